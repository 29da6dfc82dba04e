"""One file per claim. Each defines EXPERIMENT (`poise.lab.experiment`); its words are in `texts/NAME.json`."""

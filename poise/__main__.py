"""`python -m poise`: the command line."""

import sys

from poise.cli import main

sys.exit(main())

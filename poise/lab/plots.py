"""An experiment's plot as SVG, with its words in one language. Text stays text, so that any reader's fonts show it."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from poise.lab.evidence import Interval
from poise.lab.experiment import Experiment, Rows
from poise.lab.texts import speaker

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Colours that all kinds of colour vision tell apart (Okabe and Ito), dark enough on white.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#a8478c", "#b58900", "#3a9bd6", "#4d4d4d")


def svg(experiment: Experiment, rows: Rows, language: str) -> str:
    try:
        import matplotlib
        from cycler import cycler  # comes with it
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("plots are drawn with matplotlib: pip install 'poise[lab]'") from None
    style: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": experiment.name,  # the same picture from the same numbers
        "font.size": 10.5,
        "axes.prop_cycle": cycler(color=COLOURS),
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.color": "#e4e4e4",
        "axes.axisbelow": True,
        "axes.titlesize": "small",
        "legend.frameon": False,
        "legend.fontsize": "small",
        "lines.markersize": 4,
    }
    drawn = io.StringIO()
    with matplotlib.rc_context(style), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # only measured here, drawn by the reader
        figure = Figure(figsize=(8.6, 4.2), layout="constrained")
        experiment.draw(figure, rows, speaker(experiment.name, language))
        figure.savefig(drawn, format="svg", metadata={"Date": None, "Creator": None})
    text = drawn.getvalue()
    return _lighter(text[text.index("<svg") :].replace("DejaVu Sans", "system-ui"))


def _lighter(text: str) -> str:
    """Coordinates to a hundredth of a point, and no indentation: half the size, the same picture."""
    rounded = re.sub(r"<[^>]*>", lambda tag: re.sub(r"(\.\d\d)\d+", r"\1", tag[0]), text)
    return re.sub(r"\n\s+", "\n", rounded)


def curve(axes: Axes, x: Sequence[float], found: Iterable[Interval], label: str, **style: Any) -> Any:
    """Means over seeds with their intervals; returns the colour."""
    found = list(found)
    bars = [[each.mean - each.low for each in found], [each.high - each.mean for each in found]]
    drawn = axes.errorbar(x, [each.mean for each in found], bars, label=label, **{"fmt": "o-", "capsize": 2, **style})
    return drawn[0].get_color()


def ticks(axes: Axes, values: Sequence[float], narrow: bool = False) -> None:
    """A logarithmic x axis that names the measured values themselves; aslant where panels stand side by side."""
    axes.set_xscale("log")
    axes.set_xticks(list(values), [f"{value:g}" for value in values])
    axes.minorticks_off()
    if narrow:
        axes.tick_params("x", labelsize="x-small", rotation=45)

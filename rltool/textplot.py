"""Learning curves in a terminal (extra: plots)."""

from __future__ import annotations

import os
import sys
from typing import Any

from rltool.charts import name_of
from rltool.curves import Panel
from rltool.importing import missing_package
from rltool.wording import fitted

# Lines of the plot, without axes and legend.
_HEIGHT = 16
# What stands at the right of the plot: its frame and the numbers of the axis.
_MARGIN = 12
# What stands beside a label in the legend: its sign, and some room.
_SIGN = 6
# How far the axes go beyond what is drawn.
_BEYOND = 1.02
_COLOURS = ["blue", "red", "green", "magenta", "yellow", "cyan", "white"]
_PLAIN = str.maketrans("▔─▁│┌┐└┘", "---|++++")
_LETTERS = ["*", "o", "+", "x", "#", "@", "%"]


def text_of(panel: Panel, labels: list[str], *, axis: str, columns: int) -> str:
    """A panel as lines of text: braille in colours where the terminal shows them, else a sign for each curve.

    Args:
        panel: what is drawn.
        labels: every label; a label has one colour in all panels.
        axis: ``frames`` or ``seconds``.
        columns: of the terminal.

    Raises:
        ConfigError: the package that draws is not installed.
    """
    try:
        from uniplot import plot_to_string
    except ImportError as error:
        raise missing_package("", "a plot in the terminal", error) from error
    unicode, coloured = _has_unicode(), sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    names = fitted(labels, max(columns - _MARGIN, 20) - _SIGN)
    numbers = [labels.index(curve.label) for curve in panel.curves]
    # Dots of one colour cannot be told apart.
    letters = not unicode or (len(panel.curves) > 1 and not coloured)
    options: dict[str, Any] = {
        "lines": True,
        "width": max(columns - _MARGIN, 20),
        "height": _HEIGHT,
        "character_set": "ascii" if letters else "braille",
        "force_ascii_characters": [_LETTERS[number % len(_LETTERS)] for number in numbers],
        "color": [_COLOURS[number % len(_COLOURS)] for number in numbers] if coloured else False,
        "x_gridlines": [],
        "y_gridlines": [] if panel.threshold is None else [panel.threshold],
        "title": f"{name_of(panel.metric)} over {axis}, {panel.env}{_across(panel)}",
        "legend_labels": [names[curve.label] for curve in panel.curves],
        "x_min": 0,
        "x_max": _BEYOND * max(curve.x[-1] for curve in panel.curves),
        **_heights(panel),
    }
    text: str = plot_to_string(
        xs=[curve.x for curve in panel.curves], ys=[curve.y for curve in panel.curves], **options
    )
    lines = "\n".join(line.rstrip() for line in text.splitlines())
    return lines if unicode else lines.translate(_PLAIN)


def _heights(panel: Panel) -> dict[str, float]:
    """What is to be seen of the y axis: every line, and the threshold."""
    ends = [float(end) for curve in panel.curves for end in (curve.y.min(), curve.y.max())]
    ends += [] if panel.threshold is None else [panel.threshold]
    low, high = min(ends), max(ends)
    room = (_BEYOND - 1) * (high - low) or 1.0
    return {"y_min": low - room, "y_max": high + room}


def _across(panel: Panel) -> str:
    return "" if panel.threshold is None else f" (line across: {panel.threshold:g})"


def _has_unicode() -> bool:
    return (sys.stdout.encoding or "").lower().replace("-", "").startswith("utf")

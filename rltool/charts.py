"""Pictures for a paper: learning curves, and scores with their intervals (extra: plots).

Sizes are those of print: text has 8 points at the width that is asked for. Lines differ in colour and in dashes, so that
they can be told apart in grey; the colours are those of Okabe and Ito, which colour-blind readers tell apart.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rltool.curves import Curve, Panel
from rltool.errors import RltoolError
from rltool.importing import missing_package
from rltool.wording import fitted

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from rltool.comparison import Scores

PICTURES = (".png", ".svg", ".pdf")
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.2, 1.2)), (0, (5, 1.5, 1.2, 1.5)))
_GREY = "0.45"
# From here on numbers at the y axis are 100k and 1M.
_LARGE = 1e5
# Letters of a label that have room in an inch, beside the sign of its line.
_LETTERS = 14
# Letters in a line of a label beside the scores, and lines of it at most.
_BESIDE, _LINES = 22, 2
# Letters in a line of what a score is.
_BELOW = 32
# Inches of a line of text.
_LINE = 0.14
# Narrower than that, in inches, no panel is put beside another.
_PANEL = 2.9
_STYLE: Any = {
    "font.family": "sans-serif",
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.fontsize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "0.9",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "lines.linewidth": 1.3,
    "figure.constrained_layout.h_pad": 0.03,
    "figure.constrained_layout.w_pad": 0.03,
    "savefig.dpi": 300,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "rltool",  # the same picture is the same file
    "pdf.fonttype": 42,
}
# What the axes say of metrics whose names are no words.
_NAMES = {
    "eval/return_mean": "Evaluation return",
    "episode/return": "Training return",
    "eval/success_rate": "Success rate",
    "eval/length_mean": "Evaluation episode length",
    "episode/length": "Training episode length",
}


def name_of(metric: str) -> str:
    """A metric as an axis says it."""
    return _NAMES.get(metric, metric)


def check_drawing(key: str) -> None:
    """Refuses to draw where matplotlib is not installed; for whoever has work to do before.

    Args:
        key: what asks for a picture.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise missing_package(key, "a picture", error) from error


def draw_curves(panels: Sequence[Panel], labels: Sequence[str], out: Path, *, axis: str, width: float) -> None:
    """Draws learning curves into a file.

    Args:
        panels: side by side where the width has room, else below each other.
        labels: every label among the curves; a label has one colour in all panels.
        out: the file; its suffix says which format.
        axis: ``frames`` or ``seconds``.
        width: of the picture, in inches.

    Raises:
        ConfigError: matplotlib is not installed.
        RltoolError: the file cannot be written.
    """
    with _drawing():
        from matplotlib.figure import Figure

        columns = min(len(panels), max(1, int(width / _PANEL)))
        rows = -(-len(panels) // columns)
        figure = Figure(figsize=(width, rows * min(0.64 * width / columns, 3.2)), layout="constrained")
        grid = figure.subplots(rows, columns, squeeze=False).ravel()
        for axes in grid[len(panels) :]:
            axes.remove()
        several = len({panel.env for panel in panels}) > 1
        for axes, panel in zip(grid, panels, strict=False):
            _draw_panel(axes, panel, labels, axis)
            if several or panel is panels[0]:
                title = textwrap.fill(_title(panel, labels, panels), int(_LETTERS * width / columns) - 4)
                axes.set_title(title, loc="left")
        _legend(figure, labels, panels)
        _save(figure, out)


def draw_comparison(
    rows: Sequence[tuple[Panel, Scores]], labels: Sequence[str], outs: Sequence[Path], *, score: str, width: float
) -> None:
    """Draws, for each environment in a row of its own, learning curves and the scores with their intervals.

    Args:
        rows: the panel of an environment, and the scores of its groups.
        labels: every label.
        outs: files; their suffixes say which formats.
        score: what a score is, for the axis.
        width: of the picture, in inches.

    Raises:
        ConfigError: matplotlib is not installed.
        RltoolError: a file cannot be written.
    """
    with _drawing():
        from matplotlib.figure import Figure

        names = {label: textwrap.fill(text, _BESIDE + 2) for label, text in fitted(labels, _BESIDE * _LINES).items()}
        tallest = max(_lines_beside(scores, names) for _, scores in rows)
        height = max(0.3 * width, (tallest + 6) * _LINE)
        figure = Figure(figsize=(width, len(rows) * height), layout="constrained")
        grid = figure.subplots(len(rows), 2, squeeze=False, width_ratios=(1.15, 1))
        for (left, right), (panel, scores) in zip(grid, rows, strict=True):
            _draw_panel(left, panel, labels, "frames")
            left.set_title(_title(panel, labels, [panel for panel, _ in rows]), loc="left")
            _draw_scores(right, scores, labels, names)
            right.set_xlabel(textwrap.fill(score, _BELOW))
            right.set_title(f"{scores.estimate_name} and 95 % interval", loc="left")
        _legend(figure, labels, [panel for panel, _ in rows])
        for out in outs:
            _save(figure, out)


def _draw_panel(axes: Axes, panel: Panel, labels: Sequence[str], axis: str) -> None:
    from matplotlib.ticker import EngFormatter, MaxNLocator

    for curve in panel.curves:
        _draw_curve(axes, curve, labels.index(curve.label))
    axes.margins(x=0.02)
    axes.set_xlim(left=0)
    axes.set_xlabel(axis.capitalize())
    smoothed = f"\n(smoothed over {panel.smoothed})" if panel.smoothed else ""
    axes.set_ylabel(f"{name_of(panel.metric)}{smoothed}")
    axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    if max(map(abs, axes.get_ylim())) >= _LARGE:
        axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    if panel.threshold is not None:
        axes.axhline(panel.threshold, color=_GREY, linewidth=0.8, linestyle=(0, (4, 3)), zorder=1.5)
        axes.annotate(
            f"{panel.threshold:g}", (1, panel.threshold), xycoords=("axes fraction", "data"),
            xytext=(3, 0), textcoords="offset points", va="center", color=_GREY,
        )  # fmt: skip


def _draw_curve(axes: Axes, curve: Curve, number: int) -> None:
    style = _style(number)
    if curve.raw is not None:
        axes.plot(curve.x, curve.raw, color=style["color"], linewidth=0.6, alpha=0.35)
    if curve.low is not None and curve.high is not None:
        axes.fill_between(curve.x, curve.low, curve.high, color=style["color"], alpha=0.18, linewidth=0)
    axes.plot(curve.x, curve.y, **style, marker="o" if len(curve.x) == 1 else None, markersize=3)


def _lines_beside(scores: Scores, names: Mapping[str, str]) -> int:
    """Lines that the labels beside the scores take, with one between them."""
    return sum(names[label].count("\n") + 2 for label in scores.groups)


def _draw_scores(axes: Axes, scores: Scores, labels: Sequence[str], names: Mapping[str, str]) -> None:
    """A row for each group: its seeds as dots, the estimate as a bar across its interval."""
    groups = list(scores.groups.values())
    for row, group in enumerate(groups):
        colour = _style(labels.index(group.label))["color"]
        shown = group.estimate
        axes.plot(group.scores, [row + 0.2] * len(group.scores), "o", color=colour, alpha=0.45, markersize=3, mew=0)
        if shown.low is not None and shown.high is not None:
            axes.plot([shown.low, shown.high], [row, row], color=colour, linewidth=4, alpha=0.35, solid_capstyle="butt")
        axes.plot([shown.value] * 2, [row - 0.14, row + 0.14], color=colour, linewidth=1.6)
    axes.set_yticks(range(len(groups)), [names[group.label] for group in groups])
    # the threshold is told below the last row
    axes.set_ylim(len(groups) - (0.5 if scores.threshold is None else 0.1), -0.5)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.grid(visible=False, axis="y")
    axes.grid(visible=True, axis="x")
    axes.margins(x=0.06)
    if scores.threshold is not None:
        axes.axvline(scores.threshold, color=_GREY, linewidth=0.8, linestyle=(0, (4, 3)), zorder=1.5)
        right = scores.threshold > sum(axes.get_xlim()) / 2
        axes.annotate(
            f"threshold {scores.threshold:g}", (scores.threshold, 0), xycoords=("data", "axes fraction"),
            xytext=(-3 if right else 3, 3), textcoords="offset points", ha="right" if right else "left", color=_GREY,
        )  # fmt: skip


def _style(number: int) -> dict[str, Any]:
    return {"color": _COLOURS[number % len(_COLOURS)], "linestyle": _DASHES[number % len(_DASHES)]}


def _title(panel: Panel, labels: Sequence[str], panels: Sequence[Panel]) -> str:
    """The environment, with what no legend says: the label of an only curve, and the seeds where all have as many."""
    counts = _counts(panels)
    words = [panel.env, *(labels if len(labels) == 1 else ()), *(_seeds(count) for count in counts if len(counts) == 1)]
    return ", ".join(words)


def _counts(panels: Sequence[Panel], label: str | None = None) -> set[int]:
    """The different numbers of seeds, of all curves or of those of a label."""
    return {curve.seeds for panel in panels for curve in panel.curves if label in (None, curve.label)}


def _seeds(count: int) -> str:
    return f"{count}\N{NO-BREAK SPACE}seed{'s' * (count > 1)}"


def _legend(figure: Figure, labels: Sequence[str], panels: Sequence[Panel]) -> None:
    """A legend above the panels, in as few rows as the width allows, for which the picture grows; none for a single label.

    The seeds are told where they differ between labels, and a label has as many in all panels.
    """
    if len(labels) < 2:
        return
    from matplotlib.lines import Line2D

    texts = []
    for label in labels:
        counts = _counts(panels, label)
        told = f" ({_seeds(counts.pop())})" if len(counts) == 1 < len(_counts(panels)) else ""
        texts.append(textwrap.fill(f"{label}{told}", int(_LETTERS * (figure.get_figwidth() - 0.5))))
    handles = [Line2D([], [], **_style(number)) for number in range(len(labels))]
    for columns in range(len(labels), 0, -1):
        legend = figure.legend(
            handles, texts, loc="outside upper left", ncols=columns, frameon=False, handlelength=2.2, columnspacing=1.2,
            borderpad=0.2,
        )  # fmt: skip
        extent = legend.get_window_extent()
        if columns == 1 or extent.width <= figure.bbox.width:
            figure.set_figheight(figure.get_figheight() + extent.height / figure.dpi)
            return
        legend.remove()


@contextmanager
def _drawing() -> Iterator[None]:
    """matplotlib with the style of these pictures; a missing package becomes the error that names the extra."""
    check_drawing("out")
    from matplotlib import rc_context

    with rc_context(_STYLE):
        yield


def _save(figure: Figure, out: Path) -> None:
    """Writes the picture without the date, so that the same picture is the same file."""
    kind = out.suffix.lower()
    metadata: dict[str, Any] = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(kind, {})
    try:
        figure.savefig(out, metadata=metadata)
    except OSError as error:
        raise RltoolError(f"cannot write {out}: {error.strerror or error}") from error

"""Tables of numbers as text: cells with intervals, and Markdown that is in columns too. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rltool.estimates import Estimate


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose source is in columns, too."""
    cells = [[cell.replace("|", "\\|") for cell in row] for row in (header, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    lines = [
        "| " + " | ".join(f"{cell:<{size}}" for cell, size in zip(row, widths, strict=True)) + " |" for row in cells
    ]
    return "\n".join([lines[0], "|" + "|".join("-" * (size + 2) for size in widths) + "|", *lines[1:]])


def decimals(estimates: Sequence[Estimate]) -> int:
    """Decimals that show the narrowest interval with two digits; 2 at most, where numbers are not small."""
    widths = [e.high - e.low for e in estimates if e.low is not None and e.high is not None and e.high > e.low]
    size = max(abs(e.value) for e in estimates)
    if size < 10:
        return 3 if size < 1 else 2
    return 0 if widths and min(widths) >= 20 else 1


def interval(estimated: Estimate, digits: int) -> str:
    """A number with its interval in brackets, where it has one."""
    value = f"{estimated.value:,.{digits}f}"
    if estimated.low is None or estimated.high is None:
        return value
    return f"{value} [{estimated.low:,.{digits}f}, {estimated.high:,.{digits}f}]"


def count(value: float | None) -> str:
    """Frames or seconds; a dash for none."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"

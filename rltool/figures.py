"""Figures for a terminal: numbers, durations and curves in few characters. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

_BARS = "▁▂▃▄▅▆▇█"
_ASCII_BARS = "_.-=+*%#"


def number(value: float | None) -> str:
    """A number in nine characters at most, up to ten million: 9,351.2  312.4  1.23  0.0123  3e-4; ``-`` for none."""
    if value is None:
        return "-"
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    if size >= 1e7 or 0 < size < 1e-3:
        mantissa, _, exponent = f"{value:.1e}".partition("e")
        return f"{mantissa.removesuffix('.0')}e{int(exponent)}"
    if value == round(value) or size >= 1e5:
        return f"{value:,.0f}"
    if size >= 10:
        return f"{value:,.1f}"
    return f"{value:.2f}" if size >= 1 else f"{value:.4f}".rstrip("0")


def duration(seconds: float) -> str:
    """Hours, minutes and seconds; days where there are any."""
    minutes, second = divmod(max(int(seconds), 0), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return f"{f'{days}d ' if days else ''}{hour}:{minute:02}:{second:02}"


def counted(count: int, noun: str) -> str:
    """``1 episode``, ``2 episodes``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def sparkline(values: Sequence[float], width: int, *, ascii_only: bool = False) -> str:
    """Finite values as a row of bars from their smallest to their largest, means of neighbours where there are more than
    ``width``; empty for none."""
    if not values:
        return ""
    if len(values) > width:
        edges = [round(index * len(values) / width) for index in range(width + 1)]
        values = [sum(values[start:end]) / (end - start) for start, end in pairwise(edges)]
    bars = _ASCII_BARS if ascii_only else _BARS
    low, high = min(values), max(values)
    if not high > low:
        return bars[3] * len(values)
    return "".join(bars[round((value - low) / (high - low) * (len(bars) - 1))] for value in values)


def size_in_words(size: float) -> str:
    """Bytes in units of a thousand."""
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"

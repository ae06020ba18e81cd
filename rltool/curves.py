"""Learning curves: what the runs of a group measured, brought to the same frames, with a line and a band over the seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rltool.estimates import STATISTICS, Array, band
from rltool.grouping import Group
from rltool.records import Record

# A band over fewer points than this is drawn at all of them; beyond it, at so many equal steps.
_POINTS = 300
# The interquartile mean of fewer seeds than this leaves nobody out.
_IQM_FROM = 4
# The share of the points that a moving average takes in where nothing else is asked for.
_WINDOW = 0.1
# A curve that ends that share before its longest run is not worth a word.
_CUT = 0.02


@dataclass(frozen=True)
class Series:
    """What one run measured.

    Attributes:
        x: frames or seconds ``[points]``, rising.
        y: values ``[points]``.
        raw: the values before they were smoothed; None where they were not.
    """

    x: Array
    y: Array
    raw: Array | None = None


@dataclass(frozen=True)
class Curve:
    """One line of a panel.

    Attributes:
        label: of the group.
        seeds: runs in it.
        x, y: the line, ``[points]`` each.
        low, high: its 95 % interval ``[points]``; None for a single run.
        raw: what a single run measured, before it was smoothed ``[points]``; None where it was not.
    """

    label: str
    seeds: int
    x: Array
    y: Array
    low: Array | None
    high: Array | None
    raw: Array | None


@dataclass(frozen=True)
class Panel:
    """The curves of one metric in one environment.

    Attributes:
        env, metric: which.
        threshold: a line across; None for none.
        estimate: what the lines are over the seeds: ``iqm``, ``mean`` or ``median``.
        curves: one for each group that has any.
        smoothed: over how much the moving average of the curves is; empty where they are as measured.
    """

    env: str
    metric: str
    threshold: float | None
    estimate: str
    curves: tuple[Curve, ...]
    smoothed: str


def read_series(run: Record, metric: str, axis: str, smooth: str | int | None) -> Series | None:
    """What a run measured; None where it did not.

    Args:
        run: the run.
        metric: a name in metrics.jsonl.
        axis: ``frames`` or ``seconds``.
        smooth: points in a centred moving average; ``auto``: a tenth of them for what training episodes say.
    """
    # Of a frame that was measured twice, before and after a run was resumed, the later one counts.
    points = dict(run.curve(metric))
    x, y = np.array(list(points), float), np.array(list(points.values()), float)
    if axis == "seconds":
        frames, seconds = (np.array(column, float) for column in zip((0, 0.0), *run.times, strict=True))
        timed = x <= frames[-1]
        x, y = np.interp(x[timed], frames, seconds), y[timed]
    if not len(x):
        return None
    window = smooth
    if smooth == "auto":
        window = round(_WINDOW * len(y)) if metric.startswith("episode/") else 1
    if not isinstance(window, int) or window < 3:
        return Series(x, y)
    return Series(x, moving_average(y, window), y)


def moving_average(values: Array, window: int) -> Array:
    """The mean over ``window`` points around each; towards both ends over fewer, as many on each side.

    Args:
        values: ``[points]``.
        window: an even one counts as the odd one below it, so that there is a middle.
    """
    index = np.arange(len(values))
    reach = np.minimum(np.minimum(index, index[::-1]), (window - 1) // 2)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    return np.asarray((sums[index + reach + 1] - sums[index - reach]) / (2 * reach + 1))


def common(series: Sequence[Series]) -> tuple[Array, Array]:
    """The values of all series at the same x, in straight lines between what was measured, nowhere beyond it.

    Returns:
        x ``[points]`` from the latest start to the earliest end; empty where no two overlap. And y ``[series, points]``.
    """
    start, end = max(one.x[0] for one in series), min(one.x[-1] for one in series)
    x = np.unique(np.concatenate([one.x for one in series]))
    x = x[(x >= start) & (x <= end)]
    if len(x) > _POINTS:
        x = np.linspace(start, end, _POINTS)
    return x, np.stack([np.interp(x, one.x, one.y) for one in series])


def choose_estimate(wanted: str, seeds: Sequence[int]) -> str:
    """``auto`` as the statistic that it stands for, given the seeds of each curve that has more than one."""
    if wanted != "auto":
        return wanted
    several = [count for count in seeds if count > 1]
    return "iqm" if several and min(several) >= _IQM_FROM else "mean"


def read_panel(
    groups: Sequence[Group], env: str, metric: str, threshold: float | None, *,
    axis: str, smooth: str | int | None, estimate: str, resamples: int, notes: list[str],
) -> Panel:  # fmt: skip
    """The curves of all groups; adds what a reader has to know of them to the notes.

    Args:
        groups: in the order in which they are drawn.
        env, metric, threshold: see :class:`Panel`.
        axis, smooth: see :func:`read_series`.
        estimate: ``auto``, ``iqm``, ``mean`` or ``median``.
        resamples: of the bootstrap.
        notes: lines.
    """
    found: dict[str, list[Series]] = {}
    smoothed = ""
    for group in groups:
        runs = group.of(env)
        series = [one for run in runs if (one := read_series(run, metric, axis, smooth)) is not None]
        if len(series) < len(runs):
            notes.append(f"{group.label}: {len(runs) - len(series)} of {len(runs)} runs on {env} have no {metric}")
        if series:
            found[group.label] = series
        if any(one.raw is not None for one in series):
            smoothed = _share(smooth)
    if smoothed:
        notes.append(f"{metric}: smoothed, a moving average over {smoothed}")
    chosen = choose_estimate(estimate, [len(series) for series in found.values()])
    curves = [_curve(label, series, chosen, resamples, axis, notes) for label, series in found.items()]
    return Panel(env, metric, threshold, chosen, tuple(curve for curve in curves if curve is not None), smoothed)


def _share(smooth: str | int | None) -> str:
    """What a moving average takes in, in words."""
    return f"{2 * ((smooth - 1) // 2) + 1} points" if isinstance(smooth, int) else f"1/{1 / _WINDOW:.0f} of the run"


def _curve(
    label: str, series: Sequence[Series], estimate: str, resamples: int, axis: str, notes: list[str]
) -> Curve | None:
    if len(series) == 1:
        (one,) = series
        return Curve(label, 1, one.x, one.y, None, None, one.raw)
    x, values = common(series)
    if not len(x):
        notes.append(f"{label}: its runs have no {axis} in common and are not drawn")
        return None
    longest = max(one.x[-1] for one in series)
    if x[-1] < (1 - _CUT) * longest:
        notes.append(
            f"{label}: drawn to {x[-1]:,.0f} {axis}, as far as all {len(series)} runs reach (the longest: {longest:,.0f})"
        )
    statistic = STATISTICS[estimate]
    limits = band(values, statistic, resamples)
    low, high = limits if limits is not None else (None, None)
    return Curve(label, len(series), x, statistic(values.T), low, high, None)

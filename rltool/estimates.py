"""What several seeds say together: mean, median, interquartile mean, how probably one group is better, with 95 % intervals.

The estimators are those of Agarwal et al. 2021 (arXiv:2108.13264, the package rliable): a stratum is an environment, its
seeds are resampled with replacement, and the interval is that between the percentiles. SciPy computes them; rliable 1.2
needs a pandas older than 3, and the seed that is given to it has no effect.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Statistic = Callable[..., Array]

# The share that the interquartile mean leaves out at each end.
_TRIMMED = 0.25
# Resamples that are in memory at a time.
_BATCH = 200


@dataclass(frozen=True)
class Estimate:
    """A number and its 95 % interval.

    Attributes:
        value: of the seeds as they are.
        low, high: the interval; None where one seed is all there is.
    """

    value: float
    low: float | None = None
    high: float | None = None

    def to_json(self) -> dict[str, float | None]:
        """All of it as plain values."""
        return {"value": self.value, "low": self.low, "high": self.high}


def mean(*strata: Array, axis: int = -1) -> Array:
    """Mean over the strata of the means over their seeds.

    Args:
        strata: scores, seeds along ``axis``.
        axis: see above; it is gone from the result.
    """
    return np.asarray(np.mean([scores.mean(axis) for scores in strata], 0))


def median(*strata: Array, axis: int = -1) -> Array:
    """Median over the seeds of a single stratum; over several, the median of their means, as the paper has it."""
    if len(strata) == 1:
        return np.asarray(np.median(strata[0], axis))
    return np.asarray(np.median([scores.mean(axis) for scores in strata], 0))


def iqm(*strata: Array, axis: int = -1) -> Array:
    """Interquartile mean: of the scores of all strata together the mean without the lowest and the highest quarter."""
    from scipy.stats import trim_mean

    return np.asarray(trim_mean(np.concatenate(strata, axis), _TRIMMED, axis))


def improvement(*strata: Array, axis: int = -1) -> Array:
    """Probability that a seed of A scores above one of B, a tie as half; the mean over the strata.

    Args:
        strata: the strata of A, and then those of B in the same order.
        axis: that of the seeds; the last one.
    """
    assert axis == -1
    half = len(strata) // 2
    pairs = zip(strata[:half], strata[half:], strict=True)
    signs = [np.sign(a[..., :, None] - b[..., None, :]).mean((-2, -1)) for a, b in pairs]
    return np.asarray((np.mean(signs, 0) + 1) / 2)


TITLES = {"iqm": "IQM", "mean": "Mean", "median": "Median"}
STATISTICS: dict[str, Statistic] = {"iqm": iqm, "mean": mean, "median": median}


def estimate(strata: Sequence[Array], statistic: Statistic, resamples: int) -> Estimate:
    """A statistic of scores ``[seeds]`` of each stratum; without an interval where a stratum has one seed only."""
    value = float(statistic(*strata))
    if min(len(scores) for scores in strata) < 2:
        return Estimate(value)
    low, high = _interval(strata, statistic, resamples)
    return Estimate(value, float(low), float(high))


def band(values: Array, statistic: Statistic, resamples: int) -> tuple[Array, Array] | None:
    """The interval at each point of curves ``[seeds, points]``, seeds resampled as a whole; None for a single seed."""
    return None if len(values) < 2 else _interval([values.T], statistic, resamples)


def _interval(strata: Sequence[Array], statistic: Statistic, resamples: int) -> tuple[Array, Array]:
    """The percentiles of the statistic over resamples of the seeds, which lie along the last axis; always the same draw."""
    from scipy.stats import bootstrap

    result: Any = bootstrap(
        tuple(strata), statistic, n_resamples=resamples, batch=_BATCH, vectorized=True, axis=-1, method="percentile", rng=0
    )  # fmt: skip
    return np.asarray(result.confidence_interval.low), np.asarray(result.confidence_interval.high)

"""What returns of episodes say, and how surely. Free of torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

BOOTSTRAP_RESAMPLES = 10_000
_QUANTILES = (0.025, 0.975)


def interquartile_mean(values: Sequence[float]) -> float:
    """Mean of what is left after a quarter of the values is cut off at each end (rounded down)."""
    ordered = np.sort(np.asarray(values, np.float64))
    cut = len(ordered) // 4
    return float(ordered[cut : len(ordered) - cut].mean())


def bootstrap_interval(values: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """95 % percentile bootstrap interval of the mean (Efron 1979), the same for the same values."""
    array = np.asarray(values, np.float64)
    if len(array) == 1 or array.min() == array.max():
        return float(array.min()), float(array.max())
    return _between(_resampled_means(array, BOOTSTRAP_RESAMPLES, np.random.default_rng(seed)))


def nested_interval(groups: Sequence[Sequence[float]], seed: int = 0) -> tuple[float, float]:
    """95 % percentile bootstrap interval of the mean over groups, the same for the same values.

    Each resample draws as many groups as there are, with replacement, and of each drawn group as many values as it has: the
    interval is as wide as seeds and episodes together make it.

    Args:
        groups: the returns of each checkpoint, one seed of training each.
    """
    if len(groups) == 1:
        return bootstrap_interval(groups[0], seed)
    rng = np.random.default_rng(seed)
    arrays = [np.asarray(group, np.float64) for group in groups]
    total = np.zeros(BOOTSTRAP_RESAMPLES)
    for _ in arrays:
        drawn = rng.integers(len(arrays), size=BOOTSTRAP_RESAMPLES)
        for index, array in enumerate(arrays):
            here = drawn == index
            total[here] += _resampled_means(array, int(here.sum()), rng)
    return _between(total / len(arrays))


def _resampled_means(values: Array, count: int, rng: np.random.Generator) -> Array:
    """Means of ``count`` resamples, ``[count]``."""
    means: Array = values[rng.integers(len(values), size=(count, len(values)))].mean(1)
    return means


def _between(means: Array) -> tuple[float, float]:
    low, high = np.quantile(means, _QUANTILES)
    return float(low), float(high)

"""Means and their intervals, against what is known of them."""

from __future__ import annotations

import numpy as np
import pytest

from rltool.intervals import bootstrap_interval, interquartile_mean, nested_interval


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([7.0], 7.0),
        ([5.0, 1.0, 3.0], 3.0),
        ([8, 1, 7, 2, 6, 3, 5, 4], 4.5),
        ([-1e9, 1, 2, 3, 4, 5, 6, 1e9], 3.5),
        ([0, 0, 0, 0, 10], 0.0),
    ],
)
def test_interquartile_mean(values: list[float], expected: float) -> None:
    assert interquartile_mean(values) == expected


@pytest.mark.parametrize("values", [[3.0], [2.0, 2.0, 2.0]])
def test_the_interval_of_equal_values_is_a_point(values: list[float]) -> None:
    assert bootstrap_interval(values) == (values[0], values[0])


def test_the_bootstrap_interval_is_the_normal_one_for_many_values() -> None:
    values = np.random.default_rng(0).normal(50, 4, 400)
    low, high = bootstrap_interval(values.tolist())
    margin = 1.96 * values.std() / 20
    np.testing.assert_allclose([low, high], [values.mean() - margin, values.mean() + margin], atol=0.1 * margin)
    assert bootstrap_interval(values.tolist()) == (low, high)


def test_the_bootstrap_of_two_values_reaches_both() -> None:
    assert bootstrap_interval([0.0, 1.0]) == (0.0, 1.0)


def test_the_interval_over_groups_is_as_wide_as_the_groups_make_it() -> None:
    # Of two groups each resample has both once, or one of them twice.
    assert nested_interval([[0.0] * 9, [10.0] * 9]) == (0.0, 10.0)
    assert nested_interval([[4.0, 4.0], [4.0, 4.0]]) == (4.0, 4.0)
    values = [1.0, 5.0, 6.0, 9.0]
    assert nested_interval([values]) == bootstrap_interval(values)


def test_the_interval_over_groups_is_the_normal_one_for_many() -> None:
    rng = np.random.default_rng(0)
    groups = rng.normal(rng.normal(50, 3, (60, 1)), 8, (60, 20))
    low, high = nested_interval(groups.tolist())
    variance = groups.mean(1).var() / 60 + groups.var(1).mean() / (60 * 20)
    margin = 1.96 * variance**0.5
    np.testing.assert_allclose([low, high], [groups.mean() - margin, groups.mean() + margin], atol=0.1 * margin)
    # Pooled, episodes of one seed would count as if they were of different ones.
    pooled = bootstrap_interval(groups.reshape(-1).tolist())
    assert high - low > 1.3 * (pooled[1] - pooled[0])

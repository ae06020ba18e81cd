"""Policy units to the environment's units, by hand and at random."""

from __future__ import annotations

import json
import re
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from rltool.actions import ActionSpec, action_spec
from rltool.errors import ConfigError

INF = np.inf
LARGEST = float(np.finfo(np.float64).max)


def box(low: list[float], high: list[float], dtype: type = np.float32) -> spaces.Box:
    return spaces.Box(np.array(low, dtype), np.array(high, dtype), dtype=dtype)


BOXES: dict[str, spaces.Box] = {
    "symmetric": box([-2, -2], [2, 2]),
    "asymmetric": box([0, -3], [1, 5]),
    "one-sided": box([0, -INF], [INF, 1]),
    "unbounded": box([-INF, -INF], [INF, INF]),
    "mixed": box([-1, -INF, 0, -7], [3, INF, INF, -5]),
    "float64": box([-0.1, 1 / 3], [0.1, 2 / 3], np.float64),
    "float16": box([0, -3], [0.1, 5], np.float16),
    "vast": box([-LARGEST, -1], [LARGEST, 1], np.float64),
    "no dimension": spaces.Box(-1, 3, (), np.float32),
    "matrix": spaces.Box(-1, 3, (2, 3), np.float32),
}


@pytest.mark.parametrize(
    ("name", "action", "expected"),
    [
        ("symmetric", [0.0, 0.5], [0.0, 1.0]),
        ("symmetric", [-1.0, 1.0], [-2.0, 2.0]),
        ("symmetric", [-9.0, 9.0], [-2.0, 2.0]),
        ("asymmetric", [0.0, 0.0], [0.5, 1.0]),
        ("asymmetric", [-1.0, -1.0], [0.0, -3.0]),
        ("asymmetric", [1.0, 1.0], [1.0, 5.0]),
        ("asymmetric", [0.5, -0.5], [0.75, -1.0]),
        ("one-sided", [2.5, -4.0], [2.5, -4.0]),
        ("one-sided", [-2.5, 4.0], [0.0, 1.0]),
        ("unbounded", [-70.0, 1e30], [-70.0, 1e30]),
        ("mixed", [0.0, 40.0, -1.0, 0.0], [1.0, 40.0, 0.0, -6.0]),
        ("vast", [-1.0, 0.0], [-LARGEST, 0.0]),
        ("vast", [0.0, 2.0], [0.0, 1.0]),
    ],
)
def test_box_by_hand(name: str, action: list[float], expected: list[float]) -> None:
    result = action_spec(BOXES[name], "Env-v0").to_env(np.array([action], np.float32))
    assert result.dtype == BOXES[name].dtype
    np.testing.assert_allclose(result, np.array([expected], result.dtype), rtol=1e-6)


def test_shapes() -> None:
    single = action_spec(BOXES["no dimension"], "Env-v0")
    assert (single.size, single.to_env(np.array([[0.0], [1.0]], np.float32)).tolist()) == (1, [1.0, 3.0])
    matrix = action_spec(BOXES["matrix"], "Env-v0")
    assert (matrix.size, matrix.to_env(np.zeros((4, 6), np.float32)).shape) == (6, (4, 2, 3))


@pytest.mark.parametrize("action", [-3.0, -0.5, 0.0, 0.2, 4.0])
def test_tanh_squashes_bounded_dimensions_only(action: float) -> None:
    spec = replace(action_spec(box([0, -INF, -INF], [1, INF, 2]), "Env-v0"), squash="tanh")
    expected = [0.5 + 0.5 * np.tanh(action), action, min(action, 2.0)]
    np.testing.assert_allclose(spec.to_env(np.full((1, 3), action, np.float32)), [expected], rtol=1e-6)


@pytest.mark.parametrize("squash", ["clip", "tanh"])
@pytest.mark.parametrize("name", BOXES)
def test_every_action_lies_in_the_space_and_has_its_type(name: str, squash: Any) -> None:
    space = BOXES[name]
    spec = replace(action_spec(space, "Env-v0"), squash=squash)
    source = np.random.default_rng(0)
    scale = 10.0 ** source.integers(-8, 39, (400, spec.size))
    actions = np.concatenate(
        [
            source.standard_normal((400, spec.size)) * np.minimum(scale, 3e38),
            source.standard_normal((400, spec.size)),
            np.full((1, spec.size), 1.0),
            np.full((1, spec.size), np.nextafter(np.float32(1), np.float32(0))),
            np.full((1, spec.size), -1.0),
            np.full((1, spec.size), 3e38),
        ]
    ).astype(np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        results = spec.to_env(actions)
    assert results.shape == (len(actions), *space.shape)
    for action, result in zip(actions, results, strict=True):
        array = np.asarray(result)
        assert array.dtype == space.dtype
        assert space.contains(array), f"{action} became {array}, outside {space}"


def test_a_larger_number_never_gives_a_smaller_action() -> None:
    spec = action_spec(BOXES["mixed"], "Env-v0")
    ramp = np.linspace(-2, 2, 1001, dtype=np.float32)[:, None].repeat(4, 1)
    assert (np.diff(spec.to_env(ramp), axis=0) >= 0).all()


@pytest.mark.parametrize(
    ("space", "expected"),
    [
        (spaces.Discrete(3), [0, 1, 2]),
        (spaces.Discrete(3, start=-1), [-1, 0, 1]),
        (spaces.Discrete(3, start=5, dtype=np.int32), [5, 6, 7]),
    ],
)
def test_discrete_actions_begin_at_the_space_s_start(space: spaces.Discrete, expected: list[int]) -> None:
    spec = action_spec(space, "Env-v0")
    result = spec.to_env(np.arange(3))
    assert (spec.size, result.tolist(), result.dtype) == (3, expected, space.dtype)
    assert all(space.contains(action) for action in result)


@pytest.mark.parametrize(
    ("space", "action", "expected"),
    [
        (spaces.MultiDiscrete([5, 5]), [4, 0], [4, 0]),
        (spaces.MultiDiscrete([2, 3], start=[-1, 7], dtype=np.int32), [1, 2], [0, 9]),
        (spaces.MultiDiscrete([[2], [4]], start=[[0], [10]]), [1, 3], [[1], [13]]),
        (spaces.MultiDiscrete([[2, 3], [4, 5]]), [1, 2, 3, 4], [[1, 2], [3, 4]]),
        (spaces.MultiBinary(4), [0, 1, 1, 0], [0, 1, 1, 0]),
        (spaces.MultiBinary([2, 2]), [0, 1, 1, 1], [[0, 1], [1, 1]]),
    ],
    ids=str,
)
def test_several_choices_at_once_in_the_space_s_shape_and_start(
    space: spaces.Space[Any], action: list[int], expected: list[Any]
) -> None:
    spec = action_spec(space, "Env-v0")
    assert spec.policy_shape == (len(action),)
    result = spec.to_env(np.array([action, action]))
    assert (result.tolist(), result.dtype) == ([expected, expected], space.dtype)
    assert space.contains(result[0])


@pytest.mark.parametrize(
    ("space", "size"),
    [
        (spaces.MultiDiscrete([2, 3], start=[-1, 7]), 5),
        (spaces.MultiDiscrete([[2], [4]]), 6),
        (spaces.MultiBinary([2, 2]), 8),
    ],
    ids=str,
)
def test_random_choices_are_even_and_apart(space: spaces.Space[Any], size: int) -> None:
    """Each option of each choice as often as the others, and as often whatever the other choice is."""
    spec = action_spec(space, "Env-v0")
    assert spec.size == size
    actions = spec.random(6000, torch.Generator().manual_seed(0))
    assert (actions.shape, actions.dtype) == ((6000, len(spec.nvec)), torch.int64)
    for column, count in zip(actions.T, spec.nvec, strict=True):
        np.testing.assert_allclose(np.bincount(column, minlength=count) / 6000, [1 / count] * count, atol=0.03)
    pairs = actions[:, 0] * spec.nvec[1] + actions[:, 1]
    both = spec.nvec[0] * spec.nvec[1]
    np.testing.assert_allclose(np.bincount(pairs, minlength=both) / 6000, [1 / both] * both, atol=0.03)
    assert all(space.contains(action) for action in spec.to_env(actions[:100].numpy()))


CHOICES: list[spaces.Space[Any]] = [
    spaces.Discrete(4),
    spaces.Discrete(3, start=-1),
    spaces.MultiDiscrete([2, 3], start=[-1, 7]),
    spaces.MultiDiscrete([[2], [4]]),
    spaces.MultiBinary([2, 2]),
]


@pytest.mark.parametrize("space", [*BOXES.values(), *CHOICES], ids=lambda space: str(space)[:30])
@pytest.mark.parametrize("squash", ["clip", "tanh"])
def test_specs_survive_json(space: spaces.Space[Any], squash: Any) -> None:
    spec = replace(action_spec(space, "Env-v0"), squash=squash)
    assert ActionSpec.from_json(json.loads(json.dumps(spec.to_json(), allow_nan=False))) == spec


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "button"},
        {"squash": "fold"},
        {"shape": [3]},
        {"shape": [-1, -2]},
        {"low": [0.0]},
        {"high": ["up", "down"]},
        {"dtype": "object"},
        {"dtype": "int64"},
        {"kind": "discrete", "shape": [], "low": [], "high": [], "nvec": [0], "start": [0], "dtype": "int64"},
        {"kind": "discrete", "shape": [1], "low": [], "high": [], "nvec": [3], "start": [0], "dtype": "int64"},
        {"kind": "multi_discrete", "low": [], "high": [], "nvec": [2], "start": [0], "dtype": "int64"},
        {"kind": "multi_discrete", "low": [], "high": [], "nvec": [2, 2], "start": [0], "dtype": "int64"},
        {"kind": "multi_discrete", "low": [], "high": [], "nvec": [2, -2], "start": [0, 0], "dtype": "int64"},
        {"kind": "multi_binary", "low": [], "high": [], "nvec": [2, 2], "start": [0, 0]},
        {"nvec": [2, 2], "start": [0, 0]},
    ],
)
def test_json_of_another_kind_is_refused(change: dict[str, Any]) -> None:
    data = action_spec(BOXES["asymmetric"], "Env-v0").to_json()
    with pytest.raises((ValueError, TypeError)):
        ActionSpec.from_json(data | change)


@pytest.mark.parametrize(
    "space",
    [
        spaces.Box(0, 9, (2,), np.int64),
        spaces.Box(-1, 1, (0,), np.float32),
        spaces.Tuple((spaces.Discrete(2), spaces.Discrete(2))),
        spaces.Dict({"a": spaces.Discrete(2)}),
        spaces.Text(3),
        spaces.Sequence(spaces.Discrete(2)),
        spaces.Graph(spaces.Discrete(2), None),
    ],
    ids=str,
)
def test_an_action_space_that_no_policy_has_is_refused_by_name(space: spaces.Space[Any]) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"Odd-v3 has {space}")):
        action_spec(space, "Odd-v3")


def test_random_actions_fill_bounded_dimensions_evenly_and_others_normally() -> None:
    spec = action_spec(BOXES["mixed"], "Env-v0")
    actions = spec.random(4000, torch.Generator().manual_seed(0)).numpy()
    assert actions.shape == (4000, 4)
    for column in (0, 3):
        assert np.abs(actions[:, column]).max() <= 1
        np.testing.assert_allclose(np.quantile(actions[:, column], [0.25, 0.5, 0.75]), [-0.5, 0, 0.5], atol=0.06)
    for column in (1, 2):
        np.testing.assert_allclose([actions[:, column].mean(), actions[:, column].std()], [0, 1], atol=0.06)

    choices = ActionSpec("discrete", (), "int64", (3,), (7,)).random(3000, torch.Generator().manual_seed(0))
    np.testing.assert_allclose(np.bincount(choices.numpy()) / 3000, [1 / 3] * 3, atol=0.03)


def test_in_words() -> None:
    assert str(action_spec(spaces.Discrete(4), "Env-v0")) == "Discrete(4)"
    assert str(action_spec(spaces.MultiDiscrete([[2], [4]]), "Env-v0")) == "MultiDiscrete([[2], [4]])"
    assert str(action_spec(spaces.MultiBinary(4), "Env-v0")) == "MultiBinary(4)"
    assert str(action_spec(spaces.MultiBinary([2, 2]), "Env-v0")) == "MultiBinary([2, 2])"
    assert str(action_spec(BOXES["symmetric"], "Env-v0")) == "Box(2,) from -2 to 2"
    assert str(action_spec(BOXES["asymmetric"], "Env-v0")) == "Box(2,) from [0, -3] to [1, 5]"

"""Observation spaces as flat leaves."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from probes import OBSERVATIONS

from rltool.errors import ConfigError
from rltool.spaces import LeafSpec, flatten, leaf_specs

OBS = ("observation",)


def described(space: spaces.Space[Any]) -> list[tuple[str, str, tuple[int, ...], str, int, int]]:
    return [(leaf.name, leaf.kind, leaf.shape, leaf.dtype, leaf.n, leaf.start) for leaf in leaf_specs(space, "Env-v0")]


@pytest.mark.parametrize(
    ("space", "expected"),
    [
        (OBSERVATIONS["const"], [("observation", "box", (1,), "float32", 0, 0)]),
        (OBSERVATIONS["noise"], [("observation", "box", (3,), "float32", 0, 0)]),
        (OBSERVATIONS["scalar"], [("observation", "box", (), "float32", 0, 0)]),
        (OBSERVATIONS["discrete"], [("observation", "discrete", (), "int64", 4, 2)]),
        (spaces.Box(0, 255, (5,), np.uint8), [("observation", "box", (5,), "float32", 0, 0)]),
        (spaces.Box(0, 1, (8, 8, 3), np.float32), [("observation", "box", (8, 8, 3), "float32", 0, 0)]),
        (
            OBSERVATIONS["dict"],
            [
                ("observation.a.b", "box", (2,), "float32", 0, 0),
                ("observation.a_b", "box", (2,), "float32", 0, 0),
                ("observation.c", "discrete", (), "int64", 3, 1),
            ],
        ),
        (
            OBSERVATIONS["tuple"],
            [("observation.0", "discrete", (), "int64", 3, 0), ("observation.1", "box", (2,), "float32", 0, 0)],
        ),
    ],
)
def test_leaves_of_a_space(space: spaces.Space[Any], expected: list[object]) -> None:
    assert described(space) == expected


@pytest.mark.parametrize("name", ["const", "scalar", "discrete", "dict", "tuple"])
def test_leaves_survive_json(name: str) -> None:
    leaves = leaf_specs(OBSERVATIONS[name], "Env-v0")
    assert tuple(LeafSpec.from_json(json.loads(json.dumps(leaf.to_json()))) for leaf in leaves) == leaves


@pytest.mark.parametrize(
    "space",
    [
        OBSERVATIONS["image"],
        spaces.MultiBinary(4),
        spaces.MultiDiscrete([5, 5]),
        spaces.Text(3),
        spaces.Dict({"vec": OBSERVATIONS["const"], "img": OBSERVATIONS["image"]}),
        spaces.Tuple((spaces.Discrete(2), spaces.Sequence(spaces.Discrete(2)))),
    ],
)
def test_a_space_without_an_encoder_is_refused_by_name(space: spaces.Space[Any]) -> None:
    refused = space["img"] if isinstance(space, spaces.Dict) else space[1] if isinstance(space, spaces.Tuple) else space
    with pytest.raises(ConfigError, match=re.escape(str(refused))) as caught:
        leaf_specs(space, "Odd-v3")
    assert "Odd-v3" in str(caught.value)
    assert "FlattenObservation" in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "picture"},
        {"kind": "discrete"},
        {"shape": [-1]},
        {"shape": "many"},
        {"dtype": "object"},
        {"dtype": "no type"},
        {"n": None, "kind": "discrete", "shape": []},
    ],
)
def test_json_of_another_kind_is_refused(change: dict[str, Any]) -> None:
    data = LeafSpec(OBS, "box", (2,), "float32").to_json()
    with pytest.raises((ValueError, TypeError)):
        LeafSpec.from_json(data | change)


@pytest.mark.parametrize("missing", ["key", "kind", "shape", "dtype", "n", "start"])
def test_json_without_a_part_is_refused(missing: str) -> None:
    data = LeafSpec(OBS, "box", (2,), "float32").to_json()
    del data[missing]
    with pytest.raises(KeyError):
        LeafSpec.from_json(data)


def test_flatten_follows_the_structure_without_a_copy() -> None:
    leaves = leaf_specs(OBSERVATIONS["dict"], "Env-v0")
    inner = np.array([1.0, 2.0])
    flat = flatten({"c": 2, "a_b": np.zeros(2), "a": {"b": inner}}, leaves)
    assert list(flat) == [leaf.key for leaf in leaves]
    assert flat["observation", "a", "b"] is inner
    assert flat["observation", "c"].shape == ()

    first, second = flatten((1, np.array([3.0, 4.0])), leaf_specs(OBSERVATIONS["tuple"], "Env-v0")).values()
    assert int(first) == 1
    np.testing.assert_array_equal(second, [3.0, 4.0])


@pytest.mark.parametrize("observation", [{"a": {"b": np.zeros(2)}}, {"a": np.zeros(2), "a_b": 0, "c": 0}, (1, 2), None])
def test_flatten_of_another_structure_raises(observation: object) -> None:
    with pytest.raises((KeyError, IndexError, TypeError, ValueError)):
        flatten(observation, leaf_specs(OBSERVATIONS["dict"], "Env-v0"))


@pytest.mark.parametrize(
    ("name", "features"), [("const", 1), ("scalar", 1), ("discrete", 4), ("image", None), ("dict", 7), ("tuple", 5)]
)
def test_features_add_up(name: str, features: int | None) -> None:
    if features is None:
        assert LeafSpec(OBS, "box", (8, 8, 3), "float32").features == 192
    else:
        assert sum(leaf.features for leaf in leaf_specs(OBSERVATIONS[name], "Env-v0")) == features

"""Observation spaces as flat leaves."""

from __future__ import annotations

import json
import re
from typing import Any, get_args

import numpy as np
import pytest
from gymnasium import spaces
from probes import OBSERVATIONS

from rltool.errors import ConfigError
from rltool.spaces import SMALLEST_IMAGE, LeafKind, LeafSpec, flatten, inputs_of, is_masked, leaf_specs, mask_spec

OBS = ("observation",)


MIXED = spaces.Dict(
    {
        "camera": spaces.Box(0, 255, (40, 50, 3), np.uint8),
        "arm": spaces.Dict({"angles": OBSERVATIONS["const"], "grip": spaces.MultiBinary(2)}),
        "pair": spaces.Tuple((spaces.MultiDiscrete([2, 3], start=[0, 5]), spaces.Discrete(3))),
    }
)


def described(space: spaces.Space[Any]) -> list[tuple[object, ...]]:
    return [
        (leaf.name, leaf.kind, leaf.shape, leaf.dtype, leaf.nvec, leaf.start) for leaf in leaf_specs(space, "Env-v0")
    ]


@pytest.mark.parametrize(
    ("space", "expected"),
    [
        (OBSERVATIONS["const"], [("observation", "box", (1,), "float32", (), ())]),
        (OBSERVATIONS["noise"], [("observation", "box", (3,), "float32", (), ())]),
        (OBSERVATIONS["scalar"], [("observation", "box", (), "float32", (), ())]),
        (OBSERVATIONS["discrete"], [("observation", "discrete", (), "int64", (4,), (2,))]),
        (spaces.Box(0, 255, (5,), np.uint8), [("observation", "box", (5,), "uint8", (), ())]),
        (spaces.Box(0, 1, (8, 8, 3), np.float32), [("observation", "box", (8, 8, 3), "float32", (), ())]),
        (spaces.Box(0, 9, (2,), np.int64), [("observation", "box", (2,), "float32", (), ())]),
        (spaces.MultiDiscrete([5, 5]), [("observation", "discrete", (2,), "int64", (5, 5), (0, 0))]),
        (
            spaces.MultiDiscrete([[2, 3], [4, 5]], start=[[0, 1], [2, -3]]),
            [("observation", "discrete", (2, 2), "int64", (2, 3, 4, 5), (0, 1, 2, -3))],
        ),
        (spaces.MultiBinary(4), [("observation", "binary", (4,), "int8", (), ())]),
        (spaces.MultiBinary([2, 3]), [("observation", "binary", (2, 3), "int8", (), ())]),
        (
            OBSERVATIONS["dict"],
            [
                ("observation.a.b", "box", (2,), "float32", (), ()),
                ("observation.a_b", "box", (2,), "float32", (), ()),
                ("observation.c", "discrete", (), "int64", (3,), (1,)),
            ],
        ),
        (
            OBSERVATIONS["tuple"],
            [("observation.0", "discrete", (), "int64", (3,), (0,)), ("observation.1", "box", (2,), "float32", (), ())],
        ),
        (
            MIXED,
            [
                ("observation.arm.angles", "box", (1,), "float32", (), ()),
                ("observation.arm.grip", "binary", (2,), "int8", (), ()),
                ("observation.camera", "image", (40, 50, 3), "uint8", (), ()),
                ("observation.pair.0", "discrete", (2,), "int64", (2, 3), (0, 5)),
                ("observation.pair.1", "discrete", (), "int64", (3,), (0,)),
            ],
        ),
    ],
)
def test_leaves_of_a_space(space: spaces.Space[Any], expected: list[object]) -> None:
    assert described(space) == expected


def pixels(*shape: int, high: float = 255, dtype: type = np.uint8) -> spaces.Box:
    return spaces.Box(0, high, shape, dtype)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("space", "height", "input_shape", "scale"),
    [
        (pixels(3, 64, 48), 1, (3, 64, 48), 255),
        (pixels(64, 48, 3), 0, (3, 64, 48), 255),
        (pixels(64, 48), 0, (1, 64, 48), 255),
        (pixels(4, 84, 84), 1, (4, 84, 84), 255),
        (pixels(4, 40, 50, 3), 1, (12, 40, 50), 255),
        (pixels(36, 36), 0, (1, 36, 36), 255),
        (pixels(64, 48, 3, high=1, dtype=np.float32), 0, (3, 64, 48), 1),
        (pixels(64, 48, 3, high=255, dtype=np.float32), 0, (3, 64, 48), 255),
        (pixels(64, 48, high=1), 0, (1, 64, 48), 1),
        (spaces.Box(-1, 1, (3, 64, 48), np.float64), 1, (3, 64, 48), 1),
    ],
    ids=str,
)
def test_a_large_bounded_box_is_an_image(
    space: spaces.Box, height: int, input_shape: tuple[int, ...], scale: float
) -> None:
    (leaf,) = leaf_specs(space, "Env-v0")
    assert (leaf.kind, leaf.shape, leaf.height, leaf.scale) == ("image", space.shape, height, scale)
    assert leaf.dtype == ("uint8" if space.dtype == np.uint8 else "float32")
    assert leaf.input_shape == input_shape
    assert leaf.channels == input_shape[0]


@pytest.mark.parametrize(
    ("space", "scale"),
    [
        (spaces.Box(-np.inf, np.inf, (64, 64, 3), np.float32), 1),
        (spaces.Box(0, np.inf, (64, 64, 3), np.float32), 1),
        (pixels(7, 7, 3), 255),
        (pixels(35, 84), 255),
        (pixels(35, 35, 3), 255),
        (pixels(64, 3, 64), 255),
        (pixels(64, 64, 64), 255),
        (pixels(84), 255),
        (pixels(64, 64, 64, high=1, dtype=np.float32), 1),
    ],
    ids=str,
)
def test_what_is_unbounded_or_small_stays_numbers(space: spaces.Box, scale: float) -> None:
    (leaf,) = leaf_specs(space, "Env-v0")
    assert (leaf.kind, leaf.scale) == ("box", scale)
    assert leaf.dtype == ("uint8" if space.dtype == np.uint8 else "float32")
    assert leaf.input_shape == (np.prod(space.shape),)


def test_the_smallest_image_is_the_smallest_that_the_nature_network_takes() -> None:
    """(((36 - 8) / 4 + 1) - 4) / 2 + 1 = 3, and one kernel of 3 remains; 35 leaves 2."""
    sizes = [(((side - 8) // 4 + 1) - 4) // 2 + 1 for side in (SMALLEST_IMAGE - 1, SMALLEST_IMAGE)]
    assert sizes == [2, 3]


@pytest.mark.parametrize(
    ("space", "stack", "found"),
    [
        (pixels(4, 84, 84), 4, (4, "4 frames, gray")),
        (pixels(4, 84, 84, 3), 4, (4, "4 frames, channels last")),
        (pixels(3, 84, 84), 1, (1, "channels first")),
        (pixels(84, 84, 3), 1, (1, "channels last")),
        (pixels(84, 84), 1, (1, "one channel")),
        (pixels(3, 84, 84), 4, (1, "channels first")),
    ],
    ids=str,
)
def test_a_stack_of_frames_is_known_where_a_wrapper_made_it(
    space: spaces.Box, stack: int, found: tuple[int, str]
) -> None:
    (leaf,) = leaf_specs(space, "Env-v0", stack=stack)
    assert leaf.stack == found[0]
    assert str(leaf) == f"observation image {space.shape} of uint8, {found[1]}"


def test_in_words() -> None:
    assert [str(leaf) for leaf in leaf_specs(MIXED, "Env-v0")] == [
        "observation.arm.angles Box(1,)",
        "observation.arm.grip MultiBinary(2,)",
        "observation.camera image (40, 50, 3) of uint8, channels last",
        "observation.pair.0 MultiDiscrete([2, 3])",
        "observation.pair.1 Discrete(3)",
    ]


def names(space: spaces.Space[Any], keys: list[str] | None) -> list[str]:
    return [leaf.name.removeprefix("observation.") for leaf in leaf_specs(space, "Env-v0", keys=keys)]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (None, ["arm.angles", "arm.grip", "camera", "pair.0", "pair.1"]),
        (["camera"], ["camera"]),
        (["arm"], ["arm.angles", "arm.grip"]),
        (["pair.1", "arm.grip"], ["arm.grip", "pair.1"]),
        (["arm", "arm.angles"], ["arm.angles", "arm.grip"]),
    ],
)
def test_keys_choose_entries_in_the_order_of_the_space(keys: list[str] | None, expected: list[str]) -> None:
    assert names(MIXED, keys) == expected


@pytest.mark.parametrize(
    ("space", "keys", "message"),
    [
        (
            MIXED,
            ["camera", "lidar"],
            r"(?s)^env\.observation_keys: Odd-v3 has no observation 'lidar'.*It has: arm\.angles, arm\.grip, camera, pair\.0, pair\.1",
        ),
        (MIXED, ["arm.elbow"], "has no observation 'arm.elbow'"),
        (MIXED, ["arm.angles.0"], "has no observation 'arm.angles.0'"),
        (MIXED, ["pair.2"], "has no observation 'pair.2'"),
        (MIXED, ["cam"], "has no observation 'cam'"),
        (MIXED, [], "expected at least one key, found none"),
        (OBSERVATIONS["const"], ["observation"], "Its observation is no Dict or Tuple: leave observation_keys out"),
    ],
)
def test_a_key_that_is_not_there_is_refused_with_those_that_are(
    space: spaces.Space[Any], keys: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        leaf_specs(space, "Odd-v3", keys=keys)
    assert {problem.path for problem in caught.value.problems} == {"env.observation_keys"}


def test_a_space_that_no_network_takes_can_be_left_out() -> None:
    space = spaces.Dict({"vec": OBSERVATIONS["const"], "mission": spaces.Text(9)})
    with pytest.raises(ConfigError, match=r"Odd-v3 has at observation\.mission the space Text.*observation_keys"):
        leaf_specs(space, "Odd-v3")
    assert names(space, ["vec"]) == ["vec"]
    mask = ("observation", "mission")
    assert [leaf.name for leaf in leaf_specs(space, "Odd-v3", without=mask)] == ["observation.vec"]


def test_names_of_different_keys_are_different() -> None:
    keys = [("a", "b"), ("a.b",), ("a/b",), ("a~2b",), ("a~b",), ("a", "b", "c"), ("a.b", "c"), ("a", "b.c"), ("a_b",)]
    specs = [LeafSpec((*OBS, *key), "box", (1,), "float32") for key in keys]
    assert len({spec.name for spec in specs}) == len(keys)
    assert len({spec.name.replace(".", "/") for spec in specs}) == len(keys), "as modules are named"


LEAVES = [
    *(
        leaf
        for name in ("const", "scalar", "discrete", "dict", "tuple")
        for leaf in leaf_specs(OBSERVATIONS[name], "E")
    ),
    *leaf_specs(MIXED, "E"),
    *leaf_specs(pixels(4, 84, 84, 3), "E", stack=4),
    *leaf_specs(pixels(7, 7, 3), "E"),
    *leaf_specs(spaces.MultiDiscrete([[2], [3]], start=[[1], [-1]]), "E"),
    mask_spec(5),
]


@pytest.mark.parametrize("leaf", LEAVES, ids=str)
def test_leaves_survive_json(leaf: LeafSpec) -> None:
    assert LeafSpec.from_json(json.loads(json.dumps(leaf.to_json(), allow_nan=False))) == leaf


def test_all_kinds_of_leaf_were_asked() -> None:
    assert {leaf.kind for leaf in LEAVES} == set(get_args(LeafKind))


@pytest.mark.parametrize(
    "space",
    [
        spaces.Text(3),
        spaces.Sequence(spaces.Discrete(2)),
        spaces.Graph(spaces.Discrete(2), None),
        spaces.OneOf((spaces.Discrete(2), spaces.Discrete(3))),
        spaces.Dict({"vec": OBSERVATIONS["const"], "odd": spaces.Text(3)}),
        spaces.Tuple((spaces.Discrete(2), spaces.Sequence(spaces.Discrete(2)))),
    ],
    ids=str,
)
def test_a_space_without_an_encoder_is_refused_by_name(space: spaces.Space[Any]) -> None:
    refused = space["odd"] if isinstance(space, spaces.Dict) else space[1] if isinstance(space, spaces.Tuple) else space
    with pytest.raises(ConfigError, match=re.escape(str(refused))) as caught:
        leaf_specs(space, "Odd-v3")
    assert "Odd-v3" in str(caught.value)
    assert "Gymnasium wrapper that turns it into numbers" in str(caught.value)
    assert ("env.observation_keys" in str(caught.value)) == (refused is not space)


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "picture"},
        {"kind": "discrete"},
        {"kind": "discrete", "dtype": "int64"},
        {"kind": "discrete", "dtype": "int64", "nvec": [3], "start": [0]},
        {"kind": "discrete", "dtype": "int64", "nvec": [3, 0], "start": [0, 0]},
        {"kind": "binary"},
        {"kind": "mask"},
        {"kind": "image"},
        {"kind": "image", "shape": [40, 40], "height": 1},
        {"shape": [-1]},
        {"shape": "many"},
        {"dtype": "object"},
        {"dtype": "no type"},
        {"dtype": "int64"},
        {"nvec": [2], "start": [0]},
        {"nvec": None},
        {"scale": 0.0},
        {"scale": -1.0},
        {"scale": "large"},
        {"stack": 0},
        {"stack": 3},
        {"kind": "discrete", "dtype": "int64", "nvec": None, "shape": []},
    ],
    ids=str,
)
def test_json_of_another_kind_is_refused(change: dict[str, Any]) -> None:
    data = LeafSpec(OBS, "box", (2,), "float32").to_json()
    with pytest.raises((ValueError, TypeError)):
        LeafSpec.from_json(data | change)


@pytest.mark.parametrize("missing", list(LeafSpec(OBS, "box", (2,), "float32").to_json()))
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


def test_the_mask_is_no_input() -> None:
    leaves = (*leaf_specs(OBSERVATIONS["const"], "Env-v0"), mask_spec(5))
    assert leaves[1] == LeafSpec(("action_mask",), "mask", (5,), "bool")
    assert inputs_of(leaves) == leaves[:1]
    assert is_masked(leaves)
    assert not is_masked(leaves[:1])
    assert list(flatten(np.ones(1), leaves)) == [OBS]


@pytest.mark.parametrize(
    ("space", "inputs"),
    [
        (OBSERVATIONS["const"], 1),
        (OBSERVATIONS["scalar"], 1),
        (OBSERVATIONS["discrete"], 4),
        (pixels(8, 8, 3), 192),
        (OBSERVATIONS["dict"], 7),
        (OBSERVATIONS["tuple"], 5),
        (spaces.MultiDiscrete([[2], [3]]), 5),
        (spaces.MultiBinary([2, 3]), 6),
    ],
    ids=str,
)
def test_inputs_add_up(space: spaces.Space[Any], inputs: int) -> None:
    assert sum(leaf.input_shape[0] for leaf in leaf_specs(space, "Env-v0")) == inputs

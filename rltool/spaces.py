"""Observation spaces as a flat list of leaves, the same for a Box, a Dict or a Tuple.

A leaf's key is a path: ``("observation",)`` for a plain space, ``("observation", "camera")`` for an entry of a Dict,
``("observation", "0")`` for an entry of a Tuple, ``("action_mask",)`` for the mask of valid actions. It is TorchRL's
nested key too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, cast, get_args

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray
from pydantic import JsonValue

from rltool.errors import ConfigError, Problem

Key = tuple[str, ...]
Array = NDArray[Any]
Leaves = dict[Key, Array]
LeafKind = Literal["box", "image", "discrete", "binary", "mask"]

OBSERVATION: Key = ("observation",)
MASK: Key = ("action_mask",)

# The smallest side of an image: what the convolutions of the Nature network need (Mnih et al. 2015).
SMALLEST_IMAGE = 36

# The types that a leaf of a kind is stored in.
_DTYPES: dict[LeafKind, str] = {"box": "uf", "image": "uf", "discrete": "iu", "binary": "iu", "mask": "b"}


@dataclass(frozen=True)
class LeafSpec:
    """One leaf of an observation.

    Attributes:
        key: its path.
        kind: ``box`` (numbers), ``image`` (for convolutions), ``discrete`` (each entry one of several), ``binary``
            (each entry 0 or 1), ``mask`` (the valid actions; no input of a network).
        shape: shape of one observation, without the batch.
        dtype: NumPy name of the type it is stored in (``float32``, ``uint8``, ``int64``).
        nvec, start: number of values and the smallest one, of each entry of a discrete leaf.
        scale: what a network divides a box or an image by (255 for bytes).
        height: the axis of an image's rows; its columns are the next axis, all others are channels.
        stack: frames that the first axis stacks, oldest first; 1 where it stacks none.

    Raises:
        ValueError: the parts contradict each other.
    """

    key: Key
    kind: LeafKind
    shape: tuple[int, ...]
    dtype: str
    nvec: tuple[int, ...] = ()
    start: tuple[int, ...] = ()
    scale: float = 1.0
    height: int = 0
    stack: int = 1

    def __post_init__(self) -> None:
        entries = math.prod(self.shape) if self.kind == "discrete" else 0
        sound = (
            min(self.shape, default=0) >= 0
            and len(self.nvec) == len(self.start) == entries
            and min(self.nvec, default=1) > 0
            and math.isfinite(self.scale)
            and self.scale > 0
            and (self.stack == 1 or (self.stack > 1 and self.shape[:1] == (self.stack,)))
            and (self.kind != "image" or 0 <= self.height < len(self.shape) - 1)
        )
        if not sound or np.dtype(self.dtype).kind not in _DTYPES[self.kind]:
            raise ValueError(f"no such leaf: {self!r}")

    def __str__(self) -> str:
        if self.kind == "discrete":
            values = f"Discrete({self.nvec[0]})" if self.shape == () else f"MultiDiscrete({list(self.nvec)})"
            return f"{self.name} {values}"
        if self.kind == "image":
            return f"{self.name} image {self.shape} of {self.dtype}, {self._order}"
        kind = {"box": "Box", "binary": "MultiBinary", "mask": "of actions "}[self.kind]
        return f"{self.name} {kind}{self.shape}"

    @property
    def _order(self) -> str:
        """Where an image has its channels, in words."""
        before, after = self.shape[: self.height], self.shape[self.height + 2 :]
        order = {(True, False): "channels first", (False, True): "channels last", (False, False): "one channel"}
        found = order.get((bool(before), bool(after)), f"{self.channels} channels")
        return f"{self.stack} frames, {'channels last' if after else 'gray'}" if self.stack > 1 else found

    @property
    def name(self) -> str:
        """The key in dotted form, for messages, network inputs and tensor names; different for each key (a dot inside a
        part is escaped as in JSON pointers)."""
        return ".".join(part.replace("~", "~0").replace("/", "~1").replace(".", "~2") for part in self.key)

    @property
    def channels(self) -> int:
        """Channels of an image."""
        return math.prod(self.shape) // math.prod(self.shape[self.height : self.height + 2])

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape in which a network gets it, without the batch: ``(channels, rows, columns)`` or ``(numbers,)``."""
        if self.kind == "image":
            return (self.channels, *self.shape[self.height : self.height + 2])
        return (sum(self.nvec) if self.kind == "discrete" else math.prod(self.shape),)

    def to_json(self) -> dict[str, JsonValue]:
        """A plain mapping; :meth:`from_json` reverses it."""
        data = asdict(self)
        return cast("dict[str, JsonValue]", {k: list(v) if isinstance(v, tuple) else v for k, v in data.items()})

    @classmethod
    def from_json(cls, data: Mapping[str, JsonValue]) -> LeafSpec:
        """Rebuilds what :meth:`to_json` gave.

        Raises:
            KeyError, TypeError, ValueError: the mapping is not one of those.
        """
        kind, key = data["kind"], data["key"]
        if kind not in get_args(LeafKind):
            raise ValueError(f"unknown kind of leaf {kind!r}")
        if not isinstance(key, list) or (*key[:1],) not in (OBSERVATION, MASK):
            raise ValueError(f"no key of a leaf: {key!r}")
        shape, nvec, start = (whole_numbers(data[part]) for part in ("shape", "nvec", "start"))
        height, stack = whole_numbers([data["height"], data["stack"]])
        return cls(
            key=tuple(str(part) for part in key),
            kind=cast("LeafKind", kind),
            shape=shape,
            dtype=str(np.dtype(str(data["dtype"]))),
            nvec=nvec,
            start=start,
            scale=float(cast("float", data["scale"])),
            height=height,
            stack=stack,
        )


def whole_numbers(value: JsonValue) -> tuple[int, ...]:
    """A list of whole numbers that fit into an int64.

    Raises:
        TypeError, ValueError: it is something else.
    """
    if not isinstance(value, list):
        raise TypeError(f"expected a list of whole numbers, found {value!r}")
    numbers = tuple(number for number in value if type(number) is int and -(2**63) <= number < 2**63)
    if len(numbers) < len(value):
        raise ValueError(f"expected whole numbers, found {str(value)[:100]}")
    return numbers


def nested(columns: Mapping[Key, object]) -> dict[str, Any]:
    """Values by key as a tree of mappings, as a TensorDict takes it (one call that builds it all costs least)."""
    tree: dict[str, Any] = {}
    for key, value in columns.items():
        node = tree
        for part in key[:-1]:
            node = node.setdefault(part, {})
        node[key[-1]] = value
    return tree


def mask_spec(choices: int) -> LeafSpec:
    """The leaf that says which of an action space's choices are valid."""
    return LeafSpec(MASK, "mask", (choices,), "bool")


def mask_rows(value: object, count: int) -> Array:
    """Masks of ``count`` environments as rows ``[count, choices]``, of any number type.

    Args:
        value: one array, or an array for each of several choices.

    Raises:
        ValueError: it does not divide into so many rows.
    """
    several = isinstance(value, tuple | list) and len(value) > 0 and np.ndim(value[0]) > 0
    parts = cast("Sequence[object]", value) if several else [value]
    return np.concatenate([np.asarray(part).reshape(count, -1) for part in parts], -1)


def inputs_of(leaves: Iterable[LeafSpec]) -> tuple[LeafSpec, ...]:
    """The leaves that networks take: all but the mask of actions."""
    return tuple(spec for spec in leaves if spec.kind != "mask")


def is_masked(leaves: Iterable[LeafSpec]) -> bool:
    """Whether the environment says which actions are valid."""
    return any(spec.kind == "mask" for spec in leaves)


def leaf_specs(
    space: spaces.Space[Any],
    env: str,
    *,
    keys: Sequence[str] | None = None,
    without: Key | None = None,
    stack: int = 1,
    skip: bool = False,
) -> tuple[LeafSpec, ...]:
    """The leaves of an observation space.

    Args:
        space: a Gymnasium observation space.
        env: the environment's name, for the message.
        keys: entries to keep, dotted where nested; None: all.
        without: the key of an entry that is no observation (the mask of actions).
        stack: frames that a wrapper stacked along the first axis of every leaf.
        skip: leave out what no encoder takes.

    Raises:
        ConfigError: a leaf that no encoder takes, named with its space, or a key that is not there.
    """
    parts = {key: part for key, part in parts_of(space).items() if key != without}
    if keys is not None:
        parts = _chosen(parts, keys, env)
    if skip:
        parts = {key: part for key, part in parts.items() if _takes(part)}
    return tuple(_leaf(part, key, env, stack) for key, part in parts.items())


def parts_of(space: spaces.Space[Any]) -> dict[Key, spaces.Space[Any]]:
    """The spaces inside Dict and Tuple by the keys of their leaves; a space that is neither is its own only part."""
    return dict(_parts(space, OBSERVATION))


def _parts(space: spaces.Space[Any], key: Key) -> Iterator[tuple[Key, spaces.Space[Any]]]:
    """The spaces inside Dict and Tuple, by their keys."""
    if isinstance(space, spaces.Dict):
        for name, part in space.spaces.items():
            yield from _parts(part, (*key, str(name)))
    elif isinstance(space, spaces.Tuple):
        for index, part in enumerate(space.spaces):
            yield from _parts(part, (*key, str(index)))
    else:
        yield key, space


def _chosen(parts: Mapping[Key, spaces.Space[Any]], keys: Sequence[str], env: str) -> dict[Key, spaces.Space[Any]]:
    """The parts that lie at or under one of the dotted keys, in the order of the space."""

    def under(key: Key, wanted: str) -> bool:
        names = (".".join(key[1 : end + 1]) for end in range(1, len(key)))
        return wanted in names

    problems = [
        Problem(
            "env.observation_keys",
            f"{env} has no observation {wanted!r}",
            f"It has: {', '.join('.'.join(key[1:]) for key in parts)}"
            if parts.keys() != {OBSERVATION}
            else "Its observation is no Dict or Tuple: leave observation_keys out",
        )
        for wanted in keys
        if not any(under(key, wanted) for key in parts)
    ]
    if not keys:
        problems = [Problem("env.observation_keys", "expected at least one key, found none", "null takes all of them")]
    if problems:
        raise ConfigError(problems)
    return {key: part for key, part in parts.items() if any(under(key, wanted) for wanted in keys)}


def _takes(space: spaces.Space[Any]) -> bool:
    if isinstance(space, spaces.Box):
        return space.dtype.kind in "fiub"
    return isinstance(space, spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary)


def _leaf(space: spaces.Space[Any], key: Key, env: str, stack: int) -> LeafSpec:
    if isinstance(space, spaces.Discrete):
        return LeafSpec(key, "discrete", (), "int64", (int(space.n),), (int(space.start),))
    if isinstance(space, spaces.MultiDiscrete):
        counts, starts = (tuple(int(x) for x in part.reshape(-1)) for part in (space.nvec, space.start))
        return LeafSpec(key, "discrete", tuple(space.shape), "int64", counts, starts)
    if isinstance(space, spaces.MultiBinary):
        return LeafSpec(key, "binary", tuple(space.shape), "int8")
    if isinstance(space, spaces.Box) and _takes(space):
        return _numbers(space, key, stack if space.shape[:1] == (stack,) else 1)
    raise ConfigError(
        Problem(
            "env",
            f"expected observations of numbers (Box), images or categories (Discrete, MultiDiscrete, MultiBinary), also "
            f"inside Dict or Tuple; {env} has at {'.'.join(key)} the space {space}, which no network of rltool's takes",
            "Leave it out with env.observation_keys=[…], or add a Gymnasium wrapper that turns it into numbers"
            if len(key) > 1
            else "Add a Gymnasium wrapper that turns it into numbers to env.wrappers",
        )
    )


def _numbers(space: spaces.Box, key: Key, stack: int) -> LeafSpec:
    """A Box: an image where it looks like one (see :func:`image_height`), else numbers."""
    shape = tuple(space.shape)
    dtype = "uint8" if space.dtype == np.uint8 else "float32"
    finite = bool(np.isfinite(space.low).all() and np.isfinite(space.high).all())
    scale = 255.0 if finite and space.low.size and space.low.min() == 0 and space.high.max() == 255 else 1.0
    height = image_height(shape) if finite else None
    if height is None:
        return LeafSpec(key, "box", shape, dtype, scale=scale, stack=stack)
    return LeafSpec(key, "image", shape, dtype, scale=scale, height=height, stack=stack)


def image_height(shape: Sequence[int]) -> int | None:
    """The axis of an image's rows: the first of two neighbouring axes of at least :data:`SMALLEST_IMAGE` where all
    other axes (channels, stacked frames) are smaller; None where that fits nowhere."""
    large = [axis for axis, size in enumerate(shape) if size >= SMALLEST_IMAGE]
    return large[0] if len(large) == 2 and large[1] == large[0] + 1 else None


def flatten(observation: object, specs: Sequence[LeafSpec]) -> Leaves:
    """The leaves of an observation, single or batched, in the order of the specs (no copy); the mask is not its part.

    Raises:
        KeyError, IndexError, TypeError: the observation has another structure than its space.
    """
    return {spec.key: np.asarray(entry(observation, spec.key[1:])) for spec in inputs_of(specs)}


def entry(observation: object, path: Iterable[str]) -> object:
    """The part of a nested observation at a path.

    Raises:
        KeyError, IndexError, TypeError: there is none.
    """
    for part in path:
        observation = (
            observation[int(part)]
            if isinstance(observation, tuple)
            else cast("Mapping[str, object]", observation)[part]
        )
    return observation


def nth(batch: Any, index: int) -> Any:
    """One of a batch of observations, nested as the batch is (an array of whole observations is one, too)."""
    if isinstance(batch, Mapping):
        return {name: nth(part, index) for name, part in batch.items()}
    return tuple(nth(part, index) for part in batch) if isinstance(batch, tuple) else batch[index]

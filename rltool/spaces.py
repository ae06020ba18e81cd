"""Observation spaces as a flat list of leaves, the same for a Box, a Dict or a Tuple.

A leaf's key is a path: ``("observation",)`` for a plain space, ``("observation", "camera")`` for an entry of a Dict,
``("observation", "0")`` for an entry of a Tuple. It is TorchRL's nested key too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, cast

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray
from pydantic import JsonValue

from rltool.errors import ConfigError, Problem

Key = tuple[str, ...]
Array = NDArray[Any]
Leaves = dict[Key, Array]

OBSERVATION: Key = ("observation",)


@dataclass(frozen=True)
class LeafSpec:
    """One leaf of an observation.

    Attributes:
        key: its path.
        kind: ``box`` (numbers) or ``discrete`` (one of ``n``).
        shape: shape of one observation, without the batch.
        dtype: NumPy name of the type it is stored in (``float32``, ``int64``).
        n: number of values of a discrete leaf; 0 for a box.
        start: smallest value of a discrete leaf.

    Raises:
        ValueError: the parts contradict each other.
    """

    key: Key
    kind: Literal["box", "discrete"]
    shape: tuple[int, ...]
    dtype: str
    n: int = 0
    start: int = 0

    def __post_init__(self) -> None:
        discrete = self.kind == "discrete"
        sound = (self.shape == () and self.n > 0) if discrete else min(self.shape, default=0) >= 0
        if not sound or np.dtype(self.dtype).kind not in ("iu" if discrete else "iuf"):
            raise ValueError(f"no such leaf: {self!r}")

    def __str__(self) -> str:
        return f"{self.name} Discrete({self.n})" if self.kind == "discrete" else f"{self.name} Box{self.shape}"

    @property
    def name(self) -> str:
        """The key in dotted form, for messages and tensor names."""
        return ".".join(self.key)

    @property
    def features(self) -> int:
        """How many numbers the leaf gives a network."""
        return self.n if self.kind == "discrete" else math.prod(self.shape)

    def to_json(self) -> dict[str, JsonValue]:
        """A plain mapping; :meth:`from_json` reverses it."""
        return cast("dict[str, JsonValue]", asdict(self) | {"key": list(self.key), "shape": list(self.shape)})

    @classmethod
    def from_json(cls, data: Mapping[str, JsonValue]) -> LeafSpec:
        """Rebuilds what :meth:`to_json` gave.

        Raises:
            KeyError, TypeError, ValueError: the mapping is not one of those.
        """
        kind = data["kind"]
        if kind not in ("box", "discrete"):
            raise ValueError(f"unknown kind of leaf {kind!r}")
        return cls(
            key=tuple(str(part) for part in cast("list[str]", data["key"])),
            kind=cast("Literal['box', 'discrete']", kind),
            shape=tuple(int(size) for size in cast("list[int]", data["shape"])),
            dtype=str(np.dtype(str(data["dtype"]))),
            n=int(cast("int", data["n"])),
            start=int(cast("int", data["start"])),
        )


def leaf_specs(space: spaces.Space[Any], env: str) -> tuple[LeafSpec, ...]:
    """The leaves of an observation space.

    Args:
        space: a Gymnasium observation space.
        env: the environment's name, for the message.

    Raises:
        ConfigError: a leaf that no encoder takes, named with its space.
    """
    return tuple(_specs(space, OBSERVATION, env))


def _specs(space: spaces.Space[Any], key: Key, env: str) -> Iterator[LeafSpec]:
    if isinstance(space, spaces.Dict):
        for name, part in space.spaces.items():
            yield from _specs(part, (*key, name), env)
    elif isinstance(space, spaces.Tuple):
        for index, part in enumerate(space.spaces):
            yield from _specs(part, (*key, str(index)), env)
    elif isinstance(space, spaces.Discrete):
        yield LeafSpec(key, "discrete", (), "int64", int(space.n), int(space.start))
    elif isinstance(space, spaces.Box) and not _is_image(space):
        yield LeafSpec(key, "box", tuple(space.shape), "float32")
    else:
        what = "an image" if isinstance(space, spaces.Box) else "this kind of space"
        raise ConfigError(
            Problem(
                "env",
                f"expected observations of numbers (Box) or categories (Discrete), also inside Dict or Tuple; "
                f"{env} has {what} at {'.'.join(key)}: {space}",
                "Add a Gymnasium wrapper that turns it into one of these: "
                "env.wrappers='[{name: FlattenObservation, kwargs: {}}]'",
            )
        )


def _is_image(space: spaces.Box) -> bool:
    return space.dtype == np.uint8 and len(space.shape) >= 2


def flatten(observation: object, specs: Sequence[LeafSpec]) -> Leaves:
    """The leaves of an observation, single or batched, in the order of the specs (no copy).

    Raises:
        KeyError, IndexError, TypeError: the observation has another structure than its space.
    """
    return {spec.key: np.asarray(_at(observation, spec.key[1:])) for spec in specs}


def _at(observation: object, path: Iterable[str]) -> object:
    for part in path:
        observation = (
            observation[int(part)]
            if isinstance(observation, tuple)
            else cast("Mapping[str, object]", observation)[part]
        )
    return observation

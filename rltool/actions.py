"""Units of action: what a policy works in, and what an environment receives.

A policy sees each bounded dimension as [-1, 1] and a discrete choice as 0 … n-1. The stored action is the policy's own;
:meth:`ActionSpec.to_env` is applied by collector, evaluation and exported policy alike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
from gymnasium import spaces
from pydantic import JsonValue

from rltool.errors import ConfigError, Problem
from rltool.spaces import Array

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Squash = Literal["clip", "tanh"]


@dataclass(frozen=True)
class ActionSpec:
    """An action space in the policy's units.

    Attributes:
        kind: ``discrete`` or ``box``.
        shape: shape that the environment receives (``()`` for a discrete choice).
        dtype: NumPy name of the type that the environment receives.
        n, start: number of choices and the first one (discrete).
        low, high: bounds of each dimension, flat, ±inf where there is none (box).
        squash: how a number outside [-1, 1] is brought in, where a dimension is bounded on both sides.

    Raises:
        ValueError: the parts contradict each other.
    """

    kind: Literal["discrete", "box"]
    shape: tuple[int, ...]
    dtype: str
    n: int = 0
    start: int = 0
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    squash: Squash = "clip"

    def __post_init__(self) -> None:
        discrete = self.kind == "discrete"
        dimensions = 0 if discrete else math.prod(self.shape)
        sound = (self.shape == () and self.n > 0) if discrete else min(self.shape, default=1) > 0
        fits = np.dtype(self.dtype).kind in ("iu" if discrete else "f")
        if not (sound and fits and len(self.low) == len(self.high) == dimensions):
            raise ValueError(f"no such action space: {self!r}")

    def __str__(self) -> str:
        if self.kind == "discrete":
            return f"Discrete({self.n})"
        low, high = (
            f"{min(side):g}" if min(side) == max(side) else f"[{', '.join(f'{bound:g}' for bound in side)}]"
            for side in (self.low, self.high)
        )
        return f"Box{self.shape} from {low} to {high}"

    @property
    def size(self) -> int:
        """Numbers a policy gives for an action: choices to score, or dimensions."""
        return self.n if self.kind == "discrete" else len(self.low)

    @cached_property
    def _bounds(self) -> tuple[Array, Array, Array]:
        low, high = np.asarray(self.low, np.float64), np.asarray(self.high, np.float64)
        return low, high, np.isfinite(low) & np.isfinite(high)

    def to_env(self, action: Array) -> Array:
        """Policy units to the environment's.

        Args:
            action: ``[N]`` choices (discrete) or ``[N, dimensions]`` (box).

        Returns:
            ``[N, *shape]`` in the environment's dtype and inside its space: bounded dimensions are squashed into
            [-1, 1] and mapped to [low, high]; the others are only cut at the bound they have.
        """
        if self.kind == "discrete":
            return (action + self.start).astype(self.dtype, copy=False)
        low, high, bounded = self._bounds
        action = action.astype(np.float64)
        squashed = np.tanh(action) if self.squash == "tanh" else np.clip(action, -1.0, 1.0)
        with np.errstate(invalid="ignore", over="ignore"):
            # A weighted mean of the bounds: high - low could overflow, and ±1 gives the bounds themselves.
            scaled = np.where(bounded, (0.5 - 0.5 * squashed) * low + (0.5 + 0.5 * squashed) * high, action)
            clipped = np.clip(scaled.astype(self.dtype), low.astype(self.dtype), high.astype(self.dtype))
        return cast("Array", clipped.reshape(len(action), *self.shape))

    def random(self, count: int, generator: torch.Generator) -> Tensor:
        """Random actions in policy units: ``[count]`` uniform choices, or ``[count, dimensions]`` uniform over bounded
        dimensions and standard normal over the others."""
        import torch

        if self.kind == "discrete":
            return torch.randint(self.n, (count,), generator=generator)
        uniform = torch.rand(count, self.size, generator=generator) * 2.0 - 1.0
        normal = torch.randn(count, self.size, generator=generator)
        return torch.where(torch.from_numpy(self._bounds[2]), uniform, normal)

    def to_json(self) -> dict[str, JsonValue]:
        """A plain mapping (infinite bounds as null); :meth:`from_json` reverses it."""
        bounds = {name: [v if np.isfinite(v) else None for v in getattr(self, name)] for name in ("low", "high")}
        return cast("dict[str, JsonValue]", asdict(self) | {"shape": list(self.shape)} | bounds)

    @classmethod
    def from_json(cls, data: Mapping[str, JsonValue]) -> ActionSpec:
        """Rebuilds what :meth:`to_json` gave.

        Raises:
            KeyError, TypeError, ValueError: the mapping is not one of those.
        """
        kind, squash = data["kind"], data["squash"]
        if kind not in ("discrete", "box") or squash not in ("clip", "tanh"):
            raise ValueError(f"unknown action space {kind!r} with squash {squash!r}")
        low, high = cast("list[float | None]", data["low"]), cast("list[float | None]", data["high"])
        return cls(
            kind=cast("Literal['discrete', 'box']", kind),
            shape=tuple(int(size) for size in cast("list[int]", data["shape"])),
            dtype=str(np.dtype(str(data["dtype"]))),
            n=int(cast("int", data["n"])),
            start=int(cast("int", data["start"])),
            low=tuple(-np.inf if bound is None else float(bound) for bound in low),
            high=tuple(np.inf if bound is None else float(bound) for bound in high),
            squash=cast("Squash", squash),
        )


def action_spec(space: spaces.Space[Any], env: str) -> ActionSpec:
    """The policy's view of an action space.

    Raises:
        ConfigError: neither Discrete nor a Box of floats, named with its space.
    """
    if isinstance(space, spaces.Discrete):
        return ActionSpec("discrete", (), str(space.dtype), n=int(space.n), start=int(space.start))
    if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating) and np.prod(space.shape) > 0:
        low, high = (tuple(float(bound) for bound in side.reshape(-1)) for side in (space.low, space.high))
        return ActionSpec("box", tuple(space.shape), str(space.dtype), low=low, high=high)
    raise ConfigError(
        Problem(
            "env",
            f"expected Discrete or Box actions of floats; {env} has {space}",
            "Add a Gymnasium wrapper that turns them into one of these",
        )
    )

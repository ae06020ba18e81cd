"""Units of action: what a policy works in, and what an environment receives.

A policy sees each bounded dimension as [-1, 1] and a choice as 0 … n-1. The stored action is the policy's own;
:meth:`ActionSpec.to_env` is applied by collector, evaluation and exported policy alike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

import numpy as np
from gymnasium import spaces
from pydantic import JsonValue

from rltool.errors import ConfigError, Problem
from rltool.spaces import Array, whole_numbers

if TYPE_CHECKING:
    import torch
    from torch import Tensor

ActionKind = Literal["discrete", "multi_discrete", "multi_binary", "box"]
Squash = Literal["clip", "tanh"]


@dataclass(frozen=True)
class ActionSpec:
    """An action space in the policy's units.

    Attributes:
        kind: one choice, several choices at once, several yes-or-no choices at once, or numbers.
        shape: shape that the environment receives (``()`` for one choice).
        dtype: NumPy name of the type that the environment receives.
        nvec, start: number of options and the first one, of each choice (not for a box).
        low, high: bounds of each dimension, flat, ±inf where there is none (box).
        squash: how a number outside [-1, 1] is brought in, where a dimension is bounded on both sides.

    Raises:
        ValueError: the parts contradict each other.
    """

    kind: ActionKind
    shape: tuple[int, ...]
    dtype: str
    nvec: tuple[int, ...] = ()
    start: tuple[int, ...] = ()
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    squash: Squash = "clip"

    def __post_init__(self) -> None:
        entries = math.prod(self.shape)
        choices, bounds = (0, entries) if self.kind == "box" else (entries, 0)
        sound = (
            min(self.shape, default=1) > 0
            and (self.shape == () or self.kind != "discrete")
            and len(self.nvec) == len(self.start) == choices
            and min(self.nvec, default=1) > 0
            and len(self.low) == len(self.high) == bounds
        )
        if not sound or np.dtype(self.dtype).kind not in ("f" if self.kind == "box" else "iu"):
            raise ValueError(f"no such action space: {self!r}")

    def __str__(self) -> str:
        if self.kind == "discrete":
            return f"Discrete({self.nvec[0]})"
        if self.kind == "multi_discrete":
            return f"MultiDiscrete({np.reshape(self.nvec, self.shape).tolist()})"
        if self.kind == "multi_binary":
            return f"MultiBinary({self.shape[0] if len(self.shape) == 1 else list(self.shape)})"
        low, high = (
            f"{min(side):g}" if min(side) == max(side) else f"[{', '.join(f'{bound:g}' for bound in side)}]"
            for side in (self.low, self.high)
        )
        return f"Box{self.shape} from {low} to {high}"

    @property
    def continuous(self) -> bool:
        """Whether actions are numbers and not choices."""
        return self.kind == "box"

    @property
    def size(self) -> int:
        """Numbers a policy gives for an action: options to score, of all choices together, or dimensions."""
        return len(self.low) if self.continuous else sum(self.nvec)

    @property
    def policy_shape(self) -> tuple[int, ...]:
        """Shape of one action in the policy's units: ``()`` for one choice, else one entry a choice or a dimension."""
        return () if self.kind == "discrete" else (len(self.nvec) or len(self.low),)

    @property
    def policy_dtype(self) -> str:
        """NumPy name of the type of an action in the policy's units."""
        return "float32" if self.continuous else "int64"

    @cached_property
    def _bounds(self) -> tuple[Array, Array, Array]:
        low, high = np.asarray(self.low, np.float64), np.asarray(self.high, np.float64)
        return low, high, np.isfinite(low) & np.isfinite(high)

    @cached_property
    def _halves(self) -> tuple[Array, Array]:
        low, high, _ = self._bounds
        return 0.5 * low, 0.5 * high

    @cached_property
    def _limits(self) -> tuple[Array, Array]:
        low, high, _ = self._bounds
        return low.astype(self.dtype), high.astype(self.dtype)

    @cached_property
    def _symmetric(self) -> bool:
        low, high, _ = self._bounds
        return self.bounded and bool((low == -high).all())

    @cached_property
    def bounded(self) -> bool:
        """Whether every dimension of a box is bounded on both sides."""
        return self.continuous and bool(self._bounds[2].all())

    def to_env(self, action: Array) -> Array:
        """Policy units to the environment's.

        Args:
            action: ``[N]`` choices, ``[N, choices]``, or ``[N, dimensions]`` (box).

        Returns:
            ``[N, *shape]`` in the environment's dtype and inside its space: bounded dimensions are squashed into
            [-1, 1] and mapped to [low, high]; the others are only cut at the bound they have.
        """
        if self.kind == "discrete" and self.start == (0,) and action.dtype == self.dtype:
            return action
        if not self.continuous:
            start = self.start[0] if self.kind == "discrete" else np.asarray(self.start)
            return (action + start).reshape(len(action), *self.shape).astype(self.dtype, copy=False)
        if self._symmetric and self.squash == "clip":
            # The usual case, in a few operations: with one environment this is part of every frame.
            inside = np.minimum(np.maximum(action, -1.0, dtype=self.dtype), 1.0) * self._limits[1]
            return inside.reshape(len(action), *self.shape)
        half_low, half_high = self._halves
        action = action.astype(np.float64)
        squashed = np.tanh(action) if self.squash == "tanh" else np.minimum(np.maximum(action, -1.0), 1.0)
        # A weighted mean of the bounds: high - low could overflow, and ±1 gives the bounds themselves.
        if self.bounded:
            return self._inside(half_low * (1.0 - squashed) + half_high * (1.0 + squashed))
        with np.errstate(invalid="ignore", over="ignore"):
            scaled = half_low * (1.0 - squashed) + half_high * (1.0 + squashed)
            return self._inside(np.where(self._bounds[2], scaled, action))

    def _inside(self, action: Array) -> Array:
        """In the environment's type and shape, cut at its bounds."""
        least, most = self._limits
        cut = np.minimum(np.maximum(action.astype(self.dtype), least), most)
        return cast("Array", cut.reshape(len(action), *self.shape))

    def empty(self, *batch: int) -> Tensor:
        """Room for actions in policy units, ``[*batch, *policy_shape]``."""
        import torch

        return torch.empty((*batch, *self.policy_shape), dtype=getattr(torch, self.policy_dtype))

    def random(self, count: int, generator: torch.Generator) -> Tensor:
        """Random actions in policy units, ``[count, *policy_shape]``: each choice uniform, each dimension uniform where
        it is bounded and standard normal where not."""
        import torch

        if self.kind == "discrete":
            return torch.randint(self.nvec[0], (count,), generator=generator)
        if not self.continuous:
            uniform = torch.rand(count, len(self.nvec), generator=generator, dtype=torch.float64)
            return (uniform * torch.tensor(self.nvec)).long()
        uniform = torch.rand(count, self.size, generator=generator) * 2.0 - 1.0
        normal = torch.randn(count, self.size, generator=generator)
        return torch.where(torch.from_numpy(self._bounds[2]), uniform, normal)

    def to_json(self) -> dict[str, JsonValue]:
        """A plain mapping (infinite bounds as null); :meth:`from_json` reverses it."""
        bounds = {name: [v if np.isfinite(v) else None for v in getattr(self, name)] for name in ("low", "high")}
        lists = {name: list(getattr(self, name)) for name in ("shape", "nvec", "start")}
        return cast("dict[str, JsonValue]", asdict(self) | lists | bounds)

    @classmethod
    def from_json(cls, data: Mapping[str, JsonValue]) -> ActionSpec:
        """Rebuilds what :meth:`to_json` gave.

        Raises:
            KeyError, TypeError, ValueError: the mapping is not one of those.
        """
        kind, squash = data["kind"], data["squash"]
        if kind not in get_args(ActionKind) or squash not in get_args(Squash):
            raise ValueError(f"unknown action space {kind!r} with squash {squash!r}")
        shape, nvec, start = (whole_numbers(data[part]) for part in ("shape", "nvec", "start"))
        low, high = cast("list[float | None]", data["low"]), cast("list[float | None]", data["high"])
        return cls(
            kind=cast("ActionKind", kind),
            shape=shape,
            dtype=str(np.dtype(str(data["dtype"]))),
            nvec=nvec,
            start=start,
            low=tuple(-np.inf if bound is None else float(bound) for bound in low),
            high=tuple(np.inf if bound is None else float(bound) for bound in high),
            squash=cast("Squash", squash),
        )


def action_spec(space: spaces.Space[Any], env: str) -> ActionSpec:
    """The policy's view of an action space.

    Raises:
        ConfigError: a space that no policy of rltool's acts in, named.
    """
    shape, dtype = tuple(space.shape or ()), str(space.dtype)
    if isinstance(space, spaces.Discrete):
        return ActionSpec("discrete", (), dtype, (int(space.n),), (int(space.start),))
    if isinstance(space, spaces.MultiDiscrete) and space.nvec.size > 0:
        counts, starts = (tuple(int(x) for x in part.reshape(-1)) for part in (space.nvec, space.start))
        return ActionSpec("multi_discrete", shape, dtype, counts, starts)
    if isinstance(space, spaces.MultiBinary) and math.prod(shape) > 0:
        choices = math.prod(shape)
        return ActionSpec("multi_binary", shape, dtype, (2,) * choices, (0,) * choices)
    if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating) and np.prod(space.shape) > 0:
        low, high = (tuple(float(bound) for bound in side.reshape(-1)) for side in (space.low, space.high))
        return ActionSpec("box", shape, dtype, low=low, high=high)
    raise ConfigError(
        Problem(
            "env",
            f"expected Discrete, MultiDiscrete, MultiBinary or Box actions of floats; {env} has {space}",
            "Add a Gymnasium wrapper that turns them into one of these to env.wrappers",
        )
    )

"""TorchRL's specs and Gymnasium's spaces: what stands for what, and values turned from one into the other."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor
from torchrl.data import (
    Binary,
    Bounded,
    Categorical,
    Composite,
    MultiCategorical,
    MultiOneHot,
    OneHot,
    TensorSpec,
    Unbounded,
)

from rltool.errors import ConfigError, Problem
from rltool.spaces import Array


def space_of(spec: TensorSpec, name: str = "") -> spaces.Space[Any]:
    """The Gymnasium space that a spec stands for; a Composite becomes a Dict, one-hot becomes a category.

    Args:
        spec: a spec without a batch.
        name: what it is of, dotted, for the message.

    Raises:
        ConfigError: a spec that stands for none.
    """
    shape = tuple(spec.shape)
    if isinstance(spec, Composite):
        return spaces.Dict({str(key): space_of(part, f"{name}.{key}".strip(".")) for key, part in spec.items()})
    if isinstance(spec, MultiOneHot):
        spec, shape = spec.to_categorical_spec(), (*shape[:-1], len(spec.space))
    if isinstance(spec, MultiCategorical):
        return spaces.MultiDiscrete(np.broadcast_to(spec.nvec.cpu().numpy(), shape))
    if isinstance(spec, Binary) and shape:
        return spaces.MultiBinary(shape)
    if isinstance(spec, OneHot | Categorical):
        shape = shape[:-1] if isinstance(spec, OneHot) else shape
        count = int(spec.space.n)
        return spaces.MultiDiscrete(np.full(shape, count)) if shape else spaces.Discrete(count)
    if isinstance(spec, Bounded | Unbounded):
        dtype = torch.empty((), dtype=spec.dtype).numpy().dtype
        if isinstance(spec, Unbounded):
            return spaces.Box(-np.inf, np.inf, shape, dtype if dtype.kind == "f" else np.float32)
        low, high = (
            bound.expand(spec.shape).cpu().numpy().astype(dtype) for bound in (spec.space.low, spec.space.high)
        )
        return spaces.Box(low, high, dtype=dtype)
    raise ConfigError(
        Problem(
            "env",
            f"expected numbers (Bounded, Unbounded) or categories (Categorical, OneHot, MultiCategorical, MultiOneHot, "
            f"Binary) of TorchRL's, found {type(spec).__name__}{f' at {name}' if name else ''}",
        )
    )


def spec_of(space: spaces.Space[Any]) -> TensorSpec:
    """The spec that stands for a space of numbers or categories; these count from 0."""
    if isinstance(space, spaces.Discrete):
        return Categorical(int(space.n))
    if isinstance(space, spaces.MultiDiscrete):
        return MultiCategorical(torch.from_numpy(np.asarray(space.nvec, np.int64)))
    if isinstance(space, spaces.MultiBinary):
        return Binary(shape=tuple(space.shape), dtype=torch.int8)
    assert isinstance(space, spaces.Box)
    dtype = np.dtype(np.uint8 if space.dtype == np.uint8 else np.float32)
    low, high = (torch.from_numpy(bound.astype(dtype)) for bound in (space.low, space.high))
    if bool(low.isinf().all() and high.isinf().all()):
        return Unbounded(space.shape, dtype=low.dtype)
    return Bounded(low, high, space.shape, dtype=low.dtype)


def categories(value: Tensor, spec: TensorSpec) -> Tensor:
    """A value as the space of :func:`space_of` has it: one-hot becomes the category, all else stays."""
    return cast("Tensor", spec.to_categorical(value, safe=False)) if isinstance(spec, OneHot) else value


def encoded(value: Array | Tensor, spec: TensorSpec) -> Tensor:
    """The reverse of :func:`categories`: a value of the space as its spec wants it."""
    tensor = torch.as_tensor(value)
    if isinstance(spec, OneHot):
        tensor = spec.to_categorical_spec().to_one_hot(tensor.long(), safe=False)
    return tensor.to(spec.dtype)

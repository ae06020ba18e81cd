"""What a look at a few states says of networks and their inputs: units that no longer learn, inputs of an odd size."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.modules import activation

from rltool.metrics import Metrics
from rltool.nets import Features

# How many states are looked at: a look happens once a point and must cost little, also with images.
LOOKED_AT = 128
# A unit is saturated where the slope of its activation is below this one on so large a share of the states.
FLAT, SHARE = 0.05, 0.95

_ACTIVATIONS = tuple(
    kind
    for kind in vars(activation).values()
    if isinstance(kind, type) and issubclass(kind, nn.Module) and kind not in (nn.Module, nn.MultiheadAttention)
)


def sample(columns: Features) -> Features:
    """Rows of columns ``[N, …]`` at equal distances, at most :data:`LOOKED_AT`, as copies: nothing else is kept alive."""
    count = len(next(iter(columns.values())))
    stride = -(-count // LOOKED_AT)
    return {name: column[::stride].clone() for name, column in columns.items()}


def saturated_units(network: nn.Module, inputs: Iterable[Tensor]) -> Tensor | None:
    """The share of the hidden units through which hardly any gradient comes, in these states; None where no module is an
    activation.

    A ReLU that is 0 everywhere ("dead"; Sokar et al. 2023, arXiv:2302.12902, call those near it dormant) is one, and so is
    a tanh at ±1. A channel of a convolution is one unit.

    Args:
        network: called with the inputs.
        inputs: ``[N, *shape]`` each.
    """
    shares: list[Tensor] = []

    def look(module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        with torch.enable_grad():
            given = arguments[0].detach().requires_grad_()
            # A copy, since some work in place; without the module's hooks, of which this is one.
            (slope,) = torch.autograd.grad(module.forward(given.clone()).sum(), given)
        units = slope.movedim(1, -1).flatten(0, -2) if slope.ndim > 1 else slope.unsqueeze(-1)
        shares.append((units.abs() < FLAT).float().mean(0) >= SHARE)

    hooks = [part.register_forward_pre_hook(look) for part in network.modules() if isinstance(part, _ACTIVATIONS)]
    try:
        with torch.no_grad():
            network(*inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return torch.cat(shares).float().mean() if shares else None


def input_metrics(features: Iterable[Tensor]) -> Metrics:
    """Of network inputs ``[N, numbers]``, after normalisation: the largest absolute value, and the share of them that have
    one value in all states; nothing of images."""
    numbers = [column.float() for column in features if column.ndim == 2 and column.is_floating_point()]
    if not numbers or len(numbers[0]) < 2:
        return {}
    inputs = torch.cat(numbers, -1)
    constant = (inputs == inputs[0]).all(0).float().mean()
    return {"data/input_abs_max": inputs.abs().max(), "data/input_constant_share": constant}

"""The slowly following copies of networks that TorchRL's losses keep."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn


class TargetNetwork:
    """A target's weights and buffers, under the names of the network that it follows.

    TorchRL's ``SoftUpdate`` does the same in ten times the time, which is a twentieth of a step of SAC's.

    Args:
        net: the network.
        source: its parameters as the loss holds them.
        target: those of the target.
    """

    def __init__(self, net: nn.Module, source: TensorDictBase, target: TensorDictBase) -> None:
        keys = {id(value): key for key, value in source.items(True, True)}
        named = {**dict(net.named_parameters()), **dict(net.named_buffers())}
        self._source = {name: value for name, value in named.items() if id(value) in keys}
        self._tensors = {name: target.get(keys[id(value)]).data for name, value in self._source.items()}

    @torch.no_grad()
    def copy(self) -> None:
        """target ← network."""
        torch._foreach_copy_(list(self._tensors.values()), list(self._source.values()))

    @torch.no_grad()
    def follow(self, tau: float) -> None:
        """target ← (1-τ)·target + τ·network (Lillicrap et al. 2016, arXiv:1509.02971)."""
        torch._foreach_lerp_(list(self._tensors.values()), list(self._source.values()), tau)

    def state_dict(self) -> dict[str, Tensor]:
        """The target's tensors by name."""
        return dict(self._tensors)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Takes them back, in place."""
        for name, tensor in self._tensors.items():
            tensor.copy_(state[name])


def note_large(tau: float, note: Callable[[str], None]) -> None:
    """Says that a target hardly lags behind, where it does."""
    if tau > 0.5:
        note(f"algo.tau={tau:g} moves the target more than half way at each step; 0.005 to 0.05 is usual")

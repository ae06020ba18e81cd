"""The slowly following copies of networks that TorchRL's losses keep."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping

from tensordict import TensorDictBase
from torch import Tensor, nn
from torchrl.objectives import SoftUpdate
from torchrl.objectives.common import LossModule


class TargetNetwork:
    """A target's weights and buffers, under the names of the network that it follows.

    Args:
        net: the network.
        source: its parameters as the loss holds them.
        target: those of the target.
    """

    def __init__(self, net: nn.Module, source: TensorDictBase, target: TensorDictBase) -> None:
        keys = {id(value): key for key, value in source.items(True, True)}
        named = {**dict(net.named_parameters()), **dict(net.named_buffers())}
        self._tensors = {name: target.get(keys[id(value)]).data for name, value in named.items() if id(value) in keys}

    def state_dict(self) -> dict[str, Tensor]:
        """The target's tensors by name."""
        return dict(self._tensors)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Takes them back, in place."""
        for name, tensor in self._tensors.items():
            tensor.copy_(state[name])


def soft_update(loss: LossModule, tau: float, note: Callable[[str], None]) -> SoftUpdate:
    """TorchRL's soft update, target ← (1-τ)·target + τ·network; its warning about a large τ is given in our words."""
    if tau > 0.5:
        note(f"algo.tau={tau:g} moves the target more than half way at each step; 0.005 to 0.05 is usual")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return SoftUpdate(loss, tau=tau)

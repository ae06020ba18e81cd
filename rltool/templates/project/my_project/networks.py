"""The network: what lies between the observation and rltool's heads."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Body(nn.Module):
    """Sees where the point is and, instead of the goal itself, the way there.

    Args:
        inputs: each input's name and its shape without the batch, in the order in which ``forward`` gets them.
        hidden: units of each layer; ``network.kwargs.hidden`` in the config.
    """

    def __init__(self, inputs: dict[str, tuple[int, ...]], hidden: int = 64) -> None:
        super().__init__()
        (size,) = inputs["observation.position"]
        self.layers = nn.Sequential(nn.Linear(2 * size, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh())

    def forward(self, goal: Tensor, position: Tensor) -> Tensor:
        """Features ``[N, hidden]`` of two batches ``[N, 2]``."""
        features: Tensor = self.layers(torch.cat((position, goal - position), -1))
        return features

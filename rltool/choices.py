"""Scores of choices: masked, compared, sampled. All choices of an action lie side by side in one row of scores."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributions import Categorical, Independent
from torch.nn.functional import pad

# The score of what cannot be chosen: finite, so that 0 times it is 0 and not NaN; its probability is exactly 0.
LOWEST = torch.finfo(torch.float32).min


def masked(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Scores ``[…, options]`` with those of invalid options at the lowest number there is."""
    return scores if mask is None else scores.masked_fill(~mask, LOWEST)


def best(scores: Tensor, nvec: Sequence[int]) -> Tensor:
    """The best option of each choice: ``[…, sum(nvec)]`` to ``[…]`` for one choice, ``[…, choices]`` for several."""
    if len(nvec) == 1:
        return scores.argmax(-1)
    return torch.stack([part.argmax(-1) for part in scores.split(list(nvec), -1)], -1)


def gumbel(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Gumbel noise: the :func:`best` of scores plus it is a sample of their softmax (Gumbel 1954)."""
    uniform = torch.rand(*shape, generator=generator).clamp_min(torch.finfo(torch.float32).tiny)
    return -(-uniform.log()).log()


class Choices(Independent[Categorical]):
    """Several independent choices: a softmax over the scores of each.

    log π(a) and the entropy are the sums over the choices.

    Args:
        logits: ``[N, choices, options]``, see :func:`apart`.
    """

    def __init__(self, logits: Tensor, validate_args: bool | None = None) -> None:
        super().__init__(Categorical(logits=logits, validate_args=validate_args), 1, validate_args=validate_args)


def apart(scores: Tensor, nvec: Sequence[int]) -> Tensor:
    """``[…, sum(nvec)]`` scores as ``[…, choices, most options]``, filled up with :data:`LOWEST`."""
    most = max(nvec)
    parts = scores.split(list(nvec), -1)
    return torch.stack([pad(part, (0, most - part.shape[-1]), value=LOWEST) for part in parts], -2)

"""What algorithms that learn from replayed transitions share; each says itself what a gradient step is."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from tensordict import TensorDict
from torch import Tensor

from rltool.algos.base import Algorithm
from rltool.buffers import ReplayBuffer
from rltool.metrics import Metrics
from rltool.optim import Optimizer

Columns = dict[str, Tensor]


def columns(algorithm: Algorithm, drawn: TensorDict) -> tuple[Columns, Columns]:
    """Transitions ``[steps, size]`` as the gradient of an algorithm takes them, for all steps at once.

    Returns:
        now: network inputs, ``action``, ``priority_weight`` (1 for uniform replay).
        following: network inputs, ``reward``, ``terminated``, and ``done``, which is the same: a time limit does not
        cut a target.
    """
    weight = drawn.get("priority_weight", None)
    if weight is None:
        weight = torch.ones(drawn.batch_size, device=drawn.device)
    terminated = drawn["next", "terminated"]
    now = {
        **algorithm.preprocessor(algorithm.leaves(drawn)),
        "action": drawn["action"],
        "priority_weight": weight.float(),
    }
    following = {
        **algorithm.preprocessor(algorithm.leaves(drawn, following=True)),
        "reward": drawn["next", "reward"],
        "terminated": terminated,
        "done": terminated,
    }
    return now, following


def steps(
    count: int,
    size: int,
    *,
    buffer: ReplayBuffer,
    optimizer: Optimizer,
    columns: Callable[[TensorDict], tuple[Columns, Columns]],
    gradient: Callable[[Columns, Columns], tuple[Tensor, Tensor, Tensor]],
    names: Sequence[str],
    follow: Callable[[], object] | None = None,
) -> Metrics:
    """Gradient steps on minibatches that a replay buffer draws; new priorities go back to it.

    Args:
        count, size: how many steps, and transitions for each.
        buffer, optimizer: of the algorithm.
        columns: what ``gradient`` takes, for all steps of a draw at once.
        gradient: of one minibatch: the gradient, flat; a row of scalars; |δ| ``[size]``.
        names: of those scalars.
        follow: called after each step (a target that follows softly).

    Returns:
        The means of the scalars over all steps, the |δ| of the last one, its gradients and the new parameters; nothing
        where no step was due.
    """
    rows: list[Tensor] = []
    for drawn in buffer.draw(count, size):
        now, following = columns(drawn)
        td_errors: list[Tensor] = []
        for step in range(drawn.batch_size[0]):
            direction, row, td_error = gradient(
                {name: column[step] for name, column in now.items()},
                {name: column[step] for name, column in following.items()},
            )
            optimizer.step(direction)
            if follow is not None:
                follow()
            rows.append(row)
            td_errors.append(td_error)
        buffer.update_priority(drawn, torch.stack(td_errors))
    if not rows:
        return {}
    means = dict(zip(names, torch.stack(rows).mean(0), strict=True))
    return {**means, "critic/td_errors": td_errors[-1], **optimizer.histograms(direction)}

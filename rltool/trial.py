"""Short trials of environments with random actions: how many steps a second they make."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from rltool.collect import RandomExplorer, Step
from rltool.spaces import MASK, Array, Leaves

if TYPE_CHECKING:
    from rltool.actions import ActionSpec

# Steps before the clock runs, and the fewest that are timed.
_UNTIMED, _FEWEST = 2, 5


def random_actions(actions: ActionSpec, leaves: Leaves, generator: torch.Generator) -> Array:
    """Random valid actions ``[N, *shape]`` as the environments take them, for leaves ``[N, …]``."""
    explorer = RandomExplorer(actions, masked=MASK in leaves)
    count = len(next(iter(leaves.values())))
    tensors = {key: torch.from_numpy(array.astype(bool)) for key, array in leaves.items() if key == MASK}
    drawn = explorer(tensors, tuple(part[0] for part in explorer.draw(1, count, 0, generator)))
    return actions.to_env(drawn.numpy())


def steps_per_second(
    actions: ActionSpec, reset: Callable[[], Leaves], step: Callable[[Array], Step], seconds: float
) -> float:
    """Steps a second of environments side by side, all of them counted, the choice of actions not.

    Args:
        actions: their action space.
        reset, step: of all of them.
        seconds: how long to try.
    """
    generator, leaves = torch.Generator().manual_seed(0), reset()
    count = len(next(iter(leaves.values())))
    steps, spent = -_UNTIMED, 0.0
    while spent < seconds or steps < _FEWEST:
        action = random_actions(actions, leaves, generator)
        begin = time.perf_counter()
        leaves = step(action).observation
        steps += 1
        if steps > 0:
            spent += time.perf_counter() - begin
    return steps * count / spent

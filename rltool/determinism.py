"""Whether a run repeats: the same seed, machine and versions give the same numbers again, or what keeps them from it."""

from __future__ import annotations

import torch

from rltool.checkpoint import random_state

# What these do with the global generators depends on when each thread comes to them, or on which of them was chosen.
_BY_TIMING = {
    "threads": "environments in threads drew from the global generators, in no fixed order",
    "auto": "env.backend=auto chose by speed, and the environments drew from the global generators, which differs between "
    "backends; name the backend",
}


class Determinism:
    """Watches a run for what the clock decides in it.

    rltool's own random numbers all have generators of their own, so that whatever moves the global ones of Python, NumPy
    and torch between here and :meth:`summary` is an environment or one of its wrappers.

    Args:
        seed: as it was asked for; None: it was drawn.
        backend: ``env.backend`` as it was asked for; None where the environments have none.
        device: where the policy learns.
    """

    def __init__(self, seed: int | None, backend: str | None, device: torch.device) -> None:
        self._seed, self._backend, self._device = seed, backend, device
        self._world = _world()

    def summary(self, seed: int) -> dict[str, object]:
        """What summary.json says: of the seed, the environments and learning, whether they are the same the next time;
        and ``reasons``, for those that are not.

        Args:
            seed: that of the run.
        """
        reasons = {}
        if self._seed is None:
            reasons["seed"] = f"it was drawn; seed={seed} repeats the run"
        if self._backend in _BY_TIMING and _world() != self._world:
            reasons["environments"] = _BY_TIMING[self._backend]
        if self._device.type != "cpu":
            reasons["learning"] = f"on {self._device.type}, sums are added up in no fixed order"
        parts = ("seed", "environments", "learning")
        return {**{part: part not in reasons for part in parts}, "reasons": reasons}


def _world() -> tuple[object, list[int]]:
    """Where the global generators stand."""
    return random_state(), torch.get_rng_state().tolist()

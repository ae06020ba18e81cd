"""Gymnasium environments stepped by several threads of this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from typing import Any, TypeVar

import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from rltool.contract import EnvContract
from rltool.spaces import Array

Result = TypeVar("Result")


class ThreadedVectorEnv:
    """Environments in chunks, each chunk a ``SyncVectorEnv`` with a thread of its own; answers as one of them all would.

    The first chunk is stepped by the calling thread. Every environment is made and stepped by one and the same thread,
    since some (those that draw with OpenGL) do not bear another. Environments that draw from the *global* generators
    of Python or NumPy get their numbers in no fixed order here.

    Args:
        factories: make one environment each.
        threads: how many chunks; more than there are environments are not used.
    """

    def __init__(self, factories: Sequence[Callable[[], EnvContract]], threads: int) -> None:
        parts = [part.tolist() for part in np.array_split(np.arange(len(factories)), min(threads, len(factories)))]
        self._pools = [ThreadPoolExecutor(1) for _ in parts[1:]]
        self._chunks: list[SyncVectorEnv] = []
        try:
            for place, part in enumerate(parts):
                chosen = [factories[index] for index in part]
                make = partial(SyncVectorEnv, chosen, copy=False, autoreset_mode=AutoresetMode.SAME_STEP)
                # One after the other: what making them touches (imports, warnings) belongs to the whole process.
                self._chunks.append(self._pools[place - 1].submit(make).result() if place else make())
        except BaseException:
            self.close()
            raise

    @property
    def envs(self) -> list[Any]:
        """The environments, in their order."""
        return [env for chunk in self._chunks for env in chunk.envs]

    def reset(self, *, seed: Sequence[int]) -> tuple[Any, dict[str, Any]]:
        """Resets each environment at its own seed; the observation as ``SyncVectorEnv`` gives it, no infos."""
        seeds = [part.tolist() for part in np.array_split(np.asarray(seed), len(self._chunks))]
        answers = self._together(
            [partial(chunk.reset, seed=part) for chunk, part in zip(self._chunks, seeds, strict=True)]
        )
        return _joined([observation for observation, _ in answers]), {}

    def step(self, action: Array) -> tuple[Any, Array, Array, Array, dict[str, Any]]:
        """Steps all environments: the five values of ``SyncVectorEnv``; of the infos the final observations alone."""
        actions = np.array_split(action, len(self._chunks))
        answers = self._together([partial(chunk.step, part) for chunk, part in zip(self._chunks, actions, strict=True)])
        observations, rewards, terminated, truncated, infos = zip(*answers, strict=True)
        info: dict[str, Any] = {}
        for name, kind in (("final_obs", object), ("_final_obs", np.bool_)):
            none = [np.zeros(len(reward), kind) for reward in rewards]
            info[name] = np.concatenate([part.get(name, empty) for part, empty in zip(infos, none, strict=True)])
        ends = np.concatenate(terminated), np.concatenate(truncated)
        return _joined(observations), np.concatenate(rewards), *ends, info

    def _together(self, calls: Sequence[Callable[[], Result]]) -> list[Result]:
        """The results of calls, one a chunk, that run at the same time; all have ended when this returns or raises."""
        futures = [pool.submit(call) for pool, call in zip(self._pools, calls[1:], strict=True)]
        try:
            first = calls[0]()
        finally:
            wait(futures)
        return [first, *(future.result() for future in futures)]

    def close(self) -> None:
        """Closes every environment, each in its thread, and ends the threads."""
        for place, chunk in enumerate(self._chunks):
            if place:
                self._pools[place - 1].submit(chunk.close).result()
            else:
                chunk.close()
        for pool in self._pools:
            pool.shutdown()


def _joined(parts: Sequence[Any]) -> Any:
    """Batches one after the other; each an array, or a flat mapping of arrays (see :class:`EnvContract`)."""
    if isinstance(parts[0], Mapping):
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    return np.concatenate(parts)

"""The env group -> a vectorised environment and its specs.

Whatever stands behind it, a vectorised environment here gives flat leaves, resets by itself (Gymnasium's SAME_STEP) and
hands over the true final observation of an episode.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv

from rltool.actions import ActionSpec
from rltool.collect import Behaviour, Collector, Step
from rltool.contract import EnvContract, leaves_of
from rltool.envs import make_env
from rltool.errors import EnvironmentFault
from rltool.schema import GymEnvConfig
from rltool.seeding import Stream, seed_world, seeds
from rltool.spaces import Array, LeafSpec, Leaves
from rltool.threaded import ThreadedVectorEnv

# How worker processes start, said here because importing torchrl changes Python's default: with fork they start at
# once and know what plugins registered. Elsewhere fork is missing or unsafe.
START_METHOD = "fork" if sys.platform == "linux" else "spawn"


def make_env_in_worker(config: GymEnvConfig, index: int, world: int, parent: int) -> EnvContract:
    """:func:`make_env` for a worker process (picklable; Gymnasium calls the first in the parent, too, for the spaces).

    Args:
        config, index: as for :func:`make_env`.
        world: seeds the worker's global generators; those of the parent are seeded already.
        parent: process id of the parent.
    """
    if os.getpid() != parent:
        seed_world(world)
        # Ctrl-C reaches every process of a terminal; when to stop is for the process that saves the checkpoint to say.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    return make_env(config, index)


def usable_cores() -> int:
    """Processor cores that this process may use: what a batch system left it, not all that the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def _worker_reports() -> Iterator[None]:
    """Gymnasium prints the tracebacks of its workers and then raises the same errors here: once is enough."""
    level, gymnasium.logger.min_level = gymnasium.logger.min_level, logging.CRITICAL
    try:
        yield
    finally:
        gymnasium.logger.min_level = level


class VectorEnvBase(ABC):
    """Environments side by side, described by one of them.

    Args:
        config: the env node.
        probe: one of the environments.
        seed: seed of the run.
        session: how many processes worked on this run before: each starts its environments at fresh seeds.

    Attributes:
        id: the full id, with its version.
        resolved_config: the env node with what was found out: the full id, where the mask of actions is.
        leaves, actions: the specs.
    """

    def __init__(self, config: GymEnvConfig, probe: EnvContract, *, seed: int, session: int) -> None:
        self.num_envs = config.num_envs
        self._seeds = seeds(seed, Stream.TRAIN_ENV, config.num_envs, start=session * config.num_envs)
        self.id = probe.spec.id if probe.spec is not None else config.id
        module = config.id.rpartition(":")[0]
        # What has been found out is found out once: the others, and evaluation, are told.
        known = {"id": f"{module}:{self.id}" if module else self.id, "action_mask": probe.mask_source}
        self.resolved_config = config.model_copy(update=known)
        self.leaves: tuple[LeafSpec, ...] = probe.leaves
        self.actions: ActionSpec = probe.actions

    @abstractmethod
    def reset(self) -> Leaves:
        """Starts every environment at its own seed; leaves ``[num_envs, *shape]``."""

    @abstractmethod
    def step(self, action: Array) -> Step:
        """Steps all environments.

        Args:
            action: ``[num_envs, *shape]`` in the environment's units.

        Raises:
            EnvironmentFault: an environment raised, broke its contract, or its worker process ended.
        """

    @abstractmethod
    def close(self) -> None:
        """Closes every environment and ends worker processes."""

    def collector(
        self,
        behaviour: Behaviour,
        *,
        total_frames: int,
        generator: torch.Generator,
        device: torch.device,
        frames: int = 0,
    ) -> Collector:
        """A collector that steps these environments."""
        return Collector(self, behaviour, total_frames=total_frames, generator=generator, device=device, frames=frames)


def restarted(
    observation: Leaves, reward: Array, terminated: Array, truncated: Array, restart: Callable[[Array], Leaves]
) -> Step:
    """The step of environments that do not restart by themselves: those whose episode ended are restarted.

    Args:
        observation: leaves ``[num_envs, *shape]`` after the step.
        reward, terminated, truncated: ``[num_envs]``.
        restart: the first leaves ``[len(ended), *shape]`` of new episodes of the environments with these numbers.
    """
    ended = np.flatnonzero(terminated | truncated)
    if not len(ended):
        return Step(observation, reward, terminated, truncated, ())
    observation = {key: array.copy() for key, array in observation.items()}
    final = [(int(index), {key: array[index].copy() for key, array in observation.items()}) for index in ended]
    for key, array in restart(ended).items():
        observation[key][ended] = array
    return Step(observation, reward, terminated, truncated, final)


class GymVectorEnv(VectorEnvBase):
    """Gymnasium environments in this process, in its threads or in worker processes (``env.backend``).

    Args:
        config, seed, session: as for :class:`VectorEnvBase`.

    Raises:
        ConfigError: the environment cannot be made, or has a space that rltool does not take.
    """

    def __init__(self, config: GymEnvConfig, *, seed: int, session: int = 0) -> None:
        with closing(make_env(config, 0, tell=True)) as probe:
            super().__init__(config, probe, seed=seed, session=session)
        config = self.resolved_config
        self._lost = False  # a worker process ended by itself
        self._env: VectorEnv[Any, Any, Any] | ThreadedVectorEnv
        self._reports = _worker_reports if config.backend == "async" else nullcontext
        if config.backend == "async":
            workers = [
                partial(make_env_in_worker, config, index, world, os.getpid())
                for index, world in enumerate(self._seeds)
            ]
            self._env = AsyncVectorEnv(
                workers, copy=False, autoreset_mode=AutoresetMode.SAME_STEP, context=START_METHOD
            )
            return
        factories = [partial(make_env, config, index) for index in range(config.num_envs)]
        if config.backend == "threads":
            self._env = ThreadedVectorEnv(factories, usable_cores())
        else:
            self._env = SyncVectorEnv(factories, copy=False, autoreset_mode=AutoresetMode.SAME_STEP)

    @staticmethod
    def single(config: GymEnvConfig, index: int, render_mode: str | None = None) -> EnvContract:
        """One of these environments, as evaluation wants it; see :func:`single_env`."""
        return make_env(config, index, render_mode, evaluation=True)

    def reset(self) -> Leaves:
        with self._reports():
            observation, _ = self._env.reset(seed=list(self._seeds))  # type: ignore[arg-type]
        return leaves_of(observation, self.leaves)

    def step(self, action: Array) -> Step:
        try:
            with self._reports():
                observation, reward, terminated, truncated, info = self._env.step(action)
        except (EOFError, ConnectionError) as error:
            self._lost = True
            raise EnvironmentFault(
                f"a worker process of {self.id} ended without an answer: it was killed, ran out of memory, or the environment called exit"
            ) from error
        final: list[tuple[int, Leaves]] = []
        if "final_obs" in info:
            ended = np.flatnonzero(info["_final_obs"])
            final = [(int(index), leaves_of(info["final_obs"][index], self.leaves)) for index in ended]
        return Step(leaves_of(observation, self.leaves), reward, terminated, truncated, final)

    def close(self) -> None:
        if self._lost:
            # Gymnasium's own close waits for the answer that will not come.
            assert isinstance(self._env, AsyncVectorEnv)
            for process in self._env.processes:
                process.terminate()
                process.join()
            self._env.closed = True
        self._env.close()

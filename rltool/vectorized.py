"""The env group -> a vectorised environment and its specs.

Whatever stands behind it, a vectorised environment here gives flat leaves, resets by itself (Gymnasium's SAME_STEP) and
hands over the true final observation of an episode.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import closing
from functools import partial

import numpy as np
import torch

from rltool.actions import ActionSpec
from rltool.collect import Behaviour, Collector, Step
from rltool.contract import EnvContract
from rltool.envs import make_env, remarks
from rltool.local import LocalVectorEnv, ThreadedVectorEnv
from rltool.schema import GymEnvConfig
from rltool.seeding import Stream, seeds
from rltool.spaces import Array, LeafSpec, Leaves
from rltool.workers import WorkerVectorEnv


def usable_cores() -> int:
    """Processor cores that this process may use: what a batch system left it, not all that the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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
        remarks: what a user should know before training, as labels and texts.
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
        self.remarks = remarks(probe.leaves, probe.mask_source, probe.spec)

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
        factories = [partial(make_env, config, index) for index in range(config.num_envs)]
        self._env: LocalVectorEnv | ThreadedVectorEnv | WorkerVectorEnv
        if config.backend == "async":
            self._env = WorkerVectorEnv(config, self.leaves, self._seeds)
        elif config.backend == "threads":
            self._env = ThreadedVectorEnv(factories, usable_cores())
        else:
            self._env = LocalVectorEnv(factories)

    @staticmethod
    def single(config: GymEnvConfig, index: int, render_mode: str | None = None) -> EnvContract:
        """One of these environments, as evaluation wants it; see :func:`single_env`."""
        return make_env(config, index, render_mode, evaluation=True)

    def reset(self) -> Leaves:
        return self._env.reset(self._seeds)

    def step(self, action: Array) -> Step:
        return self._env.step(action)

    def close(self) -> None:
        self._env.close()

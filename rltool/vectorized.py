"""The env group -> a vectorised environment and its specs.

Whatever stands behind it, a vectorised environment here gives flat leaves, resets by itself (Gymnasium's SAME_STEP) and
hands over the true final observation of an episode.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial

import numpy as np
import torch

from rltool.actions import ActionSpec
from rltool.collect import Behaviour, Collector, Step
from rltool.contract import EnvContract
from rltool.envs import make_env, remarks
from rltool.errors import EnvironmentFault, RltoolError
from rltool.local import LocalVectorEnv, ThreadedVectorEnv
from rltool.schema import GymEnvConfig
from rltool.seeding import Stream, seeds, untouched_world
from rltool.simulators import Arrays, unknown_part
from rltool.spaces import Array, LeafSpec, Leaves
from rltool.trial import steps_per_second
from rltool.workers import WorkerVectorEnv

Stepper = LocalVectorEnv | ThreadedVectorEnv | WorkerVectorEnv

# env.backend=auto: how long each backend is tried, how much faster than sync another must be, and the seconds a step of
# one environment from which on a process of its own can pay.
_TRIAL_SECONDS, _WELL_AHEAD, _WORTH_A_PROCESS = 0.2, 1.1, 1e-4


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
        unsaved: the part that keeps the state of the environments from being saved; empty where it can be.
    """

    unsaved = "this kind of environments"

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
    def restart(self) -> Leaves:
        """Starts every environment where its generator stands; leaves ``[num_envs, *shape]``."""

    def read_states(self) -> list[Arrays | None]:
        """The state of each environment in the middle of its episode; None where it cannot be saved."""
        return [None] * self.num_envs

    def write_states(self, states: Sequence[Arrays]) -> None:
        """Puts back what :meth:`read_states` gave, where that was all of them; to be called after a reset.

        Raises:
            EnvironmentFault: they are another environment's, or this kind takes none.
        """
        raise EnvironmentFault(f"{self.id}: {self.unsaved} cannot take up the state of {len(states)} environments")

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
        skip: Callable[[str], object] | None = None,
    ) -> Collector:
        """A collector that steps these environments."""
        return Collector(
            self,
            behaviour,
            total_frames=total_frames,
            generator=generator,
            device=device,
            frames=frames,
            skip=skip,
        )


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
            self.unsaved = unknown_part(probe.env)
        backend = self._fastest() if config.backend == "auto" else config.backend
        self.resolved_config = self.resolved_config.model_copy(update={"backend": backend})
        self._env = self._stepper(backend)

    def _stepper(self, backend: str) -> Stepper:
        config = self.resolved_config
        if backend == "async":
            return WorkerVectorEnv(config, self.leaves, self._seeds)
        factories = [partial(make_env, config, index) for index in range(config.num_envs)]
        if backend == "threads":
            return ThreadedVectorEnv(factories, usable_cores(), config.timeout)
        return LocalVectorEnv(factories)

    def _fastest(self) -> str:
        """Tries the backends, says what came out, and gives the one to use: another than ``sync`` only where it is well
        ahead, since it takes a core from whatever else runs."""
        chosen, reason, failed = "sync", "there is one environment", list[tuple[str, str]]()
        if self.num_envs > 1:
            reason = "there is one core to use"
        if self.num_envs > 1 and usable_cores() > 1:
            with untouched_world():
                speeds = {"sync": self._tried("sync")}
                # Handing a step to a process and back costs more than a fast environment's.
                others = ["threads", *(["async"] if speeds["sync"] < 1 / _WORTH_A_PROCESS else [])]
                for backend in others:
                    try:
                        speeds[backend] = self._tried(backend)
                    except RltoolError as error:  # sync works, so this backend is at fault
                        failed.append(("backend", f"{backend} is left out: {error}"))
            best = max(speeds, key=speeds.__getitem__)
            if speeds[best] > _WELL_AHEAD * speeds["sync"]:
                chosen = best
            reason = ", ".join(f"{name} {speed:,.0f}" for name, speed in speeds.items()) + " steps/s"
        self.remarks = [*self.remarks, ("backend", f"{chosen} (auto: {reason})"), *failed]
        return chosen

    def _tried(self, backend: str) -> float:
        with closing(self._stepper(backend)) as env:
            return steps_per_second(self.actions, partial(env.reset, self._seeds), env.step, _TRIAL_SECONDS)

    @staticmethod
    def single(config: GymEnvConfig, index: int, render_mode: str | None = None) -> EnvContract:
        """One of these environments, as evaluation wants it; see :func:`single_env`."""
        return make_env(config, index, render_mode, evaluation=True)

    def reset(self) -> Leaves:
        return self._env.reset(self._seeds)

    def restart(self) -> Leaves:
        return self._env.reset([None] * self.num_envs)

    def step(self, action: Array) -> Step:
        return self._env.step(action)

    def read_states(self) -> list[Arrays | None]:
        return self._env.read_states()

    def write_states(self, states: Sequence[Arrays]) -> None:
        self._env.write_states(states)

    def close(self) -> None:
        self._env.close()

"""Gymnasium environments in worker processes.

Where processes start afresh, each of them imports this module: it needs little.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import wait
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode
from gymnasium.vector.async_vector_env import _async_worker

from rltool.collect import Step
from rltool.contract import EnvContract, leaves_of
from rltool.envs import make_env
from rltool.errors import ConfigError, EnvironmentFault, Problem, RltoolError
from rltool.schema import GymEnvConfig
from rltool.seeding import seed_world
from rltool.simulators import Arrays
from rltool.spaces import Array, LeafSpec, Leaves

# How worker processes start, said here because importing torchrl changes Python's default: with fork they start at
# once and know what plugins registered. Elsewhere fork is missing or unsafe.
START_METHOD = "fork" if sys.platform == "linux" else "spawn"

# What asks a run to stop: Ctrl-C, a scheduler that ends it, and what one sends ahead of a time limit (not on Windows).
STOP_SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name))


class WorkerVectorEnv:
    """Gymnasium's ``AsyncVectorEnv`` of :class:`EnvContract`; what goes wrong in a worker is raised here, once.

    Args:
        config: the env node.
        leaves: specs of an observation.
        worlds: a seed for the global generators of each worker.

    Raises:
        ConfigError: a worker cannot make the environment.
        EnvironmentFault: here and from ``reset`` and ``step``: an environment raised or broke its contract, or its
            worker ended.
    """

    def __init__(self, config: GymEnvConfig, leaves: tuple[LeafSpec, ...], worlds: Sequence[int]) -> None:
        self._name, self._leaves = config.id.rpartition(":")[2], leaves
        factories = [partial(make_in_worker, config, index, world, os.getpid()) for index, world in enumerate(worlds)]
        with self._reports():
            self._env = _Workers(factories)

    def reset(self, seeds: Sequence[int | None]) -> Leaves:
        """Starts every environment at its own seed, or where its generator stands; leaves ``[num_envs, *shape]``."""
        with self._reports():
            observation, _ = self._env.reset(seed=list(seeds))
        return leaves_of(observation, self._leaves)

    def step(self, action: Array) -> Step:
        """One step of every environment; those whose episode ends with it start the next one."""
        with self._reports():
            observation, reward, terminated, truncated, info = self._env.step(action)
        final: list[tuple[int, Leaves]] = []
        if "final_obs" in info:
            ended = np.flatnonzero(info["_final_obs"])
            final = [(int(index), leaves_of(info["final_obs"][index], self._leaves)) for index in ended]
        return Step(leaves_of(observation, self._leaves), reward, terminated, truncated, final)

    def read_states(self) -> list[Arrays | None]:
        """The state of each environment."""
        with self._reports():
            return list(self._env.call("read_state"))

    def write_states(self, states: Sequence[Arrays]) -> None:
        """Puts back what :meth:`read_states` gave."""
        with self._reports():
            self._env.call("write_state", states)

    def close(self) -> None:
        """Ends the workers."""
        self._env.close()

    @contextmanager
    def _reports(self) -> Iterator[None]:
        # Gymnasium prints the tracebacks of its workers and then raises the same errors here: once is enough.
        level, gymnasium.logger.min_level = gymnasium.logger.min_level, logging.CRITICAL
        try:
            yield
        except (EOFError, ConnectionError) as error:
            self._env.lost = True
            raise EnvironmentFault(f"{self._who_ended()} without an answer") from error
        finally:
            gymnasium.logger.min_level = level

    def _who_ended(self) -> str:
        """Which workers have ended, and how; they may still be on their way out."""
        ready = wait([process.sentinel for process in self._env.processes], timeout=1)
        ended = []
        for index, process in enumerate(self._env.processes):
            if process.sentinel in ready:
                process.join(timeout=1)
            if process.exitcode is not None:
                how = f"exit code {process.exitcode}"
                if process.exitcode < 0:
                    how = f"{signal.Signals(-process.exitcode).name}: it was killed, or ran out of memory"
                ended.append(f"the worker process of environment {index} ({self._name}) ended ({how})")
        return ", ".join(ended) or f"a worker process of {self._name} ended"


class _Workers(AsyncVectorEnv):
    """Gymnasium's worker processes.

    Attributes:
        lost: whether one of them has ended before its time.
    """

    lost = False

    def __init__(self, factories: Sequence[Callable[[], EnvContract]]) -> None:
        super().__init__(
            factories,
            copy=False,
            worker=_work,  # type: ignore[arg-type]  # Gymnasium's annotation lacks the semaphore
            autoreset_mode=AutoresetMode.SAME_STEP,
            context=START_METHOD,
        )

    def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
        """Ends the workers."""
        if not (self.lost or terminate):
            super().close_extras(timeout)
            return
        # Gymnasium's own waits for the answer that will not come, and asks where workers do not listen.
        for process in self.processes:
            process.kill()
            process.join()


def make_in_worker(config: GymEnvConfig, index: int, world: int, parent: int) -> EnvContract:
    """:func:`make_env` for a worker process (picklable; Gymnasium calls the first in the parent, too, for the spaces).

    Args:
        config, index: as for :func:`make_env`.
        world: seeds the worker's global generators; those of the parent are seeded already.
        parent: process id of the parent.
    """
    if os.getpid() == parent:
        return make_env(config, index)
    seed_world(world)
    # These reach every process of a group (Ctrl-C on a terminal, timeout, a scheduler); when to stop is for the process
    # that saves the checkpoint to say. A worker ends with its parent, whose end of the pipe then closes.
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    try:
        return make_env(config, index)
    except ConfigError as error:
        if ":" in config.id:
            raise
        raise ConfigError(
            Problem(
                "env.id",
                f"{config.id} is registered in this process only: worker processes start afresh and do not know it",
                f"Use env.id=module:{config.id} with the module that registers it, or env.backend=sync",
            )
        ) from error


def _work(
    index: int,
    make: Callable[[], EnvContract],
    pipe: Any,
    parent_pipe: Any,
    shared_memory: Any,
    errors: Any,
    autoreset_mode: AutoresetMode,
    semaphore: Any,
) -> None:
    """Gymnasium's worker, which tells the parent also what keeps the environment from being made."""
    try:
        env = make()
    except RltoolError as error:
        pipe.recv()
        errors.put((index, type(error), str(error), ""))
        pipe.send((None, False))
        return
    _async_worker(index, lambda: env, pipe, parent_pipe, shared_memory, errors, autoreset_mode, semaphore)

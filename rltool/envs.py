"""The env group -> a vectorised environment and its specs.

Whatever stands behind it, a vectorised environment here gives flat leaves, resets by itself (Gymnasium's SAME_STEP) and
hands over the true final observation of an episode.
"""

from __future__ import annotations

import inspect
import logging
import os
import re
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from copy import deepcopy
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import gymnasium
import numpy as np
import torch
from gymnasium.error import Error as GymnasiumError
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv

from rltool.actions import ActionSpec, action_spec
from rltool.collect import Behaviour, Collector, Step
from rltool.errors import ConfigError, EnvironmentFault, Problem
from rltool.schema import GymEnvConfig
from rltool.seeding import Stream, seed_world, seeds
from rltool.spaces import Array, LeafSpec, Leaves, flatten, leaf_specs

if TYPE_CHECKING:
    from rltool.schema import EnvConfig

# How many steps of each environment are checked in full; after that only what costs nothing.
CHECKED_STEPS = 100

# A module that an environment may lack -> the extra of rltool that brings it.
EXTRAS = {"box2d": "box2d", "gymnasium[box2d]": "box2d", "ale_py": "atari", "ale-py": "atari", "minigrid": "minigrid"}

# How worker processes start, said here because importing torchrl changes Python's default: with fork they start at
# once and know what plugins registered. Elsewhere fork is missing or unsafe.
START_METHOD = "fork" if sys.platform == "linux" else "spawn"

GymEnv = gymnasium.Env[Any, Any]


class EnvContract(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Holds one environment to Gymnasium's contract and names what breaks it.

    Rewards come out as Python floats; the info mapping is dropped, since gathering it costs more than a simulator step.
    """

    def __init__(self, env: GymEnv, name: str, index: int) -> None:
        super().__init__(env)
        self._name = f"environment {index} ({name}, {type(env.unwrapped).__name__})"
        for space in ("observation_space", "action_space"):
            if not isinstance(getattr(env, space, None), gymnasium.Space):
                raise EnvironmentFault(f"{self._name}: it declares no {space}. Set self.{space} in its __init__")
        self._specs = leaf_specs(env.observation_space, name)
        parameters = inspect.signature(env.unwrapped.reset).parameters
        if not {"seed", "options"} <= set(parameters) and not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            raise EnvironmentFault(f"{self._name}: reset() must take seed and options, found ({', '.join(parameters)})")
        self._plain = self._specs[0].shape if len(self._specs) == 1 and self._specs[0].key == ("observation",) else None
        self._steps = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, object] | None = None
    ) -> tuple[object, dict[str, object]]:
        try:
            result = self.env.reset(seed=seed, options=options)
        except (Exception, SystemExit) as error:
            raise EnvironmentFault(f"{self._name}: reset() {_raised(error)}") from error
        if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):
            raise EnvironmentFault(f"{self._name}: reset() must return (observation, info), found {_shown(result)}")
        self._check(result[0], "reset()")
        return result[0], {}

    def step(self, action: object) -> tuple[object, float, bool, bool, dict[str, object]]:
        try:
            result = self.env.step(action)
        except (Exception, SystemExit) as error:
            raise EnvironmentFault(f"{self._name}: step {self._steps + 1} {_raised(error)}") from error
        if not (isinstance(result, tuple) and len(result) == 5):
            raise EnvironmentFault(
                f"{self._name}: step() must return (observation, reward, terminated, truncated, info), found {_shown(result)}"
            )
        observation, reward, terminated, truncated, _ = result
        self._steps += 1
        if self._plain is None or self._steps <= CHECKED_STEPS or getattr(observation, "shape", None) != self._plain:
            self._check(observation, f"step {self._steps}")
        if terminated or truncated:
            # An environment may fill one array again and again; its last observation must outlive the reset that follows.
            observation = deepcopy(observation)
        return (
            observation,
            reward if type(reward) is float else self._number(reward),
            bool(terminated),
            bool(truncated),
            {},
        )

    def _check(self, observation: object, when: str) -> None:
        try:
            leaves = flatten(observation, self._specs)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise EnvironmentFault(
                f"{self._name}: the observation of {when} lacks a part of its space {self.env.observation_space}: {error!r}"
            ) from error
        for spec in self._specs:
            found = leaves[spec.key]
            if found.shape != spec.shape or not np.can_cast(found.dtype, spec.dtype, casting="same_kind"):
                raise EnvironmentFault(
                    f"{self._name}: {spec.name} of {when} must have shape {spec.shape} and a type that fits {spec.dtype}, "
                    f"found shape {found.shape} of {found.dtype}. Declare the right observation_space or mend the environment"
                )
            if spec.kind == "discrete" and not spec.start <= int(found) < spec.start + spec.n:
                raise EnvironmentFault(
                    f"{self._name}: {spec.name} of {when} must be in {spec.start} … {spec.start + spec.n - 1}, found {int(found)}"
                )

    def _number(self, reward: object) -> float:
        array = np.asarray(reward)
        if array.size != 1 or array.dtype.kind not in "fiub":
            raise EnvironmentFault(
                f"{self._name}: the reward of step {self._steps} must be one number, found {reward!r}"
            )
        return float(array.reshape(()))


def _raised(error: BaseException) -> str:
    """What an environment raised, and the line of its code."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"raised {type(error).__name__}: {error}{where}"


def _shown(result: object) -> str:
    if isinstance(result, tuple):
        return f"a tuple of {len(result)}: ({', '.join(type(part).__name__ for part in result)})"
    return type(result).__name__


def make_env(config: GymEnvConfig, index: int, render_mode: str | None = None, *, tell: bool = False) -> EnvContract:
    """One environment with the wrappers of the config.

    Args:
        config: the env node.
        index: which of the environments side by side it is, for messages.
        render_mode: Gymnasium's.
        tell: print Gymnasium's warnings about the id; one of several equal environments is enough.

    Raises:
        ConfigError: the id, an argument or a wrapper is wrong, or a package is missing.
        EnvironmentFault: it is none of Gymnasium's kind.
    """
    env = _gym_make(config, render_mode, tell=tell)
    for position, wrapper in enumerate(config.wrappers):
        path = f"env.wrappers[{position}]"
        module, _, name = wrapper.name.rpartition(":")
        try:
            cls = getattr(import_user_module(module or "gymnasium.wrappers", f"{path}.name"), name)
        except AttributeError as error:
            raise ConfigError(
                Problem(
                    f"{path}.name", f"expected a wrapper of gymnasium.wrappers or module:Class, found {wrapper.name}"
                )
            ) from error
        try:
            env = cls(env, **wrapper.kwargs)
        except (TypeError, ValueError, AssertionError, GymnasiumError) as error:
            raise ConfigError(Problem(path, f"{wrapper.name} cannot be applied to {config.id}: {error}")) from error
    return EnvContract(env, env.spec.id if env.spec is not None else config.id, index)


def single_env(config: EnvConfig, index: int, render_mode: str | None = None) -> EnvContract:
    """One environment of the group, whatever its kind, with Gymnasium's interface (evaluation steps these).

    Raises:
        ConfigError: it cannot be made.
    """
    return cast("type[GymVectorEnv]", config.target()).single(config, index, render_mode)  # type: ignore[arg-type]


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


def _gym_make(config: GymEnvConfig, render_mode: str | None, *, tell: bool) -> GymEnv:
    module, _, env_id = config.id.rpartition(":")
    if module:
        import_user_module(module, "env.id")
    arguments: dict[str, object] = dict(config.kwargs)
    if config.max_episode_steps is not None:
        arguments["max_episode_steps"] = config.max_episode_steps
    if render_mode is not None:
        arguments["render_mode"] = render_mode
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            env = gymnasium.make(env_id, disable_env_checker=True, **arguments)  # type: ignore[arg-type]
        if tell:
            for text in dict.fromkeys(str(warning.message) for warning in caught):
                _tell(text)
        return env
    except gymnasium.error.DependencyNotInstalled as error:
        raise ConfigError(
            Problem("env.id", f"{config.id} needs a package that is not installed: {error}", _extra(str(error)))
        ) from error
    except gymnasium.error.NamespaceNotFound as error:
        raise ConfigError(
            Problem(
                "env.id",
                f"expected a registered id, found {config.id}: {error}",
                _extra(env_id.replace("ALE/", "ale_py ")),
            )
        ) from error
    except (gymnasium.error.UnregisteredEnv, gymnasium.error.DeprecatedEnv) as error:
        raise ConfigError(
            Problem("env.id", f"expected a registered id, found {config.id}: {error}", _extra(str(error)))
        ) from error
    except ImportError as error:
        raise ConfigError(Problem("env.id", f"{config.id} cannot be imported: {error}", _extra(str(error)))) from error
    except TypeError as error:
        if "unexpected keyword argument" not in str(error) and "required positional argument" not in str(error):
            raise EnvironmentFault(f"{config.id}: making it {_raised(error)}") from error
        raise ConfigError(Problem("env.kwargs", f"{config.id} does not take these arguments: {error}")) from error
    except GymnasiumError as error:
        raise ConfigError(Problem("env.id", f"{config.id} cannot be made: {error}")) from error
    except (Exception, SystemExit) as error:
        raise EnvironmentFault(f"{config.id}: making it {_raised(error)}") from error


def _tell(text: str) -> None:
    """Hands a warning of Gymnasium's (an old version of an id, …) on to the user, without its colours."""
    plain = re.sub(r"\x1b\[\d+m", "", text).removeprefix("WARN: ")
    print(f"warning: {plain}", file=sys.stderr)


def _extra(message: str) -> str:
    for module, extra in EXTRAS.items():
        if module in message.lower():
            return f"Install the extra: pip install 'rltool[{extra}]'"
    return ""


def import_user_module(name: str, path: str) -> object:
    """Imports a module that a config names, also from the working directory.

    Raises:
        ConfigError: there is no such module, or it raises while it is imported.
    """
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)
    try:
        return import_module(name)
    except ImportError as error:
        raise ConfigError(
            Problem(
                path,
                f"module {name} cannot be imported: {error}",
                _extra(name) or "Install it, or run where its file lies",
            )
        ) from error
    except (Exception, SystemExit) as error:
        raise ConfigError(Problem(path, f"importing module {name} {_raised(error)}")) from error


@contextmanager
def _worker_reports() -> Iterator[None]:
    """Gymnasium prints the tracebacks of its workers and then raises the same errors here: once is enough."""
    level, gymnasium.logger.min_level = gymnasium.logger.min_level, logging.CRITICAL
    try:
        yield
    finally:
        gymnasium.logger.min_level = level


class GymVectorEnv:
    """Gymnasium environments side by side, in this process or in worker processes.

    Args:
        config: the env node.
        seed: seed of the run.
        session: how many processes worked on this run before: each starts its environments at fresh seeds.

    Attributes:
        id: the full id, with its version.
        resolved_config: the env node with the full id.
        leaves, actions: the specs.

    Raises:
        ConfigError: the environment cannot be made, or has a space that rltool does not take.
    """

    def __init__(self, config: GymEnvConfig, *, seed: int, session: int = 0) -> None:
        self.num_envs = config.num_envs
        self._seeds = seeds(seed, Stream.TRAIN_ENV, config.num_envs, start=session * config.num_envs)
        with closing(make_env(config, 0, tell=True)) as probe:
            self.id = probe.spec.id if probe.spec is not None else config.id
            module = config.id.rpartition(":")[0]
            self.resolved_config = config.model_copy(update={"id": f"{module}:{self.id}" if module else self.id})
            self.observation_space, self.action_space = probe.observation_space, probe.action_space
            self.leaves: tuple[LeafSpec, ...] = leaf_specs(probe.observation_space, self.id)
            self.actions: ActionSpec = action_spec(probe.action_space, self.id)
        self._lost = False  # a worker process ended by itself
        self._env: VectorEnv[Any, Any, Any]
        self._reports = _worker_reports if config.backend == "async" else nullcontext
        if config.backend == "async":
            workers = [
                partial(make_env_in_worker, config, index, world, os.getpid())
                for index, world in enumerate(self._seeds)
            ]
            self._env = AsyncVectorEnv(
                workers, copy=False, autoreset_mode=AutoresetMode.SAME_STEP, context=START_METHOD
            )
        else:
            factories = [partial(make_env, config, index) for index in range(config.num_envs)]
            self._env = SyncVectorEnv(factories, copy=False, autoreset_mode=AutoresetMode.SAME_STEP)

    @staticmethod
    def single(config: GymEnvConfig, index: int, render_mode: str | None = None) -> EnvContract:
        """One of these environments; see :func:`single_env`."""
        return make_env(config, index, render_mode)

    def reset(self) -> Leaves:
        """Starts every environment at its own seed; leaves ``[num_envs, *shape]``."""
        with self._reports():
            observation, _ = self._env.reset(seed=list(self._seeds))  # type: ignore[arg-type]
        return flatten(observation, self.leaves)

    def step(self, action: Array) -> Step:
        """Steps all environments.

        Args:
            action: ``[num_envs, *shape]`` in the environment's units.

        Raises:
            EnvironmentFault: an environment raised, broke its contract, or its worker process ended.
        """
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
            final = [(int(index), flatten(info["final_obs"][index], self.leaves)) for index in ended]
        return Step(flatten(observation, self.leaves), reward, terminated, truncated, final)

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

    def close(self) -> None:
        """Closes every environment and ends worker processes."""
        if self._lost:
            # Gymnasium's own close waits for the answer that will not come.
            assert isinstance(self._env, AsyncVectorEnv)
            for process in self._env.processes:
                process.terminate()
                process.join()
            self._env.closed = True
        self._env.close()

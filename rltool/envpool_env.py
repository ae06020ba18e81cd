"""EnvPool: environments stepped by threads of C++ (extra: envpool)."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from pydantic import JsonValue

from rltool.collect import Step
from rltool.contract import EnvContract
from rltool.envs import no_pictures
from rltool.errors import ConfigError, EnvironmentFault, Problem
from rltool.importing import import_user_module, raised
from rltool.schema import GymEnvConfig
from rltool.spaces import MASK, Array, Leaves, nth
from rltool.vectorized import VectorEnvBase, restarted, usable_cores
from rltool.wording import did_you_mean, nearest

# Arguments that rltool gives, and the key that says what.
_OURS = {
    "num_envs": "env.num_envs",
    "batch_size": "env.num_envs",
    "max_episode_steps": "env.max_episode_steps",
    "seed": "seed",
    "env_seed": "seed",
}
# EnvPool's time limit where there is none.
_ENDLESS = 2**31 - 1
# What makes training easier and would falsify the return of an evaluation.
_TRAINING_ONLY = {"reward_clip": False, "episodic_life": False}


class EnvPoolVectorEnv(VectorEnvBase):
    """EnvPool's environments side by side.

    ``env.kwargs.num_threads`` says how many threads step them; by default as many as there are cores to use.

    Args:
        config, seed, session: as for :class:`rltool.vectorized.GymVectorEnv`.

    Raises:
        ConfigError: EnvPool is not installed, or does not have this environment or an argument of it.
    """

    unsaved = "EnvPool"

    def __init__(self, config: GymEnvConfig, *, seed: int, session: int = 0) -> None:
        with closing(_contract(config, 0)) as contract:
            super().__init__(config, contract, seed=seed, session=session)
            self._contract = contract
        self._pool: Any = None

    @staticmethod
    def single(config: GymEnvConfig, index: int, render_mode: str | None = None) -> EnvContract:
        """One of these environments, as evaluation wants it: whole games, true rewards."""
        if render_mode is not None:
            hint = "With env.backend=sync Gymnasium's own environment of this name runs instead, if it has one"
            raise no_pictures(render_mode, f"{config.id} of EnvPool draws no pictures", hint)
        off = {name: value for name, value in _TRAINING_ONLY.items() if name in config.kwargs}
        return _contract(config.model_copy(update={"kwargs": config.kwargs | off}), index)

    def reset(self) -> Leaves:
        self.close()  # EnvPool takes seeds only while it makes environments
        self._pool = _made(self.resolved_config, self._seeds, min(self.num_envs, usable_cores()))
        return self.restart()

    def restart(self) -> Leaves:
        return self._leaves(*self._called("reset"))

    def step(self, action: Array) -> Step:
        observation, reward, terminated, truncated, info = self._called("step", action)
        # Those that ended, and only those, are stepped once more, which is EnvPool's own restart: the action is ignored.
        # Its reset(ids) would begin a new game where only a life is lost (episodic_life).
        return restarted(
            self._leaves(observation, info), reward, terminated, truncated, lambda ended: self._restart(ended, action)
        )

    def _restart(self, ended: Array, action: Array) -> Leaves:
        observation, *_, info = self._called("step", action[ended], ended.astype(np.int32))
        return self._leaves(observation, info, len(ended))

    def _leaves(self, observation: object, info: Mapping[str, object], count: int | None = None) -> Leaves:
        return self._contract.batched(observation, info, self.num_envs if count is None else count)

    def _called(self, method: str, *args: Array) -> Any:
        try:
            return getattr(self._pool, method)(*args)
        except BaseException as error:
            raise EnvironmentFault(f"EnvPool's {self.id}: {method}() {raised(error)}") from error

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None


class EnvPoolGym(gymnasium.Env[Any, Any]):
    """One EnvPool environment with Gymnasium's interface.

    Attributes:
        stacked: frames that its observations stack.
    """

    def __init__(self, config: GymEnvConfig) -> None:
        self._config = config
        self._pool = _made(config, [0], 1)
        self.observation_space = _without_placeholders(self._pool.observation_space)
        self.action_space = self._pool.action_space
        settings = self._pool.spec.config
        self.stacked = getattr(settings, "stack_num", getattr(settings, "frame_stack", 1))
        self.spec = EnvSpec(
            config.id.rpartition(":")[2],
            reward_threshold=getattr(settings, "reward_threshold", None),
            max_episode_steps=settings.max_episode_steps if settings.max_episode_steps < _ENDLESS else None,
            # Of games; MuJoCo's frame_skip is part of an environment.
            kwargs={"frameskip": settings.frame_skip} if hasattr(settings, "stack_num") else {},
        )

    def reset(
        self, *, seed: int | None = None, options: dict[str, object] | None = None
    ) -> tuple[Any, dict[str, object]]:
        """A new episode; with a seed, of an environment made anew, since EnvPool takes it only then."""
        super().reset(seed=seed, options=options)
        if seed is not None:
            self._pool.close()
            self._pool = _made(self._config, [seed], 1)
        observation, info = self._pool.reset()
        return nth(observation, 0), _mask_of(info)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, object]]:
        """One step."""
        observation, reward, terminated, truncated, info = self._pool.step(np.asarray(action)[None])
        return nth(observation, 0), float(reward[0]), bool(terminated[0]), bool(truncated[0]), _mask_of(info)

    def close(self) -> None:
        """Closes the environment."""
        self._pool.close()


def _without_placeholders(space: spaces.Space[Any]) -> spaces.Space[Any]:
    """A space without the bounds that EnvPool writes where there are none: the smallest and largest numbers of a type."""
    if isinstance(space, spaces.Dict):
        return spaces.Dict({name: _without_placeholders(part) for name, part in space.spaces.items()})
    if not isinstance(space, spaces.Box) or np.dtype(space.dtype).kind != "f":
        return space
    limits: list[Any] = [np.finfo(np.float32), np.finfo(np.float64)]
    none = [value for limit in limits for value in (limit.tiny, -limit.tiny, limit.max, -limit.max)]
    low, high = (
        np.where(np.isin(space.low, none), -np.inf, space.low),
        np.where(np.isin(space.high, none), np.inf, space.high),
    )
    return spaces.Box(low.astype(space.dtype), high.astype(space.dtype), space.shape, space.dtype.type)


def _contract(config: GymEnvConfig, index: int) -> EnvContract:
    return EnvContract(
        EnvPoolGym(config), config.id, index, keys=config.observation_keys, action_mask=config.action_mask
    )


def _mask_of(info: Mapping[str, Any]) -> dict[str, object]:
    """What rltool reads of the infos of one environment: the mask of actions."""
    return {name: info[name][0] for name in MASK if name in info}


def _made(config: GymEnvConfig, seeds: Sequence[int], threads: int) -> Any:
    """EnvPool's environments, one a seed.

    Raises:
        ConfigError: EnvPool is not installed, or does not have this environment or an argument of it.
    """
    envpool = import_user_module("envpool", "env.backend")
    task = config.id.rpartition(":")[2].removeprefix("ALE/")
    known = envpool.list_all_envs()
    if task not in known:
        raise ConfigError(
            Problem(
                "env.id",
                f"EnvPool has no {task}",
                did_you_mean(nearest(task, known)) or "env.backend=sync takes every environment of Gymnasium's",
            )
        )
    try:
        defaults = envpool.make_spec(task).config._asdict()
        if defaults["max_num_players"] != 1:
            raise ConfigError(Problem("env.id", f"EnvPool's {task} is a game of several players, and a policy is one"))
        _check_arguments(task, config.kwargs, defaults)
        limit = {} if config.max_episode_steps is None else {"max_episode_steps": config.max_episode_steps}
        arguments = {"num_threads": threads, **config.kwargs, **limit}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the bounds of its spaces lose digits as they become float32
            pool = envpool.make_gymnasium(task, num_envs=len(seeds), seed=list(seeds), **arguments)
            _ = pool.observation_space, pool.action_space
        return pool
    except (AssertionError, ImportError, RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(Problem("env.kwargs", f"EnvPool cannot make {task}: {error}")) from error


def _check_arguments(task: str, arguments: Mapping[str, JsonValue], defaults: Mapping[str, JsonValue]) -> None:
    """Arguments by name and type, since EnvPool itself answers with the signature of a C++ constructor.

    Raises:
        ConfigError: all that is wrong.
    """
    problems = []
    for name, value in arguments.items():
        default, path = defaults.get(name), f"env.kwargs.{name}"
        if name in _OURS:
            problems.append(Problem(path, f"expected none, found {value}", f"Give {_OURS[name]} instead"))
        elif name not in defaults:
            known = sorted(defaults.keys() - _OURS.keys())
            hint = did_you_mean(nearest(name, known)) or f"It takes {', '.join(known)}"
            problems.append(Problem(path, f"EnvPool's {task} takes no such argument", hint))
        elif type(value) is not type(default) and not (type(default) is float and type(value) is int):
            kind = type(default).__name__
            problems.append(Problem(path, f"expected a value of type {kind} (such as {default!r}), found {value!r}"))
    if problems:
        raise ConfigError(problems)

"""Single environments: made by id, wrapped, held to their contract."""

from __future__ import annotations

import math
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar, cast

import gymnasium
from gymnasium.envs.registration import EnvSpec, WrapperSpec
from gymnasium.error import Error as GymnasiumError
from pydantic import JsonValue

from rltool.contract import EnvContract, GymEnv
from rltool.errors import ConfigError, EnvironmentFault, Problem
from rltool.importing import base_among, extra_for, import_user_module, missing_package, raised
from rltool.schema import GymEnvConfig, WrapperConfig
from rltool.spaces import MASK, LeafSpec
from rltool.wording import did_you_mean, nearest

if TYPE_CHECKING:
    from rltool.schema import EnvConfig
    from rltool.vectorized import GymVectorEnv

Made = TypeVar("Made")


# Wrappers whose statistics belong to the algorithm, and the key that does the same.
_STATISTICS = {
    "NormalizeObservation": "algo.normalize_observation=true, whose statistics",
    "NormalizeReward": "algo.scale_reward=true (PPO), whose statistics",
}


def make_env(
    config: GymEnvConfig, index: int, render_mode: str | None = None, *, tell: bool = False, evaluation: bool = False
) -> EnvContract:
    """One environment with the wrappers of the config.

    Args:
        config: the env node.
        index: which of the environments side by side it is, for messages.
        render_mode: Gymnasium's.
        tell: print Gymnasium's warnings about the id; one of several equal environments is enough.
        evaluation: as evaluation wants it: some wrappers are for training only (``eval`` of a wrapper).

    Raises:
        ConfigError: the id, an argument or a wrapper is wrong, or a package is missing.
        EnvironmentFault: it is none of Gymnasium's kind.
    """
    env = wrapped(config, render_mode, tell=tell, evaluation=evaluation)
    name = env.spec.id if env.spec is not None else config.id
    return EnvContract(env, name, index, keys=config.observation_keys, action_mask=config.action_mask)


def wrapped(
    config: GymEnvConfig, render_mode: str | None = None, *, tell: bool = False, evaluation: bool = False
) -> GymEnv:
    """The environment with its wrappers, as Gymnasium has it; see :func:`make_env`."""
    env = _made(config, render_mode, tell=tell)
    for position, wrapper in enumerate(config.wrappers):
        if evaluation and wrapper.eval is False:
            continue
        changes = wrapper.eval if evaluation and isinstance(wrapper.eval, dict) else {}
        env = _wrap(env, wrapper, wrapper.kwargs | changes, f"env.wrappers[{position}]", config.id)
    return env


def _made(config: GymEnvConfig, render_mode: str | None, *, tell: bool) -> GymEnv:
    make: Callable[..., GymEnv] = partial(gymnasium.make, disable_env_checker=True)
    if render_mode is None:
        return gym_made(config, make, tell=tell)
    chosen = config.kwargs.get("render_mode", render_mode)
    if chosen != render_mode:
        key = "render" if render_mode == "human" else "video"
        problem = f"expected {render_mode} with {key}=true, found {chosen}"
        raise ConfigError(Problem("env.kwargs.render_mode", problem, f"Give env.kwargs.render_mode={render_mode}"))
    hint = f"If it is yours: take render_mode in __init__, name {render_mode} in metadata['render_modes'], draw in render()"
    try:
        env = gym_made(config, partial(make, render_mode=render_mode), tell=tell)
    except ConfigError as error:
        if "render_mode" not in str(error):
            raise
        raise no_pictures(render_mode, f"{config.id} cannot be watched: it takes no render_mode", hint) from error
    modes = env.metadata.get("render_modes") or []
    if render_mode == "rgb_array" and render_mode not in modes:
        env.close()
        found = f"only {', '.join(map(str, modes))}" if modes else "none"
        raise no_pictures(
            render_mode,
            f"{config.id} draws no pictures: expected rgb_array among its render modes, found {found}",
            hint,
        )
    return env


def no_pictures(render_mode: str, problem: str, hint: str) -> ConfigError:
    """The refusal of what was asked of an environment that cannot be watched in this way."""
    return ConfigError(Problem("render" if render_mode == "human" else "video", problem, hint))


def _wrap(env: GymEnv, wrapper: WrapperConfig, kwargs: dict[str, JsonValue], path: str, env_id: str) -> GymEnv:
    module, _, name = wrapper.name.rpartition(":")
    home = import_user_module(module or "gymnasium.wrappers", f"{path}.name")
    try:
        cls = getattr(home, name)
    except ImportError as error:  # gymnasium imports some of its wrappers at the first look
        raise missing_package(path, name, error) from error
    except AttributeError as error:
        known = [] if module else [known for known in dir(home) if isinstance(getattr(home, known), type)]
        raise ConfigError(
            Problem(
                f"{path}.name",
                f"expected a wrapper of gymnasium.wrappers or module:Class, found {wrapper.name}",
                did_you_mean(nearest(name, known)),
            )
        ) from error
    if (base := base_among(cls, _STATISTICS, "gymnasium")) is not None:
        raise ConfigError(
            Problem(
                f"{path}.name",
                f"{name} keeps statistics that no checkpoint would hold, different in each environment and in evaluation",
                f"Use {_STATISTICS[base]} are saved with the policy",
            )
        )
    if not (isinstance(cls, type) and issubclass(cls, gymnasium.Wrapper)):
        raise ConfigError(Problem(f"{path}.name", f"expected a gymnasium.Wrapper, found {wrapper.name}"))
    try:
        made: GymEnv = cls(env, **{key: _tuples(value) for key, value in kwargs.items()})
    except (ImportError, gymnasium.error.DependencyNotInstalled) as error:
        raise missing_package(path, wrapper.name, error) from error
    except (TypeError, ValueError, AssertionError, GymnasiumError) as error:
        raise ConfigError(Problem(path, f"{wrapper.name} cannot be applied to {env_id}: {error}")) from error
    except BaseException as error:
        raise ConfigError(Problem(path, f"{wrapper.name} cannot be applied to {env_id}: it {raised(error)}")) from error
    return made


def _tuples(value: JsonValue) -> object:
    """YAML knows no tuples, and some of Gymnasium's wrappers take nothing else."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def remarks(leaves: Sequence[LeafSpec], mask_source: str, spec: EnvSpec | None) -> list[tuple[str, str]]:
    """What a user should know before training, as labels and texts: what a frame is, where a mask comes from.

    Args:
        leaves: the specs of the observations.
        mask_source: where the mask of actions is found.
        spec: Gymnasium's of the environment with its wrappers.
    """
    rows, skipped = [], 1
    if spec is not None:
        # ALE's own argument, and those of Gymnasium's wrappers. (MuJoCo's frame_skip is part of an environment.)
        named = [spec.kwargs.get("frameskip"), *(_skip(wrapper) for wrapper in spec.additional_wrappers)]
        skipped = math.prod(count for count in named if isinstance(count, int))
    if skipped > 1:
        rows.append(("a frame", f"is {skipped} of the simulator's, here and in every count of frames"))
    if any(leaf.key == MASK for leaf in leaves):
        sources = {"info": "in the info", "method": "by action_masks()"}
        source = sources.get(mask_source, f"observed as {mask_source}")
        rows.append(("mask", f"of actions, {source}: only valid ones are taken"))
    return rows


def _skip(wrapper: WrapperSpec) -> object:
    names = {"AtariPreprocessing": "frame_skip", "MaxAndSkipObservation": "skip"}
    return (wrapper.kwargs or {}).get(names.get(wrapper.name, ""))


def single_env(config: EnvConfig, index: int, render_mode: str | None = None) -> EnvContract:
    """One environment of the group, whatever its kind, with Gymnasium's interface (evaluation steps these).

    Raises:
        ConfigError: it cannot be made.
    """
    return cast("type[GymVectorEnv]", config.target()).single(config, index, render_mode)  # type: ignore[arg-type]


# Names that the package gymnasium-robotics registers.
_ROBOTICS = ("Fetch", "Hand", "AntMaze", "PointMaze", "AdroitHand", "FrankaKitchen")


def gym_made(config: GymEnvConfig, make: Callable[..., Made], *, tell: bool = False) -> Made:
    """What a Gymnasium id stands for.

    Args:
        config: the env node.
        make: ``gymnasium.make`` or a function like it; called with the id and the arguments of the config.
        tell: print Gymnasium's warnings about the id.

    Raises:
        ConfigError: the id or an argument is wrong, or a package is missing.
        EnvironmentFault: the environment's own code raised.
    """
    module, _, env_id = config.id.rpartition(":")
    if module:
        import_user_module(module, "env.id")
    arguments: dict[str, object] = dict(config.kwargs)
    if config.max_episode_steps is not None:
        arguments["max_episode_steps"] = config.max_episode_steps
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            env = make(env_id, **arguments)
        if tell:
            for text in dict.fromkeys(str(each.message) for each in caught if _is_for_users(each)):
                _tell(text)
        return env
    except gymnasium.error.DependencyNotInstalled as error:
        raise missing_package("env.id", config.id, error) from error
    except gymnasium.error.NamespaceNotFound as error:
        raise ConfigError(
            Problem(
                "env.id",
                f"expected a registered id, found {config.id}: {error}",
                extra_for(env_id.replace("ALE/", "ale_py ")),
            )
        ) from error
    except (gymnasium.error.UnregisteredEnv, gymnasium.error.DeprecatedEnv) as error:
        text = f"expected a registered id, found {config.id}: {error}"
        hint = extra_for(str(error)) or _instead(env_id)
        if module and (own := _ids_of(module)):
            text, hint = f"module {module} registers no {env_id}", f"It registers {', '.join(own)}"
        raise ConfigError(Problem("env.id", text, hint)) from error
    except ImportError as error:
        hint = extra_for(str(error)) or _instead(env_id)
        raise ConfigError(Problem("env.id", f"{config.id} cannot be imported: {error}", hint)) from error
    except TypeError as error:
        if "unexpected keyword argument" not in str(error) and "required positional argument" not in str(error):
            raise EnvironmentFault(f"{config.id}: making it {raised(error)}") from error
        raise ConfigError(Problem("env.kwargs", f"{config.id} does not take these arguments: {error}")) from error
    except GymnasiumError as error:
        raise ConfigError(Problem("env.id", f"{config.id} cannot be made: {error}")) from error
    except BaseException as error:
        # dm_control reads MuJoCo's model field by field, and knows only those of certain releases.
        hint = ". Its dm_control does not know this MuJoCo: pip install 'mujoco<4'" if "MjModel" in str(error) else ""
        raise EnvironmentFault(f"{config.id}: making it {raised(error)}{hint}") from error


def _instead(env_id: str) -> str:
    """What an id of another time or package is called now; empty where nothing is known of it."""
    name, _, version = env_id.rpartition("-v")
    versions = [
        spec.version or 0 for spec in gymnasium.registry.values() if spec.name == name and spec.version is not None
    ]
    if versions and version.isdecimal() and max(versions) > int(version):
        return f"Use {name}-v{max(versions)}"
    if old := re.fullmatch(r"(\w+?)(?:NoFrameskip|Deterministic)", name):
        return f"Use env=atari env.game={old[1]}"
    if name.startswith(_ROBOTICS):
        return f"pip install gymnasium-robotics, and env.id=gymnasium_robotics:{env_id} (or a newer version of it)"
    return ""


def _ids_of(module: str) -> list[str]:
    """The ids whose environments a module, or a part of it, holds."""
    homes = {
        name: spec.entry_point.partition(":")[0]
        if isinstance(spec.entry_point, str)
        else getattr(spec.entry_point, "__module__", "")
        for name, spec in gymnasium.registry.items()
    }
    return [name for name, home in homes.items() if f"{home}.".startswith(f"{module}.")]


def _is_for_users(warning: warnings.WarningMessage) -> bool:
    """Gymnasium colours what it says of an id; other deprecations are between libraries."""
    return not issubclass(warning.category, DeprecationWarning) or "\x1b" in str(warning.message)


def _tell(text: str) -> None:
    """Hands a warning of Gymnasium's (an old version of an id, …) on to the user, without its colours."""
    plain = re.sub(r"\x1b\[\d+m", "", text).removeprefix("WARN: ")
    print(f"warning: {plain}", file=sys.stderr)

"""``rltool env``: makes an environment and says what it is, what rltool makes of it, and what is wrong with it."""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from rltool.composition import read_overrides
from rltool.errors import ConfigError, Problem, RltoolError
from rltool.launch import check_command
from rltool.schema import EnvCheckConfig, GymEnvConfig, TorchRLEnvConfig

if TYPE_CHECKING:
    import gymnasium

    from rltool.cli import Options
    from rltool.vectorized import GymVectorEnv

    Env = gymnasium.Env[Any, Any]

# Steps of one environment that are looked at in full; the rollout after that is checked as training is.
_CLOSE_LOOK = 200


@dataclass
class _Findings:
    """What is said about an environment.

    Attributes:
        rows: label and text, in the order in which they are printed.
        faults: what is wrong; a training run would suffer from it.
        debug: show the traceback of what an environment raises.
    """

    debug: bool
    rows: list[tuple[str, str]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def row(self, label: str, text: object) -> None:
        """One line of the report."""
        self.rows.append((label, str(text)))

    def fault(self, text: str) -> None:
        """One thing that is wrong, said once."""
        if text not in self.faults:
            self.faults.append(text)

    @contextmanager
    def catching(self, what: str) -> Iterator[None]:
        """Turns whatever the environment's code raises into a fault that names the place."""
        try:
            yield
        except ConfigError:
            raise
        except RltoolError as error:
            self.fault(str(error))
        except Exception as error:  # the environment is the user's own code and may raise anything
            if self.debug:
                traceback.print_exc()
            frame = traceback.extract_tb(error.__traceback__)[-1]
            text = str(error).strip() or "no message"
            self.fault(f"{what} raised {type(error).__name__}: {text} ({frame.filename}:{frame.lineno})")

    def print(self) -> int:
        """Prints everything; returns the exit code, 1 where something is wrong."""
        rows = (
            self.rows
            + [("", "")] * bool(self.faults)
            + [("wrong" if not i else "", text) for i, text in enumerate(self.faults)]
        )
        width = max(len(label) for label, _ in rows)
        for label, text in rows:
            first, *more = text.splitlines() or [""]
            print(f"{label:<{width}}  {first}".rstrip())
            for line in more:
                print(f"{'':<{width}}  {line}".rstrip())
        if not self.faults:
            print(f"{'wrong':<{width}}  nothing found")
        return int(bool(self.faults))


def main(options: Options) -> int:
    """Runs the command; returns the exit code: 0, 1 where the environment is faulty, 2 where it cannot be made."""
    files = options.files()
    line = read_overrides(options.overrides, files, name="env")
    config = check_command(EnvCheckConfig, line, files, "env")

    # TorchRL sets the level of its messages when it is imported; only after that can it be lowered.
    import torchrl.envs  # noqa: F401

    from rltool.devices import quieten_libraries

    quieten_libraries()
    findings = _Findings(config.debug)
    if isinstance(config.env, GymEnvConfig):
        _gymnasium(config, config.env, findings)
    elif isinstance(config.env, TorchRLEnvConfig):
        _torchrl(config, config.env, findings)
    else:
        findings.row("environment", f"kind {config.env.kind}, from a plugin: nothing is known about how to look at it")
    return findings.print()


def _gymnasium(config: EnvCheckConfig, node: GymEnvConfig, findings: _Findings) -> None:
    from rltool.envs import single_env

    env = single_env(node, 0)
    try:
        _spaces(env, node, findings)
        with findings.catching("the environment"):
            _close_look(env, config, findings)
        with findings.catching("the environment"):
            findings.row("TorchRL's check", _specs_check(env, findings))
    finally:
        with suppress(Exception):  # a fault in close() is no news after the others
            env.close()
    if findings.faults:
        return  # a rollout would only show the same again
    with findings.catching("the environment"):
        vector = cast("GymVectorEnv", node.build(seed=config.seed))
        try:
            findings.row("random rollout", _rollout(vector, config))
        finally:
            vector.close()


def _spaces(env: Env, node: GymEnvConfig, findings: _Findings) -> None:
    from rltool.actions import action_spec
    from rltool.spaces import leaf_specs

    spec = env.spec
    name = spec.id if spec is not None else node.id
    limit = spec.max_episode_steps if spec is not None else None
    threshold = spec.reward_threshold if spec is not None else None
    findings.row("environment", f"{name}, {node.num_envs} side by side ({node.backend})")
    findings.row("time limit", f"{limit:,} steps" if limit is not None else "none")
    findings.row("solved at", f"a mean return of {threshold:g}" if threshold is not None else "not said")
    findings.row("observations", env.observation_space)
    findings.row("  as leaves", "\n".join(str(leaf) for leaf in leaf_specs(env.observation_space, name)))
    findings.row("actions", env.action_space)
    try:
        findings.row("  for a policy", action_spec(env.action_space, name))
    except ConfigError as error:
        findings.fault(str(error))


def _close_look(env: Env, config: EnvCheckConfig, findings: _Findings) -> None:
    """Steps one environment with random actions and looks at everything it answers."""
    import numpy as np

    first, _ = env.reset(seed=config.seed)
    findings.row("an observation", _shown(first))
    env.action_space.seed(config.seed)
    findings.row("an action", _shown(env.action_space.sample()))
    again, _ = env.reset(seed=config.seed)
    if not _equal(first, again):
        findings.fault(
            "the same seed gives different first observations. Draw from self.np_random, and call super().reset(seed=seed)"
        )
    observation, rewards, ended = again, [], 0
    for step in range(min(config.steps, _CLOSE_LOOK)):
        if not env.observation_space.contains(observation):
            findings.fault(
                f"the observation at step {step} is not in its space: {_shown(observation)}. {_why(env, observation)}"
            )
            break
        if not _finite(observation):
            findings.fault(f"the observation at step {step} is not finite: {_shown(observation)}")
            break
        observation, reward, terminated, truncated, _ = env.step(env.action_space.sample())
        rewards.append(float(reward))
        if not np.isfinite(rewards[-1]):
            findings.fault(f"the reward at step {step} is {reward}")
            break
        if terminated or truncated:
            ended += 1
            observation, _ = env.reset()
    if rewards:
        findings.row(
            "rewards", f"{min(rewards):g} … {max(rewards):g} in {len(rewards):,} random steps, {ended} episodes ended"
        )


def _specs_check(env: Env, findings: _Findings) -> str:
    from torchrl.envs import GymWrapper
    from torchrl.envs.utils import check_env_specs

    try:
        check_env_specs(GymWrapper(env), seed=0)
    except Exception as error:  # the check raises whatever TorchRL or the environment raises
        text = " ".join(str(error).split())
        findings.fault(f"TorchRL's check_env_specs: {type(error).__name__}: {text[:300]}")
        return "failed"
    return "check_env_specs passed"


def _rollout(env: GymVectorEnv, config: EnvCheckConfig) -> str:
    """Random actions on all environments, as training would take them."""
    import numpy as np
    import torch

    generator = torch.Generator().manual_seed(config.seed)
    env.reset()
    returns, lengths = np.zeros(env.num_envs), np.zeros(env.num_envs, dtype=int)
    ended: list[tuple[float, int]] = []
    terminated = truncated = steps = 0
    began = time.perf_counter()
    while steps < config.steps:
        answer = env.step(env.actions.to_env(env.actions.random(env.num_envs, generator).numpy()))
        steps += env.num_envs
        returns += answer.reward
        lengths += 1
        terminated += int(answer.terminated.sum())
        truncated += int((answer.truncated & ~answer.terminated).sum())
        for index in np.flatnonzero(answer.terminated | answer.truncated):
            ended.append((float(returns[index]), int(lengths[index])))
            returns[index], lengths[index] = 0.0, 0
    text = f"{steps:,} steps at {steps / (time.perf_counter() - began):,.0f} steps/s; "
    if not ended:
        return f"{text}no episode ended (longest so far: {lengths.max():,} steps)"
    scores, sizes = [score for score, _ in ended], [size for _, size in ended]
    return (
        f"{text}{len(ended)} episodes ended ({terminated} terminated, {truncated} truncated)\n"
        f"return {np.mean(scores):,.2f} ({min(scores):,.2f} … {max(scores):,.2f}), "
        f"length {np.mean(sizes):,.1f} ({min(sizes):,} … {max(sizes):,})"
    )


def _torchrl(config: EnvCheckConfig, node: TorchRLEnvConfig, findings: _Findings) -> None:
    import torch
    from torchrl.envs.utils import check_env_specs

    from rltool.importing import import_user_module

    module, _, name = node.entry_point.partition(":")
    make = getattr(import_user_module(module, "env.entry_point"), name, None)
    if not callable(make):
        raise ConfigError(Problem("env.entry_point", f"there is no callable {name!r} in the module {module}"))
    torch.manual_seed(config.seed)
    with findings.catching("the environment"):
        env = make(**node.kwargs)
        findings.row("environment", f"{node.entry_point}, {type(env).__name__}")
        findings.row("observations", env.observation_spec)
        findings.row("actions", env.action_spec)
        findings.row("reward", env.reward_spec)
        check_env_specs(env)
        findings.row("TorchRL's check", "check_env_specs passed")
        batch = env.rollout(config.steps, break_when_any_done=False)
        reward = batch["next", "reward"]
        findings.row(
            "random rollout",
            f"{batch.numel():,} steps, rewards {reward.min():g} … {reward.max():g}, {int(batch['next', 'done'].sum())} episodes ended",
        )
        env.close()


def _shown(value: object) -> str:
    """An observation or an action, short: numbers of a small array, shape and range of a large one."""
    import numpy as np

    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {_shown(item)}" for key, item in value.items())
    if isinstance(value, tuple):
        return ", ".join(_shown(item) for item in value)
    array = np.asarray(value)
    if array.dtype == object or array.ndim == 0:
        return str(value)
    if array.size > 24:
        return f"{array.dtype} array {array.shape}, {array.min():g} … {array.max():g}"
    return np.array2string(array, precision=3, suppress_small=True, max_line_width=70)


def _why(env: Env, observation: object) -> str:
    """Why a Box does not contain an observation; nothing for other spaces."""
    import numpy as np
    from gymnasium.spaces import Box

    space = env.observation_space
    if not isinstance(space, Box) or not isinstance(observation, np.ndarray):
        return ""
    if observation.shape != space.shape:
        return f"Its shape is {observation.shape}, the space's {space.shape}"
    if not np.can_cast(observation.dtype, space.dtype):
        return f"Its type is {observation.dtype}, the space's {space.dtype}"
    outside = np.argwhere((observation < space.low) | (observation > space.high))
    if not len(outside):
        return ""
    at = tuple(int(index) for index in outside[0])
    return f"At {list(at)} it is {observation[at]:g}, the bounds are {space.low[at]:g} … {space.high[at]:g}"


def _finite(value: object) -> bool:
    import numpy as np

    if isinstance(value, Mapping):
        return all(_finite(item) for item in value.values())
    if isinstance(value, tuple):
        return all(_finite(item) for item in value)
    array = np.asarray(value)
    return array.dtype.kind not in "fc" or bool(np.isfinite(array).all())


def _equal(left: object, right: object) -> bool:
    import numpy as np

    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return left.keys() == right.keys() and all(_equal(left[key], right[key]) for key in left)
    if isinstance(left, tuple) and isinstance(right, tuple):
        return len(left) == len(right) and all(map(_equal, left, right))
    return bool(np.array_equal(np.asarray(left), np.asarray(right)))

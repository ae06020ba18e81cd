"""A close look at an environment: what it is, what rltool makes of it, and what is wrong with it (``rltool env``)."""

from __future__ import annotations

import math
import re
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.spaces import Box
from gymnasium.utils.env_checker import check_env
from gymnasium.wrappers import TransformAction
from torchrl.envs import GymWrapper
from torchrl.envs.utils import check_env_specs

from rltool.contract import EnvContract
from rltool.envs import remarks, single_env
from rltool.errors import ConfigError, RltoolError
from rltool.schema import EnvCheckConfig, GymEnvConfig, TorchRLEnvConfig
from rltool.spaces import Array
from rltool.torchrl_env import make_torchrl
from rltool.trial import random_actions
from rltool.vectorized import GymVectorEnv

Env = gymnasium.Env[Any, Any]
Space = gymnasium.Space[Any]

# Steps of one environment that are looked at in full; the rollout after that is checked as training is.
_CLOSE_LOOK = 200


@dataclass
class Findings:
    """What is said about an environment.

    Attributes:
        rows: label and text, in the order in which they are printed.
        faults: what is wrong; a training run would suffer from it.
        warnings: what Gymnasium advises against; nothing that stops training.
        debug: show the traceback of what an environment raises.
    """

    debug: bool
    rows: list[tuple[str, str]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

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
        wrong = self.faults or ["nothing found"]
        rows = [*self.rows, *[("", "")] * bool(self.faults), *_labelled("wrong", wrong)]
        rows += _labelled("warning" if len(self.warnings) == 1 else "warnings", self.warnings)
        width = max(len(label) for label, _ in rows)
        for label, text in rows:
            first, *more = text.splitlines() or [""]
            print(f"{label:<{width}}  {first}".rstrip())
            for line in more:
                print(f"{'':<{width}}  {line}".rstrip())
        return int(bool(self.faults))


def _labelled(label: str, texts: list[str]) -> list[tuple[str, str]]:
    """Rows of which the first alone bears the label."""
    return [(label if not index else "", text) for index, text in enumerate(texts)]


def look_at_gymnasium(config: EnvCheckConfig, node: GymEnvConfig, findings: Findings) -> None:
    """Looks at a Gymnasium environment: its spaces, its answers, the checks of TorchRL and Gymnasium, a random rollout."""
    env = single_env(node, 0)
    name = f"environment 0 ({env.spec.id if env.spec is not None else node.id}, {type(env.unwrapped).__name__})"
    try:
        _spaces(env, node, findings)
        with findings.catching(name):
            _close_look(env, name, config, findings)
            masked = env.mask_source != "none"
            text = "not possible, it knows no masks" if masked else _specs_check(env.env, name, findings)
            findings.row("TorchRL's check", text)
    finally:
        env.close()
    if config.check == "full":
        with findings.catching(name):
            findings.row("Gymnasium's check", _gymnasiums_check(config, node, name, findings))
    if findings.faults:
        return  # a rollout would only show the same again
    with (
        findings.catching("the environment"),
        closing(cast("GymVectorEnv", node.build(seed=config.seed))) as vector,
    ):
        findings.row("random rollout", _rollout(vector, config))


def _spaces(env: EnvContract, node: GymEnvConfig, findings: Findings) -> None:
    spec = env.spec
    name = spec.id if spec is not None else node.id
    limit = spec.max_episode_steps if spec is not None else None
    threshold = spec.reward_threshold if spec is not None else None
    findings.row("environment", f"{name}, {node.num_envs} side by side ({node.backend})")
    findings.row("time limit", f"{limit:,} steps" if limit is not None else "none")
    findings.row("solved at", f"a mean return of {threshold:g}" if threshold is not None else "not said")
    findings.row("observations", env.env.observation_space)
    findings.row("  as leaves", "\n".join(str(leaf) for leaf in env.leaves))
    findings.row("actions", env.action_space)
    findings.row("  for a policy", env.actions)
    for label, text in remarks(env.leaves, env.mask_source, spec):
        findings.row(label, text)


class _Seen(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Remembers what an environment observed.

    Attributes:
        observation: the last one.
    """

    def reset(self, **arguments: Any) -> Any:
        """As the environment's."""
        result = self.env.reset(**arguments)
        self.observation = result[0] if isinstance(result, tuple) and result else None
        return result

    def step(self, action: Any) -> Any:
        """As the environment's."""
        result = self.env.step(action)
        self.observation = result[0] if isinstance(result, tuple) and result else None
        return result


def _close_look(env: EnvContract, name: str, config: EnvCheckConfig, findings: Findings) -> None:
    """Steps one environment with random actions and looks at everything it answers.

    Raises:
        EnvironmentFault: the answer breaks Gymnasium's contract, or there is none.
    """
    space = env.env.observation_space
    env.env = seen = _Seen(env.env)  # what the environment itself observes, before it becomes leaves
    generator = torch.Generator().manual_seed(config.seed)

    env.reset(seed=config.seed)
    first = seen.observation
    findings.row("an observation", _shown(first))
    casts = list(_casts(space, first))
    if casts:
        findings.row("  cast", "\n".join(casts))
    observed, _ = env.reset(seed=config.seed)
    if not _equal(first, seen.observation):
        findings.fault(
            f"{name}: the same seed gives different first observations. Draw from self.np_random, and call super().reset(seed=seed)"
        )
    rewards, ended = [], 0
    for step in range(min(config.steps, _CLOSE_LOOK)):
        observation = seen.observation
        if not _finite(observation):
            findings.fault(
                f"{name}: the observation at step {step} is not finite: {_shown(observation)}. Look for what divides by 0 or overflows"
            )
            break
        outside = _outside(space, observation)
        if outside or not space.contains(_cast(space, observation)):
            findings.fault(
                f"{name}: the observation at step {step} is not in its space: {_shown(observation)}. "
                f"{outside}Widen observation_space, or clip what is observed"
            )
            break
        single = {key: array[None] for key, array in env.as_leaves(observed).items()}
        action = random_actions(env.actions, single, generator)[0]
        if not step:
            findings.row("an action", _shown(action))
        observed, reward, terminated, truncated, _ = env.step(action)
        rewards.append(reward)
        if not math.isfinite(reward):
            findings.fault(f"{name}: the reward at step {step} is {reward}. Look for what divides by 0 or overflows")
            break
        if terminated or truncated:
            ended += 1
            observed, _ = env.reset()
    if rewards:
        findings.row(
            "rewards", f"{min(rewards):g} … {max(rewards):g} in {len(rewards):,} random steps, {ended} episodes ended"
        )


def _specs_check(env: Env, name: str, findings: Findings) -> str:
    """What became of TorchRL's check."""
    if isinstance(env.action_space, Box) and env.action_space.shape == ():
        # TorchRL would hand over one number in an array of shape (1,).
        env = TransformAction(env, lambda action: np.reshape(action, ()), env.action_space)
    # TorchRL has no specs for some spaces that rltool does take, such as a Tuple of unlike parts.
    impossible = "not possible, TorchRL has no specs for these spaces"
    try:
        wrapped = GymWrapper(env)
    except Exception as error:
        return f"{impossible}: {_one_line(error)}"
    try:
        check_env_specs(wrapped, seed=0)
    except NotImplementedError:
        return impossible
    except Exception as error:  # the check raises whatever TorchRL or the environment raises
        findings.fault(f"{name}: TorchRL's check_env_specs: {type(error).__name__}: {_one_line(error)[:300]}")
        return "failed"
    return "check_env_specs passed"


def _gymnasiums_check(config: EnvCheckConfig, node: GymEnvConfig, name: str, findings: Findings) -> str:
    """What became of Gymnasium's check of a fresh environment, without wrappers, as the checker wants it."""
    made = single_env(node, 0)
    try:
        made.unwrapped.action_space.seed(config.seed)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                # Rendering would open windows, and training needs none.
                check_env(made.unwrapped, skip_render_check=True)
                failed = False
            except Exception as error:
                if not Path(traceback.extract_tb(error.__traceback__)[-1].filename).name.endswith("env_checker.py"):
                    raise  # the environment's own code
                findings.fault(f"{name}: Gymnasium's check_env: {_one_line(error)}")
                failed = True
    finally:
        made.close()
    # Its logger colours them; what other libraries warn of in the meantime is not about the environment.
    texts = [re.sub(r"\x1b\[\d+m", "", str(warning.message)) for warning in caught]
    findings.warnings += dict.fromkeys(text.removeprefix("WARN: ") for text in texts if text.startswith("WARN: "))
    return "failed" if failed else "check_env passed"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _rollout(env: GymVectorEnv, config: EnvCheckConfig) -> str:
    """Random actions on all environments, as training would take them."""
    generator = torch.Generator().manual_seed(config.seed)
    leaves = env.reset()
    returns, lengths = np.zeros(env.num_envs), np.zeros(env.num_envs, dtype=int)
    ended: list[tuple[float, int]] = []
    terminated = truncated = steps = 0
    began = time.perf_counter()
    while steps < config.steps:
        answer = env.step(random_actions(env.actions, leaves, generator))
        leaves = answer.observation
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


def look_at_torchrl(config: EnvCheckConfig, node: TorchRLEnvConfig | GymEnvConfig, findings: Findings) -> None:
    """Looks at a TorchRL environment, or at one with transforms: its specs, TorchRL's check, a random rollout."""
    torch.manual_seed(config.seed)
    with findings.catching("the environment"):
        env = make_torchrl(node, 0, tried=True)
        env.set_seed(config.seed)
        name = node.id if isinstance(node, GymEnvConfig) else node.entry_point
        findings.row("environment", f"{name}, {type(env).__name__}")
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
    if config.check == "full":
        findings.row("Gymnasium's check", "is for Gymnasium environments")


def _shown(value: object) -> str:
    """An observation or an action, short: numbers of a small array, shape and range of a large one."""
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


def _parts(space: Space, value: object, name: str = "") -> Iterator[tuple[str, Box, Array]]:
    """The Box parts of an observation: where each lies, its space and its numbers."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        parts = space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces)
        for key, part in parts:
            yield from _parts(part, cast("Any", value)[key], f"{name}.{key}".removeprefix("."))
    elif isinstance(space, spaces.Box):
        yield name, space, np.asarray(value)


def _casts(space: Space, observation: object) -> Iterator[str]:
    """The parts of an observation that have another type than their space."""
    for name, box, numbers in _parts(space, observation):
        if numbers.dtype != box.dtype:
            what = f"{name} from {numbers.dtype} to the {box.dtype} of its space".lstrip()
            yield f"{what}: fine here, wrong to Gymnasium's check"


def _cast(space: Space, observation: object) -> object:
    """An observation with every part in the type of its space."""
    if isinstance(space, spaces.Dict):
        return {key: _cast(part, cast("Any", observation)[key]) for key, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_cast(part, cast("Any", observation)[index]) for index, part in enumerate(space.spaces))
    return np.asarray(observation, space.dtype) if isinstance(space, spaces.Box) else observation


def _outside(space: Space, observation: object) -> str:
    """The first number of an observation that is beyond its bounds, as a sentence; empty where it is none of a Box."""
    for name, box, found in _parts(space, observation):
        # Rounding to the type of the space may bring a number back onto its bound; whole numbers would wrap around.
        numbers = found.astype(box.dtype) if np.issubdtype(box.dtype, np.floating) else found
        for at in np.argwhere((numbers < box.low) | (numbers > box.high)):
            index = tuple(int(part) for part in at)
            where = f"At {name}{list(index)} it" if index else f"{name or 'It'}"
            return f"{where} is {numbers[index]:g}, the bounds are {box.low[index]:g} … {box.high[index]:g}. "
    return ""


def _finite(value: object) -> bool:

    if isinstance(value, Mapping):
        return all(_finite(item) for item in value.values())
    if isinstance(value, tuple):
        return all(_finite(item) for item in value)
    array = np.asarray(value)
    return array.dtype.kind not in "fc" or bool(np.isfinite(array).all())


def _equal(left: object, right: object) -> bool:

    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return left.keys() == right.keys() and all(_equal(left[key], right[key]) for key in left)
    if isinstance(left, tuple) and isinstance(right, tuple):
        return len(left) == len(right) and all(map(_equal, left, right))
    return bool(np.array_equal(np.asarray(left), np.asarray(right)))

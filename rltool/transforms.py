"""Gymnasium environments as TorchRL's, and TorchRL transforms around either (``env.transforms``)."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import torch
from pydantic import JsonValue
from tensordict import TensorDict, TensorDictBase
from torchrl.data import Binary, Bounded, Categorical, Composite, MultiCategorical, TensorSpec, Unbounded
from torchrl.envs import Compose, EnvBase, Transform, TransformedEnv

from rltool.actions import ActionSpec
from rltool.contract import EnvContract, leaves_of
from rltool.envs import wrapped
from rltool.errors import ConfigError, EnvironmentFault, Problem
from rltool.importing import base_among, extra_for, import_user_module, raised
from rltool.schema import EnvConfig, GymEnvConfig, TransformConfig
from rltool.spaces import MASK, OBSERVATION, Array, Key, LeafSpec, parts_of
from rltool.torchrl_specs import spec_of
from rltool.wording import did_you_mean, nearest

# Transforms that would be wrong here without a word: what they do, and what to use.
_STATISTICS = "keeps statistics of its own, which evaluation would not have"
_NORMALISE = "Use algo.normalize_observation and algo.scale_reward"
_REFUSED = {
    "VecNorm": (_STATISTICS, _NORMALISE),
    "VecNormV2": (_STATISTICS, _NORMALISE),
    "FrameSkipTransform": (
        "steps on after an episode has ended",
        "Use env.wrappers=[{name: MaxAndSkipObservation, kwargs: {skip: 4}}]",
    ),
}
# Keys of TorchRL's data beside those of the observation.
_TORCHRLS = {"action", "done", "next", "reward", "terminated", "truncated"}


class ContractEnv(EnvBase):  # type: ignore[misc]
    """A Gymnasium environment, held to its contract, as a TorchRL environment.

    An entry of a Dict observation has its own key, any other observation is ``observation``; the mask of actions is
    ``action_mask`` wherever it came from. Categories and choices count from 0, and an action is flat. (TorchRL's own
    ``GymWrapper`` drops the ``start`` of a Discrete and takes no Tuple.)

    Attributes:
        contract: the environment.
    """

    def __init__(self, contract: EnvContract) -> None:
        super().__init__(device=torch.device("cpu"), batch_size=torch.Size([]))
        self.contract = contract
        self._actions: ActionSpec = contract.actions
        self._next_seed: int | None = None
        spaces = parts_of(contract.env.observation_space)
        taken = _TORCHRLS & {key_of(leaf)[0] for leaf in contract.leaves}
        if taken:
            raise ConfigError(
                Problem(
                    "env.transforms",
                    f"expected an observation without the keys of TorchRL's own, found {', '.join(sorted(taken))}",
                    "Rename it with a Gymnasium wrapper (env.wrappers)",
                )
            )
        self.observation_spec = Composite()
        for leaf in contract.leaves:
            mask = Binary(shape=leaf.shape, dtype=torch.bool) if leaf.kind == "mask" else None
            self.observation_spec[key_of(leaf)] = mask or spec_of(spaces[leaf.key])
        self.action_spec = _action_spec(contract.actions)
        self.reward_spec = Unbounded((1,))
        flag = Categorical(2, shape=(1,), dtype=torch.bool)
        self.full_done_spec = Composite(
            {name: flag.clone() for name in ("done", "terminated", "truncated")}, shape=torch.Size([])
        )

    def _set_seed(self, seed: int | None) -> None:
        self._next_seed = seed

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: object) -> TensorDictBase:
        del tensordict, kwargs
        seed, self._next_seed = self._next_seed, None
        return self._observed(self.contract.reset(seed=seed)[0])

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        observation, reward, terminated, truncated, _ = self.contract.step(self._to_env(tensordict["action"].numpy()))
        following = self._observed(observation)
        following["reward"] = torch.tensor([reward])
        flags = {"terminated": terminated, "truncated": truncated, "done": terminated or truncated}
        for name, flag in flags.items():
            following[name] = torch.tensor([flag])
        return following

    def _to_env(self, action: Array) -> Array:
        if self._actions.continuous:
            return action.reshape(self._actions.shape).astype(self._actions.dtype)
        (chosen,) = self._actions.to_env(action[None])
        return np.asarray(chosen)

    def _observed(self, observation: object) -> TensorDictBase:
        state = TensorDict({}, [])
        leaves = leaves_of(observation, self.contract.leaves)
        for leaf in self.contract.leaves:
            value = leaves[leaf.key]
            if leaf.kind == "discrete":
                value = value - np.reshape(leaf.start, leaf.shape)
            state[key_of(leaf)] = torch.tensor(np.asarray(value, leaf.dtype))  # a copy: the array may be used again
        return state

    def close(self, *, raise_if_closed: bool = True) -> None:
        """Closes the environment."""
        super().close(raise_if_closed=raise_if_closed)
        self.contract.close()


def key_of(leaf: LeafSpec) -> Key:
    """Where a leaf lies in TorchRL's data: an entry of an observation has its own key there."""
    return leaf.key if leaf.key in (OBSERVATION, MASK) else leaf.key[1:]


def _action_spec(actions: ActionSpec) -> TensorSpec:
    if actions.kind == "discrete":
        return Categorical(actions.nvec[0])
    if actions.kind == "multi_discrete":
        return MultiCategorical(actions.nvec)
    if actions.kind == "multi_binary":
        return Binary(actions.size // 2, dtype=torch.int8)
    if not np.isfinite([*actions.low, *actions.high]).any():
        return Unbounded((actions.size,))
    return Bounded(torch.tensor(actions.low), torch.tensor(actions.high), (actions.size,), dtype=torch.float32)


def gym_env(
    config: GymEnvConfig, index: int, render_mode: str | None, *, tell: bool = False, evaluation: bool = False
) -> ContractEnv:
    """An environment of ``env=gym`` for transforms; arguments and errors are those of :func:`rltool.envs.make_env`.

    ``env.observation_keys`` is for what the transforms give; they themselves see all that a network could take.
    """
    env = wrapped(config, render_mode, tell=tell, evaluation=evaluation)
    name = env.spec.id if env.spec is not None else config.id
    skip = config.observation_keys is not None
    return ContractEnv(EnvContract(env, name, index, action_mask=config.action_mask, skip=skip))


def transformed(base: EnvBase, config: EnvConfig, *, evaluation: bool = False, tried: bool = False) -> EnvBase:
    """The environment with the transforms of the config.

    Args:
        base: the environment.
        config: the env node.
        evaluation: without the transforms of the reward alone: evaluation counts the true one.
        tried: reset the environment after each, so that one that does not fit is named.

    Raises:
        ConfigError: a transform that is not there, does not take its arguments or does not fit.
    """
    if not config.transforms:
        return base
    env = TransformedEnv(base, Compose())
    for position, item in enumerate(config.transforms):
        path = f"env.transforms[{position}]"
        transform = _transform(item, path)
        if evaluation and list(transform.in_keys or ()) == list(transform.out_keys or ()) == ["reward"]:
            continue
        seen = {_dotted(key) for key in env.observation_spec.keys(True)}
        unknown = {_dotted(key) for key in transform.in_keys or ()} - seen - _TORCHRLS
        if unknown:
            raise ConfigError(
                Problem(
                    f"{path}.kwargs.in_keys",
                    f"{item.name} would work on {', '.join(sorted(unknown))}, which is not there",
                    f"There is {', '.join(sorted(seen))}",
                )
            )
        try:
            env.append_transform(transform)
            if tried:
                env.reset()
        except EnvironmentFault:
            raise
        except Exception as error:  # TorchRL raises whatever it stumbles over
            raise ConfigError(Problem(path, f"{item.name} cannot be applied: it {raised(error)}")) from error
    return env


def _transform(item: TransformConfig, path: str) -> Transform:
    module, _, name = item.name.rpartition(":")
    home = import_user_module(module or "torchrl.envs.transforms", f"{path}.name")
    cls = getattr(home, name, None)
    if not (isinstance(cls, type) and issubclass(cls, Transform)):
        known = [each for each in dir(home) if _is_transform(getattr(home, each))]
        raise ConfigError(
            Problem(
                f"{path}.name",
                f"expected a transform of torchrl.envs.transforms or module:Class, found {item.name}",
                did_you_mean(nearest(name, known)),
            )
        )
    if (base := base_among(cls, _REFUSED, "torchrl")) is not None:
        why, instead = _REFUSED[base]
        raise ConfigError(Problem(f"{path}.name", f"{name} {why}", instead))
    parameters = inspect.signature(cls).parameters
    wrong = [each for each in item.kwargs if each not in parameters]
    if wrong and not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        raise ConfigError(
            Problem(
                f"{path}.kwargs.{each}",
                f"{name} takes no such argument",
                did_you_mean(nearest(each, parameters)) or f"It takes {', '.join(parameters)}",
            )
            for each in wrong
        )
    try:
        return cls(**{each: _keys(each, value) for each, value in item.kwargs.items()})
    except Exception as error:  # the class may be the user's own
        raise ConfigError(Problem(path, f"{name} cannot be made: it {raised(error)}", extra_for(str(error)))) from error


def _is_transform(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, Transform)


def _keys(name: str, value: JsonValue) -> Any:
    """An argument; nested keys, which YAML writes as lists, are tuples for TorchRL."""
    if not name.endswith(("keys", "keys_inv")) or not isinstance(value, list):
        return value
    return [tuple(key) if isinstance(key, list) else key for key in value]


def _dotted(key: Any) -> str:
    return key if isinstance(key, str) else ".".join(key)

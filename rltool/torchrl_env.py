"""A TorchRL ``EnvBase`` as an environment of rltool, collected by TorchRL's own collector."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.collectors import Collector as TorchRLCollector
from torchrl.data import Bounded, Categorical, Composite, OneHot, TensorSpec, Unbounded
from torchrl.envs import EnvBase, SerialEnv, Transform, TransformedEnv

from rltool.actions import ActionSpec, action_spec
from rltool.collect import Behaviour, Episodes, RunningEpisodes
from rltool.contract import EnvContract
from rltool.errors import ConfigError, NonFiniteError, Problem
from rltool.importing import import_user_module
from rltool.seeding import Stream, seeds
from rltool.spaces import OBSERVATION, Key, LeafSpec, leaf_specs

if TYPE_CHECKING:
    from rltool.schema import TorchRLEnvConfig


def make_base(config: TorchRLEnvConfig) -> EnvBase:
    """Calls the entry point.

    Raises:
        ConfigError: it cannot be imported, does not take the arguments, or returns something else.
    """
    module, _, name = config.entry_point.partition(":")
    try:
        env = getattr(import_user_module(module, "env.entry_point"), name)(**config.kwargs)
    except AttributeError as error:
        raise ConfigError(Problem("env.entry_point", f"module {module} has no {name}: {error}")) from error
    except TypeError as error:
        raise ConfigError(
            Problem("env.kwargs", f"{config.entry_point} does not take these arguments: {error}")
        ) from error
    if not isinstance(env, EnvBase) or env.batch_size != torch.Size([]):
        found = f"one with batch size {list(env.batch_size)}" if isinstance(env, EnvBase) else type(env).__name__
        raise ConfigError(
            Problem(
                "env.entry_point",
                f"expected one torchrl EnvBase without a batch size, found {found}",
                "Use env.num_envs for more",
            )
        )
    return env


def space_of(spec: TensorSpec) -> spaces.Space[Any]:
    """The Gymnasium space that a TorchRL spec stands for (a Composite becomes a Dict)."""
    if isinstance(spec, Composite):
        return spaces.Dict({str(name): space_of(part) for name, part in spec.items()})
    if isinstance(spec, OneHot | Categorical):
        return spaces.Discrete(int(spec.space.n))
    if isinstance(spec, Bounded | Unbounded):
        dtype = torch.empty((), dtype=spec.dtype).numpy().dtype
        if isinstance(spec, Unbounded):
            return spaces.Box(-np.inf, np.inf, tuple(spec.shape), dtype if dtype.kind == "f" else np.float32)
        low, high = (
            bound.expand(spec.shape).cpu().numpy().astype(dtype) for bound in (spec.space.low, spec.space.high)
        )
        return spaces.Box(low, high, dtype=dtype)
    raise ConfigError(
        Problem(
            "env.entry_point", f"expected Bounded, Unbounded, Categorical or OneHot specs, found {type(spec).__name__}"
        )
    )


class TorchRLGym(gymnasium.Env[Any, Any]):
    """One TorchRL environment with Gymnasium's interface."""

    def __init__(self, base: EnvBase) -> None:
        self._base = base
        self.observation_space = observation_space(base)
        self.action_space = space_of(base.action_spec)
        self._state: TensorDictBase | None = None

    def reset(
        self, *, seed: int | None = None, options: dict[str, object] | None = None
    ) -> tuple[Any, dict[str, object]]:
        """A new episode; the observation as NumPy, nested as the environment has it."""
        super().reset(seed=seed, options=options)
        if seed is not None:
            self._base.set_seed(seed)
        self._state = self._base.reset()
        return self._observation(self._state), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, object]]:
        """One step."""
        assert self._state is not None, "step() before reset()"
        self._state.set("action", _as_torchrl(np.asarray(action)[None], self._base.action_spec)[0])
        following = self._base.step(self._state).get("next")
        self._state = following
        truncated = bool(following.get("truncated", torch.zeros(1)).any())
        # An environment that knows only "done" ends by dying, unless it says that it was cut.
        ended = following.get("terminated", None)
        terminated = bool(following["done"].any()) and not truncated if ended is None else bool(ended.any())
        return self._observation(following), float(following["reward"].item()), terminated, truncated, {}

    def close(self) -> None:
        """Closes the environment."""
        if not self._base.is_closed:
            self._base.close()

    def _observation(self, state: TensorDictBase) -> object:
        def values(spec: Composite, part: TensorDictBase) -> dict[str, object]:
            return {
                str(name): values(inner, part[name]) if isinstance(inner, Composite) else _category(part[name], inner)
                for name, inner in spec.items()
            }

        nested = values(self._base.observation_spec, state)
        return nested["observation"] if list(nested) == ["observation"] else nested


def observation_space(base: EnvBase) -> spaces.Space[Any]:
    """The observation space: the ``observation`` entry alone where there is no other."""
    space = space_of(base.observation_spec)
    assert isinstance(space, spaces.Dict)
    return space["observation"] if list(space) == ["observation"] else space


def _category(value: Tensor, spec: TensorSpec) -> object:
    value = value.argmax(-1) if isinstance(spec, OneHot) else value
    return value.cpu().numpy()


def _as_torchrl(action: Any, spec: TensorSpec) -> Tensor:
    """An action in the environment's units as its spec wants it: one-hot where it is."""
    tensor = torch.as_tensor(action)
    return (
        torch.nn.functional.one_hot(tensor, spec.shape[-1]).to(spec.dtype)
        if isinstance(spec, OneHot)
        else tensor.to(spec.dtype)
    )


class _Units(Transform):  # type: ignore[misc]
    """Turns actions in policy units into the environment's before they reach it; the batch keeps the policy's own."""

    def __init__(self, behaviour: Behaviour, spec: TensorSpec) -> None:
        super().__init__(in_keys_inv=["action"], out_keys_inv=["action"])
        self._behaviour, self._spec = (behaviour,), spec

    def _inv_apply_transform(self, action: Tensor) -> Tensor:
        actions = self._behaviour[0].actions
        single = action.ndim == (0 if actions.kind == "discrete" else 1)
        converted = _as_torchrl(actions.to_env((action.unsqueeze(0) if single else action).cpu().numpy()), self._spec)
        return converted[0] if single else converted

    def transform_input_spec(self, input_spec: Composite) -> Composite:
        """The policy's units: any number, or a choice."""
        actions = self._behaviour[0].actions
        batch = input_spec["full_action_spec"].batch_size
        policy: TensorSpec
        if actions.kind == "discrete":
            policy = Categorical(actions.size, shape=batch)
        else:
            policy = Unbounded((*batch, actions.size))
        input_spec["full_action_spec", "action"] = policy
        return input_spec


class TorchRLVectorEnv:
    """TorchRL environments side by side.

    Attributes:
        id: the entry point.
        resolved_config: the env node.
        leaves, actions: the specs.

    Raises:
        ConfigError: the environment cannot be made, or has a spec that rltool does not take.
    """

    def __init__(self, config: TorchRLEnvConfig, *, seed: int, session: int = 0) -> None:
        self.num_envs = config.num_envs
        self.id = config.entry_point
        self.resolved_config = config
        (self._seed,) = seeds(seed, Stream.TRAIN_ENV, 1, start=session)
        first = make_base(config)
        self.observation_space, self.action_space = observation_space(first), space_of(first.action_spec)
        self.leaves: tuple[LeafSpec, ...] = leaf_specs(self.observation_space, self.id)
        self.actions: ActionSpec = action_spec(self.action_space, self.id)
        self.action_spec: TensorSpec = first.action_spec
        if config.num_envs == 1:
            self.base: EnvBase = first
        else:
            first.close()
            self.base = SerialEnv(config.num_envs, partial(make_base, config))

    @staticmethod
    def single(config: TorchRLEnvConfig, index: int, render_mode: str | None = None) -> EnvContract:
        """One of these environments with Gymnasium's interface."""
        if render_mode is not None:
            raise ConfigError(Problem("render", "a TorchRL environment opens no window"))
        return EnvContract(TorchRLGym(make_base(config)), config.entry_point, index)

    def collector(
        self,
        behaviour: Behaviour,
        *,
        total_frames: int,
        generator: torch.Generator,
        device: torch.device,
        frames: int = 0,
    ) -> TorchRLExperience:
        """TorchRL's collector around these environments."""
        self.base.set_seed(self._seed)
        return TorchRLExperience(
            self, behaviour, total_frames=total_frames, generator=generator, device=device, frames=frames
        )

    def close(self) -> None:
        """Closes the environments."""
        if not self.base.is_closed:
            self.base.close()


class TorchRLExperience:
    """Batches as :class:`rltool.collect.Collector` gives them, collected by TorchRL's ``Collector``.

    Its batches have one size, ``frames_per_batch`` of the algorithm after its warm-up; random warm-up lasts for as
    many whole batches as it needs. Args, attributes and errors are those of :class:`rltool.collect.Collector`.
    """

    def __init__(
        self,
        env: TorchRLVectorEnv,
        behaviour: Behaviour,
        *,
        total_frames: int,
        generator: torch.Generator,
        device: torch.device,
        frames: int,
    ) -> None:
        self._env, self._behaviour, self._generator, self._device = env, behaviour, generator, device
        self.total_frames, self.frames = total_frames, frames
        self.episodes = Episodes()
        self._running = RunningEpisodes(env.num_envs)
        self._acted = frames
        self._paths: dict[Key, Key] = {spec.key: spec.key[1:] or OBSERVATION for spec in env.leaves}

    def __iter__(self) -> Iterator[TensorDict]:
        size = -(-self._behaviour.batch_frames // self._env.num_envs) * self._env.num_envs
        units = _Units(self._behaviour, self._env.action_spec)
        collector = TorchRLCollector(
            TransformedEnv(self._env.base, units), self._act, frames_per_batch=size, total_frames=-1, trust_policy=True
        )
        try:
            for collected in collector:
                yield self._batch(collected)
                if 0 <= self.total_frames <= self.frames:
                    return
        finally:
            collector.shutdown(close_env=False)

    def _act(self, state: TensorDictBase) -> TensorDictBase:
        """One action for every environment, in policy units."""
        leaves = {spec.key: self._leaf(state, spec, ()).to(self._device) for spec in self._env.leaves}
        count = self._env.num_envs
        leaves = {key: leaf.reshape((count, *leaf.shape[len(state.batch_size) :])) for key, leaf in leaves.items()}
        explorer = self._behaviour.explorer
        noise = explorer.draw(1, count, self._acted, self._generator)
        with torch.no_grad():
            action = explorer(leaves, tuple(part[0].to(self._device) for part in noise)).cpu()
        self._acted += count
        return state.set("action", action.reshape((*state.batch_size, *action.shape[1:])))

    def _leaf(self, state: TensorDictBase, spec: LeafSpec, prefix: Key) -> Tensor:
        value = cast("Tensor", state.get((*prefix, *self._paths[spec.key])))
        if spec.kind == "discrete" and value.ndim > len(state.batch_size):
            value = value.argmax(-1)
        return value.to(getattr(torch, spec.dtype))

    def _batch(self, collected: TensorDictBase) -> TensorDict:
        if collected.ndim == 1:
            collected = collected.unsqueeze(0)
        batch = TensorDict({}, collected.batch_size)
        batch.set("action", collected["action"])
        following = collected["next"]
        done = following["done"]
        truncated = following.get("truncated", torch.zeros_like(done))
        ends = {"terminated": following.get("terminated", done & ~truncated), "truncated": truncated, "done": done}
        for name, value in {"reward": following["reward"].float(), **ends}.items():
            batch.set(("next", name), value)
        for spec in self._env.leaves:
            batch.set(spec.key, self._leaf(collected, spec, ()))
            batch.set(("next", *spec.key), self._leaf(collected, spec, ("next",)))
        self._check_finite(batch)
        reward, done = (batch["next", name].squeeze(-1).cpu().numpy().T for name in ("reward", "done"))
        self.episodes = self._running.add(reward, done)
        self.frames += batch.numel()
        return batch.to(self._device)

    def _check_finite(self, batch: TensorDict) -> None:
        for key, value in batch.items(True, True):
            if value.is_floating_point() and not bool(value.isfinite().all()):
                env, step = (int(part) for part in (~value.isfinite()).nonzero()[0][:2])
                name = key if isinstance(key, str) else ".".join(key)
                raise NonFiniteError(
                    f"{name} of environment {env} is not finite at frame {self.frames + step * self._env.num_envs}. Nothing "
                    "was learned from this batch; mend the environment"
                )

    def shutdown(self) -> None:
        """Does nothing: the environment belongs to whoever built it."""

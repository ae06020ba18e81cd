"""A TorchRL ``EnvBase`` as an environment of rltool, collected by TorchRL's own collector."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import gymnasium
import torch
from gymnasium import spaces
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.collectors import Collector as TorchRLCollector
from torchrl.data import Categorical, Composite, MultiCategorical, TensorSpec, Unbounded
from torchrl.envs import EnvBase, SerialEnv, Transform, TransformedEnv

from rltool.actions import ActionSpec
from rltool.collect import Behaviour, fail, left_out_in_words, named
from rltool.contract import EnvContract
from rltool.envs import no_pictures, remarks
from rltool.errors import ConfigError, EnvironmentFault, NonFiniteError, Problem
from rltool.experience import Episodes, RunningEpisodes, Tally
from rltool.importing import import_object, raised
from rltool.schema import GymEnvConfig
from rltool.seeding import Stream, seeds
from rltool.spaces import MASK, Key, LeafSpec
from rltool.torchrl_specs import categories, encoded, space_of
from rltool.transforms import gym_env, key_of, transformed
from rltool.watchdog import CALLS

if TYPE_CHECKING:
    from rltool.schema import TorchRLEnvConfig
    from rltool.transforms import ContractEnv


def make_base(config: TorchRLEnvConfig) -> EnvBase:
    """Calls the entry point.

    Raises:
        ConfigError: it cannot be imported, does not take the arguments, or returns something else.
    """
    make = import_object(config.entry_point, "env.entry_point")
    if not callable(make) or (isinstance(make, type) and not issubclass(make, EnvBase)):
        problem = (
            f"expected a function that returns a torchrl EnvBase, found {config.entry_point}: a {type(make).__name__}"
        )
        raise ConfigError(Problem("env.entry_point", problem))
    try:
        env = make(**config.kwargs)
    except ConfigError:
        raise
    except BaseException as error:
        if isinstance(error, TypeError) and ("keyword argument" in str(error) or "positional argument" in str(error)):
            raise ConfigError(
                Problem("env.kwargs", f"{config.entry_point} does not take these arguments: {error}")
            ) from error
        raise EnvironmentFault(f"{config.entry_point} {raised(error)}") from error
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


def make_torchrl(
    config: TorchRLEnvConfig | GymEnvConfig,
    index: int,
    render_mode: str | None = None,
    *,
    evaluation: bool = False,
    tried: bool = False,
) -> EnvBase:
    """One environment with its transforms; the arguments are those of :func:`rltool.envs.make_env` and of
    :func:`rltool.transforms.transformed`."""
    if isinstance(config, GymEnvConfig):
        base = gym_env(config, index, render_mode, tell=tried, evaluation=evaluation)
    else:
        base = make_base(config)
    return transformed(base, config, evaluation=evaluation, tried=tried)


def _single(
    config: TorchRLEnvConfig | GymEnvConfig,
    index: int,
    render_mode: str | None = None,
    *,
    evaluation: bool = False,
    tried: bool = False,
) -> EnvContract:
    if isinstance(config, GymEnvConfig):
        base = make_torchrl(config, index, render_mode, evaluation=evaluation, tried=tried)
        contract = _contract_of(base)
        # Wherever it came from, a TorchRL environment has it among its observations.
        name, mask = config.id, "none" if contract.mask_source == "none" else MASK[0]
    elif render_mode is not None:
        problem = f"{config.entry_point} is a TorchRL environment, and those draw no pictures"
        raise no_pictures(render_mode, problem, "Leave it out")
    else:
        base, contract = make_torchrl(config, index, evaluation=evaluation, tried=tried), None
        name, mask = config.entry_point, config.action_mask
    env = TorchRLGym(base)
    if contract is not None:
        env.spec, env.metadata, env.render_mode = contract.spec, contract.metadata, contract.render_mode
    return EnvContract(env, name, index, keys=config.observation_keys, action_mask=mask)


def _contract_of(base: EnvBase) -> EnvContract:
    """The Gymnasium environment inside, as it is without transforms."""
    return cast("ContractEnv", base.base_env).contract


class TorchRLGym(gymnasium.Env[Any, Any]):
    """One TorchRL environment with Gymnasium's interface."""

    def __init__(self, base: EnvBase) -> None:
        self.base = base
        self.observation_space = _observation_space(base)
        self.action_space = space_of(base.action_spec, "action")
        self._state: TensorDictBase | None = None

    def reset(
        self, *, seed: int | None = None, options: dict[str, object] | None = None
    ) -> tuple[Any, dict[str, object]]:
        """A new episode; the observation as NumPy, nested as the environment has it."""
        super().reset(seed=seed, options=options)
        if seed is not None:
            self.base.set_seed(seed)
        self._state = self.base.reset()
        return self._observation(self._state), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, object]]:
        """One step."""
        assert self._state is not None, "step() before reset()"
        self._state.set("action", encoded(action, self.base.action_spec))
        following = self.base.step(self._state).get("next")
        self._state = following
        truncated = bool(following.get("truncated", torch.zeros(1)).any())
        # An environment that knows only "done" ends by dying, unless it says that it was cut.
        ended = following.get("terminated", None)
        terminated = bool(following["done"].any()) and not truncated if ended is None else bool(ended.any())
        return self._observation(following), float(following["reward"].item()), terminated, truncated, {}

    def render(self) -> Any:
        """What the Gymnasium environment inside draws."""
        return _contract_of(self.base).render()

    def close(self) -> None:
        """Closes the environment."""
        if not self.base.is_closed:
            self.base.close()

    def _observation(self, state: TensorDictBase) -> object:
        def values(spec: Composite, part: TensorDictBase) -> dict[str, object]:
            return {
                str(name): values(inner, part[name])
                if isinstance(inner, Composite)
                else categories(part[name], inner).cpu().numpy()
                for name, inner in spec.items()
            }

        nested = values(self.base.observation_spec, state)
        return nested["observation"] if list(nested) == ["observation"] else nested


def _observation_space(base: EnvBase) -> spaces.Space[Any]:
    """The observation space: the ``observation`` entry alone where there is no other."""
    space = space_of(base.observation_spec)
    assert isinstance(space, spaces.Dict)
    return space["observation"] if list(space) == ["observation"] else space


class _Units(Transform):  # type: ignore[misc]
    """Turns actions in policy units into the environment's before they reach it; the batch keeps the policy's own."""

    def __init__(self, behaviour: Behaviour, spec: TensorSpec) -> None:
        super().__init__(in_keys_inv=["action"], out_keys_inv=["action"])
        self._behaviour, self._spec = (behaviour,), spec

    def _inv_apply_transform(self, action: Tensor) -> Tensor:
        actions = self._behaviour[0].actions
        single = action.ndim == len(actions.policy_shape)
        converted = encoded(actions.to_env((action.unsqueeze(0) if single else action).cpu().numpy()), self._spec)
        return converted[0] if single else converted

    def transform_input_spec(self, input_spec: Composite) -> Composite:
        """The policy's units: any number, or choices."""
        actions = self._behaviour[0].actions
        batch = input_spec["full_action_spec"].batch_size
        policy: TensorSpec
        if actions.continuous:
            policy = Unbounded((*batch, actions.size))
        elif actions.kind == "discrete":
            policy = Categorical(actions.size, shape=batch)
        else:
            policy = MultiCategorical(actions.nvec, shape=(*batch, len(actions.nvec)))
        input_spec["full_action_spec", "action"] = policy
        return input_spec


class TorchRLVectorEnv:
    """TorchRL environments side by side, or Gymnasium's with ``env.transforms``.

    Args:
        config, seed, session: as for :class:`rltool.vectorized.GymVectorEnv`.

    Attributes:
        id: the entry point, or the full id.
        resolved_config: the env node with what was found out.
        leaves, actions: the specs.
        remarks: what a user should know before training, as labels and texts.
        observation_spec, action_spec: TorchRL's, of one environment.
        unsaved: as for :class:`rltool.vectorized.VectorEnvBase`.

    Raises:
        ConfigError: the environment cannot be made, or has a spec that rltool does not take.
    """

    unsaved = "TorchRL's collector"

    def __init__(self, config: TorchRLEnvConfig | GymEnvConfig, *, seed: int, session: int = 0) -> None:
        self.num_envs = config.num_envs
        (self._seed,) = seeds(seed, Stream.TRAIN_ENV, 1, start=session)
        with closing(_single(config, 0, tried=True)) as probe:
            base = cast("TorchRLGym", probe.unwrapped).base
            self.leaves: tuple[LeafSpec, ...] = probe.leaves
            self.actions: ActionSpec = probe.actions
            self.mask_source = probe.mask_source
            self.observation_spec: Composite = base.observation_spec.clone()
            self.action_spec: TensorSpec = base.action_spec.clone()
            known = {"action_mask": probe.mask_source}
            if isinstance(config, GymEnvConfig):
                contract = _contract_of(base)
                self.id = contract.spec.id if contract.spec is not None else config.id
                module = config.id.rpartition(":")[0]
                known = {"action_mask": contract.mask_source, "id": f"{module}:{self.id}" if module else self.id}
            else:
                self.id = config.entry_point
        self.resolved_config = config.model_copy(update=known)
        names = [transform.name for transform in config.transforms]
        self.remarks = [
            *remarks(probe.leaves, known["action_mask"], probe.spec),
            ("collector", f"TorchRL's own{', with ' if names else ''}{', '.join(names)}"),
        ]
        make = partial(make_torchrl, self.resolved_config, 0)
        self.base: EnvBase = make() if config.num_envs == 1 else SerialEnv(config.num_envs, make)

    @staticmethod
    def single(config: TorchRLEnvConfig | GymEnvConfig, index: int, render_mode: str | None = None) -> EnvContract:
        """One of these environments with Gymnasium's interface, as evaluation wants it."""
        return _single(config, index, render_mode, evaluation=True)

    def collector(
        self,
        behaviour: Behaviour,
        *,
        total_frames: int,
        generator: torch.Generator,
        device: torch.device,
        frames: int = 0,
        skip: Callable[[str], object] | None = None,
    ) -> TorchRLExperience:
        """TorchRL's collector around these environments."""
        self.base.set_seed(self._seed)
        return TorchRLExperience(
            self,
            behaviour,
            total_frames=total_frames,
            generator=generator,
            device=device,
            frames=frames,
            skip=skip,
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
        skip: Callable[[str], object] | None,
    ) -> None:
        self._skip, self.left_out, self.batches = skip, 0, 0
        self._env, self._behaviour, self._generator, self._device = env, behaviour, generator, device
        self.total_frames, self.frames = total_frames, frames
        self.episodes, self.tally = Episodes(), Tally()
        self._running = RunningEpisodes(env.num_envs)
        self._acted, self._acting = frames, False
        self._paths: dict[Key, Key] = {spec.key: key_of(spec) for spec in env.leaves}
        if MASK in self._paths:
            self._paths[MASK] = tuple(env.mask_source.split("."))

    continued = False

    @property
    def frame(self) -> int:
        """Frames before the step that the environments are at."""
        return max(self._acted - self._env.num_envs, self.frames)

    def state_dict(self) -> dict[str, Tensor]:
        """Nothing: open episodes start anew."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Nothing is taken up."""
        del state

    def __iter__(self) -> Iterator[TensorDict]:
        size = -(-self._behaviour.batch_frames // self._env.num_envs) * self._env.num_envs
        units = _Units(self._behaviour, self._env.action_spec)
        collector = TorchRLCollector(
            TransformedEnv(self._env.base, units), self._act, frames_per_batch=size, total_frames=-1, trust_policy=True
        )
        self._acted = self.frames  # TorchRL's collector has tried the policy once
        batches = iter(collector)
        try:
            while self.total_frames < 0 or self.frames < self.total_frames:
                self.batches += 1
                try:
                    batch = self._batch(self._collected(batches))
                except NonFiniteError as fault:
                    if self._skip is None:
                        raise
                    self._leave_out(fault, self._skip)
                    collector.reset()
                else:
                    yield batch
        finally:
            collector.shutdown(close_env=False)

    def _leave_out(self, fault: NonFiniteError, skip: Callable[[str], object]) -> None:
        """As :class:`rltool.collect.Collector` does."""
        self.left_out += 1
        if self.left_out == 1:
            skip(left_out_in_words(fault))
        self.frames += fault.batch["next.reward"].numel()
        self._behaviour.abandon_episodes()
        self.episodes, self.tally = Episodes(), Tally()
        self._running = RunningEpisodes(self._env.num_envs)

    def _collected(self, batches: Iterator[TensorDictBase]) -> TensorDictBase:
        """The next batch of TorchRL's.

        Raises:
            EnvironmentFault: an environment raised, whatever it was.
        """
        before = self._generator.get_state()
        try:
            with CALLS:
                return next(batches)
        except BaseException as error:
            if self._acting:
                raise
            self._generator.set_state(before)
            frame, self._acted = self.frame, self.frames
            fail(self._env.id, error, frame)

    def _act(self, state: TensorDictBase) -> TensorDictBase:
        """One action for every environment, in policy units."""
        self._acting = True
        leaves = {spec.key: self._leaf(state, spec, ()).to(self._device) for spec in self._env.leaves}
        count = self._env.num_envs
        leaves = {key: leaf.reshape((count, *leaf.shape[len(state.batch_size) :])) for key, leaf in leaves.items()}
        explorer = self._behaviour.explorer
        noise = explorer.draw(1, count, self._acted, self._generator)
        with torch.no_grad():
            action = explorer(leaves, tuple(part[0].to(self._device) for part in noise)).cpu()
        self._acted += count
        state.set("action", action.reshape((*state.batch_size, *action.shape[1:])))
        self._acting = False
        CALLS.serial += 1  # what follows is another step
        return state

    def _leaf(self, state: TensorDictBase, spec: LeafSpec, prefix: Key) -> Tensor:
        path = self._paths[spec.key]
        value = categories(cast("Tensor", state.get((*prefix, *path))), self._env.observation_spec[path])
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
        self.tally = Tally.of(reward, batch["action"].cpu().numpy(), self._env.actions)
        self.frames += batch.numel()
        return batch.to(self._device)

    def _check_finite(self, batch: TensorDict) -> None:
        for key, value in batch.items(True, True):
            if value.is_floating_point() and not bool(value.isfinite().all()):
                env, step = (int(part) for part in (~value.isfinite()).nonzero()[0][:2])
                name = key if isinstance(key, str) else ".".join(key)
                raise NonFiniteError(
                    f"{name} of environment {env} is not finite at frame {self.frames + step * self._env.num_envs}. Nothing "
                    "was learned from this batch; mend the environment",
                    named(batch),
                    learned=False,
                )

    def shutdown(self) -> None:
        """Does nothing: the environment belongs to whoever built it."""

"""Every config schema of rltool: types, ranges, units and meaning. The values are in conf/, nowhere else.

No torch here: ``--help``, ``list``, ``config`` and every config error must stay fast.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from math import isfinite
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    JsonValue,
    SerializeAsAny,
    StringConstraints,
    ValidationInfo,
    field_validator,
)

from rltool.configfiles import flat
from rltool.errors import Problem
from rltool.health import NAMES
from rltool.registry import Schema, register
from rltool.wording import did_you_mean, nearest


def _whole(value: object) -> object:
    """1e6 (a float in YAML) is a count; true, "5" and 1.5 are not."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def _finite(value: JsonValue) -> JsonValue:
    """NaN and infinities are no JSON: a checkpoint could not hold them."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for part in parts:
        _finite(part)
    if isinstance(value, float) and not isfinite(value):
        raise ValueError(f"expected finite numbers, found {value}; leave the argument out, or give a large number")
    return value


Arguments = Annotated[dict[str, JsonValue], AfterValidator(_finite)]
# Counts become int64 in tensors. What stands side by side costs memory each, whatever file asks for it.
Count = Annotated[int, BeforeValidator(_whole), Field(ge=0, lt=2**63)]
PositiveCount = Annotated[int, BeforeValidator(_whole), Field(ge=1, lt=2**63)]
SideBySide = Annotated[int, BeforeValidator(_whole), Field(ge=1, le=100_000)]
Real = Annotated[float, Field(allow_inf_nan=False)]
PositiveReal = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeReal = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Seconds = Annotated[float, Field(gt=0, le=1e7, allow_inf_nan=False)]
Resamples = Annotated[int, BeforeValidator(_whole), Field(ge=100, le=1_000_000)]
Inches = Annotated[float, Field(ge=2.5, le=40, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Place = Annotated[str, Field(min_length=1)]


class Anneal(Schema):
    """A value that moves in a straight line from ``start`` to ``end`` over ``frames`` frames and then stays."""

    start: Real = Field(description="value at frame 0")
    end: Real = Field(description="value from `frames` on")
    frames: PositiveCount | None = Field(description="length in frames; null: the whole budget as first started")

    def at(self, frame: int, budget: int) -> float:
        """The value at a frame: a pure function of the frame counter, so that a resumed run continues it.

        Args:
            frame: frames collected so far.
            budget: the budget the run was first started with, used where ``frames`` is null.
        """
        length = budget if self.frames is None else self.frames
        if length <= 0 or self.start == self.end:
            return self.end
        share = min(max(frame / length, 0.0), 1.0)
        return self.start + share * (self.end - self.start)

    def unbounded(self, path: str, total_frames: int) -> Iterator[Problem]:
        """With total_frames=-1 there is no budget to spread a schedule over."""
        if total_frames < 0 and self.frames is None and self.start != self.end:
            yield Problem(
                f"{path}.frames", "null means the whole budget, but total_frames=-1 has none", "Give a number of frames"
            )


# --------------------------------------------------------------------------------------------------------------- env


def _key(value: object) -> object:
    """The place in a Tuple is a number on the command line."""
    return str(value) if type(value) is int else value


def _named(value: object) -> object:
    """A bare name is a wrapper without arguments."""
    return {"name": value} if isinstance(value, str) else value


class WrapperConfig(Schema):
    """One Gymnasium wrapper, applied to each environment, in the order of the list."""

    name: str = Field(description="class name in gymnasium.wrappers, or module:Class")
    kwargs: Arguments = Field({}, description="its keyword arguments")
    eval: bool | Arguments = Field(
        True, description="false: not in evaluation (a clipped reward); {…}: other arguments there"
    )


class TransformConfig(Schema):
    """One TorchRL transform, applied to each environment, in the order of the list."""

    name: str = Field(description="class name in torchrl.envs.transforms, or module:Class")
    kwargs: Arguments = Field({}, description="its keyword arguments")


class EnvConfig(Schema):
    """What every kind of environment has."""

    kind: str = Field(description="which kind of environment this is")
    num_envs: SideBySide = Field(description="environments stepped side by side; 1 to 32 on a laptop")
    kwargs: Arguments = Field(description="keyword arguments of the environment")
    observation_keys: list[Annotated[str, BeforeValidator(_key)]] | None = Field(
        description="entries of a Dict or Tuple observation to learn from, dotted where nested; null: all"
    )
    action_mask: str = Field(
        description="which actions are valid: auto finds out, none, info (its entry action_mask), method (action_masks()), "
        "or the key of an entry of the observation",
        min_length=1,
    )
    timeout: Seconds | None = Field(
        description="seconds that one step or reset may take before the environment is taken to hang; null: for ever"
    )
    transforms: list[Annotated[TransformConfig, BeforeValidator(_named)]] = Field(
        description="TorchRL transforms: [Name, {name: …, kwargs: {…}}]; TorchRL's own collector is used then"
    )

    @property
    def whole_batches(self) -> bool:
        """Whether random warm-up comes in whole batches: TorchRL's collector makes no others."""
        return bool(self.transforms)


# EnvPool's arguments that do what a Gymnasium wrapper does (of Atari's; MuJoCo's stack is frame_stack).
_IN_ENVPOOL = {
    "AtariPreprocessing": ("noop_max", "frame_skip", "img_height", "img_width", "episodic_life", "gray_scale"),
    "ClipReward": ("reward_clip",),
    "FrameStackObservation": ("stack_num", "frame_stack"),
    "GrayscaleObservation": ("gray_scale",),
    "MaxAndSkipObservation": ("frame_skip",),
    "ResizeObservation": ("img_height", "img_width"),
}


@register("env", "gym", builder="rltool.vectorized:GymVectorEnv")
class GymEnvConfig(EnvConfig):
    """A Gymnasium environment by its id."""

    id: str = Field(description="Gymnasium id, `module:Id` imports the module first", min_length=1)
    backend: Literal["sync", "threads", "async", "auto", "envpool", "vector"] = Field(
        description="sync: one after the other; threads: some at a time (simulators that let go of Python's lock); async: a "
        "worker process each, for slow environments; auto: the fastest of these, tried at start; envpool: EnvPool's own (extra); vector: the environment's own vector "
        "version"
    )
    wrappers: list[Annotated[WrapperConfig, BeforeValidator(_named)]] = Field(
        description="Gymnasium wrappers: [Name, {name: …, kwargs: {…}, eval: false}]"
    )
    max_episode_steps: PositiveCount | None = Field(description="time limit in steps; null: the environment's own")

    @field_validator("kwargs")
    @classmethod
    def _are_the_environments(cls, kwargs: dict[str, JsonValue]) -> dict[str, JsonValue]:
        """gymnasium.make's own arguments never reach an environment."""
        keys = {"id": "env.id", "max_episode_steps": "env.max_episode_steps", "disable_env_checker": "rltool env"}
        for name in keys.keys() & kwargs.keys():
            raise ValueError(f"expected arguments of the environment, found {name}. Give {keys[name]} instead")
        return kwargs

    @field_validator("backend")
    @classmethod
    def _steps_transforms(cls, backend: str, others: ValidationInfo) -> str:
        if others.data.get("transforms") and backend not in ("sync", "auto"):
            raise ValueError(
                f"expected sync with env.transforms (TorchRL steps one environment after the other), found {backend}"
            )
        return backend

    @field_validator("wrappers")
    @classmethod
    def _are_applied(cls, wrappers: list[WrapperConfig], others: ValidationInfo) -> list[WrapperConfig]:
        """Wrappers are around single environments, which these backends do not have."""
        backend, names = others.data.get("backend"), [wrapper.name for wrapper in wrappers]
        if not wrappers or backend not in ("vector", "envpool"):
            return wrappers
        same = [f"{name}: env.kwargs.{{{', '.join(_IN_ENVPOOL[name])}}}" for name in names if name in _IN_ENVPOOL]
        hint = f"; EnvPool has arguments for {'; '.join(same)}" if same and backend == "envpool" else ""
        raise ValueError(
            f"expected none with env.backend={backend}, found {', '.join(names)}. env.backend=sync and threads apply them{hint}"
        )

    def builds(self) -> str:
        if self.transforms:
            return "rltool.torchrl_env:TorchRLVectorEnv"
        others = {
            "envpool": "rltool.envpool_env:EnvPoolVectorEnv",
            "vector": "rltool.vector_version:VectorVersionEnv",
        }
        return others.get(self.backend, super().builds())


@register("env", "atari", builder="rltool.vectorized:GymVectorEnv")
class AtariEnvConfig(GymEnvConfig):
    """A game of the Arcade Learning Environment by its name."""

    kind: Literal["atari"] = Field(description="a game of the Arcade Learning Environment")
    game: str = Field(description="its name as in the id: Pong, Breakout, SpaceInvaders, …", pattern=r"^\w+$")

    @field_validator("game")
    @classmethod
    def _is_of_the_id(cls, game: str, others: ValidationInfo) -> str:
        """Where the id has been resolved, as in a checkpoint, another game alone would change nothing."""
        env_id = others.data.get("id", game)
        if f"/{game}-" not in f"/{env_id}-":
            raise ValueError(f"expected the game of env.id={env_id}, found {game}. Give env.id instead")
        return game


@register("env", "torchrl", builder="rltool.torchrl_env:TorchRLVectorEnv")
class TorchRLEnvConfig(EnvConfig):
    """A TorchRL EnvBase, collected by TorchRL's own collector."""

    kind: Literal["torchrl"] = Field(description="a TorchRL environment")
    entry_point: str = Field(description="module:callable that returns a torchrl EnvBase", pattern=r"^[\w.]+:\w+$")

    @property
    def whole_batches(self) -> bool:
        return True

    @field_validator("action_mask")
    @classmethod
    def _is_observed(cls, source: str) -> str:
        if source in ("info", "method"):
            raise ValueError(f"expected auto, none or the key of an entry of the observation, found {source}")
        return source


# --------------------------------------------------------------------------------------------------------------- algo


class AlgoConfig(Schema):
    """What the training loop needs of every algorithm."""

    kind: str = Field(description="which algorithm this is")
    frames_per_batch: PositiveCount = Field(description="frames collected between updates, all environments together")
    gamma: Fraction = Field(description="discount factor a step; 0.9 to 0.999")
    normalize_observation: bool = Field(
        description="normalise float observations by running mean and variance, kept in the policy"
    )
    warmup_frames: Count = Field(description="random frames before learning that start the normaliser's statistics")
    max_grad_norm: PositiveReal | None = Field(description="clip the global gradient norm here; null: never")

    @abstractmethod
    def updates(self, run: RunConfig) -> int:
        """Gradient steps planned for the whole budget (0 when the budget is open)."""

    def problems(self, run: RunConfig) -> Iterator[Problem]:
        if self.frames_per_batch < run.env.num_envs:
            yield Problem(
                "algo.frames_per_batch",
                f"expected at least one frame of each environment (env.num_envs={run.env.num_envs}), found {self.frames_per_batch}",
                "Raise it or lower env.num_envs",
            )
        if self.normalize_observation and self.warmup_frames == 0:
            yield Problem(
                "algo.warmup_frames",
                "expected at least 1 with normalize_observation=true, found 0",
                "The normaliser needs frames to start from; 1000 is usual",
            )

    def batch_frames(self, num_envs: int) -> int:
        """Frames of a batch: ``frames_per_batch`` rounded up to a multiple of the number of environments."""
        return -(-self.frames_per_batch // num_envs) * num_envs

    def warmup_end(self, env: EnvConfig) -> int:
        """The frame at which random warm-up is over: whole steps of all environments, or whole batches."""
        unit = self.batch_frames(env.num_envs) if env.whole_batches else env.num_envs
        return -(-self.warmup_frames // unit) * unit

    def last_frame(self, run: RunConfig) -> int:
        """The frame at which a run from the start ends: batches are whole, and so is the warm-up."""
        first, size = self.warmup_end(run.env), self.batch_frames(run.env.num_envs)
        return first + max(-(-(run.total_frames - first) // size), 0) * size


class ReplayedAlgoConfig(AlgoConfig):
    """What the algorithms that learn from a replay buffer have in common."""

    minibatch_size: PositiveCount = Field(description="transitions a gradient step; 32 to 512")
    updates_per_frame: PositiveReal = Field(description="gradient steps a frame; 0.1 to 1")

    @property
    @abstractmethod
    def first_update(self) -> int:
        """Frames before the first gradient step: a minibatch at least."""

    def updates_by(self, frames: int) -> int:
        """Gradient steps due by a frame: a pure function of the counter, whatever the batch size."""
        return int(max(frames - self.first_update, 0) * self.updates_per_frame)

    def updates(self, run: RunConfig) -> int:
        return self.updates_by(self.last_frame(run)) - self.updates_by(self.warmup_end(run.env))

    def problems(self, run: RunConfig) -> Iterator[Problem]:
        yield from super().problems(run)
        if not isinstance(run.buffer, ReplayBufferConfig | PrioritizedBufferConfig):
            yield Problem(
                "buffer",
                f"{self.kind} learns from a replay buffer, found buffer.kind={run.buffer.kind}",
                "Leave buffer out, or give buffer=replay or buffer=prioritized",
            )
            return
        if run.buffer.size < self.minibatch_size:
            yield Problem(
                "buffer.size", f"expected at least algo.minibatch_size={self.minibatch_size}, found {run.buffer.size}"
            )


@register("algo", "ppo", builder="rltool.algos.ppo:PPO")
class PPOConfig(AlgoConfig):
    """Proximal policy optimisation with a clipped surrogate (Schulman et al. 2017, arXiv:1707.06347)."""

    kind: Literal["ppo"] = Field(description="proximal policy optimisation")
    gae_lambda: Fraction = Field(description="λ of generalised advantage estimation; 0.8 to 1")
    epochs: PositiveCount = Field(description="passes over a batch; 3 to 20")
    minibatch_size: PositiveCount = Field(description="frames a gradient step; 32 to 4096")
    clip_epsilon: Annotated[float, Field(gt=0, lt=1)] | Anneal = Field(
        description="clip range of the probability ratio, or a schedule {start, end, frames}; 0.1 to 0.4"
    )
    clip_value: PositiveReal | None = Field(description="clip the change of the value by this much; null: no clipping")
    entropy_coeff: NonNegativeReal = Field(description="weight of the entropy bonus; 0 to 0.02")
    critic_coeff: PositiveReal = Field(description="weight of the value loss; 0.25 to 1")
    loss_critic_type: Literal["l2", "smooth_l1"] = Field(description="value loss: squared error or Huber")
    normalize_advantage: bool = Field(description="standardise advantages within each minibatch")
    scale_reward: bool = Field(description="divide rewards by the running standard deviation of the discounted return")
    target_kl: PositiveReal | None = Field(
        description="stop the epochs of a batch when the approximate KL exceeds 1.5 times this; null: never"
    )
    squash: Literal["clip", "tanh"] = Field(description="how a continuous action is brought into [-1, 1]")
    initial_std: PositiveReal = Field(
        description="standard deviation of the Gaussian policy at start, in units where a bounded action is [-1, 1]"
    )

    def updates(self, run: RunConfig) -> int:
        frames, learned = self.batch_frames(run.env.num_envs), self.last_frame(run) - self.warmup_end(run.env)
        return learned // frames * self.epochs * (frames // self.minibatch_size)

    def problems(self, run: RunConfig) -> Iterator[Problem]:
        yield from super().problems(run)
        frames = self.batch_frames(run.env.num_envs)
        if self.minibatch_size > frames:
            yield Problem(
                "algo.minibatch_size",
                f"expected at most the {frames} frames of a batch, found {self.minibatch_size}",
                "Lower it or raise algo.frames_per_batch",
            )
        if isinstance(self.clip_epsilon, Anneal):
            yield from self.clip_epsilon.unbounded("algo.clip_epsilon", run.total_frames)
            for name in ("start", "end"):
                value = getattr(self.clip_epsilon, name)
                if not 0 <= value < 1:
                    yield Problem(f"algo.clip_epsilon.{name}", f"expected a number in [0, 1), found {value}")
        if run.buffer.kind != "rollout":
            yield Problem(
                "buffer",
                f"ppo learns from its own last batch and needs buffer=rollout, found buffer.kind={run.buffer.kind}",
                "Leave buffer out, or give buffer=rollout",
            )


@register("algo", "dqn", builder="rltool.algos.dqn:DQN")
class DQNConfig(ReplayedAlgoConfig):
    """Deep Q-learning (Mnih et al. 2015), double by option (van Hasselt et al. 2016, arXiv:1509.06461)."""

    kind: Literal["dqn"] = Field(description="deep Q-learning")
    learning_starts: Count = Field(description="frames stored before the first gradient step")
    target_interval: PositiveCount | None = Field(
        description="copy the network into the target every so many frames; null: use tau"
    )
    tau: Annotated[float, Field(gt=0, le=1)] | None = Field(
        description="soft update each step: target ← (1-τ)·target + τ·network; null: use target_interval"
    )
    double: bool = Field(description="double Q-learning: the network chooses the next action, the target values it")
    epsilon: Anneal = Field(description="share of random actions, by frame")
    loss_function: Literal["l2", "smooth_l1"] = Field(description="loss of the TD error: squared or Huber")

    @property
    def first_update(self) -> int:
        return max(self.learning_starts, self.minibatch_size)

    def problems(self, run: RunConfig) -> Iterator[Problem]:
        yield from super().problems(run)
        if (self.tau is None) == (self.target_interval is None):
            found = "neither" if self.tau is None else f"tau={self.tau} and target_interval={self.target_interval}"
            hint = "Give one of them a number" if self.tau is None else "Set the other one to null"
            yield Problem("algo.tau", f"expected either tau or target_interval, found {found}", hint)
        for name in ("start", "end"):
            value = getattr(self.epsilon, name)
            if not 0 <= value <= 1:
                yield Problem(f"algo.epsilon.{name}", f"expected a number in [0, 1], found {value}")
        yield from self.epsilon.unbounded("algo.epsilon", run.total_frames)
        buffer = run.buffer
        if isinstance(buffer, ReplayBufferConfig | PrioritizedBufferConfig) and buffer.size < self.learning_starts:
            yield Problem(
                "buffer.size", f"expected at least algo.learning_starts={self.learning_starts}, found {buffer.size}"
            )


@register("algo", "sac", builder="rltool.algos.sac:SAC")
class SACConfig(ReplayedAlgoConfig):
    """Soft actor-critic (Haarnoja et al. 2018, arXiv:1812.05905)."""

    kind: Literal["sac"] = Field(description="soft actor-critic")
    tau: Annotated[float, Field(gt=0, le=1)] = Field(
        description="soft update of the critics' targets each step: target ← (1-τ)·target + τ·critic"
    )
    alpha: PositiveReal = Field(description="weight of the entropy at the start; 0.1 to 1")
    learn_alpha: bool = Field(description="adapt alpha so that the policy keeps target_entropy")
    target_entropy: Real | None = Field(
        description="entropy to keep, in nats; null: -1 for each dimension of the action"
    )

    @property
    def first_update(self) -> int:
        return max(self.warmup_frames, self.minibatch_size)

    def problems(self, run: RunConfig) -> Iterator[Problem]:
        yield from super().problems(run)
        if run.network.shared:
            yield Problem(
                "network.shared", "sac trains actor and critics by losses of their own; expected false, found true"
            )


# --------------------------------------------------------------------------------------- network, buffer, optim, logging


Activation = Literal["tanh", "relu", "elu", "gelu", "silu"]


class NetworkConfig(Schema):
    """The trainable body between the observation and the heads."""

    kind: str = Field(description="which network this is")
    init: Literal["orthogonal", "xavier", "default"] = Field(
        description="first weights: orthogonal (gain √2, small policy head), xavier (uniform), default (torch's own)"
    )
    shared: bool = Field(description="one body for actor and critic (PPO); false: one each")
    precision: Literal["float32", "bfloat16"] = Field(
        description="of its products; bfloat16 is for large networks on a GPU: weights, losses and outputs stay float32"
    )

    def for_loading(self) -> NetworkConfig:
        """The same network where all of its weights come from a checkpoint: it fetches none."""
        return self


class _Hidden(NetworkConfig):
    hidden: list[PositiveCount] = Field(description="units of each hidden layer; [64, 64] for PPO, [256, 256] for DQN")
    activation: Activation = Field(description="activation after each hidden layer")
    layer_norm: bool = Field(description="normalise each hidden layer before its activation")


class CNNConfig(Schema):
    """Convolutions over an image, and one linear layer after them."""

    channels: list[PositiveCount] = Field(description="output channels of each convolution", min_length=1)
    kernels: list[PositiveCount] = Field(description="kernel size of each, in pixels")
    strides: list[PositiveCount] = Field(description="stride of each, in pixels")
    features: PositiveCount = Field(description="units of the linear layer after them")
    activation: Activation = Field(description="activation after each")

    def problems_at(self, path: str) -> Iterator[Problem]:
        """A kernel and a stride for each convolution."""
        for name in ("kernels", "strides"):
            if len(getattr(self, name)) != len(self.channels):
                yield Problem(
                    f"{path}.{name}",
                    f"expected one for each of the {len(self.channels)} entries of {path}.channels, found {len(getattr(self, name))}",
                )


class _Convolutional(_Hidden):
    cnn: CNNConfig = Field(description="the network of each image")

    def problems(self, run: RunConfig) -> Iterator[Problem]:
        yield from super().problems(run)
        yield from self.cnn.problems_at("network.cnn")


@register("network", "mlp", builder="rltool.nets:mlp")
class MLPConfig(_Hidden):
    """A multi-layer perceptron."""

    kind: Literal["mlp"] = Field(description="multi-layer perceptron")


@register("network", "auto", builder="rltool.nets:auto")
class AutoConfig(_Convolutional):
    """What fits the observations: hidden layers for numbers, convolutions for images, both for both."""

    kind: Literal["auto"] = Field(description="what fits the observations")


@register("network", "nature_cnn", builder="rltool.nets:nature_cnn")
class NatureCNNConfig(_Convolutional):
    """The convolutional network of Mnih et al. 2015 (Nature 518)."""

    kind: Literal["nature_cnn"] = Field(description="the Nature CNN")


@register("network", "resnet", builder="rltool.nets:resnet")
class ResNetConfig(_Hidden):
    """A ResNet of torchvision's as encoder of images (extra: vision)."""

    kind: Literal["resnet"] = Field(description="a ResNet of torchvision's")
    name: Literal["resnet18", "resnet34", "resnet50", "resnet101", "resnet152"] = Field(description="which of them")
    weights: str | None = Field(
        description="a name of torchvision's (DEFAULT, downloaded once), a .pth or .safetensors file; null: random"
    )
    frozen: bool = Field(description="true: the backbone does not learn")

    def for_loading(self) -> NetworkConfig:
        return self.model_copy(update={"weights": None})


@register("network", "module", builder="rltool.nets:module")
class ModuleConfig(NetworkConfig):
    """A torch module of your own."""

    kind: Literal["module"] = Field(description="a torch module of your own")
    entry_point: str = Field(
        description="module:Class; called with the shapes of its inputs by name and kwargs", pattern=r"^[\w.]+:\w+$"
    )
    kwargs: Arguments = Field(description="its keyword arguments")


class BufferConfig(Schema):
    """Where experience waits to be learned from."""

    kind: str = Field(description="which buffer this is")

    def ready(self) -> None:
        """Asks before anything is built whether what it needs is installed.

        Raises:
            ConfigError: it is not; says what to install.
        """

    def for_acting(self) -> BufferConfig:
        """The buffer of a policy that does not learn: one that needs no room."""
        return self


@register("buffer", "rollout", builder="rltool.buffers:RolloutBuffer")
class RolloutBufferConfig(BufferConfig):
    """The last batch only, drawn without replacement (PPO)."""

    kind: Literal["rollout"] = Field(description="the last batch, for PPO")


class _Stored(BufferConfig):
    size: PositiveCount = Field(description="transitions kept; the oldest leave first")
    storage: Literal["memory", "memmap"] = Field(
        description="memory, or files mapped into memory for buffers larger than it"
    )

    def for_acting(self) -> BufferConfig:
        return ReplayBufferConfig(kind="replay", size=1, storage="memory")


@register("buffer", "replay", builder="rltool.buffers:ReplayBuffer")
class ReplayBufferConfig(_Stored):
    """Uniform replay."""

    kind: Literal["replay"] = Field(description="uniform replay")


@register("buffer", "prioritized", builder="rltool.buffers:PrioritizedBuffer")
class PrioritizedBufferConfig(_Stored):
    """Replay in proportion to the TD error (Schaul et al. 2016, arXiv:1511.05952)."""

    kind: Literal["prioritized"] = Field(description="prioritised replay")
    alpha: Fraction = Field(description="exponent of the priority; 0: uniform")
    beta: Anneal = Field(description="exponent of the importance weight, by frame; towards 1")
    eps: PositiveReal = Field(description="added to every priority, so that none is zero")

    def ready(self) -> None:
        from rltool.buffers import check_compiled_extension

        check_compiled_extension()

    def problems(self, run: RunConfig) -> Iterator[Problem]:
        yield from self.beta.unbounded("buffer.beta", run.total_frames)
        for name in ("start", "end"):
            value = getattr(self.beta, name)
            if not 0 <= value <= 1:
                yield Problem(f"buffer.beta.{name}", f"expected a number in [0, 1], found {value}")


class OptimConfig(Schema):
    """What every optimiser has."""

    kind: str = Field(description="which optimiser this is")
    lr: PositiveReal = Field(description="learning rate at the start; 1e-5 to 1e-2")
    schedule: Literal["constant", "linear", "cosine"] = Field(description="how it falls to 0 over the budget, or stays")

    def lr_at(self, frame: int, budget: int) -> float:
        """The learning rate at a frame: a pure function of the frame counter."""
        from math import cos, pi

        share = min(max(frame / budget, 0.0), 1.0) if budget > 0 else 0.0
        factor = {"constant": 1.0, "linear": 1.0 - share, "cosine": 0.5 * (1.0 + cos(pi * share))}[self.schedule]
        return self.lr * factor

    def problems(self, run: RunConfig) -> Iterator[Problem]:
        if run.total_frames < 0 and self.schedule != "constant":
            yield Problem(
                "optim.schedule",
                f"total_frames=-1 has no end to fall towards, found {self.schedule}",
                "Use optim.schedule=constant",
            )


class _Adam(OptimConfig):
    eps: PositiveReal = Field(description="added to the denominator; 1e-5 for PPO, 1e-8 for DQN")
    betas: list[Annotated[float, Field(ge=0, lt=1)]] = Field(
        description="decay of the two moments", min_length=2, max_length=2
    )


@register("optim", "adam", builder="rltool.optim:adam")
class AdamConfig(_Adam):
    """Adam (Kingma & Ba 2015)."""

    kind: Literal["adam"] = Field(description="Adam")


@register("optim", "adamw", builder="rltool.optim:adamw")
class AdamWConfig(_Adam):
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019)."""

    kind: Literal["adamw"] = Field(description="Adam with decoupled weight decay")
    weight_decay: NonNegativeReal = Field(description="share of each weight matrix taken off, times the learning rate")


@register("optim", "rmsprop", builder="rltool.optim:rmsprop")
class RMSpropConfig(OptimConfig):
    """RMSprop."""

    kind: Literal["rmsprop"] = Field(description="RMSprop")
    eps: PositiveReal = Field(description="added to the denominator")
    alpha: Annotated[float, Field(ge=0, lt=1)] = Field(description="decay of the squared gradient")
    momentum: Annotated[float, Field(ge=0, lt=1)] = Field(description="momentum")


@register("optim", "sgd", builder="rltool.optim:sgd")
class SGDConfig(OptimConfig):
    """Stochastic gradient descent."""

    kind: Literal["sgd"] = Field(description="stochastic gradient descent")
    momentum: Annotated[float, Field(ge=0, lt=1)] = Field(description="momentum")
    weight_decay: NonNegativeReal = Field(description="L2 penalty on the weight matrices")


class LoggingConfig(Schema):
    """Where metrics go besides the console."""

    kind: str = Field(description="which logger this is")
    interval: PositiveCount = Field(description="frames between points")


@register("logging", "tensorboard", builder="rltool.logs:TensorBoardLogger")
class TensorBoardConfig(LoggingConfig):
    """TensorBoard events and metrics.jsonl."""

    kind: Literal["tensorboard"] = Field(description="TensorBoard events and metrics.jsonl")
    histogram_interval: PositiveCount | None = Field(description="frames between histograms; null: none")


@register("logging", "csv", builder="rltool.logs:CSVLogger")
class CSVConfig(LoggingConfig):
    """metrics.csv and metrics.jsonl."""

    kind: Literal["csv"] = Field(description="metrics.csv and metrics.jsonl")


@register("logging", "wandb", builder="rltool.logs:WandbLogger")
class WandbConfig(LoggingConfig):
    """Weights & Biases and metrics.jsonl."""

    kind: Literal["wandb"] = Field(description="Weights & Biases and metrics.jsonl")
    histogram_interval: PositiveCount | None = Field(description="frames between histograms; null: none")
    project: str = Field(description="the project that runs go to", min_length=1)
    entity: str | None = Field(description="whose project it is, a user or a team; null: your own")
    group: str | None = Field(description="runs of one group are shown together; null: none")
    tags: list[str] = Field(description="words to find runs by")
    mode: Literal["online", "offline"] = Field(
        description="offline: kept in the run directory; wandb sync uploads it later"
    )


@register("logging", "none", builder="rltool.logs:NoLogger")
class NoLoggingConfig(LoggingConfig):
    """No files of metrics; the console still shows them."""

    kind: Literal["none"] = Field(description="console only")


# -------------------------------------------------------------------------------------------------- eval, save, stop, run


class EvalConfig(Schema):
    """Evaluation during training, on environments of its own."""

    interval: PositiveCount | None = Field(description="frames between evaluations; null: none")
    episodes: PositiveCount = Field(description="episodes each time")
    num_envs: SideBySide = Field(description="environments side by side")
    max_steps: PositiveCount = Field(description="an episode that has not ended by then is cut, in steps")
    deterministic: bool = Field(description="true: the mode of the policy; false: sample from it")
    final_episodes: Count = Field(
        description="episodes on fresh seeds at the end, of best.ckpt and of the last policy, in no more steps together than "
        "a fifth of the run's frames; 0: none"
    )
    video_interval: PositiveCount | None = Field(
        description="frames between videos of one episode (extra: video); null: none"
    )


class SaveConfig(Schema):
    """Checkpoints besides best.ckpt and the last one at the end."""

    interval: PositiveCount | None = Field(description="frames between checkpoints; null: only best and last")
    keep: Count = Field(description="numbered checkpoints kept; the oldest leave first; 0: last.ckpt alone is renewed")


def _rule(name: str) -> str:
    """A rule of health that there is."""
    if name not in NAMES:
        hint = did_you_mean(nearest(name, NAMES)) or f"One of {', '.join(NAMES)}"
        raise ValueError(f"expected the name of a fault, found {name!r}. {hint}")
    return name


class StopConfig(Schema):
    """When to end before the budget."""

    return_threshold: Real | None = Field(description="stop once evaluations reach this mean return; null: never")
    evaluations: PositiveCount = Field(description="how many evaluations in a row must reach it")
    on: list[Annotated[str, AfterValidator(_rule)]] = Field(
        description="faults that end the run when they are first seen; rltool doctor has a list"
    )


class RunConfig(Schema):
    """The whole, checked configuration of a run."""

    total_frames: Annotated[int, BeforeValidator(_whole), Field(ge=-1, lt=2**63)] = Field(
        description="budget in frames (steps of all environments together); -1: until stopped or solved"
    )
    seed: Annotated[int, Field(ge=0, lt=2**32)] | None = Field(
        description="seed of everything random; null: one is drawn, logged and saved"
    )
    device: Annotated[str, StringConstraints(pattern=r"^(auto|cpu|cuda|cuda:\d+)$")] = Field(
        description="auto, cpu, cuda or cuda:N"
    )
    threads: Annotated[int, BeforeValidator(_whole), Field(ge=1, le=1024)] = Field(
        description="torch threads; 1 is fastest for small networks"
    )
    compile: Literal["auto"] | bool = Field(
        description="compile policy and update with torch.compile; auto: when the run is long enough to pay for it"
    )
    on_nonfinite: Literal["stop", "skip"] = Field(
        description="a NaN or an infinity in a batch or a gradient: stop the run, or skip what it was found in"
    )
    resume: str | None = Field(description="a run directory or checkpoint to continue")
    init: str | None = Field(description="a checkpoint to take weights and normaliser from")
    plugins: list[str] = Field(
        description="modules imported first; they may register environments, algorithms, networks"
    )
    quiet: bool = Field(description="print warnings and the result only")
    debug: bool = Field(description="show tracebacks")
    env: SerializeAsAny[EnvConfig] = Field(description="the environment")
    algo: SerializeAsAny[AlgoConfig] = Field(description="the algorithm")
    network: SerializeAsAny[NetworkConfig] = Field(description="the network")
    buffer: SerializeAsAny[BufferConfig] = Field(description="the buffer of experience")
    optim: SerializeAsAny[OptimConfig] = Field(description="the optimiser")
    logging: SerializeAsAny[LoggingConfig] = Field(description="the logger")
    eval: EvalConfig = Field(description="evaluation during training")
    save: SaveConfig = Field(description="checkpoints")
    stop: StopConfig = Field(description="ending early")

    def problems(self, run: RunConfig | None = None) -> Iterator[Problem]:
        """Every rule across keys and groups that this configuration breaks."""
        del run
        if self.total_frames == 0:
            yield Problem("total_frames", "expected at least 1, or -1 for no limit, found 0")
        if self.stop.return_threshold is not None and self.eval.interval is None:
            yield Problem(
                "stop.return_threshold",
                "needs evaluations, but eval.interval is null",
                "Give eval.interval a number of frames",
            )
        if self.resume is not None and self.init is not None:
            yield Problem("init", "resume already brings the weights", "Give resume or init, not both")
        for node in (
            self.env,
            self.algo,
            self.network,
            self.buffer,
            self.optim,
            self.logging,
            self.eval,
            self.save,
            self.stop,
        ):
            yield from node.problems(self)


# ------------------------------------------------------------------------------------------------------------- sweeps


class JobsConfig(Schema):
    """How the jobs of a sweep share a machine (``hydra/launcher=local``)."""

    jobs: Literal["auto"] | PositiveCount = Field(
        description="jobs at a time; auto: as many as the cores allow, each with its threads"
    )
    jobs_per_gpu: PositiveCount = Field(description="jobs at a time on each GPU, of those that may use one (device)")
    memory: PositiveReal | None = Field(
        description="a job that uses more is ended, in GiB; null: jobs wait, and the largest begins again later, where "
        "memory runs out"
    )
    timeout: Seconds | None = Field(description="a job that takes longer is ended, in seconds; null: no limit")
    fail_fast: bool = Field(description="true: the first job that fails stops the others")


class TuneConfig(Schema):
    """A search for good values (``hydra/sweeper=tune``; extra: sweep)."""

    trials: PositiveCount = Field(description="trials in all, those of earlier sessions included")
    seeds: PositiveCount = Field(description="runs of a trial, with seeds of their own: seed, seed + 1, …")
    final_seeds: Count = Field(description="runs of the winner on fresh seeds, which its score comes from; 0: none")
    objective: Literal["final", "auc", "frames"] | list[Literal["final", "auc", "frames"]] = Field(
        description="of a trial's runs, on the mean: final: return at the end; auc: mean of all evaluations over the "
        "frames; frames: frames until stop.return_threshold or the environment's own; a list: several at once"
    )
    sampler: Literal["tpe", "random", "grid", "gp"] = Field(
        description="who proposes: tree-structured Parzen estimator, chance, each combination once, Gaussian process"
    )
    sampler_seed: Annotated[int, Field(ge=0, lt=2**32)] = Field(description="seed of the proposals")
    startup_trials: Count = Field(description="trials by chance before the sampler learns from them; never pruned")
    pruner: Literal["none", "median", "asha", "hyperband"] = Field(
        description="ends trials whose evaluations fall behind those of others"
    )
    prune_after: Fraction = Field(description="no trial is ended before this share of its frames")
    storage: str | None = Field(
        description="a database URL, which several processes or machines can share; null: a file in the sweep's directory",
        min_length=1,
    )
    study: Place = Field(description="the name of the study in the database")
    space: dict[str, str | list[JsonValue]] = Field(
        description="the values to search, by key: tag(log,interval(1e-5,1e-2)), int(interval(1,8)), choice(a,b), range(1,9), "
        "or a list; what is typed so is added"
    )

    @field_validator("space", mode="before")
    @classmethod
    def _by_dotted_key(cls, space: object) -> object:
        """Nodes are keys with dots; a single value is a word, whose meaning is judged with the others'."""
        if not isinstance(space, Mapping):
            return space
        return {key: of if isinstance(of, str | list) else json.dumps(of) for key, of in flat(space).items()}


class SweepConfig(Schema):
    """What of ``rltool train -m`` concerns the jobs together."""

    sweep: JobsConfig = Field(description="how the jobs share the machine")
    tune: TuneConfig = Field(description="the search")


# ------------------------------------------------------------------------------------------------ the other commands


class EvalRunConfig(Schema):
    """The configuration of ``rltool eval``; all else comes from the checkpoint."""

    checkpoint: Place | list[Place] = Field(
        description="a .ckpt file, a run directory (its best.ckpt), a directory of runs, a pattern with *, or a list of these"
    )
    episodes: PositiveCount = Field(description="episodes; 100 for a figure to quote")
    deterministic: bool | Literal["both"] = Field(
        description="true: the mode of the policy; false: sample from it; both: one after the other"
    )
    seed: Annotated[int, Field(ge=0, lt=2**32)] = Field(
        description="seed of the environments and of sampling; the same seed gives the same report"
    )
    device: Annotated[str, StringConstraints(pattern=r"^(auto|cpu|cuda|cuda:\d+)$")] = Field(
        description="auto, cpu, cuda or cuda:N"
    )
    num_envs: SideBySide = Field(description="environments side by side")
    max_steps: PositiveCount | None = Field(
        description="an episode that has not ended by then is cut, in steps; null: as in training"
    )
    render: bool = Field(description="open a window and show the episodes")
    video: bool = Field(description="write a video of each episode (extra: video)")
    video_format: Literal["mp4", "gif", "both"] = Field(
        description="gif: smaller pictures, for a page; both: a file of each"
    )
    video_dir: str | None = Field(
        description="directory for the videos; null: a new one under videos/ of the checkpoint's run, or of the working "
        "directory where it lies elsewhere",
        min_length=1,
    )
    out: str | None = Field(description="a JSON file for the whole report; null: none")
    trajectories: Annotated[str, StringConstraints(pattern=r".\.npz$")] | None = Field(
        description="a file ending in .npz for every step of the episodes of one checkpoint; null: none"
    )
    plugins: list[str] = Field(
        description="modules imported first; those that a checkpoint of somebody else's names are imported only from here"
    )
    quiet: bool = Field(description="print the result only, in one line")
    debug: bool = Field(description="show tracebacks")
    env: dict[str, JsonValue] = Field(
        description="changes to the environment of the checkpoint: env.id=…, env.kwargs.x=…"
    )

    @property
    def typed(self) -> dict[str, object]:
        """The user's own values of keys that the checkpoint has, too."""
        return {"env": self.env, **({"plugins": self.plugins} if self.plugins else {})}

    @field_validator("video")
    @classmethod
    def _is_no_window(cls, video: bool, others: ValidationInfo) -> bool:
        if video and others.data.get("render"):
            raise ValueError(
                "expected false with render=true (an environment draws in a window or in a video), found true"
            )
        return video


class EnvCheckConfig(Schema):
    """The configuration of ``rltool env``."""

    steps: PositiveCount = Field(description="steps of the random rollout, all environments together")
    seed: Annotated[int, Field(ge=0, lt=2**32)] = Field(
        description="seed of the environments and of the random actions"
    )
    check: Literal["quick", "full"] = Field(
        description="full: also what Gymnasium's own checker says of the environment without its wrappers"
    )
    plugins: list[str] = Field(description="modules imported first; they may register environments")
    debug: bool = Field(description="show tracebacks")
    env: SerializeAsAny[EnvConfig] = Field(description="the environment")


class PlotConfig(Schema):
    """The configuration of ``rltool plot``; the runs are named beside it."""

    metric: list[str] = Field(description="what to draw, a panel each: any name in metrics.jsonl", min_length=1)
    x: Literal["frames", "seconds"] = Field(description="what it is drawn over; seconds are those of the training loop")
    out: str = Field(
        description="a .png, .svg or .pdf file, or a .csv of the points; - draws in the terminal", min_length=1
    )
    group: list[str] | None = Field(
        description="keys whose values make a curve; []: all runs of an environment in one; null: all keys but the seed"
    )
    estimate: Literal["auto", "mean", "median", "iqm"] = Field(
        description="the line over the seeds; auto: the interquartile mean where every curve has 4 seeds, else the mean"
    )
    resamples: Resamples = Field(description="resamples of the bootstrap behind a band")
    smooth: Literal["auto"] | PositiveCount | None = Field(
        description="points in a moving average; auto: a tenth of them for training episodes, none for the rest; null: none"
    )
    threshold: Literal["auto"] | Real | None = Field(
        description="a line across the returns, at a number; auto: where the environment counts as solved, if it says so; null: "
        "none"
    )
    width: Inches = Field(description="of the picture, in inches: 3.5 is a column, 7 a page")
    debug: bool = Field(description="show tracebacks")


class CompareConfig(Schema):
    """The configuration of ``rltool compare``; the runs are named beside it."""

    metric: str = Field(description="what is compared, the larger the better: any name in metrics.jsonl", min_length=1)
    at: Literal["final", "last", "best", "auc"] = Field(
        description="a run's score; final: the return of its last policy on fresh episodes after training, where every run "
        "has it, else last; last: its last value in training; best: its best (flatters: a maximum of noise); auc: the mean "
        "over the frames that all runs have"
    )
    out: str | None = Field(
        description="a directory for table.md, table.csv, comparison.png and comparison.svg; null: none", min_length=1
    )
    group: list[str] | None = Field(
        description="without --: keys whose values make a group; null: all keys but the seed"
    )
    resamples: Resamples = Field(description="resamples of the bootstrap behind an interval")
    threshold: Literal["auto"] | Real | None = Field(
        description="the return to be reached, a number; auto: where the environment counts as solved, if it says so; null: nothing"
    )
    width: Inches = Field(description="of the picture, in inches")
    debug: bool = Field(description="show tracebacks")

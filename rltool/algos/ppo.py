"""Proximal policy optimisation (Schulman et al. 2017, arXiv:1707.06347)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from tensordict import TensorDict
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution
from torchrl.modules import IndependentNormal, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value.functional import td0_advantage_estimate, vec_generalized_advantage_estimate

from rltool.algos.base import Algorithm, Component, GreedyPolicy, RandomState, Runtime
from rltool.buffers import RolloutBuffer
from rltool.choices import Choices, apart, best, gumbel, masked
from rltool.collect import Explorer, TensorLeaves
from rltool.metrics import Metrics
from rltool.nets import Features, Network, RunningNormalizer, head, network
from rltool.optim import FlatParameters, Optimizer
from rltool.schema import Anneal, PPOConfig
from rltool.units import input_metrics, sample, saturated_units

if TYPE_CHECKING:
    from rltool.nets import Preprocessor

POLICY_HEAD_GAIN, VALUE_HEAD_GAIN = 0.01, 1.0
# A whole batch of images goes through the networks in pieces of this size; its activations are of the same order.
FORWARD_BYTES = 2**26
# γλ below which the errors of later steps count for nothing in float32.
_NO_TRACE = 1e-6

# What one gradient step reports, in the order of its row.
STEP_METRICS = (
    "train/loss",
    "critic/value_loss",
    "train/grad_norm",
    "policy/approx_kl",
    "train/clip_fraction",
    "policy/ratio_mean",
    "critic/clip_fraction",
)


class PPO(Algorithm):
    """PPO with a clipped surrogate, for discrete and continuous actions.

    Args:
        config: the algo node.
        run: the runtime objects it is built from.
    """

    def __init__(self, config: PPOConfig, *, run: Runtime) -> None:
        super().__init__(config, run)
        self._config, self._budget = config, run.budget
        self.actions = replace(run.actions, squash=config.squash)
        self.actor, self.critic = self._networks(config, run)
        self.policy = GreedyPolicy(self.preprocessor, self.actor.mode)
        self._explorer = StochasticPolicy(self.preprocessor, self.actor, run)

        self.loss = _ClippedSurrogate(
            self.actor.probabilistic(),
            ValueOperator(self.critic, in_keys=list(self.actor.encoder.keys)),
            functional=False,
            clip_epsilon=self._clip_epsilon(0),
            clip_value=config.clip_value,
            entropy_bonus=config.entropy_coeff > 0,
            entropy_coeff=config.entropy_coeff,
            critic_coeff=config.critic_coeff,
            loss_critic_type=config.loss_critic_type,
            normalize_advantage=config.normalize_advantage,
            log_explained_variance=False,
        ).to(run.device)
        self.loss.in_keys  # noqa: B018 - filled in at first use, which would make a compiled graph compile again
        self.flat = FlatParameters({"policy": self.actor, "critic": self.critic})
        self.optimizer = cast("Optimizer", run.optim.build(flat=self.flat))
        self.reward_scale = ReturnScale(run.num_envs, config.gamma).to(run.device) if config.scale_reward else None
        self._buffer = cast("RolloutBuffer", run.buffer.build(generator=self._minibatch_order))
        self._gradient = run.compiler(self.gradient)
        self._looked_at: Features = {}
        if dropped := self.batch_frames % config.minibatch_size:
            run.note(
                f"{self.batch_frames} frames a batch make {self.batch_frames // config.minibatch_size} minibatches of "
                f"{config.minibatch_size}; the other {dropped} frames sit out each epoch, drawn anew"
            )

    def _networks(self, config: PPOConfig, run: Runtime) -> tuple[CategoricalActor | GaussianActor, nn.Module]:
        """Actor and critic: a body each, or heads on one body that belongs to the actor."""
        size, trunk = self.actions.size, None
        policy: nn.Module
        value: nn.Module
        if run.network.shared:
            trunk = Trunk(network(run.network, self.preprocessor, None, self.weights), self.preprocessor)
            policy = head(run.network, trunk.body.width, size, self.weights, gain=POLICY_HEAD_GAIN)
            value = head(run.network, trunk.body.width, 1, self.weights, gain=VALUE_HEAD_GAIN)
        else:
            policy = network(run.network, self.preprocessor, size, self.weights, head_gain=POLICY_HEAD_GAIN)
            value = network(run.network, self.preprocessor, 1, self.weights, head_gain=VALUE_HEAD_GAIN)
        encoder = trunk or Apart(self.preprocessor)
        actor: CategoricalActor | GaussianActor
        if self.actions.continuous:
            actor = GaussianActor(policy, encoder, size, config.initial_std)
        else:
            actor = CategoricalActor(policy, encoder, self.actions.nvec)
        return actor.to(run.device), value.to(run.device)

    @property
    def sampler(self) -> Explorer:
        """The stochastic policy."""
        return self._explorer

    def learn(self, batch: TensorDict, frames: int) -> Metrics:
        r"""Several epochs of minibatch steps on one batch.

        With r(θ) = π_θ(a|s) / π_old(a|s) and Â from GAE(γ, λ) (Schulman et al. 2016, arXiv:1506.02438, eq. 16), each
        minibatch descends

            L = -E[min(r Â, clip(r, 1-ε, 1+ε) Â)] + c_v E[(V(s) - V_target)²] - c_e E[H(π)]      (eq. 7 and 9)

        A terminal state is worth 0; a truncated episode and the end of the batch are worth V of the true last
        observation; the λ-chain is cut wherever an episode ends. Rewards are divided by the running standard deviation
        of the discounted return, without subtracting a mean.

        Args:
            batch: ``[num_envs, steps]``; read: observation, action, next reward / terminated / done / observation.
            frames: frames of the run, this batch included.
        """
        config = self._config
        learning_rate = self.optimizer.set_lr(frames - batch.numel(), self._budget)
        self.loss.clip_epsilon.fill_(self._clip_epsilon(frames - batch.numel()))
        data, metrics = self.prepare(batch)

        rows: list[Tensor] = []
        for _ in range(config.epochs):
            first = len(rows)
            for minibatch in self._buffer.epoch(data, config.minibatch_size):
                gradient, row = self._gradient(minibatch)
                if not self.leaves_out(gradient, row, frames):
                    self.optimizer.step(gradient)
                    rows.append(row)
            if config.target_kl is not None and len(rows) > first:
                kl = torch.stack([row[STEP_METRICS.index("policy/approx_kl")] for row in rows[first:]]).mean()
                if float(kl) > 1.5 * config.target_kl:
                    break
        if not rows:
            return metrics
        steps = torch.stack(rows)
        self.optimizer.check(steps, STEP_METRICS, frames, lambda: data)
        self.counters.updates += len(rows)
        self._looked_at = sample(data)
        metrics |= dict(zip(STEP_METRICS, steps.mean(0), strict=True))
        if config.clip_value is None:
            del metrics["critic/clip_fraction"]
        metrics["policy/approx_kl_max"] = steps[:, STEP_METRICS.index("policy/approx_kl")].max()
        metrics["train/learning_rate"] = torch.tensor(learning_rate)
        metrics["train/updates"] = torch.tensor(float(self.counters.updates))
        return metrics

    @torch.no_grad()
    def inspect(self) -> Metrics:
        """Parameters and the last gradient, layer by layer; and of a few states of the last batch what its epochs made of the
        policy, and what the networks make of their inputs."""
        data = self._looked_at
        if not data:
            return {}
        inputs = [data[key] for key in self.preprocessor.keys]
        encoded = self.actor.encoder({key: data[key] for key in self.preprocessor.masked_keys})
        ratio = (self.actor.distribution(encoded).log_prob(data["action"]) - data["action_log_prob"]).exp()
        metrics = {**self.optimizer.histograms(), **input_metrics(inputs)}
        metrics |= {"policy/ratio_min": ratio.min(), "policy/ratio_max": ratio.max()}
        encoder = self.actor.encoder
        bodies = (
            {"policy": encoder.body}
            if isinstance(encoder, Trunk)
            else {"policy": self.actor.net, "critic": self.critic}
        )
        for name, body in bodies.items():
            if (share := saturated_units(body, inputs)) is not None:
                metrics[f"{name}/saturated_units"] = share
        return metrics

    @torch.no_grad()
    def prepare(self, batch: TensorDict) -> tuple[dict[str, Tensor], Metrics]:
        """Advantages and value targets of a time-ordered batch, flattened to frames.

        Returns:
            What :meth:`gradient` takes, by name: network inputs ``[N, …]``, ``action [N, …]``, ``action_log_prob [N]``,
            ``advantage``, ``value_target``, ``state_value`` ``[N, 1]``; and the metrics of the batch.
        """
        config = self._config
        num_envs, steps = batch.batch_size
        reward, done, terminated = (batch["next", name] for name in ("reward", "done", "terminated"))
        if self.reward_scale is not None:
            reward = self.reward_scale(reward, done)

        # One value pass: V of every observation, and of the observations that followed only where the next row is
        # not the same state (an episode's end, the batch's end).
        elsewhere = done.squeeze(-1).clone()
        elsewhere[:, -1] = True
        features = self.preprocessor({key: leaf.flatten(0, 1) for key, leaf in self.leaves(batch).items()})
        last = self.preprocessor({key: leaf[elsewhere] for key, leaf in self.leaves(batch, following=True).items()})
        action = batch["action"].flatten(0, 1)
        values, log_probs, entropies = [], [], []
        for rows, part in pieces(features):
            encoded = self.actor.encoder(part)
            distribution = self.actor.distribution(encoded)
            values.append(self._value(encoded))
            log_probs.append(distribution.log_prob(action[rows]))
            entropies.append(distribution.entropy())
        value = torch.cat(values).view(num_envs, steps, 1)
        next_value = torch.cat([value[:, 1:], torch.empty_like(value[:, :1])], 1)
        next_value[elsewhere] = torch.cat([self._value(self.actor.encoder(part)) for _, part in pieces(last)])

        if config.gamma * config.gae_lambda < _NO_TRACE:
            # TorchRL's vectorised estimate fails there, with an IndexError.
            advantage = td0_advantage_estimate(config.gamma, value, next_value, reward, done, terminated)
            target = advantage + value
        else:
            advantage, target = vec_generalized_advantage_estimate(
                config.gamma, config.gae_lambda, value, next_value, reward, done, terminated
            )
        data = {
            **features,
            "action": action,
            "action_log_prob": torch.cat(log_probs),
            "advantage": advantage.flatten(0, 1),
            "value_target": target.flatten(0, 1),
            "state_value": value.flatten(0, 1),
        }
        spread = target.var(correction=0)
        metrics: Metrics = {
            "policy/entropy": torch.cat(entropies).mean(),
            "policy/actions": action,
            "critic/value_target_mean": target.mean(),
            "data/advantage_mean": advantage.mean(),
            "data/advantage_std": advantage.std(correction=0),
            "data/advantages": advantage,
            "data/truncated_share": (done & ~terminated).float().sum() / done.float().sum().clamp_min(1),
        }
        if float(spread) > 0:
            metrics["critic/explained_variance"] = 1 - (target - value).var(correction=0) / spread
            pairs = torch.stack([target.flatten(), value.flatten()]).double()
            metrics["critic/value_return_correlation"] = torch.corrcoef(pairs)[0, 1].nan_to_num()
        return data, metrics

    def _value(self, encoded: Features) -> Tensor:
        """V ``[N, 1]`` of what the encoder gave."""
        return cast("Tensor", self.critic(*(encoded[key] for key in self.actor.encoder.keys)))

    def gradient(self, data: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The clipped gradient of the loss on a minibatch of what :meth:`prepare` gave, flat, and the row of
        :data:`STEP_METRICS`.

        A pure function of its arguments and the parameters: it compiles into one graph.
        """
        encoded = self.actor.encoder({key: data[key] for key in self.preprocessor.masked_keys})
        minibatch = TensorDict(data | encoded, [data["action"].shape[0]])
        losses = self.loss(minibatch)
        total = losses["loss_objective"] + losses["loss_critic"]
        if self._config.entropy_coeff > 0:
            total = total + losses["loss_entropy"]
        gradient = self.flat.gather(torch.autograd.grad(total, self.flat.parameters))
        norm = gradient.norm()
        if self._config.max_grad_norm is not None:
            gradient = gradient * (self._config.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
        # KL(old || new) ≈ E[(r - 1) - log r], low in variance and never negative (Schulman 2020, "Approximating KL
        # divergence"); TorchRL reports E[-log r] and E[r].
        kl = losses["mean_ratio"] - 1 + losses["kl_approx"]
        value_loss = losses["loss_critic"] / self._config.critic_coeff
        clipped = losses["value_clip_fraction"] if self._config.clip_value is not None else torch.zeros_like(norm)
        row = torch.stack([total, value_loss, norm, kl, losses["clip_fraction"], losses["mean_ratio"], clipped])
        return gradient, row.detach()

    def bytes_per_frame(self) -> int:
        """Also the networks' inputs, as they came and in the order of an epoch."""
        sizes = {spec.name: np.dtype(spec.dtype).itemsize for spec in self.preprocessor.leaves if spec.kind == "image"}
        inputs = sum(math.prod(shape) * sizes.get(name, 4) for name, shape in self.preprocessor.shapes.items())
        return super().bytes_per_frame() + 2 * inputs

    def abandon_episodes(self) -> None:
        """The discounted returns begin at 0."""
        if self.reward_scale is not None:
            self.reward_scale.returns.zero_()

    def components(self) -> dict[str, Component]:
        """Networks, statistics, moments, counters and generators."""
        parts: dict[str, Component] = {
            "policy": self.actor,
            "critic": self.critic,
            "normalizer": self.preprocessor.normalizers,
            "optim": self.optimizer,
            "counters": self.counters,
            **self.extras,
            "rng.minibatch": RandomState(self._minibatch_order),
        }
        if self.reward_scale is not None:
            parts["reward_scale"] = self.reward_scale
        return parts

    def _clip_epsilon(self, frames: int) -> float:
        epsilon = self._config.clip_epsilon
        # TorchRL bounds log r by log(1 ± ε): a schedule that ends at 0 stays a hair above it.
        return max(epsilon.at(frames, self._budget), 1e-6) if isinstance(epsilon, Anneal) else epsilon


def pieces(features: Features) -> Iterator[tuple[slice, Features]]:
    """Rows of network inputs, as many at a time as take :data:`FORWARD_BYTES` in float32: all at once but for images."""
    count = len(next(iter(features.values())))
    row = sum(4 * math.prod(column.shape[1:]) for column in features.values())
    size = max(FORWARD_BYTES // row, 1)
    for rows in (slice(first, first + size) for first in range(0, count, size)):
        yield rows, {key: column[rows] for key, column in features.items()}


class Apart:
    """No shared body: actor and critic take the network inputs themselves.

    Attributes:
        keys: names of what a critic takes.
        masked_keys: the same, and the mask of actions where there is one: what an actor takes.
    """

    def __init__(self, preprocessor: Preprocessor) -> None:
        self.keys, self.masked_keys = preprocessor.keys, preprocessor.masked_keys

    def __call__(self, features: Features) -> Features:
        """The features."""
        return features


class Trunk(nn.Module):
    """The body that actor and critic share: network inputs to its output, ``hidden [N, width]``. Attributes as in
    :class:`Apart`."""

    def __init__(self, body: Network, preprocessor: Preprocessor) -> None:
        super().__init__()
        self.body = body
        self._inputs = preprocessor.keys
        self.keys: tuple[str, ...] = ("hidden",)
        self.masked_keys: tuple[str, ...] = (*self.keys, *preprocessor.masked_keys[len(self._inputs) :])

    def forward(self, features: Features) -> Features:
        """What is shared, and the mask where there is one."""
        hidden = self.body(*(features[key] for key in self._inputs))
        return {"hidden": hidden, **{key: features[key] for key in self.masked_keys[1:]}}


class CategoricalActor(nn.Module):
    """Scores of discrete actions, π(a|s) = softmax(scores); of several choices at once, the product over them.

    Args:
        net: encoded observation to scores ``[N, sum(nvec)]``.
        encoder: network inputs to what ``net`` takes, and the mask.
        nvec: options of each choice.
    """

    def __init__(self, net: nn.Module, encoder: Apart | Trunk, nvec: tuple[int, ...]) -> None:
        super().__init__()
        self.net, self.encoder, self.nvec = net, encoder, nvec
        self._inputs = len(encoder.keys)

    def forward(self, *encoded: Tensor) -> Tensor:
        """Logits as the distribution takes them: ``[N, options]``, or ``[N, choices, most options]``."""
        scores = self._scores(*encoded)
        return scores if len(self.nvec) == 1 else apart(scores, self.nvec)

    def _scores(self, *encoded: Tensor) -> Tensor:
        scores = self.net(*encoded[: self._inputs])
        return masked(scores, encoded[-1] if len(encoded) > self._inputs else None)

    def mode(self, features: Features) -> Tensor:
        """The best option of each choice."""
        return best(self._scores(*self.encoder(features).values()), self.nvec)

    def draw(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Gumbel noise ``[*shape, sum(nvec)]``."""
        return gumbel((*shape, sum(self.nvec)), generator)

    def act(self, features: Features, noise: Tensor) -> Tensor:
        """Sampled actions ``[N]`` or ``[N, choices]``."""
        return best(self._scores(*self.encoder(features).values()) + noise, self.nvec)

    def distribution(self, encoded: Features) -> Distribution:
        """π(·|s)."""
        return self._class(logits=self(*encoded.values()), validate_args=False)

    @property
    def _class(self) -> type[Categorical | Choices]:
        return Categorical if len(self.nvec) == 1 else Choices

    def probabilistic(self) -> ProbabilisticTensorDictSequential:
        """This actor, behind its encoder, as TorchRL's losses take it."""
        return _probabilistic(self, self.encoder.masked_keys, ["logits"], self._class)


class GaussianActor(nn.Module):
    """A diagonal Gaussian with a standard deviation that does not depend on the state.

    Args:
        net: encoded observation to means ``[N, size]``.
        encoder: network inputs to what ``net`` takes.
        size: dimensions of an action.
        initial_std: standard deviation at the start.
    """

    def __init__(self, net: nn.Module, encoder: Apart | Trunk, size: int, initial_std: float) -> None:
        super().__init__()
        self.net, self.encoder = net, encoder
        self.log_std = nn.Parameter(torch.full((size,), math.log(initial_std)))

    def forward(self, *encoded: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation, both ``[N, dimensions]``."""
        mean = self.net(*encoded)
        return mean, self.log_std.exp().expand_as(mean)

    def mode(self, features: Features) -> Tensor:
        """The mean ``[N, dimensions]``."""
        return cast("Tensor", self.net(*self.encoder(features).values()))

    def draw(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Standard normal noise ``[*shape, size]``."""
        return torch.randn(*shape, len(self.log_std), generator=generator)

    def act(self, features: Features, noise: Tensor) -> Tensor:
        """Sampled actions ``[N, dimensions]``, unclipped."""
        mean, std = self(*self.encoder(features).values())
        return cast("Tensor", mean + std * noise)

    def distribution(self, encoded: Features) -> Distribution:
        """π(·|s)."""
        return cast("Distribution", IndependentNormal(*self(*encoded.values()), validate_args=False))

    def probabilistic(self) -> ProbabilisticTensorDictSequential:
        """This actor, behind its encoder, as TorchRL's losses take it."""
        return _probabilistic(self, self.encoder.masked_keys, ["loc", "scale"], IndependentNormal)


def _probabilistic(
    module: nn.Module, inputs: Sequence[str], keys: list[str], distribution: type[Distribution]
) -> ProbabilisticTensorDictSequential:
    return ProbabilisticTensorDictSequential(
        TensorDictModule(module, in_keys=list(inputs), out_keys=keys),
        ProbabilisticTensorDictModule(
            in_keys=keys,
            out_keys=["action"],
            distribution_class=distribution,
            distribution_kwargs={"validate_args": False},
            return_log_prob=True,
            log_prob_key="action_log_prob",
        ),
    )


class _ClippedSurrogate(ClipPPOLoss):  # type: ignore[misc]
    """TorchRL's loss, made to compile into one graph without random numbers.

    While compiling, TorchRL adds a sampled estimate of the entropy in case the closed form is infinite; ours never is.
    It also asks whether the value is clipped of a tensor, which a graph cannot branch on: here that is a plain number.
    """

    def __init__(self, *args: nn.Module, clip_value: float | None, **kwargs: object) -> None:
        super().__init__(*args, clip_value=clip_value, **kwargs)
        if clip_value is not None:
            del self._buffers["clip_value"]
            self.clip_value: float = clip_value

    def _get_entropy(self, dist: Distribution, adv_shape: torch.Size) -> Tensor:
        del adv_shape
        return dist.entropy().unsqueeze(-1)


class StochasticPolicy:
    """The policy that PPO collects with: a sample from π, its noise drawn a batch at a time."""

    def __init__(self, preprocessor: Preprocessor, actor: CategoricalActor | GaussianActor, run: Runtime) -> None:
        self._preprocessor, self._actor = preprocessor, actor
        self._call = run.compiler(self._act)

    def draw(self, steps: int, num_envs: int, frames: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        """Noise ``[steps, num_envs, size]``."""
        del frames
        return (self._actor.draw((steps, num_envs), generator),)

    def __call__(self, leaves: TensorLeaves, noise: tuple[Tensor, ...]) -> Tensor:
        """Sampled actions in policy units."""
        return self._call(leaves, noise[0])

    def _act(self, leaves: TensorLeaves, noise: Tensor) -> Tensor:
        return self._actor.act(self._preprocessor(leaves), noise)


class ReturnScale(nn.Module):
    """Divides rewards by the running standard deviation of the discounted return; no mean is subtracted.

    R_t = γ R_{t-1} + r_t, set to 0 where an episode ends (Engstrom et al. 2020, arXiv:2005.12729). The statistics take
    in a batch first, so that the very first one is scaled too.

    Args:
        num_envs: environments, each with a return of its own.
        gamma: the discount factor that the algorithm learns with.
        clip: largest absolute scaled reward.
    """

    returns: Tensor

    def __init__(self, num_envs: int, gamma: float, clip: float = 10.0) -> None:
        super().__init__()
        self.gamma, self.clip = gamma, clip
        self.register_buffer("returns", torch.zeros(num_envs, dtype=torch.float64))
        self.statistics = RunningNormalizer(())

    @torch.no_grad()
    def forward(self, reward: Tensor, done: Tensor) -> Tensor:
        """Scaled rewards ``[num_envs, steps, 1]``."""
        rewards, ends = reward.squeeze(-1).double().cpu().numpy().T, done.squeeze(-1).cpu().numpy().T
        running = self.returns.cpu().numpy().copy()
        seen = torch.empty(rewards.shape, dtype=torch.float64)
        rows = seen.numpy()
        for t in range(len(rewards)):
            running = running * self.gamma + rewards[t]
            rows[t] = running
            running[ends[t]] = 0.0
        self.returns.copy_(torch.from_numpy(running))
        self.statistics.update(seen.flatten())
        scale = float(self.statistics.var + 1e-8) ** 0.5
        scaled: Tensor = (reward / scale).clamp(-self.clip, self.clip)
        return scaled

"""Soft actor-critic (Haarnoja et al. 2018, arXiv:1812.05905), with automatic temperature."""

from __future__ import annotations

import math
from typing import cast

import torch
from tensordict import TensorDict, TensorDictParams
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.nn.functional import softplus
from torchrl.objectives import SACLoss, ValueEstimators

from rltool.algos.base import Component, GreedyPolicy, RandomState, Runtime
from rltool.algos.replaying import Columns, ReplayedAlgorithm
from rltool.collect import Explorer, TensorLeaves
from rltool.errors import ConfigError, Problem
from rltool.metrics import Metric, explain
from rltool.nets import Features, Network, Preprocessor, network
from rltool.schema import SACConfig
from rltool.targets import TargetNetwork, note_large

CRITICS = 2
# log σ is cut to this range, as in the authors' code.
LOG_STD = (-20.0, 2.0)

explain(
    Metric(
        "policy/loss",
        "mean of α log π(a|s) - min Q(s, a) over actions of the current policy",
        "reward",
        "falls as the return rises: it is about minus the value",
        "rises without end: Q runs away; lower optim.lr, raise buffer.size",
    ),
    Metric(
        "policy/alpha",
        "temperature: the weight of the entropy against the reward",
        "reward per nat",
        "falls as the policy becomes sure, then settles",
        "grows without end: target_entropy asks for more than bounded actions allow; near 0 early: lower algo.target_entropy",
    ),
)


class SAC(ReplayedAlgorithm):
    """SAC with two critics, for bounded continuous actions.

    Args:
        config: the algo node.
        run: the runtime objects it is built from.

    Raises:
        ConfigError: the environment's actions are not numbers between two bounds.
    """

    step_metrics = (
        "train/loss",
        "critic/value_loss",
        "policy/loss",
        "policy/entropy",
        "policy/alpha",
        "critic/q_value_mean",
        "train/grad_norm",
    )

    def __init__(self, config: SACConfig, *, run: Runtime) -> None:
        if not run.actions.bounded:
            use = "Use algo=ppo, or bound them with a wrapper" if run.actions.continuous else "Use algo=dqn or algo=ppo"
            if run.actions.kind in ("multi_discrete", "multi_binary"):
                use = "Use algo=ppo"
            raise ConfigError(
                Problem("algo", f"sac needs a Box action space with finite bounds; {run.env} has {run.actions}", use)
            )
        super().__init__(config, run)
        self._config = config
        size = run.actions.size
        self.actor = SquashedActor(network(run.network, self.preprocessor, 2 * size, self.weights), self.preprocessor)
        self.actor.to(run.device)
        critics = [
            network(run.network, self.preprocessor, 1, self.weights, extra={"action": (size,)}).to(run.device)
            for _ in range(CRITICS)
        ]
        critic_keys = [*self.preprocessor.keys, "action"]
        self.loss = SACLoss(
            self.actor.probabilistic(),
            [TensorDictModule(critic, in_keys=critic_keys, out_keys=["state_action_value"]) for critic in critics],
            num_qvalue_nets=CRITICS,
            loss_function="l2",
            alpha_init=config.alpha,
            fixed_alpha=not config.learn_alpha,
            target_entropy=-float(size) if config.target_entropy is None else config.target_entropy,
            # The weights of prioritised replay correct the critics' error; the policy's loss is not theirs.
            use_prioritized_weights=False,
            reduction="none",
            scalar_output_mode="exclude",
        ).to(run.device)
        self.loss.make_value_estimator(ValueEstimators.TD0, gamma=config.gamma)
        # Filled in at first use, which would make a compiled graph compile again.
        self.loss.in_keys, self.loss.target_entropy  # noqa: B018
        note_large(config.tau, run.note)
        # Each tensor holds both critics', one behind the other.
        self.critic = TensorDictParams(self.loss.qvalue_network_params.get("module"), no_convert=True)
        self.target = TargetNetwork(
            self.critic, self.loss.qvalue_network_params, self.loss.target_qvalue_network_params
        )
        self.temperature = nn.ParameterDict({"log_alpha": self.loss.log_alpha} if config.learn_alpha else {})
        self._optimize({"policy": self.actor, "critic": self.critic, "temperature": self.temperature}, run)
        self.policy = GreedyPolicy(self.preprocessor, self.actor.mode)
        self._explorer = SquashedPolicy(self.preprocessor, self.actor, run)

    @property
    def sampler(self) -> Explorer:
        """The stochastic policy."""
        return self._explorer

    def after_step(self) -> None:
        """The targets follow: target ← (1-τ)·target + τ·critic."""
        self.target.follow(self._config.tau)

    def gradient(self, now: Columns, following: Columns) -> tuple[Tensor, Tensor, Tensor]:
        r"""The clipped gradient of the three losses on a minibatch, flat; the row of :attr:`step_metrics`; |δ| ``[size]``
        (the larger one of the two critics).

        With a' ~ π(·|s'), both critics descend

            L_Q = E[w Σ_i (Q_i(s, a) - y)²],   y = r + γ (1 - terminated) (min_i Q_target,i(s', a') - α log π(a'|s'))

        the policy (through a ~ π(·|s), a = tanh(μ + σ ε)) and the temperature

            L_π = E[α log π(a|s) - min_i Q_i(s, a)],   L_α = -log α · E[log π(a|s) + H]      (eq. 5, 7 and 18; log α for α)

        w is the importance weight of prioritised replay (1 for uniform). A time limit does not cut y. A pure function of
        its arguments and the parameters: it compiles into one graph.

        Args:
            now: network inputs, ``noise``, ``action``, ``priority_weight`` ``[size, …]``.
            following: network inputs, ``noise``, ``reward``, ``terminated``, ``done`` ``[size, …]``.
        """
        minibatch = TensorDict({**now, "next": following}, [now["action"].shape[0]])
        loss_critic, critic = self.loss.qvalue_v2_loss(minibatch)
        loss_policy, policy = self.loss.actor_loss(minibatch)
        log_prob, alpha = policy["log_prob"], self.loss.log_alpha.detach().exp()
        value_loss, policy_loss = (now["priority_weight"] * loss_critic).mean(), loss_policy.mean()
        total = value_loss + policy_loss
        if self._config.learn_alpha:
            total = total + self.loss.alpha_loss(log_prob).mean()
        gradient = self.flat.gather(torch.autograd.grad(total, self.flat.parameters))
        norm = gradient.norm()
        if self._config.max_grad_norm is not None:
            gradient = gradient * (self._config.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
        value = (alpha * log_prob - loss_policy).mean()
        row = torch.stack([total, value_loss, policy_loss, -log_prob.mean(), alpha, value, norm])
        return gradient, row.detach(), critic["td_error"].detach()

    def columns(self, drawn: TensorDict) -> tuple[Columns, Columns]:
        """As in every replayed algorithm, with the noise of two samples, so that a compiled graph draws no random
        numbers."""
        now, following = super().columns(drawn)
        noise = torch.randn(2, *now["action"].shape, generator=self._minibatch_order).to(now["action"].device)
        return {**now, "noise": noise[0]}, {**following, "noise": noise[1]}

    @property
    def policy_network(self) -> nn.Module:
        """The actor's."""
        return self.actor.net

    def components(self) -> dict[str, Component]:
        """What all replayed algorithms keep, the networks, the temperature, and what draws the noise."""
        return {
            "policy": self.actor,
            "critic": self.critic,
            "target": self.target,
            "temperature": self.temperature,
            **super().components(),
            "rng.minibatch": RandomState(self._minibatch_order),
        }


class SquashedActor(nn.Module):
    """a = tanh(μ(s) + σ(s) ε): a Gaussian whose mean and deviation depend on the state, squashed into (-1, 1)."""

    def __init__(self, net: Network, preprocessor: Preprocessor) -> None:
        super().__init__()
        self.net = net
        self.keys = preprocessor.keys

    def forward(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """μ and σ, both ``[N, dimensions]``."""
        mean, log_std = self.net(*inputs).chunk(2, -1)
        return mean, log_std.clamp(*LOG_STD).exp()

    def mode(self, features: Features) -> Tensor:
        """tanh μ ``[N, dimensions]``."""
        mean, _ = self(*(features[key] for key in self.keys))
        return cast("Tensor", mean.tanh())

    def act(self, features: Features, noise: Tensor) -> Tensor:
        """Sampled actions ``[N, dimensions]``."""
        mean, std = self(*(features[key] for key in self.keys))
        return cast("Tensor", (mean + std * noise).tanh())

    def probabilistic(self) -> ProbabilisticTensorDictSequential:
        """This actor as TorchRL's loss takes it."""
        return ProbabilisticTensorDictSequential(
            TensorDictModule(self, in_keys=list(self.keys), out_keys=["loc", "scale"]),
            ProbabilisticTensorDictModule(
                in_keys=["loc", "scale", "noise"],
                out_keys=["action"],
                distribution_class=SquashedGaussian,
                return_log_prob=True,
                log_prob_key="action_log_prob",
            ),
        )


class SquashedGaussian(Distribution):
    """tanh(μ + σ ε) with ε drawn beforehand: sampling it is a function, without random numbers.

    Args:
        loc, scale, noise: μ, σ and ε, ``[N, dimensions]``.
    """

    def __init__(self, loc: Tensor, scale: Tensor, noise: Tensor) -> None:
        self._loc, self._scale, self._noise = loc, scale, noise
        super().__init__(loc.shape[:-1], loc.shape[-1:], validate_args=False)

    def rsample_and_log_prob(self, sample_shape: torch.Size | tuple[int, ...] = ()) -> tuple[Tensor, Tensor]:
        """The action ``[N, dimensions]`` and log π of it ``[N]`` (appendix C, eq. 21), from the same pre-tanh value: an
        action that tanh has rounded to ±1 keeps its density.

        With x = μ + σ ε:  log π = Σ (-ε²/2 - log σ - log √(2π) - log(1 - tanh² x)),
        log(1 - tanh² x) = 2 (log 2 - x - softplus(-2x)).
        """
        assert not sample_shape, "one sample, from the noise that was given"
        x = self._loc + self._scale * self._noise
        gaussian = -0.5 * self._noise.square() - self._scale.log() - 0.5 * math.log(2 * math.pi)
        log_prob = gaussian - 2.0 * (math.log(2.0) - x - softplus(-2.0 * x))
        return x.tanh(), log_prob.sum(-1)


class SquashedPolicy:
    """The policy that SAC collects with: a sample from π, its noise drawn a batch at a time."""

    def __init__(self, preprocessor: Preprocessor, actor: SquashedActor, run: Runtime) -> None:
        self._preprocessor, self._actor = preprocessor, actor
        self._size = run.actions.size
        self._call = run.compiler(self._act)

    def draw(self, steps: int, num_envs: int, frames: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        """Noise ``[steps, num_envs, dimensions]``."""
        del frames
        return (torch.randn(steps, num_envs, self._size, generator=generator),)

    def __call__(self, leaves: TensorLeaves, noise: tuple[Tensor, ...]) -> Tensor:
        """Sampled actions in policy units."""
        return self._call(leaves, noise[0])

    def _act(self, leaves: TensorLeaves, noise: Tensor) -> Tensor:
        return self._actor.act(self._preprocessor(leaves), noise)

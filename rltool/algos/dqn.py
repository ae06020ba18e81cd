"""Deep Q-learning (Mnih et al. 2015, Nature 518), double by option (van Hasselt et al. 2016, arXiv:1509.06461)."""

from __future__ import annotations

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torchrl.modules import QValueActor
from torchrl.objectives import DQNLoss, ValueEstimators

from rltool.algos.base import Component, GreedyPolicy, Runtime
from rltool.algos.replaying import Columns, ReplayedAlgorithm
from rltool.choices import masked
from rltool.collect import Explorer, RandomExplorer, TensorLeaves
from rltool.errors import ConfigError, Problem
from rltool.metrics import Metrics, due
from rltool.nets import Features, network
from rltool.schema import DQNConfig
from rltool.targets import TargetNetwork, note_large


class DQN(ReplayedAlgorithm):
    """DQN for discrete actions, with uniform or prioritised replay.

    Args:
        config: the algo node.
        run: the runtime objects it is built from.

    Raises:
        ConfigError: the environment's actions are not discrete.
    """

    step_metrics = ("train/loss", "train/grad_norm")

    def __init__(self, config: DQNConfig, *, run: Runtime) -> None:
        if run.actions.kind != "discrete":
            raise ConfigError(
                Problem(
                    "algo",
                    f"dqn needs a Discrete action space; {run.env} has {run.actions}",
                    "Use algo=ppo or algo=sac" if run.actions.bounded else "Use algo=ppo",
                )
            )
        super().__init__(config, run)
        self._config = config
        self.net = network(run.network, self.preprocessor, run.actions.size, self.weights).to(run.device)
        self.loss = DQNLoss(
            QValueActor(
                self.net,
                in_keys=list(self.preprocessor.keys),
                action_space="categorical",
                action_mask_key="action_mask" if self.masked else None,
            ),
            loss_function=config.loss_function,
            delay_value=True,
            double_dqn=config.double,
            action_space="categorical",
            # TorchRL's mean divides by the sum of the importance weights; the paper's divides by their number.
            reduction="none",
        ).to(run.device)
        self.loss.make_value_estimator(ValueEstimators.TD0, gamma=config.gamma)
        self.loss.in_keys  # noqa: B018 - filled in at first use, which would make a compiled graph compile again
        self.target = TargetNetwork(self.net, self.loss.value_network_params, self.loss.target_value_network_params)
        if config.tau is not None:
            note_large(config.tau, run.note)
        self._optimize({"policy": self.net}, run)
        self.policy = GreedyPolicy(self.preprocessor, lambda features: self.values(features).argmax(-1))
        self._explorer = EpsilonGreedy(self, config, run)
        self._seen: TensorLeaves = {}

    @property
    def sampler(self) -> Explorer:
        """ε-greedy."""
        return self._explorer

    def learn(self, batch: TensorDict, frames: int) -> Metrics:
        """As every replayed algorithm; also reports ε."""
        self._seen = self.leaves(batch)
        epsilon = torch.tensor(self._config.epsilon.at(frames, self._budget))
        return {**super().learn(batch, frames), "policy/epsilon": epsilon}

    @torch.no_grad()
    def inspect(self) -> Metrics:
        """As every replayed algorithm; also Q in the states of the last batch, and how far it is from the target's in those of
        the last step."""
        metrics = super().inspect()
        if self.last_step is None:
            return metrics
        seen = self.preprocessor({key: leaf.flatten(0, 1) for key, leaf in self._seen.items()})
        values = self.net(*(seen[key] for key in self.preprocessor.keys))
        largest = values.max(-1).values
        metrics |= {
            "critic/q_values": values,
            "critic/q_value_mean": largest.mean(),
            "critic/q_value_max": largest.max(),
        }
        now = self.last_step
        inputs = tuple(now[key] for key in self.preprocessor.keys)
        gap = self.net(*inputs) - torch.func.functional_call(self.net, self.target.state_dict(), inputs)
        metrics["critic/target_gap"] = gap.gather(-1, now["action"].unsqueeze(-1)).abs().mean()
        if self._config.gamma < 1 and (reward := self.buffer.largest_reward()) > 0:
            metrics["critic/q_limit_share"] = values.abs().max() * ((1 - self._config.gamma) / reward)
        return metrics

    @property
    def policy_network(self) -> nn.Module:
        """Q."""
        return self.net

    def before_steps(self, before: int, frames: int) -> None:
        """The target copies the network where the frame counter crossed a multiple of ``target_interval``."""
        if self._config.target_interval is not None and due(before, frames, self._config.target_interval):
            self.target.copy()

    def after_step(self) -> None:
        """The target follows softly where it is asked to: target ← (1-τ)·target + τ·network."""
        if self._config.tau is not None:
            self.target.follow(self._config.tau)

    def values(self, features: Features) -> Tensor:
        """Q of each action ``[N, n]``; of an invalid one the lowest number there is."""
        values = self.net(*(features[key] for key in self.preprocessor.keys))
        return masked(values, features.get("action_mask"))

    def gradient(self, now: Columns, following: Columns) -> tuple[Tensor, Tensor, Tensor]:
        r"""The clipped gradient of the loss on a minibatch, flat; the row of :attr:`step_metrics`; |δ| ``[size]``.

            L = E[w · l(Q(s, a) - y)],   y = r + γ (1 - terminated) max_a' Q_target(s', a')

        With ``double`` the maximising a' is the network's, its value the target's. l is the square or Huber's; w is the
        importance weight (1 for uniform replay), multiplied in before the mean. A time limit does not cut y. A pure
        function of its arguments and the parameters: it compiles into one graph.

        Args:
            now: network inputs, ``action``, ``priority_weight`` ``[size, …]``.
            following: network inputs, ``reward``, ``terminated``, ``done`` ``[size, …]``.
        """
        minibatch = TensorDict({**now, "next": following}, [now["action"].shape[0]])
        loss = self.loss(minibatch)["loss"].mean()
        gradient = self.flat.gather(torch.autograd.grad(loss, self.flat.parameters))
        norm = gradient.norm()
        if self._config.max_grad_norm is not None:
            gradient = gradient * (self._config.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
        # TorchRL leaves δ² as the priority; the paper's is |δ|.
        td_error = minibatch["td_error"].squeeze(-1).sqrt()
        return gradient, torch.stack([loss, norm]).detach(), td_error.detach()

    def components(self) -> dict[str, Component]:
        """What all replayed algorithms keep, and the networks."""
        return {"policy": self.net, "target": self.target, **super().components()}


class EpsilonGreedy:
    """A random action with probability ε, else the best one; ε falls with the frame counter, also inside a batch."""

    def __init__(self, algorithm: DQN, config: DQNConfig, run: Runtime) -> None:
        self._algorithm = algorithm
        self._epsilon, self._budget = config.epsilon, run.budget
        self._random = RandomExplorer(run.actions, masked=algorithm.masked)
        self._call = run.compiler(self._act)

    def draw(self, steps: int, num_envs: int, frames: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        """Whether to explore ``[steps, num_envs]``, and what the random action is made from."""
        epsilon = torch.tensor([self._epsilon.at(frames + step * num_envs, self._budget) for step in range(steps)])
        explore = torch.rand(steps, num_envs, generator=generator) < epsilon.unsqueeze(-1)
        return explore, *self._random.draw(steps, num_envs, frames, generator)

    def __call__(self, leaves: TensorLeaves, noise: tuple[Tensor, ...]) -> Tensor:
        """Actions ``[num_envs]``."""
        return self._call(leaves, *noise)

    def _act(self, leaves: TensorLeaves, explore: Tensor, choice: Tensor) -> Tensor:
        values = self._algorithm.values(self._algorithm.preprocessor(leaves))
        return torch.where(explore, self._random(leaves, (choice,)), values.argmax(-1))

"""The same work by other libraries, each as its own documentation writes it: frames a second of a whole training loop.

Every function trains on ``work.env`` with the hyperparameters of ``work`` on one torch thread of the CPU and returns the
rate between the frame at which its start-up is over and its last frame.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass
from typing import Any

import gymnasium
import torch
from torch import nn


@dataclass(frozen=True)
class Work:
    """What is trained, in words that every library understands.

    Attributes:
        algo: ppo, dqn or sac.
        env: Gymnasium's id.
        num_envs: environments side by side.
        steps: of each environment between updates.
        minibatch: frames or transitions a gradient step.
        epochs: passes of PPO over a batch; gradient steps after each collection otherwise.
        hidden: hidden layers of every network.
        learning_starts: frames before the first gradient step of DQN and SAC.
        buffer: transitions kept by DQN and SAC.
        target_interval: frames between copies into DQN's target.
        lr: learning rate.
        untimed: frames at the start that are not timed.
        frames: of the whole run.
    """

    algo: str
    env: str
    num_envs: int
    steps: int
    minibatch: int
    epochs: int
    hidden: tuple[int, ...]
    frames: int
    untimed: int
    learning_starts: int = 0
    buffer: int = 100_000
    target_interval: int = 10
    lr: float = 3e-4


class Stopwatch:
    """The rate between the first moment at or after ``untimed`` frames and the last one."""

    def __init__(self, untimed: int) -> None:
        self._untimed = untimed
        self._first: tuple[int, float] | None = None
        self._last = (0, 0.0)

    def at(self, frames: int) -> None:
        """Notes that so many frames have been learned from by now."""
        self._last = frames, time.perf_counter()
        if self._first is None and frames >= self._untimed:
            self._first = self._last

    @property
    def rate(self) -> float:
        """Frames a second."""
        assert self._first is not None
        return (self._last[0] - self._first[0]) / (self._last[1] - self._first[1])


def stable_baselines3(work: Work) -> float:
    """Stable-Baselines3, observations and rewards of PPO normalised by its VecNormalize."""
    from stable_baselines3 import DQN, PPO, SAC
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import VecNormalize

    watch = Stopwatch(work.untimed)

    class Watch(BaseCallback):
        def _on_rollout_start(self) -> None:
            watch.at(self.num_timesteps)

        def _on_step(self) -> bool:
            return True

        def _on_training_end(self) -> None:
            watch.at(self.num_timesteps)

    env: Any = make_vec_env(work.env, n_envs=work.num_envs, seed=0)
    common = {"policy_kwargs": {"net_arch": list(work.hidden)}, "device": "cpu", "seed": 0, "learning_rate": work.lr}
    replay = {
        "batch_size": work.minibatch,
        "buffer_size": work.buffer,
        "learning_starts": work.learning_starts,
        "train_freq": work.steps,
        "gradient_steps": work.epochs,
    }
    agent: Any
    if work.algo == "ppo":
        env = VecNormalize(env)
        agent = PPO("MlpPolicy", env, n_steps=work.steps, batch_size=work.minibatch, n_epochs=work.epochs, **common)
    elif work.algo == "dqn":
        # ε is at its end where timing begins, on both sides.
        greedy = {"exploration_fraction": work.untimed / work.frames / 2, "exploration_final_eps": 0.05}
        agent = DQN("MlpPolicy", env, target_update_interval=work.target_interval, **greedy, **replay, **common)
    else:
        agent = SAC("MlpPolicy", env, **replay, **common)
    agent.learn(work.frames, callback=Watch())
    return watch.rate


def skrl(work: Work) -> float:
    """skrl's PPO with its running standard scalers, as in its examples for Gymnasium."""
    from skrl.agents.torch.ppo import PPO, PPO_CFG
    from skrl.envs.wrappers.torch import wrap_env
    from skrl.memories.torch import RandomMemory
    from skrl.models.torch import DeterministicMixin, GaussianMixin, Model
    from skrl.resources.preprocessors.torch import RunningStandardScaler
    from skrl.trainers.torch import SequentialTrainer

    def body(inputs: int, outputs: int) -> nn.Sequential:
        sizes = [inputs, *work.hidden]
        layers: list[nn.Module] = []
        for wide, narrow in itertools.pairwise(sizes):
            layers += [nn.Linear(wide, narrow), nn.Tanh()]
        return nn.Sequential(*layers, nn.Linear(sizes[-1], outputs))

    class Policy(GaussianMixin, Model):  # type: ignore[misc]
        def __init__(self, **spaces: Any) -> None:
            Model.__init__(self, **spaces)
            GaussianMixin.__init__(self, clip_actions=False)
            self.net = body(self.num_observations, self.num_actions)
            self.log_std = nn.Parameter(torch.zeros(self.num_actions))

        def compute(self, inputs: dict[str, Any], role: str) -> tuple[torch.Tensor, dict[str, Any]]:
            return self.net(inputs["observations"]), {"log_std": self.log_std}

    class Value(DeterministicMixin, Model):  # type: ignore[misc]
        def __init__(self, **spaces: Any) -> None:
            Model.__init__(self, **spaces)
            DeterministicMixin.__init__(self)
            self.net = body(self.num_observations, 1)

        def compute(self, inputs: dict[str, Any], role: str) -> tuple[torch.Tensor, dict[str, Any]]:
            return self.net(inputs["observations"]), {}

    env = wrap_env(gymnasium.make_vec(work.env, num_envs=work.num_envs, vectorization_mode="sync"), verbose=False)
    spaces = {"observation_space": env.observation_space, "action_space": env.action_space, "device": env.device}
    cfg = PPO_CFG(
        rollouts=work.steps,
        learning_epochs=work.epochs,
        mini_batches=work.num_envs * work.steps // work.minibatch,
        learning_rate=work.lr,
        value_clip=0.0,
        value_loss_scale=0.5,
        observation_preprocessor=RunningStandardScaler,
        observation_preprocessor_kwargs={"size": env.observation_space, "device": env.device},
        value_preprocessor=RunningStandardScaler,
        value_preprocessor_kwargs={"size": 1, "device": env.device},
    )
    cfg.experiment.write_interval = cfg.experiment.checkpoint_interval = 0
    agent = PPO(
        models={"policy": Policy(**spaces), "value": Value(**spaces)},
        memory=RandomMemory(memory_size=work.steps, num_envs=env.num_envs, device=env.device),
        cfg=cfg,
        **spaces,
    )
    watch, update, batches = Stopwatch(work.untimed), agent.update, [0]

    def watched(**times: int) -> None:
        update(**times)
        batches[0] += 1
        watch.at(batches[0] * work.steps * work.num_envs)

    agent.update = watched
    steps = work.frames // work.num_envs
    SequentialTrainer(
        env=env, agents=agent, cfg={"timesteps": steps, "headless": True, "disable_progressbar": True}
    ).train()
    return watch.rate


def torchrl(work: Work) -> float:
    """PPO from TorchRL's stock objects: GymEnv with its transforms, Collector, ReplayBuffer, eager ClipPPOLoss."""
    from tensordict.nn import AddStateIndependentNormalScale, TensorDictModule
    from torchrl.collectors import Collector
    from torchrl.data import LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement
    from torchrl.envs import Compose, DoubleToFloat, GymEnv, RewardSum, StepCounter, TransformedEnv, VecNorm
    from torchrl.modules import MLP, IndependentNormal, ProbabilisticActor, ValueOperator
    from torchrl.objectives import ClipPPOLoss
    from torchrl.objectives.value import GAE

    env = TransformedEnv(
        GymEnv(work.env),
        Compose(VecNorm(in_keys=["observation"]), DoubleToFloat(), RewardSum(), StepCounter()),
    )
    size, actions = env.observation_spec["observation"].shape[-1], env.action_spec.shape[-1]
    net = {"activation_class": nn.Tanh, "num_cells": list(work.hidden)}
    policy = nn.Sequential(MLP(in_features=size, out_features=actions, **net), AddStateIndependentNormalScale(actions))
    actor = ProbabilisticActor(
        TensorDictModule(policy, in_keys=["observation"], out_keys=["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=IndependentNormal,
        return_log_prob=True,
    )
    critic = ValueOperator(MLP(in_features=size, out_features=1, **net), in_keys=["observation"])
    batch = work.steps * work.num_envs
    collector = Collector(env, actor, frames_per_batch=batch, total_frames=work.frames)
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(batch), sampler=SamplerWithoutReplacement(), batch_size=work.minibatch
    )
    advantage = GAE(gamma=0.99, lmbda=0.95, value_network=critic)
    loss = ClipPPOLoss(
        actor, critic, entropy_bonus=False, critic_coeff=0.5, loss_critic_type="l2", normalize_advantage=True
    )
    optimizer = torch.optim.Adam(loss.parameters(), lr=work.lr)
    watch = Stopwatch(work.untimed)
    for number, data in enumerate(collector, start=1):
        with torch.no_grad():
            advantage(data)
        for _ in range(work.epochs):
            buffer.extend(data.reshape(-1))
            for _ in range(batch // work.minibatch):
                losses = loss(buffer.sample())
                optimizer.zero_grad()
                (losses["loss_objective"] + losses["loss_critic"]).backward()
                nn.utils.clip_grad_norm_(loss.parameters(), 0.5)
                optimizer.step()
        watch.at(number * batch)
    collector.shutdown()
    return watch.rate


PEERS = {"stable-baselines3": stable_baselines3, "skrl": skrl, "torchrl": torchrl}

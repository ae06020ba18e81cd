"""Every algorithm, through environment, collector and update, against values known in closed form.

The probes follow the ladder that rejax and bsuite use: value of a constant, discounting, a reward that depends on the
action, on observation and action, and the two kinds of ending.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any, cast

import gymnasium as gym
import numpy as np
import pytest
import torch
from builders import run_config, runtime
from gymnasium import spaces
from tensordict import TensorDict

from rltool.algos.base import Algorithm
from rltool.algos.dqn import DQN
from rltool.algos.ppo import PPO
from rltool.algos.sac import SAC
from rltool.vectorized import GymVectorEnv

GAMMA = 0.9


class Ladder(gym.Env[Any, Any]):
    """Episodes of ``length`` steps; ``show(t, sign)`` is observed, ``pay(t, sign, action)`` is paid.

    ``sign`` is -1 or 1, drawn anew each episode.
    """

    def __init__(
        self,
        length: int | None,
        truncates: bool,
        show: Callable[[int, int], float],
        pay: Callable[[int, int, int], float],
        box: bool = False,
    ) -> None:
        self.observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)
        # A number above 0 is the second choice.
        self.action_space = spaces.Box(-1, 1, (1,), np.float32) if box else spaces.Discrete(2)
        self.length, self.truncates, self.show, self.pay = length, truncates, show, pay

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t, self.sign = 0, int(self.np_random.integers(2)) * 2 - 1
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        chosen = action[0] > 0 if isinstance(self.action_space, spaces.Box) else action
        reward = self.pay(self.t, self.sign, int(chosen))
        self.t += 1
        over = self.t == self.length
        return self._observe(), reward, over and not self.truncates, over and self.truncates, {}

    def _observe(self) -> Any:
        return np.array([self.show(self.t, self.sign)], np.float32)


# What is observed, what is paid, how it ends; then the value of each observation under the best policy.
LADDER: dict[str, tuple[dict[str, Any], dict[float, float]]] = {
    "discounting": (
        {"length": 2, "truncates": False, "show": lambda t, s: float(t), "pay": lambda t, s, a: float(t)},
        {0.0: GAMMA, 1.0: 1.0},
    ),
    "no end": (
        {"length": None, "truncates": False, "show": lambda t, s: 1.0, "pay": lambda t, s, a: 1.0},
        {1.0: 1 / (1 - GAMMA)},
    ),
    # Bootstrapping from the observation of the next episode would give about -24 for the later states, death about 1.8.
    "time limit, another start": (
        {
            "length": 3,
            "truncates": True,
            "show": lambda t, s: 1.0 if t else -1.0,
            "pay": lambda t, s, a: 1.0 if t else -10.0,
        },
        {1.0: 10.0, -1.0: -1.0},
    ),
    "terminal": (
        {"length": 3, "truncates": False, "show": lambda t, s: float(t), "pay": lambda t, s, a: 1.0},
        {0.0: 1 + GAMMA + GAMMA**2, 1.0: 1 + GAMMA, 2.0: 1.0},
    ),
}
CHOICES: dict[str, tuple[dict[str, Any], dict[float, int]]] = {
    "observation and action": (
        {
            "length": 1,
            "truncates": False,
            "show": lambda t, s: float(s),
            "pay": lambda t, s, a: float((a == 1) == (s == 1)),
        },
        {-1.0: 0, 1.0: 1},
    ),
}
for _name, (_arguments, _) in (LADDER | CHOICES).items():
    gym.register(f"Ladder-{_name.replace(' ', '-').replace(',', '')}-v0", entry_point=Ladder, kwargs=_arguments)

ALGORITHMS = {
    "ppo": (
        2_000,
        "algo.frames_per_batch=100",
        "algo.minibatch_size=50",
        "algo.epochs=6",
        "algo.normalize_observation=false",
        "algo.warmup_frames=0",
        "algo.scale_reward=false",
        "algo.critic_coeff=1.0",
        "algo.max_grad_norm=null",
        "optim.lr=1e-2",
        "network.hidden=[32]",
    ),
    "dqn": (
        800,
        "algo.frames_per_batch=20",
        "algo.minibatch_size=32",
        "algo.learning_starts=100",
        "algo.updates_per_frame=0.25",
        "algo.target_interval=null",
        "algo.tau=0.3",
        "algo.epsilon={start: 1.0, end: 0.5, frames: 600}",
        "algo.loss_function=l2",
        "optim.lr=1e-2",
        "network.hidden=[32]",
    ),
    # Next to no entropy bonus, so that the values are those of the reward.
    "sac": (
        600,
        "algo.frames_per_batch=20",
        "algo.minibatch_size=32",
        "algo.warmup_frames=100",
        "algo.updates_per_frame=0.4",
        "algo.tau=0.2",
        "algo.learn_alpha=false",
        "algo.alpha=1e-3",
        "optim.lr=2e-2",
        "network.hidden=[32]",
        "++env.kwargs.box=true",
    ),
}


def learned(algo: str, name: str, *overrides: str) -> Algorithm:
    """Trains on a rung of the ladder with the collector and the update of real runs."""
    frames, *words = ALGORITHMS[algo]
    frames = 2 * cast("int", frames) if "another start" in name else frames
    rung = f"Ladder-{name.replace(' ', '-').replace(',', '')}-v0"
    total = f"total_frames={frames}"
    config = run_config(
        f"algo={algo}",
        "env=gym",
        f"env.id={rung}",
        f"algo.gamma={GAMMA}",
        total,
        "optim.schedule=linear",
        *cast("list[str]", words),
        *overrides,
    )
    with closing(cast("GymVectorEnv", config.env.build(seed=0))) as env:
        algorithm = cast("Algorithm", config.algo.build(run=runtime(config, env.actions, leaves=env.leaves)))
        source = torch.Generator().manual_seed(0)
        collector = env.collector(
            algorithm, total_frames=cast("int", frames), generator=source, device=torch.device("cpu")
        )
        for batch in collector:
            algorithm.update(batch, collector.frames)
    return algorithm


def values(algorithm: Algorithm, observations: list[float]) -> list[float]:
    """The value that the algorithm gives each observation: its critic's, or its largest Q."""
    features = torch.tensor(observations).unsqueeze(-1)
    with torch.no_grad():
        if isinstance(algorithm, PPO):
            return cast("list[float]", algorithm.critic(features).flatten().tolist())
        if isinstance(algorithm, SAC):
            asked = TensorDict({"observation": features, "action": algorithm.actor.mode({"observation": features})}, [])
            both = algorithm.loss._vmap_qnetworkN0(asked, algorithm.loss.qvalue_network_params)["state_action_value"]
            return cast("list[float]", both.min(0).values.flatten().tolist())
        assert isinstance(algorithm, DQN)
        return cast("list[float]", algorithm.net(features).max(-1).values.tolist())


BOTH_ENDS = "time limit, another start"


@pytest.mark.parametrize(
    ("algo", "name"),
    [
        # A rung of each kind of ending; all others are long tests.
        pytest.param(
            algo, name, marks=() if (algo, name) in (("ppo", "terminal"), ("dqn", BOTH_ENDS)) else pytest.mark.long
        )
        for algo in ALGORITHMS
        for name in LADDER
    ],
)
def test_values(algo: str, name: str) -> None:
    expected = LADDER[name][1]
    got = values(learned(algo, name), list(expected))
    assert got == pytest.approx(list(expected.values()), rel=0.05, abs=0.08)


@pytest.mark.long
def test_the_end_of_a_batch_is_not_the_end_of_an_episode() -> None:
    """Batches shorter than any horizon, cut in the middle of an episode: the value is that of going on."""
    words = ["algo.frames_per_batch=20", "algo.minibatch_size=20", "env.num_envs=1"]
    (got,) = values(learned("ppo", "no end", *words), [1.0])
    assert got == pytest.approx(10.0, rel=0.05)


@pytest.mark.parametrize("name", list(CHOICES))
@pytest.mark.parametrize(
    "algo", [pytest.param(algo, marks=() if algo == "ppo" else pytest.mark.long) for algo in ALGORITHMS]
)
def test_choices(algo: str, name: str) -> None:
    algorithm = learned(algo, name)
    best = CHOICES[name][1]
    observations = torch.tensor(list(best)).unsqueeze(-1)
    chosen = algorithm.policy({("observation",): observations})
    if isinstance(algorithm, SAC):
        chosen = (chosen > 0).flatten().long()
    assert chosen.tolist() == list(best.values())
    if isinstance(algorithm, PPO):
        probability = algorithm.actor.distribution({"observation": observations}).log_prob(chosen).exp().detach()
        assert float(probability.min()) > 0.9

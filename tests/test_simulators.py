"""The state of a simulator in the middle of an episode: put into another one, both go on alike, bit for bit."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.wrappers import ClipReward, FrameStackObservation, RescaleAction

from rltool.errors import EnvironmentFault
from rltool.schema import GymEnvConfig
from rltool.simulators import read_state, unknown_part, write_state
from rltool.vectorized import GymVectorEnv

CLASSIC = ["CartPole-v1", "MountainCar-v0", "MountainCarContinuous-v0", "Pendulum-v1", "Acrobot-v1"]
MUJOCO = [
    f"{name}-v5"
    for name in (
        "InvertedPendulum", "InvertedDoublePendulum", "Reacher", "Pusher", "HalfCheetah", "Hopper", "Swimmer", "Walker2d",
        "Ant", "Humanoid", "HumanoidStandup",
    )
]  # fmt: skip


# As rltool makes them.
make = partial(gym.make, disable_env_checker=True)


def stepped(env: gym.Env[Any, Any], actions: list[Any]) -> list[Any]:
    """What an environment answers to actions, restarts included."""
    answers: list[Any] = []
    for action in actions:
        observation, reward, terminated, truncated, _ = env.step(action)
        answers += [np.array(observation), float(reward), terminated, truncated]
        if terminated or truncated:
            answers.append(np.array(env.reset()[0]))
    return answers


def check_alike(one: gym.Env[Any, Any], other: gym.Env[Any, Any], actions: list[Any]) -> None:
    for expected, found in zip(stepped(one, actions), stepped(other, actions), strict=True):
        np.testing.assert_array_equal(expected, found)


@pytest.mark.parametrize("env_id", [*CLASSIC, *MUJOCO])
def test_an_episode_goes_on_in_another_environment(env_id: str) -> None:
    one, other = (make(env_id, max_episode_steps=50) for _ in range(2))
    one.action_space.seed(0)
    actions = [one.action_space.sample() for _ in range(150)]
    one.reset(seed=1)
    other.reset(seed=2)
    stepped(one, actions[:20])
    state = read_state(one)
    assert state is not None
    assert all(array.dtype.kind in "biuf" for array in state.values())
    write_state(other, state)
    # More than one time limit: the counter of steps and the generator of the next starts went along.
    check_alike(one, other, actions[20:])


def test_what_keeps_a_state_from_being_saved_is_named() -> None:
    assert unknown_part(ClipReward(RescaleAction(make("Pendulum-v1"), np.float32(-1), np.float32(1)), -1.0, 1.0)) == ""
    assert unknown_part(FrameStackObservation(make("Pendulum-v1"), 4)) == "FrameStackObservation"
    assert unknown_part(make("FrozenLake-v1")) == "FrozenLakeEnv"
    assert read_state(make("FrozenLake-v1")) is None


class Counting(gym.Env[Any, Any]):
    """An environment of one's own that can be saved."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)
    steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        return np.array([self.steps + self.np_random.random()], np.float32), 0.0, False, False, {}

    def state_dict(self) -> dict[str, Any]:
        return {"steps": np.array(self.steps)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = int(state["steps"])


def test_an_environment_of_ones_own_says_its_state_itself() -> None:
    one, other = Counting(), Counting()
    one.reset(seed=1)
    other.reset(seed=2)
    stepped(one, [0] * 5)
    state = read_state(one)
    assert state is not None
    write_state(other, state)
    check_alike(one, other, [0] * 3)


@pytest.mark.parametrize("backend", ["sync", "threads", "async"])
def test_environments_side_by_side_go_on_each_from_its_own_state(backend: str) -> None:
    config = GymEnvConfig.model_validate(
        {"kind": "gym", "id": "CartPole-v1", "num_envs": 3, "backend": backend, **DEFAULTS}
    )
    one, other = GymVectorEnv(config, seed=0), GymVectorEnv(config, seed=1)
    try:
        assert one.unsaved == ""
        one.reset()
        other.reset()
        actions = np.random.default_rng(0).integers(0, 2, (60, 3))
        for action in actions[:15]:
            one.step(action)
        states = [state for state in one.read_states() if state is not None]
        assert len(states) == 3
        other.write_states(states)
        for action in actions[15:]:
            expected, found = one.step(action), other.step(action)
            np.testing.assert_array_equal(expected.observation["observation",], found.observation["observation",])
            np.testing.assert_array_equal(expected.terminated, found.terminated)
        with pytest.raises(
            EnvironmentFault, match=r"environment 0 \(CartPole-v1.*putting back its state raised KeyError"
        ):
            other.write_states([{}, {}, {}])
    finally:
        one.close()
        other.close()


DEFAULTS: dict[str, Any] = {
    "kwargs": {},
    "max_episode_steps": None,
    "observation_keys": None,
    "action_mask": "auto",
    "wrappers": [],
    "timeout": None,
    "transforms": [],
}

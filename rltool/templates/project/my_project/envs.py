"""The environment: a point on a plane walks to a goal."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

Vector = NDArray[np.float32]
Observation = dict[str, Any]


class Point(gym.Env[Observation, Vector]):
    """A step moves the point by up to ``speed`` along each axis and costs the distance that is left.

    An episode terminates at the goal; Gymnasium truncates it after the ``max_episode_steps`` below.
    """

    def __init__(self, speed: float = 0.1) -> None:
        self.speed = speed
        plane = spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.observation_space = spaces.Dict({"goal": plane, "position": plane})
        self.action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        super().reset(seed=seed, options=options)  # seeds self.np_random, the one source of chance here
        self._goal, self._position = self.np_random.uniform(-1, 1, (2, 2)).astype(np.float32)
        return self._observe(), {}

    def step(self, action: Vector) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        self._position = np.clip(self._position + self.speed * action, -1, 1)
        distance = float(np.linalg.norm(self._goal - self._position))
        return self._observe(), -distance, distance < self.speed, False, {}

    def _observe(self) -> Observation:
        # Copies: an observation that someone keeps must not change with the next step.
        return {"goal": self._goal.copy(), "position": self._position.copy()}


# Importing this module registers the id, which is what env.id=my_project.envs:Point-v0 does.
gym.register("Point-v0", entry_point="my_project.envs:Point", max_episode_steps=50, reward_threshold=-7)

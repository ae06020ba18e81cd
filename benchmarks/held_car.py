"""CarRacing with every action held for four of its frames, of which only the last is drawn: drawing is most of its time.

rltool train algo=ppo env=gym env.id=held_car:HeldCar-v0        # from this directory
"""

from __future__ import annotations

from typing import Any

import gymnasium
from gymnasium.envs.box2d.car_racing import CarRacing

HELD = 4


class HeldCar(CarRacing):
    """An episode is at most 250 actions (1,000 of the car's frames)."""

    _drawing = True

    def reset(self, **arguments: Any) -> tuple[Any, dict[str, Any]]:
        self._drawing = True
        return super().reset(**arguments)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if action is None:  # how its own reset asks for the first frame
            return super().step(action)
        total, over = 0.0, False
        for frame in range(HELD):
            if over:
                break
            self._drawing = frame == HELD - 1
            observation, reward, terminated, truncated, info = super().step(action)
            total, over = total + float(reward), terminated or truncated
        self._drawing = True
        return observation, total, terminated, truncated, info

    def _render(self, mode: str) -> Any:
        return super()._render(mode) if self._drawing or mode != "state_pixels" else self.state


gymnasium.register("HeldCar-v0", entry_point=HeldCar, max_episode_steps=1000 // HELD)

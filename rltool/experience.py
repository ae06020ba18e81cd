"""What batches of experience say by themselves, counted on the host as they come: episodes, rewards, actions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from rltool.spaces import Array

if TYPE_CHECKING:
    from rltool.actions import ActionSpec

# Choices with more options are not counted one by one.
_MOST_OPTIONS = 18
# Policies that squash come so near to a bound, in units where it is 1.
_AT_BOUND = 0.999


@dataclass
class Episodes:
    """Episodes that ended during a batch: raw (unscaled) undiscounted returns, lengths in frames."""

    returns: list[float] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)


class RunningEpisodes:
    """Returns and lengths of the episodes that are going on in each environment; float64, so that long ones keep digits."""

    def __init__(self, num_envs: int) -> None:
        self._return = np.zeros(num_envs)
        self._length = np.zeros(num_envs, np.int64)

    def state_dict(self) -> dict[str, Tensor]:
        """Both, ``[num_envs]``."""
        return {"return": torch.from_numpy(self._return.copy()), "length": torch.from_numpy(self._length.copy())}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Takes them back."""
        self._return[:], self._length[:] = state["return"].numpy(), state["length"].numpy()

    def add(self, reward: Array, done: Array) -> Episodes:
        """Takes in a batch, both ``[steps, num_envs]``; gives the episodes that ended in it, one environment after the
        other."""
        ended = Episodes()
        for index in range(reward.shape[1]):
            begin = 0
            for end in np.flatnonzero(done[:, index]):
                part = reward[begin : end + 1, index].sum(dtype=np.float64)
                ended.returns.append(float(self._return[index] + part))
                ended.lengths.append(int(self._length[index]) + int(end) + 1 - begin)
                self._return[index], self._length[index] = 0.0, 0
                begin = int(end) + 1
            self._return[index] += reward[begin:, index].sum(dtype=np.float64)
            self._length[index] += len(reward) - begin
        return ended


class Tally:
    """Rewards and actions of a batch or of several.

    Attributes:
        frames: how many frames were taken in.
        rewards: sum, smallest and largest of their rewards.
        choices: how often each option of a single choice was taken; empty for other spaces and for many options.
        entries, at_bound: numbers in actions between bounds, and how many of them were at or beyond one.
    """

    def __init__(self) -> None:
        self.frames = self.entries = self.at_bound = 0
        self.rewards = np.array([0.0, np.inf, -np.inf])
        self.choices = np.zeros(0, np.int64)

    @classmethod
    def of(cls, reward: Array, action: Array, spec: ActionSpec) -> Tally:
        """That of a batch.

        Args:
            reward: ``[…]``.
            action: ``[…, *policy_shape]``, in policy units.
            spec: the action space.
        """
        tally = cls()
        tally.frames = reward.size
        tally.rewards[:] = reward.sum(dtype=np.float64), reward.min(), reward.max()
        if spec.kind == "discrete" and spec.size <= _MOST_OPTIONS:
            tally.choices = np.bincount(action.reshape(-1), minlength=spec.size)
        elif spec.bounded:
            tally.entries, tally.at_bound = action.size, int((np.abs(action) >= _AT_BOUND).sum())
        return tally

    def add(self, other: Tally) -> None:
        """Takes in another one."""
        self.frames += other.frames
        self.entries += other.entries
        self.at_bound += other.at_bound
        total, low, high = other.rewards
        self.rewards[:] = self.rewards[0] + total, min(self.rewards[1], low), max(self.rewards[2], high)
        self.choices = self.choices + other.choices if len(self.choices) else other.choices

    def metrics(self) -> dict[str, float]:
        """Its metrics by name; none of no frames."""
        if not self.frames:
            return {}
        total, low, high = (float(value) for value in self.rewards)
        found = {"data/reward_mean": total / self.frames, "data/reward_min": low, "data/reward_max": high}
        found |= {f"policy/action_share/{option}": n / self.frames for option, n in enumerate(self.choices.tolist())}
        if self.entries:
            found["policy/bound_share"] = self.at_bound / self.entries
        return found

    def state_dict(self) -> dict[str, Tensor]:
        """All of it; nothing of no frames."""
        if not self.frames:
            return {}
        counts = torch.tensor([self.frames, self.entries, self.at_bound])
        return {
            "counts": counts,
            "rewards": torch.from_numpy(self.rewards.copy()),
            "choices": torch.from_numpy(self.choices),
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Takes it back, where it is any."""
        if not state:
            return
        self.frames, self.entries, self.at_bound = state["counts"].tolist()
        self.rewards[:] = state["rewards"].numpy()
        self.choices = state["choices"].numpy()

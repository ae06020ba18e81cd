"""Environments whose numbers can be worked out by hand, and short ways to configure, step and train on them."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from compositions import run_config
from gymnasium import spaces
from torch import Tensor

from rltool.actions import ActionSpec, action_spec
from rltool.collect import Collector, TensorLeaves
from rltool.schema import GymEnvConfig
from rltool.seeding import Stream, generator
from rltool.training import train
from rltool.vectorized import GymVectorEnv

Result = tuple[Any, ...]


def _box(low: object, high: object, shape: tuple[int, ...], dtype: type = np.float32) -> spaces.Box:
    return spaces.Box(low, high, shape, dtype)  # type: ignore[arg-type]


OBSERVATIONS: dict[str, spaces.Space[Any]] = {
    "const": _box(-1e6, 1e6, (1,)),
    "t": _box(-1e6, 1e6, (1,)),
    "noise": _box(-np.inf, np.inf, (3,), np.float64),
    "world": _box(-np.inf, np.inf, (1,)),
    "scalar": _box(-1, 1, ()),
    "discrete": spaces.Discrete(4, start=2),
    "dict": spaces.Dict(
        {
            "a": spaces.Dict({"b": _box(-np.inf, np.inf, (2,), np.float64)}),
            "a_b": _box(-np.inf, np.inf, (2,)),
            "c": spaces.Discrete(3, start=1),
        }
    ),
    "tuple": spaces.Tuple((spaces.Discrete(3), _box(-1, 1, (2,)))),
    "image": _box(0, 255, (8, 8, 3), np.uint8),
    "camera": _box(0, 255, (36, 40, 3), np.uint8),
    "several": spaces.MultiDiscrete([2, 4], start=[0, 3]),
    "bits": spaces.MultiBinary([2, 2]),
    "all": spaces.Dict(
        {
            "bits": spaces.MultiBinary(3),
            "camera": _box(0, 255, (36, 40), np.uint8),
            "inner": spaces.Dict({"c": spaces.Discrete(3, start=1), "x": _box(-1, 1, (2,))}),
            "several": spaces.MultiDiscrete([2, 4]),
        }
    ),
    "photo": _box(0, 255, (84, 84, 3), np.uint8),
    "channels first": _box(0, 255, (4, 84, 84), np.uint8),
    "float image": _box(0, 1, (84, 84, 3)),
    "multi_discrete": spaces.MultiDiscrete([3, 2], start=[-1, 4]),
    "multi_binary": spaces.MultiBinary((2, 3)),
    "dict of images": spaces.Dict(
        {"arm": spaces.Dict({"camera": _box(0, 255, (40, 40, 1), np.uint8)}), "speed": _box(-1, 1, (2,))}
    ),
    # Text is for no network: only with observation_keys=[seen].
    "text": spaces.Dict({"seen": _box(-1, 1, (2,)), "mission": spaces.Text(8)}),
}
ACTIONS: dict[str, spaces.Space[Any]] = {
    "discrete": spaces.Discrete(2),
    "start": spaces.Discrete(3, start=-1),
    "three": spaces.Discrete(3),
    "box": spaces.Box(np.array([0, -3], np.float32), np.array([1, 5], np.float32)),
    "scalar": _box(-1, 1, ()),
    "multi": spaces.MultiDiscrete([2, 3], start=[0, -1]),
    "matrix": spaces.MultiDiscrete([[2, 3], [4, 5]]),
    "pair": spaces.MultiDiscrete([3, 3]),
    "bits": spaces.MultiBinary(4),
    "whole": _box(0, 9, (2,), np.int64),
    "multi equal": spaces.MultiDiscrete([3, 3], start=[0, -1]),
    "multi 2-D": spaces.MultiDiscrete([[2, 3], [4, 2]]),
    "binary": spaces.MultiBinary(3),
    "binary 2-D": spaces.MultiBinary((2, 2)),
}
# What a faulty environment makes of the right answer to a step.
FAULTS: dict[str, Callable[..., Result]] = {
    "observation of another length": lambda obs, *rest: (np.append(obs, 0).astype(np.float32), *rest),
    "observation of text": lambda obs, *rest: (np.array(["left"]), *rest),
    "observation without a key": lambda obs, *rest: ({"a": obs["a"], "c": obs["c"]}, *rest),
    "observation out of range": lambda obs, *rest: (np.int64(9), *rest),
    "category out of range": lambda obs, *rest: (np.array([1, 7]), *rest),
    "observation NaN": lambda obs, *rest: (np.full_like(obs, np.nan), *rest),
    "reward None": lambda obs, reward, *rest: (obs, None, *rest),
    "reward of two": lambda obs, reward, *rest: (obs, np.array([1.0, 2.0]), *rest),
    "reward ragged": lambda obs, reward, *rest: (obs, [1, [2, 3]], *rest),
    "terminated a word": lambda obs, reward, terminated, *rest: (obs, reward, "False", *rest),
    "terminated of two": lambda obs, reward, terminated, *rest: (obs, reward, np.array([True, False]), *rest),
    "truncated None": lambda obs, reward, terminated, truncated, info: (obs, reward, terminated, None, info),
    "info None": lambda *answer: (*answer[:4], None),
    "reward NaN": lambda obs, reward, *rest: (obs, float("nan"), *rest),
    "four values": lambda obs, reward, terminated, truncated, info: (obs, reward, terminated or truncated, info),
}
# How it gives no answer at all, or none for a long time.
HANGS: dict[str, Callable[[], object]] = {
    "sleep": lambda: time.sleep(60),
    "loop": lambda: _loop(),
    "stubborn": lambda: _stubborn(),
    "deadlock": lambda: _deadlock(),
    # Keeps Python's lock meanwhile.
    "lock": lambda: ctypes.PyDLL(None).usleep(2_500_000),
    "nap": lambda: time.sleep(0.8),
}
SIGNALS: dict[str, Callable[[], None]] = {
    "SIGINT": lambda: os.kill(os.getpid(), signal.SIGINT),
    "SIGTERM": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "SIGUSR1": lambda: os.kill(os.getpid(), signal.SIGUSR1),
    # As Ctrl-C on a terminal does: to every process of the group, workers included.
    "Ctrl-C": lambda: os.killpg(0, signal.SIGINT),
    # As timeout and schedulers do.
    "SIGTERM to all": lambda: os.killpg(0, signal.SIGTERM),
}


def _loop() -> None:
    while True:
        pass


def _stubborn() -> None:
    """Bears being interrupted."""
    while True:
        with suppress(BaseException):
            time.sleep(60)


def _deadlock() -> None:
    """Waits in C, where no exception reaches, for a lock that it holds."""
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):
        ctypes.CDLL(None).pthread_mutex_lock(mutex)


def drawn_from(space: spaces.Space[Any], rng: np.random.Generator) -> Any:
    """An element of a space, drawn from a generator (and not from the space's own, which no seed of a run reaches)."""
    if isinstance(space, spaces.Dict):
        return {name: drawn_from(part, rng) for name, part in space.spaces.items()}
    if isinstance(space, spaces.Text):
        return "go"
    if isinstance(space, spaces.MultiDiscrete):
        return space.start + rng.integers(space.nvec)
    if isinstance(space, spaces.MultiBinary):
        return rng.integers(2, size=space.shape, dtype=np.int8)
    assert isinstance(space, spaces.Box)
    if space.dtype.kind == "u":
        return rng.integers(space.low, space.high, endpoint=True, dtype=space.dtype.type)
    return rng.uniform(space.low, space.high).astype(space.dtype)


class Probe(gym.Env[Any, Any]):
    """Counts its steps, checks that each action lies in its space, and can break the contract at a chosen step.

    Args:
        n: steps of an episode; None: it never ends.
        end: ``trunc`` or ``term``.
        obs: a name of :data:`OBSERVATIONS`; ``t`` is the step within the episode, ``noise`` N(100, 10) of the
            environment's own generator, ``world`` a number of NumPy's global one; what has no rule of its own is drawn
            from the environment's own.
        actions: a name of :data:`ACTIONS`.
        reward: what each step pays; a list becomes an array, ``t`` pays the step within the episode, ``drawn`` a whole
            number from 0 to 9 that the environment's own generator draws at reset.
        mask: where it tells which actions are valid: ``info``, ``method``, or ``key`` (the observation is then a Dict of
            what it was and ``action_mask``); drawn anew for each step, and no other action is borne.
        fault: a name of :data:`FAULTS`, :data:`HANGS` or :data:`SIGNALS`, or ``raise``, ``exit``, ``panic`` (what an extension raises), ``die`` and ``segfault`` (the process), at the ``at``-th step since it was made.
        drew: only of the environment that drew this number at reset (``self.drawn``).
    """

    def __init__(
        self,
        n: int | None = 3,
        end: str = "trunc",
        obs: str = "const",
        actions: str = "discrete",
        reward: object = 1.0,
        mask: str | None = None,
        fault: str | None = None,
        at: int = 1,
        drew: int | None = None,
    ) -> None:
        self.drew = drew
        self.n, self.end, self.obs, self.fault, self.at = n, end, obs, fault, at
        self.reward = np.array(reward) if isinstance(reward, list) else reward
        self.observation_space, self.action_space = OBSERVATIONS[obs], ACTIONS[actions]
        self.t = self.steps = 0
        self.mask = mask
        if mask is not None:
            self.spec_of_actions = action_spec(self.action_space, "Probe-v0")
            self.valid = np.ones(self.spec_of_actions.size, np.int8)
        if mask == "key":
            parts = {"seen": self.observation_space, "action_mask": spaces.MultiBinary(self.spec_of_actions.size)}
            self.observation_space = spaces.Dict(parts)
        elif mask == "method":
            self.action_masks = lambda: self.valid

    def answer(self) -> tuple[Any, dict[str, Any]]:
        """An observation with the mask in it, and the info with the mask in it, as ``mask`` says."""
        if self.mask is None:
            return self.observe(), {}
        self.valid = self.np_random.integers(2, size=self.spec_of_actions.size, dtype=np.int8)
        for first, count in zip(np.cumsum([0, *self.spec_of_actions.nvec]), self.spec_of_actions.nvec, strict=False):
            self.valid[first + self.np_random.integers(count)] = 1  # one of each choice at least
        seen = {"seen": self.observe(), "action_mask": self.valid} if self.mask == "key" else self.observe()
        return seen, {"action_mask": self.valid} if self.mask == "info" else {}

    def check(self, action: object) -> None:
        """An action lies in the space, and in the mask."""
        assert self.action_space.contains(np.asarray(action)), f"action {action!r} outside {self.action_space}"
        if self.mask is not None:
            spec = self.spec_of_actions
            chosen = np.reshape(action, -1) - np.asarray(spec.start) + np.cumsum([0, *spec.nvec[:-1]])
            assert self.valid[chosen].all(), f"action {action!r} is masked: {self.valid}"

    def observe(self) -> Any:
        match self.obs:
            case "t":
                return np.array([self.t], np.float32)
            case "noise":
                return self.np_random.normal(100, 10, 3)
            case "world":
                return np.array([np.random.normal()], np.float32)
            case "scalar":
                return np.float32(0.5)
            case "discrete":
                return np.int64(2 + self.t % 4)
            case "dict":
                inner, outer = self.np_random.normal(size=2), np.array([self.t, 1], np.float32)
                return {"a": {"b": inner}, "a_b": outer, "c": np.int64(1 + self.t % 3)}
            case "tuple":
                return np.int64(self.t % 3), np.array([0, 1], np.float32)
            case "image" | "camera":
                return np.full(self.observation_space.shape, self.t, np.uint8)
            case "several":
                return np.array([self.t % 2, 3 + self.t % 4])
            case "bits":
                return np.array([[self.t & 1, self.t >> 1 & 1], [1, 0]], np.int8)
            case "all":
                camera, inner = np.full((36, 40), self.t, np.uint8), {"c": np.int64(1 + self.t % 3), "x": np.zeros(2)}
                bits, several = np.array([1, 0, self.t & 1], np.int8), np.array([self.t % 2, self.t % 4])
                return {"bits": bits, "camera": camera, "inner": inner, "several": several}
            case "const":
                return np.array([1], np.float32)
            case _:
                return drawn_from(OBSERVATIONS[self.obs], self.np_random)

    def reset(self, *, seed: int | None = None, options: Mapping[str, object] | None = None) -> Any:
        super().reset(seed=seed)
        self.t, self.drawn = 0, float(self.np_random.integers(10))
        return self.answer()

    def step(self, action: object) -> Any:
        self.check(action)
        self.t, self.steps = self.t + 1, self.steps + 1
        done = self.t == self.n
        reward = (
            {"t": float(self.t), "drawn": self.drawn}.get(self.reward) if isinstance(self.reward, str) else self.reward
        )
        seen, info = self.answer()
        result = (
            seen,
            reward,
            done and self.end == "term",
            done and self.end == "trunc",
            {"steps": self.steps, **info},
        )
        if self.fault is None or self.steps != self.at or self.drew not in (None, self.drawn):
            return result
        if self.fault in HANGS:
            HANGS[self.fault]()
            return result
        if self.fault == "segfault":
            ctypes.string_at(0)
        if self.fault == "raise":
            raise ZeroDivisionError("the probe broke")
        if self.fault == "exit":
            raise SystemExit(0)
        if self.fault == "panic":
            raise BaseException("the probe broke")
        if self.fault == "die":
            os._exit(9)
        if self.fault in SIGNALS:
            SIGNALS[self.fault]()
            return result
        return FAULTS[self.fault](*result)


class Masked(Probe):
    """Forbids the action ``t`` modulo their number, at step t, and refuses to be given it.

    Args:
        where: where the mask is found: ``info``, ``method``, ``key`` (entry ``action_mask``) or ``nested`` (entry
            ``legal.now``), or several, joined by ``+``. As an entry, equal choices have a row each.
        last: what the mask of a terminal state is: ``mask`` (as of any other), ``empty`` (nothing is valid), ``none``
            (none is given).
        give: turns the mask into what is given.
        changes: of :class:`Probe`.
    """

    def __init__(
        self,
        where: str = "info",
        last: str = "mask",
        give: Callable[[Any], object] | None = None,
        actions: str = "three",
        **changes: Any,
    ) -> None:
        super().__init__(actions=actions, **changes)
        self.where, self.last, self.give = where.split("+"), last, give or (lambda mask: mask)
        self.sizes = getattr(self.action_space, "nvec", np.array([getattr(self.action_space, "n", 0)])).reshape(-1)
        size = int(self.sizes.sum())
        parts: dict[str, spaces.Space[Any]] = {"seen": self.observation_space}
        if "key" in self.where:
            even = len(self.sizes) > 1 and (self.sizes == self.sizes[0]).all()
            self.rows = (len(self.sizes), int(self.sizes[0])) if even else (size,)
            parts["action_mask"] = spaces.MultiBinary(self.rows)
        if "nested" in self.where:
            parts["legal"] = spaces.Dict({"now": _box(0, 1, (size,), np.int8), "ever": _box(-1, 1, (1,))})
        if len(parts) > 1:
            self.observation_space = spaces.Dict(parts)
        if "method" in self.where:
            self.action_masks = lambda: self.give(self.allowed())

    def allowed(self) -> Any:
        parts = [np.arange(size) != self.t % size for size in self.sizes]
        over = self.t == self.n and self.end == "term"
        return np.concatenate(parts).astype(np.int8) * (0 if over and self.last == "empty" else 1)

    def observe(self) -> Any:
        seen = super().observe()
        if not isinstance(self.observation_space, spaces.Dict):
            return seen
        found = self.observation_space.spaces
        result = {"seen": seen}
        if "action_mask" in found:
            result["action_mask"] = self.allowed().reshape(self.rows)
        if "legal" in found:
            result["legal"] = {"now": self.allowed(), "ever": np.zeros(1, np.float32)}
        return result

    def reset(self, *, seed: int | None = None, options: Mapping[str, object] | None = None) -> Any:
        observation, info = super().reset(seed=seed)
        return observation, self.told(info)

    def step(self, action: object) -> Any:
        chosen = np.asarray(action).reshape(-1) - np.asarray(getattr(self.action_space, "start", 0)).reshape(-1)
        assert (chosen != self.t % self.sizes).all(), f"{action!r} is not valid at step {self.t}"
        *rest, info = super().step(action)
        return *rest, self.told(info)

    def told(self, info: dict[str, object]) -> dict[str, object]:
        over = self.t == self.n and self.end == "term"
        if "info" not in self.where or (over and self.last == "none"):
            return info
        return info | {"action_mask": self.give(self.allowed())}


class OldReset(Probe):
    """Gives no info on reset, as before Gymnasium."""

    def reset(self, *, seed: int | None = None, options: Mapping[str, object] | None = None) -> Any:
        return super().reset(seed=seed)[0]


class OldSeed(Probe):
    """Takes no seed on reset, as before Gymnasium."""

    def reset(self) -> Any:  # type: ignore[override]
        return super().reset()


class Bonus(gym.Wrapper[Any, Any, Any, Any]):
    """A wrapper of the user's own: pays ``bonus`` more a step."""

    def __init__(self, env: gym.Env[Any, Any], bonus: float = 0.0) -> None:
        super().__init__(env)
        self.bonus = bonus

    def step(self, action: object) -> Any:
        observation, reward, *rest = self.env.step(action)
        return observation, float(reward) + self.bonus, *rest


class Breaks(gym.Wrapper[Any, Any, Any, Any]):
    """Breaks at the ``at``-th step since it was made (and at ``every`` one from there on), or hangs there; never by
    default. Or hangs when it is closed."""

    def __init__(
        self,
        env: gym.Env[Any, Any],
        at: int | None = None,
        hang: bool = False,
        every: bool = False,
        close: bool = False,
    ) -> None:
        super().__init__(env)
        self.at, self.hang, self.every, self.steps = at, hang, every, 0
        self.hangs_at_close = close

    def step(self, action: object) -> Any:
        self.steps += 1
        if self.at is not None and (self.steps == self.at or (self.every and self.steps > self.at)):
            if self.hang:
                time.sleep(60)
            raise LookupError("no such level")
        return self.env.step(action)

    def close(self) -> None:
        if self.hangs_at_close and multiprocessing.parent_process() is not None:
            time.sleep(60)


gym.register("Probe-v0", entry_point=Probe)
gym.register("Masked-v0", entry_point=Masked)
gym.register("Goal-v0", entry_point=Probe, reward_threshold=5.0)
gym.register("OldReset-v0", entry_point=OldReset)
gym.register("OldSeed-v0", entry_point=OldSeed)


def gym_config(
    env_id: str = "Probe-v0",
    *,
    num_envs: int = 1,
    backend: str = "sync",
    wrappers: Sequence[Mapping[str, object] | str] = (),
    max_episode_steps: int | None = None,
    observation_keys: Sequence[str] | None = None,
    action_mask: str = "auto",
    transforms: Sequence[object] = (),
    timeout: float | None = None,
    **kwargs: object,
) -> GymEnvConfig:
    """An env node; further arguments are those of the environment."""
    return GymEnvConfig.model_validate(
        {
            "kind": "gym",
            "id": env_id,
            "num_envs": num_envs,
            "backend": backend,
            "kwargs": kwargs,
            "wrappers": list(wrappers),
            "max_episode_steps": max_episode_steps,
            "observation_keys": observation_keys,
            "action_mask": action_mask,
            "timeout": timeout,
            "transforms": list(transforms),
        }
    )


class Rule:
    """A deterministic policy for a collector or an evaluator: its actions are a function of the observation alone.

    Args:
        actions: units of action.
        act: leaves ``[N, …]`` to actions in policy units; always the first choice (or the middle) by default.
        frames: frames of a batch.
    """

    def __init__(
        self, actions: ActionSpec, act: Callable[[TensorLeaves], Tensor] | None = None, frames: int = 12
    ) -> None:
        self.actions, self.frames_per_batch, self.batch_frames = actions, frames, frames
        self.explorer = self.sampler = self
        self._act = act or self._idle

    def _idle(self, leaves: TensorLeaves) -> Tensor:
        count = len(next(iter(leaves.values())))
        return self.actions.empty(count).zero_()

    def policy(self, leaves: TensorLeaves) -> Tensor:
        return self._act(leaves)

    def draw(self, steps: int, num_envs: int, frames: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        return ()

    def __call__(self, leaves: TensorLeaves, noise: tuple[Tensor, ...]) -> Tensor:
        return self._act(leaves)


def collector(
    env: GymVectorEnv,
    act: Callable[[TensorLeaves], Tensor] | None = None,
    *,
    frames: int = 12,
    total: int = -1,
    start: int = 0,
) -> Collector:
    """A collector on the CPU that acts by a :class:`Rule`, ``frames`` frames a batch."""
    return env.collector(
        Rule(env.actions, act, frames),
        total_frames=total,
        generator=generator(0, Stream.POLICY),
        device=torch.device("cpu"),
        frames=start,
    )


# Short runs of every algorithm: tests that hold for all take a new one up from here.
TINY = {
    "ppo": ("algo.frames_per_batch=64", "algo.minibatch_size=32", "algo.epochs=2", "algo.warmup_frames=32"),
    "dqn": (
        "algo.frames_per_batch=20",
        "algo.minibatch_size=16",
        "algo.learning_starts=60",
        "algo.updates_per_frame=0.1",
        "algo.target_interval=100",
        "algo.epsilon.frames=1000",
        "buffer.size=10_000",
    ),
    "sac": (
        "algo.frames_per_batch=20",
        "algo.minibatch_size=16",
        "algo.warmup_frames=60",
        "algo.updates_per_frame=0.1",
        "buffer.size=10_000",
    ),
}
ALGORITHMS = tuple(TINY)
# An environment of classic control and a probe that each can act in.
HOME = {"ppo": "cartpole", "dqn": "cartpole", "sac": "pendulum"}
PROBE_ACTIONS = {"ppo": "discrete", "dqn": "discrete", "sac": "box"}
QUICK = (
    "tuned=none",
    "env.num_envs=2",
    "network.hidden=[16]",
    "compile=false",
    "quiet=true",
    "eval.episodes=2",
    "eval.num_envs=2",
    "eval.final_episodes=0",
)


def tiny(algo: str, *overrides: str) -> list[str]:
    """The words of a run of a few hundred frames on classic control, without evaluation and TensorBoard; overrides come last."""
    given = {word.partition("=")[0] for word in overrides}
    words = [
        f"algo={algo}",
        f"env={HOME[algo]}",
        "logging=csv",
        "logging.interval=40",
        "eval=none",
        *QUICK,
        *TINY[algo],
    ]
    return [*(word for word in words if word.partition("=")[0] not in given), *overrides]


def run(directory: Path, algo: str, *overrides: str) -> dict[str, object]:
    """Trains a tiny run into a directory; returns its summary."""
    return train(run_config(*tiny(algo, *overrides)), directory, overrides)

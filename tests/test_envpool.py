"""EnvPool: Gymnasium's numbers, real transitions, whole games in evaluation, arguments by name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from importlib.util import find_spec
from typing import Any, Protocol, cast

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from probes import collector, gym_config

from rltool.config import load_node
from rltool.contract import EnvContract
from rltool.envpool_env import _without_placeholders
from rltool.envs import single_env
from rltool.errors import ConfigError
from rltool.schema import EnvConfig, GymEnvConfig
from rltool.spaces import MASK
from rltool.vectorized import VectorEnvBase

if find_spec("envpool") is None:
    pytest.skip("envpool is not installed", allow_module_level=True)

OBS = ("observation",)


class MakePool(Protocol):
    def __call__(self, env_id: str, *, seed: int = 0, **changes: Any) -> VectorEnvBase: ...


def pool_config(env_id: str, **changes: Any) -> GymEnvConfig:
    return gym_config(env_id, **{"num_envs": 4, "backend": "envpool"} | changes)


@pytest.fixture
def pool() -> Iterator[MakePool]:
    with ExitStack() as stack:

        def make(env_id: str, *, seed: int = 0, **changes: Any) -> VectorEnvBase:
            env = cast("VectorEnvBase", pool_config(env_id, **changes).build(seed=seed))
            return stack.enter_context(closing(env))

        yield make


def test_cartpole_agrees_with_gymnasiums(pool: MakePool) -> None:
    env = pool("CartPole-v1", num_envs=2)
    twins = [gymnasium.make("CartPole-v1") for _ in range(2)]
    for twin, state in zip(twins, env.reset()[OBS], strict=True):
        twin.reset()
        twin.unwrapped.state = tuple(state.astype(np.float64))  # type: ignore[attr-defined]
    running, source, steps = {0, 1}, np.random.default_rng(0), 0
    while running:
        action = source.integers(2, size=2)
        step = env.step(action)
        final = dict(step.final)
        for index in sorted(running):
            expected, reward, terminated, truncated, _ = twins[index].step(int(action[index]))
            found = final[index][OBS] if index in final else step.observation[OBS][index]
            np.testing.assert_allclose(found, expected, atol=1e-6)
            assert (step.reward[index], step.terminated[index], step.truncated[index]) == (
                reward,
                terminated,
                truncated,
            )
            running -= {index} if terminated or truncated else set()
        steps += 1
    assert steps > 15


@pytest.mark.parametrize("env_id", ["HalfCheetah-v5", "InvertedDoublePendulum-v5", "Pendulum-v1"])
def test_a_time_limit_is_a_truncation(pool: MakePool, env_id: str) -> None:
    collecting = collector(pool(env_id, max_episode_steps=4), frames=4 * 9)  # type: ignore[arg-type]
    batch = collecting.collect()
    ended = batch["next", "truncated"].squeeze(-1).nonzero()[:, 1].tolist()
    assert not batch["next", "terminated"].any()
    assert ended == [3, 7] * 4
    # What follows a step is the next step's observation, but where an episode ends its own last one.
    inside = ~batch["next", "done"][:, :-1, 0]
    same = (batch["next", "observation"][:, :-1] == batch["observation"][:, 1:]).all(-1)
    assert same[inside].all()
    assert not same[~inside].any()


def test_seeds_fix_the_episodes_and_a_session_brings_new_ones(pool: MakePool) -> None:
    env = pool("Pendulum-v1", seed=1)
    first = env.reset()[OBS].copy()
    np.testing.assert_array_equal(env.reset()[OBS], first)
    np.testing.assert_array_equal(pool("Pendulum-v1", seed=1).reset()[OBS], first)
    config = pool_config("Pendulum-v1")
    with closing(cast("VectorEnvBase", config.build(seed=1, session=1))) as later:
        assert not np.isin(later.reset()[OBS], first).any()
    assert len(np.unique(first, axis=0)) == 4


@pytest.mark.long
@pytest.mark.parametrize("env_id", ["ale_py:ALE/Breakout-v5", pytest.param("Breakout-v5", marks=pytest.mark.long)])
def test_atari_stacks_frames_along_the_first_axis(pool: MakePool, env_id: str) -> None:
    env = pool(env_id, num_envs=2)
    (leaf,) = env.leaves
    assert (leaf.kind, leaf.shape, leaf.dtype, leaf.stack, leaf.scale) == ("image", (4, 84, 84), "uint8", 4, 255.0)
    assert (env.id, env.resolved_config.id) == (env_id.rpartition(":")[2], env_id)
    before = env.reset()[OBS].copy()
    after = env.step(np.ones(2, np.int64)).observation[OBS]
    np.testing.assert_array_equal(after[:, :-1], before[:, 1:])


def lives(env: EnvContract | VectorEnvBase, steps: int) -> list[int]:
    """Steps at which the first environment's episode ended, serving the ball and never meeting it."""
    env.reset()
    ends = []
    for step in range(steps):
        if isinstance(env, EnvContract):
            *_, terminated, truncated, _ = env.step(np.int64(1))
            over = terminated or truncated
        else:
            over = bool(env.step(np.ones(1, np.int64)).final)
        if over:
            ends.append(step)
            if isinstance(env, EnvContract):
                env.reset()
    return ends


@pytest.mark.long
def test_the_end_of_a_life_is_no_new_game_in_training_and_no_end_in_evaluation(pool: MakePool) -> None:
    arguments = {"num_envs": 1, "episodic_life": True, "reward_clip": True, "noop_max": 1}
    ends = lives(pool("Breakout-v5", **arguments), 150)
    assert len(ends) >= 5
    with closing(single_env(pool_config("Breakout-v5", **arguments), 0)) as env:
        # The fifth life ends the game: all of them were of one game.
        (end, *_) = lives(env, 150)
        assert abs(end - ends[4]) <= 10


def test_evaluation_starts_each_episode_at_its_seed() -> None:
    with closing(single_env(pool_config("CartPole-v1"), 0)) as env:
        (first, _), (other, _), (again, _) = (env.reset(seed=seed) for seed in (5, 6, 5))
        np.testing.assert_array_equal(first, again)
        assert not np.array_equal(first, other)
        assert env.spec is not None
        assert (env.spec.id, env.spec.reward_threshold) == ("CartPole-v1", 475.0)


def test_dicts_masks_and_categories(pool: MakePool) -> None:
    env = pool("Game2048-v1")
    assert [leaf.name for leaf in env.leaves] == ["observation.board", "action_mask"]
    assert env.resolved_config.action_mask == "action_mask"
    observation = env.reset()
    for _ in range(30):
        assert observation[MASK].shape == (4, 4)
        assert observation[MASK].any(1).all()
        observation = env.step(observation[MASK].argmax(1)).observation
    (leaf,) = pool("FrozenLake-v1").leaves
    assert (leaf.kind, leaf.nvec) == ("discrete", (16,))
    grid = pool("MiniGrid-Empty-8x8-v0", observation_keys=["image", "direction"])
    assert [(leaf.name, leaf.kind) for leaf in grid.leaves] == [
        ("observation.direction", "discrete"),
        ("observation.image", "box"),
    ]


@pytest.mark.parametrize(
    ("env_id", "changes", "message"),
    [
        ("CartPol-v1", {}, r"^env\.id: EnvPool has no CartPol-v1\. Did you mean CartPole-v1"),
        ("probes:Probe-v0", {}, r"^env\.id: EnvPool has no Probe-v0"),
        ("Pong-v5", {"frameskip": 2}, r"^env\.kwargs\.frameskip: .* no such argument\. Did you mean frame_skip"),
        ("Pong-v5", {"frame_skip": "four"}, r"^env\.kwargs\.frame_skip: expected .* int \(such as 4\), found 'four'"),
        ("Pong-v5", {"frame_skip": True}, r"^env\.kwargs\.frame_skip: expected .* int \(such as 4\), found True"),
        ("CartPole-v1", {"seed": 3}, r"^env\.kwargs\.seed: expected none, found 3\. Give seed instead"),
    ],
)
def test_what_envpool_does_not_take_is_named(env_id: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        pool_config(env_id, **changes).build(seed=0)


def test_several_arguments_are_refused_together() -> None:
    with pytest.raises(ConfigError) as caught:
        pool_config("Pong-v5", num_threadz=2, batch_size=4).build(seed=0)
    assert [problem.path for problem in caught.value.problems] == ["env.kwargs.num_threadz", "env.kwargs.batch_size"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"wrappers": ["ClipReward", "NormalizeObservation"]},
            r"^env\.wrappers: expected none with env\.backend=envpool, found ClipReward, NormalizeObservation\. "
            r".*EnvPool has arguments for ClipReward: env\.kwargs\.\{reward_clip\}",
        ),
        ({"transforms": ["ToTensorImage"]}, r"^env\.backend: expected sync with env\.transforms .*found envpool"),
    ],
)
def test_wrappers_and_transforms_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_node("env", pool_config("Pong-v5").model_dump() | changes)


@pytest.mark.parametrize(("key", "render_mode"), [("render", "human"), ("video", "rgb_array")])
def test_no_picture_is_promised(key: str, render_mode: str) -> None:
    config = cast("EnvConfig", pool_config("CartPole-v1"))
    with pytest.raises(ConfigError, match=rf"^{key}: CartPole-v1 of EnvPool draws no pictures.*env\.backend=sync"):
        single_env(config, 0, render_mode=render_mode)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_bounds_that_stand_for_none_are_infinite(dtype: type[np.floating[Any]]) -> None:
    limit = np.finfo(dtype)
    low, high = np.array([limit.tiny, limit.min, -1], dtype), np.array([limit.max, limit.max, 2], dtype)
    space = spaces.Dict({"speed": spaces.Box(low, high, dtype=dtype), "image": spaces.Box(0, 255, (2, 2), np.uint8)})
    found = cast("spaces.Dict", _without_placeholders(space))
    assert found["image"] == space["image"]
    speed = cast("spaces.Box", found["speed"])
    assert (speed.low.tolist(), speed.high.tolist()) == ([-np.inf, -np.inf, -1.0], [np.inf, np.inf, 2.0])

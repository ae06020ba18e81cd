"""The collector: real transitions only, true final observations, episode statistics, the same batch as TorchRL's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from probes import ACTIONS, collector, gym_config
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import Tensor
from torchrl.collectors import Collector as TorchRLCollector
from torchrl.envs import GymWrapper

from rltool.actions import ActionSpec
from rltool.collect import RandomExplorer
from rltool.contract import EnvContract
from rltool.errors import NonFiniteError
from rltool.local import LocalVectorEnv
from rltool.spaces import Leaves
from rltool.vectorized import GymVectorEnv

OBS = ("observation",)
MakeVector = Callable[..., GymVectorEnv]


def test_only_real_transitions_are_stored(vector: MakeVector) -> None:
    env = vector(num_envs=2, obs="t")
    collecting = collector(env, frames=18, total=90)
    batches = list(collecting)
    pairs = {
        (int(before), int(after))
        for batch in batches
        for before, after in zip(
            batch["observation"].flatten().tolist(), batch["next", "observation"].flatten().tolist(), strict=True
        )
    }
    assert pairs == {(0, 1), (1, 2), (2, 3)}
    assert torch.cat([batch["next", "reward"] for batch in batches]).mean() == 1.0
    assert collecting.frames == sum(probe.unwrapped.steps for probe in env._env.envs) == 90  # type: ignore[attr-defined]


@pytest.mark.parametrize("end", ["term", "trunc"])
def test_flags_and_shapes_at_an_end(vector: MakeVector, end: str) -> None:
    batch = collector(vector(num_envs=2, obs="t", end=end), frames=10).collect()
    assert batch.shape == (2, 5)
    third = [[False], [False], [True], [False], [False]]
    never = [[False]] * 5
    assert batch["next", "done"].tolist() == [third] * 2
    assert batch["next", "terminated"].tolist() == [third if end == "term" else never] * 2
    assert batch["next", "truncated"].tolist() == [third if end == "trunc" else never] * 2
    assert batch["observation"][0].flatten().tolist() == [0, 1, 2, 0, 1]
    assert batch["next", "observation"][0].flatten().tolist() == [1, 2, 3, 1, 2]


def test_a_batch_goes_on_where_the_one_before_stopped(vector: MakeVector) -> None:
    collecting = collector(vector(num_envs=2, obs="t", n=7), frames=8)
    first, second = collecting.collect(), collecting.collect()
    assert first["observation"][0].flatten().tolist() == [0, 1, 2, 3]
    assert second["observation"][0].flatten().tolist() == [4, 5, 6, 0]
    assert second["next", "observation"][0].flatten().tolist() == [5, 6, 7, 1]


def test_batches_share_no_memory(vector: MakeVector) -> None:
    collecting = collector(vector(num_envs=2, obs="t"), frames=6)
    first = collecting.collect()
    kept = first.clone()
    collecting.collect()
    assert (first == kept).all()
    first["next", "observation"].fill_(-1)
    assert (first["observation"] == kept["observation"]).all()


def test_final_observations_of_nested_spaces_are_true(vector: MakeVector) -> None:
    batch = collector(vector(num_envs=2, obs="dict"), frames=14).collect()
    assert batch["next", "observation", "a_b"][0, :, 0].tolist() == [1, 2, 3, 1, 2, 3, 1]
    assert batch["next", "observation", "c"][0].tolist() == [2, 3, 1, 2, 3, 1, 2]
    assert batch["observation", "a_b"][1, :, 0].tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert batch["observation", "a", "b"].dtype == torch.float32
    inner = batch["observation", "a", "b"][:, 1:] == batch["next", "observation", "a", "b"][:, :-1]
    assert inner.all(-1)[0].tolist() == [True, True, False, True, True, False]


@pytest.mark.parametrize(("backend", "num_envs"), [("sync", 1), ("sync", 2), ("sync", 4), ("async", 2), ("async", 4)])
@pytest.mark.parametrize("end", ["term", "trunc"])
def test_every_episode_is_counted_whole_from_the_first_to_the_last(
    vector: MakeVector, backend: str, num_envs: int, end: str
) -> None:
    env = vector(num_envs=num_envs, backend=backend, end=end, reward=100)
    collecting = collector(env, frames=4, total=12 * num_envs)
    lengths, returns = [], []
    for _ in collecting:
        lengths += collecting.episodes.lengths
        returns += collecting.episodes.returns
    assert lengths == [3] * (collecting.frames // num_envs // 3 * num_envs)
    assert set(returns) == {300.0}


def test_returns_of_uneven_rewards_survive_batch_boundaries(vector: MakeVector) -> None:
    collecting = collector(vector(n=5, reward="t"), frames=3)
    returns = [collecting.episodes.returns for _ in range(7) if collecting.collect() is not None]
    assert returns == [[], [15.0], [], [15.0], [15.0], [], [15.0]]


def test_long_returns_keep_their_digits(vector: MakeVector) -> None:
    collecting = collector(vector(n=3000, reward=16_777_217.0 / 2), frames=1000)
    for _ in range(3):
        collecting.collect()
    assert collecting.episodes.returns == [3000 * float(np.float32(16_777_217.0 / 2))]


@pytest.mark.parametrize(("num_envs", "frames", "steps"), [(1, 7, 7), (3, 7, 3), (10, 145, 15), (4, 4, 1)])
def test_batches_are_rounded_up_to_whole_steps(vector: MakeVector, num_envs: int, frames: int, steps: int) -> None:
    collecting = collector(vector(num_envs=num_envs), frames=frames, total=2 * num_envs * steps - 1)
    assert [tuple(batch.shape) for batch in collecting] == [(num_envs, steps)] * 2
    assert collecting.frames == 2 * num_envs * steps


def test_the_frame_counter_goes_on_from_an_earlier_session(vector: MakeVector) -> None:
    collecting = collector(vector(), frames=12, start=100, total=120)
    assert len(list(collecting)) == 2
    assert collecting.frames == 124


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("reward NaN", "reward of environment 0 is nan at frame 18"),
        ("observation NaN", "observation of environment 0 is nan at frame 20"),
    ],
)
def test_the_first_number_that_is_not_finite_is_named(vector: MakeVector, fault: str, message: str) -> None:
    env = vector(num_envs=2, n=None, fault=fault, at=10)
    env._env.envs[1].unwrapped.fault = None  # type: ignore[attr-defined]
    collecting = collector(env, frames=12)
    collecting.collect()
    with pytest.raises(NonFiniteError, match=f"^{message}\\."):
        collecting.collect()
    assert collecting.frames == 12


def test_an_observation_is_named_before_the_action_that_it_spoils(
    vector: MakeVector, monkeypatch: pytest.MonkeyPatch
) -> None:
    def follow(leaves: Mapping[tuple[str, ...], Tensor]) -> Tensor:
        return leaves[OBS].expand(-1, 2)

    monkeypatch.setattr(ACTIONS["box"], "contains", lambda action: True)  # the probe would refuse the action
    env = vector(n=None, actions="box", fault="observation NaN", at=3)
    with pytest.raises(NonFiniteError, match=r"^observation of environment 0 is nan at frame 3\."):
        collector(env, follow).collect()


def test_a_last_observation_that_is_not_finite_is_named(vector: MakeVector) -> None:
    env = vector(n=3, fault="observation NaN", at=3)
    with pytest.raises(
        NonFiniteError, match=r"^observation \(last of an episode\) of environment 0 is nan at frame 3\."
    ):
        collector(env).collect()


class BegunAsTorchRL(GymVectorEnv):
    """Three environments with time limits of 20, 25 and 31 steps, begun as TorchRL's wrapper begins them: by a seeded
    reset and then one that is not. (Where all end at the same step, that wrapper resets once more; these never do.)"""

    def __init__(self, env_id: str) -> None:
        super().__init__(gym_config(env_id, num_envs=3), seed=0)
        self._env.close()
        self._env = LocalVectorEnv(
            [partial(EnvContract, make(), env_id, index) for index, make in enumerate(limited(env_id))]
        )

    def reset(self) -> Leaves:
        self._env.reset([7, 8, 9])
        return self._env.reset([None] * 3)


def limited(env_id: str) -> list[Callable[[], gymnasium.Env[object, object]]]:
    return [partial(gymnasium.make, env_id, max_episode_steps=limit) for limit in (20, 25, 31)]


def left_or_right(observation: Tensor) -> Tensor:
    return (observation[..., 2] > 0).long()


def against_the_swing(observation: Tensor) -> Tensor:
    """In [-1, 1]."""
    return -torch.sign(observation[..., 2:]) * 0.75


@pytest.mark.parametrize(
    ("env_id", "act", "unit"), [("CartPole-v1", left_or_right, 1), ("Pendulum-v1", against_the_swing, 2.0)]
)
def test_a_batch_is_the_one_that_torchrl_collects(env_id: str, act: Callable[[Tensor], Tensor], unit: float) -> None:
    wrapped = GymWrapper(
        SyncVectorEnv(limited(env_id), autoreset_mode=AutoresetMode.SAME_STEP), categorical_action_encoding=True
    )
    wrapped.set_seed(7)
    theirs = TorchRLCollector(
        wrapped,
        TensorDictModule(lambda observation: act(observation) * unit, in_keys=["observation"], out_keys=["action"]),
        frames_per_batch=180,
        total_frames=360,
        auto_register_policy_transforms=False,
    )
    env = BegunAsTorchRL(env_id)
    ours = collector(env, lambda leaves: act(leaves[OBS]), frames=180)
    try:
        for expected in theirs:
            batch = ours.collect()
            assert batch.shape == expected.shape == (3, 60)
            assert batch["next", "done"].sum() >= 6
            assert not batch["next", "done"].all(0).any()
            torch.testing.assert_close(batch["action"] * unit, expected["action"], rtol=0, atol=0)
            torch.testing.assert_close(batch["observation"], expected["observation"], rtol=0, atol=0)
            for name in ("observation", "reward", "terminated", "truncated", "done"):
                found, wanted = batch["next", name], expected["next", name]
                torch.testing.assert_close(found, wanted.to(found.dtype), rtol=0, atol=0, msg=name)
    finally:
        theirs.shutdown()
        env.close()


class Random:
    """Collects with random actions."""

    def __init__(self, actions: ActionSpec) -> None:
        self.actions, self.explorer = actions, RandomExplorer(actions)
        self.frames_per_batch = self.batch_frames = 90


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_the_same_seed_gives_the_same_frames(vector: MakeVector, env_id: str) -> None:
    def batch(seed: int) -> TensorDictBase:
        env = vector(env_id, num_envs=3, seed=seed)
        noise = torch.Generator().manual_seed(seed)
        return env.collector(
            Random(env.actions), total_frames=-1, generator=noise, device=torch.device("cpu")
        ).collect()

    zero, again, one = batch(0), batch(0), batch(1)
    assert (zero == again).all()
    assert not torch.equal(zero["observation"], one["observation"])
    assert not torch.equal(zero["action"], one["action"])


def test_no_two_environments_of_any_run_or_session_begin_alike(vector: MakeVector) -> None:
    starts = [
        tuple(row)
        for seed, session in [(0, 0), (1, 0), (2, 0), (0, 1), (0, 2)]
        for row in vector("CartPole-v1", num_envs=3, seed=seed, session=session).reset()[OBS].tolist()
    ]
    assert len(set(starts)) == 15


@pytest.mark.parametrize("num_envs", [1, 4])
def test_the_first_environments_begin_alike_however_many_there_are(vector: MakeVector, num_envs: int) -> None:
    eight = vector("CartPole-v1", num_envs=8).reset()[OBS].copy()
    np.testing.assert_array_equal(vector("CartPole-v1", num_envs=num_envs).reset()[OBS], eight[:num_envs])

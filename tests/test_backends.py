"""Backends: whatever steps the environments, the batches are the same."""

from __future__ import annotations

import gc
import multiprocessing
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from probes import ACTIONS, OBSERVATIONS, Probe, gym_config

from rltool import vectorized, workers
from rltool.choices import best, masked
from rltool.collect import Step
from rltool.config import load_node
from rltool.errors import ConfigError, EnvironmentFault
from rltool.spaces import MASK, Leaves
from rltool.vectorized import GymVectorEnv

pytestmark = pytest.mark.long

MakeVector = Callable[..., GymVectorEnv]
OTHERS = ("threads", "async")


@pytest.fixture(autouse=True)
def two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two chunks, of two environments and of one, on any machine."""
    monkeypatch.setattr(vectorized, "usable_cores", lambda: 2)


def rollout(env: GymVectorEnv, steps: int = 7) -> tuple[Leaves, list[Step]]:
    """The first observation and the steps after random actions, valid ones where they are masked; all of it copied."""
    source = torch.Generator().manual_seed(3)

    def kept(leaves: Leaves) -> Leaves:
        return {key: array.copy() for key, array in leaves.items()}

    first = observation = kept(env.reset())
    answers = []
    for _ in range(steps):
        chosen = env.actions.random(env.num_envs, source)
        if MASK in observation:
            noise = torch.rand(env.num_envs, env.actions.size, generator=source)
            chosen = best(masked(noise, torch.from_numpy(observation[MASK]).bool()), env.actions.nvec)
        answer = env.step(env.actions.to_env(chosen.numpy()))
        observation = kept(answer.observation)
        answers.append(Step(observation, answer.reward, answer.terminated, answer.truncated, answer.final))
    return first, answers


def assert_equal_leaves(found: Leaves, expected: Leaves) -> None:
    assert found.keys() == expected.keys()
    for key, array in expected.items():
        np.testing.assert_array_equal(found[key], array, err_msg=".".join(key))


def assert_equal_rollouts(found: tuple[Leaves, list[Step]], expected: tuple[Leaves, list[Step]]) -> None:
    assert_equal_leaves(found[0], expected[0])
    for answer, wanted in zip(found[1], expected[1], strict=True):
        assert_equal_leaves(answer.observation, wanted.observation)
        for name in ("reward", "terminated", "truncated"):
            np.testing.assert_array_equal(getattr(answer, name), getattr(wanted, name), err_msg=name)
        assert [index for index, _ in answer.final] == [index for index, _ in wanted.final]
        for (_, final), (_, last) in zip(answer.final, wanted.final, strict=True):
            assert_equal_leaves(final, last)


@pytest.mark.parametrize("obs", sorted(OBSERVATIONS.keys() - {"world", "text"}))
def test_every_observation_is_the_same_through_every_backend(vector: MakeVector, obs: str) -> None:
    expected = rollout(vector(num_envs=3, obs=obs, reward="drawn"))
    assert sum(len(answer.final) for answer in expected[1]) == 6
    for backend in OTHERS:
        assert_equal_rollouts(rollout(vector(num_envs=3, obs=obs, reward="drawn", backend=backend)), expected)


@pytest.mark.parametrize("actions", sorted(ACTIONS.keys() - {"whole"}))
def test_every_action_is_in_its_space_through_every_backend(vector: MakeVector, actions: str) -> None:
    # The probe itself refuses what its space does not contain.
    expected = rollout(vector(num_envs=3, obs="noise", actions=actions))
    for backend in OTHERS:
        assert_equal_rollouts(rollout(vector(num_envs=3, obs="noise", actions=actions, backend=backend)), expected)


@pytest.mark.parametrize("mask", ["info", "method", "key"])
@pytest.mark.parametrize("actions", ["start", "multi", "binary 2-D"])
def test_masks_are_the_same_through_every_backend(vector: MakeVector, mask: str, actions: str) -> None:
    changes: dict[str, Any] = {"num_envs": 3, "obs": "noise", "actions": actions, "mask": mask}
    env = vector(**changes)
    assert env.resolved_config.action_mask == {"key": "action_mask"}.get(mask, mask)
    expected = rollout(env)
    assert not expected[0][MASK].all(), "some action of some environment is masked"
    for backend in OTHERS:
        assert_equal_rollouts(rollout(vector(backend=backend, **changes)), expected)


@pytest.mark.parametrize("backend", ["sync", *OTHERS])
def test_text_is_refused_unless_it_is_left_out(vector: MakeVector, backend: str) -> None:
    with pytest.raises(ConfigError, match=r"observation\.mission the space Text.*env\.observation_keys"):
        GymVectorEnv(gym_config(num_envs=2, backend=backend, obs="text"), seed=0)
    env = vector(num_envs=3, backend=backend, obs="text", observation_keys=["seen"])
    assert [leaf.name for leaf in env.leaves] == ["observation.seen"]
    assert_equal_rollouts(rollout(env), rollout(vector(num_envs=3, obs="text", observation_keys=["seen"])))


def test_threads_step_a_simulator_as_one_after_the_other_does(vector: MakeVector) -> None:
    changes: dict[str, Any] = {"num_envs": 5, "max_episode_steps": 6}
    expected = rollout(vector("Hopper-v5", **changes), steps=20)
    assert_equal_rollouts(rollout(vector("Hopper-v5", backend="threads", **changes), steps=20), expected)


@pytest.mark.parametrize(
    ("fault", "message"),
    [("raise", "ZeroDivisionError: the probe broke"), ("exit", "SystemExit: 0"), ("reward None", "the reward of")],
)
def test_what_an_environment_raises_in_a_thread_is_named(vector: MakeVector, fault: str, message: str) -> None:
    env = vector(num_envs=3, backend="threads", fault=fault, at=2)
    env.reset()
    env.step(np.zeros(3, np.int64))
    with pytest.raises(EnvironmentFault, match=rf"^environment 0 \(Probe-v0, Probe\): .*{message}"):
        env.step(np.zeros(3, np.int64))


def test_threads_end_with_the_environments() -> None:
    before = threading.active_count()
    env = GymVectorEnv(gym_config(num_envs=3, backend="threads"), seed=0)
    env.reset()
    assert threading.active_count() == before + 1
    env.close()
    assert threading.active_count() == before
    assert not multiprocessing.active_children()


# ------------------------------------------------------------------------------------- an environment's vector version


class WholeReset(SyncVectorEnv):
    """Restarts everything, whatever mask it is given."""

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return super().reset(seed=seed)


def vector_probes(cls: type[SyncVectorEnv], mode: AutoresetMode) -> Callable[..., SyncVectorEnv]:
    def make(num_envs: int, max_episode_steps: int | None = None, **kwargs: Any) -> SyncVectorEnv:
        factories = [lambda: Probe(**kwargs)] * num_envs
        if max_episode_steps is not None:
            factories = [lambda: gymnasium.wrappers.TimeLimit(Probe(**kwargs), max_episode_steps)] * num_envs
        return cls(factories, autoreset_mode=mode)

    return make


for name, (cls, mode) in {
    "Same": (SyncVectorEnv, AutoresetMode.SAME_STEP),
    "Next": (SyncVectorEnv, AutoresetMode.NEXT_STEP),
    "Disabled": (SyncVectorEnv, AutoresetMode.DISABLED),
    "Whole": (WholeReset, AutoresetMode.NEXT_STEP),
}.items():
    gymnasium.register(f"{name}Vector-v0", entry_point=Probe, vector_entry_point=vector_probes(cls, mode))


def vector_version(env_id: str, num_envs: int = 3, seed: int = 0, **changes: Any) -> Any:
    return gym_config(env_id, num_envs=num_envs, backend="vector", **changes).build(seed=seed)


@pytest.mark.parametrize("mode", ["Same", "Next", "Disabled"])
@pytest.mark.parametrize("changes", [{"obs": "t"}, {"obs": "t", "mask": "key"}, {"obs": "t", "n": None}])
def test_a_vector_version_gives_real_transitions_only(vector: MakeVector, mode: str, changes: dict[str, Any]) -> None:
    limit = 3 if "n" in changes else None
    env = vector_version(f"{mode}Vector-v0", max_episode_steps=limit, **changes)
    key = env.leaves[0].key
    first, answers = rollout(env)
    seen = [first[key].reshape(-1).tolist()]
    for answer in answers:
        final = {index: leaves[key].item() for index, leaves in answer.final}
        for index, before in enumerate(seen[-1]):
            after = final.get(index, answer.observation[key][index].item())
            assert (before, after) in {(0, 1), (1, 2), (2, 3)}
        assert answer.reward.tolist() == [1.0] * 3
        seen.append(answer.observation[key].reshape(-1).tolist())
    assert seen == [[t % 3] * 3 for t in range(8)]
    env.close()


@pytest.mark.parametrize(
    ("env_id", "message"),
    [
        ("CartPole-v1", "vector: CartPole-v1 has a vector version that restarts an environment only with the step"),
        (
            "WholeVector-v0",
            r"vector: WholeVector-v0 has a vector version .*all environments at once.*sync, threads or async",
        ),
        ("Acrobot-v1", "vector: Acrobot-v1 has no vector version of its own"),
    ],
)
def test_a_vector_version_that_would_give_ghosts_is_refused(env_id: str, message: str) -> None:
    changes = {"obs": "t"} if "Vector" in env_id else {}
    with pytest.raises(ConfigError, match=rf"^env\.backend: {message}"):
        vector_version(env_id, **changes)


def test_a_vector_version_of_one_environment_needs_no_mask() -> None:
    env = vector_version("CartPole-v1", num_envs=1, max_episode_steps=5)
    _, answers = rollout(env, steps=11)
    assert [answer.truncated.item() for answer in answers] == [step % 5 == 4 for step in range(11)]
    assert all(answer.reward.item() == 1.0 for answer in answers)


def test_wrappers_around_a_vector_version_are_refused() -> None:
    config = {**gym_config().model_dump(), "backend": "vector", "wrappers": [{"name": "ClipReward", "kwargs": {}}]}
    with pytest.raises(ConfigError, match=r"env\.wrappers: expected none with env\.backend=vector, found ClipReward"):
        load_node("env", config)


def test_a_missing_envpool_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "envpool", None)
    with pytest.raises(ConfigError, match=r"^env\.backend: module envpool .*pip install 'rltool\[envpool\]'"):
        gym_config("CartPole-v1", backend="envpool").build(seed=0)


# ------------------------------------------------------------------------------------------- processes that start afresh


@pytest.fixture
def spawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on macOS and Windows: a worker process imports everything anew."""
    monkeypatch.setattr(workers, "START_METHOD", "spawn")


@pytest.mark.usefixtures("spawn")
def test_spawned_workers_import_a_file_of_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_env.py").write_text(
        "import gymnasium\n"
        "from gymnasium.envs.classic_control import PendulumEnv\n"
        "class MyEnv(PendulumEnv):\n"
        "    pass\n"
        "gymnasium.register('MyEnv-v3', entry_point=MyEnv, max_episode_steps=3)\n"
    )
    monkeypatch.chdir(tmp_path)
    rollouts = []
    for backend in ("sync", "async"):
        with closing(GymVectorEnv(gym_config("my_env:MyEnv-v3", num_envs=2, backend=backend), seed=0)) as env:
            rollouts.append(rollout(env))
    assert_equal_rollouts(*rollouts)


@pytest.mark.usefixtures("spawn")
@pytest.mark.parametrize("env_id", ["CartPole-v1", "gymnasium.envs.mujoco:Hopper-v5"])
def test_spawned_workers_know_what_an_installed_module_registers(vector: MakeVector, env_id: str) -> None:
    assert_equal_rollouts(rollout(vector(env_id, backend="async")), rollout(vector(env_id)))


@pytest.mark.usefixtures("spawn")
def test_an_id_that_spawned_workers_do_not_know_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    gymnasium.register("OnlyHere-v0", entry_point=Probe)
    with pytest.raises(
        ConfigError, match=r"^env\.id: OnlyHere-v0 is registered in this process only.*module:OnlyHere-v0"
    ):
        GymVectorEnv(gym_config("OnlyHere-v0", backend="async"), seed=0)
    assert "Traceback" not in capfd.readouterr().err
    gc.collect()
    assert not multiprocessing.active_children()

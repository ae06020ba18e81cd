"""Environments: the contract and what names its breaches, ids, wrappers, backends."""

from __future__ import annotations

import multiprocessing
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from probes import ACTIONS, OBSERVATIONS, Probe, collector, gym_config
from torch import Tensor

from rltool.contract import EnvContract
from rltool.envs import make_env
from rltool.vectorized import GymVectorEnv
from rltool.errors import ConfigError, EnvironmentFault
from rltool.seeding import seed_world

OBS = ("observation",)
MakeVector = Callable[..., GymVectorEnv]


def contract(**changes: Any) -> EnvContract:
    return EnvContract(Probe(**changes), "Probe-v0", 3)


@pytest.mark.parametrize(
    ("fault", "changes", "message"),
    [
        ("observation of another length", {}, r"observation of step 2 must have shape \(1,\).*found shape \(2,\)"),
        ("observation of text", {}, r"observation of step 2 must have .*fits float32, found .* of <U4"),
        (
            "observation without a key",
            {"obs": "dict"},
            r"the observation of step 2 lacks a part of its space Dict.*a_b",
        ),
        ("observation out of range", {"obs": "discrete"}, r"observation of step 2 must be in 2 … 5, found 9"),
        ("reward None", {}, r"the reward of step 2 must be one number, found None"),
        ("reward of two", {}, r"the reward of step 2 must be one number, found array\(\[1\., 2\.\]\)"),
        (
            "four values",
            {},
            r"step\(\) must return \(observation, reward, terminated, truncated, info\), found a tuple of 4",
        ),
    ],
)
def test_a_breach_names_environment_class_and_step(fault: str, changes: dict[str, Any], message: str) -> None:
    env = contract(fault=fault, at=2, **changes)
    env.reset(seed=0)
    env.step(0)
    with pytest.raises(EnvironmentFault, match=message) as caught:
        env.step(0)
    assert str(caught.value).startswith("environment 3 (Probe-v0, Probe): ")


@pytest.mark.parametrize("fault", ["observation of another length", "reward None"])
def test_breaches_are_found_long_after_the_start(fault: str) -> None:
    env = contract(n=None, fault=fault, at=151)
    env.reset(seed=0)
    for _ in range(150):
        env.step(0)
    with pytest.raises(EnvironmentFault, match="must"):
        env.step(0)


@pytest.mark.parametrize(
    ("env_id", "message"),
    [
        ("OldReset-v0", r"environment 0 \(OldReset-v0, OldReset\): reset\(\) must return \(observation, info\)"),
        ("OldSeed-v0", r"environment 0 \(OldSeed-v0, OldSeed\): reset\(\) must take seed and options, found \(\)"),
    ],
)
def test_environments_from_before_gymnasium_are_named(env_id: str, message: str) -> None:
    with pytest.raises(EnvironmentFault, match=message):
        make_env(gym_config(env_id), 0).reset(seed=0)


def test_a_reset_observation_of_another_shape_is_named() -> None:
    probe = Probe()
    probe.observe = lambda: np.zeros(4, np.float32)  # type: ignore[method-assign]
    with pytest.raises(EnvironmentFault, match=r"observation of reset\(\) must have shape \(1,\).*found shape \(4,\)"):
        EnvContract(probe, "Probe-v0", 0).reset()


@pytest.mark.parametrize("reward", [1, True, 1.0, np.float64(1), np.float32(1), np.array([1.0]), np.array(1), [1.0]])
def test_every_form_of_one_number_is_the_same_reward(reward: object) -> None:
    env = contract(reward=reward)
    env.reset(seed=0)
    _, received, *_ = env.step(0)
    assert (type(received), received) == (float, 1.0)


@pytest.mark.parametrize("reward", [1, True, 1.0, [1.0]])
def test_rewards_arrive_as_float32_columns(vector: MakeVector, reward: object) -> None:
    rewards = collector(vector(num_envs=2, reward=reward)).collect()["next", "reward"]
    torch.testing.assert_close(rewards, torch.ones(2, 6, 1))


def test_float64_observations_become_float32(vector: MakeVector) -> None:
    batch = collector(vector(obs="noise", num_envs=2)).collect()
    assert batch["observation"].dtype == batch["next", "observation"].dtype == torch.float32
    assert 60 < float(batch["observation"].mean()) < 140


def test_float64_observations_of_a_float32_space_do_too(vector: MakeVector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Probe, "observe", lambda probe: np.array([0.1]))
    batch = collector(vector(num_envs=2)).collect()
    torch.testing.assert_close(batch["observation"], torch.full((2, 6, 1), 0.1))


def test_the_last_observation_outlives_a_reset_that_reuses_its_array() -> None:
    class Reuser(Probe):
        shared = np.zeros(1, np.float32)

        def observe(self) -> Any:
            self.shared[0] = self.t
            return self.shared

    env = EnvContract(Reuser(n=2), "Probe-v0", 0)
    env.reset()
    env.step(0)
    last, *_ = env.step(0)
    env.reset()
    assert last[0] == 2  # type: ignore[index]


@pytest.mark.parametrize(
    ("actions", "expected"),
    [("discrete", [0, 0]), ("start", [-1, -1]), ("scalar", [0, 0]), ("box", [[0.5, 1], [0.5, 1]])],
)
def test_environments_receive_actions_of_their_space(vector: MakeVector, actions: str, expected: list[Any]) -> None:
    env = vector(num_envs=2, actions=actions)  # the probe itself asserts that its space contains what it gets
    batch = collector(env, frames=8).collect()
    sent = env.actions.to_env(batch["action"][:, 0].numpy())
    assert sent.shape == (2, *(ACTIONS[actions].shape or ()))
    np.testing.assert_allclose(sent, expected)


@pytest.mark.parametrize("changes", [{"actions": "multi"}, {"obs": "image"}])
@pytest.mark.parametrize("backend", ["sync", "async"])
def test_a_space_that_is_not_taken_is_refused_before_anything_runs(changes: dict[str, str], backend: str) -> None:
    space = ACTIONS["multi"] if "actions" in changes else OBSERVATIONS["image"]
    before = set(multiprocessing.active_children())
    with pytest.raises(ConfigError, match=re.escape(str(space))):
        GymVectorEnv(gym_config(num_envs=2, backend=backend, **changes), seed=0)
    assert set(multiprocessing.active_children()) == before


def test_an_id_without_a_version_is_resolved_to_the_newest(
    vector: MakeVector, capsys: pytest.CaptureFixture[str]
) -> None:
    env = vector("InvertedDoublePendulum", num_envs=2)
    error = capsys.readouterr().err
    assert error.count("\n") == 1, "said once, in one line"
    assert error.startswith("warning: Using the latest versioned environment `InvertedDoublePendulum-v5`")
    assert (env.id, env.resolved_config.id) == ("InvertedDoublePendulum-v5",) * 2
    assert env.leaves[0].shape == (9,)


def test_an_old_version_works_with_a_warning(vector: MakeVector, capsys: pytest.CaptureFixture[str]) -> None:
    env = vector("InvertedDoublePendulum-v4")
    assert "InvertedDoublePendulum-v4 is out of date" in capsys.readouterr().err
    assert (env.id, env.leaves[0].shape) == ("InvertedDoublePendulum-v4", (11,))


@pytest.mark.parametrize(
    ("env_id", "reason"),
    [
        ("InvertedDoublePendulum-v2", "moved to the gymnasium-robotics project"),
        ("InvertedDoublePendulum-v3", "Please use `InvertedDoublePendulum-v5` instead"),
        ("InvertedDoublePendulum-v6", "versioned environments: [ `v2`, `v4`, `v5` ]"),
        ("CartPol-v1", "Did you mean: `CartPole`?"),
        ("PongNoFrameskip-v4", "Environment `PongNoFrameskip` doesn't exist"),
        ("Cart Pole!", "Malformed environment ID"),
        ("no_such_module:CartPole-v1", "module no_such_module cannot be imported"),
    ],
)
def test_an_id_that_cannot_be_had_gives_gymnasium_s_reason(env_id: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(reason)) as caught:
        make_env(gym_config(env_id), 0)
    (problem,) = caught.value.problems
    assert problem.path == "env.id"
    assert env_id in problem.text or env_id.partition(":")[0] in problem.text


@pytest.mark.parametrize(
    ("env_id", "module", "extra"),
    [
        ("LunarLander-v3", "Box2D", "box2d"),
        ("ALE/Pong-v5", "ale_py", "atari"),
        ("MiniGrid-Empty-5x5-v0", "minigrid", "minigrid"),
        ("minigrid:MiniGrid-Empty-5x5-v0", "minigrid", "minigrid"),
    ],
)
def test_a_missing_package_names_the_extra(env_id: str, module: str, extra: str) -> None:
    if find_spec(module) is not None:
        pytest.skip(f"{module} is installed")
    with pytest.raises(ConfigError, match=re.escape(f"pip install 'rltool[{extra}]'")):
        make_env(gym_config(env_id), 0)


def test_arguments_that_the_environment_does_not_take_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^env\.kwargs: CartPole-v1 does not take these arguments.*gravitas"):
        make_env(gym_config("CartPole-v1", gravitas=3), 0)


def test_a_module_in_the_working_directory_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vector: MakeVector
) -> None:
    (tmp_path / "mine.py").write_text(
        "import gymnasium as gym\nfrom probes import Probe\ngym.register('Mine-v7', entry_point=Probe)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    env = vector("mine:Mine")
    assert (env.id, env.resolved_config.id) == ("Mine-v7", "mine:Mine-v7")
    assert collector(env).collect().shape == (1, 12)


def wrapper(name: str, **kwargs: object) -> Mapping[str, object]:
    return {"name": name, "kwargs": kwargs}


def test_wrappers_are_applied_in_their_order(vector: MakeVector) -> None:
    clip, bonus = wrapper("ClipReward", min_reward=0.0, max_reward=0.5), wrapper("probes:Bonus", bonus=3.0)
    env = vector(num_envs=2, wrappers=[clip, bonus])
    torch.testing.assert_close(collector(env).collect()["next", "reward"], torch.full((2, 6, 1), 3.5))


def test_a_wrapper_changes_the_space(vector: MakeVector) -> None:
    assert vector("Blackjack-v1").leaves[0].name == "observation.0"
    (leaf,) = vector("Blackjack-v1", wrappers=[wrapper("FlattenObservation")]).leaves
    assert (leaf.kind, leaf.shape) == ("box", (32 + 11 + 2,))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (wrapper("FlattenObservations"), r"env\.wrappers\[0\]\.name: expected a wrapper of gymnasium\.wrappers"),
        (wrapper("no_such_module:Wrapper"), r"env\.wrappers\[0\]\.name: module no_such_module cannot be imported"),
        (wrapper("probes:NoSuchClass"), r"env\.wrappers\[0\]\.name: expected .* found probes:NoSuchClass"),
        (wrapper("ClipReward", lowest=0), r"env\.wrappers\[0\]: ClipReward cannot be applied to Probe-v0: .*lowest"),
    ],
)
def test_a_wrapper_that_cannot_be_applied_is_named(wrong: Mapping[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_env(gym_config(wrappers=[wrong]), 0)


def test_the_time_limit_can_be_set(vector: MakeVector) -> None:
    collecting = collector(vector(n=None, max_episode_steps=4))
    batch = collecting.collect()
    assert collecting.episodes.lengths == [4, 4, 4]
    assert not batch["next", "terminated"].any()
    assert batch["next", "truncated"].sum() == 3


def lean(leaves: Mapping[tuple[str, ...], Tensor]) -> Tensor:
    return (leaves[OBS][:, 2] > 0).long()


def test_worker_processes_give_the_same_batch_and_leave() -> None:
    before = set(multiprocessing.active_children())
    batches = []
    for backend in ("sync", "async"):
        config = gym_config("CartPole-v1", num_envs=2, backend=backend, max_episode_steps=30)
        with closing(GymVectorEnv(config, seed=4)) as env:
            assert len(set(multiprocessing.active_children()) - before) == (2 if backend == "async" else 0)
            batches.append(collector(env, lean, frames=160).collect())
    sync, workers = batches
    assert sync["next", "truncated"].any()
    assert (sync == workers).all()
    assert set(multiprocessing.active_children()) == before


@pytest.mark.parametrize("obs", ["dict", "tuple"])
def test_worker_processes_hand_over_nested_final_observations(obs: str) -> None:
    batches = []
    for backend in ("sync", "async"):
        with closing(GymVectorEnv(gym_config(num_envs=2, backend=backend, obs=obs), seed=4)) as env:
            batches.append(collector(env, frames=20).collect())
    assert (batches[0] == batches[1]).all()
    if obs == "dict":
        assert batches[1]["next", "observation", "a_b"][0, :7, 0].tolist() == [1, 2, 3, 1, 2, 3, 1]


@pytest.mark.filterwarnings("ignore:.*ERROR.*:UserWarning")  # gymnasium shows the worker's traceback as warnings
def test_a_breach_in_a_worker_process_reaches_the_user_and_no_process_stays() -> None:
    before = set(multiprocessing.active_children())
    config = gym_config(num_envs=2, backend="async", fault="reward None", at=2)
    with (
        pytest.raises(EnvironmentFault, match=r"^environment \d \(Probe-v0, Probe\): the reward of step 2"),
        closing(GymVectorEnv(config, seed=0)) as env,
    ):
        collector(env).collect()
    assert set(multiprocessing.active_children()) == before


@pytest.mark.parametrize("backend", ["sync", "async"])
def test_environments_that_use_the_global_generator_follow_the_seed(backend: str) -> None:
    def first(seed: int) -> list[float]:
        seed_world(seed)
        with closing(GymVectorEnv(gym_config(num_envs=2, backend=backend, obs="world"), seed=seed)) as env:
            return list(env.reset()[OBS].reshape(-1).tolist())

    zero, again, one = first(0), first(0), first(1)
    assert zero == again
    assert len({*zero, *one}) == 4


def test_the_frames_counted_are_those_that_the_environments_made(vector: MakeVector) -> None:
    env = vector(num_envs=3, n=4)
    collecting = collector(env, frames=10, total=25)
    assert [tuple(batch.shape) for batch in collecting] == [(3, 4)] * 3
    assert collecting.frames == sum(probe.unwrapped.steps for probe in env._env.envs) == 36  # type: ignore[attr-defined]


@pytest.mark.parametrize("backend", ["sync", "async"])
@pytest.mark.parametrize(
    ("fault", "message"), [("raise", "ZeroDivisionError: the probe broke"), ("exit", "SystemExit: 0")]
)
def test_what_an_environment_raises_is_named_with_index_step_and_line(
    vector: MakeVector, capfd: pytest.CaptureFixture[str], backend: str, fault: str, message: str
) -> None:
    env = vector(num_envs=2, backend=backend, fault=fault, at=2)
    env.reset()
    env.step(np.zeros(2, np.int64))
    with pytest.raises(EnvironmentFault) as caught:
        env.step(np.zeros(2, np.int64))
    assert re.match(
        rf"environment \d \(Probe-v0, Probe\): step 2 raised {message} \(probes\.py:\d+\)", str(caught.value)
    )
    assert "Traceback" not in capfd.readouterr().err, "the workers' own reports are not printed as well"


def test_a_worker_that_dies_is_a_fault_in_words(vector: MakeVector) -> None:
    env = vector(num_envs=2, backend="async", fault="die", at=2)
    env.reset()
    env.step(np.zeros(2, np.int64))
    with pytest.raises(EnvironmentFault, match="a worker process of Probe-v0 ended without an answer"):
        env.step(np.zeros(2, np.int64))
    env.close()
    assert not multiprocessing.active_children()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("1 / 0", r"^env\.id: importing module broken raised ZeroDivisionError: division by zero \(broken\.py:1\)"),
        (
            "import gymnasium as gym\nclass E(gym.Env):\n    pass\ngym.register('Bare-v0', entry_point=E)",
            r"environment 0 \(Bare-v0, E\): it declares no observation_space",
        ),
        (
            "import gymnasium as gym\nclass E(gym.Env):\n    def __init__(self):\n        raise KeyError('map')\n"
            "gym.register('Bare-v0', entry_point=E)",
            r"broken:Bare-v0: making it raised KeyError: 'map' \(broken\.py:4\)",
        ),
    ],
)
def test_an_environment_that_cannot_be_made_says_where(
    vector: MakeVector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, message: str
) -> None:
    (tmp_path / "broken.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "broken", raising=False)
    with pytest.raises((ConfigError, EnvironmentFault), match=message):
        vector("broken:Bare-v0")

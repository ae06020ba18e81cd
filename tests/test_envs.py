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

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.wrappers import FrameStackObservation
from probes import ACTIONS, OBSERVATIONS, Masked, Probe, collector, gym_config
from torch import Tensor

from rltool.contract import EnvContract
from rltool.envs import make_env, single_env
from rltool.errors import ConfigError, EnvironmentFault
from rltool.seeding import seed_world
from rltool.vectorized import GymVectorEnv

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
        (
            "category out of range",
            {"obs": "several"},
            r"observation of step 2 must be in \[0, 3\] … \[1, 6\], found \[1, 7\]",
        ),
        ("reward None", {}, r"the reward of step 2 must be one number, found None"),
        ("reward of two", {}, r"the reward of step 2 must be one number, found array\(\[1\., 2\.\]\)"),
        ("reward ragged", {}, r"the reward of step 2 must be one number, found \[1, \[2, 3\]\]"),
        ("terminated a word", {}, r"terminated of step 2 must be True or False, found 'False'"),
        ("terminated of two", {}, r"terminated of step 2 must be True or False, found array"),
        ("truncated None", {}, r"truncated of step 2 must be True or False, found None"),
        ("info None", {}, r"the info of step 2 must be a dict, found NoneType"),
        ("info None", {"mask": "info"}, r"the info of step 2 must be a dict, found NoneType"),
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
    [
        ("discrete", [0, 0]),
        ("start", [-1, -1]),
        ("scalar", [0, 0]),
        ("box", [[0.5, 1], [0.5, 1]]),
        ("multi", [[0, -1], [0, -1]]),
        ("matrix", [[[0, 0], [0, 0]], [[0, 0], [0, 0]]]),
        ("bits", [[0, 0, 0, 0], [0, 0, 0, 0]]),
    ],
)
def test_environments_receive_actions_of_their_space(vector: MakeVector, actions: str, expected: list[Any]) -> None:
    env = vector(num_envs=2, actions=actions)  # the probe itself asserts that its space contains what it gets
    batch = collector(env, frames=8).collect()
    sent = env.actions.to_env(batch["action"][:, 0].numpy())
    assert sent.shape == (2, *(ACTIONS[actions].shape or ()))
    np.testing.assert_allclose(sent, expected)


@pytest.mark.parametrize("actions", ["multi", "matrix", "bits"])
@pytest.mark.parametrize("backend", ["sync", "async"])
def test_several_choices_at_once_arrive_each_in_its_place(vector: MakeVector, backend: str, actions: str) -> None:
    env = vector(num_envs=2, backend=backend, actions=actions)
    last = env.actions.empty(2)
    last[:] = torch.tensor(env.actions.nvec) - 1

    batch = collector(env, lambda leaves: last, frames=8).collect()
    assert batch["action"].shape == (2, 4, len(env.actions.nvec))
    assert (batch["action"] == last.unsqueeze(1)).all()


@pytest.mark.parametrize("backend", ["sync", "async"])
def test_observations_of_every_kind_arrive_in_their_type(vector: MakeVector, backend: str) -> None:
    batch = collector(vector(num_envs=2, backend=backend, obs="all"), frames=14).collect()
    expected = {
        ("bits",): (torch.int8, (3,)),
        ("camera",): (torch.uint8, (36, 40)),
        ("inner", "c"): (torch.int64, ()),
        ("inner", "x"): (torch.float32, (2,)),
        ("several",): (torch.int64, (2,)),
    }
    for where, observed in (("now", batch["observation"]), ("next", batch["next", "observation"])):
        assert len(list(observed.keys(True, True))) == len(expected)
        for key, (dtype, shape) in expected.items():
            assert (observed[key].dtype, observed[key].shape) == (dtype, (2, 7, *shape)), (where, key)
    assert batch["observation", "camera"][0, :, 0, 0].tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert batch["next", "observation", "camera"][0, :, 35, 39].tolist() == [1, 2, 3, 1, 2, 3, 1]
    assert batch["next", "observation", "several"][1].tolist() == [[1, 1], [0, 2], [1, 3]] * 2 + [[1, 1]]


def test_keys_choose_what_is_learned_from(vector: MakeVector) -> None:
    env = vector(num_envs=2, obs="all", observation_keys=["inner.c", "bits"])
    assert [leaf.name for leaf in env.leaves] == ["observation.bits", "observation.inner.c"]
    batch = collector(env, frames=8).collect()
    assert {".".join(key) for key in batch["observation"].keys(True, True) if isinstance(key, tuple)} == {"inner.c"}
    assert batch["next", "observation", "inner", "c"][0].tolist() == [2, 3, 1, 2]
    with pytest.raises(
        ConfigError, match=r"Probe-v0 has no observation 'lidar'.*bits, camera, inner\.c, inner\.x, several"
    ):
        vector(obs="all", observation_keys=["lidar"])


def test_frames_that_a_wrapper_stacks_are_channels(vector: MakeVector) -> None:
    env = vector(obs="camera", wrappers=[wrapper("FrameStackObservation", stack_size=4)])
    (leaf,) = env.leaves
    assert (leaf.kind, leaf.shape, leaf.stack, leaf.input_shape) == ("image", (4, 36, 40, 3), 4, (12, 36, 40))
    batch = collector(env, frames=6).collect()
    assert batch["next", "observation"][0, :3, :, 0, 0, 0].tolist() == [[0, 0, 0, 1], [0, 0, 1, 2], [0, 1, 2, 3]]


@pytest.mark.parametrize("changes", [{"actions": "whole"}, {"obs": "text"}])
@pytest.mark.parametrize("backend", ["sync", "async"])
def test_a_space_that_is_not_taken_is_refused_before_anything_runs(changes: dict[str, str], backend: str) -> None:
    space = ACTIONS["whole"] if "actions" in changes else OBSERVATIONS["text"]["mission"]
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
        ("NoSuchGame-v4", "Environment `NoSuchGame` doesn't exist"),
        ("Cart Pole!", "Malformed environment ID"),
        ("no_such_module:CartPole-v1", "module no_such_module cannot be imported"),
        ("probes:Prob-v0", "module probes registers no Prob-v0"),
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


def test_a_bare_name_is_a_wrapper_without_arguments(vector: MakeVector) -> None:
    (leaf,) = vector("Blackjack-v1", wrappers=["FlattenObservation"]).leaves
    assert leaf.shape == (32 + 11 + 2,)


def test_evaluation_leaves_out_or_changes_wrappers_where_asked_to(vector: MakeVector) -> None:
    clip = {**wrapper("ClipReward", min_reward=0.0, max_reward=0.5), "eval": False}
    bonus = {**wrapper("probes:Bonus", bonus=3.0), "eval": {"bonus": 5.0}}
    config = gym_config(wrappers=[clip, bonus])
    with closing(make_env(config, 0)) as env:
        env.reset(seed=0)
        assert env.step(0)[1] == 0.5 + 3.0
    with closing(single_env(config, 0)) as env:
        env.reset(seed=0)
        assert env.step(0)[1] == 1.0 + 5.0


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
        (
            wrapper(f"{__name__}:Leaving", at="once"),
            r"env\.wrappers\[0\]: .*Leaving cannot be applied .* it raised SystemExit: 0 \(test_envs\.py",
        ),
        (
            wrapper(f"{__name__}:NoWrapper"),
            r"env\.wrappers\[0\]\.name: expected a gymnasium\.Wrapper, found .*NoWrapper",
        ),
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
    ("fault", "message"),
    [
        ("raise", "ZeroDivisionError: the probe broke"),
        ("exit", "SystemExit: 0"),
        ("panic", "BaseException: the probe broke"),
    ],
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
    who = r"the worker process of environment \d \(Probe-v0\) ended \(exit code 9\)"
    with pytest.raises(EnvironmentFault, match=rf"^{who}.* without an answer$"):
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


# -------------------------------------------------------------------------------------------------------------- masks


def masked_contract(action_mask: str = "auto", **changes: Any) -> EnvContract:
    return EnvContract(Masked(**changes), "Masked-v0", 3, action_mask=action_mask)


@pytest.mark.parametrize(
    ("where", "action_mask", "source", "leaves"),
    [
        ("info", "auto", "info", ["observation", "action_mask"]),
        ("info", "info", "info", ["observation", "action_mask"]),
        ("info", "none", "none", ["observation"]),
        ("method", "auto", "method", ["observation", "action_mask"]),
        ("method", "method", "method", ["observation", "action_mask"]),
        ("key", "auto", "action_mask", ["observation.seen", "action_mask"]),
        ("key", "action_mask", "action_mask", ["observation.seen", "action_mask"]),
        ("key", "none", "none", ["observation.action_mask", "observation.seen"]),
        ("nested", "legal.now", "legal.now", ["observation.legal.ever", "observation.seen", "action_mask"]),
        ("nested", "auto", "none", ["observation.legal.ever", "observation.legal.now", "observation.seen"]),
        ("info+method", "auto", "method", ["observation", "action_mask"]),
        ("info+method+key", "auto", "action_mask", ["observation.seen", "action_mask"]),
        ("info+method+key", "info", "info", ["observation.action_mask", "observation.seen", "action_mask"]),
    ],
)
def test_where_masks_are_found(where: str, action_mask: str, source: str, leaves: list[str]) -> None:
    env = masked_contract(action_mask, where=where)
    assert env.mask_source == source
    assert [leaf.name for leaf in env.leaves] == leaves
    observation, _ = env.reset(seed=0)
    for step in range(3):
        if source != "none":
            expected = [option != step % 3 for option in range(3)]
            mask = env.as_leaves(observation)["action_mask",]
            assert (mask.dtype, mask.tolist()) == (np.bool_, expected)
        observation, *_ = env.step((step + 1) % 3)


@pytest.mark.parametrize(("actions", "where"), [("box", "info"), ("box", "method"), ("scalar", "info")])
def test_numbers_are_never_masked(actions: str, where: str) -> None:
    assert masked_contract(where=where, actions=actions).mask_source == "none"
    with pytest.raises(
        ConfigError, match=r"^env\.action_mask: masks are for choices, and Masked-v0 has the actions Box"
    ):
        masked_contract(where, where=where, actions=actions)


@pytest.mark.parametrize(
    ("where", "action_mask", "message"),
    [
        ("info", "method", r"^env\.action_mask: Masked-v0 has no method action_masks\(\)"),
        (
            "key",
            "legal",
            r"^env\.action_mask: expected auto, none, info, method or an entry .*found 'legal'; Masked-v0 has",
        ),
        ("nested", "legal", r"^env\.action_mask: expected auto, none, info, method or an entry .*found 'legal'"),
        (
            "nested",
            "legal.ever",
            r"^env\.action_mask: the mask of Discrete\(3\) has 3 entries, and legal\.ever .* is Box",
        ),
        ("info", "action_mask", r"^env\.action_mask: expected auto.*found 'action_mask'; Masked-v0 has Box"),
    ],
)
def test_a_mask_that_is_asked_for_and_not_there_is_refused(where: str, action_mask: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        masked_contract(action_mask, where=where)


def test_an_entry_of_another_size_is_no_mask() -> None:
    """An observation that happens to be called action_mask stays one."""
    env = Masked(where="key")
    assert isinstance(env.observation_space, spaces.Dict)
    env.observation_space.spaces["action_mask"] = spaces.Box(-1, 1, (5,))
    assert EnvContract(env, "Masked-v0", 0, action_mask="auto").mask_source == "none"


def test_of_stacked_masks_the_newest_counts() -> None:
    env = FrameStackObservation(Masked(where="key"), 3)
    contract = EnvContract(env, "Masked-v0", 0, action_mask="auto")
    assert contract.mask_source == "action_mask"
    first, _ = contract.reset(seed=0)
    assert first["action_mask"].tolist() == np.asarray(env.unwrapped.allowed(), bool).tolist()  # type: ignore[call-overload, attr-defined]


@pytest.mark.parametrize(
    ("obs", "fault", "message"),
    [
        ("discrete", "observation out of range", "must be in 2 … 5, found 9"),
        ("const", "observation of text", "found shape"),
    ],
)
def test_a_fault_is_named_at_any_step(obs: str, fault: str, message: str) -> None:
    """Also after the first steps, when what costs time is not looked at any more."""
    env = make_env(gym_config(n=None, obs=obs, fault=fault, at=150), 0)
    env.reset(seed=0)
    for _ in range(149):
        env.step(np.int64(0))
    with pytest.raises(EnvironmentFault, match=message):
        env.step(np.int64(0))


@pytest.mark.parametrize("module", ["", "gymnasium.wrappers:"])
@pytest.mark.parametrize("name", ["NormalizeObservation", "NormalizeReward"])
def test_wrappers_with_statistics_of_their_own_are_refused(name: str, module: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name} keeps statistics .* Use algo\.\w+=true"):
        make_env(gym_config(wrappers=[{"name": f"{module}{name}"}]), 0)


@pytest.mark.parametrize("flag", [True, np.True_, 1, 1.0, np.array(True), np.array([1])])
def test_every_form_of_a_flag_ends_an_episode(flag: object, monkeypatch: pytest.MonkeyPatch) -> None:
    env = contract()
    answer = Probe.step
    monkeypatch.setattr(Probe, "step", lambda self, action: (*answer(self, action)[:2], flag, flag, {}))
    env.reset(seed=0)
    _, _, terminated, truncated, _ = env.step(0)
    assert (terminated, truncated) == (True, True)


class Leaving(gym.Wrapper[Any, Any, Any, Any]):
    """Ends Python where it should only end itself.

    Args:
        env: the environment.
        at: ``close``, or already when it is made.
    """

    def __init__(self, env: gym.Env[Any, Any], at: str) -> None:
        super().__init__(env)
        self.at = at
        if at != "close":
            raise SystemExit(0)

    def close(self) -> None:
        if self.at == "close":
            raise SystemExit(0)


def test_ctrl_c_while_an_environment_steps_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    env = contract()
    env.reset(seed=0)
    monkeypatch.setattr(Probe, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        env.step(0)


class NoWrapper:
    """Around an environment, and none itself."""

    def __init__(self, env: object) -> None:
        del env


def test_an_environment_that_leaves_on_close_ends_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    env = make_env(gym_config(wrappers=[wrapper(f"{__name__}:Leaving", at="close")]), 0)
    env.close()
    assert re.search(
        r"warning: environment 0 .* close\(\) raised SystemExit: 0 \(test_envs\.py", capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("space", "shown"),
    [
        (spaces.Dict({}), r"Dict\(\)"),
        (spaces.Tuple(()), r"Tuple\(\)"),
        (spaces.Box(-1, 1, (0,)), r"Box\(\[\]"),
        (spaces.Dict({"action_mask": spaces.MultiBinary(2)}), "action_mask"),
    ],
)
def test_an_environment_with_nothing_to_observe_is_refused(space: spaces.Space[Any], shown: str) -> None:
    probe = Probe()
    probe.observation_space = space
    with pytest.raises(ConfigError, match=rf"gives a policy nothing to observe: its space is .*{shown}"):
        EnvContract(probe, "Probe-v0", 0, action_mask="auto")


def unlucky(at: int, instead: object) -> Callable[[Any], object]:
    """The mask as it is, but for the one that is given at the ``at``-th time."""
    calls = iter(range(10**6))
    return lambda mask: instead if next(calls) == at else mask


@pytest.mark.parametrize("where", ["info", "method"])
@pytest.mark.parametrize(
    ("instead", "message"),
    [
        (np.zeros(3), r"the mask of actions after step 2 leaves no valid action, and the episode goes on"),
        (
            np.ones(4),
            r"the mask of actions after step 2 must have 3 entries of 0 or 1 for Discrete\(3\), found 4 of float64",
        ),
        (np.array(["yes"] * 3), r"the mask of actions after step 2 must have 3 entries of 0 or 1 .*found 3 of <U3"),
    ],
    ids=["nothing valid", "another size", "text"],
)
def test_a_mask_that_cannot_be_is_named_with_its_step(where: str, instead: object, message: str) -> None:
    env = masked_contract(where, where=where, n=None, give=unlucky(2, instead))
    env.reset(seed=0)
    env.step(1)
    with pytest.raises(EnvironmentFault, match=message) as caught:
        env.step(2)
    assert str(caught.value).startswith("environment 3 (Masked-v0, Masked): ")


def test_an_info_without_a_mask_is_named_with_its_step() -> None:
    env = masked_contract("info", where="info", n=None)
    env.reset(seed=0)
    env.step(1)
    env.unwrapped.where = []  # type: ignore[attr-defined]
    with pytest.raises(
        EnvironmentFault, match=r"the info of step 2 lacks action_mask\. Give it at every step, or set env"
    ):
        env.step(2)
    with pytest.raises(EnvironmentFault, match=r"the info of reset\(\) lacks action_mask"):
        masked_contract("info", where="method").reset(seed=0)


def test_a_method_that_raises_is_named_with_its_line() -> None:
    def broken(mask: object) -> object:
        raise KeyError("board")

    env = masked_contract("method", where="method", give=broken)
    with pytest.raises(
        EnvironmentFault, match=r"action_masks\(\) after reset\(\) raised KeyError: 'board' \(test_envs\.py:\d+\)"
    ):
        env.reset(seed=0)


@pytest.mark.parametrize("where", ["info", "method", "key"])
@pytest.mark.parametrize("last", ["empty", "none"])
def test_a_terminal_state_needs_no_valid_action(vector: MakeVector, where: str, last: str) -> None:
    env = vector("Masked-v0", num_envs=2, where=where, end="term", last=last)
    batch = collector(env, valid_choice, frames=14).collect()
    assert batch["next", "terminated"][0, :, 0].tolist() == [False, False, True] * 2 + [False]
    going = ~batch["next", "terminated"].squeeze(-1)
    assert batch["action_mask"].any(-1).all()
    assert batch["next", "action_mask"][going].any(-1).all()


def test_a_time_limit_still_needs_its_mask() -> None:
    """What comes after a truncation is worth something, and an action would be taken there."""
    env = masked_contract("info", where="info", n=3, end="trunc", give=unlucky(3, np.zeros(3)))
    env.reset(seed=0)
    env.step(1)
    env.step(2)
    with pytest.raises(EnvironmentFault, match="after step 3 leaves no valid action"):
        env.step(0)


def valid_choice(leaves: Mapping[tuple[str, ...], Tensor]) -> Tensor:
    return leaves["action_mask",].long().argmax(-1)


@pytest.mark.parametrize("backend", ["sync", "async"])
@pytest.mark.parametrize("where", ["info", "method", "key"])
def test_masks_of_a_batch_are_those_of_its_states(vector: MakeVector, backend: str, where: str) -> None:
    env = vector("Masked-v0", num_envs=2, backend=backend, where=where, obs="t")
    assert env.resolved_config.action_mask == {"key": "action_mask"}.get(where, where), "found out once"
    batch = collector(env, valid_choice, frames=14).collect()
    key = ("observation", "seen") if where == "key" else "observation"
    for part in (batch, batch["next"]):
        assert part["action_mask"].dtype == torch.bool
        step = part[key].squeeze(-1).long()
        assert torch.equal(part["action_mask"], torch.arange(3) != (step % 3).unsqueeze(-1))
    assert batch["next", *([key] if isinstance(key, str) else key)][0, :, 0].tolist() == [1, 2, 3, 1, 2, 3, 1]


@pytest.mark.parametrize(
    "give",
    [
        lambda mask: mask,
        lambda mask: mask.astype(np.bool_),
        lambda mask: mask.tolist(),
        lambda mask: (mask[:2], mask[2:]),
        lambda mask: [mask[:2].tolist(), mask[2:].tolist()],
        lambda mask: mask.astype(np.float32)[None],
    ],
    ids=["array", "bool", "list", "a tuple a choice", "a list a choice", "one row"],
)
def test_masks_of_several_choices_lie_side_by_side(give: Callable[[Any], object]) -> None:
    env = masked_contract("info", actions="multi", give=give)
    observation, _ = env.reset(seed=0)
    for step, expected in enumerate([[0, 1, 0, 1, 1], [1, 0, 1, 0, 1], [0, 1, 1, 1, 0]]):
        assert env.as_leaves(observation)["action_mask",].tolist() == [bool(value) for value in expected]
        observation, *_ = env.step(np.array([(step + 1) % 2, (step + 1) % 3 - 1]))


def test_a_mask_in_the_observation_may_have_a_row_a_choice(vector: MakeVector) -> None:
    env = vector("Masked-v0", num_envs=2, where="key", actions="pair")
    assert env.resolved_config.action_mask == "action_mask"
    assert [leaf.shape for leaf in env.leaves] == [(1,), (6,)]
    assert env.reset()["action_mask",].tolist() == [[False, True, True] * 2] * 2


def test_each_of_several_choices_needs_a_valid_option() -> None:
    env = masked_contract("info", actions="multi", give=unlucky(0, np.array([1, 1, 0, 0, 0])))
    with pytest.raises(EnvironmentFault, match=r"after reset\(\) leaves no valid action"):
        env.reset(seed=0)


@pytest.mark.parametrize(
    ("env_id", "hint"),
    [
        ("InvertedDoublePendulum-v2", "Use InvertedDoublePendulum-v5"),
        ("LunarLander-v2", "Use LunarLander-v3"),
        ("PongNoFrameskip-v4", "Use env=atari env.game=Pong"),
        ("FetchReach-v1", "pip install gymnasium-robotics, and env.id=gymnasium_robotics:FetchReach-v1"),
    ],
)
def test_an_id_of_another_time_is_told_what_it_is_called_now(env_id: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=rf"^env\.id: .*{re.escape(hint)}"):
        make_env(gym_config(env_id), 0)

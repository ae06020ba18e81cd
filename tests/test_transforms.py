"""Transforms of TorchRL's around Gymnasium environments and around TorchRL's own."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import probes
import pytest
import torch
from builders import run_config
from probes import ACTIONS, OBSERVATIONS, Rule, gym_config, tiny
from tensordict import TensorDict
from torchrl.data import Binary, Categorical, MultiCategorical, MultiOneHot, OneHot, TensorSpec

from rltool.actions import ActionSpec
from rltool.choices import best
from rltool.collect import TensorLeaves
from rltool.contract import leaves_of
from rltool.envs import make_env, single_env
from rltool.errors import ConfigError, EnvironmentFault
from rltool.schema import EnvConfig
from rltool.seeding import Stream, generator
from rltool.spaces import MASK
from rltool.torchrl_env import TorchRLVectorEnv
from rltool.torchrl_specs import categories, encoded, space_of
from rltool.training import train

OBS = ("observation",)
# Changes nothing, and makes TorchRL step the environments.
IDLE = {"name": "RewardScaling", "kwargs": {"loc": 0.0, "scale": 1.0}}


def built(
    env_id: str = "Probe-v0", *, num_envs: int = 2, transforms: Any = (IDLE,), **changes: Any
) -> TorchRLVectorEnv:
    config = gym_config(env_id, num_envs=num_envs, transforms=transforms, **changes)
    return cast("TorchRLVectorEnv", config.build(seed=0))


def valid(actions: ActionSpec) -> Any:
    """Of each choice the last valid option; the middle of a box."""

    def act(leaves: TensorLeaves) -> torch.Tensor:
        if actions.continuous:
            return torch.zeros(len(next(iter(leaves.values()))), actions.size)
        count = len(next(iter(leaves.values())))
        scores = torch.arange(float(actions.size)).expand(count, -1)
        if MASK in leaves:
            scores = scores.masked_fill(~leaves[MASK].bool(), -1.0)
        return best(scores, actions.nvec)

    return act


def batch(env: TorchRLVectorEnv, frames: int = 16) -> TensorDict:
    with closing(env):
        rule = Rule(env.actions, valid(env.actions), frames)
        source = generator(0, Stream.POLICY)
        experience = env.collector(rule, total_frames=frames, generator=source, device=torch.device("cpu"))
        (collected,) = experience
    return collected


@pytest.mark.parametrize("obs", sorted(OBSERVATIONS.keys() - {"world", "text"}))
def test_every_observation_comes_through_as_it_is(obs: str) -> None:
    plain = make_env(gym_config(obs=obs), 0)
    env = single_env(gym_config(obs=obs, transforms=[IDLE]), 0)
    for mine, expected in zip(env.leaves, plain.leaves, strict=True):
        assert mine == replace(expected, start=(0,) * len(expected.start)), "categories count from 0"
    answers = [(each.reset(seed=7)[0], *(each.step(0)[0] for _ in range(3))) for each in (env, plain)]
    for found, expected in zip(*answers, strict=True):
        wanted = leaves_of(expected, plain.leaves)
        for leaf in plain.leaves:
            shifted = wanted[leaf.key] - np.reshape(leaf.start, leaf.shape) if leaf.start else wanted[leaf.key]
            np.testing.assert_array_equal(leaves_of(found, env.leaves)[leaf.key], shifted.astype(leaf.dtype))
    collected = batch(built(obs=obs))
    for leaf in env.leaves:
        assert tuple(collected[leaf.key].shape) == (2, 8, *leaf.shape)
        assert str(collected[leaf.key].dtype) == f"torch.{leaf.dtype}"


@pytest.mark.parametrize("actions", sorted(ACTIONS.keys() - {"whole"}))
def test_every_action_is_in_its_space(actions: str) -> None:
    env = built(actions=actions, obs="t")  # the probe itself refuses what its space does not contain
    collected = batch(env)
    assert tuple(collected["action"].shape) == (2, 8, *env.actions.policy_shape)
    assert collected["next", "observation"][0, :7, 0].tolist() == [1, 2, 3, 1, 2, 3, 1]
    assert collected["next", "truncated"][0, :, 0].tolist() == [False, False, True] * 2 + [False] * 2


@pytest.mark.parametrize("mask", ["info", "method", "key"])
@pytest.mark.parametrize("actions", ["start", "multi", "binary 2-D"])
def test_masks_are_honoured_wherever_they_come_from(mask: str, actions: str) -> None:
    env = built(actions=actions, obs="noise", mask=mask)
    assert env.resolved_config.action_mask == {"key": "action_mask"}.get(mask, mask)
    collected = batch(env)  # the probe itself refuses a masked action
    assert collected[MASK].dtype == torch.bool
    assert not collected[MASK].all()
    with closing(single_env(cast("EnvConfig", env.resolved_config), 0)) as single:
        assert single.leaves == env.leaves


def test_images_become_what_the_transforms_make_of_them() -> None:
    transforms = [
        {"name": "ToTensorImage", "kwargs": {"in_keys": ["observation"]}},
        {"name": "GrayScale", "kwargs": {"in_keys": ["observation"]}},
        {"name": "CatFrames", "kwargs": {"N": 4, "dim": -3, "in_keys": ["observation"]}},
    ]
    env = built(obs="photo", transforms=transforms[:1])
    (leaf,) = env.leaves
    assert (leaf.kind, leaf.shape, leaf.dtype, leaf.scale, leaf.height) == ("image", (3, 84, 84), "float32", 1.0, 1)
    config = gym_config(obs="photo", transforms=transforms[:1])
    seen, raw = single_env(config, 0).reset(seed=3)[0], make_env(gym_config(obs="photo"), 0).reset(seed=3)[0]
    np.testing.assert_allclose(seen, np.moveaxis(cast("Any", raw), -1, 0) / 255, rtol=1e-6)
    (leaf,) = built(obs="photo", transforms=transforms).leaves
    assert (leaf.kind, leaf.shape) == ("image", (4, 84, 84))
    assert batch(built(obs="photo", transforms=transforms))["observation"].max() <= 1.0


def test_keys_choose_among_what_the_transforms_give_and_leave_text_out() -> None:
    cat = {"name": "CatTensors", "kwargs": {"in_keys": ["a_b", ["a", "b"]], "out_key": "both", "del_keys": False}}
    env = built(obs="dict", transforms=[cat], observation_keys=["both", "c"])
    assert [(leaf.name, leaf.shape) for leaf in env.leaves] == [("observation.both", (4,)), ("observation.c", ())]
    with pytest.raises(ConfigError, match=r"observation\.mission the space Text"):
        built(obs="text")
    (leaf,) = built(obs="text", observation_keys=["seen"]).leaves
    assert leaf.name == "observation.seen"


def test_a_time_limit_of_a_transform_is_a_truncation() -> None:
    counter = {"name": "StepCounter", "kwargs": {"max_steps": 4}}
    collected = batch(built(n=None, obs="t", transforms=[counter], observation_keys=["observation"]), frames=24)
    assert collected["next", "truncated"][0, :, 0].nonzero().flatten().tolist() == [3, 7, 11]
    assert not collected["next", "terminated"].any()


def test_evaluation_counts_the_true_reward_and_starts_at_its_seeds() -> None:
    scaled = {"name": "RewardScaling", "kwargs": {"loc": 0.0, "scale": 10.0}}
    config = gym_config(obs="noise", reward=3.0, transforms=[scaled])
    assert batch(built(obs="noise", reward=3.0, transforms=[scaled]))["next", "reward"].unique().tolist() == [30.0]
    with closing(single_env(cast("EnvConfig", config), 0)) as env:
        first, other, again = (env.reset(seed=seed)[0] for seed in (1, 2, 1))
        assert env.step(0)[1] == 3.0
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


def test_a_breach_is_named_as_everywhere() -> None:
    with pytest.raises(EnvironmentFault, match=r"^environment 0 \(Probe-v0, Probe\): the reward of step 2 must be"):
        batch(built(fault="reward None", at=2))


@pytest.mark.parametrize(
    ("transform", "message"),
    [
        ("RewardScalin", r"^env\.transforms\[0\]\.name: expected a transform of .*Did you mean RewardScaling"),
        ("no_such:Thing", r"^env\.transforms\[0\]\.name: module no_such cannot be imported"),
        ("VecNormV2", r"^env\.transforms\[0\]\.name: VecNormV2 keeps statistics .*algo\.normalize_observation"),
        ("torchrl.envs.transforms:VecNormV2", "keeps statistics"),
        ({"name": "FrameSkipTransform", "kwargs": {"frame_skip": 2}}, "steps on after .* MaxAndSkipObservation"),
        (
            {"name": "StepCounter", "kwargs": {"max_step": 4}},
            r"^env\.transforms\[0\]\.kwargs\.max_step: StepCounter takes no such argument\. Did you mean max_steps",
        ),
        ("RewardScaling", r"^env\.transforms\[0\]: RewardScaling cannot be made: .*loc"),
        (
            "ToTensorImage",
            r"^env\.transforms\[0\]\.kwargs\.in_keys: .* on pixels, which is not there\. There is observation",
        ),
        (
            {"name": "PermuteTransform", "kwargs": {"in_keys": ["observation"], "dims": [-1, -2, -3]}},
            r"^env\.transforms\[0\]: PermuteTransform cannot be applied: it raised RuntimeError",
        ),
    ],
)
def test_a_transform_that_cannot_be_had_is_named(transform: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        built(transforms=[transform])


@pytest.mark.parametrize(
    ("spec", "value", "category"),
    [
        (OneHot(3), [0, 1, 0], 1),
        (Categorical(3), 2, 2),
        (MultiOneHot([2, 3]), [0, 1, 1, 0, 0], [1, 0]),
        (MultiCategorical([2, 3]), [1, 2], [1, 2]),
        (Binary(3, dtype=torch.int8), [1, 0, 1], [1, 0, 1]),
        (torch.stack([OneHot(2), OneHot(2)]), [[0, 1], [1, 0]], [1, 0]),
    ],
)
def test_specs_stand_for_spaces(spec: TensorSpec, value: Any, category: Any) -> None:
    given = torch.as_tensor(value, dtype=spec.dtype)
    found = categories(given, spec)
    assert found.tolist() == category
    assert space_of(spec).contains(np.asarray(category))
    assert torch.equal(encoded(np.asarray(category), spec), given)


def test_transforms_around_an_environment_of_torchrls() -> None:
    words = ["algo=dqn", "env=torchrl", "env.entry_point=test_torchrl_env:cartpole", "env.num_envs=2"]
    config = run_config(*words, "env.transforms=[{name: StepCounter, kwargs: {max_steps: 3}}]")
    env = cast("TorchRLVectorEnv", config.env.build(seed=0))
    assert [leaf.name for leaf in env.leaves] == ["observation.observation", "observation.step_count"]
    assert batch(env, 12)["next", "truncated"].sum() == 4
    with pytest.raises(ConfigError, match=r"^env\.action_mask: expected auto, none or the key .* found info"):
        run_config(*words, "env.action_mask=info")


def test_a_run_trains_evaluates_and_saves(tmp_path: Path) -> None:
    config = run_config(
        "algo=ppo",
        "env.transforms=[{name: CatFrames, kwargs: {N: 2, dim: -1, in_keys: [observation]}}]",
        "total_frames=128",
        "algo.frames_per_batch=64",
        "algo.minibatch_size=32",
        "algo.epochs=1",
        "algo.warmup_frames=32",
        "logging=none",
        "eval.interval=64",
        "eval.episodes=2",
        "eval.num_envs=2",
        "compile=false",
        "quiet=true",
    )
    summary = train(config, tmp_path / "run")
    assert (summary["frames"], summary["env"]) == (128, "CartPole-v1")


@pytest.mark.parametrize("transforms", ["[]", "[RewardSum]"])
@pytest.mark.parametrize("algo", ["dqn", *(pytest.param(algo, marks=pytest.mark.long) for algo in ("ppo", "sac"))])
def test_as_many_gradient_steps_are_made_as_were_planned(tmp_path: Path, algo: str, transforms: str) -> None:
    """TorchRL's collector makes whole batches of the random warm-up, too."""
    words = tiny(algo, "total_frames=260", f"env.transforms={transforms}", "algo.warmup_frames=70")
    words += ["algo.normalize_observation=false"]
    config = probes.run_config(*words)
    assert train(config, tmp_path)["updates"] == config.algo.updates(config) > 0


def test_a_transform_that_finds_its_keys_itself_is_applied() -> None:
    config = gym_config(obs="noise", transforms=["DoubleToFloat"])
    env = cast("TorchRLVectorEnv", config.build(seed=0))
    assert [(leaf.name, leaf.dtype) for leaf in env.leaves] == [("observation", "float32")]
    assert batch(env, 6)["observation"].dtype == torch.float32

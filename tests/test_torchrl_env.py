"""TorchRL environments through TorchRL's own collector."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from builders import run_config, runtime
from torchrl.envs import EnvBase, GymEnv, PendulumEnv

from rltool.algos.base import Algorithm
from rltool.envs import single_env
from rltool.errors import ConfigError, EnvironmentFault
from rltool.torchrl_env import TorchRLExperience, TorchRLVectorEnv
from rltool.training import train


def pendulum() -> EnvBase:
    return PendulumEnv()


def cartpole() -> EnvBase:
    """Its actions are one-hot."""
    return GymEnv("CartPole-v1")


def nothing() -> int:
    return 0


def collected(
    entry: str, *overrides: str, frames: int = 96
) -> tuple[TorchRLVectorEnv, TorchRLExperience, list[torch.Tensor]]:
    config = run_config("env=torchrl", f"env.entry_point={__name__}:{entry}", "algo.frames_per_batch=32", *overrides)
    env = cast("TorchRLVectorEnv", config.env.build(seed=0))
    algorithm = cast("Algorithm", config.algo.build(run=runtime(config, env.actions, leaves=env.leaves)))
    experience = env.collector(
        algorithm, total_frames=frames, generator=torch.Generator().manual_seed(0), device=torch.device("cpu")
    )
    batches = []
    for batch in experience:
        algorithm.update(batch, experience.frames)
        batches.append(batch.clone())
    env.close()
    return env, experience, batches


@pytest.mark.parametrize("num_envs", [1, 2])
def test_batches_have_the_keys_and_shape_of_our_own_collector(num_envs: int) -> None:
    _, experience, batches = collected(
        "cartpole", "algo=dqn", f"env.num_envs={num_envs}", "algo.learning_starts=32", "algo.minibatch_size=8"
    )
    assert [tuple(batch.batch_size) for batch in batches] == [(num_envs, 32 // num_envs)] * 3
    assert experience.frames == 96
    for batch in batches:
        assert batch["action"].dtype == torch.int64
        assert batch["next", "reward"].shape == (*batch.batch_size, 1)
        same = ~batch["next", "done"][:, :-1, 0]
        assert torch.equal(batch["observation"][:, 1:][same], batch["next", "observation"][:, :-1][same])
    assert experience.episodes.returns == [float(length) for length in experience.episodes.lengths]


def test_units_of_action_are_the_policys_in_the_batch_and_the_environments_outside() -> None:
    env, _, batches = collected(
        "pendulum", "algo=ppo", "algo.minibatch_size=16", "algo.warmup_frames=32", "env.num_envs=1"
    )
    assert (env.actions.low, env.actions.high) == ((-2.0,), (2.0,))
    first = batches[0]
    angle, speed, action = first["observation", "th"], first["observation", "thdot"], first["action"].squeeze(-1)
    assert float(action.abs().max()) <= 1.0
    # One step of the pendulum's equation with the torque that the action stands for.
    torque = 2.0 * action
    expected = (speed + (15.0 * angle.sin() + 3.0 * torque) * 0.05).clamp(-8.0, 8.0)
    torch.testing.assert_close(first["next", "observation", "thdot"], expected, rtol=1e-3, atol=1e-3)


def test_one_environment_has_gymnasiums_interface() -> None:
    env = single_env(run_config("algo=dqn", "env=torchrl", f"env.entry_point={__name__}:cartpole").env, 0)
    observation, _ = env.reset(seed=1)
    again, _ = env.reset(seed=1)
    np.testing.assert_array_equal(observation, again)
    for _ in range(20):
        _, reward, terminated, truncated, _ = env.step(0)
        assert reward == 1.0
        if terminated or truncated:
            break
    assert terminated
    assert not truncated


def choosy(size: int) -> int:
    return size


def broken() -> int:
    return cast("int", None) + 1


def test_what_an_entry_point_raises_is_its_own() -> None:
    config = run_config("algo=ppo", "env=torchrl", f"env.entry_point={__name__}:broken")
    with pytest.raises(EnvironmentFault, match=r"broken raised TypeError: .*NoneType.* \(test_torchrl_env\.py:\d+\)"):
        config.env.build(seed=0)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("nothing", "expected one torchrl EnvBase.*found int"),
        ("absent", "has no absent"),
        ("np", "expected a function that returns a torchrl EnvBase, found .*: a module"),
        ("choosy", r"env\.kwargs: .*choosy does not take these arguments: .*required positional argument: 'size'"),
    ],
)
def test_what_is_no_environment_is_refused(entry: str, message: str) -> None:
    config = run_config("algo=ppo", "env=torchrl", f"env.entry_point={__name__}:{entry}")
    with pytest.raises(ConfigError, match=message):
        config.env.build(seed=0)


def test_a_run_trains_evaluates_and_saves(tmp_path: Path) -> None:
    config = run_config(
        "algo=dqn",
        "env=torchrl",
        f"env.entry_point={__name__}:cartpole",
        "total_frames=200",
        "algo.frames_per_batch=40",
        "algo.learning_starts=40",
        "algo.minibatch_size=8",
        "logging=none",
        "eval.interval=100",
        "eval.episodes=2",
        "eval.num_envs=2",
        "compile=false",
        "quiet=true",
    )
    summary = train(config, tmp_path / "run")
    assert summary["frames"] == 200
    assert summary["updates"] == 40
    assert summary["env"] == f"{__name__}:cartpole"

"""What must hold after every change: the environment keeps its contract, the configs compose, a short run trains."""

from __future__ import annotations

from pathlib import Path

import gymnasium as gym
from gymnasium.utils.env_checker import check_env

from rltool.cli import main

CONF = str(Path(__file__).parents[1] / "conf")
RUN = ("algo=ppo", "env=point", "network=relative", "--config-dir", CONF)


def test_the_environment_keeps_its_contract() -> None:
    check_env(gym.make("my_project.envs:Point-v0").unwrapped)


def test_the_configs_compose() -> None:
    assert main(["config", *RUN]) == 0


def test_a_short_run_trains(tmp_path: Path) -> None:
    assert main(["train", *RUN, "total_frames=1024", "eval.episodes=2", f"hydra.run.dir={tmp_path}/run"]) == 0
    assert (tmp_path / "run" / "checkpoints" / "last.ckpt").is_file()

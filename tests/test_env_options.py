"""The options of conf/env: each builds or names what to install; what a user is told of them."""

from __future__ import annotations

import sys
from contextlib import closing
from typing import cast

import numpy as np
import pytest
from builders import run_config

from rltool.config import load_node
from rltool.configfiles import ConfigFiles
from rltool.envs import single_env
from rltool.errors import ConfigError
from rltool.schema import AtariEnvConfig, EnvConfig
from rltool.vectorized import VectorEnvBase

pytestmark = pytest.mark.long

OPTIONS = [option for option in ConfigFiles.find_main().options("env") if option not in ("gym", "torchrl")]


def node(option: str, *overrides: str) -> EnvConfig:
    return run_config("algo=ppo", f"env={option}", "env.num_envs=2", *overrides).env


def built(config: EnvConfig) -> VectorEnvBase:
    """The environment, or a skipped test where its package is not installed: the error names the extra then."""
    try:
        return cast("VectorEnvBase", config.build(seed=0))
    except ConfigError as error:
        if "pip install 'rltool[" not in str(error):
            raise
        pytest.skip(str(error))


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_steps_or_names_its_extra(option: str) -> None:
    with closing(built(node(option))) as env:
        first = env.reset()
        source = np.random.default_rng(0)
        actions = [env.actions.to_env(source.integers(1, size=(2, *env.actions.policy_shape))) for _ in range(2)]
        for action in actions:
            step = env.step(action)
        assert {key: (array.shape, array.dtype) for key, array in first.items()} == {
            key: (array.shape, array.dtype) for key, array in step.observation.items()
        }


@pytest.mark.parametrize(
    ("option", "module", "extra"),
    [
        ("atari", "ale_py", "atari"),
        ("minigrid", "minigrid", "minigrid"),
        ("atari_envpool", "envpool", "envpool"),
        ("dm_control", "envpool", "envpool"),
    ],
)
def test_a_missing_package_is_named_by_its_extra(
    monkeypatch: pytest.MonkeyPatch, option: str, module: str, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=rf"pip install 'rltool\[{extra}\]'"):
        node(option).build(seed=0)


@pytest.mark.parametrize("option", ["atari", "atari_envpool"])
def test_atari_skips_frames_says_so_and_evaluates_the_true_reward(option: str) -> None:
    config = node(option, "env.game=Breakout")
    with closing(built(config)) as env:
        assert env.id == "ALE/Breakout-v5"
        (leaf,) = env.leaves
        assert (leaf.kind, leaf.shape, leaf.dtype, leaf.stack) == ("image", (4, 84, 84), "uint8", 4)
        assert dict(env.remarks)["a frame"].startswith("is 4 of the simulator's")
        known = cast("AtariEnvConfig", env.resolved_config)
    with closing(single_env(known, 0)) as single:
        assert single.leaves == env.leaves
        wrappers = [wrapper.name for wrapper in single.spec.additional_wrappers] if single.spec is not None else []
        assert "ClipReward" not in wrappers
    assert "ClipReward" in [wrapper.name for wrapper in known.wrappers] or known.kwargs["reward_clip"]


def test_a_game_alone_does_not_change_a_resolved_id() -> None:
    saved = node("atari").model_dump() | {"game": "Breakout"}
    with pytest.raises(
        ConfigError, match=r"^env\.game: expected the game of env\.id=ale_py:ALE/Pong-v5, found Breakout"
    ):
        load_node("env", saved)


def test_where_a_mask_comes_from_is_said() -> None:
    with closing(built(node("gym", "env.id=Taxi-v4"))) as env:
        assert dict(env.remarks)["mask"] == "of actions, in the info: only valid ones are taken"
    with closing(built(node("cartpole"))) as env:
        assert not env.remarks

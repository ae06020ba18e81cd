"""What a checkpoint may have imported: nothing that its user has not written or typed."""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import gymnasium
import pytest
import safetensors.torch
import torch
from safetensors import safe_open

import rltool
from rltool import checkpoint, cli, trust
from rltool.checkpoint import Header, State, read_header
from rltool.config import laid_over
from rltool.errors import ConfigError
from rltool.policy import load_policy

MARK = "imported"
# A module that leaves a mark where it is imported or its function called.
MODULE = f"""
from os import system
from pathlib import Path
import gymnasium
from torch import nn

def mark(*_, **__):
    Path("{MARK}").touch()

mark()
gymnasium.register("Theirs-v0", entry_point="gymnasium.envs.classic_control:CartPoleEnv", max_episode_steps=5)

class Bonus(gymnasium.RewardWrapper):
    def reward(self, reward):
        return reward + 1

class Net(nn.Module):
    def __init__(self, inputs):
        super().__init__()
        self.layers = nn.Linear(4, 16)

    def forward(self, observation):
        return self.layers(observation)
"""


def rewritten(source: Path, target: Path, changes: Mapping[str, object], *, keep: bool = False) -> Path:
    """A copy of a checkpoint whose configuration says something else, as a stranger may write it.

    Args:
        keep: keep the signature of what it said before.
    """
    with safe_open(source, framework="numpy") as file:
        metadata = file.metadata()
    state = json.loads(metadata["rltool"])
    state["config"] = laid_over(state["config"], changes) | {
        group: node for group, node in changes.items() if group == "network"
    }
    kept = {"signature": metadata["signature"]} if keep else {}
    tensors = safetensors.torch.load_file(source)
    safetensors.torch.save_file(tensors, target, {"rltool": json.dumps(state), **kept})
    return target


@pytest.fixture
def theirs(dqn_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Makes a stranger's checkpoint; ``theirs.py`` lies beside it in the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "theirs", raising=False)
    monkeypatch.delitem(gymnasium.registry, "Theirs-v0", raising=False)
    (tmp_path / "theirs.py").write_text(MODULE)

    def make(changes: Mapping[str, object], **options: bool) -> Path:
        return rewritten(dqn_run / "checkpoints/last.ckpt", tmp_path / "theirs.ckpt", changes, **options)

    return make


def of_module(entry_point: str, **kwargs: object) -> dict[str, object]:
    """A network of one's own."""
    known = {"kind": "module", "init": "default", "shared": False, "precision": "float32"}
    return {"network": {**known, "entry_point": entry_point, "kwargs": kwargs}}


NAMING: dict[str, dict[str, Any]] = {
    "plugins": {"plugins": ["theirs"]},
    "id": {"env": {"id": "theirs:Theirs-v0"}},
    "wrapper": {"env": {"wrappers": [{"name": "theirs:Bonus", "kwargs": {}, "eval": True}]}},
    "bare wrapper": {"env": {"wrappers": ["theirs:Bonus"]}},
    "transform": {"env": {"transforms": [{"name": "theirs:mark", "kwargs": {}}]}},
    "entry point": {"env": {"kind": "torchrl", "entry_point": "theirs:mark"}},
    "network": of_module("theirs:mark"),
    "argument": {"env": {"kwargs": {"inner": {"env_id": "theirs:Theirs-v0"}}}},
    "submodule": {"env": {"id": "theirs.envs:Theirs-v0"}},
}
OF_POLICY = ("plugins", "network")


def refused(code: int, capsys: pytest.CaptureFixture[str], module: str = "theirs") -> None:
    error = capsys.readouterr().err
    assert code == 2
    assert f"names code of the module {module}, and was not written by you on this machine" in error
    assert f"Give plugins=[{module}] if you trust it" in error
    assert "Traceback" not in error
    assert not Path(MARK).exists()
    assert "theirs" not in sys.modules


@pytest.mark.parametrize("keep", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", NAMING)
def test_a_stranger_s_checkpoint_imports_nothing(
    theirs: Callable[..., Path], capsys: pytest.CaptureFixture[str], name: str, keep: bool
) -> None:
    """Neither evaluated, filmed, resumed nor printed; a signature of another configuration does not help it."""
    path, module = theirs(NAMING[name], keep=keep), "theirs.envs" if name == "submodule" else "theirs"
    commands = [
        ["eval", f"checkpoint={path}", "episodes=1"],
        ["train", f"resume={path}", "total_frames=420"],
        ["config", f"resume={path}"],
    ]
    for words in commands:
        refused(cli.main(words), capsys, module)
    with pytest.raises(ConfigError, match="was not written by you on this machine"):
        rltool.train(f"resume={path}")
    if name in OF_POLICY:
        with pytest.raises(ConfigError, match="was not written by you on this machine"):
            load_policy(path)
    else:
        load_policy(path)  # a policy acts without its environment
    assert not Path(MARK).exists()


def test_init_takes_weights_and_imports_nothing(theirs: Callable[..., Path], tmp_path: Path) -> None:
    from probes import run

    run(tmp_path / "new", "dqn", f"init={theirs(NAMING['plugins'] | NAMING['id'])}", "total_frames=40")
    assert not Path(MARK).exists()


@pytest.mark.parametrize("words", [["plugins=[theirs]"], ["env.id=theirs:Theirs-v0"]])
def test_the_user_s_word_lets_it_in(
    theirs: Callable[..., Path], capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    path = theirs(NAMING["id"] | {"eval": {"max_steps": 9}})
    code = cli.main(["eval", f"checkpoint={path}", "episodes=1", "quiet=true", *words])
    assert (code, capsys.readouterr().err.replace("warning: ", "")[:21]) == (0, "the policy was traine")
    assert Path(MARK).exists()


def test_load_policy_takes_plugins(theirs: Callable[..., Path]) -> None:
    path = theirs(NAMING["plugins"])
    assert load_policy(path, plugins=["theirs"])(torch.zeros(4)).shape == ()
    assert Path(MARK).exists()


def test_what_is_typed_replaces_what_the_file_names(theirs: Callable[..., Path]) -> None:
    assert cli.main(["eval", f"checkpoint={theirs(NAMING['id'])}", "episodes=1", "env.id=CartPole-v1"]) == 0
    assert not Path(MARK).exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            of_module("theirs:system", command=f"touch {MARK}2"),
            r"network\.entry_point: expected a function or a class that theirs defines, found theirs:system, which comes",
        ),
        (
            of_module("theirs:Bonus"),
            r"expected a torch\.nn\.Module or a function",
        ),
    ],
)
def test_an_entry_point_is_what_it_should_be(
    theirs: Callable[..., Path], changes: Mapping[str, object], message: str
) -> None:
    """A module that the user trusts may hold functions that are not its own."""
    path = theirs(changes)
    with pytest.raises((ConfigError, checkpoint.CheckpointError), match=message):
        load_policy(path, plugins=["theirs"])
    assert not Path(f"{MARK}2").exists()


@pytest.mark.parametrize(
    ("key", "item"),
    [
        ("wrappers", {"name": "RecordVideo", "kwargs": {"video_folder": "stolen"}, "eval": True}),
        ("transforms", {"name": "VC1Transform", "kwargs": {"install_vc_models": True}}),
    ],
)
def test_a_stranger_chooses_no_wrapper_that_writes_or_downloads(
    theirs: Callable[..., Path], capsys: pytest.CaptureFixture[str], key: str, item: Mapping[str, object]
) -> None:
    path = theirs({"env": {key: [item]}})
    assert cli.main(["eval", f"checkpoint={path}", "episodes=1"]) == 2
    assert f"env.{key}: {path} names {item['name']}, which reaches beyond the environment" in capsys.readouterr().err
    assert not Path("stolen").exists()


def test_no_variable_of_the_environment_gets_into_a_configuration(
    theirs: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KEY", "hunter2")
    path = theirs({"env": {"kwargs": {"render_mode": "${oc.env:KEY}"}}, "device": "${oc.env:KEY}"})
    assert cli.main(["config", f"resume={path}"]) == 2
    answer = capsys.readouterr()
    assert "hunter2" not in answer.out + answer.err
    assert "device: expected" in answer.err


# ------------------------------------------------------------------------------------------------------------- signatures


def header(config: Mapping[str, Any], signature: str | None) -> Header:
    values: dict[str, Any] = {part.name: None for part in fields(State)}
    return Header(Path("some.ckpt"), State(**{**values, "config": dict(config)}), signature=signature)


MINE: dict[str, Any] = {"plugins": ["mine"], "env": {"id": "mine:Mine-v0", "kwargs": {"a": 0.1, "b": [1, None]}}}


def test_one_s_own_checkpoint_needs_no_word(dqn_run: Path) -> None:
    mine = header(MINE, trust.signature(MINE))
    assert trust.configuration(mine, {}) == mine.config
    saved = read_header(dqn_run / "checkpoints/last.ckpt")
    assert saved.signature == trust.signature(saved.config)
    renamed = replace(saved, state=replace(saved.state, config={**saved.config, "plugins": ["mine"]}))
    with pytest.raises(ConfigError, match="module mine"):
        trust.configuration(renamed, {})


def test_a_signature_is_of_every_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    signature = trust.signature(MINE)
    assert signature is not None
    assert trust.signature(json.loads(json.dumps(MINE, indent=3))) == signature
    for other in (laid_over(MINE, {"env": {"id": "mine:Other-v0"}}), laid_over(MINE, {"env": {"kwargs": {"a": 0.2}}})):
        assert trust.signature(other) != signature
        with pytest.raises(ConfigError):
            trust.configuration(header(other, signature), {})
    for wrong in ("", "é", signature[:-1], signature.upper(), None):
        with pytest.raises(ConfigError):
            trust.configuration(header(MINE, wrong), {})
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))  # another user
    with pytest.raises(ConfigError, match=r"modules? mine.*\. Give plugins=\[mine\] if you trust it"):
        trust.configuration(header(MINE, signature), {})


def test_the_secret_is_for_the_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    first = trust.signature(MINE)
    secret = tmp_path / "rltool/secret"
    assert len(secret.read_bytes()) == 32
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert trust.signature(MINE) == first
    secret.chmod(0o644)  # others may have read it
    assert trust.signature(MINE) is None
    secret.chmod(0o600)
    secret.write_bytes(b"")
    assert trust.signature(MINE) is None


def test_without_a_place_for_a_secret_checkpoints_are_unsigned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    assert trust.signature(MINE) is None
    with pytest.raises(ConfigError):
        trust.configuration(header(MINE, "0" * 64), {})


def test_known_packages_and_plain_names_need_no_word() -> None:
    config = {
        "plugins": [],
        "env": {
            "id": "minigrid:MiniGrid-Empty-8x8-v0",
            "wrappers": [{"name": "ClipReward"}],
            "kwargs": {"xml_file": "C:\\robot.xml", "server": "host:5000", "at": "http://x"},
        },
        "device": "cuda:0",
        "algo": {"kind": "ppo"},
    }
    theirs = header(config, None)
    assert trust.configuration(theirs, {}) == theirs.config


def test_a_module_in_a_trusted_package_is_trusted() -> None:
    config = {"env": {"id": "mine.envs:Mine-v0"}}
    theirs = header(config, None)
    assert trust.configuration(theirs, {"plugins": ["mine"]})["env"] == theirs.config["env"]
    with pytest.raises(ConfigError, match=r"Give plugins=\[min,mine\.envs\]"):
        trust.configuration(header(config, None), {"plugins": ["min"]})


def test_two_processes_make_one_secret(tmp_path: Path) -> None:
    import subprocess

    words = [sys.executable, "-c", "from rltool import trust; print(trust.signature({}))"]
    env = {**os.environ, "XDG_STATE_HOME": str(tmp_path)}
    started = [subprocess.Popen(words, env=env, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    signatures = {process.communicate()[0].strip() for process in started}
    assert len(signatures) == 1
    assert len(signatures.pop()) == 64

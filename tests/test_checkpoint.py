"""Checkpoints: readable without rltool, whole or absent, never executed."""

from __future__ import annotations

import json
import os
import pickle
import random
import re
import shutil
from collections.abc import Mapping
from dataclasses import replace
from errno import ENOSPC
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import safetensors.torch
import torch
from probes import ALGORITHMS
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from rltool import checkpoint, train
from rltool.algos.base import Algorithm
from rltool.checkpoint import Saver, State, load_buffer, read_header, write_tensors
from rltool.errors import CheckpointError, NonFiniteError, RltoolError, WriteError
from rltool.policy import load_policy

STATE = State(
    config={
        "env": {"kind": "gym", "num_envs": 2},
        "algo": {"kind": "ppo"},
        "network": {"kind": "mlp"},
        "buffer": {"kind": "rollout"},
        "optim": {"kind": "adam"},
        "eval": {"max_steps": 9},
    },
    leaves=[{"key": ["observation"], "kind": "box", "shape": [2], "dtype": "float32", "n": 0, "start": 0}],
    actions={
        "kind": "discrete",
        "shape": [],
        "dtype": "int64",
        "n": 2,
        "start": 0,
        "low": [],
        "high": [],
        "squash": "clip",
    },
    env="Probe-v0",
    frames=100,
    budget=1000,
    compiled=False,
    sessions=1,
    episodes=3,
    best=None,
    evaluation=None,
    solved=0,
    random={},
    versions={},
    parent=None,
)


class Rows:
    """A replay buffer that holds ``count`` rows."""

    def __init__(self, count: int) -> None:
        self.rows = torch.arange(4.0 * count).view(count, 4)

    def state_dict(self) -> dict[str, Tensor]:
        return {"data.observation": self.rows}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.rows = state["data.observation"]


class Parts:
    """What a checkpoint sees of an algorithm: a policy whose parameters are views of one tensor, and a buffer."""

    def __init__(self, fill: float = 0.5, rows: int | None = None) -> None:
        self.policy = nn.Linear(2, 2)
        flat = torch.full((6,), fill)
        self.policy.weight.data, self.policy.bias.data = flat[:4].view(2, 2), flat[4:]
        self.buffer = None if rows is None else Rows(rows)

    def components(self) -> dict[str, Any]:
        parts: dict[str, Any] = {"policy": self.policy, "twin": self.policy}
        return parts if self.buffer is None else {**parts, "buffer": self.buffer}


def parts(fill: float = 0.5, rows: int | None = None) -> Algorithm:
    return cast("Algorithm", Parts(fill, rows))


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def fill_of(path: Path) -> float:
    return float(safetensors.torch.load_file(path)["policy.bias"][0])


@pytest.mark.parametrize(
    "algo", [pytest.param(algo, marks=pytest.mark.long if algo == "sac" else ()) for algo in ALGORITHMS]
)
def test_a_checkpoint_reads_with_safetensors_and_json_alone(request: pytest.FixtureRequest, algo: str) -> None:
    file = request.getfixturevalue(f"{algo}_run") / "checkpoints/last.ckpt"
    with safe_open(file, framework="numpy") as content:
        tensors = {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118
        metadata = content.metadata()
    assert set(metadata) == {"rltool", "signature", "crc32"}
    data = json.loads(metadata["rltool"])
    assert (data["format"], data["config"]["algo"]["kind"]) == (1, algo)
    assert data["frames"] == {"ppo": 352, "dqn": 400, "sac": 400}[algo]
    assert set(data["random"]) == {"python", "numpy"}
    assert all(np.isfinite(value).all() for value in tensors.values() if value.dtype.kind == "f")
    heads = {name.partition(".")[0] for name in tensors}
    common = {"policy", "optim", "counters", "rng", "meter", "collector"}
    own = {
        "ppo": {"critic", "normalizer", "reward_scale"},
        "dqn": {"target"},
        "sac": {"critic", "target", "temperature"},
    }
    assert heads == common | own[algo]
    moments = {name.removeprefix("optim.exp_avg.") for name in tensors if name.startswith("optim.exp_avg.")}
    assert moments == {name for name in tensors if name.startswith(("policy.", "critic.", "temperature."))}


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_every_tensor_comes_back_by_its_name(request: pytest.FixtureRequest, algo: str) -> None:
    file = request.getfixturevalue(f"{algo}_run") / "checkpoints/last.ckpt"
    saved = safetensors.torch.load_file(file)
    algorithm = load_policy(file).algorithm
    checkpoint.load(algorithm, file)
    found = {
        f"{component}.{name}": tensor
        for component, part in algorithm.components().items()
        if component != "buffer"
        for name, tensor in part.state_dict().items()
    }
    # What is of the run around it is not part of acting.
    around = ("collector.", "meter.", "rng.policy.", "rng.torch.")
    assert {name for name in saved if not name.startswith(around)} == set(found)
    assert len(found) > 10
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, saved[name], rtol=0, atol=0, msg=name)


def test_shared_memory_is_written_once_a_name(tmp_path: Path) -> None:
    path = Saver(tmp_path, 0).last(parts(0.25), STATE)
    saved = safetensors.torch.load_file(path)
    assert {name: tuple(tensor.shape) for name, tensor in saved.items()} == {
        "policy.weight": (2, 2),
        "policy.bias": (2,),
        "twin.weight": (2, 2),
        "twin.bias": (2,),
    }
    assert {float(value) for tensor in saved.values() for value in tensor.flatten()} == {0.25}


def test_the_header_says_where_it_lies(ppo_run: Path, tmp_path: Path) -> None:
    file = ppo_run / "checkpoints/last.ckpt"
    assert read_header(file).run_directory == ppo_run
    moved = shutil.copy(file, tmp_path / "mine.ckpt")
    header = read_header(moved)
    assert (header.run_directory, header.state) == (None, read_header(file).state)


def test_a_run_directory_stands_for_its_newest_whole_checkpoint(dqn_run: Path, tmp_path: Path) -> None:
    shutil.copytree(dqn_run, tmp_path, dirs_exist_ok=True)
    directory = tmp_path / "checkpoints"
    assert names(directory) == ["300.ckpt", "400.ckpt", "buffer-400.safetensors", "last.ckpt"]
    assert read_header(tmp_path).path == directory / "last.ckpt"
    (directory / "last.ckpt").write_bytes(b"cut off")
    assert read_header(tmp_path).path == directory / "400.ckpt"
    (directory / "400.ckpt").unlink()
    assert read_header(tmp_path).path == directory / "300.ckpt"
    (directory / "300.ckpt").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"no checkpoint of this run is whole:\n.*last\.ckpt.*\n.*300\.ckpt"):
        read_header(tmp_path)


@pytest.mark.parametrize("kind", ["cut", "zeros", "header", "state", "data"])
def test_a_damaged_checkpoint_is_never_preferred_to_a_whole_older_one(
    dqn_run: Path, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where safetensors itself would read it: a flipped bit of a weight, another digit in the state."""
    shutil.copytree(dqn_run, tmp_path, dirs_exist_ok=True)
    last = tmp_path / "checkpoints/last.ckpt"
    content = bytearray(last.read_bytes())
    match kind:
        case "cut":
            del content[-1:]
        case "zeros":
            content[:] = bytes(len(content))
        case "header":
            content[9] ^= 1
        case "state":
            place = content.index(b'\\"frames\\": 400') + len(b'\\"frames\\": ')
            content[place : place + 1] = b"9"
        case "data":
            content[-100] ^= 1
    last.write_bytes(content)
    header = read_header(tmp_path)
    assert (header.path.name, header.frames) == ("400.ckpt", 400)
    (reason,) = header.passed_over
    assert reason.startswith(f"{last} is ")
    load_policy(tmp_path)
    assert capsys.readouterr().err == f"warning: passed over: {reason}\n"
    with pytest.raises(CheckpointError, match=r"last\.ckpt is "):
        read_header(last)


def test_resume_says_which_checkpoint_it_passed_over(
    dqn_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(dqn_run, tmp_path, dirs_exist_ok=True)
    last = tmp_path / "checkpoints/last.ckpt"
    last.write_bytes(last.read_bytes()[:-1] + b"!")
    result = train(f"resume={tmp_path}", "total_frames=420")
    assert (result["status"], result["frames"]) == ("finished", 420)
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.match(
        rf"warning: passed over: {last} is not a whole checkpoint: its bytes have the checksum \w{{8}}, and", error
    )
    assert read_header(tmp_path).path == last


def test_a_checkpoint_without_a_checksum_is_read(dqn_run: Path, tmp_path: Path) -> None:
    source = dqn_run / "checkpoints/last.ckpt"
    old = rewritten(source, tmp_path / "old.ckpt", json.dumps(header_of(source)))
    assert read_header(old).state == read_header(source).state
    assert load_policy(old)(torch.zeros(4)).shape == ()


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.ckpt")
    for path in (tmp_path / "pipe.ckpt", Path("/dev/zero")):
        with pytest.raises(CheckpointError, match="is no ordinary file"):
            read_header(path)
    with pytest.raises(CheckpointError, match="cannot be read: File name too long"):
        read_header(tmp_path / ("a" * 5000))


def test_a_missing_file_names_those_beside_it(dqn_run: Path) -> None:
    with pytest.raises(CheckpointError, match=r"there is no file .*best\.ckpt\. Here are: .*300\.ckpt, .*last\.ckpt"):
        read_header(dqn_run / "checkpoints/best.ckpt")


def test_a_directory_without_checkpoints_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"is a directory without checkpoints\. Give a file such as"):
        read_header(tmp_path)


@pytest.mark.parametrize("share", [0.0, 1e-4, 0.01, 0.5, 0.9999])
def test_a_file_that_was_cut_off_is_refused(dqn_run: Path, tmp_path: Path, share: float) -> None:
    content = (dqn_run / "checkpoints/last.ckpt").read_bytes()
    path = tmp_path / "cut.ckpt"
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(CheckpointError, match=r"cut\.ckpt is not a whole checkpoint: .*\. It was cut off, or"):
        load_policy(path)


class Touch:
    """Makes a file as soon as it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("write", [torch.save, lambda value, path: path.write_bytes(pickle.dumps(value))])
def test_a_pickle_is_refused_and_not_executed(tmp_path: Path, write: Any) -> None:
    trap, path = tmp_path / "executed", tmp_path / "model.ckpt"
    write({"weights": torch.zeros(3), "x": np.float64(1), "trap": Touch(trap)}, path)
    with pytest.raises(CheckpointError, match=r"model\.ckpt is a pickle or an archive, such as torch\.save writes"):
        load_policy(path)
    assert not trap.exists()
    pickle.loads(pickle.dumps(Touch(trap)))
    assert trap.exists()  # it would have been noticed


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}])
def test_another_program_s_safetensors_file_is_refused(tmp_path: Path, metadata: dict[str, str] | None) -> None:
    path = tmp_path / "bert.ckpt"
    safetensors.torch.save_file({"w": torch.zeros(2)}, path, metadata)
    with pytest.raises(CheckpointError, match=r"is a safetensors file, but not a checkpoint of rltool's"):
        read_header(path)


def rewritten(source: Path, target: Path, header: str, tensors: Mapping[str, Tensor] | None = None) -> Path:
    """A copy of a checkpoint with another header."""
    kept = safetensors.torch.load_file(source) if tensors is None else dict(tensors)
    safetensors.torch.save_file(kept, target, {"rltool": header})
    return target


def header_of(path: Path) -> dict[str, Any]:
    with safe_open(path, framework="numpy") as file:
        return cast("dict[str, Any]", json.loads(file.metadata()["rltool"]))


def laid_over(below: Any, path: tuple[str, ...], value: object) -> Any:
    head, *rest = path
    return {**below, head: laid_over(below[head], tuple(rest), value) if rest else value}


@pytest.mark.parametrize(
    "header", ["", "no JSON", "null", "[]", "3", '"text"', "{}", '{"format": 1}', "[" * 100_000, '{"format": {}}']
)
def test_a_header_that_is_none_is_refused(dqn_run: Path, tmp_path: Path, header: str) -> None:
    path = rewritten(dqn_run / "checkpoints/last.ckpt", tmp_path / "odd.ckpt", header)
    with pytest.raises(CheckpointError, match=r"odd\.ckpt has (an unreadable header|format)"):
        read_header(path)


def test_a_later_format_says_so(dqn_run: Path, tmp_path: Path) -> None:
    data = header_of(dqn_run / "checkpoints/last.ckpt") | {"format": 2}
    path = rewritten(dqn_run / "checkpoints/last.ckpt", tmp_path / "new.ckpt", json.dumps(data))
    with pytest.raises(CheckpointError, match=r"has format 2, and this rltool reads format 1"):
        read_header(path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (("frames",), -1),
        (("frames",), "many"),
        (("frames",), True),
        (("budget",), None),
        (("config",), []),
        (("config",), {}),
        (("config", "algo"), "dqn"),
        (("config", "env"), {}),
        (("config", "env", "num_envs"), "two"),
        (("config", "eval"), {"max_steps": 1.5}),
        (("leaves",), []),
        (("leaves",), [{"key": ["observation"]}]),
        (("leaves",), "observation"),
        (("env",), 3),
        (("evaluation",), "high"),
        (("best",), {"mean": 1.0}),
        (("best",), {"mean": 1.0, "frames": "2"}),
        (("versions",), {"torch": 2}),
        (("frames",), 2**63),
        (("sessions",), 1.0),
        (("compiled",), 1),
        (("config", "env", "num_envs"), 0),
        (("config", "env", "num_envs"), 10**30),
        (("actions", "nvec"), [True]),
        (("actions", "nvec"), [2.0]),
        (("actions", "nvec"), [10**30]),
        (("actions",), None),
        (("actions", "nvec"), [-2]),
        (("actions", "nvec"), "two"),
        (("actions", "nvec"), [2, 2]),
        (("actions", "shape"), [1]),
        (("actions", "dtype"), "object"),
        (("surprise",), 1),
    ],
)
def test_a_header_of_other_types_is_refused(dqn_run: Path, tmp_path: Path, key: tuple[str, ...], value: object) -> None:
    source = dqn_run / "checkpoints/last.ckpt"
    path = rewritten(source, tmp_path / "odd.ckpt", json.dumps(laid_over(header_of(source), key, value)))
    with pytest.raises(CheckpointError, match=r"odd\.ckpt has an unreadable header"):
        load_policy(path)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"frames": ', '"frames": NaN, "was": '),
        ('"frames": ', '"frames": 1, "frames": '),
        ('"evaluation": null', '"evaluation": 1e999'),
        ('"parent": null', '"parent": "\\ud800"'),
        ('"parent": null', f'"parent": {"[" * 100_000}'),
        ('"parent": null', f'"parent": {"[" * 300}{"]" * 300}'),
        ('"frames": ', f'"frames": {"1" * 5000}'),
    ],
)
def test_json_that_readers_differ_about_is_refused(dqn_run: Path, tmp_path: Path, old: str, new: str) -> None:
    source = dqn_run / "checkpoints/last.ckpt"
    text = json.dumps(header_of(source))
    assert old in text
    path = rewritten(source, tmp_path / "odd.ckpt", text.replace(old, new, 1))
    with pytest.raises(CheckpointError, match=r"odd\.ckpt has an unreadable header"):
        read_header(path)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (("config", "env", "num_envs"), 10**12, "env.num_envs: expected a whole number from 1 to 100000"),
        (("config", "threads"), 10**9, "threads: expected a whole number from 1 to 1024"),
        (("config", "eval", "num_envs"), 10**12, "eval.num_envs: expected a whole number from 1 to 100000"),
        (("config", "buffer", "size"), 10**15, "buffer.size: .* need .* GiB"),
        (("config", "network", "hidden"), [10**5, 10**5], "describes networks that its weights cannot fill"),
        (("random",), {}, "random numbers cannot be taken up again: KeyError"),
        (
            ("random", "numpy"),
            ["MT19937", [0] * 624, 10**6, 0, 0.0],
            "random numbers cannot be taken up again: .*position",
        ),
        (("random", "python"), [3, [0] * 5, None], "random numbers cannot be taken up again"),
    ],
)
def test_a_run_is_not_resumed_with_what_no_run_would_save(
    dqn_run: Path, tmp_path: Path, key: tuple[str, ...], value: object, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    source = dqn_run / "checkpoints/last.ckpt"
    path = rewritten(source, tmp_path / "odd.ckpt", json.dumps(laid_over(header_of(source), key, value)))
    with pytest.raises(RltoolError, match=message) as refusal:
        train(f"resume={path}", "total_frames=420")
    assert refusal.value.exit_code == 2


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (("config", "algo", "kind"), "os:system", "holds a configuration that is none: algo.kind"),
        (("config", "algo", "gamma"), "__import__('os')", "holds a configuration that is none: algo.gamma"),
        (("config", "network", "hidden"), [1] * 20_000, "describes networks that its weights cannot fill"),
        (("config", "network", "hidden"), [10**5, 10**5], "describes networks that its weights cannot fill"),
        (("config", "network", "hidden"), [10**15], "describes networks that its weights cannot fill"),
        (("config", "network", "hidden"), [17], "policy.body.hidden.0.weight has shape"),
        (("config", "algo", "kind"), "ppo", "holds a configuration that is none"),
        (("actions", "nvec"), [3], "policy.head.weight has shape"),
        (("actions", "nvec"), [10**15], "describes networks that its weights cannot fill"),
        (("leaves", "shape"), [5], "policy.body.hidden.0.weight has shape"),
    ],
)
def test_a_header_that_does_not_fit_its_tensors_is_refused(
    dqn_run: Path, tmp_path: Path, key: tuple[str, ...], value: object, message: str
) -> None:
    source = dqn_run / "checkpoints/last.ckpt"
    data = header_of(source)
    if key[0] == "leaves":
        data["leaves"][0][key[1]] = value
    else:
        data = laid_over(data, key, value)
    path = rewritten(source, tmp_path / "odd.ckpt", json.dumps(data))
    with pytest.raises(CheckpointError, match=message):
        load_policy(path)


def test_a_missing_tensor_is_named(dqn_run: Path, tmp_path: Path) -> None:
    source = dqn_run / "checkpoints/last.ckpt"
    tensors = safetensors.torch.load_file(source)
    del tensors["policy.head.bias"]
    path = rewritten(source, tmp_path / "thin.ckpt", json.dumps(header_of(source)), tensors)
    with pytest.raises(CheckpointError, match=r"lacks the tensor policy\.head\.bias"):
        load_policy(path)


@pytest.mark.parametrize("fault", [OSError(ENOSPC, "No space left on device"), SafetensorError("I/O error")])
@pytest.mark.parametrize("place", ["save_file", "replace", "fsync"])
def test_the_old_file_survives_a_write_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Exception, place: str
) -> None:
    saver = Saver(tmp_path, 0)
    path = saver.last(parts(1.0), STATE)

    def fail(*_: object) -> None:
        if place == "save_file":
            cast("Path", _[1]).write_bytes(b"half of it")
        raise fault

    with monkeypatch.context() as patch:
        patch.setattr(safetensors.torch if place == "save_file" else os, place, fail)
        with pytest.raises(
            RltoolError, match=r"last\.ckpt could not be written: .*\. What was there before is untouched"
        ):
            saver.last(parts(2.0), STATE)
    assert names(tmp_path) == ["last.ckpt"]
    assert fill_of(path) == 1.0


def test_an_interrupted_write_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saver = Saver(tmp_path, 0)
    saver.last(parts(1.0), STATE)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        saver.last(parts(2.0), STATE)
    assert names(tmp_path) == ["last.ckpt"]


@pytest.mark.parametrize(("keep", "kept"), [(0, []), (1, ["500.ckpt"]), (2, ["500.ckpt", "95.ckpt"])])
def test_the_newest_numbered_checkpoints_are_kept(tmp_path: Path, keep: int, kept: list[str]) -> None:
    saver = Saver(tmp_path, keep)
    for frames in (5, 40, 95, 500):
        saver.numbered(parts(float(frames)), replace(STATE, frames=frames))
    assert names(tmp_path) == sorted([*kept, "last.ckpt"])
    assert fill_of(tmp_path / "last.ckpt") == 500
    assert all(fill_of(tmp_path / name) == float(name.removesuffix(".ckpt")) for name in kept)


def test_the_best_checkpoint_is_never_cleared_away(tmp_path: Path) -> None:
    saver = Saver(tmp_path, 1)
    saver.best(parts(1.0), STATE)
    for frames in (200, 300):
        saver.numbered(parts(), replace(STATE, frames=frames))
    assert names(tmp_path) == ["300.ckpt", "best.ckpt", "last.ckpt"]
    assert fill_of(tmp_path / "best.ckpt") == 1.0


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused_and_the_good_ones_kept(tmp_path: Path, value: float) -> None:
    saver = Saver(tmp_path, 2)
    saver.last(parts(1.0, rows=3), STATE)
    with pytest.raises(NonFiniteError, match=r"^policy\.weight holds a NaN or an infinity at frame 200"):
        saver.numbered(parts(value, rows=3), replace(STATE, frames=200))
    assert names(tmp_path) == ["buffer-100.safetensors", "last.ckpt"]
    assert fill_of(tmp_path / "last.ckpt") == 1.0


def test_one_buffer_lies_beside_the_last_checkpoint(tmp_path: Path) -> None:
    saver = Saver(tmp_path, 1)
    for frames, rows in ((10, 100), (20, 200)):
        saver.numbered(parts(rows=rows), replace(STATE, frames=frames))
    assert names(tmp_path) == ["20.ckpt", "buffer-20.safetensors", "last.ckpt"]
    assert 200 * 16 <= (tmp_path / "buffer-20.safetensors").stat().st_size < 200 * 16 + 300
    assert (tmp_path / "last.ckpt").stat().st_size < 4000


def test_a_stored_run_takes_the_room_of_what_it_holds(dqn_run: Path) -> None:
    # 400 transitions of CartPole: an observation of four numbers, a pointer, an action, a reward and three flags.
    row = 16 + 4 + 8 + 4 + 3
    # What is over: the header, and the last observation of each episode.
    assert 400 * row <= (dqn_run / "checkpoints/buffer-400.safetensors").stat().st_size < 400 * row + 2500


def test_the_buffer_comes_back(tmp_path: Path) -> None:
    path = Saver(tmp_path, 0).last(parts(rows=7), STATE)
    empty = parts(rows=0)
    assert load_buffer(empty, path, 100) is True
    torch.testing.assert_close(empty.components()["buffer"].state_dict()["data.observation"], Rows(7).rows)


def test_a_buffer_that_is_not_there_or_of_another_moment_is_not_taken(tmp_path: Path) -> None:
    path = Saver(tmp_path, 0).last(parts(rows=7), STATE)
    assert load_buffer(parts(rows=0), path, 99) is False
    (tmp_path / "buffer-100.safetensors").write_bytes(b"cut off")
    assert load_buffer(parts(rows=0), path, 100) is False
    assert load_buffer(parts(), path, 100) is None


def test_the_global_generators_come_back_through_json() -> None:
    np.random.normal()
    random.gauss(0, 1)
    state = json.loads(json.dumps(checkpoint.random_state()))

    def draw() -> list[float]:
        return [random.random(), random.gauss(0, 1), np.random.normal(), np.random.random()]

    expected = draw()
    draw()
    checkpoint.restore_random_state(state)
    assert draw() == expected


def test_tensors_of_every_kind_are_written(tmp_path: Path) -> None:
    tensors = {
        "scalar": torch.tensor(3),
        "empty": torch.zeros(0, 4),
        "bool": torch.tensor([True, False]),
        "strided": torch.arange(6).view(2, 3).T,
        "parameter": nn.Parameter(torch.ones(2)),
    }
    write_tensors(tmp_path / "all", tensors, {})
    for name, tensor in safetensors.torch.load_file(tmp_path / "all").items():
        assert torch.equal(tensor, tensors[name].detach())


@pytest.fixture
def room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many bytes the disk has for checkpoints."""
    limit, save_file = [10**9], safetensors.torch.save_file

    def save(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
        save_file(tensors, path, metadata)
        if sum(file.stat().st_size for file in tmp_path.iterdir()) > limit[0]:
            raise OSError(ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(safetensors.torch, "save_file", save)
    return limit


def test_a_full_disk_keeps_the_weights_rather_than_the_buffer(tmp_path: Path, room: list[int]) -> None:
    saver = Saver(tmp_path, 0)
    saver.last(parts(1.0, rows=300), replace(STATE, frames=100))
    first = sum(file.stat().st_size for file in tmp_path.iterdir())
    # Not enough for two buffers at a time: the new one goes where the old one was.
    room[0] = first + 2000
    saver.last(parts(2.0, rows=300), replace(STATE, frames=200))
    assert (names(tmp_path), fill_of(tmp_path / "last.ckpt")) == (["buffer-200.safetensors", "last.ckpt"], 2.0)
    # Not enough for a larger one at all: the weights are there, and the fault is named.
    with pytest.raises(WriteError, match=r"buffer-300\.safetensors could not be written: .*No space left on device"):
        saver.last(parts(3.0, rows=1000), replace(STATE, frames=300))
    assert (names(tmp_path), fill_of(tmp_path / "last.ckpt")) == (["last.ckpt"], 3.0)
    # Nothing fits: what was there stays, and no buffer without a checkpoint.
    room[0] = 100
    with pytest.raises(WriteError, match=r"last\.ckpt could not be written"):
        saver.last(parts(4.0, rows=1), replace(STATE, frames=400))
    assert (names(tmp_path), fill_of(tmp_path / "last.ckpt")) == (["last.ckpt"], 3.0)

"""Run directories: one process each, nothing overwritten, files whole."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from errno import ENOSPC
from pathlib import Path

import numpy as np
import pytest
from omegaconf import OmegaConf

from rltool import runs
from rltool.errors import ConfigError, RltoolError
from rltool.runs import RunDirectory, git_commit, versions

TREE: dict[str, object] = {
    "seed": 0,
    "optim": {"lr": 1e-05, "betas": [0.9, 0.999], "eps": 1e-8},
    "env": {"id": "module:Id-v0", "kwargs": {"text": "1e6", "yes": "yes", "none": "null", "empty": "", "umlaut": "ä"}},
    "resume": None,
    "compile": True,
    "literal": "${not.an.interpolation}",
    "multi": "two\nlines",
}


def python(code: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, text=True)


def test_a_new_run(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "run"
    with RunDirectory.create(path) as run:
        assert run.path == path
        assert run.checkpoints.is_dir()
        run.write_config(TREE)
        run.write_overrides(["algo=ppo", "network.hidden=[64, 64]"])
        assert OmegaConf.to_container(OmegaConf.load(run.config_path), resolve=True) == TREE
        assert run.overrides_path.read_text() == "algo=ppo\nnetwork.hidden=[64, 64]\n"
        assert run.read_summary() == {}
        names = (run.config_path, run.overrides_path, run.metrics, run.summary_path, run.log_path, run.checkpoints)
        assert [name.name for name in names] == [
            "config.yaml",
            "overrides.txt",
            "metrics.jsonl",
            "summary.json",
            "log.txt",
            "checkpoints",
        ]
        assert {name.parent for name in names} == {path}


def test_an_empty_directory_and_other_files_are_fine(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "train.log").write_text("")
    RunDirectory.create(tmp_path).close()
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize(
    "trace",
    ["config.yaml", "summary.json", "metrics.jsonl", "metrics.csv", "events.out.tfevents.1.host.2.3", "checkpoints"],
)
def test_a_directory_that_holds_a_run_is_refused(tmp_path: Path, trace: str) -> None:
    (tmp_path / trace).write_text("old")
    with pytest.raises(ConfigError, match=re.escape(f"found {trace} in {tmp_path}")) as caught:
        RunDirectory.create(tmp_path)
    assert f"resume={tmp_path}" in str(caught.value)
    assert caught.value.exit_code == 2
    assert [path.name for path in tmp_path.iterdir()] == [trace]
    assert (tmp_path / trace).read_text() == "old"


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    for path in (tmp_path / "runs", tmp_path / "runs" / "a" / "b"):
        with pytest.raises(ConfigError, match=re.escape(f"{tmp_path / 'runs'} is a file")):
            RunDirectory.create(path)


def test_no_write_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", str(tmp_path / "run"))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(ConfigError, match=r"cannot make the run directory .*run: Permission denied") as caught:
        RunDirectory.create(tmp_path / "run")
    assert caught.value.exit_code == 2


def test_a_name_that_is_too_long(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="File name too long"):
        RunDirectory.create(tmp_path / ("x" * 300))


def test_a_claim_that_cannot_be_completed_is_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path) -> None:
        raise OSError(ENOSPC, os.strerror(ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(runs, "_locked", full)
        with pytest.raises(RltoolError, match="No space left on device") as caught:
            RunDirectory.create(tmp_path / "run")
        assert caught.value.exit_code == 1
    RunDirectory.create(tmp_path / "run").close()


@pytest.mark.long
def test_processes_that_start_together_never_share_a_directory(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from rltool.errors import ConfigError; from rltool.runs import RunDirectory\n"
        "time.sleep(max(0, float(sys.argv[2]) - time.time()))\n"
        "try:\n    RunDirectory.create(Path(sys.argv[1])); print('mine'); time.sleep(0.3)\n"
        "except ConfigError:\n    print('refused')"
    )
    start = str(time.time() + 1.5)
    processes = [python(code, str(tmp_path / "run"), start) for _ in range(4)]
    assert sorted(process.communicate()[0].strip() for process in processes) == [
        "mine",
        "refused",
        "refused",
        "refused",
    ]


def test_a_run_that_another_process_writes_is_not_resumed_until_that_process_is_dead(tmp_path: Path) -> None:
    # The forked child, like a worker of an environment, outlives its parent and must not keep the run locked.
    code = (
        "import os, sys, time; from pathlib import Path; from rltool.runs import RunDirectory\n"
        "run = RunDirectory.create(Path(sys.argv[1]))\n"
        "running, started = os.pipe()\n"
        "if os.fork() == 0:\n    os.close(1); os.write(started, b'.'); time.sleep(3); os._exit(0)\n"
        "os.read(running, 1); print('mine', flush=True); time.sleep(60)"
    )
    process = python(code, str(tmp_path))
    assert process.stdout is not None
    with process:
        assert process.stdout.readline() == "mine\n"
        with pytest.raises(ConfigError, match="another process is writing into"):
            RunDirectory.open(tmp_path)
        with pytest.raises(ConfigError, match="found config"):
            RunDirectory.create(tmp_path)
        process.send_signal(signal.SIGKILL)
    RunDirectory.open(tmp_path).close()


def test_closing_lets_the_next_one_in(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path)
    with pytest.raises(ConfigError, match="another process"):
        RunDirectory.open(tmp_path)
    run.close()
    run.close()
    with RunDirectory.open(tmp_path) as again:
        assert again.path == tmp_path


@pytest.mark.parametrize(
    ("kind", "text"), [("missing", "there is no such directory"), ("file", "it is a file"), ("empty", "found none")]
)
def test_only_a_run_can_be_opened(tmp_path: Path, kind: str, text: str) -> None:
    path = tmp_path / "run"
    if kind == "file":
        path.write_text("")
    if kind == "empty":
        path.mkdir()
    with pytest.raises(ConfigError, match=text) as caught:
        RunDirectory.open(path)
    assert caught.value.problems[0].path == "resume"
    assert not (path / ".lock").exists()


def test_a_relative_path_stays_the_same_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with RunDirectory.create(Path("run")) as run:
        monkeypatch.chdir("/")
        run.write_summary({"status": "done"})
    assert (tmp_path / "run" / "summary.json").exists()


def test_the_summary_is_finite_json(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path / "ü") as run:
        run.write_summary(
            {
                "objective": np.float32(1.5),
                "best": {"mean": math.nan, "max": math.inf, "episodes": np.int64(10)},
                "returns": [1.0, -math.inf],
                "path": run.path,
                "broken": "a\udcffb",
                "error": None,
                "solved": True,
            }
        )
        assert run.read_summary() == {
            "objective": 1.5,
            "best": {"mean": None, "max": None, "episodes": 10},
            "returns": [1.0, None],
            "path": str(run.path),
            "broken": "a\udcffb",
            "error": None,
            "solved": True,
        }
        text = run.summary_path.read_text(encoding="utf-8")
        assert "ü" in text
        assert "NaN" not in text
        with pytest.raises(TypeError, match="found object"):
            run.write_summary({"a": object()})


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with RunDirectory.create(tmp_path) as run:
        run.write_summary({"status": "old"})
        before = sorted(path.name for path in tmp_path.iterdir())

        def full(descriptor: int) -> None:
            raise OSError(ENOSPC, os.strerror(ENOSPC))

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            with pytest.raises(RltoolError, match=r"cannot write .*summary.json: No space left on device"):
                run.write_summary({"status": "new"})
        assert run.read_summary() == {"status": "old"}
        assert sorted(path.name for path in tmp_path.iterdir()) == before


@pytest.mark.parametrize(("text", "problem"), [("{", "expected JSON"), ("[1]", "found list")])
def test_a_damaged_summary_is_named(tmp_path: Path, text: str, problem: str) -> None:
    with RunDirectory.create(tmp_path) as run:
        run.summary_path.write_text(text)
        with pytest.raises(RltoolError, match=problem):
            run.read_summary()


def test_new_paths_are_plain_and_distinct() -> None:
    paths = {RunDirectory.new_path(Path("runs"), "cartpole", "ppo") for _ in range(50)}
    assert len(paths) == 50
    for path in paths:
        assert re.fullmatch(r"runs/cartpole-ppo/\d{4}-\d\d-\d\d-\d\d-\d\d-\d\d-[0-9a-f]{6}", path.as_posix())
    odd = RunDirectory.new_path(Path("runs"), "gym id=[ALE/Pong-v5], a:b", "..")
    assert re.fullmatch(r"runs/gym-id-ALE-Pong-v5-a-b-unnamed/[\w-]+", odd.as_posix())
    assert not set("=,[] :") & set(odd.as_posix())


def test_versions_name_what_is_installed() -> None:
    found = versions()
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert found["numpy"] == np.__version__
    assert {"torch", "torchrl", "tensordict", "gymnasium"} <= set(found)


def test_git_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))

    def git(*arguments: str) -> None:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True)

    assert git_commit(tmp_path) is None
    git("init")
    assert git_commit(tmp_path) is None
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-m", "one")
    git("tag", "v1")
    commit = git_commit(tmp_path)
    assert commit is not None
    assert re.fullmatch("[0-9a-f]{40}", commit)
    (tmp_path / "untracked").write_text("")
    assert git_commit(tmp_path) == commit
    (tmp_path / "a").write_text("2")
    assert git_commit(tmp_path) == f"{commit}-dirty"
    assert git_commit(tmp_path / "missing") is None
    monkeypatch.setenv("PATH", "")
    assert git_commit(tmp_path) is None


def test_the_module_imports_no_torch() -> None:
    script = "import sys, rltool.runs; rltool.runs.versions(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_the_summary_can_be_read_by_anything(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path) as run:
        run.write_summary({"a": [1, {"b": (2.5, "c")}]})
        assert json.loads(run.summary_path.read_bytes()) == {"a": [1, {"b": [2.5, "c"]}]}

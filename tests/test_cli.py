"""The command line as a person meets it: what each line typed prints, leaves behind and returns."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import cast

import numpy as np
import pytest
from safetensors.numpy import save_file

import rltool
from rltool import cli, registry
from rltool.errors import CheckpointError, ConfigError, Problem, RltoolError
from rltool.schema import RunConfig
from rltool.sweeps.jobs import SweepJob

ROOT = Path(__file__).resolve().parents[1]
RUN = ("algo=ppo", "env=cartpole")


@dataclass
class Answer:
    """What a command did."""

    code: int
    out: str
    err: str

    @property
    def all(self) -> str:
        return self.out + self.err


Rltool = Callable[..., Answer]


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Rltool:
    """``rltool WORDS`` in this process, started from an empty directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    # Hydra's --info sets up logging for the whole process, on a stream that is gone after the test.
    monkeypatch.setattr(logging.root, "handlers", list(logging.root.handlers))
    monkeypatch.setattr(logging.root, "level", logging.root.level)
    # Hydra composes once more only to look for hydra.mode, which no test sets.
    monkeypatch.setattr("hydra._internal.hydra.Hydra.get_mode", lambda *_, **__: None)

    def call(*words: str) -> Answer:
        capsys.readouterr()
        code = cli.main(words)
        out, err = capsys.readouterr()
        return Answer(code, out, err)

    return call


@dataclass
class Call:
    """One call of the training that stands in for the real one."""

    config: RunConfig
    directory: Path
    overrides: list[str]
    tuned: str | None


@dataclass
class Training:
    """Stands in for rltool.training: notes what it was called with and writes what a run would.

    ``refusal`` is raised before anything is written, as training does with what it cannot build; ``fault`` after that.
    """

    calls: list[Call] = field(default_factory=list)
    refusal: ConfigError | None = None
    fault: Callable[[Call], None] = lambda call: None

    def __call__(
        self, config: RunConfig, directory: Path, overrides: Sequence[str] = (), *, tuned: str | None = None
    ) -> dict[str, object]:
        call = Call(config, directory, list(overrides), tuned)
        self.calls.append(call)
        if self.refusal is not None:
            raise self.refusal
        (directory / "config.yaml").touch()
        (directory / "checkpoints").mkdir(exist_ok=True)
        self.fault(call)
        (directory / "checkpoints" / "last.ckpt").touch()
        return {"status": "finished", "objective": 1.0}


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> Training:
    stand_in = Training()
    _replace_module(monkeypatch, "training", SimpleNamespace(train=stand_in))
    return stand_in


def _replace_module(monkeypatch: pytest.MonkeyPatch, name: str, module: object) -> None:
    monkeypatch.setitem(sys.modules, f"rltool.{name}", cast("ModuleType", module))
    monkeypatch.setattr(rltool, name, module, raising=False)


def raising(error: BaseException) -> Callable[[Call], None]:
    def fault(call: Call) -> None:
        raise error

    return fault


def nothing_left(directory: Path) -> bool:
    return not list(directory.iterdir())


# ------------------------------------------------------------------------------------------------------------ help pages


@pytest.mark.parametrize("words", [["--help"], [], *[[name, "--help"] for name in cli.COMMANDS], ["help", "train"]])
def test_help_is_readable_at_80_columns(command: Rltool, words: list[str]) -> None:
    answer = command(*words)
    assert answer.code == 0
    assert not answer.err
    assert "usage" in answer.out
    assert "examples" in answer.out
    # A key with its default may be longer than a line has room for; all else is wrapped.
    long = [line for line in answer.out.splitlines() if len(line) > 80 and "=" not in line]
    assert not long


def test_train_help_explains_every_key(command: Rltool) -> None:
    page = command("train", "--help").out
    for name in RunConfig.model_fields:
        if not registry.kinds(name) and name not in ("eval", "save", "stop"):
            assert re.search(rf"^ +{name}=", page, re.MULTILINE), name
    keys = [
        (group, key)
        for group in ("algo", "env")
        for kind in registry.kinds(group).values()
        for key in kind.model_fields
    ]
    for group, key in [*keys, ("optim", "lr"), ("network", "hidden"), ("eval", "interval"), ("stop", "evaluations")]:
        assert key == "kind" or f"{group}.{key}" in page, f"{group}.{key}"
    for option in ("cartpole", "inverted_double_pendulum", "prioritized", "rmsprop", "mlp_256"):
        assert option in page
    assert "algo.gamma=0.99" in page
    assert "discount factor" in page


def test_help_shows_the_keys_of_a_choice(command: Rltool) -> None:
    page = command("train", "algo=dqn", "optim=sgd", "--help").out
    assert "algo.double=false" in page
    assert "optim.momentum=0.9" in page
    assert "buffer.size=100000" in page  # the buffer that dqn brings along
    assert "algo.gae_lambda" not in page
    assert "Did you mean dqn?" in command("train", "algo=dqm", "--help").err


def test_version_names_what_a_result_depends_on(command: Rltool) -> None:
    answer = command("--version")
    names = [line.split()[0] for line in answer.out.splitlines()]
    assert names == ["rltool", "torch", "torchrl", "gymnasium", "python"]
    assert "not installed" not in answer.out


def test_neither_help_nor_lists_nor_config_errors_import_torch(tmp_path: Path) -> None:
    lines = [
        ["--help"],
        ["--version"],
        *[[name, "--help"] for name in cli.COMMANDS],
        ["list"],
        ["list", "envs"],
        ["config", *RUN],
        ["train", *RUN, "--cfg", "job"],
        ["train", "-m", *RUN, "algo.gama=1", "seed=1,2"],
        ["train", "algo=pp0"],
        ["eval", "episodes=0"],
        ["env", "env=cartpol"],
        ["runs"],
        ["show"],
        ["diff"],
        ["rerun"],
        ["checkpoint"],
        ["plot"],
        ["compare", "nowhere"],
        ["sweep"],
        ["sweep", "nowhere"],
        ["init"],
        ["lst"],
        ["-sc", "install=bash"],
    ]
    script = (
        "import sys\nfrom rltool.cli import main\n"
        f"for line in {lines!r}:\n"
        "    main(line)\n"
        "    loaded = {'torch', 'torchrl', 'gymnasium', 'tensordict'} & set(sys.modules)\n"
        "    if loaded: sys.exit(f'{line}: {loaded}')\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, env=_env())
    assert done.returncode == 0, done.stderr[-2000:]
    assert nothing_left(tmp_path)


def test_help_pages_need_neither_hydra_nor_omegaconf(tmp_path: Path) -> None:
    script = (
        "import sys\nfrom rltool.cli import main\n"
        f"for name in {list(cli.COMMANDS)!r}: main([name, '--help'])\n"
        "main(['list', 'envs'])\n"
        "sys.exit(str({'hydra', 'omegaconf', 'numpy', 'rich'} & set(sys.modules) or ''))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, env=_env())
    assert done.stderr.strip() == ""


def _env() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def test_a_reader_that_stops_reading_is_no_error(tmp_path: Path) -> None:
    line = f"{sys.executable} -m rltool train --help | head -1"
    done = subprocess.run(line, shell=True, cwd=tmp_path, capture_output=True, text=True, env=_env())
    assert done.stdout == "usage\n"
    assert done.stderr == ""


# ------------------------------------------------------------------------------------------------------------ wrong input

# What is typed -> what the answer must say. Exit 2, one screen, no traceback, nothing left behind.
WRONG = [
    (["trian"], ["Did you mean train?"]),
    (["algo=ppo"], ["Did you mean rltool train algo=ppo?"]),
    (["train", *RUN, "--mulitrun"], ["Did you mean --multirun?"]),
    (["train", *RUN, "--seed=3"], ["Values are given without dashes: seed=3"]),
    (["train"], ["algo: a value is required", "one of dqn, ppo", "env: a value is required"]),
    (["train", "cartpole", "algo=ddpg"], ["Did you mean env=cartpole?", "algo: there is no option 'ddpg'", "Options: dqn, ppo"]),
    (["train", "algo=pp0", "env=cartpol", "optim.lr=-1"], ["Did you mean ppo?", "Did you mean cartpole?", "optim.lr: expected"]),
    (["train", *RUN, "algo.gama=0.9", "+algo.foo=1"], ["algo.gama: no such key. Did you mean algo.gamma?", "algo.foo: no such"]),
    (["train", *RUN, "~algo.gama"], ["algo.gama", "does not exist"]),
    (["train", *RUN, "~algo.epochs", "optim.lr=high", "algo.gamma=1.5"], ["algo.epochs: a value is required", "above 0, found 'high'", "algo.gamma: expected a number from 0 to 1"]),
    (["train", "algo=ppo,dqn", "env=cartpole"], ["rltool train: algo: expected one value, found several: ppo,dqn. Add -m"]),
    (["train", "algo=ppo", "env.id=CartPole-v1"], ["env: a value is required. Give env=gym env.id=CartPole-v1"]),
    (["train", *RUN, "env.kwargs=[3]"], ["env.kwargs: expected a mapping {key: value, …}, found a list […]"]),
    (["train", *RUN, "network.hidden={a: 1}"], ["network.hidden: expected a list […], found a mapping {key: value, …}"]),
    (["train", "algo=ppo", "env=gym"], ["env.id: a value is required. Give env.id=VALUE"]),
    (["train", *RUN, "algo.minibatch_size=100000", "total_frames=0"], ["minibatch_size: expected at most", "at least 1"]),
    (["train", *RUN, "total_frames=-5", "env.num_envs=0", "algo.minibatch_size=-64"], ["found -5", "found 0", "found -64"]),
    (["train", "algo=dqn", "env=cartpole", "algo.gae_lambda=1"], ["algo.gae_lambda", "It is a key of ppo"]),
    (["train", *RUN, "seed=1,2", "optim.lr=[1", "optim=addam"], ["Add -m", "optim.lr: cannot read '[1'", "Did you mean adam"]),
    (["train", "-m", *RUN, "seed=1,2", "optim.lr=1e-3,-2"], ["optim.lr: expected a number above 0, found -2"]),
    (["train", *RUN, "device=gpu", "plugins=[not_there]"], ["auto, cpu, cuda or cuda:N", "module not_there cannot be imported"]),
    (["train", *RUN, "device=${device}"], ["device", "cannot be resolved"]),
    (["train", *RUN, "hydra.run.dri=x"], ["Did you mean hydra.run.dir?"]),
    (["train", *RUN, "hydra/launcher=jobib"], ["hydra/launcher", "jobib"]),
    (["train", *RUN, "-m", "--cfg", "job"], ["--multirun"]),
    (["train", *RUN, "--config-dir", "nowhere"], ["there is no directory", "nowhere"]),
    (["train", *RUN, "hydra.run.dir=taken/x"], ["taken is a file"]),
    (["train", "-m", "resume=x"], ["resume: one run continues at a time"]),
    (["train", "resume=nowhere.ckpt"], ["nowhere.ckpt"]),
    (["eval", "checkpoint=None", "episodes=0", "epsiodes=3"], ["found null", "episodes: expected", "Did you mean episodes?"]),
    (["eval", "run/best.ckpt", "env=cartpole"], ["rltool eval: env: ", "env.KEY=VALUE"]),
    (["eval", "cartpole"], ["Did you mean env=cartpole?", "checkpoint: a value is required"]),
    (["eval", "checkpoint=a,b"], ["checkpoint: expected one value, found several: a,b. Give one, or write checkpoint=[…] for a list"]),
    (["eval", "a.ckpt", "checkpoint=b"], ["checkpoint: expected paths or checkpoint=, found both: a.ckpt"]),
    (["eval", "runs/*/best.ckpt"], ["checkpoint: nothing matches runs/*/best.ckpt"]),
    (["eval", "a.ckpt", "b.ckpt"], ["2 problems", "there is no file", "a.ckpt", "b.ckpt"]),
    (["eval", "a.ckpt", "trajectories=a.txt"], ["trajectories: expected text (a file ending in .npz", "found"]),
    (["eval", "a.ckpt", "deterministic=maybe"], ["deterministic: expected true or false or both, found 'maybe'"]),
    (["eval", "checkpoint=nowhere.ckpt"], ["nowhere.ckpt"]),
    (["eval", "-m", "checkpoint=a,b"], ["-m"]),
    (["list", "envz"], ["Did you mean env"]),
    (["list", "env", "algo"], ["expected one group"]),
    (["config", "algo=pqo"], ["Did you mean ppo?"]),
    (["env", "env=cartpole", "check=all"], ["check: expected one of quick, full, found 'all'"]),
    (["eval", "nosuch"], ["there is no file", "nosuch"]),
    (["runs", "status=finised"], ["status: expected a status, found 'finised'. Did you mean finished"]),
    (["env", "algo=ppo"], ["Give env=OPTION", "algo: is not chosen by this command"]),
    (["-sc", "install=tcsh"], ["install=bash"]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "said"),
    # Each takes as long as composing twice does: every second one is a long test.
    [
        pytest.param(*row, marks=pytest.mark.long if number % 2 else (), id=" ".join(row[0]))
        for number, row in enumerate(WRONG)
    ],
)
def test_wrong_input(command: Rltool, training: Training, tmp_path: Path, words: list[str], said: list[str]) -> None:
    (tmp_path / "taken").touch()
    answer = command(*words)
    assert answer.code == 2
    for text in said:
        assert text in answer.err
    assert "Traceback" not in answer.all
    assert answer.out == ""
    assert len(answer.err.splitlines()) <= 24
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]
    assert not training.calls


def test_a_process_without_standard_output_runs_all_the_same(
    command: Rltool, training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    for stream in ("stdout", "stderr"):
        monkeypatch.setattr(sys, stream, None)
    assert cli.main(["train", *RUN]) == 0
    assert cli.main(["list", "envs"]) == 0
    assert len(training.calls) == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that is always full")
@pytest.mark.parametrize("words", [["list", "envs"], ["train", "--help"], ["--version"]])
def test_output_that_cannot_be_written_is_said_in_a_line(
    command: Rltool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert cli.main(words) == 1
    assert re.fullmatch(r"rltool.*: what is printed cannot be written: .*\n", capsys.readouterr().err)


def test_every_problem_is_on_one_screen(command: Rltool) -> None:
    answer = command("train", *RUN, "optim.lr=-1", "algo.gama=1", "seed=-1", "foo=1", "algo.minibatch_size=9999999")
    head, *lines = answer.err.splitlines()
    assert head == "rltool train: 5 problems"
    assert [line.split(":")[0].strip() for line in lines] == [
        "seed",
        "algo.gama",
        "optim.lr",
        "foo",
        "algo.minibatch_size",
    ]


@pytest.mark.parametrize("how", ["debug=true", "HYDRA_FULL_ERROR"])
def test_debug_shows_the_traceback_too(command: Rltool, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    if how == "HYDRA_FULL_ERROR":
        monkeypatch.setenv(how, "1")
    answer = command("eval", "episodes=0", *([how] if "=" in how else []))
    assert answer.code == 2
    assert "Traceback" in answer.err
    assert "episodes: expected" in answer.err


# ------------------------------------------------------------------------------------------------------------- one run


def test_a_run_gets_a_directory_of_its_own(command: Rltool, training: Training, tmp_path: Path) -> None:
    for _ in range(2):
        assert command("train", *RUN).code == 0
    first, second = (call.directory for call in training.calls)
    assert first != second
    assert first.is_absolute()
    assert first.parent == tmp_path / "runs" / "cartpole-ppo"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d-\d\d-\d\d-\d\d-[0-9a-f]{6}", first.name)
    assert sorted(entry.name for entry in first.iterdir()) == ["checkpoints", "config.yaml"]


def test_training_gets_what_was_typed_and_the_tuned_file(command: Rltool, training: Training) -> None:
    words = [*RUN, "optim.lr=1e-3", "+env.kwargs.x=None", "tuned=none"]
    assert command("train", *words).code == 0
    (call,) = training.calls
    assert call.overrides == words
    assert call.tuned is None
    assert call.config.env.kwargs == {"x": None}


def test_training_is_told_the_tuned_file(command: Rltool, training: Training, tmp_path: Path) -> None:
    (tmp_path / "mine" / "tuned").mkdir(parents=True)
    (tmp_path / "mine" / "tuned" / "acrobot-ppo.yaml").write_text("# @package _global_\n# Mine\ntotal_frames: 4321\n")
    (tmp_path / "ours" / "network").mkdir(parents=True)
    (tmp_path / "ours" / "network" / "tiny.yaml").write_text("# Tiny\ndefaults: [mlp, _self_]\nhidden: [4]\n")
    words = ["algo=ppo", "env=acrobot", "network=tiny", "--config-dir", "mine", "hydra.searchpath=[ours]"]
    assert command("train", *words).code == 0
    (call,) = training.calls
    assert (call.tuned, call.config.total_frames) == ("acrobot-ppo", 4321)
    assert call.config.network.model_dump()["hidden"] == [4]


def test_paths_are_relative_to_where_they_were_typed(command: Rltool, training: Training, tmp_path: Path) -> None:
    assert command("train", *RUN, "init=../a b/x=1.ckpt", "hydra.job.chdir=true").code == 0
    (call,) = training.calls
    assert call.config.init == str(tmp_path.parent / "a b" / "x=1.ckpt")
    assert call.directory.is_relative_to(tmp_path / "runs")
    assert Path.cwd() == tmp_path


def test_a_directory_that_holds_a_run_is_refused(command: Rltool, training: Training, tmp_path: Path) -> None:
    assert command("train", *RUN, "hydra.run.dir=same").code == 0
    answer = command("train", *RUN, "hydra.run.dir=same")
    assert answer.code == 2
    assert f"resume={tmp_path / 'same'}" in answer.err
    assert len(training.calls) == 1
    assert (tmp_path / "same" / "checkpoints" / "last.ckpt").exists()


def test_a_directory_without_write_permission_is_refused(
    command: Rltool, training: Training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "closed").mkdir()
    # The super-user may write anywhere, so permission bits alone prove nothing here.
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    answer = command("train", *RUN, "hydra.run.dir=closed")
    assert (answer.code, training.calls) == (2, [])
    assert "no permission to write into" in answer.err
    assert nothing_left(tmp_path / "closed")


def test_a_mistake_found_inside_the_run_leaves_nothing(command: Rltool, training: Training, tmp_path: Path) -> None:
    training.refusal = ConfigError(Problem("algo", "dqn needs discrete actions, found Box", "Use algo=ppo"))
    answer = command("train", *RUN)
    assert answer.code == 2
    assert answer.err == "rltool train: algo: dqn needs discrete actions, found Box. Use algo=ppo\n"
    assert nothing_left(tmp_path)


def test_a_mistake_found_inside_the_run_leaves_what_was_there(
    command: Rltool, training: Training, tmp_path: Path
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").touch()
    training.refusal = ConfigError("no")
    assert command("train", *RUN, "hydra.run.dir=mine").code == 2
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes.txt"]


def test_what_another_process_wrote_meanwhile_is_kept(command: Rltool, training: Training, tmp_path: Path) -> None:
    def refuse(call: Call) -> None:
        raise ConfigError(f"another process is writing into {call.directory}")

    training.fault = refuse
    assert command("train", *RUN, "hydra.run.dir=shared").code == 2
    assert (tmp_path / "shared" / "config.yaml").exists()


def test_what_rltool_can_explain_is_a_plain_line_and_exit_1(
    command: Rltool, training: Training, tmp_path: Path
) -> None:
    training.fault = raising(RltoolError("the loss became NaN at frame 12"))
    answer = command("train", *RUN)
    assert (answer.code, answer.err) == (1, "rltool train: the loss became NaN at frame 12\n")
    assert list(tmp_path.rglob("config.yaml"))


def test_a_full_disk_is_a_plain_line(command: Rltool, training: Training) -> None:
    training.fault = raising(OSError(28, "No space left on device", "runs/x/metrics.jsonl"))
    answer = command("train", *RUN)
    assert (answer.code, answer.err) == (1, "rltool train: runs/x/metrics.jsonl: No space left on device\n")


def test_other_errors_keep_the_part_of_their_traceback_that_is_the_users(command: Rltool, training: Training) -> None:
    training.fault = raising(ZeroDivisionError("in the environment"))
    answer = command("train", *RUN)
    assert answer.code == 1
    assert answer.err.startswith("Traceback")
    assert answer.err.endswith("ZeroDivisionError: in the environment\n")
    assert "hydra" not in answer.err
    assert "launch.py" not in answer.err
    assert "Error executing job" not in answer.all
    full = command("train", *RUN, "debug=true")
    assert "launch.py" in full.err
    assert full.err.count("ZeroDivisionError: in the environment") == 1


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt(), 130), (SystemExit(143), 143)])
def test_interruptions_have_their_exit_codes(
    command: Rltool, training: Training, error: BaseException, code: int
) -> None:
    training.fault = raising(error)
    answer = command("train", *RUN)
    assert answer.code == code
    assert "Traceback" not in answer.err


def test_nothing_of_hydra_stays_set(command: Rltool, training: Training) -> None:
    from hydra.core.global_hydra import GlobalHydra

    argv = list(sys.argv)
    command("train", *RUN)
    assert "HYDRA_FULL_ERROR" not in os.environ
    assert sys.argv == argv
    assert not GlobalHydra.instance().is_initialized()


# ------------------------------------------------------------------------------------------------------------ multirun


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs of a sweep run here, one after the other, where training is a stand-in."""
    from rltool.sweeps import plugins, worker

    def run_all(pool: object, jobs: list[SweepJob]) -> None:
        for job in jobs:
            try:
                worker.run(job)
            except Exception as error:
                worker.tell(job, "failed", f"{type(error).__name__}: {error}")

    monkeypatch.setattr(plugins, "run_all", run_all)


@pytest.mark.usefixtures("in_this_process")
def test_a_sweep_gives_each_job_a_directory(command: Rltool, training: Training, tmp_path: Path) -> None:
    answer = command("train", "-m", "algo=ppo", "env=cartpole,acrobot", "seed=3", "optim.lr=1e-3")
    (sweep,) = (tmp_path / "runs" / "sweeps").iterdir()
    assert [call.directory for call in training.calls] == [sweep / "0", sweep / "1"]
    assert [(call.config.env.model_dump()["id"], call.config.seed) for call in training.calls] == [
        ("CartPole-v1", 3),
        ("Acrobot-v1", 3),
    ]
    assert training.calls[1].overrides == ["algo=ppo", "env=acrobot", "seed=3", "optim.lr=0.001"]
    assert f"sweep: {sweep.relative_to(tmp_path)}" in answer.out


@pytest.mark.usefixtures("in_this_process")
def test_one_failing_job_does_not_stop_the_others(command: Rltool, training: Training) -> None:
    def fault(call: Call) -> None:
        if call.config.seed == 2:
            raise RuntimeError("bad luck")

    training.fault = fault
    answer = command("train", "-m", *RUN, "seed=2,3")
    assert answer.code == 1
    assert [call.config.seed for call in training.calls] == [2, 3]
    assert "RuntimeError: bad luck" in answer.all
    assert "Error executing job" not in answer.all


def test_a_sweep_with_a_mistake_leaves_nothing(command: Rltool, training: Training, tmp_path: Path) -> None:
    answer = command("train", "-m", *RUN, "seed=1,2", "algo.gamma=2")
    assert answer.code == 2
    assert "algo.gamma" in answer.err
    assert nothing_left(tmp_path)
    assert not training.calls


@pytest.mark.usefixtures("in_this_process")
def test_an_interrupted_sweep_stops(command: Rltool, training: Training) -> None:
    training.fault = raising(SystemExit(130))
    assert command("train", "-m", *RUN, "seed=1,2").code == 130
    assert len(training.calls) == 1


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("optim.lr=interval(1e-4,1e-2)", "a grid needs values one by one, found interval(1e-4,1e-2)"),
        ("tune.trials=5", "tune.trials: is for a search, found tune.trials=5"),
    ],
)
def test_what_is_for_a_search_is_refused_in_a_grid(command: Rltool, word: str, told: str, tmp_path: Path) -> None:
    answer = command("train", "-m", *RUN, "seed=1,2", word)
    assert answer.code == 2
    assert told in answer.err
    assert nothing_left(tmp_path)


# -------------------------------------------------------------------------------------------------------------- resume


@dataclass
class Header:
    """What rltool.checkpoint.read_header gives."""

    path: Path
    config: dict[str, object]
    frames: int
    run_directory: Path | None
    passed_over: tuple[str, ...] = ()


@pytest.fixture
def header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Header:
    """A checkpoint of a run of 5000 frames at frame 1000, inside its run directory."""
    from rltool.configfiles import ConfigFiles
    from rltool.launch import check

    words = ["algo=ppo", "env=cartpole", "tuned=none", "++total_frames=5000", "++init='/from/here.ckpt'"]
    config = check(words, ConfigFiles.find_main()).config.model_dump(mode="json")
    directory = tmp_path / "old"
    (directory / "checkpoints").mkdir(parents=True)
    known = Header(directory / "checkpoints" / "last.ckpt", config, 1000, directory)

    def read_header(path: Path) -> Header:
        if path not in (known.path, directory):
            raise CheckpointError(f"there is no file {path}")
        return known

    _replace_module(monkeypatch, "checkpoint", SimpleNamespace(read_header=read_header))
    return known


def test_resume_starts_from_the_checkpoints_configuration(command: Rltool, training: Training, header: Header) -> None:
    answer = command("train", "resume=old", "optim.lr=1e-4", "total_frames=2e4", "logging.interval=2048")
    assert answer.code == 0
    (call,) = training.calls
    assert call.directory == header.run_directory
    assert call.config.resume == str(header.path)
    assert call.config.init is None
    assert (call.config.total_frames, call.config.optim.lr) == (20_000, 1e-4)
    assert call.config.env.model_dump()["id"] == "CartPole-v1"
    assert call.overrides == ["resume=old", "optim.lr=1e-4", "total_frames=2e4", "logging.interval=2048"]
    assert "  total_frames: 5000 → 20000\n" in answer.out
    assert "  optim.lr: 0.0003 → 0.0001\n" in answer.out
    assert "logging.interval" not in answer.out  # typed, but no change


def test_a_checkpoint_from_elsewhere_starts_a_new_run(
    command: Rltool, training: Training, header: Header, tmp_path: Path
) -> None:
    header.run_directory = None
    assert command("train", f"resume={header.path}").code == 0
    assert command("train", f"resume={header.path}", "hydra.run.dir=new").code == 0
    first, second = (call.directory for call in training.calls)
    assert first.parent == tmp_path / "runs" / "CartPole-v1-ppo"
    assert second == tmp_path / "new"


def test_what_a_resumed_run_cannot_change_is_refused_by_name(
    command: Rltool, training: Training, header: Header
) -> None:
    answer = command(
        "train", "resume=old", "algo=dqn", "eval=none", "env.id=Acrobot-v1", "network.hidden=[8]", "optim.kind=sgd",
        "seed=5", "gamma=1", "optim.lr=-1", "~save", "hydra.run.dir=x", "optim.lr=1,2",
    )  # fmt: skip
    assert answer.code == 2
    for text in (
        "algo: a resumed run keeps the algo",
        "eval: a resumed run keeps the eval",
        "gamma: no such key. Did you mean algo.gamma?",
        "optim.lr: expected a number above 0, found -1",
        "save: a resumed run keeps the save",
        "hydra.run.dir: a checkpoint inside a run directory continues there",
        "Add -m",
    ):
        assert text in answer.err, text
    answer = command("train", "resume=old", "env.id=Acrobot-v1", "network.hidden=[8]", "seed=5", "env.backend=async")
    for key in ("env.id", "network.hidden", "seed"):
        assert f"{key}: cannot change on resume" in answer.err
    assert "env.backend" not in answer.err
    assert f"init={header.path}" in answer.err
    assert not training.calls


def test_a_finished_run_says_so(command: Rltool, training: Training, header: Header) -> None:
    header.frames = 5000
    assert header.run_directory is not None
    (header.run_directory / "summary.json").write_text('{"status": "finished"}')
    answer = command("train", "resume=old")
    assert answer.code == 0
    assert "has used its budget of 5,000 frames" in answer.out
    assert "total_frames" in answer.out
    assert not training.calls
    # Killed before it could write down how it ended.
    (header.run_directory / "summary.json").unlink()
    assert command("train", "resume=old").code == 0
    assert len(training.calls) == 1


def test_resume_null_is_no_resume(command: Rltool, training: Training) -> None:
    assert command("train", *RUN, "resume=None").code == 0
    assert [call.config.resume for call in training.calls] == [None]


# ---------------------------------------------------------------------------------------------------------------- eval


REPORT: dict[str, object] = {
    "mean": 480.5, "std": float("nan"), "median": 500.0, "iqm": 495.0, "min": 400.0, "max": 500.0,
    "ci_low": 470.0, "ci_high": 490.0, "success_rate": 0.75, "episodes": 4, "deterministic": True, "seed": 0,
    "returns": [500.0, 500.0, 400.0, 500.0], "lengths": [500, 500, 400, 500], "threshold": 475.0, "cut": 0,
    "env": "CartPole-v1", "checkpoint": "best.ckpt", "device": "cpu", "videos": [], "video_problem": None,
}  # fmt: skip


@pytest.fixture
def evaluation(header: Header, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Stands in for rltool.evaluation; the configurations that it was called with."""
    calls: list[object] = []

    def evaluate_checkpoint(config: object) -> object:
        calls.append(config)
        return SimpleNamespace(to_json=lambda: REPORT, video_problem=REPORT["video_problem"])

    _replace_module(monkeypatch, "evaluation", SimpleNamespace(evaluate_checkpoint=evaluate_checkpoint))
    return calls


def test_eval_prints_a_report_and_writes_it(command: Rltool, evaluation: list[object], tmp_path: Path) -> None:
    answer = command("eval", "checkpoint=old", "out=report.json", "env.kwargs.x=1")
    assert answer.code == 0
    for text in ("480.50 ± –", "470.00 … 490.00", "500.00, 495.00", "400.00 … 500.00", "75% of episodes reach 475"):
        assert text in answer.out
    assert f"written to {tmp_path / 'report.json'}" in answer.out
    written = json.loads((tmp_path / "report.json").read_text())
    assert "changed for this evaluation: env.kwargs.x=1" in answer.out
    assert written.pop("env_config")["kwargs"]["x"] == 1
    assert written == {**REPORT, "std": None, "algo": "ppo", "training_seed": 0, "frames": 1000}
    (config,) = evaluation
    assert (config.checkpoint, config.env) == (str(tmp_path / "old"), {"kwargs": {"x": 1}})  # type: ignore[attr-defined]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["old", "report.json"]


def test_eval_says_where_the_videos_are(
    command: Rltool, evaluation: list[object], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("imageio_ffmpeg")
    monkeypatch.setitem(
        REPORT, "videos", [str(tmp_path / f"old/videos/best/episode-{index}.mp4") for index in range(4)]
    )
    answer = command("eval", "checkpoint=old", "video=true", "device=auto")
    assert answer.code == 0
    assert re.search(r"^videos +4, in old/videos/best$", answer.out, re.MULTILINE)
    assert re.search(r"^device +cpu, chosen by device=auto$", answer.out, re.MULTILINE)


def test_eval_without_its_videos_prints_its_numbers_and_fails(
    command: Rltool, evaluation: list[object], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("imageio_ffmpeg")
    monkeypatch.setitem(REPORT, "videos", [str(tmp_path / "old/videos/best/episode-0.mp4")])
    monkeypatch.setitem(REPORT, "video_problem", "video: drawing CartPole-v1 raised ImportError: no GL")
    answer = command("eval", "checkpoint=old", "video=true", "out=report.json")
    assert answer.code == 1
    assert "480.50 ± –" in answer.out
    assert "1 of 4 episodes, in old/videos/best" in answer.out
    assert answer.err == "rltool eval: video: drawing CartPole-v1 raised ImportError: no GL\n"
    assert json.loads((tmp_path / "report.json").read_text())["mean"] == 480.5


def test_eval_names_the_extra_for_videos_first(
    command: Rltool, evaluation: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    answer = command("eval", "checkpoint=old", "video=true")
    assert (answer.code, evaluation) == (2, [])
    assert "pip install 'rltool[video]'" in answer.err


def test_eval_quiet_is_one_line(command: Rltool, evaluation: list[object]) -> None:
    assert command("eval", "checkpoint=old", "quiet=true").out == "480.50 ± – over 4 episodes\n"


def test_eval_of_several_is_a_table_with_a_row_over_all(
    command: Rltool, dqn_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [tmp_path / f"runs/{name}" for name in ("a", "b", "c")]
    for run in runs:
        (run / "checkpoints").mkdir(parents=True)
        (run / "config.yaml").touch()
        shutil.copy(dqn_run / "checkpoints/last.ckpt", run / "checkpoints/best.ckpt")
    (runs[1] / "checkpoints/best.ckpt").write_bytes(b"nothing")
    shutil.copy(dqn_run / "checkpoints/300.ckpt", runs[2] / "checkpoints/best.ckpt")
    shutil.copytree(runs[0], tmp_path / "runs/d")
    answer = command("eval", "runs", "episodes=4", "out=report.json")
    assert answer.code == 1
    lines = answer.out.splitlines()
    assert lines[0] == "dqn on CartPole-v1, deterministic; success: a return of 475 or more"
    assert all(len(line) <= 80 for line in lines[:-1])
    assert [line.split()[:2] for line in lines[2:6]] == [["run", "seed"], ["a", "0"], ["c", "0"], ["d", "0"]]
    assert lines[6].split()[:2] == ["all", "2"]
    assert "note: d holds the same policy as a, which counts once" in lines
    assert "note: several have seed 0; equal seeds are no independent runs" in lines
    assert "Each row: the same 4 episodes, those of seed 0" in answer.out
    assert "rltool eval, runs/b/checkpoints/best.ckpt: " in answer.err
    assert "1 of 4 checkpoints could not be evaluated" in answer.err
    report = json.loads((tmp_path / "report.json").read_text())
    first, second, third = report["reports"]
    assert first == {**third, "checkpoint": str(runs[0] / "checkpoints/best.ckpt")}
    (overall,) = report["overall"]
    assert overall["mean"] == pytest.approx((first["mean"] + second["mean"]) / 2)
    assert (overall["episodes"], overall["checkpoints"], overall["differing"]) == (8, 2, [])
    assert [failure["checkpoint"] for failure in report["failed"]] == ["runs/b/checkpoints/best.ckpt"]


def test_eval_in_both_modes_is_what_each_says_alone(command: Rltool, ppo_run: Path, tmp_path: Path) -> None:
    common = ("eval", str(ppo_run), "episodes=2", "max_steps=20")
    answer = command(*common, "deterministic=both", "out=both.json")
    assert answer.code == 0
    assert re.search(r"^ +deterministic +sampled$", answer.out, re.MULTILINE)
    reports = json.loads((tmp_path / "both.json").read_text())["reports"]
    for mode, report in zip(("true", "false"), reports, strict=True):
        command(*common, f"deterministic={mode}", "out=one.json")
        assert json.loads((tmp_path / "one.json").read_text()) == report
    assert reports[0]["returns"] != reports[1]["returns"]


def test_eval_keeps_the_episodes_of_one_checkpoint_in_one_mode(command: Rltool, ppo_run: Path, tmp_path: Path) -> None:
    answer = command("eval", str(ppo_run), "episodes=3", "max_steps=20", "trajectories=kept.npz")
    assert (answer.code, f"episodes written to {tmp_path / 'kept.npz'}" in answer.out) == (0, True)
    about = json.loads(str(np.load(tmp_path / "kept.npz")["metadata"]))
    assert (about["env"], about["algo"], about["checkpoint"]) == (
        "Pendulum-v1",
        "ppo",
        str(ppo_run / "checkpoints/best.ckpt"),
    )
    answer = command("eval", str(ppo_run), "deterministic=both", "trajectories=kept.npz")
    assert (answer.code, "trajectories: one file holds the episodes of one checkpoint" in answer.err) == (2, True)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("env.num_envs=0", "env.num_envs: expected a whole number from 1 to 100000, found 0"),
        ("env.ide=x", "env.ide: no such key. Did you mean env.id?"),
        ("out=old", "out: expected a file"),
        ("out=nowhere/x.json", "out: there is no directory"),
        ("trajectories=nowhere/x.npz", "trajectories: there is no directory"),
        ("device=gpu", "device: expected text (auto, cpu, cuda or cuda:N), found 'gpu'"),
    ],
)
def test_eval_refuses_before_the_first_episode(command: Rltool, evaluation: list[object], word: str, said: str) -> None:
    answer = command("eval", "checkpoint=old", word)
    assert (answer.code, evaluation) == (2, [])
    assert said in answer.err


# ---------------------------------------------------------------------------------------------------------- checkpoint


def test_checkpoint_prints_what_a_run_holds(command: Rltool, dqn_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(dqn_run.parent)
    answer = command("checkpoint", dqn_run.name)
    assert answer.code == 0
    lines = answer.out.splitlines()
    # Paths and commands are whole, to be copied; all else fits.
    assert not [line for line in lines if len(line) > 80 and dqn_run.name not in line]
    for pattern in (
        rf"checkpoint +{dqn_run.name}/checkpoints/last\.ckpt",
        r"file +\d+\.\d kB, format 1",
        r"run +dqn on CartPole-v1, network auto, seed \d+",
        r"spaces +observation Box\(4,\) → Discrete\(2\)",
        r"frames +400 of 400; \d+ episodes, 34 updates",
        r"open episodes +yes, .*",
        r"replay buffer +buffer-400\.safetensors: 400 transitions, \d+\.\d kB",
        r"compiled +no",
        r"policy +4 +456 B +\[16\], \[16, 4\], \[2\], \[2, 16\]",
        r"counters +2 +16 B +2 scalars",
        rf"  .*rltool eval checkpoint={dqn_run.name}/checkpoints/last\.ckpt",
        rf"  .*rltool train resume={dqn_run.name} total_frames=800",
    ):
        assert any(re.fullmatch(pattern, line) for line in lines), pattern


def test_checkpoint_prints_json(command: Rltool, ppo_run: Path, dqn_run: Path) -> None:
    file = ppo_run / "checkpoints/best.ckpt"
    found = json.loads(command("checkpoint", str(file), "--json").out)
    assert (found["kind"], found["path"], found["bytes"]) == ("checkpoint", str(file), file.stat().st_size)
    assert (found["algo"], found["env"], found["network"], found["sessions"]) == ("ppo", "Pendulum-v1", "auto", 1)
    assert (found["frames"], found["total_frames"], found["buffer"]) == (352, 352, None)
    assert found["best_evaluation"] == {"mean": found["last_evaluation"], "frames": 352}
    assert found["normalizer"] == {"observation": 352}
    assert found["open_episodes"]
    assert found["tensors"]["policy.log_std"] == {"dtype": "F32", "shape": [1], "bytes": 4}
    assert sum(tensor["bytes"] for tensor in found["tensors"].values()) < found["bytes"]
    assert [word.partition(" ")[2] for word in found["next"]] == [
        f"eval checkpoint={file}",
        f"train resume={file} total_frames=704",
    ]
    beside = json.loads(command("checkpoint", str(dqn_run / "checkpoints/last.ckpt"), "--json").out)["buffer"]
    assert (Path(beside["path"]).name, beside["transitions"]) == ("buffer-400.safetensors", 400)


def test_checkpoint_prints_a_stored_replay_buffer(command: Rltool, dqn_run: Path) -> None:
    file = dqn_run / "checkpoints/buffer-400.safetensors"
    answer = command("checkpoint", str(file))
    assert answer.code == 0
    for pattern in (
        r"transitions +400, of 2 environments side by side",
        r"priorities +none: drawn uniformly",
        r"belongs to +last\.ckpt, 400\.ckpt",
        r"data +5 +\d+\.\d kB +\[400\], 4 × \[400, 1\]",
    ):
        assert re.search(rf"^{pattern}$", answer.out, re.MULTILINE), pattern
    found = json.loads(command("checkpoint", str(file), "--json").out)
    assert (found["kind"], found["transitions"], found["num_envs"], found["steps"]) == ("buffer", 400, 2, 400)
    assert found["tensors"]["data.action"] == {"dtype": "I64", "shape": [400], "bytes": 3200}


def test_checkpoint_says_that_a_moved_file_lacks_its_buffer(command: Rltool, dqn_run: Path, tmp_path: Path) -> None:
    shutil.copy(dqn_run / "checkpoints/last.ckpt", tmp_path / "a b.ckpt")
    answer = command("checkpoint", "a b.ckpt")
    assert answer.code == 0
    assert re.search(r"^replay buffer +no buffer-400\.safetensors beside it", answer.out, re.MULTILINE)
    assert "train 'resume=a b.ckpt'" in answer.out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "expected one path, found none. Give a file or a run directory"),
        (["a.ckpt", "b.ckpt"], "expected one path, found a.ckpt b.ckpt"),
        (["checkpoint=a.ckpt"], "expected one path, found checkpoint=a.ckpt"),
        (["nothing.ckpt"], "there is no file"),
        (["."], "is a directory without checkpoints"),
        (["cut.ckpt"], "is not a whole checkpoint"),
        (["cut.safetensors"], "is not a whole checkpoint"),
        (["weights.safetensors"], "is no stored replay buffer of rltool's"),
        (["cut.ckpt", "--jsn"], "Did you mean --json?"),
    ],
)
def test_checkpoint_refuses_what_is_none(command: Rltool, tmp_path: Path, words: list[str], said: str) -> None:
    save_file({"weight": np.zeros(3)}, tmp_path / "weights.safetensors")
    for name in ("cut.ckpt", "cut.safetensors"):
        (tmp_path / name).write_bytes((tmp_path / "weights.safetensors").read_bytes()[:20])
    answer = command("checkpoint", *words)
    assert (answer.code, answer.out) == (2, "")
    assert said in answer.err


def test_checkpoint_tells_of_damaged_files(command: Rltool, dqn_run: Path, tmp_path: Path) -> None:
    """A bit of the replay buffer and one of the newest checkpoint."""
    directory = shutil.copytree(dqn_run, tmp_path / "run")
    for name in ("buffer-400.safetensors", "last.ckpt"):
        path = directory / "checkpoints" / name
        content = bytearray(path.read_bytes())
        content[-50] ^= 4
        path.write_bytes(content)
    answer = command("checkpoint", str(directory))
    assert answer.code == 0
    assert re.search(r"checkpoint +\S*400\.ckpt", answer.out)
    text = " ".join(answer.out.split())
    assert "passed over" in text
    assert "last.ckpt is not a whole checkpoint" in text
    assert "buffer-400.safetensors is not a whole checkpoint" in text
    assert "collects frames anew before it learns" in text
    told = json.loads(command("checkpoint", str(directory), "--json").out)
    assert len(told["passed_over"]) == 1
    assert "checksum" in told["damaged_buffer"]
    assert told["buffer"] is None
    assert command("checkpoint", str(directory / "checkpoints/buffer-400.safetensors")).code == 2


def test_checkpoint_needs_no_torch(dqn_run: Path, tmp_path: Path) -> None:
    script = (
        "import sys\nfrom rltool.cli import main\n"
        f"code = main(['checkpoint', {str(dqn_run)!r}])\n"
        "sys.exit(str({'torch', 'torchrl', 'tensordict'} & set(sys.modules) or '') or code)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, env=_env())
    assert (done.returncode, done.stderr) == (0, "")


# -------------------------------------------------------------------------------------------------- list, config, shell


@pytest.mark.parametrize("group", ["env", "algo", "network", "buffer", "optim", "logging", "tuned", "experiment"])
def test_list_has_a_line_for_each_option(command: Rltool, group: str) -> None:
    for word in (group, f"{group}s"):
        answer = command("list", word)
        assert answer.code == 0
        assert max(map(len, answer.out.splitlines())) <= 80
        options = {path.stem for path in (ROOT / "conf" / group).glob("*.yaml")}
        assert options <= {line.split()[0] for line in answer.out.splitlines()}


def test_list_shows_ids_and_the_users_own_options(command: Rltool, tmp_path: Path) -> None:
    (tmp_path / "mine" / "env").mkdir(parents=True)
    (tmp_path / "mine" / "env" / "maze.yaml").write_text("# Find the way out\ndefaults: [gym, _self_]\nid: Maze-v3\n")
    out = " ".join(command("list", "envs", "--config-dir", "mine").out.split())
    assert f"maze Find the way out (Maze-v3) [{tmp_path / 'mine' / 'env'}]" in out
    assert "(CartPole-v1)" in out


def test_config_prints_yaml_with_sources(command: Rltool) -> None:
    import yaml

    answer = command("config", *RUN, "tuned=none", "optim.lr=1e-3")
    assert answer.code == 0
    tree = yaml.safe_load(answer.out)
    assert (tree["env"]["id"], tree["optim"]["lr"]) == ("CartPole-v1", 1e-3)
    assert re.search(r"^  lr: 0\.001 +# command line$", answer.out, re.MULTILINE)
    assert re.search(r"^  id: CartPole-v1 +# env/cartpole\.yaml$", answer.out, re.MULTILINE)
    assert yaml.safe_load(command("config", *RUN, "tuned=none", "optim.lr=1e-3", "--yaml").out) == tree
    values = json.loads(command("config", *RUN, "optim.lr=1e-3", "--json").out)
    assert values["optim.lr"] == {"value": 1e-3, "source": "command line"}


def test_config_of_a_resume_says_what_comes_from_the_checkpoint(command: Rltool, header: Header) -> None:
    values = json.loads(command("config", "resume=old", "total_frames=9000", "--json").out)
    assert values["total_frames"] == {"value": 9000, "source": "command line"}
    assert values["env.id"] == {"value": "CartPole-v1", "source": "checkpoint"}


def test_hydras_own_options_work(command: Rltool, tmp_path: Path) -> None:
    answer = command("train", *RUN, "optim.lr=1e-3", "--cfg", "job", "--package", "optim")
    assert answer.code == 0
    assert "lr: 0.001" in answer.out
    assert str(ROOT / "conf") in command("train", *RUN, "--info", "searchpath").all
    assert command("train", "--hydra-help").code == 0
    assert nothing_left(tmp_path)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("rltool ", " ".join(cli.COMMANDS)),
        ("rltool tr", "train"),
        ("rltool train algo=", "algo=dqn algo=ppo algo=sac"),
        ("rltool train -m seed=1,2 env=cart", "env=cartpole"),
        ("rltool train algo=ppo algo.clip_", "algo.clip_epsilon= algo.clip_value="),
        ("rltool train --mul", "--multirun"),
        ("rltool train --nonsense al", ""),
        ("rltool list buf", "buffer"),
        ("rltool eval che", "checkpoint="),
        ("rltool eval runs/a runs/b deter", "deterministic="),
        ("rltool env env=pend", "env=pendulum"),
        ("rltool env env=cartpole che", "check="),
        ("rltool init ", ""),
        ("rltool init --", "--help"),
        ("rltool checkpoint ru", ""),  # the shell completes paths
        ("rltool checkpoint --", "--help --json"),
        ("rltool plot runs/a met", "metric="),
        ("rltool compare a -- b --", "--help --json"),
    ],
)
def test_completion(command: Rltool, monkeypatch: pytest.MonkeyPatch, line: str, expected: str) -> None:
    monkeypatch.setenv("COMP_LINE", line)
    answer = command("-sc", "query=bash")
    assert (answer.code, answer.out.strip()) == (0, expected)


def test_completion_script_is_for_rltool(command: Rltool) -> None:
    assert command("-sc", "install=bash").out.strip().endswith("hydra_bash_completion rltool")


# ------------------------------------------------------------------------------------------------------------------ env

# Every class is registered under its own name; the first keeps the contract, the others break or stretch it.
ENVIRONMENTS = """
import gymnasium, numpy as np

class Sound(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (3,), np.float32)
    action_space = gymnasium.spaces.Box(-1, 1, (), np.float32)
    reward = 1.0
    def observe(self):
        return np.zeros(3, np.float32)
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.observe(), {}
    def step(self, action):
        assert np.shape(action) == (), action
        assert self.action_space.contains(np.asarray(action)), action
        self.t += 1
        return self.observe(), self.reward, self.t == 7, False, {}

class Outside(Sound):
    def observe(self):
        return np.array([0, 3, 0], np.float32)
class NotFinite(Sound):
    def observe(self):
        return np.full(3, np.nan, np.float32)
class Raising(Sound):
    def step(self, action):
        raise RuntimeError("no luck")
class Longer(Sound):
    def observe(self):
        return np.zeros(4, np.float32)
class NoReward(Sound):
    reward = None
class TwoRewards(Sound):
    reward = np.array([1.0, 2.0])
class NoInfo(Sound):
    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed)[0]
class Unseeded(Sound):
    def observe(self):
        return np.random.rand(3).astype(np.float32)
class Unoptioned(Sound):
    def reset(self, *, seed=None, options=None):
        assert options is None, "no options here"
        return super().reset(seed=seed)

class Whole(Sound):
    reward = 1
class Truth(Sound):
    reward = True
class NumPys(Sound):
    reward = np.float64(1)
class Row(Sound):
    reward = np.array([1.0])
class Double(Sound):
    def observe(self):
        return np.zeros(3)
class Unbounded(Sound):
    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (3,), np.float32)
class Nested(Sound):
    observation_space = gymnasium.spaces.Dict(
        a=gymnasium.spaces.Tuple((gymnasium.spaces.Discrete(9), gymnasium.spaces.Box(0, 1, ())))
    )
    def observe(self):
        return {"a": (np.int64(self.t), np.float32(self.t / 8))}
class Wrapping(Sound):
    observation_space = gymnasium.spaces.Box(0, 255, (3,), np.uint8)
    def observe(self):
        return np.full(3, 256)
class NestedOutside(Nested):
    def observe(self):
        return {"a": (np.int64(self.t), np.float32(self.t + 2))}

for cls in [value for value in globals().values() if isinstance(value, type)]:
    gymnasium.registry.pop(f"{cls.__name__}-v0", None)
    gymnasium.register(f"{cls.__name__}-v0", entry_point=cls)
"""


@pytest.fixture
def env_command(command: Rltool, tmp_path: Path) -> Rltool:
    """``rltool env WORDS`` on one of :data:`ENVIRONMENTS`, by the name of its class."""
    (tmp_path / "own_envs.py").write_text(ENVIRONMENTS)

    def call(name: str, *words: str) -> Answer:
        return command("env", "env=gym", f"env.id=own_envs:{name}-v0", "env.num_envs=2", "steps=40", *words)

    return call


def test_env_looks_at_an_environment(command: Rltool, tmp_path: Path) -> None:
    answer = command("env", "env=cartpole", "steps=400", "env.num_envs=2")
    assert answer.code == 0
    for text in (
        "CartPole-v1, 2 side by side",
        "500 steps",
        "475",
        "Discrete(2)",
        "check_env_specs passed",
        "nothing found",
    ):
        assert text in answer.out
    assert re.search(r"400 steps at [\d,]+ steps/s; \d+ episodes ended", answer.out)
    assert nothing_left(tmp_path)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Outside", ["the observation at step 0 is not in its space", "At [1] it is 3, the bounds are -1 … 1. Widen"]),
        ("Wrapping", ["must have shape (3,) and a type that fits uint8, found shape (3,) of int64"]),
        ("NestedOutside", ["a.1 is 2, the bounds are 0 … 1. Widen observation_space, or clip"]),
        ("NotFinite", ["the observation at step 0 is not finite: [nan nan nan]. Look for"]),
        ("Raising", ["step 1 raised RuntimeError: no luck (own_envs.py:28)"]),
        ("Longer", ["must have shape (3,)", "found shape (4,) of float32. Declare the right observation_space"]),
        ("NoReward", ["the reward of step 1 must be one number, found None"]),
        ("TwoRewards", ["the reward of step 1 must be one number, found array([1., 2.])"]),
        ("NoInfo", ["reset() must return (observation, info), found ndarray"]),
        ("Unseeded", ["the same seed gives different first observations. Draw from self.np_random"]),
    ],
)
def test_env_says_what_is_wrong(env_command: Rltool, name: str, said: list[str]) -> None:
    answer = env_command(name)
    assert answer.code == 1
    assert re.search(rf"^wrong +environment 0 \({name}-v0, {name}\): ", answer.out, re.MULTILINE)
    for text in said:
        assert text in answer.out
    assert answer.out.count(said[0]) == 1, "TorchRL's check need not find it once more"
    assert "Traceback" not in answer.all


@pytest.mark.parametrize("name", ["Sound", "Whole", "Truth", "NumPys", "Row", "Double", "Unbounded", "Nested"])
def test_env_finds_nothing_wrong_with_what_training_takes(env_command: Rltool, name: str) -> None:
    answer = env_command(name)
    assert (answer.code, answer.err) == (0, "")
    assert "wrong            nothing found" in answer.out
    assert "rewards          1 … 1 in 40 random steps, 5 episodes ended" in answer.out
    assert "return 7.00 (7.00 … 7.00), length 7.0" in answer.out
    assert ("cast           from float64 to the float32 of its space" in answer.out) == (name == "Double")


def test_a_full_check_asks_gymnasium_too(env_command: Rltool) -> None:
    assert "Gymnasium's check" not in env_command("Unseeded").out
    answer = env_command("Unseeded", "check=full")
    assert answer.code == 1
    assert "Gymnasium's check  failed" in answer.out
    assert (
        "(Unseeded-v0, Unseeded): Gymnasium's check_env: Using `env.reset(seed=123)` is non-deterministic" in answer.out
    )
    assert "Gymnasium's check  check_env passed" in env_command("Sound", "check=full").out


def test_what_gymnasium_only_advises_is_no_failure(env_command: Rltool) -> None:
    answer = env_command("Unbounded", "check=full")
    assert (answer.code, answer.err) == (0, "")
    *_, wrong, low, high = answer.out.splitlines()
    assert wrong == "wrong              nothing found"
    assert low == "warnings           A Box observation space minimum value is -infinity. This is probably too low."
    assert high == "                   A Box observation space maximum value is infinity. This is probably too high."


def test_what_an_environment_raises_under_gymnasiums_check_is_its_own(env_command: Rltool) -> None:
    answer = env_command("Unoptioned", "check=full")
    assert answer.code == 1
    assert "environment 0 (Unoptioned-v0, Unoptioned) raised AssertionError: no options here (" in answer.out
    assert "own_envs.py" in answer.out


# --------------------------------------------------------------------------------------------------------------- Python


def test_train_from_python(training: Training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert rltool.train("algo=ppo", "env=cartpole", "total_frames=1e4")["status"] == "finished"
    (call,) = training.calls
    assert call.config.total_frames == 10_000
    assert call.directory.parent == tmp_path / "runs" / "cartpole-ppo"
    with pytest.raises(ConfigError, match="no such key"):
        rltool.train("algo=ppo", "env=cartpole", "algo.gama=1")
    training.refusal = ConfigError("no")
    with pytest.raises(ConfigError, match="no"):
        rltool.train("algo=ppo", "env=acrobot")
    assert not (tmp_path / "runs" / "acrobot-ppo").exists()


def test_resume_from_python(
    training: Training, header: Header, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rltool.train("resume=old", "total_frames=6000")
    assert training.calls[0].directory == header.run_directory
    header.frames = 5000
    assert header.run_directory is not None
    (header.run_directory / "summary.json").write_text('{"status": "solved"}')
    assert rltool.train("resume=old")["frames"] == 5000
    assert len(training.calls) == 1


def test_importing_rltool_does_nothing() -> None:
    script = "import sys, rltool; print(sorted({'torch', 'hydra', 'pydantic'} & set(sys.modules)), rltool.__version__)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=_env())
    assert done.stdout == f"[] {rltool.__version__}\n"
    assert {"train", "load_policy"} <= set(dir(rltool))
    with pytest.raises(AttributeError, match="nonsense"):
        _ = rltool.nonsense


# ---------------------------------------------------------------------------------------------------------------- smoke


@pytest.mark.long
@pytest.mark.smoke
def test_a_real_multirun_of_two_seeds(command: Rltool, tmp_path: Path) -> None:
    answer = command(
        "train", "-m", *RUN, "seed=0,1", "total_frames=512", "algo.frames_per_batch=256", "algo.minibatch_size=64",
        "algo.epochs=1", "algo.warmup_frames=16", "eval=none", "compile=false", "device=cpu", "tuned=none",
    )  # fmt: skip
    assert answer.code == 0, answer.err
    (sweep,) = (tmp_path / "runs" / "sweeps").iterdir()
    summaries = [json.loads((sweep / str(job) / "summary.json").read_text()) for job in range(2)]
    assert [summary["status"] for summary in summaries] == ["finished", "finished"]
    for job in range(2):
        assert (sweep / str(job) / "checkpoints" / "last.ckpt").is_file()
        assert f"seed={job}" in (sweep / str(job) / "overrides.txt").read_text().splitlines()


def test_runs_started_together_never_share_a_directory(training: Training, tmp_path: Path) -> None:
    """Four claims of one path at the same moment: directories are made once, and given back only by whom they belong to."""
    from rltool.launch import Claim

    barrier = threading.Barrier(4)
    claims: list[Claim] = []

    def claim() -> None:
        barrier.wait()
        claims.append(Claim.make(tmp_path / "runs" / "a" / "b"))

    threads = [threading.Thread(target=claim) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(claims) == 4
    (tmp_path / "runs" / "a" / "b" / "config.yaml").touch()
    for one in claims:
        one.give_back()
    assert (tmp_path / "runs" / "a" / "b" / "config.yaml").exists()


@pytest.fixture(autouse=True)
def _no_plugins_left() -> Iterator[None]:
    yield
    for name in ("own_envs",):
        sys.modules.pop(name, None)

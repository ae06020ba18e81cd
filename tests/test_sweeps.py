"""Sweeps: what is planned is what runs; jobs fail, hang, are killed and go on alone; nothing is left behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from omegaconf import OmegaConf

from rltool.cli import main
from rltool.composition import read_overrides
from rltool.configfiles import ConfigFiles
from rltool.errors import ConfigError
from rltool.records import Record
from rltool.schema import JobsConfig, TuneConfig
from rltool.sweeps import processes
from rltool.sweeps.answer import answer
from rltool.sweeps.children import Child
from rltool.sweeps.jobs import Sweep, SweepJob
from rltool.sweeps.planning import planned
from rltool.sweeps.pool import Pool
from rltool.sweeps.processes import Forked, Interpreter, Order, Start

FILES = ConfigFiles.find_main()
TINY = (
    "algo=ppo", "env=gym", "env.id=probes:Probe-v0", "env.num_envs=1", "env.kwargs.n=5", "total_frames=640", "env.timeout=3",
    "algo.frames_per_batch=64", "algo.minibatch_size=32", "algo.epochs=1", "algo.warmup_frames=16", "eval.interval=128",
    "eval.episodes=2", "eval.num_envs=1", "eval.final_episodes=2", "save.interval=64", "logging=csv", "logging.interval=64",
    "compile=false", "device=cpu",
)  # fmt: skip

# Some seconds of training, with a checkpoint after the first tenth of one.
LONGER = (
    "total_frames=50_000", "env.num_envs=8", "algo.frames_per_batch=512", "algo.minibatch_size=256", "eval=none",
    "save.interval=1024", "logging.interval=1024",
)  # fmt: skip


def plan(path: Path, *words: str) -> Sweep:
    """The sweep of a command line, planned in a directory and not run."""
    typed = ["algo=ppo", "env=cartpole", f"hydra.sweep.dir={path}", *words]
    with planned(typed, read_overrides(typed, FILES, multirun=True), FILES) as it:
        return it.sweep


def titles(sweep: Sweep) -> dict[str, str]:
    return {job.name: job.title for job in sweep.jobs}


# ------------------------------------------------------------------------------------------------------------ planning


def test_each_combination_is_a_job_with_its_whole_configuration(tmp_path: Path) -> None:
    sweep = plan(tmp_path / "s", "seed=0,1", "optim.lr=1e-3,3e-4", "algo.gamma=0.9")
    assert titles(sweep) == {
        "0": "seed=0 optim.lr=0.001",
        "1": "seed=0 optim.lr=0.0003",
        "2": "seed=1 optim.lr=0.001",
        "3": "seed=1 optim.lr=0.0003",
    }
    assert sweep.varied == ("seed", "optim.lr")
    job = sweep.jobs[3]
    assert (job.config["seed"], job.config["optim"]["lr"], job.config["algo"]["gamma"]) == (1, 3e-4, 0.9)  # type: ignore[index,call-overload]
    assert job.status == "waiting"
    assert not any(word.startswith("hydra") for word in job.words)


def test_all_problems_of_all_jobs_are_told_and_nothing_is_left(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        plan(tmp_path / "s", "optim.lr=1e-3,-1", "algo.gamma=0.9,2")
    assert {problem.path for problem in refused.value.problems} == {"optim.lr", "algo.gamma"}
    with pytest.raises(ConfigError, match=r"sweep.jobs: .*found 0"):
        plan(tmp_path / "s", "seed=1,2", "sweep.jobs=0")
    with pytest.raises(ConfigError, match=r"sweep.jobs: expected one value"):
        plan(tmp_path / "s", "seed=1,2", "sweep.jobs=1,2")
    assert not (tmp_path / "s").exists()


def test_what_concerns_a_sweep_is_refused_without_one() -> None:
    (problem,) = read_overrides(["algo=ppo", "env=cartpole", "sweep.jobs=2"], FILES).problems
    assert str(problem) == "sweep.jobs: is for several runs, found sweep.jobs=2. Add -m, or leave it out"


def test_more_jobs_than_anybody_can_mean_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"these values make 1,000,000,000 jobs, and a sweep has at most 100,000"):
        plan(tmp_path / "s", *(f"{key}=range(1000)" for key in ("seed", "algo.epochs", "total_frames")))


def test_names_of_jobs_are_numbers(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"hydra.sweep.subdir: jobs are named by their numbers"):
        plan(tmp_path / "s", "seed=0,1", "hydra.sweep.subdir=x")


@pytest.mark.long
@pytest.mark.rehearsed
def test_what_only_building_a_job_shows_is_told_before_the_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An algorithm that cannot act there, a GPU that is not, weights that do not fit or are not: of all jobs at once."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    (tmp_path / "no.ckpt").touch()
    with pytest.raises(ConfigError) as refused:
        plan(
            tmp_path / "s",
            "algo=ppo,sac", "tuned=none", "compile=false", "device=cuda,cpu", f"init={tmp_path / 'no.ckpt'},null", "seed=0,1",
        )  # fmt: skip
    told = [str(problem) for problem in refused.value.problems]
    assert sorted(text.partition(":")[0] for text in told) == ["algo", "device", "init"]
    assert "sac needs a Box action space with finite bounds; CartPole-v1 has Discrete(2)" in "".join(told)
    assert not (tmp_path / "s").exists()
    assert "building 8 kinds of job once" in capsys.readouterr().out
    assert len(plan(tmp_path / "s", "seed=0,1").jobs) == 2
    plan(tmp_path / "s", "seed=0,1,2")
    assert capsys.readouterr().out.count("building 1 kind of job once") == 2


def test_jobs_that_are_there_keep_their_directories(tmp_path: Path) -> None:
    first = plan(tmp_path / "s", "seed=0,1")
    (first.jobs[1].directory / "summary.json").write_text('{"status": "finished"}')
    second = plan(tmp_path / "s", "seed=1,2,0", "sweep.jobs=1")
    assert {job.name: job.config["seed"] for job in second.jobs} == {"0": 0, "1": 1, "2": 2}
    assert [job.status for job in second.jobs] == ["waiting", "finished", "waiting"]


def test_a_job_that_cannot_be_read_is_left_out_and_told(tmp_path: Path) -> None:
    """It keeps its directory; the job that it was is planned anew beside it."""
    plan(tmp_path / "s", "seed=0,1")
    (tmp_path / "s" / "0" / "job.json").write_text('{"words": [')
    sweep = Sweep.read(tmp_path / "s")
    assert [job.name for job in sweep.jobs] == ["1"]
    assert "0/job.json cannot be read" in sweep.damaged[0]
    assert answer(sweep).notes[0] == f"left out: {sweep.damaged[0]}"
    assert {job.name: job.config["seed"] for job in plan(tmp_path / "s", "seed=0,1").jobs} == {"1": 1, "2": 0}


@pytest.mark.parametrize("content", [pytest.param(None, marks=pytest.mark.long), '{"kind": '])
def test_a_sweep_whose_own_file_is_lost_goes_on(tmp_path: Path, content: str | None) -> None:
    first = plan(tmp_path / "s", "seed=0,1")
    (first.jobs[1].directory / "summary.json").write_text('{"status": "finished"}')
    (first.path / "sweep.json").unlink()
    if content is not None:
        (first.path / "sweep.json").write_text(content)
    again = plan(tmp_path / "s", "seed=0,1,2")
    assert {job.name: job.config["seed"] for job in again.jobs} == {"0": 0, "1": 1, "2": 2}
    assert [job.status for job in again.jobs] == ["waiting", "finished", "waiting"]


def test_jobs_that_are_gone_are_told(tmp_path: Path) -> None:
    for job in plan(tmp_path / "s", "seed=0,1,2,3,4,5,6").jobs[1:]:
        shutil.rmtree(job.directory)
    (note,) = answer(Sweep.read(tmp_path / "s")).notes
    assert note.startswith("gone from the sweep's directory: 1, 2, 3, 4 and 2 more jobs; the same command")
    assert answer(plan(tmp_path / "s", "seed=0,1,2,3,4,5,6")).notes == ()


def test_a_directory_with_other_things_is_refused(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "thesis.tex").touch()
    with pytest.raises(ConfigError, match="expected a new directory, or one with a sweep"):
        plan(tmp_path / "s", "seed=0,1")
    assert [path.name for path in (tmp_path / "s").iterdir()] == ["thesis.tex"]


def test_one_process_runs_a_sweep(tmp_path: Path) -> None:
    typed = ["algo=ppo", "env=cartpole", f"hydra.sweep.dir={tmp_path / 's'}", "seed=0,1"]
    line = read_overrides(typed, FILES, multirun=True)
    with (
        planned(typed, line, FILES),
        pytest.raises(ConfigError, match="another process runs the sweep"),
        planned(typed, line, FILES),
    ):
        pass


def test_config_files_are_copied_before_the_first_job(tmp_path: Path) -> None:
    """Jobs hold their configuration; what a launcher composes once more comes from the copy."""
    own = tmp_path / "own"
    (own / "optim").mkdir(parents=True)
    (own / "optim" / "mine.yaml").write_text("defaults: [adam]\nlr: 0.125\n")
    files = ConfigFiles.find_main((own,))
    typed = ["algo=ppo", "env=cartpole", f"hydra.sweep.dir={tmp_path / 's'}", "seed=0,1", "optim=mine", "tuned=none"]
    with planned(typed, read_overrides(typed, files, multirun=True), files) as it:
        (own / "optim" / "mine.yaml").write_text("no: [yaml")
        assert it.files.read("optim", "mine").node["lr"] == 0.125
        assert it.files.find("env", "cartpole") != files.find("env", "cartpole")
    assert [job.config["optim"]["lr"] for job in it.sweep.jobs] == [0.125, 0.125]  # type: ignore[index,call-overload]


@pytest.mark.long
def test_a_sweep_that_serves_as_config_files_is_copied_without_its_jobs(tmp_path: Path) -> None:
    first = plan(tmp_path / "a", "seed=0")
    for name in ("config.yaml", "metrics.jsonl"):
        (first.jobs[0].directory / name).touch()
    (first.path / "experiment").mkdir()
    (first.path / "experiment" / "best.yaml").write_text("# @package _global_\noptim:\n  lr: 0.125\n")
    files = ConfigFiles.find_main((first.path,))
    typed = ["algo=ppo", "env=cartpole", "experiment=best", "seed=0,1", f"hydra.sweep.dir={tmp_path / 'b'}"]
    with planned(typed, read_overrides(typed, files, multirun=True), files) as it:
        (copy,) = it.files.extra
        assert [path.relative_to(copy) for path in copy.rglob("*.*")] == [Path("experiment/best.yaml")]


# ---------------------------------------------------------------------------------------------------------------- pool


def sharing(**changes: object) -> JobsConfig:
    config = {"jobs": "auto", "jobs_per_gpu": 1, "memory": None, "timeout": None, "fail_fast": False}
    return JobsConfig.model_validate(config | changes)


class Fake:
    """A child that runs until it is told how it ended."""

    def __init__(self, job: SweepJob, gpu: str | None) -> None:
        self.job, self.gpu, self.code, self.peak, self.size = job, gpu, None, 0, 2**20
        self.asked_to_end, self.on_cpu, self.seconds, self.reason = False, False, 1.0, None

    code: int | None
    keep_within = Child.keep_within

    def memory(self) -> int:
        self.peak = max(self.peak, self.size)
        return self.size

    def end(self, reason: str = "") -> None:
        self.asked_to_end, self.reason = True, reason
        self.code = 143

    def kill(self) -> None:
        self.code = -9

    def wait(self) -> int:
        assert self.code is not None
        return self.code


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """Four cores, two GPUs, and as much memory as a test says."""
    has: dict[str, object] = {"cores": 4, "gpus": ["0", "1"], "free": 2**34}
    for name in ("cores", "gpus"):
        monkeypatch.setattr(f"rltool.sweeps.pool.{name}", lambda name=name: has[name])
    monkeypatch.setattr("rltool.sweeps.pool.free_memory", lambda: has["free"])
    monkeypatch.setattr("rltool.sweeps.pool._PAUSE", 0.0)
    return has


def job(tmp_path: Path, name: str, **config: object) -> SweepJob:
    made = SweepJob(tmp_path / name, (), {}, {"threads": 1, "device": "cpu", **config})  # type: ignore[dict-item]
    made.write()
    return made


def filled(tmp_path: Path, config: JobsConfig, *jobs: SweepJob) -> Pool:
    pool = Pool(config, start=Fake)  # type: ignore[arg-type]
    for one in jobs:
        pool.add(one)
    pool.step()
    return pool


def test_no_more_jobs_run_than_there_are_cores_for_their_threads(tmp_path: Path, machine: dict[str, object]) -> None:
    ones = [job(tmp_path, str(number)) for number in range(6)]
    assert len(filled(tmp_path, sharing(), *ones).running) == 4
    assert len(filled(tmp_path, sharing(jobs=6), *ones).running) == 6
    twos = [job(tmp_path, str(number), threads=2) for number in range(6)]
    assert len(filled(tmp_path, sharing(), *twos).running) == 2
    workers = [job(tmp_path, str(number), env={"backend": "async", "num_envs": 16}) for number in range(2)]
    assert len(filled(tmp_path, sharing(), *workers).running) == 1


def test_gpus_are_shared_evenly_and_no_further_than_asked(tmp_path: Path, machine: dict[str, object]) -> None:
    jobs = [job(tmp_path, str(number), device="auto") for number in range(4)]
    pool = filled(tmp_path, sharing(), *jobs)
    assert [child.gpu for child in pool.running] == ["0", "1"]
    pool.running[0].on_cpu = True  # it has said that the CPU is faster for it
    pool.step()
    assert [child.gpu for child in pool.running] == ["0", "1", "0"]
    assert [child.gpu for child in filled(tmp_path, sharing(), *[job(tmp_path, "c")]).running] == [None]


def test_the_next_job_begins_when_one_has_ended(tmp_path: Path, machine: dict[str, object]) -> None:
    pool = filled(tmp_path, sharing(jobs=1), job(tmp_path, "0"), job(tmp_path, "1"))
    pool.running[0].code = 3  # type: ignore[misc]
    assert [one.name for one in pool.step()] == ["0"]
    assert [child.job.name for child in pool.running] == ["1"]
    assert pool.ended == {tmp_path / "0": 3}


def test_fail_fast_ends_the_others(tmp_path: Path, machine: dict[str, object]) -> None:
    pool = filled(tmp_path, sharing(jobs=2, fail_fast=True), *[job(tmp_path, str(number)) for number in range(4)])
    pool.running[1].code = 1  # type: ignore[misc]
    assert [one.name for one in pool.step()] == ["1"]
    assert not pool.busy
    assert pool.ended == {tmp_path / "1": 1, tmp_path / "0": 143}


def test_jobs_that_take_too_long_or_too_much_are_ended(tmp_path: Path, machine: dict[str, object]) -> None:
    pool = filled(tmp_path, sharing(timeout=10, memory=1), *[job(tmp_path, str(number)) for number in range(3)])
    slow, large, fine = pool.running
    slow.seconds, large.size = 11.0, 2**31  # type: ignore[misc,attr-defined]
    pool.step()
    assert slow.reason == "it took longer than sweep.timeout=10 seconds"  # type: ignore[attr-defined]
    assert large.reason == "it used 2.0 GiB, more than sweep.memory=1"  # type: ignore[attr-defined]
    assert not fine.asked_to_end


def test_where_memory_runs_out_the_largest_begins_again_later(tmp_path: Path, machine: dict[str, object]) -> None:
    pool = filled(tmp_path, sharing(), *[job(tmp_path, str(number)) for number in range(3)])
    notes: list[str] = []
    pool.note = notes.append
    pool.running[1].size = 2**30  # type: ignore[attr-defined]
    machine["free"] = 2**20
    pool.step()
    machine["free"] = 2**34
    assert pool.step() == []  # it has ended, and is not done
    assert [child.job.name for child in pool.running] == ["0", "2"]
    assert [one.name for one in pool.waiting] == ["1"]
    assert "job 1, with 1.0 GiB the largest, is put back, and 2 run at a time" in notes[0]
    pool.running[0].code = 0  # type: ignore[misc]
    assert [one.name for one in pool.step()] == ["0"]
    assert [child.job.name for child in pool.running] == ["2", "1"]


# ------------------------------------------------------------------------------------------------------- real processes


def started(directory: Path, *words: str) -> subprocess.Popen[str]:
    """``rltool train -m`` of tiny runs in a process of its own, in which Ctrl-C works."""
    return subprocess.Popen(
        [sys.executable, "-m", "rltool", "train", "-m", *TINY, f"hydra.sweep.dir={directory}", *words],
        cwd=Path(__file__).parent, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        env={**os.environ, "PYTHONPATH": f"{Path(__file__).parents[1]}:{Path(__file__).parent}"},
    )  # fmt: skip


def swept(directory: Path, *words: str) -> tuple[int, str]:
    process = started(directory, *words)
    out, _ = process.communicate(timeout=240)
    return process.returncode, out


def workers(directory: Path) -> list[psutil.Process]:
    """The processes of a sweep's jobs that are alive."""
    found = []
    for process in psutil.process_iter():
        try:
            told = [*process.cmdline(), *(file.path for file in process.open_files())]  # a job's output lies there
            if any(str(directory) in word for word in told) and process.pid != os.getpid():
                found.append(process)
        except psutil.Error:
            continue
    return found


def wait_for(condition: object, seconds: float = 60.0) -> None:
    assert callable(condition)
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it never came true"
        time.sleep(0.05)


@pytest.mark.long
def test_a_job_that_raises_dies_or_hangs_touches_no_other(tmp_path: Path) -> None:
    sweep = tmp_path / "s"
    code, out = swept(sweep, "env.kwargs.at=200", "env.kwargs.fault=null,raise,die,sleep", "env.timeout=2", "eval=none")
    records = {job.varied["env.kwargs.fault"]: job for job in Sweep.read(sweep).jobs}
    assert {fault: job.status for fault, job in records.items()} == {
        None: "finished", "raise": "failed", "die": "failed", "sleep": "failed",
    }  # fmt: skip
    assert code == 1
    assert "ZeroDivisionError: the probe broke" in (records["raise"].directory / "log.txt").read_text()
    assert "the probe broke" in records["raise"].console.read_text()
    assert "exit code 9" in str(records["die"].record.summary["error"])
    assert "gave no answer" in records["sleep"].console.read_text()
    assert "3 of 4" in out
    assert not workers(sweep)


@pytest.mark.long
def test_jobs_equal_the_single_run_in_any_order(tmp_path: Path) -> None:
    for name, seeds in (("a", "seed=3,4"), ("b", "seed=4,3")):
        code, out = swept(tmp_path / name, seeds, "env.kwargs.obs=noise")
        assert code == 0, out
    runs = {(name, job.config["seed"]): job.record for name in "ab" for job in Sweep.read(tmp_path / name).jobs}
    single = subprocess.run(
        [sys.executable, "-m", "rltool", "train", *TINY, "seed=3", "env.kwargs.obs=noise", f"hydra.run.dir={tmp_path / 'single'}"],
        cwd=Path(__file__).parent, env={**os.environ, "PYTHONPATH": f"{Path(__file__).parents[1]}:{Path(__file__).parent}"},
        check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert single.returncode == 0, single.stderr

    def learned(record: Record) -> list[dict[str, float]]:
        return [{key: value for key, value in point.items() if not key.startswith("time/")} for point in record.points]

    assert learned(runs["a", 3]) == learned(runs["b", 3]) == learned(Record(tmp_path / "single"))
    assert learned(runs["a", 4]) == learned(runs["b", 4])
    assert learned(runs["a", 3]) != learned(runs["a", 4])


@pytest.mark.long
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL], ids=lambda how: how.name)
def test_a_sweep_that_was_cut_off_leaves_no_process_and_goes_on(tmp_path: Path, how: signal.Signals) -> None:
    sweep = tmp_path / "s"
    words = ("seed=0,1", *LONGER, "sweep.jobs=1")
    process = started(sweep, *words)
    wait_for(lambda: (sweep / "0" / "checkpoints" / "last.ckpt").exists())
    process.send_signal(how)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == {"SIGINT": 130, "SIGKILL": -9}[how.name], out
    wait_for(lambda: not workers(sweep), 20)
    jobs = Sweep.read(sweep).jobs
    assert [job.status for job in jobs] == ["interrupted", "waiting"]
    frames = jobs[0].record.frames
    assert 0 < frames < 50_000
    code, out = swept(sweep, *words)
    assert code == 0, out
    jobs = Sweep.read(sweep).jobs
    assert [job.status for job in jobs] == ["finished", "finished"]
    assert "resumed" in (jobs[0].directory / "log.txt").read_text()
    before = [(job.directory / "summary.json").stat().st_mtime_ns for job in jobs]
    code, out = swept(sweep, *words)
    assert code == 0, out
    assert [(job.directory / "summary.json").stat().st_mtime_ns for job in jobs] == before


@pytest.mark.long
def test_a_killed_job_is_told_and_goes_on_when_the_sweep_is_started_again(tmp_path: Path) -> None:
    sweep = tmp_path / "s"
    words = ("seed=0,1", *LONGER, "sweep.jobs=1")
    process = started(sweep, *words)
    wait_for(lambda: (sweep / "0" / "checkpoints" / "last.ckpt").exists())
    for worker in workers(sweep):
        if worker.name() == "rltool 0":
            worker.kill()
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 1, out
    jobs = Sweep.read(sweep).jobs
    assert [job.status for job in jobs] == ["killed", "finished"]
    assert "SIGKILL" in json.loads((sweep / "0" / "summary.json").read_text())["error"]
    assert "SIGKILL" in out
    code, out = swept(sweep, *words)
    assert code == 0, out
    assert [job.status for job in Sweep.read(sweep).jobs] == ["finished", "finished"]


@pytest.mark.long
def test_a_job_that_is_called_off_is_pruned_and_is_not_run_again(tmp_path: Path) -> None:
    sweep = tmp_path / "s"
    words = ("seed=0", "total_frames=1_000_000")
    process = started(sweep, *words)
    wait_for(lambda: (sweep / "0" / "checkpoints" / "last.ckpt").exists())
    (sweep / "0" / "stop").touch()
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0, out
    (job,) = Sweep.read(sweep).jobs
    assert job.status == "pruned"
    assert job.record.frames < 1_000_000
    assert swept(sweep, *words)[0] == 0
    assert OmegaConf.load(job.directory / "config.yaml").total_frames == 1_000_000


@pytest.mark.long
@pytest.mark.parametrize("start", [Interpreter, Forked])
def test_who_starts_a_job_ends_it_by_dying(tmp_path: Path, start: Start) -> None:
    """Standard input of the job is held by who started it."""
    sweep = plan(tmp_path / "s", "seed=0", "total_frames=10_000_000", "save.interval=1000", "eval=none")
    child = Child(sweep.jobs[0], start=start)
    wait_for(lambda: (sweep.jobs[0].directory / "checkpoints" / "last.ckpt").exists())
    assert child.code is None
    child._process.let_go()
    assert child._process.wait(30) == 143
    assert child.code == 143
    assert sweep.jobs[0].status == "interrupted"


def test_the_help_page_of_train_tells_what_sweeps_have(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help"]) == 0
    page = capsys.readouterr().out
    keys = [f"sweep.{name}=" for name in JobsConfig.model_fields] + [
        f"tune.{name}=" for name in TuneConfig.model_fields
    ]
    assert not [key for key in (*keys, "hydra/launcher=slurm", "hydra/sweeper=tune") if key not in page]


@pytest.mark.parametrize("words", ["seed=range(0)", "seed=range(0,5,0)"])
def test_values_that_are_none_are_refused(words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="seed: expected at least one value, found none in range"):
        plan(tmp_path / "s", words)
    assert not (tmp_path / "s").exists()


@pytest.mark.long
def test_a_job_that_repeats_another_is_left_out(tmp_path: Path) -> None:
    """One run is one seed, however often it was typed; seeds that are drawn are all different."""
    assert titles(plan(tmp_path / "s", "seed=0,0,1")) == {"0": "seed=0", "1": "seed=1"}
    assert len(plan(tmp_path / "drawn", "seed=null,null").jobs) == 2


@pytest.mark.long
def test_jobs_that_are_not_asked_for_are_not_run_again(tmp_path: Path) -> None:
    plan(tmp_path / "s", "seed=0,1")
    typed = ["algo=ppo", "env=cartpole", f"hydra.sweep.dir={tmp_path / 's'}", "seed=1,2", "quiet=true"]
    with planned(typed, read_overrides(typed, FILES, multirun=True), FILES) as it:
        assert [job.name for job in it.jobs] == ["1", "2"]  # quiet changes nothing of what is learned
        assert "1 of 2 jobs are there already, 0 done; 1 that are not asked for stay as they are" in it.told


@pytest.mark.long
def test_rows_are_configurations_whatever_was_typed(tmp_path: Path) -> None:
    """Sessions with other words in one directory: no row holds runs of two configurations, and a default is its value."""
    for words in (["seed=0,1"], ["seed=0,1", "algo.gamma=0.5"], ["seed=0", "optim.lr=0.001,0.125"]):
        plan(tmp_path / "s", "tuned=none", *words)
    (ranking,) = answer(Sweep.read(tmp_path / "s")).rankings
    found = {(row.values["optim.lr"], row.values["algo.gamma"]): len(row.results) for row in ranking.ranked}
    assert found == {(3e-4, 0.99): 2, (3e-4, 0.5): 2, (0.001, 0.99): 1, (0.125, 0.99): 1}


def test_a_path_that_is_none_stays_so_among_others(tmp_path: Path) -> None:
    (typed,) = read_overrides(["init=a.ckpt,null"], FILES, multirun=True, choices_allowed=False).typed
    assert typed.values[1] == "null"
    assert typed.values[0].strip("'").endswith("/a.ckpt")


def test_a_search_for_whole_numbers_between_any_is_refused(tmp_path: Path) -> None:
    """Both ends are whole, what lies between is not."""
    with pytest.raises(ConfigError, match=r"algo.epochs: expected a whole number"):
        plan(tmp_path / "s", "hydra/sweeper=tune", "algo.epochs=interval(1,5)")
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize("start", [Interpreter, pytest.param(Forked, marks=pytest.mark.long)])
def test_a_process_is_one_of_its_own(tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own session, variables, output, directory and exit code; a second one knows nothing of the first."""
    (tmp_path / "errand.py").write_text(
        "import os, sys\n"
        "seen = []\n"
        "def main(words):\n"
        "    seen.append(words[0])\n"
        "    print(seen, os.environ.get('ERRAND'), os.environ.get('HOME'), os.getcwd(), os.getsid(0) == os.getpid(), flush=True)\n"
        "    print(sys.argv[1:], file=sys.stderr)\n"
        "    os.read(0, 1)\n"  # until it is left alone
        "    return int(words[0])\n"
        "if __name__ == '__main__':\n"
        "    sys.exit(main(sys.argv[1:]))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    environment = {name: value for name, value in os.environ.items() if name != "HOME"}
    environment |= {"PYTHONPATH": str(tmp_path), "PYTHONUNBUFFERED": "1"}
    for code in ("3", "4"):
        output = tmp_path / f"{code}.txt"
        output.write_text("before\n")
        process = start(Order("errand", (code,), {**environment, "ERRAND": f"e{code}"}, output, tmp_path))
        wait_for(lambda text=output: text.read_text().count("\n") == 3)  # type: ignore[misc]
        assert process.poll() is None
        process.let_go()
        process.let_go()
        assert process.wait(30) == process.poll() == int(code)
        assert sorted(output.read_text().splitlines()) == sorted(
            ["before", f"['{code}'] e{code} None {tmp_path} True", f"['{code}']"]
        )
    killed = start(Order("errand", ("0",), environment, tmp_path / "killed.txt"))
    assert killed.wait(0.1) is None
    processes.kill(killed)
    assert killed.wait(30) == -signal.SIGKILL


def test_where_no_signal_asks_a_process_is_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Windows, of which nothing else is here."""
    (tmp_path / "patient.py").write_text(
        "import os, subprocess, sys\n"
        "print(subprocess.Popen(['sleep', '60'], stdin=subprocess.DEVNULL).pid, flush=True)\n"
        "os.read(0, 1)\n"
        "sys.exit(5)\n"
    )
    monkeypatch.setattr(sys, "platform", "win32")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    both = [Interpreter(Order("patient", (), environment, tmp_path / f"{number}.txt")) for number in range(2)]
    wait_for(lambda: all((tmp_path / f"{number}.txt").read_text().endswith("\n") for number in range(2)))
    below = [psutil.Process(int((tmp_path / f"{number}.txt").read_text())) for number in range(2)]
    processes.kill(both[0])
    processes.end(both[1])
    assert [process.wait(30) for process in both] == [-signal.SIGKILL, 5]
    assert below[1].is_running()
    below[1].kill()
    assert not psutil.wait_procs(below[:1], timeout=5)[1]


def test_where_no_server_can_be_had_each_job_is_a_new_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> None:
        raise OSError("AF_UNIX path too long")

    monkeypatch.setattr(processes, "_serve", nowhere)
    assert processes.several() is Interpreter

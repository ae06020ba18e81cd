"""Launchers of Hydra's plugins: what is checked, what they are told, and sweeps through submitit, Slurm's commands and Ray."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from omegaconf import OmegaConf
from test_sweeps import FILES, LONGER, TINY, plan, started, swept, titles, wait_for, workers

from rltool.errors import ConfigError
from rltool.records import Record
from rltool.schema import JobsConfig
from rltool.sweeps import alone
from rltool.sweeps.jobs import Sweep, SweepJob
from rltool.sweeps.launchers import fill
from rltool.sweeps.watching import Watch

LAUNCHERS = ("slurm", "slurm_local", "ray")


def has(plugin: str) -> bool:
    try:
        return __import__(f"hydra_plugins.{plugin}") is not None
    except ImportError:
        return False


needs_submitit = pytest.mark.skipif(not has("hydra_submitit_launcher"), reason="the extra slurm is not installed")
needs_ray = pytest.mark.skipif(not has("hydra_ray_launcher"), reason="the extra ray is not installed")


# ------------------------------------------------------------------------------------------------------------- checked


@pytest.mark.parametrize(("launcher", "extra"), [("slurm_local", "slurm"), ("ray", "ray")])
def test_a_launcher_that_is_not_installed_names_its_extra(
    launcher: str, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rltool.sweeps.launchers._is_installed", lambda package: False)
    with pytest.raises(
        ConfigError, match=rf"hydra/launcher: {launcher} needs a package .*pip install 'rltool\[{extra}\]'"
    ):
        plan(tmp_path / "s", "seed=0,1", f"hydra/launcher={launcher}")
    assert not (tmp_path / "s").exists()


@pytest.mark.long
def test_slurm_is_used_where_there_is_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rltool.sweeps.launchers._is_installed", lambda package: True)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs sbatch and srun.*hydra/launcher=slurm_local"):
        plan(tmp_path / "s", "seed=0,1", "hydra/launcher=slurm")
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    assert len(plan(tmp_path / "s", "seed=0,1", "hydra/launcher=slurm").jobs) == 2


@pytest.mark.long
def test_what_only_the_local_launcher_looks_at_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rltool.sweeps.launchers._is_installed", lambda package: True)
    with pytest.raises(ConfigError) as refused:
        plan(
            tmp_path / "s", "seed=0,1", "hydra/launcher=ray", "sweep.jobs=2", "sweep.fail_fast=true", "sweep.timeout=9"
        )
    jobs, fail_fast = refused.value.problems
    assert str(jobs).endswith("found sweep.jobs=2 with hydra/launcher=ray. Give hydra.launcher.ray.init.num_cpus")
    assert fail_fast.path == "sweep.fail_fast"
    assert titles(plan(tmp_path / "s", "seed=0,1", "sweep.jobs=2", "sweep.fail_fast=true"))


# ---------------------------------------------------------------------------------------------------------------- told


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_each_file_of_a_launcher_says_what_its_plugin_wants(launcher: str) -> None:
    """No key that the plugin does not know, and none of its keys left out."""
    plugin = {"slurm": "submitit_slurm", "slurm_local": "submitit_local", "ray": "ray"}[launcher]
    package = "hydra_ray_launcher._config" if launcher == "ray" else "hydra_submitit_launcher.config"
    pytest.importorskip(f"hydra_plugins.{package}")
    from hydra.core.config_store import ConfigStore

    theirs = OmegaConf.create(ConfigStore.instance().load(f"hydra/launcher/{plugin}.yaml").node)
    ours = FILES.read("hydra/launcher", launcher).node
    assert ours["_target_"] == theirs._target_
    extra = {"max_num_timeout"} if launcher == "slurm_local" else set()
    assert set(ours) == {*map(str, theirs)} | extra
    assert all(option in ours["ray"] for option in ("init", "remote")) if launcher == "ray" else True  # type: ignore[operator]


def filled(launcher: str, needed: int, *words: str) -> object:
    tree = OmegaConf.create({"hydra": {"launcher": dict(FILES.read("hydra/launcher", launcher).node)}})
    tree.merge_with_dotlist([f"hydra.launcher.{word}" for word in words])
    OmegaConf.set_struct(tree, True)
    fill(tree, needed)
    return tree.hydra.launcher


def test_a_job_is_given_the_cores_that_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rltool.sweeps.launchers.cores", lambda: 4)
    assert filled("slurm", 16).cpus_per_task == 16  # type: ignore[attr-defined]
    assert filled("slurm", 16, "cpus_per_task=2").cpus_per_task == 2  # type: ignore[attr-defined]
    assert filled("slurm", 16, "cpus_per_gpu=8").cpus_per_task is None  # type: ignore[attr-defined]
    ray = filled("ray", 2).ray  # type: ignore[attr-defined]
    assert (ray.remote.num_cpus, ray.init.num_cpus) == (2, 4)
    assert filled("ray", 16).ray.init.num_cpus == 16  # type: ignore[attr-defined]  # or the job would never begin
    assert filled("ray", 2, "ray.init.address=auto").ray.init.num_cpus is None  # type: ignore[attr-defined]


# --------------------------------------------------------------------------------------------------------- one by one


class Fake:
    """A job's process that runs until it is asked to end."""

    def __init__(self, job: SweepJob, gpu: str | None, origin: Path, *, inside: bool) -> None:
        self.job, self.code = job, None

    code: int | None

    def memory(self) -> int:
        os.kill(os.getpid(), signal.SIGTERM)
        return 0

    def keep_within(self, config: JobsConfig, size: int) -> None:
        pass

    def end(self) -> None:
        self.code = 143


def test_a_signal_that_is_passed_over_is_followed_by_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Slurm and submitit do it: SIGTERM, which nobody acts upon, then SIGUSR2, which puts the task back into the queue."""
    SweepJob(tmp_path, (), {}, {}).write()
    sharing = JobsConfig(jobs="auto", jobs_per_gpu=1, memory=None, timeout=None, fail_fast=False)
    seen: list[int] = []

    class Requeued(BaseException):
        pass

    def requeue(number: int, frame: object) -> None:
        raise Requeued

    def wait(seconds: float) -> None:
        if seconds == alone._PATIENCE:
            os.kill(os.getpid(), signal.SIGUSR2)

    monkeypatch.setattr(alone, "Child", Fake)
    monkeypatch.setattr(time, "sleep", wait)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR2)}
    try:
        signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
        signal.signal(signal.SIGUSR2, requeue)
        with pytest.raises(Requeued):
            alone.run_alone(tmp_path, tmp_path, sharing)
        assert seen == [signal.SIGTERM]
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with pytest.raises(SystemExit) as left:
            alone.run_alone(tmp_path, tmp_path, sharing)
        assert left.value.code == 143
        (tmp_path / "summary.json").write_text('{"status": "finished", "objective": 7.5}')
        signal.signal(signal.SIGTERM, lambda number, frame: None)
        assert alone.run_alone(tmp_path, tmp_path, sharing) == 7.5  # it was done: nothing is to follow
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_how_jobs_end_somewhere_else_is_told_once(tmp_path: Path) -> None:
    jobs = [SweepJob(tmp_path / str(number), (), {"seed": number}, {}) for number in range(2)]
    for job in jobs:
        job.write()
    (jobs[0].directory / "summary.json").write_text('{"status": "failed", "error": "before"}')
    lines: list[str] = []
    with Watch(jobs, lines.append) as watch:
        (jobs[1].directory / "summary.json").write_text('{"status": "failed", "error": "it broke"}')
        watch._look()
        (jobs[1].directory / "overrides.txt").write_text("# resumed at frame 2,064\n")
        (jobs[1].directory / "summary.json").write_text('{"status": "running"}')
    assert lines == ["job 1 (seed=1)  failed  it broke", "job 1 (seed=1)  goes on from its checkpoint"]


# ----------------------------------------------------------------------------------------------------- real processes


def statuses(sweep: Path) -> list[str]:
    return [job.status for job in Sweep.read(sweep).jobs]


def learned(record: Record) -> list[dict[str, float]]:
    return [{key: value for key, value in point.items() if not key.startswith("time/")} for point in record.points]


def process_of(sweep: Path, job: str) -> psutil.Process:
    """The process of a job."""
    return next(
        one for one in workers(sweep) if "rltool.sweeps.worker" in one.cmdline() and str(sweep / job) in one.cmdline()
    )


def begun(sweep: Path, *jobs: str) -> bool:
    return all((sweep / job / "checkpoints" / "last.ckpt").exists() for job in jobs)


@pytest.mark.long
@needs_submitit
def test_submitit_runs_what_the_local_launcher_runs_and_a_preempted_job_goes_on(tmp_path: Path) -> None:
    """Job 0 raises; the task of job 1 is told to end as Slurm would tell it, and is started again as Slurm would start it."""
    words = (*LONGER, "env.kwargs.fault=raise", "env.kwargs.at=200,1_000_000,1_000_001", "env.kwargs.obs=noise")
    sweep = tmp_path / "s"
    process = started(sweep, "hydra/launcher=slurm_local", *words)
    wait_for(lambda: begun(sweep, "1"))
    task = process_of(sweep, "1").parent()
    assert task is not None
    task.send_signal(signal.SIGUSR2)
    out, _ = process.communicate(timeout=240)
    assert process.returncode == 1, out
    assert statuses(sweep) == ["failed", "finished", "finished"], out
    assert "job 1 (at=1000000)  goes on from its checkpoint" in out
    assert "job 1 (at=1000000)  finished" in out
    assert "resumed" in (sweep / "1" / "log.txt").read_text()
    told = "".join(path.read_text() for path in (sweep / ".submitit").rglob("*log.out"))
    assert told.count("Requeued job") == 1, told
    assert not workers(sweep)
    code, out = swept(tmp_path / "local", *words)
    assert code == 1, out
    assert statuses(tmp_path / "local") == statuses(sweep)
    for name in "02":  # an episode that was open when a job was told to end begins anew
        assert learned(Record(tmp_path / "local" / name)) == learned(Record(sweep / name))


@pytest.mark.long
@needs_submitit
def test_slurm_is_told_what_jobs_need_and_goes_on_when_the_command_is_interrupted(tmp_path: Path) -> None:
    """With commands in place of Slurm's that take jobs and never run them."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, says in (("sbatch", "Submitted batch job 4711"), ("srun", ""), ("sacct", "JobID|State|NodeList")):
        (tools / name).write_text(f'#!/bin/sh\n[ -f "$1" ] && cp "$1" {tmp_path / "script"}\necho "{says}"\n')
        (tools / name).chmod(0o755)
    sweep = tmp_path / "s"
    process = subprocess.Popen(
        [sys.executable, "-m", "rltool", "train", "-m", *TINY, f"hydra.sweep.dir={sweep}", "seed=0,1,2", "threads=2",
         "hydra/launcher=slurm", "hydra.launcher.partition=gpu", "hydra.launcher.gpus_per_node=1"],
        cwd=Path(__file__).parent, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        env={**os.environ, "PYTHONPATH": f"{Path(__file__).parents[1]}:{Path(__file__).parent}",
             "PATH": f"{tools}:{os.environ['PATH']}"},
    )  # fmt: skip
    wait_for(lambda: (sweep / ".submitit").is_dir() and len(list((sweep / ".submitit").glob("4711_*"))) == 3)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130, out
    assert "scancel 4711" in out
    assert "rltool sweep" in out
    flags = dict(re.findall(r"#SBATCH --([\w-]+)=?(.*)", (tmp_path / "script").read_text()))
    wanted = {"array": "0-2%3", "cpus-per-task": "2", "gpus-per-node": "1", "mem": "4GB", "partition": "gpu", "requeue": "",
              "signal": "USR2@120", "time": "240", "open-mode": "append"}  # fmt: skip
    assert wanted.items() <= flags.items()


@pytest.mark.long
@pytest.mark.parametrize(
    "launcher", [pytest.param("slurm_local", marks=needs_submitit), pytest.param("ray", marks=needs_ray)]
)
def test_what_runs_here_ends_with_the_command_and_goes_on_when_it_is_started_again(
    launcher: str, tmp_path: Path
) -> None:
    sweep = tmp_path / "s"
    words = (f"hydra/launcher={launcher}", "seed=0,1", *LONGER)
    process = started(sweep, *words)
    wait_for(lambda: begun(sweep, "0", "1"), 120)
    here = [process_of(sweep, "0"), *psutil.Process(process.pid).children(recursive=True)]
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130, out
    assert not [one for one in psutil.wait_procs(here, timeout=5)[1] if one.status() != psutil.STATUS_ZOMBIE]
    assert statuses(sweep) == ["interrupted", "interrupted"], out
    code, out = swept(sweep, *words)
    assert code == 0, out
    assert statuses(sweep) == ["finished", "finished"]
    assert "resumed" in (sweep / "0" / "log.txt").read_text()


@pytest.mark.long
@needs_ray
def test_ray_runs_what_the_local_launcher_runs_and_loses_no_job(tmp_path: Path) -> None:
    """Two at a time. Of job 0 the process is killed; of job 1 Ray's worker, as if its node were gone."""
    sweep = tmp_path / "s"
    words = ("seed=0,1,2", "env.kwargs.obs=noise", *LONGER)
    process = started(sweep, "hydra/launcher=ray", "hydra.launcher.ray.init.num_cpus=2", *words)
    wait_for(lambda: begun(sweep, "0", "1"), 120)
    here = psutil.Process(process.pid).children(recursive=True)
    job, worker = process_of(sweep, "1"), process_of(sweep, "1").parent()
    assert not (sweep / "2" / "config.yaml").exists()
    assert job.environ()["OMP_NUM_THREADS"] == "1"
    assert worker is not None
    process_of(sweep, "0").kill()
    worker.kill()
    out, _ = process.communicate(timeout=240)
    assert process.returncode == 1, out
    assert statuses(sweep) == ["killed", "finished", "finished"], out
    assert "SIGKILL" in str(Record(sweep / "0").error)
    assert "resumed" in (sweep / "1" / "log.txt").read_text()
    assert not workers(sweep)
    assert not [one for one in psutil.wait_procs(here, timeout=10)[1] if one.status() != psutil.STATUS_ZOMBIE]
    code, out = swept(tmp_path / "local", *words)
    assert code == 0, out
    assert learned(Record(tmp_path / "local" / "2")) == learned(Record(sweep / "2"))


@pytest.mark.long
def test_jobs_one_after_the_other_in_one_process_touch_no_other(tmp_path: Path) -> None:
    sweep = tmp_path / "s"
    code, out = swept(
        sweep, "hydra/launcher=basic", "env.kwargs.at=200", "env.kwargs.fault=raise,die,null", "eval=none"
    )
    assert code == 1, out
    assert statuses(sweep) == ["failed", "failed", "finished"], out

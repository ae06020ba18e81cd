"""Launchers of Hydra's plugins (Slurm, Ray, …): checked before anything is written, told what jobs need, waited for.

How a job ended is read from its directory. What a launcher returns or raises says less: it is not told of a run that failed, and
it may raise for one job while others still run.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, flag_override

from rltool.composition import Composition, Line, quoted
from rltool.errors import Problem, RltoolError
from rltool.figures import counted
from rltool.importing import extra_for
from rltool.sweeps.children import GRACE
from rltool.sweeps.jobs import SweepJob
from rltool.sweeps.pool import cores, cores_of
from rltool.sweeps.watching import Watch

OURS = "hydra_plugins.rltool."
_SLURM = "hydra_plugins.hydra_submitit_launcher.submitit_launcher.SlurmLauncher"
# What only our own launcher looks at (a search counts its batches with sweep.jobs), and what does the same in others.
_LOCAL = ("jobs", "jobs_per_gpu", "fail_fast")
_INSTEAD = {
    ("jobs", "SlurmLauncher"): "hydra.launcher.array_parallelism",
    ("jobs", "RayLauncher"): "hydra.launcher.ray.init.num_cpus",
    ("jobs_per_gpu", "RayLauncher"): "hydra.launcher.ray.remote.num_gpus, a fraction",
}
# Ray's usage statistics; and that it kills, with a worker that leaves, the job's process before that has saved its checkpoint.
_RAY_OFF = ("RAY_USAGE_STATS_ENABLED", "RAY_kill_child_processes_on_worker_exit")
_WORKER = "rltool.sweeps.worker"


def runs_here(composition: Composition) -> bool:
    """Whether it is our own launcher that runs jobs like this one."""
    return _target_of(composition).startswith(OURS)


def _target_of(composition: Composition) -> str:
    return str(OmegaConf.select(composition.hydra, "hydra.launcher._target_"))


def problems_of(composition: Composition, line: Line) -> Iterator[Problem]:
    """What is wrong with the choice of a launcher.

    Args:
        composition: of a job.
        line: what was typed.
    """
    if runs_here(composition):
        return
    target, choice = _target_of(composition), composition.choices.get("hydra/launcher", "")
    package = ".".join(target.split(".")[:2])
    if package != "hydra._internal" and not _is_installed(package):
        text = f"{choice} needs a package that is not installed: {package.partition('.')[2].replace('_', '-')}"
        yield Problem("hydra/launcher", text, extra_for(package) or "Install it")
    elif target == _SLURM and not (shutil.which("sbatch") and shutil.which("srun")):
        hint = "Start it where jobs are handed to Slurm, or try it here with hydra/launcher=slurm_local"
        yield Problem("hydra/launcher", f"{choice} needs sbatch and srun, and they are not on this machine", hint)
    for name in _LOCAL:
        typed = line.get(f"sweep.{name}")
        if typed is not None and not (name == "jobs" and composition.choices.get("hydra/sweeper") == "tune"):
            text = f"is for hydra/launcher=local, found {typed.word} with hydra/launcher={choice}"
            instead = _INSTEAD.get((name, target.rpartition(".")[2]))
            yield Problem(f"sweep.{name}", text, f"Give {instead}" if instead else "Leave it out")


class Elsewhere:
    """A launcher of somebody else's.

    Args:
        hydra_context, task_function, config: as Hydra hands them to sweepers.
        note: is told what is decided, a line each time.
    """

    def __init__(
        self,
        *,
        hydra_context: HydraContext,
        task_function: TaskFunction,
        config: DictConfig,
        note: Callable[[str], object] = print,
    ) -> None:
        self._context, self._task, self._config, self._note = hydra_context, task_function, config, note
        self._target = str(config.hydra.launcher._target_)
        self._name = str(config.hydra.runtime.choices["hydra/launcher"])

    def launch(self, jobs: Sequence[SweepJob]) -> list[JobReturn]:
        """Runs jobs to their end; how each ended stands in its directory.

        What ends this ends the jobs that run on this machine, each after its batch; those that Slurm has go on.

        Raises:
            RltoolError: the launcher cannot start them.
        """
        for name in _RAY_OFF:
            os.environ.setdefault(name, "0")
        fill(self._config, max(cores_of(job) for job in jobs))
        launcher = Plugins.instance().instantiate_launcher(self._context, self._task, self._config)
        words = [words_of(job) for job in jobs]
        before = self._tasks()
        self._say_what_begins(jobs)
        with Watch(jobs, self._note) as watch, _no_result_is_no_reason_to_leave(self._target, self._note):
            try:
                launcher.launch(words, 0)
            except Exception as error:
                end_what_is_here(self._note)
                reason = " ".join(str(error).split()) or type(error).__name__
                raise RltoolError(f"hydra/launcher={self._name} cannot go on: {reason}") from error
            except BaseException:
                watch.close()
                end_what_is_here(self._note)
                self._say_what_goes_on(self._tasks() - before)
                raise
        return [returned(one, job) for one, job in zip(words, jobs, strict=True)]

    def _say_what_begins(self, jobs: Sequence[SweepJob]) -> None:
        text = f"{counted(len(jobs), 'job')}, handed to {self._name}"
        needed = sum(cores_of(job) for job in jobs)
        if self._target.endswith("submitit_launcher.LocalLauncher") and needed > cores():
            text += f", which runs them all at once, for {needed} cores (this machine has {cores()})"
        self._note(text)

    def _tasks(self) -> set[str]:
        """The numbers that Slurm has given to what this sweep has handed to it."""
        if self._target != _SLURM:
            return set()
        folder = Path(str(self._config.hydra.launcher.submitit_folder)).parent
        names = {path.name.partition("_")[0] for path in folder.glob("*/")}  # beside the pickles of submitit
        return {name for name in names if name.isdigit()}

    def _say_what_goes_on(self, tasks: set[str]) -> None:
        if tasks:
            self._note(
                f"Slurm goes on with the jobs; to end them, each with a checkpoint: scancel {' '.join(sorted(tasks))}"
            )


def fill(config: DictConfig, needed: int) -> None:
    """Puts into Hydra's configuration of a launcher what it leaves open (null): the cores of a job, and of a local Ray.

    Args:
        config: Hydra's whole configuration.
        needed: cores of the job that needs the most.
    """
    node = config.hydra.launcher
    ray = OmegaConf.select(node, "ray")
    with flag_override(config, ["readonly", "struct"], False):
        if "cpus_per_task" in node and node.cpus_per_task is None and node.get("cpus_per_gpu") is None:
            node.cpus_per_task = needed
        if ray is not None and ray.remote.get("num_cpus") is None:
            ray.remote.num_cpus = needed
        if ray is not None and ray.init.get("address") == "local" and ray.init.get("num_cpus") is None:
            ray.init.num_cpus = max(cores(), needed)


def words_of(job: SweepJob) -> list[str]:
    """The overrides of a job for a launcher."""
    return [*job.words, f"hydra.sweep.subdir={quoted(job.name)}"]


def returned(words: Sequence[str], job: SweepJob) -> JobReturn:
    """What Hydra is told of a job."""
    result = JobReturn(overrides=list(words), status=JobStatus.COMPLETED)
    result.return_value = job.record.summary.get("objective")
    return result


def end_what_is_here(note: Callable[[str], object] = str) -> None:
    """Ends all that this process has started on this machine: first those that run jobs, whereupon each job saves a checkpoint
    and ends by itself (it notices that its starter is gone)."""
    here = psutil.Process().children(recursive=True)
    jobs = [process for process in here if _is_job(process)]
    if jobs:
        note(f"ending {counted(len(jobs), 'job')}, each after its batch")
    spared = {one for job in jobs for one in (job, *_below(job))}
    ray = sys.modules.get("ray")
    if ray is not None:
        ray.shutdown()
    for process in here:
        if process not in spared:
            with suppress(psutil.Error):
                process.kill()
    _, left = psutil.wait_procs(jobs, timeout=GRACE)
    for process in left:
        with suppress(psutil.Error):
            process.kill()


@contextmanager
def _no_result_is_no_reason_to_leave(target: str, note: Callable[[str], object]) -> Iterator[None]:
    """The launchers of submitit and Ray ask for one result after the other and raise at the first that is none (a task that was
    killed, that has used up its time), while the others still run. They offer no other way: what they ask is answered here."""

    def tolerant(ask: Callable[..., Any], none: object) -> Callable[..., Any]:
        def answer(of: Any) -> Any:
            try:
                return ask(of)
            except Exception as error:
                first = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
                note(f"{type(error).__name__}: {first.strip()}")
                return none

        return answer

    with ExitStack() as stack:
        for package, module, name, none in (
            ("hydra_submitit_launcher", "submitit", "Job.results", [None]),
            ("hydra_ray_launcher", "ray", "get", None),
        ):
            if f".{package}." in target:
                owner: Any = import_module(module)
                *path, last = name.split(".")
                for part in path:
                    owner = getattr(owner, part)
                stack.callback(setattr, owner, last, getattr(owner, last))
                setattr(owner, last, tolerant(getattr(owner, last), none))
        yield


def _is_installed(package: str) -> bool:
    with suppress(ModuleNotFoundError):
        return find_spec(package) is not None
    return False


def _is_job(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return _WORKER in process.cmdline()
    return False


def _below(process: psutil.Process) -> list[psutil.Process]:
    with suppress(psutil.Error):
        return list(process.children(recursive=True))
    return []

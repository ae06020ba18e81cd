"""Jobs side by side on this machine: as many as its cores, its GPUs and its memory allow. No torch, no Hydra."""

from __future__ import annotations

import os
import subprocess
import time
from collections import Counter, deque
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

from rltool.memory import free_memory
from rltool.schema import JobsConfig
from rltool.sweeps.children import Child
from rltool.sweeps.jobs import SweepJob

# Backends of environments that take a core for each of them.
_PARALLEL = ("async", "threads", "envpool")
# With less free than that, in bytes, the machine comes to a standstill, or kills whatever it likes.
_LEAST_FREE = 400 * 2**20
# Seconds between looks at memory, which cost milliseconds.
_PAUSE = 1.0


class Pool:
    """Runs jobs, each in a process of its own.

    Args:
        config: how they share the machine.
        note: is told what is decided, a line each time.
        start: starts a job, on a GPU by name or wherever it likes.

    Attributes:
        waiting, running: the jobs that have not begun, and those that have.
        ended: exit codes by directory.
        limit: why no more jobs run at a time, in words.
    """

    def __init__(
        self,
        config: JobsConfig,
        note: Callable[[str], object] = str,
        start: Callable[[SweepJob, str | None], Child] = Child,
    ) -> None:
        self._config, self.note, self._start = config, note, start
        self.waiting: deque[SweepJob] = deque()
        self.running: list[Child] = []
        self.ended: dict[Path, int] = {}
        self._cores, self._gpus = cores(), gpus()
        self._most, self._peak, self._looked = float("inf"), 0, 0.0
        self.limit = self._in_words()

    def add(self, job: SweepJob) -> None:
        """Puts a job at the end of the queue."""
        self.waiting.append(job)

    @property
    def busy(self) -> bool:
        """Whether jobs wait or run."""
        return bool(self.waiting or self.running)

    @property
    def has_room(self) -> bool:
        """Whether another job like the last one could begin now."""
        return not self.waiting and (not self.running or self.room(self.running[-1].job))

    def holds(self, jobs: Collection[SweepJob]) -> bool:
        """Whether any of the jobs waits or runs."""
        there = {job.directory for job in (*self.waiting, *(child.job for child in self.running))}
        return any(job.directory in there for job in jobs)

    def withdraw(self, jobs: Collection[SweepJob]) -> None:
        """Takes jobs out of those that wait."""
        self.waiting = deque(job for job in self.waiting if job not in jobs)

    def room(self, job: SweepJob) -> bool:
        """Whether a job could begin now."""
        if not self.running:
            return True
        taken = len(self.running)
        if taken >= self._most:
            return False
        if isinstance(self._config.jobs, int):
            if taken >= self._config.jobs:
                return False
        elif sum(cores_of(child.job) for child in self.running) + cores_of(job) > self._cores:
            return False
        if self._gpus and _may_use_gpu(job) and self._emptiest()[1] >= self._config.jobs_per_gpu:
            return False
        free = free_memory()
        return free is None or free > max([self._peak, *(child.peak for child in self.running)]) + _LEAST_FREE

    def step(self) -> list[SweepJob]:
        """Starts what there is room for, looks after what runs; returns the jobs that have ended since the last call."""
        ended = [child for child in self.running if child.code is not None]
        self.running = [child for child in self.running if child not in ended]
        done = []
        for child in ended:
            self._peak = max(self._peak, child.peak)
            if child.job in self.waiting:  # it is to begin again
                continue
            code = child.code
            assert code is not None
            self.ended[child.job.directory] = code
            done.append(child.job)
        if self._config.fail_fast and any(self.ended[job.directory] for job in done) and self.busy:
            self.note(f"job {done[0].name} failed: the others are stopped (sweep.fail_fast)")
            self.close()
        while self.waiting and self.room(self.waiting[0]) and not self._held_back():
            job = self.waiting.popleft()
            self.running.append(self._start(job, self._emptiest()[0] if self._gpus and _may_use_gpu(job) else None))
        self._look_after()
        return done

    def close(self) -> None:
        """Asks every job to save a checkpoint and end, and waits for that; interrupted meanwhile, it kills them at once."""
        self.waiting.clear()
        try:
            while True:
                for child in self.running:
                    if child.code is None:
                        child.end()
                if all(child.code is not None for child in self.running):
                    break
                time.sleep(0.05)
        except BaseException:
            for child in self.running:
                child.kill()
                child.wait()
            raise
        finally:
            self.ended |= {child.job.directory: child.wait() for child in self.running}
            self.running = []

    def _held_back(self) -> bool:
        """Whether a job that was put back has not ended yet: it lets go of its directory first."""
        return any(child.job is self.waiting[0] for child in self.running)

    def _look_after(self) -> None:
        """Ends what takes too long or uses too much; where memory runs out, the largest job begins again later."""
        config, now = self._config, time.monotonic()
        if now - self._looked < _PAUSE:
            return
        self._looked = now
        sizes = {child: child.memory() for child in self.running}
        for child in self.running:
            if child.gpu is not None and not child.on_cpu:
                child.on_cpu = (child.job.record.logged("device") or "").startswith("cpu")
        for child, size in sizes.items():
            child.keep_within(config, size)
        free = free_memory()
        left = [child for child in self.running if not child.asked_to_end]
        if free is not None and free < _LEAST_FREE and len(left) > 1 and len(left) == len(self.running):
            largest = max(left, key=lambda child: sizes[child])
            self._most = len(left) - 1
            self.note(
                f"memory runs out ({free / 2**20:.0f} MiB free): job {largest.job.name}, with {sizes[largest] / 2**30:.1f} GiB the "
                f"largest, is put back, and {self._most} run at a time from now on"
            )
            self.waiting.append(largest.job)
            largest.end()

    def _emptiest(self) -> tuple[str, int]:
        """The GPU with the fewest jobs, and how many it has; a job that has said that the CPU is faster counts for none."""
        taken = Counter(child.gpu for child in self.running if not child.on_cpu)
        gpu = min(self._gpus, key=lambda name: taken[name])
        return gpu, taken[gpu]

    def _in_words(self) -> str:
        if isinstance(self._config.jobs, int):
            return f"sweep.jobs={self._config.jobs}"
        words = f"{self._cores} core{'s' * (self._cores > 1)}"
        if self._gpus:
            words += f", and {len(self._gpus)} GPU{'s' * (len(self._gpus) > 1)} with sweep.jobs_per_gpu={self._config.jobs_per_gpu}"
        return words


def cores() -> int:
    """Cores that this process may use: those it is bound to, or fewer where a control group limits its time."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        count = min(count, max(int(quota) // int(period), 1))  # "max" is no number
    return count


def gpus() -> list[str]:
    """NVIDIA GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name for name in visible.split(",") if name and name != "-1"]
    with suppress(OSError, subprocess.SubprocessError):
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=10, check=True).stdout
        return [str(number) for number, line in enumerate(listed.splitlines()) if line.startswith("GPU ")]
    return []


def cores_of(job: SweepJob) -> int:
    """Cores that a job takes."""
    env, threads = job.config.get("env"), job.config.get("threads")
    count = threads if isinstance(threads, int) else 1
    if isinstance(env, dict) and env.get("backend") in _PARALLEL and isinstance(envs := env.get("num_envs"), int):
        count = max(count, envs)
    return count


def _may_use_gpu(job: SweepJob) -> bool:
    return job.config.get("device") != "cpu"

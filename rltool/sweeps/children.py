"""A job's process, seen by whoever started it: how it is started, what it may use, how it is ended. No torch, no Hydra."""

from __future__ import annotations

import signal
import time
from contextlib import suppress
from datetime import datetime
from pathlib import Path

import psutil

from rltool.schema import JobsConfig
from rltool.sweeps import processes
from rltool.sweeps.jobs import SweepJob
from rltool.sweeps.processes import Interpreter, Order, Start, surroundings
from rltool.sweeps.worker import LEASH, tell

# Seconds for a batch and a checkpoint, once a job was asked to end.
GRACE = 60.0


class Child:
    """The process of a job, started as this is made; in a session of its own, so that Ctrl-C reaches only who started it.

    Args:
        job: what it runs.
        gpu: the only GPU that it sees; None: all there are.
        origin: where the user's own modules may lie; None: the working directory.
        inside: the job's directory is its working directory (hydra.job.chdir).
        start: makes the process.

    Attributes:
        job, gpu: see above.
        started: seconds of a clock that only goes forward.
        frames_before: what the run had then.
        on_cpu: whether the run was seen to say that it needs no GPU.
        peak: the most bytes of memory that it and its own processes were seen to use.
    """

    def __init__(
        self,
        job: SweepJob,
        gpu: str | None = None,
        origin: Path | None = None,
        *,
        inside: bool = False,
        start: Start = Interpreter,
    ) -> None:
        self.job, self.gpu = job, gpu
        self.started, self.peak = time.monotonic(), 0
        self.frames_before = job.record.frames
        self.on_cpu = False
        self._reason, self._asked = "", 0.0
        environment = surroundings(job.config.get("threads", 1))
        if gpu is not None:
            environment["CUDA_VISIBLE_DEVICES"] = gpu
        with open(job.console, "ab") as console:
            console.write(f"--- {datetime.now():%Y-%m-%d %H:%M:%S} {job.title}\n".encode())
        words = (str(job.directory), str(origin or Path.cwd()), LEASH)
        self._process = start(
            Order("rltool.sweeps.worker", words, environment, job.console, job.directory if inside else None)
        )
        self._is_over = False

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self.started

    @property
    def code(self) -> int | None:
        """Its exit code, negative for a signal that ended it; None while it runs. What it left undone is done then."""
        code = self._process.poll()
        if code is not None and not self._is_over:
            self._is_over = True
            self._end_of(code)
        return code

    @property
    def asked_to_end(self) -> bool:
        """Whether :meth:`end` was called."""
        return self._asked > 0

    def memory(self) -> int:
        """Bytes that it and its own processes have in memory."""
        total = 0
        with suppress(psutil.Error):
            process = psutil.Process(self._process.pid)
            for one in (process, *process.children(recursive=True)):
                with suppress(psutil.Error):
                    total += one.memory_info().rss
        self.peak = max(self.peak, total)
        return total

    def end(self, reason: str = "") -> None:
        """Asks it to save a checkpoint and end; what has not ended within :data:`GRACE` seconds after is killed by the next
        call.

        Args:
            reason: why, where that makes the job a failure.
        """
        if not self._asked:
            self._asked, self._reason = time.monotonic(), reason
            processes.end(self._process)
        elif time.monotonic() - self._asked > GRACE:
            self.kill()

    def keep_within(self, config: JobsConfig, size: int) -> None:
        """Ends it where it takes too long or uses too much, and what was asked to end and has not ended in time.

        Args:
            config: how much is too much.
            size: bytes that it has in memory now.
        """
        if self.asked_to_end:
            self.end()
        elif config.memory is not None and size > config.memory * 2**30:
            self.end(f"it used {size / 2**30:.1f} GiB, more than sweep.memory={config.memory:g}")
        elif config.timeout is not None and self.seconds > config.timeout:
            self.end(f"it took longer than sweep.timeout={config.timeout:g} seconds")

    def kill(self) -> None:
        """Ends it and its own processes at once."""
        processes.kill(self._process)

    def wait(self) -> int:
        """Waits for the end; returns the exit code."""
        self._process.wait()
        code = self.code
        assert code is not None
        return code

    def _end_of(self, code: int) -> None:
        """Ends what it left behind, and writes down what it could not."""
        self.kill()
        self._process.let_go()
        if self._reason:
            tell(self.job, "failed", self._reason)
        elif self._asked and self.job.status == "waiting":
            pass  # it was told to end before it had begun: it still waits
        elif code < 0:
            name = signal.Signals(-code).name
            more = ", often because memory ran out" if name == "SIGKILL" else f"; see {self.job.console.name}"
            tell(self.job, "killed", f"its process was ended by {name}{more}")
        elif code and self.job.status in ("waiting", "running", "killed", "unknown") and code < 128:
            tell(self.job, "failed", f"its process ended with exit code {code}; see {self.job.console.name}")

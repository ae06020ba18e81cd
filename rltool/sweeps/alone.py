"""One job for a launcher that is not ours: Slurm's tasks and Ray's workers run each job as the local pool does, in a process."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from rltool.schema import JobsConfig
from rltool.sweeps.children import Child
from rltool.sweeps.jobs import DONE, SweepJob

# Seconds between two looks at what a signal has asked for, and at the time and memory that the job takes.
_TICK, _PAUSE = 0.2, 1.0
# Seconds to wait for what follows a signal that was passed over.
_PATIENCE = 600.0
_SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1", "SIGUSR2") if hasattr(signal, name))


def run_alone(directory: Path, origin: Path, config: JobsConfig, *, inside: bool = False) -> float | None:
    """Runs the job of a directory to its end; returns the objective, None where there is none.

    A signal that tells this process to end has the job save a checkpoint first; then whoever had set a handler for that signal
    is called (submitit puts the task back into the queue).

    Args:
        directory: the job's.
        origin: where the sweep was started.
        config: how long the job may take, and how much memory.
        inside: see :class:`Child`.

    Raises:
        SystemExit: after a signal that nobody else handles.
    """
    child, looked = Child(SweepJob.read(directory), None, origin, inside=inside), 0.0
    try:
        with _noted() as asked:
            while child.code is None:
                if asked:
                    child.end()
                elif time.monotonic() - looked > _PAUSE:
                    looked = time.monotonic()
                    child.keep_within(config, child.memory())
                time.sleep(_TICK)
    finally:
        if child.code is None:
            child.end()
            child.wait()
    for number, handler in asked.items():
        if callable(handler):
            handler(number, None)
        elif handler is signal.SIG_DFL:
            raise SystemExit(128 + number)
    job = SweepJob.read(directory)
    if asked and job.status not in DONE:
        # submitit passes over SIGTERM, with which Slurm begins a preemption and a cancellation: then come the signal upon which
        # submitit puts the task back into the queue, or SIGKILL. A task that had left by then would count as done.
        time.sleep(_PATIENCE)
        raise SystemExit(128 + next(iter(asked)))
    objective = job.record.summary.get("objective")
    return float(objective) if isinstance(objective, int | float) else None


_Asked = dict[int, Callable[[int, FrameType | None], object] | int | None]


@contextmanager
def _noted() -> Iterator[_Asked]:
    """The signals that come while it lasts, and the handlers that they had before."""
    asked: _Asked = {}
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    previous = {number: signal.getsignal(number) for number in _SIGNALS}

    def note(number: int, frame: FrameType | None) -> None:
        del frame
        asked.setdefault(number, previous[signal.Signals(number)])

    for number in _SIGNALS:
        signal.signal(number, note)
    try:
        yield asked
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)

"""What becomes of jobs that run somewhere else, told line by line from what they write into their directories."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Self

from rltool.sweeps.board import TOLD, named, told
from rltool.sweeps.jobs import SweepJob

# Seconds between two looks; the files may lie on another machine.
_PAUSE = 2.0
_ENDLESS = ("waiting", "running")


class Watch:
    """Says how jobs end, and that they go on, while a launcher has this thread; used as a context manager.

    Args:
        jobs: those to look at.
        note: is told, a line each time.
    """

    def __init__(self, jobs: Sequence[SweepJob], note: Callable[[str], object]) -> None:
        self._jobs, self._note = jobs, note
        self._known = {job.directory: _stamp(job) for job in jobs}
        self._sessions = {job.directory: len(job.record.resumed) for job in jobs}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look_on, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
        self._look()

    def close(self) -> None:
        """Looks no more by itself; a second call changes nothing."""
        self._over.set()
        self._thread.join()

    def _look_on(self) -> None:
        last = time.monotonic()
        while not self._over.wait(_PAUSE):
            self._look()
            if time.monotonic() - last > TOLD:
                last = time.monotonic()
                counts = Counter(job.status for job in self._jobs)
                self._note(", ".join(f"{count} {status}" for status, count in counts.most_common()))

    def _look(self) -> None:
        for job in self._jobs:
            # A job that was put off may go on before anybody has looked how it ended.
            sessions = len(job.record.resumed)
            if sessions > self._sessions[job.directory]:
                self._sessions[job.directory] = sessions
                self._note(f"{named(job)}  goes on from its checkpoint")
            stamp = _stamp(job)
            if stamp != self._known[job.directory] and job.status not in _ENDLESS:
                self._known[job.directory] = stamp
                self._note(told(job))


def _stamp(job: SweepJob) -> int:
    """Changes when a job writes down how it ended; 0 before."""
    with suppress(OSError):
        return (job.directory / "summary.json").stat().st_mtime_ns
    return 0

"""How a sweep goes, for a person: a line a job on a terminal that is redrawn, elsewhere a line when a job ends."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import datetime
from itertools import islice
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from rltool.figures import counted, duration, number
from rltool.sweeps.children import Child
from rltool.sweeps.jobs import SweepJob
from rltool.sweeps.pool import Pool

# Seconds between two looks at the processes, and at the files of the jobs.
_TICK, _PAUSE = 0.1, 1.0
# Seconds between two lines that say how far a sweep is, where nothing is redrawn.
TOLD = 300.0
# Lines around the jobs.
_FRAME = 3
# The column of a row that says what its job is, and the letters that it keeps.
_TITLE, _LEAST = 2, 8


class Board:
    """Looks after a pool at work, and shows it; used as a context manager: whatever ends that ends the jobs.

    Args:
        pool: the jobs that wait and run.
        total: how many jobs there will be; None where nobody knows.
        console: where to; standard output by default.
    """

    def __init__(self, pool: Pool, total: int | None, console: Console | None = None) -> None:
        self._pool, self._total = pool, total
        self._console = console or Console(file=sys.stdout, highlight=False, emoji=False)
        self._live: Live | None = None
        self._ended: list[SweepJob] = []
        self._seen = self._told = time.monotonic()
        self._begun = time.monotonic()

    def __enter__(self) -> Self:
        self._pool.note = self.note
        if self._console.is_terminal:
            self._live = Live(console=self._console, auto_refresh=False, vertical_overflow="crop", transient=True)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
        if error is not None:
            running = counted(len(self._pool.running), "job")
            self.note(f"ending {running}, each after its batch; Ctrl-C again: at once")
            self._pool.close()

    def turn(self) -> None:
        """Starts what there is room for, says what has ended, and waits a moment."""
        self.ended(self._pool.step())
        self.show()
        time.sleep(_TICK)

    def note(self, text: str) -> None:
        """A line that stays."""
        if self._console.is_terminal:
            self._console.print(text, markup=False)
        else:
            self._console.print(f"{datetime.now():%H:%M:%S}  {text}", markup=False, soft_wrap=True)

    def ended(self, jobs: Sequence[SweepJob]) -> None:
        """Says how jobs have ended."""
        for job in jobs:
            self._ended.append(job)
            self.note(told(job))

    def show(self) -> None:
        """Draws anew, where it is time to."""
        now = time.monotonic()
        if self._live is not None and now - self._seen >= _PAUSE:
            self._seen = now
            self._live.update(self._drawn(), refresh=True)
        elif self._live is None and now - self._told >= TOLD:
            self._told = now
            self.note(", ".join([self._counts(), *islice(self._progress(), 8)]))

    def _progress(self) -> Iterator[str]:
        for child in self._pool.running:
            record = child.job.record
            yield f"job {child.job.name} at {record.frames:,} frames"

    def _counts(self) -> str:
        counts = Counter(job.status for job in self._ended)
        done = [f"{count} {status}" for status, count in counts.most_common()]
        return ", ".join([*done, f"{len(self._pool.running)} running", f"{len(self._pool.waiting)} waiting"])

    def _drawn(self) -> Group:
        pool, room = self._pool, max(self._console.height - _FRAME, 3)
        rows = [_row(child) for child in pool.running[:room]]
        room -= len(pool.running)
        waiting = list(pool.waiting)[: max(room, 0)]
        rows += [(job.name, Text("waiting", style="bright_black"), job.brief, "", "", "") for job in waiting]
        table = Table.grid(padding=(0, 2, 0, 0), pad_edge=False)
        widths = [max((len(cell) for cell in column), default=0) for column in zip(*rows, strict=True)]
        for place, width in enumerate(widths):
            # Where there is too little room, only what the job is called is cut.
            spared = max(self._console.width - sum(widths) + width - 2 * (len(widths) - 1), _LEAST)
            table.add_column(
                style="bold" if place == 0 else "",
                justify="left" if place in (1, _TITLE) else "right",
                no_wrap=True,
                width=min(width, spared) if place == _TITLE else width,
                overflow="ellipsis",
            )
        for row in rows:
            table.add_row(*row)
        more = len(pool.waiting) - max(room, 0)
        elapsed = duration(time.monotonic() - self._begun)
        total = "" if self._total is None else f"{counted(self._total, 'job')}: "
        head = Text(f"{total}{self._counts()}; {elapsed} elapsed", style="bold", no_wrap=True)
        rest = [Text(f"… and {more} more that wait", style="bright_black")] if more > 0 else []
        return Group(head, table, *rest)


def named(job: SweepJob) -> str:
    """A job, with what it varies."""
    return f"job {job.name}" + (f" ({job.brief})" if job.brief else "")


def told(job: SweepJob) -> str:
    """How a job ended, in a line."""
    record = job.record
    parts = [named(job), job.status]
    if record.fresh is not None:
        parts.append(f"return {number(record.fresh)} on fresh episodes")
    elif record.last is not None:
        parts.append(f"return {number(record.last[1])} at {record.last[0]:,} frames")
    if record.seconds is not None:
        parts.append(duration(record.seconds))
    if record.error:
        parts.append(record.error.splitlines()[0])
    return "  ".join(parts)


def _row(child: Child) -> tuple[str | Text, ...]:
    record, total = child.job.record, child.job.config.get("total_frames")
    frames, last = record.frames, record.last
    share, left = f"{frames:,}", ""
    if isinstance(total, int) and total > 0:
        share = f"{frames:,} ({min(100 * frames // total, 100)}%)"
        gained = frames - child.frames_before
        if gained > 0 and frames < total:
            left = f"{duration(child.seconds * (total - frames) / gained).removeprefix('0:')} left"
    state = "ending" if child.asked_to_end else "running"
    evaluation = f"return {number(last[1])}" if last is not None else ""
    return (child.job.name, Text(state, style="magenta"), child.job.brief, share, evaluation, left)

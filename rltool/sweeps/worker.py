"""``python -m rltool.sweeps.worker JOB ORIGIN``: the process of one job. It starts the run, goes on with it, or finds it done.

Whoever starts it (the local pool, a Slurm task, a Ray worker) holds the other end of its standard input: when that closes, the
starter is gone, and the job saves a checkpoint and ends.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rltool import launch, reporting
from rltool.composition import quoted, read_overrides
from rltool.config import load
from rltool.configfiles import ConfigFiles
from rltool.errors import CheckpointError
from rltool.runs import RunDirectory, is_locked, read_summary, replace_file
from rltool.stopping import ending_tidily
from rltool.sweeps.jobs import DONE, SweepJob

LEASH = "--leash"
# Seconds that a job whose starter is gone has for its batch and its checkpoint.
_GRACE = 120.0
# Seconds between two looks at a lock.
_PAUSE = 0.5


def main(words: Sequence[str]) -> int:
    """Runs the job of a directory; returns the exit code.

    Args:
        words: the job's directory; the one that the sweep was started in, where the user's own modules may lie; and
            :data:`LEASH`, where somebody holds the other end of standard input.
    """
    directory, origin = Path(words[0]), words[1]
    if origin not in sys.path:
        sys.path.append(origin)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace", line_buffering=True)  # type: ignore[union-attr]
    faulthandler.enable()  # a fault of a library leaves its place in console.log
    with suppress(OSError):  # what top and ps call it, on Linux
        Path("/proc/self/comm").write_text(f"rltool {directory.name}")
    if LEASH in words:
        threading.Thread(target=_end_when_left_alone, daemon=True).start()
    with ending_tidily():
        job = SweepJob.read(directory)
        try:
            wait_for_the_one_before(directory)
            run(job)
        except _Held as error:
            print(f"job {job.name}: {error}", file=sys.stderr)
            return 0
        except Exception as error:
            tell(job, "failed", f"{type(error).__name__}: {error}")
            return reporting.show(error, f"job {job.name}", debug=bool(job.config.get("debug")))
    return 0


class _Held(Exception):
    """Another process runs the job."""


def wait_for_the_one_before(directory: Path) -> None:
    """Waits for a process that has lost its starter and still saves its checkpoint.

    Raises:
        _Held: it goes on instead.
    """
    until = time.monotonic() + _GRACE
    while is_locked(directory):
        if time.monotonic() > until:
            raise _Held("another process runs it, and goes on")
        time.sleep(_PAUSE)


def run(job: SweepJob) -> None:
    """Trains; a run that was cut off goes on from its newest checkpoint, one that is done is left as it is.

    Raises:
        RltoolError: as :func:`rltool.training.train`.
    """
    if job.status in DONE:
        return
    if job.stop_file.exists():  # called off before its run began
        tell(job, "pruned", "")
        return
    from rltool.checkpoint import read_header  # imports Gymnasium, which who starts jobs does without

    try:
        header = read_header(job.directory)
    except CheckpointError:
        RunDirectory.clear(job.directory)
        overrides = [word.lstrip("+") for word in job.words]
        launch.start(load(job.config), job.directory, overrides, job.tuned)
        return
    line = read_overrides([f"resume={quoted(str(header.path))}"], ConfigFiles.find_main(), choices_allowed=False)
    resumption = launch.read_resumption(line, ConfigFiles.find_main())
    launch.start(resumption.config, job.directory, [])


def tell(job: SweepJob, status: str, error: str) -> None:
    """Writes down how a job ended that could not do so itself: before its run began, or since somebody ended its process."""
    before = {}
    with suppress(Exception):
        before = read_summary(job.directory)
    if status != "failed" or before.get("status") != status:
        told = {**before, "status": status, "error": error}
        replace_file(job.directory / "summary.json", f"{json.dumps(told, indent=2, ensure_ascii=False)}\n".encode())


def _end_when_left_alone() -> None:
    """Waits for the other end of standard input to close, and asks this process to end then as a scheduler would."""
    with suppress(OSError):
        while os.read(0, 1024):
            pass
    if sys.platform == "win32":  # os.kill would end it here and now
        signal.raise_signal(signal.SIGTERM)
        time.sleep(_GRACE)
        os._exit(1)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE)
    os.killpg(os.getpgrp(), signal.SIGKILL)  # with the processes of its environments


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

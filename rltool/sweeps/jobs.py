"""A sweep as it lies on disk: what was asked for, and a directory a job with what it is to run. Free of torch and Hydra.

What runs is what was checked: a job is run from the configuration in its job.json, whatever becomes of conf/ meanwhile.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import TypeVar

from pydantic import JsonValue, TypeAdapter, ValidationError

from rltool.errors import ConfigError, Problem
from rltool.grouping import settings, short_names, value_shown
from rltool.records import SWEEP, Record
from rltool.runs import CALL_OFF, is_locked, replace_file

WINNER = "winner-"
"""What begins the names of jobs that run the best of a search once more, on fresh seeds."""
TUNERS = ".tuners"
"""Where each process that works on a search has a directory, locked while it lives."""
_JOB, _CONSOLE = "job.json", "console.log"
# What to do about a file that cannot be read.
_WHOLE = "What it says is written anew by the same command with hydra.sweep.dir=DIRECTORY; the runs are none the worse"
Kind = TypeVar("Kind")
DONE = ("finished", "solved", "stopped", "pruned")
"""Statuses of jobs that are not run again."""


@dataclass(frozen=True)
class SweepJob:
    """One job: a run with a directory of its own.

    Attributes:
        directory: the job's, absolute.
        words: its overrides as Hydra gets them, without those that are the sweep's.
        varied: its values of the keys (or groups) that the sweep varies, the seed among them.
        config: the checked configuration, as JSON.
        tuned: the name of the tuned file in it, or None.
        trial: the number of the trial it belongs to; None in a grid.
    """

    directory: Path
    words: tuple[str, ...]
    varied: Mapping[str, JsonValue]
    config: Mapping[str, JsonValue]
    tuned: str | None = None
    trial: int | None = None

    @property
    def name(self) -> str:
        """Of its directory, and what it is called by."""
        return self.directory.name

    @property
    def title(self) -> str:
        """What tells it from the other jobs, as it would be typed."""
        return " ".join(f"{key}={value_shown(value)}" for key, value in self.varied.items())

    @property
    def brief(self) -> str:
        """The title with keys told by their last parts; of a trial's, whose values stand elsewhere, the seed."""
        if self.trial is not None:
            return f"seed={self.varied.get('seed')}"
        names = short_names(self.varied)
        return " ".join(f"{names[key]}={value_shown(value)}" for key, value in self.varied.items())

    @property
    def record(self) -> Record:
        """Its run as it lies there now; its status is ``unknown`` before there is one."""
        return Record(self.directory)

    @property
    def status(self) -> str:
        """``waiting`` before there is a run, else the run's status."""
        if not any((self.directory / name).exists() for name in ("config.yaml", "summary.json")):
            return "waiting"
        return self.record.status

    @property
    def console(self) -> Path:
        """What its process printed, in all sessions."""
        return self.directory / _CONSOLE

    @property
    def stop_file(self) -> Path:
        """Once it is there, the job ends at its next point or evaluation, with the status ``pruned``."""
        return self.directory / CALL_OFF

    def write(self) -> None:
        """Makes the directory, and writes what the job is to run."""
        self.directory.mkdir(parents=True, exist_ok=True)
        _write(self.directory / _JOB, self, but="directory")

    @classmethod
    def read(cls, directory: Path) -> SweepJob:
        """The job of a directory.

        Raises:
            ConfigError: it holds none, or one that cannot be read.
        """
        return _read(_jobs(), directory / _JOB, but="directory")


@dataclass(frozen=True)
class Sweep:
    """All jobs together.

    Attributes:
        path: the directory, absolute.
        kind: ``grid``, or ``tune`` for a search.
        overrides: what was typed, ``--config-dir`` among it.
        varied: the keys (or groups) whose values differ between jobs, the seed among them, in the order in which they were
            typed.
        details: of a grid, by the name of each of the ``jobs`` that it was ever asked for, its :func:`fingerprint`; of a search,
            its objective and its space.
    """

    path: Path
    kind: str
    overrides: tuple[str, ...]
    varied: tuple[str, ...]
    details: Mapping[str, JsonValue] = field(default_factory=dict)

    @property
    def jobs(self) -> tuple[SweepJob, ...]:
        """The jobs there are, in the order of their names, 2 before 10; those that cannot be read are left out."""
        return self._found[0]

    @property
    def is_at_work(self) -> bool:
        """Whether a process on this machine starts its jobs."""
        return any(map(is_locked, (self.path, *(self.path / TUNERS).glob("*/"))))

    @property
    def gone(self) -> tuple[str, ...]:
        """The names of jobs of a grid whose directories are no longer there, or hold no job."""
        told = self.details.get("jobs")
        names = map(str, told) if isinstance(told, Mapping) else ()
        return tuple(name for name in names if not (self.path / name / _JOB).exists())

    @property
    def damaged(self) -> tuple[str, ...]:
        """Why jobs cannot be read, a text each."""
        return self._found[1]

    @cached_property
    def _found(self) -> tuple[tuple[SweepJob, ...], tuple[str, ...]]:
        jobs: list[SweepJob] = []
        damaged: list[str] = []
        for path in sorted(self.path.glob(f"*/{_JOB}"), key=lambda path: _order(path.parent)):
            try:
                jobs.append(SweepJob.read(path.parent))
            except ConfigError as error:
                damaged += map(str, error.problems)
        return tuple(jobs), tuple(damaged)

    def write(self) -> None:
        """Writes what was asked for; the jobs are written one by one."""
        _write(self.path / SWEEP, self, but="path")

    @classmethod
    def found(cls, path: Path) -> Sweep | None:
        """The sweep in a directory, as far as can be told from its jobs where sweep.json is gone or damaged; None where there
        is none."""
        try:
            return cls.read(path)
        except ConfigError:
            jobs = cls(path.absolute(), "grid", (), ()).jobs
            if not jobs:
                return None
            kind = "grid" if all(job.trial is None for job in jobs) else "tune"
            varied = dict.fromkeys(key for job in jobs for key in job.varied)
            return cls(path.absolute(), kind, (), tuple(varied))

    @classmethod
    def read(cls, path: Path) -> Sweep:
        """The sweep in a directory.

        Raises:
            ConfigError: it holds none, or one that cannot be read.
        """
        return _read(_sweeps(), path / SWEEP, but="path")


def is_job(path: Path) -> bool:
    """Whether a directory is that of a sweep's job."""
    return (path / _JOB).is_file()


def fingerprint(config: Mapping[str, JsonValue]) -> str:
    """The same for configurations that do the same but for the seed."""
    return hashlib.sha1(json.dumps(settings(config), sort_keys=True).encode(), usedforsecurity=False).hexdigest()[:12]


def _write(path: Path, of: SweepJob | Sweep, *, but: str) -> None:
    told = {name: value for name, value in asdict(of).items() if name != but}
    replace_file(path, f"{json.dumps(told, indent=1, ensure_ascii=False)}\n".encode())


def _read(adapter: TypeAdapter[Kind], path: Path, *, but: str) -> Kind:
    """What a file says of a job or a sweep, and of its directory, which is not in it."""
    try:
        told = json.loads(path.read_bytes())
    except FileNotFoundError:
        hint = "A sweep's directory holds a sweep.json; they are made by rltool train -m"
        raise ConfigError(Problem("", f"there is no {path}", hint)) from None
    except (OSError, ValueError) as error:
        raise ConfigError(Problem("", f"{path} cannot be read: {error}", _WHOLE)) from error
    if not isinstance(told, dict):
        raise ConfigError(Problem("", f"expected a JSON object in {path}, found {type(told).__name__}", _WHOLE))
    try:
        return adapter.validate_python({**told, but: str(path.parent.absolute())})
    except ValidationError as error:
        reason = error.errors()[0]
        where = ".".join(map(str, reason["loc"]))
        text = f"{path} is not what rltool wrote there: {where}: {reason['msg']}"
        raise ConfigError(Problem("", text, _WHOLE)) from error


@cache  # pydantic takes milliseconds to build one
def _jobs() -> TypeAdapter[SweepJob]:
    return TypeAdapter(SweepJob)


@cache
def _sweeps() -> TypeAdapter[Sweep]:
    return TypeAdapter(Sweep)


def _order(directory: Path) -> list[tuple[int, int, str]]:
    parts = re.split(r"(\d+)", directory.name)
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in parts if part]

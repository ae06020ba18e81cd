"""From a command line to a sweep on disk: every job composed and checked, and written down before the first one starts."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from filelock import FileLock, Timeout
from omegaconf import OmegaConf
from pydantic import JsonValue

from rltool.composition import TOGETHER, Composition, Line, compose
from rltool.config import load_as
from rltool.configfiles import ConfigFiles, read_value
from rltool.errors import ConfigError, Problem, WriteError
from rltool.figures import counted
from rltool.grouping import settings
from rltool.launch import Claim, Job, check_jobs
from rltool.records import is_run
from rltool.runs import shown
from rltool.schema import SweepConfig
from rltool.sweeps.jobs import DONE, Sweep, SweepJob, fingerprint
from rltool.sweeps.launchers import OURS, problems_of
from rltool.sweeps.rehearsal import rehearsed

if TYPE_CHECKING:
    from rltool.sweeps.tuning import Tuning

_LOCK, _CONF = ".lock", ".conf"
# Jobs that take seconds to check.
_MANY = 2_000
# Nodes that are the sweep's, not its jobs'.
_OWN = ("hydra", *TOGETHER)


@dataclass(frozen=True)
class Plan:
    """A sweep that is checked and written down.

    Attributes:
        sweep: see :class:`Sweep`.
        files: a copy of the config files as they are now: what becomes of the originals changes nothing.
        told: where it is, and what was found there.
        jobs: those that were asked for; none of a search, whose jobs come one by one.
        tuning: the search; None of a grid.
    """

    sweep: Sweep
    files: ConfigFiles
    told: str
    jobs: tuple[SweepJob, ...] = ()
    tuning: Tuning | None = None


@contextmanager
def planned(typed: Sequence[str], line: Line, files: ConfigFiles) -> Iterator[Plan]:
    """Checks what is to run and writes the sweep down.

    Of a grid, every job is checked, and nobody else has the directory while this lasts. In a directory that holds the sweep
    already, jobs with settings that are there keep their directory, and with it what they have done; others are added. Jobs
    that are there and are not asked for stay as they are.

    Args:
        typed: what was typed.
        line: the same, read.
        files: where config files lie.

    Raises:
        ConfigError: the problems of all jobs together, of what concerns them together, or of the directory.
    """
    problems = list(_without_values(line))
    if problems:
        raise ConfigError(problems)
    first = _first(line, files)
    sweeper = first.choices.get("hydra/sweeper") if first is not None else None
    together = _checked_together(first, problems) if first is not None else None
    problems += _of_names(line)
    problems += _of_sweeper(line, sweeper) if first is not None else []
    problems += problems_of(first, line) if first is not None else []
    if sweeper == "tune" and together is not None and not problems:
        from rltool.sweeps.tuning import planned_search

        with planned_search(typed, line, files, together) as plan:
            yield plan
        return
    jobs: list[Job] = []
    if (count := len(line.jobs())) > _MANY and not problems:
        print(f"checking {count:,} jobs before the first one starts", flush=True)
    try:
        jobs = check_jobs(line, files, multirun=True)
    except ConfigError as error:
        problems = [*error.problems, *problems]
    if problems:
        raise ConfigError(dict.fromkeys(problems))
    path = jobs[0].composition.sweep_directory
    with claimed(path, "grid"):
        yield _written(typed, line, jobs, path, files)


def _checked_together(composition: Composition, problems: list[Problem]) -> SweepConfig | None:
    """The checked ``sweep`` and ``tune`` nodes; None where they have problems, which are added."""
    try:
        return load_as(SweepConfig, composition.together)
    except ConfigError as error:
        problems += error.problems
        return None


def _first(line: Line, files: ConfigFiles) -> Composition | None:
    """The first job, composed; None where that is not possible, which the check of all jobs explains."""
    if line.problems:
        return None
    try:
        return compose(line.jobs()[0], files)
    except ConfigError:
        return None


def _without_values(line: Line) -> Iterator[Problem]:
    """Lists that are none: there is no first job to look at."""
    for one in line.typed:
        values: list[str] | None = None
        with suppress(ValueError):  # a range in steps of 0
            values = one.values
        if one.override.is_discrete_sweep() and not values:
            yield Problem(one.key, f"expected at least one value, found none in {one.word.partition('=')[2]}")


def _of_names(line: Line) -> Iterator[Problem]:
    """Jobs are found again by their names."""
    typed = line.get("hydra.sweep.subdir")
    if typed is not None:
        hint = "Leave it out: rltool sweep and results.csv say which is which"
        yield Problem("hydra.sweep.subdir", f"jobs are named by their numbers, found {typed.word}", hint)


def _of_sweeper(line: Line, sweeper: str | None) -> Iterator[Problem]:
    """What was typed for another sweeper than the one that was chosen."""
    if sweeper == "tune":
        return
    if sweeper not in ("grid", "basic"):
        yield Problem("hydra/sweeper", f"expected grid or tune, found {sweeper}", "tune searches with Optuna")
    for one in line.typed:
        if one.key.partition(".")[0] == "tune":
            yield Problem(one.key, f"is for a search, found {one.word}", "Add hydra/sweeper=tune")
        elif one.override.is_sweep_override() and not one.override.is_discrete_sweep():
            text = f"a grid needs values one by one, found {one.word.partition('=')[2]}"
            yield Problem(one.key, text, "Give a,b,c or range(a,b), or add hydra/sweeper=tune to search")


@contextmanager
def claimed(path: Path, kind: str) -> Iterator[None]:
    """A directory for a sweep, new or one that holds a sweep of the kind; a grid is run by one process at a time.

    Raises:
        ConfigError: it holds something else, another process has it, or it cannot be made.
    """
    found = Sweep.found(path)
    if path.is_dir() and found is None and any(entry.name != _LOCK for entry in path.iterdir()):
        hint = "Leave hydra.sweep.dir out, and get a new one"
        raise ConfigError(
            Problem(
                "hydra.sweep.dir", f"expected a new directory, or one with a sweep, found other files in {path}", hint
            )
        )
    if found is not None and found.kind != kind:
        raise ConfigError(
            Problem("hydra.sweep.dir", f"{path} holds a sweep of another kind ({found.kind}), and this is {kind}")
        )
    claim = Claim.make(path, "hydra.sweep.dir")
    lock = FileLock(path / _LOCK, timeout=0.2)
    try:
        if kind == "grid":
            try:
                lock.acquire()
            except Timeout:
                text = f"another process runs the sweep in {path}"
                raise ConfigError(
                    Problem("hydra.sweep.dir", text, "Wait for it, stop it, or use another directory")
                ) from None
        yield
    finally:
        lock.release()
        if Sweep.found(path) is None:
            (path / _LOCK).unlink(missing_ok=True)
            shutil.rmtree(path / _CONF, ignore_errors=True)
        claim.give_back()


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Says of a fault where it was to be written.

    Raises:
        WriteError: instead of an OSError.
    """
    try:
        yield
    except OSError as error:
        raise WriteError(f"cannot write into {path}: {error.strerror or error}") from error


def copy_files(files: ConfigFiles, path: Path) -> ConfigFiles:
    """A copy of the config files in a sweep's directory; what other sessions copied stays, as their jobs may need it."""
    home = path / _CONF / secrets.token_hex(3)
    copies = []
    for number, directory in enumerate(files.directories):
        copies.append(home / str(number))
        copies[-1].mkdir(parents=True, exist_ok=True)
        for source in _config_files(directory):
            target = copies[-1] / source.relative_to(directory)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
    return ConfigFiles(copies[0], tuple(copies[1:]))


def _config_files(directory: Path) -> Iterator[Path]:
    """The YAML files of a directory of config files; it may be a sweep's, whose jobs have files that are none."""
    for place, inner, names in os.walk(directory):
        inner[:] = sorted(name for name in inner if not name.startswith(".") and not is_run(Path(place, name)))
        yield from (Path(place, name) for name in sorted(names) if name.endswith(".yaml"))


def values_of(words: Sequence[str], keys: Sequence[str]) -> dict[str, JsonValue]:
    """What overrides say of keys, in the order of the keys."""
    found = {word.partition("=")[0].lstrip("+"): read_value(word.partition("=")[2]) for word in words}
    return {key: cast("JsonValue", found[key]) for key in keys if key in found}


def own_words(words: Sequence[str]) -> tuple[str, ...]:
    """The overrides that are a job's, not the sweep's."""
    return tuple(word for word in words if _node(word) not in _OWN)


def _node(word: str) -> str:
    return word.partition("=")[0].lstrip("+~").partition(".")[0].partition("/")[0]


def _written(typed: Sequence[str], line: Line, jobs: Sequence[Job], path: Path, files: ConfigFiles) -> Plan:
    """The plan of a grid, written down.

    Raises:
        ConfigError: jobs that are to begin cannot be built.
    """
    before = Sweep.found(path)
    there = {_key(old.config): old for old in (before.jobs if before is not None else ())}
    varied = tuple(dict.fromkeys([*_varying(line, jobs), *(before.varied if before is not None else ())]))
    number, planned = 0, {}
    for job in jobs:
        config = cast("dict[str, JsonValue]", job.config.model_dump(mode="json"))
        key = _key(config) if config["seed"] is not None else secrets.token_hex()  # each draws a seed of its own
        if key in planned:
            continue
        old = there.get(key)
        while old is None and (path / str(number)).exists():
            number += 1
        directory = path / str(number) if old is None else old.directory
        number += old is None
        if old is not None and old.status in DONE:
            config = dict(old.config)  # what it was run with, down to what changes nothing
        words = own_words(job.words)
        planned[key] = SweepJob(directory, words, values_of(words, varied), config, job.composition.tuned)
    build([job.config for job in planned.values() if job.status == "waiting"], jobs[0].composition)
    names = {job.name: fingerprint(job.config) for job in planned.values()}
    sweep = Sweep(path, "grid", tuple(typed), varied, {"jobs": {**_names(before), **names}})
    with writing(path):
        copied = copy_files(files, path)
        sweep.write()
        for planned_job in planned.values():
            planned_job.write()
    kept = len(planned.keys() & there.keys())
    told = _told(sweep, list(planned.values()), kept if before is not None else None, len(jobs) - len(planned))
    return Plan(sweep, copied, told, tuple(planned.values()))


def build(configs: Sequence[Mapping[str, JsonValue]], composition: Composition) -> None:
    """Builds what jobs are made of, once for each kind of job.

    Args:
        configs: of the jobs.
        composition: of one of them: it says where they run.

    Raises:
        ConfigError: what is wrong with them.
    """
    target = str(OmegaConf.select(composition.hydra, "hydra.launcher._target_"))
    note = partial(print, flush=True)
    if problems := rehearsed(configs, note, here=target.startswith(OURS)):
        raise ConfigError(problems)


def _names(sweep: Sweep | None) -> dict[str, JsonValue]:
    """The jobs that a grid was ever asked for, with their fingerprints; those that are gone and are asked for anew have another
    name by now."""
    if sweep is None:
        return {}
    return {job.name: fingerprint(job.config) for job in sweep.jobs}


def _told(sweep: Sweep, jobs: Sequence[SweepJob], kept: int | None, repeated: int) -> str:
    """Where the sweep is, and what is there already.

    Args:
        sweep: as it lies there now.
        jobs: those that were asked for.
        kept: how many of them are there already; None in a new directory.
        repeated: how many more repeat one of them.
    """
    parts = []
    if kept is not None:
        done = sum(job.status in DONE for job in jobs)
        parts.append(f"{kept} of {counted(len(jobs), 'job')} are there already, {done} done")
    others = len(sweep.jobs) - len(jobs)
    if others:
        parts.append(f"{others} that are not asked for stay as they are")
    if repeated:
        parts.append(f"{repeated} that repeat others are left out")
    return f"sweep: {shown(sweep.path)}" + "".join(f"; {part}" for part in parts)


def _key(config: Mapping[str, JsonValue]) -> str:
    """The same for runs that do the same."""
    return json.dumps([settings(config), config["seed"]], sort_keys=True)


def _varying(line: Line, jobs: Sequence[Job]) -> list[str]:
    """The keys whose values differ between the jobs, in the order in which they were typed."""
    values: dict[str, set[str]] = {}
    for job in jobs:
        for word in own_words(job.words):
            key, _, value = word.partition("=")
            values.setdefault(key.lstrip("+"), set()).add(value)
    order = [typed.key for typed in line.typed]
    varied = [key for key, different in values.items() if len(different) > 1]
    return sorted(varied, key=lambda key: order.index(key) if key in order else len(order))

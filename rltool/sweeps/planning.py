"""From a command line to a sweep on disk: every job composed and checked, and written down before the first one starts."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from pydantic import JsonValue

from rltool.composition import Composition, Line, compose, own_words
from rltool.config import load_as
from rltool.configfiles import ConfigFiles, read_value
from rltool.errors import ConfigError, Problem
from rltool.figures import counted
from rltool.grouping import settings
from rltool.launch import Job, check_jobs
from rltool.runs import shown
from rltool.schema import SweepConfig
from rltool.sweeps.directory import claimed, copy_files, writing
from rltool.sweeps.jobs import DONE, Sweep, SweepJob, fingerprint
from rltool.sweeps.launchers import problems_of, runs_here
from rltool.sweeps.rehearsal import rehearse

if TYPE_CHECKING:
    from rltool.sweeps.tuning import Tuning

# Jobs that take seconds to check.
_MANY = 2_000


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

        with planned_search(typed, line, files, together) as tuning:
            yield Plan(tuning.sweep, tuning.files, f"sweep: {shown(tuning.sweep.path)}", tuning=tuning)
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


def values_of(words: Sequence[str], keys: Sequence[str]) -> dict[str, JsonValue]:
    """What overrides say of keys, in the order of the keys."""
    found = {word.partition("=")[0].lstrip("+"): read_value(word.partition("=")[2]) for word in words}
    return {key: cast("JsonValue", found[key]) for key in keys if key in found}


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
    begins = [job.config for job in planned.values() if job.status == "waiting"]
    rehearse(begins, here=runs_here(jobs[0].composition))
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

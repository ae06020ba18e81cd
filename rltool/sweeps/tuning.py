"""``hydra/sweeper=tune``: trials that a study proposes, each a few ordinary runs, and the winner once more on fresh seeds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from pydantic import JsonValue

from rltool.composition import Composer, Line, Typed, own_words
from rltool.configfiles import ConfigFiles
from rltool.errors import ConfigError, Problem
from rltool.figures import counted
from rltool.figures import number as figure
from rltool.grouping import few, short_names, value_shown
from rltool.launch import Job, check
from rltool.records import is_sweep
from rltool.schema import SweepConfig
from rltool.sweeps.board import Board
from rltool.sweeps.directory import claimed, copy_files, writing
from rltool.sweeps.jobs import DONE, WINNER, Sweep, SweepJob, is_job
from rltool.sweeps.launchers import runs_here
from rltool.sweeps.pool import Pool
from rltool.sweeps.rehearsal import rehearse
from rltool.sweeps.space import Space
from rltool.sweeps.study import Proposal, Search, Trial, problems_of

if TYPE_CHECKING:
    from collections.abc import Collection

# Seconds between two looks at the evaluations of runs.
_PAUSE = 1.0
# Runs at a time where somebody else has the machines and sweep.jobs names no number.
_ELSEWHERE = 12

Launch = Callable[[Sequence[SweepJob]], object]
"""Runs jobs to their end."""


@contextmanager
def planned_search(typed: Sequence[str], line: Line, files: ConfigFiles, together: SweepConfig) -> Iterator[Tuning]:
    """Checks the ends of the space and opens the study; several processes may have the sweep's directory.

    Args:
        typed: what was typed.
        line: the same, read.
        files: where config files lie.
        together: what concerns the jobs together.

    Raises:
        ConfigError: all that is wrong with the space, with runs at its ends, with the directory or with the study.
    """
    space, problems = Space.attempt(line, together.tune.space, files)
    fixed = tuple(one.hydra for one in line.typed if not one.override.is_sweep_override() and one.key != "seed")
    seed = _seed(line)
    corners = _checked_corners(fixed, space, files, problems)
    path = corners[0].composition.sweep_directory
    base = cast("dict[str, JsonValue]", corners[0].config.model_dump(mode="json"))
    if problems := problems_of(together.tune, space, base):
        raise ConfigError(problems)
    if not is_sweep(path):
        configs = [cast("dict[str, JsonValue]", corner.config.model_dump(mode="json")) for corner in corners]
        rehearse(configs, here=runs_here(corners[0].composition))
    with claimed(path, "tune"):
        with writing(path):
            copied = copy_files(files, path)
        with Search.open(together.tune, path, space, base) as search:
            _check_jobs(search, path)
            sweep = Sweep(path, "tune", tuple(typed), (*space.distributions, "seed"), search.to_json())
            with writing(path):
                sweep.write()
            yield Tuning(sweep, copied, Composer(copied), fixed, seed, together, search)


@dataclass(frozen=True)
class Tuning:
    """A search that is ready to go.

    Attributes:
        sweep: see :class:`Sweep`.
        files, composer: the config files that trials are composed from, and what composes them.
        fixed: the overrides that all runs have, ready for Hydra.
        seed: of the first run of a trial.
        together: what concerns the runs together.
        search: the study.
    """

    sweep: Sweep
    files: ConfigFiles
    composer: Composer
    fixed: tuple[str, ...]
    seed: int
    together: SweepConfig
    search: Search

    def side_by_side(self, pool: Pool) -> None:
        """Runs trials on this machine; a new one begins whenever there is room, whatever the others are at."""
        underway: dict[int, list[SweepJob]] = {}
        with Board(pool, None) as board:
            board.note(
                f"up to {counted(self.search.limit, 'trial')} of {counted(self.together.tune.seeds, 'run')}: {pool.limit}"
            )
            looked, more = 0.0, True
            while more or underway:
                while more and pool.has_room:
                    begun = self._begin(board.note)
                    more = begun is not None
                    if begun is not None:
                        underway[begun[0]] = begun[1]
                        for job in begun[1]:
                            if job.status not in DONE:
                                pool.add(job)
                board.turn()
                if time.monotonic() - looked > _PAUSE:
                    looked = time.monotonic()
                    self._prune(underway, pool.withdraw)
                for number in [number for number, jobs in underway.items() if not pool.holds(jobs)]:
                    self._end(number, underway.pop(number), board.note)
            for job in self._final_jobs(board.note):
                pool.add(job)
            while pool.busy:
                board.turn()

    def in_batches(self, launch: Launch, note: Callable[[str], object] = print) -> None:
        """Runs trials through somebody else's launcher, which returns when all of a batch have ended.

        Args:
            launch: the launcher.
            note: is told how trials ended.
        """
        jobs = self.together.sweep.jobs
        size = max((jobs if isinstance(jobs, int) else _ELSEWHERE) // self.together.tune.seeds, 1)
        while True:
            batch: dict[int, list[SweepJob]] = {}
            while len(batch) < size and (begun := self._begin(note)) is not None:
                batch[begun[0]] = begun[1]
            if not batch:
                break
            with self._pruning(batch):
                launch([job for jobs in batch.values() for job in jobs if job.status not in DONE])
            for number, trial_jobs in batch.items():
                self._end(number, trial_jobs, note)
        final = self._final_jobs(note)
        if final:
            launch(final)

    def _begin(self, note: Callable[[str], object]) -> tuple[int, list[SweepJob]] | None:
        """The number and the runs of the next trial that can begin; None where there are no more."""
        while (proposal := self.search.ask()) is not None:
            try:
                return proposal.number, self._jobs(proposal)
            except ConfigError as error:
                reason = "; ".join(map(str, error.problems))
                self.search.fail(proposal.number, reason)
                self._write_down()
                note(f"trial {proposal.number} cannot be run: {reason}")
        return None

    def _end(self, number: int, jobs: Sequence[SweepJob], note: Callable[[str], object]) -> None:
        """Tells the study how a trial ended, and whoever looks on."""
        trial = self.search.tell(number, jobs)
        note(self._told(trial))
        if trial.state == "failed":
            self._write_down()

    def _write_down(self) -> None:
        """What the answer cannot see in the runs: which trials failed, and why."""
        replace(self.sweep, details=self.search.to_json()).write()

    def _jobs(self, proposal: Proposal) -> list[SweepJob]:
        return [
            self._job(f"{proposal.number}-{k}", proposal.values, self.seed + k, proposal.number)
            for k in range(self.together.tune.seeds)
        ]

    def _job(self, name: str, values: Mapping[str, JsonValue], seed: int, trial: int) -> SweepJob:
        """A run, written down; one that is there already goes on as it is.

        Raises:
            ConfigError: these values make no run.
        """
        directory = self.sweep.path / name
        if is_job(directory):
            return SweepJob.read(directory)
        words = (*self.fixed, *self.search.space.words(values), f"++seed={seed}")
        job = check(words, self.files, self.composer)
        config = cast("dict[str, JsonValue]", job.config.model_dump(mode="json"))
        made = SweepJob(directory, own_words(words), {**values, "seed": seed}, config, job.composition.tuned, trial)
        made.write()
        return made

    def _prune(
        self, underway: Mapping[int, Sequence[SweepJob]], withdraw: Callable[[Collection[SweepJob]], object]
    ) -> None:
        for number, jobs in underway.items():
            if self.search.pruned(number, jobs):
                withdraw(jobs)
                for job in jobs:
                    if job.status not in DONE:
                        job.stop_file.touch()

    @contextmanager
    def _pruning(self, batch: Mapping[int, Sequence[SweepJob]]) -> Iterator[None]:
        """Looks after trials while a launcher has this thread."""
        over = threading.Event()

        def look() -> None:
            while not over.wait(_PAUSE):
                self._prune(batch, lambda _: None)

        thread = threading.Thread(target=look, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _told(self, trial: Trial) -> str:
        names = short_names(trial.values)
        values = " ".join(f"{names[key]}={value_shown(value)}" for key, value in trial.values.items())
        scores = "" if trial.scores is None else "  " + ", ".join(
            f"{name} {figure(score)}" for name, score in zip(self.search.objectives, trial.scores, strict=True)
        )  # fmt: skip
        best = self.search.best()
        mark = "  (the best so far)" if trial.number in {one.number for one in best} and len(best) == 1 else ""
        reason = f"  {trial.reason}" if trial.reason else ""
        return f"trial {trial.number} {trial.state}{scores}{mark}  {values}{reason}"

    def _final_jobs(self, note: Callable[[str], object]) -> list[SweepJob]:
        """The runs of the winner on seeds that no trial has had, which are not done; none where several objectives leave no
        single winner, or nothing is finished."""
        best, count = self.search.best(), self.together.tune.final_seeds
        others = sum(trial.state == "running" for trial in self.search.trials())
        if others:
            note(f"{counted(others, 'trial')} of other processes still run: the last process judges the winner")
            return []
        if len(best) != 1 or count == 0 or len(self.search.objectives) > 1:
            return []
        (winner,), first = best, self.seed + self.together.tune.seeds
        jobs = [
            self._job(f"{WINNER}{winner.number}-{k}", winner.values, first + k, winner.number) for k in range(count)
        ]
        left = [job for job in jobs if job.status not in (*DONE, "running")]
        if left:
            note(
                f"trial {winner.number} is the best: {counted(len(left), 'run')} of it on fresh seeds, since its score was the best of many"
            )
        return left


def _check_jobs(search: Search, path: Path) -> None:
    """Asks whether what lies in a sweep's directory are runs of the search: a trial finds its runs by their names.

    Raises:
        ConfigError: it is not: of another study, or of one whose database is gone.
    """
    before = Sweep.found(path)
    strangers = search.strangers(before.jobs) if before is not None else []
    if strangers:
        text = (
            f"{path} holds runs of another search, or its study is gone: {few([job.name for job in strangers], 'job')}"
        )
        raise ConfigError(Problem("hydra.sweep.dir", text, "Begin in another directory"))


def _checked_corners(fixed: Sequence[str], space: Space, files: ConfigFiles, known: Sequence[Problem]) -> list[Job]:
    """The runs at the ends of the space, checked.

    Args:
        fixed: the overrides that all runs have.
        space: what could be read of it.
        files: where config files lie.
        known: what is wrong with the rest.

    Raises:
        ConfigError: the problems of all of them together.
    """
    jobs: list[Job] = []
    problems = list(known)
    composer = Composer(files)
    for values in space.corners():
        try:
            jobs.append(check([*fixed, *space.words(values)], files, composer))
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(dict.fromkeys(problems))
    return jobs


def _seed(line: Line) -> int:
    """The seed of the first run of a trial.

    Raises:
        ConfigError: none can be counted on from.
    """
    typed: Typed | None = line.get("seed")
    if typed is None:
        return 0
    value = None if typed.override.is_sweep_override() else typed.override.value()
    if type(value) is not int or value < 0:
        text = f"expected a number, the seed of the first run of a trial, found {typed.word.partition('=')[2]}"
        raise ConfigError(Problem("seed", text, "tune.seeds says how many follow"))
    return value

"""A search: who proposes values, what its trials have come to, and which of them are not worth going on with.

An Optuna study in a database, which outlives the process and may be shared by several. All there is to know of a trial while it
runs is read from the directories of its runs.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import shutil
import socket
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
from filelock import FileLock, Timeout
from pydantic import JsonValue

from rltool.configfiles import flat
from rltool.errors import ConfigError, Problem, RltoolError
from rltool.importing import missing_package
from rltool.runs import is_locked
from rltool.schema import TuneConfig
from rltool.sweeps.jobs import DONE, TUNERS, SweepJob
from rltool.sweeps.scores import OBJECTIVES, budget, immeasurable, interval, progress, score
from rltool.wording import found

try:
    import optuna
    from optuna.exceptions import ExperimentalWarning, StorageInternalError
    from optuna.pruners import BasePruner, HyperbandPruner, MedianPruner, NopPruner, SuccessiveHalvingPruner
    from optuna.samplers import BaseSampler, GPSampler, GridSampler, RandomSampler, TPESampler
    from optuna.storages import RDBStorage
    from optuna.trial import FrozenTrial, TrialState
    from sqlalchemy import URL, make_url
    from sqlalchemy.exc import ArgumentError, SQLAlchemyError
except ImportError as error:
    raise missing_package("hydra/sweeper", "tune (Optuna)", error) from error

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.study import Study

    from rltool.sweeps.space import Space

_DATABASE, _ABOUT = "study.db", "rltool"
# Attributes of a trial.
_OWNER, _CALLED_OFF, _JOBS, _SEEDS, _REASON = "owner", "called_off", "jobs", "seeds", "reason"
# Seconds to wait for another process to be done with the database: what it does there takes a fraction of one.
_PATIENCE = 120
# A third of the trials goes on at each rung of successive halving; its first rung is at tune.prune_after.
_REDUCTION = 3
# A median over fewer trials is none.
_FEWEST = 3
# Keys whose values change nothing that a trial is judged by.
_IRRELEVANT = ("device", "threads", "compile", "quiet", "debug", "logging", "save", "resume")
_MOST_TOLD = 8
_ANOTHER = "Type it as before, or begin another search in another hydra.sweep.dir"
_FIXED = "one value"
_STATES = {
    TrialState.COMPLETE: "finished",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "failed",
    TrialState.RUNNING: "running",
    TrialState.WAITING: "waiting",
}


@dataclass(frozen=True)
class Proposal:
    """Values to try.

    Attributes:
        number: of the trial.
        values: by key.
        again: another process had begun it, and is gone: its runs go on.
    """

    number: int
    values: Mapping[str, JsonValue]
    again: bool = False


@dataclass(frozen=True)
class Trial:
    """What has become of a proposal.

    Attributes:
        number: of the trial.
        state: ``finished``, ``pruned``, ``failed``, ``running``, or ``waiting`` for one that somebody put into the database.
        values: by key; empty where they are not known yet.
        scores: one for each objective; None where it has none.
        jobs, seeds: names of its runs, and their seeds; empty while they run.
        reason: why it failed; empty where it did not.
    """

    number: int
    state: str
    values: Mapping[str, JsonValue]
    scores: tuple[float, ...] | None
    jobs: tuple[str, ...]
    seeds: tuple[int, ...]
    reason: str

    def to_json(self) -> dict[str, JsonValue]:
        """All of it as plain values."""
        return {
            "number": self.number,
            "state": self.state,
            "values": dict(self.values),
            "scores": None if self.scores is None else list(self.scores),
            "jobs": list(self.jobs),
            "seeds": list(self.seeds),
            "reason": self.reason,
        }


def problems_of(config: TuneConfig, space: Space, base: Mapping[str, JsonValue]) -> list[Problem]:
    """Why a search cannot be: trials could not be told apart, or the sampler cannot draw from the space.

    Args:
        config, space, base: as :meth:`Search.open`.
    """
    objectives = objectives_of(config)
    return [
        *immeasurable(objectives, base, pruned=config.pruner != "none" and len(objectives) == 1),
        *space.problems(config.sampler),
    ]


class Search:
    """One process's hold on a study. Use :meth:`open`, and close it.

    Of processes that share a study, each asks and tells for itself. Those with a common sweep directory or a common sqlite file
    take turns, and begin ``tune.trials`` trials together. Of others, on a database server, each may begin one more.
    """

    def __init__(
        self, config: TuneConfig, path: Path, space: Space, base: Mapping[str, JsonValue], url: URL, turn: FileLock
    ) -> None:
        self.config, self.path, self.space = config, path, space
        self.objectives = objectives_of(config)
        self._budget, self._interval = budget(base), interval(base)
        self._url, self._turn = url, turn
        self._told: dict[int, int] = {}  # evaluations of a trial that the study knows
        self._owner = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
        self._home = FileLock(self._home_of(self._owner) / ".lock")
        with _held(turn):
            with _explained(url):
                self._storage = _storage(url)
                self._study = self._created(base)
            self._compare(base)
            self._id_of_study = self._storage.get_study_id_from_name(config.study)
            self._home_of(self._owner).mkdir(parents=True, exist_ok=True)
            self._home.acquire(timeout=_PATIENCE)

    @classmethod
    def open(cls, config: TuneConfig, path: Path, space: Space, base: Mapping[str, JsonValue]) -> Search:
        """Begins a search, or goes on with the one that the database holds under that name.

        Args:
            config: the search.
            path: the sweep's directory; it exists.
            space: what is searched.
            base: the configuration of any of the runs, as JSON: what is not searched must be as it was.

        Raises:
            ConfigError: trials could not be told apart, the sampler cannot draw from the space, the database cannot be used,
                or the study in it is another search.
        """
        if problems := problems_of(config, space, base):
            raise ConfigError(problems)
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        url = _url(config, path)
        place = Path(str(url.database)) if _is_file(url) else path / TUNERS / "turn"
        turn = FileLock(place.with_name(f".{place.name}.lock"))
        made = [one for one in (path / TUNERS, Path(turn.lock_file)) if not one.exists()]
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            with _undone(made):
                return cls(config, path, space, base, url, turn)
        except OSError as error:
            text = f"cannot write beside {place}: {error.strerror or error}"
            raise ConfigError(Problem("tune.storage", text, "Choose another place")) from error

    def close(self) -> None:
        """Lets others go on with what this process has not told; calling it again is harmless."""
        if not self._home.is_locked:
            return
        with self._alone():
            self._home.release()
            if not any(trial.user_attrs.get(_OWNER) == self._owner for trial in self._running()):
                (self._home_of(self._owner) / ".lock").unlink(missing_ok=True)
                self._home_of(self._owner).rmdir()

    def __enter__(self) -> Search:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def strangers(self, jobs: Sequence[SweepJob]) -> list[SweepJob]:
        """The jobs that are no runs of its trials: of another study, or of one whose database is gone."""
        trials = {trial.number: trial.params for trial in self._trials()}

        def belongs(job: SweepJob) -> bool:
            drawn = trials.get(job.trial) if job.trial is not None else None
            if drawn is None or drawn.keys() != self.space.distributions.keys():
                return False
            values = self.space.values(drawn)
            return all(job.varied.get(key) == value for key, value in values.items())

        return [job for job in jobs if not belongs(job)]

    @property
    def is_shared(self) -> bool:
        """Whether other processes work on it in the same directory now."""
        homes = [home for home in (self.path / TUNERS).glob("*/") if home.name != self._owner]
        return any(is_locked(home) for home in homes)

    @property
    def limit(self) -> int:
        """Trials in all: ``tune.trials``, or all combinations of a grid where they are fewer."""
        most = self.space.combinations if self.config.sampler == "grid" else math.inf
        return int(min(self.config.trials, most))

    @property
    def prunes(self) -> bool:
        """Whether trials may be ended early: not with several objectives, of which evaluations tell one only."""
        return self.config.pruner != "none" and len(self.objectives) == 1 and self._interval is not None

    def ask(self) -> Proposal | None:
        """What to try next: first what a process had begun that is gone, with the same number and values; then something new.
        None when there are as many trials as there are to be.

        What it proposes depends on ``tune.sampler_seed``, the number of the trial and the trials before, not on the process.
        """
        with self._alone():
            for trial in self._running():
                if not self._left(trial):
                    continue
                if trial.params.keys() == self.space.distributions.keys():
                    self._note(trial.number, _OWNER, self._owner)
                    return Proposal(trial.number, self.space.values(trial.params), again=True)
                self._fail(trial.number, "its process ended before its values were drawn")
            begun = [trial for trial in self._trials() if trial.state != TrialState.WAITING]
            if len(begun) >= self.limit:
                return None
            drawn = self._study.ask(self.space.distributions)
            return Proposal(drawn.number, self.space.values(drawn.params))

    def pruned(self, number: int, jobs: Sequence[SweepJob]) -> bool:
        """Tells the study what evaluations there are of a trial that it does not know, and says whether to end its runs.

        Once it has said so of a trial it always does. The first ``tune.startup_trials`` trials are never ended, and no trial
        before ``tune.prune_after`` of its frames.

        Args:
            number: of the trial.
            jobs: all its runs.
        """
        if not self.prunes:
            return False
        points = progress(jobs)
        if len(points) <= self._told.get(number, 0):
            return False
        with self._alone():
            trial = self._trial(number)
            if trial.state.is_finished() or _CALLED_OFF in trial.user_attrs:
                return _CALLED_OFF in trial.user_attrs
            for step, behind in self._reported(trial, points):
                if behind:
                    self._note(number, _CALLED_OFF, step)
                    return True
            self._told[number] = len(points)
        return False

    def tell(self, number: int, jobs: Sequence[SweepJob]) -> Trial:
        """Tells the study how a trial ended, once its runs are over.

        A trial is finished when all its runs are, and can be judged; pruned when it was to be ended, or somebody called one of
        its runs off; failed otherwise, and the search goes on. Of a trial that was told before nothing changes.
        """
        with self._alone():
            trial = self._trial(number)
            if trial.state.is_finished():
                return self._told_of(trial)
            self._note(number, _JOBS, [job.name for job in jobs])
            self._note(number, _SEEDS, [cast("int", job.config.get("seed")) for job in jobs])
            if self.prunes:  # others are measured by the evaluations since it was last looked at, too
                list(self._reported(trial, progress(jobs)))
            statuses = [job.status for job in jobs]
            if all(status in DONE and status != "pruned" for status in statuses):
                scores = [score(objective, jobs) for objective in self.objectives]
                lacking = [name for name, value in zip(self.objectives, scores, strict=True) if value is None]
                if lacking:
                    self._fail(number, f"a run has no {lacking[0]}: it has no evaluations, or they are not finite")
                else:
                    self._study.tell(number, cast("list[float]", scores))
            elif _CALLED_OFF in trial.user_attrs or "pruned" in statuses:
                self._study.tell(number, state=TrialState.PRUNED)
            else:
                self._fail(number, _reason(jobs))
            return self._told_of(self._trial(number))

    def fail(self, number: int, reason: str) -> None:
        """Gives up a trial whose runs could not even begin."""
        with self._alone():
            if not self._trial(number).state.is_finished():
                self._fail(number, reason)

    def best(self) -> tuple[Trial, ...]:
        """The best finished trial, the earliest of equal ones; with several objectives those of which no other is better in
        one and as good in the rest; none where none is finished."""
        with self._alone():
            front = (
                self._study.best_trials if any(trial.state == TrialState.COMPLETE for trial in self._trials()) else []
            )
            front = sorted(front, key=lambda trial: trial.number)
            return tuple(self._told_of(trial) for trial in (front if len(self.objectives) > 1 else front[:1]))

    def trials(self) -> tuple[Trial, ...]:
        """All trials in the order of their numbers."""
        with self._alone():
            return tuple(self._told_of(trial) for trial in self._trials())

    def to_json(self) -> dict[str, JsonValue]:
        """What is sought, for the sweep's own file."""
        return {
            "study": self.config.study,
            "objective": list(self.objectives),
            "sampler": self.config.sampler,
            "pruner": self.config.pruner if self.prunes else "none",
            "space": dict(self.space.to_json()),
            "failed": {str(trial.number): trial.reason for trial in self.trials() if trial.state == "failed"},
        }

    @cached_property
    def _pruner(self) -> BasePruner:
        if not self.prunes:
            return NopPruner()
        assert self._interval is not None
        first = max(math.ceil(self.config.prune_after * self._budget / self._interval), 1)
        if self.config.pruner == "median":
            startup = self.config.startup_trials
            return MedianPruner(startup, first, n_min_trials=max(min(startup, _FEWEST), 1))
        if self.config.pruner == "asha":
            return SuccessiveHalvingPruner(first, _REDUCTION)
        return HyperbandPruner(first, max(self._budget // self._interval, first), _REDUCTION)

    def _reported(self, trial: FrozenTrial, points: Sequence[tuple[int, float]]) -> Iterator[tuple[int, bool]]:
        """Tells the study each evaluation that it does not know, and gives it with whether the trial falls behind by it."""
        for step, value in points:
            if step not in trial.intermediate_values:
                # Evaluations are returns; where frames are sought, few of them, a study prefers what is smaller.
                known = value if OBJECTIVES[self.objectives[0]] == "maximize" else -value
                self._storage.set_trial_intermediate_value(self._id(trial.number), step, known)
                yield step, self._falls_behind(trial.number, step)

    def _falls_behind(self, number: int, step: int) -> bool:
        # Asked of every trial: those that are never ended fill the rungs that others are measured at.
        behind = self._pruner.prune(self._study, self._trial(number))
        enough = step * cast("int", self._interval) >= self.config.prune_after * self._budget
        return behind and enough and number >= self.config.startup_trials

    def _created(self, base: Mapping[str, JsonValue]) -> Study:
        """The study of that name, begun where there is none."""
        name, directions = self.config.study, [OBJECTIVES[objective] for objective in self.objectives]
        sampler = _Numbered(self._sampler, self._own)
        study = optuna.create_study(
            storage=self._storage, study_name=name, load_if_exists=True, directions=directions, sampler=sampler,
            pruner=self._pruner,
        )  # fmt: skip
        if _ABOUT not in study.user_attrs and not study.get_trials(deepcopy=False):
            study.set_user_attr(_ABOUT, self._about(base))
        return study

    def _compare(self, base: Mapping[str, JsonValue]) -> None:
        """Refuses a study whose trials were made otherwise.

        Raises:
            ConfigError: with what differs.
        """
        before = self._study.user_attrs.get(_ABOUT)
        if before is None:
            text = f"the database holds a study {self.config.study!r} that rltool did not make"
            raise ConfigError(Problem("tune.study", text, _ANOTHER))
        differences = list(_differences(before, self._about(base)))
        more = len(differences) - _MOST_TOLD
        if differences:
            rest = f"{f'and {more} more. ' if more > 0 else ''}{_ANOTHER}"
            raise ConfigError([*differences[:_MOST_TOLD], Problem("", rest)])

    def _about(self, base: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
        """What must be the same for two trials to be compared."""
        searched = [*self.space.distributions, *_IRRELEVANT]
        kept = {key: value for key, value in flat(base).items() if not any(_below(key, name) for name in searched)}
        about = {
            "space": self.space.to_json(),
            "objective": list(self.objectives),
            "seeds": self.config.seeds,
            "base": kept,
        }
        return cast("dict[str, JsonValue]", json.loads(json.dumps(about)))

    def _sampler(self, number: int) -> BaseSampler:
        """Who proposes the values of a trial; it has no memory of its own, and a seed that no other trial has."""
        seed = int(np.random.SeedSequence((self.config.sampler_seed, number)).generate_state(1)[0])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            match self.config.sampler:
                case "tpe":
                    return TPESampler(n_startup_trials=self.config.startup_trials, seed=seed)
                case "gp":
                    return GPSampler(n_startup_trials=self.config.startup_trials, seed=seed)
                case "random":
                    return RandomSampler(seed=seed)
                case "grid":
                    # Combinations go by the trial's number: their order must be that of every process, so no seed.
                    return GridSampler({one.key: one.grid or [] for one in self.space.parameters}, seed=0)

    def _own(self, number: int) -> None:
        self._note(number, _OWNER, self._owner)

    def _left(self, trial: FrozenTrial) -> bool:
        """Whether the process that had a trial is gone. One that works in another directory may be on another machine."""
        owner = trial.user_attrs.get(_OWNER)
        if owner is None:  # it was killed before it could say so; a database server may have others that still will
            return _is_file(self._url)
        home = self._home_of(str(owner))
        return owner != self._owner and home.is_dir() and not is_locked(home)

    def _home_of(self, owner: str) -> Path:
        return self.path / TUNERS / owner

    def _trials(self) -> list[FrozenTrial]:
        return self._study.get_trials(deepcopy=False)

    def _running(self) -> list[FrozenTrial]:
        return [trial for trial in self._trials() if trial.state == TrialState.RUNNING]

    def _id(self, number: int) -> int:
        return self._storage.get_trial_id_from_study_id_trial_number(self._id_of_study, number)

    def _trial(self, number: int) -> FrozenTrial:
        return self._storage.get_trial(self._id(number))

    def _note(self, number: int, key: str, value: JsonValue) -> None:
        self._storage.set_trial_user_attr(self._id(number), key, value)

    def _fail(self, number: int, reason: str) -> None:
        self._note(number, _REASON, reason)
        self._study.tell(number, state=TrialState.FAIL)

    def _told_of(self, trial: FrozenTrial) -> Trial:
        known, attributes = trial.params.keys() == self.space.distributions.keys(), trial.user_attrs
        return Trial(
            trial.number,
            _STATES[trial.state],
            self.space.values(trial.params) if known else {},
            tuple(trial.values) if trial.state == TrialState.COMPLETE else None,
            tuple(attributes.get(_JOBS, ())),
            tuple(attributes.get(_SEEDS, ())),
            str(attributes.get(_REASON, "")),
        )

    @contextmanager
    def _alone(self) -> Iterator[None]:
        try:
            with _held(self._turn):
                yield
        except (SQLAlchemyError, StorageInternalError) as error:
            raise RltoolError(f"the study cannot be reached: {_named(self._url)}: {_first_line(error)}") from error


class _Numbered(BaseSampler):
    """Another sampler for each trial, by its number: processes that share a study, and one that goes on with it, do not repeat
    each other's random numbers.

    Args:
        made: the sampler of a number.
        begin: told of each new trial, before anything is drawn for it.
    """

    def __init__(self, made: Callable[[int], BaseSampler], begin: Callable[[int], None]) -> None:
        self._made, self._begin = made, begin
        self._current: BaseSampler | None = None

    def before_trial(self, study: Study, trial: FrozenTrial) -> None:
        self._begin(trial.number)
        self._current = self._made(trial.number)
        self._current.before_trial(study, trial)

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        assert self._current is not None
        return self._current.infer_relative_search_space(study, trial)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, object]:
        assert self._current is not None
        return self._current.sample_relative(study, trial, search_space)

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> object:
        assert self._current is not None
        return self._current.sample_independent(study, trial, param_name, param_distribution)


def objectives_of(config: TuneConfig) -> tuple[str, ...]:
    """The objectives, also where one was typed alone."""
    return (config.objective,) if isinstance(config.objective, str) else tuple(config.objective)


def _url(config: TuneConfig, path: Path) -> URL:
    """The database.

    Raises:
        ConfigError: it is none that a search can outlive its process in.
    """
    if config.storage is None:
        file = path.absolute() / _DATABASE
        if set(str(file)) & set("?{}"):
            raise ConfigError(Problem("hydra.sweep.dir", f"a database cannot lie in a path with ?, {{ or }}: {path}"))
        return make_url(f"sqlite:///{file}")
    example = "Write sqlite:////absolute/path/study.db or postgresql://user@host/database"
    try:
        url = make_url(config.storage)
    except ArgumentError as error:
        text = f"expected the URL of a database, found {found(config.storage)}"
        raise ConfigError(Problem("tune.storage", text, example)) from error
    if url.get_backend_name() == "sqlite" and url.database in (None, "", ":memory:"):
        raise ConfigError(Problem("tune.storage", "expected a file, found a database in memory", example))
    return url


def _storage(url: URL) -> RDBStorage:
    # The default of five seconds is little where other programs look into the file.
    options = {"connect_args": {"timeout": _PATIENCE}} if _is_file(url) else {}
    return RDBStorage(url.render_as_string(hide_password=False), engine_kwargs=options)


def _is_file(url: URL) -> bool:
    return url.get_backend_name() == "sqlite"


def _named(url: URL) -> str:
    """The database, without its password."""
    return url.render_as_string(hide_password=True)


@contextmanager
def _explained(url: URL) -> Iterator[None]:
    """Turns what a database refuses when it is first used into an error of the key that names it."""
    try:
        yield
    except (SQLAlchemyError, StorageInternalError, RuntimeError, ImportError) as error:
        hint = "Install the package of that database" if isinstance(error, ImportError) else ""
        raise ConfigError(Problem("tune.storage", f"cannot use {_named(url)}: {_first_line(error)}", hint)) from error


def _first_line(error: BaseException) -> str:
    """What went wrong; of an error that only says that one went before, that one."""
    cause = error.__cause__ if isinstance(error, StorageInternalError | ImportError) and error.__cause__ else error
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    return lines[0] if lines else type(cause).__name__


@contextmanager
def _undone(made: Sequence[Path]) -> Iterator[None]:
    """Where the search is refused, nothing of it is left: removes directories and files that were made for it."""
    try:
        yield
    except BaseException:
        for path in made:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        raise


@contextmanager
def _held(turn: FileLock) -> Iterator[None]:
    try:
        turn.acquire(timeout=_PATIENCE)
    except Timeout:
        raise RltoolError(
            f"another process has held the study for {_PATIENCE} s ({turn.lock_file}). Is one of them stopped?"
        ) from None
    try:
        yield
    finally:
        turn.release()


def _differences(before: Mapping[str, JsonValue], now: Mapping[str, JsonValue]) -> Iterator[Problem]:
    for name, key in (("objective", "tune.objective"), ("seeds", "tune.seeds")):
        if before.get(name) != now[name]:
            yield _difference(key, before.get(name), now[name])
    spaces = [cast("dict[str, JsonValue]", about["space"]) for about in (before, now)]
    bases = [cast("dict[str, JsonValue]", about["base"]) for about in (before, now)]
    searched = spaces[0].keys() | spaces[1].keys()
    for key in sorted(searched):
        if spaces[0].get(key) != spaces[1].get(key):
            yield _difference(key, *(space.get(key, _FIXED) for space in spaces))
    for key in dict.fromkeys((*bases[1], *bases[0])):
        # What was searched and is not any more has been told.
        if bases[0].get(key) != bases[1].get(key) and not any(_below(key, name) for name in searched):
            yield _difference(key, bases[0].get(key), bases[1].get(key))


def _difference(key: str, before: JsonValue, now: JsonValue) -> Problem:
    return Problem(key, f"the search was begun with {_said(before)}, found {_said(now)}")


def _said(value: JsonValue) -> str:
    return value if isinstance(value, str) else found(value)


def _below(key: str, name: str) -> bool:
    return key == name or key.startswith(f"{name}.")


def _reason(jobs: Sequence[SweepJob]) -> str:
    for job in jobs:
        if job.status not in DONE:
            error = (job.record.error or "").strip().splitlines()
            return f"{job.name} {job.status}" + (f": {error[-1]}" if error else "")
    return "it has no runs"

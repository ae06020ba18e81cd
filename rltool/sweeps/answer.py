"""What the jobs of a sweep say together: configurations ranked over their seeds, the best of them, and what failed.

Read from disk at any time, also while jobs run or wait. Free of torch and Hydra.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
from pydantic import JsonValue

from rltool.comparison import SUMMARISED, GroupScores, Scored, choose_score, first_reached, rate, score_of
from rltool.configfiles import flat
from rltool.estimates import Estimate, estimate, improvement
from rltool.figures import counted
from rltool.grouping import Group, differing, few, settings
from rltool.records import Record
from rltool.sweeps import scores
from rltool.sweeps.jobs import WINNER, Sweep, SweepJob, fingerprint

ENDED = ("finished", "solved", "stopped")
"""Statuses of jobs that trained as long as they were to: these are ranked."""
OPEN = ("waiting", "running")
"""Statuses of jobs that something may still come of by itself."""
PRUNED = "pruned"
SEED = "seed"

# Resamples of the bootstrap: as rltool compare takes them, fewer where there are many configurations.
_RESAMPLES, _ALL_RESAMPLES = 10_000, 500_000
# Two groups of seeds are told apart where chance alone would separate them so in one of twenty sweeps: three and three seeds
# that do not overlap can lie in 20 orders, two of which separate them; four and four in 70.
_ORDERS = 40


@dataclass(frozen=True)
class Result:
    """One job.

    Attributes:
        job, run: what it was to do, and what it did.
        status: the run's, or ``waiting``.
        score: None where there is none yet; of a pruned job its last evaluation.
        reached: frames and seconds to the threshold; None where it was not reached, or there is none.
    """

    job: SweepJob
    run: Record
    status: str
    score: float | None = None
    reached: tuple[int, float | None] | None = None

    @property
    def failed(self) -> bool:
        """Whether nothing comes of it unless it is run again."""
        return self.status not in (*ENDED, *OPEN, PRUNED)

    @property
    def error(self) -> str | None:
        """The last line of what ended it; None where nothing did."""
        if not self.failed:
            return None
        lines = [line.strip() for line in (self.run.error or "").splitlines() if line.strip()]
        if lines:
            return lines[-1]
        silent = {"killed": "its process is gone and said nothing", "unknown": "its files do not say how it ended"}
        return silent.get(self.status, f"it was {self.status}")

    def to_json(self) -> dict[str, JsonValue]:
        """All of it as plain values: a row of results.csv."""
        started = bool(self.run.config)
        return {
            "name": self.job.name,
            "status": self.status,
            **{key: value for key, value in self.job.varied.items() if key != SEED},
            "seed": self.run.seed if started else self.job.config.get(SEED),
            "score": self.score,
            "frames": self.run.frames if started else None,
            "seconds": self.run.seconds if started else None,
            "frames_to_threshold": self.reached[0] if self.reached is not None else None,
            "error": self.error,
        }


@dataclass(frozen=True)
class Configuration:
    """Jobs that differ in the seed alone.

    Attributes:
        values: by varied key; the seed is none of them.
        results: the jobs.
        scores: of those that ended; None where none has a score.
        objective: what it is ranked by, the larger the better; None where there is nothing to rank.
        trial: its number in a search; None in a grid.
        lost: how many more jobs it had, whose files are gone or cannot be read.
    """

    values: Mapping[str, JsonValue]
    results: tuple[Result, ...]
    scores: GroupScores | None
    objective: float | None
    trial: int | None
    lost: int = 0

    @property
    def size(self) -> int:
        """How many jobs it has, or had."""
        return len(self.results) + self.lost

    @property
    def counts(self) -> Counter[str]:
        """How many of its jobs have each status."""
        return Counter(result.status for result in self.results)

    @property
    def tier(self) -> int:
        """0: every job ended; 1: some did; 2: it was pruned; 3: there is nothing to rank it by. A lower one ranks first."""
        if self.objective is None:
            return 3
        if self.counts[PRUNED]:
            return 2
        return int(self.scores is None or len(self.scores.runs) < self.size)

    @property
    def mean(self) -> Estimate | None:
        """Mean of the scores over the seeds, with its interval."""
        return self.scores.estimates["mean"] if self.scores is not None else None

    @property
    def iqm(self) -> Estimate | None:
        """Interquartile mean of the scores over the seeds, with its interval."""
        return self.scores.estimates["iqm"] if self.scores is not None else None

    @property
    def frames_to_threshold(self) -> float | None:
        """Median over the seeds; None where that is none, or there is no threshold."""
        return self.scores.frames_to_threshold if self.scores is not None else None

    @property
    def seeds(self) -> list[int]:
        """The seeds of its jobs."""
        return [seed for result in self.results if isinstance(seed := result.job.config.get(SEED), int)]

    @property
    def config(self) -> Mapping[str, JsonValue]:
        """The whole configuration, with the seed of its first job."""
        return self.results[0].job.config

    def to_json(self) -> dict[str, JsonValue]:
        """All of it as plain values."""
        scores = self.scores
        return {
            "values": dict(self.values),
            "trial": self.trial,
            "jobs": [result.job.name for result in self.results],
            "statuses": dict(self.counts),
            "seeds": len(scores.runs) if scores is not None else 0,
            "mean": dict(self.mean.to_json()) if self.mean is not None else None,
            "iqm": dict(self.iqm.to_json()) if self.iqm is not None else None,
            "objective": self.objective,
            "reached": len(scores.reached) if scores is not None else 0,
            "frames_to_threshold": scores.frames_to_threshold if scores is not None else None,
            "seconds_to_threshold": scores.seconds_to_threshold if scores is not None else None,
        }


@dataclass(frozen=True)
class Ranking:
    """The configurations on one environment.

    Attributes:
        env: its full id.
        threshold: the mean return to be reached; None for none.
        keys: those that tell the configurations apart.
        ranked: best first.
        best: the one to take; None before anything can be said.
        second: the next one after it; None where there is none.
        better: how probably a seed of the best does better than one of the second, by what they are ranked by.
        winner: the best once more, on fresh seeds; None where it was not run so.
        front: with several objectives, those of which no other one is as good in all of them and better in one.
    """

    env: str
    threshold: float | None
    keys: tuple[str, ...]
    ranked: tuple[Configuration, ...]
    best: Configuration | None
    second: Configuration | None
    better: Estimate | None
    winner: Configuration | None
    front: tuple[Configuration, ...] = ()

    @property
    def can_tell(self) -> bool:
        """Whether there are seeds enough to tell the best from the second."""
        pair = (self.best, self.second)
        seeds = [len(one.scores.runs) for one in pair if one is not None and one.scores is not None]
        return len(seeds) == 2 and math.comb(sum(seeds), seeds[0]) >= _ORDERS

    @property
    def really_worse(self) -> bool | None:
        """Whether the second really is worse than the best; None where the seeds are too few to say, or there is none."""
        if self.better is None or self.better.low is None or not self.can_tell:
            return None
        return self.better.low > 0.5

    def to_json(self) -> dict[str, JsonValue]:
        """All of it as plain values; the best and the second are among the configurations, by their places."""
        at = {id(one): place for place, one in enumerate(self.ranked)}
        return {
            "threshold": self.threshold,
            "keys": list(self.keys),
            "configurations": [one.to_json() for one in self.ranked],
            "best": at[id(self.best)] if self.best is not None else None,
            "second": at[id(self.second)] if self.second is not None else None,
            "improvement": dict(self.better.to_json()) if self.better is not None else None,
            "really_worse": self.really_worse,
            "winner": self.winner.to_json() if self.winner is not None else None,
            "front": [at[id(one)] for one in self.front],
        }


@dataclass(frozen=True)
class Answer:
    """What a sweep says.

    Attributes:
        sweep: which.
        at: the score of a job: ``final``, its last policy on fresh episodes, or ``last``, its last evaluation in training.
        objectives: of a search; ranked by the first: ``final`` (the mean score), ``auc`` or ``frames``.
        results: every job.
        rankings: one for each environment.
        notes: what a reader has to know.
    """

    sweep: Sweep
    at: str
    objectives: tuple[str, ...]
    results: tuple[Result, ...]
    rankings: tuple[Ranking, ...]
    notes: tuple[str, ...]

    @property
    def counts(self) -> Counter[str]:
        """How many jobs have each status."""
        return Counter(result.status for result in self.results)

    @property
    def failures(self) -> list[Result]:
        """The jobs that failed, were killed or interrupted."""
        return [result for result in self.results if result.failed]

    @property
    def is_open(self) -> bool:
        """Whether jobs wait or run."""
        return any(result.status in OPEN for result in self.results)

    def to_json(self) -> dict[str, JsonValue]:
        """All of it as plain values; ``rltool sweep --json`` promises these keys."""
        return {
            "sweep": str(self.sweep.path),
            "kind": self.sweep.kind,
            "overrides": list(self.sweep.overrides),
            "score": self.at,
            "objectives": list(self.objectives),
            "statuses": dict(self.counts),
            "environments": {ranking.env: ranking.to_json() for ranking in self.rankings},
            "jobs": [result.to_json() for result in self.results],
            "failures": [
                {"name": one.job.name, "title": one.job.title, "error": one.error, "console": str(one.job.console)}
                for one in self.failures
            ],
            "notes": list(self.notes),
        }


def answer(sweep: Sweep) -> Answer:
    """What the jobs of a sweep say, as far as they are; jobs that go on count once they have ended."""
    notes = [f"left out: {text}" for text in sweep.damaged]
    if sweep.gone:
        notes.append(
            f"gone from the sweep's directory: {few(sweep.gone, 'job')}; the same command runs what is missing"
        )
    found = [Result(job, job.record, _status(job)) for job in sweep.jobs]
    ended = tuple(result.run for result in found if result.status in ENDED)
    at = choose_score([Group("", ended)], SUMMARISED, "final", notes) if ended else "final"
    envs = dict.fromkeys(env_of(result.job) for result in found)
    goals = {env: _goal([result for result in found if env_of(result.job) == env]) for env in envs}
    results = tuple(_scored(result, at, goals[env_of(result.job)]) for result in found)
    without = sum(result.status in ENDED and result.score is None for result in results)
    if without:
        notes.append(
            f"{without} of {len(ended)} jobs that ended have no evaluation and no score: eval.interval=FRAMES evaluates"
        )
    notes += _of_runs([result for result in results if result.score is not None])
    objectives = _objectives_of(sweep, notes)
    rankings = [
        _ranking(env, goals[env], [result for result in results if env_of(result.job) == env], sweep, objectives)
        for env in envs
    ]
    if any(one.counts[PRUNED] for ranking in rankings for one in ranking.ranked):
        notes.append("of a pruned trial the last evaluations are shown; it ranks behind those that were not")
    notes += _failed_trials(sweep, results)
    return Answer(sweep, at, objectives, results, tuple(rankings), tuple(notes))


def _failed_trials(sweep: Sweep, results: Sequence[Result]) -> Iterator[str]:
    """Trials that came to nothing though no run of them failed: the search said why, once."""
    failed = sweep.details.get("failed")
    told = {result.job.trial for result in results if result.failed}
    for number, reason in failed.items() if isinstance(failed, Mapping) else ():
        if int(number) not in told:
            yield f"trial {number} failed: {reason}"


def _of_runs(results: Sequence[Result]) -> Iterator[str]:
    """What makes scores less, or more, than they seem."""
    cut = [result.job.name for result in results if result.run.cut("last")]
    if cut:
        yield f"episodes of {counted(len(cut), 'job')} were cut at eval.max_steps: {few(cut, 'job')}"
    unread = [f"{one.job.name} ({'; '.join(one.run.all_problems)})" for one in results if one.run.all_problems]
    if unread:
        yield f"not all can be read of {few(unread, 'job')}"
    longer = [one.job.name for one in results if one.run.total_frames not in (None, one.job.config.get("total_frames"))]
    if longer:
        yield f"trained for another budget than the sweep's: {few(longer, 'job')}"


def _status(job: SweepJob) -> str:
    """As the job's; one that was called off before it began waits for nothing."""
    status = job.status
    return PRUNED if status == "waiting" and job.stop_file.exists() else status


def env_of(job: SweepJob) -> str:
    """The full id of a job's environment."""
    node = job.config.get("env")
    told = node if isinstance(node, Mapping) else {}
    return str(told.get("id") or told.get("entry_point") or "?")


def suffix(found: Answer, ranking: Ranking) -> str:
    """What ends the names of files about one environment of several; empty where there is one only."""
    return "" if len(found.rankings) == 1 else "-" + re.sub(r"[^A-Za-z0-9._-]+", "-", ranking.env).strip("-")


def _goal(results: Sequence[Result]) -> float | None:
    """The mean return to be reached: that at which the jobs stop, where they agree on one, else the environment's own."""
    stops = [cast("Mapping[str, JsonValue]", result.job.config.get("stop") or {}) for result in results]
    wanted = {stop.get("return_threshold") for stop in stops}
    if len(wanted) == 1 and isinstance(value := next(iter(wanted)), int | float):
        return float(value)
    started = next((result.run for result in results if result.run.config), None)
    return started.threshold if started is not None else None


def _scored(result: Result, at: str, goal: float | None) -> Result:
    if result.status in OPEN:
        return result
    counts = at if result.status in ENDED else "last" if result.status == PRUNED else None
    score = score_of(result.run, SUMMARISED, counts) if counts is not None else None
    finite = float(score) if score is not None and math.isfinite(score) else None
    return Result(result.job, result.run, result.status, finite, first_reached(result.run, SUMMARISED, goal))


def _objectives_of(sweep: Sweep, notes: list[str]) -> tuple[str, ...]:
    told = sweep.details.get("objective")
    names = tuple(str(name) for name in (told if isinstance(told, list) else [told]) if name in scores.OBJECTIVES)
    if len(names) > 1:
        notes.append(f"ranked by the first of several objectives ({', '.join(names)}); the search weighs all of them")
    return names or ("final",)


def _ranking(
    env: str, goal: float | None, results: Sequence[Result], sweep: Sweep, objectives: Sequence[str]
) -> Ranking:
    keys = [key for key in sweep.varied if key != SEED]
    grouped: dict[str, list[Result]] = {}
    fresh: dict[int | None, list[Result]] = {}
    for result in results:
        if result.job.name.startswith(WINNER):
            fresh.setdefault(result.job.trial, []).append(result)
            continue
        of = result.job.trial if result.job.trial is not None else settings(result.job.config)
        name = json.dumps(of, sort_keys=True)  # whatever was typed, and in however many sessions
        grouped.setdefault(name, []).append(result)
    resamples = min(_RESAMPLES, _ALL_RESAMPLES // max(len(grouped), 1))
    told = _telling(keys, [members[0].job for members in grouped.values()])
    lost = _lost(sweep)
    unordered = [
        replace(
            _configuration(members, told, objectives[0], resamples),
            lost=lost[fingerprint(members[0].job.config)] if members[0].job.trial is None else 0,
        )
        for members in grouped.values()
    ]
    ranked = tuple(sorted(unordered, key=_place))
    best = _best(ranked, fresh, is_open=any(result.status in OPEN for result in results))
    again = fresh.get(best.trial) if best is not None else None
    winner = _configuration(again, told, objectives[0], resamples) if again else None
    second = next((one for one in ranked if one is not best and best is not None and one.tier == best.tier), None)
    better = None
    if best is not None and second is not None and best.scores is not None and second.scores is not None:
        pair = [np.array(_worth(one.results, objectives[0])) for one in (best, second)]
        better = estimate(pair, improvement, _RESAMPLES) if all(of.size for of in pair) else None
    front = _front([one for one in ranked if one.tier == 0], objectives) if len(objectives) > 1 else ()
    return Ranking(env, goal, tuple(told), ranked, best, second, better, winner, front)


def _lost(sweep: Sweep) -> Counter[str]:
    """How many jobs of a grid are gone or cannot be read, by the fingerprint of their configuration."""
    told = sweep.details.get("jobs")
    there = {job.name for job in sweep.jobs}
    return Counter(str(of) for name, of in (told.items() if isinstance(told, Mapping) else ()) if name not in there)


def _place(one: Configuration) -> tuple[int, float, float]:
    """What sorts configurations, the best first: of equal ones that which reaches the threshold first."""
    frames = one.frames_to_threshold
    return one.tier, -(one.objective or 0.0), math.inf if frames is None else frames


def _telling(keys: Iterable[str], jobs: Sequence[SweepJob]) -> list[str]:
    """The keys whose values differ among the jobs of different configurations: of the varied ones, and where these do not tell
    all of them apart (a config file was another one in an earlier session), of all."""
    telling = [key for key in keys if _distinct([key], jobs) > 1]
    if _distinct(telling, jobs) == len(jobs) or any(job.trial is not None for job in jobs):
        return telling
    others = differing([settings(job.config) for job in jobs])
    return telling + [key for key in others if not any(key == one or key.startswith(f"{one}.") for one in telling)]


def _distinct(keys: Sequence[str], jobs: Sequence[SweepJob]) -> int:
    return len({json.dumps([_value(job, key) for key in keys], sort_keys=True) for job in jobs})


def _value(job: SweepJob, key: str) -> JsonValue:
    """A job's value of a key as it is in its configuration; of a group the option that was typed, else its kind."""
    leaves = flat(job.config)
    node = job.config.get(key)
    kind = node.get("kind") if isinstance(node, Mapping) else None
    return cast("JsonValue", leaves[key]) if key in leaves else job.varied.get(key, kind)


def _configuration(results: Sequence[Result], keys: Sequence[str], objective: str, resamples: int) -> Configuration:
    known = [Scored(one.run, one.score, one.reached) for one in results if one.score is not None]
    rated = rate("", known, "mean", resamples) if known else None
    values = {key: _value(results[0].job, key) for key in keys}
    return Configuration(values, tuple(results), rated, _objective(results, objective), results[0].job.trial)


def _best(ranked: Sequence[Configuration], fresh: Collection[int | None], *, is_open: bool) -> Configuration | None:
    """The first, if it was not pruned. Of a search that is over it is one that was run on fresh seeds: the search has looked
    at each job by itself, and the first of it may be another one where not all were judged on fresh episodes."""
    whole = [one for one in ranked if one.tier < 2]
    again = [] if is_open else [one for one in whole if one.trial is not None and one.trial in fresh]
    return next(iter([*again, *whole]), None)


def _objective(results: Sequence[Result], objective: str) -> float | None:
    """What a configuration is ranked by, the larger the better: of those of its jobs that have a score."""
    worth = _worth(results, objective)
    return statistics.fmean(worth) if worth else None


def _worth(results: Sequence[Result], objective: str) -> list[float]:
    """What each job with a score is worth, the larger the better; empty where one of them cannot be judged."""
    if objective == "final":  # as it is shown
        return [one.score for one in results if one.score is not None]
    found = [scores.score(objective, [one.job]) for one in results if one.score is not None]
    sign = 1 if scores.OBJECTIVES[objective] == "maximize" else -1
    known = [sign * value for value in found if value is not None]
    return known if len(known) == len(found) else []


def _front(rows: Sequence[Configuration], objectives: Sequence[str]) -> tuple[Configuration, ...]:
    """The configurations of which no other one is as good in all objectives and better in one."""
    worth = [[_objective(row.results, name) for name in objectives] for row in rows]
    known = [(row, [value for value in of if value is not None]) for row, of in zip(rows, worth, strict=True)]
    whole = [(row, of) for row, of in known if len(of) == len(objectives)]

    def beaten(of: Sequence[float]) -> bool:
        return any(
            all(a >= b for a, b in zip(other, of, strict=True)) and list(other) != list(of) for _, other in whole
        )

    return tuple(row for row, of in whole if not beaten(of))

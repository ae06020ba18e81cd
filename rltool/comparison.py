"""Groups of runs side by side: their scores with 95 % intervals, and what it took them to reach a threshold."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from pydantic import JsonValue

from rltool.curves import choose_estimate, common, read_series
from rltool.estimates import STATISTICS, TITLES, Array, Estimate, estimate, improvement
from rltool.grouping import Group
from rltool.records import Record
from rltool.wording import listed

# The metric that a summary holds, too, and that fresh episodes are judged by.
SUMMARISED = "eval/return_mean"


@dataclass(frozen=True)
class Scored:
    """A run and its score.

    Attributes:
        run: the run.
        score: the larger the better.
        reached: frames and seconds of the first evaluation at the threshold; None where there was none, or no threshold.
    """

    run: Record
    score: float
    reached: tuple[int, float | None] | None

    def to_json(self) -> dict[str, JsonValue]:
        """All of it as plain values."""
        frames, seconds = self.reached if self.reached is not None else (None, None)
        return {
            "path": str(self.run.path),
            "seed": self.run.seed,
            "status": self.run.status,
            "score": self.score,
            "frames": self.run.frames,
            "seconds": self.run.seconds,
            "frames_to_threshold": frames,
            "seconds_to_threshold": seconds,
        }


@dataclass(frozen=True)
class GroupScores:
    """The runs of a group on one environment.

    Attributes:
        label: of the group.
        runs: those that have a score.
        estimates: ``iqm``, ``mean`` and ``median`` over them.
        chosen: which of these the picture shows.
    """

    label: str
    runs: tuple[Scored, ...]
    estimates: Mapping[str, Estimate]
    chosen: str

    @property
    def scores(self) -> Array:
        """``[runs]``."""
        return np.array([scored.score for scored in self.runs], float)

    @property
    def estimate(self) -> Estimate:
        """The one that the picture shows."""
        return self.estimates[self.chosen]

    @property
    def reached(self) -> list[tuple[int, float | None]]:
        """Frames and seconds to the threshold, of the runs that reached it."""
        return [scored.reached for scored in self.runs if scored.reached is not None]

    @property
    def frames_to_threshold(self) -> float | None:
        """Median over all runs, those that never reached it counted as later than any; None where that is half or more."""
        return self._median([frames for frames, _ in self.reached])

    @property
    def seconds_to_threshold(self) -> float | None:
        """As :attr:`frames_to_threshold`, in seconds of the training loop."""
        return self._median([seconds for _, seconds in self.reached if seconds is not None])

    @property
    def frames(self) -> float:
        """Median of the frames of a run."""
        return statistics.median(scored.run.frames for scored in self.runs)

    @property
    def seconds(self) -> float | None:
        """Median of the seconds of a run; None where none says them."""
        known = [scored.run.seconds for scored in self.runs if scored.run.seconds is not None]
        return statistics.median(known) if known else None

    @property
    def frames_per_second(self) -> float | None:
        """Median of the frames a second of a run; None where none says them."""
        known = [speed for scored in self.runs if (speed := _speed(scored.run)) is not None]
        return statistics.median(known) if known else None

    def _median(self, known: Sequence[float]) -> float | None:
        later = [math.inf] * (len(self.runs) - len(known))
        middle = statistics.median([*known, *later]) if self.runs else math.inf
        return middle if math.isfinite(middle) else None

    def to_json(self) -> dict[str, JsonValue]:
        """All of it as plain values."""
        return {
            "runs": [scored.to_json() for scored in self.runs],
            **{name: dict(estimated.to_json()) for name, estimated in self.estimates.items()},
            "reached": len(self.reached),
            "frames_to_threshold": self.frames_to_threshold,
            "seconds_to_threshold": self.seconds_to_threshold,
            "frames": self.frames,
            "seconds": self.seconds,
            "frames_per_second": self.frames_per_second,
        }


@dataclass(frozen=True)
class Improvement:
    """How probably a run of one group scores above one of another; ties as half.

    Attributes:
        better, worse: labels.
        probability: with its interval.
    """

    better: str
    worse: str
    probability: Estimate

    def to_json(self) -> dict[str, JsonValue]:
        """All of it as plain values."""
        return {"a": self.better, "b": self.worse, **self.probability.to_json()}


@dataclass(frozen=True)
class Scores:
    """All groups on one environment, or the normalised scores on all of them.

    Attributes:
        env: the environment.
        threshold: what is to be reached; None for nothing.
        groups: by label; those without a score are left out.
        improvements: of each group over each that comes after it.
    """

    env: str
    threshold: float | None
    groups: Mapping[str, GroupScores]
    improvements: tuple[Improvement, ...]

    @property
    def estimate_name(self) -> str:
        """Which estimate the picture shows."""
        return TITLES[next(iter(self.groups.values())).chosen]

    def to_json(self) -> dict[str, JsonValue]:
        """All of it as plain values."""
        return {
            "threshold": self.threshold,
            "groups": {label: group.to_json() for label, group in self.groups.items()},
            "improvement": [pair.to_json() for pair in self.improvements],
        }


@dataclass(frozen=True)
class Aggregate:
    """Groups over several environments.

    Attributes:
        estimates: label -> ``iqm``, ``mean`` and ``median`` of the scores divided by the thresholds; empty where they cannot
            be.
        improvements: the mean over the environments.
    """

    estimates: Mapping[str, Mapping[str, Estimate]]
    improvements: tuple[Improvement, ...]

    def to_json(self) -> dict[str, JsonValue]:
        """All of it as plain values."""
        return {
            "normalised": {
                label: {name: dict(one.to_json()) for name, one in estimates.items()}
                for label, estimates in self.estimates.items()
            },
            "improvement": [pair.to_json() for pair in self.improvements],
        }


def compare(
    groups: Sequence[Group],
    env: str,
    threshold: float | None,
    *,
    metric: str,
    at: str,
    resamples: int,
    notes: list[str],
) -> Scores:
    """The groups on one environment; adds what a reader has to know to the notes.

    Args:
        groups: each with a label of its own; those without a run on it are left out.
        env, threshold: see :class:`Scores`.
        metric: a name in metrics.jsonl.
        at: ``final``, ``last``, ``best`` or ``auc``; see :func:`choose_score`.
        resamples: of the bootstrap.
        notes: lines.
    """
    present = [group for group in groups if group.of(env)]
    scores = _areas(present, env, metric, notes) if at == "auc" else {}
    found: dict[str, list[Scored]] = {}
    for group in present:
        runs = group.of(env)
        known = [
            Scored(run, score, first_reached(run, metric, threshold))
            for run in runs
            if (score := scores.get(run) if at == "auc" else score_of(run, metric, at)) is not None
        ]
        if len(known) < len(runs):
            notes.append(f"{group.label}: {len(runs) - len(known)} of {len(runs)} runs on {env} have no {metric}")
        if known:
            found[group.label] = known
            notes += _of_runs(group.label, env, known)
    if len(found) == 1 < len(groups):
        notes.append(f"{env}: no group but {next(iter(found))} has a score there")
    notes += _of_budgets(env, found)
    chosen = choose_estimate("auto", [len(known) for known in found.values()])
    rated = {label: rate(label, known, chosen, resamples) for label, known in found.items()}
    pairs = _improvements({label: [group.scores] for label, group in rated.items()}, resamples)
    return Scores(env, threshold, rated, pairs)


def aggregate(all_scores: Sequence[Scores], resamples: int, notes: list[str]) -> Aggregate | None:
    """The groups over all environments that every group was run on, each a stratum; None where that is one or none.

    Scores are divided by the thresholds, where all have one above 0: 1 is as good as solved, 0 is a return of 0.
    """
    labels = list(dict.fromkeys(label for scores in all_scores for label in scores.groups))
    shared = [scores for scores in all_scores if len(scores.groups) == len(labels)]
    left = [scores.env for scores in all_scores if scores not in shared]
    if left and len(shared) > 1:
        notes.append(f"not in the rows over all environments, as a group has no score there: {', '.join(left)}")
    if len(shared) < 2:
        return None
    raw = {label: [scores.groups[label].scores for scores in shared] for label in labels}
    goals = [scores.threshold for scores in shared]
    estimates: dict[str, dict[str, Estimate]] = {}
    if all(goal is not None and goal > 0 for goal in goals):
        for label, strata in raw.items():
            divided = [values / goal for values, goal in zip(strata, goals, strict=True) if goal]
            estimates[label] = {name: estimate(divided, of, resamples) for name, of in STATISTICS.items()}
    else:
        without = [scores.env for scores in shared if scores.threshold is None or scores.threshold <= 0]
        notes.append(
            f"scores are not averaged over the environments: {', '.join(without)} has no threshold above 0 to divide them by"
        )
    return Aggregate(estimates, _improvements(raw, resamples))


def rate(label: str, runs: Sequence[Scored], chosen: str, resamples: int) -> GroupScores:
    """What the scores of runs say together; see :class:`GroupScores`.

    Args:
        label, runs, chosen: see there; one run or more.
        resamples: of the bootstrap.
    """
    values = np.array([scored.score for scored in runs], float)
    estimates = {name: estimate([values], statistic, resamples) for name, statistic in STATISTICS.items()}
    return GroupScores(label, tuple(runs), estimates, chosen)


def _improvements(strata: Mapping[str, Sequence[Array]], resamples: int) -> tuple[Improvement, ...]:
    labels = list(strata)
    return tuple(
        Improvement(a, b, estimate([*strata[a], *strata[b]], improvement, resamples))
        for number, a in enumerate(labels)
        for b in labels[number + 1 :]
    )


def choose_score(groups: Sequence[Group], metric: str, at: str, notes: list[str]) -> str:
    """Which score is compared: ``at``; of ``final`` what every run has, ``last`` where one lacks it, and then the notes say so.

    Args:
        groups: all that are compared.
        metric: a name in metrics.jsonl; only returns are judged on fresh episodes.
        at: ``final``, ``last``, ``best`` or ``auc``.
        notes: lines.
    """
    if at != "final":
        return at
    if metric != SUMMARISED:
        return "last"
    runs = dict.fromkeys(run for group in groups for run in group.runs)
    without = sum(score_of(run, metric, at) is None for run in runs)
    if not without:
        return at
    notes.append(
        f"{without} of {len(runs)} runs were not judged on fresh episodes after training; the last evaluation in training "
        "counts for all"
    )
    return "last"


def score_of(run: Record, metric: str, at: str) -> float | None:
    """The score of one run; None where it has none.

    Args:
        run: the run.
        metric: a name in metrics.jsonl.
        at: ``final``, the mean return of the last policy on fresh episodes; ``last`` or ``best``, the last or the highest
            value in training, of a run that logged no metrics what its summary says of evaluations.
    """
    if at == "final":
        return run.fresh if metric == SUMMARISED else None
    curve = run.curve(metric)
    if curve:
        return max(value for _, value in curve) if at == "best" else curve[-1][1]
    return _mean(run.summary.get(f"{at}_evaluation") if metric == SUMMARISED else None)


def _mean(written: object) -> float | None:
    """The mean of an evaluation as a summary holds it."""
    value = written.get("mean") if isinstance(written, Mapping) else None
    return float(value) if isinstance(value, int | float) else None


def _areas(groups: Sequence[Group], env: str, metric: str, notes: list[str]) -> dict[Record, float]:
    """The mean of each run's curve over the frames that all runs of all groups have."""
    series = {
        run: one for group in groups for run in group.of(env) if (one := read_series(run, metric, "frames", None))
    }
    if not series:
        return {}
    x, values = common(list(series.values()))
    if len(x) < 2:
        notes.append(f"{env}: the runs have no two frames in common to take a mean between")
        return {}
    notes.append(f"{env}: the mean is over frames {x[0]:,.0f} to {x[-1]:,.0f}, which all runs have")
    areas = np.trapezoid(values, x, axis=1) / (x[-1] - x[0])
    return dict(zip(series, map(float, areas), strict=True))


def first_reached(run: Record, metric: str, threshold: float | None) -> tuple[int, float | None] | None:
    """Frames and seconds of a run's first value at the threshold; None where there was none, or there is no threshold."""
    if threshold is None:
        return None
    frames = next((frames for frames, value in run.curve(metric) if value >= threshold), None)
    if frames is None:
        return None
    times = [(0, 0.0), *run.times]
    if frames > times[-1][0]:
        return frames, None
    return frames, float(np.interp(frames, [frame for frame, _ in times], [seconds for _, seconds in times]))


def _speed(run: Record) -> float | None:
    written = run.summary.get("frames_per_second")
    if isinstance(written, int | float):
        return float(written)
    return run.times[-1][0] / run.times[-1][1] if run.times else None


def _of_runs(label: str, env: str, runs: Sequence[Scored]) -> list[str]:
    """What makes an interval less than it looks."""
    notes = []
    if len(runs) == 1:
        notes.append(f"{label}: one seed on {env}; an interval over one seed cannot be had")
    elif len({scored.score for scored in runs}) == 1:
        notes.append(f"{label}: all seeds on {env} score the same; an interval of no width says nothing of other seeds")
    elif len(runs) < 5:
        notes.append(f"{label}: {len(runs)} seeds on {env}; an interval over so few is rough, and rather too narrow")
    if cut := sum(bool(scored.run.cut("last")) for scored in runs):
        notes.append(f"{label}: episodes of {cut} of {len(runs)} runs on {env} were cut at eval.max_steps")
    unfinished: dict[str, int] = {}
    for scored in runs:
        if scored.run.status not in ("finished", "solved"):
            unfinished[scored.run.status] = unfinished.get(scored.run.status, 0) + 1
    if unfinished:
        counts = ", ".join(f"{count} {status}" for status, count in unfinished.items())
        notes.append(f"{label}: not every run on {env} is finished ({counts}); what they have measured so far counts")
    return notes


def _of_budgets(env: str, groups: Mapping[str, Sequence[Scored]]) -> list[str]:
    notes = []
    counts = {label: len(runs) for label, runs in groups.items()}
    if len(set(counts.values())) > 1:
        notes.append(f"{env}: unequal numbers of seeds: {listed([f'{n} {label}' for label, n in counts.items()])}")
    frames = {label: statistics.median(scored.run.frames for scored in runs) for label, runs in groups.items()}
    if frames and max(frames.values()) > 1.05 * min(frames.values()):
        told = "; ".join(f"{label} {count:,.0f}" for label, count in frames.items())
        notes.append(f"{env}: unequal budgets (median frames): {told}")
    return notes

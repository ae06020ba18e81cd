"""What the runs of a trial say while they run, and what they are worth at the end. Read from disk; free of torch and Optuna."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from statistics import fmean
from typing import Literal

import numpy as np
from pydantic import JsonValue

from rltool.errors import Problem
from rltool.importing import import_user_module
from rltool.sweeps.jobs import DONE, SweepJob

OBJECTIVES: dict[str, Literal["maximize", "minimize"]] = {"final": "maximize", "auc": "maximize", "frames": "minimize"}
"""The objectives of ``tune.objective``, and what is sought of each."""

NEVER = 2
"""A run that never reaches the threshold counts as if it had taken so many times its budget."""

_RETURN = "eval/return_mean"


def goal(config: Mapping[str, JsonValue]) -> float | None:
    """The mean return to be reached: ``stop.return_threshold``, else that at which the environment counts as solved."""
    typed = _at(config, "stop", "return_threshold")
    if isinstance(typed, int | float):
        return float(typed)
    module, _, name = str(_at(config, "env", "id")).rpartition(":")
    import gymnasium

    with suppress(Exception):  # of names that no plugin has registered, and of modules of the user's, in many ways
        if module:
            import_user_module(module, "env.id")
        return gymnasium.spec(name).reward_threshold
    return None


def interval(config: Mapping[str, JsonValue]) -> int | None:
    """Frames between two evaluations; None for none."""
    found = _at(config, "eval", "interval")
    return found if isinstance(found, int) else None


def budget(config: Mapping[str, JsonValue]) -> int:
    """Frames of a run; below 0 for no end."""
    found = config.get("total_frames")
    return found if isinstance(found, int) else -1


def immeasurable(objectives: Sequence[str], config: Mapping[str, JsonValue], *, pruned: bool) -> list[Problem]:
    """Why trials of a configuration cannot be told apart; empty where they can.

    Args:
        objectives: see :data:`OBJECTIVES`.
        config: of any of the runs: what is asked of it is the same for all.
        pruned: whether they may be ended early.
    """
    problems = []
    if len(set(objectives)) < len(objectives) or not objectives:
        problems.append(Problem("tune.objective", f"expected different objectives, found {list(objectives)}"))
    if budget(config) < 1:
        problems.append(Problem("total_frames", "a search needs a budget for each run", "Give a number of frames"))
    needy = [name for name in objectives if name != "final" or not _at(config, "eval", "final_episodes")]
    what = f"tune.objective={needy[0]}" if needy else "tune.pruner" if pruned else ""
    if what and interval(config) is None:
        problems.append(Problem("eval.interval", f"{what} needs evaluations, found null", "Give a number of frames"))
    if what and _at(config, "logging", "kind") == "none":
        problems.append(Problem("logging", f"{what} reads metrics.jsonl, found none", "Take another logging: csv, say"))
    if "frames" in objectives and goal(config) is None:
        problems.append(
            Problem(
                "tune.objective",
                f"frames needs a return to be reached, and {_at(config, 'env', 'id')} names none",
                "Give stop.return_threshold=RETURN",
            )
        )
    return problems


def progress(jobs: Sequence[SweepJob]) -> list[tuple[int, float]]:
    """The mean over a trial's runs at each evaluation that all of them have had.

    A run that is over stays at its last evaluation.

    Returns:
        Pairs of the evaluation's number (of whole ``eval.interval`` in its frames: alike in trials whose batches differ) and
        the mean return.
    """
    curves = [_numbered(job) for job in jobs]
    if not all(curves):
        return []
    ends = [math.inf if job.status in DONE else max(curve) for job, curve in zip(jobs, curves, strict=True)]
    begins = max(min(curve) for curve in curves)
    numbers = sorted(set().union(*curves))
    return [
        (number, fmean(curve[max(known for known in curve if known <= number)] for curve in curves))
        for number in numbers
        if begins <= number <= min(ends)
    ]


def score(objective: str, jobs: Sequence[SweepJob]) -> float | None:
    """What a trial is worth: the mean over its runs; None where one of them cannot be judged."""
    values = [_SCORES[objective](job) for job in jobs]
    known = [value for value in values if value is not None and math.isfinite(value)]
    return fmean(known) if known and len(known) == len(values) else None


def _final(job: SweepJob) -> float | None:
    """The return of the policy at the end: on fresh episodes, else at the last evaluation."""
    record = job.record
    mean = (record.final("last") or {}).get("mean")
    if isinstance(mean, int | float):
        return float(mean)
    return None if record.last is None else record.last[1]


def _auc(job: SweepJob) -> float | None:
    """The mean return over the frames of the budget, in straight lines between evaluations; what was measured first holds
    from the start, what was measured last until the end, of a run that was solved before, too."""
    curve = dict(job.record.curve(_RETURN))
    if not curve:
        return None
    frames, returns = list(curve), list(curve.values())
    end = max(budget(job.config), frames[-1])
    return float(np.trapezoid([returns[0], *returns, returns[-1]], [0, *frames, end]) / end)


def _frames(job: SweepJob) -> float | None:
    """Frames of the first evaluation at the goal; ``NEVER`` times the budget where there was none."""
    wanted, curve = goal(job.config), job.record.curve(_RETURN)
    if wanted is None or not curve:
        return None
    reached = next((frames for frames, value in curve if value >= wanted), None)
    return float(NEVER * budget(job.config) if reached is None else reached)


_SCORES = {"final": _final, "auc": _auc, "frames": _frames}


def _numbered(job: SweepJob) -> dict[int, float]:
    """The evaluations of a run by number; of two with the same the first: what was told is not told otherwise later."""
    numbered: dict[int, float] = {}
    if (every := interval(job.config)) is not None:
        for frames, value in job.record.curve(_RETURN):
            numbered.setdefault(frames // every, value)
    return numbered


def _at(config: Mapping[str, JsonValue], group: str, key: str) -> JsonValue:
    node = config.get(group)
    return node.get(key) if isinstance(node, dict) else None

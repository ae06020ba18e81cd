"""Several evaluations beside each other, and what they say together. Free of torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rltool.intervals import interquartile_mean, nested_interval

if TYPE_CHECKING:
    from pathlib import Path

    from rltool.checkpoint import Header

# Keys of the env node that change nothing about the episodes.
_HOW = ("num_envs", "backend", "timeout")


@dataclass(frozen=True)
class Entry:
    """The evaluation of one checkpoint in one mode.

    Attributes:
        path: the checkpoint, as it was found.
        report: the values of an EvalReport.
        algo: kind of its algorithm.
        training_seed: seed of its run.
        frames: frames that its policy was trained for.
        kind: ``best``, ``last`` or the frames of a numbered checkpoint; empty for a file outside of a run.
        env: its env node, as it was evaluated.
    """

    path: Path
    report: Mapping[str, Any]
    algo: str
    training_seed: int | None
    frames: int
    kind: str
    env: Mapping[str, object]

    @classmethod
    def of(cls, path: Path, header: Header, report: Mapping[str, Any], env: Mapping[str, object]) -> Entry:
        """An entry from what is known of its checkpoint."""
        seed, algo = header.config.get("seed"), header.config.get("algo")
        return cls(
            path,
            report,
            str(algo["kind"]) if isinstance(algo, Mapping) else "",
            seed if isinstance(seed, int) else None,
            header.frames,
            header.path.stem if header.run_directory is not None else "",
            {key: value for key, value in env.items() if key not in _HOW},
        )

    @property
    def task(self) -> tuple[str, str, str, str]:
        """What entries share that are averaged: environment with its arguments, algorithm, which checkpoint of a run."""
        return (self.algo, str(self.report["env"]), self.kind, json.dumps(self.env, sort_keys=True, default=str))

    def to_json(self) -> dict[str, object]:
        """The report, and what it is of."""
        told = {"algo": self.algo, "training_seed": self.training_seed, "frames": self.frames, "env_config": self.env}
        return {**self.report, **told}


def by_task(entries: Sequence[Entry]) -> list[list[Entry]]:
    """Entries of one task and one mode together, in the order of the first of each."""
    groups: dict[object, list[Entry]] = {}
    for entry in entries:
        groups.setdefault((entry.task, entry.report["deterministic"]), []).append(entry)
    return list(groups.values())


def overall(entries: Sequence[Entry]) -> dict[str, Any]:
    """What the entries of one task and one mode say together.

    Returns:
        ``mean``: mean over checkpoints of their means. ``ci_low``, ``ci_high``: its 95 % interval, over checkpoints and
        episodes (:func:`rltool.intervals.nested_interval`). ``iqm``, ``median``, ``min``, ``max``, ``success_rate``: of
        all their episodes together.
    """
    first = entries[0]
    groups = [entry.report["returns"] for entry in entries]
    returns = np.concatenate([np.asarray(group, np.float64) for group in groups])
    low, high = nested_interval(groups)
    thresholds = {entry.report["threshold"] for entry in entries}
    threshold = thresholds.pop() if len(thresholds) == 1 else None
    return {
        "algo": first.algo,
        "env": first.report["env"],
        "kind": first.kind,
        "deterministic": first.report["deterministic"],
        "checkpoints": len(entries),
        "training_seeds": [entry.training_seed for entry in entries],
        "mean": float(np.mean([np.mean(group) for group in groups])),
        "ci_low": low,
        "ci_high": high,
        "iqm": interquartile_mean(returns.tolist()),
        "median": float(np.median(returns)),
        "min": float(returns.min()),
        "max": float(returns.max()),
        "success_rate": None if threshold is None else float((returns >= threshold).mean()),
        "threshold": threshold,
        "episodes": len(returns),
    }

"""Several evaluations beside each other, and what they say together. Free of torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rltool.grouping import differing, settings
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
        settings: what shaped its training, see :func:`rltool.grouping.settings`.
    """

    path: Path
    report: Mapping[str, Any]
    algo: str
    training_seed: int | None
    frames: int
    kind: str
    env: Mapping[str, object]
    settings: Mapping[str, object]

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
            settings(header.config),
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


def copies(entries: Sequence[Entry]) -> dict[Path, Path]:
    """Checkpoints that hold the same policy as one before them in a task and mode, and that one.

    Names and bytes do not say it (a copy of a run, best.ckpt beside last.ckpt of the same frames, a run made once more with
    its seed): settings, seed and frames do, where every episode brought the same as well.
    """
    first: dict[str, Path] = {}
    found = {}
    for entry in entries:
        known = json.dumps(
            [entry.training_seed, entry.frames, entry.settings, entry.report["returns"]], sort_keys=True, default=str
        )
        if known in first:
            found[entry.path] = first[known]
        first.setdefault(known, entry.path)
    return found


def distinct(entries: Sequence[Entry]) -> list[Entry]:
    """Entries of one task and mode without the copies: a policy that counts twice makes the interval over checkpoints too
    narrow and pulls the mean towards itself."""
    repeated = copies(entries)
    return [entry for entry in entries if entry.path not in repeated]


def overall(entries: Sequence[Entry]) -> dict[str, Any]:
    """What the entries of one task and one mode say together.

    Args:
        entries: :func:`distinct` ones.

    Returns:
        ``differing``: keys of the configuration, apart from the seed, in which their runs differ.
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
        "differing": differing([entry.settings for entry in entries]),
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

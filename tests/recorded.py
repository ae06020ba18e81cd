"""Run directories as they may lie on disk, written without training."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

# Seconds since 1970 at which the runs of these tests began.
BEGAN = 1_700_000_000

CONFIG: dict[str, object] = {
    "total_frames": 1000,
    "seed": 3,
    "init": None,
    "env": {"kind": "gym", "id": "CartPole-v1", "num_envs": 8, "kwargs": {}},
    "algo": {"kind": "ppo", "gamma": 0.99},
    "network": {"kind": "auto", "hidden": [64, 64]},
    "optim": {"kind": "adam", "lr": 3e-4},
}
SUMMARY: dict[str, object] = {
    "status": "finished",
    "error": None,
    "env": "CartPole-v1",
    "algo": "ppo",
    "seed": 3,
    "frames": 1000,
    "best_evaluation": {"mean": 480.5, "frames": 800},
    "last_evaluation": {"mean": 470.0, "frames": 1000, "episodes": 10},
    "faults": {"evaluation": 0, "logging": 0},
    "seconds": 12.5,
    "frames_per_second": 80.0,
    "versions": {"rltool": "0.1.0", "torch": "2.14.1"},
    "git_commit": "abc",
}


def recorded(
    directory: Path,
    *,
    config: Mapping[str, object] | None = CONFIG,
    summary: Mapping[str, object] | str | None = SUMMARY,
    points: Sequence[Mapping[str, object]] | None = None,
    overrides: Sequence[str] = ("algo=ppo", "env=cartpole"),
    log: str = "",
) -> Path:
    """Writes a run; None leaves a file out.

    Args:
        summary: a text is written as it is.
        points: of metrics.jsonl; each gets the time at which it would have been written, a second for 100 frames. None: one
            at the end, where the summary says when that was.
    """
    if points is None:
        frames = summary.get("frames") if isinstance(summary, Mapping) else None
        points = [{"frames": frames}] if isinstance(frames, int) else []
    (directory / "checkpoints").mkdir(parents=True)
    if config is not None:
        (directory / "config.yaml").write_text(yaml.safe_dump(dict(config)))
    (directory / "overrides.txt").write_text("".join(f"{word}\n" for word in overrides))
    lines = [json.dumps({"time/wall": BEGAN + point["frames"] / 100, **point}) for point in points]  # type: ignore[operator]
    (directory / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    (directory / "log.txt").write_text(log)
    if summary is not None:
        text = summary if isinstance(summary, str) else json.dumps(summary)
        (directory / "summary.json").write_text(text)
        os.utime(directory / "summary.json", (BEGAN + 10, BEGAN + 10))
    return directory

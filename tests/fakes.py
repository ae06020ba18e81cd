"""Run directories written by hand, as rltool leaves them: what reads runs is tested on numbers that are known."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import yaml

from rltool.configfiles import flat

Rltool = Callable[..., tuple[int, str, str]]


def fake_run(
    path: Path,
    evaluations: Sequence[tuple[int, float]] = (),
    *,
    seed: int = 0,
    env: str = "CartPole-v1",
    algo: str = "ppo",
    status: str | None = "finished",
    points: Sequence[Mapping[str, float]] = (),
    seconds: float = 10.0,
    fresh: float | None = None,
    error: str | None = None,
    **changes: object,
) -> Path:
    """Writes a run and returns its directory.

    Args:
        path: the directory.
        evaluations: frames and mean returns.
        seed, env, algo: of the run.
        status: of its summary; None: it has none.
        points: further lines of metrics.jsonl.
        seconds: wall time.
        fresh: mean return of the last policy on fresh episodes after training; None: it was not judged.
        error: what ended it.
        changes: keys of the configuration, with ``__`` for a dot.
    """
    (path / "checkpoints").mkdir(parents=True)
    config: dict[str, object] = {
        "total_frames": 1000, "seed": seed, "env": {"id": env}, "algo": {"kind": algo}, "optim": {"lr": 0.001},
        "logging": {"kind": "csv"}, "stop": {"return_threshold": None},
    }  # fmt: skip
    leaves = flat(config) | {key.replace("__", "."): value for key, value in changes.items()}
    tree: dict[str, object] = {}
    for key, value in leaves.items():
        *nodes, last = key.split(".")
        below = tree
        for node in nodes:
            below = below.setdefault(node, {})  # type: ignore[assignment]
        below[last] = value
    (path / "config.yaml").write_text(yaml.safe_dump(tree, sort_keys=False))
    lines = [*points, *({"frames": frames, "eval/return_mean": value} for frames, value in evaluations)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if status is not None:
        frames = max((line["frames"] for line in lines), default=0)
        summary: dict[str, object] = {
            "status": status, "env": env, "algo": algo, "seed": seed, "frames": frames, "seconds": seconds,
            "frames_per_second": frames / seconds, "error": error,
        }  # fmt: skip
        if fresh is not None:
            summary["final_evaluation"] = {"seed": seed, "best": None, "last": {"mean": fresh, "frames": frames}}
        (path / "summary.json").write_text(json.dumps(summary))
    return path

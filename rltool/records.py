"""Runs as they lie on disk, read by whoever lists, compares or draws them. Free of torch and Hydra; nothing is written.

A run may be finished, running, killed, of an older rltool, or half copied: whatever is missing is None.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import cast

from rltool.configfiles import read_yaml
from rltool.errors import ConfigError, Problem, RltoolError
from rltool.runs import is_locked, read_summary, shown

Point = dict[str, float]
"""A line of metrics.jsonl: numbers by name; those that were not finite are left out."""

# What a directory that a run made holds, and a sweep's does not.
_MARKS = ("config.yaml", "checkpoints")


@dataclass(frozen=True)
class Record:
    """One run.

    Args:
        path: its directory.
    """

    path: Path

    @cached_property
    def summary(self) -> dict[str, object]:
        """summary.json; empty where there is none, or none that can be read."""
        with suppress(RltoolError):
            return read_summary(self.path)
        return {}

    @cached_property
    def config(self) -> dict[str, object]:
        """The resolved configuration; empty where it cannot be read."""
        with suppress(ConfigError):
            return cast("dict[str, object]", _unescaped(read_yaml(self.path / "config.yaml")))
        return {}

    @cached_property
    def status(self) -> str:
        """``finished``, ``solved``, ``interrupted``, ``failed``, ``running``, or ``killed``: no process has it, and none said
        how it ended."""
        if is_locked(self.path):
            return "running"
        # A summary that is older than the last point was written before the run was resumed.
        status = self.summary.get("status")
        return status if isinstance(status, str) and not self._went_on else "killed"

    @property
    def _went_on(self) -> bool:
        """Whether points were written after the summary."""
        times = []
        for name in ("summary.json", "metrics.jsonl"):
            with suppress(OSError):
                times.append((self.path / name).stat().st_mtime)
        return len(times) == 2 and times[1] > times[0] + 1

    @cached_property
    def points(self) -> list[Point]:
        """Every point of metrics.jsonl in the order of frames; lines that are not whole are left out."""
        try:
            text = (self.path / "metrics.jsonl").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return []
        points = []
        for line in text.splitlines():
            with suppress(ValueError):
                point = json.loads(line)
                if isinstance(point, dict) and isinstance(point.get("frames"), int):
                    points.append({key: value for key, value in point.items() if isinstance(value, int | float)})
        return sorted(points, key=lambda point: point["frames"])

    def curve(self, name: str) -> list[tuple[int, float]]:
        """Frames and values of a metric; empty where it was never measured."""
        return [(int(point["frames"]), point[name]) for point in self.points if name in point]

    @cached_property
    def times(self) -> list[tuple[int, float]]:
        """Frames, and the seconds that the training loop took for them; what lies between two sessions is left out."""
        frames, seconds = 0, 0.0
        times = []
        for point in self.points:
            if (speed := point.get("time/frames_per_second", 0.0)) > 0:
                seconds += (point["frames"] - frames) / speed
                frames = int(point["frames"])
                times.append((frames, seconds))
        return times

    @property
    def env(self) -> str:
        """Full id of the environment."""
        node = self._node("env")
        return str(self.summary.get("env") or node.get("id") or node.get("entry_point") or "?")

    @property
    def algo(self) -> str:
        """Kind of the algorithm."""
        return str(self.summary.get("algo") or self._node("algo").get("kind") or "?")

    @property
    def seed(self) -> int | None:
        """The seed."""
        seed = self.config.get("seed", self.summary.get("seed"))
        return seed if isinstance(seed, int) else None

    @property
    def frames(self) -> int:
        """Frames collected, as far as is written down."""
        written = self.summary.get("frames")
        last = int(self.points[-1]["frames"]) if self.points else 0
        return max(last, written if isinstance(written, int) else 0)

    @property
    def total_frames(self) -> int | None:
        """The budget; None where it has no end."""
        total = self.config.get("total_frames")
        return int(total) if isinstance(total, int | float) and total >= 0 else None

    @cached_property
    def threshold(self) -> float | None:
        """Mean return at which the environment counts as solved; None where it has none, or is not registered here."""
        import gymnasium

        with suppress(Exception):  # of names that no plugin of this process has registered, in many ways
            return gymnasium.spec(self.env).reward_threshold
        return None

    @property
    def goal(self) -> float | None:
        """The mean return to be reached: that at which the environment counts as solved, else that at which the run stops."""
        stop = self._node("stop").get("return_threshold")
        return self.threshold if self.threshold is not None or not isinstance(stop, int | float) else float(stop)

    @property
    def best(self) -> tuple[int, float] | None:
        """Frames and mean return of the best evaluation (of equal ones the newest, as for best.ckpt)."""
        curve = self.curve("eval/return_mean")
        return max(curve, key=lambda point: (point[1], point[0])) if curve else None

    @property
    def last(self) -> tuple[int, float] | None:
        """Frames and mean return of the last evaluation."""
        curve = self.curve("eval/return_mean")
        return curve[-1] if curve else None

    @property
    def seconds(self) -> float | None:
        """Wall time, of the last session where the run was resumed."""
        written = self.summary.get("seconds")
        if isinstance(written, int | float) and self.status != "running":
            return float(written)
        times = [point["time/wall"] for point in self.points if "time/wall" in point]
        return times[-1] - times[0] if len(times) > 1 else None

    @property
    def started(self) -> datetime | None:
        """When it was started: its directory's name says so; else when its configuration was written."""
        with suppress(ValueError):
            return datetime.strptime(self.path.name[:19], "%Y-%m-%d-%H-%M-%S")
        with suppress(OSError):
            return datetime.fromtimestamp((self.path / "config.yaml").stat().st_mtime)
        return None

    @property
    def overrides(self) -> list[str]:
        """What was typed, without what was typed to resume it."""
        with suppress(OSError):
            lines = (self.path / "overrides.txt").read_text(encoding="utf-8", errors="replace").splitlines()
            first = next((number for number, line in enumerate(lines) if line.startswith("# ")), len(lines))
            return [line for line in lines[:first] if line]
        return []

    def _node(self, group: str) -> Mapping[str, object]:
        node = self.config.get(group)
        return cast("Mapping[str, object]", node) if isinstance(node, Mapping) else {}


def is_run(path: Path) -> bool:
    """Whether a directory holds a run."""
    return all((path / name).exists() for name in _MARKS)


def read_run(path: Path) -> Record:
    """The run in a directory, or the one that a checkpoint or another file of it belongs to.

    Raises:
        ConfigError: there is none.
    """
    place = path.expanduser()
    for directory in (place, place.parent, place.parent.parent):
        if is_run(directory):
            return Record(directory)
    if not place.exists():
        raise ConfigError(Problem("", f"there is no {path}", "rltool runs lists those there are"))
    raise ConfigError(
        Problem("", f"expected a run directory, found none in {path}", "rltool runs lists those there are")
    )


def find_runs(roots: Sequence[Path]) -> Iterator[Record]:
    """Every run in and below directories, each once, in the order of their paths; runs hold no other runs.

    Raises:
        ConfigError: a directory is missing.
    """
    seen: set[Path] = set()
    for root in roots:
        root = root.expanduser()
        if not root.is_dir():
            raise ConfigError(Problem("", f"there is no directory {shown(root)}", "Give one with runs in it"))
        for directory, inner, _ in os.walk(root):
            path = Path(directory)
            if is_run(path):
                inner.clear()
                if (real := path.resolve()) not in seen:
                    seen.add(real)
                    yield Record(path)
            else:
                inner.sort()


def _unescaped(value: object) -> object:
    """A tree as it was before its ``${`` were escaped for OmegaConf."""
    if isinstance(value, str):
        return value.replace("\\${", "${")
    if isinstance(value, Mapping):
        return {key: _unescaped(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_unescaped(item) for item in value]
    return value

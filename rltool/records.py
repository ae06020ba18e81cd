"""Runs as they lie on disk, read by whoever lists, compares or draws them. Free of torch and Hydra; nothing is written.

A run may be finished, running, killed, of an older rltool, or half copied: whatever is missing is None.
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

from rltool.configfiles import read_yaml
from rltool.errors import CheckpointError, ConfigError, Problem, RltoolError
from rltool.runs import is_locked, program, read_summary, shown

if TYPE_CHECKING:
    from rltool.checkpoint import Header

STATUSES = (
    "finished",
    "solved",
    "stopped",
    "pruned",
    "interrupted",
    "failed",
    "running",
    "killed",
    "unknown",
    "unreadable",
)

Point = dict[str, float]
"""A line of metrics.jsonl: numbers by name; those that were not finite are left out."""

RUNS = Path("runs")
"""Where runs go unless hydra.run.dir says otherwise, and where they are looked for by name."""

SWEEP = "sweep.json"
"""What a sweep leaves in its directory."""

# What a run leaves in its directory; any two of them tell it from other directories, also where half of it was copied.
_MARKS = frozenset({"config.yaml", "overrides.txt", "metrics.jsonl", "summary.json", "log.txt", "checkpoints"})
_FEWEST = 2
# How far above a file of a run its directory may be.
_LEVELS = 3
# The name that a run's directory gets by itself.
_NAME = re.compile(r"\d{4}(?:-\d\d){5}-([0-9a-f]{6})")
# Bytes: more than a line of metrics.jsonl takes, and more than the last lines of a log.
_TAIL = 2**16


@dataclass(frozen=True)
class Record:
    """One run.

    Args:
        path: its directory.
    """

    path: Path

    @property
    def summary(self) -> dict[str, object]:
        """summary.json; empty where there is none, or none that can be read."""
        return self._summary[0]

    @property
    def config(self) -> dict[str, object]:
        """The resolved configuration; empty where it cannot be read."""
        return self._config[0]

    @cached_property
    def problems(self) -> list[str]:
        """What cannot be read of it, one text each; a run that is whole has none."""
        if isinstance(self._names, OSError):
            return [f"cannot be looked into: {self._names.strerror}"]
        missing = [f"{name} is missing" for name in ("config.yaml", "checkpoints") if name not in self._names]
        return [*missing, *(text for text in (self._config[1], self._summary[1], self._cut_short) if text)]

    @cached_property
    def all_problems(self) -> list[str]:
        """:attr:`problems`, and those that only reading all of metrics.jsonl shows."""
        lines = [line for line in self._lines() if line.endswith("\n")]  # the last one may be in the making
        lost = sum(not (line.startswith("{") and line.endswith("}\n")) for line in lines)
        told = f"{lost} of {len(lines):,} lines of metrics.jsonl cannot be read, and are left out"
        return [*self.problems, *([told] if lost else [])]

    @property
    def _cut_short(self) -> str:
        """Whether metrics.jsonl says less than the summary."""
        frames = self.summary.get("frames")
        if not self.ended or not isinstance(frames, int) or frames == 0:
            return ""
        kind = self.config.get("logging")
        if isinstance(kind, Mapping) and kind.get("kind") == "none":
            return ""
        if isinstance(self._names, OSError) or "metrics.jsonl" not in self._names:
            return "metrics.jsonl is missing"
        try:
            with open(self.path / "metrics.jsonl", "rb") as file:
                file.seek(max(os.fstat(file.fileno()).st_size - _TAIL, 0))
                last = json.loads(file.read().splitlines()[-1])["frames"]
        except (OSError, ValueError, LookupError, TypeError):
            return "metrics.jsonl is damaged at its end"
        return "" if last >= frames else f"metrics.jsonl ends at {last:,} of {frames:,} frames"

    @cached_property
    def status(self) -> str:
        """``finished``, ``solved``, ``interrupted``, ``failed``, ``running``, ``killed`` (no process has it, and none said
        how it ended), ``unknown`` (the files that would say so are missing or damaged), or ``unreadable``."""
        if isinstance(self._names, OSError):
            return "unreadable"
        if is_locked(self.path):
            return "running"
        if self._told:
            return printable(str(self.summary["status"]))
        return "unknown" if self._summary[1] or "config.yaml" not in self._names else "killed"

    @property
    def ended(self) -> bool:
        """Whether its process wrote down how it ended."""
        return self.status not in ("running", "killed", "unknown", "unreadable")

    @cached_property
    def points(self) -> list[Point]:
        """Every point of metrics.jsonl in the order of frames; lines that are not whole are left out."""
        points = [point for line in self._lines() if (point := _point(line)) is not None]
        return sorted(points, key=lambda point: point["frames"])

    def curve(self, name: str) -> list[tuple[int, float]]:
        """Frames and values of a metric; empty where it was never measured."""
        # Most lines of a long run hold no evaluation: they are not taken apart for one.
        points = self.points if "points" in vars(self) else self._points_with(name)
        return [(int(point["frames"]), point[name]) for point in points if name in point]

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
        """Full id of the environment; ``?`` where nothing says so."""
        node = self._node("env")
        return printable(str(self.summary.get("env") or node.get("id") or node.get("entry_point") or "?"))

    @property
    def algo(self) -> str:
        """Kind of the algorithm; ``?`` where nothing says so."""
        return printable(str(self.summary.get("algo") or self._node("algo").get("kind") or "?"))

    @property
    def seed(self) -> int | None:
        """The seed."""
        seed = self.config.get("seed", self.summary.get("seed"))
        return seed if isinstance(seed, int) else None

    @cached_property
    def frames(self) -> int:
        """Frames collected, as far as is written down."""
        written = self.summary.get("frames")
        if isinstance(written, int) and (self.ended or self._newest is None):
            return written
        return int(self._newest["frames"]) if self._newest is not None else 0

    def subject(self, *, with_network: bool = False) -> str:
        """What it trains, for a reader: ``ppo on CartPole-v1, seed 0``, as far as anything says so."""
        what = " on ".join(name for name in (self.algo, self.env) if name != "?") or "unknown algorithm and environment"
        network = self._node("network").get("kind") if with_network else None
        parts = [what, *([f"network {network}"] if network is not None else [])]
        return ", ".join([*parts, *([f"seed {self.seed}"] if self.seed is not None else [])])

    @property
    def remedy(self) -> str | None:
        """What to do about a run whose configuration cannot be read; None where it can."""
        if self.config:
            return None
        tool, place = program("rltool"), shlex.quote(shown(self.path))
        if self.status == "unreadable":
            return f"let yourself look into it: chmod u+rx {place}, or ask its owner"
        if self.header is not None:
            return f"its checkpoints hold the configuration: {tool} checkpoint {place} prints it, train resume={place} goes on"
        if self.overrides:
            return f"start it anew: {tool} train {shlex.join(self.overrides)}"
        return "copy it once more from where it was made, or delete it: nothing here says what it was"

    @property
    def total_frames(self) -> int | None:
        """The budget; None where it has no end."""
        total = self.config.get("total_frames")
        return int(total) if isinstance(total, int | float) and 0 <= total < math.inf else None

    @cached_property
    def threshold(self) -> float | None:
        """Mean return at which the environment counts as solved; None where it has none, or is not registered here."""
        told = self.summary.get("reward_threshold")
        if isinstance(told, int | float) and math.isfinite(told):
            return float(told)
        if ":" in self.env:  # looking would import the module that a stranger's run names
            return None
        import gymnasium

        with suppress(Exception):  # of names that no plugin of this process has registered, in many ways
            return gymnasium.spec(self.env).reward_threshold
        return None

    @property
    def goal(self) -> float | None:
        """The mean return to be reached: that at which the environment counts as solved, else that at which the run stops."""
        stop = self._node("stop").get("return_threshold")
        return self.threshold if self.threshold is not None or not isinstance(stop, int | float) else float(stop)

    @cached_property
    def best(self) -> tuple[int, float] | None:
        """Frames and mean return of the best evaluation (of equal ones the newest, as for best.ckpt)."""
        if self.ended and "best_evaluation" in self.summary:
            return _evaluation(self.summary["best_evaluation"])
        curve = self.curve("eval/return_mean")
        return max(curve, key=lambda point: (point[1], point[0])) if curve else None

    @cached_property
    def last(self) -> tuple[int, float] | None:
        """Frames and mean return of the last evaluation."""
        if self.ended and (told := _evaluation(self.summary.get("last_evaluation"))) is not None:
            return told
        if self.best is None:
            return None
        curve = self.curve("eval/return_mean")  # a session that was resumed for a few frames made none
        return curve[-1] if curve else None

    def cut(self, policy: Literal["best", "last"]) -> int | None:
        """How many episodes of the best or last evaluation were cut at ``eval.max_steps``; None where nothing says so."""
        found = self.best if policy == "best" else self.last
        told = self.summary.get(f"{policy}_evaluation") if self.ended else None
        if found is None or (isinstance(told, Mapping) and "cut" not in told):  # an older rltool counted none
            return None
        if isinstance(told, Mapping) and told.get("frames") == found[0] and isinstance(told["cut"], int):
            return told["cut"]
        count = dict(self.curve("eval/episodes_cut")).get(found[0])
        return None if count is None else int(count)

    def final(self, policy: str = "best") -> Mapping[str, object] | None:
        """What the evaluation on fresh episodes at the end of the run says of a policy, ``best`` or ``last``: ``mean``,
        ``ci_low``, ``ci_high``, ``episodes``, …; None where there was none, or the run has gone on since."""
        found = self.summary.get("final_evaluation") if self.ended else None
        policies = cast("Mapping[str, object]", found) if isinstance(found, Mapping) else {}
        numbers = policies.get(policy)
        return cast("Mapping[str, object]", numbers) if isinstance(numbers, Mapping) else None

    @property
    def fresh(self) -> float | None:
        """Mean return of the last policy on fresh episodes at the end of the run: the score that runs are compared by."""
        told = self.final("last")
        mean = told.get("mean") if told is not None else None
        return float(mean) if isinstance(mean, int | float) else None

    @cached_property
    def seconds(self) -> float | None:
        """Wall time, of the last session where the run was resumed; from the first point to the last where nobody wrote it
        down."""
        written = self.summary.get("seconds")
        if isinstance(written, int | float) and self.ended:
            return float(written) if 0 <= written < math.inf else None
        first = next((point for line in self._lines() if (point := _point(line)) is not None), None)
        times = [point["time/wall"] for point in (first, self._newest) if point is not None and "time/wall" in point]
        return times[1] - times[0] if len(times) == 2 and 0 < times[1] - times[0] < math.inf else None

    @cached_property
    def started(self) -> datetime | None:
        """When it was started: its directory's name says so; else its log, or when its configuration was written."""
        with suppress(ValueError):
            return datetime.strptime(self.path.name[:19], "%Y-%m-%d-%H-%M-%S")
        with suppress(OSError, ValueError), open(self.path / "log.txt", "rb") as log:
            return datetime.strptime(log.read(19).decode(), "%Y-%m-%d %H:%M:%S")
        with suppress(OSError):
            return datetime.fromtimestamp((self.path / "config.yaml").stat().st_mtime)
        return None

    @property
    def versions(self) -> dict[str, str]:
        """Versions of the packages that it ran with: of its summary, else of its newest checkpoint; may be empty."""
        told = self.summary.get("versions")
        if isinstance(told, Mapping):
            return {str(name): str(version) for name, version in told.items()}
        return dict(self.header.state.versions) if self.header is not None else {}

    @property
    def commit(self) -> str | None:
        """The commit that was checked out where it was started, with ``-dirty`` where files differed."""
        commit = self.summary.get("git_commit")
        return commit if isinstance(commit, str) else None

    @property
    def error(self) -> str | None:
        """What ended it: an error, or the name of a signal."""
        error = self.summary.get("error")
        return printable(error) if isinstance(error, str) and (self.ended or self.status == "killed") else None

    @cached_property
    def header(self) -> Header | None:
        """The readable part of its newest whole checkpoint; imports numpy and pydantic."""
        from rltool.checkpoint import read_header

        with suppress(CheckpointError):
            return read_header(self.path)
        return None

    @property
    def typed(self) -> dict[str, str]:
        """What was typed, by key; a key that was deleted (``~key``) is not there."""
        words = (word.lstrip("+").partition("=") for word in self.overrides if not word.startswith("~"))
        return {key: value for key, _, value in words}

    @property
    def resumed(self) -> list[list[str]]:
        """What was typed each time that it was resumed."""
        sessions: list[list[str]] = []
        for line in self._override_lines:
            if line.startswith("# resumed"):
                sessions.append([])
            elif sessions and not line.startswith("# "):
                sessions[-1].append(line)
        return sessions

    @property
    def rerun_of(self) -> str | None:
        """The directory of the run whose configuration it was started with."""
        head = "# rerun of "
        return next((line.removeprefix(head) for line in self._override_lines if line.startswith(head)), None)

    def log_lines(self, count: int) -> list[str]:
        """The last lines of log.txt."""
        return [printable(line) for line in _tail(self.path / "log.txt")[-count:]]

    def logged(self, label: str) -> str | None:
        """What log.txt says under a label of the block at the start (``tuned``, ``device``, …), of the last session."""
        pattern = re.compile(rf"\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d  {re.escape(label)} +(.+)")
        with suppress(OSError):
            lines = (self.path / "log.txt").read_text(encoding="utf-8", errors="replace").splitlines()
            return next((printable(match[1]) for line in reversed(lines) if (match := pattern.fullmatch(line))), None)
        return None

    @property
    def overrides(self) -> list[str]:
        """What was typed, without what was typed to resume it."""
        lines = self._override_lines
        first = next((index for index, line in enumerate(lines) if line.startswith("# ")), len(lines))
        return lines[:first]

    def to_json(self) -> dict[str, object]:
        """What there is to list of it, as plain values; ``rltool runs --json`` promises these keys."""
        return {
            "path": str(self.path),
            "status": self.status,
            "algo": self.algo,
            "env": self.env,
            "seed": self.seed,
            "frames": self.frames,
            "total_frames": self.total_frames,
            "best": self._judged("best"),
            "last": self._judged("last"),
            "fresh": self.fresh,
            "seconds": self.seconds,
            "started": None if self.started is None else self.started.isoformat(sep=" ", timespec="seconds"),
            "error": self.error,
            "problems": self.problems,
        }

    def _judged(self, policy: Literal["best", "last"]) -> dict[str, object] | None:
        found = self.best if policy == "best" else self.last
        return None if found is None else {"frames": found[0], "mean": found[1], "cut": self.cut(policy)}

    @cached_property
    def _names(self) -> frozenset[str] | OSError:
        try:
            return frozenset(os.listdir(self.path))
        except OSError as error:
            return error

    @cached_property
    def _summary(self) -> tuple[dict[str, object], str]:
        """summary.json, and why it cannot be read."""
        try:
            return read_summary(self.path), ""
        except RltoolError as error:
            return {}, str(error)

    @cached_property
    def _config(self) -> tuple[dict[str, object], str]:
        """config.yaml, and why it cannot be read."""
        path = self.path / "config.yaml"
        if not os.path.lexists(path):
            return {}, ""
        try:
            tree = cast("dict[str, object]", _unescaped(read_yaml(path)))
            return tree, "" if tree else "config.yaml is empty"
        except ConfigError as error:
            return {}, str(error)
        except (ValueError, RecursionError) as error:  # a date that is none, a mapping that holds itself
            return {}, f"{path} is no configuration: {type(error).__name__}"

    @cached_property
    def _told(self) -> bool:
        """Whether the summary says how the run ended, and not how a session before a resume did."""
        if not isinstance(self.summary.get("status"), str):
            return False
        newest, written = self._newest, self.summary.get("frames")
        if newest is None:
            return True
        if isinstance(written, int) and newest["frames"] > written:
            return False
        # Not by the time of both files: a copy may have any.
        with suppress(OSError):
            return newest.get("time/wall", 0.0) <= (self.path / "summary.json").stat().st_mtime + 1
        return True

    @cached_property
    def _newest(self) -> Point | None:
        """The last whole point of metrics.jsonl."""
        lines = reversed(_tail(self.path / "metrics.jsonl"))
        return next((point for line in lines if (point := _point(line)) is not None), None)

    @cached_property
    def _override_lines(self) -> list[str]:
        with suppress(OSError):
            lines = (self.path / "overrides.txt").read_text(encoding="utf-8", errors="replace").splitlines()
            return [printable(line) for line in lines if line]
        return []

    def _lines(self) -> Iterator[str]:
        with (
            suppress(OSError),
            open(self.path / "metrics.jsonl", encoding="utf-8", errors="replace") as file,
        ):
            yield from file

    def _points_with(self, name: str) -> list[Point]:
        points = [point for line in self._lines() if name in line and (point := _point(line)) is not None]
        return sorted(points, key=lambda point: point["frames"])

    def _node(self, group: str) -> Mapping[str, object]:
        node = self.config.get(group)
        return cast("Mapping[str, object]", node) if isinstance(node, Mapping) else {}


def is_run(path: Path) -> bool:
    """Whether a directory holds a run, or what is left of one."""
    return sum(os.path.lexists(path / name) for name in _MARKS) >= _FEWEST


def is_sweep(path: Path) -> bool:
    """Whether a directory holds a sweep."""
    return (path / SWEEP).is_file()


def located(word: str | Path) -> Path:
    """The path that a word stands for: itself, or that of the run below runs/ that is called so, or of the sweep; itself
    where there is none.

    Both are called by any end of their path that begins after a ``/`` or a ``-``.

    Raises:
        ConfigError: several are called so.
    """
    path = Path(os.path.expanduser(word))
    if os.path.lexists(path) or path.is_absolute() or not RUNS.is_dir():
        return path
    text = path.as_posix()
    for what, places in (("runs", [record.path for record in find_runs([RUNS])]), ("sweeps", find_sweeps(RUNS))):
        found = [place for place in places if text in _ends(place)]
        if len(found) > 1:
            some = ", ".join(map(str, found[:3])) + (f" and {len(found) - 3} more" if len(found) > 3 else "")
            raise ConfigError(Problem("", f"{word} may be any of {len(found)} {what}: {some}", "Give more of the path"))
        if found:
            return found[0]
    return path


def read_run(path: Path) -> Record:
    """The run in a directory, or the one that a checkpoint or another file of it belongs to, or the one called so.

    Raises:
        ConfigError: there is none, or several are called so.
    """
    place = located(path)
    if place.is_dir() and not os.access(place, os.R_OK | os.X_OK):
        return Record(Path(shown(place)))  # it may be one
    for directory in (place, *place.absolute().parents[:_LEVELS]):
        if is_run(directory):
            return Record(Path(shown(directory)))
    if not os.path.lexists(place):
        raise ConfigError(Problem("", f"there is no {path}", "rltool runs lists those there are"))
    raise ConfigError(
        Problem("", f"expected a run directory, found none in {path}", "rltool runs lists those there are")
    )


def find_runs(roots: Sequence[Path]) -> Iterator[Record]:
    """Every run in and below directories, each once, in the order of their paths; runs hold no other runs. A directory that
    cannot be looked into may be one, and is given too.

    Raises:
        ConfigError: a directory is missing.
    """
    seen: set[Path] = set()
    closed: list[Record] = []
    for root in roots:
        root = root.expanduser()
        if not root.is_dir():
            raise ConfigError(Problem("", f"there is no directory {shown(root)}", "Give one with runs in it"))
        for directory, inner, files in os.walk(root, onerror=lambda error: closed.append(_closed(error))):
            path = Path(directory)
            if len(_MARKS.intersection((*inner, *files))) >= _FEWEST:
                inner.clear()
                if (real := path.resolve()) not in seen:
                    seen.add(real)
                    yield Record(path)
            else:
                inner.sort()
    yield from closed


def find_sweeps(root: Path) -> list[Path]:
    """The sweeps in and below a directory, the newest first; none lies in another one."""
    found: list[Path] = []
    for directory, inner, _ in os.walk(root):
        path = Path(directory)
        if is_sweep(path):
            found.append(path)
            inner.clear()
        inner[:] = [name for name in inner if not name.startswith(".")]
    return sorted(found, key=lambda path: (path / SWEEP).stat().st_mtime, reverse=True)


def _closed(error: OSError) -> Record:
    return Record(Path(str(error.filename)))


def names(records: Iterable[Record]) -> list[str]:
    """What to call each run: the id at the end of its directory's name, where :func:`located` finds it by that; its path
    where it does not."""
    known = {os.path.abspath(record.path): record.path for record in find_runs([RUNS])} if RUNS.is_dir() else {}
    counts = Counter(end for path in known.values() for end in _ends(path))

    def called(record: Record) -> str:
        path = known.get(os.path.abspath(record.path))
        short = _short(path) if path is not None else ""
        return short if counts[short] == 1 and not os.path.lexists(short) else shown(record.path)

    return [called(record) for record in records]


def _short(path: Path) -> str:
    """An id, or a directory of another name; a job of a sweep is called after the sweep."""
    match, above = _NAME.fullmatch(path.name), _NAME.fullmatch(path.parent.name)
    return match[1] if match else f"{above[1]}/{path.name}" if above else path.name


def _ends(path: Path) -> set[str]:
    text = path.as_posix()
    return {text[match.end() :] for match in re.finditer("[/-]", text)} | {text}


def _point(line: str) -> Point | None:
    with suppress(ValueError, RecursionError):
        point = json.loads(line)
        if isinstance(point, dict) and isinstance(point.get("frames"), int):
            return {key: value for key, value in point.items() if isinstance(value, int | float)}
    return None


def _evaluation(told: object) -> tuple[int, float] | None:
    """Frames and mean of an evaluation in a summary."""
    if not isinstance(told, Mapping):
        return None
    frames, mean = told.get("frames"), told.get("mean")
    return (frames, float(mean)) if isinstance(frames, int) and isinstance(mean, int | float) else None


def printable(text: str) -> str:
    """A text without what would move the cursor or change colours: files may come from anywhere."""
    return "".join(sign if sign.isprintable() or sign in "\n\t" else "�" for sign in text)


def _tail(path: Path) -> list[str]:
    """The last lines of a file; none where it cannot be read."""
    with suppress(OSError), open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - _TAIL, 0))
        return file.read().decode(errors="replace").splitlines()
    return []


def _unescaped(value: object) -> object:
    """A tree as it was before its ``${`` were escaped for OmegaConf."""
    if isinstance(value, str):
        return value.replace("\\${", "${")
    if isinstance(value, Mapping):
        return {key: _unescaped(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_unescaped(item) for item in value]
    return value

"""Which checkpoints a user means: files, run directories, directories of runs, patterns. Free of torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from glob import glob, has_magic
from itertools import takewhile
from pathlib import Path

from rltool.errors import ConfigError, Problem
from rltool.records import find_runs, is_run, located

_BEST, _DIRECTORY, _SUFFIX = "best.ckpt", "checkpoints", ".ckpt"


def checkpoints_at(places: Sequence[str]) -> list[Path]:
    """The checkpoints, each once, in the order of the places.

    A run directory stands for its best.ckpt, or itself (its newest checkpoint) where it has none; any other directory for
    the runs below it; a run can be given by the end of its path, too. A file that is missing is left for its reader to explain.

    Raises:
        ConfigError: nothing matches a pattern.
    """
    found: dict[Path, Path] = {}
    for place in places:
        for path in _at(place):
            found.setdefault(path.resolve(), path)
    return list(found.values())


def _at(place: str) -> Iterator[Path]:
    path = located(place)
    if path.is_dir():
        yield from _in_directory(path)
    elif path.exists() or not has_magic(place):
        yield path
    else:
        matches = sorted(map(Path, glob(str(path), recursive=True)), key=natural)
        if not matches:
            raise ConfigError(Problem("checkpoint", f"nothing matches {place}", "Quote patterns, or give paths"))
        for match in matches:
            yield from _in_directory(match) if match.is_dir() else [match]


def _in_directory(path: Path) -> Iterator[Path]:
    if is_run(path) or any(path.glob(f"*{_SUFFIX}")):
        best = (path / _DIRECTORY if is_run(path) else path) / _BEST
        yield best if best.is_file() else path
        return
    runs = sorted((record.path for record in find_runs([path])), key=natural)
    for run in runs:
        yield from _in_directory(run)
    if not runs:
        yield path  # what it is said to be then is its reader's business


def natural(path: Path) -> list[tuple[int, str]]:
    """A key to sort paths by: 2 comes before 10."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", str(path)) if part]


def labels(paths: Sequence[Path]) -> list[str]:
    """What tells paths apart: their parts without those that all of them begin or end with.

    ``runs/a/checkpoints/best.ckpt`` and ``runs/b/checkpoints/best.ckpt`` are ``a`` and ``b``.
    """
    parts = [tuple(part for part in path.parts if part != _DIRECTORY) for path in paths]
    if len(set(parts)) < 2:
        return [path.name for path in paths]
    start = _alike(parts)
    end = _alike([part[:start:-1] for part in parts])
    return ["/".join(part[start : len(part) - end]) or part[-1] for part in parts]


def _alike(parts: Sequence[Sequence[str]]) -> int:
    """How many parts all of them begin with."""
    return len(list(takewhile(lambda column: len(set(column)) == 1, zip(*parts, strict=False))))

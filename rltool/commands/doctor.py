"""``rltool doctor``: what is wrong with runs, from their metrics, while they train and afterwards."""

from __future__ import annotations

import json
import shutil
import textwrap
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from rltool.commands.list import table
from rltool.errors import ConfigError, Problem
from rltool.health import RULES, Checkup, Finding, examine
from rltool.records import Record, find_runs, read_run
from rltool.runs import shown

if TYPE_CHECKING:
    from rltool.cli import Options

# Below, rules that look at a course of things wait for more.
_FEW_POINTS = 12


def main(options: Options) -> int:
    """Prints what was found; returns the exit code.

    Raises:
        ConfigError: a path holds no run.
    """
    if "rules" in options.flags:
        print(table(("fault", "what it means"), [(rule.name, f"{rule.title}: {rule.cause}") for rule in RULES]))
        return 0
    records = list(_runs(options.overrides))
    found = [(record, examine(record.points, record.config, record.threshold)) for record in records]
    if "json" in options.flags:
        print(json.dumps([_to_json(record, checkup) for record, checkup in found], indent=2, ensure_ascii=False))
    else:
        print("\n\n".join("\n".join(_lines(record, checkup)) for record, checkup in found))
    return 0


def _runs(words: tuple[str, ...]) -> Iterator[Record]:
    """The runs that were asked for; a directory of runs stands for all of them, nothing for the newest one in runs/."""
    if not words:
        if not Path("runs").is_dir():
            raise ConfigError(
                Problem("", "expected a run, found none typed and no runs/ here", "Usage: rltool doctor RUN …")
            )
        newest = max(find_runs([Path("runs")]), key=_written, default=None)
        if newest is None:
            raise ConfigError(Problem("", "there is no run in runs/", "Usage: rltool doctor RUN …"))
        yield newest
    for word in words:
        path = Path(word)
        inside = list(find_runs([path])) if path.is_dir() else []
        yield from inside or [read_run(path)]


def _written(record: Record) -> float:
    """When its configuration was written, by a resume too; of half a run, which may have none, the beginning of time."""
    with suppress(OSError):
        return (record.path / "config.yaml").stat().st_mtime
    return 0.0


def _lines(record: Record, checkup: Checkup) -> Iterator[str]:
    yield f"{shown(record.path)}: {record.subject()}, {record.status} at {record.frames:,} frames"
    points = len(record.points)
    for problem in record.all_problems:
        yield from _wrapped(f"  warning: {problem}")
    if (remedy := record.remedy) is not None:
        yield from _wrapped(f"  to do: {remedy}")
    error = record.summary.get("error")
    if record.status in ("failed", "killed"):
        yield from _wrapped(
            f"  it ended with {error}" if error else "  it ended without a word (killed, or out of memory)"
        )
    gone = {finding.rule: finding for finding in checkup.told if finding.gone is not None}
    for finding in checkup.open.values():
        yield from _finding(finding)
    past = [finding for rule, finding in gone.items() if rule not in checkup.open]
    if past:
        yield from _wrapped(
            "  earlier: "
            + "; ".join(f"{one.title} ({one.rule}) from {one.frames:,} to {one.gone:,} frames" for one in past)
        )
    if not checkup.open:
        looked = f"{len(RULES)} rules found nothing in {points:,} points"
        few = (
            f" (few: rules that look at how things go wait for up to {_FEW_POINTS}; logging.interval sets how often there is one)"
            if points < _FEW_POINTS
            else ""
        )
        yield from _wrapped(f"  nothing is wrong now: {looked}{few}" if points else "  no point has been written yet")


def _finding(finding: Finding) -> Iterator[str]:
    yield from _wrapped(f"  {finding.title} ({finding.rule})")
    yield from _wrapped(f"    seen from {finding.frames:,} frames on: {finding.seen}")
    yield from _wrapped(f"    likely: {finding.cause}")
    for remedy in finding.remedies:
        yield from _wrapped(f"    try {remedy}")


def _wrapped(text: str) -> list[str]:
    indent = " " * (len(text) - len(text.lstrip()))
    width = min(shutil.get_terminal_size().columns, 100)
    return textwrap.wrap(
        text,
        width,
        subsequent_indent=f"{indent}  ",
        break_long_words=False,
        break_on_hyphens=False,
        drop_whitespace=True,
    )


def _to_json(record: Record, checkup: Checkup) -> dict[str, object]:
    return {
        "run": str(record.path),
        "status": record.status,
        "frames": record.frames,
        "points": len(record.points),
        "open": [finding.to_json() for finding in checkup.open.values()],
        "gone": [finding.to_json() for finding in checkup.told if finding.gone is not None],
    }

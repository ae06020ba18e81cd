"""``rltool runs``: the runs there are, as a table or as JSON, chosen and sorted by any column or key."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rltool.commands.list import grid
from rltool.errors import ConfigError, Problem
from rltool.figures import counted, duration, number
from rltool.records import RUNS, Record, find_runs, names
from rltool.runs import shown
from rltool.selection import Condition, check_keys, in_order, selected, value_of

if TYPE_CHECKING:
    from rltool.cli import Options

# From left to right.
_COLUMNS = ("run", "status", "algo", "env", "seed", "frames", "of", "best", "last", "fresh", "time", "started")
_RIGHT = frozenset({"seed", "frames", "of", "best", "last", "fresh", "time"})
# Left out in this order where the terminal is too narrow.
_SPARED = ("started", "time", "of", "last", "fresh", "algo", "frames", "seed")
# Letters of a long id of an environment that are shown where there is no room for more.
_ENV = 20
# Marks an evaluation some of whose episodes were cut.
_CUT = "*"
# Runs of which something cannot be read that are named.
_NAMED = 5


@dataclass(frozen=True)
class Request:
    """What was typed.

    Attributes:
        roots: directories to look in.
        conditions: of the runs that are wanted.
        sort: a column or key, ``-`` before it for the largest first.
        limit: how many are shown; None: all.
        columns: columns or keys beside the usual ones.
    """

    roots: tuple[Path, ...] = ()
    conditions: tuple[Condition, ...] = ()
    sort: str = "-started"
    limit: int | None = None
    columns: tuple[str, ...] = field(default=())

    @classmethod
    def read(cls, words: Sequence[str]) -> Request:
        """Words taken apart: what is a directory, or has no ``=``, ``<`` or ``>`` in it, is one to look in.

        Raises:
            ConfigError: every word that says nothing.
        """
        roots: list[Path] = []
        conditions: list[Condition] = []
        given: dict[str, str] = {}
        problems: list[Problem] = []
        for word in words:
            key, equals, value = word.partition("=")
            if not set(word) & set("=<>") or os.path.isdir(word):
                roots.append(Path(word))
            elif equals and key in ("sort", "limit", "columns"):
                given[key] = value
            else:
                try:
                    conditions.append(Condition.read(word))
                except ConfigError as error:
                    problems += error.problems
        limit = given.get("limit")
        if limit is not None and not (limit.isdecimal() and int(limit) > 0):
            problems.append(Problem("limit", f"expected a whole number of at least 1, found {limit!r}"))
        if problems:
            raise ConfigError(problems)
        return cls(
            tuple(roots),
            tuple(conditions),
            given.get("sort", cls.sort),
            int(limit) if limit is not None else None,
            tuple(name for name in given.get("columns", "").split(",") if name),
        )

    @property
    def keys(self) -> list[str]:
        """Every column and key that is asked for."""
        return [*(condition.key for condition in self.conditions), self.sort.removeprefix("-"), *self.columns]


def main(options: Options) -> int:
    """Lists the runs; returns the exit code.

    Raises:
        ConfigError: a directory is missing, a word says nothing, or no run has such a key.
    """
    request = Request.read(options.overrides)
    roots = request.roots or ((RUNS,) if RUNS.is_dir() else ())
    everything = list(find_runs(roots))
    check_keys(request.keys, everything)
    found = in_order(selected(everything, request.conditions), request.sort)
    kept = found[: request.limit]
    called = names(kept)
    if "json" in options.flags:
        print(json.dumps([_as_json(*pair, request) for pair in zip(kept, called, strict=True)], indent=2, default=str))
        return 0
    if not kept:
        places = ", ".join(map(shown, roots)) or f"{RUNS}, which is not there yet"
        print(f"none of {counted(len(everything), 'run')} matches" if everything else f"no runs in {places}")
        return 0
    print("\n".join(_table(kept, called, request)))
    counts = Counter(record.status for record in kept).most_common()
    of = f" of {len(found):,}" if len(kept) < len(found) else ""
    print(
        f"\n{len(kept):,}{of} {counted(len(found), 'run').split()[1]}: {', '.join(f'{n:,} {name}' for name, n in counts)}"
    )
    _complain(kept)
    return 0


def _as_json(record: Record, name: str, request: Request) -> dict[str, object]:
    extra = {"columns": {key: value_of(record, key) for key in request.columns}} if request.columns else {}
    return {"run": name, **record.to_json(), **extra}


def _table(records: Sequence[Record], called: Sequence[str], request: Request) -> list[str]:
    rows = [_cells(*pair, request) for pair in zip(records, called, strict=True)]
    if any_cut := any(row[key].endswith(_CUT) for row in rows for key in ("best", "last")):
        # All as wide, so that digits stand below each other.
        rows = [
            {**row, **{key: row[key] if row[key].endswith(_CUT) else f"{row[key]} " for key in ("best", "last")}}
            for row in rows
        ]
    judged = any(record.fresh is not None for record in records)
    usual = [key for key in _COLUMNS if judged or key != "fresh"]
    columns = [*usual, *(key for key in request.columns if key not in usual)]
    numeric = _RIGHT | {key for key in request.columns if all(_looks_numeric(row[key]) for row in rows)}

    def lines() -> list[str]:
        right = [index for index, key in enumerate(columns) if key in numeric]
        return grid(columns, [[row[key] for key in columns] for row in rows], right)

    width = _width()
    if len(lines()[0]) > width or max(map(len, lines())) > width:
        rows = [{**row, "env": _cut(row["env"])} for row in rows]
    left_out = []
    for key in _SPARED:
        if max(map(len, lines())) <= width:
            break
        if key not in request.columns:
            columns.remove(key)
            left_out.append(key)
    notes = [f"(no room for {', '.join(left_out)})"] if left_out else []
    if any_cut:
        notes.append(f"({_CUT} of episodes cut at eval.max_steps: returns are of the steps until then)")
    return [*lines(), *notes]


def _cells(record: Record, name: str, request: Request) -> Mapping[str, str]:
    total = record.total_frames
    return {
        "run": name,
        "status": record.status,
        "algo": record.algo,
        "env": record.env,
        "seed": _text(record.seed),
        "frames": f"{record.frames:,}",
        # Rounded down: 100 % means done.
        "of": f"{min(100 * record.frames // total, 100)}%" if total else "-",
        "best": number(record.best[1] if record.best else None) + _CUT * bool(record.cut("best")),
        "last": number(record.last[1] if record.last else None) + _CUT * bool(record.cut("last")),
        "fresh": number(record.fresh),
        "time": _text(None if record.seconds is None else duration(record.seconds).removeprefix("0:")),
        "started": _text(None if record.started is None else f"{record.started:%Y-%m-%d %H:%M}"),
        **{key: _text(value_of(record, key)) for key in request.columns if key not in _COLUMNS},
    }


def _text(value: object) -> str:
    if value is None:
        return "-"
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)


def _looks_numeric(text: str) -> bool:
    return text == "-" or text.replace(".", "").replace("-", "").replace("e", "").isdecimal()


def _cut(text: str) -> str:
    return text if len(text) <= _ENV else f"{text[: _ENV - 1]}…"


def _width() -> int:
    """Columns of the terminal; what is read by another program has all the room it needs."""
    bounded = sys.stdout.isatty() or "COLUMNS" in os.environ
    return shutil.get_terminal_size().columns if bounded else sys.maxsize


def _complain(records: Sequence[Record]) -> None:
    """Names the runs of which something cannot be read."""
    damaged = [record for record in records if record.problems]
    for record in damaged[:_NAMED]:
        print(f"warning: {shown(record.path)}: {'; '.join(record.problems)}", file=sys.stderr)
    if len(damaged) > _NAMED:
        print(f"warning: {len(damaged) - _NAMED} more cannot be read in full, see --json", file=sys.stderr)

"""``rltool diff``: what differs between runs, key by key, and their results side by side."""

from __future__ import annotations

import json
import shutil
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rltool.commands.list import grid
from rltool.configfiles import flat
from rltool.errors import ConfigError, Problem
from rltool.figures import duration, number
from rltool.records import Record, names, read_run
from rltool.runs import shown
from rltool.wording import found as typed_value

if TYPE_CHECKING:
    from rltool.cli import Options

_ABSENT = "-"
# Keys of a configuration that say where a run came from.
_ORIGINS = ("resume", "init")
# Letters of a value that are shown, at the most and at the least.
_WIDEST, _NARROWEST = 60, 12


def main(options: Options) -> int:
    """Prints the differences; returns the exit code.

    Raises:
        ConfigError: fewer than two runs were given, or one is not there.
    """
    problems: list[Problem] = []
    records: list[Record] = []
    for word in options.overrides:
        try:
            records.append(read_run(Path(word)))
        except ConfigError as error:
            problems += error.problems
    if len(options.overrides) < 2:
        problems.append(
            Problem(
                "", f"expected two runs or more, found {len(options.overrides)}", "rltool runs lists those there are"
            )
        )
    if problems:
        raise ConfigError(problems)
    if "json" in options.flags:
        print(json.dumps(as_json(records), indent=2, ensure_ascii=False, default=str))
        return 0
    print("\n\n".join(_blocks(records)))
    return 0


def as_json(records: Sequence[Record]) -> dict[str, object]:
    """Values by key, in the order of the runs; null where a run has no such key."""
    called = names(records)
    return {
        "runs": [{"run": name, **record.to_json()} for name, record in zip(called, records, strict=True)],
        "config": {
            key: {"values": list(values), "typed": [is_typed(record, key) for record in records]}
            for key, values in differences([flat(record.config) for record in records]).items()
        },
        "versions": differences([record.versions for record in records]),
        "commits": differences(commits(records)),
        "spaces": differences([spaces(record) for record in records]),
    }


def differences(trees: Sequence[Mapping[str, object]]) -> dict[str, list[object]]:
    """The keys whose values are not the same in all mappings, with all values; None where there is no such key.

    An empty mapping says nothing of its run, so it differs from none.
    """
    keys = dict.fromkeys(key for tree in trees for key in tree)
    values = {key: [tree.get(key) for tree in trees] for key in keys}
    # As JSON, where true is not 1.
    told = {key: {json.dumps(tree.get(key), default=str) for tree in trees if tree} for key in keys}
    return {key: row for key, row in values.items() if len(told[key]) > 1}


def commits(records: Sequence[Record]) -> list[Mapping[str, object]]:
    """The commit of each run, where it is known."""
    return [{"commit": record.commit} if record.commit is not None else {} for record in records]


def is_typed(record: Record, key: str) -> bool:
    """Whether a value was typed when the run was started or resumed: itself, a mapping around it, or the choice that brings it."""
    words = [*record.overrides, *(word for words in record.resumed for word in words)]
    for name, _, value in (word.lstrip("+").partition("=") for word in words):
        if key == name or (key.startswith(f"{name}.") and (value.startswith("{") or key in (f"{name}.kind", "env.id"))):
            return True
    return False


def spaces(record: Record) -> dict[str, object]:
    """Observations and actions in words, from the log, else from the newest checkpoint; nothing where there is neither."""
    told = record.logged("spaces")
    if told is None and (header := record.header) is not None:
        told = f"{', '.join(map(str, header.leaves))} → {header.actions}"
    return {} if told is None else {"spaces": told}


def _blocks(records: Sequence[Record]) -> list[str]:
    called = names(records)
    blocks = [
        "\n".join(grid(("run", "path"), [(name, shown(r.path)) for name, r in zip(called, records, strict=True)]))
    ]
    config = differences([flat(record.config) for record in records])
    rows = [
        (key, *(_marked(value, record, key) for value, record in zip(values, records, strict=True)))
        for key, values in config.items()
    ]
    if rows:
        note = ["* typed"] if any(cell.endswith(" *") for row in rows for cell in row[1:]) else []
        blocks.append("\n".join([*_side_by_side("configuration", called, rows), *note]))
    told = {
        "versions": differences([record.versions for record in records]),
        "commit": differences(commits(records)),
        "spaces": differences([spaces(record) for record in records]),
    }
    for heading, differing in told.items():
        if differing:
            blocks.append(
                "\n".join(_side_by_side(heading, called, [(k, *map(_value, v)) for k, v in differing.items()]))
            )
    unread = [name for name, record in zip(called, records, strict=True) if not record.config]
    if len(records) - len(unread) < 2:
        blocks.append("the configurations cannot be compared")
    elif not rows and not any(told.values()):
        blocks.append(
            "nothing differs: configuration, versions, commit and spaces are the same, as far as they are written down"
        )
    elif not rows:
        blocks.append("the configuration is the same")
    if unread:
        blocks.append(f"no configuration can be read of {', '.join(unread)}")
    blocks.append("\n".join(_side_by_side("result", called, _results(records))))
    return blocks


def _marked(value: object, record: Record, key: str) -> str:
    text = "null" if value is None and key in flat(record.config) else _value(value)
    return f"{text} *" if is_typed(record, key) else text


def _results(records: Sequence[Record]) -> list[tuple[str, ...]]:
    cells: dict[str, Callable[[Record], str]] = {
        "status": lambda record: record.status,
        "frames": lambda record: f"{record.frames:,}",
        "best evaluation": lambda record: _evaluation(record.best),
        "last evaluation": lambda record: _evaluation(record.last),
        "fresh episodes": lambda record: _ABSENT if record.fresh is None else number(record.fresh),
        "time": lambda record: _ABSENT if record.seconds is None else duration(record.seconds),
    }
    return [(label, *map(cell, records)) for label, cell in cells.items()]


def _evaluation(evaluation: tuple[int, float] | None) -> str:
    return _ABSENT if evaluation is None else f"{number(evaluation[1])} at {evaluation[0]:,}"


def _side_by_side(heading: str, called: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A column for each run; where the terminal is too narrow for them, a line for each run below each key."""
    width = shutil.get_terminal_size().columns
    cut = [[row[0], *(_cut(cell, _WIDEST) for cell in row[1:])] for row in rows]
    lines = grid((heading, *called), cut)
    if max(map(len, lines)) <= width:
        return lines
    longest = max(map(len, called))
    lines = [heading]
    for key, *cells in rows:
        lines.append(f"  {key}")
        lines += [
            f"    {name:<{longest}}  {_cut(cell, max(width - longest - 6, _NARROWEST))}"
            for name, cell in zip(called, cells, strict=True)
        ]
    return lines


def _value(value: object) -> str:
    return _ABSENT if value is None else value if isinstance(value, str) else typed_value(value)


def _cut(text: str, width: int) -> str:
    return textwrap.shorten(text, width, placeholder="…") if len(text) > width else text

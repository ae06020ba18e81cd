"""``rltool list``: the groups, or the options of one with a line of description each."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from rltool.configfiles import OF_SWEEPS
from rltool.errors import ConfigError, Problem
from rltool.wording import did_you_mean, nearest

if TYPE_CHECKING:
    from rltool.cli import Options
    from rltool.configfiles import ConfigFiles


def main(options: Options) -> int:
    """Prints the table; returns the exit code."""
    files = options.files()
    groups = [*files.groups(), *OF_SWEEPS]
    if len(options.overrides) > 1:
        raise ConfigError(
            Problem("", f"expected one group, found {' '.join(options.overrides)}", "Leave it out to see all")
        )
    if not options.overrides:
        rows = [(group, ", ".join(files.options(group))) for group in groups]
        print(table(("group", "options"), rows))
        return 0
    group = _group(options.overrides[0], groups)
    print(_options_table(files, group))
    return 0


def _group(word: str, groups: Sequence[str]) -> str:
    """The group of a word; plurals are taken too (``envs``, ``buffers``, ``loggings``)."""
    for name in (word, word.removesuffix("s")):
        if name in groups:
            return name
    raise ConfigError(
        Problem(
            "",
            f"there is no group {word!r}",
            f"{did_you_mean(nearest(word, groups))} Groups: {', '.join(groups)}".strip(),
        )
    )


def _options_table(files: ConfigFiles, group: str) -> str:
    rows: list[tuple[str, str]] = []
    for name in files.options(group):
        option = files.read(group, name)
        text = option.description
        if group == "env" and option.node.get("id", "???") != "???":
            text += f" ({option.node['id']})"
        if not option.path.is_relative_to(files.main):
            text += f" [{option.path.parent}]"
        rows.append((name, text.strip()))
    return table((group, "what it is"), rows)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Rows under a header, in columns; the last one is wrapped at the width of the terminal."""
    width = min(shutil.get_terminal_size().columns, 100)
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header) - 1)]
    indent = sum(widths) + 2 * len(widths)
    lines: list[str] = []
    for row in [header, *rows]:
        start = "".join(f"{cell:<{size}}  " for cell, size in zip(row[:-1], widths, strict=True))
        wrapped = textwrap.wrap(row[-1], max(width - indent, 24), break_long_words=False, break_on_hyphens=False) or [
            ""
        ]
        lines.append((start + wrapped[0]).rstrip())
        lines += [" " * indent + more for more in wrapped[1:]]
    return "\n".join(lines)


def grid(header: Sequence[str], rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Lines of rows under a header, in columns that are as wide as they need to be.

    Args:
        header, rows: the cells.
        right: the columns that stand at the right, such as numbers.
    """
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    return [
        "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in [header, *rows]
    ]

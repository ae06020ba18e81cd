"""``rltool plot``: learning curves, in a file or in the terminal."""

from __future__ import annotations

import csv
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rltool.charts import PICTURES, draw_curves
from rltool.errors import ConfigError, Problem, RltoolError
from rltool.grouping import Group, few, mixed, read_words, repeated, select
from rltool.records import is_sweep
from rltool.runs import shown
from rltool.schema import PlotConfig
from rltool.sweeps.jobs import WINNER
from rltool.textplot import text_of
from rltool.wording import did_you_mean, fitted, listed, nearest

if TYPE_CHECKING:
    from rltool.cli import Options
    from rltool.curves import Panel

_TERMINAL, _TABLE = "-", ".csv"
# What evaluations measure and training episodes do, too.
_EVALUATED = ("eval/return_mean", "eval/length_mean")
# Letters that a label keeps in a narrow terminal.
_LEAST = 12
# How many groups a note names.
_NAMED = 3


def main(options: Options) -> int:
    """Runs the command; returns the exit code.

    Raises:
        ConfigError: what was typed cannot be drawn, or the extra is missing.
        RltoolError: the file cannot be written.
    """
    config, parts = read_words(options.overrides, PlotConfig, options.files(), "plot")
    if config.out != _TERMINAL:
        _check_out(Path(config.out))
    groups = select(parts, config.group)
    notes: list[str] = []
    panels = _panels(groups, config, notes)
    labels = [group.label for group in groups if any(group.label == c.label for panel in panels for c in panel.curves)]
    if config.out == _TERMINAL:
        columns = min(shutil.get_terminal_size().columns, 120)
        print("\n\n".join(text_of(panel, labels, axis=config.x, columns=columns) for panel in panels))
        print(f"\n{_ends(panels, config.x)}")
    else:
        out = Path(config.out)
        if out.suffix.lower() == _TABLE:
            _write_points(panels, out, config.x)
        else:
            draw_curves(panels, labels, out, axis=config.x, width=config.width)
        print(_ends(panels, config.x))
        print(f"written to {shown(out)}")
    for note in joined([*pooled(groups), *notes]):
        print(_wrapped(f"note: {note}"))
    return 0


def pooled(groups: Sequence[Group]) -> list[str]:
    """What is odd about how runs were put together: differing configurations, the same seed twice."""
    notes = []
    for group in groups:
        fresh = [run for run in group.runs if run.path.name.startswith(WINNER) and is_sweep(run.path.parent)]
        if fresh and len(fresh) < len(group.runs):
            notes.append(
                f"{group.label}: the winner of a search on fresh seeds ({WINNER}…) is taken together with the runs that it was "
                "chosen by, which flatter: name the one or the other"
            )
        for run in group.runs:
            notes += [f"{group.label}: {shown(run.path)}: {problem}" for problem in run.all_problems]
        for env in group.envs:
            if keys := mixed(group, env):
                notes.append(f"{group.label}: runs on {env} are taken together that differ in {few(keys)}")
            if twice := repeated(group, env):
                which = ", ".join(map(str, twice))
                notes.append(
                    f"{group.label}: several runs on {env} have seed {which}; equal seeds are no independent runs"
                )
    return notes


def joined(notes: Iterable[str]) -> list[str]:
    """Notes ``about: text``, each text once, with all that it is about."""
    about: dict[str, list[str]] = {}
    for note in dict.fromkeys(notes):
        head, colon, text = note.partition(": ")
        about.setdefault(text if colon else head, []).extend([head] if colon else [])
    return [f"{_listed(heads)}: {text}" if heads else text for text, heads in about.items()]


def _listed(words: Sequence[str]) -> str:
    more = len(words) - _NAMED
    return listed(words[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def thresholds(groups: Sequence[Group], wanted: str | float | None, envs: Sequence[str]) -> dict[str, float | None]:
    """The mean return at which each environment counts as solved; None where nobody says so."""
    if wanted == "auto":
        return {env: next(run.goal for group in groups for run in group.of(env)) for env in envs}
    return dict.fromkeys(envs, float(wanted) if wanted is not None else None)


def envs_of(groups: Sequence[Group]) -> list[str]:
    """Every environment, in the order of the groups."""
    return list(dict.fromkeys(env for group in groups for env in group.envs))


def check_metrics(groups: Sequence[Group], metrics: Sequence[str], key: str) -> None:
    """Refuses metrics that no run has measured.

    Raises:
        ConfigError: names those that look like them.
    """
    known = dict.fromkeys(name for group in groups for run in group.runs for point in run.points for name in point)
    problems = []
    for metric in metrics:
        if metric in known:
            continue
        problems.append(Problem(key, f"none of the runs has measured {metric}", _instead(metric, list(known), key)))
    if problems:
        raise ConfigError(problems)


def _instead(metric: str, known: Sequence[str], key: str) -> str:
    """What to take for a metric that was not measured."""
    if metric in _EVALUATED and not any(name.startswith("eval/") for name in known):
        training = metric.replace("eval/", "episode/").removesuffix("_mean")
        told = f"; take {key}={training}, that of the episodes in training" if training in known else ""
        return f"They were not evaluated{told}"
    if near := nearest(metric, known):
        return did_you_mean(near)
    returns = [name for name in known if name.startswith(("eval/", "episode/"))]
    return f"They have {', '.join(returns)}" if returns else ""


def _check_out(out: Path) -> None:
    """Refuses a file that cannot be written, before anything is drawn.

    Raises:
        ConfigError: another suffix than those of pictures and of a table, or no such directory.
    """
    suffixes = (*PICTURES, _TABLE)
    if out.suffix.lower() not in suffixes:
        hint = "- draws in the terminal"
        raise ConfigError(Problem("out", f"expected a file that ends in {', '.join(suffixes)}, found {out}", hint))
    if not out.parent.is_dir():
        raise ConfigError(Problem("out", f"there is no directory {out.parent}"))
    if out.is_dir():
        raise ConfigError(Problem("out", f"expected a file, found the directory {out}"))


def _write_points(panels: Sequence[Panel], out: Path, axis: str) -> None:
    """Writes every point of every curve as a row of CSV; a curve of one run has no interval.

    Raises:
        RltoolError: the file cannot be written.
    """
    try:
        with open(out, "w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["environment", "metric", "curve", "seeds", axis, "value", "low", "high"])
            for panel in panels:
                for curve in panel.curves:
                    unknown = [""] * len(curve.x)
                    low = unknown if curve.low is None else curve.low.tolist()
                    high = unknown if curve.high is None else curve.high.tolist()
                    head = (panel.env, panel.metric, curve.label, curve.seeds)
                    points = zip(curve.x.tolist(), curve.y.tolist(), low, high, strict=True)
                    writer.writerows((*head, *point) for point in points)
    except OSError as error:
        raise RltoolError(f"cannot write {out}: {error.strerror}") from error


def _panels(groups: Sequence[Group], config: PlotConfig, notes: list[str]) -> list[Panel]:
    """A panel for each metric and environment that has any curve."""
    check_metrics(groups, config.metric, "metric")
    envs = envs_of(groups)
    goals = thresholds(groups, config.threshold, envs)
    from rltool.curves import read_panel

    panels = [
        read_panel(
            groups, env, metric, goals[env] if "return" in metric else None, axis=config.x, smooth=config.smooth,
            estimate=config.estimate, resamples=config.resamples, notes=notes,
        )
        for metric in config.metric
        for env in envs
    ]  # fmt: skip
    drawn = [panel for panel in panels if panel.curves]
    if not drawn:
        raise ConfigError(Problem("", "there is nothing to draw", "; ".join(notes)))
    return drawn


def _ends(panels: Sequence[Panel], axis: str) -> str:
    """Where each curve ends, as a table."""
    from rltool.commands.list import table

    rows = []
    for panel in panels:
        for curve in panel.curves:
            interval = "" if curve.low is None or curve.high is None else _range(curve.low[-1], curve.high[-1])
            rows.append(
                (
                    curve.label,
                    panel.env,
                    panel.metric,
                    f"{curve.x[-1]:,.0f}",
                    str(curve.seeds),
                    f"{_number(curve.y[-1])}{interval}",
                )
            )
    from rltool.estimates import TITLES

    kinds = {TITLES[panel.estimate] for panel in panels for curve in panel.curves if curve.seeds > 1}
    value = f"{' or '.join(sorted(kinds))} [95 %]" if kinds else "value"
    header = ("curve", "environment", "metric", axis, "seeds", value)
    keep = [i for i in range(len(header)) if i not in (1, 2) or len({row[i] for row in rows}) > 1]
    others = sum(max(len(row[i]) for row in (header, *rows)) + 2 for i in keep if i)
    names = fitted([row[0] for row in rows], max(min(shutil.get_terminal_size().columns, 100) - others, _LEAST))
    return table(
        [header[i] for i in keep], [[names.get(row[i], row[i]) if i == 0 else row[i] for i in keep] for row in rows]
    )


def _wrapped(line: str) -> str:
    """For a reader at a terminal; whole for a file, where it is searched."""
    if not sys.stdout.isatty():
        return line
    return textwrap.fill(line, min(shutil.get_terminal_size().columns, 100), subsequent_indent="  ")


def _range(low: float, high: float) -> str:
    return f" [{_number(low)}, {_number(high)}]"


def _number(value: float) -> str:
    return f"{value:,.1f}" if abs(value) >= 10 else f"{value:.3g}"

"""``rltool compare``: tables and a picture of two or more groups of runs."""

from __future__ import annotations

import csv
import io
import json
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rltool.commands.plot import check_metrics, envs_of, joined, pooled, thresholds
from rltool.errors import ConfigError, Problem, RltoolError
from rltool.grouping import Group, read_words, select
from rltool.importing import missing_package
from rltool.runs import shown
from rltool.schema import CompareConfig

if TYPE_CHECKING:
    from rltool.cli import Options
    from rltool.comparison import Aggregate, GroupScores, Improvement, Scores
    from rltool.estimates import Estimate

# What a score is, in words and for an axis.
_AT = {
    "last": "of the policy that a run ended with",
    "best": "of a run's best evaluation",
    "auc": "averaged over training",
}
# Of the notes below the tables.
_WIDTH = 80
_FLATTERS = "the best evaluation of a run is a maximum of noise: it flatters, the more the more evaluations there were"


def main(options: Options) -> int:
    """Runs the command; returns the exit code.

    Raises:
        ConfigError: what was typed cannot be compared, or the extra is missing.
        RltoolError: a file cannot be written.
    """
    config, parts = read_words(options.overrides, CompareConfig, options.files(), "compare")
    out = Path(config.out) if config.out is not None else None
    if out is not None and out.exists() and not out.is_dir():
        raise ConfigError(Problem("out", f"expected a directory, found the file {out}"))
    groups = select(parts, config.group)
    if len(groups) < 2:
        raise ConfigError(
            Problem(
                "",
                f"expected two or more groups, found one: {groups[0].label}",
                f"Put -- between them, or name keys that make them: group=optim.lr. {len(groups[0].runs)} runs were found",
            )
        )
    envs = envs_of(groups)
    goals = thresholds(groups, config.threshold, envs) if "return" in config.metric else dict.fromkeys(envs)
    notes = pooled(groups)
    if config.at == "best":
        notes.append(_FLATTERS)
    try:
        from rltool import comparison

        scores = [
            comparison.compare(
                groups, env, goals[env], metric=config.metric, at=config.at, resamples=config.resamples, notes=notes
            )
            for env in envs
        ]
        scores = [one for one in scores if one.groups]
        if not scores:
            check_metrics(groups, [config.metric], "metric")
            raise ConfigError(Problem("", "there is nothing to compare", "; ".join(notes)))
        over_all = comparison.aggregate(scores, config.resamples, notes)
    except ImportError as error:
        raise missing_package("", "a comparison", error) from error
    notes = joined(notes)
    text = markdown(scores, over_all, notes, config)
    if "json" in options.flags:
        print(json.dumps(tree(scores, over_all, notes, config), indent=2, ensure_ascii=False))
    else:
        print(text)
    if out is not None:
        _write(out, text, scores, groups, config)
        if "json" not in options.flags:
            print(f"\nwritten to {shown(out)}: table.md, table.csv, comparison.png, comparison.svg")
    return 0


def tree(
    scores: Sequence[Scores], over_all: Aggregate | None, notes: Sequence[str], config: CompareConfig
) -> dict[str, object]:
    """What ``--json`` prints; docs/comparing.md explains it."""
    return {
        "metric": config.metric,
        "at": config.at,
        "environments": {one.env: one.to_json() for one in scores},
        "all": over_all.to_json() if over_all is not None else None,
        "notes": list(notes),
    }


def markdown(scores: Sequence[Scores], over_all: Aggregate | None, notes: Sequence[str], config: CompareConfig) -> str:
    """The tables and the notes."""
    intervals = f"In brackets: 95 % intervals; bootstrap over the seeds, {config.resamples:,} resamples."
    blocks = [f"Scores: {config.metric} {_AT[config.at]}.\n{intervals}"]
    for one in scores:
        solved = f", solved at {one.threshold:g}" if one.threshold is not None else ""
        blocks += [f"### {one.env}{solved}", _score_table(one), _effort_table(one), _pair_table(one.improvements)]
    if over_all is not None:
        blocks.append("### All environments")
        if over_all.estimates:
            blocks.append("Scores divided by the environment's threshold: 1 is solved, 0 a return of 0.")
            rows = [(label, *_three(estimates)) for label, estimates in over_all.estimates.items()]
            blocks.append(_table(("group", "IQM", "mean", "median"), rows))
        blocks.append(_pair_table(over_all.improvements))
    if notes:
        blocks.append("\n".join(textwrap.fill(f"- {note}", _WIDTH, subsequent_indent="  ") for note in notes))
    return "\n\n".join(block for block in blocks if block)


def _score_table(scores: Scores) -> str:
    digits = _digits([e for group in scores.groups.values() for e in group.estimates.values()])
    rows = [(label, f"{len(group.runs)}", *_three(group.estimates, digits)) for label, group in scores.groups.items()]
    return _table(("group", "seeds", "IQM", "mean", "median"), rows)


def _effort_table(scores: Scores) -> str:
    header = ["group", "frames", "seconds", "frames/s"]
    if scores.threshold is not None:
        header[1:1] = ["reached", "frames to it", "seconds to it"]
    rows = []
    for label, group in scores.groups.items():
        row = [label, _count(group.frames), _count(group.seconds), _count(group.frames_per_second)]
        if scores.threshold is not None:
            reached = f"{len(group.reached)} of {len(group.runs)}"
            row[1:1] = [reached, _count(group.frames_to_threshold), _count(group.seconds_to_threshold)]
        rows.append(row)
    return _table(header, rows)


def _pair_table(pairs: Sequence[Improvement]) -> str:
    rows = [(f"{pair.better} > {pair.worse}", _interval(pair.probability, 2)) for pair in pairs]
    return _table(("A > B", "probability that a run of A beats one of B"), rows)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose source is in columns, too."""
    cells = [[cell.replace("|", "\\|") for cell in row] for row in (header, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    lines = [
        "| " + " | ".join(f"{cell:<{size}}" for cell, size in zip(row, widths, strict=True)) + " |" for row in cells
    ]
    return "\n".join([lines[0], "|" + "|".join("-" * (size + 2) for size in widths) + "|", *lines[1:]])


def _three(estimates: dict[str, Estimate] | object, digits: int = 2) -> list[str]:
    assert isinstance(estimates, dict)
    return [_interval(estimates[name], digits) for name in ("iqm", "mean", "median")]


def _digits(estimates: Sequence[Estimate]) -> int:
    """Decimals that show the narrowest interval with two digits; 2 at most, where numbers are not small."""
    widths = [e.high - e.low for e in estimates if e.low is not None and e.high is not None and e.high > e.low]
    size = max(abs(e.value) for e in estimates)
    if size < 10:
        return 3 if size < 1 else 2
    return 0 if widths and min(widths) >= 20 else 1


def _interval(estimated: Estimate, digits: int) -> str:
    value = f"{estimated.value:,.{digits}f}"
    if estimated.low is None or estimated.high is None:
        return value
    return f"{value} [{estimated.low:,.{digits}f}, {estimated.high:,.{digits}f}]"


def _count(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def _write(out: Path, text: str, scores: Sequence[Scores], groups: Sequence[Group], config: CompareConfig) -> None:
    """Writes all files of a comparison into a directory, made where it is missing."""
    from rltool.charts import draw_comparison, name_of
    from rltool.curves import read_panel

    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / "table.md").write_text(f"{text}\n", encoding="utf-8")
        (out / "table.csv").write_text(_csv(scores), encoding="utf-8", newline="")
    except OSError as error:
        raise RltoolError(f"cannot write into {out}: {error.strerror}") from error
    rows = [
        (
            read_panel(
                groups, one.env, config.metric, one.threshold, axis="frames", smooth="auto",
                estimate=next(iter(one.groups.values())).chosen, resamples=config.resamples, notes=[],
            ),
            one,
        )
        for one in scores
    ]  # fmt: skip
    labels = [group.label for group in groups if any(group.label in one.groups for one in scores)]
    names = {
        "last": f"{name_of(config.metric)}, last policy",
        "best": f"{name_of(config.metric)}, best evaluation",
        "auc": f"{name_of(config.metric)}, mean over training",
    }
    outs = [out / "comparison.png", out / "comparison.svg"]
    draw_comparison(rows, labels, outs, score=names[config.at], width=config.width)


def _csv(scores: Sequence[Scores]) -> str:
    """A row for each group and environment; what is not known is empty."""
    names = [f"{name}{end}" for name in ("iqm", "mean", "median") for end in ("", "_low", "_high")]
    effort = ["frames_to_threshold", "seconds_to_threshold", "frames", "seconds", "frames_per_second"]
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(["environment", "group", "seeds", *names, "threshold", "reached", *effort])
    for one in scores:
        for label, group in one.groups.items():
            writer.writerow([one.env, label, len(group.runs), *_numbers(group), one.threshold, len(group.reached),
                             *(getattr(group, name) for name in effort)])  # fmt: skip
    return text.getvalue()


def _numbers(group: GroupScores) -> list[float | None]:
    chosen = [group.estimates[name] for name in ("iqm", "mean", "median")]
    return [number for one in chosen for number in (one.value, one.low, one.high)]

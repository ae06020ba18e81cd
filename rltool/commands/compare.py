"""``rltool compare``: tables and a picture of two or more groups of runs."""

from __future__ import annotations

import csv
import io
import json
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rltool.charts import check_drawing
from rltool.commands.plot import check_metrics, envs_of, joined, pooled, thresholds
from rltool.errors import ConfigError, Problem, RltoolError
from rltool.grouping import Group, read_words, select
from rltool.runs import shown
from rltool.schema import CompareConfig
from rltool.tables import count, decimals, interval
from rltool.tables import markdown as markdown_table
from rltool.wording import fitted, listed

if TYPE_CHECKING:
    from rltool.cli import Options
    from rltool.comparison import Aggregate, GroupScores, Improvement, Scores
    from rltool.estimates import Estimate

# What a score is, after the metric: in words and for an axis.
_AT = {
    "final": " of the last policy, on fresh episodes after training",
    "last": ", the last value in training",
    "best": ", the best value in training",
    "auc": ", the mean over training",
}
_SHORT = {
    "final": "last policy, fresh episodes",
    "last": "last in training",
    "best": "best in training",
    "auc": "mean over training",
}
# Of the notes below the tables, and of tables at most, where the terminal has more room.
_WIDTH, _WIDEST = 80, 120
# Letters that a label keeps where there is little room.
_LEAST = 12
_FLATTERS = "the best evaluation of a run is a maximum of noise: it flatters, the more the more evaluations there were"


def main(options: Options) -> int:
    """Runs the command; returns the exit code.

    Raises:
        ConfigError: what was typed cannot be compared, or the extra that pictures need is missing.
        RltoolError: a file cannot be written.
    """
    config, parts = read_words(options.overrides, CompareConfig, options.files(), "compare")
    out = Path(config.out) if config.out is not None else None
    if out is not None and out.exists() and not out.is_dir():
        raise ConfigError(Problem("out", f"expected a directory, found the file {out}"))
    if out is not None:
        check_drawing("out")
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
    from rltool import comparison

    config = config.model_copy(update={"at": comparison.choose_score(groups, config.metric, config.at, notes)})
    if config.at == "best":
        notes.append(_FLATTERS)
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
    if all(len(one.groups) < 2 for one in scores):
        raise ConfigError(_apart(groups, scores, config.metric))
    over_all = comparison.aggregate(scores, config.resamples, notes)
    notes = joined(notes)
    if "json" in options.flags:
        print(json.dumps(tree(scores, over_all, notes, config), indent=2, ensure_ascii=False))
    else:
        columns = min(max(shutil.get_terminal_size().columns, _WIDTH), _WIDEST)
        print(markdown(scores, over_all, notes, config, columns))
    if out is not None:
        _write(out, markdown(scores, over_all, notes, config), scores, groups, config)
        if "json" not in options.flags:
            print(f"\nwritten to {shown(out)}: table.md, table.csv, comparison.png, comparison.svg")
    return 0


def _apart(groups: Sequence[Group], scores: Sequence[Scores], metric: str) -> Problem:
    """What is wrong where no environment has a score of two groups."""
    envs = {group.label: [one.env for one in scores if group.label in one.groups] for group in groups}
    told = "; ".join(f"{label} on {', '.join(of) or 'none'}" for label, of in envs.items())
    hint = "Give every group runs of the same environment"
    if not all(envs.values()):
        without = listed([label for label, of in envs.items() if not of])
        hint = f"Choose a metric=… that all have: nothing of {without} has measured {metric}"
    return Problem("", f"no environment has scores of two groups: {told}", hint)


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


def markdown(
    scores: Sequence[Scores],
    over_all: Aggregate | None,
    notes: Sequence[str],
    config: CompareConfig,
    width: int | None = None,
) -> str:
    """The tables and the notes.

    Args:
        scores, over_all, notes: what is told.
        config: ``at`` is the score that was taken.
        width: letters in a line; where they are too few, labels are cut. None: all are whole.
    """
    labels = list(dict.fromkeys(label for one in scores for label in one.groups))
    room = max(map(len, labels))
    text = _markdown(scores, over_all, dict(zip(labels, labels, strict=True)), config, width)
    while width is not None and room > _LEAST and _columns(text) > width:
        room -= 1
        text = _markdown(scores, over_all, fitted(labels, room), config, width)
    lines = "\n".join(textwrap.fill(f"- {note}", _WIDTH, subsequent_indent="  ") for note in notes)
    return f"{text}\n\n{lines}" if lines else text


def _markdown(
    scores: Sequence[Scores],
    over_all: Aggregate | None,
    names: Mapping[str, str],
    config: CompareConfig,
    width: int | None,
) -> str:
    """The tables, with each label as it is shown."""
    blocks = [
        f"Scores: {config.metric}{_AT[config.at]}.\n"
        f"In brackets: 95 % intervals; bootstrap over the seeds, {config.resamples:,} resamples.\n"
        "P(A > B): how probably a run of A scores above one of B; ties count half."
    ]
    if cut := {label: name for label, name in names.items() if name != label}:
        told = [textwrap.fill(f"{name}: {label}", _WIDTH, subsequent_indent="  ") for label, name in cut.items()]
        blocks.append("\n".join(["Groups:", *told]))
    for one in scores:
        solved = f", solved at {one.threshold:g}" if one.threshold is not None else ""
        blocks += [f"### {one.env}{solved}", _score_table(one, names, width)]
        blocks += [_threshold_table(one, names), _cost_table(one, names), _pair_table(one.improvements, names)]
    if over_all is not None:
        blocks.append("### All environments")
        if over_all.estimates:
            blocks.append("Scores divided by the environment's threshold: 1 is solved, 0 a return of 0.")
            rows = [(names[label], *_three(estimates)) for label, estimates in over_all.estimates.items()]
            blocks.append(markdown_table(("group", "IQM", "mean", "median"), rows))
        blocks.append(_pair_table(over_all.improvements, names))
    return "\n\n".join(block for block in blocks if block)


def _columns(text: str) -> int:
    return max(map(len, text.splitlines()))


def _score_table(scores: Scores, names: Mapping[str, str], width: int | None) -> str:
    """A row for each group; where not even short labels leave the room, for each estimate of each."""
    digits = decimals([e for group in scores.groups.values() for e in group.estimates.values()])
    cells = {label: (f"{len(group.runs)}", *_three(group.estimates, digits)) for label, group in scores.groups.items()}
    wide = markdown_table(
        ("group", "seeds", "IQM", "mean", "median"), [(names[label], *row) for label, row in cells.items()]
    )
    longest = max(len(names[label]) for label in cells)
    if width is None or _columns(wide) - max(longest - _LEAST, 0) <= width:
        return wide
    rows = []
    for label, (seeds, *three) in cells.items():
        for number, (name, value) in enumerate(zip(("IQM", "mean", "median"), three, strict=True)):
            rows.append(("", "", name, value) if number else (names[label], seeds, name, value))
    return markdown_table(("group", "seeds", "estimate", "score"), rows)


def _threshold_table(scores: Scores, names: Mapping[str, str]) -> str:
    """What it took to reach the threshold; empty where there is none."""
    if scores.threshold is None:
        return ""
    rows = [
        (
            names[label],
            f"{len(group.reached)} of {len(group.runs)}",
            count(group.frames_to_threshold),
            count(group.seconds_to_threshold),
        )
        for label, group in scores.groups.items()
    ]
    return markdown_table(("group", "reached", "frames to it", "seconds to it"), rows)


def _cost_table(scores: Scores, names: Mapping[str, str]) -> str:
    rows = [
        (names[label], count(group.frames), count(group.seconds), count(group.frames_per_second))
        for label, group in scores.groups.items()
    ]
    return markdown_table(("group", "frames", "seconds", "frames/s"), rows)


def _pair_table(pairs: Sequence[Improvement], names: Mapping[str, str]) -> str:
    """Every pair of groups; empty where there is none."""
    rows = [(names[pair.better], names[pair.worse], interval(pair.probability, 2)) for pair in pairs]
    return markdown_table(("A", "B", "P(A > B)"), rows) if rows else ""


def _three(estimates: Mapping[str, Estimate], digits: int = 2) -> list[str]:
    return [interval(estimates[name], digits) for name in ("iqm", "mean", "median")]


def _write(out: Path, text: str, scores: Sequence[Scores], groups: Sequence[Group], config: CompareConfig) -> None:
    """Writes all files of a comparison into a directory, made where it is missing."""
    from rltool.charts import draw_comparison, name_of
    from rltool.curves import read_panel

    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / "table.md").write_text(f"{text}\n", encoding="utf-8")
        (out / "table.csv").write_text(_csv(scores, config), encoding="utf-8", newline="")
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
    outs = [out / "comparison.png", out / "comparison.svg"]
    draw_comparison(rows, labels, outs, score=f"{name_of(config.metric)}, {_SHORT[config.at]}", width=config.width)


def _csv(scores: Sequence[Scores], config: CompareConfig) -> str:
    """A row for each group and environment; what is not known is empty."""
    names = [f"{name}{end}" for name in ("iqm", "mean", "median") for end in ("", "_low", "_high")]
    effort = ["frames_to_threshold", "seconds_to_threshold", "frames", "seconds", "frames_per_second"]
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(["environment", "metric", "at", "group", "seeds", *names, "threshold", "reached", *effort])
    for one in scores:
        for label, group in one.groups.items():
            writer.writerow([one.env, config.metric, config.at, label, len(group.runs), *_numbers(group), one.threshold,
                             len(group.reached), *(getattr(group, name) for name in effort)])  # fmt: skip
    return text.getvalue()


def _numbers(group: GroupScores) -> list[float | None]:
    chosen = [group.estimates[name] for name in ("iqm", "mean", "median")]
    return [number for one in chosen for number in (one.value, one.low, one.high)]

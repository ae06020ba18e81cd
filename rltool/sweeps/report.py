"""The answer of a sweep as a person gets it: a table on the terminal, and files in the sweep's directory."""

from __future__ import annotations

import csv
import io
import json
import shlex
import shutil
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pydantic import JsonValue

from rltool.commands.list import grid
from rltool.configfiles import flat
from rltool.figures import counted
from rltool.grouping import short_names, value_shown
from rltool.runs import program, replace_file, shown
from rltool.sweeps.answer import PRUNED, Answer, Configuration, Ranking, Result, answer, suffix
from rltool.sweeps.experiment import experiment
from rltool.sweeps.jobs import Sweep
from rltool.sweeps.pictures import draw
from rltool.tables import count, decimals, interval, markdown
from rltool.wording import fitted

RESULTS, SUMMARY, EXPERIMENT = "results.csv", "summary.md", "experiment"
# Letters in a line.
_LEAST, _WIDEST = 80, 120
# Configurations and failures that are shown on the terminal and in the file; results.csv has every job.
_SHOWN, _SHOWN_IN_FILE = 15, 200
# Left out in this order where the terminal is too narrow.
_SPARED = ("seconds to", "IQM", "frames to")
# The interquartile mean of fewer seeds leaves nobody out.
_IQM_FROM = 4
# Digits of a number in the table, where they tell all values apart.
_DIGITS = 3
# Letters of a value where there is little room.
_VALUE = 14
# Fresh seeds for the best, unless it had more.
_FRESH = 5
_AT = {
    "final": "mean return of the last policy, on fresh episodes after training",
    "last": "mean return of the last evaluation in training",
}
_OBJECTIVES = {
    "auc": "mean over training",
    "frames": "frames to the threshold (twice the budget where it was not reached)",
}
_BEATS = {
    "final": "It beats",
    "auc": "In the mean over training it beats",
    "frames": "In frames to the threshold it beats",
}


def report(sweep: Sweep, *, final: bool) -> int:
    """Prints what a sweep says, writes it into its directory, and returns the exit code: 1 where a job failed.

    Args:
        sweep: finished, running or cut off; its jobs are read anew.
        final: nothing more will come of it by itself: what has not begun is left over.
    """
    found = answer(Sweep.read(sweep.path))
    written, trouble = write(found, final=final)
    width = min(max(shutil.get_terminal_size().columns, _LEAST), _WIDEST)
    print(text(found, width, final=final))
    lines = [f"Written to {shown(sweep.path)}: {', '.join(written)}."] if written else []
    lines += [f"{line[0].upper()}{line[1:]}." for line in trouble]
    print("\n" + "\n".join(textwrap.fill(line, width, break_on_hyphens=False) for line in lines))
    return exit_code(found)


def exit_code(found: Answer) -> int:
    """1 where a job failed, was killed or interrupted."""
    return int(bool(found.failures))


def write(found: Answer, *, final: bool) -> tuple[list[str], list[str]]:
    """Writes every file of an answer; a job's own files are never touched.

    Returns:
        the names of what was written, and what is wrong with the rest.
    """
    files = {RESULTS: _csv(found), SUMMARY: page(found, final=final)}
    for ranking in found.rankings:
        if ranking.best is not None:
            files[f"{EXPERIMENT}/{best_name(found, ranking)}.yaml"] = _experiment(found, ranking, ranking.best)
    written: list[str] = []
    results = found.sweep.path / RESULTS
    try:
        anew = not results.is_file() or results.read_text(encoding="utf-8", errors="replace") != files[RESULTS]
        for name, content in files.items():
            path = found.sweep.path / name
            path.parent.mkdir(exist_ok=True)
            replace_file(path, content.encode("utf-8", errors="backslashreplace"))
            written.append(name)
        pictures, trouble = draw(found, anew=anew)
    except OSError as error:
        return written, [f"cannot write into {shown(found.sweep.path)}: {error.strerror}"]
    return [*written, *pictures], trouble


# ------------------------------------------------------------------------------------------------------------- terminal


def text(found: Answer, width: int, *, final: bool) -> str:
    """The answer for a terminal.

    Args:
        found: the answer.
        width: letters in a line.
        final: see :func:`report`.
    """
    blocks = [_wrapped([_head(found), _scores_are(found)], width)]
    for ranking in found.rankings:
        lines = [_title(ranking), *_terminal_table(ranking, found.objectives[0], width)] if ranking.ranked else []
        blocks += ["\n".join(lines), _wrapped(_verdict(found, ranking), width)]
    blocks += [_failures(found, width), _wrapped(_going_on(found, final=final), width)]
    blocks.append("\n".join(textwrap.fill(f"- {note}", width, subsequent_indent="  ") for note in found.notes))
    return "\n\n".join(block for block in blocks if block)


def _wrapped(paragraphs: Sequence[str], width: int) -> str:
    """Paragraphs, wrapped; a command stands in a line of its own, whole, so that it can be copied."""
    return "\n".join(
        line if line.startswith("  ") else textwrap.fill(line, width, break_long_words=False, break_on_hyphens=False)
        for line in paragraphs
    )


def _head(found: Answer) -> str:
    counts = ", ".join(f"{number} {status}" for status, number in found.counts.most_common())
    kind = "search" if found.sweep.kind == "tune" else "grid"
    return f"{shown(found.sweep.path)}: a {kind} of {counted(len(found.results), 'job')}: {counts or 'none yet'}"


def _scores_are(found: Answer) -> str:
    if not any(ranking.best for ranking in found.rankings):
        return ""
    first = found.objectives[0]
    ranked = f" Ranked by {_OBJECTIVES[first]}." if first in _OBJECTIVES else ""
    return f"Scores: {_AT[found.at]}; in brackets the 95 % interval over the seeds.{ranked}"


def _title(ranking: Ranking) -> str:
    return ranking.env + (f", solved at {ranking.threshold:g}" if ranking.threshold is not None else "")


@dataclass(frozen=True)
class _Column:
    """Cells under a title."""

    title: str
    cells: tuple[str, ...]
    right: bool = True

    @property
    def is_empty(self) -> bool:
        return not any(cell.strip("–") for cell in self.cells)


def _terminal_table(ranking: Ranking, objective: str, width: int) -> list[str]:
    """The rows that are shown, in columns; what there is no room for is named below."""
    shown_rows = ranking.ranked[:_SHOWN]
    keys, numbers = _columns(ranking, shown_rows, objective)
    dropped: list[str] = []
    for start in _SPARED:
        spared = [column for column in numbers if column.title.startswith(start)]
        if spared and _width(keys + numbers) > width:
            numbers = [column for column in numbers if column not in spared]
            dropped += [column.title for column in spared]
    if _width(keys + numbers) > width:
        keys = [_narrowed(column) for column in keys]
    while _width(keys + numbers) > width and len(keys) > 1:
        dropped.append(keys.pop().title)
    columns = keys + numbers
    rows = list(zip(*(column.cells for column in columns), strict=True))
    right = {place for place, column in enumerate(columns) if column.right}
    lines = grid([column.title for column in columns], rows, right)
    more = len(ranking.ranked) - len(shown_rows)
    if more:
        lines.append(f"… and {more} more, in {SUMMARY}")
    if dropped:
        lines.append(textwrap.fill(f"no room for: {', '.join(dropped)}; see {SUMMARY}", width))
    return lines


def _columns(ranking: Ranking, rows: Sequence[Configuration], objective: str) -> tuple[list[_Column], list[_Column]]:
    """What was chosen, and what came of it; columns in which nothing stands are left out."""
    keys = []
    if any(row.trial is not None for row in rows):
        keys.append(_Column("trial", tuple(f"{row.trial}" for row in rows)))
    for key, name in short_names(ranking.keys).items():
        values = [row.values.get(key) for row in rows]
        is_number = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
        keys.append(_Column(name, _shown_values(values), right=is_number))
    digits = _digits(ranking)
    numbers = [
        _Column("seeds", tuple(_seeds(row) for row in rows)),
        _Column("mean", tuple(_mean(row, digits) for row in rows), right=False),
    ]
    if any(row.scores is not None and len(row.scores.runs) >= _IQM_FROM for row in rows):
        told = tuple(f"{row.iqm.value:,.{digits}f}" if row.iqm is not None else "–" for row in rows)
        numbers.append(_Column("IQM", told))
    if objective == "auc":
        told = tuple("–" if row.objective is None else f"{row.objective:,.{digits}f}" for row in rows)
        numbers.append(_Column(_OBJECTIVES[objective], told))
    elif objective == "frames":
        told = tuple("–" if row.objective is None else count(-row.objective) for row in rows)
        numbers.append(_Column("mean frames", told))
    goal = f"{ranking.threshold:g}" if ranking.threshold is not None else ""
    frames = (row.scores.frames_to_threshold if row.scores else None for row in rows)
    seconds = (row.scores.seconds_to_threshold if row.scores else None for row in rows)
    numbers += [
        _Column(f"frames to {goal}", tuple(map(count, frames))),
        _Column(f"seconds to {goal}", tuple(map(count, seconds))),
        _Column("", tuple(_remark(row) for row in rows), right=False),
    ]
    return keys, [column for column in numbers if not column.is_empty]


def _shown_values(values: Sequence[JsonValue]) -> tuple[str, ...]:
    """Values in few digits, where these tell them apart."""
    whole = tuple(map(value_shown, values))
    short = tuple(
        f"{value:.{_DIGITS}g}" if isinstance(value, float) else text for value, text in zip(values, whole, strict=True)
    )
    return short if len(set(short)) == len(set(whole)) else whole


def _seeds(row: Configuration) -> str:
    scored = len(row.scores.runs) if row.scores is not None else 0
    return f"{scored}" if scored == row.size else f"{scored} of {row.size}"


def _remark(row: Configuration) -> str:
    """What became of jobs that did not end as they were to."""
    if row.counts[PRUNED]:
        return PRUNED
    told = {status: number for status, number in row.counts.items() if status not in ("finished", "solved")}
    if row.lost:
        told["lost"] = row.lost
    return ", ".join(f"{number} {status}" for status, number in told.items())


def _width(columns: Sequence[_Column]) -> int:
    return sum(max(len(cell) for cell in (column.title, *column.cells)) + 2 for column in columns) - 2


def _narrowed(column: _Column) -> _Column:
    names = fitted(column.cells, _VALUE)
    return _Column(column.title[:_VALUE], tuple(names[cell] for cell in column.cells), column.right)


# --------------------------------------------------------------------------------------------------------- what it says


def title_of(row: Configuration, ranking: Ranking) -> str:
    """A configuration as one would type it; a trial by its number."""
    words = " ".join(f"{key}={value_shown(row.values.get(key))}" for key in ranking.keys)
    if row.trial is not None:
        return f"trial {row.trial}" + (f" ({words})" if words else "")
    return words


def best_name(found: Answer, ranking: Ranking) -> str:
    """What ``experiment=`` calls the best configuration on an environment."""
    return f"best{suffix(found, ranking)}"


def _verdict(found: Answer, ranking: Ranking) -> list[str]:
    """The best, whether the second is really worse, and how much of it is luck."""
    best = ranking.best
    if best is None or best.scores is None:
        return []
    so_far = " so far" if found.is_open else ""
    of = f"{counted(len(best.scores.runs), 'seed')}"
    title = title_of(best, ranking)
    head = f"Best{so_far}: {title}" if title else f"All seeds{so_far}"
    lines = [f"{head}: {_mean(best, _digits(ranking))} over {of}."]
    if ranking.second is not None and ranking.better is not None:
        lines[0] += f" {_against_second(ranking, best, ranking.second, found.objectives[0])}"
    if ranking.front:
        front = ", ".join(f"{one.trial}" for one in ranking.front)
        lines.append(f"The Pareto front of the objectives: trial{'s' * (len(ranking.front) > 1)} {front}.")
    ahead = next((one for one in ranking.ranked if one.tier == 1 and one.objective is not None), None)
    if (
        ahead is not None
        and best.objective is not None
        and (ahead.objective or 0.0) > best.objective
        and best.tier == 0
    ):
        lines.append(f"{title_of(ahead, ranking)} does better on {_seeds(ahead)} of its jobs; the others are missing.")
    rivals = sum(one.objective is not None for one in ranking.ranked)
    if ranking.winner is not None:
        lines.append(_winner(ranking.winner, _digits(ranking)))
    elif rivals > 1:
        lines.append(
            f"It is the best of {rivals}, chosen by the very seeds that it is scored on: that flatters. On fresh seeds:"
        )
        lines.append(f"  {_fresh(found, ranking, best)}")
    return lines


def _mean(row: Configuration, digits: int) -> str:
    return interval(row.mean, digits) if row.mean is not None else "–"


def _digits(ranking: Ranking) -> int:
    """Decimals of all scores on an environment."""
    means = [row.mean for row in ranking.ranked if row.mean is not None]
    return decimals(means) if means else 0


def _against_second(ranking: Ranking, best: Configuration, second: Configuration, objective: str) -> str:
    assert ranking.better is not None
    equal = [one for one in ranking.ranked if one.tier == best.tier and one.objective == best.objective]
    if len(equal) > 1:
        others = [one.frames_to_threshold for one in equal if one is not best]
        frames = best.frames_to_threshold
        if frames is not None and all(other is None or other > frames for other in others):
            return f"{len(equal)} configurations score the same; it is the one that reaches {ranking.threshold:g} in the fewest frames."
        return (
            f"{len(equal)} configurations score the same, and it is the first of them. Who learns fastest may tell them apart: "
            "tune.objective=auc in a search, rltool compare … at=auc of a grid."
        )
    chance = interval(ranking.better, 2)
    told = f"{_BEATS[objective]} the second, {title_of(second, ranking)}, with a probability of {chance}:"
    if ranking.really_worse:
        return f"{told} the second really is worse."
    if ranking.can_tell:
        return f"{told} that may be chance."
    seeds = [len(one.scores.runs) for one in (best, second) if one.scores is not None]
    which = counted(seeds[0], "seed") if len(set(seeds)) == 1 else f"{seeds[0]} and {seeds[1]} seeds"
    return f"{told} {which} cannot tell."


def _winner(winner: Configuration, digits: int) -> str:
    if winner.scores is None:
        return f"The winner on fresh seeds: no score yet ({_remark(winner)})."
    missing = f" ({_seeds(winner)} jobs)" if len(winner.scores.runs) < len(winner.results) else ""
    of = counted(len(winner.scores.runs), "seed")
    return f"The winner on fresh seeds: {_mean(winner, digits)} over {of}{missing}. That is the number to quote."


def _fresh(found: Answer, ranking: Ranking, best: Configuration) -> str:
    """The command that runs the best on seeds that nothing was chosen by."""
    used = [seed for one in ranking.ranked for seed in one.seeds]
    first, number = max(used, default=-1) + 1, max(_FRESH, len(best.results))
    seeds = ",".join(map(str, range(first, first + number)))
    return f"{program('rltool')} train -m {_chosen(found, ranking)} seed={seeds}"


def _chosen(found: Answer, ranking: Ranking) -> str:
    """The words that choose the best configuration."""
    return f"--config-dir {shlex.quote(shown(found.sweep.path))} experiment={best_name(found, ranking)}"


def _failures(found: Answer, width: int) -> str:
    failures = found.failures
    if not failures:
        return ""
    statuses = ", ".join(f"{number} {status}" for status, number in Counter(one.status for one in failures).items())
    what = "failed" if all(one.status == "failed" for one in failures) else f"are not done, {statuses}"
    lines = [f"{len(failures)} of {counted(len(found.results), 'job')} {what}:"]
    for result in failures[:_SHOWN]:
        lines.append(textwrap.fill(_failure(result), width, initial_indent="  ", subsequent_indent="    "))
        if result.job.console.is_file():
            lines.append(f"    {shown(result.job.console)}")
    if len(failures) > _SHOWN:
        lines.append(f"  … and {len(failures) - _SHOWN} more, in {SUMMARY}")
    return "\n".join(lines)


def _failure(result: Result) -> str:
    title = f" ({result.job.title})" if result.job.title else ""
    return f"{result.job.name}{title} {result.status}: {result.error}"


def _going_on(found: Answer, *, final: bool) -> list[str]:
    """How to run what is missing; empty where nothing is, or where it is on its way."""
    on_its_way = not final and (found.counts["running"] or found.sweep.is_at_work)
    waiting = 0 if on_its_way else found.counts["waiting"]
    if not found.failures and not waiting:
        return []
    left = f"{counted(waiting, 'job')} did not begin. " if waiting else ""
    return [f"{left}What is missing runs, and nothing else, with the words of before:", f"  {_again(found.sweep)}"]


def _again(sweep: Sweep) -> str:
    words = [word for word in sweep.overrides if not word.startswith("hydra.sweep.dir=")]
    return f"{program('rltool')} train -m {shlex.join([*words, f'hydra.sweep.dir={shown(sweep.path)}'])}"


# ---------------------------------------------------------------------------------------------------------------- files


def page(found: Answer, *, final: bool) -> str:
    """summary.md."""
    blocks = [
        f"# {found.sweep.path.name}",
        "Asked for with",
        f"    {_again(found.sweep)}",
        _head(found),
        _scores_are(found),
    ]
    for ranking in found.rankings:
        if ranking.ranked:
            blocks += [f"## {_title(ranking)}", _page_table(ranking, found.objectives[0])]
            blocks += list(_paragraphs(_verdict(found, ranking)))
        if ranking.best is not None:
            name = best_name(found, ranking)
            blocks.append(f"`{EXPERIMENT}/{name}.yaml` holds the best configuration, all but the seed:")
            blocks.append(f"    {program('rltool')} train {_chosen(found, ranking)} seed=0")
    if found.failures:
        blocks.append("## What is not done")
        lines = [f"- {_failure(one)} (`{shown(one.job.console)}`)" for one in found.failures[:_SHOWN_IN_FILE]]
        blocks.append("\n".join(lines))
    blocks += list(_paragraphs(_going_on(found, final=final)))
    if found.notes:
        blocks.append("\n".join(f"- {note}" for note in found.notes))
    if any(flat(result.job.config).get("logging.kind") == "tensorboard" for result in found.results):
        blocks.append("All jobs side by side, with their hyperparameters (the HPARAMS tab):")
        blocks.append(f"    tensorboard --logdir {shlex.quote(shown(found.sweep.path))}")
    return "\n\n".join(block for block in blocks if block) + "\n"


def _paragraphs(lines: Sequence[str]) -> Iterator[str]:
    """Lines as paragraphs of Markdown; a command is set off."""
    for line in lines:
        yield f"  {line}" if line.startswith("  ") else line


def _page_table(ranking: Ranking, objective: str) -> str:
    rows = ranking.ranked[:_SHOWN_IN_FILE]
    keys, numbers = _columns(ranking, rows, objective)
    columns = keys + numbers
    cells = list(zip(*(column.cells for column in columns), strict=True))
    table = markdown([column.title for column in columns], cells)
    more = len(ranking.ranked) - len(rows)
    return f"{table}\n\n… and {more} more, in {RESULTS}" if more else table


def _csv(found: Answer) -> str:
    """A row for each job; what is not known is empty."""
    rows = [result.to_json() for result in found.results]
    names = list(dict.fromkeys(name for row in rows for name in row))
    last = [name for name in ("seed", "score", "frames", "seconds", "frames_to_threshold", "error") if name in names]
    stream = io.StringIO()
    writer = csv.DictWriter(stream, [*(name for name in names if name not in last), *last], lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _cell(value) for name, value in row.items()} for row in rows)
    return stream.getvalue()


def _cell(value: JsonValue) -> JsonValue:
    """Lists and mappings as they would be typed."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, list | Mapping) else value


def _experiment(found: Answer, ranking: Ranking, best: Configuration) -> str:
    job = best.results[0].job
    names = ", ".join(result.job.name for result in best.results)
    told = [title_of(best, ranking), f"tuned values in it: {job.tuned}" if job.tuned is not None else ""]
    heading = [
        f"Best of {shown(found.sweep.path)}: jobs {names}; score {_mean(best, _digits(ranking))}",
        *filter(None, told),
    ]
    return experiment([line.replace("\n", " ") for line in heading], best.config, job.words)

"""``rltool eval``: evaluates checkpoints and prints or writes what was found."""

from __future__ import annotations

import json
import math
import os
import secrets
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from rltool import reporting, trust
from rltool.composition import quoted, read_overrides
from rltool.config import import_plugins, load_node
from rltool.configfiles import flat
from rltool.errors import ConfigError, Problem, RltoolError
from rltool.figures import counted
from rltool.importing import import_user_module
from rltool.launch import check_command
from rltool.places import checkpoints_at, labels
from rltool.records import located
from rltool.runs import shown
from rltool.schema import EvalRunConfig
from rltool.wording import found

if TYPE_CHECKING:
    from rltool.cli import Options
    from rltool.configfiles import ConfigFiles
    from rltool.entries import Entry

# Width of a report that goes into a file, where COLUMNS does not say otherwise.
_WIDTH = 120
# Columns of a table of several, those that stand together whatever the mode.
_PARTS = (("mean", "95 % interval"), ("success",), ("episodes",), ("IQM",), ("min … max",))
_MODES = {True: "deterministic", False: "sampled"}


def main(options: Options) -> int:
    """Runs the command; returns the exit code.

    Raises:
        ConfigError: what was asked for cannot be evaluated.
        RltoolError: a file cannot be written, or a video, after the report was printed.
    """
    files = options.files()
    line = read_overrides(_with_places(options.overrides, files), files, name="eval", several="Give one")
    config = check_command(EvalRunConfig, line, files, "eval")
    places = [config.checkpoint] if isinstance(config.checkpoint, str) else config.checkpoint
    paths = checkpoints_at(places)
    modes = [True, False] if config.deterministic == "both" else [config.deterministic]
    jobs = [(path, mode) for path in paths for mode in modes]
    if config.trajectories is not None and len(jobs) > 1:
        text = f"one file holds the episodes of one checkpoint in one mode, found {len(jobs)}"
        raise ConfigError(Problem("trajectories", text, "Name one checkpoint, and deterministic=true or false"))
    for key in ("out", "trajectories"):
        if (target := getattr(config, key)) is not None:
            _check_writable(key, Path(target))
    checked: dict[Path, Mapping[str, object]] = {}
    failed: dict[Path, Exception] = {}
    for path in paths:
        with _noted(failed, path):
            checked[path] = _check_environment(config, path)
    if not checked:
        raise _of_all(failed)
    if config.video:
        import_user_module("imageio_ffmpeg", "video")  # a missing extra is told before torch is imported
    for path, error in failed.items():
        reporting.show(error, f"rltool eval, {shown(path)}", debug=config.debug)

    entries, problems = _evaluated(config, [job for job in jobs if job[0] in checked], checked, failed)
    if config.env and not config.quiet:
        changed = flat({"env": config.env})
        print(f"changed for this evaluation: {', '.join(f'{key}={found(value)}' for key, value in changed.items())}")
    if len(jobs) == 1:
        if failed:
            raise next(iter(failed.values()))
        print(_line(entries[0].report) if config.quiet else _table([entries[0].report], config.device))
    elif entries:
        print("\n".join(_lines(entries)) if config.quiet else _tables(entries, config.device))
    if config.out is not None:
        _write(Path(config.out), entries[0].to_json() if len(jobs) == 1 else _together(entries, failed))
        print(f"written to {config.out}")
    if config.trajectories is not None:
        print(f"episodes written to {config.trajectories}")
    if problems:
        raise RltoolError("\n".join(dict.fromkeys(problems)))
    if failed:
        print(f"rltool eval: {len(failed)} of {len(paths)} checkpoints could not be evaluated", file=sys.stderr)
    return int(bool(failed))


def _with_places(words: Sequence[str], files: ConfigFiles) -> list[str]:
    """The words with those that are paths under the key ``checkpoint``.

    Raises:
        ConfigError: checkpoints are given in both ways.
    """
    places = [word for word in words if _is_place(word, files)]
    rest = [word for word in words if word not in places]
    if places and any(word.lstrip("+").startswith("checkpoint=") for word in rest):
        text = f"expected paths or checkpoint=, found both: {places[0]}"
        raise ConfigError(Problem("checkpoint", text, "Give all of them in one way"))
    return rest + ([f"checkpoint=[{','.join(map(quoted, places))}]"] if places else [])


def _is_place(word: str, files: ConfigFiles) -> bool:
    """Whether a word is a path and no override: directories may have = in their names."""
    if word.startswith(("+", "~")):
        return False
    head, equals, _ = word.partition("=")
    if equals:
        return Path(word).exists() or os.sep in head
    # An option of a group is a choice whose key was forgotten.
    return located(word).exists() or not any(word in files.options(group) for group in files.groups())


@contextmanager
def _noted(failed: dict[Path, Exception], path: Path) -> Iterator[None]:
    """One checkpoint that cannot be evaluated does not keep the others from it."""
    try:
        yield
    except Exception as error:
        failed[path] = error


def _of_all(failed: Mapping[Path, Exception]) -> Exception:
    """The error of a command whose checkpoints all fail its checks; each reason once."""
    errors = list(failed.values())
    if len(errors) == 1 or not all(isinstance(error, RltoolError) for error in errors):
        return errors[0]
    problems = [
        problem
        for error in errors
        for problem in (error.problems if isinstance(error, ConfigError) else [Problem("", str(error))])
    ]
    return ConfigError(dict.fromkeys(problems))


def _check_environment(config: EvalRunConfig, path: Path) -> Mapping[str, object]:
    """Reads a checkpoint's configuration and checks the environment with the changes laid over it, before torch is imported.

    Returns:
        The env node.

    Raises:
        CheckpointError: it is no checkpoint.
        ConfigError: the changes do not fit, or it names code of a stranger's.
    """
    from rltool.checkpoint import read_header

    header = read_header(path)
    tree = trust.configuration(header, config.typed, (*trust.POLICY, "env"))
    problems = import_plugins(tree.get("plugins"))
    if problems:
        raise ConfigError(problems)
    node = cast("Mapping[str, object]", tree["env"])
    load_node("env", node)
    return node


def _evaluated(
    config: EvalRunConfig,
    jobs: Sequence[tuple[Path, bool]],
    nodes: Mapping[Path, Mapping[str, object]],
    failed: dict[Path, Exception],
) -> tuple[list[Entry], list[str]]:
    """Evaluates checkpoints one after the other.

    Args:
        config: what was asked for.
        jobs: each checkpoint and mode.
        nodes: the env node of each checkpoint.
        failed: those that could not be evaluated are added to it, and told at once.

    Returns:
        What was found, and why videos are missing.
    """
    from rltool.checkpoint import read_header
    from rltool.entries import Entry
    from rltool.evaluation import evaluate_checkpoint

    entries: list[Entry] = []
    problems: list[str] = []
    names = _names(jobs)
    for number, (path, mode) in enumerate(jobs):
        if path in failed:
            continue
        changes: dict[str, object] = {"checkpoint": str(path), "deterministic": mode}
        if len(jobs) > 1 and config.video_dir is not None:
            changes["video_dir"] = str(Path(config.video_dir) / names[number].replace(os.sep, "-"))
        with _noted(failed, path), _progress(number, len(jobs), names[number]):
            report = evaluate_checkpoint(config.model_copy(update=changes))
            entries.append(Entry.of(path, read_header(path), report.to_json(), nodes[path]))
            problems += [report.video_problem] if report.video_problem is not None else []
        if path in failed and len(jobs) > 1:
            reporting.show(failed[path], f"rltool eval, {shown(path)}", debug=config.debug)
    return entries, problems


def _names(jobs: Sequence[tuple[Path, bool]]) -> list[str]:
    """What tells the jobs apart: their checkpoints, their modes, or both."""
    paths, modes = {path for path, _ in jobs}, {mode for _, mode in jobs}
    found = labels([path for path, _ in jobs])
    if len(modes) < 2:
        return found
    words = [_MODES[mode] for _, mode in jobs]
    return words if len(paths) == 1 else [f"{name}-{word}" for name, word in zip(found, words, strict=True)]


@contextmanager
def _progress(number: int, count: int, name: str) -> Iterator[None]:
    """A line that says which of several is evaluated, on a terminal and until that is done."""
    shows = count > 1 and sys.stderr.isatty()
    if shows:
        print(f"{number + 1} of {count}: {name}", end="", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        if shows:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def _together(entries: Sequence[Entry], failed: Mapping[Path, Exception]) -> dict[str, object]:
    """The report of several for programs."""
    from rltool.entries import by_task, distinct, overall

    groups = [distinct(group) for group in by_task(entries)]
    return {
        "reports": [entry.to_json() for entry in entries],
        "overall": [overall(group) for group in groups if len(group) > 1],
        "failed": [{"checkpoint": str(path), "error": str(error)} for path, error in failed.items()],
    }


def _number(value: object, digits: int = 2) -> str:
    known = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return f"{value:,.{digits}f}" if known else "–"


def _line(report: Mapping[str, Any]) -> str:
    cut = f", {report['cut']} cut at {report['max_steps']:,} steps" if report["cut"] else ""
    return f"{_number(report['mean'])} ± {_number(report['std'])} over {counted(report['episodes'], 'episode')}{cut}"


def _lines(entries: Sequence[Entry]) -> list[str]:
    """A line for each of several."""
    names = _names([(entry.path, entry.report["deterministic"]) for entry in entries])
    width = max(map(len, names))
    return [f"{name:<{width}}  {_line(entry.report)}" for name, entry in zip(names, entries, strict=True)]


def _table(reports: Sequence[Mapping[str, Any]], device: str) -> str:
    """The reports of one checkpoint for a reader, a column each; rows whose value does not exist are left out.

    Args:
        reports: the values; of two modes, or of one.
        device: which one was asked for.
    """
    first, several = reports[0], len(reports) > 1
    how = "both ways" if several else _MODES[first["deterministic"]]
    rows = [
        ("checkpoint", [str(first["checkpoint"])]),
        ("environment", [str(first["env"])]),
        ("episodes", [f"{first['episodes']}, {how}, seed {first['seed']}"]),
        ("device", [f"{first['device']}{', chosen by device=auto' if device == 'auto' else ''}"]),
    ]
    if several:
        rows.append(("", [_MODES[report["deterministic"]] for report in reports]))
    measured = [_measured(report, brief=several) for report in reports]
    for name in dict.fromkeys(name for each in measured for name in each):
        rows.append((name, [each.get(name, "–") for each in measured]))
    width = max(len(name) for name, _ in rows)
    column = max((len(cells[0]) for _, cells in rows if len(cells) > 1), default=0)
    return "\n".join(
        f"{name:<{width}}  {'  '.join(f'{cell:<{column}}' for cell in cells)}".rstrip() for name, cells in rows
    )


def _measured(report: Mapping[str, Any], *, brief: bool) -> dict[str, str]:
    """Label and text of each line about what was measured; ``brief`` where two stand beside each other."""
    said = {"std": "", "of": ""} if brief else {"std": " (standard deviation)", "of": " (bootstrap of the mean)"}
    rows = {
        "return, mean": f"{_number(report['mean'])} ± {_number(report['std'])}{said['std']}",
        "95 % interval": f"{_number(report['ci_low'])} … {_number(report['ci_high'])}{said['of']}",
        "median, IQM": f"{_number(report['median'])}, {_number(report['iqm'])}",
        "min … max": f"{_number(report['min'])} … {_number(report['max'])}",
    }
    if lengths := report["lengths"]:
        rows["steps an episode"] = f"{_number(sum(lengths) / len(lengths), 1)} ({min(lengths)} … {max(lengths)})"
    if report["threshold"] is not None and report["success_rate"] is not None:
        rate = f"{report['success_rate']:.0%}"
        rows["success"] = (
            f"{rate} reach {report['threshold']:g}" if brief else (f"{rate} of episodes reach {report['threshold']:g}")
        )
    if report["cut"]:
        rows["cut"] = (
            f"{report['cut']} at {report['max_steps']:,} steps"
            if brief
            else (f"{report['cut']} episodes were cut at {report['max_steps']:,} steps (max_steps)")
        )
    if report["videos"]:
        rows["videos"] = _videos(report)
    return rows


def _videos(report: Mapping[str, Any]) -> str:
    paths = [Path(path) for path in report["videos"]]
    filmed, files = len({path.stem for path in paths}), f"{len(paths)}"
    count = f"{filmed} of {report['episodes']} episodes" if filmed != report["episodes"] else files
    return f"{count}, in {_from_here(paths[0].parent)}"


# ------------------------------------------------------------------------------------------------------------- several


def _tables(entries: Sequence[Entry], device: str) -> str:
    """Several reports for a reader: of each task a table with a row for each checkpoint, and one over all of them."""
    from rltool.entries import by_task, distinct

    paths = list(dict.fromkeys(entry.path for entry in entries))
    if len(paths) == 1:
        return _table([entry.report for entry in entries], device)
    names = dict(zip(paths, labels(paths), strict=True))
    tasks: dict[object, list[list[Entry]]] = {}
    for group in by_task(entries):
        tasks.setdefault(group[0].task, []).append(group)
    blocks = [_task(groups, names) for groups in tasks.values()]
    first = entries[0].report
    said = f"Each row: the same {first['episodes']} episodes, those of seed {first['seed']}, never seen in training."
    if any(len(distinct(group)) > 1 for groups in tasks.values() for group in groups):
        said += " all: the mean over checkpoints, its interval over checkpoints and episodes."
    videos = [f"videos: {_videos(entry.report)}" for entry in entries if entry.report["videos"]]
    return "\n\n".join([*blocks, "\n".join([*_wrapped(said), *videos])])


def _task(groups: Sequence[Sequence[Entry]], names: Mapping[Path, str]) -> str:
    """The table of one task.

    Args:
        groups: its entries in each mode.
        names: what each checkpoint is called.
    """
    from rltool.entries import distinct, overall

    first = groups[0][0]
    modes = [group[0].report["deterministic"] for group in groups]
    title = f"{first.algo} on {first.report['env']}, {' and '.join(_MODES[mode] for mode in modes)}"
    if (threshold := first.report["threshold"]) is not None:
        title += f"; success: a return of {threshold:g} or more"
    paths = list(dict.fromkeys(entry.path for group in groups for entry in group))
    seeds = {entry.path: entry.training_seed for group in groups for entry in group}
    rows = [[names[path], "–" if seeds[path] is None else str(seeds[path])] for path in paths]
    columns = [_values(group, paths) for group in groups]
    counted_once = [distinct(group) for group in groups]
    if min(map(len, counted_once)) > 1:
        rows.append([f"all {max(map(len, counted_once))}", ""])
        for column, group in zip(columns, counted_once, strict=True):
            for name, cell in _cells(overall(group)).items():
                column[name].append(cell)
    # What is compared stands side by side: a measure in one mode, then in the other.
    mixed = {
        name if number == 0 else f"{_MODES[modes[number]]} {name}": columns[number][name]
        for part in _PARTS
        for number in range(len(columns))
        for name in part
        if name in columns[number] and (number == 0 or name != "episodes")
    }
    cut = [
        f"{names[entry.path]}: {entry.report['cut']} episodes were cut at {entry.report['max_steps']:,} steps"
        for group in groups
        for entry in group
        if entry.report["cut"]
    ]
    notes = dict.fromkeys(note for group in groups for note in _notes(group, names))
    wrapped = [line for note in notes for line in _wrapped(f"note: {note}")]
    return "\n".join([title, "", *_split(("run", "seed"), rows, mixed), *cut, *wrapped])


def _notes(group: Sequence[Entry], names: Mapping[Path, str]) -> Iterator[str]:
    """What is odd about the row over all of one mode.

    A row over runs of several settings is kept, since who asks for it may mean it (some keys change nothing that matters); that
    it is not over seeds alone has to be said, as ``rltool plot`` says it.
    """
    from rltool.entries import copies, distinct
    from rltool.grouping import differing, few

    for copy, original in copies(group).items():
        yield f"{names[copy]} holds the same policy as {names[original]}, which counts once"
    entries = distinct(group)
    if keys := differing([entry.settings for entry in entries]):
        yield f"all is over runs that differ in {few(keys)}, and not over seeds alone"
    known = [(entry.training_seed, json.dumps(entry.settings, sort_keys=True, default=str)) for entry in entries]
    if twice := sorted({seed for seed, of in known if seed is not None and known.count((seed, of)) > 1}):
        yield f"several have seed {', '.join(map(str, twice))}; equal seeds are no independent runs"


def _values(group: Sequence[Entry], paths: Sequence[Path]) -> dict[str, list[str]]:
    """The cells of each measure, one for each checkpoint; a dash where it could not be evaluated in this mode."""
    found = {entry.path: _cells(entry.report) for entry in group}
    names = next(iter(found.values()))
    return {name: [found[path][name] if path in found else "–" for path in paths] for name in names}


def _cells(report: Mapping[str, Any]) -> dict[str, str]:
    cells = {
        "mean": _number(report["mean"]),
        "95 % interval": f"{_number(report['ci_low'])} … {_number(report['ci_high'])}",
        "success": "–" if report["success_rate"] is None else f"{report['success_rate']:.0%}",
        "episodes": f"{report['episodes']:,}",
        "IQM": _number(report["iqm"]),
        "min … max": f"{_number(report['min'])} … {_number(report['max'])}",
    }
    if report["threshold"] is None:
        del cells["success"]
    return cells


def _split(heads: Sequence[str], rows: Sequence[Sequence[str]], columns: Mapping[str, Sequence[str]]) -> list[str]:
    """Lines of a table; columns for which the terminal is too narrow follow in another one below, with the same heads."""
    left = [max(len(cell) for cell in (head, *(row[place] for row in rows))) for place, head in enumerate(heads)]
    margin, width = sum(left) + 2 * (len(left) - 1), _columns()
    parts: list[list[str]] = [[]]
    used = margin
    sizes = {name: max(len(name), *map(len, cells)) for name, cells in columns.items()}
    for name, size in sizes.items():
        if parts[-1] and used + 2 + size > width:
            parts.append([])
            used = margin
        parts[-1].append(name)
        used += 2 + size
    lines: list[str] = []
    for part in parts:
        lines += [""] if lines else []
        for number, row in enumerate([heads, *rows]):
            cells = [f"{row[0]:<{left[0]}}", *(f"{cell:>{size}}" for cell, size in zip(row[1:], left[1:], strict=True))]
            cells += [f"{columns[name][number - 1] if number else name:>{sizes[name]}}" for name in part]
            lines.append("  ".join(cells).rstrip())
    return lines


def _columns() -> int:
    return shutil.get_terminal_size((_WIDTH, 24)).columns


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, min(_columns(), 100))


def _from_here(path: Path) -> str:
    """A path as it is shortest for a reader: from the working directory where it lies in it."""
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


def _check_writable(key: str, path: Path) -> None:
    """An hour of episodes must not end in a report that has nowhere to go."""
    if path.is_dir():
        raise ConfigError(Problem(key, f"expected a file, found the directory {path}"))
    if not path.parent.is_dir():
        raise ConfigError(Problem(key, f"there is no directory {path.parent}"))
    if not os.access(path.parent, os.W_OK):
        raise ConfigError(Problem(key, f"no permission to write into {path.parent}"))


def _write(path: Path, report: Mapping[str, object]) -> None:
    """Writes the whole report in one step: a reader sees the old file or the new one."""
    temporary = path.with_name(f".{path.name}-{secrets.token_hex(4)}.tmp")
    try:
        temporary.write_text(
            json.dumps(_finite(report), indent=2, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8"
        )
        os.replace(temporary, path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise RltoolError(f"cannot write {path}: {error.strerror}") from error


def _finite(value: object) -> object:
    """NaN and infinities, which JSON does not have, as null: the standard deviation of a single episode, say."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value

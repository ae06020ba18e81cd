"""``rltool show``: one run on one screen: what it was, how it went, its last numbers, its files, and what to type next."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rltool.commands.list import grid, table
from rltool.errors import ConfigError, Problem
from rltool.figures import counted, duration, number, size_in_words, sparkline
from rltool.records import Record, names, read_run
from rltool.runs import program, shown

if TYPE_CHECKING:
    from rltool.cli import Options

# The metrics that say most, in the order of the panel of a run, in a few words; docs/metrics.md has all of them.
KEY_METRICS: Mapping[str, str] = {
    "episode/return": "mean return of the training episodes",
    "episode/length": "their mean length, in steps",
    "episode/finished": "training episodes so far",
    "policy/epsilon": "share of random actions",
    "policy/entropy": "how undecided the policy is, in nats",
    "policy/alpha": "weight of the entropy against the reward",
    "policy/approx_kl": "step of the policy in an update; 0.002 to 0.02",
    "train/clip_fraction": "share of samples clipped; 0.05 to 0.25",
    "critic/explained_variance": "of the targets by the value estimate; 1 at most",
    "critic/value_loss": "loss of the value estimate",
    "critic/q_value_mean": "mean Q value; at most the highest return",
    "train/loss": "what the optimiser minimises",
    "train/grad_norm": "of the gradient, before it is clipped",
    "train/learning_rate": "now",
    "train/updates": "gradient steps so far",
}
# What the states are that a run did not write down itself.
_MEANINGS = {
    "killed": "no process has it, and none wrote down how it ended",
    "unknown": "the files that say how it ended are missing or damaged",
    "unreadable": "its directory cannot be looked into",
}
# Lines of the log of a run that failed.
_LOG_LINES = 10
# Bars of the curve of evaluations.
_CURVE = 40


def main(options: Options) -> int:
    """Prints the run; returns the exit code.

    Raises:
        ConfigError: not one run was given, or there is none.
    """
    if len(options.overrides) != 1:
        found = " ".join(options.overrides) or "none"
        raise ConfigError(Problem("", f"expected one run, found {found}", "rltool runs lists those there are"))
    record = read_run(Path(options.overrides[0]))
    if "json" in options.flags:
        print(json.dumps(as_json(record), indent=2, ensure_ascii=False, default=str))
        return 0
    metrics = last_metrics(record)
    blocks = [_table(what_it_was(record)), _table(how_it_went(record))]
    if metrics:
        rows = [(name, number(value), KEY_METRICS[name]) for name, value in metrics.items()]
        blocks.append("\n".join(grid(("metric", "last", "what it is"), rows, right=[1])))
    if log := _log(record):
        blocks.append("\n".join(["last lines of log.txt", *(f"  {line}" for line in log)]))
    blocks.append(_table([("files", _files_in_words(record))]))
    if commands := next_commands(record):
        blocks.append("\n".join(["next", *(f"  {command}" for command in commands)]))
    print("\n\n".join(blocks))
    return 0


def what_it_was(record: Record) -> list[tuple[str, str]]:
    """Label and text of each line about how it was started."""
    rows = [("run", shown(record.path))]
    rows += [("cannot read", problem) for problem in record.all_problems]
    if (remedy := record.remedy) is not None:
        rows.append(("to do", remedy))
    rows.append(("trains", record.subject(with_network=True)))
    if record.overrides:
        rows.append(("typed", " ".join(record.overrides)))
    if record.rerun_of is not None:
        rows.append(("rerun of", shown(Path(record.rerun_of))))
    rows += [("resumed with", " ".join(words) or "nothing else") for words in record.resumed]
    rows += [(label, text) for label in ("tuned", "weights", "spaces", "device") if (text := record.logged(label))]
    if versions := record.versions:
        rows.append(("versions", ", ".join(f"{name} {version}" for name, version in versions.items())))
    if record.commit:
        rows.append(("commit", record.commit))
    if record.started is not None:
        rows.append(("started", f"{record.started:%Y-%m-%d %H:%M:%S}"))
    return rows


def how_it_went(record: Record) -> list[tuple[str, str]]:
    """Label and text of each line about what came of it."""
    budget = f" of {record.total_frames:,}" if record.total_frames else ""
    parts = [f"{record.status} after {record.frames:,}{budget} frames"]
    if record.seconds is not None:
        parts.append(duration(record.seconds))
    if (rate := _rate(record)) is not None:
        parts.append(f"{number(rate)} frames/s")
    rows = [("status", ", ".join(parts))]
    if record.status in _MEANINGS:
        rows.append(("", _MEANINGS[record.status]))
    if record.error:
        rows.append(("error", record.error))
    if shares := record_shares(record):
        rows.append(("time", ", ".join(f"{part} {share:.0%}" for part, share in shares.items() if share > 0.005)))
    faults = _mapping(record.summary.get("faults"))
    told = [f"{count:,} {name.replace('_', ' ')}" for name, count in faults.items() if isinstance(count, int) and count]
    if told:
        rows.append(("faults", ", ".join(told)))
    determinism = _mapping(record.summary.get("deterministic"))
    if determinism:
        reasons = _mapping(determinism.get("reasons")).values()
        rows.append(("repeats", f"no: {'; '.join(map(str, reasons))}" if reasons else "yes, with the same versions"))
    curve = record.curve("eval/return_mean")
    if curve:
        means = [mean for _, mean in curve]
        bars = sparkline(means, _CURVE, ascii_only=not _draws_bars())
        rows.append(("evaluations", f"{bars}  {counted(len(curve), 'evaluation')}"))
    if record.best is not None:
        rows.append(("best", _evaluation(record.best, record.cut("best"), record)))
    if record.last is not None:
        rows.append(("last", _evaluation(record.last, record.cut("last"), record)))
    rows += [(f"{policy}, fresh", _fresh(of)) for policy in ("best", "last") if (of := record.final(policy))]
    return rows


def _fresh(told: Mapping[str, object]) -> str:
    """The evaluation on fresh episodes after training: of all figures the one to quote."""
    mean, low, high, episodes = (told.get(name) for name in ("mean", "ci_low", "ci_high", "episodes"))
    text = f"{mean:,.2f} mean return" if isinstance(mean, int | float) else "-"
    if isinstance(low, int | float) and isinstance(high, int | float):
        text += f" ({low:,.2f} to {high:,.2f})"
    return text + (f", {counted(episodes, 'episode')} after training" if isinstance(episodes, int) else "")


def _evaluation(found: tuple[int, float], cut: int | None, record: Record) -> str:
    text = f"{found[1]:,.2f} mean return at {found[0]:,} frames"
    if not cut:
        return text
    limit = _mapping(record.config.get("eval")).get("max_steps")
    at = f" at {limit:,} steps" if isinstance(limit, int) else ""
    return f"{text}, {counted(cut, 'episode')} cut{at} (eval.max_steps)"


def last_metrics(record: Record) -> dict[str, float]:
    """The newest value of each key metric that the run has."""
    newest: dict[str, float] = {}
    for point in record.points:
        newest |= point
    return {name: newest[name] for name in KEY_METRICS if name in newest}


def record_shares(record: Record) -> dict[str, float]:
    """Share of each part of the loop in its time, the largest first: as the summary has it (of the last session), else the
    shares of the points, by how long each took."""
    told = _mapping(record.summary.get("time_shares"))
    if record.ended and told:
        return {part: float(share) for part, share in told.items() if isinstance(share, int | float)}
    spent: dict[str, float] = {}
    before = 0.0
    for point in record.points:
        rate = point.get("time/frames_per_second", 0.0)
        if rate > 0:
            seconds, before = (point["frames"] - before) / rate, point["frames"]
            for name, share in point.items():
                if name.startswith("time/") and name.endswith("_share"):
                    part = name.removeprefix("time/").removesuffix("_share")
                    spent[part] = spent.get(part, 0.0) + share * seconds
    total = sum(spent.values())
    return {part: value / total for part, value in sorted(spent.items(), key=lambda item: -item[1])} if total else {}


def files(record: Record) -> dict[str, int]:
    """Each file of the run, by its path from there, and its size in bytes."""
    found = {}
    for directory, inner, names_here in os.walk(record.path):
        inner.sort()
        for name in sorted(names_here):
            path = Path(directory, name)
            if name != ".lock" and path.is_file():
                found[path.relative_to(record.path).as_posix()] = path.stat().st_size
    return found


def next_commands(record: Record) -> list[str]:
    """What to type next."""
    tool, place = program("rltool"), shown(record.path)
    kept = (
        {path.name for path in (record.path / "checkpoints").glob("*.ckpt")} if record.status != "unreadable" else set()
    )
    best = next((name for name in ("best.ckpt", "last.ckpt") if name in kept), None)
    lines: list[list[str]] = []
    if record.status == "running":
        lines.append(["tail", "-f", shown(record.path / "log.txt")])
    elif best is not None and record.status not in ("finished", "solved"):
        lines.append([tool, "train", f"resume={place}"])
    if best is not None:
        lines.append([tool, "eval", f"checkpoint={shown(record.path / 'checkpoints' / best)}"])
    if record.status in ("finished", "solved") and best is not None and record.total_frames:
        lines.append([tool, "train", f"resume={place}", f"total_frames={2 * record.total_frames}"])
    if record.config and record.status != "running":
        seed = (
            [f"seed={record.seed + 1}"] if record.seed is not None and record.status in ("finished", "solved") else []
        )
        lines.append([tool, "rerun", place, *seed])
    if (record.path / "metrics.jsonl").is_file():
        lines.append([tool, "doctor", place])
    if any(record.path.glob("events.out.tfevents.*")):
        lines.append([program("tensorboard"), "--logdir", place])
    return [shlex.join(line) for line in lines]


def as_json(record: Record) -> dict[str, object]:
    """All of it as plain values: what ``rltool runs --json`` says of it, and more."""
    return {
        "run": names([record])[0],
        **record.to_json(),
        "network": _kind(record, "network"),
        "overrides": record.overrides,
        "resumed": record.resumed,
        "rerun_of": record.rerun_of,
        "tuned": record.logged("tuned"),
        "versions": record.versions,
        "commit": record.commit,
        "updates": record.summary.get("updates"),
        "episodes": record.summary.get("episodes"),
        "frames_per_second": _rate(record),
        "shares": record_shares(record),
        "faults": record.summary.get("faults"),
        "deterministic": record.summary.get("deterministic"),
        "evaluations": [{"frames": frames, "mean": mean} for frames, mean in record.curve("eval/return_mean")],
        "metrics": last_metrics(record),
        "log": _log(record),
        "files": files(record),
        "next": next_commands(record),
    }


def _table(rows: Sequence[tuple[str, str]]) -> str:
    return table(rows[0], rows[1:])


def _kind(record: Record, group: str) -> str:
    return str(_mapping(record.config.get(group)).get("kind", "?"))


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, Mapping) else {}


def _rate(record: Record) -> float | None:
    """Frames a second as the summary says, else over all points."""
    told = record.summary.get("frames_per_second")
    if record.ended:
        return float(told) if isinstance(told, int | float) else None
    return record.frames / record.times[-1][1] if record.times and record.times[-1][1] > 0 else None


def _log(record: Record) -> list[str]:
    """The end of the log of a run that did not end well, cut at the width of the terminal."""
    if record.status not in ("failed", "killed"):
        return []
    width = min(shutil.get_terminal_size().columns, 100) - 2
    return [line if len(line) <= width else f"{line[: width - 1]}…" for line in record.log_lines(_LOG_LINES)]


def _files_in_words(record: Record) -> str:
    """Files at the top by name, those of a directory counted, all with their sizes."""
    groups: dict[str, list[int]] = {}
    for name, size in files(record).items():
        head, _, inner = name.partition("/")
        groups.setdefault(
            f"{head}/" if inner else "events.out.tfevents.…" if head.startswith("events.out") else head, []
        ).append(size)
    return ", ".join(
        f"{name} ({counted(len(sizes), 'file') + ', ' if name.endswith('/') else ''}{size_in_words(sum(sizes))})"
        for name, sizes in groups.items()
    )


def _draws_bars() -> bool:
    return "utf" in (sys.stdout.encoding or "").lower()

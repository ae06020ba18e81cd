"""``rltool eval``: evaluates a checkpoint and prints or writes the report."""

from __future__ import annotations

import json
import math
import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, cast

from rltool import trust
from rltool.composition import read_overrides
from rltool.config import import_plugins, load_node
from rltool.errors import ConfigError, Problem, RltoolError
from rltool.importing import import_user_module
from rltool.launch import check_command
from rltool.schema import EvalRunConfig

if TYPE_CHECKING:
    from rltool.cli import Options


def main(options: Options) -> int:
    """Runs the command; returns the exit code.

    Raises:
        ConfigError: what was asked for cannot be evaluated.
        RltoolError: a file cannot be written, or a video, after the report was printed.
    """
    files = options.files()
    line = read_overrides(options.overrides, files, name="eval")
    config = check_command(EvalRunConfig, line, files, "eval")
    _check_environment(config)
    out = Path(config.out) if config.out is not None else None
    if out is not None:
        _check_writable(out)
    if config.video:
        import_user_module("imageio_ffmpeg", "video")  # a missing extra is told before torch is imported

    from rltool.evaluation import evaluate_checkpoint

    report = evaluate_checkpoint(config)
    tree = report.to_json()
    print(_line(tree) if config.quiet else _table(tree, config.device))
    if out is not None:
        _write(out, tree)
        print(f"written to {out}")
    if report.video_problem is not None:
        raise RltoolError(report.video_problem)
    return 0


def _check_environment(config: EvalRunConfig) -> None:
    """Reads the checkpoint's configuration and checks the environment with the changes laid over it, before torch is imported.

    Raises:
        CheckpointError: it is no checkpoint.
        ConfigError: the changes do not fit, or it names code of a stranger's.
    """
    from rltool.checkpoint import read_header

    header = read_header(Path(config.checkpoint))
    tree = trust.configuration(header, config.typed, (*trust.POLICY, "env"))
    problems = import_plugins(tree.get("plugins"))
    if problems:
        raise ConfigError(problems)
    load_node("env", cast("Mapping[str, object]", tree["env"]))


def _number(value: object, digits: int = 2) -> str:
    known = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return f"{value:,.{digits}f}" if known else "–"


def _line(report: Mapping[str, object]) -> str:
    return f"{_number(report['mean'])} ± {_number(report['std'])} over {report['episodes']} episodes"


def _table(report: Mapping[str, object], device: str) -> str:
    """The report for a reader; rows whose value does not exist are left out.

    Args:
        report: the values.
        device: which one was asked for.
    """
    rows = [
        ("checkpoint", str(report["checkpoint"])),
        ("environment", str(report["env"])),
        (
            "episodes",
            f"{report['episodes']}, {'deterministic' if report['deterministic'] else 'sampled'}, seed {report['seed']}",
        ),
        ("device", f"{report['device']}{', chosen by device=auto' if device == 'auto' else ''}"),
        ("return, mean", f"{_number(report['mean'])} ± {_number(report['std'])} (standard deviation)"),
        ("95 % interval", f"{_number(report['ci_low'])} … {_number(report['ci_high'])} (bootstrap of the mean)"),
        ("median, IQM", f"{_number(report['median'])}, {_number(report['iqm'])}"),
        ("min … max", f"{_number(report['min'])} … {_number(report['max'])}"),
    ]
    lengths = report["lengths"]
    if isinstance(lengths, list) and lengths:
        rows.append(
            ("steps an episode", f"{_number(sum(lengths) / len(lengths), 1)} ({min(lengths)} … {max(lengths)})")
        )
    if report["threshold"] is not None and report["success_rate"] is not None:
        rate = cast("float", report["success_rate"])
        rows.append(("success", f"{rate:.0%} of episodes reach {report['threshold']:g}"))
    if report["cut"]:
        rows.append(("cut", f"{report['cut']} episodes were cut at {report['max_steps']:,} steps (max_steps)"))
    videos = report["videos"]
    if isinstance(videos, list) and videos:
        count = (
            f"{len(videos)} of {report['episodes']} episodes" if len(videos) != report["episodes"] else str(len(videos))
        )
        rows.append(("videos", f"{count}, in {_from_here(Path(videos[0]).parent)}"))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)


def _from_here(path: Path) -> str:
    """A path as it is shortest for a reader: from the working directory where it lies in it."""
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


def _check_writable(path: Path) -> None:
    """An hour of episodes must not end in a report that has nowhere to go."""
    if path.is_dir():
        raise ConfigError(Problem("out", f"expected a file, found the directory {path}"))
    if not path.parent.is_dir():
        raise ConfigError(Problem("out", f"there is no directory {path.parent}"))
    if not os.access(path.parent, os.W_OK):
        raise ConfigError(Problem("out", f"no permission to write into {path.parent}"))


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

"""``rltool checkpoint``: what a checkpoint or a stored replay buffer holds, and what can be done with it."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, cast

from rltool.commands.list import table
from rltool.errors import ConfigError, Problem
from rltool.figures import size_in_words
from rltool.records import located
from rltool.runs import program, shown

if TYPE_CHECKING:
    from rltool.cli import Options
    from rltool.contents import BufferContents, CheckpointContents, TensorInfo

# Different shapes of a component that are shown.
_SHAPES = 6


def main(options: Options) -> int:
    """Prints what the file holds; returns the exit code.

    Raises:
        ConfigError: not one path was given.
        CheckpointError: there is no such file, or it is not whole.
    """
    if len(options.overrides) != 1 or options.overrides[0].startswith("checkpoint="):
        found = " ".join(options.overrides) or "none"
        raise ConfigError(
            Problem("", f"expected one path, found {found}", "Give a file or a run directory: rltool checkpoint runs/…")
        )
    from rltool.contents import CheckpointContents, read_contents

    contents = read_contents(located(options.overrides[0]))
    commands = [f"{program('rltool')} {shlex.join(words)}" for words in contents.next_words()]
    if "json" in options.flags:
        print(json.dumps({**contents.to_json(), "next": commands}, indent=2, ensure_ascii=False))
        return 0
    rows = checkpoint_rows(contents) if isinstance(contents, CheckpointContents) else buffer_rows(contents)
    blocks = [table(rows[0], rows[1:]), components(contents.tensors)]
    if commands:
        blocks.append("\n".join(["next", *(f"  {command}" for command in commands)]))
    print("\n\n".join(blocks))
    return 0


def checkpoint_rows(contents: CheckpointContents) -> list[tuple[str, str]]:
    """Label and text of each line about a checkpoint."""
    header, state = contents.header, contents.header.state
    episodes, updates = _count(state.episodes, "episode"), _count(contents.updates, "update")
    budget = f" of {contents.total_frames:,}" if contents.total_frames > 0 else ", no end"
    session = f", session {state.sessions}" if state.sessions > 1 else ""
    rows = [
        ("checkpoint", shown(header.path)),
        ("file", f"{size_in_words(header.path.stat().st_size)}, format {state.format}"),
        (
            "run",
            f"{contents.kind('algo')} on {state.env}, network {contents.kind('network')}, seed {header.config.get('seed')}{session}",
        ),
        ("spaces", f"{', '.join(map(str, header.leaves))} → {header.actions}"),
        ("frames", f"{state.frames:,}{budget}; {episodes}, {updates}"),
    ]
    if state.budget not in (contents.total_frames, 0):
        rows.append(("schedules", f"over the first {state.budget:,} frames"))
    if state.best is not None:
        best, frames = cast("float", state.best["mean"]), cast("int", state.best["frames"])
        here = f"; {state.evaluation:,.2f} here" if state.evaluation is not None and frames != state.frames else ""
        rows.append(("evaluation", f"best {best:,.2f} at {frames:,} frames{here}"))
    elif state.evaluation is not None:
        rows.append(("evaluation", f"{state.evaluation:,.2f} here"))
    if contents.observed:
        counts = {f"{count:,}" for count in contents.observed.values()}
        rows.append(("normaliser", f"of {' and '.join(sorted(counts))} observations"))
    goes_on = "yes, a resumed run goes on in the middle of them"
    rows.append(("open episodes", goes_on if contents.continues_episodes else "no, a resumed run starts new ones"))
    if contents.buffer is not None:
        size = size_in_words(contents.buffer.path.stat().st_size)
        rows.append(
            ("replay buffer", f"{contents.buffer.path.name}: {contents.buffer.transitions:,} transitions, {size}")
        )
    elif contents.damaged is not None:
        rows.append(("replay buffer", f"{contents.damaged}. A resumed run collects frames anew before it learns"))
    elif contents.keeps_a_buffer:
        missing = f"no buffer-{state.frames}.safetensors beside it: a resumed run collects frames anew before it learns"
        rows.append(("replay buffer", missing))
    rows.append(("compiled", "yes" if state.compiled else "no"))
    rows += [("passed over", text) for text in header.passed_over]
    if state.parent is not None:
        rows.append(("started from", shown(Path(state.parent))))
    rows.append(("written by", ", ".join(f"{name} {version}" for name, version in state.versions.items())))
    return rows


def buffer_rows(contents: BufferContents) -> list[tuple[str, str]]:
    """Label and text of each line about a stored replay buffer."""
    gone = contents.steps - contents.transitions
    left = f"; {gone:,} older ones have left" if gone > 0 else ""
    names = ", ".join(header.path.name for header in contents.checkpoints)
    return [
        ("replay buffer", shown(contents.path)),
        ("file", size_in_words(contents.path.stat().st_size)),
        (
            "transitions",
            f"{contents.transitions:,}, of {_count(contents.num_envs, 'environment')} side by side{left}",
        ),
        ("priorities", "yes" if contents.prioritized else "none: drawn uniformly"),
        ("belongs to", names or "no checkpoint that lies beside it"),
    ]


def components(tensors: Mapping[str, TensorInfo]) -> str:
    """A table of the tensors by the first part of their names."""
    groups: dict[str, list[TensorInfo]] = {}
    for name, tensor in tensors.items():
        groups.setdefault(name.partition(".")[0], []).append(tensor)
    found = [
        (name, f"{len(group)}", size_in_words(sum(tensor.bytes for tensor in group))) for name, group in groups.items()
    ]
    header = ("component", "tensors", "size")
    widths = [max(len(row[column]) for row in [header, *found]) for column in (1, 2)]
    rows = [(name, count.rjust(widths[0]), size.rjust(widths[1]), _shapes(groups[name])) for name, count, size in found]
    return table((header[0], header[1].rjust(widths[0]), header[2].rjust(widths[1]), "shapes"), rows)


def _shapes(tensors: list[TensorInfo]) -> str:
    """The different shapes, how often each."""
    counts = Counter(tensor.shape for tensor in tensors)
    texts = []
    for shape, count in list(counts.items())[:_SHAPES]:
        text = f"[{', '.join(map(str, shape))}]" if shape else "scalar" if count == 1 else "scalars"
        texts.append(text if count == 1 else f"{count} {text}" if not shape else f"{count} × {text}")
    more = len(counts) - _SHAPES
    return ", ".join(texts) + (f" and {more} more" if more > 0 else "")


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"

"""What a checkpoint or a stored replay buffer holds, as plain values. Reads headers and a few numbers; no torch."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from pydantic import JsonValue
from safetensors import SafetensorError, safe_open

from rltool.checkpoint import LAST, SUFFIX, Header, checked, read_header
from rltool.errors import CheckpointError
from rltool.runs import shown

_BUFFER = re.compile(r"buffer-(\d+)\.safetensors")


@dataclass(frozen=True)
class TensorInfo:
    """A tensor by what a file says of it.

    Attributes:
        dtype: safetensors' name of its type (``F32``, ``I64``, ``BOOL``).
        shape: its shape.
    """

    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """The room it takes."""
        bits = re.search(r"\d+", self.dtype)
        return math.prod(self.shape) * (int(bits[0]) // 8 if bits else 1)

    def to_json(self) -> dict[str, JsonValue]:
        """All of it as plain values."""
        return {"dtype": self.dtype, "shape": list(self.shape), "bytes": self.bytes}


@dataclass(frozen=True)
class BufferContents:
    """A stored replay buffer.

    Attributes:
        path: the file.
        transitions: how many can be drawn.
        num_envs: environments that they are from.
        steps: how many were ever stored, those that have left included.
        prioritized: whether priorities are in it.
        frames: of the checkpoint that it belongs to, by its name; None where it has another.
        tensors: by name.
    """

    path: Path
    transitions: int
    num_envs: int
    steps: int
    prioritized: bool
    frames: int | None
    tensors: Mapping[str, TensorInfo]

    @property
    def checkpoints(self) -> list[Header]:
        """The checkpoints beside it that it belongs to; the newest of a run, where it is one of them, comes first."""
        found = []
        for path in sorted(self.path.parent.glob(f"*{SUFFIX}"), key=lambda path: (path.name != LAST, path.name)):
            try:
                header = read_header(path)
            except CheckpointError:
                continue  # it is not what was asked for
            if header.frames == self.frames:
                found.append(header)
        return found

    def next_words(self) -> list[list[str]]:
        """What to type next, after ``rltool``."""
        return [["train", f"resume={_resumed(header)}"] for header in self.checkpoints[:1]]

    def to_json(self) -> dict[str, JsonValue]:
        """All of it as plain values."""
        return {
            "kind": "buffer",
            "path": str(self.path),
            "bytes": self.path.stat().st_size,
            "frames": self.frames,
            "transitions": self.transitions,
            "num_envs": self.num_envs,
            "steps": self.steps,
            "prioritized": self.prioritized,
            "checkpoints": [str(header.path) for header in self.checkpoints],
            "tensors": {name: tensor.to_json() for name, tensor in self.tensors.items()},
        }


@dataclass(frozen=True)
class CheckpointContents:
    """A checkpoint.

    Attributes:
        header: its readable part.
        tensors: by name.
        updates: gradient steps made.
        observed: leaf -> observations that its statistics have taken in.
        buffer: the replay buffer beside it, where there is one.
        damaged: what is wrong with the file of one, where it is not whole.
    """

    header: Header
    tensors: Mapping[str, TensorInfo]
    updates: int
    observed: Mapping[str, int]
    buffer: BufferContents | None
    damaged: str | None = None

    @property
    def continues_episodes(self) -> bool:
        """Whether open episodes are in it."""
        return any(name.startswith("collector.") for name in self.tensors)

    @property
    def keeps_a_buffer(self) -> bool:
        """Whether the algorithm learns from a replay buffer."""
        return "size" in cast("dict[str, JsonValue]", self.header.config["buffer"])

    @property
    def total_frames(self) -> int:
        """The budget of the run; -1: none."""
        return cast("int", self.header.config["total_frames"])

    def kind(self, group: str) -> str:
        """Which algorithm, network, … it is."""
        return str(cast("dict[str, JsonValue]", self.header.config[group])["kind"])

    def next_words(self) -> list[list[str]]:
        """What to type next, after ``rltool``; a run that has used its budget needs a larger one to go on."""
        used = 0 < self.total_frames <= self.header.frames
        larger = [f"total_frames={2 * self.total_frames}"] if used else []
        return [
            ["eval", f"checkpoint={shown(self.header.path)}"],
            ["train", f"resume={_resumed(self.header)}", *larger],
        ]

    def to_json(self) -> dict[str, JsonValue]:
        """All of it as plain values."""
        state, buffer = self.header.state, self.buffer
        return {
            "kind": "checkpoint",
            "path": str(self.header.path),
            "bytes": self.header.path.stat().st_size,
            "format": state.format,
            "run_directory": None if self.header.run_directory is None else str(self.header.run_directory),
            "passed_over": list(self.header.passed_over),
            "damaged_buffer": self.damaged,
            "env": state.env,
            "algo": self.kind("algo"),
            "network": self.kind("network"),
            "seed": self.header.config.get("seed"),
            "frames": state.frames,
            "episodes": state.episodes,
            "updates": self.updates,
            "total_frames": self.total_frames,
            "first_budget": state.budget,
            "best_evaluation": None if state.best is None else {**state.best},
            "last_evaluation": state.evaluation,
            "compiled": state.compiled,
            "sessions": state.sessions,
            "versions": dict(state.versions),
            "parent": state.parent,
            "normalizer": dict(self.observed),
            "leaves": list(state.leaves),
            "actions": state.actions,
            "open_episodes": self.continues_episodes,
            "buffer": None
            if buffer is None
            else {"path": str(buffer.path), "transitions": buffer.transitions, "bytes": buffer.path.stat().st_size},
            "tensors": {name: tensor.to_json() for name, tensor in self.tensors.items()},
        }


def read_contents(path: Path) -> CheckpointContents | BufferContents:
    """What a file holds.

    Args:
        path: a checkpoint, a run directory (its newest whole checkpoint), or a stored replay buffer.

    Raises:
        CheckpointError: it is none of these, or not whole.
    """
    path = path.expanduser().absolute()
    if path.suffix != SUFFIX and path.is_file():
        return read_buffer(path)
    header = read_header(path)
    tensors = _tensors(header.path)
    counts = [name for name in tensors if name.startswith("normalizer.") and name.endswith(".count")]
    wanted = ["counters.updates", *counts] if "counters.updates" in tensors else counts
    numbers = _numbers(header.path, wanted)
    return CheckpointContents(
        header,
        tensors,
        numbers.pop("counters.updates", 0),
        {name.removeprefix("normalizer.").removesuffix(".count"): count for name, count in numbers.items()},
        *_buffer_beside(header),
    )


def _buffer_beside(header: Header) -> tuple[BufferContents | None, str | None]:
    """The replay buffer that goes with a checkpoint, and why there is none though there is such a file."""
    path = header.path.parent / f"buffer-{header.frames}.safetensors"
    try:
        return (read_buffer(path) if path.is_file() else None), None
    except CheckpointError as error:
        return None, str(error)


def read_buffer(path: Path) -> BufferContents:
    """What a stored replay buffer holds.

    Raises:
        CheckpointError: the file is none, or not whole.
    """
    checked(path)
    tensors = _tensors(path)
    columns = [tensor for name, tensor in tensors.items() if name.startswith("data.")]
    if not (columns and {"count", "num_envs"} <= set(tensors)):
        raise CheckpointError(
            f"{path} is no stored replay buffer of rltool's. Give a file ending in {SUFFIX}, a run directory, or "
            "buffer-<frames>.safetensors"
        )
    numbers, named = _numbers(path, ["count", "num_envs"]), _BUFFER.fullmatch(path.name)
    return BufferContents(
        path,
        columns[0].shape[0],
        numbers["num_envs"],
        numbers["count"],
        "priority" in tensors,
        int(named[1]) if named else None,
        tensors,
    )


def _resumed(header: Header) -> str:
    """What to resume: a run by its directory where this is its newest checkpoint."""
    directory = header.run_directory if header.path.name == LAST else None
    return shown(directory or header.path)


def _tensors(path: Path) -> dict[str, TensorInfo]:
    try:
        with safe_open(str(path), framework="numpy") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
            return {name: TensorInfo(part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path} is no whole safetensors file: {error}") from error


def _numbers(path: Path, names: list[str]) -> dict[str, int]:
    """The values of single numbers."""
    with safe_open(str(path), framework="numpy") as file:
        return {name: int(file.get_tensor(name)) for name in names}

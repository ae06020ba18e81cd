"""The steps of evaluated episodes in one file that NumPy reads: a NumPy archive (.npz), no pickle.

Steps wait on disk, those of each episode apart, since episodes run side by side and a file has them one after the other.
"""

from __future__ import annotations

import json
import os
import secrets
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import numpy as np
from numpy.lib import format as npy

from rltool.actions import ActionSpec
from rltool.errors import ConfigError, Problem, RltoolError
from rltool.spaces import MASK, OBSERVATION, Array, LeafSpec, Leaves

# Bytes of an episode that wait in memory; episodes side by side have as much each.
_WAITING = 2**22
# Bytes that are copied at a time.
_BLOCK = 2**20


@dataclass
class _Column:
    """One array of the archive while its rows come in."""

    waiting: bytearray = field(default_factory=bytearray)
    pieces: list[tuple[int, int]] = field(default_factory=list)  # places and sizes in the spool


@dataclass
class _Episode:
    """An episode while it is run."""

    seed: int
    columns: dict[str, _Column]
    total: float = 0.0
    length: int = 0
    waiting: int = 0


class Trajectories:
    """Takes the steps of episodes as they are run, and writes them when :meth:`write` is called; a context manager.

    Args:
        path: the file. What is there stays until the new one is whole.
        leaves: specs of the observations.
        actions: spec of the actions.

    Raises:
        ConfigError: nothing can be written there.
    """

    def __init__(self, path: Path, leaves: Sequence[LeafSpec], actions: ActionSpec) -> None:
        self._path, self._leaves = path, {spec.key: _name(spec) for spec in leaves}
        self._layout: dict[str, tuple[np.dtype[np.generic], tuple[int, ...]]] = {
            **{_name(spec): (np.dtype(spec.dtype), tuple(spec.shape)) for spec in leaves},
            "actions": (np.dtype(actions.dtype), tuple(actions.shape)),
            "rewards": (np.dtype(np.float64), ()),
            "terminations": (np.dtype(np.bool_), ()),
            "truncations": (np.dtype(np.bool_), ()),
        }
        self._episodes: dict[int, _Episode] = {}
        with _explained(path, ConfigError):
            self._spool: IO[bytes] = tempfile.TemporaryFile(dir=path.parent)  # noqa: SIM115 - closed with this object

    def begin(self, episode: int, seed: int, observed: Leaves) -> None:
        """The observation that a reset gave."""
        self._episodes[episode] = _Episode(seed, {name: _Column() for name in self._layout})
        self._add(episode, self._observation(observed))

    def step(
        self, episode: int, action: Array, reward: float, terminated: bool, truncated: bool, observed: Leaves
    ) -> None:
        """One step: the action as the environment got it, and what it answered."""
        values = {"actions": action, "rewards": reward, "terminations": terminated, "truncations": truncated}
        self._add(episode, {**values, **self._observation(observed)})
        self._episodes[episode].total += reward
        self._episodes[episode].length += 1

    def write(self, about: Mapping[str, object]) -> None:
        """Writes the file in one step.

        Args:
            about: what the episodes are of; JSON.

        Raises:
            RltoolError: it could not be written (disk full).
        """
        temporary = self._path.with_name(f".{self._path.name}-{secrets.token_hex(4)}.tmp")
        episodes = [self._episodes[index] for index in sorted(self._episodes)]
        lengths = np.array([episode.length for episode in episodes], np.int64)
        single = {
            "seeds": np.array([episode.seed for episode in episodes], np.int64),
            "returns": np.array([episode.total for episode in episodes], np.float64),
            "lengths": lengths,
            "starts": np.cumsum(lengths) - lengths,
            "metadata": np.array(json.dumps(about, ensure_ascii=False, allow_nan=False)),
        }
        try:
            with _explained(self._path, RltoolError):
                for episode in episodes:
                    self._flush(episode)
                # The fastest level: rows of images are mostly alike.
                with zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
                    for name, value in single.items():
                        with archive.open(f"{name}.npy", "w") as member:
                            npy.write_array(member, value, allow_pickle=False)
                    for name in self._layout:
                        with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                            self._copy(name, episodes, member)
                os.replace(temporary, self._path)
        finally:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)

    def _observation(self, observed: Leaves) -> dict[str, object]:
        return {self._leaves[key]: array for key, array in observed.items()}

    def _add(self, number: int, values: Mapping[str, object]) -> None:
        episode = self._episodes[number]
        for name, value in values.items():
            dtype, shape = self._layout[name]
            row = np.asarray(value, dtype).reshape(shape)
            episode.columns[name].waiting += row.tobytes()
            episode.waiting += row.nbytes
        if episode.waiting > _WAITING:
            with _explained(self._path, RltoolError):
                self._flush(episode)

    def _flush(self, episode: _Episode) -> None:
        for column in episode.columns.values():
            column.pieces.append((self._spool.seek(0, os.SEEK_END), len(column.waiting)))
            self._spool.write(column.waiting)
            column.waiting.clear()
        episode.waiting = 0

    def _copy(self, name: str, episodes: Sequence[_Episode], target: IO[bytes]) -> None:
        """Writes one array: its header, and the rows of each episode."""
        dtype, shape = self._layout[name]
        extra = len(episodes) if name in self._leaves.values() else 0  # an observation more than steps
        rows = sum(episode.length for episode in episodes) + extra
        header = {"descr": npy.dtype_to_descr(dtype), "fortran_order": False, "shape": (rows, *shape)}
        npy.write_array_header_1_0(target, header)
        for episode in episodes:
            for place, size in episode.columns[name].pieces:
                self._spool.seek(place)
                left = size
                while left:
                    block = self._spool.read(min(left, _BLOCK))
                    target.write(block)
                    left -= len(block)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError):
            self._spool.close()


def _name(spec: LeafSpec) -> str:
    """``observations``, ``observations.<part>`` of a Dict or Tuple, ``action_masks``."""
    if spec.key == MASK:
        return "action_masks"
    return spec.name.replace(OBSERVATION[0], "observations", 1)


@contextmanager
def _explained(path: Path, kind: type[RltoolError]) -> Iterator[None]:
    """Turns a refusal of the file system into an error of a kind, which names the file."""
    try:
        yield
    except OSError as error:
        text = f"cannot write {path}: {error.strerror or error}"
        raise (ConfigError(Problem("trajectories", text)) if kind is ConfigError else kind(text)) from error

"""Checkpoints: one safetensors file each, tensors by name and JSON in its metadata. No pickle, nothing is executed.

Reading a header needs no torch, so that the command line can look into a checkpoint before it starts anything.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
from pydantic import JsonValue
from safetensors import SafetensorError, safe_open

from rltool.actions import ActionSpec
from rltool.errors import CheckpointError, NonFiniteError, WriteError
from rltool.spaces import LeafSpec

if TYPE_CHECKING:
    from torch import Tensor

    from rltool.algos.base import Algorithm

FORMAT = 1
LAST, BEST, SUFFIX = "last.ckpt", "best.ckpt", ".ckpt"
_METADATA = "rltool"
# Component whose tensors lie in a file of their own: it can be large, and acting needs none of it.
_BUFFER = "buffer"
# Components whose tensors vary (an optimiser has no moments before its first step): they say themselves what they need.
_SELF_TOLD = ("optim", "collector", "meter")
# What stands around an algorithm: the environments, and the metrics of the open interval.
_OF_THE_RUN = ("collector.", "meter.")


@dataclass(frozen=True)
class State:
    """What a checkpoint says besides tensors.

    Attributes:
        config: the resolved configuration of the run.
        leaves, actions: the environment's spaces, as :mod:`rltool.spaces` and :mod:`rltool.actions` describe them.
        env: full id of the environment.
        frames: frames collected.
        budget: frames over which schedules run: the budget as the run was first started.
        compiled: whether policy and update were compiled.
        sessions: processes that have worked on this run, this one included.
        episodes: training episodes finished.
        best: mean return of the best evaluation so far, and at how many frames.
        evaluation: mean return of the evaluation at ``frames``, where there was one.
        solved: evaluations in a row that reached the threshold.
        random: states of the global generators of Python and NumPy.
        versions: of the packages that wrote it.
        parent: the checkpoint that the run was started from, if any.
    """

    config: dict[str, JsonValue]
    leaves: list[dict[str, JsonValue]]
    actions: dict[str, JsonValue]
    env: str
    frames: int
    budget: int
    compiled: bool
    sessions: int
    episodes: int
    best: dict[str, JsonValue] | None
    evaluation: float | None
    solved: int
    random: dict[str, JsonValue]
    versions: dict[str, str]
    parent: str | None
    format: int = FORMAT


@dataclass(frozen=True)
class Header:
    """The readable part of a checkpoint.

    Attributes:
        path: the file.
        state: what it says.
        run_directory: the run directory it lies in, if it does.
    """

    path: Path
    state: State
    run_directory: Path | None = field(default=None)

    @property
    def config(self) -> dict[str, JsonValue]:
        """The resolved configuration of the run."""
        return self.state.config

    @property
    def frames(self) -> int:
        """Frames collected."""
        return self.state.frames

    @property
    def leaves(self) -> tuple[LeafSpec, ...]:
        """The observation's leaves."""
        return tuple(LeafSpec.from_json(leaf) for leaf in self.state.leaves)

    @property
    def actions(self) -> ActionSpec:
        """The action space in the policy's units."""
        return ActionSpec.from_json(self.state.actions)


def read_header(path: Path) -> Header:
    """The header of a checkpoint, or of the newest whole checkpoint of a run directory.

    Raises:
        CheckpointError: there is no such file, or it is not a whole checkpoint of rltool's; says which and what to do.
    """
    path = path.expanduser().absolute()
    if not path.is_dir():
        return _read(path)
    directory = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    candidates = _candidates(directory)
    if not candidates and (path / "config.yaml").is_file():
        raise CheckpointError(
            f"{path} holds a run that stopped before its first checkpoint. Start it anew with what stands in {path / 'overrides.txt'}"
        )
    if not candidates:
        raise CheckpointError(
            f"{path} is a directory without checkpoints. Give a file such as …/checkpoints/best.ckpt, or a run directory"
        )
    broken: list[str] = []
    for candidate in candidates:
        try:
            return _read(candidate)
        except CheckpointError as error:
            broken.append(str(error))
    raise CheckpointError("no checkpoint of this run is whole:\n" + "\n".join(broken))


def _candidates(directory: Path) -> list[Path]:
    """Checkpoints to continue from, the newest first."""
    numbered = [file for file in directory.glob(f"*{SUFFIX}") if file.stem.isdigit()]
    files = [directory / LAST, *sorted(numbered, key=lambda file: int(file.stem), reverse=True), directory / BEST]
    return [file for file in files if file.is_file()]


def _read(path: Path) -> Header:
    if not path.exists():
        near = sorted(str(file) for file in path.parent.glob(f"*{SUFFIX}")) if path.parent.is_dir() else []
        raise CheckpointError(f"there is no file {path}." + (f" Here are: {', '.join(near)}" if near else ""))
    try:
        with safe_open(str(path), framework="numpy") as file:
            metadata = file.metadata()
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} is not a whole checkpoint: {error}. It was cut off, or another program wrote it"
        ) from error
    if not metadata or _METADATA not in metadata:
        raise CheckpointError(f"{path} is a safetensors file, but not a checkpoint of rltool's")
    try:
        data = json.loads(metadata[_METADATA])
        if data["format"] != FORMAT:
            raise CheckpointError(
                f"{path} has format {data['format']}, and this rltool reads format {FORMAT}. Use the rltool that wrote it"
            )
        header = Header(path, State(**data), _run_directory(path))
        nodes = ("env", "algo", "network", "buffer", "optim", "eval")
        whole = all(isinstance(header.config[node], dict) for node in nodes) and header.leaves and header.actions
        state, config = header.state, cast("dict[str, dict[str, JsonValue]]", header.config)
        counters = [state.frames, state.budget, state.sessions, state.episodes]
        counters += [cast("int", config["env"]["num_envs"]), cast("int", config["eval"]["max_steps"])]
        if not (whole and all(type(counter) is int and counter >= 0 for counter in counters)):
            raise ValueError("a part of it is empty or of another type")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} has an unreadable header: {error!r}") from error
    return header


def _run_directory(path: Path) -> Path | None:
    parent = path.parent
    return parent.parent if parent.name == "checkpoints" and (parent.parent / "config.yaml").is_file() else None


def load(algorithm: Algorithm, path: Path, *, only: tuple[str, ...] | None = None) -> None:
    """Puts the tensors of a checkpoint into an algorithm.

    Args:
        algorithm: built from the checkpoint's config and spaces.
        path: the checkpoint.
        only: components to load; all of them by default (but the buffer, see :func:`load_buffer`).

    Raises:
        CheckpointError: a tensor is missing or has another shape.
    """
    components = {
        name: part
        for name, part in algorithm.components().items()
        if name != _BUFFER and (only is None or name in only)
    }
    tensors = _tensors(path)
    for name, component in components.items():
        prefix = f"{name}."
        found = {key[len(prefix) :]: tensor for key, tensor in tensors.items() if key.startswith(prefix)}
        expected = component.state_dict()
        wanted = {} if name in _SELF_TOLD else {key: tuple(tensor.shape) for key, tensor in expected.items()}
        for key, shape in wanted.items():
            if key not in found:
                raise CheckpointError(f"{path} lacks the tensor {prefix}{key}")
            if tuple(found[key].shape) != shape:
                raise CheckpointError(f"{path}: {prefix}{key} has shape {tuple(found[key].shape)}, expected {shape}")
        try:
            component.load_state_dict(found)
        except (RuntimeError, KeyError, TypeError, ValueError, IndexError) as error:
            raise CheckpointError(f"{path}: {name} does not fit: {error}") from error


def load_buffer(algorithm: Algorithm, path: Path, frames: int) -> bool | None:
    """Refills the replay buffer from the file beside a checkpoint.

    Returns:
        True where it was refilled, False where the file is missing or belongs to another moment of the run, None where
        the algorithm has no buffer to keep.
    """
    components = algorithm.components()
    if _BUFFER not in components:
        return None
    file = _buffer_path(path.parent, frames)
    if not file.is_file():
        return False
    try:
        components[_BUFFER].load_state_dict(_tensors(file))
    except (CheckpointError, RuntimeError, KeyError, ValueError):
        return False
    return True


def _tensors(path: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


class Saver:
    """Writes the checkpoints of a run: last, best, and numbered ones of which ``keep`` stay.

    Args:
        directory: where they go.
        keep: numbered checkpoints to keep.

    Attributes:
        directory: where they go.
    """

    def __init__(self, directory: Path, keep: int) -> None:
        self.directory, self._keep = directory, keep

    def best(self, algorithm: Algorithm, state: State) -> Path:
        """Writes best.ckpt."""
        return self._write(_finite(algorithm, state.frames), state, BEST)

    def last(self, algorithm: Algorithm, state: State) -> Path:
        """Writes last.ckpt and the replay buffer beside it; an older buffer then leaves.

        Where there is no room for both buffers, last.ckpt is written without one, and then the new one into the room that
        the older one took: weights are worth more.

        Raises:
            WriteError: one of them could not be written; names it.
        """
        tensors = _finite(algorithm, state.frames)
        buffer, file = algorithm.components().get(_BUFFER), _buffer_path(self.directory, state.frames)
        fits = True
        if buffer is not None:
            try:
                write_tensors(file, buffer.state_dict(), {})
            except WriteError:
                fits = False
        try:
            path = self._write(tensors, state, LAST)
        except WriteError:
            file.unlink(missing_ok=True)  # it belongs to no checkpoint
            raise
        for old in self.directory.glob("buffer-*.safetensors"):
            if old != file:
                old.unlink()
        if buffer is not None and not fits:
            write_tensors(file, buffer.state_dict(), {})
        return path

    def numbered(self, algorithm: Algorithm, state: State) -> Path:
        """Writes last.ckpt and, unless keep is 0, ``<frames>.ckpt``; the oldest beyond ``keep`` leave."""
        path = self.last(algorithm, state)
        if self._keep > 0:
            self._write(_finite(algorithm, state.frames), state, f"{state.frames}{SUFFIX}")
            numbered = sorted(
                (file for file in self.directory.glob(f"*{SUFFIX}") if file.stem.isdigit()),
                key=lambda file: int(file.stem),
            )
            for old in numbered[: -self._keep]:
                old.unlink()
        return path

    def _write(self, tensors: Mapping[str, Tensor], state: State, name: str) -> Path:
        path = self.directory / name
        write_tensors(path, tensors, {_METADATA: json.dumps(asdict(state), allow_nan=False)})
        return path


def _finite(algorithm: Algorithm, frames: int) -> dict[str, Tensor]:
    """The tensors of every component but the buffer, ``<component>.<name>``.

    Raises:
        NonFiniteError: one holds a NaN or an infinity.
    """
    tensors = {
        f"{component}.{key}": tensor
        for component, part in algorithm.components().items()
        if component != _BUFFER
        for key, tensor in part.state_dict().items()
    }
    for key, tensor in tensors.items():
        # A simulator and a metric may hold such numbers for reasons of their own.
        if not key.startswith(_OF_THE_RUN) and tensor.is_floating_point() and not tensor.isfinite().all():
            raise NonFiniteError(
                f"{key} holds a NaN or an infinity at frame {frames}; no checkpoint was written over a good one"
            )
    return tensors


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
    """Writes a safetensors file so that at every moment the old one or the new one is there, whole.

    Raises:
        WriteError: it could not be written (disk full, no permission); names the file and the cause.
    """
    from safetensors.torch import save_file

    # What a process that was killed was writing.
    for left in path.parent.glob(f".{path.name}.*.tmp"):
        left.unlink(missing_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        save_file(_apart(tensors), temporary, metadata)
        os.chmod(temporary, 0o666 & ~_umask())  # safetensors makes files that only their owner may read
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _sync_directory(path.parent)
    except (OSError, SafetensorError) as error:
        raise WriteError(f"{path} could not be written: {error}. What was there before is untouched") from error
    finally:
        temporary.unlink(missing_ok=True)


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors on the CPU that share no memory, which safetensors refuses. Those that have a storage of their own (a replay
    buffer can be most of the memory) are not copied."""
    apart: dict[str, Tensor] = {}
    taken: set[int] = set()
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu()
        storage = tensor.untyped_storage()
        if storage.nbytes() != tensor.nbytes or not tensor.is_contiguous() or storage.data_ptr() in taken:
            tensor = tensor.clone().contiguous()
        taken.add(tensor.untyped_storage().data_ptr())
        apart[name] = tensor
    return apart


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _sync_directory(directory: Path) -> None:
    if os.name == "nt":  # a directory cannot be opened there
        return
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _buffer_path(directory: Path, frames: int) -> Path:
    return directory / f"buffer-{frames}.safetensors"


def random_state() -> dict[str, JsonValue]:
    """The global generators of Python and NumPy as JSON (torch's are components)."""
    version, numbers, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": [version, list(numbers), gauss],
        "numpy": [str(name), [int(key) for key in keys], int(position), int(has_gauss), float(cached)],
    }


def restore_random_state(state: Mapping[str, JsonValue]) -> None:
    """Puts the global generators back to what :func:`random_state` gave."""
    version, numbers, gauss = cast("tuple[int, list[int], float | None]", state["python"])
    random.setstate((version, tuple(numbers), gauss))
    name, keys, position, has_gauss, cached = cast("tuple[str, list[int], int, int, float]", state["numpy"])
    np.random.set_state((name, np.asarray(keys, np.uint32), position, has_gauss, cached))

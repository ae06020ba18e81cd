"""Checkpoints: one safetensors file each, tensors by name and JSON in its metadata. No pickle, nothing is executed.

Reading a header needs no torch, so that the command line can look into a checkpoint before it starts anything. A file may
come from anywhere: each byte is covered by a checksum, each field has its type, and what its configuration names is
imported only as :mod:`rltool.trust` allows.
"""

from __future__ import annotations

import json
import math
import os
import random
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO, ClassVar, cast
from zlib import crc32

import numpy as np
from pydantic import ConfigDict, Field, JsonValue, TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open

from rltool import trust
from rltool.actions import ActionSpec
from rltool.config import is_shallow
from rltool.errors import CheckpointError, NonFiniteError, WriteError
from rltool.spaces import LeafSpec

if TYPE_CHECKING:
    from torch import Tensor

    from rltool.algos.base import Algorithm

FORMAT = 1
# Keys that came after the first files of this format, and the values that mean what was done before.
_BEFORE: dict[str, JsonValue] = {
    "on_nonfinite": "stop",
    "env.timeout": None,
    "network.precision": "float32",
    "stop.on": [],
    "eval.final_episodes": 0,
    "eval.video_interval": None,
}
LAST, BEST, SUFFIX = "last.ckpt", "best.ckpt", ".ckpt"
# Keys of the file's metadata: the state as JSON, who wrote it, and the checksum of all other bytes of the file.
_METADATA, _SIGNATURE, _CHECKSUM = "rltool", "signature", "crc32"
_PICKLES = (b"\x80", b"PK\x03\x04")  # how a pickle begins, and the archive that torch.save makes
_NO_CHECKSUM = "0" * 8  # stands in its place while it is computed
# Files beside a missing one that are named.
_NEAR = 5
# What a state takes at most, in characters; those of rltool's take 20,000.
_LONGEST = 2**25
# Component whose tensors lie in a file of their own: it can be large, and acting needs none of it.
_BUFFER = "buffer"
# Components whose tensors vary (an optimiser has no moments before its first step): they say themselves what they need.
_SELF_TOLD = ("optim", "collector", "meter")
# What stands around an algorithm: the environments, and the metrics of the open interval.
_OF_THE_RUN = ("collector.", "meter.")


Counter = Annotated[int, Field(ge=0, lt=2**63)]


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
        seconds: wall time of all sessions.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    config: dict[str, JsonValue]
    leaves: list[dict[str, JsonValue]]
    actions: dict[str, JsonValue]
    env: str
    frames: Counter
    budget: Counter
    compiled: bool
    sessions: Counter
    episodes: Counter
    best: dict[str, int | float] | None
    evaluation: float | None
    solved: Counter
    random: dict[str, JsonValue]
    versions: dict[str, str]
    parent: str | None
    format: int = FORMAT
    seconds: float = 0.0  # the first files of this format have none


@dataclass(frozen=True)
class Header:
    """The readable part of a checkpoint.

    Attributes:
        path: the file.
        state: what it says.
        run_directory: the run directory it lies in, if it does.
        signature: of its configuration, see :mod:`rltool.trust`.
        passed_over: what is wrong with newer checkpoints of the run directory, one text each.
    """

    path: Path
    state: State
    run_directory: Path | None = field(default=None)
    signature: str | None = None
    passed_over: tuple[str, ...] = ()

    @property
    def config(self) -> dict[str, JsonValue]:
        """The resolved configuration of the run; keys that a file is too old to have are as they were before them."""
        return completed(self.state.config)

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


def completed(config: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """A saved configuration with the keys that came after it was written, as they were before there was such a key."""
    config = dict(config)
    for dotted, value in _BEFORE.items():
        group, _, key = dotted.rpartition(".")
        node = config.get(group) if group else config
        if isinstance(node, dict) and key not in node:
            whole = {**node, key: value}
            config = {**config, group: whole} if group else whole
    return config


def read_header(path: Path) -> Header:
    """The header of a checkpoint, or of the newest whole checkpoint of a run directory.

    Raises:
        CheckpointError: there is no such file, or it is not a whole checkpoint of rltool's; says which and what to do.
    """
    path = path.expanduser().absolute()
    try:
        return _newest(path) if path.is_dir() else _read(path)
    except OSError as error:  # no permission, a name that is too long
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error


def _newest(path: Path) -> Header:
    """The header of the newest whole checkpoint in a run directory."""
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
            return replace(_read(candidate), passed_over=tuple(broken))
        except CheckpointError as error:
            broken.append(str(error))
    raise CheckpointError("no checkpoint of this run is whole:\n" + "\n".join(broken))


def _candidates(directory: Path) -> list[Path]:
    """Checkpoints to continue from, the newest first."""
    numbered = [file for file in directory.glob(f"*{SUFFIX}") if file.stem.isdecimal()]
    files = [directory / LAST, *sorted(numbered, key=lambda file: int(file.stem), reverse=True), directory / BEST]
    return [file for file in files if file.is_file()]


def _read(path: Path) -> Header:
    if not path.exists():
        near = sorted(file for file in path.parent.glob(f"*{path.suffix or SUFFIX}") if file.is_file())
        more = f" and {len(near) - _NEAR} more" if len(near) > _NEAR else ""
        here = f" Here are: {', '.join(map(str, near[:_NEAR]))}{more}" if near else ""
        raise CheckpointError(f"there is no file {path}{', only a link to nothing' * path.is_symlink()}.{here}")
    metadata = checked(path)
    if _METADATA not in metadata:
        raise CheckpointError(f"{path} is a safetensors file, but not a checkpoint of rltool's")
    try:
        state = _state(metadata[_METADATA], path)
        header = Header(path, state, _run_directory(path), metadata.get(_SIGNATURE))
        if not (header.leaves and header.actions):
            raise ValueError("it has no spaces")
    except ValidationError as error:
        faults = [f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors(include_url=False)]
        raise CheckpointError(f"{path} has an unreadable header: {'; '.join(faults[:5])}") from error
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise CheckpointError(f"{path} has an unreadable header: {error!r}") from error
    return header


def checked(path: Path) -> dict[str, str]:
    """The metadata of a safetensors file whose bytes are those that were written.

    Raises:
        CheckpointError: it was cut off or changed, or another program wrote it.
    """
    if not path.is_file():  # a pipe or a device would be read for ever
        raise CheckpointError(f"{path} is no ordinary file")
    try:
        with safe_open(str(path), framework="numpy") as content:
            metadata: dict[str, str] = content.metadata() or {}
        if strange := metadata.keys() - {_METADATA, _SIGNATURE, _CHECKSUM}:
            raise CheckpointError(
                f"{path} is a safetensors file, but not a checkpoint of rltool's: its metadata holds "
                f"{', '.join(map(repr, sorted(strange)))[:100]}. Another program or a newer rltool wrote it, or it was damaged"
            )
        stated = metadata.get(_CHECKSUM)
        if stated is not None:  # the first files of this format have none
            with open(path, "rb") as file:
                found = _checksum(file, stated)
            if found != stated:
                raise CheckpointError(
                    f"{path} is not a whole checkpoint: its bytes have the checksum {found}, and {stated} was written. "
                    "It was damaged or changed since; use another one"
                )
    except (SafetensorError, OSError, ValueError) as error:
        with suppress(OSError), open(path, "rb") as file:
            if file.read(4).startswith(_PICKLES):
                raise CheckpointError(
                    f"{path} is a pickle or an archive, such as torch.save writes: it could run anything and is not opened. "
                    "rltool's checkpoints are safetensors files"
                ) from error
        raise CheckpointError(
            f"{path} is not a whole checkpoint: {error}. It was cut off, or another program wrote it"
        ) from error
    return metadata


def _checksum(file: BinaryIO, stated: str) -> str:
    """CRC-32 of a whole safetensors file, in which a checksum is stated, as it was before that was written into it."""
    length = file.read(8)
    header = file.read(int.from_bytes(length, "little"))
    total = crc32(header.replace(_checksum_field(stated), _checksum_field(_NO_CHECKSUM), 1), crc32(length))
    while block := file.read(2**20):
        total = crc32(block, total)
    return f"{total:08x}"


def _checksum_field(value: str) -> bytes:
    """Where a safetensors header states the checksum; inside other text its quotes would be escaped."""
    return f'"{_CHECKSUM}":"{value}"'.encode()


def _state(text: str, path: Path) -> State:
    """The state that a checkpoint's JSON describes.

    Raises:
        CheckpointError: it is of another format.
        ValueError, TypeError, KeyError, RecursionError: it describes none.
    """
    if len(text) > _LONGEST:
        raise ValueError(f"its state takes {len(text):,} characters")
    data = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_number, parse_float=_number)
    text.encode()  # half of a surrogate pair could not be printed
    json.dumps(data, ensure_ascii=False).encode()
    if not is_shallow(data):
        raise ValueError("its mappings and lists are nested too deeply")
    if data["format"] != FORMAT:
        raise CheckpointError(
            f"{path} has format {json.dumps(data['format'])[:20]}, and this rltool reads format {FORMAT}. Use the rltool that wrote it"
        )
    state = _states().validate_json(text)
    for group in ("env", "algo", "network", "buffer", "optim", "eval"):
        if not isinstance(state.config.get(group), dict):
            raise ValueError(f"expected a mapping under config.{group}")
    if state.best is not None and (state.best.keys() != {"mean", "frames"} or type(state.best["frames"]) is not int):
        raise ValueError(f"expected mean and frames under best, found {state.best}")
    if strange := [
        text for text in (state.env, state.parent or "", *state.versions.values()) if not text.isprintable()
    ]:
        raise ValueError(f"expected text that can be printed, found {strange[0][:50]!r}")
    config = cast("dict[str, dict[str, JsonValue]]", state.config)
    for group, key in (("env", "num_envs"), ("eval", "max_steps")):
        value = config[group].get(key)
        if type(value) is not int or not 0 < value < 2**63:
            raise ValueError(f"expected a number of at least 1 under config.{group}.{key}")
    return state


@cache  # pydantic takes milliseconds to build one
def _states() -> TypeAdapter[State]:
    return TypeAdapter(State)


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """A JSON object; of a key that stands there twice, another reader might take the other value."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError(f"a key stands twice among {', '.join(key for key, _ in pairs)[:100]}")
    return found


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no JSON")


def _number(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is too large for a number")
    return number


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
        except (RuntimeError, LookupError, TypeError, ValueError, ArithmeticError) as error:
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
    except (CheckpointError, RuntimeError, LookupError, ValueError, TypeError, ArithmeticError):
        return False
    return True


def _tensors(path: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    checked(path)
    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError, KeyError, AttributeError) as error:
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

    def go_back(self, header: Header) -> bool:
        """Has a run end at one of its earlier checkpoints: last.ckpt becomes that one, and all that are later leave. A process
        that is killed meanwhile leaves the old end of the run or the new one; best.ckpt may then be that of the other.

        Returns:
            Whether best.ckpt is that of the best evaluation which the checkpoint knows.

        Raises:
            WriteError: a file could not be written.
        """
        best = self.directory / BEST
        sound = best.is_file() and _frames(best) <= header.frames
        if not sound and header.state.best is not None:
            frames = int(header.state.best["frames"])
            kept = header.path if frames == header.frames else self.directory / f"{frames}{SUFFIX}"
            if sound := kept.is_file():
                _copy(kept, best)
        _copy(header.path, self.directory / LAST)
        for file in self.directory.glob(f"*{SUFFIX}"):
            later = file.stem.isdecimal() and int(file.stem) > header.frames
            if later or (file == best and not sound):
                file.unlink()
        return sound

    def _write(self, tensors: Mapping[str, Tensor], state: State, name: str) -> Path:
        path = self.directory / name
        metadata = {_METADATA: json.dumps(asdict(state), allow_nan=False)}
        signature = trust.signature(state.config)
        write_tensors(path, tensors, metadata | ({_SIGNATURE: signature} if signature is not None else {}))
        return path


def _frames(path: Path) -> float:
    """The frame counter of a checkpoint; infinite of one that is not whole."""
    try:
        return read_header(path).frames
    except CheckpointError:
        return math.inf


def _copy(source: Path, target: Path) -> None:
    """Makes a file that is another one's copy, in one step."""
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        shutil.copyfile(source, temporary)
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, target)
        _sync_directory(target.parent)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise WriteError(f"{target} could not be written: {error}. What was there before is untouched") from error


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

    Its metadata holds a checksum of the whole file besides.

    Raises:
        WriteError: it could not be written (disk full, no permission); names the file and the cause.
    """
    from safetensors.torch import save_file

    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        save_file(_apart(tensors), temporary, {**metadata, _CHECKSUM: _NO_CHECKSUM})
        os.chmod(temporary, 0o666 & ~_umask())  # safetensors makes files that only their owner may read
        with open(temporary, "rb+") as file:
            _state_checksum(file)
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


def _state_checksum(file: BinaryIO) -> None:
    """Writes the checksum of a safetensors file over the zeros that its header holds in its place."""
    length = int.from_bytes(file.read(8), "little")
    place = 8 + file.read(length).index(_checksum_field(_NO_CHECKSUM))
    file.seek(0)
    checksum = _checksum(file, _NO_CHECKSUM)
    file.seek(place)
    file.write(_checksum_field(checksum))
    file.flush()


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
    """Puts the global generators back to what :func:`random_state` gave.

    Raises:
        CheckpointError: it is not such a state.
    """
    try:
        version, numbers, gauss = cast("tuple[int, list[int], float | None]", state["python"])
        name, keys, position, has_gauss, cached = cast("tuple[str, list[int], int, int, float]", state["numpy"])
        if not 0 <= position <= len(keys):  # NumPy would read what lies behind them
            raise ValueError(f"position {position} among {len(keys)} numbers")
        random.setstate((version, tuple(numbers), gauss))
        np.random.set_state((name, np.asarray(keys, np.uint32), position, has_gauss, cached))
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise CheckpointError(f"the checkpoint's random numbers cannot be taken up again: {error!r}") from error

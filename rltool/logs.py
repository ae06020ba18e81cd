"""Where metrics go besides the console: TensorBoard events, CSV, JSON lines. Logging never stops training."""

from __future__ import annotations

import csv
import io
import json
import logging
import math
import os
import struct
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt

from rltool.errors import ConfigError, Problem
from rltool.health import Finding
from rltool.importing import import_user_module
from rltool.schema import CSVConfig, NoLoggingConfig, TensorBoardConfig, WandbConfig

Warn = Callable[[str], None]

_FRAMES, _WALL, _EVERY_POINT = "frames", "time/wall", "episode/finished"
_LARGEST = float(np.finfo(np.float32).max)
_BINS = 64
_FLUSH_SECONDS = 10
_QUEUE = 1000
_LONGEST_PAUSE = 1024


class Logger:
    """What the training loop asks of a logger; as it stands it writes nothing.

    A file that cannot be written is reported once, counted in ``faults``, and training goes on.

    Args:
        warn: told about faults and values that cannot be logged, a line each; Python's logging by default.

    Attributes:
        histogram_interval: frames between histograms; None: this logger takes none.
        faults: how often something could not be written, whatever the reason.
    """

    histogram_interval: int | None = None

    def __init__(self, warn: Warn | None = None) -> None:
        self.faults = 0
        self._warn: Warn = logging.getLogger(__name__).warning if warn is None else warn
        self._warned: set[str] = set()
        self._unsound: set[str] = set()

    def start(self, config: Mapping[str, object]) -> None:
        """Log the configuration (nested) before the first point."""

    def scalars(self, values: Mapping[str, float], frames: int) -> None:
        """Log one point: numbers by name at a frame count. What is no number is left out, with one warning a name."""

    def histograms(self, values: Mapping[str, npt.NDArray[np.generic]], frames: int) -> None:
        """Log distributions by name at a frame count. Values that are not finite are left out and counted."""

    def text(self, tag: str, markdown: str) -> None:
        """Log a text, e.g. the configuration."""

    def gif(self, tag: str, content: bytes, frames: int) -> None:
        """Log a moving picture at a frame count: the bytes of a GIF."""

    def hparams(self, config: Mapping[str, object], metrics: Mapping[str, float], first: Collection[str] = ()) -> None:
        """Log the configuration (nested) as hyper-parameters together with the final values of metrics.

        Args:
            config, metrics: see above.
            first: dotted keys that are shown before all others.
        """

    def flush(self) -> None:
        """Bring everything logged so far to disk."""

    def close(self) -> None:
        """Flush and let go of all files; calling it again is harmless."""

    def _fault(self, error: Exception) -> None:
        self.faults += 1
        place, reason = "", f"{type(error).__name__}: {error}"
        if isinstance(error, OSError):
            place, reason = f" ({error.filename})" if error.filename else "", error.strerror or str(error)
        self._warn_once(
            "fault", f"cannot write metrics{place}: {reason}. Training goes on; points are lost while this lasts"
        )

    def _warn_once(self, topic: str, text: str) -> None:
        if topic not in self._warned:
            self._warned.add(topic)
            self._warn(text)

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Turns a refusal of the file system, or what a library stumbles over, into a counted fault."""
        try:
            yield
        except Exception as error:
            self._fault(error)

    def _numbers(self, values: Mapping[str, float]) -> dict[str, float]:
        """The values that are one number each, NaN and infinities included."""
        numbers: dict[str, float] = {}
        for name, value in values.items():
            number = _number(value)
            if number is None:
                self._warn_once(name, f"{name} is not logged: expected one number, found {_kind(value)}")
            else:
                numbers[name] = number
        return numbers

    def _sound(
        self, values: Mapping[str, npt.NDArray[np.generic]], frames: int
    ) -> tuple[dict[str, npt.NDArray[np.float64]], dict[str, float]]:
        """The finite part of distributions, and by ``<tag>/nonfinite`` how many values were not, from the first one on."""
        unsound: dict[str, float] = {}
        sound: dict[str, npt.NDArray[np.float64]] = {}
        for tag, value in values.items():
            array = _flat(value)
            if array is None:
                self._warn_once(tag, f"{tag} has no histogram: expected an array of numbers, found {_kind(value)}")
                continue
            # TensorBoard draws float32; NaN compares false, so this drops it as well.
            finite = array[np.abs(array) <= _LARGEST]
            bad = array.size - finite.size
            if bad:
                self._unsound.add(tag)
                self._warn_once(
                    tag, f"{tag}: {bad} of {array.size} values at frame {frames} are NaN, infinite or beyond float32"
                )
            if tag in self._unsound:
                unsound[f"{tag}/nonfinite"] = float(bad)
            if finite.size:
                sound[tag] = finite
        return sound, unsound


class NoLogger(Logger):
    """Writes no files.

    Args:
        config: the ``logging`` node.
        directory: unused.
        start_frames: unused.
        warn: unused.
    """

    def __init__(
        self, config: NoLoggingConfig, *, directory: Path, start_frames: int = 0, warn: Warn | None = None
    ) -> None:
        del config, directory, start_frames
        super().__init__(warn)


class CSVLogger(Logger):
    """Writes ``metrics.csv`` (a row a point) and ``metrics.jsonl`` (a line a point).

    A metric that appears later, as ``eval/return_mean`` does, becomes a new last column: the file is written anew with
    the wider header and empty cells in the old rows, so that it is a rectangular table at every moment. A cell is empty
    where a metric was not measured or was not finite.

    Args:
        config: the ``logging`` node.
        directory: the run directory.
        start_frames: frame count at which this process starts; later points left by an earlier one are dropped.
        warn: see :class:`Logger`.
    """

    def __init__(self, config: CSVConfig, *, directory: Path, start_frames: int = 0, warn: Warn | None = None) -> None:
        del config
        super().__init__(warn)
        self._lines = _Lines(directory / "metrics.jsonl")
        self._table = _Table(directory / "metrics.csv")
        with self._guarded():
            _drop_lines_after(directory / "metrics.jsonl", start_frames)
        with self._guarded():
            self._table.load(start_frames)

    def scalars(self, values: Mapping[str, float], frames: int) -> None:
        point = _point(self._numbers(values), frames)
        with self._guarded():
            self._lines.append(json.dumps(point, allow_nan=False) + "\n")
        with self._guarded():
            self._table.append(point)

    def close(self) -> None:
        self._lines.close()
        self._table.close()


class TensorBoardLogger(Logger):
    """Writes TensorBoard events and ``metrics.jsonl`` (a line a point) into the run directory.

    Args:
        config: the ``logging`` node.
        directory: the run directory.
        start_frames: frame count at which this process starts; later points left by an earlier one are dropped from
            metrics.jsonl and marked as obsolete for TensorBoard, so that no curve runs backwards.
        warn: see :class:`Logger`.
    """

    def __init__(
        self, config: TensorBoardConfig, *, directory: Path, start_frames: int = 0, warn: Warn | None = None
    ) -> None:
        super().__init__(warn)
        self.histogram_interval = config.histogram_interval
        self._directory = directory
        self._lines = _Lines(directory / "metrics.jsonl")
        self._purge_step = start_frames + 1 if start_frames > 0 else None
        self._frames = start_frames
        self._writer: _Writer | None = None
        self._opened = 0
        self._pause = 1
        self._skip = 0
        self._restore_hook = _silence_worker()
        with self._guarded():
            _drop_lines_after(directory / "metrics.jsonl", start_frames)
        self._record(lambda _: None)

    def scalars(self, values: Mapping[str, float], frames: int) -> None:
        self._frames = frames
        numbers = self._numbers(values)
        with self._guarded():
            self._lines.append(json.dumps(_point(numbers, frames), allow_nan=False) + "\n")

        def write(writer: _Writer) -> None:
            for name, number in numbers.items():
                writer.add_scalar(name, number, frames)

        self._record(write)

    def histograms(self, values: Mapping[str, npt.NDArray[np.generic]], frames: int) -> None:
        sound, unsound = self._sound(values, frames)

        def write(writer: _Writer) -> None:
            for tag, array in sound.items():
                limits, counts = _buckets(array)
                writer.add_histogram_raw(
                    tag,
                    float(array.min()),
                    float(array.max()),
                    array.size,
                    float(array.sum()),
                    float(array.dot(array)),
                    limits,
                    counts,
                    frames,
                )

        if sound:
            self._record(write)
        if unsound:
            self.scalars(unsound, frames)

    def text(self, tag: str, markdown: str) -> None:
        # A path that is no valid Unicode would make the protocol buffer raise.
        clean = markdown.encode("utf-8", errors="replace").decode("utf-8")
        self._record(lambda writer: writer.add_text(tag, clean, self._frames))

    def gif(self, tag: str, content: bytes, frames: int) -> None:
        """Log a GIF as an image, which TensorBoard plays (SummaryWriter.add_video does the same, and needs moviepy)."""

        def write(writer: _Writer) -> None:
            from tensorboard.compat.proto.summary_pb2 import Summary

            width, height = struct.unpack("<HH", content[6:10])  # of its logical screen
            image = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=content)
            writer.file_writer.add_summary(Summary(value=[Summary.Value(tag=tag, image=image)]), frames)

        self._record(write)

    def hparams(self, config: Mapping[str, object], metrics: Mapping[str, float], first: Collection[str] = ()) -> None:
        """Log the configuration as hyper-parameters together with final values, into the run's own event file.

        SummaryWriter.add_hparams would make a second run in a sub-directory. The tab shows five columns at first, those
        that are said to differ and then by name: these are here those that were typed.

        Args:
            config: nested; keys become dotted. null, true and false become words, lists text.
            metrics: final values; their tags get the prefix ``final/``, so that no curve gets a point that is not its own.
            first: dotted keys that are shown before all others.
        """
        finals = {f"final/{name}": number for name, number in self._numbers(metrics).items() if math.isfinite(number)}

        def write(writer: _Writer) -> None:
            from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
            from torch.utils.tensorboard.summary import hparams

            summarise = cast("Callable[[dict[str, float | str], dict[str, float]], tuple[Any, ...]]", hparams)
            for summary in summarise(dict(_flattened(config)), finals):
                plugin = summary.value[0].metadata.plugin_data
                data = HParamsPluginData.FromString(plugin.content)
                for info in data.experiment.hparam_infos:
                    info.differs = info.name in first
                plugin.content = data.SerializeToString()
                writer.file_writer.add_summary(summary, self._frames)
            for name, number in finals.items():
                writer.add_scalar(name, number, self._frames)

        self._record(write)

    def flush(self) -> None:
        if self._writer is None:
            return
        self._record(lambda writer: writer.flush())
        if self._writer is not None:
            self._pause = 1

    def close(self) -> None:
        self._lines.close()
        if self._writer is not None:
            with self._guarded():
                self._writer.close()
            self._writer = None
        self._skip = _LONGEST_PAUSE
        self._restore_hook()

    def _record(self, write: Callable[[_Writer], None]) -> None:
        """Hand something to TensorBoard's writer; after a fault a new one is tried, less and less often."""
        if self._skip > 0:
            self._skip -= 1
            return
        if self._writer is None and int(time.time()) <= self._opened:
            return  # files are read in the order of their names, which hold whole seconds
        try:
            if self._writer is None:
                self._writer = self._open()
            write(self._writer)
        except Exception as error:  # protocol buffers, threads and files each have their own
            self._fault(error)
            self._skip, self._pause = self._pause, min(2 * self._pause, _LONGEST_PAUSE)
            if self._writer is not None:
                # Its thread is dead or its file unusable: what it still holds is what the fault reported as lost.
                with suppress(Exception):
                    self._writer.close()
                self._writer = None

    def _open(self) -> _Writer:
        # Imported here: it takes seconds.
        from torch.utils.tensorboard import SummaryWriter

        purge_step, self._purge_step = self._purge_step, None
        self._opened = int(time.time())
        writer = SummaryWriter(
            log_dir=str(self._directory), purge_step=purge_step, max_queue=_QUEUE, flush_secs=_FLUSH_SECONDS
        )
        return cast("_Writer", writer)


class WandbLogger(Logger):
    """Logs to Weights & Biases (extra: wandb), online or offline, and writes ``metrics.jsonl``.

    W&B's run has the name of the run directory as its id, so that a resumed run goes on there. The x axis is ``frames``, a
    metric of its own: W&B's own step may not go back, and a resumed run may.

    Args:
        config: the ``logging`` node.
        directory: the run directory; W&B's files lie in ``wandb/`` in it.
        start_frames: frame count at which this process starts; later points left by an earlier one are dropped from
            metrics.jsonl.
        warn: see :class:`Logger`.

    Raises:
        ConfigError: the extra is missing, nobody is logged in, or W&B does not start.
    """

    def __init__(
        self, config: WandbConfig, *, directory: Path, start_frames: int = 0, warn: Warn | None = None
    ) -> None:
        super().__init__(warn)
        self.histogram_interval = config.histogram_interval
        wandb: Any = import_user_module("wandb", "logging")
        self._wandb, self._closed = wandb, False
        if config.mode == "online" and not wandb.login(prompt=False, verify=False):
            raise ConfigError(
                Problem(
                    "logging.mode",
                    "online needs an account of Weights & Biases, and nobody is logged in here",
                    "Run wandb login, set WANDB_API_KEY, or give logging.mode=offline and wandb sync later",
                )
            )
        try:
            self._run: Any = wandb.init(
                project=config.project,
                entity=config.entity,
                group=config.group,
                tags=config.tags,
                name="/".join(directory.parts[-2:]),
                id=directory.name,
                resume="allow",
                dir=str(directory),
                mode=config.mode,
                settings=wandb.Settings(console="off"),
            )
        except (wandb.Error, OSError) as error:
            reason = " ".join(str(error).split())
            raise ConfigError(
                Problem("logging", f"Weights & Biases does not start: {reason}", "Try logging.mode=offline")
            ) from error
        self._run.define_metric(_FRAMES)
        self._run.define_metric("*", step_metric=_FRAMES)
        self._lines = _Lines(directory / "metrics.jsonl")
        with self._guarded():
            _drop_lines_after(directory / "metrics.jsonl", start_frames)

    def scalars(self, values: Mapping[str, float], frames: int) -> None:
        numbers = self._numbers(values)
        with self._guarded():
            self._lines.append(json.dumps(_point(numbers, frames), allow_nan=False) + "\n")
        with self._guarded():
            self._run.log({_FRAMES: frames, **numbers})

    def histograms(self, values: Mapping[str, npt.NDArray[np.generic]], frames: int) -> None:
        sound, unsound = self._sound(values, frames)
        found: dict[str, object] = {}
        for tag, array in sound.items():
            limits, counts = _buckets(array)
            # W&B wants the left edge as well; a bucket of one value has no width.
            first = float(array.min()) if len(limits) > 1 else limits[0] - 0.5
            found[tag] = self._wandb.Histogram(np_histogram=(counts, [first, *limits]))
        if found:
            with self._guarded():
                self._run.log({_FRAMES: frames, **found})
        if unsound:
            self.scalars(unsound, frames)

    def start(self, config: Mapping[str, object]) -> None:
        with self._guarded():
            self._run.config.update(dict(config), allow_val_change=True)  # a resumed run may have changed values

    def hparams(self, config: Mapping[str, object], metrics: Mapping[str, float], first: Collection[str] = ()) -> None:
        del config, first  # there since the start
        with self._guarded():
            self._run.summary.update({f"final/{name}": value for name, value in self._numbers(metrics).items()})

    def close(self) -> None:
        self._lines.close()
        if not self._closed:
            self._closed = True
            with self._guarded():
                self._run.finish()


class HealthLog(Logger):
    """Writes ``health.jsonl``: a line for each fault of a run when it is first seen, and one when it has gone.

    Args:
        directory: the run directory.
        told: what was found in the points of earlier sessions: the file is written anew from it.
        warn: see :class:`Logger`.
    """

    def __init__(self, directory: Path, told: Sequence[Finding] = (), warn: Warn | None = None) -> None:
        super().__init__(warn)
        path = directory / "health.jsonl"
        self._lines = _Lines(path)
        with self._guarded():
            if told or path.exists():
                _replace(path, "".join(map(_health_line, told)))

    def add(self, finding: Finding) -> None:
        """A fault that is new, or has gone."""
        with self._guarded():
            self._lines.append(_health_line(finding))

    def close(self) -> None:
        self._lines.close()


def _health_line(finding: Finding) -> str:
    seen = finding.gone is None
    told = {
        "frames": finding.frames if seen else finding.gone,
        "state": "seen" if seen else "gone",
        "rule": finding.rule,
        "since": finding.frames,
        "title": finding.title,
        "seen": finding.seen,
        "cause": finding.cause,
        "remedies": finding.remedies,
    }
    return json.dumps(told, ensure_ascii=False) + "\n"


class _FileWriter(Protocol):
    def add_summary(self, summary: object, global_step: int) -> None: ...


class _Writer(Protocol):
    """The part of SummaryWriter, which has no types, that is used here."""

    file_writer: _FileWriter

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None: ...

    def add_text(self, tag: str, text_string: str, global_step: int) -> None: ...

    def add_histogram_raw(
        self,
        tag: str,
        low: float,
        high: float,
        count: int,
        total: float,
        squares: float,
        limits: list[float],
        counts: list[int],
        step: int,
        /,
    ) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


class _Lines:
    """A text file that grows by whole lines only, also when the disk is full."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: io.FileIO | None = None

    def append(self, line: str) -> None:
        """Add a line, which ends in a newline.

        Raises:
            OSError: it could not be written; the file is as it was before.
        """
        if self._file is None:
            self._file = io.FileIO(self._path, "a")
        content = line.encode("utf-8", errors="backslashreplace")
        end = self._file.seek(0, os.SEEK_END)
        try:
            while content:  # a disk that fills up takes a part first and gives its reason at the next call
                content = content[self._file.write(content) :]
        except OSError as error:
            with suppress(OSError):
                self._file.truncate(end)
            raise OSError(error.errno, error.strerror, str(self._path)) from error

    def close(self) -> None:
        """Close the file; a later line opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None


class _Table:
    """A CSV file whose columns may grow."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines = _Lines(path)
        self._columns: list[str] = []

    def load(self, start_frames: int) -> None:
        """Continue an existing file, without its rows beyond a frame count."""
        if not self._path.exists():
            return
        rows = [row for row in self._rows() if _whole(row.get(_FRAMES)) <= start_frames]
        self._rewrite(self._columns, rows)

    def drop(self, unwanted: Callable[[Mapping[str, object]], bool]) -> None:
        """Take rows out of an existing file."""
        if self._path.exists():
            rows = [row for row in self._rows() if not unwanted(row)]
            self._rewrite(self._columns, rows)

    def append(self, point: Mapping[str, float | None]) -> None:
        """Add a row; names not seen before become columns."""
        new = [name for name in point if name not in self._columns]
        if new:
            rows = self._rows() if self._path.exists() else []
            self._rewrite([*self._columns, *new], rows)
        self._lines.append(_csv([["" if (value := point.get(name)) is None else value for name in self._columns]]))

    def close(self) -> None:
        """Close the file."""
        self._lines.close()

    def _rows(self) -> list[dict[str, str]]:
        with open(self._path, encoding="utf-8", errors="replace", newline="") as file:
            reader = csv.DictReader([line for line in file if line.endswith("\n")], restval="")
            self._columns = list(reader.fieldnames or [])
            return [dict(row) for row in reader if None not in row]

    def _rewrite(self, columns: list[str], rows: list[dict[str, str]]) -> None:
        self._lines.close()
        _replace(self._path, _csv([columns, *([row.get(name, "") for name in columns] for row in rows)]))
        self._columns = columns


def _point(numbers: Mapping[str, float], frames: int) -> dict[str, float | None]:
    """A line of metrics.jsonl: frames, time, values; None where a number is not finite, as JSON has no NaN."""
    point: dict[str, float | None] = {_FRAMES: int(frames), _WALL: round(time.time(), 3)}
    return point | {name: number if math.isfinite(number) else None for name, number in numbers.items()}


def _number(value: object) -> float | None:
    """The value as a float, None where it is not exactly one number."""
    item = getattr(value, "item", None)
    try:
        value = item() if callable(item) else value
    except (ValueError, RuntimeError):  # NumPy and torch: more than one element
        return None
    if not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _flat(value: object) -> npt.NDArray[np.float64] | None:
    """The numbers of an array or a tensor of any type as one row, None where they are no numbers."""
    from torch import Tensor

    if isinstance(value, Tensor):
        if value.is_complex():
            return None
        value = value.detach().cpu().double().numpy()  # bfloat16 has no NumPy type
    array = np.asarray(value)
    return array.astype(np.float64).reshape(-1) if array.dtype.kind in "biuf" else None


def _kind(value: object) -> str:
    shape = getattr(value, "shape", None)
    return type(value).__name__ if shape is None else f"{type(value).__name__} of shape {list(shape)}"


def _buckets(array: npt.NDArray[np.float64]) -> tuple[list[float], list[int]]:
    """Right edges and counts of equal buckets from the smallest to the largest value.

    TensorBoard's default buckets end at 1e20 and cost a search of 1,550 edges a value.
    """
    low, high = float(array.min()), float(array.max())
    edges = np.linspace(low, high, _BINS + 1)
    if not (np.diff(edges) > 0).all():  # constant, or too close together for floating point
        return [high], [array.size]
    counts, _ = np.histogram(array, bins=_BINS, range=(low, high))
    return edges[1:].tolist(), counts.tolist()


def _flattened(tree: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, float | str]]:
    """Dotted key and value of every leaf; what TensorBoard cannot hold becomes text."""
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _flattened(value, f"{path}.")
        elif isinstance(value, str):
            yield path, value.encode("utf-8", errors="replace").decode("utf-8")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield path, value
        else:
            yield path, json.dumps(value, default=str)


def withdraw_point(directory: Path, since: int, frames: int) -> None:
    """Takes the last point of a run that was stopped in the middle of an interval out of its files: the interval goes on.

    Args:
        directory: the run directory.
        since: frames at which the interval began, as the checkpoint says.
        frames: frames of the checkpoint.
    """

    def is_open(point: Mapping[str, object]) -> bool:
        # Each point of an interval has the number of episodes; an evaluation between two of them has not.
        return since < _whole(str(point.get(_FRAMES))) <= frames and point.get(_EVERY_POINT) not in (None, "")

    lines, table = directory / "metrics.jsonl", _Table(directory / "metrics.csv")
    with suppress(OSError, ValueError):
        kept = [line for line in lines.read_text(encoding="utf-8").splitlines(True) if not is_open(json.loads(line))]
        _replace(lines, "".join(kept))
    with suppress(OSError):
        table.drop(is_open)


def _drop_lines_after(path: Path, frames: int) -> None:
    """Leave only the whole lines of a metrics.jsonl up to a frame count."""
    if not path.exists():
        return
    with open(path, encoding="utf-8", errors="replace") as file:
        kept = [line for line in file if line.endswith("\n") and _frames_of(line) <= frames]
    _replace(path, "".join(kept))


def _frames_of(line: str) -> float:
    """The frame count of a line of metrics.jsonl; infinite where the line is damaged."""
    try:
        point = json.loads(line)
    except ValueError:
        return math.inf
    frames = point.get(_FRAMES) if isinstance(point, dict) else None
    return frames if isinstance(frames, int) else math.inf


def _whole(text: str | None) -> float:
    return int(text) if text is not None and text.isdigit() else math.inf


def _csv(rows: list[list[str]] | list[list[str | float]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def _replace(path: Path, text: str) -> None:
    """Write a file in one step: a reader sees the old or the new one."""
    temporary = path.with_name(f".{path.name}-{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8", newline="")
        os.replace(temporary, path)
    except OSError:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def _silence_worker() -> Callable[[], None]:
    """Keeps TensorBoard's writing thread from printing a traceback, as when the disk is full; returns the way back.

    The same error is raised in our thread at the next call, and reported there in a line.
    """
    previous = threading.excepthook

    def hook(arguments: threading.ExceptHookArgs) -> None:
        module = type(arguments.thread).__module__
        if not module.startswith("tensorboard."):
            previous(arguments)

    def restore() -> None:
        if threading.excepthook is hook:
            threading.excepthook = previous

    threading.excepthook = hook
    return restore

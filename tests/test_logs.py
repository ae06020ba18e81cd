"""Loggers, read back with TensorBoard's own reader; what they do with bad values and a full disk."""

from __future__ import annotations

import csv
import itertools
import json
import logging
import math
import os
import resource
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from errno import ENOSPC
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from tensorboard.summary.writer.event_file_writer import AtomicCounter

from rltool.errors import ConfigError
from rltool.logs import CSVLogger, Logger, NoLogger, TensorBoardLogger, WandbLogger, _buckets
from rltool.schema import CSVConfig, NoLoggingConfig, TensorBoardConfig, WandbConfig

TENSORBOARD = TensorBoardConfig(kind="tensorboard", interval=10, histogram_interval=20)
CSV = CSVConfig(kind="csv", interval=10)
NONE = NoLoggingConfig(kind="none", interval=10)


def tensorboard(directory: Path, start_frames: int = 0, warn: list[str] | None = None) -> TensorBoardLogger:
    logger = TENSORBOARD.build(
        directory=directory, start_frames=start_frames, warn=None if warn is None else warn.append
    )
    assert isinstance(logger, TensorBoardLogger)
    return logger


def table(directory: Path, start_frames: int = 0, warn: list[str] | None = None) -> CSVLogger:
    logger = CSV.build(directory=directory, start_frames=start_frames, warn=None if warn is None else warn.append)
    assert isinstance(logger, CSVLogger)
    return logger


def events(directory: Path) -> EventAccumulator:
    return EventAccumulator(str(directory), size_guidance={"scalars": 0, "histograms": 0, "tensors": 0}).Reload()


def curve(directory: Path, tag: str) -> list[tuple[int, float]]:
    return [(point.step, point.value) for point in events(directory).Scalars(tag)]


def lines(directory: Path) -> list[dict[str, float | None]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def without_time(points: list[dict[str, float | None]]) -> list[dict[str, float | None]]:
    return [{name: value for name, value in point.items() if name != "time/wall"} for point in points]


def rows(directory: Path) -> list[dict[str, str]]:
    with open(directory / "metrics.csv", newline="") as file:
        return [{k: v for k, v in row.items() if k != "time/wall"} for row in csv.DictReader(file)]


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """No file may grow beyond ``size``: the nearest thing to a full disk that needs no special rights."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_scalars_are_on_disk_after_a_flush(tmp_path: Path) -> None:
    logger = tensorboard(tmp_path)
    logger.scalars({"train/loss": 1.5, "episode/finished": 0}, 10)
    logger.scalars({"train/loss": float(np.float32(0.5))}, 20)
    logger.flush()
    assert curve(tmp_path, "train/loss") == [(10, 1.5), (20, 0.5)]
    assert without_time(lines(tmp_path)) == [
        {"frames": 10, "train/loss": 1.5, "episode/finished": 0.0},
        {"frames": 20, "train/loss": 0.5},
    ]
    assert all((point["time/wall"] or 0) > 1.6e9 for point in lines(tmp_path))
    logger.close()


def test_closing_flushes_and_is_harmless_twice(tmp_path: Path) -> None:
    hook = threading.excepthook
    logger = tensorboard(tmp_path)
    assert threading.excepthook is not hook
    logger.scalars({"train/loss": 1.0}, 10)
    logger.close()
    logger.close()
    assert threading.excepthook is hook
    assert curve(tmp_path, "train/loss") == [(10, 1.0)]


def test_text_and_histograms(tmp_path: Path) -> None:
    logger = tensorboard(tmp_path)
    assert logger.histogram_interval == 20
    logger.text("config", "    algo: ppo\n    name: \udcff")
    logger.histograms({"policy/actions": np.arange(128)}, 20)
    logger.close()
    read = events(tmp_path)
    (text,) = read.Tensors("config/text_summary")
    assert text.tensor_proto.string_val[0] == b"    algo: ppo\n    name: ?"
    (point,) = read.Histograms("policy/actions")
    histogram = point.histogram_value
    assert (point.step, histogram.min, histogram.max, histogram.num, histogram.sum) == (20, 0, 127, 128, 8128)
    assert histogram.bucket == [2.0] * 64
    assert histogram.bucket_limit[-1] == 127


UNUSUAL: dict[str, object] = {
    "empty": torch.zeros(0),
    "all_nan": torch.full((5,), math.nan),
    "half_nan": torch.tensor([1.0, math.nan, 2.0, math.nan]),
    "infinite": torch.tensor([math.inf, -math.inf, 1.0]),
    "huge": torch.tensor([1e30, -1e30]),
    "huge_constant": torch.tensor([1e30, 1e30]),
    "beyond_float32": np.array([1e300, 1.0]),
    "one": torch.tensor([2.0]),
    "scalar": torch.tensor(2.0),
    "bool": torch.tensor([True, False, True]),
    "bfloat16": torch.ones(4, dtype=torch.bfloat16),
    "uint8": np.zeros((2, 3), dtype=np.uint8),
    "neighbours": np.array([1.0, np.nextafter(1.0, 2.0)]),
    "complex": torch.zeros(2, dtype=torch.complex64),
    "gradient": None,
    "words": "abc",
}


def test_unusual_histograms_never_raise_and_bad_values_are_counted(tmp_path: Path) -> None:
    warned: list[str] = []
    logger = tensorboard(tmp_path, warn=warned)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        logger.histograms(UNUSUAL, 20)  # type: ignore[arg-type]
        logger.histograms(UNUSUAL, 40)  # type: ignore[arg-type]
        logger.histograms({"half_nan": np.ones(3)}, 60)
    logger.close()
    read = events(tmp_path)
    sums = {
        tag: (read.Histograms(tag)[0].histogram_value.num, read.Histograms(tag)[0].histogram_value.sum)
        for tag in read.Tags()["histograms"]
    }
    assert sums == {
        "half_nan": (2, 3.0),
        "infinite": (1, 1.0),
        "huge": (2, 0.0),
        "huge_constant": (2, pytest.approx(2e30)),
        "beyond_float32": (1, 1.0),
        "one": (1, 2.0),
        "scalar": (1, 2.0),
        "bool": (3, 2.0),
        "bfloat16": (4, 4.0),
        "uint8": (6, 0.0),
        "neighbours": (2, 2.0),
    }
    assert curve(tmp_path, "half_nan/nonfinite") == [(20, 2.0), (40, 2.0), (60, 0.0)]
    assert curve(tmp_path, "all_nan/nonfinite") == [(20, 5.0), (40, 5.0)]
    assert curve(tmp_path, "infinite/nonfinite") == [(20, 2.0), (40, 2.0)]
    assert sorted(text.split(" ")[0].rstrip(":") for text in warned) == [
        "all_nan",
        "beyond_float32",
        "complex",
        "gradient",
        "half_nan",
        "infinite",
        "words",
    ]
    assert logger.faults == 0


@pytest.mark.parametrize(
    "values", [np.array([1e30, -1e30]), np.array([3.0]), np.linspace(-1, 1, 1000), np.array([0.0, 1e-300])]
)
def test_buckets_hold_every_value(values: np.ndarray) -> None:
    limits, counts = _buckets(values)
    assert sum(counts) == values.size
    assert len(limits) == len(counts)
    assert limits == sorted(limits)
    assert limits[-1] == values.max()


@pytest.mark.parametrize("build", [tensorboard, table])
def test_values_that_are_no_number_are_left_out_with_one_warning(
    tmp_path: Path, build: type[TensorBoardLogger] | type[CSVLogger]
) -> None:
    warned: list[str] = []
    logger = build(tmp_path, warn=warned)  # type: ignore[call-arg, arg-type]
    values = {
        "none": None,
        "word": "1",
        "two": torch.ones(2),
        "array": np.ones(3),
        "one": torch.ones(1),
        "big": 10**400,
    }
    for frames in (10, 20):
        logger.scalars(values, frames)  # type: ignore[arg-type]
    logger.close()
    assert without_time(lines(tmp_path)) == [{"frames": frames, "one": 1.0, "big": None} for frames in (10, 20)]
    assert [text.split(" ")[0] for text in warned] == ["none", "word", "two", "array"]
    assert "Tensor of shape [2]" in warned[2]


def test_nan_is_null_in_the_lines_and_nan_in_tensorboard(tmp_path: Path) -> None:
    logger = tensorboard(tmp_path)
    logger.scalars({"train/loss": math.nan, "train/grad_norm": math.inf}, 10)
    logger.close()
    text = (tmp_path / "metrics.jsonl").read_text()
    assert "NaN" not in text
    assert "Infinity" not in text
    assert without_time(lines(tmp_path)) == [{"frames": 10, "train/loss": None, "train/grad_norm": None}]
    assert math.isnan(curve(tmp_path, "train/loss")[0][1])
    assert curve(tmp_path, "train/grad_norm") == [(10, math.inf)]


def test_hyperparameters_and_final_values_are_in_the_runs_own_event_file(tmp_path: Path) -> None:
    logger = tensorboard(tmp_path)
    logger.scalars({"eval/return_mean": 400.0}, 10)
    config = {
        "seed": 3,
        "algo": {"kind": "dqn", "double": True, "tau": None, "epsilon": {"end": 0.05}},
        "network": {"hidden": [64, 64]},
        "env": {"kwargs": {}},
    }
    logger.hparams(config, {"eval/return_mean": 475.0, "bad": math.nan}, first=["seed", "algo.kind"])
    logger.close()
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []
    assert len(list(tmp_path.glob("events.out.tfevents.*"))) == 1
    assert curve(tmp_path, "final/eval/return_mean") == [(10, 475.0)]
    assert curve(tmp_path, "eval/return_mean") == [(10, 400.0)]
    contents = events(tmp_path).summary_metadata
    start = HParamsPluginData.FromString(
        contents["_hparams_/session_start_info"].plugin_data.content
    ).session_start_info
    assert {name: value.number_value or value.string_value for name, value in start.hparams.items()} == {
        "seed": 3.0,
        "algo.kind": "dqn",
        "algo.double": "true",
        "algo.tau": "null",
        "algo.epsilon.end": 0.05,
        "network.hidden": "[64, 64]",
    }
    experiment = HParamsPluginData.FromString(contents["_hparams_/experiment"].plugin_data.content).experiment
    assert [info.name.tag for info in experiment.metric_infos] == ["final/eval/return_mean"]
    assert {info.name for info in experiment.hparam_infos if info.differs} == {"seed", "algo.kind"}
    assert "_hparams_/session_end_info" in contents


def test_a_resumed_run_never_runs_backwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    # TensorBoard reads files in the order of their names, which end in a count of the process's writers: 10 is before 9.
    monkeypatch.setattr("tensorboard.summary.writer.event_file_writer._global_uid", AtomicCounter(0))
    logger = tensorboard(tmp_path)
    for frames in (10, 20, 30, 40):
        logger.scalars({"train/loss": float(frames)}, frames)
    logger.close()
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"frames": 15, "train/lo')  # the process died while it wrote

    logger = tensorboard(tmp_path, start_frames=20)
    for frames in (30, 50):
        logger.scalars({"train/loss": float(-frames)}, frames)
    logger.close()
    expected = [(10, 10.0), (20, 20.0), (30, -30.0), (50, -50.0)]
    assert curve(tmp_path, "train/loss") == expected
    assert [(point["frames"], point["train/loss"]) for point in lines(tmp_path)] == expected


def test_csv_grows_columns_and_continues(tmp_path: Path) -> None:
    logger = table(tmp_path)
    assert logger.histogram_interval is None
    logger.scalars({"train/loss": 1.5}, 10)
    logger.scalars({"train/loss": math.nan, "eval/return_mean": 7.0}, 20)
    logger.scalars({"eval/return_mean": 0.1 + 0.2}, 30)
    logger.histograms({"x": np.ones(3)}, 30)
    logger.text("config", "a: 1")
    logger.hparams({"a": 1}, {"b": 2.0})
    logger.flush()
    assert rows(tmp_path) == [
        {"frames": "10", "train/loss": "1.5", "eval/return_mean": ""},
        {"frames": "20", "train/loss": "", "eval/return_mean": "7.0"},
        {"frames": "30", "train/loss": "", "eval/return_mean": "0.30000000000000004"},
    ]
    logger.close()
    with open(tmp_path / "metrics.csv", "a") as file:
        file.write("1")

    logger = table(tmp_path, start_frames=20)
    logger.scalars({"train/loss": 2.0, "policy/entropy": 0.5}, 25)
    logger.close()
    assert [row["frames"] for row in rows(tmp_path)] == ["10", "20", "25"]
    assert rows(tmp_path)[-1] == {"frames": "25", "train/loss": "2.0", "eval/return_mean": "", "policy/entropy": "0.5"}
    assert without_time(lines(tmp_path)) == [
        {"frames": 10, "train/loss": 1.5},
        {"frames": 20, "train/loss": None, "eval/return_mean": 7.0},
        {"frames": 25, "train/loss": 2.0, "policy/entropy": 0.5},
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.csv", "metrics.jsonl"]


def test_no_logger_writes_nothing(tmp_path: Path) -> None:
    logger = NONE.build(directory=tmp_path, start_frames=0)
    assert isinstance(logger, NoLogger)
    logger.scalars({"a": 1.0}, 10)
    logger.histograms({"a": np.ones(2)}, 10)
    logger.text("a", "b")
    logger.hparams({"a": 1}, {"b": 1.0})
    logger.flush()
    logger.close()
    assert list(tmp_path.iterdir()) == []
    assert (logger.histogram_interval, logger.faults) == (None, 0)


def test_a_full_disk_is_reported_once_and_logging_recovers(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = itertools.count(1_800_000_000)
    monkeypatch.setattr(time, "time", lambda: float(next(seconds)))
    warned: list[str] = []
    logger = tensorboard(tmp_path, warn=warned)
    logger.scalars({"train/loss": 0.0}, 0)
    logger.flush()
    with file_size_limit(200):
        for frames in range(10, 60, 10):
            logger.scalars({f"train/{number}": 1.0 for number in range(20)}, frames)
            logger.flush()
    assert logger.faults >= 2
    assert len(warned) == 1
    assert "Training goes on" in warned[0]
    assert "File too large" in warned[0]
    for frames in range(60, 160, 10):
        logger.scalars({"train/loss": float(frames)}, frames)
        logger.flush()
    logger.close()
    # Each line is whole, and what could be written was.
    written = [point["frames"] for point in lines(tmp_path)]
    assert written[0] == 0
    assert written[-10:] == list(range(60, 160, 10))
    points = curve(tmp_path, "train/loss")
    assert points[0] == (0, 0.0)
    assert points[-1] == (150, 150.0)
    assert len(warned) == 1
    assert "Traceback" not in capfd.readouterr().err


def test_a_full_disk_leaves_csv_whole(tmp_path: Path) -> None:
    warned: list[str] = []
    logger = table(tmp_path, warn=warned)
    logger.scalars({"train/loss": 1.0}, 10)
    with file_size_limit(80):
        for frames in range(20, 60, 10):
            logger.scalars({"train/loss": 1.0, f"train/{'long' * 10}{frames}": 2.0}, frames)
    assert (logger.faults, len(warned)) == (8, 1)
    logger.scalars({"train/loss": 3.0}, 60)
    logger.close()
    assert rows(tmp_path) == [{"frames": "10", "train/loss": "1.0"}, {"frames": "60", "train/loss": "3.0"}]
    assert [point["frames"] for point in lines(tmp_path)] == [10, 60]


def test_a_directory_that_cannot_be_written_does_not_stop_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    missing = tmp_path / "a file"
    missing.write_text("")
    with caplog.at_level(logging.WARNING, logger="rltool.logs"):
        for logger in (tensorboard(missing), table(missing)):
            logger.scalars({"a": 1.0}, 10)
            logger.histograms({"a": np.ones(2)}, 10)
            logger.text("a", "b")
            logger.hparams({"a": 1}, {"b": 1.0})
            logger.flush()
            logger.close()
            assert logger.faults >= 2
    assert len(caplog.records) == 2


def test_retries_become_rare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attempts: list[int] = []

    def refuse(self: TensorBoardLogger) -> None:
        attempts.append(0)
        raise OSError(ENOSPC, os.strerror(ENOSPC))

    monkeypatch.setattr(TensorBoardLogger, "_open", refuse)
    logger = tensorboard(tmp_path, warn=[])
    for frames in range(1000):
        logger.scalars({"a": 1.0}, frames)
    logger.close()
    assert len(attempts) == 10
    assert len(lines(tmp_path)) == 1000


@pytest.mark.long
def test_events_survive_a_killed_process(tmp_path: Path) -> None:
    script = (
        "import os, sys; from pathlib import Path; from rltool.schema import TensorBoardConfig\n"
        "logger = TensorBoardConfig(kind='tensorboard', interval=1, histogram_interval=None)"
        ".build(directory=Path(sys.argv[1]), start_frames=0)\n"
        "logger.scalars({'a': 1.0}, 50); logger.scalars({'a': 2.0}, 100); logger.flush(); os._exit(9)"
    )
    assert subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False).returncode == 9
    assert curve(tmp_path, "a") == [(50, 1.0), (100, 2.0)]
    assert [point["frames"] for point in lines(tmp_path)] == [50, 100]


def test_the_module_imports_no_torch() -> None:
    script = "import sys, rltool.logs; sys.exit('torch' in sys.modules or 'tensorboard' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_every_logger_has_the_same_interface() -> None:
    for kind in (TensorBoardLogger, CSVLogger, WandbLogger, NoLogger):
        assert kind.__mro__[1:] == (Logger, object)


# --------------------------------------------------------------------------------------------------- Weights & Biases


def wandb_records(directory: Path) -> list[Any]:
    """What an offline run wrote: a log in LevelDB's format (blocks of 32 KiB; checksum, length and type ahead of each part)
    of protocol buffers. Its process may write the end of it after ``finish``."""
    end = time.monotonic() + 10
    while True:
        records = _wandb_records(directory)
        if any(record.HasField("exit") for record in records):
            return records
        assert time.monotonic() < end, "it never ends"
        time.sleep(0.05)


def _wandb_records(directory: Path) -> list[Any]:
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = directory.glob("wandb/offline-run-*/run-*.wandb")
    content, at, parts, records = path.read_bytes(), 7, [], []
    while at + 7 <= len(content):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        length, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        parts.append(content[at + 7 : at + 7 + length])
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = Record()
            record.ParseFromString(b"".join(parts))
            records.append(record)
            parts = []
    return records


def wandb_logger(directory: Path, mode: str = "offline", **changes: Any) -> Logger:
    directory.mkdir(exist_ok=True)
    config = WandbConfig(
        kind="wandb",
        interval=1,
        histogram_interval=1,
        project="p",
        entity=None,
        group="g",
        tags=["t"],
        mode=cast("Any", mode),
    )
    return WandbLogger(config, directory=directory, **changes)


@pytest.mark.long
def test_an_offline_run_of_wandb_holds_points_histograms_and_configuration(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    logger = wandb_logger(tmp_path / "2026-01-01-00-00-00-abcdef")
    directory = tmp_path / "2026-01-01-00-00-00-abcdef"
    logger.start({"algo": {"kind": "ppo"}, "seed": 3})
    logger.scalars({"train/loss": 0.25, "eval/return_mean": math.nan}, 100)
    logger.scalars({"train/loss": 0.125}, 200)
    logger.histograms({"policy/actions": np.array([0.0, 1.0, 1.0, math.inf]), "one": np.ones(3)}, 200)
    logger.hparams({}, {"eval/return_mean": 7.0})
    logger.close()
    logger.close()
    assert logger.faults == 0
    records = wandb_records(directory)
    (run,) = (record.run for record in records if record.HasField("run"))
    assert (run.run_id, run.project, run.run_group, list(run.tags)) == (directory.name, "p", "g", ["t"])
    history = [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.HasField("history")
    ]
    losses = [(point["frames"], point["train/loss"]) for point in history if "train/loss" in point]
    assert losses == [(100, 0.25), (200, 0.125)]
    (counts,) = (point["policy/actions/values"] for point in history if "policy/actions/values" in point)
    (bins,) = (point["policy/actions/bins"] for point in history if "policy/actions/bins" in point)
    assert (sum(counts), bins[0], bins[-1], len(bins)) == (3, 0.0, 1.0, len(counts) + 1)
    assert next(point for point in history if "policy/actions/nonfinite" in point)["policy/actions/nonfinite"] == 1.0
    updates = {
        item.key: item.value_json for record in records if record.HasField("config") for item in record.config.update
    }
    assert json.loads(updates["algo"]) == {"kind": "ppo"}
    assert [point["frames"] for point in lines(directory)] == [100, 200, 200]


def test_wandb_without_an_account_is_refused_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(
        ConfigError, match=r"^logging\.mode: online needs an account.*nobody is logged in here\. Run wandb login"
    ):
        wandb_logger(tmp_path / "run", "online")

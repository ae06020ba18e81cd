"""A run killed with SIGKILL twice ends as one that nobody disturbed: the short form of benchmarks/kill.py."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
from probes import run, tiny

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import kill


def killed(words: list[str], log: Path, metrics: Path, points: int) -> bool:
    """Trains until so many points are written, or to the end, then kills; whether it had not ended by itself, with 0."""
    process = kill.start(words, log)
    while process.is_alive() and not (metrics.is_file() and metrics.read_text().count("\n") >= points):
        time.sleep(0.001)
    process.kill()
    process.join()
    code = log.with_suffix(".code")
    assert not code.exists() or code.read_text() == "0", log.read_text()
    return not code.exists()


@pytest.mark.long
def test_a_killed_run_ends_as_an_undisturbed_one(tmp_path: Path) -> None:
    kill.PROCESSES.set_forkserver_preload(kill.PRELOAD)
    words = ["buffer=prioritized", "total_frames=800", "save.interval=60", "eval=default", "eval.interval=150"]
    words += ["eval.max_steps=50"]
    whole, parts, log = tmp_path / "whole", tmp_path / "parts", tmp_path / "log.txt"
    run(whole, "dqn", *words)
    metrics = parts / "metrics.jsonl"
    assert killed([*tiny("dqn", *words), f"hydra.run.dir={parts}"], log, metrics, 6)
    assert killed([f"resume={parts}"], log, metrics, 14)
    assert not killed([f"resume={parts}"], log, metrics, 10**6)
    assert kill.differences(parts, whole) == []

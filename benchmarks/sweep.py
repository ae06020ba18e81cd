"""Seconds of a sweep, and of the same runs as commands of their own, as many at a time.

    python benchmarks/sweep.py
    python benchmarks/sweep.py algo=dqn env=cartpole total_frames=20_000 --runs 12 --rounds 3

The arguments are those of ``rltool train``; the seeds are 0, 1, …. A round is one after the other: the sweep, then the commands,
started by a pool of as many threads as there are cores. Everything counts: the check of the jobs, start-up, the answer.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

WORDS = ["algo=ppo", "env=cartpole", "total_frames=20_000", "compile=false", "quiet=true"]
RLTOOL = [sys.executable, "-m", "rltool", "train"]


def call(words: list[str]) -> None:
    """Runs a command to its end."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*RLTOOL, *words], check=True, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def seconds(words: list[str], runs: int, *, sweep: bool) -> float:
    """Wall time of so many runs."""
    with tempfile.TemporaryDirectory() as base:
        start = time.perf_counter()
        if sweep:
            call(["-m", *words, f"seed=range({runs})", f"hydra.sweep.dir={Path(base) / 'sweep'}"])
        else:
            commands = [[*words, f"seed={seed}", f"hydra.run.dir={Path(base) / str(seed)}"] for seed in range(runs)]
            with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
                list(pool.map(call, commands))
        return time.perf_counter() - start


def main() -> None:
    """Prints a line of Markdown for each way, and how they compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", default=WORDS)
    parser.add_argument("--runs", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    took: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(asked.rounds):
        for sweep, times in took.items():
            times.append(seconds(asked.words, asked.runs, sweep=sweep))
    print(
        f"{asked.runs} runs of {' '.join(asked.words)}; {platform.processor() or platform.machine()}, {os.cpu_count()} cores"
    )
    print("| | seconds, median (range) |\n|---|---|")
    for sweep, times in took.items():
        name = "a sweep" if sweep else "as many commands at a time as cores"
        print(f"| {name} | {statistics.median(times):.0f} ({min(times):.0f} to {max(times):.0f}) |")
    print(f"\nratio of the medians: {statistics.median(took[False]) / statistics.median(took[True]):.2f}")


if __name__ == "__main__":
    main()

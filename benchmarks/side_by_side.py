"""Two runs at once on two cores: the speed that each keeps of what it has alone.

    python benchmarks/side_by_side.py
    python benchmarks/side_by_side.py algo=dqn env=cartpole total_frames=30_000 --rounds 3

The arguments are those of ``rltool train``. A round is one run alone, then two at once. The speed is that of the loop,
from the last quarter of its points: start-up and compilation are over by then.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

WORDS = ["algo=ppo", "env=inverted_double_pendulum", "total_frames=60_000", "eval=none", "save=none"]


def together(count: int, words: list[str]) -> list[float]:
    """Frames a second of so many runs at once."""
    with tempfile.TemporaryDirectory() as base:
        directories = [Path(base) / str(index) for index in range(count)]
        runs = [
            subprocess.Popen(
                [sys.executable, "-m", "rltool", "train", *words, f"seed={index}", f"hydra.run.dir={directory}", "quiet=true"],
                stdout=subprocess.DEVNULL,
            )
            for index, directory in enumerate(directories)
        ]  # fmt: skip
        if any(run.wait() for run in runs):
            raise SystemExit("a run failed")
        return [steady(directory / "metrics.jsonl") for directory in directories]


def steady(path: Path) -> float:
    """The median rate of the last quarter of the points."""
    points = [json.loads(line) for line in path.read_text().splitlines()]
    rates = [point["time/frames_per_second"] for point in points if "time/frames_per_second" in point]
    return statistics.median(rates[-max(len(rates) // 4, 1) :])


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="what would follow `rltool train`")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    shares = []
    for number in range(arguments.rounds):
        (alone,), both = together(1, arguments.words or WORDS), together(2, arguments.words or WORDS)
        shares.append(statistics.mean(both) / alone)
        print(
            f"round {number}: alone {alone:,.0f}, two at once {', '.join(f'{rate:,.0f}' for rate in both)} frames/s",
            flush=True,
        )
    print(
        f"each keeps {statistics.median(shares):.0%} (median; {min(shares):.0%} to {max(shares):.0%}) of one run's speed"
    )
    print(f"\non {platform.platform()}, {os.cpu_count()} cores, Python {platform.python_version()}")


if __name__ == "__main__":
    main()

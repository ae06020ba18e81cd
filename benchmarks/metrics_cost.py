"""What the metrics cost: the share of a run's wall time that goes into looking, logging and writing, histograms included.

    python benchmarks/metrics_cost.py

Trains presets with what they log by default, and once more without histograms, and prints for each the mean of
``time/log_share`` over its points (the first, which waits for imports, left out), and its largest value.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

RUNS = {
    "PPO, CartPole": ["algo=ppo", "env=cartpole"],
    "PPO, InvertedDoublePendulum": ["algo=ppo", "env=inverted_double_pendulum", "total_frames=60_000"],
    "DQN, CartPole": ["algo=dqn", "env=cartpole"],
    "SAC, Pendulum": ["algo=sac", "env=pendulum", "total_frames=4_000"],
}


def shares(words: list[str]) -> list[float]:
    """The share at each point of a run but the first."""
    with tempfile.TemporaryDirectory() as directory:
        command = [
            sys.executable,
            "-m",
            "rltool",
            "train",
            *words,
            "quiet=true",
            "seed=0",
            f"hydra.run.dir={directory}/run",
        ]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        lines = (Path(directory) / "run/metrics.jsonl").read_text().splitlines()
    found = [point["time/log_share"] for point in map(json.loads, lines) if "time/log_share" in point]
    return found[1:]


def main() -> None:
    """Prints the table."""
    print("| run | points | share of the time, mean | largest | without histograms |")
    print("|---|---|---|---|---|")
    for name, words in RUNS.items():
        found, without = shares(words), shares([*words, "logging.histogram_interval=null"])
        mean, other = (sum(each) / len(each) for each in (found, without))
        print(f"| {name} | {len(found)} | {mean:.1%} | {max(found):.1%} | {other:.1%} |", flush=True)


if __name__ == "__main__":
    main()

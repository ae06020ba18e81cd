"""Whether a long run keeps to its memory: resident memory of whole runs, each in a process of its own. Linux.

    python benchmarks/memory.py

A million frames of CartPole with few gradient steps, evaluations and checkpoints included, once without metrics and once
with TensorBoard's. What grows with the number of frames, points, episodes, evaluations or checkpoints shows here.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile

SHARES = (0.1, 0.25, 0.5, 1.0)
COMMON = [
    "env=cartpole", "env.num_envs=16", "tuned=none", "compile=false", "quiet=true", "seed=0",
    "eval.interval=50_000", "eval.episodes=5",
]  # fmt: skip
RUNS = {
    "PPO": ["algo=ppo", "algo.frames_per_batch=2048", "algo.epochs=1", "algo.minibatch_size=1024"],
    "DQN, buffer.size=10,000": [
        "algo=dqn", "algo.frames_per_batch=512", "algo.updates_per_frame=0.005", "algo.learning_starts=1000",
        "buffer.size=10_000",
    ],
}  # fmt: skip


def watched(words: list[str], marks: list[int]) -> None:
    """Trains, and prints the resident memory at the first batch that reaches each of these frames."""
    from rltool import cli, collect
    from rltool.memory import resident_memory

    waiting, collected = list(marks), collect.Collector.collect

    def collect_and_look(self: collect.Collector) -> object:
        batch = collected(self)
        while waiting and self.frames >= waiting[0]:
            waiting.pop(0)
            print("resident", resident_memory(), flush=True)
        return batch

    collect.Collector.collect = collect_and_look  # type: ignore[assignment,method-assign]
    sys.exit(cli.main(["train", *words]))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, default=1_000_000, help="of each run")
    parser.add_argument("--watched", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    marks = [round(share * arguments.frames) for share in SHARES]
    if arguments.watched:
        watched(arguments.watched, marks)
    print(f"| MB resident, of {arguments.frames:,} frames | {' | '.join(f'{share:.0%}' for share in SHARES)} |")
    print("|---|" + "---|" * len(SHARES))
    for name, words in RUNS.items():
        for logging in ("none", "tensorboard"):
            with tempfile.TemporaryDirectory() as directory:
                typed = [*COMMON, *words, f"logging={logging}", f"total_frames={arguments.frames}"]
                command = [sys.executable, __file__, f"--frames={arguments.frames}", "--watched", *typed]
                command.append(f"hydra.run.dir={directory}/run")
                done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            found = [int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("resident ")]
            cells = " | ".join(f"{size / 1e6:,.1f}" for size in found)
            print(f"| {name}, logging={logging} | {cells} |", flush=True)


if __name__ == "__main__":
    main()

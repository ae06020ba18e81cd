"""How far two games of images come on two cores in half an hour: the learning curve of one run of each.

    python benchmarks/half_hour.py                      # both, one after the other
    python benchmarks/half_hour.py --runs pong --minutes 5

Each is `rltool train` with the words below, stopped by Ctrl-C when its time is over (a checkpoint is saved then, and
`rltool train resume=…` goes on). Networks and images are smaller than in the papers, as suits two cores. The curve is
printed as Markdown: the mean return of the episodes that ended while training, and of the evaluations.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

RUNS = {
    "pong": [
        "algo=dqn",
        "env=atari_envpool",
        "env.kwargs={img_height: 42, img_width: 42, repeat_action_probability: 0, noop_max: 30}",
        "network=nature_cnn",
        "network.cnn={channels: [16, 32, 32], kernels: [4, 4, 3], strides: [2, 2, 2], features: 256}",
        "algo.frames_per_batch=32",
        "algo.minibatch_size=32",
        "algo.learning_starts=5_000",
        "algo.target_interval=1000",
        "algo.double=true",
        "algo.epsilon={end: 0.02, frames: 50_000}",
        "optim.lr=5e-4",
        "logging.interval=5_000",
        "eval.interval=50_000",
    ],
    "car": [
        "algo=ppo",
        "env=gym",
        "env.id=held_car:HeldCar-v0",
        "env.backend=async",
        "env.num_envs=8",
        "env.wrappers=[GrayscaleObservation, {name: ResizeObservation, kwargs: {shape: [64, 64]}}, "
        "{name: FrameStackObservation, kwargs: {stack_size: 4}}]",
        "network=nature_cnn",
        "network.shared=true",
        "network.cnn={channels: [16, 32, 32], kernels: [4, 4, 3], strides: [4, 2, 1], features: 256}",
        "algo.minibatch_size=128",
        "algo.epochs=6",
        "algo.normalize_observation=false",
        "algo.warmup_frames=0",
        "algo.initial_std=0.7",
        "optim.lr=5e-4",
        "logging.interval=2_000",
        "eval.interval=20_000",
    ],
}
COMMON = ["total_frames=10_000_000", "eval.episodes=5", "eval.num_envs=5", "compile=false"]


def train(name: str, minutes: float, out: Path) -> Path:
    """Trains for so long; the directory of the run."""
    directory = out / name
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    words = [sys.executable, "-m", "rltool", "train", *RUNS[name], *COMMON, f"hydra.run.dir={directory}"]
    with subprocess.Popen(words, env={**os.environ, "PYTHONPATH": path}) as process:
        try:
            process.wait(60 * minutes)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
    return directory


def curve(directory: Path, rows: int = 10) -> str:
    """The returns of a run, at so many places evenly spread over its frames."""
    points = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    frames, started = points[-1]["frames"], points[0]["time/wall"]
    lines = ["| frames | minutes | return while training | evaluation |", "|---|---|---|---|"]
    for row in range(rows):
        part = [p for p in points if row * frames / rows < p["frames"] <= (row + 1) * frames / rows]
        if not part:
            continue
        cells = []
        for metric in ("episode/return", "eval/return_mean"):
            found = [p[metric] for p in part if metric in p]
            cells.append(f"{found[-1]:.1f}" if found else "")
        minutes = (part[-1]["time/wall"] - started) / 60
        lines.append(f"| {part[-1]['frames']:,} | {minutes:.1f} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="+", choices=list(RUNS), default=list(RUNS))
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--out", type=Path, default=Path("runs/benchmark-half-hour"))
    arguments = parser.parse_args()
    for name in arguments.runs:
        directory = train(name, arguments.minutes, arguments.out.absolute())
        print(f"\n{name}\n\n{curve(directory)}\n", flush=True)


if __name__ == "__main__":
    main()

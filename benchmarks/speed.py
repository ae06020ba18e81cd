"""Frames a second of whole training loops beside other libraries': the same work, in turns, on one torch thread.

    pip install -e '.[all,peers]'
    python benchmarks/speed.py                                  # every row, five rounds
    python benchmarks/speed.py --rows ppo-8x256 dqn-1 --rounds 3

Start-up and compilation are excluded: a rate is taken from the first frame after ``untimed`` to the last. Each figure
is a process of its own; a round runs rltool and its peers one after the other, so that whatever else the machine does
hits all of them alike. Medians, ranges and ratios are printed as Markdown and written to OUT/table.md, with the versions
and the machine. Networks, minibatches, gradient steps a frame and precision (float32) are the same on all sides.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from peers import PEERS, Stopwatch, Work

MARK = "measured: "
PENDULUM = "InvertedDoublePendulum-v5"
PPO = {"algo": "ppo", "env": PENDULUM, "epochs": 10, "hidden": (64, 64)}
ZOO = {
    "algo": "dqn",
    "env": "CartPole-v1",
    "minibatch": 64,
    "hidden": (256, 256),
    "learning_starts": 1000,
    "lr": 2.3e-3,
}
ROWS: dict[str, tuple[Work, list[str]]] = {
    "ppo-8x256": (
        Work(**PPO, num_envs=8, steps=256, minibatch=64, frames=24_576, untimed=12_288),
        ["rltool", "rltool threads", "rltool envpool", "stable-baselines3"],
    ),
    "ppo-16x128": (
        Work(**PPO, num_envs=16, steps=128, minibatch=256, frames=32_768, untimed=12_288),
        ["rltool", "rltool threads", "rltool envpool", "stable-baselines3", "skrl"],
    ),
    "ppo-1x2048": (
        Work(**PPO, num_envs=1, steps=2048, minibatch=64, frames=10_240, untimed=4_096),
        ["rltool", "torchrl"],
    ),
    # The RL Zoo's preset: 128 steps each 256 frames.
    "dqn-1": (
        Work(**ZOO, num_envs=1, steps=256, epochs=128, frames=8_192, untimed=3_072),
        ["rltool", "stable-baselines3"],
    ),
    "dqn-8": (
        Work(**ZOO, num_envs=8, steps=32, epochs=128, frames=8_192, untimed=3_072),
        ["rltool", "stable-baselines3"],
    ),
    "dqn-cleanrl": (
        Work(
            algo="dqn", env="CartPole-v1", num_envs=1, steps=10, minibatch=128, epochs=1, hidden=(120, 84),
            learning_starts=2_000, buffer=10_000, target_interval=500, lr=2.5e-4, frames=16_000, untimed=6_000,
        ),
        ["rltool", "stable-baselines3"],
    ),
    "sac": (
        Work(
            algo="sac", env="Pendulum-v1", num_envs=1, steps=1, minibatch=256, epochs=1, hidden=(256, 256),
            learning_starts=100, frames=700, untimed=300, lr=1e-3,
        ),
        ["rltool", "stable-baselines3"],
    ),
}  # fmt: skip


def words(work: Work, backend: str) -> list[str]:
    """The same work as overrides of `rltool train`."""
    batch, hidden = work.num_envs * work.steps, list(work.hidden)
    common = [
        f"algo={work.algo}", "env=gym", f"env.id={work.env}", f"env.num_envs={work.num_envs}", f"env.backend={backend}",
        f"algo.frames_per_batch={batch}", f"algo.minibatch_size={work.minibatch}", f"network.hidden={hidden}",
        f"optim.lr={work.lr}", f"total_frames={work.frames}", "threads=1", "compile=true", "eval=none", "save=none",
        "quiet=true", "tuned=none",
    ]  # fmt: skip
    if work.algo == "ppo":
        return [*common, f"algo.epochs={work.epochs}"]
    common += [f"algo.updates_per_frame={work.epochs / batch}", f"buffer.size={work.buffer}"]
    if work.algo == "dqn":
        return [
            *common,
            f"algo.learning_starts={work.learning_starts}",
            f"algo.target_interval={work.target_interval}",
            f"algo.epsilon={{start: 1.0, end: 0.05, frames: {work.untimed // 2}}}",
        ]
    return [*common, f"algo.warmup_frames={work.learning_starts}"]


def ours(work: Work, backend: str = "sync") -> float:
    """rltool, through the function behind `rltool train`; logging as it comes."""
    import rltool
    from rltool.algos.base import Algorithm

    watch, update = Stopwatch(work.untimed), Algorithm.update

    def watched(self: Algorithm, batch, frames: int):  # type: ignore[no-untyped-def]
        metrics = update(self, batch, frames)
        watch.at(frames)
        return metrics

    Algorithm.update = watched  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as directory:
        rltool.train(*words(work, backend), f"hydra.run.dir={directory}/run")
    return watch.rate


def one(row: str, side: str) -> tuple[float, float]:
    """Frames a second and the most memory that was resident, in MB, of this process."""
    import torch

    torch.set_num_threads(1)
    work, _ = ROWS[row]
    name, _, backend = side.partition(" ")
    rate = ours(work, backend or "sync") if name == "rltool" else PEERS[name](work)
    return rate, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(row: str, side: str) -> tuple[float, float]:
    """The same, in a process of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--one", row, side]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{row}, {side}:\n{done.stdout}{done.stderr}")
    # Libraries print at their ends, too.
    (line,) = (line for line in done.stdout.splitlines() if line.startswith(MARK))
    rate, memory = line.removeprefix(MARK).split()
    return float(rate), float(memory)


def table(figures: dict[str, dict[str, list[tuple[float, float]]]]) -> str:
    """All rows as Markdown."""
    lines = [
        "| work | side | frames/s, median (range) | times the fastest peer | peak memory |",
        "|---|---|---|---|---|",
    ]
    for row, sides in figures.items():
        rates = {side: [rate for rate, _ in runs] for side, runs in sides.items()}
        peer = max(statistics.median(values) for side, values in rates.items() if not side.startswith("rltool"))
        for side, values in rates.items():
            median, memory = statistics.median(values), max(memory for _, memory in sides[side])
            ratio = f"{median / peer:.2f}" if side.startswith("rltool") else ""
            spread = f"{median:,.0f} ({min(values):,.0f} to {max(values):,.0f})"
            lines.append(f"| {row} | {side} | {spread} | {ratio} | {memory:,.0f} MB |")
    return "\n".join(lines)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("runs/benchmark-speed"))
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(f"\n{MARK}{' '.join(map(str, one(*arguments.one)))}", flush=True)
        return
    if arguments.rounds < 1:
        parser.error(f"--rounds: expected 1 or more, found {arguments.rounds}")
    names = ("torch", "torchrl", "gymnasium", "mujoco", "envpool", "stable-baselines3", "skrl")
    try:  # before hours of measuring
        versions = ", ".join(f"{name} {version(name)}" for name in names)
    except PackageNotFoundError as error:
        parser.error(f"{error.name} is not installed: pip install -e '.[all,peers]'")
    figures: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for row in arguments.rows:
        sides = ROWS[row][1]
        figures[row] = {side: [] for side in sides}
        for _ in range(arguments.rounds):
            for side in sides:
                figures[row][side].append(measure(row, side))
        print(f"{row}: {json.dumps(figures[row])}", flush=True)
    text = f"{table(figures)}\n\n{platform.platform()}, {os.cpu_count()} cores, Python {platform.python_version()}; {versions}"
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "table.md").write_text(text + "\n")
    print(f"\n{text}")


if __name__ == "__main__":
    main()

"""The table of solved tasks: every seed trained by the command a user types, judged on fresh episodes.

    python benchmarks/learning.py                       # all tasks, seeds 0 to 5
    python benchmarks/learning.py --tasks cartpole-dqn --seeds 0 1

Each run is `rltool train algo=… env=… seed=…` with the tuned file that applies by itself. `checkpoints/best.ckpt` and
`checkpoints/last.ckpt` are then evaluated over 100 deterministic episodes of a random stream that neither training nor
its evaluations draw from. Runs go one after the other and are kept in --out; a run that is there already is not
repeated. A summary over the seeds and the table of all of them are printed as Markdown and written to OUT/table.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

# task: environment, algorithm, return from which it counts as solved (Gymnasium's reward_threshold; Pendulum has none:
# what the best published policies reach less one standard error; MiniGrid: 1 is the shortest way in no time)
TASKS = {
    "cartpole-dqn": ("cartpole", "dqn", 475.0),
    "cartpole-ppo": ("cartpole", "ppo", 475.0),
    "inverted_double_pendulum-ppo": ("inverted_double_pendulum", "ppo", 9100.0),
    "pendulum-sac": ("pendulum", "sac", -180.0),
    "lunar_lander-dqn": ("lunar_lander", "dqn", 200.0),
    "lunar_lander-ppo": ("lunar_lander", "ppo", 200.0),
    "minigrid-ppo": ("minigrid", "ppo", 0.95),
}
EPISODES = 100
JUDGED = ("best", "last")


def rltool(*words: str, log: Path) -> None:
    """Runs the command line in a process of its own; its output goes into a file."""
    with open(log, "a") as out:
        subprocess.run([sys.executable, "-m", "rltool", *words], check=True, stdout=out, stderr=subprocess.STDOUT)


def measure(task: str, seed: int, out: Path, overrides: list[str]) -> dict[str, float]:
    """Trains and judges one seed."""
    env, algo, _ = TASKS[task]
    directory = out / task / f"seed-{seed}"
    log = out / task / f"seed-{seed}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    if not (directory / "summary.json").is_file():
        rltool("train", f"algo={algo}", f"env={env}", f"seed={seed}", f"hydra.run.dir={directory}", *overrides, log=log)
    summary = json.loads((directory / "summary.json").read_text())
    row = {"frames": summary["frames"], "seconds": summary["seconds"], "updates": summary["updates"]}
    for which in JUDGED:
        report = directory / f"{which}.json"
        if not report.is_file():
            checkpoint = directory / "checkpoints" / f"{which}.ckpt"
            rltool("eval", f"checkpoint={checkpoint}", f"episodes={EPISODES}", f"out={report}", "num_envs=20", log=log)
        data = json.loads(report.read_text())
        row |= {which: data["mean"], f"{which}_low": data["ci_low"], f"{which}_high": data["ci_high"]}
    return row


def summary(rows: dict[str, dict[int, dict[str, float]]]) -> str:
    """A line for each task as Markdown: means over the seeds, with the lowest and the highest of them."""
    lines = [
        "| task | frames | solved | best.ckpt | last.ckpt | seconds |",
        "|---|---|---|---|---|---|",
    ]
    for task, seeds in rows.items():
        threshold = TASKS[task][2]
        solved = sum(row["best"] >= threshold for row in seeds.values())
        cells = [
            _range([row[which] for row in seeds.values()], ".2f" if abs(threshold) < 10 else ".1f") for which in JUDGED
        ]
        frames, seconds = max(row["frames"] for row in seeds.values()), [row["seconds"] for row in seeds.values()]
        lines.append(
            f"| {task} | {frames:,} | {solved} of {len(seeds)} seeds ≥ {threshold:g} | {' | '.join(cells)} "
            f"| {min(seconds):.0f} to {max(seconds):.0f} |"
        )
    return "\n".join(lines)


def _range(values: list[float], form: str) -> str:
    return f"{sum(values) / len(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def table(rows: dict[str, dict[int, dict[str, float]]]) -> str:
    """All seeds of all tasks as Markdown."""
    lines = [
        "| task | seed | frames | seconds | best.ckpt, 100 fresh episodes | last.ckpt, 100 fresh episodes |",
        "|---|---|---|---|---|---|",
    ]
    for task, seeds in rows.items():
        form = ".2f" if abs(TASKS[task][2]) < 10 else ".1f"
        for seed, row in seeds.items():
            cells = [f"{row[w]:{form}} ({row[f'{w}_low']:{form}} to {row[f'{w}_high']:{form}})" for w in JUDGED]
            lines.append(f"| {task} | {seed} | {row['frames']:,} | {row['seconds']:.0f} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(6)))
    parser.add_argument("--out", type=Path, default=Path("runs/benchmark-learning"))
    parser.add_argument("--overrides", nargs="*", default=[], help="further words for rltool train")
    arguments = parser.parse_args()
    out = arguments.out.absolute()
    rows: dict[str, dict[int, dict[str, float]]] = {}
    for task in arguments.tasks:
        for seed in arguments.seeds:
            row = measure(task, seed, out, arguments.overrides)
            rows.setdefault(task, {})[seed] = row
            print(f"{task} seed {seed}: {json.dumps(row)}", flush=True)
    text = f"{summary(rows)}\n\n{table(rows)}"
    (out / "table.md").write_text(text + "\n")
    print(f"\n{text}\n\non {platform.platform()}, {os.cpu_count()} cores, Python {platform.python_version()}")


if __name__ == "__main__":
    main()

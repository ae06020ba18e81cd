"""Kills short runs at random moments and resumes each: does it end as the run that nobody disturbed?

    python benchmarks/kill.py                     # 200 kills, some twenty minutes on two cores
    python benchmarks/kill.py --kills 12 --jobs 1

Each run is killed with SIGKILL, now while it starts, now while it collects, learns or writes a checkpoint, and resumed by
``rltool train resume=…``, then killed again and resumed again; one that had no checkpoint yet is started anew in its
directory's place. Its checkpoints, its replay buffer, its metrics (but time/) and its result must equal those of the
undisturbed run, bit for bit; no curve may run backwards; nothing may be left lying about.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

# Small networks, frequent checkpoints, evaluations and points: a kill then often falls into one of them.
COMMON = [
    "tuned=none", "compile=false", "network.hidden=[16]", "env.num_envs=2", "total_frames=4000", "logging.interval=100",
    "logging=csv", "eval.interval=300", "eval.episodes=2", "eval.num_envs=2", "eval.max_steps=60", "save.interval=90",
    "save.keep=2", "optim.schedule=linear", "quiet=true",
]  # fmt: skip
REPLAYED = ["algo.frames_per_batch=20", "algo.minibatch_size=16", "buffer.size=800"]
RUNS = {
    "ppo, cartpole": ["algo=ppo", "env=cartpole", "algo.frames_per_batch=64", "algo.minibatch_size=32", *COMMON],
    "ppo, hopper, worker processes": [
        "algo=ppo", "env=gym", "env.id=Hopper-v5", "env.backend=async", "algo.frames_per_batch=64", "algo.minibatch_size=32",
        *COMMON,
    ],
    "dqn, cartpole, prioritised replay": [
        "algo=dqn", "env=cartpole", "buffer=prioritized", "algo.learning_starts=100", "algo.updates_per_frame=0.2",
        *REPLAYED, *COMMON,
    ],
    "sac, pendulum": ["algo=sac", "env=pendulum", "algo.warmup_frames=100", "algo.updates_per_frame=0.2", *REPLAYED, *COMMON],
}  # fmt: skip
# Processes begin as copies of one that has imported everything: a kill then falls into the run, not into imports.
PROCESSES = multiprocessing.get_context("forkserver")
PRELOAD = ["rltool.training", "rltool.commands.train", "rltool.algos.ppo", "rltool.algos.dqn", "rltool.algos.sac"]


@dataclass
class Outcome:
    """How one run fared.

    Attributes:
        kills: how often it was killed.
        anew: kills before its first checkpoint.
        writing: kills that left an unfinished file.
        differences: what is not as in the undisturbed run.
    """

    kills: int = 0
    anew: int = 0
    writing: int = 0
    differences: list[str] = field(default_factory=list)


def trained(words: list[str], log: str) -> None:
    """``rltool train`` in this process; what it prints goes into a file."""
    from rltool import cli

    with open(log, "a") as file, redirect_stdout(file), redirect_stderr(file):
        code = cli.main(["train", *words])
    # The server of processes now and then loses the exit code of one.
    Path(log).with_suffix(".code").write_text(str(code))


def start(words: list[str], log: Path) -> Any:
    """A process that trains."""
    process = PROCESSES.Process(target=trained, args=(words, str(log)))
    process.start()
    return process


def disturbed(words: list[str], directory: Path, moments: list[float]) -> Outcome:
    """A run that is killed so many seconds after each of its starts, and then left in peace."""
    outcome, log = Outcome(), directory.with_suffix(".txt")
    fresh = [*words, f"hydra.run.dir={directory}"]
    command = fresh
    for moment in [*moments, None]:
        process = start(command, log)
        process.join(moment)
        if process.exitcode is None:
            process.kill()
            process.join()
            outcome.kills += 1
        elif (code := log.with_suffix(".code").read_text()) != "0":
            outcome.differences.append(f"exit code {code}: {log.read_text().splitlines()[-1]}")
            break
        checkpoints = directory / "checkpoints"
        outcome.writing += any(directory.rglob(".*.tmp"))
        command = [f"resume={directory}"]
        if not (checkpoints.is_dir() and any(checkpoints.glob("*.ckpt"))):
            outcome.anew += 1
            shutil.rmtree(directory, ignore_errors=True)
            command = fresh
    return outcome


def points(directory: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what a clock measured."""
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [{name: value for name, value in json.loads(line).items() if name[:5] != "time/"} for line in lines]


def result(directory: Path) -> dict[str, Any]:
    """summary.json without what a clock measured."""
    summary = json.loads((directory / "summary.json").read_text())
    return {
        name: value
        for name, value in summary.items()
        if name not in ("seconds", "frames_per_second", "time_shares", "directory")
    }


def differences(directory: Path, whole: Path) -> list[str]:
    """What of a run is not as in another one."""
    import safetensors.torch

    found = []
    files = sorted(path.name for path in (whole / "checkpoints").iterdir())
    if (here := sorted(path.name for path in (directory / "checkpoints").iterdir())) != files:
        found.append(f"checkpoints {here} instead of {files}")
    else:
        for name in files:
            one, other = (safetensors.torch.load_file(run / "checkpoints" / name) for run in (directory, whole))
            found += [f"{name}: {key}" for key in one.keys() | other.keys() if not _equal(one.get(key), other.get(key))]
    if points(directory) != points(whole):
        found.append("metrics.jsonl")
    if not all(one["frames"] <= other["frames"] for one, other in pairwise(points(directory))):
        found.append("metrics.jsonl runs backwards")
    if result(directory) != result(whole):
        found.append("summary.json")
    if left := [path.name for path in directory.rglob(".*.tmp")]:
        found.append(f"left lying about: {left}")
    return found


def _equal(one: Any, other: Any) -> bool:
    return one is not None and other is not None and bool(one.equal(other))


def survey(name: str, kills: int, jobs: int, seed: int, home: Path) -> list[Outcome]:
    """So many kills of runs of one kind."""
    words, whole = RUNS[name], home / "whole"
    seconds = 0.0
    for directory in (home / "first", whole):  # the first one waits for the imports of the server of processes
        begin = time.monotonic()
        outcome = disturbed(words, directory, [])
        seconds = time.monotonic() - begin
        if outcome.differences:
            sys.exit(directory.with_suffix(".txt").read_text())
    dice = random.Random(f"{seed} {name}")

    def one(index: int) -> Outcome:
        moments = [dice.uniform(0, seconds) for _ in range(2)]
        outcome = disturbed(words, home / str(index), moments)
        if not outcome.differences:
            try:
                outcome.differences += differences(home / str(index), whole)
            except OSError as error:
                outcome.differences.append(str(error))
        if not outcome.differences:
            shutil.rmtree(home / str(index))
        return outcome

    outcomes: list[Outcome] = []
    with ThreadPoolExecutor(jobs) as pool:
        while sum(outcome.kills for outcome in outcomes) < kills:
            first = len(outcomes)
            outcomes += pool.map(one, range(first, first + jobs))
    return outcomes


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    PROCESSES.set_forkserver_preload(PRELOAD)
    total = Counter[str]()
    print(
        "| run | runs | kills | before the first checkpoint | while a file was written | ended otherwise |\n|---|---|---|---|---|---|"
    )
    with tempfile.TemporaryDirectory(prefix="rltool-kill-") as home:
        for place, name in enumerate(RUNS):
            directory = Path(home) / str(place)
            directory.mkdir()
            share = -(-arguments.kills * (place + 1) // len(RUNS)) - -(-arguments.kills * place // len(RUNS))
            outcomes = survey(name, share, arguments.jobs, arguments.seed, directory)
            row = {
                "runs": len(outcomes),
                "kills": sum(outcome.kills for outcome in outcomes),
                "anew": sum(outcome.anew for outcome in outcomes),
                "writing": sum(outcome.writing for outcome in outcomes),
                "bad": sum(bool(outcome.differences) for outcome in outcomes),
            }
            total.update(row)
            print(f"| {name} | {' | '.join(map(str, row.values()))} |", flush=True)
            for outcome in outcomes:
                for difference in outcome.differences:
                    print(f"  {difference}", file=sys.stderr)
    print(f"| all | {' | '.join(str(total[key]) for key in ('runs', 'kills', 'anew', 'writing', 'bad'))} |")
    print(f"\non {platform.platform()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    sys.exit(total["bad"] > 0)


if __name__ == "__main__":
    main()

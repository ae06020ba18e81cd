"""Collection, policy included, beside raw stepping of the same environments with given actions.

    python benchmarks/collecting.py

Raw stepping is Gymnasium's ``SyncVectorEnv`` (SAME_STEP) or EnvPool itself, with actions drawn beforehand from the same
distribution as the untrained policy's. Collection is rltool's collector with PPO's compiled policy: observations
normalised, everything stored, true final observations kept. Both sides run in one process, in turns.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from rltool.compiling import Compiler
from rltool.composition import compose
from rltool.config import load
from rltool.devices import quieten_libraries
from rltool.seeding import Stream, generator
from rltool.training import built
from rltool.vectorized import usable_cores

ENV = "InvertedDoublePendulum-v5"


def raw(backend: str, num_envs: int) -> Callable[[Any], Any]:
    """A function that steps all environments."""
    env: Any
    if backend == "envpool":
        import envpool

        env = envpool.make_gymnasium(ENV, num_envs=num_envs, num_threads=min(num_envs, usable_cores()), seed=0)
        env.reset()
    else:
        env = SyncVectorEnv([partial(gymnasium.make, ENV)] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)
        env.reset(seed=0)
    return env.step  # type: ignore[no-any-return]


def compare(backend: str, num_envs: int, rounds: int, steps: int) -> str:
    """A row of the table."""
    words = [
        "algo=ppo", "env=gym", f"env.id={ENV}", f"env.num_envs={num_envs}", f"env.backend={backend}", "tuned=none",
        f"algo.frames_per_batch={num_envs * steps}", "algo.warmup_frames=1000", "algo.minibatch_size=64",
    ]  # fmt: skip
    config = load(compose(words).tree)
    env: Any = config.env.build(seed=0)
    device = torch.device("cpu")
    algorithm = built(config, env, device, budget=0, seed=0, compiler=Compiler(True, 0, str), note=str)
    collector = env.collector(algorithm, total_frames=-1, generator=generator(0, Stream.POLICY), device=device)
    algorithm.update(collector.collect(), 1000)  # random frames, which start the normaliser
    collector.collect()  # compiles the policy
    step, noise = raw(backend, num_envs), np.random.default_rng(0)
    rates: dict[str, list[float]] = {"raw": [], "collected": []}
    for _ in range(rounds):
        actions = np.clip(noise.standard_normal((steps, num_envs, 1)), -1.0, 1.0).astype(env.actions.dtype)
        begin = time.perf_counter()
        for action in actions:
            step(action)
        middle = time.perf_counter()
        collector.collect()
        end = time.perf_counter()
        rates["raw"].append(num_envs * steps / (middle - begin))
        rates["collected"].append(num_envs * steps / (end - middle))
    env.close()
    medians = {name: statistics.median(values) for name, values in rates.items()}
    share = statistics.median(ours / theirs for ours, theirs in zip(rates["collected"], rates["raw"], strict=True))
    return f"| {backend} | {num_envs} | {medians['raw']:,.0f} | {medians['collected']:,.0f} | {share:.0%} |"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=256, help="of each environment in a round")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    quieten_libraries()
    print("| backend | environments | raw steps/s | collected frames/s | share |\n|---|---|---|---|---|")
    for backend in ("sync", "threads", "envpool"):
        for num_envs in (8, 32):
            print(compare(backend, num_envs, arguments.rounds, arguments.steps), flush=True)
    print(f"\non {platform.platform()}, {os.cpu_count()} cores, Python {platform.python_version()}")


if __name__ == "__main__":
    main()

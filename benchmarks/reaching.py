"""Seconds from a command to a policy that is good enough, everything included: start-up, compilation, evaluation.

    python benchmarks/reaching.py                                      # both tasks, five seeds, and Stable-Baselines3
    python benchmarks/reaching.py --tasks cartpole-dqn --seeds 0 1 --sides rltool
    python benchmarks/reaching.py --sides rltool --cold                # compiled code is made anew each time

Both sides evaluate the mean of 20 deterministic episodes every so many frames and stop at the first one that reaches the
threshold; the clock runs from the start of the process to its end. rltool runs its tuned preset. Stable-Baselines3 runs
its defaults for PPO (8 environments, VecNormalize) and the RL Zoo's preset for DQN.
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
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Task:
    """What is to be reached.

    Attributes:
        algo, env: for rltool.
        gym_id: for Stable-Baselines3.
        threshold: mean return of an evaluation.
        interval: frames between evaluations.
        limit: frames after which a side gives up.
    """

    algo: str
    env: str
    gym_id: str
    threshold: float
    interval: int
    limit: int


TASKS = {
    "inverted_double_pendulum-ppo": Task(
        "ppo", "inverted_double_pendulum", "InvertedDoublePendulum-v5", 9100.0, 8_192, 200_000
    ),
    "cartpole-dqn": Task("dqn", "cartpole", "CartPole-v1", 475.0, 2_560, 100_000),
}
EPISODES = 20


def rltool(task: Task, seed: int, directory: Path) -> dict[str, Any]:
    """Trains by the command line; what its summary says."""
    words = [
        "train", f"algo={task.algo}", f"env={task.env}", f"seed={seed}", f"hydra.run.dir={directory}/run", "quiet=true",
        f"eval.interval={task.interval}", f"eval.episodes={EPISODES}", f"stop.return_threshold={task.threshold}",
        "stop.evaluations=1", "eval.final_episodes=0",
    ]  # fmt: skip
    subprocess.run([sys.executable, "-m", "rltool", *words], check=True, stdout=subprocess.DEVNULL)
    summary = json.loads((directory / "run" / "summary.json").read_text())
    return {"frames": summary["frames"], "reached": summary["status"] == "solved"}


def stable_baselines3(name: str, seed: int) -> dict[str, Any]:
    """Trains in this process."""
    import torch
    from stable_baselines3 import DQN, PPO
    from stable_baselines3.common.callbacks import EvalCallback, StopTrainingOnRewardThreshold
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import VecNormalize

    torch.set_num_threads(1)
    task = TASKS[name]
    num_envs = 8 if task.algo == "ppo" else 1
    env: Any = make_vec_env(task.gym_id, n_envs=num_envs, seed=seed)
    judge: Any = make_vec_env(task.gym_id, n_envs=num_envs, seed=seed + 1000)
    agent: Any
    if task.algo == "ppo":
        env = VecNormalize(env)
        judge = VecNormalize(judge, training=False, norm_reward=False)
        agent = PPO("MlpPolicy", env, n_steps=256, seed=seed, device="cpu")
    else:
        agent = DQN(
            "MlpPolicy", env, learning_rate=2.3e-3, batch_size=64, buffer_size=100_000, learning_starts=1000, gamma=0.99,
            target_update_interval=10, train_freq=256, gradient_steps=128, exploration_fraction=0.16,
            exploration_final_eps=0.04, policy_kwargs={"net_arch": [256, 256]}, seed=seed, device="cpu",
        )  # fmt: skip
    stop = StopTrainingOnRewardThreshold(reward_threshold=task.threshold, verbose=0)
    evaluation = EvalCallback(
        judge, callback_on_new_best=stop, n_eval_episodes=EPISODES, eval_freq=task.interval // num_envs, verbose=0
    )
    # The preset's exploration is a share of its own budget.
    agent.learn(50_000 if task.algo == "dqn" else task.limit, callback=evaluation)
    return {"frames": agent.num_timesteps, "reached": bool(evaluation.best_mean_reward >= task.threshold)}


SIDES = ("rltool", "stable-baselines3")


def measure(name: str, side: str, seed: int, *, cold: bool) -> dict[str, Any]:
    """A run in a process of its own, and its seconds."""
    with tempfile.TemporaryDirectory() as directory:
        cache = {"TORCHINDUCTOR_CACHE_DIR": f"{directory}/cache"} if cold else {}
        command = [sys.executable, __file__, "--one", name, side, str(seed), directory]
        begin = time.perf_counter()
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **cache})
        if done.returncode:
            sys.exit(f"{side} ended with exit code {done.returncode} on {name}, seed {seed}")
        seconds = time.perf_counter() - begin
    return {**json.loads(done.stdout.splitlines()[-1]), "seconds": seconds}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(5)))
    parser.add_argument("--cold", action="store_true", help="without compiled code from before")
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        name, side, seed, directory = arguments.one
        answer = (
            rltool(TASKS[name], int(seed), Path(directory)) if side == "rltool" else stable_baselines3(name, int(seed))
        )
        print(json.dumps(answer))
        return
    print("| task | side | reached | seconds, median (range) | frames, median (range) |\n|---|---|---|---|---|")
    for name in arguments.tasks:
        runs: dict[str, list[dict[str, Any]]] = {side: [] for side in arguments.sides}
        for seed in arguments.seeds:
            for side in arguments.sides:
                runs[side].append(measure(name, side, seed, cold=arguments.cold))
        for side, results in runs.items():
            cells = []
            for key in ("seconds", "frames"):
                values = [result[key] for result in results]
                cells.append(f"{statistics.median(values):,.0f} ({min(values):,.0f} to {max(values):,.0f})")
            reached = sum(result["reached"] for result in results)
            print(f"| {name} | {side} | {reached} of {len(results)} | {' | '.join(cells)} |", flush=True)
    print(f"\non {platform.platform()}, {os.cpu_count()} cores, Python {platform.python_version()}")


if __name__ == "__main__":
    main()

"""What bounds a run on this machine: matrix products of a gradient step at the core's peak, and importing the libraries.

    python benchmarks/limits.py

For the settings of benchmarks/speed.py: the time of one compiled gradient step, and the time that its matrix products
alone would take at the rate at which one core multiplies square matrices of the same width. Then what a simulator
costs without rltool; the seconds and the memory to import torch, and with it TensorDict and what rltool uses of TorchRL;
the seconds of ``rltool train`` to its first frame and of ``rltool --help``, and the memory of a run without compilation.
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
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from rltool.compiling import Compiler
from rltool.composition import compose
from rltool.config import load
from rltool.devices import quieten_libraries
from rltool.seeding import Stream, generator
from rltool.training import built

PPO = [
    "algo=ppo",
    "env=inverted_double_pendulum",
    "env.num_envs=8",
    "algo.frames_per_batch=2048",
    "network.hidden=[64,64]",
]
DQN = ["algo=dqn", "env=cartpole", "env.num_envs=8", "algo.frames_per_batch=256", "algo.learning_starts=512"]
SAC = ["algo=sac", "env=pendulum", "env.num_envs=8", "algo.frames_per_batch=64", "algo.warmup_frames=512"]
STEPS = {
    "PPO, nets 64-64, minibatch 64": [*PPO, "algo.minibatch_size=64"],
    "PPO, nets 64-64, minibatch 256": [*PPO, "algo.minibatch_size=256"],
    "DQN, nets 256-256, batch 64": [*DQN, "network.hidden=[256,256]", "algo.minibatch_size=64"],
    "DQN, nets 120-84, batch 128": [*DQN, "network.hidden=[120,84]", "algo.minibatch_size=128"],
    "SAC, nets 256-256, batch 256": [*SAC, "network.hidden=[256,256]", "algo.minibatch_size=256"],
}
IMPORTS = {
    "import torch": "import torch",
    "import torch, tensordict, torchrl's modules and losses": "import torch, tensordict, torchrl.modules, torchrl.objectives",
}
FIRST_FRAMES = """
import os, sys, time
from rltool import cli, collect

begin, directory = float(sys.argv[1]), sys.argv[2]

def first(self):
    print(time.time() - begin, flush=True)
    os._exit(0)

collect.Collector.collect = first
sys.exit(cli.main(["train", "algo=ppo", "env=inverted_double_pendulum", "quiet=true", "hydra.run.dir=" + directory]))
"""


class Products(TorchDispatchMode):
    """Counts the operations of matrix products by torch's own formulas (its FlopCounterMode minds TensorDict's modules)."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._overloadpacket in flop_registry:
            self.operations += flop_registry[func._overloadpacket](*args, **(kwargs or {}), out_val=result)
        return result


def best(call: Callable[[], object], repeats: int, rounds: int = 7) -> float:
    """Seconds of a call: the best mean of several rounds."""
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        for _ in range(repeats):
            call()
        times.append((time.perf_counter() - begin) / repeats)
    return min(times)


def peak(width: int, rows: int) -> float:
    """Floating-point operations a second of one core on ``[rows, width] @ [width, width]``."""
    left, right, out = torch.randn(rows, width), torch.randn(width, width), torch.empty(rows, width)
    return 2 * rows * width * width / best(lambda: torch.mm(left, right, out=out), 500)


def step(words: list[str]) -> tuple[float, float]:
    """Seconds of one compiled gradient step, and of its matrix products at the peak."""
    config = load(compose([*words, "tuned=none"]).tree)
    env: Any = config.env.build(seed=0)
    device = torch.device("cpu")
    algorithm: Any = built(config, env, device, budget=0, seed=0, compiler=Compiler(True, 0, str), note=str)
    taken: list[Any] = []
    compiled = algorithm._gradient

    def watched(*args: Any) -> Any:
        taken[:] = args
        return compiled(*args)

    algorithm._gradient = watched
    collector = env.collector(algorithm, total_frames=-1, generator=generator(0, Stream.POLICY), device=device)
    while not taken:
        algorithm.update(collector.collect(), collector.frames)
    env.close()
    with Products() as products:
        algorithm.gradient(*taken)
    network: Any = config.network
    at_peak = products.operations / peak(network.hidden[0], algorithm._config.minibatch_size)
    return best(lambda: compiled(*taken), 30), at_peak


def simulator(num_envs: int = 8, steps: int = 200) -> tuple[float, float]:
    """Microseconds of a step of one environment of several, restarts included, and of MuJoCo's part of it."""
    import mujoco

    envs = [gymnasium.make("InvertedDoublePendulum-v5") for _ in range(num_envs)]
    actions = np.clip(np.random.default_rng(0).standard_normal((steps, num_envs, 1)), -1, 1).astype(np.float32)

    def stepped() -> None:
        for row in actions:
            for env, action in zip(envs, row, strict=True):
                _, _, terminated, truncated, _ = env.step(action)
                if terminated or truncated:
                    env.reset()

    def simulated() -> None:
        for row in actions:
            for env, action in zip(envs, row, strict=True):
                inner: Any = env.unwrapped
                inner.data.ctrl[:] = action
                mujoco.mj_step(inner.model, inner.data, nstep=inner.frame_skip)

    for index, env in enumerate(envs):
        env.reset(seed=index)
    frames = num_envs * steps
    return best(stepped, 1) / frames * 1e6, best(simulated, 1) / frames * 1e6


def seconds(*command: str) -> float:
    """Median seconds of a process, of five."""
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def megabytes(*command: str) -> float:
    """Most resident memory of a process."""
    code = "import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL); "
    code += "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    done = subprocess.run([sys.executable, "-c", code, *command], check=True, capture_output=True, text=True)
    return int(done.stdout) / 1024


def memory() -> Iterator[tuple[str, float]]:
    """Most resident memory of importing the libraries, and of a run of some batches that compiles nothing."""
    for name, code in IMPORTS.items():
        yield name, megabytes(sys.executable, "-c", code)
    with tempfile.TemporaryDirectory() as directory:
        words = [
            *PPO,
            "tuned=none",
            "compile=false",
            "total_frames=20000",
            "quiet=true",
            f"hydra.run.dir={directory}/run",
        ]
        yield "PPO, not compiled", megabytes(sys.executable, "-m", "rltool", "train", *words)


def first_frames() -> float:
    """Median seconds from the command to the first frame that is collected."""
    times = []
    for _ in range(5):
        with tempfile.TemporaryDirectory() as directory:
            command = [sys.executable, "-c", FIRST_FRAMES, str(time.time()), f"{directory}/run"]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            times.append(float(done.stdout.splitlines()[0]))
    return statistics.median(times)


def main() -> None:
    """Command line."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    torch.set_num_threads(1)
    quieten_libraries()
    print("| gradient step | compiled | its matrix products at peak | share |\n|---|---|---|---|")
    for name, words in STEPS.items():
        spent, products = step(words)
        print(f"| {name} | {spent * 1e6:,.0f} µs | {products * 1e6:,.0f} µs | {products / spent:.0%} |", flush=True)
    print("\n| InvertedDoublePendulum-v5, 8 in a loop | µs a frame |\n|---|---|")
    for name, cost in zip(("env.step, and reset where an episode ended", "MuJoCo's part"), simulator(), strict=True):
        print(f"| {name} | {cost:,.0f} |")
    print("\n| | seconds |\n|---|---|")
    for name, code in IMPORTS.items():
        print(f"| {name} | {seconds(sys.executable, '-c', code):.2f} |", flush=True)
    print(f"| `rltool train …` to its first frame | {first_frames():.2f} |", flush=True)
    print(f"| `rltool --help` | {seconds(sys.executable, '-m', 'rltool', '--help'):.2f} |")
    print("\n| | most resident memory, MB |\n|---|---|")
    for name, most in memory():
        print(f"| {name} | {most:,.0f} |", flush=True)
    print(f"\non {platform.platform()}, {os.cpu_count()} cores, Python {platform.python_version()}")


if __name__ == "__main__":
    main()

"""Which settings run fastest on this machine: what ``rltool tune-speed`` tries, and what came out."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch

from rltool.compiling import Compiler
from rltool.devices import quieten_libraries, resolve_device
from rltool.errors import RltoolError
from rltool.schema import GymEnvConfig, ReplayedAlgoConfig, RunConfig
from rltool.seeding import Stream, draw_seed, generator, seed_world
from rltool.training import built, planned_updates
from rltool.trial import steps_per_second
from rltool.vectorized import usable_cores

if TYPE_CHECKING:
    from rltool.algos.base import Algorithm
    from rltool.collect import Collector
    from rltool.vectorized import GymVectorEnv

# Numbers of environments that are tried, as long as each is so much faster than the one before.
_NUM_ENVS, _FASTER = (1, 2, 4, 8, 16, 32, 64), 1.05
_BACKENDS = ("sync", "threads", "async", "envpool")


@dataclass(frozen=True)
class Rate:
    """How fast settings are.

    Attributes:
        overrides: the settings, by key.
        frames: frames a second of collecting and learning together.
        start: seconds that the first batch took longer than the others: compilation.
    """

    overrides: Mapping[str, object]
    frames: float
    start: float

    @property
    def words(self) -> str:
        """The settings as one types them."""
        return " ".join(
            f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in self.overrides.items()
        )


def tune(config: RunConfig, seconds: float, say: Callable[[str], object]) -> list[Rate]:
    """Tries numbers of environments and backends, then threads and compilation, and says each result as it comes.

    Args:
        config: what would be trained; its own settings are tried, too.
        seconds: how long each is tried (two batches at least).
        say: prints a line.

    Returns:
        What was tried of whole training loops: the present settings first, then from the fastest to the slowest.

    Raises:
        ConfigError, EnvironmentFault: the environment cannot be made, or fails.
    """
    quieten_libraries()
    config = config.model_copy(update={"seed": draw_seed() if config.seed is None else config.seed})
    present: dict[str, object] = {"threads": config.threads, "compile": _compiles(config)}
    if isinstance(config.env, GymEnvConfig):
        present = {"env.num_envs": config.env.num_envs, "env.backend": config.env.backend} | present
    with closing(_env(config)) as env:  # what is wrong with the words is said before anything is tried
        _built(config, env, _silent)
    envs = _fastest_envs(config, seconds, say)
    say("")
    say(f"{'the whole loop':<56}{'frames/s':>10}{'first batch':>14}")
    threads = sorted({1, usable_cores(), config.threads})
    tried: list[Rate] = []
    # Without a compiler there is nothing to compare with, which is said.
    compiled = (False, True) if Compiler(True, 0, say).enabled else (False,)
    others: list[dict[str, object]] = [
        *({**present, "compile": flag} for flag in compiled),
        *({**envs, "threads": count, "compile": flag} for flag in compiled for count in threads),
    ]
    for overrides in [present, *others]:
        if any(rate.overrides == overrides for rate in tried):
            continue
        rate = _loop(config, overrides, seconds, say)
        tried.append(rate)
        say(f"{rate.words:<56}{rate.frames:>10,.0f}{rate.start:>12,.1f} s")
    return [tried[0], *sorted(tried, key=lambda rate: -rate.frames)]


def _fastest_envs(config: RunConfig, seconds: float, say: Callable[[str], object]) -> dict[str, object]:
    """The number of environments and the backend with the most steps a second."""
    if not isinstance(config.env, GymEnvConfig) or config.env.transforms:
        say(
            f"environments are tried for Gymnasium's alone; this one stays as it is: env.num_envs={config.env.num_envs}"
        )
        return {}
    say(f"{'environments alone, random actions':<56}{'steps/s':>10}")
    speeds: dict[tuple[str, int], float] = {}
    for backend in _BACKENDS:
        if (usable_cores() == 1 and backend in ("threads", "async")) or (config.env.wrappers and backend == "envpool"):
            continue
        before = 0.0
        for num_envs in sorted({*_NUM_ENVS, config.env.num_envs}):
            changed = _with(config, {"env.num_envs": num_envs, "env.backend": backend})
            if any(True for _ in changed.problems()) or (num_envs == 1 and backend in ("threads", "async")):
                continue
            try:
                with closing(_env(changed)) as env:
                    speed = steps_per_second(env.actions, env.reset, env.step, seconds / 2)
            except RltoolError as error:
                say(f"{f'env.num_envs={num_envs} env.backend={backend}':<56}{'left out':>10}: {_first_line(error)}")
                break
            speeds[backend, num_envs] = speed
            say(f"{f'env.num_envs={num_envs} env.backend={backend}':<56}{speed:>10,.0f}")
            if speed < _FASTER * before:
                break
            before = speed
    if not speeds:
        say("none of these runs, so the environments stay as they are")
        return {}
    backend, num_envs = max(speeds, key=speeds.__getitem__)
    return {"env.num_envs": num_envs, "env.backend": backend}


def _loop(config: RunConfig, overrides: Mapping[str, object], seconds: float, say: Callable[[str], object]) -> Rate:
    """Collects and learns for so long, two batches at least, after a first one that is timed apart."""
    config = _hurried(_with(config, overrides))
    torch.set_num_threads(config.threads)
    seed_world(cast("int", config.seed))
    device = resolve_device(config.device)
    with closing(_env(config)) as env:
        algorithm = _built(config, env, lambda line: say(f"  {line}"))
        noise = generator(cast("int", config.seed), Stream.POLICY)
        collector = env.collector(algorithm, total_frames=-1, generator=noise, device=device)
        while algorithm.counters.updates == 0:
            first = _batch(collector, algorithm)
        _batch(collector, algorithm)  # another signature of the policy's arguments may have come
        begin, frames, batches = time.perf_counter(), collector.frames, 0
        while batches < 2 or time.perf_counter() - begin < seconds:
            _batch(collector, algorithm)
            batches += 1
        spent = time.perf_counter() - begin
    return Rate(overrides, (collector.frames - frames) / spent, max(first - spent / batches, 0.0))


def _built(config: RunConfig, env: GymVectorEnv, note: Callable[[str], object]) -> Algorithm:
    """The algorithm as a run would build it; what compiles is noted."""
    device, compiler = resolve_device(config.device), Compiler(config.compile, 0, note)
    return built(config, env, device, budget=0, seed=cast("int", config.seed), compiler=compiler, note=_silent)


def _first_line(error: RltoolError) -> str:
    return str(error).partition("\n")[0]


def _batch(collector: Collector, algorithm: Algorithm) -> float:
    """Seconds of a batch, collected and learned from."""
    begin = time.perf_counter()
    batch = collector.collect()
    algorithm.update(batch, collector.frames)
    return time.perf_counter() - begin


def _env(config: RunConfig) -> GymVectorEnv:
    return cast("GymVectorEnv", config.env.build(seed=cast("int", config.seed)))


def _with(config: RunConfig, overrides: Mapping[str, object]) -> RunConfig:
    """The configuration with other values: of the run, or of a group (``env.num_envs``)."""
    changes: dict[str, Any] = {}
    for key, value in overrides.items():
        group, _, name = key.rpartition(".")
        if group:
            changes[group] = changes.get(group, getattr(config, group)).model_copy(update={name: value})
        else:
            changes[name] = value
    return config.model_copy(update=changes)


def _hurried(config: RunConfig) -> RunConfig:
    """The same with as little as possible before the first gradient step."""
    algo, batch = config.algo, config.algo.batch_frames(config.env.num_envs)
    changes: dict[str, object] = {"warmup_frames": min(algo.warmup_frames, batch)}
    if isinstance(algo, ReplayedAlgoConfig):
        changes["warmup_frames"] = min(algo.warmup_frames, max(batch, algo.minibatch_size))
        if hasattr(algo, "learning_starts"):
            changes["learning_starts"] = min(algo.learning_starts, max(batch, algo.minibatch_size))
    return config.model_copy(update={"algo": algo.model_copy(update=changes)})


def _silent(line: str) -> None:
    del line


def _compiles(config: RunConfig) -> bool:
    """Whether a run as configured would compile."""
    return Compiler(config.compile, planned_updates(config), _silent).enabled

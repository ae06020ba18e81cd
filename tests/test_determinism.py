"""The same seed gives the same run again, with every backend; seeds of environments are never used twice."""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from probes import gym_config, run
from test_training import points, same, tensors

from rltool.determinism import Determinism
from rltool.seeding import Stream, seed_world, seeds
from rltool.spaces import OBSERVATION
from rltool.vectorized import GymVectorEnv

CPU = torch.device("cpu")
REPEATS = {"seed": True, "environments": True, "learning": True, "reasons": {}}


@pytest.mark.long
def test_every_backend_gives_the_same_run_each_time(tmp_path: Path) -> None:
    runs = []
    for number, backend in enumerate(("sync", "threads", "threads", "async", "async")):
        runs.append(tmp_path / f"{number}")
        words = ("seed=4", "total_frames=96", "env.num_envs=3", f"env.backend={backend}")
        assert run(runs[-1], "ppo", *words)["deterministic"] == REPEATS
    assert any("train/loss" in point for point in points(runs[0]))
    for directory in runs[1:]:
        assert points(directory) == points(runs[0])
        assert same(tensors(directory), tensors(runs[0]))


def test_workers_sessions_evaluation_and_neighbouring_runs_share_no_seed() -> None:
    """A hundred runs: 160 environments (or 32 in each of five sessions), evaluations of 100 episodes while training and
    after it. (Of numbers of 31 bits, n drawn at random hold about n²/2³² equal pairs: 7 in 250,000.)"""
    counts = {Stream.TRAIN_ENV: 160, Stream.EVAL_ENV: 100, Stream.TEST_ENV: 100}
    used = Counter(
        number for seed in range(100) for stream, count in counts.items() for number in seeds(seed, stream, count)
    )
    assert used.total() == len(used) == 100 * 360


def test_streams_of_a_run_and_of_its_neighbours_begin_at_different_places() -> None:
    first = [seeds(seed, stream, 1)[0] for seed in range(100) for stream in Stream]
    assert len(set(first)) == len(first) == 100 * len(Stream)


def test_a_later_part_of_a_stream_goes_on_where_an_earlier_one_ended() -> None:
    whole = seeds(3, Stream.TRAIN_ENV, 12)
    assert whole == [number for start in (0, 4, 8) for number in seeds(3, Stream.TRAIN_ENV, 4, start=start)]


def rows(backend: str, seed: int, steps: int = 6) -> list[list[float]]:
    """What four environments that draw from NumPy's global generator observe, one list each."""
    seed_world(seed)
    config = gym_config(num_envs=4, backend=backend, obs="world")
    with closing(GymVectorEnv(config, seed=seed)) as env:
        seen = [env.reset()[OBSERVATION].copy()]
        seen += [env.step(np.zeros(4, np.int64)).observation[OBSERVATION].copy() for _ in range(steps)]
    return [[float(value) for value in column] for column in np.stack(seen)[..., 0].T]


def test_workers_that_draw_from_the_global_generator_differ_and_repeat() -> None:
    """Also after the ends of episodes, which come every three steps."""
    once, again, other = rows("async", 0), rows("async", 0), rows("async", 1)
    assert once == again
    values = [value for column in [*once, *other] for value in column]
    assert len(set(values)) == len(values) == 2 * 4 * 7


@pytest.mark.parametrize(("backend", "repeats"), [("sync", True), ("async", True), ("threads", False)])
def test_a_run_says_whether_its_environments_repeat(tmp_path: Path, backend: str, repeats: bool) -> None:
    words = ("env=gym", "env.id=Probe-v0", "env.kwargs={obs: world}", "total_frames=64", "seed=1")
    found: Any = run(tmp_path, "ppo", *words, f"env.backend={backend}")["deterministic"]
    assert (found["seed"], found["environments"], found["learning"]) == (True, repeats, True)
    assert ("in no fixed order" in found["reasons"].get("environments", "")) is not repeats


def test_a_drawn_seed_and_a_gpu_are_named() -> None:
    watched = Determinism(None, "auto", torch.device("cuda", 0))
    found: Any = watched.summary(17)
    assert found["reasons"] == {
        "seed": "it was drawn; seed=17 repeats the run",
        "learning": "on cuda, sums are added up in no fixed order",
    }
    np.random.random()
    found = watched.summary(17)
    assert not any(found[part] for part in ("seed", "environments", "learning"))
    assert "env.backend=auto chose by speed" in found["reasons"]["environments"]
    assert Determinism(3, "sync", CPU).summary(3) == REPEATS

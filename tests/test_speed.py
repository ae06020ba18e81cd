"""What decides how fast a run is: environments in this process, the choice of a backend, ``rltool tune-speed``."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from builders import run_config
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from probes import gym_config

from rltool import cli, compiling, speed, vectorized
from rltool.contract import EnvContract
from rltool.errors import EnvironmentFault
from rltool.local import LocalVectorEnv, ThreadedVectorEnv
from rltool.recording import Clock
from rltool.spaces import OBSERVATION
from rltool.vectorized import GymVectorEnv

ENDS = {"CartPole-v1": None, "Pendulum-v1": 7}


def factories(env_id: str, count: int) -> list[Callable[[], EnvContract]]:
    def make(index: int) -> EnvContract:
        return EnvContract(gymnasium.make(env_id, max_episode_steps=ENDS[env_id]), env_id, index)

    return [partial(make, index) for index in range(count)]


@pytest.mark.parametrize("env_id", ENDS)
@pytest.mark.parametrize("make", [LocalVectorEnv, partial(ThreadedVectorEnv, threads=2)], ids=["local", "threads"])
def test_environments_in_this_process_step_as_gymnasiums_own(
    env_id: str, make: Callable[..., LocalVectorEnv | ThreadedVectorEnv]
) -> None:
    env = make(factories(env_id, 3))
    reference = SyncVectorEnv(
        [partial(gymnasium.make, env_id, max_episode_steps=ENDS[env_id])] * 3, autoreset_mode=AutoresetMode.SAME_STEP
    )
    reference.action_space.seed(0)
    expected, _ = reference.reset(seed=[5, 6, 7])
    np.testing.assert_array_equal(env.reset([5, 6, 7])[OBSERVATION], expected)
    ended = 0
    for _ in range(60):
        action = reference.action_space.sample()
        expected, reward, terminated, truncated, info = reference.step(action)
        step = env.step(action)
        np.testing.assert_array_equal(step.observation[OBSERVATION], expected)
        np.testing.assert_array_equal(step.reward, reward)
        np.testing.assert_array_equal(step.terminated, terminated)
        np.testing.assert_array_equal(step.truncated, truncated)
        assert [index for index, _ in step.final] == np.flatnonzero(terminated | truncated).tolist()
        for index, leaves in step.final:
            np.testing.assert_array_equal(leaves[OBSERVATION], info["final_obs"][index])
        ended += len(step.final)
    assert ended > 3
    env.close()


def test_an_environment_that_cannot_be_made_leaves_none_open() -> None:
    class Open(gymnasium.Wrapper):  # type: ignore[type-arg]
        closed = 0

        def close(self) -> None:
            Open.closed += 1

    def broken() -> EnvContract:
        raise EnvironmentFault("no")

    def sound() -> EnvContract:
        return EnvContract(Open(gymnasium.make("CartPole-v1")), "CartPole-v1", 0)

    for threads in (1, 2):
        with pytest.raises(EnvironmentFault, match="no"):
            ThreadedVectorEnv([sound, sound, broken], threads)
    assert Open.closed == 4


# ------------------------------------------------------------------------------------------------- env.backend=auto


@pytest.fixture
def auto(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., GymVectorEnv]]:
    """Makes three probes with ``env.backend=auto`` where the backends have these speeds, on so many cores."""
    made: list[GymVectorEnv] = []

    def make(speeds: dict[str, float], *, cores: int = 2, num_envs: int = 3) -> GymVectorEnv:
        monkeypatch.setattr(vectorized, "usable_cores", lambda: cores)
        monkeypatch.setattr(GymVectorEnv, "_tried", lambda self, backend: speeds[backend])
        made.append(GymVectorEnv(gym_config(num_envs=num_envs, backend="auto"), seed=0))
        return made[-1]

    yield make
    for env in made:
        env.close()


@pytest.mark.parametrize(
    ("speeds", "chosen", "reason"),
    [
        ({"sync": 20_000, "threads": 21_000}, "sync", "sync 20,000, threads 21,000 steps/s"),
        ({"sync": 20_000, "threads": 24_000}, "threads", "sync 20,000, threads 24,000 steps/s"),
        ({"sync": 500, "threads": 450, "async": 950}, "async", "sync 500, threads 450, async 950 steps/s"),
    ],
)
def test_auto_takes_the_fastest_backend_that_is_well_ahead(
    auto: Callable[..., GymVectorEnv], speeds: dict[str, float], chosen: str, reason: str
) -> None:
    env = auto(speeds)
    assert env.resolved_config.backend == chosen  # type: ignore[attr-defined]
    assert ("backend", f"{chosen} (auto: {reason})") in env.remarks


@pytest.mark.parametrize(
    ("cores", "num_envs", "reason"), [(1, 3, "there is one core to use"), (2, 1, "there is one environment")]
)
def test_auto_tries_nothing_where_there_is_nothing_to_choose(
    auto: Callable[..., GymVectorEnv], cores: int, num_envs: int, reason: str
) -> None:
    env = auto({}, cores=cores, num_envs=num_envs)
    assert ("backend", f"sync (auto: {reason})") in env.remarks


def test_auto_leaves_out_a_backend_that_the_environment_does_not_bear(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(vectorized, "usable_cores", lambda: 2)
    monkeypatch.setattr(vectorized, "_TRIAL_SECONDS", 0.005)
    monkeypatch.setattr(vectorized, "_WORTH_A_PROCESS", 1e-12)  # processes are tried, too
    tried = GymVectorEnv._tried

    def bears(self: GymVectorEnv, backend: str) -> float:
        if backend != "sync":
            raise EnvironmentFault("environment 1 (Probe-v0, Probe): step 1 raised RuntimeError: not here")
        return tried(self, backend)

    monkeypatch.setattr(GymVectorEnv, "_tried", bears)
    env = GymVectorEnv(gym_config(num_envs=2, backend="auto"), seed=0)
    env.close()
    said = [text for name, text in env.remarks if name == "backend"]
    assert said[0].startswith("sync (auto: sync ")
    assert said[1:] == [
        f"{backend} is left out: environment 1 (Probe-v0, Probe): step 1 raised RuntimeError: not here"
        for backend in ("threads", "async")
    ]


def test_a_trial_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in what is learned from nor in the global random numbers."""
    monkeypatch.setattr(vectorized, "usable_cores", lambda: 2)
    monkeypatch.setattr(vectorized, "_TRIAL_SECONDS", 0.005)
    monkeypatch.setattr(vectorized, "_WORTH_A_PROCESS", 10.0)  # steps of ten seconds: no processes
    drawn = []
    for backend in ("sync", "auto"):
        random.seed(3)
        np.random.seed(3)
        env = GymVectorEnv(gym_config(num_envs=2, backend=backend, obs="noise", reward="drawn"), seed=0)
        observation = env.reset()[OBSERVATION].copy()
        step = env.step(np.zeros(2, np.int64))
        drawn.append((observation, step.reward.copy(), random.random(), np.random.random()))
        env.close()
    for plain, tried in zip(*drawn, strict=True):
        np.testing.assert_array_equal(plain, tried)


# ------------------------------------------------------------------------------------------------- rltool tune-speed


@pytest.mark.long
def test_tune_speed_prints_settings_that_can_be_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(speed, "_NUM_ENVS", (1, 2))
    monkeypatch.setattr(speed, "_BACKENDS", ("sync", "threads"))
    monkeypatch.setattr(speed, "usable_cores", lambda: 2)
    monkeypatch.setattr(compiling, "_missing_tools", lambda: "the test has no compiler")
    words = ["algo=ppo", "env=cartpole", "tuned=none", "env.num_envs=4", "network.hidden=[8]", "algo.epochs=1"]
    words += ["algo.frames_per_batch=64", "algo.minibatch_size=32", "total_frames=1000"]
    assert cli.main(["tune-speed", *words, "--seconds", "0.01"]) == 0
    lines = capsys.readouterr().out.splitlines()
    tried = [line.split()[:2] for line in lines if line.startswith("env.num_envs=")]
    assert ["env.num_envs=1", "env.backend=sync"] in tried
    assert ["env.num_envs=2", "env.backend=threads"] in tried
    (now,) = (line for line in lines if line.startswith("now "))
    assert "env.num_envs=4 env.backend=sync threads=1 compile=false" in now
    (fastest,) = (line for line in lines if line.startswith("fastest "))
    settings = fastest.split("frames/s")[1].split()
    assert cli.main(["config", "algo=ppo", "env=cartpole", *settings]) == 0
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("seconds", ["x", "0", "-1", "nan", "inf"])
def test_seconds_that_are_none_are_refused(capsys: pytest.CaptureFixture[str], seconds: str) -> None:
    assert cli.main(["tune-speed", "algo=ppo", "env=cartpole", f"--seconds={seconds}"]) == 2
    assert f"expected seconds, such as 2 or 0.5, found '{seconds}'" in capsys.readouterr().err


@pytest.mark.parametrize("count", [0, 2])
def test_tune_speed_goes_on_without_what_an_environment_does_not_bear(
    monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """A licence for so many environments, say."""
    monkeypatch.setattr(speed, "_NUM_ENVS", (1, 2, 4))
    monkeypatch.setattr(speed, "_FASTER", 0.0)
    monkeypatch.setattr(speed, "_BACKENDS", ("sync",))
    monkeypatch.setattr(compiling, "_missing_tools", lambda: "the test has no compiler")
    made = speed._env

    def licensed(config: Any) -> Any:
        if config.env.num_envs > count and config.env.num_envs != 3:
            raise EnvironmentFault("4 environments are too many\nin all")
        return made(config)

    monkeypatch.setattr(speed, "_env", licensed)
    lines: list[str] = []
    words = [
        "env.num_envs=3",
        "network.hidden=[8]",
        "algo.epochs=1",
        "algo.frames_per_batch=64",
        "algo.minibatch_size=32",
    ]
    best = speed.tune(run_config("algo=ppo", "total_frames=1000", "compile=false", *words), 0.01, lines.append)
    first = {0: "env.num_envs=1", 2: "env.num_envs=4"}[count]
    assert any(line.startswith(first) and "left out: 4 environments are too many" in line for line in lines)
    assert ("none of these runs, so the environments stay as they are" in lines) == (count == 0)
    assert any("the test has no compiler" in line for line in lines)
    assert best[0].frames > 0


def test_tune_speed_says_what_is_wrong_before_it_tries_anything(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tune-speed", "algo=sac", "env=cartpole"]) == 2
    assert cli.main(["tune-speed", "algo=ppo", "env=cartpole", "init=some.ckpt"]) == 2
    answer = capsys.readouterr()
    assert "steps/s" not in answer.out
    assert "init: weights make no difference to speed" in answer.err


def test_tune_speed_refuses_to_try_a_run_that_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tune-speed", "resume=runs/x"]) == 2
    error = capsys.readouterr().err
    assert "resume: tune-speed tries a run that would start, found resume=runs/x" in error
    assert "overrides.txt" in error


# ------------------------------------------------------------------------------------------------- where time goes


def test_the_clock_tells_shares_of_an_interval_and_of_the_whole() -> None:
    times = iter([0.0, 6.0, 9.0, 9.01, 10.01, 13.01])
    clock = Clock(lambda: next(times))
    for part in ("collect", "update", "log"):
        clock.lap(part)
    assert clock.shares()["time/collect_share"] == pytest.approx(6 / 9.01)
    clock.lap("collect")
    clock.lap("evaluate")
    assert clock.shares() == pytest.approx({"time/collect_share": 0.25, "time/evaluate_share": 0.75})
    assert clock.in_words() == "collect 54%, update 23%, evaluate 23%"

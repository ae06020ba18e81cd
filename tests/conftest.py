"""Fixtures that several test files share. They import torch themselves: tests without them start fast."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from fakes import Rltool

    from rltool.evaluation import Evaluator
    from rltool.vectorized import GymVectorEnv

# As a run does it: small networks gain nothing from a second thread, and lose much where another process has the core.
os.environ["OMP_NUM_THREADS"] = "1"
# A shell ignores SIGINT in what it starts in the background, and so would all processes that tests send it to.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def state_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the secret of these tests lies: never the user's own."""
    directory = tmp_path_factory.mktemp("state")
    os.environ["XDG_STATE_HOME"] = str(directory)
    return directory


@pytest.fixture(autouse=True)
def unrehearsed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep that a test plans in its own process builds no job beforehand: that takes a process with torch in it."""
    if "rehearsed" not in request.keywords:
        monkeypatch.setattr("rltool.sweeps.rehearsal._built", lambda kinds: [])


@pytest.fixture
def vector() -> Iterator[Callable[..., GymVectorEnv]]:
    """Makes vectorised environments, by default of probes, and closes them."""
    from probes import gym_config

    from rltool.vectorized import GymVectorEnv

    with ExitStack() as stack:

        def make(env_id: str = "Probe-v0", *, seed: int = 0, session: int = 0, **changes: object) -> GymVectorEnv:
            config = gym_config(env_id, **changes)  # type: ignore[arg-type]
            return stack.enter_context(closing(GymVectorEnv(config, seed=seed, session=session)))

        yield make


@pytest.fixture
def evaluator() -> Iterator[Callable[..., Evaluator]]:
    """Makes evaluators, by default of probes, and closes them."""
    import torch
    from probes import gym_config

    from rltool.evaluation import Evaluator

    with ExitStack() as stack:

        def make(env_id: str = "Probe-v0", *, num_envs: int = 1, **changes: object) -> Evaluator:
            config = gym_config(env_id, **changes)  # type: ignore[arg-type]
            return stack.enter_context(closing(Evaluator(config, num_envs=num_envs, device=torch.device("cpu"))))

        yield make


@pytest.fixture(scope="session")
def ppo_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a finished run: PPO on Pendulum (continuous actions), with a normaliser and evaluations."""
    from probes import run

    directory = tmp_path_factory.mktemp("ppo")
    run(
        directory,
        "ppo",
        "env=pendulum",
        "total_frames=352",
        "eval=default",
        "eval.interval=200",
        "eval.max_steps=30",
        "save.interval=100",
        "save.keep=2",
    )
    return directory


@pytest.fixture(scope="session")
def sac_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a finished run: SAC on Pendulum, 400 frames, a checkpoint every 100 of which two are kept."""
    from probes import run

    directory = tmp_path_factory.mktemp("sac")
    words = ("total_frames=400", "eval.max_steps=30", "save.interval=100", "save.keep=2", "optim.schedule=linear")
    run(directory, "sac", *words)
    return directory


@pytest.fixture(scope="session")
def dqn_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a finished run: DQN on CartPole, 400 frames, a checkpoint every 100 of which two are kept."""
    from probes import run

    directory = tmp_path_factory.mktemp("dqn")
    run(directory, "dqn", "total_frames=400", "save.interval=100", "save.keep=2", "optim.schedule=linear")
    return directory


@pytest.fixture
def rltool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Rltool:
    """``rltool WORDS`` in an empty directory, at 80 columns: exit code, output, errors."""
    from rltool import cli

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")

    def call(*words: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = cli.main(words)
        return (code, *capsys.readouterr())

    return call

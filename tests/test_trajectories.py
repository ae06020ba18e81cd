"""The steps of evaluated episodes in a file: every one of them, in the order of the seeds, whole at every moment."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from probes import Rule

from rltool import trajectories
from rltool.envs import single_env
from rltool.errors import ConfigError, RltoolError
from rltool.evaluation import EvalReport, Evaluator
from rltool.seeding import Stream, seeds
from rltool.trajectories import Trajectories

MakeEvaluator = Callable[..., Evaluator]


def kept(
    made: Evaluator, path: Path, *, episodes: int = 5, max_steps: int = 50
) -> tuple[EvalReport, dict[str, np.ndarray[Any, Any]]]:
    """The report of an evaluation, and what its file holds."""
    with Trajectories(path, made.leaves, made.actions) as file:
        report = made(Rule(made.actions), episodes=episodes, seed=3, max_steps=max_steps, trajectories=file)
        file.write({"env": made.id})
    with np.load(path) as archive:
        return report, dict(archive)


@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize("waiting", [0, 40, 10**9])
def test_every_step_is_in_the_file(
    evaluator: MakeEvaluator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_envs: int, waiting: int
) -> None:
    monkeypatch.setattr(trajectories, "_WAITING", waiting)
    report, data = kept(evaluator("CartPole-v1", num_envs=num_envs), tmp_path / "kept.npz")
    assert json.loads(str(data["metadata"])) == {"env": "CartPole-v1"}
    assert data["seeds"].tolist() == seeds(3, Stream.EVAL_ENV, 5)
    assert data["lengths"].tolist() == report.lengths
    assert data["returns"].tolist() == report.returns
    assert {name: str(data[name].dtype) for name in ("observations", "actions", "rewards", "terminations")} == {
        "observations": "float32",
        "actions": "int64",
        "rewards": "float64",
        "terminations": "bool",
    }
    env: Any = single_env(evaluator_config(), 0)
    for episode, (seed, start, length) in enumerate(zip(data["seeds"], data["starts"], data["lengths"], strict=True)):
        observations = data["observations"][start + episode : start + episode + length + 1]
        expected = [env.reset(seed=int(seed))[0]]
        for step in range(start, start + length):
            observation, reward, terminated, truncated, _ = env.step(data["actions"][step])
            expected.append(observation)
            assert (data["rewards"][step], data["terminations"][step], data["truncations"][step]) == (
                reward,
                terminated,
                truncated,
            )
        np.testing.assert_array_equal(observations, np.stack(expected))
    assert len(data["observations"]) == sum(report.lengths) + 5
    assert list(tmp_path.iterdir()) == [tmp_path / "kept.npz"]


def evaluator_config() -> Any:
    from probes import gym_config

    return gym_config("CartPole-v1")


def test_nested_observations_and_masks_have_an_array_each(evaluator: MakeEvaluator, tmp_path: Path) -> None:
    made = evaluator(obs="dict", mask="info", num_envs=2)
    with Trajectories(tmp_path / "kept.npz", made.leaves, made.actions) as file:
        made(Rule(made.actions, valid), episodes=2, seed=0, max_steps=9, trajectories=file)
        file.write({})
    with np.load(tmp_path / "kept.npz") as data:
        shapes = {name: data[name].shape for name in data.files if name.startswith(("obs", "action"))}
        assert shapes == {
            "observations.a.b": (8, 2),
            "observations.a_b": (8, 2),
            "observations.c": (8,),
            "action_masks": (8, 2),
            "actions": (6,),
        }
        np.testing.assert_array_equal(data["observations.a_b"][:, 0], [0, 1, 2, 3] * 2)
        for step, action in enumerate(data["actions"]):
            assert data["action_masks"][step + step // 3, action]


def valid(leaves: Any) -> Any:
    return leaves["action_mask",].long().argmax(-1)


def test_a_cut_episode_is_truncated_at_its_last_step(evaluator: MakeEvaluator, tmp_path: Path) -> None:
    _, data = kept(evaluator(n=None), tmp_path / "kept.npz", episodes=2, max_steps=3)
    assert data["truncations"].tolist() == [False, False, True] * 2
    assert not data["terminations"].any()
    _, data = kept(evaluator(n=3, end="term"), tmp_path / "kept.npz", episodes=1, max_steps=3)
    assert (data["terminations"].tolist(), data["truncations"].any()) == ([False, False, True], False)


def test_what_was_there_stays_until_the_new_file_is_whole(
    evaluator: MakeEvaluator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "kept.npz"
    path.write_bytes(b"before")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Trajectories, "_copy", full)
    with pytest.raises(RltoolError, match=r"cannot write .*kept\.npz: No space left on device"):
        kept(evaluator(), path)
    assert (path.read_bytes(), list(tmp_path.iterdir())) == (b"before", [path])
    with pytest.raises(ConfigError, match=r"^trajectories: cannot write"):
        kept(evaluator(), tmp_path / "nowhere/kept.npz")

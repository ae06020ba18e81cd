"""Evaluation: fixed episodes, frozen statistics, nobody's random numbers but its own."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from probes import ALGORITHMS, Rule
from torch import Tensor

from rltool.config import load_node
from rltool.errors import ConfigError, NonFiniteError
from rltool.evaluation import EvalReport, Evaluator, Limit, Stopped, evaluate_checkpoint
from rltool.policy import load_policy
from rltool.schema import EvalRunConfig
from rltool.seeding import Stream, seeds

OBS = ("observation",)
MakeEvaluator = Callable[..., Evaluator]


def lean(leaves: Mapping[tuple[str, ...], Tensor]) -> Tensor:
    return (leaves[OBS][:, 2] > 0).long()


def evaluate(
    evaluator: Evaluator, *, episodes: int = 8, seed: int = 0, max_steps: int = 100, act: object = None
) -> EvalReport:
    rule = Rule(evaluator.actions, act)  # type: ignore[arg-type]
    return evaluator(rule, episodes=episodes, seed=seed, max_steps=max_steps)


def eval_config(checkpoint: Path, **changes: object) -> EvalRunConfig:
    values: dict[str, object] = {
        "checkpoint": str(checkpoint),
        "episodes": 3,
        "deterministic": True,
        "seed": 0,
        "device": "cpu",
        "num_envs": 2,
        "max_steps": 20,
        "render": False,
        "video": False,
        "video_format": "mp4",
        "video_dir": None,
        "out": None,
        "trajectories": None,
        "plugins": [],
        "quiet": True,
        "debug": False,
        "env": {},
    }
    return EvalRunConfig.model_validate(values | changes)


def test_the_report_says_what_its_returns_say(evaluator: MakeEvaluator) -> None:
    report = evaluate(evaluator("Goal-v0", reward="drawn", n=2, num_envs=3), episodes=9)
    returns = np.array(report.returns)
    starts = [2 * np.random.default_rng(seed).integers(10) for seed in seeds(0, Stream.EVAL_ENV, 9)]
    np.testing.assert_array_equal(returns, starts)
    assert len(set(starts)) > 3
    assert report.lengths == [2] * 9
    assert (report.mean, report.std) == (returns.mean(), returns.std(ddof=1))
    assert (report.median, report.min, report.max) == (np.median(returns), returns.min(), returns.max())
    assert report.iqm == np.sort(returns)[2:7].mean()
    assert report.ci_low < report.mean < report.ci_high
    assert (report.success_rate, report.threshold) == ((returns >= 5).mean(), 5.0)
    assert (report.episodes, report.cut, report.deterministic, report.seed, report.env) == (9, 0, True, 0, "Goal-v0")


def test_without_a_threshold_there_is_no_success(evaluator: MakeEvaluator) -> None:
    report = evaluate(evaluator(reward="t"), episodes=1)
    assert (report.returns, report.std, report.success_rate, report.threshold) == ([6.0], 0.0, None, None)


@pytest.mark.parametrize("num_envs", [1, 2, 5, 9])
def test_the_seed_fixes_the_episodes_whichever_environment_runs_them(evaluator: MakeEvaluator, num_envs: int) -> None:
    alone = evaluate(evaluator("CartPole-v1"), episodes=5, act=lean)
    together = evaluate(evaluator("CartPole-v1", num_envs=num_envs), episodes=5, act=lean)
    assert len(set(alone.returns)) > 1
    assert (together.returns, together.lengths) == (alone.returns, alone.lengths)


@pytest.mark.parametrize(
    ("steps", "at_least", "episodes"),
    [(1, 0, 1), (6, 0, 2), (7, 0, 3), (6, 4, 4), (10**9, 0, 8)],
)
def test_no_episode_begins_after_the_steps_that_may_be_made(
    evaluator: MakeEvaluator, steps: int, at_least: int, episodes: int
) -> None:
    made = evaluator("Goal-v0", reward="drawn")  # episodes of three steps
    limit = Limit(steps, at_least, lambda: False)
    whole = evaluate(made)
    report = made(Rule(made.actions, None), episodes=8, seed=0, max_steps=100, limit=limit)
    assert (report.episodes, report.returns) == (episodes, whole.returns[:episodes])
    assert report.mean == np.mean(whole.returns[:episodes])


def test_an_evaluation_can_be_stopped(evaluator: MakeEvaluator) -> None:
    made = evaluator(n=None)
    calls = iter([False, False, True])
    with pytest.raises(Stopped):
        made(Rule(made.actions, None), episodes=1, seed=0, max_steps=100, limit=Limit(9, 1, lambda: next(calls)))
    assert evaluate(made, episodes=1, max_steps=5).lengths == [5]


def test_more_episodes_begin_with_the_same_ones(evaluator: MakeEvaluator) -> None:
    made = evaluator("CartPole-v1", num_envs=3)
    assert evaluate(made, episodes=9, act=lean).returns[:4] == evaluate(made, episodes=4, act=lean).returns


def test_another_seed_gives_other_episodes(evaluator: MakeEvaluator) -> None:
    made = evaluator("CartPole-v1")
    assert evaluate(made, seed=0, act=lean).returns != evaluate(made, seed=1, act=lean).returns


def test_no_episode_of_training_evaluation_or_test_begins_alike() -> None:
    streams = (Stream.TRAIN_ENV, Stream.EVAL_ENV, Stream.TEST_ENV)
    drawn = [value for seed in range(3) for stream in streams for value in seeds(seed, stream, 200)]
    assert len(set(drawn)) == len(drawn)


def test_an_episode_without_an_end_is_cut_and_said(evaluator: MakeEvaluator) -> None:
    report = evaluate(evaluator(n=None, num_envs=2), episodes=3, max_steps=7)
    assert (report.cut, report.max_steps, report.lengths, report.returns) == (3, 7, [7] * 3, [7.0] * 3)


def test_an_episode_that_ends_at_the_last_step_is_not_cut(evaluator: MakeEvaluator) -> None:
    assert evaluate(evaluator(n=7), episodes=2, max_steps=7).cut == 0


@pytest.mark.parametrize("obs", ["dict", "tuple", "discrete", "scalar"])
def test_observations_of_every_kind(evaluator: MakeEvaluator, obs: str) -> None:
    assert evaluate(evaluator(obs=obs, num_envs=2), episodes=3).returns == [3.0] * 3


def test_a_return_that_is_no_number_is_an_error(evaluator: MakeEvaluator) -> None:
    with pytest.raises(NonFiniteError, match=r"return of evaluation episode 0 on Probe-v0 is nan"):
        evaluate(evaluator(fault="reward NaN", at=2), episodes=2)
    with pytest.raises(NonFiniteError, match=r"observation of evaluation episode 0 on Probe-v0 is NaN or infinite"):
        evaluate(evaluator(fault="observation NaN", at=2), episodes=2)


def worlds() -> tuple[object, ...]:
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # type: ignore[index]


@pytest.mark.parametrize("obs", ["const", "world"])
def test_global_generators_are_neither_used_nor_moved(evaluator: MakeEvaluator, obs: str) -> None:
    def follow(leaves: Mapping[tuple[str, ...], Tensor]) -> Tensor:
        heard.append(float(leaves[OBS][0, 0]))
        return torch.zeros(1, dtype=torch.int64)

    made = evaluator(obs=obs)
    results = []
    for seed in (1, 2):
        heard: list[float] = []
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        before = worlds()
        results.append((evaluate(made, act=follow), heard))
        assert worlds() == before
    assert results[0] == results[1]
    assert len(heard) == 24


@pytest.mark.parametrize("algo", ALGORITHMS)
@pytest.mark.parametrize("deterministic", [True, False])
def test_a_checkpoint_s_report_repeats_to_the_last_digit(
    request: pytest.FixtureRequest, algo: str, deterministic: bool
) -> None:
    config = eval_config(request.getfixturevalue(f"{algo}_run") / "checkpoints/last.ckpt", deterministic=deterministic)
    report = evaluate_checkpoint(config)
    torch.manual_seed(1234)
    assert evaluate_checkpoint(config) == report
    assert report.deterministic == deterministic
    other = evaluate_checkpoint(config.model_copy(update={"deterministic": not deterministic}))
    assert other.returns != report.returns


def test_evaluation_changes_neither_statistics_nor_the_file(ppo_run: Path) -> None:
    file = ppo_run / "checkpoints/last.ckpt"
    before = file.read_bytes()
    loaded = load_policy(file)
    modules = {name: loaded.algorithm.components()[name].state_dict() for name in ("policy", "normalizer")}
    kept = {(part, name): value.clone() for part, state in modules.items() for name, value in state.items()}
    assert float(kept["normalizer", "observation.count"]) == 352

    with closing(Evaluator(load_node("env", loaded.env_node), num_envs=2, device=torch.device("cpu"))) as made:
        made(loaded.algorithm, episodes=2, seed=0, max_steps=20)
    for part, name in kept:
        assert torch.equal(loaded.algorithm.components()[part].state_dict()[name], kept[part, name])
    evaluate_checkpoint(eval_config(file))
    assert file.read_bytes() == before


def test_a_checkpoint_names_itself_and_takes_its_own_limit(ppo_run: Path) -> None:
    report = evaluate_checkpoint(eval_config(ppo_run / "checkpoints/best.ckpt", max_steps=None))
    assert report.checkpoint == str(ppo_run / "checkpoints/best.ckpt")
    assert (report.env, report.max_steps, report.lengths) == ("Pendulum-v1", 30, [30] * 3)


def test_a_run_directory_stands_for_its_last_checkpoint(ppo_run: Path) -> None:
    assert evaluate_checkpoint(eval_config(ppo_run)).checkpoint == str(ppo_run / "checkpoints/last.ckpt")


def test_a_checkpoint_is_judged_on_episodes_that_training_s_evaluations_never_ran(ppo_run: Path) -> None:
    loaded = load_policy(ppo_run)
    with closing(Evaluator(load_node("env", loaded.env_node), num_envs=2, device=torch.device("cpu"))) as made:
        in_training = made(loaded.algorithm, episodes=3, seed=0, max_steps=20).returns
    assert not set(in_training) & set(evaluate_checkpoint(eval_config(ppo_run)).returns)


def test_changes_to_the_environment_reach_it(ppo_run: Path) -> None:
    config = eval_config(ppo_run, env={"max_episode_steps": 5, "kwargs": {"g": 0.0}}, max_steps=None)
    report = evaluate_checkpoint(config)
    assert report.lengths == [5] * 3
    assert report.returns != evaluate_checkpoint(config.model_copy(update={"env": {"max_episode_steps": 5}})).returns


def test_wrappers_of_an_evaluation_are_those_that_are_typed(dqn_run: Path) -> None:
    bonus = {"wrappers": [{"name": "probes:Bonus", "kwargs": {"bonus": 2.0}}]}
    report = evaluate_checkpoint(eval_config(dqn_run, env=bonus))
    plain = evaluate_checkpoint(eval_config(dqn_run))
    assert report.lengths == plain.lengths
    assert report.returns == [3 * length for length in plain.lengths]


def test_an_environment_with_other_spaces_is_refused_with_both(ppo_run: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        evaluate_checkpoint(eval_config(ppo_run, env={"id": "CartPole-v1"}))
    text = str(caught.value)
    for part in ("ppo", "Pendulum-v1", "CartPole-v1", "Box(3,)", "Box(4,)"):
        assert part in text


@pytest.mark.filterwarnings("ignore:.*out of date:DeprecationWarning")
def test_another_environment_with_the_same_spaces_is_a_warning(
    dqn_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = evaluate_checkpoint(eval_config(dqn_run, env={"id": "CartPole-v0"}))
    assert report.env == "CartPole-v0"
    warning = capsys.readouterr().err
    assert warning.startswith("warning: the policy was trained on CartPole-v1 and is evaluated on CartPole-v0")
    evaluate_checkpoint(eval_config(dqn_run))
    assert capsys.readouterr().err == ""


def test_a_window_without_a_screen_is_refused(dqn_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    checkpoint = dqn_run / "checkpoints/last.ckpt"
    with pytest.raises(ConfigError, match=r"^render: true opens a window, and neither DISPLAY nor"):
        evaluate_checkpoint(eval_config(checkpoint, render=True))

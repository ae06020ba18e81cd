"""Whole runs of a few hundred frames: what they leave behind, how they go on, how they end."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, cast

import gymnasium
import numpy as np
import pytest
import safetensors.torch
import yaml
from probes import ALGORITHMS, PROBE_ACTIONS, QUICK, TINY, run
from safetensors import safe_open
from torch import Tensor

import rltool
from rltool import checkpoint, cli, training
from rltool.algos.dqn import DQN
from rltool.algos.ppo import PPO, STEP_METRICS
from rltool.algos.sac import SAC
from rltool.checkpoint import read_header, restore_random_state
from rltool.errors import CheckpointError, ConfigError, EnvironmentFault, NonFiniteError, WriteError
from rltool.metrics import due
from rltool.runs import RunDirectory
from rltool.stopping import Interruption, interrupts

PROBE = ("env=gym", "env.id=Probe-v0")


def points(directory: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what a clock measured."""
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [{name: value for name, value in json.loads(line).items() if name[:5] != "time/"} for line in lines]


def tensors(directory: Path, name: str = "last.ckpt") -> dict[str, Tensor]:
    return safetensors.torch.load_file(directory / "checkpoints" / name)


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return set(one) == set(other) and all(tensor.equal(other[name]) for name, tensor in one.items())


def summary(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "summary.json").read_text())  # type: ignore[no-any-return]


def log(directory: Path) -> str:
    return (directory / "log.txt").read_text()


def curve(directory: Path, name: str) -> dict[int, float]:
    return {point["frames"]: point[name] for point in points(directory) if name in point}


def scalars(directory: Path, name: str) -> dict[int, float]:
    """A curve as TensorBoard reads it."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory))
    events.Reload()
    return {event.step: event.value for event in events.Scalars(name)}


@pytest.mark.parametrize("algo", ["ppo", "dqn", pytest.param("sac", marks=pytest.mark.long)])
def test_a_seed_fixes_the_whole_run(tmp_path: Path, algo: str) -> None:
    for name, seed in (("one", 0), ("two", 0), ("other", 1)):
        run(tmp_path / name, algo, f"seed={seed}", "total_frames=224")
    one, two, other = (tmp_path / name for name in ("one", "two", "other"))
    assert points(one) == points(two)
    assert len(points(one)) >= 3
    assert any("train/loss" in point for point in points(one))
    assert same(tensors(one), tensors(two))
    assert points(one) != points(other)


def test_evaluation_with_other_spaces_is_refused_before_training(tmp_path: Path) -> None:
    stack = "env.wrappers=[{name: FrameStackObservation, kwargs: {stack_size: 4}, eval: {stack_size: 2}}]"
    expected = r"env\.wrappers: evaluation observes observation Box\(2, 4\), and training observation Box\(4, 4\)"
    with pytest.raises(ConfigError, match=expected):
        run(tmp_path / "run", "dqn", stack, "eval=default")
    assert not (tmp_path / "run").exists()


def test_evaluations_do_not_move_training(tmp_path: Path) -> None:
    run(tmp_path / "plain", "dqn", "total_frames=200")
    run(
        tmp_path / "evaluated",
        "dqn",
        "total_frames=200",
        "eval=default",
        "eval.interval=40",
        "eval.deterministic=false",
    )
    assert same(tensors(tmp_path / "plain"), tensors(tmp_path / "evaluated"))
    assert sorted(curve(tmp_path / "evaluated", "eval/return_mean")) == [40, 80, 120, 160, 200]


def test_a_seed_that_was_drawn_and_the_full_id_are_written_down(tmp_path: Path) -> None:
    result = run(tmp_path, "dqn", "env.id=CartPole", "seed=null", "total_frames=40")
    saved = yaml.safe_load((tmp_path / "config.yaml").read_text())
    header = read_header(tmp_path)
    assert isinstance(saved["seed"], int)
    assert saved["seed"] == header.config["seed"] == result["seed"]
    assert saved["env"]["id"] == header.config["env"]["id"] == header.state.env == result["env"] == "CartPole-v1"  # type: ignore[index, call-overload]


def test_a_directory_that_holds_a_run_is_left_alone(dqn_run: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in dqn_run.rglob("*") if path.is_file() and path.suffix}
    with pytest.raises(ConfigError, match=r"expected a directory without a run"):
        run(dqn_run, "dqn", "total_frames=40")
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_points_evaluations_and_checkpoints_come_when_they_are_due(ppo_run: Path) -> None:
    # The warm-up of 32 frames, then batches of 64; every 40, 200 and 100 frames (the first after that).
    assert list(curve(ppo_run, "episode/finished")) == [96, 160, 224, 288, 352]
    assert list(curve(ppo_run, "eval/return_mean")) == [224, 352]
    assert {path.name for path in (ppo_run / "checkpoints").iterdir()} == {
        "last.ckpt",
        "best.ckpt",
        "224.ckpt",
        "352.ckpt",
    }


def test_the_best_checkpoint_is_the_newest_of_the_best(tmp_path: Path) -> None:
    run(tmp_path, "dqn", *PROBE, "total_frames=100", "eval=default", "eval.interval=40")
    assert set(curve(tmp_path, "eval/return_mean").values()) == {3.0}
    header = read_header(tmp_path / "checkpoints/best.ckpt")
    assert (header.frames, header.state.evaluation, header.state.best) == (100, 3.0, {"mean": 3.0, "frames": 100})


def test_a_run_ends_once_enough_evaluations_in_a_row_reach_the_threshold(tmp_path: Path) -> None:
    overrides = ("eval=default", "eval.interval=40", "stop.return_threshold=3", "stop.evaluations=2")
    result = run(tmp_path, "dqn", *PROBE, *overrides, "total_frames=400")
    assert (result["status"], result["frames"], result["objective"]) == ("solved", 80, 3.0)
    assert read_header(tmp_path).state.solved == 2


def test_a_short_run_has_a_point_at_its_end(tmp_path: Path) -> None:
    result = run(tmp_path, "dqn", *PROBE, "logging.interval=5000", "total_frames=90")
    (point,) = points(tmp_path)
    assert (point["frames"], point["episode/return"], point["episode/finished"]) == (100, 3.0, 32.0)
    assert result["objective"] == 3.0


@pytest.mark.parametrize("scaled", ["true", "false"])
def test_returns_are_raw_whether_rewards_are_scaled_or_not(tmp_path: Path, scaled: str) -> None:
    run(tmp_path, "ppo", *PROBE, "env.kwargs={reward: 100}", f"algo.scale_reward={scaled}", "total_frames=224")
    assert curve(tmp_path, "episode/return") == dict.fromkeys([96, 160, 224], 300.0)
    assert curve(tmp_path, "episode/length") == dict.fromkeys([96, 160, 224], 3.0)


@pytest.mark.filterwarnings("error")
def test_where_no_episode_finishes_there_is_no_return(tmp_path: Path) -> None:
    overrides = (
        "env.kwargs={n: null}",
        "algo.frames_per_batch=100",
        "algo.minibatch_size=50",
        "algo.warmup_frames=100",
    )
    result = run(tmp_path, "ppo", *PROBE, *overrides, "total_frames=300")
    assert curve(tmp_path, "episode/finished") == {100: 0.0, 200: 0.0, 300: 0.0}
    assert not any("episode/return" in point or "episode/length" in point for point in points(tmp_path))
    assert (result["status"], result["episodes"], result["objective"]) == ("finished", 0, None)
    assert "no episode finished" in log(tmp_path)


def test_an_evaluation_that_was_cut_is_said(tmp_path: Path) -> None:
    run(tmp_path, "dqn", *PROBE, "env.kwargs={n: null}", "total_frames=40", "eval=default", "eval.max_steps=7")
    assert curve(tmp_path, "eval/length_mean") == {40: 7.0}
    assert curve(tmp_path, "eval/episodes_cut") == {40: 2.0}
    assert "2 of these 2 episodes were cut at 7 steps" in log(tmp_path)
    assert re.search(r"last policy .*, 2 episodes, 2 cut at 7 steps\)", log(tmp_path))


def test_a_budget_without_gradient_steps_is_said_before_and_after(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run(tmp_path, "dqn", "total_frames=40")
    assert (result["status"], result["updates"]) == ("finished", 0)
    printed = capsys.readouterr()
    text = printed.out + printed.err
    begin, end = text.index("total_frames=40 is too few to learn from"), text.index("0 gradient updates were made")
    assert begin < end


@pytest.mark.parametrize(
    ("total", "warmup", "said", "end"),
    [
        # Pieces of 250 steps of both environments, and the rest.
        (300, 10_000, r"sac, 300 frames \(500 random ones\)", 500),
        (501, 601, r"sac, 501 frames \(602 random ones\)", 602),
        (500, 500, r"sac, 500 frames, all of them random", 500),
    ],
)
def test_a_budget_below_the_warm_up_is_counted_as_it_runs(
    tmp_path: Path, total: int, warmup: int, said: str, end: int
) -> None:
    words = (f"total_frames={total}", f"algo.warmup_frames={warmup}", "env.num_envs=2", "buffer.size=20000")
    assert run(tmp_path, "sac", *words)["frames"] == end
    assert re.search(said, log(tmp_path))


def test_a_budget_below_one_batch_is_one_batch_and_said(tmp_path: Path) -> None:
    overrides = ("env.num_envs=10", "algo.frames_per_batch=145", "algo.minibatch_size=50", "algo.warmup_frames=3")
    result = run(tmp_path, "ppo", *overrides, "total_frames=100")
    assert (result["frames"], result["updates"]) == (10 + 150, 2 * 3)
    assert "100 frames (10 random ones first, 1 batch of 150: 160)" in log(tmp_path)
    assert "too few to learn from" not in log(tmp_path)


@pytest.mark.parametrize(
    ("algo", "stop", "at", "total", "prioritized"),
    [
        ("ppo", 288, 130, 480, False),
        pytest.param("dqn", 300, 145, 560, False, marks=pytest.mark.long),
        pytest.param("dqn", 300, 145, 560, True, marks=pytest.mark.long),
        pytest.param("sac", 300, 145, 560, False, marks=pytest.mark.long),
        pytest.param("sac", 300, 145, 560, True, marks=pytest.mark.long),
    ],
)
def test_a_stopped_run_goes_on_as_if_it_had_not_been_stopped(
    tmp_path: Path, algo: str, stop: int, at: int, total: int, prioritized: bool
) -> None:
    """Bit for bit, since the probe's episodes all end where the run is stopped: weights, statistics, moments, counters,
    schedules, buffer and generators."""
    overrides = [*PROBE, f"total_frames={total}", "logging.interval=50", "optim.schedule=linear", "seed=5"]
    overrides += ["buffer=prioritized"] if prioritized else []
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    probe = f"obs: t, reward: t, actions: {PROBE_ACTIONS[algo]}"
    run(whole, algo, *overrides, f"env.kwargs={{{probe}}}")
    with pytest.raises(SystemExit) as stopped:
        run(parts, algo, *overrides, f"env.kwargs={{{probe}, fault: SIGTERM, at: {at}}}")
    assert stopped.value.code == 143
    assert (summary(parts)["status"], read_header(parts).frames) == ("interrupted", stop)
    assert points(parts) == [point for point in points(whole) if point["frames"] <= stop]

    result = rltool.train(f"resume={parts}")
    assert (result["status"], result["frames"]) == ("finished", summary(whole)["frames"])
    assert points(parts) == points(whole)
    assert any("train/loss" in point for point in points(parts) if point["frames"] > stop)
    assert same(tensors(parts), tensors(whole))
    assert float(tensors(parts)["optim.step"]) == float(tensors(parts)["counters.updates"]) == result["updates"]
    if algo != "ppo":
        name = f"buffer-{result['frames']}.safetensors"
        assert same(tensors(parts, name), tensors(whole, name))
    one, other = read_header(parts).state, read_header(whole).state
    assert (one.episodes, one.random, one.sessions, other.sessions) == (other.episodes, other.random, 2, 1)


@pytest.mark.parametrize(
    ("algo", "words"),
    [
        pytest.param("ppo", ["env.backend=threads"], marks=pytest.mark.long),
        pytest.param(
            "ppo", ["env=gym", "env.id=InvertedDoublePendulum-v5", "env.backend=async"], marks=pytest.mark.long
        ),
        pytest.param("ppo", ["env=gym", "env.id=Hopper-v5", "algo.scale_reward=true"], marks=pytest.mark.long),
        ("dqn", []),
        pytest.param("dqn", ["buffer=prioritized"], marks=pytest.mark.long),
        pytest.param("sac", ["env=gym", "env.id=Hopper-v5"], marks=pytest.mark.long),
        *(pytest.param(algo, ["compile=true"], marks=pytest.mark.long) for algo in ALGORITHMS),
    ],
)
def test_a_run_stopped_in_the_middle_of_episodes_goes_on_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algo: str, words: list[str]
) -> None:
    """The simulators' state, their generators and time limits, running returns and the interval's means go along."""
    words = [*words, "total_frames=480", "logging.interval=100", "save.interval=130", "seed=3", "optim.schedule=linear"]
    words += ["eval=default", "eval.interval=150", "eval.episodes=2", "eval.max_steps=30"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run(whole, algo, *words)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        # A process that is killed some batches after its last checkpoint.
        patch.setattr(
            training, "due", lambda before, after, interval: killed() if after > 330 else due(before, after, interval)
        )
        with pytest.raises(KeyboardInterrupt):
            run(parts, algo, *words)
    stopped = read_header(parts).frames
    assert 130 <= stopped <= 330
    rltool.train(f"resume={parts}")
    assert "everything continues where the checkpoint was taken, the open episodes too" in log(parts)
    assert points(parts) == points(whole)
    assert len([point for point in points(parts) if point["frames"] > stopped]) >= 2
    assert same(tensors(parts), tensors(whole))
    assert same(tensors(parts, "best.ckpt"), tensors(whole, "best.ckpt"))
    ignored = ("seconds", "frames_per_second", "time_shares", "directory")
    one, other = ({key: value for key, value in summary(path).items() if key not in ignored} for path in (whole, parts))
    assert one == other


@pytest.mark.parametrize("logging", ["tensorboard", pytest.param("csv", marks=pytest.mark.long)])
def test_a_run_stopped_by_a_signal_takes_its_last_point_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logging: str
) -> None:
    """The point that is written at the stop is of an interval that goes on."""
    words = ["total_frames=480", "logging.interval=200", f"logging={logging}", "eval=default", "eval.interval=90"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run(whole, "dqn", *words)

    def stopping(before: int, after: int, interval: int | None) -> bool:
        if before < 260 <= after:
            os.kill(os.getpid(), signal.SIGUSR1)
        return due(before, after, interval)

    with monkeypatch.context() as patch:
        patch.setattr(training, "due", stopping)
        with pytest.raises(SystemExit):
            run(parts, "dqn", *words)
    assert (read_header(parts).frames, points(parts)[-1]["frames"]) == (260, 260)
    rltool.train(f"resume={parts}")
    assert points(parts) == points(whole)
    assert same(tensors(parts), tensors(whole))
    if logging == "csv":
        rows = [(run / "metrics.csv").read_text().splitlines() for run in (parts, whole)]
        assert [row.partition(",")[0] for row in rows[0]] == [row.partition(",")[0] for row in rows[1]]


def test_a_run_killed_before_its_summary_still_ends(copied: Path, tmp_path: Path) -> None:
    expected, before = summary(copied), points(copied)
    (copied / "summary.json").unlink()
    (copied / ".summary.json-1-a.tmp").touch()
    (copied / "checkpoints/.buffer-1.safetensors.1.tmp").touch()
    assert cli.main(["train", f"resume={copied}", "quiet=true"]) == 0
    ignored = ("seconds", "frames_per_second", "time_shares", "directory", "git_commit", "objective")
    found = summary(copied)
    assert {key: value for key, value in found.items() if key not in ignored} == {
        key: value for key, value in expected.items() if key not in ignored
    }
    assert points(copied) == before
    assert not list(copied.rglob(".*.tmp"))
    assert cli.main(["train", f"resume={copied}"]) == 0
    assert summary(copied) == found


def test_a_checkpoint_from_before_a_key_goes_on_as_it_was(copied: Path) -> None:
    file = copied / "checkpoints/last.ckpt"
    with safe_open(file, framework="pt") as content:
        state = json.loads(content.metadata()["rltool"])
    del state["config"]["env"]["timeout"], state["config"]["on_nonfinite"], state["config"]["network"]["precision"]
    checkpoint.write_tensors(file, tensors(copied), {"rltool": json.dumps(state)})
    assert rltool.train(f"resume={copied}", "total_frames=440")["frames"] == 440
    config = read_header(copied).state.config
    assert (config["on_nonfinite"], config["env"]["timeout"]) == ("stop", None)  # type: ignore[index, call-overload]
    assert config["network"]["precision"] == "float32"  # type: ignore[index, call-overload]


def test_a_run_that_does_not_come_to_its_first_batch_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(training, "Recorder", stopped)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").touch()
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "run", "dqn", "total_frames=100")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["notes.txt"]


def test_episodes_that_cannot_go_on_start_anew_and_say_why(tmp_path: Path) -> None:
    run(
        tmp_path,
        "ppo",
        *PROBE,
        "total_frames=96",
        f"env.kwargs={{actions: {PROBE_ACTIONS['ppo']}}}",
        "algo.scale_reward=true",
    )
    assert not any(name.startswith("collector.") for name in tensors(tmp_path))
    rltool.train(f"resume={tmp_path}", "total_frames=160")
    assert "open episodes start anew: Probe cannot be saved; all else continues" in log(tmp_path)


def test_a_signal_ahead_of_a_time_limit_saves_and_ends_the_run(tmp_path: Path) -> None:
    """SIGUSR1, as batch systems send it; 128 + 10."""
    with pytest.raises(SystemExit) as stopped:
        run(tmp_path, "dqn", *PROBE, "env.kwargs={fault: SIGUSR1, at: 30}", "total_frames=400")
    assert stopped.value.code == 128 + signal.SIGUSR1
    assert (summary(tmp_path)["status"], summary(tmp_path)["error"]) == ("interrupted", "SIGUSR1")
    assert read_header(tmp_path).frames == 60
    assert f"train resume={tmp_path}" in log(tmp_path)


def test_an_environment_that_draws_from_the_global_generator_goes_on_in_its_stream(tmp_path: Path) -> None:
    run(tmp_path, "dqn", *PROBE, "env.kwargs={obs: world}", "total_frames=100")
    state = read_header(tmp_path).state.random
    rltool.train(f"resume={tmp_path}", "total_frames=140")
    restore_random_state(state)
    expected = [np.random.normal() for _ in range(2)]
    rows = tensors(tmp_path, "buffer-140.safetensors")["frame.observation"]
    np.testing.assert_array_equal(rows[100:102, 0], np.float32(expected))


@pytest.fixture
def copied(tmp_path: Path, dqn_run: Path) -> Path:
    """A copy of the finished run on CartPole, 400 frames."""
    return Path(shutil.copytree(dqn_run, tmp_path / "copied"))


def test_a_finished_run_goes_on_with_a_larger_budget(copied: Path) -> None:
    before = points(copied)
    result = rltool.train(f"resume={copied}", "total_frames=520")
    assert (result["frames"], read_header(copied).frames) == (520, 520)
    assert points(copied)[: len(before)] == before
    frames = [point["frames"] for point in points(copied)]
    assert frames == sorted(set(frames))
    assert frames[-1] == 520
    # ε by its own length; the learning rate stays where its schedule, the first budget, ended.
    assert curve(copied, "policy/epsilon") == {f: pytest.approx(1 - 0.95 * f / 1000) for f in frames}
    rates = curve(copied, "train/learning_rate")
    first = read_header(copied).config["optim"]["lr"]  # type: ignore[index, call-overload]
    assert {f: rates[f] for f in frames if f > 60} == {
        f: pytest.approx(first * max(1 - (f - 20) / 400, 0)) for f in frames if f > 60
    }
    assert rates[520] == 0
    assert "schedules ran over the first budget of 400 frames and stay at their end" in log(copied)
    assert len(tensors(copied, "buffer-520.safetensors")["data.action"]) == 520


def test_an_older_checkpoint_takes_the_run_back(copied: Path) -> None:
    before = [point for point in points(copied) if point["frames"] <= 300]
    rltool.train(f"resume={copied / 'checkpoints/300.ckpt'}", "total_frames=400")
    after = points(copied)
    assert after[: len(before)] == before
    assert [point["frames"] for point in after[len(before) :]] == [320, 360, 400]
    # Its buffer is gone: 24 updates had been made, and those of the frames from 300 to 340 are not.
    assert "no replay buffer lies beside this checkpoint" in log(copied)
    assert curve(copied, "train/updates")[400] == 24 + 6


def test_a_checkpoint_from_elsewhere_begins_a_new_run(
    copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = shutil.move(copied / "checkpoints/last.ckpt", tmp_path / "mine.ckpt")
    before = points(copied)
    monkeypatch.chdir(tmp_path)
    rltool.train("resume=mine.ckpt", "total_frames=440")
    (directory,) = (tmp_path / "runs").glob("*/*/")
    header = read_header(directory)
    assert (header.frames, header.state.parent, header.state.sessions) == (440, str(moved), 2)
    assert [point["frames"] for point in points(directory)] == [440]
    assert points(copied) == before


def test_init_takes_the_weights_and_nothing_else(tmp_path: Path, dqn_run: Path) -> None:
    file = dqn_run / "checkpoints/last.ckpt"
    result = run(tmp_path, "dqn", f"init={file}", "total_frames=40", "optim.schedule=linear")
    assert (result["frames"], result["updates"]) == (40, 0)
    before, after = tensors(dqn_run), tensors(tmp_path)
    networks = [name for name in before if name.startswith(("policy.", "target."))]
    assert len(networks) == 8
    assert all(before[name].equal(after[name]) for name in networks)
    assert not any(name.startswith("optim.") for name in after)
    assert curve(tmp_path, "policy/epsilon") == {40: pytest.approx(1 - 0.95 * 40 / 1000)}
    state = read_header(tmp_path).state
    assert (state.parent, state.sessions, state.frames) == (str(file), 1, 40)
    assert read_header(tmp_path).config["init"] is None


def test_init_takes_the_normaliser_and_needs_no_warm_up(tmp_path: Path, ppo_run: Path) -> None:
    run(tmp_path, "ppo", "env=pendulum", f"init={ppo_run / 'checkpoints/last.ckpt'}", "total_frames=32")
    assert float(tensors(tmp_path)["normalizer.observation.count"]) == 352 + 64
    assert not tensors(tmp_path)["critic.head.weight"].equal(tensors(ppo_run)["critic.head.weight"]), (
        "the first batch is learned from"
    )


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("dqn", "network.hidden=[8]"),
            r"^init: its networks, those of dqn, do not fit dqn with this network: .*has shape",
        ),
        (("ppo",), r"^init: its networks, those of dqn, do not fit ppo with this network: .*lacks the tensor"),
        (("dqn", "env=acrobot"), r"^init: .* was trained on CartPole-v1, whose spaces are not those of Acrobot-v1"),
    ],
)
def test_init_from_other_networks_or_spaces_is_refused(
    tmp_path: Path, dqn_run: Path, overrides: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        run(tmp_path / "new", *overrides, f"init={dqn_run}", "total_frames=40")
    assert not (tmp_path / "new").exists()


def test_an_environment_that_raises_ends_the_run_with_everything_written(tmp_path: Path) -> None:
    overrides = ("env.kwargs={fault: raise, at: 75}", "logging=tensorboard", "logging.interval=50")
    with pytest.raises(
        EnvironmentFault,
        match=r"environment 0 \(Probe-v0, Probe\): step 75 raised ZeroDivisionError: the probe broke \(probes.py:\d+\)",
    ):
        run(tmp_path, "dqn", *PROBE, *overrides, "total_frames=400")
    assert summary(tmp_path)["status"] == "failed"
    assert "ZeroDivisionError: the probe broke" in str(summary(tmp_path)["error"])
    assert read_header(tmp_path).frames > 0, "what was learned before is kept"
    assert summary(tmp_path)["frames"] == 140
    assert "Traceback (most recent call last)" in log(tmp_path)
    assert "ZeroDivisionError: the probe broke" in log(tmp_path)
    assert list(curve(tmp_path, "episode/return")) == [60, 100, 140]
    assert scalars(tmp_path, "episode/return") == curve(tmp_path, "episode/return")


@pytest.mark.parametrize(
    ("fault", "overrides", "message"),
    [
        ("fault: reward NaN, at: 61", (), r"reward of environment 0 is nan at frame 120\. Nothing was learned"),
        (
            "reward: 1e+30",
            ("algo.loss_function=l2",),
            r"train/loss became inf at gradient step 1 of 2 within the frames up to 80\. Lower optim",
        ),
    ],
)
def test_a_number_that_is_not_finite_ends_the_run(
    tmp_path: Path, fault: str, overrides: tuple[str, ...], message: str
) -> None:
    with pytest.raises(NonFiniteError, match=message) as caught:
        run(tmp_path, "dqn", *PROBE, f"env.kwargs={{{fault}}}", *overrides, "total_frames=400")
    assert summary(tmp_path)["status"] == "failed"
    # What was learned before a batch with a NaN is sound; what a loss has become infinite in is not.
    saved = (tmp_path / "checkpoints" / "last.ckpt").exists()
    assert saved == ("NaN" in fault)
    found = (
        f"train resume={tmp_path} goes on from frame 120, which is saved" if saved else "no checkpoint had been written"
    )
    assert found in log(tmp_path)
    (kept,) = tmp_path.glob("nonfinite-*.safetensors")
    assert caught.value.__notes__ == [f"The batch is kept in {kept}"]
    with safe_open(str(kept), "pt") as file:
        assert file.metadata()["found"] == str(caught.value)
    columns = safetensors.torch.load_file(kept)
    if "NaN" in fault:
        # Frame 120 is the first of its batch, [steps, num_envs].
        assert columns["reward"].isnan().nonzero().tolist() == [[0, 0], [0, 1]]
    else:
        assert float(columns["next.reward"].max()) == float(np.float32(1e30))


@pytest.mark.parametrize(
    "words",
    [
        "env.backend=sync",
        pytest.param("env.backend=async", marks=pytest.mark.long),
        pytest.param("env.transforms=[{name: RewardScaling, kwargs: {loc: 0.0, scale: 1.0}}]", marks=pytest.mark.long),
    ],
)
def test_batches_that_are_not_finite_are_skipped_where_asked_to(tmp_path: Path, words: str) -> None:
    """Each environment pays a NaN at its 61st step; the batches around go on, all environments anew."""
    kwargs = "env.kwargs={fault: reward NaN, at: 61, n: null, obs: t}"
    result = run(tmp_path, "dqn", *PROBE, kwargs, "on_nonfinite=skip", "total_frames=200", words)
    assert (result["status"], result["frames"]) == ("finished", 200)
    assert (result["faults"]["nonfinite_batches"], result["faults"]["nonfinite_gradients"]) == (1, 0)  # type: ignore[index]
    assert len(re.findall(r"reward of environment 0 is n\w+(?: \w+)? at frame 120", log(tmp_path))) == 1
    assert "batches that were not finite and are left out: 1 of 10" in log(tmp_path)
    buffer = tensors(tmp_path, "buffer-200.safetensors")
    assert len(buffer["data.action"]) == 200 - 20
    assert all(tensor.isfinite().all() for tensor in tensors(tmp_path).values())
    # The episodes began anew after the batch that was left out, at frame 140.
    assert buffer["frame.observation"][-2 * 31 :].min() == 0


@pytest.mark.parametrize("algo", ["ppo", "dqn", pytest.param("sac", marks=pytest.mark.long)])
def test_gradients_that_are_not_finite_are_skipped_where_asked_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algo: str
) -> None:
    """Every fifth gradient step is a NaN; the others count, and the weights stay finite."""
    kind: type[Any] = {"ppo": PPO, "dqn": DQN, "sac": SAC}[algo]
    names = STEP_METRICS if kind is PPO else kind.step_metrics
    made, gradient = [0], kind.gradient

    def spoiled(self: Any, *arguments: Any) -> Any:
        made[0] += 1
        step, row, *rest = gradient(self, *arguments)
        if made[0] % 5 == 0:
            step, row = step * math.nan, row.clone()
            row[names.index("train/grad_norm")] = math.nan
        return step, row, *rest

    monkeypatch.setattr(kind, "gradient", spoiled)
    result = run(tmp_path, algo, "on_nonfinite=skip", "total_frames=300")
    assert (result["faults"]["nonfinite_batches"], result["faults"]["nonfinite_gradients"]) == (0, made[0] // 5)  # type: ignore[index]
    assert result["updates"] == made[0] - made[0] // 5
    assert made[0] >= 10
    assert all(tensor.isfinite().all() for tensor in tensors(tmp_path).values())
    with pytest.raises(NonFiniteError, match=r"^train/grad_norm became nan at gradient step \d of \d within the"):
        run(tmp_path / "stop", algo, "total_frames=300")


@pytest.mark.parametrize(
    ("env", "found"),
    [
        ("inverted_double_pendulum", "InvertedDoublePendulum-v5 has Box(1,) from -1 to 1"),
        pytest.param("pendulum", "Pendulum-v1 has Box(1,) from -2 to 2", marks=pytest.mark.long),
    ],
)
def test_dqn_on_continuous_actions_leaves_no_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], env: str, found: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", "algo=dqn", f"env={env}", "logging=none", "device=cpu"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"rltool train: algo: dqn needs a Discrete action space; {found}")
    assert "Use algo=ppo" in error
    assert "Traceback" not in error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "backend", "logging", "number"),
    [
        pytest.param("SIGTERM", "sync", "tensorboard", signal.SIGTERM, marks=pytest.mark.long),
        pytest.param("Ctrl-C", "async", "csv", signal.SIGINT, marks=pytest.mark.long),
        pytest.param("SIGTERM to all", "async", "csv", signal.SIGTERM, marks=pytest.mark.long),
    ],
)
def test_a_signal_ends_the_command_after_its_batch_with_a_checkpoint(
    tmp_path: Path, name: str, backend: str, logging: str, number: signal.Signals
) -> None:
    directory = tmp_path / "run"
    words = ["algo=dqn", "env=gym", "env.id=probes:Probe-v0", f"env.backend={backend}", *QUICK, *TINY["dqn"]]
    words += ["env.num_envs=1", "quiet=false", f"logging={logging}", f"env.kwargs={{fault: {name}, at: 110}}"]
    words += ["eval=none", "logging.interval=40", "total_frames=100_000", f"hydra.run.dir={directory}"]
    done = subprocess.run(
        [sys.executable, "-m", "rltool", "train", *words],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        timeout=100,
    )
    assert done.returncode == 128 + number, done.stdout
    assert "Traceback" not in done.stdout
    assert "torchrl" not in done.stdout  # its log lines
    assert f"rltool train resume={directory}" in done.stdout
    assert read_header(directory).frames == 120
    assert (summary(directory)["status"], summary(directory)["error"]) == ("interrupted", number.name)
    assert list(curve(directory, "episode/finished")) == [40, 80, 120]
    if name == "SIGTERM":
        assert scalars(directory, "episode/return") == curve(directory, "episode/return")
    left = [path for path in Path("/proc").glob("[0-9]*/cmdline") if str(directory).encode() in _contents(path)]
    assert left == [], "no worker process survives"


def _contents(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # it ended meanwhile
        return b""


def test_a_second_ctrl_c_stops_at_once() -> None:
    interruption = Interruption()
    interruption(signal.SIGTERM, None)
    interruption(signal.SIGTERM, None)
    assert interruption.by == signal.SIGTERM
    with pytest.raises(KeyboardInterrupt):
        interruption(signal.SIGINT, None)


def test_handlers_are_put_back_and_other_threads_touch_none() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with interrupts() as interrupted:
        assert signal.getsignal(signal.SIGTERM) is interrupted
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before

    def elsewhere() -> None:
        with interrupts():
            seen.append((signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)))

    seen: list[Any] = []
    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert seen == [before]


def test_a_signal_during_the_last_evaluation_still_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluate = training.Recorder.evaluate

    def interrupted(recorder: training.Recorder) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        evaluate(recorder)

    monkeypatch.setattr(training.Recorder, "evaluate", interrupted)
    result = run(tmp_path, "dqn", *PROBE, "total_frames=40")
    assert (result["status"], read_header(tmp_path).frames) == ("finished", 40)


def test_a_checkpoint_that_cannot_be_written_does_not_end_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real, failures = checkpoint.write_tensors, iter([True])

    def full_once(path: Path, *arguments: Any) -> None:
        if next(failures, False):
            raise WriteError(f"{path} could not be written: no space left")
        real(path, *arguments)

    monkeypatch.setattr(checkpoint, "write_tensors", full_once)
    result = run(tmp_path, "ppo", "total_frames=250", "save.interval=50", "save.keep=1")
    assert result["status"] == "finished"
    assert "no space left. Training goes on" in capsys.readouterr().out
    assert read_header(tmp_path).frames == result["frames"]


def test_a_resume_with_changed_values_is_written_down(tmp_path: Path) -> None:
    run(tmp_path, "dqn", "total_frames=100")
    cli.main(["train", f"resume={tmp_path}", "total_frames=200", "optim.lr=1e-4"])
    saved = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert (saved["total_frames"], saved["optim"]["lr"], saved["resume"]) == (200, 1e-4, None)
    assert (tmp_path / "overrides.txt").read_text().splitlines()[-4:] == [
        "# resumed at frame 100",
        f"resume={tmp_path}",
        "total_frames=200",
        "optim.lr=1e-4",
    ]


def test_going_back_to_an_older_checkpoint_is_said(tmp_path: Path) -> None:
    run(tmp_path, "dqn", "total_frames=200", "save.interval=100", "save.keep=2")
    cli.main(["train", f"resume={tmp_path / 'checkpoints/100.ckpt'}", "total_frames=160", "quiet=false"])
    assert "the run goes back from frame 200 to 100; what came after is dropped" in log(tmp_path)


def test_a_run_that_goes_back_forgets_what_came_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it is killed before it saves anything: no file is of the run's other end, and it goes on with what was
    asked for."""
    words = (
        "total_frames=400",
        "save.interval=100",
        "save.keep=9",
        "eval=default",
        "eval.interval=100",
        "eval.max_steps=40",
    )
    run(tmp_path, "dqn", *words)
    # The best policy is of frame 400, so that the way back leaves it behind.
    shutil.copy(tmp_path / "checkpoints/last.ckpt", tmp_path / "checkpoints/best.ckpt")

    def killed(*_: object) -> None:
        raise SystemExit(9)

    with monkeypatch.context() as patch:
        patch.setattr(training, "loop", killed)
        with pytest.raises(SystemExit):
            rltool.train(f"resume={tmp_path / 'checkpoints/200.ckpt'}", "optim.lr=1e-5")
    header = read_header(tmp_path)
    assert (header.path.name, header.frames) == ("last.ckpt", 200)
    assert header.config["optim"]["lr"] == 1e-5  # type: ignore[index, call-overload]
    names = sorted(path.name for path in (tmp_path / "checkpoints").glob("*.ckpt"))
    best = header.state.best
    assert best is not None
    assert names == ["100.ckpt", "200.ckpt", "best.ckpt", "last.ckpt"]
    assert read_header(tmp_path / "checkpoints/best.ckpt").frames == best["frames"] <= 200
    assert max(point["frames"] for point in points(tmp_path)) <= 200
    result = rltool.train(f"resume={tmp_path}")
    assert (result["status"], result["frames"]) == ("finished", 400)
    assert result["best_evaluation"]["frames"] == read_header(tmp_path / "checkpoints/best.ckpt").frames  # type: ignore[index]


@pytest.mark.long
def test_a_best_policy_that_is_gone_is_not_claimed(tmp_path: Path) -> None:
    words = (
        "total_frames=400",
        "save.interval=200",
        "save.keep=9",
        "eval=default",
        "eval.interval=100",
        "eval.max_steps=40",
    )
    run(tmp_path, "dqn", *words)
    states = {frames: read_header(tmp_path / f"checkpoints/{frames}.ckpt").state for frames in (200, 400)}
    if states[200].best["frames"] == 200:  # type: ignore[index]
        (tmp_path / "checkpoints/best.ckpt").unlink()
    shutil.copy(tmp_path / "checkpoints/400.ckpt", tmp_path / "checkpoints/best.ckpt")
    result = rltool.train(f"resume={tmp_path / 'checkpoints/200.ckpt'}", "eval.interval=null")
    kept = states[200].best["frames"] == 200  # type: ignore[index]
    assert (tmp_path / "checkpoints/best.ckpt").exists() == kept
    assert (result["best_evaluation"] is None) != kept
    assert ("the best is looked for anew" in log(tmp_path)) != kept


def test_a_budget_below_what_a_run_has_is_refused(tmp_path: Path) -> None:
    run(tmp_path, "dqn", "total_frames=200")
    with pytest.raises(
        ConfigError, match=r"^total_frames: expected more than the 200 frames that this run has, found 100\."
    ):
        rltool.train(f"resume={tmp_path}", "total_frames=100")


def test_the_time_of_a_run_is_that_of_all_its_sessions(tmp_path: Path) -> None:
    first = run(tmp_path, "dqn", "total_frames=200")
    second = rltool.train(f"resume={tmp_path}", "total_frames=400")
    assert second["seconds"] > first["seconds"]  # type: ignore[operator]
    assert second["frames_per_second"] == pytest.approx(400 / second["seconds"], rel=0.01)  # type: ignore[operator]


def test_of_two_that_continue_a_run_the_second_says_nothing_but_that(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path, "dqn", "total_frames=200")
    with RunDirectory.open(tmp_path):
        capsys.readouterr()
        assert cli.main(["train", f"resume={tmp_path}", "total_frames=400", "quiet=true"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "another process is writing into" in err


class NoNumber(gymnasium.RewardWrapper[Any, Any]):
    """Every reward is a NaN."""

    def reward(self, reward: Any) -> float:
        del reward
        return math.nan


def test_a_run_that_learned_nothing_since_no_batch_was_finite_has_failed(tmp_path: Path) -> None:
    wrapper = f"env.wrappers=[{{name: '{__name__}:NoNumber'}}]"
    with pytest.raises(NonFiniteError, match=r"^10 of 10 batches were not finite, and nothing was learned"):
        run(tmp_path, "dqn", *PROBE, wrapper, "on_nonfinite=skip", "total_frames=200")
    assert summary(tmp_path)["status"] == "failed"


def test_a_copied_checkpoint_starts_without_the_best_of_its_origin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("eval=default", "eval.interval=40", "eval.max_steps=20")
    run(tmp_path / "first", "dqn", "total_frames=80", *words)
    shutil.copy(tmp_path / "first/checkpoints/best.ckpt", tmp_path / "moved.ckpt")
    assert cli.main(["train", "resume=moved.ckpt", "total_frames=160"]) == 0
    (directory,) = (tmp_path / "runs").glob("*/*/")
    assert (directory / "checkpoints/best.ckpt").is_file()


def test_a_run_without_a_checkpoint_says_how_to_go_on(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "config.yaml").write_text("")
    with pytest.raises(
        CheckpointError, match=r"stopped before its first checkpoint\. Start it anew with what stands in"
    ):
        read_header(tmp_path)


def test_histograms_are_written_though_their_interval_ends_between_two_points(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    words = ("logging=tensorboard", "logging.interval=40", "logging.histogram_interval=100", "total_frames=240")
    run(tmp_path, "dqn", *words)
    events = EventAccumulator(str(tmp_path), size_guidance={"histograms": 0})
    events.Reload()
    # The frames 100 and 200 fall between points: the next one, at 120 and at 200, brings them.
    for tag in (
        "critic/q_values",
        "critic/td_errors",
        "policy/actions",
        "params/policy.head.weight",
        "grads/policy.head.weight",
    ):
        assert [event.step for event in events.Histograms(tag)] == [120, 200]


MASKED = {
    "info, an empty mask at the end": "where: info, n: 7, end: term, last: empty",
    "info, none at the end": "where: info, n: 7, end: term, last: none",
    "method": "where: method, n: 7",
    "an entry": "where: key, n: 7, obs: t",
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if "empty" in name else pytest.mark.long) for name in MASKED]
)
@pytest.mark.parametrize("algo", ["ppo", pytest.param("dqn", marks=pytest.mark.long)])
def test_no_invalid_action_is_taken_in_a_run_with_masks(tmp_path: Path, algo: str, name: str) -> None:
    """The environment itself refuses invalid actions: in warm-up, training and evaluation of both kinds."""
    words = ["env=gym", "env.id=Masked-v0", f"env.kwargs={{{MASKED[name]}}}", "eval=default", "eval.interval=100"]
    words += ["algo.normalize_observation=true", "algo.warmup_frames=40", "total_frames=200"]
    words += [f"eval.deterministic={str(algo == 'ppo').lower()}"]
    result = run(tmp_path, algo, *words, "env.num_envs=2")
    assert (result["status"], result["frames"]) == ("finished", {"ppo": 40 + 3 * 64, "dqn": 200}[algo])
    found = {"an entry": "action_mask", "method": "method"}.get(name, "info")
    config = cast("dict[str, Any]", read_header(tmp_path).config)
    assert config["env"]["action_mask"] == found, "what auto found is kept"
    assert [leaf.kind for leaf in read_header(tmp_path).leaves] == ["box", "mask"]


@pytest.mark.parametrize("actions", ["multi", "bits", "matrix"])
def test_ppo_trains_on_several_choices_at_once(tmp_path: Path, actions: str) -> None:
    masks = ["env.id=Masked-v0"] if actions != "bits" else ["env.id=Probe-v0"]
    result = run(tmp_path, "ppo", "env=gym", *masks, f"env.kwargs={{actions: {actions}}}", "total_frames=160")
    assert result["status"] == "finished"
    kind = "multi_binary" if actions == "bits" else "multi_discrete"
    assert read_header(tmp_path).actions.kind == kind


def test_dqn_on_several_choices_is_refused_by_name(tmp_path: Path) -> None:
    message = r"dqn needs a Discrete action space; Probe-v0 has MultiDiscrete\(\[2, 3\]\).*Use algo=ppo"
    with pytest.raises(ConfigError, match=message):
        run(tmp_path, "dqn", *PROBE, "env.kwargs={actions: multi}")


@pytest.mark.parametrize("algo", ["ppo", "dqn"])
def test_a_run_learns_from_observations_of_every_kind(tmp_path: Path, algo: str) -> None:
    words = ["network.cnn.features=16", "network.cnn.channels=[4,4,4]", "total_frames=160"]
    result = run(tmp_path, algo, *PROBE, "env.kwargs={obs: all}", *words, "eval=default", "eval.interval=80")
    assert result["status"] == "finished"
    kinds = [leaf.kind for leaf in read_header(tmp_path).leaves]
    assert kinds == ["binary", "image", "discrete", "box", "discrete"]
    saved = [name for name in tensors(tmp_path) if name.startswith("policy.")]
    assert any("encoders.1.0.weight" in name for name in saved), "the convolutions are in the checkpoint"


@pytest.mark.parametrize("squash", ["clip", "tanh"])
def test_a_policy_far_beyond_its_bounds_stays_finite(tmp_path: Path, squash: str) -> None:
    """A mean of 50 where actions end at 1: densities and ratios neither overflow nor become NaN."""
    words = ("env=pendulum", f"algo.squash={squash}", "total_frames=160", "logging=csv")
    run(tmp_path, "ppo", *words)
    file = read_header(tmp_path).path
    with safe_open(file, framework="pt") as content:
        metadata = content.metadata()
    saved = safetensors.torch.load_file(file)
    saved["policy.net.head.bias"] += 50
    checkpoint.write_tensors(file, saved, {"rltool": metadata["rltool"]})

    result = rltool.train(f"resume={tmp_path}", "total_frames=288")
    assert (result["status"], result["frames"]) == ("finished", 288)
    after = tensors(tmp_path)
    assert all(bool(tensor.isfinite().all()) for tensor in after.values() if tensor.is_floating_point())
    assert float(after["policy.net.head.bias"]) > 40
    assert all(
        value is None or np.isfinite(value) for point in points(tmp_path) for value in point.values() if value != "step"
    )


def test_a_run_whose_summary_is_damaged_goes_on(tmp_path: Path) -> None:
    run(tmp_path, "dqn", "total_frames=200")
    (tmp_path / "summary.json").write_text('{"status": "fin')
    assert rltool.train(f"resume={tmp_path}", "total_frames=300")["status"] == "finished"
    assert summary(tmp_path)["frames"] == 300

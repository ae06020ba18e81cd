"""Fresh episodes at the end of a run: of the policies that its checkpoints hold, never seen before, and nothing else moves."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from probes import run
from safetensors.torch import load_file
from test_evaluation import eval_config

from rltool import training
from rltool.checkpoint import BEST, LAST
from rltool.evaluation import evaluate_checkpoint
from rltool.logs import Logger
from rltool.records import Record
from rltool.seeding import Stream, seeds

FINAL = ("eval=default", "eval.interval=100", "eval.final_episodes=5", "eval.max_steps=30")


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run whose best policy is not its last, and its summary."""
    directory = tmp_path_factory.mktemp("judged")
    return directory, run(directory, "sac", *FINAL, "total_frames=400", "eval.max_steps=10", "seed=3")


def test_it_is_what_eval_says_of_the_same_checkpoints(judged: tuple[Path, dict[str, Any]]) -> None:
    directory, summary = judged
    final = summary["final_evaluation"]
    assert (final["seed"], final["deterministic"]) == (3, True)
    assert final["best"]["frames"] < final["last"]["frames"] == 400
    for name, file in (("best", BEST), ("last", LAST)):
        config = eval_config(directory / "checkpoints" / file, episodes=5, seed=3, max_steps=10, num_envs=2)
        report = evaluate_checkpoint(config)
        expected = {key: report.to_json()[key] for key in final[name] if key != "frames"}
        assert {key: value for key, value in final[name].items() if key != "frames"} == expected
    assert json.loads((directory / "summary.json").read_text())["final_evaluation"] == final
    record = Record(directory)
    assert (record.final(), record.final("last")) == (final["best"], final["last"])
    assert Record(directory / "nowhere").final() is None


def test_its_episodes_are_those_of_no_evaluation_in_training(judged: tuple[Path, dict[str, Any]]) -> None:
    _, summary = judged
    assert summary["last_evaluation"]["mean"] != summary["final_evaluation"]["last"]["mean"]
    assert summary["objective"] == summary["last_evaluation"]["mean"]
    assert not set(seeds(3, Stream.TEST_ENV, 100)) & set(seeds(3, Stream.EVAL_ENV, 100))


def test_it_moves_nothing_that_is_saved(tmp_path: Path) -> None:
    for name, episodes in (("with", 5), ("without", 0)):
        run(tmp_path / name, "dqn", *FINAL, f"eval.final_episodes={episodes}", "total_frames=200")
    assert not (tmp_path / "without/summary.json").read_text().count('"final_evaluation": {')
    for file in (LAST, BEST):
        one, two = (load_file(tmp_path / name / "checkpoints" / file) for name in ("with", "without"))
        assert one.keys() == two.keys()
        assert all(one[key].equal(two[key]) for key in one)


def test_where_the_last_policy_is_the_best_it_is_judged_once(tmp_path: Path) -> None:
    # Every episode pays 3 in 3 steps: of equal evaluations the newest is the best.
    words = ("env=gym", "env.id=Probe-v0", "total_frames=80", "eval.interval=20")
    final: Any = run(tmp_path, "dqn", *FINAL, *words)["final_evaluation"]
    assert final["best"] == final["last"]
    assert (final["last"]["mean"], final["last"]["episodes"], final["last"]["frames"]) == (3.0, 5, 80)


def test_it_makes_no_more_steps_than_a_fifth_of_the_run(tmp_path: Path) -> None:
    words = ("env=gym", "env.id=Probe-v0", "total_frames=200", "eval.interval=100", "eval.final_episodes=1000")
    final: Any = run(tmp_path, "dqn", *FINAL, *words, "eval.num_envs=1")["final_evaluation"]
    assert final["last"]["episodes"] == 14  # the first that end with 40 steps of 3 each
    final = run(tmp_path / "few", "dqn", *FINAL, *words, "eval.episodes=30", "eval.num_envs=1")["final_evaluation"]
    assert final["last"]["episodes"] == 30  # as many as any other evaluation


def test_the_console_and_the_logger_tell_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    finals: dict[str, float] = {}
    monkeypatch.setattr(Logger, "hparams", lambda _, config, metrics, first: finals.update(metrics))
    words = ("env=gym", "env.id=Probe-v0", "total_frames=80", "eval.interval=20", "quiet=false", "logging=none")
    run(tmp_path, "dqn", *FINAL, *words)
    said = capsys.readouterr().out
    assert re.search(
        r"best policy +3\.00 mean return at 80 frames\n +3\.00 \(3\.00 to 3\.00\) over 5 fresh episodes", said
    )
    assert re.search(r"last policy +3\.00 .*\n +3\.00 \(3\.00 to 3\.00\) over 5 fresh episodes", said)
    assert (finals["eval/best_fresh_return_mean"], finals["eval/last_fresh_return_mean"]) == (3.0, 3.0)


def test_without_evaluations_the_last_policy_is_judged_alone(tmp_path: Path) -> None:
    words = ("env=gym", "env.id=Probe-v0", "total_frames=40", "eval=none", "eval.final_episodes=4")
    summary: Any = run(tmp_path, "dqn", *words)
    assert summary["final_evaluation"]["best"] is None
    assert (summary["final_evaluation"]["last"]["mean"], summary["best_evaluation"]) == (3.0, None)


def test_a_run_that_goes_on_is_judged_anew_at_its_end(tmp_path: Path) -> None:
    run(tmp_path, "dqn", *FINAL, "total_frames=100")
    resumed = (f"resume={tmp_path}", "total_frames=200")
    summary: Any = run(tmp_path, "dqn", *FINAL, *resumed)
    assert summary["final_evaluation"]["last"]["frames"] == 200
    whole: Any = run(tmp_path / "whole", "dqn", *FINAL, "total_frames=200")
    assert summary["final_evaluation"]["last"] == whole["final_evaluation"]["last"]


def test_a_run_that_was_interrupted_is_not_judged(tmp_path: Path) -> None:
    words = ("env=gym", "env.id=Probe-v0", "env.kwargs={fault: SIGTERM, at: 30}", "total_frames=1000")
    with pytest.raises(SystemExit):
        run(tmp_path, "dqn", *FINAL, *words)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["status"], summary["final_evaluation"]) == ("interrupted", None)


def test_a_signal_meanwhile_ends_it_and_the_run_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save = training.Recorder.save_last

    def interrupted(recorder: training.Recorder) -> None:
        save(recorder)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(training.Recorder, "save_last", interrupted)
    summary = run(tmp_path, "dqn", *FINAL, "total_frames=40")
    assert (summary["status"], summary["final_evaluation"]) == ("finished", None)
    assert "the evaluation on fresh episodes is left out" in (tmp_path / "log.txt").read_text()


def test_whatever_happens_meanwhile_the_last_checkpoint_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the watchdog saves where an environment hangs for ever, also while the best policy is looked at."""
    fresh = training.Recorder._fresh
    contents: list[bytes] = []

    def hanging(recorder: training.Recorder, *arguments: Any) -> Any:
        recorder.save_last()
        contents.append((tmp_path / "checkpoints" / LAST).read_bytes())
        return fresh(recorder, *arguments)

    monkeypatch.setattr(training.Recorder, "_fresh", hanging)
    run(tmp_path, "sac", *FINAL, "total_frames=400", "eval.max_steps=10", "seed=3")
    assert len(contents) == 2
    assert contents[0] == contents[1] == (tmp_path / "checkpoints" / LAST).read_bytes()


@pytest.mark.parametrize("fault", ["at: 40", "at: 40, hang: true"])
def test_one_that_fails_is_told_and_counted(tmp_path: Path, fault: str) -> None:
    # The evaluation at the end of training takes 20 steps of its two environments; what follows breaks.
    broken = f"env.wrappers=[{{name: 'probes:Breaks', eval: {{{fault}}}}}]"
    words = ("env=pendulum", "total_frames=96", "eval.max_steps=15", "eval.num_envs=1", "env.timeout=0.3", broken)
    summary: Any = run(tmp_path, "ppo", *FINAL, "eval.interval=96", *words)
    assert (summary["status"], summary["final_evaluation"]) == ("finished", None)
    assert (summary["faults"]["evaluation"], summary["best_evaluation"]["frames"]) == (1, 96)
    assert "the evaluation on fresh episodes failed: " in (tmp_path / "log.txt").read_text()

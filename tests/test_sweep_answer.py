"""What the jobs of a sweep say together: tables, files, pictures, and the configuration that is best."""

from __future__ import annotations

import csv
import json
import re
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from compositions import run_config
from fakes import Rltool
from filelock import FileLock
from sweeps import BASE, Made

from rltool.composition import read_overrides
from rltool.config import load
from rltool.configfiles import ConfigFiles
from rltool.launch import check_jobs
from rltool.records import find_sweeps
from rltool.sweeps.answer import Answer, Ranking, answer
from rltool.sweeps.experiment import experiment
from rltool.sweeps.jobs import WINNER, fingerprint
from rltool.sweeps.report import report, text, write

DOCS = Path(__file__).parents[1] / "docs" / "sweeps.md"
RATES = ("optim.lr=0.001", "optim.lr=0.002", "optim.lr=0.003", "optim.lr=0.004", "optim.lr=0.005", "optim.lr=0.006")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("rltool.sweeps.answer._RESAMPLES", 200)


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pictures: they take seconds."""
    monkeypatch.setattr("rltool.sweeps.report.draw", lambda found, anew: ([], []))


def grid(path: Path, scores: Mapping[str, list[float]]) -> Made:
    made = Made(path / "s")
    made.grid(scores)
    return made


def only(found: Answer) -> Ranking:
    (ranking,) = found.rankings
    return ranking


def order(found: Answer) -> list[object]:
    return [one.trial if one.trial is not None else one.values.get("optim.lr") for one in only(found).ranked]


def said(made: Made, *, width: int = 80, final: bool = True) -> str:
    """The answer as it is printed, its lines run together."""
    return " ".join(text(answer(made.sweep), width, final=final).split())


# --------------------------------------------------------------------------------------------------------------- ranking


def test_configurations_are_ranked_by_their_mean_over_the_seeds(tmp_path: Path) -> None:
    made = grid(tmp_path, {RATES[0]: [1, 3], RATES[1]: [5, 9], RATES[2]: [0, 6]})
    ranking = only(answer(made.sweep))
    assert order(answer(made.sweep)) == [0.002, 0.003, 0.001]
    assert [one.mean.to_json() for one in ranking.ranked if one.mean] == [
        {"value": 7, "low": 5, "high": 9},  # the interval of two seeds is their range
        {"value": 3, "low": 0, "high": 6},
        {"value": 2, "low": 1, "high": 3},
    ]
    assert ranking.keys == ("optim.lr",)
    assert ranking.best is ranking.ranked[0]
    assert ranking.second is ranking.ranked[1]
    assert ranking.best.seeds == [0, 1]


def test_the_interquartile_mean_leaves_out_a_quarter_at_each_end(tmp_path: Path) -> None:
    made = grid(tmp_path, {RATES[0]: [0, 1, 3, 1000]})
    assert only(answer(made.sweep)).ranked[0].iqm.value == 2  # type: ignore[union-attr]
    assert "251 [" in said(made)
    assert re.search(r"seeds mean IQM 4 251 \[\d+, 750\] 2 ", said(made))


@pytest.mark.parametrize(
    ("best", "second", "worse", "words"),
    [
        ([6, 7, 8, 9], [1, 2, 3, 4], True, "1.00 [1.00, 1.00]: the second really is worse."),
        ([4, 5, 6, 7], [3, 4, 5, 6], False, "that may be chance."),
        ([6, 7, 8], [1, 2, 3], None, "1.00 [1.00, 1.00]: 3 seeds cannot tell."),  # 2 of 20 orders look so by chance
        ([6, 7], [1, 2], None, "2 seeds cannot tell."),
        ([6], [1], None, "with a probability of 1.00: 1 seed cannot tell."),
        ([6, 7, 8, 9, 10], [1, 2], None, "5 and 2 seeds cannot tell."),
    ],
)
def test_whether_the_second_is_really_worse(
    tmp_path: Path, best: list[float], second: list[float], worse: bool | None, words: str
) -> None:
    made = grid(tmp_path, {RATES[0]: second, RATES[1]: best})
    assert only(answer(made.sweep)).really_worse is worse
    assert f"Best: optim.lr=0.002: {sum(best) / len(best):.1f}"[:-2] in said(made)
    assert words in said(made)


def test_of_equal_ones_the_one_that_gets_there_first_is_the_best(tmp_path: Path) -> None:
    made = Made(tmp_path / "s")
    for number, (rate, at) in enumerate([(RATES[0], 900), (RATES[1], 400), (RATES[2], 600)]):
        made.job(str(number), f"{rate} seed=0", 500, curve=[(at, 480)])
    best = only(answer(made.sweep)).best
    assert best is not None
    assert best.values == {"optim.lr": 0.002}
    assert "3 configurations score the same; it is the one that reaches 475 in the fewest frames." in said(made)


def test_a_configuration_that_has_lost_jobs_is_incomplete(tmp_path: Path) -> None:
    made = grid(tmp_path, {RATES[0]: [1, 3], RATES[1]: [9, 9]})
    names = {job.name: fingerprint(job.config) for job in made.sweep.jobs}
    replace(made.sweep, details={"jobs": names}).write()
    shutil.rmtree(made.path / "3")
    assert order(answer(made.sweep)) == [0.001, 0.002]
    assert "1 of 2 9" in said(made)
    assert "1 lost" in said(made)


def test_a_trial_that_came_to_nothing_is_told(tmp_path: Path) -> None:
    made = search(tmp_path)
    replace(made.sweep, details={"failed": {"1": "a run has no auc"}}).write()
    assert "trial 1 failed: a run has no auc" in said(made)


def test_metrics_that_were_cut_off_are_told(tmp_path: Path) -> None:
    made = Made(tmp_path / "s")
    made.job("0", f"{RATES[0]} seed=0", 3, curve=[(500, 1)])
    lines = (made.path / "0" / "metrics.jsonl").read_text().splitlines()
    (made.path / "0" / "metrics.jsonl").write_text(lines[0] + "\n")
    (found,) = [note for note in answer(made.sweep).notes if note.startswith("not all can be read")]
    assert "of 0 (metrics.jsonl ends at " in found


def test_the_best_of_many_flatters_and_fresh_seeds_are_named(tmp_path: Path) -> None:
    made = grid(tmp_path, {RATES[0]: [1, 3, 4], RATES[1]: [5, 9, 6]})
    assert "It is the best of 2, chosen by the very seeds that it is scored on: that flatters." in said(made)
    assert "train -m --config-dir s experiment=best seed=3,4,5,6,7" in said(made)
    alone = Made(tmp_path / "t", ("seed",))
    alone.grid({"": [1, 2, 3]})
    assert "All seeds: 2.00" in said(alone)
    assert "flatters" not in said(alone)


def test_frames_to_the_threshold_count_those_that_never_got_there(tmp_path: Path) -> None:
    made = Made(tmp_path / "s")
    curves = [[(200, 480.0)], [(600, 480.0)], [], [(400, 475.0)], []]
    for seed, curve in enumerate(curves):
        made.job(f"{seed}", f"optim.lr=0.001 seed={seed}", 100.0, curve=curve)
    (row,) = only(answer(made.sweep)).ranked
    assert row.scores is not None
    assert len(row.scores.reached) == 3
    assert row.scores.frames_to_threshold == 600  # of 200, 400, 600, never, never
    made.job("5", "optim.lr=0.001 seed=5", 100.0)
    (row,) = only(answer(made.sweep)).ranked
    assert row.scores is not None
    assert row.scores.frames_to_threshold is None


def test_a_threshold_of_the_users_goes_first(tmp_path: Path) -> None:
    made = Made(tmp_path / "s", base=(*BASE, "stop.return_threshold=100"))
    made.grid({RATES[0]: [120, 90]})
    assert only(answer(made.sweep)).threshold == 100
    assert [result.reached for result in answer(made.sweep).results] == [(1000, None), None]


def test_fresh_episodes_count_where_all_jobs_have_them(tmp_path: Path) -> None:
    made = Made(tmp_path / "s")
    made.job("0", "optim.lr=0.001 seed=0", 10, fresh=2)
    made.job("1", "optim.lr=0.001 seed=1", 20, fresh=4)
    assert answer(made.sweep).at == "final"
    assert [result.score for result in answer(made.sweep).results] == [2, 4]
    made.job("2", "optim.lr=0.001 seed=2", 60)
    found = answer(made.sweep)
    assert found.at == "last"
    assert [result.score for result in found.results] == [10, 20, 60]
    assert "1 of 3 runs were not judged on fresh episodes" in " ".join(found.notes)


# ---------------------------------------------------------------------------------------- what failed, runs, or is missing


def test_what_failed_is_named_and_ranks_behind(
    tmp_path: Path, undrawn: None, capsys: pytest.CaptureFixture[str]
) -> None:
    made = grid(tmp_path, {RATES[0]: [1, 2]})
    made.job("2", "optim.lr=0.002 seed=0", 100)
    made.job(
        "3", "optim.lr=0.002 seed=1", status="failed", error="Traceback\n  deep\nNonFiniteError: a NaN in the loss"
    )
    made.job("4", "optim.lr=0.003 seed=0", status="killed")
    made.job("5", "optim.lr=0.003 seed=1", 9, status="interrupted", error="SIGINT")
    assert report(made.sweep, final=True) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "6 jobs: 3 finished, 1 failed, 1 killed, 1 interrupted" in out
    assert "3 of 6 jobs are not done, 1 failed, 1 killed, 1 interrupted:" in out
    assert "3 (optim.lr=0.002 seed=1) failed: NonFiniteError: a NaN in the loss s/3/console.log" in out
    assert "4 (optim.lr=0.003 seed=0) killed: its process is gone and said nothing" in out
    assert "5 (optim.lr=0.003 seed=1) interrupted: SIGINT" in out
    # Complete ones first, whatever half of another one scores; an interrupted job has no score.
    found = answer(made.sweep)
    assert order(found) == [0.001, 0.002, 0.003]
    assert "optim.lr=0.002 does better on 1 of 2 of its jobs; the others are missing." in out
    assert only(found).best is only(found).ranked[0]
    assert only(found).ranked[2].mean is None
    assert f"train -m {' '.join(BASE)} hydra.sweep.dir=s" in out
    assert "elsewhere" not in out


def test_a_sweep_can_be_looked_at_while_it_runs(
    tmp_path: Path, undrawn: None, capsys: pytest.CaptureFixture[str]
) -> None:
    made = grid(tmp_path, {RATES[0]: [1, 3]})
    made.job("2", "optim.lr=0.002 seed=0", 7)
    made.job("3", "optim.lr=0.002 seed=1", 1000, status="killed")
    made.job("4", "optim.lr=0.003 seed=0", status=None)
    with FileLock(made.path / "3" / ".lock"):
        assert report(made.sweep, final=False) == 0
        found = answer(made.sweep)
    out = " ".join(capsys.readouterr().out.split())
    assert "Best so far: optim.lr=0.001: 2.00 [1.00, 3.00] over 2 seeds." in out
    assert "1 of 2 7.00 1 running" in out
    assert "0 of 1 – 1 waiting" in out
    assert order(found) == [0.001, 0.002, 0.003]
    assert found.is_open
    assert "did not begin" not in out
    # Nobody runs it any more.
    assert "1 job did not begin. What is missing runs, and nothing else" in said(made, final=False)


def test_jobs_without_evaluations_have_no_score_and_say_so(tmp_path: Path, undrawn: None) -> None:
    made = Made(tmp_path / "s")
    made.job("0", "optim.lr=0.001 seed=0")
    assert "1 of 1 jobs that ended have no evaluation and no score: eval.interval=FRAMES evaluates" in said(made)
    assert only(answer(made.sweep)).best is None
    assert report(made.sweep, final=True) == 0
    assert not (made.path / "experiment").exists()


def test_failures_only_and_no_jobs_at_all(tmp_path: Path, undrawn: None) -> None:
    made = Made(tmp_path / "s")
    assert report(made.sweep, final=True) == 0
    assert "a grid of 0 jobs: none yet" in said(made)
    made.job("0", "optim.lr=0.001 seed=0", status="failed", error="OutOfMemoryError: none left")
    assert report(made.sweep, final=True) == 1
    assert "1 of 1 job failed: 0 (optim.lr=0.001 seed=0) failed: OutOfMemoryError: none left" in said(made)
    assert "Best" not in said(made)


def test_a_return_that_is_no_number_is_no_score(tmp_path: Path) -> None:
    made = Made(tmp_path / "s")
    made.job("0", "optim.lr=0.001 seed=0", 1, fresh=float("nan"))
    assert [result.score for result in answer(made.sweep).results] == [None]


# -------------------------------------------------------------------------------------------------------------- searches


def search(path: Path) -> Made:
    """Three trials of two seeds, the last of which was pruned."""
    made = Made(path / "s", kind="tune")
    for trial, scores in enumerate([[1, 3], [5, 7], [50, 70]]):
        for seed, score in enumerate(scores):
            status = "pruned" if trial == 2 else "finished"
            made.job(f"{trial}-{seed}", f"{RATES[trial]} seed={seed}", score, trial=trial, status=status)
    return made


def test_trials_are_ranked_and_pruned_ones_come_last(tmp_path: Path, undrawn: None) -> None:
    made = search(tmp_path)
    assert order(answer(made.sweep)) == [1, 0, 2]
    assert "Best: trial 1 (optim.lr=0.002): 6.0" in said(made)
    assert re.search(r"2 0\.003 2 60\.0 \[50\.0, 70\.0\] pruned", said(made))
    assert "flatters" in said(made)
    assert report(made.sweep, final=True) == 0


def test_equal_trials_are_trials_of_their_own(tmp_path: Path) -> None:
    made = Made(tmp_path / "s", kind="tune")
    for trial, score in enumerate([4, 8]):
        made.job(f"{trial}-0", "optim.lr=0.001 seed=0", score, trial=trial)
    assert order(answer(made.sweep)) == [1, 0]


def test_the_winner_on_fresh_seeds_is_told_apart(tmp_path: Path) -> None:
    made = search(tmp_path)
    for seed, score in enumerate([4, 5, 6]):
        made.job(f"winner-1-{seed}", f"{RATES[1]} seed={100 + seed}", score, trial=1)
    made.job("winner-0-0", f"{RATES[0]} seed=100", 1000, trial=0)  # when the search had fewer trials, it was the best
    ranking = only(answer(made.sweep))
    assert ranking.best is not None
    assert ranking.best.trial == 1
    assert ranking.best.mean is not None
    assert ranking.best.mean.value == 6  # the fresh runs are none of the trial's
    assert "The winner on fresh seeds: 5.0 [4.0, 6.0] over 3 seeds. That is the number to quote." in said(made)
    assert "flatters" not in said(made)
    made.job("winner-1-3", f"{RATES[1]} seed=103", status=None, trial=1)
    assert "5.0 [4.0, 6.0] over 3 seeds (3 of 4 jobs)" in said(made)


def test_the_search_has_the_last_word_on_its_winner(tmp_path: Path) -> None:
    made = search(tmp_path)
    made.job("winner-0-0", f"{RATES[0]} seed=100", 4, trial=0)
    best, second = only(answer(made.sweep)).best, only(answer(made.sweep)).second
    assert best is not None
    assert second is not None
    assert (best.trial, second.trial) == (0, 1)
    made.job("3-0", f"{RATES[3]} seed=0", status=None, trial=3)  # while it goes on there is none
    best = only(answer(made.sweep)).best
    assert best is not None
    assert best.trial == 1


def test_a_job_that_was_called_off_before_it_began_waits_for_nothing(tmp_path: Path) -> None:
    made = search(tmp_path)
    made.job("2-2", f"{RATES[2]} seed=2", status=None, trial=2)
    made.sweep.jobs[-1].stop_file.touch()
    found = answer(made.sweep)
    assert not found.is_open
    assert found.counts == {"finished": 4, "pruned": 3}
    assert order(found) == [1, 0, 2]
    assert found.results[-1].to_json()["frames"] is None


def test_trials_are_ranked_by_the_objective_of_the_search(tmp_path: Path) -> None:
    def made(name: str, *objectives: str) -> Made:
        base = (*BASE, "total_frames=1000", "stop.return_threshold=400")
        one = Made(tmp_path / name, base=base, kind="tune", details={"objective": list(objectives)})
        one.job("0-0", "optim.lr=0.001 seed=0", 500, curve=[(0, 0.0)], trial=0)
        one.job("1-0", "optim.lr=0.002 seed=0", 400, curve=[(0, 400.0)], trial=1)
        one.job("2-0", "optim.lr=0.003 seed=0", 300, curve=[(0, 300.0)], trial=2)
        return one

    assert order(answer(made("a", "final").sweep)) == [0, 1, 2]
    areas = answer(made("b", "auc").sweep)
    assert [(one.trial, one.objective) for one in only(areas).ranked] == [(1, 400), (2, 300), (0, 250)]
    frames = answer(made("c", "frames").sweep)
    # 2 never got there: twice its budget of 1000 frames
    assert [(one.trial, one.objective) for one in only(frames).ranked] == [(1, 0), (0, -1000), (2, -2000)]
    assert only(frames).better.value == 1  # type: ignore[union-attr]  # though its policy is the worse one in the end
    assert "In frames to the threshold it beats the second, trial 0" in said(made("e", "frames"))
    several = made("d", "final", "frames")
    assert order(answer(several.sweep)) == [0, 1, 2]
    assert [one.trial for one in only(answer(several.sweep)).front] == [0, 1]
    assert "ranked by the first of several objectives (final, frames)" in said(several)
    assert "The Pareto front of the objectives: trials 0, 1." in said(several)


# ------------------------------------------------------------------------------------------------------------------ files


def contents(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


def test_files_are_written_beside_the_jobs(tmp_path: Path, undrawn: None) -> None:
    made = grid(tmp_path, {RATES[0]: [1, 3], RATES[1]: [475, 9]})
    made.job("4", "optim.lr=0.003 seed=0", status="failed", error='a "quoted", error')
    before = contents(made.path)
    report(made.sweep, final=True)
    after = contents(made.path)
    assert {name: after[name] for name in before} == before
    assert set(after) - set(before) == {"results.csv", "summary.md", "experiment/best.yaml"}
    rows = list(csv.DictReader((made.path / "results.csv").read_text().splitlines()))
    assert [list(row.values()) for row in rows[2:]] == [
        ["2", "finished", "0.002", "0", "475.0", "1000", "10.0", "1000", ""],
        ["3", "finished", "0.002", "1", "9.0", "1000", "10.0", "", ""],
        ["4", "failed", "0.003", "0", "", "0", "10.0", "", 'a "quoted", error'],
    ]
    assert list(rows[0]) == [
        "name", "status", "optim.lr", "seed", "score", "frames", "seconds", "frames_to_threshold", "error"
    ]  # fmt: skip
    page = (made.path / "summary.md").read_text()
    assert re.search(r"^\| lr +\| seeds +\| mean ", page, re.MULTILINE)
    for words in (
        "## CartPole-v1, solved at 475",
        "Best: optim.lr=0.002",
        "## What is not done",
        "experiment=best seed=0",
    ):
        assert words in page
    assert "tensorboard --logdir s" in page


def test_the_table_fits_the_terminal(tmp_path: Path) -> None:
    keys = ("optim.lr", "algo.gae_lambda", "algo.clip_epsilon", "algo.entropy_coeff", "network.hidden", "seed")
    made = Made(tmp_path / "s", keys)
    for number in range(16):
        words = [
            f"optim.lr={0.001 + number / 1e5}",
            f"algo.gae_lambda=0.9{number:02}",
            f"algo.clip_epsilon=0.{number + 1}",
        ]
        words += [f"algo.entropy_coeff=0.0{number}", f"network.hidden=[{number + 1},64,64,64,64,64]"]
        for seed in range(1 if number else 4):
            made.job(f"{number}-{seed}", " ".join([*words, f"seed={seed}"]), 1000.0 + number + seed, curve=[(0, 480.0)])
    found = answer(made.sweep)
    for width in (80, 120):
        lines = text(found, width, final=True).splitlines()
        assert all(len(line) <= width for line in lines if "train -m" not in line), width
        told = " ".join("\n".join(lines).partition("no room for: ")[2].partition("; see")[0].split())
        assert told.startswith("seconds to 475, IQM")
        assert ("hidden" in told) == (width == 80)
        assert "… and 1 more, in summary.md" in lines
    assert "no room for" not in text(found, 400, final=True)


def test_environments_have_a_table_and_a_best_each(tmp_path: Path, undrawn: None) -> None:
    made = Made(tmp_path / "s", ("env", "optim.lr", "seed"), base=("algo=ppo", "tuned=none"))
    scores = {("cartpole", 1): [1, 2], ("cartpole", 2): [3, 4], ("acrobot", 1): [6, 7], ("acrobot", 2): [5, 5]}
    for (env, rate), of in scores.items():
        for seed, score in enumerate(of):
            made.job(f"{env}-{rate}-{seed}", f"env={env} optim.lr=0.00{rate} seed={seed}", score)
    found = answer(made.sweep)
    best = {ranking.env: ranking.best.values for ranking in found.rankings if ranking.best is not None}
    assert best == {"Acrobot-v1": {"optim.lr": 0.001}, "CartPole-v1": {"optim.lr": 0.002}}
    write(found, final=True)
    for env, values in best.items():
        tree = yaml.safe_load((made.path / "experiment" / f"best-{env}.yaml").read_text())
        assert (tree["env"]["id"], tree["optim"]["lr"]) == (env, values["optim.lr"])
    assert "experiment=best-Acrobot-v1 seed=2,3,4,5,6" in said(made)


def test_a_directory_that_cannot_be_written_into_is_no_end(tmp_path: Path, undrawn: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    def refuse(path: Path, content: bytes) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("rltool.sweeps.report.replace_file", refuse)
    made = grid(tmp_path, {RATES[0]: [1, 3]})
    assert report(made.sweep, final=True) == 0
    out = capsys.readouterr().out
    assert "All seeds: 2.00" in out
    assert "Cannot write into s: Permission denied." in out


# --------------------------------------------------------------------------------------------------------- experiment=best


@pytest.mark.parametrize(
    "words",
    [
        ("algo=ppo", "env=cartpole", "optim.lr=0.5", "seed=7"),  # there are tuned values for the pair
        ("algo=dqn", "env=cartpole", "tuned=none", "algo.max_grad_norm=null", "network.hidden=[]", "seed=7"),
        pytest.param(("algo=sac", "env=pendulum", "optim=adamw", "stop=hopeless", "logging=none", "eval=none", "seed=7"), marks=pytest.mark.long),
        ("algo=ppo", "env=gym", "env.id=FrozenLake-v1", "env.kwargs.is_slippery=false", "+env.kwargs.note='1e-3'", "seed=7"),
        ("algo=dqn", "env=atari", "env.game=Breakout", "buffer=prioritized", "plugins=[a_b]", "seed=7"),
    ],
)  # fmt: skip
def test_the_best_configuration_composes_to_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    (tmp_path / "a_b.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    config = run_config(*words)
    path = tmp_path / "sweep" / "experiment" / "best.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(experiment(["Best of it"], config.model_dump(mode="json"), words))
    files = ConfigFiles.find_main((tmp_path / "sweep",))
    (job,) = check_jobs(read_overrides(["experiment=best"], files), files)
    assert job.config.model_dump() == config.model_copy(update={"seed": 0}).model_dump()
    assert job.composition.tuned is None
    names = {word.partition("=")[0]: word.partition("=")[2] for word in words}
    assert {group: job.composition.choices[group] for group in ("env", "algo")} == {
        group: names[group] for group in ("env", "algo")
    }
    assert files.read("experiment", "best").description == "Best of it"


def test_an_option_that_would_leave_something_behind_is_not_chosen(tmp_path: Path) -> None:
    config = run_config("algo=dqn", "env=atari", "seed=7").model_dump(mode="json")
    config["env"]["kwargs"] = {"mode": 1}  # and no frameskip, which every option has
    path = tmp_path / "experiment" / "best.yaml"
    path.parent.mkdir()
    path.write_text(experiment(["x"], config, ["env=atari"]))
    files = ConfigFiles.find_main((tmp_path,))
    (job,) = check_jobs(read_overrides(["experiment=best", "seed=7"], files), files)
    assert job.config == load(config)
    assert "override /env: atari" not in path.read_text()


def test_the_words_of_a_reference_stay_words(tmp_path: Path) -> None:
    config = run_config("algo=ppo", "env=cartpole", "seed=0").model_dump(mode="json")
    config["env"]["kwargs"] = {"note": "${seed}"}
    path = tmp_path / "experiment" / "best.yaml"
    path.parent.mkdir()
    path.write_text(experiment(["x"], config, []))
    files = ConfigFiles.find_main((tmp_path,))
    (job,) = check_jobs(read_overrides(["experiment=best"], files), files)
    assert job.config.env.kwargs == {"note": "${seed}"}


# --------------------------------------------------------------------------------------------------------------- pictures


@pytest.mark.long
def test_pictures_are_drawn_and_drawn_anew_when_something_changed(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    pytest.importorskip("plotly")
    made = Made(tmp_path / "s", ("optim.lr", "network.hidden", "seed"))
    for number in range(6):
        made.job(f"{number}", f"optim.lr=0.00{number % 3 + 1} network.hidden=[{8 << number % 2}] seed=0", float(number))
    names, missing = write(answer(made.sweep), final=True)
    drawn = ["parallel.png", "parallel.html", "importance.png", "importance.html"]
    assert names[-4:] == drawn
    assert missing == []
    for name in drawn:
        content = (made.path / name).read_bytes()
        assert content.startswith(b"\x89PNG" if name.endswith("png") else b"<!doctype html>")
        assert name.endswith("png") or (b"plotly.min.js" in content and len(content) < 100_000)
    assert (made.path / "plotly.min.js").stat().st_size > 1e6
    (made.path / "parallel.png").write_bytes(b"old")
    assert write(answer(made.sweep), final=True) == (names, missing)
    assert (made.path / "parallel.png").read_bytes() == b"old"
    made.job("6", "optim.lr=0.009 network.hidden=[8] seed=0", 2.0)
    write(answer(made.sweep), final=True)
    assert (made.path / "parallel.png").read_bytes() != b"old"


def test_without_the_extra_the_table_is_made_and_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    made = grid(tmp_path, {RATES[0]: [1, 3], RATES[1]: [5, 9]})
    assert report(made.sweep, final=True) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "Best: optim.lr=0.002: 7.00 [5.00, 9.00]" in out
    assert "Install the extra: pip install 'rltool[sweep]'" in out
    assert not list(made.path.glob("*.png"))


@pytest.mark.long
def test_what_cannot_be_drawn_is_told_in_a_few_words(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    alone = grid(tmp_path, {RATES[0]: [1, 3]})
    assert write(answer(alone.sweep), final=True)[1] == []
    assert not list(alone.path.glob("*.png"))
    few = Made(tmp_path / "few", ("optim.lr", "algo.gamma", "seed"))
    for number in range(2):
        few.job(f"{number}", f"optim.lr=0.00{number + 1} algo.gamma=0.9{number} seed=0", 1.0)
    names, missing = write(answer(few.sweep), final=True)
    assert names[-2:] == ["parallel.png", "parallel.html"]
    assert missing == ["there is no importance.png: 2 configurations are too few to weigh keys by; 6 are the least"]


# ---------------------------------------------------------------------------------------------------------------- command


@pytest.fixture
def sweep(tmp_path: Path, undrawn: None) -> Callable[[str], Made]:
    def make(name: str) -> Made:
        made = Made(tmp_path / "runs" / "sweeps" / name)
        made.grid({RATES[0]: [1, 3], RATES[1]: [5, 9]})
        return made

    return make


def test_sweeps_are_listed_and_found_by_the_end_of_their_names(rltool: Rltool, sweep: Callable[[str], Made]) -> None:
    assert rltool("sweep") == (0, "no sweeps in runs; rltool train -m … makes them\n", "")
    first, second = sweep("2026-01-01-00-00-00-aaaaaa"), sweep("2026-01-02-00-00-00-bbbbbb")
    second.job("4", "optim.lr=0.003 seed=0", status="failed", error="no")
    assert find_sweeps(Path("runs")) == [
        Path("runs/sweeps/2026-01-02-00-00-00-bbbbbb"),
        Path("runs/sweeps") / first.path.name,
    ]
    code, out, _ = rltool("sweep")
    assert code == 0
    assert [line.split() for line in out.splitlines()] == [
        ["sweep", "kind", "jobs", "varied"],
        [str(Path("runs/sweeps") / second.path.name), "grid", "4", "finished,", "1", "failed", "optim.lr,", "seed"],
        [str(Path("runs/sweeps") / first.path.name), "grid", "4", "finished", "optim.lr,", "seed"],
    ]
    rows = json.loads(rltool("sweep", "--json")[1])
    assert [(row["kind"], row["varied"], row["statuses"]) for row in rows] == [
        ("grid", ["optim.lr", "seed"], {"finished": 4, "failed": 1}),
        ("grid", ["optim.lr", "seed"], {"finished": 4}),
    ]
    code, out, err = rltool("sweep", "aaaaaa")
    assert (code, err) == (0, "")
    assert "Best: optim.lr=0.002" in out
    assert "Written to runs/sweeps/2026-01-01-00-00-00-aaaaaa: results.csv" in out.replace("\n", " ")
    assert rltool("sweep", "bbbbbb")[0] == 1


def test_a_sweep_that_cannot_be_read_does_not_hide_the_others(rltool: Rltool, sweep: Callable[[str], Made]) -> None:
    sweep("2026-01-01-00-00-00-aaaaaa")
    broken = sweep("2026-01-02-00-00-00-bbbbbb")
    (broken.path / "sweep.json").write_text('{"kind": ')
    code, out, err = rltool("sweep")
    assert code == 0
    assert "aaaaaa" in out
    assert "bbbbbb" not in out
    assert "warning: left out: " in err
    assert "What it says is written anew by the same command with hydra.sweep.dir=DIRECTORY" in err
    assert rltool("sweep", "bbbbbb")[0] == 2


def test_a_sweep_is_drawn_and_compared_by_its_name(rltool: Rltool, sweep: Callable[[str], Made]) -> None:
    sweep("2026-01-01-00-00-00-aaaaaa")
    code, out, _ = rltool("compare", "aaaaaa")
    assert code == 0
    assert "lr=0.002" in out


def test_fresh_runs_of_a_winner_are_not_pooled_unsaid(rltool: Rltool, tmp_path: Path) -> None:
    made = Made(tmp_path / "runs" / "sweeps" / "2026-01-01-00-00-00-aaaaaa", kind="tune")
    made.grid({RATES[0]: [1, 3], RATES[1]: [5, 9]})
    for seed in (5, 6):
        made.job(f"{WINNER}1-{seed}", f"{RATES[1]} seed={seed}", 7, trial=1)
    assert "the winner of a search on fresh seeds" in " ".join(rltool("compare", "aaaaaa")[1].split())
    assert "the winner of a search" not in rltool("compare", "aaaaaa/0", "aaaaaa/1", "--", f"aaaaaa/{WINNER}1-5")[1]


def test_what_is_no_sweep_names_what_may_be_meant(rltool: Rltool, sweep: Callable[[str], Made]) -> None:
    for name in ("a-x", "b-x"):
        sweep(name)
    for words, told in (
        (["runs/sweeps/a-x/0"], "found none in runs/sweeps/a-x/0. Did you mean runs/sweeps/a-x?"),
        (["runs"], "found none in runs. Did you mean runs/sweeps/"),
        (["nowhere"], "there is no nowhere. rltool sweep lists the sweeps there are"),
        (["x"], "x may be any of 2 sweeps: runs/sweeps/"),
        (["a", "b"], "expected one sweep, found a b"),
    ):
        code, out, err = rltool("sweep", *words)
        assert (code, out) == (2, "")
        assert told in err


def test_json_keeps_its_promises(rltool: Rltool, sweep: Callable[[str], Made]) -> None:
    made = sweep("a-x")
    made.job("4", "optim.lr=0.003 seed=0", status="failed", error="no")
    code, out, err = rltool("sweep", "x", "--json")
    assert (code, err) == (1, "")
    tree = json.loads(out)
    env = tree["environments"]["CartPole-v1"]
    best = env["configurations"][env["best"]]
    assert (best["values"], best["jobs"], best["mean"]["value"]) == ({"optim.lr": 0.002}, ["2", "3"], 7)
    assert tree["failures"] == [
        {"name": "4", "title": "optim.lr=0.003 seed=0", "error": "no", "console": str(made.path / "4" / "console.log")}
    ]
    assert tree["files"][:2] == ["results.csv", "summary.md"]
    told = set(re.findall(r"`(\w+)`", DOCS.read_text(encoding="utf-8").partition("### As JSON")[2]))
    keys = {*tree, *env, *best, *tree["jobs"][0], *tree["failures"][0]} - {"optim.lr"}
    assert keys <= told, keys - told


def test_completion_offers_sweeps(
    rltool: Rltool, sweep: Callable[[str], Made], monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep("a-x")
    monkeypatch.setenv("COMP_LINE", "rltool sweep runs/")
    assert rltool("-sc", "query=bash")[1] == "runs/sweeps/a-x\n"

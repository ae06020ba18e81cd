"""rltool compare: estimates of several seeds, and the tables and pictures made of them."""

from __future__ import annotations

import csv
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from fakes import Rltool, fake_run

from rltool.comparison import SUMMARISED, choose_score, compare, score_of
from rltool.estimates import Estimate, band, estimate, improvement, iqm, mean, median
from rltool.grouping import Group
from rltool.records import Record

N = 500  # resamples


def array(*values: float) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.array(values, float)


# -------------------------------------------------------------------------------------------------------------- estimates


def test_estimates_of_known_numbers() -> None:
    assert iqm(array(8, 1, 2, 7, 3, 6, 5, 4)) == 4.5  # (3 + 4 + 5 + 6) / 4
    assert iqm(array(0, 1, 2, 1000)) == 1.5
    assert iqm(array(1, 2, 3, 4), array(5, 6, 7, 8)) == 4.5  # of all strata together
    assert mean(array(0, 2), array(10, 20, 30)) == 10.5  # of the strata's means, 1 and 20
    assert median(array(1, 2, 30)) == 2
    assert median(array(0, 2), array(10, 20, 30), array(5)) == 5  # of the strata's means
    assert improvement(array(2, 3), array(1, 2)) == 0.875  # three pairs and a tie, of four
    assert improvement(array(1, 2), array(1, 2)) == 0.5
    assert improvement(array(2, 3), array(0), array(1, 2), array(1)) == (0.875 + 0) / 2


def test_the_interval_of_two_seeds_is_their_range() -> None:
    # A quarter of the resamples takes the one twice, a quarter the other: both lie within 95 %.
    assert estimate([array(0, 1)], mean, N) == Estimate(0.5, 0.0, 1.0)


def test_the_interval_of_many_seeds_is_the_normal_one() -> None:
    scores = np.random.default_rng(0).normal(size=400)
    found = estimate([scores], mean, 4000)
    error = scores.std() / np.sqrt(len(scores))
    assert found.low is not None
    assert found.high is not None
    np.testing.assert_allclose(
        [found.low, found.high], scores.mean() + np.array([-1.96, 1.96]) * error, atol=0.1 * error
    )
    assert found.low < found.value < found.high


def test_equal_seeds_have_an_interval_of_no_width_and_one_seed_has_none() -> None:
    assert estimate([array(3, 3, 3)], iqm, N) == Estimate(3.0, 3.0, 3.0)
    assert estimate([array(3)], iqm, N) == Estimate(3.0, None, None)
    assert estimate([array(2, 3), array(1)], improvement, N) == Estimate(1.0, None, None)
    assert band(np.zeros((1, 5)), mean, N) is None


def test_seeds_are_resampled_within_their_environment() -> None:
    assert estimate([array(0, 0), array(10, 10)], mean, N) == Estimate(5.0, 5.0, 5.0)


def test_the_same_scores_give_the_same_interval() -> None:
    assert estimate([array(1, 5, 6, 9)], iqm, N) == estimate([array(1, 5, 6, 9)], iqm, N)


# ------------------------------------------------------------------------------------------------------------------ tables


def runs(root: Path, curves: Sequence[Sequence[tuple[int, float]]], **changes: object) -> str:
    """A run for each curve, with seeds 0, 1, …; returns the directory as one would type it."""
    for seed, curve in enumerate(curves):
        fake_run(root / str(seed), curve, seed=seed, **changes)  # type: ignore[arg-type]
    return root.name


def judged(root: Path, *scores: float, **changes: object) -> str:
    """A run for each score of fresh episodes, the last evaluation in training 100 below it."""
    for seed, score in enumerate(scores):
        fake_run(root / str(seed), [(100, score), (200, score - 100)], seed=seed, fresh=score, **changes)  # type: ignore[arg-type]
    return root.name


def ends(*scores: float) -> list[list[tuple[int, float]]]:
    """Curves of two evaluations, the last of which is the score; the first is better."""
    return [[(100, score + 1000), (200, score)] for score in scores]


def read(rltool: Rltool, *words: str) -> dict[str, object]:
    code, out, err = rltool("compare", *words, "--json")
    assert (code, err) == (0, "")
    tree = json.loads(out)
    assert list(tree) == ["metric", "at", "environments", "all", "notes"]
    assert isinstance(tree, dict)
    return tree


def test_the_score_is_that_of_the_last_policy_on_fresh_episodes(rltool: Rltool, tmp_path: Path) -> None:
    a, b = judged(tmp_path / "a", 302, 303), judged(tmp_path / "b", 301, 302, algo="dqn")
    tree = read(rltool, a, "--", b)
    groups = tree["environments"]["CartPole-v1"]["groups"]  # type: ignore[index]
    assert tree["at"] == "final"
    assert [run["score"] for run in groups["ppo"]["runs"]] == [302, 303]
    assert groups["dqn"]["mean"] == {"value": 301.5, "low": 301.0, "high": 302.0}
    assert rltool("compare", a, "--", b)[1].startswith(
        "Scores: eval/return_mean of the last policy, on fresh episodes after training."
    )


def test_where_one_run_was_not_judged_all_have_the_last_evaluation(rltool: Rltool, tmp_path: Path) -> None:
    a, b = judged(tmp_path / "a", 302, 303), judged(tmp_path / "b", 301, algo="dqn")
    fake_run(tmp_path / "b/1", [(100, 7.0), (200, 5.0)], seed=1, algo="dqn")
    tree = read(rltool, a, "--", b)
    groups = tree["environments"]["CartPole-v1"]["groups"]  # type: ignore[index]
    assert tree["at"] == "last"
    assert [run["score"] for name in ("ppo", "dqn") for run in groups[name]["runs"]] == [202, 203, 201, 5]
    assert tree["notes"][0] == (  # type: ignore[index]
        "1 of 4 runs were not judged on fresh episodes after training; the last evaluation in training counts for all"
    )
    assert rltool("compare", a, "--", b)[1].startswith("Scores: eval/return_mean, the last value in training.")


def test_fresh_episodes_say_nothing_of_other_metrics(rltool: Rltool, tmp_path: Path) -> None:
    points = [{"frames": 200, "episode/return": 4.0}]
    a, b = judged(tmp_path / "a", 302, points=points), judged(tmp_path / "b", 301, points=points)
    tree = read(rltool, f"a={a}", "--", f"b={b}", "metric=episode/return")
    assert tree["at"] == "last"
    assert tree["environments"]["CartPole-v1"]["groups"]["a"]["runs"][0]["score"] == 4  # type: ignore[index]
    assert "fresh" not in " ".join(tree["notes"])  # type: ignore[arg-type]


def test_groups_of_ones_own_are_compared(tmp_path: Path) -> None:
    judged(tmp_path, 1, 3)
    notes: list[str] = []
    groups = [Group(f"job {seed}", (Record(tmp_path / str(seed)),)) for seed in (0, 1)]
    assert choose_score(groups, SUMMARISED, "final", notes) == "final"
    assert [score_of(group.runs[0], SUMMARISED, at) for group in groups for at in ("final", "last", "best")] == [
        1, -99, 1, 3, -97, 3,
    ]  # fmt: skip
    scores = compare(groups, "CartPole-v1", None, metric=SUMMARISED, at="final", resamples=N, notes=notes)
    assert [group.estimate for group in scores.groups.values()] == [Estimate(1.0), Estimate(3.0)]
    assert scores.improvements[0].probability.value == 0


def test_the_score_is_that_of_the_last_evaluation(rltool: Rltool, tmp_path: Path) -> None:
    a, b = runs(tmp_path / "a", ends(2, 3)), runs(tmp_path / "b", ends(1, 2), algo="dqn")
    env = read(rltool, a, "--", b, "at=last")["environments"]["CartPole-v1"]  # type: ignore[index]
    assert list(env["groups"]) == ["ppo", "dqn"]
    assert env["groups"]["ppo"]["mean"] == {"value": 2.5, "low": 2.0, "high": 3.0}
    assert [run["score"] for run in env["groups"]["dqn"]["runs"]] == [1, 2]
    (pair,) = env["improvement"]
    assert (pair["a"], pair["b"], pair["value"]) == ("ppo", "dqn", 0.875)
    assert pair["low"] < 0.875 <= pair["high"] == 1


def test_the_best_evaluation_flatters_and_says_so(rltool: Rltool, tmp_path: Path) -> None:
    a, b = runs(tmp_path / "a", ends(2, 3)), runs(tmp_path / "b", ends(1, 2), algo="dqn")
    tree = read(rltool, a, "--", b, "at=best")
    assert tree["environments"]["CartPole-v1"]["groups"]["ppo"]["mean"]["value"] == 1002.5  # type: ignore[index]
    assert "it flatters" in " ".join(tree["notes"])  # type: ignore[arg-type]


def test_the_mean_over_training_is_over_the_frames_that_all_have(rltool: Rltool, tmp_path: Path) -> None:
    a = runs(tmp_path / "a", [[(0, 0), (100, 10), (1000, 10_000)]])  # 5 on average up to frame 100
    b = runs(tmp_path / "b", [[(0, 2), (50, 4), (100, 2)]], algo="dqn")  # 3
    tree = read(rltool, a, "--", b, "at=auc")
    groups = tree["environments"]["CartPole-v1"]["groups"]  # type: ignore[index]
    assert [groups[name]["mean"]["value"] for name in ("ppo", "dqn")] == [5, 3]
    assert "CartPole-v1: the mean is over frames 0 to 100, which all runs have" in tree["notes"]  # type: ignore[operator]


def test_frames_and_seconds_to_the_threshold(rltool: Rltool, tmp_path: Path) -> None:
    curves = [[(100, 1.0), (200, 9.0), (300, 1.0)], [(100, 1.0), (300, 9.0)], [(300, 1.0)]]
    points = [{"frames": 300, "time/frames_per_second": 10.0}]
    a, b = runs(tmp_path / "a", curves, points=points), runs(tmp_path / "b", curves[2:], points=points, algo="dqn")
    groups = read(rltool, a, "--", b, "threshold=9")["environments"]["CartPole-v1"]["groups"]  # type: ignore[index]
    assert groups["ppo"]["reached"] == 2
    assert groups["ppo"]["frames_to_threshold"] == 300  # of 200, 300 and never
    assert groups["ppo"]["seconds_to_threshold"] == 30
    assert [run["seconds_to_threshold"] for run in groups["ppo"]["runs"]] == [20, 30, None]
    assert groups["dqn"]["reached"] == 0
    assert groups["dqn"]["frames_to_threshold"] is None


def test_what_makes_an_interval_less_than_it_looks_is_said(rltool: Rltool, tmp_path: Path) -> None:
    a, b = runs(tmp_path / "a", ends(2, 2)), runs(tmp_path / "b", [[(500, 1.0)]], algo="dqn", status=None)
    notes = read(rltool, a, "--", b, "at=last")["notes"]
    assert notes == [
        "ppo: all seeds on CartPole-v1 score the same; an interval of no width says nothing of other seeds",
        "dqn: one seed on CartPole-v1; an interval over one seed cannot be had",
        "dqn: not every run on CartPole-v1 is finished (1 killed); what they have measured so far counts",
        "CartPole-v1: unequal numbers of seeds: 2 ppo, 1 dqn",
        "CartPole-v1: unequal budgets (median frames): ppo 200; dqn 500",
    ]


def test_several_environments_are_strata(rltool: Rltool, tmp_path: Path) -> None:
    for env, factor in (("CartPole-v1", 475), ("LunarLander-v3", 200)):  # their thresholds
        runs(tmp_path / f"a-{env}", ends(1.0 * factor, 1.2 * factor), env=env)
        runs(tmp_path / f"b-{env}", ends(0.4 * factor, 0.6 * factor, 0.8 * factor), env=env, algo="dqn")
    both = read(rltool, "a-*", "--", "b-*")["all"]
    found = both["normalised"]  # type: ignore[index]
    np.testing.assert_allclose([found["ppo"]["mean"]["value"], found["dqn"]["mean"]["value"]], [1.1, 0.6])
    assert both["improvement"][0]["value"] == 1  # type: ignore[index]


def test_without_a_threshold_nothing_is_normalised(rltool: Rltool, tmp_path: Path) -> None:
    for env in ("CartPole-v1", "Pendulum-v1"):
        runs(tmp_path / f"a-{env}", ends(3, 4), env=env)
        runs(tmp_path / f"b-{env}", ends(1, 2), env=env, algo="dqn")
    tree = read(rltool, "a-*", "--", "b-*")
    assert tree["all"]["normalised"] == {}  # type: ignore[index]
    assert tree["all"]["improvement"][0]["value"] == 1  # type: ignore[index]
    assert "Pendulum-v1 has no threshold above 0" in " ".join(tree["notes"])  # type: ignore[arg-type]


def test_an_environment_that_one_group_lacks_is_no_part_of_the_whole(rltool: Rltool, tmp_path: Path) -> None:
    for env in ("CartPole-v1", "LunarLander-v3", "Acrobot-v1"):
        runs(tmp_path / f"a-{env}", ends(3, 4), env=env)
        if env != "Acrobot-v1":
            runs(tmp_path / f"b-{env}", ends(1, 2), env=env, algo="dqn")
    tree = read(rltool, "a-*", "--", "b-*")
    assert list(tree["environments"]["Acrobot-v1"]["groups"]) == ["ppo"]  # type: ignore[index]
    assert "a group has no score there: Acrobot-v1" in " ".join(tree["notes"])  # type: ignore[arg-type]
    assert "Acrobot-v1: no group but ppo has a score there" in tree["notes"]  # type: ignore[operator]


def test_no_table_is_empty(rltool: Rltool, tmp_path: Path) -> None:
    for env in ("CartPole-v1", "Pendulum-v1"):
        runs(tmp_path / f"a-{env}", ends(3, 4), env=env)
    b = runs(tmp_path / "b", ends(1, 2), algo="dqn")
    lines = rltool("compare", "a-*", "--", b)[1].splitlines()
    rules = [number for number, line in enumerate(lines) if line.startswith("|--")]
    assert len(rules) == 6
    assert all(lines[number + 1].startswith("| ") for number in rules)


def test_a_group_is_labelled_by_what_its_runs_share(rltool: Rltool, tmp_path: Path) -> None:
    for name, lr, gamma in (("0", 1e-3, 0.9), ("1", 3e-4, 0.9), ("2", 1e-3, 0.8)):
        runs(tmp_path / name, ends(1, 2), optim__lr=lr, algo__gamma=gamma)
    tree = read(rltool, "0", "1", "--", "2")
    assert list(tree["environments"]["CartPole-v1"]["groups"]) == ["gamma=0.9", "gamma=0.8"]  # type: ignore[index]
    assert "gamma=0.9: runs on CartPole-v1 are taken together that differ in optim.lr" in tree["notes"]  # type: ignore[operator]
    tree = read(rltool, "0", "1", "--", "0")
    assert list(tree["environments"]["CartPole-v1"]["groups"]) == ["ppo", "ppo, lr=0.001"]  # type: ignore[index]


@pytest.mark.long
def test_long_labels_are_cut_in_the_terminal_and_whole_in_files(rltool: Rltool, tmp_path: Path) -> None:
    for number in range(4):
        changes = {f"algo__{letter * 24}": number // size % 2 for letter, size in (("a", 1), ("b", 2))}
        runs(tmp_path / f"runs/{number}", ends(210 + number, 250.5, 300), **changes)
    code, out, _ = rltool("compare", "runs", "out=paper")
    assert code == 0
    assert all(len(line) <= 80 for line in out.splitlines())
    whole = [f"{'a' * 24}={a}, {'b' * 24}={b}" for b in (0, 1) for a in (0, 1)]
    table = (tmp_path / "paper/table.md").read_text()
    assert all(re.search(rf"^\| {label} +\| 3 ", table, re.MULTILINE) for label in whole)
    assert all(re.search(f": {label.replace(' ', chr(92) + 's+')}$", out, re.MULTILINE) for label in whole)
    assert len(set(re.findall(r"^\| ([^|]+?) +\| 3 ", out, re.MULTILINE))) == 4


def test_without_matplotlib_nothing_is_begun(rltool: Rltool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = runs(tmp_path / "a", ends(2, 3)), runs(tmp_path / "b", ends(1, 2))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, out, err = rltool("compare", a, "--", b, "out=paper")
    assert (code, out) == (2, "")
    assert "rltool compare: out: a picture needs a package that is not installed" in err
    assert "pip install 'rltool[plots]'" in err
    assert not (tmp_path / "paper").exists()


def test_markdown_is_readable_at_80_columns(rltool: Rltool, tmp_path: Path) -> None:
    a, b = runs(tmp_path / "a", ends(210, 250, 300)), runs(tmp_path / "b", ends(90, 120, 200), algo="dqn")
    code, out, _ = rltool("compare", a, "--", b)
    assert code == 0
    assert "### CartPole-v1, solved at 475" in out
    assert re.search(
        r"^\| ppo +\| 3 +\| 253 \[210, 300\] +\| 253 \[210, 300\] +\| 250 \[210, 300\] \|$", out, re.MULTILINE
    )
    assert all(len(line) <= 80 for line in out.splitlines())
    assert "dqn: 3 seeds on CartPole-v1; an interval over so few is rough" in " ".join(out.split())


def test_a_run_without_metrics_has_the_score_of_its_summary(rltool: Rltool, tmp_path: Path) -> None:
    for name, algo in (("a", "ppo"), ("b", "dqn")):
        summary = fake_run(tmp_path / name, algo=algo) / "summary.json"
        tree = json.loads(summary.read_text()) | {"last_evaluation": {"mean": 7.0, "frames": 10, "episodes": 5}}
        summary.write_text(json.dumps(tree))
    groups = read(rltool, "a", "--", "b")["environments"]["CartPole-v1"]["groups"]  # type: ignore[index]
    assert groups["ppo"]["mean"] == {"value": 7.0, "low": None, "high": None}


def test_files_for_a_paper(rltool: Rltool, tmp_path: Path) -> None:
    a, b = runs(tmp_path / "a", ends(2, 3)), runs(tmp_path / "b", ends(1, 2))
    code, out, _ = rltool("compare", f"ours={a}", "--", f"theirs={b}", "out=paper/figures")
    assert code == 0
    out_dir = tmp_path / "paper/figures"
    assert sorted(path.name for path in out_dir.iterdir()) == [
        "comparison.png", "comparison.svg", "table.csv", "table.md",
    ]  # fmt: skip
    assert (out_dir / "table.md").read_text().strip() in out
    with open(out_dir / "table.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["group"], row["mean"], row["mean_low"], row["iqm_high"]) for row in rows] == [
        ("ours", "2.5", "2.0", "3.0"),
        ("theirs", "1.5", "1.0", "2.0"),
    ]
    svg = (out_dir / "comparison.svg").read_text()
    assert "Evaluation return, last" in svg
    assert "threshold 475" in svg
    assert "theirs" in svg
    assert (out_dir / "comparison.png").stat().st_size < 150_000


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["a"], "expected two or more groups, found one: ppo"),
        (["a", "--", "nowhere", "no*thing"], "2 problems"),
        (["a", "--", "b", "at=end"], "at: expected one of final, last, best, auc"),
        (["a", "--", "b", "metric=eval/return_men"], "Did you mean eval/return_mean"),
        (["a", "--", "c"], "no environment has scores of two groups: ppo on CartPole-v1; sac on Pendulum-v1"),
        (["a", "--", "d"], "ppo on CartPole-v1; dqn on none. Choose a metric=… that all have: nothing of dqn has"),
        (["d", "--", "e=d"], "They were not evaluated; take metric=episode/return"),
        (["a", "--", "b", "out=file"], "out: expected a directory, found the file file"),
    ],
)
def test_mistakes_are_told_and_return_2(rltool: Rltool, tmp_path: Path, words: list[str], answer: str) -> None:
    runs(tmp_path / "a", ends(2, 3))
    runs(tmp_path / "b", ends(1, 2))
    runs(tmp_path / "c", ends(1, 2), env="Pendulum-v1", algo="sac")
    runs(tmp_path / "d", [[]], algo="dqn", points=[{"frames": 1, "episode/return": 1.0, "data/reward_mean": 1.0}])
    (tmp_path / "file").touch()
    code, _, err = rltool("compare", *words)
    assert code == 2
    assert answer in err

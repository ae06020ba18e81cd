"""What several evaluations say together."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rltool.entries import Entry, by_task, copies, distinct, overall
from rltool.intervals import nested_interval


def entry(
    returns: list[float], *, algo: str = "ppo", kind: str = "best", deterministic: bool = True, **env: object
) -> Entry:
    report = {"returns": returns, "env": "A-v0", "deterministic": deterministic, "threshold": 4.0}
    return Entry(Path(f"{returns}"), report, algo, 7, 100, kind, env, {"optim.lr": 1e-3})


def test_the_row_over_all_is_the_mean_over_checkpoints() -> None:
    groups = [[1.0, 3.0], [4.0, 8.0], [5.0, 9.0]]
    found = overall([entry(group) for group in groups])
    assert (found["mean"], found["min"], found["max"], found["median"]) == (5.0, 1.0, 9.0, 4.5)
    assert (found["iqm"], found["success_rate"], found["episodes"]) == ((3 + 4 + 5 + 8) / 4, 4 / 6, 6)
    assert (found["ci_low"], found["ci_high"]) == nested_interval(groups)
    assert (found["checkpoints"], found["training_seeds"]) == (3, [7, 7, 7])


def test_a_policy_under_two_names_counts_once() -> None:
    one = entry([1.0, 3.0])
    others = [
        replace(one, path=Path("copy")),
        replace(one, path=Path("seed"), training_seed=8),
        replace(one, path=Path("frames"), frames=200),
        replace(one, path=Path("settings"), settings={"optim.lr": 1e-2}),
        replace(entry([1.0, 4.0]), path=Path("returns")),
        replace(one, path=Path("another copy")),
    ]
    assert copies([one, *others]) == {Path("copy"): one.path, Path("another copy"): one.path}
    assert distinct([one, *others]) == [one, *others[1:5]]


def test_the_row_over_all_names_the_keys_that_differ() -> None:
    entries = [entry([1.0]), replace(entry([2.0]), settings={"optim.lr": 1e-2, "algo.gamma": 0.9})]
    assert overall(entries)["differing"] == ["optim.lr", "algo.gamma"]
    assert overall([entry([1.0]), entry([2.0])])["differing"] == []


def test_only_what_is_of_one_task_and_mode_is_averaged() -> None:
    entries = [
        entry([1.0]),
        entry([2.0], algo="dqn"),
        entry([3.0], kind="last"),
        entry([4.0], deterministic=False),
        entry([5.0], kwargs={"g": 1.0}),
        entry([6.0]),
    ]
    assert [[each.report["returns"] for each in group] for group in by_task(entries)] == [
        [[1.0], [6.0]],
        [[2.0]],
        [[3.0]],
        [[4.0]],
        [[5.0]],
    ]

"""``rltool runs``, ``show``, ``diff`` and ``rerun`` as a person meets them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml
from fakes import fake_run
from filelock import FileLock
from recorded import CONFIG, SUMMARY, recorded
from test_cli import Rltool, Training, command, training  # noqa: F401 (fixtures)

from rltool.commands.show import KEY_METRICS
from rltool.config import laid_over
from rltool.records import Record
from rltool.selection import Condition, in_order, value_of

IDS = {"good": "aaaaaa", "poor": "bbbbbb", "dead": "cccccc", "broken": "dddddd", "old": "eeeeee"}


def name(day: int, run: str) -> str:
    return f"2026-11-{day:02}-10-00-00-{IDS[run]}"


def changed(**changes: object) -> dict[str, object]:
    return laid_over(CONFIG, changes)


@pytest.fixture
def home(command: Rltool, tmp_path: Path) -> Path:  # noqa: F811
    """The directory that commands start from, with five runs: good, poor, dead (killed), broken (failed), old."""
    runs = tmp_path / "runs"
    recorded(runs / "cartpole-ppo" / name(1, "good"))
    recorded(
        runs / "cartpole-ppo" / name(2, "poor"),
        config=changed(seed=4, optim={"lr": 1e-3}),
        summary={**SUMMARY, "seed": 4, "best_evaluation": {"mean": 90, "frames": 500}, "seconds": 700},
        overrides=("algo=ppo", "env=cartpole", "optim.lr=1e-3", "seed=4"),
    )
    recorded(
        runs / "pendulum-sac" / name(3, "dead"),
        config=changed(env={"id": "InvertedDoublePendulum-v5"}, algo={"kind": "sac"}),
        summary=None,
        points=[{"frames": 300, "eval/return_mean": -120.5}],
        overrides=("algo=sac", "env=inverted_double_pendulum"),
    )
    recorded(
        runs / "cartpole-dqn" / name(4, "broken"),
        config=changed(algo={"kind": "dqn"}),
        summary={
            **SUMMARY,
            "status": "failed",
            "algo": "dqn",
            "frames": 200,
            "error": "EnvironmentFault: it fell over",
            "best_evaluation": None,
            "last_evaluation": None,
        },
        log="2026-11-04 10:00:00  tuned        none\nTraceback (most recent call last):\nEnvironmentFault: it fell over\n",
    )
    recorded(runs / "cartpole-ppo" / name(5, "old"), config={"algo": {"kind": "ppo"}}, summary={"status": "finished"})
    return tmp_path


def listed(answer_out: str) -> list[str]:
    """The first cells of a table."""
    lines = answer_out.partition("\n\n")[0].splitlines()[1:]
    return [line.split()[0] for line in lines if not line.startswith("(")]


# ---------------------------------------------------------------------------------------------------------------- runs


def test_runs_lists_every_run_the_newest_first(command: Rltool, home: Path) -> None:  # noqa: F811
    answer = command("runs")
    assert (answer.code, answer.err) == (0, "")
    assert listed(answer.out) == [IDS[run] for run in ("old", "broken", "dead", "poor", "good")]
    head, *rows = answer.out.splitlines()
    assert head.split()[:4] == ["run", "status", "algo", "env"]
    assert rows[4].split()[:7] == ["aaaaaa", "finished", "ppo", "CartPole-v1", "3", "1,000", "100%"]
    assert rows[4].split()[7:9] == ["480.5", "470"]
    assert rows[2].split()[1:4] == ["killed", "sac", "InvertedDoublePendu…"]
    assert rows[0].split() == ["eeeeee", "finished", "ppo", "?", "-", "0", "-", "-", "-", "-"][: len(rows[0].split())]
    assert answer.out.endswith("5 runs: 3 finished, 1 failed, 1 killed\n")
    assert all(len(line) <= 80 for line in answer.out.splitlines())
    assert "(no room for " in answer.out


def test_a_wide_terminal_has_room_for_every_column(
    command: Rltool,  # noqa: F811
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    out = command("runs", "columns=optim.lr,network.hidden").out
    assert "no room" not in out
    assert out.splitlines()[0].split()[-4:] == ["time", "started", "optim.lr", "network.hidden"]
    assert "2026-11-02 10:00     0.001  [64, 64]" in out


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (("status=failed",), "broken"),
        (("status=failed,killed",), "broken dead"),
        (("status!=finished",), "broken dead"),
        (("env=cartpole",), "broken poor good"),
        (("env=CARTPOLE-v1", "algo=ppo"), "poor good"),
        (("env=inverted_double_pendulum",), "dead"),
        (("env=*pend*",), "dead"),
        (("best>=475",), "good"),
        (("best=475..",), "good"),
        (("best=..100",), "dead poor"),
        (("best<0",), "dead"),
        (("best=480.5",), "good"),
        (("best=null",), "old broken"),
        (("seed=4",), "poor"),
        (("seed=0..3",), "broken dead good"),
        (("seed!=3",), "old poor"),
        (("frames=1_000",), "poor good"),
        (("optim.lr=1e-3",), "poor"),
        (("optim.lr>3e-4",), "poor"),
        (("optim=adam", "algo=dqn"), "broken"),
        (("network.hidden=[64,64]", "algo=sac"), "dead"),
        (("init=null", "algo=sac"), "dead"),
        (("time>10m",), "poor"),
        (("time<=12.5",), "broken good"),
        (("started>=2026-11-04",), "old broken"),
        (("started=2026-11-02*",), "poor"),
        (("run=*bbbbbb",), "poor"),
        (("runs/cartpole-dqn", "runs/pendulum-sac"), "broken dead"),
        (("sort=best",), "dead poor good broken old"),
        (("sort=-best", "limit=2"), "good poor"),
        (("sort=-optim.lr", "limit=1"), "poor"),
        (("sort=env", "limit=4"), "broken good poor dead"),
        (("env=null",), "old"),
    ],
)
def test_runs_are_chosen_and_sorted(command: Rltool, home: Path, words: tuple[str, ...], found: str) -> None:  # noqa: F811
    answer = command("runs", *words)
    assert answer.code == 0
    assert listed(answer.out) == [IDS[run] for run in found.split()]


@pytest.mark.parametrize(
    ("words", "texts"),
    [
        (("beast>3",), ["beast: no run has such a key", "Did you mean best or last?"]),
        (("optim.lt=1",), ["Did you mean optim.lr"]),
        (("best>much",), ["best: expected a number behind >, found 'much'"]),
        (("limit=none",), ["limit: expected a whole number of at least 1"]),
        (("limit=0", "best<x"), ["2 problems", "limit:", "best:"]),
        (("nowhere",), ["there is no directory nowhere"]),
        (("sort=quality",), ["quality: no run has such a key"]),
        (("=3",), ["expected KEY=VALUE, found '=3'"]),
    ],
)
def test_what_says_nothing_is_refused(
    command: Rltool,  # noqa: F811
    home: Path,
    words: tuple[str, ...],
    texts: list[str],
) -> None:
    answer = command("runs", *words)
    assert answer.code == 2
    assert not answer.out
    for text in texts:
        assert text in answer.err


def test_no_runs_are_no_mistake(command: Rltool, tmp_path: Path) -> None:  # noqa: F811
    assert command("runs").out == "no runs in runs, which is not there yet\n"
    assert command("runs", "--json").out == "[]\n"
    (tmp_path / "runs").mkdir()
    assert command("runs").out == "no runs in runs\n"
    recorded(tmp_path / "runs/one")
    assert command("runs", "algo=dqn").out == "none of 1 run matches\n"


def test_damaged_runs_are_listed_and_named(command: Rltool, home: Path) -> None:  # noqa: F811
    recorded(home / "runs/half", config=None, summary="{")
    answer = command("runs", "run=half")
    assert answer.code == 0
    assert answer.out.splitlines()[1].split()[:2] == ["half", "unknown"]
    assert "warning: runs/half: config.yaml is missing" in answer.err
    assert "expected JSON" in answer.err


def test_runs_as_json_has_the_keys_of_the_documentation(command: Rltool, home: Path) -> None:  # noqa: F811
    (found,) = json.loads(command("runs", "best>=475", "columns=optim.lr", "--json").out)
    assert found == {
        "run": "aaaaaa",
        "path": f"runs/cartpole-ppo/{name(1, 'good')}",
        "status": "finished",
        "algo": "ppo",
        "env": "CartPole-v1",
        "seed": 3,
        "frames": 1000,
        "total_frames": 1000,
        "best": {"frames": 800, "mean": 480.5, "cut": None},
        "last": {"frames": 1000, "mean": 470.0, "cut": None},
        "fresh": None,
        "seconds": 12.5,
        "started": "2026-11-01 10:00:00",
        "error": None,
        "problems": [],
        "columns": {"optim.lr": 3e-4},
    }
    text = (Path(__file__).parents[1] / "docs/runs.md").read_text(encoding="utf-8")
    assert all(f"`{key}`" in text for key in found)


def test_evaluations_that_were_cut_are_marked_and_said(command: Rltool, home: Path) -> None:  # noqa: F811
    recorded(
        home / "runs/endless",
        config=changed(eval={"max_steps": 7000}),
        summary={**SUMMARY, "best_evaluation": {"mean": 480.5, "frames": 800, "cut": 0},
                 "last_evaluation": {"mean": 70.25, "frames": 1000, "episodes": 10, "cut": 3}},
    )  # fmt: skip
    answer = command("runs", "algo=ppo", "seed=3")
    by_run = {line.split()[0]: line.split() for line in answer.out.splitlines() if line}
    assert "70.2*" in by_run["endless"]
    assert "470" in by_run["aaaaaa"]
    assert "(* of episodes cut at eval.max_steps" in answer.out
    assert all(len(line) <= 80 for line in answer.out.splitlines())
    assert "*" not in command("runs", "run=aaaaaa").out
    said = command("show", "endless").out
    assert "70.25 mean return at 1,000 frames, 3 episodes cut at 7,000 steps" in said
    assert "480.50 mean return at 800 frames\n" in said


def test_those_without_a_value_come_last_either_way(tmp_path: Path) -> None:
    runs = [
        Record(recorded(tmp_path / str(seed), config={**CONFIG, "seed": seed}, summary=None)) for seed in (None, 2, 10)
    ]
    assert [value_of(record, "seed") for record in in_order(runs, "seed")] == [2, 10, None]
    assert [value_of(record, "seed") for record in in_order(runs, "-seed")] == [10, 2, None]


def test_true_is_not_one(tmp_path: Path) -> None:
    record = Record(recorded(tmp_path / "run", config={**CONFIG, "compile": True, "threads": 1}))
    holds = {
        word: Condition.read(word).holds(record) for word in ("compile=true", "compile=1", "threads=1", "threads=true")
    }
    assert holds == {"compile=true": True, "compile=1": False, "threads=1": True, "threads=true": False}


# ---------------------------------------------------------------------------------------------------------------- show


def test_show_is_one_screen_about_a_run(command: Rltool, dqn_run: Path, ppo_run: Path) -> None:  # noqa: F811
    for run in (ppo_run, ppo_run / "checkpoints/best.ckpt"):
        answer = command("show", str(run))
        assert (answer.code, answer.err) == (0, "")
        for text in (
            "trains    ppo on Pendulum-v1, network auto, seed 0",
            "typed     env=pendulum total_frames=352 ",
            "spaces    observation Box(3,) → Box(1,) from -2 to 2",
            "finished after 352 of 352 frames",
            "repeats      yes",
            "2 evaluations",
            "policy/approx_kl",
            "summary.json (",
            f"rltool eval checkpoint={ppo_run}/checkpoints/best.ckpt",
            f"rltool train resume={ppo_run} total_frames=704",
            f"rltool rerun {ppo_run} seed=1",
        ):
            assert text in answer.out, text
        assert len(answer.out.splitlines()) <= 50
    assert "policy/epsilon" in command("show", str(dqn_run)).out


def test_the_key_metrics_are_metrics() -> None:
    from rltool.metrics import explained

    names = [metric for metric in explained() if not metric.histogram]
    for key in KEY_METRICS:
        assert any(metric.covers(key) for metric in names), key


def test_show_of_a_failed_run_says_what_went_wrong(command: Rltool, home: Path) -> None:  # noqa: F811
    answer = command("show", IDS["broken"])
    assert "failed after 200 of 1,000 frames" in answer.out
    assert "error   EnvironmentFault: it fell over" in answer.out
    assert "last lines of log.txt\n" in answer.out
    assert "\n  Traceback (most recent call last):\n" in answer.out
    assert f"rltool rerun runs/cartpole-dqn/{name(4, 'broken')}\n" in answer.out
    assert "eval checkpoint" not in answer.out  # there is none


def test_show_says_what_a_killed_and_a_running_run_is(command: Rltool, home: Path) -> None:  # noqa: F811
    (home / "runs/pendulum-sac" / name(3, "dead") / "checkpoints/last.ckpt").touch()
    answer = command("show", IDS["dead"])
    assert "no process has it, and none wrote down how it ended" in answer.out
    assert f"train resume=runs/pendulum-sac/{name(3, 'dead')}\n" in answer.out
    with FileLock(home / "runs/pendulum-sac" / name(3, "dead") / ".lock"):
        answer = command("show", IDS["dead"])
        assert "running after 300 of 1,000 frames" in answer.out
        assert f"tail -f runs/pendulum-sac/{name(3, 'dead')}/log.txt" in answer.out
        assert "rerun" not in answer.out


@pytest.mark.parametrize("run", ["old", "half"])
def test_show_of_what_is_left_of_a_run(command: Rltool, home: Path, run: str) -> None:  # noqa: F811
    recorded(home / "runs/half", config=None, summary="{")
    answer = command("show", IDS.get(run, run))
    assert answer.code == 0
    assert "next" in answer.out


@pytest.mark.parametrize(
    ("overrides", "said"),
    [(("algo=ppo", "env=cartpole"), "start it anew: "), ((), "copy it once more from where it was made")],
)
def test_a_run_that_cannot_be_read_says_what_to_do(
    command: Rltool,  # noqa: F811
    home: Path,
    overrides: tuple[str, ...],
    said: str,
) -> None:
    recorded(home / "runs/half", config={}, summary=None, overrides=overrides)
    for name_of_command in ("show", "doctor"):
        answer = command(name_of_command, "half" if name_of_command == "show" else "runs/half")
        assert "config.yaml is empty" in answer.out
        assert "unknown algorithm and environment" in answer.out
        assert said in answer.out
        assert "?" not in answer.out
        assert "None" not in answer.out
    (home / "runs/half/config.yaml").write_text("algo: {kind: ppo}")
    assert said not in command("show", "half").out


def test_show_as_json(command: Rltool, ppo_run: Path) -> None:  # noqa: F811
    found = json.loads(command("show", str(ppo_run), "--json").out)
    assert (found["path"], found["frames"], found["network"]) == (str(ppo_run), 352, "auto")
    assert [point["frames"] for point in found["evaluations"]] == [
        frames for frames, _ in Record(ppo_run).curve("eval/return_mean")
    ]
    assert sum(found["shares"].values()) == pytest.approx(1)
    assert found["files"]["summary.json"] == (ppo_run / "summary.json").stat().st_size
    assert found["overrides"][0] == "env=pendulum"
    text = (Path(__file__).parents[1] / "docs/runs.md").read_text(encoding="utf-8")
    assert all(f"`{key}`" in text for key in found)


def test_the_shares_of_time_weigh_each_point_by_how_long_it_took(tmp_path: Path) -> None:
    from rltool.commands.show import record_shares

    shares = ({"collect": 1.0, "update": 0.0}, {"collect": 0.0, "update": 1.0})
    points: list[Mapping[str, object]] = [
        {
            "frames": 100 * (index + 1),
            "time/frames_per_second": rate,
            **{f"time/{k}_share": v for k, v in share.items()},
        }
        for index, (rate, share) in enumerate(zip((100.0, 25.0), shares, strict=True))
    ]
    # 100 frames in one second, then 100 in four.
    record = Record(recorded(tmp_path / "run", points=points))
    assert record_shares(record) == {"update": 0.8, "collect": 0.2}


@pytest.mark.parametrize("words", [(), ("a", "b"), ("nowhere",)])
def test_show_wants_one_run(command: Rltool, home: Path, words: tuple[str, ...]) -> None:  # noqa: F811
    answer = command("show", *words)
    assert answer.code == 2
    assert "rltool runs lists those there are" in answer.err


# ---------------------------------------------------------------------------------------------------------------- diff


def test_diff_shows_what_differs_and_no_more(command: Rltool, home: Path) -> None:  # noqa: F811
    answer = command("diff", IDS["good"], IDS["poor"])
    assert answer.code == 0
    _, config, result = answer.out.split("\n\n")
    assert config.splitlines() == [
        "configuration  aaaaaa  bbbbbb",
        "optim.lr       0.0003  0.001 *",
        "seed           3       4 *",
        "* typed",
    ]
    assert "best evaluation  480.5 at 800  90 at 500" in result
    assert "last evaluation  470 at 1,000  470 at 1,000" in result


def test_diff_says_when_nothing_differs(command: Rltool, home: Path) -> None:  # noqa: F811
    shutil.copytree(home / "runs/cartpole-ppo" / name(1, "good"), home / "copy")
    answer = command("diff", IDS["good"], "copy")
    assert "nothing differs: configuration, versions, commit and spaces are the same" in answer.out


def test_diff_of_versions_commits_and_spaces(command: Rltool, home: Path) -> None:  # noqa: F811
    recorded(
        home / "other",
        summary={**SUMMARY, "git_commit": "def", "versions": {"rltool": "0.1.0", "torch": "2.13.0"}},
        log="2026-01-01 00:00:00  spaces       observation Box(4,) → Discrete(2)\n",
    )
    log = "2026-01-01 00:00:00  spaces       observation Box(4,) → Discrete(3)\n"
    (home / "runs/cartpole-ppo" / name(1, "good") / "log.txt").write_text(log)
    answer = command("diff", IDS["good"], "other")
    assert "the configuration is the same" in answer.out
    assert "versions  aaaaaa  other\ntorch     2.14.1  2.13.0" in answer.out
    assert "commit  aaaaaa  other\ncommit  abc     def" in answer.out
    assert "rltool 0" not in answer.out
    assert "Discrete(3)  observation Box(4,) → Discrete(2)\n" in answer.out


def test_diff_of_many_runs_stands_below_each_other_on_a_narrow_terminal(command: Rltool, home: Path) -> None:  # noqa: F811
    runs = [IDS[run] for run in ("good", "poor", "dead", "broken")]
    answer = command("diff", *runs)
    assert all(len(line) <= 80 for line in answer.out.splitlines())
    assert "  env.id\n    aaaaaa  CartPole-v1 *\n" in answer.out
    assert "    cccccc  InvertedDoublePendulum-v5 *\n" in answer.out


def test_diff_as_json(command: Rltool, home: Path) -> None:  # noqa: F811
    found = json.loads(command("diff", IDS["good"], IDS["poor"], IDS["old"], "--json").out)
    assert [run["run"] for run in found["runs"]] == ["aaaaaa", "bbbbbb", "eeeeee"]
    assert found["config"]["optim.lr"] == {"values": [3e-4, 1e-3, None], "typed": [False, True, False]}
    assert found["versions"] == {}  # that one of them wrote none down is no difference
    assert set(found) == {"runs", "config", "versions", "commits", "spaces"}
    assert "algo.kind" not in found["config"]


def test_diff_of_what_cannot_be_read_says_so(command: Rltool, home: Path) -> None:  # noqa: F811
    recorded(home / "runs/half", config=None, summary=None)
    answer = command("diff", IDS["good"], IDS["poor"], "half")
    assert "optim.lr       0.0003  0.001 *  -\n" in answer.out
    assert "env.id" not in answer.out
    assert "no configuration can be read of half" in answer.out
    assert "torch" not in answer.out


def test_diff_wants_two_runs_and_names_all_that_are_missing(command: Rltool, home: Path) -> None:  # noqa: F811
    answer = command("diff", "here", "there")
    assert answer.code == 2
    assert "there is no here" in answer.err
    assert "there is no there" in answer.err
    assert "expected two runs or more, found 1" in command("diff", IDS["good"]).err


# --------------------------------------------------------------------------------------------------------------- rerun


def test_a_rerun_gives_the_same_to_the_last_bit(command: Rltool, dqn_run: Path, tmp_path: Path) -> None:  # noqa: F811
    from safetensors.numpy import load_file

    answer = command("rerun", str(dqn_run), "hydra.run.dir=again")
    assert (answer.code, answer.err) == (0, "")
    for file in ("last.ckpt", "400.ckpt", "buffer-400.safetensors"):
        before, after = load_file(dqn_run / "checkpoints" / file), load_file(tmp_path / "again/checkpoints" / file)
        assert before.keys() == after.keys()
        for key, tensor in before.items():
            assert tensor.tobytes() == after[key].tobytes(), f"{file}: {key}"
    assert (tmp_path / "again/config.yaml").read_text() == (dqn_run / "config.yaml").read_text()
    assert Record(tmp_path / "again").overrides == Record(dqn_run).overrides
    assert (tmp_path / "again/overrides.txt").read_text().endswith(f"# rerun of {dqn_run}\n")
    assert f"rerun of  {dqn_run}\n" in command("show", "again").out


@pytest.fixture
def killed(home: Path, dqn_run: Path) -> Path:
    """A run that was killed before its first checkpoint."""
    directory = recorded(home / "runs/cartpole-dqn/2026-11-06-10-00-00-ffffff", config=None, summary=None)
    shutil.copy(dqn_run / "config.yaml", directory)
    shutil.copy(dqn_run / "overrides.txt", directory)
    return directory


def test_a_rerun_needs_no_checkpoint_and_shows_what_changed(
    command: Rltool,  # noqa: F811
    training: Training,  # noqa: F811
    killed: Path,
) -> None:
    answer = command("rerun", "ffffff", "seed=7", "quiet=false", "optim.lr=3e-4")
    assert (answer.code, answer.err) == (0, "")
    (call,) = training.calls
    assert call.directory.parent == killed.parent
    assert call.directory.name[:4].isdecimal()
    assert (call.config.seed, call.config.total_frames, call.config.resume) == (7, 400, None)
    assert answer.out.startswith("running runs/cartpole-dqn/2026-11-06-10-00-00-ffffff anew\n")
    assert "  seed: 0 → 7\n" in answer.out
    assert call.overrides[-4:-1] == ["seed=7", "quiet=false", "optim.lr=3e-4"]
    assert call.overrides[-1] == f"# rerun of {killed}"


def test_what_a_rerun_cannot_change_is_refused_by_name(
    command: Rltool,  # noqa: F811
    training: Training,  # noqa: F811
    killed: Path,
) -> None:
    before = sorted(os.listdir(killed.parent))
    answer = command(
        "rerun", "ffffff", "algo=ppo", "optim.kind=sgd", "gamma=1", "optim.lr=-1", "~save", "resume=x", "seed=1,2"
    )
    assert answer.code == 2
    for text in (
        "algo: a rerun keeps the algo of its run, found algo=ppo",
        "start a new run: rltool train total_frames=400 ",
        "optim.kind: cannot change on a rerun: 'adam' in runs/cartpole-dqn/2026-11-06-10-00-00-ffffff/config.yaml, found 'sgd'",
        "gamma: no such key. Did you mean algo.gamma?",
        "optim.lr: expected a number above 0, found -1",
        "save: a rerun keeps the save",
        "resume: a rerun begins at frame 0",
        "A rerun is one run",
    ):
        assert text in answer.err, text
    assert not training.calls
    assert sorted(os.listdir(killed.parent)) == before


def test_a_rerun_warns_where_its_numbers_may_be_others(
    command: Rltool,  # noqa: F811
    training: Training,  # noqa: F811
    killed: Path,
) -> None:
    (killed / "summary.json").write_text(json.dumps({**SUMMARY, "versions": {"torch": "1.0.0"}, "git_commit": None}))
    with open(killed / "overrides.txt", "a") as file:
        file.write("# resumed at frame 100\noptim.lr=1e-5\n# resumed at frame 200\n")
    answer = command("rerun", "ffffff")
    assert answer.code == 0
    assert "warning: the run was made with torch 1.0.0, and this is torch 2." in answer.err
    assert "warning: the run was resumed with optim.lr=1e-5: " in answer.err


def test_a_run_without_a_configuration_cannot_be_run_anew(
    command: Rltool,  # noqa: F811
    training: Training,  # noqa: F811
    home: Path,
) -> None:
    recorded(home / "runs/half", config=None)
    answer = command("rerun", "half")
    assert answer.code == 2
    assert "runs/half has no configuration to run anew: config.yaml is missing" in answer.err
    recorded(home / "runs/odd", config={"algo": {"kind": "ppo"}})
    answer = command("rerun", "odd")
    assert answer.code == 2
    assert "env: a value is required" in answer.err
    assert not training.calls


@pytest.mark.parametrize("trusted", [False, True])
def test_a_strangers_run_imports_no_code_unless_named(
    command: Rltool,  # noqa: F811
    training: Training,  # noqa: F811
    killed: Path,
    home: Path,
    trusted: bool,
) -> None:
    (home / "theirs.py").write_text("from pathlib import Path\nPath('imported').touch()\n")
    config = yaml.safe_load((killed / "config.yaml").read_text())
    (killed / "config.yaml").write_text(yaml.safe_dump({**config, "plugins": ["theirs"]}))
    answer = command("rerun", "ffffff", *(["plugins=[theirs]"] if trusted else []))
    assert (answer.code, (home / "imported").exists(), len(training.calls)) == (
        (0, True, 1) if trusted else (2, False, 0)
    )
    if not trusted:
        assert "names code of the module theirs, and was not written by you" in answer.err
        assert "Give plugins=[theirs] if you trust it" in answer.err


def test_ones_own_run_is_known_by_its_checkpoint(dqn_run: Path) -> None:
    from rltool import trust

    record = Record(dqn_run)
    assert trust.is_own(record.header, record.config)
    assert not trust.is_own(record.header, {**record.config, "plugins": ["theirs"]})
    assert not trust.is_own(record.header, {key: node for key, node in record.config.items() if key != "plugins"})
    assert not trust.is_own(None, record.config)


# -------------------------------------------------------------------------------------------------------------- names


def test_a_name_stands_for_a_run_in_every_command(
    command: Rltool,  # noqa: F811
    dqn_run: Path,
    tmp_path: Path,
) -> None:
    shutil.copytree(dqn_run, tmp_path / "runs/cartpole-dqn/2026-11-06-10-00-00-123456")
    assert "runs/cartpole-dqn/2026-11-06-10-00-00-123456/checkpoints/last.ckpt" in command("checkpoint", "123456").out
    answer = command("train", "resume=123456")
    assert answer.code == 0
    assert "2026-11-06-10-00-00-123456/checkpoints/last.ckpt has used its budget of 400 frames" in answer.out
    recorded(tmp_path / "runs/other-dqn/2026-11-07-10-00-00-123456")
    answer = command("train", "resume=123456")
    assert answer.code == 2
    assert "resume: 123456 may be any of 2 runs" in answer.err


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("rltool show ", "bbbbbb aaaaaa"),
        ("rltool rerun b", "bbbbbb"),
        ("rltool diff aaaaaa b", "bbbbbb"),
        ("rltool runs st", "status= started="),
        ("rltool runs so", "sort="),
        ("rltool show --", "--help --json"),
    ],
)
def test_names_are_completed(
    command: Rltool,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    line: str,
    expected: str,
) -> None:
    for letter in "ab":
        recorded(tmp_path / f"runs/{'x' * (letter == 'a')}y/2026-11-06-10-00-00-{letter * 6}")
    monkeypatch.setenv("COMP_LINE", line)
    answer = command("-sc", "query=bash")
    assert sorted(answer.out.split()) == sorted(expected.split())


def test_show_says_what_fresh_episodes_gave(
    command: Rltool,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The figure to quote, beside the last evaluation in training."""
    monkeypatch.chdir(tmp_path)
    run = fake_run(tmp_path / "run", [(1000, 500.0)], fresh=437.25)
    summary = json.loads((run / "summary.json").read_text())
    summary["final_evaluation"]["last"] |= {"ci_low": 401.5, "ci_high": 470.0, "episodes": 100}
    (run / "summary.json").write_text(json.dumps(summary))
    said = " ".join(command("show", "run").out.split())
    assert "last, fresh 437.25 mean return (401.50 to 470.00), 100 episodes after training" in said
    assert "best, fresh" not in said

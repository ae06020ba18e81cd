"""Runs read as they lie on disk: finished, running, killed, resumed, torn, half copied, of an older rltool."""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path

import pytest
from filelock import FileLock
from recorded import BEGAN, CONFIG, SUMMARY, recorded

from rltool.errors import ConfigError
from rltool.records import Record, find_runs, located, names, read_run

POINTS = [
    {"frames": 400, "episode/return": 20.0},
    {"frames": 400, "eval/return_mean": 100.0},
    {"frames": 800, "episode/return": 30.0},
    {"frames": 800, "eval/return_mean": 300.0},
    {"frames": 1000, "eval/return_mean": 200.0},
]
# Whose run came to its end, and whose went on after it.
STAMP = "2026-11-30-21-04-31-a1b2c3"


def test_a_finished_run_is_what_its_summary_says(tmp_path: Path) -> None:
    record = Record(recorded(tmp_path / STAMP, points=POINTS))
    assert (record.status, record.env, record.algo, record.seed) == ("finished", "CartPole-v1", "ppo", 3)
    assert (record.frames, record.total_frames) == (1000, 1000)
    assert (record.best, record.last) == ((800, 480.5), (1000, 470.0))
    assert record.seconds == 12.5
    assert record.started == datetime(2026, 11, 30, 21, 4, 31)
    assert record.versions == {"rltool": "0.1.0", "torch": "2.14.1"}
    assert (record.commit, record.error, record.problems) == ("abc", None, [])


def test_the_points_of_a_finished_run_are_not_read_for_the_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = Record(recorded(tmp_path / "run", points=POINTS))
    monkeypatch.setattr(Record, "_lines", lambda self: pytest.fail("metrics.jsonl was read"))
    assert record.to_json()["best"] == {"frames": 800, "mean": 480.5, "cut": None}


def test_a_killed_run_is_what_its_points_say(tmp_path: Path) -> None:
    record = Record(recorded(tmp_path / "run", summary=None, points=POINTS))
    assert record.status == "killed"
    assert record.frames == 1000
    assert (record.best, record.last) == ((800, 300.0), (1000, 200.0))
    assert record.seconds == 6.0  # from the first point at 4 s to the last at 10 s
    assert (record.env, record.algo) == ("CartPole-v1", "ppo")
    assert record.curve("episode/return") == [(400, 20.0), (800, 30.0)]


def test_of_equal_evaluations_the_newest_is_the_best(tmp_path: Path) -> None:
    points = [{"frames": 100, "eval/return_mean": 5.0}, {"frames": 200, "eval/return_mean": 5.0}]
    assert Record(recorded(tmp_path / "run", summary=None, points=points)).best == (200, 5.0)


def test_a_run_whose_lock_is_held_is_running(tmp_path: Path) -> None:
    directory = recorded(tmp_path / "run", points=POINTS)
    with FileLock(directory / ".lock"):
        record = Record(directory)
        assert record.status == "running"
        assert (record.frames, record.best) == (1000, (800, 300.0))  # not those of the summary of a session before
    assert Record(directory).status == "finished"


@pytest.mark.parametrize(
    "later",
    [
        {"frames": 1200, "eval/return_mean": 490.0, "time/wall": BEGAN},  # more frames than the summary says
        {"frames": 900, "eval/return_mean": 490.0, "time/wall": BEGAN + 20},  # it went back, and on
    ],
)
def test_a_summary_from_before_a_resume_does_not_count(tmp_path: Path, later: dict[str, object]) -> None:
    record = Record(recorded(tmp_path / "run", points=[POINTS[0], later]))
    assert record.status == "killed"
    assert record.frames == later["frames"]
    assert record.best == (later["frames"], 490.0)
    assert record.error is None


def test_the_times_of_a_copy_change_nothing(tmp_path: Path) -> None:
    directory = recorded(tmp_path / "run", points=POINTS)
    os.utime(directory / "metrics.jsonl", (BEGAN + 5000, BEGAN + 5000))
    assert Record(directory).status == "finished"


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    directory = recorded(tmp_path / "run", summary=None, points=POINTS)
    with open(directory / "metrics.jsonl", "a") as file:
        file.write('{"frames": 1200, "eval/return_me')
    record = Record(directory)
    assert (record.frames, record.last) == (1000, (1000, 200.0))
    assert [point["frames"] for point in record.points] == [400, 400, 800, 800, 1000]


def test_lines_that_are_not_whole_are_counted(tmp_path: Path) -> None:
    directory = recorded(tmp_path / "run", points=POINTS)
    assert Record(directory).all_problems == []
    path = directory / "metrics.jsonl"
    path.write_text('{"frames": 10, "a\n' + path.read_text() + '{"frames": 1200, "in the mak')
    assert Record(directory).all_problems[-1] == "1 of 6 lines of metrics.jsonl cannot be read, and are left out"


def test_numbers_that_are_not_finite_are_no_numbers(tmp_path: Path) -> None:
    points = [{"frames": 100, "eval/return_mean": None}, {"frames": 200, "eval/return_mean": 1}]
    assert Record(recorded(tmp_path / "run", summary=None, points=points)).curve("eval/return_mean") == [(200, 1)]


def test_a_run_of_an_older_rltool_lacks_what_it_did_not_write(tmp_path: Path) -> None:
    config = {"env": {"kind": "gym", "id": "Old-v0"}, "algo": {"kind": "ppo"}}
    record = Record(recorded(tmp_path / "run", config=config, summary={"status": "finished"}, points=POINTS))
    assert (record.status, record.env, record.algo) == ("finished", "Old-v0", "ppo")
    assert (record.seed, record.total_frames, record.commit, record.versions) == (None, None, None, {})
    assert (record.frames, record.best) == (1000, (800, 300.0))


@pytest.mark.parametrize(
    ("changes", "status", "problem"),
    [
        ({"summary": "{"}, "unknown", "expected JSON"),
        ({"summary": "[1]"}, "unknown", "expected a JSON object"),
        ({"summary": "[" * 100_000}, "unknown", "expected JSON"),
        ({"config": None}, "finished", "config.yaml is missing"),
        ({"config": None, "summary": None}, "unknown", "config.yaml is missing"),
    ],
)
def test_what_is_damaged_is_said(tmp_path: Path, changes: dict[str, object], status: str, problem: str) -> None:
    record = Record(recorded(tmp_path / "run", points=POINTS, **changes))  # type: ignore[arg-type]
    assert record.status == status
    assert any(problem in text for text in record.problems)
    assert record.to_json()["path"] == str(tmp_path / "run")


@pytest.mark.parametrize("text", ["a: [", "- 1", "a: &a [*a]", "a: 2026-99-99", "\0", "{" * 2000])
def test_a_configuration_that_is_none_is_said(tmp_path: Path, text: str) -> None:
    directory = recorded(tmp_path / "run")
    (directory / "config.yaml").write_text(text)
    record = Record(directory)
    assert (record.config, record.status, len(record.problems)) == ({}, "finished", 1)
    assert (record.env, record.total_frames) == ("CartPole-v1", None)


def test_bytes_that_are_no_text_are_said(tmp_path: Path) -> None:
    directory = recorded(tmp_path / "run", points=POINTS)
    for name in ("config.yaml", "summary.json", "overrides.txt", "log.txt"):
        (directory / name).write_bytes(b"\xff\xfe\x00")
    record = Record(directory)
    assert (record.status, len(record.problems)) == ("unknown", 2)
    assert record.to_json()["frames"] == 1000


def test_what_was_typed_to_resume_stands_by_itself(tmp_path: Path) -> None:
    lines = ["algo=ppo", "+optim.lr=1", "~eval", "# resumed at frame 800", "resume=x", "# resumed at frame 900"]
    record = Record(recorded(tmp_path / "run", overrides=lines))
    assert record.overrides == ["algo=ppo", "+optim.lr=1", "~eval"]
    assert record.typed == {"algo": "ppo", "optim.lr": "1"}
    assert record.resumed == [["resume=x"], []]


def test_the_log_says_what_stood_in_the_block_at_the_start(tmp_path: Path) -> None:
    log = "2026-01-02 03:04:05  tuned        first\n2026-01-02 03:04:06  tuned        cartpole-ppo\nTraceback\n"
    record = Record(recorded(tmp_path / "run", log=log))
    assert (record.logged("tuned"), record.logged("device")) == ("cartpole-ppo", None)
    assert record.log_lines(1) == ["Traceback"]
    assert record.started == datetime(2026, 1, 2, 3, 4, 5)


def test_escaped_interpolations_are_what_they_were(tmp_path: Path) -> None:
    config = {**CONFIG, "env": {"kind": "gym", "kwargs": {"text": "\\${seed}"}}}
    assert Record(recorded(tmp_path / "run", config=config)).config["env"] == {
        "kind": "gym",
        "kwargs": {"text": "${seed}"},
    }


# ------------------------------------------------------------------------------------------------------ finding runs


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with runs of three kinds below runs/."""
    monkeypatch.chdir(tmp_path)
    for name in (
        f"cartpole-ppo/{STAMP}",
        "sweeps/2026-11-30-21-04-31-d4e5f6/0",
        "sweeps/2026-11-30-21-04-31-d4e5f6/1",
        "mine",
    ):
        recorded(tmp_path / "runs" / name)
    (tmp_path / "runs/sweeps/2026-11-30-21-04-31-d4e5f6/multirun.yaml").touch()
    (tmp_path / "runs/empty").mkdir()
    return tmp_path


def test_every_run_is_found_once_with_its_shortest_name(home: Path) -> None:
    (home / "runs/again").symlink_to(home / "runs/mine")
    found = list(find_runs([Path("runs"), Path("runs/mine")]))
    assert names(found) == ["a1b2c3", "mine", "d4e5f6/0", "d4e5f6/1"]
    for record, name in zip(found, names(found), strict=True):
        assert located(name) == record.path
        assert read_run(Path(name)).path == record.path


def test_a_name_that_two_runs_have_is_no_name(home: Path) -> None:
    recorded(home / "runs/dqn/2026-12-01-00-00-00-a1b2c3")
    first, second, *_ = names(find_runs([Path("runs")]))
    assert (first, second) == (f"runs/cartpole-ppo/{STAMP}", "runs/dqn/2026-12-01-00-00-00-a1b2c3")
    with pytest.raises(ConfigError, match="a1b2c3 may be any of 2 runs: runs/cartpole-ppo"):
        located("a1b2c3")
    assert located("dqn/2026-12-01-00-00-00-a1b2c3") == Path(second)


def test_runs_elsewhere_go_by_their_path(home: Path) -> None:
    recorded(home / f"elsewhere/{STAMP}")
    assert names(find_runs([Path("elsewhere")])) == [f"elsewhere/{STAMP}"]


def test_what_is_there_goes_before_a_name(home: Path) -> None:
    (home / "mine").mkdir()
    assert located("mine") == Path("mine")
    assert "runs/mine" in names(find_runs([Path("runs")]))


@pytest.mark.parametrize("file", ["", "/", "/checkpoints", "/config.yaml", "/checkpoints/best.ckpt", "/videos/a/b.mp4"])
def test_any_path_in_a_run_is_of_the_run(home: Path, file: str) -> None:
    (home / "runs/mine/videos/a").mkdir(parents=True)
    for name in ("checkpoints/best.ckpt", "videos/a/b.mp4"):
        (home / "runs/mine" / name).touch()
    assert read_run(Path(f"runs/mine{file}")).path == Path("runs/mine")


def test_what_is_no_run_is_refused(home: Path) -> None:
    with pytest.raises(ConfigError, match="there is no nothing"):
        read_run(Path("nothing"))
    with pytest.raises(ConfigError, match="expected a run directory, found none in runs/empty"):
        read_run(Path("runs/empty"))
    with pytest.raises(ConfigError, match="no directory nowhere"):
        list(find_runs([Path("nowhere")]))


def test_half_a_run_is_one_and_a_directory_with_a_config_is_none(tmp_path: Path) -> None:
    (tmp_path / "half").mkdir()
    for name in ("log.txt", "metrics.jsonl"):
        (tmp_path / "half" / name).touch()
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf/config.yaml").touch()
    (record,) = find_runs([tmp_path])
    assert record.path == tmp_path / "half"
    assert record.problems == ["config.yaml is missing", "checkpoints is missing"]


def test_a_directory_that_cannot_be_looked_into_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded(tmp_path / "run")
    (tmp_path / "shut").mkdir()
    for name in ("listdir", "scandir"):
        monkeypatch.setattr(os, name, _refusing(getattr(os, name)))
    records = list(find_runs([tmp_path]))
    assert [(record.path.name, record.status) for record in records] == [("run", "finished"), ("shut", "unreadable")]
    assert records[1].problems == ["cannot be looked into: Permission denied"]
    assert records[1].to_json()["frames"] == 0
    monkeypatch.setattr(os, "access", lambda path, mode: not str(path).endswith("shut"))
    asked = read_run(tmp_path / "shut")
    assert asked.status == "unreadable"
    assert f"chmod u+rx {asked.path}" in str(asked.remedy)


def _refusing(real: object) -> object:
    def look(path: object = ".") -> object:
        if str(path).endswith("shut"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)  # type: ignore[operator]

    return look


def test_the_summary_of_a_real_run_is_read(ppo_run: Path) -> None:
    record = Record(ppo_run)
    assert (record.status, record.algo, record.env, record.frames) == ("finished", "ppo", "Pendulum-v1", 352)
    assert record.total_frames == 352
    assert record.best is not None
    curve = record.curve("eval/return_mean")
    assert record.best == max(curve, key=lambda point: (point[1], point[0]))
    assert record.last == curve[-1]
    assert record.header is not None
    assert record.versions == record.header.state.versions


def test_episodes_that_were_cut_are_counted(ppo_run: Path, tmp_path: Path) -> None:
    whole = Record(ppo_run)  # no episode of Pendulum ends within its 30 steps
    assert (whole.cut("best"), whole.cut("last")) == (2, 2)
    points = [
        {"frames": 300, "eval/return_mean": 9.0, "eval/episodes_cut": 4},
        {"frames": 400, "eval/return_mean": 2.0, "eval/episodes_cut": 0},
    ]
    killed = Record(recorded(tmp_path / "killed", summary=None, points=points))
    assert (killed.best, killed.cut("best"), killed.cut("last")) == ((300, 9.0), 4, 0)
    # The best evaluation was made before a resume, of which the checkpoint keeps no count.
    summary = {**SUMMARY, "best_evaluation": {"mean": 9.0, "frames": 300, "cut": None}}
    assert Record(recorded(tmp_path / "resumed", summary=summary, points=points)).cut("best") == 4


def test_a_run_that_was_evaluated_before_it_was_resumed_has_a_last_evaluation(tmp_path: Path) -> None:
    summary = {**SUMMARY, "last_evaluation": None}
    assert Record(recorded(tmp_path / "run", summary=summary, points=POINTS)).last == (1000, 200.0)


def test_odd_values_are_none(tmp_path: Path) -> None:
    summary = (
        '{"status": "fin\\u001b[2J", "seconds": Infinity, "frames": "x", "best_evaluation": {"mean": "y"}, "error": []}'
    )
    directory = recorded(tmp_path / "run", config={**CONFIG, "total_frames": float("inf")}, summary=summary)
    record = Record(directory)
    assert record.status == "fin�[2J"
    assert (record.seconds, record.frames, record.best, record.error, record.total_frames) == (
        None,
        0,
        None,
        None,
        None,
    )


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "metrics.jsonl is missing"),
        ('{"frames": 600}\n', "metrics.jsonl ends at 600 of 1,000 frames"),
        ('{"frames": 600}\n{"fra', "metrics.jsonl is damaged at its end"),
        ("\x00\x01", "metrics.jsonl is damaged at its end"),
    ],
)
def test_metrics_that_end_before_the_run_are_said(tmp_path: Path, content: str | None, said: str) -> None:
    directory = recorded(tmp_path / "run")
    assert Record(directory).problems == []
    if content is None:
        (directory / "metrics.jsonl").unlink()
    else:
        (directory / "metrics.jsonl").write_text(content)
    assert Record(directory).problems == [said]


def test_fresh_episodes_of_a_run_that_went_on_since_are_those_of_no_policy_it_has(tmp_path: Path) -> None:
    summary = {**SUMMARY, "final_evaluation": {"best": None, "last": {"mean": 7.0}}}
    ended = recorded(tmp_path / "ended", summary=summary)
    resumed = recorded(tmp_path / "resumed", summary=summary, points=[{"frames": 1000}, {"frames": 1200}])
    assert Record(ended).final("last") == {"mean": 7.0}
    assert Record(resumed).status == "killed"
    assert Record(resumed).final("last") is None

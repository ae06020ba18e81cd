"""rltool plot: which runs make a curve, what is drawn of them, and how it looks."""

from __future__ import annotations

import csv
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from fakes import Rltool, fake_run

from rltool.commands.plot import joined
from rltool.configfiles import ConfigFiles
from rltool.curves import Series, choose_estimate, common, moving_average, read_panel, read_series
from rltool.errors import ConfigError
from rltool.grouping import Group, Part, read_words, select
from rltool.records import Record
from rltool.registry import Schema
from rltool.schema import CompareConfig, PlotConfig
from rltool.wording import fitted

ROOT = Path(__file__).resolve().parents[1]


def group(*runs: Path, label: str = "a") -> Group:
    return Group(label, tuple(Record(run) for run in runs))


def labels(words: list[str], keys: list[str] | None = None) -> list[str]:
    return [found.label for found in select([Part(None, tuple(words))], keys)]


# ---------------------------------------------------------------------------------------------------- which runs, which curve


def test_runs_that_differ_in_the_seed_are_one_curve(tmp_path: Path) -> None:
    for seed in range(3):
        fake_run(tmp_path / f"ppo/{seed}", [(10, 1.0)], seed=seed, logging__kind="csv" if seed else "tensorboard")
        fake_run(tmp_path / f"dqn/{seed}", [(10, 1.0)], seed=seed, algo="dqn", optim__lr=0.1)
    groups = select([Part(None, (str(tmp_path),))], None)
    assert [(found.label, len(found.runs)) for found in groups] == [("dqn", 3), ("ppo", 3)]


def test_a_key_that_an_older_rltool_did_not_have_makes_no_difference(tmp_path: Path) -> None:
    fake_run(tmp_path / "0", [(10, 1.0)])
    fake_run(tmp_path / "1", [(10, 1.0)], seed=1, stop__on=[], env__timeout=None)
    assert labels([str(tmp_path)]) == ["ppo"]


def test_a_label_is_what_differs(tmp_path: Path) -> None:
    for number, (lr, gamma) in enumerate([(1e-3, 0.9), (3e-4, 0.9), (3e-4, 0.99)]):
        fake_run(tmp_path / str(number), [(10, 1.0)], optim__lr=lr, algo__gamma=gamma)
    assert labels([str(tmp_path)]) == [
        "gamma=0.9, lr=0.0003",
        "gamma=0.9, lr=0.001",
        "gamma=0.99, lr=0.0003",
    ]  # fmt: skip
    assert labels([str(tmp_path)], ["optim.lr"]) == ["lr=0.0003", "lr=0.001"]
    assert labels([str(tmp_path)], []) == ["all runs"]
    assert labels([str(tmp_path / "0")]) == ["ppo"]


def test_a_key_is_its_last_part_where_that_is_no_other_key(tmp_path: Path) -> None:
    for number, (algo, lr, more) in enumerate(
        [("ppo", 1.0, 2.0), ("ppo", 2.0, 2.0), ("dqn", 2.0, 1.0), ("dqn", 2.0, 2.0)]
    ):
        fake_run(tmp_path / str(number), [(10, 1.0)], algo=algo, optim__lr=lr, algo__lr=more, network__hidden=[64, 64])
    assert labels([str(tmp_path)]) == [
        "ppo, optim.lr=1", "ppo, optim.lr=2", "dqn, algo.lr=1", "dqn, algo.lr=2",
    ]  # fmt: skip
    assert labels([str(tmp_path)], ["algo.kind", "optim.lr"]) == [
        "algo=ppo, lr=1", "algo=ppo, lr=2", "algo=dqn, lr=2",
    ]  # fmt: skip
    assert labels([str(tmp_path)], ["network.hidden"]) == ["hidden=[64,64]"]


def test_labels_that_are_cut_still_differ() -> None:
    assert list(fitted(["short", "a longer one"], 9).values()) == ["short", "a longer…"]
    assert list(fitted(["learning_rate=1", "learning_rate=2"], 12).values()) == ["learning_…=1", "learning_…=2"]
    assert list(fitted(["from the one", "from the two"], 9).values()) == ["from… one", "from… two"]
    middle = [f"{'a' * 20}{sign}{'b' * 20}" for sign in "xy"]
    assert list(fitted(middle, 12).values()) == ["aaaaaaa… (1)", "aaaaaaa… (2)"]
    assert fitted(middle, 41) == {label: label for label in middle}


def test_of_many_keys_that_differ_a_label_takes_as_many_as_tell_apart(tmp_path: Path) -> None:
    for value in range(2):
        fake_run(tmp_path / str(value), [(10, 1.0)], **{f"algo__{name}": value for name in "abcd"})
    assert labels([str(tmp_path)]) == ["a=0", "a=1"]


def test_numbers_in_labels_are_in_order(tmp_path: Path) -> None:
    for value in (16, 8, 128):
        fake_run(tmp_path / str(value), [(10, 1.0)], env__num_envs=value)
    assert labels([str(tmp_path)]) == [f"num_envs={value}" for value in (8, 16, 128)]


def test_other_labels_are_in_the_order_of_the_words(tmp_path: Path) -> None:
    words = [str(fake_run(tmp_path / algo, [(10, 1.0)], algo=algo)) for algo in ("ppo", "dqn", "sac")]
    assert labels(words) == ["ppo", "dqn", "sac"]


def test_groups_of_one_name_are_told_apart(tmp_path: Path) -> None:
    run = str(fake_run(tmp_path / "a", [(10, 1.0)]))
    groups = select([Part(None, (run,)), Part("ours", (run,)), Part("ours", (run,)), Part(None, (run,))], None)
    assert [found.label for found in groups] == ["ppo (1)", "ours (1)", "ours (2)", "ppo (2)"]


def test_patterns_checkpoints_and_doubles(tmp_path: Path) -> None:
    run = fake_run(tmp_path / "runs/a/0", [(10, 1.0)])
    (run / "checkpoints/best.ckpt").touch()
    words = [str(tmp_path / "runs/*"), str(run), str(run / "checkpoints/best.ckpt")]
    (found,) = select([Part(None, tuple(words))], None)
    assert [record.path for record in found.runs] == [run]


def test_words_are_keys_names_separators_and_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    fake_run(tmp_path / "seed=0")
    words = [
        "metric=[a/b, c]",
        "seed=0",
        "--",
        "ours=seed=0",
        "x=seconds",
        "theirs=seed*",
        "smooth=5",
        "threshold=-1e1",
    ]
    config, parts = read_words(words, PlotConfig, ConfigFiles.find_main(), "plot")
    assert config.metric == ["a/b", "c"]
    assert (config.x, config.smooth, config.threshold) == ("seconds", 5, -10.0)
    assert parts == (Part(None, ("seed=0",)), Part("ours", ("seed=0",)), Part("theirs", ("seed*",)))


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["nowhere"], "there is no nowhere"),
        (["x=minutes", "metrik=b", "a"], "metrik: no such key. Did you mean metric?"),
        (["x=minutes", "a"], "x: expected one of frames, seconds"),
        (["a", "smooth=0"], "smooth: expected"),
        ([], "no run was named"),
        (["empty"], "found none in empty"),
        (["a", "metric=eval/return_mena"], "Did you mean eval/return_mean"),
        (["a", "group=optim.lrr"], "group: no run has a key optim.lrr. Did you mean optim.lr"),
        (["a", "out=a.gif"], "expected a file that ends in .png, .svg, .pdf, .csv, found a.gif"),
        (["a", "out=no/a.png"], "there is no directory no"),
    ],
)
def test_mistakes_are_told_and_return_2(rltool: Rltool, tmp_path: Path, words: list[str], answer: str) -> None:
    fake_run(tmp_path / "a", [(10, 1.0)])
    (tmp_path / "empty").mkdir()
    code, _, err = rltool("plot", *words)
    assert code == 2
    assert answer in err
    assert "Traceback" not in err


def test_a_missing_extra_is_named(rltool: Rltool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_run(tmp_path / "a", [(10, 1.0)])
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "uniplot", None)
    for words in (["out=a.png"], []):
        code, _, err = rltool("plot", "a", *words)
        assert code == 2
        assert "pip install 'rltool[plots]'" in err


# -------------------------------------------------------------------------------------------------------------- the numbers


def test_a_moving_average_keeps_a_straight_line_and_takes_no_more_from_one_side() -> None:
    line = np.arange(10.0)
    np.testing.assert_allclose(moving_average(line, 5), line)
    np.testing.assert_allclose(moving_average(np.array([0, 3, 0, 0.0]), 3), [0, 1, 1, 0])
    np.testing.assert_allclose(moving_average(np.array([0, 3, 0, 0.0]), 4), [0, 1, 1, 0])


def test_curves_meet_where_all_were_measured() -> None:
    x, y = common(
        [Series(np.array([0.0, 10]), np.array([0.0, 10])), Series(np.array([5.0, 7, 15]), np.array([1.0, 3, 3]))]
    )
    np.testing.assert_allclose(x, [5, 7, 10])
    np.testing.assert_allclose(y, [[5, 7, 10], [1, 3, 3]])
    apart = [Series(np.array([0.0, 1]), np.zeros(2)), Series(np.array([2.0, 3]), np.zeros(2))]
    assert not len(common(apart)[0])


def panel(
    *groups: Group, metric: str = "eval/return_mean", axis: str = "frames", **changes: object
) -> tuple[object, list[str]]:
    notes: list[str] = []
    options: dict[str, object] = {"smooth": "auto", "estimate": "auto", "resamples": 200, **changes}
    return read_panel(groups, "CartPole-v1", metric, None, axis=axis, notes=notes, **options), notes  # type: ignore[arg-type]


def test_a_curve_ends_with_its_shortest_run_and_says_so(tmp_path: Path) -> None:
    short = fake_run(tmp_path / "0", [(100, 1.0), (200, 3.0)])
    long = fake_run(tmp_path / "1", [(100, 3.0), (200, 5.0), (900, 100.0)], seed=1)
    drawn, notes = panel(group(short, long))
    (curve,) = drawn.curves  # type: ignore[attr-defined]
    np.testing.assert_allclose(curve.x, [100, 200])
    np.testing.assert_allclose(curve.y, [2, 4])
    np.testing.assert_allclose(curve.low, [1, 3])  # of two seeds, a quarter of the resamples is one of them twice
    np.testing.assert_allclose(curve.high, [3, 5])
    assert notes == ["a: drawn to 200 frames, as far as all 2 runs reach (the longest: 900)"]


def test_a_frame_that_was_measured_twice_counts_once(tmp_path: Path) -> None:
    run = fake_run(tmp_path / "0", [(100, 1.0), (200, 2.0), (200, 4.0)])
    series = read_series(Record(run), "eval/return_mean", "frames", "auto")
    assert series is not None
    assert (list(series.x), list(series.y)) == ([100, 200], [1, 4])


def test_seconds_leave_out_the_time_between_two_sessions(tmp_path: Path) -> None:
    points = [
        {"frames": 100, "time/wall": 1000.0, "time/frames_per_second": 10.0},
        {"frames": 300, "time/wall": 99_999.0, "time/frames_per_second": 100.0},
    ]
    run = fake_run(tmp_path / "0", [(50, 1.0), (200, 2.0), (300, 3.0), (400, 4.0)], points=points)
    assert Record(run).times == [(100, 10.0), (300, 12.0)]
    series = read_series(Record(run), "eval/return_mean", "seconds", None)
    assert series is not None
    np.testing.assert_allclose(series.x, [5, 11, 12])  # nothing says when the evaluation after the last point was


def test_training_episodes_are_smoothed_and_evaluations_are_not(tmp_path: Path) -> None:
    values = np.tile([0.0, 1.0], 50)
    points = [{"frames": n + 1, "episode/return": value, "eval/return_mean": value} for n, value in enumerate(values)]
    run = Record(fake_run(tmp_path / "0", points=points))
    smooth, raw = (read_series(run, name, "frames", "auto") for name in ("episode/return", "eval/return_mean"))
    assert smooth is not None
    assert raw is not None
    assert smooth.raw is not None
    assert raw.raw is None
    assert np.ptp(smooth.y[5:-5]) < 0.2
    for wanted, told in (("auto", "1/10 of the run"), (6, "5 points")):
        drawn, notes = panel(group(run.path), metric="episode/return", smooth=wanted)
        assert drawn.smoothed == told  # type: ignore[attr-defined]
        assert notes == [f"episode/return: smoothed, a moving average over {told}"]
    assert panel(group(run.path))[0].smoothed == ""  # type: ignore[attr-defined]
    assert np.ptp(raw.y) == 1
    unsmoothed = read_series(run, "episode/return", "frames", None)
    assert unsmoothed is not None
    assert unsmoothed.raw is None


def test_the_interquartile_mean_is_for_four_seeds_in_every_curve() -> None:
    assert choose_estimate("auto", [4, 5]) == "iqm"
    assert choose_estimate("auto", [4, 3]) == "mean"
    assert choose_estimate("auto", [1, 4]) == "iqm"  # a single run has nothing to choose
    assert choose_estimate("auto", [1]) == "mean"
    assert choose_estimate("median", [9]) == "median"


def test_runs_without_the_metric_are_counted(tmp_path: Path) -> None:
    drawn, notes = panel(group(fake_run(tmp_path / "0", [(10, 1.0)]), fake_run(tmp_path / "1", seed=1)))
    assert drawn.curves[0].seeds == 1  # type: ignore[attr-defined]
    assert notes == ["a: 1 of 2 runs on CartPole-v1 have no eval/return_mean"]


def test_the_threshold_is_the_environments_or_the_users(tmp_path: Path) -> None:
    assert Record(fake_run(tmp_path / "0")).goal == 475
    assert Record(fake_run(tmp_path / "1", env="NotRegistered-v0", stop__return_threshold=7)).goal == 7
    assert Record(fake_run(tmp_path / "2", env="NotRegistered-v0")).goal is None


# -------------------------------------------------------------------------------------------------------------- the picture


@pytest.fixture
def two_groups(tmp_path: Path) -> Path:
    """Two seeds of PPO, rising, and one of DQN, in runs/."""
    for seed in range(2):
        fake_run(tmp_path / f"runs/ppo/{seed}", [(100 * n, 100.0 * n + seed) for n in range(1, 6)], seed=seed)
    fake_run(tmp_path / "runs/dqn/0", [(100 * n, 50.0 * n) for n in range(1, 6)], algo="dqn")
    return tmp_path / "runs"


def test_text_in_an_svg_is_text_of_eight_points(rltool: Rltool, two_groups: Path) -> None:
    code, out, _ = rltool("plot", "runs", "out=a.svg")
    assert code == 0
    assert out.splitlines()[-1] == "written to a.svg"
    text = Path("a.svg").read_text()
    words = [word.replace("\N{NO-BREAK SPACE}", " ") for word in re.findall(r"<text[^>]*>([^<]*)</text>", text)]
    assert {"dqn (1 seed)", "ppo (2 seeds)", "CartPole-v1", "Frames", "Evaluation return", "475"} <= set(words)
    sizes = [float(size) for size in re.findall(r"font(?:-size)?: (?:\w+ )*?([\d.]+)px", text)]
    assert len(sizes) == len(words)
    assert min(sizes) >= 8
    assert 'width="252pt"' in text  # 3.5 inches
    rltool("plot", "runs", "out=b.svg")
    assert Path("b.svg").read_text() == text


def test_a_picture_says_over_how_much_it_is_smoothed(rltool: Rltool, tmp_path: Path) -> None:
    fake_run(tmp_path / "run", points=[{"frames": n, "episode/return": n % 7} for n in range(1, 60)])
    code, out, _ = rltool("plot", "run", "metric=episode/return", "out=a.svg")
    assert code == 0
    assert "note: episode/return: smoothed, a moving average over 1/10 of the run" in out
    assert "(smoothed over 1/10 of the run)" in Path("a.svg").read_text()


def test_a_picture_has_the_width_that_was_asked_for(rltool: Rltool, two_groups: Path) -> None:
    from PIL import Image

    assert rltool("plot", "runs", "out=a.png", "width=5")[0] == 0
    with Image.open("a.png") as picture:
        assert picture.size[0] == 5 * 300
    assert Path("a.png").stat().st_size < 150_000
    assert rltool("plot", "runs", "out=a.pdf")[0] == 0
    assert Path("a.pdf").read_bytes().startswith(b"%PDF")


def test_the_points_as_a_table(rltool: Rltool, two_groups: Path) -> None:
    assert rltool("plot", "runs", "out=a.csv")[0] == 0
    with open("a.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 10
    assert list(rows[0].values()) == ["CartPole-v1", "eval/return_mean", "dqn", "1", "100.0", "50.0", "", ""]
    assert list(rows[-1].values()) == [
        "CartPole-v1",
        "eval/return_mean",
        "ppo",
        "2",
        "500.0",
        "500.5",
        "500.0",
        "501.0",
    ]


def test_many_long_labels_leave_the_panel_its_height(rltool: Rltool, tmp_path: Path) -> None:
    for number in range(6):
        fake_run(tmp_path / f"runs/{number}", [(10, 1.0), (20, 2.0)], algo__a_rather_long_name_of_a_key=number)
    heights = []
    for words in (["runs/0"], ["runs"]):
        assert rltool("plot", *words, "out=a.svg")[0] == 0
        heights.append(float(re.findall(r'height="([\d.]+)pt"', Path("a.svg").read_text())[0]))
    assert heights[1] > heights[0] + 6 * 8


def test_the_terminal_shows_it_at_80_columns(rltool: Rltool, two_groups: Path) -> None:
    code, out, _ = rltool("plot", "runs")
    assert code == 0
    assert all(len(line) <= 80 for line in out.splitlines())
    assert re.search(r"^ppo +500 +2 +500\.5 \[500\.0, 501\.0\]$", out, re.MULTILINE)
    assert "** dqn" in out
    assert "oo ppo" in out


def test_the_terminal_shows_the_threshold_too(rltool: Rltool, tmp_path: Path) -> None:
    fake_run(tmp_path / "low", [(100, 5.0), (200, 5.0)])
    lines = rltool("plot", "low")[1].splitlines()
    across = [number for number, line in enumerate(lines) if re.fullmatch(r"│[▔─▁]{60,}│.*", line)]
    curve = [number for number, line in enumerate(lines) if re.search("[⠀-⣿]{10}", line)]
    assert lines[0].endswith("(line across: 475)")
    assert len(across) == len(curve) == 1
    assert across < curve  # 475 is above 5


def test_a_long_label_is_cut_in_the_terminal_and_wrapped_in_a_picture(rltool: Rltool, tmp_path: Path) -> None:
    for number in range(2):
        fake_run(tmp_path / f"runs/{number}", [(100, 5.0), (200, 5.0)], network__hidden=[64] * (20 + number))
    out = rltool("plot", "runs")[1]
    assert all(len(line) <= 80 for line in out.splitlines())
    assert rltool("plot", "runs", "out=a.svg")[0] == 0
    assert not re.findall(r">[^<]{60,}</text>", Path("a.svg").read_text())


@pytest.mark.long
def test_a_terminal_without_unicode_gets_ascii(two_groups: Path) -> None:
    script = (
        "import sys\nfrom rltool.cli import main\nassert main(['plot', 'runs']) == 0\n"
        "assert not {'torch', 'hydra', 'pandas', 'matplotlib'} & set(sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=two_groups.parent, capture_output=True,
        env={"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii", "COLUMNS": "80", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, b"")
    text = done.stdout.decode("ascii")
    assert "ppo" in text
    assert "?" not in text


def test_notes_say_what_was_put_together(rltool: Rltool, tmp_path: Path) -> None:
    fake_run(tmp_path / "a", [(10, 1.0)], optim__lr=1.0)
    fake_run(tmp_path / "b", [(10, 2.0)], optim__lr=2.0)
    fake_run(tmp_path / "c", [(10, 2.0)], optim__lr=2.0)
    _, out, _ = rltool("plot", "mine=a", "b", "c")
    assert "note: mine: runs on CartPole-v1 are taken together that differ in optim.lr" in out
    assert "note: mine: several runs on CartPole-v1 have seed 0" in out


def test_a_note_about_several_groups_is_one() -> None:
    assert joined(["a: cut", "b: cut", "alone", "a: cut", "c: cut", "d: cut", "a: x: y"]) == [
        "a, b, c and 1 more: cut", "alone", "a: x: y",
    ]  # fmt: skip


@pytest.mark.smoke
def test_a_real_run_is_drawn(ppo_run: Path, rltool: Rltool) -> None:
    code, out, err = rltool("plot", str(ppo_run), "metric=eval/return_mean,train/loss", "x=seconds", "out=a.png")
    assert (code, err) == (0, "")
    assert "eval/return_mean" in out


def test_unknown_runs_raise_config_errors() -> None:
    with pytest.raises(ConfigError, match="there is no nowhere"):
        select([Part(None, ("nowhere",))], None)


@pytest.mark.parametrize("schema", [PlotConfig, CompareConfig])
def test_the_guide_explains_every_key(schema: type[Schema]) -> None:
    told = set(re.findall(r"^\| `(\w+)` \|", (ROOT / "docs/comparing.md").read_text(encoding="utf-8"), re.MULTILINE))
    assert set(schema.model_fields) - {"debug"} <= told

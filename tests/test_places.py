"""Which checkpoints a path, a directory or a pattern stands for."""

from __future__ import annotations

from pathlib import Path

import pytest

from rltool.errors import ConfigError
from rltool.places import checkpoints_at, labels


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Runs 2, 10 and ``late``, which has no best.ckpt, below runs/sweep."""
    for name, files in (("2", ["best", "last"]), ("10", ["best", "last"]), ("late", ["last"])):
        directory = tmp_path / "runs/sweep" / name / "checkpoints"
        directory.mkdir(parents=True)
        (directory.parent / "config.yaml").touch()
        for file in files:
            (directory / f"{file}.ckpt").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        (["runs/sweep/2/checkpoints/last.ckpt"], ["2/checkpoints/last.ckpt"]),
        (["runs/sweep/2"], ["2/checkpoints/best.ckpt"]),
        (["runs/sweep/2/checkpoints"], ["2/checkpoints/best.ckpt"]),
        (["runs/sweep/late"], ["late"]),
        (["runs"], ["2/checkpoints/best.ckpt", "10/checkpoints/best.ckpt", "late"]),
        (["runs/sweep/*/checkpoints/last.ckpt"], [f"{name}/checkpoints/last.ckpt" for name in ("2", "10", "late")]),
        (["runs/**/best.ckpt"], ["2/checkpoints/best.ckpt", "10/checkpoints/best.ckpt"]),
        (["runs/sweep/[0-9]*"], ["2/checkpoints/best.ckpt", "10/checkpoints/best.ckpt"]),
        (["runs/sweep/10", "runs/sweep"], ["10/checkpoints/best.ckpt", "2/checkpoints/best.ckpt", "late"]),
        (["runs/sweep/nowhere.ckpt"], ["nowhere.ckpt"]),
    ],
)
def test_what_a_place_stands_for(runs: Path, places: list[str], expected: list[str]) -> None:
    assert checkpoints_at(places) == [Path("runs/sweep", name) for name in expected]


def test_a_directory_without_runs_is_left_to_its_reader(runs: Path) -> None:
    (runs / "empty").mkdir()
    assert checkpoints_at(["empty"]) == [Path("empty")]
    with pytest.raises(ConfigError, match="checkpoint: nothing matches empty/\\*"):
        checkpoints_at(["empty/*"])


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        (["runs/a/checkpoints/best.ckpt", "runs/b/checkpoints/best.ckpt"], ["a", "b"]),
        (["a/checkpoints/best.ckpt", "a/checkpoints/last.ckpt"], ["best.ckpt", "last.ckpt"]),
        (["r/a/best.ckpt", "r/a/last.ckpt", "r/b/best.ckpt"], ["a/best.ckpt", "a/last.ckpt", "b/best.ckpt"]),
        (["a/s0/best.ckpt", "b/best.ckpt"], ["a/s0", "b"]),
        (["one.ckpt"], ["one.ckpt"]),
    ],
)
def test_paths_are_told_apart_by_what_differs(paths: list[str], expected: list[str]) -> None:
    assert labels([Path(path) for path in paths]) == expected

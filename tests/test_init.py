"""``rltool init``: what it writes, what it refuses, and that the README it writes tells the truth."""

from __future__ import annotations

import io
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from rltool import cli
from rltool.commands.init import TEMPLATE, TEMPLATE_NAME, project

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def _empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))


def files(directory: Path) -> set[str]:
    return {path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()}


def test_a_project_bears_its_name_throughout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["init", "arm"]) == 0
    out = capsys.readouterr().out
    written = files(tmp_path / "arm")
    assert {"README.md", "pyproject.toml", ".gitignore", "arm/envs.py", "conf/env/point.yaml"} <= written
    assert written == {line.strip() for line in out.partition("\n\n")[0].splitlines()[1:]}
    for name in written:
        assert TEMPLATE_NAME not in name + (tmp_path / "arm" / name).read_text(encoding="utf-8")
    assert tomllib.loads((tmp_path / "arm" / "pyproject.toml").read_text())["project"]["name"] == "arm"
    _, cd, train = out.partition("\n\n")[2].splitlines()
    assert cd == "  cd arm"
    assert train in [f"  {line}" for line in (tmp_path / "arm" / "README.md").read_text().splitlines()]


def test_the_template_is_a_project_of_its_own_name() -> None:
    compiled = {path for path in files(TEMPLATE) if path.endswith(".pyc")}
    assert {path.as_posix() for path in project(TEMPLATE_NAME)} == files(TEMPLATE) - compiled


@pytest.mark.parametrize("there", ["arm", "some where/arm", "./arm/"])
def test_the_directory_may_be_a_path(tmp_path: Path, capsys: pytest.CaptureFixture[str], there: str) -> None:
    assert cli.main(["init", there]) == 0
    assert (tmp_path / there / "arm" / "networks.py").is_file()
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("  cd "))
    assert (tmp_path / shlex.split(line)[1] / "README.md").is_file()


def test_an_empty_directory_is_filled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "arm").mkdir()
    monkeypatch.chdir(tmp_path / "arm")
    assert cli.main(["init", "."]) == 0
    assert (tmp_path / "arm" / "arm" / "envs.py").is_file()
    assert "cd " not in capsys.readouterr().out, "one is there already"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], ["expected one name", "Type rltool init my_project"]),
        (["arm", "leg"], ["expected one name for the project, found arm leg"]),
        (["my-arm"], ["'my-arm' cannot be a package", "Type rltool init my_arm"]),
        (["there/2d"], ["'2d' cannot be a package", "Type rltool init there/my_2d"]),
        (["name=arm"], ["Type rltool init arm"]),
        (["class"], ["'class' is a word of the Python language", "Type rltool init my_class"]),
        (["json"], ["'json' is a module that Python has already", "Type rltool init my_json"]),
        (["pytest"], ["'pytest' is a module that Python has already"]),
        (["conf"], ["'conf' is another directory of the project", "Type rltool init my_conf"]),
        (["full"], ["full exists and is not empty", "Choose another name"]),
        (["file"], ["file exists and is a file"]),
        (["arm", "--force"], ["there is no option --force"]),
    ],
    ids=str,
)
def test_what_cannot_be_a_project_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: list[str]
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").touch()
    (tmp_path / "file").touch()
    assert cli.main(["init", *words]) == 2
    out, err = capsys.readouterr()
    for text in said:
        assert text in err
    assert out == ""
    assert files(tmp_path) == {"full/notes.txt", "file"}


@pytest.mark.parametrize("existing", [False, True])
@pytest.mark.parametrize(("fault", "code"), [(OSError(28, "No space left on device"), 1), (KeyboardInterrupt(), 130)])
def test_half_a_project_is_none(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    existing: bool,
    fault: BaseException,
    code: int,
) -> None:
    if existing:
        (tmp_path / "arm").mkdir()
    writes = 0

    class Full(io.TextIOWrapper):
        def write(self, text: str) -> int:
            nonlocal writes
            writes += 1
            if writes == 5:
                raise fault
            return super().write(text)

    monkeypatch.setattr(Path, "open", lambda path, mode, **kwargs: Full(io.FileIO(path, mode), **kwargs))
    assert cli.main(["init", "arm"]) == code
    assert writes == 5
    assert [path.name for path in tmp_path.rglob("*")] == ["arm"] * existing
    if code == 1:
        assert "No space left on device. Nothing was left behind" in capsys.readouterr().err


def test_init_imports_nothing_heavy(tmp_path: Path) -> None:
    script = (
        "import sys\nfrom rltool.cli import main\nmain(['init', 'arm'])\n"
        "sys.exit(str({'torch', 'gymnasium', 'hydra', 'omegaconf', 'numpy', 'arm'} & set(sys.modules) or ''))"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, env=env)
    assert done.stderr.strip() == ""
    assert (tmp_path / "arm").is_dir()


@pytest.mark.long
@pytest.mark.smoke
def test_every_command_of_the_readme_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["init", "arm"]) == 0
    monkeypatch.chdir(tmp_path / "arm")
    text = Path("README.md").read_text(encoding="utf-8")
    lines = [line for block in re.findall(r"```\n(.*?)```", text, re.DOTALL) for line in block.splitlines()]
    lines += re.findall(r"`(rltool [^`]+)`", text)
    assert len(lines) == len(set(lines)) >= 6
    for line in lines:
        program, *words = line.split()
        if program == "rltool":
            if words[0] == "train":
                words.append("total_frames=512")  # it need not learn here
            assert cli.main(words) == 0, line + capfd.readouterr().err
        else:
            assert program == "python"
            path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
            subprocess.run([sys.executable, *words], check=True, env={**os.environ, "PYTHONPATH": path})
    answers = capfd.readouterr().out
    assert "check_env passed" in answers
    assert re.search(r"^warning", answers, re.MULTILINE) is None
    assert "3 passed" in answers

"""Every snippet of the documentation, run: files are written, commands carried out (with few frames)."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from probes import TINY
from safetensors import safe_open

from rltool import registry
from rltool.actions import ActionSpec
from rltool.checkpoint import State
from rltool.cli import main
from rltool.config import load_node
from rltool.configfiles import ConfigFiles
from rltool.evaluation import EvalReport
from rltool.spaces import LeafSpec

DOCS = Path(__file__).parents[1] / "docs"
GUIDES = ("environments", "extending")
SHORT = ("total_frames=200", "eval=none", "logging=none", "quiet=true", "compile=false", "buffer.size=1000")


def blocks(guide: str, language: str) -> list[str]:
    text = (DOCS / f"{guide}.md").read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def commands(guide: str) -> list[str]:
    return [line for block in blocks(guide, "sh") for line in block.splitlines()]


def files(guide: str) -> dict[str, str]:
    """The files that a guide shows: their first line is a comment with the path (after Hydra's own header)."""
    named = [
        (re.match(r"(?:# @package .*\n)?# (\S+\.(?:py|yaml))\n", block), block)
        for block in blocks(guide, "(?:python|yaml)")
    ]
    return {found[1]: block for found, block in named if found}


def short(words: list[str]) -> list[str]:
    """The words of a training command, and those that make it short."""
    given = {word.partition("=")[0] for word in words}
    algo = next(word.partition("=")[2] for word in words if word.startswith("algo="))
    more = [*TINY.get(algo, ("algo.frames_per_batch=64",)), *SHORT]
    if algo not in ("dqn", "sac"):
        more.remove("buffer.size=1000")
    unique = {word.partition("=")[0]: word for word in more}
    return [*words, *(word for key, word in unique.items() if key not in given)]


@pytest.mark.parametrize("guide", GUIDES)
def test_nothing_in_it_goes_unread(guide: str) -> None:
    text = (DOCS / f"{guide}.md").read_text(encoding="utf-8")
    read = [block for language in ("sh", "python", "yaml") for block in blocks(guide, language)]
    assert text.count("```") == 2 * len(read)
    assert all(line.startswith("rltool ") for line in commands(guide))


@pytest.mark.long
@pytest.mark.smoke
@pytest.mark.parametrize(("guide", "command"), [(guide, line) for guide in GUIDES for line in commands(guide)])
def test_every_command_runs(
    guide: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in files(guide).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "_schemas", {group: dict(of) for group, of in registry._schemas.items()})
    for name in files(guide):
        monkeypatch.delitem(sys.modules, Path(name).stem, raising=False)
    _, *words = shlex.split(command)
    code = main(short(words) if words[0] == "train" else words)
    said = capsys.readouterr()
    if code and re.search(r"pip install 'rltool\[\w+\]'", said.err):
        pytest.skip(said.err.strip())
    assert code == 0, said.err


@pytest.mark.long
@pytest.mark.smoke
def test_the_commands_about_evaluation_run_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("imageio_ffmpeg")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    for command in commands("evaluation"):
        _, *words = shlex.split(command)
        words = [word for word in words if not word.startswith("total_frames=")]
        code = main([*short(words), "eval=default", "eval.interval=100"] if words[0] == "train" else words)
        assert code == 0, (command, capsys.readouterr().err)
    (reader,) = blocks("evaluation", "python")
    done = subprocess.run([sys.executable, "-c", reader], capture_output=True, text=True)
    assert (done.stderr, len(done.stdout.splitlines())) == ("", 100)


def test_every_value_of_a_report_is_explained() -> None:
    text = (DOCS / "evaluation.md").read_text(encoding="utf-8").partition("## The report as JSON")[2]
    told = set(re.findall(r"`(\w+)`", text))
    assert {field.name for field in fields(EvalReport)} <= told
    assert {"reports", "overall", "failed"} <= told


def test_the_list_of_wrappers_is_a_valid_one() -> None:
    (block,) = (block for block in blocks("environments", "yaml") if block not in files("environments").values())
    node = ConfigFiles.find_main().read("env", "gym").node | {"id": "CarRacing-v3"} | yaml.safe_load(block)
    wrappers = load_node("env", node).wrappers  # type: ignore[attr-defined]
    assert [wrapper.name for wrapper in wrappers][-1] == "ClipReward"
    assert not wrappers[-1].eval


# --------------------------------------------------------------------------------------------------------- checkpoints


def table(heading: str) -> dict[str, str]:
    """The first two cells of each row of the table under a heading of docs/checkpoints.md, by what stands in backticks."""
    text = (DOCS / "checkpoints.md").read_text(encoding="utf-8").partition(f"### {heading}\n")[2].partition("\n#")[0]
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| `")]
    return {name: row[1] for row in rows for name in re.findall(r"`([^`]+)`", row[0])}


def test_the_reader_of_checkpoints_needs_safetensors_and_json_alone(ppo_run: Path) -> None:
    (reader,) = blocks("checkpoints", "python")
    assert len(reader.splitlines()) == 10
    loaded = "import sys\nassert not {'rltool', 'torch', 'gymnasium', 'pydantic'} & set(sys.modules)\n"
    command = [sys.executable, "-c", reader + loaded]
    done = subprocess.run(command, cwd=ppo_run / "checkpoints", capture_output=True, text=True)
    assert done.stderr == ""
    first, *rest = done.stdout.splitlines()
    assert first == "ppo on Pendulum-v1 at frame 352"
    assert "policy.log_std float32 (1,)" in rest
    with safe_open(ppo_run / "checkpoints/last.ckpt", framework="numpy") as file:
        assert [line.split()[0] for line in rest] == list(file.keys())


def test_every_field_of_a_checkpoint_is_explained() -> None:
    told = table("The JSON")
    assert set(told) >= {field.name for field in fields(State)}
    for name, spec in (("leaves", LeafSpec), ("actions", ActionSpec)):
        assert {field.name for field in fields(spec)} == set(re.findall(r"`(\w+)`", told[name]))


@pytest.mark.parametrize("algo", ["ppo", "dqn", "sac"])
def test_every_component_of_a_checkpoint_is_explained(request: pytest.FixtureRequest, algo: str) -> None:
    directory = request.getfixturevalue(f"{algo}_run") / "checkpoints"
    with safe_open(directory / "last.ckpt", framework="numpy") as file:
        assert {name.partition(".")[0] for name in file.keys()} <= set(table("The tensors"))  # noqa: SIM118


def test_every_tensor_of_a_stored_buffer_is_explained(dqn_run: Path) -> None:
    told = {re.sub(r"<\w+>", "…", name) for name in table("The replay buffer")} | {"data.next.reward"}
    told |= {f"data.next{name}" for name in told if name.startswith(".")}
    (path,) = dqn_run.glob("checkpoints/buffer-*.safetensors")
    with safe_open(path, framework="numpy") as file:
        names = {re.sub(r"(?<=frame\.|aside\.|where\.).+", "…", name) for name in file.keys()}  # noqa: SIM118
    assert names <= told

"""``rltool init``: a small working project to start from, written into a new directory."""

from __future__ import annotations

import keyword
import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING

from rltool.errors import ConfigError, Problem, WriteError

if TYPE_CHECKING:
    from rltool.cli import Options

# The template is a project that works under this name; what is written has another in its place.
TEMPLATE = Path(__file__).resolve().parents[1] / "templates" / "project"
TEMPLATE_NAME = "my_project"

# What a package and its distribution may both be called: pip wants a letter or digit at either end.
_NAME = re.compile(r"[A-Za-z](\w*[A-Za-z0-9])?", re.ASCII)


def main(options: Options) -> int:
    """Writes the project, prints what it wrote and what to type next; returns the exit code."""
    words = [word for word in options.overrides if word]
    if len(words) != 1:
        found = f"found {' '.join(words)}" if words else "found none"
        raise ConfigError(
            Problem("", f"expected one name for the project, {found}", f"Type rltool init {TEMPLATE_NAME}")
        )
    typed = os.path.normpath(words[0])
    directory = Path(os.path.abspath(typed))
    problems = [*_wrong_name(directory.name, typed), *_taken(directory, typed)]
    if problems:
        raise ConfigError(problems)
    files = project(directory.name)
    write(directory, files)
    print("\n".join([f"Wrote {typed}:", *(f"  {path.as_posix()}" for path in files), "", "Next:"]))
    if directory != Path.cwd():
        print(f"  cd {shlex.quote(typed)}")
    print(f"  {_first_training(files)}")
    return 0


def project(name: str) -> dict[Path, str]:
    """The files of a project of that name: relative path and text, those at the top first."""
    files: dict[Path, str] = {}
    for path in sorted(TEMPLATE.rglob("*"), key=lambda path: (path.parent != TEMPLATE, path)):
        if path.is_file() and path.suffix != ".pyc":
            relative = path.relative_to(TEMPLATE).as_posix().replace(TEMPLATE_NAME, name)
            files[Path(relative)] = path.read_text(encoding="utf-8").replace(TEMPLATE_NAME, name)
    return files


def write(directory: Path, files: Mapping[Path, str]) -> None:
    """Writes files into a directory, which is made where it is missing: all of them, or nothing stays behind.

    Raises:
        WriteError: one of them cannot be written.
    """
    made: list[Path] = []
    try:
        for relative, text in files.items():
            path = directory / relative
            for parent in reversed([parent for parent in path.parents if not parent.exists()]):
                parent.mkdir()
                made.append(parent)
            with path.open("x", encoding="utf-8", newline="\n") as file:
                made.append(path)
                file.write(text)
    except BaseException as error:
        for path in reversed(made):
            with suppress(OSError):
                path.rmdir() if path.is_dir() else path.unlink()
        if isinstance(error, OSError):
            raise WriteError(f"cannot write {path}: {error.strerror}. Nothing was left behind") from error
        raise


def _wrong_name(name: str, typed: str) -> Iterator[Problem]:
    """Why a name cannot be that of the project's package."""
    reason = _refusal(name)
    if reason:
        plain = re.sub(r"\W+", "_", name.rpartition("=")[2], flags=re.ASCII).strip("_") or "project"
        better = f"my_{plain}" if _refusal(plain) else plain
        yield Problem("", f"{name!r} {reason}", f"Type rltool init {os.path.join(os.path.dirname(typed), better)}")


def _refusal(name: str) -> str:
    """What speaks against a name; empty for a good one."""
    if not _NAME.fullmatch(name):
        return "cannot be a package: letters, digits and underscores, a letter first and no underscore last"
    if keyword.iskeyword(name):
        return "is a word of the Python language and cannot be a package"
    if name.lower() in {path.parts[0] for path in project(TEMPLATE_NAME)} | {"runs"} and name != TEMPLATE_NAME:
        return "is another directory of the project, and cannot be its package as well"
    here = {"", os.getcwd()}
    spec = PathFinder.find_spec(name, [entry for entry in sys.path if entry not in here])
    if name in sys.stdlib_module_names or (spec is not None and spec.origin is not None):
        return "is a module that Python has already, and would import instead of the project's"
    return ""


def _taken(directory: Path, typed: str) -> Iterator[Problem]:
    """What stands where the project is to go."""
    if directory.is_dir():
        if any(directory.iterdir()):
            yield Problem("", f"{typed} exists and is not empty", "Choose another name, or move it away")
    elif directory.exists():
        yield Problem("", f"{typed} exists and is a file", "Choose another name, or move it away")


def _first_training(files: Mapping[Path, str]) -> str:
    """The first training that the project's README tells of."""
    return next(line for line in files[Path("README.md")].splitlines() if line.startswith("rltool train "))

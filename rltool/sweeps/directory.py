"""The directory of a sweep: whose it is, and the copy of the config files in it."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from rltool.configfiles import ConfigFiles
from rltool.errors import ConfigError, Problem, WriteError
from rltool.launch import Claim
from rltool.records import is_run
from rltool.sweeps.jobs import Sweep

_LOCK, _CONF = ".lock", ".conf"


@contextmanager
def claimed(path: Path, kind: str) -> Iterator[None]:
    """A directory for a sweep, new or one that holds a sweep of the kind; a grid is run by one process at a time.

    Raises:
        ConfigError: it holds something else, another process has it, or it cannot be made.
    """
    found = Sweep.found(path)
    if path.is_dir() and found is None and any(entry.name != _LOCK for entry in path.iterdir()):
        hint = "Leave hydra.sweep.dir out, and get a new one"
        raise ConfigError(
            Problem(
                "hydra.sweep.dir", f"expected a new directory, or one with a sweep, found other files in {path}", hint
            )
        )
    if found is not None and found.kind != kind:
        raise ConfigError(
            Problem("hydra.sweep.dir", f"{path} holds a sweep of another kind ({found.kind}), and this is {kind}")
        )
    claim = Claim.make(path, "hydra.sweep.dir")
    lock = FileLock(path / _LOCK, timeout=0.2)
    try:
        if kind == "grid":
            try:
                lock.acquire()
            except Timeout:
                text = f"another process runs the sweep in {path}"
                raise ConfigError(
                    Problem("hydra.sweep.dir", text, "Wait for it, stop it, or use another directory")
                ) from None
        yield
    finally:
        lock.release()
        if Sweep.found(path) is None:
            (path / _LOCK).unlink(missing_ok=True)
            shutil.rmtree(path / _CONF, ignore_errors=True)
        claim.give_back()


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Says of a fault where it was to be written.

    Raises:
        WriteError: instead of an OSError.
    """
    try:
        yield
    except OSError as error:
        raise WriteError(f"cannot write into {path}: {error.strerror or error}") from error


def copy_files(files: ConfigFiles, path: Path) -> ConfigFiles:
    """A copy of the config files in a sweep's directory; what other sessions copied stays, as their jobs may need it."""
    home = path / _CONF / secrets.token_hex(3)
    copies = []
    for number, directory in enumerate(files.directories):
        copies.append(home / str(number))
        copies[-1].mkdir(parents=True, exist_ok=True)
        for source in _config_files(directory):
            target = copies[-1] / source.relative_to(directory)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
    return ConfigFiles(copies[0], tuple(copies[1:]))


def _config_files(directory: Path) -> Iterator[Path]:
    """The YAML files of a directory of config files; it may be a sweep's, whose jobs have files that are none."""
    for place, inner, names in os.walk(directory):
        inner[:] = sorted(name for name in inner if not name.startswith(".") and not is_run(Path(place, name)))
        yield from (Path(place, name) for name in sorted(names) if name.endswith(".yaml"))

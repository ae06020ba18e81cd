"""The directory of a run: claimed by one process, and the files in it. Free of torch."""

from __future__ import annotations

import json
import math
import os
import platform
import re
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from datetime import datetime
from errno import EACCES, EISDIR, ELOOP, ENAMETOOLONG, ENOTDIR, EPERM, EROFS
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Self

from filelock import FileLock, Timeout

from rltool.errors import ConfigError, Problem, RltoolError

_USER_ERRNOS = {EACCES, EPERM, EROFS, ENOTDIR, EISDIR, ENAMETOOLONG, ELOOP}
_CONFIG, _OVERRIDES, _METRICS, _SUMMARY, _LOG, _CHECKPOINTS = (
    "config.yaml",
    "overrides.txt",
    "metrics.jsonl",
    "summary.json",
    "log.txt",
    "checkpoints",
)
_TRACES = (_CONFIG, _OVERRIDES, _METRICS, "metrics.csv", _SUMMARY, _CHECKPOINTS)
_EVENTS = "events.out.tfevents."
CALL_OFF = "stop"
"""A file of this name in a run's directory ends the run at its next point or evaluation; see :meth:`RunDirectory.called_off`."""
# Seconds to wait for a lock that somebody only looks at.
_PATIENCE = 0.2
_PACKAGES = ("rltool", "torch", "torchrl", "tensordict", "gymnasium", "mujoco", "numpy")


class RunDirectory:
    """A run's directory, locked by this process until :meth:`close` or until the process dies.

    Made by :meth:`create` (a new run) or :meth:`open` (one to continue), not directly.

    Args:
        path: the directory, absolute.
        lock: the lock on it, held.
    """

    def __init__(self, path: Path, lock: FileLock) -> None:
        self.path = path
        self._lock = lock

    @classmethod
    def create(cls, path: Path) -> RunDirectory:
        """A new run's directory; made where it is missing, and claimed so that no two processes can both have it.

        An existing directory is taken if it holds no run; other files in it stay as they are.

        Raises:
            ConfigError: it holds a run already, a file is in the way, or it may not be written to.
            RltoolError: the file system refuses for another reason (disk full).
        """
        path = _absolute(path)
        with _explained("make the run directory", path):
            path.mkdir(parents=True, exist_ok=True)
        found = _traces(path)
        if found:
            raise _taken(path, found)
        with _explained("write into the run directory", path):
            # O_EXCL decides between two processes that both came this far.
            try:
                os.close(os.open(path / _CONFIG, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
            except FileExistsError:
                raise _taken(path, _CONFIG) from None
            try:
                lock = _locked(path)
                (path / _CHECKPOINTS).mkdir()
            except BaseException:
                (path / _CONFIG).unlink()  # an unfinished claim would keep everybody out
                raise
        return cls(path, lock)

    @classmethod
    def open(cls, path: Path) -> RunDirectory:
        """The directory of a run that is to be continued.

        Raises:
            ConfigError: there is no run, another process is writing into it, or it may not be written to.
        """
        path = _absolute(path)
        if not os.path.isdir(path):
            what = "it is a file" if os.path.exists(path) else "there is no such directory"
            raise ConfigError(Problem("resume", f"expected a run directory, found that {what}: {path}"))
        if not os.path.isfile(path / _CONFIG):
            raise ConfigError(Problem("resume", f"expected a run directory with a {_CONFIG}, found none in {path}"))
        with _explained("write into the run directory", path):
            lock = _locked(path)
            (path / _CHECKPOINTS).mkdir(exist_ok=True)
            (path / CALL_OFF).unlink(missing_ok=True)  # who continues the run wants it to go on
            # What a process that was killed was writing.
            for left in (*path.glob(".*.tmp"), *(path / _CHECKPOINTS).glob(".*.tmp")):
                left.unlink(missing_ok=True)
        return cls(path, lock)

    @classmethod
    def clear(cls, path: Path) -> None:
        """Takes away what a run left that came to no checkpoint, so that it can begin anew; other files stay.

        Checkpoints that cannot be read are kept, in a directory of another name.

        Raises:
            ConfigError: another process is writing into it.
        """
        path = _absolute(path)
        if not _traces(path):
            return
        with _explained("write into the run directory", path), closing(cls(path, _locked(path))):
            checkpoints = path / _CHECKPOINTS
            if checkpoints.is_dir() and any(checkpoints.glob("*.ckpt")):
                checkpoints.rename(path / f"{_CHECKPOINTS}-unreadable-{secrets.token_hex(3)}")
            shutil.rmtree(checkpoints, ignore_errors=True)
            for left in (*(path / name for name in _TRACES), *path.glob(f"{_EVENTS}*"), *path.glob(".*.tmp")):
                left.unlink(missing_ok=True)

    def discard(self) -> None:
        """Takes back a new run's directory that nothing came of; other files in it stay as they are."""
        events = [name for name in os.listdir(self.path) if name.startswith(_EVENTS)]
        for name in (*_TRACES, _LOG, ".lock", *events):
            with suppress(OSError):
                place = self.path / name
                place.rmdir() if place.is_dir() else place.unlink()

    @property
    def config_path(self) -> Path:
        """The whole configuration, resolved."""
        return self.path / _CONFIG

    @property
    def overrides_path(self) -> Path:
        """What was typed, one override a line."""
        return self.path / _OVERRIDES

    @property
    def metrics(self) -> Path:
        """One JSON object a logging point."""
        return self.path / _METRICS

    @property
    def summary_path(self) -> Path:
        """The result: the only file that says how the run ended."""
        return self.path / _SUMMARY

    @property
    def log_path(self) -> Path:
        """What the console showed, as plain text."""
        return self.path / _LOG

    @property
    def checkpoints(self) -> Path:
        """The directory of checkpoints; it exists."""
        return self.path / _CHECKPOINTS

    @property
    def called_off(self) -> bool:
        """Whether somebody wants the run to end: a sweep that has better ones."""
        return (self.path / CALL_OFF).exists()

    def write_config(self, tree: Mapping[str, object]) -> None:
        """Write the resolved configuration as YAML; ``OmegaConf.load`` reads back the same values.

        Args:
            tree: mappings, lists, strings, numbers, booleans and None only.
        """
        from omegaconf import OmegaConf  # which readers of runs do without

        self._write(
            self.config_path, OmegaConf.to_yaml(OmegaConf.create({key: escaped(value) for key, value in tree.items()}))
        )

    def write_overrides(self, overrides: Sequence[str]) -> None:
        """Write what was typed on the command line."""
        self._write(self.overrides_path, "".join(f"{override}\n" for override in overrides))

    def add_overrides(self, heading: str, overrides: Sequence[str]) -> None:
        """Add what was typed to continue the run, under a comment line."""
        before = self.overrides_path.read_text(encoding="utf-8") if self.overrides_path.is_file() else ""
        self._write(self.overrides_path, before + f"# {heading}\n" + "".join(f"{override}\n" for override in overrides))

    def write_summary(self, summary: Mapping[str, object]) -> None:
        """Write the result in one step: a reader sees the old file or the new one, whole. NaN and infinities become null."""
        self._write(
            self.summary_path, json.dumps(_plain(summary), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        )

    def read_summary(self) -> dict[str, object]:
        """The result as last written; see :func:`read_summary`."""
        return read_summary(self.path)

    def close(self) -> None:
        """Let another process have the directory; calling it again is harmless."""
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @staticmethod
    def new_path(root: Path, env: str, algo: str) -> Path:
        """A fresh path ``root/<env>-<algo>/<date>-<time>-<id>``; nothing is made.

        Only letters, digits, ``.``, ``_`` and ``-`` follow ``root``, whatever the names hold.

        Args:
            root: where runs go, usually ``runs``.
            env: the env group's option, e.g. ``cartpole``.
            algo: the algo group's option, e.g. ``ppo``.
        """
        names = "-".join(re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip(".-") or "unnamed" for name in (env, algo))
        return root / names / f"{datetime.now():%Y-%m-%d-%H-%M-%S}-{secrets.token_hex(3)}"

    def _write(self, path: Path, text: str) -> None:
        with _explained("write", path):
            # A file name from the system may hold bytes that are no text; its escape is valid in JSON.
            replace_file(path, text.encode("utf-8", errors="backslashreplace"))


def read_summary(directory: Path) -> dict[str, object]:
    """The result as last written; empty where there is none yet.

    Raises:
        RltoolError: the file is no JSON object.
    """
    path = directory / _SUMMARY
    with _explained("read", path):
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return {}
    try:
        summary = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise RltoolError(f"{path}: expected JSON, found something else ({error})") from error
    if not isinstance(summary, dict):
        raise RltoolError(f"{path}: expected a JSON object, found {type(summary).__name__}")
    return summary


def status_of(directory: Path) -> object:
    """How a run ended, as its summary says; None where there is no readable one."""
    try:
        return read_summary(directory).get("status")
    except RltoolError:
        return None


def versions() -> dict[str, str]:
    """The versions that a result depends on: rltool, torch, torchrl, …, python; packages that are not installed are absent.

    Read from package metadata, so that nothing is imported.
    """
    found: dict[str, str] = {}
    for package in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found | {"python": platform.python_version()}


def git_commit(cwd: Path) -> str | None:
    """The commit checked out at ``cwd``, with ``-dirty`` where tracked files differ; None outside a repository or without git."""
    try:
        answer = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            cwd=cwd,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None  # provenance is a service: no git, no repository and no commit yet are all "unknown"
    return answer.stdout.strip() or None


def program(name: str) -> str:
    """A command as a user can type it: by its path where its environment is not activated."""
    beside = Path(sys.executable).parent / name
    return shown(beside) if shutil.which(name) is None and beside.is_file() else name


def escaped(value: object) -> object:
    """A tree with every ``${`` escaped for OmegaConf: a resolved configuration holds no interpolation any more."""
    if isinstance(value, str):
        return value.replace("${", "\\${")
    if isinstance(value, Mapping):
        return {key: escaped(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [escaped(item) for item in value]
    return value


def shown(path: Path) -> str:
    """The path as a user would type it from here; absolute where this process has changed into the run directory."""
    relative = os.path.relpath(path)
    moved = Path("config.yaml").is_file() and Path("checkpoints").is_dir()
    return str(path.absolute()) if relative.startswith("..") or moved else relative


def _absolute(path: Path) -> Path:
    return Path(os.path.abspath(path.expanduser()))


def _traces(path: Path) -> str:
    """The first file in a directory that shows that it holds a run; empty where none does."""
    with _explained("read the run directory", path):
        names = {entry.name for entry in path.iterdir()}
    events = sorted(name for name in names if name.startswith(_EVENTS))
    return next(iter([name for name in _TRACES if name in names] + events), "")


def _taken(path: Path, found: str) -> ConfigError:
    return ConfigError(
        Problem(
            "hydra.run.dir",
            f"expected a directory without a run, found {found} in {path}",
            f"Continue that run with resume={path}, or leave hydra.run.dir out and get a new directory",
        )
    )


def _locked(path: Path) -> FileLock:
    """The lock on a run directory, taken; the operating system lets go of it when this process dies, however it dies.

    Raises:
        ConfigError: another process has it.
    """
    lock = FileLock(path / ".lock", timeout=_PATIENCE, poll_interval=0.02)
    try:
        lock.acquire()
    except Timeout:
        raise ConfigError(
            Problem("", f"another process is writing into {path}", "Wait for it or stop it, or use another directory")
        ) from None
    return lock


def is_locked(path: Path) -> bool:
    """Whether a process of this machine has a run directory. Whoever wants to have it meanwhile waits a moment."""
    lock = path / ".lock"
    if not lock.is_file():
        return False
    probe = FileLock(lock, timeout=0)
    try:
        with probe:
            return False
    except Timeout:
        return True
    except OSError:
        return False  # a directory that nobody can write into


@contextmanager
def _explained(action: str, path: Path) -> Iterator[None]:
    """Turns a refusal of the file system into an error that names the path; exit 2 where the user chose the path badly."""
    try:
        yield
    except OSError as error:
        places = (path, *path.parents)
        obstacle = next((place for place in places if os.path.exists(place) and not os.path.isdir(place)), None)
        in_the_way = isinstance(error, FileExistsError | NotADirectoryError) and obstacle is not None
        reason = f"{obstacle} is a file" if in_the_way else error.strerror or str(error)
        text = f"cannot {action} {path}: {reason}"
        if error.errno in _USER_ERRNOS or isinstance(error, FileExistsError):
            raise ConfigError(Problem("", text, "Choose another place, e.g. hydra.run.dir=PATH")) from error
        raise RltoolError(text) from error


def _plain(value: object) -> object:
    """JSON's own types; NaN and infinities become None, NumPy's and torch's scalars numbers."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    item = getattr(value, "item", None)
    if callable(item):
        return _plain(item())
    raise TypeError(f"expected something JSON can hold, found {type(value).__name__}")


def replace_file(path: Path, content: bytes) -> None:
    """Write a file so that it is whole at every moment, also through a power cut."""
    temporary = path.with_name(f".{path.name}-{os.getpid()}-{secrets.token_hex(3)}.tmp")
    try:
        with open(temporary, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    if os.name == "posix":
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

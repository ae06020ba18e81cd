"""Processes for jobs. On Linux they are forked from a server that has imported torch once: a job begins in a second, and not in as
many as the libraries take to be imported. Elsewhere, and where one job is all there is, each is a new interpreter.

A process is one of its own in every other way: it leads a session, has its own environment variables and output, and ends when who
started it has gone. The server does nothing but import and fork; it has one thread, no random numbers and no GPU.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Protocol

import psutil

# Libraries that start threads of their own, and where each looks up how many.
_THREADS = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)
# What a process of the server begins with.
_PRELOADED = "rltool.sweeps.preloaded"


@dataclass(frozen=True)
class Order:
    """What a process is to do.

    Attributes:
        module: it calls the module's ``main`` with the words, and exits with what that returns.
        words: see above.
        environment: all of its environment variables.
        output: the file to which its standard output and error are appended.
        directory: its working directory; None: as that of who starts it.
    """

    module: str
    words: tuple[str, ...]
    environment: Mapping[str, str]
    output: Path
    directory: Path | None = None


class Process(Protocol):
    """A process that was started. It leads a session and a group of processes, whose number is its ``pid``."""

    pid: int

    def poll(self) -> int | None:
        """Its exit code, negative for a signal that ended it; None while it runs."""

    def wait(self, seconds: float | None = None) -> int | None:
        """As :meth:`poll`, once it has ended or the seconds are over."""

    def let_go(self) -> None:
        """Closes the other end of its standard input, by which it knows that it has been left alone; harmless if repeated."""


Start = Callable[[Order], Process]


class Interpreter:
    """A new interpreter.

    Args:
        order: what it is to do.
    """

    def __init__(self, order: Order) -> None:
        # -P: what lies in the working directory comes last, as for the command line.
        command = [sys.executable, "-P", "-m", order.module, *order.words]
        with open(order.output, "ab") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(order.environment),
                cwd=order.directory,
                start_new_session=True,
            )
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """See :class:`Process`."""
        return self._process.poll()

    def wait(self, seconds: float | None = None) -> int | None:
        """See :class:`Process`."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def let_go(self) -> None:
        """See :class:`Process`."""
        assert self._process.stdin is not None
        self._process.stdin.close()


class Forked:
    """A process forked from the server, which is started with the first one.

    Args:
        order: what it is to do.
    """

    def __init__(self, order: Order) -> None:
        _serve()
        context = multiprocessing.get_context("forkserver")
        theirs, self._ours = context.Pipe(duplex=False)
        self._process = context.Process(target=_carry_out, args=(order, theirs))
        with _without_main():
            self._process.start()
        theirs.close()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """See :class:`Process`."""
        return self._process.exitcode

    def wait(self, seconds: float | None = None) -> int | None:
        """See :class:`Process`."""
        self._process.join(seconds)
        return self._process.exitcode

    def let_go(self) -> None:
        """See :class:`Process`."""
        self._ours.close()


def several() -> Start:
    """How to start many processes: forked where that is sound (macOS breaks libraries in forked processes, Windows has none) and
    can be done (the server's socket lies in the directory for temporary files, whose path may be too long for one)."""
    if sys.platform == "linux":
        with suppress(OSError):
            _serve()
            return Forked
    return Interpreter


def end(process: Process) -> None:
    """Asks it to end by itself, tidily."""
    if sys.platform == "win32":  # has no signal that asks
        process.let_go()
    elif process.poll() is None:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGTERM)


def kill(process: Process) -> None:
    """Ends it at once, and with it what it has started; where that still runs, also after its own end (not on Windows)."""
    if sys.platform == "win32":
        with suppress(psutil.Error):
            own = psutil.Process(process.pid)
            for one in (*own.children(recursive=True), own):
                with suppress(psutil.Error):
                    one.kill()
    else:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)


def _serve() -> None:
    """Starts the server, where it does not run yet.

    Raises:
        OSError: it has no place for its socket.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload([_PRELOADED])
    # Thread pools are as large as they are when libraries are imported; what lies in the working directory is no library.
    with _variables({**surroundings(1), "PYTHONSAFEPATH": "1"}):
        forkserver.ensure_running()


def surroundings(threads: object) -> dict[str, str]:
    """Environment variables for a process that trains.

    Args:
        threads: how many each library may start.
    """
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", **dict.fromkeys(_THREADS, str(threads))}
    home = str(Path(__file__).resolve().parents[2])
    if home not in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):  # a checkout that is not installed
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [home, environment.get("PYTHONPATH")]))
    return environment


def _carry_out(order: Order, leash: Connection) -> None:
    """In the forked process: makes it one of its own, and does what it is there for."""
    os.setsid()
    with open(order.output, "ab") as output:
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
    os.dup2(leash.fileno(), 0)
    leash.close()
    os.environ.clear()
    os.environ.update(order.environment)
    if order.directory is not None:
        os.chdir(order.directory)
    sys.argv = [order.module, *order.words]
    sys.exit(import_module(order.module).main(order.words))


@contextmanager
def _without_main() -> Iterator[None]:
    """A process that is started meanwhile does not import this one's main module, which would run the command once more."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


@contextmanager
def _variables(environment: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(environment)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)

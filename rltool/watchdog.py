"""Environments that give no answer: calls of them are marked, and a thread looks at how long each of them takes."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, NoReturn, Self

from rltool.contract import EnvContract
from rltool.errors import EnvironmentFault, Overtime
from rltool.tracebacks import place_in, stack_of

# Seconds that code which was interrupted may take to end.
GRACE = 5.0
# How often to look: so many times within the limit; the thread does so neither busily nor lazily.
LOOKS, _SHORTEST, _LONGEST = 20, 0.02, 5.0
# Ignored by a process that does not ask for it, and of no use to a program without out-of-band data.
_SIGNAL = getattr(signal, "SIGURG", None)


class Calls:
    """Marks the calls of environments, one at a time: a context manager around each, which costs less than half a microsecond.

    Attributes:
        serial: how many there have been.
        inside: whether one is going on.
    """

    def __init__(self) -> None:
        self.serial, self.inside = 0, False

    def __enter__(self) -> None:
        self.serial += 1
        self.inside = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.inside = False

    def leave(self) -> None:
        """What is left of the call is timed by whoever waits for it: two that time it would interrupt each other."""
        self.inside = False


# Those of the thread that trains or evaluates: it calls one environment at a time, or several side by side.
CALLS = Calls()


def no_answer(limit: float) -> str:
    """What is said of an environment that takes too long."""
    return f"gave no answer within {limit:g} s (env.timeout)"


def fault_at(frame: FrameType | None, limit: float) -> EnvironmentFault:
    """The fault of the environment that a thread hangs in.

    Args:
        frame: where the thread is; None where it has ended.
        limit: of seconds.
    """
    stack = "" if frame is None else stack_of(frame)
    return EnvironmentFault(f"{_asked_in(frame)} {no_answer(limit)}{place_in(stack)}", stack)


def _asked_in(frame: FrameType | None) -> str:
    """Which environment a thread is in, and what it was asked."""
    while frame is not None:
        contract = frame.f_locals.get("self")
        if isinstance(contract, EnvContract):
            return contract.asked(frame.f_code.co_name)
        frame = frame.f_back
    return "the environments"


class Watchdog:
    """Ends calls of environments that take longer than a limit; a context manager around training or evaluation.

    In the main thread such a call is interrupted: :class:`Overtime` is raised in the middle of it. Code outside Python
    (a simulator that waits for a lock) is not reached by that: after a few seconds more ``lost`` is called in the thread
    of the watchdog, which is to end the process. Code that keeps Python's lock stops that thread as well: then the stacks
    of all threads are written, by a thread that needs no lock. Time while the process is stopped (Ctrl-Z) does not count,
    nor does time in a debugger. Outside of the main thread nothing can be interrupted, and nothing is watched.

    Args:
        limit: seconds that a call may take; None: for ever.
        lost: given the fault, with the stack of where the call hangs; ends the process.
        log: the stacks of all threads are added to this file.
    """

    def __init__(self, limit: float | None, lost: Callable[[EnvironmentFault], None], log: Path | None = None) -> None:
        self._limit, self._lost, self._log = limit, lost, log
        self._dump: IO[str] | None = None
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._late: int | None = None
        self._debugged: int | None = None

    def __enter__(self) -> Self:
        if self._limit is None or threading.current_thread() is not threading.main_thread():
            return self
        if _SIGNAL is not None:
            self._previous = signal.signal(_SIGNAL, self._interrupt)
        if self._log is not None:
            with suppress(OSError):  # the console has told of it
                self._dump = open(self._log, "a", encoding="utf-8")
        self._arm(self._limit)  # before this thread may be kept from it
        self._thread = threading.Thread(target=self._work, args=(self._limit,), name="watchdog", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread is None:
            return
        self._stopped.set()
        self._thread.join()
        if self._dump is not None:
            self._dump.close()
        if _SIGNAL is not None:
            signal.signal(_SIGNAL, self._previous)

    def _arm(self, limit: float) -> None:
        """Has the stacks of all threads written after a while; put off only as long as a thread gets Python's lock."""
        if self._dump is not None:
            faulthandler.dump_traceback_later(limit + GRACE, file=self._dump)

    def _work(self, limit: float) -> None:
        pause = min(max(limit / LOOKS, _SHORTEST), _LONGEST)
        serial, waited, interrupted = 0, 0.0, False
        try:
            while not self._stopped.wait(pause):
                self._arm(limit)
                if not CALLS.inside or CALLS.serial != serial or self._debugged == serial:
                    serial, waited, interrupted, self._debugged = CALLS.serial, 0.0, False, None
                    continue
                waited += pause  # not what a clock says: the process may have been stopped
                if waited >= limit + GRACE:
                    self._lost(fault_at(sys._current_frames().get(_main_thread()), limit))
                    return
                if waited >= limit and not interrupted:
                    interrupted, self._late = True, serial
                    if _SIGNAL is not None:
                        signal.pthread_kill(_main_thread(), _SIGNAL)
        finally:
            if self._dump is not None:
                faulthandler.cancel_dump_traceback_later()

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        """Raises in the middle of the call, where it is still that one."""
        del number, frame
        if not CALLS.inside or CALLS.serial != self._late:
            return
        if debugging():
            self._debugged = self._late
            return
        assert self._limit is not None
        raise Overtime(no_answer(self._limit))


def _main_thread() -> int:
    ident = threading.main_thread().ident
    assert ident is not None
    return ident


def debugging() -> bool:
    """Whether a debugger follows this thread, or code that any other thread is in."""
    monitoring = getattr(sys, "monitoring", None)  # from Python 3.12 on
    if sys.gettrace() is not None or (monitoring is not None and monitoring.get_tool(monitoring.DEBUGGER_ID)):
        return True
    stacks = map(traceback.walk_stack, sys._current_frames().values())
    return any(frame.f_trace is not None for stack in stacks for frame, _ in stack)


def end_process(code: int) -> NoReturn:
    """Ends the process at once: nothing else does while its main thread hangs."""
    with suppress(OSError, ValueError):  # nobody may be reading any more
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)

"""How a run is asked to stop: the signals, and what they do before, in and after the training loop. No torch."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

# Ctrl-C, a scheduler that ends a job, and what one sends ahead of a time limit (not on Windows).
STOP_SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name))


class Interruption:
    """The signal that asked to stop, if one did."""

    def __init__(self, note: Callable[[str], object] = str) -> None:
        self._note = note
        self.by: signal.Signals | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Remembers the first, and says so; a second SIGINT stops at once (SIGTERM often comes twice: to the process and
        to its group)."""
        del frame
        if self.by is not None:
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            return
        self.by = signal.Signals(number)
        self._note(f"{self.by.name}: stopping after this batch, then a checkpoint is saved; Ctrl-C stops at once")


@contextmanager
def interrupts(note: Callable[[str], object] = str) -> Iterator[Interruption]:
    """SIGINT, SIGTERM and SIGUSR1 (what batch systems send ahead of a time limit) end the loop after its batch instead of in
    the middle (in the main thread; elsewhere they are not ours to take)."""
    interruption = Interruption(note)
    if threading.current_thread() is not threading.main_thread():
        yield interruption
        return
    previous = {number: signal.signal(number, interruption) for number in STOP_SIGNALS}
    try:
        yield interruption
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class _Stopped(KeyboardInterrupt):
    """A signal asked to stop before training began. Like Ctrl-C it is nobody's fault, and passes through all that explains
    what an environment raises."""


@contextmanager
def ending_tidily() -> Iterator[None]:
    """A signal that comes outside of the training loop, which has its own way to stop, ends the command by way of its
    ``finally``: no empty directory is left."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    asked: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        del frame
        asked.append(number)
        raise _Stopped(number)

    ours = [number for number in STOP_SIGNALS if number != signal.SIGINT]
    previous = {number: signal.signal(number, stop) for number in ours}
    try:
        yield
    except BaseException:
        if not asked:
            raise
        # An import that is interrupted may raise something of its own.
        raise SystemExit(128 + asked[0]) from None
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)

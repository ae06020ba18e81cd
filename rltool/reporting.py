"""How errors look on the terminal: plain lines for what rltool can explain, a traceback from the user's code on for the rest."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
import traceback
from collections.abc import Iterable
from types import TracebackType

from rltool.errors import ConfigError, EnvironmentFault, NonFiniteError, Problem, RltoolError
from rltool.tracebacks import shortened

# Frames of these are machinery between the command line and the code that failed.
_MACHINERY = (f"{os.sep}hydra{os.sep}", f"{os.sep}omegaconf{os.sep}")
_OWN_MACHINERY = tuple(
    os.path.join(os.path.dirname(__file__), *path) for path in (("cli.py",), ("launch.py",), ("commands", "train.py"))
)


def wants_traceback(words: Iterable[str] = ()) -> bool:
    """Whether the user asked for everything: ``debug=true`` among the overrides, or HYDRA_FULL_ERROR=1."""
    return os.environ.get("HYDRA_FULL_ERROR") == "1" or any(word.lower() == "debug=true" for word in words)


def show(error: BaseException, command: str, *, debug: bool = False) -> int:
    """Print an error to standard error and return the exit code that goes with it.

    Args:
        error: what was raised; :class:`RltoolError` and refusals of the file system are explained, all else is a traceback.
        command: what the user ran, e.g. ``rltool train``.
        debug: show the whole traceback in any case.
    """
    if debug:
        traceback.print_exception(error)
    if isinstance(error, ConfigError):
        _lines(command, error.problems)
        return error.exit_code
    if isinstance(error, RltoolError):
        notes = getattr(error, "__notes__", []) if isinstance(error, NonFiniteError) else []
        _lines(command, [Problem("", "\n".join([str(error), *notes]))])
        if isinstance(error, EnvironmentFault) and not debug:
            print(shortened(error.trace), end="", file=sys.stderr)  # unbroken: editors find the line by it
        return error.exit_code
    if isinstance(error, OSError) and error.filename is not None:
        _lines(command, [Problem("", f"{error.filename}: {error.strerror}")])
        return 1
    if not debug:
        traceback.print_exception(type(error), error, _own_frames(error.__traceback__))
    return 1


def _lines(command: str, problems: Iterable[Problem]) -> None:
    texts = [str(problem) for problem in problems]
    if len(texts) == 1:
        _print(f"{command}: {texts[0]}", "  ")
        return
    _print(f"{command}: {len(texts)} problems", "")
    for text in texts:
        _print(f"  {text}", "      ")


def _print(text: str, indent: str) -> None:
    """Wrapped for a reader at a terminal; whole lines for a file, where they are searched."""
    for line in text.splitlines() or [""]:
        if sys.stderr.isatty():
            width = min(shutil.get_terminal_size().columns, 100)
            line = textwrap.fill(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
        print(line, file=sys.stderr)


def _own_frames(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from the first frame on that is neither Hydra's nor rltool's own way there."""
    first = trace
    while first is not None:
        path = first.tb_frame.f_code.co_filename
        if path not in _OWN_MACHINERY and not any(part in path for part in _MACHINERY):
            return first
        first = first.tb_next
    return trace

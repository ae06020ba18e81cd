"""Tracebacks and stacks as the writer of an environment wants them: without what lies between rltool and the environment."""

from __future__ import annotations

import os
import re
import sysconfig
import traceback
from pathlib import Path
from types import FrameType, TracebackType

# Code between rltool and an environment. Of Gymnasium only what wraps: it has environments, too.
_RLTOOL = os.path.dirname(os.path.abspath(__file__)) + os.sep
_WRAPPING = tuple(
    os.sep + os.path.join(*path)
    for path in (
        ("gymnasium", "core.py"),
        ("gymnasium", "wrappers", ""),
        ("gymnasium", "vector", ""),
        ("torchrl", ""),
        ("tensordict", ""),
    )
)
# Python's own modules and those that were installed.
_INSTALLED = tuple(sysconfig.get_paths()[name] + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib"))
# A frame as faulthandler writes it.
_DUMPED = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)$', re.MULTILINE)


def is_between(path: str) -> bool:
    """Whether a source file is rltool's, or of a library that calls environments for it."""
    return path.startswith(_RLTOOL) or any(part in path for part in _WRAPPING)


def users_trace(trace: TracebackType | None) -> TracebackType | None:
    """A traceback from the first to the last frame that is not between rltool and the environment; None without any."""
    links: list[TracebackType] = []
    while trace is not None:
        links.append(trace)
        trace = trace.tb_next
    own = [place for place, link in enumerate(links) if not is_between(link.tb_frame.f_code.co_filename)]
    for link in reversed(links[own[0] : own[-1] + 1] if own else []):
        trace = TracebackType(trace, link.tb_frame, link.tb_lasti, link.tb_lineno)
    return trace


def trace_of(error: BaseException) -> str:
    """The traceback of an exception as text, from the environment's first frame on; empty where it has none."""
    trace = users_trace(error.__traceback__)
    return "" if trace is None else "".join(traceback.format_exception(type(error), error, trace))


def stack_of(frame: FrameType) -> str:
    """Where a thread is, as text, the innermost last: the environment's frames, or all where there are none."""
    return _text([(each.filename, each.lineno or 0, each.name) for each in traceback.extract_stack(frame)])


def dumped_stack(dump: str) -> str:
    """The same of what faulthandler wrote of a process; empty where it wrote no stack."""
    frames = [(found["file"], int(found["line"]), found["name"]) for found in _DUMPED.finditer(dump)]
    return _text(frames[::-1])


def place_in(trace: str) -> str:
    """The last line of a traceback or stack as `` (file.py:12)``, of code that is not installed where any of it is there;
    empty where it has none."""
    found = re.findall(r'^  File "(.*)", line (\d+)', trace, re.MULTILINE)
    own = [place for place in found if not place[0].startswith(_INSTALLED)]
    return next((f" ({Path(file).name}:{line})" for file, line in reversed(own or found)), "")


def shortened(trace: str, frames: int = 2) -> str:
    """The last frames of a traceback, and what was raised."""
    parts = re.split(r'^(?=  File ")', trace, flags=re.MULTILINE)
    return "".join(parts[1:][-frames:])


def _text(frames: list[tuple[str, int, str]]) -> str:
    own = [place for place, (file, _, _) in enumerate(frames) if not is_between(file)]
    # Of what calls rltool nothing is wanted either: the environment begins behind the last frame of ours.
    last = max((place for place, (file, _, _) in enumerate(frames) if is_between(file)), default=-1)
    inner = [place for place in own if place > last]
    kept = frames[inner[0] :] if inner else frames
    return "".join(traceback.format_list([traceback.FrameSummary(file, line, name) for file, line, name in kept]))

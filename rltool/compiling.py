"""torch.compile where it pays, eager everywhere else."""

from __future__ import annotations

import logging
import os
import shutil
import sysconfig
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Generic, Literal, ParamSpec, TypeVar

import torch

# Gradient steps from which compilation (10-15 s cold, 3-5 s from its cache) is paid back by a faster update.
WORTHWHILE_UPDATES = 10_000

Args = ParamSpec("Args")
Result = TypeVar("Result")


class Compiler:
    """Decides once whether a run compiles, and falls back to eager with one line if compilation fails.

    Args:
        mode: ``true``, ``false`` or ``auto``.
        updates: gradient steps planned for the whole run; negative for no end.
        note: where the one line goes.

    Attributes:
        enabled: whether functions are compiled; stored in checkpoints, since compiled and eager differ in the last digits.
        reason: why, in words.
    """

    def __init__(self, mode: Literal["auto"] | bool, updates: int, note: Callable[[str], None]) -> None:
        self._note = note
        missing = _missing_tools()
        if mode == "auto":
            self.enabled = missing is None and (updates < 0 or updates >= WORTHWHILE_UPDATES)
            planned = "open end" if updates < 0 else f"{updates:,} gradient steps planned"
            self.reason = f"auto: {missing or planned}"
        else:
            self.enabled = mode and missing is None
            self.reason = "as configured"
            if mode and missing is not None:
                note(f"compile=true, but {missing}. Training goes on without compilation")
        if self.enabled:
            os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_directory()))
            # Says "No CUDA runtime is found" on every machine without a GPU.
            logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)

    def __call__(self, function: Callable[Args, Result]) -> Callable[Args, Result]:
        """The function, compiled as one graph where this run compiles. It must be pure but for its result."""
        return _Compiled(function, self._note) if self.enabled else function


class _Compiled(Generic[Args, Result]):
    """Compiles on the first call; a failure there means eager from then on, since nothing has changed yet."""

    def __init__(self, function: Callable[Args, Result], note: Callable[[str], None]) -> None:
        self._eager, self._note = function, note
        self._name = {"gradient": "the update", "_act": "the policy"}.get(function.__name__, function.__name__)
        self._call: Callable[Args, Result] | None = None

    def __call__(self, *args: Args.args, **kwargs: Args.kwargs) -> Result:
        if self._call is None:
            return self._first(*args, **kwargs)
        try:
            return self._call(*args, **kwargs)
        except torch._dynamo.exc.Unsupported:
            # A guard failed (another batch shape): the graph is traced once more, as the first time.
            return self._first(*args, **kwargs)

    def _first(self, *args: Args.args, **kwargs: Args.kwargs) -> Result:
        if self._call is None:
            self._note(f"compiling {self._name} (seconds where it is cached, up to a minute the first time)")
            self._call = torch.compile(self._eager, fullgraph=True, dynamic=False)
        try:
            # A private, process-wide flag: on only while our own graph is traced, so that the graph holds its gradient.
            with torch._dynamo.config.patch(trace_autograd_ops=True), warnings.catch_warnings():
                # About TensorDict's own bookkeeping, which our graphs do not need.
                warnings.filterwarnings("ignore", message=".*inside a compiled graph")
                return self._call(*args, **kwargs)
        except Exception as error:  # whatever a compiler raises, training can go on without it
            first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            self._note(f"compilation failed ({first}). Training goes on without it; compile=false skips the attempt")
            self._call = self._eager
            return self._eager(*args, **kwargs)


def cache_directory() -> Path:
    """Where compiled code is kept between runs: under the user's cache directory."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "rltool" / "inductor"


def _missing_tools() -> str | None:
    """What torch.compile needs on a CPU and this machine lacks, in words with the remedy."""
    if not any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "g++", "clang++")):
        return "no C++ compiler was found (on Debian or Ubuntu: apt install g++)"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file():
        return "Python.h was not found (on Debian or Ubuntu: apt install python3-dev)"
    return None

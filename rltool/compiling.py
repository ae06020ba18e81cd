"""torch.compile where it pays, eager everywhere else."""

from __future__ import annotations

import logging
import os
import shutil
import sysconfig
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Generic, Literal, ParamSpec, TypeVar, cast

import torch
from torch import Tensor
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

# Gradient steps from which compilation (10 to 20 s on two old cores, half of that from its cache) is paid back: it saves
# about 2 ms a step there.
WORTHWHILE_UPDATES = 5_000

_CACHE = "TORCHINDUCTOR_CACHE_DIR"

Args = ParamSpec("Args")
Result = TypeVar("Result")
Signature = tuple[tuple[torch.Size, tuple[int, ...], torch.dtype], ...]


class Compiler:
    """Decides once whether a run compiles, and falls back to eager with one line if compilation fails.

    Args:
        mode: ``true``, ``false`` or ``auto``.
        updates: gradient steps planned for the whole run; negative for no end.
        note: where the one line goes.
        spent: told the seconds that each compilation took.

    Attributes:
        enabled: whether functions are compiled; stored in checkpoints, since compiled and eager differ in the last digits.
        reason: why, in words.
    """

    def __init__(
        self,
        mode: Literal["auto"] | bool,
        updates: int,
        note: Callable[[str], object],
        spent: Callable[[float], object] = float,
    ) -> None:
        self._note, self._spent = note, spent
        missing = _missing_tools()
        if mode == "auto":
            self.enabled = missing is None and (updates < 0 or updates >= WORTHWHILE_UPDATES)
            planned = "open end" if updates < 0 else f"{updates:,} gradient steps planned"
            self.reason = f"auto: {missing or planned}"
        else:
            self.enabled = mode and missing is None
            self.reason = missing if mode and missing is not None else "as configured"
            if mode and missing is not None:
                note(f"compile=true, but {missing}. Training goes on without compilation")
        if self.enabled:
            _keep_compiled_code(note)
            # Says "No CUDA runtime is found" on every machine without a GPU.
            logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)

    def __call__(self, function: Callable[Args, Result]) -> Callable[Args, Result]:
        """The function, compiled as one graph where this run compiles.

        Its arguments are tensors and mappings of tensors, its result a tensor or a tuple of them. It must be pure but
        for that result. Other tensors that it reads may change in place, but not be exchanged for others; whatever else
        it reads must stay as it is.
        """
        return _Compiled(function, self._note, self._spent) if self.enabled else function


class _Compiled(Generic[Args, Result]):
    """A function as one graph for each signature of its arguments, called without Dynamo once it has been traced.

    Dynamo's own call takes longer than a small network: it asks whether anything that the function reads has changed, and
    gathers the parameters. Here nothing changes but the arguments and what the parameters hold, so the graph is called
    itself, with the arguments put where the first call had them.

    A failure while tracing means eager from then on, since nothing has changed yet.
    """

    def __init__(
        self, function: Callable[Args, Result], note: Callable[[str], object], spent: Callable[[float], object]
    ) -> None:
        self._eager, self._note, self._spent = function, note, spent
        self._name = {"gradient": "the update", "_act": "the policy"}.get(function.__name__, function.__name__)
        self._traced: Callable[Args, Result] | None = None
        self._last: tuple[Callable[..., Sequence[Any]], Sequence[Any], Sequence[Any]] | None = None
        self.graphs: dict[Signature, _Graph | None] = {}
        self.failed = False

    def __call__(self, *args: Args.args, **kwargs: Args.kwargs) -> Result:
        if self.failed:
            return self._eager(*args, **kwargs)
        tensors = flat(args)
        signature = tuple((tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors)
        graph = self.graphs.get(signature)
        if graph is not None:
            return cast("Result", graph(tensors))
        return self._trace(signature, tensors, *args, **kwargs)

    def _trace(self, signature: Signature, tensors: list[Tensor], *args: Args.args, **kwargs: Args.kwargs) -> Result:
        """The result by way of Dynamo, which traces and compiles what it has not yet."""
        if self._traced is None:
            self._note(f"compiling {self._name} (seconds where it is cached, up to a minute the first time)")
        begin = time.perf_counter()
        try:
            if self._traced is None:
                self._traced = torch.compile(  # type: ignore[call-overload]  # torch's overloads lack isolate_recompiles
                    self._eager, fullgraph=True, dynamic=False, isolate_recompiles=True, backend=self._compile
                )
            # A private, process-wide flag: on only while our own graph is traced, so that the graph holds its gradient.
            with torch._dynamo.config.patch(trace_autograd_ops=True), warnings.catch_warnings():
                # About TensorDict's own bookkeeping, which our graphs do not need.
                warnings.filterwarnings("ignore", message=".*inside a compiled graph")
                result = cast("Callable[Args, Result]", self._traced)(*args, **kwargs)
        except Exception as error:  # whatever a compiler raises, training can go on without it
            first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            self._note(
                f"compilation failed ({first}). Training goes on without it; compile=false skips the attempt{_throw_away()}"
            )
            self.failed = True
            return self._eager(*args, **kwargs)
        finally:
            self._spent(time.perf_counter() - begin)
        assert self._last is not None
        self.graphs[signature] = _Graph.of(*self._last, tensors, result)
        self._last = None
        return result

    def _compile(self, graph: torch.fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Sequence[Any]]:
        """Inductor, as Dynamo calls it; what it makes remembers how it was last called."""
        from torch._inductor.compile_fx import compile_fx  # takes a second, and runs that do not compile do without

        # Calling the kernels from C++ saves a sixth of a small network's step on a CPU.
        on_host = not any(isinstance(value, Tensor) and value.is_cuda for value in examples)
        compiled = cast(
            "Callable[..., Sequence[Any]]", compile_fx(graph, examples, config_patches={"cpp_wrapper": on_host})
        )
        # It comes wrapped, so that Dynamo would not trace it: nothing of ours does.
        inner: Callable[..., Sequence[Any]] = getattr(compiled, "_torchdynamo_orig_callable", compiled)

        def call(*inputs: Any) -> Sequence[Any]:
            outputs = inner(*inputs)
            self._last = (inner, inputs, outputs)
            return outputs

        return call


class _Graph:
    """A compiled graph, its inputs filled in but for those that are arguments.

    Args:
        call: the graph.
        inputs: all that it takes.
        places: (place among the inputs, which of the arguments) of each input that is one.
        outputs: which of the graph's outputs is each part of the result.
        single: whether the result is one tensor and no tuple.
    """

    def __init__(
        self,
        call: Callable[..., Sequence[Any]],
        inputs: Sequence[Any],
        places: Sequence[tuple[int, int]],
        outputs: Sequence[int],
        single: bool,
    ) -> None:
        arguments = {place for place, _ in places}
        # None where an argument goes, so that no minibatch is kept alive.
        self._inputs = [None if place in arguments else value for place, value in enumerate(inputs)]
        self._call, self._places = call, places
        self._outputs, self._single = outputs, single

    @classmethod
    def of(
        cls,
        call: Callable[..., Sequence[Any]],
        inputs: Sequence[Any],
        outputs: Sequence[Any],
        tensors: Sequence[Tensor],
        result: object,
    ) -> _Graph | None:
        """The graph behind a call that Dynamo has made; None where its result is not simply what the graph gave."""
        argument = {id(tensor): index for index, tensor in enumerate(tensors)}
        places = [(place, argument[id(value)]) for place, value in enumerate(inputs) if id(value) in argument]
        given = {id(value): index for index, value in enumerate(outputs)}
        parts = result if isinstance(result, tuple) else (result,)
        if not all(id(part) in given for part in parts):
            return None
        return cls(call, inputs, places, [given[id(part)] for part in parts], not isinstance(result, tuple))

    def __call__(self, tensors: Sequence[Tensor]) -> object:
        inputs = self._inputs.copy()
        for place, index in self._places:
            inputs[place] = tensors[index]
        outputs = self._call(*inputs)
        return outputs[self._outputs[0]] if self._single else tuple([outputs[index] for index in self._outputs])


def flat(args: Sequence[object]) -> list[Tensor]:
    """The tensors of arguments, each a tensor or a mapping of tensors (always with the same keys in the same order)."""
    tensors: list[Tensor] = []
    for arg in args:
        if isinstance(arg, Tensor):
            tensors.append(arg)
        else:
            tensors.extend(cast("Mapping[Any, Tensor]", arg).values())
    return tensors


def cache_directory() -> Path:
    """Where compiled code is kept between runs: under the user's cache directory."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "rltool" / "inductor"


def _keep_compiled_code(note: Callable[[str], object]) -> None:
    """Has inductor keep what it compiles in :func:`cache_directory`, unless the user names another place."""
    # Importing inductor sets this to a place under /tmp, which the next start of the machine empties.
    named = os.environ.get(_CACHE, default_cache_dir())
    directory = cache_directory() if named == default_cache_dir() else Path(named)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=directory):
            pass
    except OSError as error:
        note(
            f"compiled code cannot be kept in {directory} ({error.strerror}): it goes to {default_cache_dir()}. "
            f"{_CACHE} names another place"
        )
        directory = Path(default_cache_dir())
    os.environ[_CACHE] = str(directory)


def _throw_away() -> str:
    """Removes what rltool keeps of compiled code, which may be damaged (a disk that was full, a crash): every run would fail
    by it. Returns what is to be said of that."""
    directory = cache_directory()
    if os.environ.get(_CACHE) != str(directory) or not directory.is_dir():
        return ""
    shutil.rmtree(directory, ignore_errors=True)
    return f". Compiled code kept in {directory} was removed in case it is damaged: the next run compiles anew"


def _missing_tools() -> str | None:
    """What torch.compile needs on a CPU and this machine lacks, in words with the remedy."""
    if not any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "g++", "clang++")):
        return "no C++ compiler was found (on Debian or Ubuntu: apt install g++)"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file():
        return "Python.h was not found (on Debian or Ubuntu: apt install python3-dev)"
    return None

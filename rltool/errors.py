"""The errors rltool raises on purpose: each names a key or a file, what was expected, what was found and what to do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

from rltool.tracebacks import trace_of


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a configuration.

    Attributes:
        path: dotted path of the key, e.g. ``algo.gamma``; empty where the problem belongs to no single key.
        text: what was expected and what was found.
        hint: what to do about it; empty where ``text`` already says so.
    """

    path: str
    text: str
    hint: str = ""

    def __str__(self) -> str:
        head = f"{self.path}: {self.text}" if self.path else self.text
        return f"{head}. {self.hint}" if self.hint else head


class RltoolError(Exception):
    """A fault that rltool can explain; shown as plain lines without a traceback.

    ``exit_code`` is 1: something went wrong that is no mistake of the user's.
    """

    exit_code = 1


class ConfigError(RltoolError):
    """The user's input cannot be used; carries every problem that was found, not just the first.

    Args:
        problems: what is wrong; a plain string stands for one problem without a key.
    """

    exit_code = 2

    def __init__(self, problems: Problem | str | Iterable[Problem]) -> None:
        if isinstance(problems, str):
            problems = Problem("", problems)
        if isinstance(problems, Problem):
            problems = (problems,)
        self.problems: tuple[Problem, ...] = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


class EnvironmentFault(RltoolError):
    """An environment broke its contract, raised or gave no answer: names the environment, the index and the step.

    Args:
        text: what happened.
        trace: see below; by default that of the exception that this one was raised from.

    Attributes:
        frame: the frame of the run at which it happened; None outside of a run.
    """

    def __init__(self, text: str, trace: str = "") -> None:
        super().__init__(text)
        self.text, self._trace = text, trace
        self.frame: int | None = None

    @property
    def trace(self) -> str:
        """The traceback of the environment's own code as text; empty where none of it raised."""
        return self._trace or ("" if self.__cause__ is None else trace_of(self.__cause__))

    def __str__(self) -> str:
        return self.text if self.frame is None else f"{self.text}. At frame {self.frame:,} of the run"

    def __reduce__(self) -> tuple[type[EnvironmentFault], tuple[str, str], dict[str, object]]:
        # A traceback does not leave its process; its text does.
        return type(self), (self.text, self.trace), {"frame": self.frame}


class Overtime(BaseException):
    """An environment takes longer than env.timeout: raised in the middle of its code.

    No ``Exception``, so that such code does not take it for one of its own.
    """


class WriteError(RltoolError):
    """A file could not be written (disk full, no permission); what was there before is untouched."""


class NonFiniteError(RltoolError):
    """A NaN or an infinity where training needs a finite number: names the value, where and when.

    Args:
        message: the first of them.
        batch: the tensors that it was found in, by name, to be kept for inspection.
        learned: whether anything was learned from them; if not, what was learned before is sound.
    """

    def __init__(self, message: str, batch: Mapping[str, Tensor] | None = None, *, learned: bool = True) -> None:
        super().__init__(message)
        self.batch, self.learned = dict(batch or {}), learned


class CheckpointError(RltoolError):
    """A file that is not a whole checkpoint of rltool's."""

    exit_code = 2

"""The errors rltool raises on purpose: each names a key or a file, what was expected, what was found and what to do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


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
    """An environment broke its contract or raised: names the environment, the index and the step."""


class WriteError(RltoolError):
    """A file could not be written (disk full, no permission); what was there before is untouched."""


class NonFiniteError(RltoolError):
    """A NaN or an infinity where training needs a finite number: names the value, where and when.

    Args:
        message: the first of them.
        batch: the tensors that it was found in, by name, to be kept for inspection.
    """

    def __init__(self, message: str, batch: Mapping[str, Tensor] | None = None) -> None:
        super().__init__(message)
        self.batch = dict(batch or {})


class CheckpointError(RltoolError):
    """A file that is not a whole checkpoint of rltool's."""

    exit_code = 2

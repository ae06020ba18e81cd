"""The values that a search may try: from the words of Hydra's grammar to Optuna's distributions, and back to words."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import cast

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep, Override, RangeSweep, Sweep
from pydantic import JsonValue

from rltool.composition import Line, Typed, quoted, read_overrides
from rltool.configfiles import ConfigFiles
from rltool.errors import ConfigError, Problem
from rltool.importing import missing_package

try:
    from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
except ImportError as error:
    raise missing_package("hydra/sweeper", "tune (Optuna)", error) from error

_TYPED_SPACE = "tune.space."
_LOG = "log"
# Text that needs no quotes, unless it reads as a number or null.
_PLAIN = re.compile(r"[\w./-]+", re.ASCII)
# More combinations than anybody tries one by one; Optuna makes a list of them.
_MOST_COMBINATIONS = 100_000
_SAME_FOR_ALL = "is the same for all trials: with other values their results could not be compared"
# Keys, with all below them, that are nothing to search.
_NOT_SEARCHED = {
    "seed": ("each trial runs with the same seeds", "tune.seeds=3 gives it three"),
    "resume": ("a search begins new runs", "init=… starts them from weights"),
    "hydra": ("is Hydra's, not the runs'", "Give one value"),
    "sweep": ("is the sweep's, not the runs'", "Give one value"),
    "tune": ("is the search's, not the runs'", "Give one value"),
    "tuned": (_SAME_FOR_ALL, "Give one value"),
    "total_frames": (_SAME_FOR_ALL, "Give one value"),
    "eval": (_SAME_FOR_ALL, "Give one value"),
    "stop": (_SAME_FOR_ALL, "Give one value"),
    "env.id": (_SAME_FOR_ALL, "Search one environment at a time"),
}
_NO_OPTION_SEARCHED = {"env": (_SAME_FOR_ALL, "Search one environment at a time")}

# How far from the lower end of an interval a value lies that is no round one.
_INNER = (3 - 5**0.5) / 2


@dataclass(frozen=True)
class Parameter:
    """The values that one key may have.

    Attributes:
        key: a dotted key, or a group.
        prefix: what stands before the ``=`` for Hydra: ``++optim.lr``, ``optim``.
        distribution: Optuna's; of choices it holds their words, so that lists and mappings can be chosen, too.
        choices: the value of each word; empty for numbers.
    """

    key: str
    prefix: str
    distribution: BaseDistribution
    choices: Mapping[str, JsonValue]

    def value(self, drawn: object) -> JsonValue:
        """What Optuna drew, as the configuration will have it."""
        if isinstance(self.distribution, CategoricalDistribution):
            return self.choices[str(drawn)]
        if isinstance(self.distribution, FloatDistribution) and self.distribution.step is not None:
            return _tidy(float(cast("float", drawn)))
        return cast("JsonValue", drawn)

    def word(self, value: JsonValue) -> str:
        """The override that gives the key a value."""
        return f"{self.prefix}={word_of(value)}"

    @property
    def extremes(self) -> list[JsonValue]:
        """The lowest and the highest number, and one between them where all are allowed (a key may want whole ones); or every
        choice."""
        kind = self.distribution
        if isinstance(kind, FloatDistribution) and kind.step is None and not kind.single():
            return [kind.low, kind.low + (kind.high - kind.low) * _INNER, kind.high]
        if isinstance(kind, IntDistribution | FloatDistribution):
            return [kind.low] if kind.single() else [kind.low, kind.high]
        return list(self.choices.values())

    @property
    def grid(self) -> list[int | float | str] | None:
        """Every value as Optuna holds it; None where there is no end of them."""
        kind = self.distribution
        if isinstance(kind, IntDistribution):
            return list(range(kind.low, kind.high + 1, kind.step))
        if isinstance(kind, FloatDistribution):
            return None if kind.step is None else _stepped(kind.low, kind.high, kind.step)
        return list(self.choices)

    @property
    def count(self) -> float:
        """How many values there are."""
        kind = self.distribution
        if isinstance(kind, IntDistribution | FloatDistribution):
            return math.inf if kind.step is None else round((kind.high - kind.low) / kind.step) + 1
        return len(self.choices)

    def __str__(self) -> str:
        """The values as they could be typed, always in the same words."""
        kind = self.distribution
        if isinstance(kind, CategoricalDistribution):
            return ",".join(self.choices)
        assert isinstance(kind, IntDistribution | FloatDistribution)
        if isinstance(kind, IntDistribution) and kind.step == 1:
            text = f"int(interval({kind.low},{kind.high}))"
        elif kind.step is None:
            text = f"interval({kind.low!r},{kind.high!r})"
        else:
            text = f"range({kind.low!r},{_tidy(kind.high + kind.step)!r},{kind.step!r})"
        return f"tag({_LOG},{text})" if kind.log else text


@dataclass(frozen=True)
class Space:
    """All parameters of a search, in the order in which they were typed; those of ``tune.space`` follow."""

    parameters: tuple[Parameter, ...]

    @classmethod
    def read(cls, line: Line, more: Mapping[str, str | list[JsonValue]], files: ConfigFiles) -> Space:
        """As :meth:`attempt`.

        Raises:
            ConfigError: all problems: values that cannot be searched, keys that are nothing to search, nothing to search.
        """
        space, problems = cls.attempt(line, more, files)
        if problems:
            raise ConfigError(problems)
        return space

    @classmethod
    def attempt(
        cls, line: Line, more: Mapping[str, str | list[JsonValue]], files: ConfigFiles
    ) -> tuple[Space, list[Problem]]:
        """The values that were typed, and those of ``tune.space`` for keys that were not: those that can be read, and what is
        wrong with the others.

        A key that was typed with one value is not searched, whatever ``tune.space`` says of it.

        Args:
            line: what was typed with -m.
            more: ``tune.space``: by key, words of Hydra's grammar or a list of values.
            files: where the options of groups lie.
        """
        problems: list[Problem] = []
        typed = [_plain(one) for one in line.typed]
        keys = {_key(word) for word in typed}
        words = [
            word
            for key, values in more.items()
            if key not in keys and (word := _worded(key, values, problems)) is not None
        ]
        told = read_overrides([*typed, *words], files, multirun=True)
        problems += (*line.problems, *told.problems)
        searched = {_key(one.word): one for one in told.typed}
        parameters = []
        for key, one in searched.items():
            if not one.override.is_sweep_override():
                if one.word in words:
                    text = f"expected several values, found {one.word.partition('=')[2]}"
                    problems.append(Problem(f"tune.space.{key}", text, _HOW))
                continue
            parameter = _parameter(key, one, problems)
            if parameter is not None:
                parameters.append(parameter)
        if not parameters and not problems:
            problems.append(
                Problem(
                    "tune.space", "expected values to search, found none", f"{_HOW}; or tune=ppo, tune=dqn, tune=sac"
                )
            )
        return cls(tuple(parameters)), list(dict.fromkeys(problems))

    def problems(self, sampler: str) -> Iterator[Problem]:
        """What a sampler (``tune.sampler``) cannot draw from."""
        if sampler != "grid":
            return
        endless = [parameter for parameter in self.parameters if parameter.grid is None]
        for parameter in endless:
            yield Problem(
                parameter.key,
                f"tune.sampler=grid tries each combination once, found values without end: {parameter}",
                "Give choice(…) or range(…), or take another tune.sampler",
            )
        if not endless and self.combinations > _MOST_COMBINATIONS:
            yield Problem(
                "tune.sampler",
                f"expected at most {_MOST_COMBINATIONS:,} combinations for grid, found {self.combinations:,.0f}",
                "Take another tune.sampler, or fewer values",
            )

    @property
    def combinations(self) -> float:
        """How many there are of all values; infinite with an interval of numbers."""
        return math.prod(parameter.count for parameter in self.parameters)

    @property
    def distributions(self) -> dict[str, BaseDistribution]:
        """Optuna's, by key."""
        return {parameter.key: parameter.distribution for parameter in self.parameters}

    def values(self, drawn: Mapping[str, object]) -> dict[str, JsonValue]:
        """What Optuna drew, as the configuration will have it, in the order of the parameters."""
        return {parameter.key: parameter.value(drawn[parameter.key]) for parameter in self.parameters}

    def words(self, values: Mapping[str, JsonValue]) -> list[str]:
        """The overrides that give the keys these values, for Hydra."""
        return [parameter.word(values[parameter.key]) for parameter in self.parameters]

    def corners(self) -> list[dict[str, JsonValue]]:
        """A few points among which each parameter has its lowest, its highest and every chosen value; the others have their
        first one then."""
        first = {parameter.key: parameter.extremes[0] for parameter in self.parameters}
        return [first, *({**first, one.key: value} for one in self.parameters for value in one.extremes[1:])]

    def to_json(self) -> dict[str, str]:
        """By key, the values as they could be typed."""
        return {parameter.key: str(parameter) for parameter in self.parameters}


_HOW = "Write KEY=tag(log,interval(1e-5,1e-2)), KEY=int(interval(1,8)), KEY=range(1,9,2) or KEY=a,b"


def word_of(value: JsonValue) -> str:
    """A value in Hydra's grammar, so that exactly it is read back."""
    if isinstance(value, list):
        return f"[{','.join(map(word_of, value))}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{word_of(item)}" for key, item in value.items()) + "}"
    if isinstance(value, str):
        return value if _PLAIN.fullmatch(value) and _read_back(value) == value else quoted(value)
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return repr(value)


def _read_back(word: str) -> object:
    return OverridesParser.create().parse_override(f"key={word}").value()


def _plain(typed: Typed) -> str:
    """An override as it was typed; tune.space.KEY=VALUES says the same as KEY=VALUES."""
    return typed.word.lstrip("+").removeprefix(_TYPED_SPACE) if typed.override.is_sweep_override() else typed.word


def _key(word: str) -> str:
    return word.partition("=")[0].lstrip("+~")


def _worded(key: str, values: object, problems: list[Problem]) -> str | None:
    """An entry of ``tune.space`` as it would be typed."""
    if not isinstance(values, list):
        return f"{key}={values}"
    words = [word_of(value) for value in values]
    if not words:
        problems.append(Problem(f"tune.space.{key}", "expected values, found an empty list", _HOW))
        return None
    return f"{key}={words[0] if len(words) > 1 else f'choice({words[0]})'}{''.join(f',{word}' for word in words[1:])}"


def _parameter(key: str, typed: Typed, problems: list[Problem]) -> Parameter | None:
    refusal = _refusal(key, typed)
    if refusal is not None:
        problems.append(Problem(key, f"{refusal[0]}, found {typed.word.partition('=')[2]}", refusal[1]))
        return None
    override = typed.override
    sweep, prefix = override.value(), override.get_key_element()
    if not isinstance(sweep, Sweep):
        problems.append(Problem(key, "glob(…) cannot be searched", "Name the values: KEY=a,b"))
        return None
    try:
        if isinstance(sweep, ChoiceSweep):
            choices = _choices(override, sweep)
            return Parameter(key, prefix, CategoricalDistribution(list(choices)), choices)
        numbers = Parameter(key, prefix, _numbers(sweep), {})
        if numbers.count == 1:
            raise _Refused(f"expected several values, found one alone in {typed.word.partition('=')[2]}", _HOW)
        return numbers
    except _Refused as refused:
        problems.append(Problem(key, *refused.args))
        return None


class _Refused(Exception):
    """Values that cannot be searched: the text of the problem, and the hint."""


def _refusal(key: str, typed: Typed) -> tuple[str, str] | None:
    if key in _NO_OPTION_SEARCHED and typed.is_choice:
        return _NO_OPTION_SEARCHED[key]
    for name, refusal in _NOT_SEARCHED.items():
        if key == name or key.startswith((f"{name}.", f"{name}/")):
            return refusal
    return None


def _choices(override: Override, sweep: ChoiceSweep) -> dict[str, JsonValue]:
    _is_log(sweep, numbers=False)
    values = (cast("JsonValue", _read_back(word)) for word in override.sweep_string_iterator())
    return {word_of(value): value for value in values}


def _numbers(sweep: Sweep) -> FloatDistribution | IntDistribution:
    log = _is_log(sweep, numbers=True)
    if isinstance(sweep, IntervalSweep):
        low, high, step = sweep.start, sweep.end, None
        assert low is not None
        assert high is not None
        if not (math.isfinite(low) and math.isfinite(high) and low < high):
            raise _Refused(f"expected a lower end below the upper one, both finite, found interval({low},{high})", "")
    else:
        assert isinstance(sweep, RangeSweep)
        low, high, step = _ends(sweep)
    if log and low <= 0:
        raise _Refused(
            f"expected a lower end above 0 with tag({_LOG},…), found {low}", "Raise it, or leave the tag out"
        )
    if isinstance(low, int) and isinstance(high, int) and (step is None or isinstance(step, int)):
        if log and step not in (None, 1):
            raise _Refused(f"expected a step of 1 with tag({_LOG},…), found {step}", "Name the values: KEY=16,32,64")
        return IntDistribution(low, high, log=log, step=step or 1)
    if log and step is not None:
        raise _Refused(
            f"expected whole numbers for a range with tag({_LOG},…), found a step of {step}", "Use interval(…)"
        )
    return FloatDistribution(low, high, log=log, step=step)


def _is_log(sweep: Sweep, *, numbers: bool) -> bool:
    others = sorted(sweep.tags - {_LOG})
    if others:
        raise _Refused(
            f"expected no tag but {_LOG}, found {', '.join(others)}", f"tag({_LOG},…) draws on a logarithmic scale"
        )
    if sweep.tags and not numbers:
        raise _Refused(
            f"tag({_LOG},…) is for numbers between two ends, found choices", "Leave the tag out, or use interval(…)"
        )
    return bool(sweep.tags)


def _ends(sweep: RangeSweep) -> tuple[int | float, int | float, int | float]:
    """The lowest and the highest value of a range, which does not hold its end, and the step between them, above 0."""
    assert sweep.start is not None
    assert sweep.stop is not None
    parts = (sweep.start, sweep.stop, sweep.step)
    told = f"range({','.join(map(repr, parts))})"
    if not all(map(math.isfinite, parts)) or sweep.step == 0:
        raise _Refused(f"expected finite ends and a step that is not 0, found {told}", "")
    start, stop, step = (Decimal(repr(part)) for part in parts)
    count = math.ceil((stop - start) / step)
    if count < 1:
        raise _Refused(f"expected at least one value, found none in {told}", "range(a,b) ends before b")
    low, high = sorted((start, start + (count - 1) * step))
    number = int if all(isinstance(part, int) for part in parts) else float
    return number(low), number(high), number(abs(step))


def _stepped(low: float, high: float, step: float) -> list[int | float | str]:
    return [_tidy(low + number * step) for number in range(round((high - low) / step) + 1)]


def _tidy(value: float) -> float:
    """Without the last digits, which are errors of adding up: 0.30000000000000004 is 0.3."""
    return float(f"{value:.12g}") if isinstance(value, float) else value

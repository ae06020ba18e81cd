"""Runs chosen and sorted by what was typed: ``algo=ppo best=475.. optim.lr!=1e-3``. No torch."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase

from rltool.errors import ConfigError, Problem
from rltool.records import STATUSES, Record
from rltool.wording import did_you_mean, nearest

_WORD = re.compile(r"([^=!<>]+)(!=|<=|>=|=|<|>)(.*)", re.DOTALL)
_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
_SECONDS = re.compile(r"(.+?)([smhd]?)")
_NULLS = ("null", "None")
_VERSION = re.compile(r"-v\d+$")

COLUMNS: Mapping[str, Callable[[Record], object]] = {
    "run": lambda record: str(record.path),
    "status": lambda record: record.status,
    "algo": lambda record: _known(record.algo),
    "env": lambda record: _known(record.env),
    "seed": lambda record: record.seed,
    "frames": lambda record: record.frames,
    "best": lambda record: None if record.best is None else record.best[1],
    "last": lambda record: None if record.last is None else record.last[1],
    "fresh": lambda record: record.fresh,
    "time": lambda record: record.seconds,
    "started": lambda record: None if record.started is None else record.started.isoformat(sep=" ", timespec="seconds"),
}
"""What every run has, by the name of its column; any dotted key of the configuration can stand beside them."""


@dataclass(frozen=True)
class Condition:
    """A word such as ``best>=475``.

    Attributes:
        key: a column or a dotted key of the configuration.
        sign: ``=``, ``!=``, ``<``, ``<=``, ``>`` or ``>=``.
        text: what it is compared with. After ``=`` and ``!=``: one value or several with commas between, each a number, a
            range ``1..5`` (either end may be left out), or text with ``*`` and ``?``, upper and lower case alike.
    """

    key: str
    sign: str
    text: str

    @classmethod
    def read(cls, word: str) -> Condition:
        """The condition that was typed.

        Raises:
            ConfigError: it is none, or what stands behind ``<`` or ``>`` cannot be compared.
        """
        match = _WORD.fullmatch(word)
        if match is None:
            raise ConfigError(Problem("", f"expected KEY=VALUE, found {word!r}"))
        condition = cls(*match.groups())
        if condition.key == "status":
            _check_statuses(condition.text)
        if (
            condition.sign in ("<", "<=", ">", ">=")
            and condition.key != "started"
            and condition._number(match[3]) is None
        ):
            raise ConfigError(Problem(condition.key, f"expected a number behind {match[2]}, found {match[3]!r}"))
        return condition

    def holds(self, record: Record) -> bool:
        """Whether it is true of a run; of a run without such a value only ``!=`` is, and ``=null``."""
        value = value_of(record, self.key)
        if self.sign in ("=", "!="):
            found = any(self._equals(value, text, record) for text in _alternatives(self.text))
            return found == (self.sign == "=")
        wanted: object = self._number(self.text)
        if isinstance(value, str):
            wanted = self.text
        elif not _is_number(value):
            return False
        return _compared(value, self.sign, wanted)

    def _equals(self, value: object, text: str, record: Record) -> bool:
        if value is None:
            return text in _NULLS
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            return json.dumps(value, default=str).replace(" ", "").lower() == text.replace(" ", "").lower()
        if isinstance(value, str):
            return any(fnmatchcase(form.lower(), text.lower()) for form in _forms(value, self.key, record))
        low, dots, high = text.partition("..")
        if dots and (low or high):
            ends = [self._number(end) for end in (low, high)]
            return (not low or (ends[0] is not None and value >= ends[0])) and (
                not high or (ends[1] is not None and value <= ends[1])
            )
        wanted = self._number(text)
        return wanted is not None and math.isclose(value, wanted, rel_tol=1e-9)

    def _number(self, text: str) -> float | None:
        """The number in a text, with a unit behind a time (``10m``)."""
        unit = 1
        if self.key == "time" and (match := _SECONDS.fullmatch(text)) is not None:
            text, unit = match[1], _UNITS[match[2]]
        with suppress(ValueError):
            return float(text) * unit
        return None


def _check_statuses(text: str) -> None:
    for word in _alternatives(text):
        if not any(fnmatchcase(status, word.lower()) for status in STATUSES):
            hint = did_you_mean(nearest(word, STATUSES)) or f"One of {', '.join(STATUSES)}"
            raise ConfigError(Problem("status", f"expected a status, found {word!r}", hint))


def value_of(record: Record, key: str) -> object:
    """A run's value of a column or of a dotted key of its configuration; of a group its kind; None where it has none."""
    if key in COLUMNS:
        return COLUMNS[key](record)
    node: object = record.config
    for part in key.split("."):
        node = node.get(part) if isinstance(node, Mapping) else None
    return node["kind"] if isinstance(node, Mapping) and "kind" in node else node


def selected(records: Iterable[Record], conditions: Sequence[Condition]) -> list[Record]:
    """The runs of which all conditions hold."""
    return [record for record in records if all(condition.holds(record) for condition in conditions)]


def in_order(records: Iterable[Record], key: str) -> list[Record]:
    """The runs by a column or key, from the smallest on, or with ``-`` before it from the largest; those without come last."""
    name, falling = key.removeprefix("-"), key.startswith("-")
    valued = [(value_of(record, name), record) for record in records]
    with_value = [(value, record) for value, record in valued if value is not None]
    with_value.sort(key=lambda pair: _rank(pair[0]), reverse=falling)
    return [record for _, record in with_value] + [record for value, record in valued if value is None]


def check_keys(keys: Iterable[str], records: Sequence[Record]) -> None:
    """Asks whether any run has such a value.

    Raises:
        ConfigError: none has: each key, with the nearest that there is.
    """
    wanted = [key for key in dict.fromkeys(keys) if key not in COLUMNS]
    unknown = [key for key in wanted if not any(_has(record.config, key) for record in records)]
    if not (unknown and records):
        return
    known = dict.fromkeys(COLUMNS)
    for record in records:
        known |= dict.fromkeys(_dotted(record.config))
    raise ConfigError(
        Problem(key, "no run has such a key", did_you_mean(nearest(key, known)) or f"Columns: {', '.join(COLUMNS)}")
        for key in unknown
    )


def _has(tree: object, key: str) -> bool:
    for part in key.split("."):
        if not (isinstance(tree, Mapping) and part in tree):
            return False
        tree = tree[part]
    return True


def _known(text: str) -> str | None:
    return None if text == "?" else text


def _dotted(tree: Mapping[str, object], prefix: str = "") -> Iterable[str]:
    for key, value in tree.items():
        yield f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _dotted(value, f"{prefix}{key}.")


def _alternatives(text: str) -> list[str]:
    """What stands between commas; those within brackets belong to a list."""
    return re.findall(r"(?:\[[^\]]*\]?|[^,\[])+", text) or [""]


def _forms(value: str, key: str, record: Record) -> list[str]:
    """What a text may be called: an environment also by the option that was chosen, and by its id without version."""
    if key == "run":
        return [value, value.rpartition("/")[2]]
    if key != "env":
        return [value]
    bare = _VERSION.sub("", re.split("[:/]", value)[-1])
    option = record.typed.get("env")
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", bare)
    return [value, bare, snake, *([option] if option else [])]


def _compared(value: object, sign: str, wanted: object) -> bool:
    low: bool = value < wanted  # type: ignore[operator]
    high: bool = value > wanted  # type: ignore[operator]
    return {"<": low, "<=": not high, ">": high, ">=": not low}[sign]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _rank(value: object) -> tuple[int, float, str]:
    """Numbers by size, before texts by letters."""
    if isinstance(value, int | float):
        return 0, float(value), ""
    return 1, 0.0, value if isinstance(value, str) else json.dumps(value, default=str)

"""Types, values and near misses put in words: what help pages and error lines have in common. No torch."""

from __future__ import annotations

import difflib
import json
import re
import types
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from rltool.registry import Schema

Path = tuple[str | int, ...]
# Letters that a key keeps where there is little room for it.
_LONGEST_KEY, _SHORTEST_KEY = 20, 3


class Shape:
    """The type of one key: its annotation and the bounds declared with it.

    Args:
        annotation: a type hint of a schema field, or a schema class.
        metadata: the constraints that stand beside it (``annotated_types`` objects or pydantic ``FieldInfo``).
        description: the meaning of the key, for types that only their own words describe.
    """

    def __init__(self, annotation: object, metadata: Iterable[object] = (), description: str = "") -> None:
        constraints = list(metadata)
        while get_origin(annotation) is Annotated:
            annotation, *extra = get_args(annotation)
            constraints += extra
        self.annotation = annotation
        self.description = description
        self._bounds: dict[str, Any] = {}
        for constraint in constraints:
            parts = constraint.metadata if isinstance(constraint, FieldInfo) else (constraint,)
            for part in parts:
                for name in ("gt", "ge", "lt", "le", "pattern", "min_length", "max_length"):
                    value = getattr(part, name, None)
                    # The width of a seed or a counter is nothing that is typed by accident.
                    if value is not None and not (isinstance(value, int) and value >= 2**32):
                        self._bounds[name] = value

    @classmethod
    def of(cls, field: FieldInfo) -> Shape:
        """The shape of a schema's field."""
        return cls(field.annotation, field.metadata, field.description or "")

    @property
    def options(self) -> tuple[Shape, ...]:
        """The members of a union; the shape alone where it is none."""
        if get_origin(self.annotation) in (Union, types.UnionType):
            return tuple(Shape(member, description=self.description) for member in get_args(self.annotation))
        return (self,)

    @property
    def schema(self) -> type[Schema] | None:
        """The schema class that a mapping under this key is checked by, if there is one."""
        for option in self.options:
            if isinstance(option.annotation, type) and issubclass(option.annotation, Schema):
                return option.annotation
        return None

    def child(self, part: str | int) -> Shape | None:
        """The shape of what lies under this one: a field of a schema, an item of a list; None where anything goes."""
        for option in self.options:
            if isinstance(option.annotation, type) and issubclass(option.annotation, Schema):
                field = option.annotation.model_fields.get(str(part))
                if field is not None:
                    return Shape.of(field)
            if get_origin(option.annotation) is list and isinstance(part, int):
                return Shape(get_args(option.annotation)[0])
        return None

    def at(self, path: Sequence[str | int]) -> Shape | None:
        """The shape at a path below this one; None where the path leaves what is declared."""
        shape: Shape | None = self
        for part in path:
            shape = shape.child(part) if shape is not None else None
        return shape

    def __str__(self) -> str:
        """What a value must be, e.g. ``a number above 0, or null``."""
        words = [option._words() for option in self.options]
        if len(words) > 1 and words[-1] == "null":
            return f"{' or '.join(words[:-1])}, or null"
        return " or ".join(words)

    @property
    def range(self) -> str:
        """The choices or the bounds in a few signs, for a help page: ``sync | async``, ``> 0 or null``; empty for none."""
        signs = [option._signs() for option in self.options]
        if len(signs) > 1:
            signs = [
                "true | false" if option.annotation is bool else sign
                for option, sign in zip(self.options, signs, strict=True)
            ]
        known = [sign for sign in signs if sign not in ("", "null")]
        return " or ".join([*known, "null"] if "null" in signs else known) if known else ""

    def _signs(self) -> str:
        if self.annotation is type(None):
            return "null"
        if get_origin(self.annotation) is Literal:
            return " | ".join(str(choice) for choice in get_args(self.annotation))
        if self.annotation not in (int, float):
            return ""
        signs = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}
        bounds = {name: value for name, value in self._bounds.items() if name in signs}
        if "ge" in bounds and "le" in bounds:
            return f"{bounds['ge']} … {bounds['le']}"
        return ", ".join(f"{signs[name]} {bounds[name]}" for name in ("gt", "ge", "lt", "le") if name in bounds)

    def _words(self) -> str:
        kind = self.annotation
        if kind is type(None):
            return "null"
        if kind is bool:
            return "true or false"
        if kind is int:
            return self._number("a whole number")
        if kind is float:
            return self._number("a number")
        if kind is str:
            told = ("pattern" in self._bounds or "min_length" in self._bounds) and self.description
            return f"text ({self.description})" if told else "text"
        if get_origin(kind) is Literal:
            choices = [str(choice) for choice in get_args(kind)]
            return choices[0] if len(choices) == 1 else f"one of {', '.join(choices)}"
        if get_origin(kind) is list:
            item, fewest, most = (
                Shape(get_args(kind)[0]),
                self._bounds.get("min_length"),
                self._bounds.get("max_length"),
            )
            return (
                f"a list of {fewest}, each {item}" if fewest is not None and fewest == most else f"a list [{item}, …]"
            )
        if get_origin(kind) is dict:
            return "a mapping {key: value, …}"
        if isinstance(kind, type) and issubclass(kind, Schema):
            return "a mapping {" + ", ".join(f"{name}: …" for name in kind.model_fields) + "}"
        return "a value of another type"

    def _number(self, noun: str) -> str:
        low, above = self._bounds.get("ge"), self._bounds.get("gt")
        high, below = self._bounds.get("le"), self._bounds.get("lt")
        words = noun
        if low is not None and high is not None:
            return f"{words} from {low} to {high}"
        if above is not None:
            words += f" above {above}"
        if low is not None:
            words += f", {low} or more" if below is None and high is None else f" from {low}"
        if below is not None:
            words += f" and below {below}"
        if high is not None:
            words += f", at most {high}" if above is not None else f" up to {high}"
        return words


def found(value: object) -> str:
    """A value as it would be typed; text in quotes where it could be taken for something else."""
    if isinstance(value, str):
        try:
            float(value)
        except ValueError:
            looks_plain = value not in ("", "true", "false", "null")
        else:
            looks_plain = False
        return _short(repr(value)) if looks_plain else f"the text {_short(repr(value))}"
    try:
        return _short(json.dumps(value, default=repr, ensure_ascii=False))
    except (TypeError, ValueError, RecursionError):  # keys of other types, thousands of digits, lists in lists in lists
        return f"a {type(value).__name__} that cannot be shown"


def _short(text: str) -> str:
    """At most 60 characters, all of which can be printed."""
    text = text.encode(errors="backslashreplace").decode()
    return text if len(text) <= 60 else f"{text[:57]}…"


def nearest(word: str, options: Iterable[str], *, count: int = 2) -> list[str]:
    """The options that look like a misspelt word, best first."""
    known = list(dict.fromkeys(options))
    lowered = {option.lower(): option for option in reversed(known)}
    return [lowered[match] for match in difflib.get_close_matches(word.lower(), lowered, n=count, cutoff=0.6)]


def did_you_mean(options: Sequence[str]) -> str:
    """``Did you mean a or b?``; empty for no options."""
    return f"Did you mean {' or '.join(options)}?" if options else ""


def listed(labels: Sequence[str]) -> str:
    """Labels in a row; with semicolons where there are commas in them."""
    return ("; " if any("," in label for label in labels) else ", ").join(labels)


def fitted(labels: Sequence[str], width: int) -> dict[str, str]:
    """Labels for a room, those that are too wide cut with … so that all still differ: in the names of their keys where that
    is enough, else at the end, else nearer the middle; where nothing of that tells them apart they are numbered.

    Args:
        labels: what is to be told apart; equal ones are one.
        width: of the room, in letters; 8 or more.
    """
    once = list(dict.fromkeys(labels))
    for texts in _cuts(once, width):
        if max(map(len, texts)) <= width and len(set(texts)) == len(once):
            return dict(zip(once, texts, strict=True))
    ends = {one: f"… ({number})" if len(one) > width else "" for number, one in enumerate(once, 1)}
    return {one: f"{one[: width - len(end)]}{end}" for one, end in ends.items()}


def _cuts(labels: Sequence[str], width: int) -> Iterator[list[str]]:
    """Ways to cut labels, those that leave most of them first."""
    yield list(labels)
    for letters in range(_LONGEST_KEY, _SHORTEST_KEY - 1, -1):
        yield [re.sub(rf"([^=,\s]{{{letters}}})[^=,\s]{{2,}}(?==)", r"\1…", label) for label in labels]
    for kept in (width - 1, *sorted(range(width), key=lambda head: abs(head - width // 2))):
        tail = width - 1 - kept
        yield [label if len(label) <= width else f"{label[:kept]}…{label[len(label) - tail :]}" for label in labels]


def dotted(path: Iterable[str | int]) -> str:
    """``("network", "hidden", 1)`` as ``network.hidden[1]``."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" if part != "" else ".''" for part in path)
    return "".join(parts).removeprefix(".")

"""The typed registry: (group, kind) -> schema class -> the object it builds.

A schema is a frozen pydantic model without default values (values live in conf/ only); ``kind:`` in a YAML names it.
``builder`` is written by the programmer next to the class, never read from a file, and imported on first use, so that
schemas stay free of torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import TYPE_CHECKING, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict

from rltool.errors import Problem

if TYPE_CHECKING:
    from rltool.schema import RunConfig


class Schema(BaseModel):
    """Base of every config node: strict types, no unknown keys, no change after creation."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", protected_namespaces=())

    builder: ClassVar[str] = ""

    def build(self, **runtime: object) -> object:
        """The object this node describes, made by the registered builder from runtime objects (specs, device, …)."""
        return self.target()(self, **runtime)

    def target(self) -> Callable[..., object]:
        """The builder, imported."""
        module, _, attribute = self.builds().partition(":")
        builder: Callable[..., object] = getattr(import_module(module), attribute)
        return builder

    def builds(self) -> str:
        """The builder's entry point: the registered one, unless a class chooses by its values."""
        return self.builder

    def problems(self, run: RunConfig) -> Iterator[Problem]:
        """What is wrong with this node in the company of the others (rules across fields and groups)."""
        del run
        yield from ()


SchemaType = TypeVar("SchemaType", bound=type[Schema])

_schemas: dict[str, dict[str, type[Schema]]] = {}


def register(group: str, kind: str, *, builder: str) -> Callable[[SchemaType], SchemaType]:
    """Class decorator: ``kind: <kind>`` in a YAML of ``group`` is validated by this class and built by ``builder``.

    Args:
        group: a config group (``env``, ``algo``, ``network``, ``buffer``, ``optim``, ``logging``).
        kind: the value of the node's ``kind`` key.
        builder: ``"package.module:callable"``, called as ``callable(config, **runtime)``.

    Raises:
        ValueError: another class already has this name.
    """

    def decorate(cls: SchemaType) -> SchemaType:
        known = _schemas.setdefault(group, {}).setdefault(kind, cls)
        if known is not cls and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ValueError(f"{group}/{kind} is already registered by {known.__module__}.{known.__qualname__}")
        cls.builder = builder
        _schemas[group][kind] = cls
        return cls

    return decorate


def kinds(group: str) -> dict[str, type[Schema]]:
    """The registered schema classes of a group by kind (a copy)."""
    return dict(_schemas.get(group, {}))

"""From the composed tree to the frozen :class:`RunConfig`, or to every problem at once. No torch, no Hydra.

The values come from conf/ and the command line, the rules from rltool/schema.py; this file only brings them together.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from typing import TypeVar

from pydantic import ValidationError

from rltool import registry
from rltool.errors import ConfigError, Problem
from rltool.importing import import_user_module
from rltool.registry import Schema
from rltool.schema import JobsConfig, RunConfig, TuneConfig
from rltool.wording import Path, Shape, did_you_mean, dotted, found, nearest

Tree = dict[str, object]
SchemaT = TypeVar("SchemaT", bound=Schema)
MISSING = "???"
LEVELS = 64  # how deep mappings and lists may be nested
ENTRY_POINTS = "rltool.plugins"
_SWITCHES = {True: "on", False: "off"}


def load(tree: Mapping[str, object], *, defaults: Mapping[str, object] | None = None) -> RunConfig:
    """The frozen configuration of a run.

    Modules under ``plugins`` and the entry points of installed plugins are imported first, so that what they register
    is known.

    Args:
        tree: the composed, resolved tree of plain mappings, lists and scalars; the string ``None`` means null.
        defaults: the same tree as it would be without the user's own values. With it, rules across keys are checked
            even where other keys are wrong, so that both kinds of problem show up together.

    Raises:
        ConfigError: all problems of all groups, first those of single keys, then those between keys.
    """
    tree = nulls(tree)
    problems = import_plugins(tree.get("plugins"))
    config, wrong = _checked(RunConfig, tree)
    problems += wrong.values()
    if config is None and defaults is not None:
        config, _ = _checked(RunConfig, _repaired(tree, nulls(defaults), wrong))
    if config is not None:
        # A rule that a repaired key takes part in may complain about the repair, not about the user's value.
        problems += [rule for rule in config.problems() if not any(_mentions(rule, dotted(path)) for path in wrong)]
    if problems:
        raise ConfigError(dict.fromkeys(problems))
    assert config is not None
    return config


def load_as(schema: type[SchemaT], tree: Mapping[str, object]) -> SchemaT:
    """The frozen configuration of another command, checked by its schema class.

    Args:
        schema: the class of the whole tree.
        tree: plain mappings, lists and scalars; the string ``None`` means null.

    Raises:
        ConfigError: all problems at once.
    """
    tree = nulls(tree)
    problems = import_plugins(tree.get("plugins"))
    config, wrong = _checked(schema, tree)
    problems += wrong.values()
    if problems:
        raise ConfigError(dict.fromkeys(problems))
    assert config is not None
    return config


def load_node(group: str, tree: Mapping[str, object]) -> Schema:
    """One group's node, e.g. ``env``, checked by the schema class that its ``kind`` names.

    Raises:
        ConfigError: all problems at once.
    """
    tree = nulls(tree)
    config, wrong = _group(group, tree, _Whole(RunConfig, {group: tree}))
    if config is None:
        raise ConfigError(wrong.values())
    return config


def laid_over(below: Mapping[str, object], above: Mapping[str, object]) -> Tree:
    """A tree with another one's values laid over it: mappings are merged, everything else is replaced."""
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        merged[key] = laid_over(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def is_shallow(value: object, levels: int = LEVELS) -> bool:
    """Whether mappings and lists lie in each other so few levels deep that they can be walked through."""
    if isinstance(value, Mapping):
        return levels > 0 and all(is_shallow(item, levels - 1) for item in value.values())
    return not isinstance(value, list | tuple) or (levels > 0 and all(is_shallow(item, levels - 1) for item in value))


def nulls(tree: Mapping[str, object]) -> Tree:
    """A deep copy in which the string ``None``, which Python users type for null, is null, and in which the keys ``on`` and
    ``off`` are what they look like: bare, they are true and false to YAML 1.1.

    Raises:
        ConfigError: values are nested too deeply.
    """
    deep = [key for key, value in tree.items() if not is_shallow(value)]
    if deep:
        raise ConfigError(
            Problem(dotted((str(key),)), f"expected at most {LEVELS} levels of mappings and lists") for key in deep
        )

    def walk(value: object) -> object:
        if isinstance(value, Mapping):
            return {
                _SWITCHES.get(key, key) if isinstance(key, bool) else key: walk(item) for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [walk(item) for item in value]
        return None if value == "None" else value

    return {key: walk(value) for key, value in tree.items()}


def import_plugins(names: object = None) -> list[Problem]:
    """Imports the modules of a ``plugins`` list and the entry points of installed plugins; returns what went wrong.

    A list that is no list of names is left for the schema to report.
    """
    problems = list(_entry_points())
    if isinstance(names, list):
        for index, name in enumerate(names):
            if isinstance(name, str) and name != MISSING:
                problems += _imported(f"plugins.{index}", name)
    return problems


@cache
def _entry_points() -> tuple[Problem, ...]:
    problems: list[Problem] = []
    for entry in metadata.entry_points(group=ENTRY_POINTS):
        problems += _imported(f"entry point {ENTRY_POINTS}:{entry.name}", entry.module)
    return tuple(problems)


def _imported(path: str, module: str) -> tuple[Problem, ...]:
    try:
        import_user_module(module, path)
    except ConfigError as error:
        return error.problems
    return ()


def group_names(schema: type[Schema] = RunConfig) -> tuple[str, ...]:
    """The keys of a tree whose schema class depends on ``kind``: env, algo, network, …"""
    return tuple(name for name, field in schema.model_fields.items() if registry.kinds(name) and Shape.of(field).schema)


def schema_of(name: str, node: object, schema: type[Schema] = RunConfig) -> type[Schema] | None:
    """The schema class of a tree's node: by ``kind`` in the registered groups, else as declared; None for a value or if unknown."""
    if name not in group_names(schema):
        field = schema.model_fields.get(name)
        return Shape.of(field).schema if field is not None else None
    kind = node.get("kind") if isinstance(node, Mapping) else None
    return registry.kinds(name).get(kind) if isinstance(kind, str) else None


_Wrong = dict[Path, Problem]


@dataclass(frozen=True)
class _Whole:
    """What a node is part of: where a key that is unknown here may have been meant to go."""

    schema: type[Schema]
    tree: Mapping[str, object]

    def declared(self) -> list[str]:
        """Every dotted key that is declared."""
        keys: list[str] = []
        for name in self.schema.model_fields:
            keys.append(name)
            below = schema_of(name, self.tree.get(name), self.schema)
            if below is not None:
                keys += [f"{name}.{key}" for key in below.model_fields]
        return keys


def _checked(schema: type[SchemaT], tree: Tree) -> tuple[SchemaT | None, _Wrong]:
    """The configuration, or None and the problem of each path, in the order of the schema."""
    wrong: _Wrong = {}
    nodes: dict[str, object] = {}
    whole = _Whole(schema, tree)
    for name in group_names(schema):
        node, faults = _group(name, tree.get(name, MISSING), whole)
        wrong |= faults
        if node is not None:
            nodes[name] = node
    broken = {path[0] for path in wrong}
    config, faults = _node(schema, {**tree, **nodes}, (), whole)
    wrong |= {path: problem for path, problem in faults.items() if path[0] not in broken}
    order = list(schema.model_fields)
    ordered = sorted(wrong, key=lambda path: order.index(str(path[0])) if path[0] in order else len(order))
    return (None if wrong else config), {path: wrong[path] for path in ordered}


def _group(group: str, node: object, whole: _Whole) -> tuple[Schema | None, _Wrong]:
    if node == MISSING:
        return None, {(group,): Problem(group, "a value is required", f"Give {group}=OPTION")}
    if not isinstance(node, Mapping):
        return None, {
            (group,): Problem(group, f"expected the keys of an option, found {found(node)}", f"Give {group}=OPTION")
        }
    kinds = registry.kinds(group)
    kind = node.get("kind", MISSING)
    schema = kinds.get(kind) if isinstance(kind, str) else None
    if schema is not None:
        return _node(schema, node, (group,), whole)
    path = (group, "kind")
    if kind == MISSING:
        problem = Problem(dotted(path), f"a value is required, one of {', '.join(kinds)}")
    else:
        guess = did_you_mean(nearest(kind, kinds)) if isinstance(kind, str) else ""
        hint = guess or "A kind of your own must be registered by a module listed in plugins"
        problem = Problem(dotted(path), f"expected one of {', '.join(kinds)}, found {found(kind)}", hint)
    return None, {path: problem}


def _node(
    schema: type[SchemaT], node: Mapping[str, object], prefix: Path, whole: _Whole
) -> tuple[SchemaT | None, _Wrong]:
    wrong: _Wrong = {path: _required(path) for path in _missing(node, prefix)}
    config: SchemaT | None = None
    try:
        config = schema.model_validate(node)
    except ValidationError as error:
        for fault in error.errors(include_url=False, include_context=False):
            path, is_key = _real_path(
                fault["loc"], node, mapping_wanted=fault["type"] in ("missing", "extra_forbidden")
            )
            if not is_key and fault["type"] in ("missing", "extra_forbidden"):
                continue  # the branch of a union that the value does not try to be
            full = (*prefix, *path)
            if full in wrong:
                continue
            if fault["type"] == "missing":
                wrong[full] = _required(full)
            elif fault["type"] == "extra_forbidden":
                wrong[full] = _unknown(full, Shape(schema), path, whole)
            elif fault["type"] == "value_error":  # a validator of ours, which has said it in full
                wrong[full] = Problem(dotted(full), fault["msg"].removeprefix("Value error, "))
            else:
                shape = Shape(schema).at(path)
                expected = str(shape) if shape is not None else fault["msg"][:1].lower() + fault["msg"][1:]
                if fault["type"] == "less_than" and "below" not in expected:
                    expected += " and not so large"
                wrong[full] = Problem(dotted(full), f"expected {expected}, found {found(_value(node, path))}")
    # A mapping where a number or a mapping may stand is judged as the mapping it tries to be.
    deeper = {path[:length] for path in wrong for length in range(1, len(path))}
    wrong = {path: problem for path, problem in wrong.items() if path not in deeper}
    return (None if wrong else config), wrong


def _required(path: Path) -> Problem:
    in_list = any(isinstance(part, int) for part in path)  # of which Hydra sets no single entries
    return Problem(dotted(path), "a value is required", "" if in_list else f"Give {dotted(path)}=VALUE")


def _missing(node: object, prefix: Path) -> Iterator[Path]:
    """Paths that still hold ``???``; schema instances have been looked at before."""
    items: Iterator[tuple[str | int, object]]
    if isinstance(node, Mapping):
        items = iter(node.items())
    elif isinstance(node, list):
        items = iter(enumerate(node))
    else:
        return
    for key, value in items:
        if value == MISSING:
            yield (*prefix, key)
        else:
            yield from _missing(value, (*prefix, key))


def _real_path(location: Sequence[str | int], node: object, *, mapping_wanted: bool) -> tuple[Path, bool]:
    """A pydantic location without the tags of union members, and whether it ends at a key.

    A tag (``constrained-float``, ``Anneal``) is told from a key by not being one: it is skipped where the data has no such
    key, except as the last part of a location that names an absent key.
    """
    path: list[str | int] = []
    is_key = True
    for index, part in enumerate(location):
        last = index == len(location) - 1
        if isinstance(node, Mapping):
            if part in node:
                node, is_key = node[part], True
                path.append(part)
                continue
            if last and mapping_wanted:
                path.append(part)
                return tuple(path), True
        elif isinstance(node, list) and isinstance(part, int) and part < len(node):
            node, is_key = node[part], True
            path.append(part)
            continue
        is_key = False
    return tuple(path), is_key


def _value(node: object, path: Path) -> object:
    for part in path:
        if isinstance(node, Mapping):
            node = node[part]
        elif isinstance(node, list):
            node = node[int(part)]
    return node


def _unknown(full: Path, root: Shape, path: Path, whole: _Whole) -> Problem:
    """A key that nobody reads, with the keys it may have been meant for."""
    name, group = str(full[-1]), str(full[0])
    parent = root.at(path[:-1])
    schema = parent.schema if parent is not None else None
    siblings = [key for key in schema.model_fields if key != "kind"] if schema is not None else []
    owners = [kind for kind, other in registry.kinds(group).items() if len(full) == 2 and name in other.model_fields]
    if owners:
        node = whole.tree.get(group)
        kind = node.get("kind") if isinstance(node, Mapping) else None
        known = kind if isinstance(kind, str) else found(kind)
        return Problem(dotted(full), f"no such key for {group} kind {known}", f"It is a key of {' and '.join(owners)}")
    guesses = [dotted((*full[:-1], guess)) for guess in nearest(name, siblings)]
    if not guesses:
        together: dict[str, type[Schema]] = {"sweep": JobsConfig, "tune": TuneConfig}
        declared = [*whole.declared(), *(f"{node}.{key}" for node, of in together.items() for key in of.model_fields)]
        guesses = [key for key in declared if key.rpartition(".")[2] == name][:3]
    hint = did_you_mean(guesses)
    if not hint and siblings:
        hint = f"Keys of {dotted(full[:-1]) or 'the configuration'}: {', '.join(siblings)}"
    return Problem(dotted(full), "no such key", hint)


def _mentions(problem: Problem, path: str) -> bool:
    return problem.path == path or path in f"{problem.text} {problem.hint}"


def _repaired(tree: Tree, defaults: Tree, wrong: _Wrong) -> Tree:
    """The tree with the value it would have without the user at each wrong path; unknown keys left out."""
    repaired: Tree = copy.deepcopy(tree)
    for path in wrong:
        # An item of a list is repaired by its list.
        keys = [
            str(part) for part in path[: next((i for i, part in enumerate(path) if isinstance(part, int)), len(path))]
        ]
        here: object = repaired
        there: object = defaults
        for key in keys[:-1]:
            here = here.get(key) if isinstance(here, dict) else None
            there = there.get(key) if isinstance(there, Mapping) else None
        if not isinstance(here, dict):
            continue
        if isinstance(there, Mapping) and keys[-1] in there:
            here[keys[-1]] = copy.deepcopy(there[keys[-1]])
        else:
            here.pop(keys[-1], None)
    return repaired

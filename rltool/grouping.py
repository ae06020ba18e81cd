"""Which runs are meant and which of them belong together: for commands that take RUN… beside KEY=VALUE. Free of torch."""

from __future__ import annotations

import glob
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import get_args, get_origin

from rltool.config import SchemaT, load_as
from rltool.configfiles import ConfigFiles, flat, read_value
from rltool.errors import ConfigError, Problem
from rltool.records import Record, find_runs, is_run, located, read_run
from rltool.registry import Schema
from rltool.wording import did_you_mean, nearest

SEPARATOR = "--"
# What a configuration says that changes nothing about what is learned. A trailing dot: all keys of the node.
_ASIDE = ("seed", "resume", "quiet", "debug", "logging.", "save.")
# More keys than that are no label.
_KEYS_IN_A_LABEL = 3
# More names than that are counted in a note.
_NAMES_IN_A_NOTE = 4
# The value of a key in which the runs of one group differ.
_MIXED = object()
_NAMED = re.compile(r"(?P<name>[^=/\\]+)=(?P<rest>.+)", re.DOTALL)


@dataclass(frozen=True)
class Group:
    """Runs that are taken together.

    Attributes:
        label: what tells it from the others: the user's name, the algorithm, or the keys that differ. No two groups that
            are compared or drawn together have the same.
        runs: at least one.
    """

    label: str
    runs: tuple[Record, ...]

    @property
    def envs(self) -> list[str]:
        """The environments, in the order of the runs."""
        return list(dict.fromkeys(run.env for run in self.runs))

    def of(self, env: str) -> list[Record]:
        """The runs of an environment."""
        return [run for run in self.runs if run.env == env]


@dataclass(frozen=True)
class Part:
    """Words that name the runs of one group; of several, where there is only one part without a name.

    Attributes:
        name: the user's own; None where none was given.
        words: files, directories of one run or many, patterns.
    """

    name: str | None
    words: tuple[str, ...]


@dataclass(frozen=True)
class _Label:
    """A label in parts.

    Attributes:
        head: what stands before the keys; may be empty.
        values: what is told, by dotted key.
    """

    head: str
    values: Mapping[str, object]


def read_words(
    words: Iterable[str], schema: type[SchemaT], files: ConfigFiles, name: str
) -> tuple[SchemaT, tuple[Part, ...]]:
    """Takes KEY=VALUE and the names of runs apart.

    Args:
        words: what was typed, with :data:`SEPARATOR` between groups.
        schema: the class of the command's configuration.
        files: where config files lie.
        name: the command's file among them.

    Raises:
        ConfigError: everything that is wrong with the keys; no run is named.
    """
    tree = files.primary(name)
    problems: list[Problem] = []
    parts: list[Part] = [Part(None, ())]
    for word in words:
        key, equals, value = word.partition("=")
        named = _NAMED.fullmatch(word)
        if word == SEPARATOR:
            parts.append(Part(None, ()))
        elif equals and key in schema.model_fields:
            tree[key] = _value(schema, key, value)
        elif named is None or Path(word).expanduser().exists():
            parts[-1] = Part(parts[-1].name, (*parts[-1].words, word))
        elif near := [] if _exists(named["rest"]) else nearest(named["name"], schema.model_fields):
            problems.append(Problem(named["name"], "no such key", did_you_mean(near)))
        elif parts[-1] == Part(None, ()):
            parts[-1] = Part(named["name"], (named["rest"],))
        else:
            parts.append(Part(named["name"], (named["rest"],)))
    given = tuple(part for part in parts if part.words)
    try:
        config = load_as(schema, tree)
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems]) from error
    if not given:
        problems.append(Problem("", "no run was named", "Give run directories, or directories with runs in them"))
    if problems:
        raise ConfigError(problems)
    return config, given


def select(parts: Sequence[Part], keys: Sequence[str] | None) -> list[Group]:
    """The groups: one for each part, or, of a single one without a name, those that the configurations make.

    Args:
        parts: what was named.
        keys: runs with the same values of these belong together; None: of all keys but the seed.

    Raises:
        ConfigError: what was named is no run, or holds none; a key that no run has.
    """
    problems: list[Problem] = []
    found = [_runs(part.words, problems) for part in parts]
    if problems:
        raise ConfigError(problems)
    if len(parts) > 1 or parts[0].name is not None:
        texts = _texts(_labels(found, None))
        labels = _unique([part.name or text for part, text in zip(parts, texts, strict=True)])
        return [Group(label, tuple(runs)) for label, runs in zip(labels, found, strict=True)]
    (runs,) = found
    if keys is not None:
        _check_keys(keys, runs)
    return _grouped(runs, keys)


def mixed(group: Group, env: str) -> list[str]:
    """The keys, apart from the seed, in which the runs of a group and an environment differ."""
    return differing([settings(run.config) for run in group.of(env)])


def repeated(group: Group, env: str) -> list[int]:
    """Seeds of which a group has several runs with the same configuration on an environment: they repeat each other."""
    keys = [(run.seed, json.dumps(settings(run.config), sort_keys=True, default=str)) for run in group.of(env)]
    return sorted({seed for seed, of in keys if seed is not None and keys.count((seed, of)) > 1})


def settings(config: Mapping[str, object]) -> dict[str, object]:
    """A run's configuration by dotted keys, without the seed and what changes nothing about what is learned.

    Nulls and empty lists are left out: a run of an older rltool lacks the keys that came later.
    """
    return {
        key: value
        for key, value in flat(config).items()
        if value not in (None, [], {})
        and not any(key.startswith(aside) if aside.endswith(".") else key == aside for aside in _ASIDE)
    }


def few(names: Sequence[str], what: str = "key") -> str:
    """Names in a line, the first of them where they are many; ``what`` they are names of."""
    more = len(names) - _NAMES_IN_A_NOTE
    return ", ".join(names[:_NAMES_IN_A_NOTE]) + (f" and {more} more {what}{'s' * (more > 1)}" if more > 0 else "")


def _value(schema: type[Schema], key: str, text: str) -> object:
    """A value as its field wants it: ``a,b`` is a list where one is wanted, and text stays what was typed."""
    annotation = schema.model_fields[key].annotation
    kinds = [annotation, *get_args(annotation)]
    if text.lower() in ("null", "none") and type(None) in kinds:
        return None
    if any(get_origin(kind) is list for kind in kinds):
        words = text.removeprefix("[").removesuffix("]").split(",")
        return [word.strip() for word in words if word.strip()]
    if str in kinds:
        return text
    return read_value(text)


def _exists(word: str) -> bool:
    return Path(word).expanduser().exists() or bool(glob.glob(str(Path(word).expanduser())))


def _runs(words: Iterable[str], problems: list[Problem]) -> list[Record]:
    """The runs that words name, each once; adds what is wrong with them to the problems."""
    runs: dict[Path, Record] = {}
    for word in words:
        path = located(word)
        paths = [path] if path.exists() else [Path(name) for name in sorted(glob.glob(str(path), recursive=True))]
        if not paths:
            problems.append(
                Problem("", f"there is no {word}", "Give run directories, or directories with runs in them")
            )
        found = [run for place in paths for run in _inside(place)]
        if paths and not found:
            problems.append(Problem("", f"expected a run or a directory with runs in it, found none in {word}"))
        runs |= {run.path.resolve(): run for run in found}
    return list(runs.values())


def _inside(path: Path) -> list[Record]:
    """The run that a path belongs to, or those below it."""
    if path.is_dir() and not is_run(path) and (below := list(find_runs([path]))):
        return below
    with suppress(ConfigError):
        return [read_run(path)]
    return []


def _check_keys(keys: Sequence[str], runs: Sequence[Record]) -> None:
    known = dict.fromkeys(key for run in runs for key in flat(run.config))
    nodes = {key.rpartition(".")[0] for key in known}
    missing = [key for key in keys if key not in known and key not in nodes]
    if missing:
        raise ConfigError(
            Problem("group", f"no run has a key {key}", did_you_mean(nearest(key, known))) for key in missing
        )


def _grouped(runs: Sequence[Record], keys: Sequence[str] | None) -> list[Group]:
    """Groups by configuration; groups of different environments with the same label are one."""
    by_env: dict[str, dict[str, list[Record]]] = {}
    for run in runs:
        values = settings(run.config) if keys is None else _chosen(run, keys)
        by_env.setdefault(run.env, {}).setdefault(json.dumps(values, sort_keys=True, default=str), []).append(run)
    told = [_labels(list(found.values()), keys) for found in by_env.values()]
    texts = iter(_texts([label for labels in told for label in labels]))
    merged: dict[str, list[Record]] = {}
    for found in by_env.values():
        for label, members in zip(_unique([next(texts) for _ in found]), found.values(), strict=True):
            merged.setdefault(label, []).extend(members)
    return [Group(label, tuple(merged[label])) for label in _in_order(list(merged))]


def _in_order(labels: list[str]) -> list[str]:
    """Labels that differ in numbers only by these, 3e-4 before 0.001 and 8 before 16; others as they are."""
    parts = {label: re.split(r"(\d+(?:\.\d+)?(?:e[-+]?\d+)?)", label) for label in labels}
    if len({tuple(of[::2]) for of in parts.values()}) > 1:
        return labels
    return sorted(labels, key=lambda label: [float(number) for number in parts[label][1::2]])


def _chosen(run: Record, keys: Sequence[str]) -> dict[str, object]:
    """The values of keys; of a node those of all its keys."""
    return {
        key: value
        for key, value in flat(run.config).items()
        if any(key == chosen or key.startswith(f"{chosen}.") for chosen in keys)
    }


def _labels(groups: Sequence[Sequence[Record]], keys: Sequence[str] | None) -> list[_Label]:
    """What tells each group from the others; the same for those that nothing tells apart."""
    if keys is not None:
        chosen = [_chosen(runs[0], keys) for runs in groups]
        told = [_told(of, differing(chosen) or list(of)[:_KEYS_IN_A_LABEL]) for of in chosen]
        return [_Label("" if of else "all runs", of) for of in told]
    algos = [" and ".join(dict.fromkeys(run.algo for run in runs)) for runs in groups]
    configs = [_shared([settings(run.config) for run in runs]) for runs in groups]
    told = []
    for config, algo in zip(configs, algos, strict=True):
        rivals = [other for other, kind in zip(configs, algos, strict=True) if kind == algo]
        told.append(_told(config, _telling(rivals)))
    named = len(set(algos)) > 1 or not all(told)
    return [_Label(algo if named else "", of) for algo, of in zip(algos, told, strict=True)]


def _shared(configs: Sequence[Mapping[str, object]]) -> dict[str, object]:
    """What all configurations say; a key in which they differ is :data:`_MIXED`."""
    return {**configs[0], **dict.fromkeys(differing(configs), _MIXED)}


def _told(values: Mapping[str, object], keys: Iterable[str]) -> dict[str, object]:
    return {key: values.get(key) for key in keys if values.get(key) is not _MIXED}


def _texts(labels: Sequence[_Label]) -> list[str]:
    """Labels as they are shown: a key is its last part where that is no other key's among all of them."""
    names = short_names(key for label in labels for key in label.values)
    return [
        ", ".join(
            [*filter(None, [label.head]), *(f"{names[key]}={value_shown(of)}" for key, of in label.values.items())]
        )
        for label in labels
    ]


def _unique(labels: Sequence[str]) -> list[str]:
    """The labels, numbered where one occurs several times."""
    return [
        label if labels.count(label) == 1 else f"{label} ({labels[: number + 1].count(label)})"
        for number, label in enumerate(labels)
    ]


def _telling(configs: Sequence[Mapping[str, object]]) -> list[str]:
    """The keys in which configurations differ; where they are many, a few that already tell all of them apart."""
    keys = differing(configs)
    # A key in which the runs of a group differ does not name it.
    shared = [key for key in keys if all(config.get(key) is not _MIXED for config in configs)]
    if _distinct(configs, shared) == _distinct(configs, keys):
        keys = shared
    if len(keys) <= _KEYS_IN_A_LABEL:
        return keys
    chosen: list[str] = []
    while (apart := _distinct(configs, chosen)) < _distinct(configs, keys):
        best = max(keys, key=lambda key: _distinct(configs, [*chosen, key]))
        if _distinct(configs, [*chosen, best]) == apart:
            break
        chosen.append(best)
    return chosen


def _distinct(configs: Sequence[Mapping[str, object]], keys: Sequence[str]) -> int:
    return len({json.dumps([config.get(key) for key in keys], default=str) for config in configs})


def differing(configs: Sequence[Mapping[str, object]]) -> list[str]:
    """The keys whose values are not the same in all of them."""
    keys = dict.fromkeys(key for config in configs for key in config)
    return [key for key in keys if any(config.get(key) != configs[0].get(key) for config in configs)]


def short_names(keys: Iterable[str]) -> dict[str, str]:
    """Each key and its last part, where no other key ends so; else the whole key."""
    # optim.kind is optim, as it is typed
    ends = {key: key.removesuffix(".kind").rpartition(".")[2] for key in keys}
    counts = Counter(ends.values())
    return {key: end if counts[end] == 1 else key for key, end in ends.items()}


def value_shown(value: object) -> str:
    """A value as it would be typed, in few letters."""
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list):
        return f"[{','.join(map(value_shown, value))}]"
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)

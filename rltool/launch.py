"""From overrides to a run: every job checked before the first starts, a directory of its own, nothing left of a mistake.

Used by ``rltool train`` and by :func:`rltool.train`. No torch until a run really starts.
"""

from __future__ import annotations

import itertools
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from omegaconf import OmegaConf

from rltool import trust
from rltool.composition import Composer, Composition, Line, compose
from rltool.config import SchemaT, Tree, laid_over, load, load_as
from rltool.configfiles import ConfigFiles, flat
from rltool.errors import ConfigError, Problem
from rltool.runs import RunDirectory, git_commit, status_of, versions
from rltool.schema import RunConfig
from rltool.wording import found

if TYPE_CHECKING:
    from pydantic import JsonValue

    from rltool.checkpoint import Header
    from rltool.records import Record

Changes = dict[str, tuple[object, object]]
"""Dotted key -> value before, value now."""

# What a resumed run cannot change: the policy, its optimiser and the recorded experience would no longer fit.
_SETTLED = (
    "env",
    "network",
    "algo.kind",
    "algo.normalize_observation",
    "algo.squash",
    "buffer.kind",
    "optim.kind",
    "seed",
)
# … except how the environments are run, and how long they may take.
_FREE = ("env.backend", "env.timeout")


@dataclass(frozen=True)
class Job:
    """One checked run.

    Attributes:
        words: its overrides, ready for Hydra.
        composition: what Hydra made of them.
        config: the checked configuration.
    """

    words: tuple[str, ...]
    composition: Composition
    config: RunConfig


def check(words: Sequence[str], files: ConfigFiles, composer: Composer | None = None) -> Job:
    """Composes and validates one run.

    Args:
        words: its overrides, ready for Hydra.
        files: where config files lie.
        composer: composes it, where it is one of many.

    Raises:
        ConfigError: everything that is wrong with it.
    """
    composition = compose(words, files) if composer is None else composer(words)
    try:
        return Job(tuple(words), composition, load(composition.tree))
    except ConfigError:
        # Once more with what the keys would be without the user's values: rules across keys can then be checked as well.
        choices = [word for word in words if not word.startswith(("++", "~"))]
        defaults = (compose(choices, files) if composer is None else composer(choices)).tree
    try:
        config = load(composition.tree, defaults=defaults)
    except ConfigError as error:
        raise ConfigError(_with_tuned(error.problems, composition, words, files)) from error
    return Job(tuple(words), composition, config)


def _with_tuned(
    problems: Sequence[Problem], composition: Composition, words: Sequence[str], files: ConfigFiles
) -> list[Problem]:
    """Says of a key that nobody typed that the tuned file brought it: made for adam, it does not fit optim=sgd."""
    if composition.tuned is None:
        return list(problems)
    typed = {word.partition("=")[0].lstrip("+") for word in words}
    brought = set(flat(files.read("tuned", composition.tuned).node)) - typed
    hint = f"The tuned file {composition.tuned} brings it along, made for other choices: give tuned=none"
    return [replace(problem, hint=hint) if problem.path in brought else problem for problem in problems]


def check_command(schema: type[SchemaT], line: Line, files: ConfigFiles, name: str) -> SchemaT:
    """Composes and validates the configuration of another command.

    Args:
        schema: the class that describes it.
        line: what was typed.
        files: where config files lie.
        name: the primary config.

    Raises:
        ConfigError: everything that is wrong with it.
    """
    problems = list(line.problems)
    stand_ins = [f"{group}={options[0]}" for group, options in line.stand_ins.items()]
    try:
        config = load_as(schema, compose([*stand_ins, *line.words], files, name).tree)
    except ConfigError as error:
        problems += [problem for problem in error.problems if problem.path.partition(".")[0] not in line.stand_ins]
    if problems:
        raise ConfigError(dict.fromkeys(problems))
    return config


def check_jobs(line: Line, files: ConfigFiles, *, multirun: bool = False) -> list[Job]:
    """Composes and validates every job of a command line before any of them starts.

    Raises:
        ConfigError: the problems of all jobs together.
    """
    if line.problems:
        raise ConfigError(dict.fromkeys([*line.problems, *_whatever_the_choice(line, files)]))
    jobs, problems = _check_each(line.jobs() if multirun else [line.words], files)
    params = OmegaConf.select(jobs[0].composition.hydra, "hydra.sweeper.params") if multirun and jobs else None
    if params:  # a sweep that a file asks for, on top of what was typed
        jobs, problems = _check_each(line.jobs(params), files)
    if problems:
        raise ConfigError(dict.fromkeys(problems))
    return jobs


def _check_each(jobs: Sequence[Sequence[str]], files: ConfigFiles) -> tuple[list[Job], list[Problem]]:
    checked: list[Job] = []
    problems: list[Problem] = []
    composer = Composer(files) if len(jobs) > 1 else None
    for words in jobs:
        try:
            checked.append(check(words, files, composer))
        except ConfigError as error:
            problems += error.problems
    return checked, problems


def _whatever_the_choice(line: Line, files: ConfigFiles) -> list[Problem]:
    """Problems beside missing or misspelt choices: those that stay whatever is chosen in their place."""
    words = line.jobs()[0]
    if not words:
        return []
    common: list[Problem] | None = None
    for options in itertools.product(*line.stand_ins.values()):
        choices = [f"{group}={option}" for group, option in zip(line.stand_ins, options, strict=True)]
        try:
            check([*choices, *words], files)
        except ConfigError as error:
            problems = [problem for problem in error.problems if problem.path.partition(".")[0] not in line.stand_ins]
        else:
            problems = []
        common = problems if common is None else [problem for problem in common if problem in problems]
    return common or []


def start(config: RunConfig, directory: Path, overrides: Sequence[str], tuned: str | None = None) -> dict[str, object]:
    """Trains; returns the summary. torch is imported here and not before.

    Args:
        config: the checked configuration.
        directory: where the run goes.
        overrides: what was typed.
        tuned: the name of the tuned file in the configuration, for the start block.
    """
    if config.eval.video_interval is not None:
        from rltool.opengl import settle_without_screen

        settle_without_screen()
    from rltool import training

    return training.train(config, directory, overrides, tuned=tuned)


class Claim:
    """A directory for a run, made before the run so that a refusal comes early, and taken back if nothing came of it.

    Args:
        path: the directory, absolute; made by :meth:`make`.
        made: the directories that were made for it, outermost first.
    """

    def __init__(self, path: Path, made: Sequence[Path]) -> None:
        self.path = path
        self._made = tuple(made)

    @classmethod
    def make(cls, path: Path, key: str = "hydra.run.dir") -> Claim:
        """Makes the directory where it is missing.

        Args:
            path: see above.
            key: the key that names it.

        Raises:
            ConfigError: it holds a run already, or it cannot be made or written to.
        """
        missing = [parent for parent in (path, *path.parents) if not parent.exists()]
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            blocker = next(
                (str(parent) for parent in path.parents if parent.exists() and not parent.is_dir()), str(path)
            )
            reason = (
                f"{blocker} is a file" if isinstance(error, FileExistsError | NotADirectoryError) else error.strerror
            )
            raise ConfigError(
                Problem(key, f"cannot make the directory {path}: {reason}", "Choose another place")
            ) from error
        claim = cls(path, missing[::-1])
        if not os.access(path, os.W_OK | os.X_OK):
            claim.give_back()
            raise ConfigError(Problem(key, f"no permission to write into {path}", "Choose another place"))
        if (path / "config.yaml").exists():
            raise ConfigError(
                Problem(
                    key,
                    f"{path} already holds a run",
                    f"Continue that run with resume={path}, or leave {key} out and get a new directory",
                )
            )
        return claim

    def give_back(self) -> None:
        """Removes the directories made here that are still empty.

        Training builds everything before it writes anything, so a run that turns out to be a mistake (an algorithm that
        cannot handle the environment's spaces) leaves them so. Whatever holds a file stays: it may be another process's.
        """
        for directory in reversed(self._made):
            with suppress(OSError):
                directory.rmdir()


@dataclass(frozen=True)
class Resumption:
    """A run that continues from a checkpoint.

    Attributes:
        header: of the checkpoint.
        config: the checkpoint's configuration with the overrides laid over it.
        changes: dotted key -> (old, new).
        directory: where it goes on: the checkpoint's own run directory, or None for a new one.
    """

    header: Header
    config: RunConfig
    changes: Changes
    directory: Path | None

    @property
    def finished(self) -> bool:
        """Whether the budget is used up already, and nothing is left to write down (a run may be killed between its last
        checkpoint and its summary)."""
        if not 0 <= self.config.total_frames <= self.header.frames:
            return False
        return self.directory is None or status_of(self.directory) in ("finished", "solved")

    def new_directory(self) -> Path:
        """A fresh directory for a checkpoint that lies in no run directory."""
        return Path(os.path.abspath(_new_directory(self.config)))


def read_resumption(line: Line, files: ConfigFiles) -> Resumption:
    """What ``resume=…`` and the overrides beside it ask for.

    The base is the configuration inside the checkpoint, never conf/.

    Raises:
        CheckpointError: there is no such checkpoint.
        ConfigError: everything else that is wrong; code that a stranger's checkpoint names before all.
    """
    from rltool.checkpoint import read_header

    resume = line.get("resume")
    assert resume is not None
    header = read_header(Path(str(resume.override.value())))
    for text in header.passed_over:
        print(f"warning: passed over: {text}", file=sys.stderr)
    keeps = _Keeps(
        "a resumed run keeps the {} it was started with",
        lambda _: f"start a new run with init={header.path}",
        partial(_settled, path=header.path),
    )
    changed, problems = _values(line, files, header.config, keeps, own=("resume", "hydra.run.dir"))
    if line.get("hydra.run.dir") is not None and header.run_directory is not None:
        problems.append(
            Problem(
                "hydra.run.dir",
                f"a checkpoint inside a run directory continues there ({header.run_directory})",
                "Leave hydra.run.dir out, or copy the checkpoint elsewhere first",
            )
        )
    # No ${…} is resolved here: what a file holds is data, and it could ask for an environment variable.
    tree = trust.configuration(header, changed)
    tree["resume"] = os.path.abspath(header.path)
    if line.get("init") is None:
        tree["init"] = None  # what the run began from is in the checkpoint by now
    config, changes = _laid(tree, header.config, problems)
    for name in ("resume", "init"):
        changes.pop(name, None)
    problems += [_settled(key, *values, path=header.path) for key, values in changes.items() if _is_settled(key)]
    if "total_frames" in changes and 0 <= config.total_frames < header.frames:
        text = f"expected more than the {header.frames:,} frames that this run has, found {config.total_frames:,}"
        problems.append(Problem("total_frames", text, "It is the budget of the whole run, what came before included"))
    if problems:
        raise ConfigError(dict.fromkeys(problems))
    return Resumption(header, config, changes, header.run_directory)


@dataclass(frozen=True)
class Rerun:
    """A new run with the configuration of another one.

    Attributes:
        record: the other one.
        config: its configuration with the overrides laid over it.
        changes: dotted key -> (old, new).
        overrides: what was typed for it, as changed by what is typed now; a comment says where they are from.
        directory: where it goes.
    """

    record: Record
    config: RunConfig
    changes: Changes
    overrides: tuple[str, ...]
    directory: Path

    @property
    def tuned(self) -> str | None:
        """The name of the tuned file that the configuration holds, where the run's log says so."""
        name = self.record.logged("tuned")
        return None if name == "none" else name

    def warnings(self) -> list[str]:
        """Why its numbers may be others than those of the run, one text each."""
        record, here = self.record, versions()
        texts = [
            f"the run was made with {name} {before}, and this is {name} {here[name]}: numbers may differ"
            for name, before in record.versions.items()
            if name in here and here[name] != before
        ]
        commit = git_commit(Path.cwd()) if record.commit is not None else None
        if commit is not None and commit != record.commit:
            texts.append(f"the run was made at commit {record.commit}, and this is {commit}")
        if any(record.resumed):
            typed = "; ".join(" ".join(words) for words in record.resumed if words)
            texts.append(f"the run was resumed with {typed}: what it ended with holds here from the first frame on")
        return texts


def read_rerun(record: Record, line: Line, files: ConfigFiles) -> Rerun:
    """What a rerun of a run with overrides beside it asks for.

    The base is the configuration in the run's directory, never conf/; it needs no checkpoint.

    Raises:
        ConfigError: everything that is wrong; code that a stranger's run names before all.
    """
    from rltool.checkpoint import completed

    path = record.path / "config.yaml"
    if not record.config:
        reason = "; ".join(record.problems) or "config.yaml is empty"
        raise ConfigError(Problem("", f"{record.path} has no configuration to run anew: {reason}"))
    base = completed(cast("dict[str, JsonValue]", record.config))
    keeps = _Keeps("a rerun keeps the {} of its run", partial(_anew, record), partial(_other, path=path))
    changed, problems = _values(line, files, base, keeps, own=("hydra.run.dir",))
    if line.get("resume") is not None:
        problems.append(Problem("resume", "a rerun begins at frame 0", "Leave it out, or use rltool train resume=…"))
    tree = trust.allowed(path, base, changed, signed=lambda: trust.is_own(record.header, record.config))
    config, changes = _laid(tree, base, problems)
    if config.resume is not None:  # it began in the middle of another run
        source = Path(config.resume)
        problems += [_settled(key, *values, path=source) for key, values in changes.items() if _is_settled(key)]
    if problems:
        raise ConfigError(dict.fromkeys(problems))
    words = [one.word for one in line.typed if one.key != "hydra.run.dir"]
    keys = {one.key for one in line.typed}
    kept = [word for word in record.overrides if word.lstrip("+~").partition("=")[0] not in keys]
    note = f"# rerun of {os.path.abspath(record.path)}"
    typed = line.get("hydra.run.dir")
    directory = Path(str(typed.override.value())) if typed is not None else _new_directory(config, record.path)
    return Rerun(record, config, changes, (*kept, *words, note), Path(os.path.abspath(directory)))


def _anew(record: Record, word: str) -> str:
    """The command that started a run, with another choice."""
    key = word.partition("=")[0]
    words = [word if one.partition("=")[0] == key else one for one in record.overrides]
    return f"start a new run: rltool train {shlex.join(words if word in words else [*words, word])}"


def _new_directory(config: RunConfig, beside: Path | None = None) -> Path:
    """A fresh directory below runs/, or beside a run's where that is one of the runs of its environment and algorithm."""
    parent = Path(os.path.abspath(beside)).parent if beside is not None else None
    env, algo = str(getattr(config.env, "id", config.env.kind)), config.algo.kind
    fresh = RunDirectory.new_path(Path("runs"), env.rpartition(":")[2], algo)
    return parent / fresh.name if parent is not None and parent.name.endswith(f"-{algo}") else fresh


@dataclass(frozen=True)
class _Keeps:
    """What is said where a saved configuration does not take another choice.

    Attributes:
        text: of a group, whose name takes the place of ``{}``.
        instead: what to do, from the word that was typed.
        kind: the problem of a ``….kind``: from its key, the value in the configuration and the value that was typed.
    """

    text: str
    instead: Callable[[str], str]
    kind: Callable[[str, object, object], Problem]


def _values(
    line: Line, files: ConfigFiles, base: Mapping[str, object], keeps: _Keeps, own: Sequence[str]
) -> tuple[Tree, list[Problem]]:
    """The values that were typed, as a tree to lay over a saved configuration, and what is wrong with them.

    Args:
        line: what was typed.
        files: where config files lie.
        base: the saved configuration.
        keeps: what is said of choices.
        own: keys that are the business of the command.
    """
    problems = list(line.problems)
    changed: Tree = {}
    for typed in line.typed:
        if typed.key in own:
            continue
        if files.is_group(typed.key) and not isinstance(typed.override.value(), dict):
            text = f"{keeps.text.format(typed.key)}, found {typed.word}"
            problems.append(
                Problem(typed.key, text, f"Change single keys ({typed.key}.KEY=VALUE), or {keeps.instead(typed.word)}")
            )
        elif typed.key.endswith(".kind"):  # other keys belong to another kind: only this one is wrong
            kind = flat(base).get(typed.key)
            if typed.override.value() != kind:
                problems.append(keeps.kind(typed.key, kind, typed.override.value()))
        elif typed.override.is_hydra_override() or typed.override.is_delete() or "/" in typed.key:
            problems.append(
                Problem(typed.key, f"cannot be given together with a saved configuration, found {typed.word}")
            )
        else:
            changed = laid_over(changed, _nested(typed.key.split("."), typed.override.value()))
    return changed, problems


def _laid(tree: Tree, base: Mapping[str, object], problems: Sequence[Problem]) -> tuple[RunConfig, Changes]:
    """The checked configuration of a tree, and what is different from the saved one.

    Raises:
        ConfigError: the problems of the tree and those that were found before.
    """
    try:
        config = load(tree, defaults=base)
    except ConfigError as error:
        raise ConfigError(dict.fromkeys([*problems, *error.problems])) from error
    old, new = flat(base), flat(config.model_dump(mode="json"))
    keys = [*old, *(key for key in new if key not in old)]
    return config, {key: (old.get(key), new.get(key)) for key in keys if old.get(key) != new.get(key)}


def told(changes: Changes) -> list[str]:
    """A line for each change."""
    return [f"  {key}: {found(old)} → {found(new)}" for key, (old, new) in changes.items()]


def _nested(keys: Sequence[str], value: object) -> Tree:
    """A tree that holds one value."""
    head, *rest = keys
    return {head: _nested(rest, value) if rest else value}


def _settled(key: str, before: object, after: object, *, path: Path) -> Problem:
    return Problem(
        key,
        f"cannot change on resume: {found(before)} in the checkpoint, found {found(after)}",
        f"Start a new run with init={path} instead",
    )


def _other(key: str, before: object, after: object, *, path: Path) -> Problem:
    return Problem(
        key,
        f"cannot change on a rerun: {found(before)} in {path}, found {found(after)}",
        "Start a new run with rltool train instead",
    )


def _is_settled(key: str) -> bool:
    return _under(key, _SETTLED) and not _under(key, _FREE)


def _under(key: str, heads: Sequence[str]) -> bool:
    return any(key == head or key.startswith(f"{head}.") for head in heads)

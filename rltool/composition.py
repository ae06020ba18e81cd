"""From what was typed to the composed tree: config files, overrides, Hydra. No torch.

Hydra merges; what it would refuse one at a time (unknown keys, misspelt options, missing choices) is gathered here and in
:func:`rltool.config.load`, so that a user sees every problem on one screen.
"""

from __future__ import annotations

import copy
import itertools
import math
import os
import re
import secrets
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import cast

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override, Quote, QuotedString, Sweep
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, ListConfig, OmegaConf, flag_override
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from rltool.configfiles import ConfigFiles, flat
from rltool.errors import ConfigError, Problem
from rltool.importing import extra_for
from rltool.records import located
from rltool.wording import did_you_mean, nearest

VERSION_BASE = "1.3"

# Keys whose value is a path: relative to where the user typed it, absolute from here on.
PATH_KEYS = frozenset({"resume", "init", "checkpoint", "out", "trajectories"})
# Those whose file or run is there already: a run can be named by the end of its path.
_FOUND_KEYS = PATH_KEYS - {"out", "trajectories"}

# Hydra compares our conf/hydra/launcher/ray.yaml with what the plugin has registered under that name, and complains that it does.
warnings.filterwarnings("ignore", message=r"\s*'hydra/launcher/ray' is validated")

# Words that are no paths.
_NULLS = ("null", "None", "???", "")

# Nodes of conf/train.yaml that concern the jobs of a sweep together.
TOGETHER = ("sweep", "tune")

# More jobs than that are a mistake: each has a directory, and all are checked before the first starts.
_MOST_JOBS = 100_000

# A value that looks like a function of Hydra's grammar, and those that there are.
_CALL = re.compile(r"([A-Za-z_]\w*)\(")
_FUNCTIONS = (
    "choice",
    "range",
    "interval",
    "tag",
    "int",
    "float",
    "str",
    "bool",
    "sort",
    "shuffle",
    "glob",
    "json_str",
)
_GRAMMAR = "Values are choice(A,B), range(START,STOP,STEP), interval(LOW,HIGH), tag(log,interval(LOW,HIGH)), int(…)"

# How many options stand in for a missing or misspelt choice while the other problems are looked for.
_STAND_INS = 2


@dataclass(frozen=True)
class Typed:
    """One override: as typed, and as Hydra gets it.

    Attributes:
        word: what was typed.
        hydra: the same for Hydra: a plain ``a.b=v`` became ``++a.b=v``, a path absolute.
        override: ``hydra``, parsed.
        is_choice: it chooses an option of a group.
    """

    word: str
    hydra: str
    override: Override
    is_choice: bool

    @property
    def key(self) -> str:
        """The dotted key or the group."""
        return self.override.key_or_group

    @property
    def values(self) -> list[str]:
        """The values, as they would be typed; more than one in a sweep."""
        if self.override.is_sweep_override():
            return (
                [str(value) for value in self.override.sweep_string_iterator()]
                if self.override.is_discrete_sweep()
                else []
            )
        return [str(self.override.get_value_element_as_str())]


@dataclass(frozen=True)
class Line:
    """The overrides of a command line, looked at one by one.

    Attributes:
        typed: those that can be read.
        problems: what is wrong with the others, and with the choices.
        stand_ins: for each group whose choice is missing or wrong, options to go on with.
    """

    typed: tuple[Typed, ...]
    problems: tuple[Problem, ...] = ()
    stand_ins: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def words(self) -> list[str]:
        """What Hydra gets."""
        return [typed.hydra for typed in self.typed]

    def get(self, key: str) -> Typed | None:
        """The last override of a key."""
        return next((typed for typed in reversed(self.typed) if typed.key == key), None)

    @property
    def resume(self) -> Typed | None:
        """The override ``resume=PATH``; None where there is none, or one that says null."""
        typed = self.get("resume")
        return None if typed is None or typed.values in (["null"], ["None"]) else typed

    def jobs(self, params: Mapping[str, object] | None = None) -> list[list[str]]:
        """The overrides of each job of a sweep, in Hydra's order; one job where nothing is swept.

        Args:
            params: sweep parameters from the configuration (``hydra.sweeper.params``).

        Raises:
            ConfigError: there are more than a directory each is good for.
        """
        extra = OverridesParser.create().parse_overrides([f"{key}={value}" for key, value in (params or {}).items()])
        lists: dict[str, list[str]] = {}
        for override in [*extra, *(typed.override for typed in self.typed)]:
            key = override.get_key_element()
            if not override.is_sweep_override():
                lists[key] = [f"{key}={override.get_value_element_as_str()}"]
            elif override.is_discrete_sweep():
                lists[key] = [f"{key}={value}" for value in override.sweep_string_iterator()]
            # A range is the business of a search: it has no list of jobs to look at beforehand.
        count = math.prod(map(len, lists.values()))
        if count > _MOST_JOBS:
            text = f"these values make {count:,} jobs, and a sweep has at most {_MOST_JOBS:,}"
            raise ConfigError(Problem("", text, "Give fewer values, or search among them: hydra/sweeper=tune"))
        return [list(job) for job in itertools.product(*lists.values())]


@dataclass(frozen=True)
class Composition:
    """What Hydra composed.

    Attributes:
        tree: the resolved configuration, plain; a value that is still missing is ``???``.
        together: of ``rltool train``, the nodes that concern the jobs of a sweep together; they are in no run's configuration.
        choices: the option chosen of each group.
        tuned: the name of the tuned file that was applied, or None.
        hydra: Hydra's own node, unresolved.
    """

    tree: dict[str, object]
    choices: dict[str, str]
    tuned: str | None
    hydra: DictConfig
    together: dict[str, object] = field(default_factory=dict)

    @cached_property
    def run_directory(self) -> Path:
        """Where a single run goes, absolute."""
        return self._directory("run.dir")

    @cached_property
    def sweep_directory(self) -> Path:
        """Where the jobs of a sweep go, absolute."""
        return self._directory("sweep.dir")

    def _directory(self, key: str) -> Path:
        try:
            path = OmegaConf.select(self.hydra, f"hydra.{key}", throw_on_missing=True)
        except OmegaConfBaseException as error:
            raise ConfigError(Problem(f"hydra.{key}", _first_line(error))) from error
        return Path(os.path.abspath(os.path.expanduser(str(path))))


def read_overrides(
    words: Sequence[str],
    files: ConfigFiles,
    *,
    name: str = "train",
    multirun: bool = False,
    choices_allowed: bool = True,
    several: str = "Add -m to run them side by side",
) -> Line:
    """The overrides of a command line: parsed, made ready for Hydra, and the choices of groups checked.

    Args:
        words: what was typed.
        files: where options lie.
        name: the primary config, whose defaults list says which groups must be chosen.
        multirun: several values for one key are a sweep, not a mistake.
        choices_allowed: False where a saved configuration is the base, whose options are settled.
        several: what to do about several values.
    """
    typed: list[Typed] = []
    problems: list[Problem] = []
    stand_ins: dict[str, tuple[str, ...]] = {}
    defaults = files.defaults(name)
    for word in words:
        one = _read(word, files, defaults, files.primary(name))
        if isinstance(one, Problem):
            problems.append(one)
        elif name == "train" and one.key.partition(".")[0] in TOGETHER and (not multirun or _is_swept(one)):
            text = "expected one value" if multirun else "is for several runs"
            problems.append(Problem(one.key, f"{text}, found {word}", "" if multirun else "Add -m, or leave it out"))
        elif one.override.is_sweep_override() and not multirun and not one.override.is_hydra_override():
            problems.append(
                Problem(
                    one.key,
                    f"expected one value, found several: {word.partition('=')[2]}",
                    several + ("" if one.is_choice else f", or write {one.key}=[…] for a list"),
                )
            )
            if one.is_choice:
                stand_ins[one.key] = tuple(one.values[:_STAND_INS])
        else:
            typed.append(one)
    if not choices_allowed:
        return Line(tuple(typed), tuple(problems))
    chosen = set(stand_ins)
    for one in typed:
        if not one.is_choice:
            continue
        chosen |= {one.key}
        for value in one.values:
            problem = _choice_problem(one.key, value, files)
            if problem is not None:
                problems.append(problem)
                stand_ins[one.key] = _candidates(one.key, value, files)
            else:
                chosen |= set(files.read(one.key, value).overrides) if files.find(one.key, value) else set()
    for group, default in defaults.items():
        if default == "???" and group not in chosen:
            options = ", ".join(files.options(group))
            hint = f"Give {group}=OPTION, one of {options}"
            ids = [one.word for one in typed if one.word.startswith("env.id=")]
            if group == "env" and ids:
                hint = f"Give env=gym {ids[0]}, or one of the other options: {options}"
            problems.append(Problem(group, "a value is required", hint))
            stand_ins[group] = _candidates(group, "", files)
    kept = tuple(one for one in typed if one.key not in stand_ins)
    return Line(kept, tuple(problems), stand_ins)


def compose(words: Sequence[str], files: ConfigFiles | None = None, name: str = "train") -> Composition:
    """What Hydra makes of overrides that are ready for it.

    Raises:
        ConfigError: Hydra cannot compose or resolve them.
    """
    files = files or ConfigFiles.find_main()
    with _explained(files), _within(files, name):
        return _resolved(_composed(words, files, name), files)


class Composer:
    """Composes many command lines that make few different choices. Hydra composes the choices, which takes a third of a second,
    once; values (``++key=…``) are laid over that as Hydra does it.

    Args:
        files: where config files lie; they are read when a choice is first met.
    """

    def __init__(self, files: ConfigFiles) -> None:
        self._files = files
        self._found: dict[tuple[str, ...], DictConfig] = {}

    def __call__(self, words: Sequence[str]) -> Composition:
        """As :func:`compose`, but that ``hydra`` knows nothing of the values.

        Raises:
            ConfigError: Hydra cannot compose or resolve them.
        """
        choices = tuple(word for word in words if not word.startswith("++"))
        with _explained(self._files), _within(self._files, "train"):
            if choices not in self._found:
                self._found[choices] = _composed(choices, self._files, "train")
            config = copy.deepcopy(self._found[choices])
            values = OverridesParser.create().parse_overrides([word for word in words if word.startswith("++")])
            with flag_override(config, ["readonly", "struct"], False):
                for value in values:
                    OmegaConf.update(config, value.key_or_group, value.value(), merge=True, force_add=True)
            return _resolved(config, self._files)


@contextmanager
def _explained(files: ConfigFiles) -> Iterator[None]:
    try:
        yield
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(explain(error, files)) from error
    except (ValueError, TypeError, AttributeError, AssertionError) as error:
        # Hydra stumbles over some overrides of its own settings without an error class for them.
        raise ConfigError(f"Hydra cannot compose these overrides: {_first_line(error)}") from error


@contextmanager
def _within(files: ConfigFiles, name: str) -> Iterator[None]:
    """While it lasts Hydra can compose, also within a run of its own, as a search does."""
    before, around = HydraConfig.instance().cfg, GlobalHydra.instance().hydra
    GlobalHydra.instance().hydra = None
    try:
        with searching(files), initialize_config_dir(str(files.main), job_name=name, version_base=VERSION_BASE):
            yield
    finally:
        HydraConfig.instance().cfg = before
        GlobalHydra.instance().hydra = around


def _composed(words: Sequence[str], files: ConfigFiles, name: str) -> DictConfig:
    return hydra_compose(name, overrides=[*words, *files.search_path_override()], return_hydra_config=True)


def _resolved(config: DictConfig, files: ConfigFiles) -> Composition:
    HydraConfig.instance().set_config(config)  # for ${hydra:…}
    node = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
    tree = cast("dict[str, object]", OmegaConf.to_container(node, resolve=True, throw_on_missing=False))
    choices = {str(key): str(value) for key, value in config.hydra.runtime.choices.items()}
    together = {key: tree.pop(key) for key in TOGETHER if key in tree}
    return Composition(tree, choices, files.tuned_name(choices.get("tuned")), config, together)


def own_words(words: Sequence[str]) -> tuple[str, ...]:
    """The overrides that are a job's, not the sweep's."""
    return tuple(word for word in words if _node_of(word) not in ("hydra", *TOGETHER))


def _node_of(word: str) -> str:
    return word.partition("=")[0].lstrip("+~").partition(".")[0].partition("/")[0]


def explain(error: Exception, files: ConfigFiles) -> list[Problem]:
    """What Hydra or OmegaConf did not like, in the words of the command line."""
    if isinstance(error, ConfigError):
        return list(error.problems)
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and "/" in str(error.missing_cfg_file):
        group, _, option = str(error.missing_cfg_file).rpartition("/")
        if group == "hydra/launcher" and (hint := extra_for(f"hydra_{option}")):
            return [Problem(group, f"{option} needs a package that is not installed", hint)]
        problem = files.problem(group, option)
        if problem is not None:
            return [problem]
    cause = error if isinstance(error, OmegaConfBaseException) else error.__cause__
    if isinstance(cause, OmegaConfBaseException):
        text = _first_line(cause)
        parent = cause.parent_node
        if isinstance(cause, ConfigKeyError | ConfigAttributeError) and isinstance(parent, DictConfig):
            head, _, name = str(cause.full_key).rpartition(".")
            guesses = [f"{head}.{key}" if head else key for key in nearest(name, map(str, parent))]
            return [Problem(str(cause.full_key), "no such key", did_you_mean(guesses))]
        if "nterpolation" in type(cause).__name__ or "recursive" in text.lower():
            text = f"its ${{…}} reference cannot be resolved: {text}"
        key = str(cause.full_key or "")
        if text.startswith("Cannot merge"):
            # It is said alike of a list for a mapping and of a mapping for a list.
            kinds = ["a list […]", "a mapping {key: value, …}"]
            wanted, given = kinds if isinstance(cause.parent_node, ListConfig) else kinds[::-1]
            text = f"expected {wanted}, found {given}"
        return [Problem(key, text)]
    return [Problem("", _first_line(error))]


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def quoted(value: str) -> str:
    """Text in the quotes of Hydra's override grammar."""
    return QuotedString(value, Quote.single).with_quotes()


def _read(word: str, files: ConfigFiles, defaults: Mapping[str, str], primary: Mapping[str, object]) -> Typed | Problem:
    key, equals, value = word.partition("=")
    bare = key.lstrip("+~")
    if not equals and not word.startswith("~"):
        return _not_an_override(word, files)
    try:
        word_for_hydra = f"{bare}={_absolute(value, named=bare in _FOUND_KEYS)}" if bare in PATH_KEYS else word
        override = OverridesParser.create().parse_override(word_for_hydra)
    except ConfigError as error:
        return Problem(bare, error.problems[0].text, error.problems[0].hint)
    except HydraException as error:
        call = _CALL.match(value)
        if call is None:
            return Problem(bare, f"cannot read {value!r}: {_first_line(error)}", f"Quote it: '{key}=\"{value}\"'")
        meant = "" if call[1] in _FUNCTIONS else did_you_mean(nearest(call[1], _FUNCTIONS))
        hint = f"{meant} {_GRAMMAR}; text in quotes: '{key}=\"{value}\"'".strip()
        return Problem(bare, f"cannot read {value}: {_called_wrong(error)}", hint)
    if isinstance(sweep := override.value(), ChoiceSweep) and any(isinstance(item, Sweep) for item in sweep.list):
        text = f"expected single values between the commas, found {value}"
        return Problem(bare, text, "Give a,b,c alone, or one range(…) or interval(…)")
    if (
        override.is_hydra_override()
        or override.is_delete()
        or "/" in bare
        or "@" in bare
        or override.package is not None
    ):
        return Typed(word, word_for_hydra, override, is_choice=False)
    if files.is_group(bare) and not isinstance(_value(override), dict):
        if bare not in defaults and not key.startswith("+"):
            hint = f"Change its keys: {bare}.KEY=VALUE" if bare in primary else "Leave it out"
            return Problem(bare, f"is not chosen by this command, found {word}", hint)
        # ``+group=option`` is needed for groups that the primary config does not list, and refused for those it does.
        sign = "" if bare in defaults else "+"
        plain = f"{sign}{bare}={value}"
        return Typed(word, plain, OverridesParser.create().parse_override(plain), is_choice=bare in defaults)
    forced = f"++{word_for_hydra.lstrip('+')}"
    return Typed(word, forced, OverridesParser.create().parse_override(forced), is_choice=False)


def _value(override: Override) -> object:
    return None if override.is_sweep_override() else cast("object", override.value())


def _is_swept(typed: Typed) -> bool:
    return typed.override.is_sweep_override() and not typed.key.startswith("tune.space")


def _not_an_override(word: str, files: ConfigFiles) -> Problem:
    groups = [group for group in files.groups() if word in files.options(group) and word != "none"]
    if groups:
        return Problem(
            "", f"expected key=value, found {word!r}", did_you_mean([f"{group}={word}" for group in groups[:2]])
        )
    if word.endswith(".ckpt") or os.sep in word:
        return Problem("", f"expected key=value, found {word!r}", f"Did you mean checkpoint={word}?")
    return Problem("", f"expected key=value, found {word!r}")


def _called_wrong(error: HydraException) -> str:
    """What Hydra says of a call, without how it came to it."""
    return _first_line(error).rpartition("': ")[2]


def _absolute(value: str, *, named: bool) -> str:
    """A path value, or several with commas between, absolute and quoted; null stays null.

    Args:
        value: what was typed.
        named: a run can be given by name, see :func:`rltool.records.located`.

    Raises:
        ConfigError: several runs are called so.
    """
    if value in _NULLS:
        return value
    try:
        override = OverridesParser.create().parse_override(f"path={value}")
    except HydraException:
        paths = [value]  # a path with = or brackets in it is no word of Hydra's grammar, and still a path
    else:
        if override.is_discrete_sweep():
            paths = [path.strip().strip("'\"") for path in override.sweep_string_iterator()]
        else:
            path = override.value()
            if isinstance(path, bool) or not isinstance(path, str | int | float):
                return value
            paths = [path if isinstance(path, str) else value]  # the name of a run may look like a number
    return ",".join(path if path in _NULLS else quoted(_place(path, named=named)) for path in paths)


def _place(path: str, *, named: bool) -> str:
    return os.path.abspath(located(path) if named else os.path.expanduser(path))


def _choice_problem(group: str, option: str, files: ConfigFiles) -> Problem | None:
    # Hydra also takes null (no option) and [a,b] (several).
    return None if option == "null" or option.startswith("[") else files.problem(group, option)


def _candidates(group: str, option: str, files: ConfigFiles) -> tuple[str, ...]:
    options = list(files.options(group))
    return tuple(dict.fromkeys([*nearest(option, options), *options]))[:_STAND_INS]


# The directories that hold user files while Hydra composes; the resolver below has no other way to learn them.
_user_directories: list[Path] = []


@contextmanager
def searching(files: ConfigFiles) -> Iterator[None]:
    """While it lasts, the choice of a tuned file looks into the user's directories too."""
    before = list(_user_directories)
    _user_directories[:] = files.extra
    try:
        yield
    finally:
        _user_directories[:] = before


def _uid() -> str:
    return secrets.token_hex(3)


def _tuned(*, _root_: DictConfig) -> str:
    """The tuned file of the chosen env and algo: ``<env>-<algo>``, else ``<env>-<kind of algo>``, unless that would change
    what the algo's file says itself.

    Read in the defaults list of conf/train.yaml. Plain ``${env}-${algo}`` fails there as soon as either is swept, since
    Hydra first composes without the swept choices.
    """
    if OmegaConf.is_missing(_root_, "env") or OmegaConf.is_missing(_root_, "algo"):
        return "none"
    env, algo = str(_root_.env), str(_root_.algo)
    files = ConfigFiles(*_composing_directories())
    if files.find("tuned", f"{env}-{algo}") is None and files.find("algo", algo) is not None:
        kind = str(files.read("algo", algo).node.get("kind"))
        if files.find("tuned", f"{env}-{kind}") is not None:
            said = flat({"algo": files.said("algo", algo, over=kind)})
            brought = flat(files.read("tuned", f"{env}-{kind}").node)
            if all(brought.get(key, value) == value for key, value in said.items()):
                return f"{env}-{kind}"
    return f"{env}-{algo}"


def _composing_directories() -> tuple[Path, tuple[Path, ...]]:
    """The directories that Hydra is searching right now."""
    paths: list[Path] = []
    for element in GlobalHydra.instance().config_loader().get_search_path().get_path():
        if element.provider not in ("hydra", "schema") and not str(element.path).startswith("pkg://"):
            paths.append(Path(str(element.path).removeprefix("file://")))
    main, *extra = paths
    return main, (*extra, *_user_directories)


OmegaConf.register_new_resolver("rltool.uid", _uid, use_cache=True, replace=True)
OmegaConf.register_new_resolver("rltool.tuned", _tuned, replace=True)

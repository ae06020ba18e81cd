"""The YAML files of conf/ and of the user's own directories: which groups and options there are and what each says.

Read without Hydra, so that ``--help`` and ``list`` stay fast.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, cast

import yaml

from rltool.errors import ConfigError, Problem, RltoolError
from rltool.wording import did_you_mean, nearest

if TYPE_CHECKING:
    from hydra.conf import HydraConf

OF_SWEEPS = ("hydra/launcher", "hydra/sweeper")
"""Groups of Hydra's that rltool has options of its own for."""


def conf_dir() -> Path:
    """The directory of the config files that come with rltool: inside the package of a wheel, beside it in a checkout.

    Raises:
        RltoolError: the installation has lost them.
    """
    package = Path(__file__).resolve().parent
    for directory in (package / "conf", package.parent / "conf"):
        if (directory / "train.yaml").is_file():
            return directory
    raise RltoolError(f"no conf/train.yaml beside {package}. Install rltool again")


@dataclass(frozen=True)
class Option:
    """One YAML file of a group.

    Attributes:
        group, name: ``algo``, ``ppo``.
        path: the file.
        description: its first comment line.
        node: its keys, with those of the option it inherits from.
        overrides: the options of other groups that it chooses.
    """

    group: str
    name: str
    path: Path
    description: str
    node: Mapping[str, object]
    overrides: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ConfigFiles:
    """Directories of config files, in the order in which Hydra searches them: the first file of a name counts.

    Attributes:
        main: the directory of the primary configs.
        extra: the user's (``--config-dir``, ``hydra.searchpath``).
    """

    main: Path
    extra: tuple[Path, ...] = ()

    @classmethod
    def find_main(cls, extra: tuple[Path, ...] = ()) -> ConfigFiles:
        """rltool's own files and then the user's.

        Raises:
            ConfigError: a user's directory does not exist.
        """
        for directory in extra:
            if not directory.is_dir():
                raise ConfigError(Problem("--config-dir", f"there is no directory {directory}"))
        return cls(conf_dir(), extra)

    @classmethod
    def from_hydra(cls, settings: HydraConf) -> ConfigFiles:
        """The directories that a job was composed from, as its Hydra settings record them."""
        sources = [
            source
            for source in settings.runtime.config_sources
            if source.schema == "file" and source.provider != "hydra"
        ]
        main, *extra = [Path(str(source.path)) for source in sources]
        return cls(main, tuple(extra))

    @property
    def directories(self) -> tuple[Path, ...]:
        """All directories, in order."""
        return (self.main, *self.extra)

    def search_path_override(self) -> list[str]:
        """The override that makes Hydra search the user's directories; none where there are none."""
        if not self.extra:
            return []
        paths = ",".join("'" + f"file://{path}".replace("'", "\\'") + "'" for path in self.extra)
        return [f"hydra.searchpath=[{paths}]"]

    def is_group(self, name: str) -> bool:
        """Whether a key is a config group."""
        return bool(name) and any((directory / name).is_dir() for directory in self.directories)

    def groups(self) -> list[str]:
        """The groups, by name; Hydra's own are left out."""
        names = {
            path.name
            for directory in self.directories
            for path in directory.iterdir()
            if path.is_dir() and path.name != "hydra"
        }
        return sorted(name for name in names if self.options(name))

    def options(self, group: str) -> dict[str, Path]:
        """The options of a group, by name, and the file of each."""
        found: dict[str, Path] = {}
        for directory in self.directories:
            for path in sorted((directory / group).glob("*.yaml")):
                found.setdefault(path.stem, path)
        return dict(sorted(found.items()))

    def find(self, group: str, option: str) -> Path | None:
        """The file of an option."""
        for directory in self.directories:
            path = directory / group / f"{option}.yaml"
            if path.is_file():
                return path
        return None

    def read(self, group: str, option: str) -> Option:
        """An option, with what it inherits from other options of its group.

        Raises:
            ConfigError: there is no such option, or the file is no YAML mapping.
        """
        return self._read(group, option, ())

    def said(self, group: str, option: str, *, over: str) -> dict[str, object]:
        """What an option and those that it inherits from say, without ``over`` and what that one inherits.

        Raises:
            ConfigError: there is no such option, or a file is no YAML mapping.
        """
        if option == over:
            return {}
        tree = read_yaml(self.read(group, option).path)
        said: dict[str, object] = {}
        for parent in _parents(tree):
            if parent != "_self_":
                said = _merge(said, self.said(group, parent, over=over))
        return _merge(said, {key: value for key, value in tree.items() if key != "defaults"})

    def problem(self, group: str, option: str) -> Problem | None:
        """What is wrong with the choice of an option; None where it exists."""
        if self.find(group, option) is not None:
            return None
        options = list(self.options(group))
        hint = did_you_mean(nearest(option, options))
        return Problem(group, f"there is no option {option!r}", f"{hint} Options: {', '.join(options)}".strip())

    def defaults(self, name: str) -> dict[str, str]:
        """The groups in the defaults list of a primary config and the option of each; ``???`` must be chosen."""
        tree = read_yaml(self.main / f"{name}.yaml")
        return {group: option for group, option, _ in _defaults(tree)}

    def primary(self, name: str) -> dict[str, object]:
        """The values of a primary config, without its defaults list and Hydra's node."""
        tree = read_yaml(self.main / f"{name}.yaml")
        return {key: value for key, value in tree.items() if key not in ("defaults", "hydra")}

    def tuned_name(self, choice: str | None) -> str | None:
        """The tuned file of a choice; None for ``none`` and for a file that does not exist (the group is optional)."""
        return choice if choice and choice != "none" and self.find("tuned", choice) is not None else None

    def _read(self, group: str, option: str, above: tuple[str, ...]) -> Option:
        path = self.find(group, option)
        problem = self.problem(group, option)
        if option in above:
            problem = Problem(group, f"the option {option!r} inherits from itself")
        if path is None or problem is not None:
            assert problem is not None
            raise ConfigError(problem)
        tree = read_yaml(path)
        node: dict[str, object] = {}
        overrides: dict[str, str] = {}
        own = {key: value for key, value in tree.items() if key != "defaults"}
        merged_self = False
        for parent in _parents(tree):
            if parent == "_self_":
                node, merged_self = _merge(node, own), True
            else:
                base = self._read(group, parent, (*above, option))
                node = _merge(node, base.node)
                overrides |= base.overrides
        if not merged_self:
            node = _merge(node, own)
        overrides |= {name: choice for name, choice, is_override in _defaults(tree) if is_override}
        return Option(group, option, path, _description(path), node, overrides)


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """YAML as OmegaConf reads it, where 1e6 is a number (PyYAML alone makes it a string), and faster."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d[\d_]*\.?[\d_]*|\.[\d_]+)[eE][-+]?\d+$"),
    list("-+0123456789."),
)


def read_yaml(path: Path) -> dict[str, object]:
    """The mapping in a YAML file; empty where the file is.

    Raises:
        ConfigError: it cannot be read, or holds something else.
    """
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), _Loader)  # noqa: S506 (a SafeLoader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(Problem("", f"{path} is no valid YAML: {' '.join(str(error).split())}")) from error
    except OSError as error:
        raise ConfigError(Problem("", f"cannot read {path}: {error.strerror}")) from error
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(Problem("", f"expected key: value lines in {path}, found {type(tree).__name__}"))
    return tree


def read_value(text: str) -> object:
    """A value as it stands in a YAML file; the text itself where it is no YAML."""
    try:
        return cast("object", yaml.load(text, _Loader))  # noqa: S506 (a SafeLoader)
    except yaml.YAMLError:
        return text


def flat(tree: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Dotted keys and their values; lists and empty mappings are values."""
    leaves: dict[str, object] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            leaves |= flat(value, f"{name}.")
        else:
            leaves[name] = value
    return leaves


def _entries(tree: Mapping[str, object]) -> list[object]:
    entries = tree.get("defaults")
    return entries if isinstance(entries, list) else []


def _parents(tree: Mapping[str, object]) -> list[str]:
    """``_self_`` and the options of the same group that a file inherits from, in order."""
    return [entry for entry in _entries(tree) if isinstance(entry, str) and not entry.startswith("/")]


def _defaults(tree: Mapping[str, object]) -> list[tuple[str, str, bool]]:
    """(group, option, whether it overrides an earlier choice) of a defaults list; Hydra's own groups are left out."""
    found: list[tuple[str, str, bool]] = []
    for entry in _entries(tree):
        if not isinstance(entry, Mapping):
            continue
        for key, option in entry.items():
            words = str(key).split()
            group = words[-1].lstrip("/").partition("@")[0]
            if not group.startswith("hydra"):
                found.append((group, str(option), "override" in words))
    return found


def _merge(below: Mapping[str, object], above: Mapping[str, object]) -> dict[str, object]:
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        merged[key] = _merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def _description(path: Path) -> str:
    """The first comment line of a file that is no ``@package`` line."""
    for line in path.read_text(encoding="utf-8").splitlines():
        text = line.strip()
        if text.startswith("#") and not text.lstrip("# ").startswith("@package"):
            return text.lstrip("# ")
        if text and not text.startswith("#"):
            break
    return ""

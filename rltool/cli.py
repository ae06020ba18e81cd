"""``rltool <command> [key=value …]``: finds the command, takes its options apart, turns errors into lines and exit codes.

Exit codes: 0 done, 1 something went wrong, 2 a mistake in what was typed, 130 interrupted.
"""

from __future__ import annotations

import argparse
import errno
import io
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from rltool import __version__, reporting
from rltool.errors import ConfigError, Problem

if TYPE_CHECKING:
    from rltool.configfiles import ConfigFiles

# The commands and what each does, in the order of the help page; each is a module of rltool.commands.
COMMANDS = {
    "train": "train an agent",
    "eval": "evaluate checkpoints, one or several",
    "runs": "the runs there are, chosen and sorted by any column or key",
    "show": "one run on one screen: what it was, how it went, what to type next",
    "diff": "what differs between runs, and their results side by side",
    "rerun": "a new run with the configuration of another one",
    "checkpoint": "what a checkpoint holds, without importing torch",
    "doctor": "what is wrong with a run, and what to change",
    "plot": "learning curves of runs, in a file or in the terminal",
    "compare": "tables and a picture of two or more groups of runs",
    "sweep": "what the jobs of a sweep say together: the best, and how surely",
    "list": "the environments, algorithms and other options there are",
    "config": "the resolved configuration, and where each value came from",
    "env": "look at an environment: spaces, a random rollout, what is wrong with it",
    "tune-speed": "try environments, backends, threads and compilation, and print the fastest",
    "init": "a small project to start from: an environment and a network of your own",
}
# The options of each command; shell completion offers them.
OPTIONS = {
    "train": ("--help", "--multirun", "--config-dir", "--cfg", "--resolve", "--package", "--info", "--hydra-help"),
    "eval": ("--help",),
    "runs": ("--help", "--json"),
    "show": ("--help", "--json"),
    "diff": ("--help", "--json"),
    "rerun": ("--help", "--config-dir"),
    "checkpoint": ("--help", "--json"),
    "doctor": ("--help", "--json", "--rules"),
    "plot": ("--help",),
    "compare": ("--help", "--json"),
    "sweep": ("--help", "--json"),
    "list": ("--help", "--config-dir"),
    "config": ("--help", "--config-dir", "--json", "--yaml"),
    "env": ("--help", "--config-dir"),
    "tune-speed": ("--help", "--config-dir", "--seconds"),
    "init": ("--help",),
}
# Commands in which -- stands between groups of words; argparse would take it out.
_GROUPING = ("plot", "compare")
_SEPARATOR, _STAND_IN = "--", "\0"
_INTERRUPTED = 130
_BROKEN_PIPE = 141


@dataclass(frozen=True)
class Options:
    """What was typed after a command.

    Attributes:
        overrides: the words that are no options.
        multirun: several values are several runs.
        config_dir: the user's own directory of config files.
        search_path: more of them, from ``hydra.searchpath``.
        passed_on: options that only Hydra answers (``--cfg job``, ``--info``).
        flags: options of the command's own.
        seconds: how long ``tune-speed`` tries each setting.
        debug: show whole tracebacks.
    """

    overrides: tuple[str, ...]
    multirun: bool = False
    config_dir: Path | None = None
    passed_on: tuple[str, ...] = ()
    flags: frozenset[str] = frozenset()
    seconds: float = 0.0
    debug: bool = False
    search_path: tuple[Path, ...] = field(default=())

    def files(self) -> ConfigFiles:
        """Where config files lie.

        Raises:
            ConfigError: a directory that was named does not exist.
        """
        from rltool.configfiles import ConfigFiles

        return ConfigFiles.find_main((*([self.config_dir] if self.config_dir else []), *self.search_path))

    def searching(self, files: ConfigFiles) -> Options:
        """The same, with other directories of config files."""
        return replace(self, config_dir=None, search_path=files.extra)

    def for_hydra(self) -> list[str]:
        """The options as Hydra's own command line knows them."""
        words = list(self.passed_on)
        if self.multirun:
            words.append("--multirun")
        if self.config_dir is not None:
            words += ["--config-dir", str(self.config_dir)]
        if self.search_path:
            from rltool.composition import quoted

            words.append(f"hydra.searchpath=[{','.join(quoted(f'file://{path}') for path in self.search_path)}]")
        return words


def main(words: Sequence[str] | None = None) -> int:
    """The console script.

    Args:
        words: the command line without the program's name; None: that of the process.
    """
    words = list(sys.argv[1:] if words is None else words)
    # A process may be started without them (cron, daemons): what is printed then goes nowhere.
    sys.stdout, sys.stderr = (
        open(os.devnull, "w") if stream is None else stream  # noqa: SIM115 - open as long as the process
        for stream in (sys.stdout, sys.stderr)
    )
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without … or → shows a question mark instead of a crash
    command = f"rltool {words[0]}" if words and words[0] in COMMANDS else "rltool"
    try:
        code = _dispatch(words)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader (head, less) has seen enough. Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _BROKEN_PIPE
    except KeyboardInterrupt:
        print(f"{command}: interrupted", file=sys.stderr)
        return _INTERRUPTED
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except OSError as error:
        if error.errno != errno.ENOSPC or error.filename is not None:
            return reporting.show(error, command, debug=reporting.wants_traceback(words))
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print(f"{command}: what is printed cannot be written: {error.strerror}", file=sys.stderr)
        return 1
    except Exception as error:
        return reporting.show(_explained(error), command, debug=reporting.wants_traceback(words))


def _explained(error: Exception) -> Exception:
    """Hydra's and OmegaConf's errors as :class:`ConfigError`; all else as it is."""
    composition = sys.modules.get("rltool.composition")
    if composition is None or isinstance(error, ConfigError):
        return error
    from hydra.errors import HydraException, InstantiationException
    from omegaconf.errors import OmegaConfBaseException

    from rltool.composition import explain
    from rltool.configfiles import ConfigFiles

    if isinstance(error, HydraException | OmegaConfBaseException) and not isinstance(error, InstantiationException):
        explained = ConfigError(explain(error, ConfigFiles.find_main()))
        explained.__cause__ = error
        return explained
    return error


def _dispatch(words: list[str]) -> int:
    # What a user names may lie in the directory rltool is started from: plugins, env.id=my_module:MyEnv-v0.
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
    first, rest = (words[0], words[1:]) if words else ("--help", [])
    if first in ("-h", "--help", "help") and not (first == "help" and rest and rest[0] in COMMANDS):
        from rltool.help import overview

        print(overview())
        return 0
    if first == "help":
        first, rest = rest[0], ["--help"]
    if first in ("-V", "--version"):
        from rltool.runs import versions

        found = {**versions(), "rltool": __version__}
        for name in ("rltool", "torch", "torchrl", "gymnasium", "python"):
            print(f"{name} {found.get(name, 'not installed')}")
        return 0
    if first in ("-sc", "--shell-completion"):
        from rltool import completion

        return completion.answer(rest)
    if first not in COMMANDS:
        raise ConfigError(_no_command(first, rest))
    options = parse(first, rest)
    if "help" in options.flags:
        from rltool.help import page

        print(page(first, options))
        return 0
    module = import_module(f"rltool.commands.{first.replace('-', '_')}")
    code: int = module.main(options)
    return code


def _no_command(word: str, rest: Sequence[str]) -> Problem:
    from rltool.wording import did_you_mean, nearest

    commands = ", ".join(COMMANDS)
    if "=" in word or word.startswith("-"):
        return Problem(
            "", f"expected a command, found {word!r}", f"Did you mean rltool train {' '.join([word, *rest])}?"
        )
    return Problem(
        "", f"there is no command {word!r}", f"{did_you_mean(nearest(word, COMMANDS))} Commands: {commands}".strip()
    )


class _Parser(argparse.ArgumentParser):
    """argparse that raises instead of printing its usage line and leaving."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(Problem("", message, f"Options: {self.prog} --help"))


def parse(command: str, words: Sequence[str]) -> Options:
    """The options of a command, taken apart from its overrides, in any order.

    Raises:
        ConfigError: an option that the command does not have.
    """
    parser = _Parser(prog=f"rltool {command}", add_help=False, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("-h", "--help", action="store_true")
    if "--config-dir" in OPTIONS[command]:
        parser.add_argument("-cd", "--config-dir", type=Path)
    if command == "train":
        parser.add_argument("-m", "--multirun", action="store_true")
        parser.add_argument("-c", "--cfg", choices=["job", "hydra", "all"])
        parser.add_argument("--resolve", action="store_true")
        parser.add_argument("-p", "--package")
        parser.add_argument(
            "-i",
            "--info",
            nargs="?",
            const="all",
            choices=["all", "config", "defaults", "defaults-tree", "plugins", "searchpath"],
        )
        parser.add_argument("--hydra-help", action="store_true")
    if "--json" in OPTIONS[command]:
        parser.add_argument("--json", action="store_true")
    if command == "doctor":
        parser.add_argument("--rules", action="store_true")
    if command == "config":
        parser.add_argument("--yaml", action="store_true")
    if command == "tune-speed":
        parser.add_argument("--seconds", type=_seconds, default=2.0)
    if command in _GROUPING:
        words = [_STAND_IN if word == _SEPARATOR else word for word in words]
    known, unknown = parser.parse_known_intermixed_args(list(words))
    if unknown:
        raise ConfigError([_unknown_option(parser, word) for word in unknown])
    given = vars(known)
    passed: list[str] = []
    for name in ("cfg", "package", "info"):
        if given.get(name):
            passed += [f"--{name}", str(given[name])]
    passed += [f"--{name.replace('_', '-')}" for name in ("resolve", "hydra_help") if given.get(name)]
    if given.get("multirun") and passed:
        raise ConfigError(Problem("", f"expected one configuration for {passed[0]}, found --multirun", "Leave -m out"))
    config_dir = given.get("config_dir")
    overrides, search_path = _search_path([_SEPARATOR if word == _STAND_IN else word for word in given["overrides"]])
    return Options(
        overrides=tuple(overrides),
        multirun=bool(given.get("multirun")) or "hydra.mode=MULTIRUN" in overrides,
        config_dir=Path(os.path.abspath(config_dir)) if config_dir is not None else None,
        passed_on=tuple(passed),
        flags=frozenset(name for name in ("help", "json", "yaml", "rules") if given.get(name)),
        seconds=given.get("seconds", 0.0),
        debug=reporting.wants_traceback(overrides),
        search_path=search_path,
    )


def _seconds(word: str) -> float:
    with suppress(ValueError):
        if 0 < (value := float(word)) < float("inf"):
            return value
    raise argparse.ArgumentTypeError(f"expected seconds, such as 2 or 0.5, found {word!r}")


def _unknown_option(parser: argparse.ArgumentParser, word: str) -> Problem:
    from rltool.wording import did_you_mean, nearest

    name, equals, value = word.lstrip("-").partition("=")
    if equals:
        return Problem("", f"there is no option {word}", f"Values are given without dashes: {name}={value}")
    known = [option for action in parser._actions for option in action.option_strings if option.startswith("--")]
    hint = did_you_mean(nearest(f"--{name}", known)) or f"Options: {', '.join(known)}. Values are given as key=value"
    return Problem("", f"there is no option {word}", hint)


def _search_path(words: Sequence[str]) -> tuple[list[str], tuple[Path, ...]]:
    """The overrides without ``hydra.searchpath=[…]``, and the directories of that list."""
    rest: list[str] = []
    directories: list[Path] = []
    for word in words:
        if not word.startswith("hydra.searchpath="):
            rest.append(word)
            continue
        from hydra.core.override_parser.overrides_parser import OverridesParser

        value = OverridesParser.create().parse_override(word).value()
        for path in value if isinstance(value, list) else [value]:
            if str(path).startswith("pkg://"):
                from importlib.resources import files

                directories.append(Path(str(files(str(path).removeprefix("pkg://")))))
            else:
                directories.append(Path(os.path.abspath(str(path).removeprefix("file://"))))
    return rest, tuple(directories)

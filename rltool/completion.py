"""Shell completion: ``eval "$(rltool -sc install=bash)"``. Hydra completes overrides; commands and options are ours."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress

import hydra
from omegaconf import DictConfig

from rltool.cli import COMMANDS, OPTIONS, parse
from rltool.composition import VERSION_BASE
from rltool.configfiles import ConfigFiles
from rltool.errors import ConfigError, Problem

# The primary config whose keys a command takes; the others take words of their own.
_PRIMARY = {"train": "train", "config": "train", "eval": "eval", "env": "env", "tune-speed": "train"}
# Those that take a run, by its name or its path.
_OF_RUNS = ("show", "diff", "rerun", "checkpoint", "doctor")
_USAGE = "Give install=bash, uninstall=bash (zsh reads the same script through bashcompinit) or install=fish"


def answer(words: Sequence[str]) -> int:
    """``-sc install=SHELL | uninstall=SHELL | query=SHELL``: prints a script, or the words that fit what is being typed.

    Raises:
        ConfigError: none of the three.
    """
    action, _, shell = (words[0] if words else "").partition("=")
    if action not in ("install", "uninstall", "query") or shell not in ("bash", "fish"):
        raise ConfigError(
            Problem("--shell-completion", f"expected what to do and a shell, found {' '.join(words)!r}", _USAGE)
        )
    if action != "query":
        _hydra("train", words)
        return 0
    line = os.environ.get("COMP_LINE", "")
    typed = line.split()[1:]
    current = "" if not typed or line.endswith(" ") else typed[-1]
    with suppress(ConfigError):  # half a command line is often wrong, and a prompt is no place for messages
        _complete(typed[: len(typed) - bool(current)], current, words)
    return 0


def _complete(before: Sequence[str], current: str, words: Sequence[str]) -> None:
    """Prints the words that may stand where ``current`` is being typed.

    Args:
        before: the words before it, without the program's name.
        current: what has been typed of it.
        words: what Hydra's completion was called with.
    """
    if not before:
        print(" ".join(command for command in COMMANDS if command.startswith(current)))
        return
    command, *rest = before
    if command not in COMMANDS:
        return
    if current.startswith("-"):
        print(" ".join(option for option in OPTIONS[command] if option.startswith(current)))
        return
    options = parse(command, rest)
    files = options.files()
    if command == "init":
        return  # a name that is not there yet
    if command == "runs":
        from rltool.selection import COLUMNS

        keys = [f"{name}=" for name in (*COLUMNS, "sort", "limit", "columns")]
        print(" ".join(key for key in keys if key.startswith(current)))
        return
    if command in _OF_RUNS:  # paths the shell completes itself
        print(" ".join(name for name in _run_names() if name.startswith(current)))
        return
    if command == "sweep":
        print(" ".join(name for name in _sweep_names() if name.startswith(current)))
        return
    if command in ("plot", "compare"):  # keys; paths are completed by the shell
        keys = [f"{key}=" for key in files.primary(command)]
        print(" ".join(key for key in keys if key.startswith(current)))
        return
    if command == "list":
        print(" ".join(group for group in files.groups() if group.startswith(current)))
        return
    # Hydra completes keys only of a configuration that it can compose: any option will do where none is chosen yet.
    name = _PRIMARY[command]
    chosen = {word.partition("=")[0] for word in options.overrides}
    choices = [
        f"{group}={next(iter(files.options(group)))}"
        for group, option in files.defaults(name).items()
        if option == "???" and group not in chosen
    ]
    multirun = ["-m"] if options.multirun else []
    overrides = [word for word in options.overrides if "=" in word]  # paths are words of their own
    os.environ["COMP_LINE"] = " ".join(["rltool", *multirun, *choices, *overrides, current])
    directory = ["--config-dir", str(options.config_dir)] if options.config_dir is not None else []
    _hydra(name, [*words, *directory])


def _run_names() -> list[str]:
    from rltool.records import RUNS, find_runs, names

    return names(find_runs([RUNS])) if RUNS.is_dir() else []


def _sweep_names() -> list[str]:
    from rltool.records import RUNS, find_sweeps

    return [str(path) for path in find_sweeps(RUNS)]


def _hydra(name: str, words: Sequence[str]) -> None:
    before = sys.argv
    sys.argv = ["rltool", "-sc", *words]
    try:
        hydra.main(config_path=str(ConfigFiles.find_main().main), config_name=name, version_base=VERSION_BASE)(
            _no_task
        )()
    finally:
        sys.argv = before


def _no_task(tree: DictConfig) -> None:
    """Hydra wants a task; completion never runs it."""
    del tree

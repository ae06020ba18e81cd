"""Each kind of job built once, in a process of its own, before the first one starts: an algorithm that cannot act in an
environment, a GPU that is not there, weights that do not fit are found here, and not by fifty jobs one after the other.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import cast

from pydantic import JsonValue

from rltool.config import load
from rltool.errors import CheckpointError, ConfigError, Problem
from rltool.figures import counted
from rltool.sweeps.processes import Order, kill, several, surroundings

_Config = Mapping[str, JsonValue]

# What decides whether the parts of a run fit together: nodes and keys, and groups of which the kind does.
_PARTS = ("env", "network", "init", "device", "plugins")
_KINDS = ("algo", "buffer", "optim")
# Seconds after which the jobs are left to find out for themselves.
_PATIENCE = 300.0


def rehearse(configs: Sequence[_Config], *, here: bool) -> None:
    """Builds what runs are made of; of runs with the same parts one is built.

    Args:
        configs: their checked configurations, as JSON.
        here: whether they run on this machine; if not, what GPUs there are is no matter of this one.

    Raises:
        ConfigError: what is wrong with them that only building them shows.
    """
    kinds = list({_kind(config): config for config in configs}.values())
    if not here:
        kinds = [{**config, "device": "cpu"} for config in kinds]
    if problems := _built(kinds) if kinds else []:
        raise ConfigError(problems)


def _built(kinds: Sequence[_Config]) -> list[Problem]:
    """What is wrong with each of these, found out by building it in a process of its own."""
    _say(f"building {counted(len(kinds), 'kind')} of job once, before the first one starts")
    with tempfile.TemporaryDirectory() as directory:
        asked, told, output = (Path(directory, name) for name in ("configs.json", "problems.json", "output.txt"))
        asked.write_text(json.dumps(kinds), encoding="utf-8")
        process = several()(Order(__name__, (str(asked), str(told), str(Path.cwd())), surroundings(1), output))
        try:
            code = process.wait(_PATIENCE)
        finally:
            kill(process)  # with those of its environments
            process.let_go()
        if code is None:
            _say(f"the jobs could not be built within {_PATIENCE:g} s: each tries for itself")
            return []
        if code:  # an environment has ended the process
            last = output.read_text(encoding="utf-8", errors="replace").strip().rpartition("\n")[2]
            _say(f"building the jobs ended with exit code {code} ({last}): each tries for itself")
            return []
        return [Problem(*of) for of in json.loads(told.read_text(encoding="utf-8"))]


def _say(text: str) -> None:
    print(text, flush=True)


def _kind(config: _Config) -> str:
    kinds = [cast("_Config", config[name])["kind"] for name in _KINDS]
    return json.dumps([[config.get(name) for name in _PARTS], kinds], sort_keys=True)


def main(words: Sequence[str]) -> None:
    """Builds runs and writes down their problems.

    Args:
        words: the file with the configurations, the one for the problems, and the directory where the user's own modules lie.
    """
    asked, told, origin = words
    if origin not in sys.path:
        sys.path.append(origin)
    from rltool import training

    problems: list[Problem] = []
    for config in json.loads(Path(asked).read_text(encoding="utf-8")):
        try:
            training.rehearse(load(config))
        except ConfigError as error:
            problems += error.problems
        except CheckpointError as error:
            problems.append(Problem("init", str(error)))
        except Exception as error:  # what an environment does may be another thing the next time, or elsewhere
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
    Path(told).write_text(json.dumps([astuple(problem) for problem in dict.fromkeys(problems)]), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])

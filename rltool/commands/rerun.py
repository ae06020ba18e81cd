"""``rltool rerun``: a new run with the configuration of another one, and what is typed laid over it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rltool import launch
from rltool.composition import read_overrides
from rltool.errors import ConfigError, Problem
from rltool.launch import Claim, read_rerun
from rltool.records import read_run
from rltool.runs import shown
from rltool.stopping import ending_tidily

if TYPE_CHECKING:
    from rltool.cli import Options


def main(options: Options) -> int:
    """Trains; returns the exit code.

    Raises:
        ConfigError: not one run was given, there is none, or what was typed does not fit it.
    """
    with ending_tidily():
        return _main(options)


def _main(options: Options) -> int:
    named = [word for word in options.overrides if "=" not in word and not word.startswith("~")]
    if len(named) != 1:
        found = " ".join(named) or "none"
        raise ConfigError(Problem("", f"expected one run, found {found}", "rltool runs lists those there are"))
    record, files = read_run(Path(named[0])), options.files()
    words = [word for word in options.overrides if word != named[0]]
    line = read_overrides(words, files, choices_allowed=False, several="A rerun is one run")
    rerun = read_rerun(record, line, files)
    if not (rerun.config.quiet and line.get("quiet") is not None):  # the run's own quiet hides no change
        same = "" if rerun.changes else " with the same configuration"
        print("\n".join([f"running {shown(record.path)} anew{same}", *launch.told(rerun.changes)]), flush=True)
    for text in rerun.warnings():
        print(f"warning: {text}", file=sys.stderr)
    claim = Claim.make(rerun.directory)
    try:
        launch.start(rerun.config, claim.path, rerun.overrides, rerun.tuned)
    finally:
        claim.give_back()
    return 0

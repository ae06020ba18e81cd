"""``rltool sweep``: what the jobs of a sweep say together, at any time, also while they run."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rltool.commands.list import grid
from rltool.errors import ConfigError, Problem
from rltool.records import RUNS, find_sweeps, is_sweep, located
from rltool.runs import shown
from rltool.sweeps.jobs import Sweep
from rltool.wording import did_you_mean

if TYPE_CHECKING:
    from rltool.cli import Options


def main(options: Options) -> int:
    """Prints the answer and writes it into the sweep's directory; without one, lists the sweeps. Returns the exit code.

    Raises:
        ConfigError: there is no such sweep, or several are called so.
    """
    as_json = "json" in options.flags
    if not options.overrides:
        return _list(as_json=as_json)
    if len(options.overrides) > 1:
        raise ConfigError(Problem("", f"expected one sweep, found {' '.join(options.overrides)}"))
    sweep = Sweep.read(_found(options.overrides[0]))
    from rltool.sweeps.answer import answer
    from rltool.sweeps.report import exit_code, report, write

    if not as_json:
        return report(sweep, final=False)
    found = answer(sweep)
    written, trouble = write(found, final=False)
    print(json.dumps({**found.to_json(), "files": written, "missing": trouble}, indent=2, ensure_ascii=False))
    return exit_code(found)


def _found(word: str) -> Path:
    """The directory of a sweep: by its path, or by the end of its name.

    Raises:
        ConfigError: there is none, or several are called so; says which may be meant.
    """
    path = located(word)
    if is_sweep(path):
        return path
    if not path.exists():
        raise ConfigError(Problem("", f"there is no {word}", "rltool sweep lists the sweeps there are"))
    near = [one for one in path.absolute().parents if is_sweep(one)][:1] or find_sweeps(path)[:2]
    hint = did_you_mean([shown(one) for one in near]) or "rltool sweep lists the sweeps there are"
    raise ConfigError(Problem("", f"expected the directory of a sweep, found none in {word}", hint))


def _list(*, as_json: bool) -> int:
    """The sweeps below runs/, the newest first."""
    sweeps = []
    for path in find_sweeps(RUNS):
        try:
            sweeps.append(Sweep.read(path))
        except ConfigError as error:
            print(f"warning: left out: {error}", file=sys.stderr)
    counts = [Counter(job.status for job in sweep.jobs) for sweep in sweeps]
    if as_json:
        rows = [
            {"path": str(sweep.path), "kind": sweep.kind, "varied": list(sweep.varied), "statuses": dict(statuses)}
            for sweep, statuses in zip(sweeps, counts, strict=True)
        ]
        print(json.dumps(rows, indent=2, ensure_ascii=False))
    elif not sweeps:
        print(f"no sweeps in {RUNS}; rltool train -m … makes them")
    else:
        print("\n".join(_table(sweeps, counts)))
    return 0


def _table(sweeps: Sequence[Sweep], counts: Sequence[Counter[str]]) -> list[str]:
    rows = [
        (
            shown(sweep.path),
            sweep.kind,
            ", ".join(f"{number} {status}" for status, number in statuses.most_common()),
            ", ".join(sweep.varied),
        )
        for sweep, statuses in zip(sweeps, counts, strict=True)
    ]
    return grid(("sweep", "kind", "jobs", "varied"), rows)

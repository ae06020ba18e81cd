"""Throws changed configurations and changed checkpoint files at rltool, and counts what comes of them.

    python benchmarks/fuzz.py [--inputs 100000] [--first 0]

Each input must be taken, or refused by the error that names the key or the file; anything else is shown with its number
and its traceback, and the exit code is 1. The inputs are those of tests/fuzzing.py. Every tenth checkpoint whose header is
taken is loaded as a policy, too, and each buffer into an empty buffer.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
os.environ["OMP_NUM_THREADS"] = "1"

SHOWN = 5  # tracebacks of crashes


def count(name: str, inputs: range, judge: Callable[[int], bool]) -> int:
    """Judges every input, prints a row, returns how many did what none may."""
    found: Counter[str] = Counter()
    begin = time.perf_counter()
    for number in inputs:
        try:
            found["accepted" if judge(number) else "refused"] += 1
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            found["other"] += 1
            if found["other"] <= SHOWN:
                print(f"{name} {number}:\n{traceback.format_exc()}", file=sys.stderr)
    seconds = time.perf_counter() - begin
    row = (len(inputs), found["accepted"], found["refused"], found["other"])
    print(f"| {name} | {' | '.join(f'{cell:,}' for cell in row)} | {seconds:,.0f} |", flush=True)
    return found["other"]


def main() -> int:
    """Runs the command; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=100_000, help="of each kind")
    parser.add_argument("--first", type=int, default=0, help="number of the first")
    options = parser.parse_args()
    inputs = range(options.first, options.first + options.inputs)

    from fuzzing import Files, Reader, Trees, loads
    from probes import run

    with tempfile.TemporaryDirectory() as directory:
        os.environ["XDG_STATE_HOME"] = directory
        run(Path(directory) / "run", "dqn", "total_frames=400")
        files, reader, trees = Files.of(Path(directory) / "run"), Reader(Path(directory), every=10), Trees.make()
        print("\n| what | inputs | accepted | refused | other | seconds |\n|---|---|---|---|---|---|")
        other = count("configuration", inputs, lambda number: loads(trees(number)))
        other += count("checkpoint", inputs, lambda number: reader(*files(number)))
    return int(other > 0)


if __name__ == "__main__":
    sys.exit(main())

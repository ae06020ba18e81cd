"""Where the time of a run goes: microseconds a frame, and the share, of each part of the loop, for any configuration.

    python benchmarks/shares.py algo=ppo env=inverted_double_pendulum total_frames=100_000
    python benchmarks/shares.py algo=dqn env=cartpole tuned=none --skip 0.5

The arguments are those of ``rltool train``. The parts are timed from outside, by wrapping the functions that do the work;
the wrappers cost about a microsecond a call, which belongs to the part that calls. What happens before ``--skip`` of the
budget is over (start-up, compilation, random warm-up) is left out.
"""

from __future__ import annotations

import argparse
import functools
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import rltool
from rltool import recording
from rltool.actions import ActionSpec
from rltool.algos.base import Algorithm
from rltool.algos.ppo import PPO
from rltool.algos.replaying import ReplayedAlgorithm
from rltool.buffers import ReplayBuffer, RolloutBuffer
from rltool.collect import Collector, Explorer
from rltool.nets import Preprocessor
from rltool.optim import Optimizer
from rltool.vectorized import VectorEnvBase

with suppress(ImportError):  # so that they are among the subclasses
    import rltool.envpool_env
    import rltool.vector_version

# What is wrapped, the part that it counts as, in the order of the loop. Time inside an inner part is not its outer part's.
PARTS: list[tuple[str, type, tuple[str, ...]]] = [
    ("collecting: storage and the loop itself", Collector, ("collect",)),
    ("collecting: actions to the environment's units", ActionSpec, ("to_env",)),
    ("update: returns, advantages, values", PPO, ("prepare",)),
    ("update: storing", ReplayBuffer, ("extend",)),
    ("update: network inputs of minibatches", ReplayedAlgorithm, ("columns",)),
    ("update: optimiser", Optimizer, ("step",)),
    ("update: observation statistics", Preprocessor, ("update",)),
    ("update: the loop itself", Algorithm, ("update",)),
    ("logging", recording.Recorder, ("batch", "log", "show", "log_rest")),
    ("evaluation", recording.Recorder, ("evaluate",)),
    ("saving", recording.Recorder, ("save", "save_last")),
]
STEPPING, POLICY, GRADIENT, SAMPLING = (
    "collecting: environments",
    "collecting: policy",
    "update: loss and gradient",
    "update: sampling",
)


class Account:
    """Seconds by part; a part's time is its own, without that of the parts called from it."""

    def __init__(self) -> None:
        self.spent: defaultdict[str, float] = defaultdict(float)
        self.calls: defaultdict[str, int] = defaultdict(int)
        self._inner = [0.0]
        self._begin = time.perf_counter()

    def clear(self) -> None:
        """Forgets what came before."""
        self.spent.clear()
        self.calls.clear()
        self._begin = time.perf_counter()

    @property
    def total(self) -> float:
        """Seconds since :meth:`clear`."""
        return time.perf_counter() - self._begin

    def with_rest(self, total: float) -> dict[str, float]:
        """Seconds by part, and what no part accounts for."""
        return {**self.spent, "rest": total - sum(self.spent.values())}

    @contextmanager
    def _part(self, part: str) -> Iterator[None]:
        self._inner.append(0.0)
        begin = time.perf_counter()
        try:
            yield
        finally:
            whole = time.perf_counter() - begin
            self.spent[part] += whole - self._inner.pop()
            self.calls[part] += 1
            self._inner[-1] += whole

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, its time counted."""

        @functools.wraps(function, updated=())
        def call(*args: Any, **kwargs: Any) -> Any:
            with self._part(part):
                return function(*args, **kwargs)

        return call

    def timed_iterator(self, part: str, function: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
        """The generator function, the time to each of its items counted."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Iterator[Any]:
            items = function(*args, **kwargs)
            while True:
                with self._part(part):
                    item = next(items, items)
                if item is items:
                    return
                yield item

        return call


class TimedExplorer:
    """An explorer, its calls counted. (The class itself is left alone: a compiled graph may hold another's call.)"""

    def __init__(self, account: Account, explorer: Explorer) -> None:
        self.draw = account.timed(POLICY, explorer.draw)
        self._call = account.timed(POLICY, explorer.__call__)

    def __call__(self, leaves: Any, noise: Any) -> Any:
        """The actions."""
        return self._call(leaves, noise)


def subclasses(cls: type) -> Iterator[type]:
    """A class and all below it."""
    yield cls
    for below in cls.__subclasses__():
        yield from subclasses(below)


def instrument(account: Account) -> None:
    """Wraps every part."""
    for part, owner, names in PARTS:
        for cls in subclasses(owner):
            for name in names:
                if name in vars(cls) and not getattr(vars(cls)[name], "__isabstractmethod__", False):
                    setattr(cls, name, account.timed(part, vars(cls)[name]))
    for cls in subclasses(VectorEnvBase):
        if "step" in vars(cls) and cls is not VectorEnvBase:
            cls.step = account.timed(STEPPING, vars(cls)["step"])
    explorer = cast("property", Algorithm.explorer).fget
    assert explorer is not None
    Algorithm.explorer = property(lambda algorithm: TimedExplorer(account, explorer(algorithm)))  # type: ignore[method-assign]
    for buffer, name in ((RolloutBuffer, "epoch"), *((cls, "draw") for cls in subclasses(ReplayBuffer))):
        if name in vars(buffer):
            setattr(buffer, name, account.timed_iterator(SAMPLING, vars(buffer)[name]))


def watch(account: Account, skip: float) -> list[int]:
    """Wraps what each run builds anew, and clears the account when ``skip`` of the budget is over; [frames then, in all]."""
    collect, seen = Collector.collect, [0, 0]
    ready: set[int] = set()

    def collected(self: Collector) -> Any:
        if id(self) not in ready:
            ready.add(id(self))
            algorithm: Any = self._behaviour
            algorithm._gradient = account.timed(GRADIENT, algorithm._gradient)
        if seen[0] == 0 and self.frames >= skip * self.total_frames:
            account.clear()
            seen[0] = self.frames
        batch = collect(self)
        seen[1] = self.frames
        return batch

    Collector.collect = collected  # type: ignore[method-assign]
    return seen


def table(account: Account, frames: int, total: float) -> str:
    """Parts, microseconds a frame, shares and calls, as Markdown."""
    spent = account.with_rest(total)
    lines = ["| part | µs a frame | share | calls | µs a call |", "|---|---|---|---|---|"]
    for part, seconds in sorted(spent.items(), key=lambda item: -item[1]):
        calls = account.calls.get(part, 0)
        each = f"{seconds / calls * 1e6:,.1f}" if calls else ""
        lines.append(f"| {part} | {seconds / frames * 1e6:,.1f} | {seconds / total:.1%} | {calls or ''} | {each} |")
    lines.append(f"| all | {total / frames * 1e6:,.1f} | | | |")
    return "\n".join(lines)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="+", help="what would follow `rltool train`")
    parser.add_argument("--skip", type=float, default=0.25, help="share of the budget that is not looked at")
    parser.add_argument("--json", type=Path, help="write the microseconds a frame of each part here, too")
    arguments = parser.parse_intermixed_args()
    account = Account()
    instrument(account)
    seen = watch(account, arguments.skip)
    with tempfile.TemporaryDirectory() as directory:
        rltool.train(*arguments.words, "quiet=true", f"hydra.run.dir={directory}/run")
    frames, total = seen[1] - seen[0], account.total
    print(f"{frames:,} frames, {frames / total:,.0f} a second\n\n{table(account, frames, total)}")
    if arguments.json:
        costs = {part: seconds / frames * 1e6 for part, seconds in account.with_rest(total).items()}
        arguments.json.write_text(json.dumps(costs))


if __name__ == "__main__":
    main()

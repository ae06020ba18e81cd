"""Sweeps as they lie on disk, written by hand: what their jobs scored is known."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from compositions import run_config
from fakes import fake_run
from pydantic import JsonValue

from rltool.configfiles import read_value
from rltool.sweeps.jobs import Sweep, SweepJob

BASE = ("algo=ppo", "env=cartpole", "tuned=none")


class Made:
    """A sweep in the making.

    Args:
        path: its directory.
        varied: the keys that its jobs differ in.
        base: words that all jobs have in common.
        kind, details: of the sweep.
    """

    def __init__(
        self,
        path: Path,
        varied: Sequence[str] = ("optim.lr", "seed"),
        *,
        base: Sequence[str] = BASE,
        kind: str = "grid",
        details: Mapping[str, JsonValue] | None = None,
    ) -> None:
        self.path, self.base = path, tuple(base)
        path.mkdir(parents=True)
        Sweep(path, kind, (*base, "hydra.sweep.dir=elsewhere"), tuple(varied), details or {}).write()

    @property
    def sweep(self) -> Sweep:
        """As it lies there."""
        return Sweep.read(self.path)

    def job(
        self,
        name: str,
        words: str,
        score: float | None = None,
        *,
        status: str | None = "finished",
        curve: Sequence[tuple[int, float]] = (),
        fresh: float | None = None,
        error: str | None = None,
        trial: int | None = None,
    ) -> None:
        """Adds a job.

        Args:
            name: of its directory.
            words: what it varies, with blanks between.
            score: of its last evaluation, at frame 1000.
            status: of its run; ``killed``: it has no summary; None: it waits.
            curve: evaluations before that, frames and means.
            fresh: mean of the last policy on fresh episodes.
            error: what ended it.
            trial: of a search.
        """
        given = words.split()
        values = {key: read_value(value) for key, _, value in (word.partition("=") for word in given)}
        config = run_config(*self.base, *given).model_dump(mode="json")
        job = SweepJob(self.path / name, (*self.base, *given), values, config, None, trial)  # type: ignore[arg-type]
        job.write()
        if status is None:
            return
        (self.path / name / "console.log").write_text(f"{error}\n" if error else "")
        evaluations = [*curve, *([(1000, score)] if score is not None else [])]
        fake_run(
            job.directory, evaluations, seed=config["seed"], env=config["env"]["id"], algo=config["algo"]["kind"],
            status=None if status == "killed" else status, fresh=fresh, error=error,
        )  # fmt: skip
        (job.directory / "config.yaml").write_text(json.dumps(config))

    def grid(self, scores: Mapping[str, Sequence[float]]) -> None:
        """Adds finished jobs: of each configuration one for each score, with seeds 0, 1, …"""
        jobs = [(words, seed, score) for words, of in scores.items() for seed, score in enumerate(of)]
        for number, (words, seed, score) in enumerate(jobs):
            self.job(str(number), f"{words} seed={seed}", score)

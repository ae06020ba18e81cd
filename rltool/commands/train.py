"""``rltool train``: one run, a multirun, or a run that continues."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, cast

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from rltool import launch, reporting
from rltool.composition import VERSION_BASE, Line, quoted, read_overrides, searching
from rltool.config import load
from rltool.configfiles import ConfigFiles
from rltool.errors import ConfigError, Problem
from rltool.launch import Claim, Job, check_jobs, read_resumption
from rltool.stopping import ending_tidily

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rltool.cli import Options

COMMAND = "rltool train"


@dataclass
class _Session:
    """What one call of the command knows and Hydra does not carry: what was typed, and how each job ended.

    Hydra calls :func:`run` itself and returns nothing, so this lies beside it. A launcher that runs jobs in other
    processes finds no session there; :func:`run` then raises, so that the launcher learns of a failure.
    """

    typed: tuple[str, ...]
    debug: bool
    jobs: int = 1
    swept: frozenset[str] = frozenset()
    codes: dict[int, int] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    process: int = field(default_factory=os.getpid)

    @property
    def code(self) -> int:
        """0; 2 where all that failed was the user's; else 1."""
        failed = {code for code in self.codes.values() if code}
        return failed.pop() if len(failed) == 1 else int(bool(failed))


_session: _Session | None = None


def main(options: Options) -> int:
    """Runs the command; returns the exit code."""
    with ending_tidily():
        return _main(options)


def _main(options: Options) -> int:
    files = options.files()
    resume = any(word.partition("=")[0].lstrip("+") == "resume" for word in options.overrides)
    line = read_overrides(options.overrides, files, multirun=options.multirun, choices_allowed=not resume)
    if line.resume is not None:
        return _resume(options, line, files)
    if resume:
        line = read_overrides(options.overrides, files, multirun=options.multirun)
    if options.passed_on:
        if line.problems and options.passed_on != ("--hydra-help",):
            raise ConfigError(line.problems)
        _hydra(options, line.words, files)
        return 0
    jobs = check_jobs(line, files, multirun=options.multirun)
    key = "hydra.sweep.dir" if options.multirun else "hydra.run.dir"
    first = jobs[0].composition
    claim = Claim.make(first.sweep_directory if options.multirun else first.run_directory)
    words = [one.hydra for one in line.typed if one.key not in ("hydra.run.dir", "hydra.sweep.dir")]
    try:
        with _as_session(_Session(tuple(options.overrides), options.debug, len(jobs), _varying(jobs))) as session:
            try:
                _hydra(options, [*words, f"{key}={quoted(str(claim.path))}"], files)
            finally:
                if options.multirun:
                    _end_of_sweep(session, claim.path)
            return session.code
    finally:
        claim.give_back()


def _varying(jobs: Sequence[Job]) -> frozenset[str]:
    """The keys whose values differ between the jobs of a sweep."""
    values: dict[str, set[str]] = {}
    for job in jobs:
        for word in job.words:
            key, _, value = word.partition("=")
            values.setdefault(key.lstrip("+"), set()).add(value)
    return frozenset(key for key, different in values.items() if len(different) > 1)


@contextmanager
def _as_session(session: _Session) -> Iterator[_Session]:
    global _session
    before, _session = _session, session
    try:
        yield session
    finally:
        _session = before


def _hydra(options: Options, words: Sequence[str], files: ConfigFiles) -> None:
    """Hands over to Hydra, which calls :func:`run` once or, in a multirun, once a job."""
    before_argv, before_error = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    # Hydra reads sys.argv. HYDRA_FULL_ERROR makes it raise instead of printing and leaving by itself.
    sys.argv = [COMMAND, *options.for_hydra(), *words]
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        with searching(files):
            hydra.main(config_path=str(files.main), config_name="train", version_base=VERSION_BASE)(run)()
    finally:
        sys.argv = before_argv
        if before_error is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = before_error


def run(tree: DictConfig) -> float | None:
    """Hydra's task: one run in its own directory; returns the objective, for sweepers that look for the best."""
    settings = HydraConfig.get()
    directory = Path(settings.runtime.output_dir)
    words = [str(word).lstrip("+") for word in settings.overrides.task]
    session = _session if _session is not None and _session.process == os.getpid() else None
    job: int | None = None
    if session is not None and session.jobs > 1:
        job = int(settings.job.num)
        session.names[job] = " ".join(word for word in words if word.partition("=")[0] in session.swept)
        print(f"job {job}: {session.names[job]} ({job + 1} of {session.jobs})", flush=True)
    try:
        summary = launch.start(
            load(cast("dict[str, object]", OmegaConf.to_container(tree, resolve=True, throw_on_missing=False))),
            directory,
            session.typed if session is not None and job is None else words,
            ConfigFiles.from_hydra(settings).tuned_name(settings.runtime.choices.get("tuned")),
        )
    except Exception as error:
        if session is None:
            raise
        session.codes[job or 0] = reporting.show(
            error, COMMAND if job is None else f"{COMMAND}, job {job}", debug=session.debug
        )
        return None
    if session is not None:
        session.codes[job or 0] = 0
    objective = summary.get("objective")
    return float(objective) if isinstance(objective, int | float) else None


def _end_of_sweep(session: _Session, directory: Path) -> None:
    """Says how the jobs ended; a sweep of which nothing is left leaves no directory."""
    for job in directory.glob("*/"):
        with suppress(OSError):
            job.rmdir()
    if [entry.name for entry in directory.iterdir()] == ["multirun.yaml"]:
        (directory / "multirun.yaml").unlink()
    if session.jobs > 1 and session.codes:
        failed = [f"job {job} ({session.names[job]})" for job, code in sorted(session.codes.items()) if code]
        print(f"{len(session.codes) - len(failed)} of {session.jobs} jobs finished: {directory}")
        if failed:
            print(f"failed: {', '.join(failed)}")


def _resume(options: Options, line: Line, files: ConfigFiles) -> int:
    if options.multirun:
        raise ConfigError(Problem("resume", "one run continues at a time, found -m", "Leave -m out"))
    if options.passed_on:
        raise ConfigError(Problem("resume", f"cannot be given together with {options.passed_on[0]}"))
    resumption = read_resumption(line, files)
    header, config = resumption.header, resumption.config
    if resumption.finished:
        print(
            f"{header.path} has used its budget of {config.total_frames:,} frames ({header.frames:,} collected). "
            f"Give a larger total_frames to go on."
        )
        return 0
    if not config.quiet:
        print(f"resuming {header.path} at frame {header.frames:,}")
        print("\n".join(launch.told(resumption.changes)), end="\n" if resumption.changes else "", flush=True)
    if resumption.directory is not None:
        launch.start(config, resumption.directory, options.overrides)
        return 0
    typed = line.get("hydra.run.dir")
    claim = Claim.make(
        Path(os.path.abspath(str(typed.override.value()))) if typed is not None else resumption.new_directory()
    )
    try:
        launch.start(config, claim.path, options.overrides)
    finally:
        claim.give_back()
    return 0

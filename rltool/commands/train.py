"""``rltool train``: one run, a sweep of many, or a run that continues."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from rltool import launch, reporting
from rltool.composition import VERSION_BASE, Line, quoted, read_overrides, searching
from rltool.configfiles import ConfigFiles
from rltool.errors import ConfigError, Problem
from rltool.launch import Claim, Job, check_jobs, read_resumption
from rltool.runs import program, shown
from rltool.stopping import ending_tidily
from rltool.sweeps.jobs import Sweep, is_job

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rltool.cli import Options

COMMAND = "rltool train"


@dataclass
class _Session:
    """What a single run is given and returns beside Hydra, which calls :func:`run` itself and returns nothing."""

    typed: tuple[str, ...]
    debug: bool
    job: Job
    code: int = 0


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
    if options.multirun:
        return _sweep(options, line, files)
    (job,) = check_jobs(line, files)
    claim = Claim.make(job.composition.run_directory)
    words = [one.hydra for one in line.typed if one.key != "hydra.run.dir"]
    try:
        with _as_session(_Session(tuple(options.overrides), options.debug, job)) as session:
            _hydra(options, [*words, f"hydra.run.dir={quoted(str(claim.path))}"], files)
            return session.code
    finally:
        claim.give_back()


def _sweep(options: Options, line: Line, files: ConfigFiles) -> int:
    """Runs many jobs, and says what they have found, also where a launcher gave up."""
    from rltool.sweeps.planning import planned
    from rltool.sweeps.plugins import register
    from rltool.sweeps.report import report

    typed = [*options.overrides, *(["--config-dir", str(options.config_dir)] if options.config_dir else [])]
    with planned(typed, line, files) as plan:
        path = plan.sweep.path
        print(plan.told, flush=True)
        register(plan)
        words = [one.hydra for one in line.typed if one.key != "hydra.sweep.dir"]
        try:
            _hydra(options.searching(plan.files), [*words, f"hydra.sweep.dir={quoted(str(path))}"], plan.files)
        except Exception as error:
            report(Sweep.read(path), final=True)
            return reporting.show(error, COMMAND, debug=options.debug)
        except BaseException:
            print(
                f"The same command with hydra.sweep.dir={shown(path)} goes on; {program('rltool')} sweep {shown(path)} says how far it is"
            )
            raise
        code = report(Sweep.read(path), final=plan.tuning is None or not plan.tuning.search.is_shared)
        found_nothing = plan.tuning is not None and not plan.tuning.search.best()
        return code or int(found_nothing)


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
    if is_job(directory):  # of a sweep, in a process of somebody else's launcher
        from rltool.schema import JobsConfig
        from rltool.sweeps.alone import run_alone

        config = JobsConfig.model_validate(OmegaConf.to_container(tree.sweep, resolve=True))
        return run_alone(directory, Path(settings.runtime.cwd), config, inside=bool(settings.job.chdir))
    session = _session
    assert session is not None
    try:
        # What was checked is what runs; Hydra has composed it once more.
        summary = launch.start(session.job.config, directory, session.typed, session.job.composition.tuned)
    except Exception as error:
        session.code = reporting.show(error, COMMAND, debug=session.debug)
        return None
    objective = summary.get("objective")
    return float(objective) if isinstance(objective, int | float) else None


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

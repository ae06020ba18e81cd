"""Training from Python: ``rltool.train("algo=ppo", "env=cartpole")``."""

from __future__ import annotations

import os
from pathlib import Path

from rltool.composition import read_overrides
from rltool.configfiles import ConfigFiles
from rltool.launch import Claim, check_jobs, read_resumption, start


def train(*overrides: str, config_dir: str | os.PathLike[str] | None = None) -> dict[str, object]:
    """Trains as ``rltool train`` with the same words does; returns the summary of the run.

    Args:
        overrides: ``key=value`` words; ``resume=PATH`` continues a run.
        config_dir: a directory of your own config files.

    Returns:
        What summary.json holds: ``status``, ``objective``, ``directory``, … For a resumed run that has used its budget
        already, ``{"status": "finished"}`` and the frames.

    Raises:
        ConfigError: every problem with the overrides.
        RltoolError: what went wrong during the run.
    """
    directories = (Path(os.path.abspath(config_dir)),) if config_dir is not None else ()
    files = ConfigFiles.find_main(directories)
    line = read_overrides(overrides, files)
    if line.resume is not None:
        resumption = read_resumption(read_overrides(overrides, files, choices_allowed=False), files)
        if resumption.finished:
            return {
                "status": "finished",
                "frames": resumption.header.frames,
                "directory": str(resumption.directory or ""),
            }
        if resumption.directory is not None:
            return start(resumption.config, resumption.directory, overrides)
        config, path, tuned = resumption.config, resumption.new_directory(), None
    else:
        (job,) = check_jobs(line, files)
        config, path, tuned = job.config, job.composition.run_directory, job.composition.tuned
    claim = Claim.make(path)
    try:
        return start(config, claim.path, overrides, tuned)
    finally:
        claim.give_back()

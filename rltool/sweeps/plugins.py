"""rltool's launcher and sweepers, as plugins of Hydra: ``hydra/launcher=local``, ``hydra/sweeper=grid`` and ``tune``.

Hydra instantiates plugins only by names in a package ``hydra_plugins``. That one is made in memory, so that no second package
has to be installed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, cast

from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from rltool.config import load_as
from rltool.figures import counted
from rltool.schema import SweepConfig
from rltool.sweeps.board import Board
from rltool.sweeps.children import Child
from rltool.sweeps.jobs import DONE, SweepJob
from rltool.sweeps.launchers import OURS, Elsewhere, returned, words_of
from rltool.sweeps.pool import Pool
from rltool.sweeps.processes import several

if TYPE_CHECKING:
    from rltool.sweeps.planning import Plan

_PACKAGE = "hydra_plugins"


class LocalLauncher(Launcher):
    """A process per job on this machine, as many at a time as it has room for."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Takes what Hydra gives; the jobs' own configurations are in their directories."""
        del hydra_context, task_function
        self._config = config
        self.pool = new_pool(config)

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Runs jobs to their end; how each ended stands in its directory.

        Args:
            job_overrides: of each job, its directory's name in ``hydra.sweep.subdir`` among them.
            initial_job_idx: names the directories where no override does.
        """
        sweep = Path(str(self._config.hydra.sweep.dir))
        jobs = [
            SweepJob.read(sweep / _name(words, initial_job_idx + number)) for number, words in enumerate(job_overrides)
        ]
        run_all(self.pool, jobs)
        return [returned(words, job) for words, job in zip(job_overrides, jobs, strict=True)]


class GridSweeper(Sweeper):
    """Every job that was planned, handed to the launcher at once.

    Args:
        params: more values, as in Hydra's own sweeper; they were taken into account when the jobs were planned.
    """

    def __init__(self, params: object = None) -> None:
        del params

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Makes the launcher."""
        self._launcher = launcher_of(hydra_context, task_function, config)

    def sweep(self, arguments: list[str]) -> Sequence[JobReturn]:
        """Runs the jobs that are not done."""
        del arguments
        assert _plan is not None
        jobs = [job for job in _plan.jobs if job.status not in DONE]
        if not jobs:
            return []
        if isinstance(self._launcher, LocalLauncher):
            run_all(self._launcher.pool, jobs)
            return [returned(words_of(job), job) for job in jobs]
        return self._launcher.launch(jobs)


class TuneSweeper(Sweeper):
    """A search."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Makes the launcher."""
        self._launcher = launcher_of(hydra_context, task_function, config)

    def sweep(self, arguments: list[str]) -> None:
        """Runs trials until there are enough."""
        del arguments
        assert _plan is not None
        assert _plan.tuning is not None
        if isinstance(self._launcher, LocalLauncher):
            _plan.tuning.side_by_side(self._launcher.pool)
        else:
            _plan.tuning.in_batches(self._launcher.launch)


# What the sweepers are to do: Hydra makes them itself and hands nothing of ours over.
_plan: Plan | None = None


def launcher_of(context: HydraContext, task: TaskFunction, config: DictConfig) -> LocalLauncher | Elsewhere:
    """The launcher that Hydra's whole configuration asks for."""
    if not str(config.hydra.launcher._target_).startswith(OURS):
        return Elsewhere(hydra_context=context, task_function=task, config=config)
    return cast("LocalLauncher", Plugins.instance().instantiate_launcher(context, task, config))


def new_pool(config: DictConfig) -> Pool:
    """The pool that Hydra's whole configuration asks for."""
    inside = bool(OmegaConf.select(config, "hydra.job.chdir"))
    return Pool(settings_of(config).sweep, start=partial(Child, inside=inside, start=several()))


def settings_of(config: DictConfig) -> SweepConfig:
    """What Hydra's whole configuration says of the jobs together."""
    tree = {name: OmegaConf.to_container(config[name], resolve=True) for name in SweepConfig.model_fields}
    return load_as(SweepConfig, cast("dict[str, object]", tree))


def run_all(pool: Pool, jobs: Sequence[SweepJob]) -> None:
    """Runs jobs to their end, and shows how they go."""
    for job in jobs:
        pool.add(job)
    with Board(pool, len(jobs)) as board:
        board.note(f"{counted(len(jobs), 'job')}, as many at a time as fit: {pool.limit}")
        while pool.busy:
            board.turn()


def register(plan: Plan) -> None:
    """Makes the plugins known to Hydra.

    Args:
        plan: what the sweepers are to carry out.
    """
    global _plan
    _plan = plan
    module = sys.modules.get(f"{_PACKAGE}.rltool")
    if module is None:
        try:
            import hydra_plugins  # type: ignore[import-not-found,import-untyped,unused-ignore]
        except ImportError:
            hydra_plugins = ModuleType(_PACKAGE)
            hydra_plugins.__path__ = []
            sys.modules[_PACKAGE] = hydra_plugins
        module = ModuleType(f"{_PACKAGE}.rltool")
        sys.modules[module.__name__] = module
        hydra_plugins.rltool = module
    for plugin in (LocalLauncher, GridSweeper, TuneSweeper):
        plugin.__module__ = module.__name__
        setattr(module, plugin.__name__, plugin)
        Plugins.instance().register(plugin)


def _name(words: Sequence[str], number: int) -> str:
    found = [word.partition("=")[2].strip("'") for word in words if word.startswith("hydra.sweep.subdir=")]
    return found[-1] if found else str(number)

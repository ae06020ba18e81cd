"""What a run leaves behind: metrics, evaluations, checkpoints, and the summary that says how it ended."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Collection, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from rltool import checkpoint
from rltool.checkpoint import BEST, LAST, Saver, State, random_state
from rltool.errors import EnvironmentFault, NonFiniteError, Overtime, RltoolError, WriteError
from rltool.evaluation import EvalReport, Evaluator, Limit, Stopped
from rltool.figures import counted
from rltool.memory import resident_memory
from rltool.metrics import Meter, Metrics, due
from rltool.runs import RunDirectory, program, shown, versions
from rltool.seeding import Stream

if TYPE_CHECKING:
    from rltool.algos.base import Algorithm
    from rltool.collect import Collector
    from rltool.console import Console
    from rltool.determinism import Determinism
    from rltool.health import Checkup, Finding
    from rltool.logs import HealthLog, Logger
    from rltool.schema import RunConfig
    from rltool.video import Film

# What a policy consists of: these components of an algorithm.
POLICY = ("policy", "normalizer")
VIDEOS = "videos"
# A loss or a gradient that is not finite ends the run; looked at whenever numbers come to the host anyway.
WATCHED = ("train/loss", "train/grad_norm")
# What shapes learning: the hyper-parameters. The rest of the configuration says where things go and what is shown.
_LEARNING = ("env", "algo", "network", "buffer", "optim", "total_frames", "seed")
# Episodes at the end of a run take the frames of the run over this, at most: a small share of its time.
_FRESH_SHARE = 5


class Clock:
    """Seconds spent on each part of the loop, by laps: each lap is the time since the one before."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._last = self.started = now()
        self._spent: dict[str, float] = {}
        self._whole: dict[str, float] = {}

    def lap(self, part: str) -> None:
        """Ends a lap and adds it to a part."""
        now = self._now()
        for spent in (self._spent, self._whole):
            spent[part] = spent.get(part, 0.0) + now - self._last
        self._last = now

    def shares(self) -> dict[str, float]:
        """Share of each part in the time since the last call, as ``time/<part>_share``."""
        total = sum(self._spent.values())
        shares = {f"time/{part}_share": spent / total for part, spent in self._spent.items()} if total > 0 else {}
        self._spent = {}
        return shares

    def all_shares(self) -> dict[str, float]:
        """Share of each part in all laps so far, the largest first."""
        total = max(sum(self._whole.values()), 1e-9)
        parts = sorted(self._whole.items(), key=lambda part: -part[1])
        return {part: round(spent / total, 7) for part, spent in parts}

    def in_words(self) -> str:
        """The same; those below half a percent are left out."""
        return ", ".join(f"{part} {share:.0%}" for part, share in self.all_shares().items() if share > 0.005)

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return self._now() - self.started


@dataclass(frozen=True)
class Best:
    """The best evaluation so far."""

    mean: float
    frames: int
    cut: int | None = None  # episodes cut at eval.max_steps; checkpoints do not keep it


class Recorder:
    """Records a run while the loop goes on; all methods take the state as it is now.

    Args:
        config: the run's configuration.
        algorithm, collector: what is recorded.
        evaluator: evaluates it, where the configuration asks for that.
        camera: evaluates it in an environment that draws, where the configuration asks for videos.
        meter: gathers the metrics of an interval.
        logger, console, saver: where records go.
        home: the run's directory.
        identity: the part of a checkpoint's state that does not change while this process runs.
        restored: the state that a resumed run starts from.
        typed: dotted keys that were typed, or swept over.
        determinism: says whether the run repeats.
        checkup: looks for faults, with the points of earlier sessions.
        health: where they are written.
    """

    def __init__(
        self,
        config: RunConfig,
        algorithm: Algorithm,
        collector: Collector,
        evaluator: Evaluator | None,
        camera: Evaluator | None = None,
        *,
        meter: Meter,
        logger: Logger,
        console: Console,
        saver: Saver,
        home: RunDirectory,
        identity: dict[str, object],
        restored: State | None,
        typed: Collection[str],
        determinism: Determinism,
        checkup: Checkup,
        health: HealthLog,
    ) -> None:
        self.config, self._typed, self._determinism = config, typed, determinism
        self._algorithm, self._collector, self._evaluator = algorithm, collector, evaluator
        self._camera, self._unfilmed = camera, 0
        self._logger, self._console, self._saver, self._home = logger, console, saver, home
        self._identity = identity
        self.meter = meter
        self.clock = Clock()
        self._start = self._timed = collector.frames
        self._timed_at = self.clock.elapsed
        self.best = None if restored is None or restored.best is None else Best(**restored.best)  # type: ignore[arg-type]
        if self.best is not None:
            console.restore_best(self.best.frames, self.best.mean)
        self.in_a_row = 0 if restored is None else restored.solved
        self._before = 0.0 if restored is None else restored.seconds
        threshold = None if evaluator is None else evaluator.threshold
        self._reached = self.best is not None and threshold is not None and self.best.mean >= threshold
        self.report: EvalReport | None = None
        self._report_frames = self._tried = -1
        # Where the last process evaluated, and was killed before it wrote the summary.
        self._evaluated = restored.frames if restored is not None and restored.evaluation is not None else -1
        # Judged on fresh episodes once the run is over: the best policy, and the last one, each with its frames.
        self.final: dict[str, tuple[EvalReport, int]] = {}
        self._over = False
        self._failed = 0
        self._told: set[type[BaseException]] = set()
        self._scalars: dict[str, float] = {}
        self._checkup, self._health = checkup, health
        self.hopeless: Finding | None = None
        self.called_off = False  # looked for at each point and evaluation

    def batch(self, metrics: Metrics) -> None:
        """Takes in what an update returned and the episodes of its batch."""
        self.meter.add(metrics)
        self.meter.add_experience(self._collector.episodes, self._collector.tally)

    def show(self) -> None:
        """Tells the console how far the run is, between two points."""
        self._console.progress(self._collector.frames, {})

    def log(self) -> None:
        """Writes a point of every metric, and the histograms where their interval has passed since the point before.

        Raises:
            NonFiniteError: a loss or a gradient is NaN or infinite.
        """
        frames = self._collector.frames
        self.meter.add(self._algorithm.inspect())
        scalars, arrays = self.meter.flush(due(self.meter.since, frames, self._logger.histogram_interval))
        elapsed = self.clock.elapsed
        scalars["time/frames_per_second"] = (frames - self._timed) / max(elapsed - self._timed_at, 1e-9)
        scalars |= self.clock.shares()
        if (memory := resident_memory()) is not None:
            scalars["time/memory"] = memory / 1e6
        self.meter.since = self._timed = frames
        self._timed_at = elapsed
        self._scalars |= scalars
        self._logger.scalars(scalars, frames)
        if arrays:
            self._logger.histograms(arrays, frames)
        self._logger.flush()
        self._console.progress(frames, scalars)
        self._look_for_faults(scalars, frames)
        self.called_off = self._home.called_off
        for name in WATCHED:
            value = scalars.get(name, 0.0)
            if value != value or value in (float("inf"), float("-inf")):
                raise NonFiniteError(
                    f"{name} became {value} within the frames up to {frames}. Lower optim.lr, set algo.max_grad_norm, or scale the "
                    "rewards; the last checkpoint is from before"
                )

    def log_rest(self) -> None:
        """Writes a last point, where frames were collected since the one before: a short run has no other."""
        if self._collector.frames > self.meter.since:
            self.log()

    def evaluate(self) -> None:
        """Evaluates the policy, keeps it as best.ckpt where it is the best so far (ties: the newer).

        An evaluation that fails is told and counted, and training goes on.
        """
        if self._evaluator is None or self.config.eval.interval is None or self._tried == self._collector.frames:
            return
        config, frames = self.config, self._collector.frames
        self._tried = frames
        try:
            report = self._evaluator(
                self._algorithm,
                episodes=config.eval.episodes,
                seed=cast("int", config.seed),
                max_steps=config.eval.max_steps,
                deterministic=config.eval.deterministic,
                frames=frames,
            )
        except (Exception, Overtime) as error:
            self._evaluation_failed(error, frames)
            return
        self.report, self._report_frames = report, frames
        if frames == self._evaluated:
            return
        better = self.best is None or report.mean >= self.best.mean
        if better:
            self.best = Best(report.mean, frames, report.cut)
        threshold = config.stop.return_threshold
        self.in_a_row = self.in_a_row + 1 if threshold is not None and report.mean >= threshold else 0
        scalars = {
            "eval/return_mean": report.mean,
            "eval/return_std": report.std,
            "eval/return_min": report.min,
            "eval/return_max": report.max,
            "eval/length_mean": sum(report.lengths) / len(report.lengths),
            "eval/episodes_cut": report.cut,
        }
        if report.success_rate is not None:
            scalars["eval/success_rate"] = report.success_rate
        self._scalars |= scalars
        self._logger.scalars(scalars, frames)
        self.called_off = self._home.called_off
        self._console.evaluation(frames, report.mean, report.ci_low, report.ci_high, report.episodes, better)
        self._look_for_faults(scalars, frames)
        if report.threshold is not None and report.mean >= report.threshold and not self._reached:
            self._reached = True
            self._console.note(
                f"milestone: {report.mean:,.2f} at {frames:,} frames is the first evaluation that reaches the environment's "
                f"threshold of {report.threshold:g}"
            )
        if report.cut:
            self._console.note(
                f"{report.cut} of these {report.episodes} episodes were cut at {report.max_steps:,} steps (eval.max_steps)"
            )
        if better:
            self._attempt(self._saver.best)

    def _look_for_faults(self, point: Mapping[str, float], frames: int) -> None:
        """Tells and writes down what a point shows to be wrong; the first fault of ``stop.on`` ends the run."""
        told = self._checkup.add(point, frames)
        for finding in told:
            self._health.add(finding)
            if finding.gone is None:
                self._console.note(f"health: {finding.line}")
                if self.hopeless is None and finding.rule in self.config.stop.on:
                    self.hopeless = finding
        if told:
            self._console.faults([finding.line for finding in self._checkup.open.values()])

    def judge(self, asked_to_stop: Callable[[], bool]) -> None:
        """Evaluates the last policy and the best one on episodes that had no part in choosing it, once the run is over and
        saved. Episodes are as many as ``eval.final_episodes``, in no more steps than a fifth of the run's frames.

        Args:
            asked_to_stop: looked at meanwhile; nothing is kept then.
        """
        frames, path = self._collector.frames, self._saver.directory / BEST
        if self._evaluator is None or self.config.eval.final_episodes == 0:
            return
        self._over = True
        policy = {name: self._algorithm.components()[name] for name in POLICY if name in self._algorithm.components()}
        last = {name: {key: value.clone() for key, value in part.state_dict().items()} for name, part in policy.items()}
        try:
            best = None if self.best is None else checkpoint.read_header(path).frames
            apart = best is not None and best != frames
            budget = frames // _FRESH_SHARE // (2 if apart else 1)
            report = self._fresh(frames, budget, asked_to_stop)
            final = {"last": (report, frames)} if best is None else {"best": (report, frames), "last": (report, frames)}
            if best is not None and apart:
                checkpoint.load(self._algorithm, path, only=POLICY)
                final["best"] = (self._fresh(best, budget, asked_to_stop), best)
            self.final = final
        except Stopped:
            self._console.note("the evaluation on fresh episodes is left out")
        except (Exception, Overtime) as error:
            self._failed += 1
            self._tell(error, "the evaluation on fresh episodes failed")
        finally:
            for name, part in policy.items():
                part.load_state_dict(last[name])
        self.clock.lap("evaluate")

    def _fresh(self, frames: int, budget: int, asked_to_stop: Callable[[], bool]) -> EvalReport:
        """Evaluates the policy as it stands on episodes that neither training nor its evaluations have seen."""
        config = self.config
        assert self._evaluator is not None
        return self._evaluator(
            self._algorithm,
            episodes=config.eval.final_episodes,
            seed=cast("int", config.seed),
            max_steps=config.eval.max_steps,
            deterministic=config.eval.deterministic,
            streams=(Stream.TEST_ENV, Stream.TEST_POLICY),
            frames=frames,
            limit=Limit(budget, min(config.eval.episodes, config.eval.final_episodes), asked_to_stop),
        )

    def film(self) -> None:
        """Films the first of the evaluation's episodes, into the run's videos/ and as a GIF into TensorBoard.

        What goes wrong is told and counted, and training goes on.
        """
        if self._camera is None:
            return
        from rltool.video import Film

        config, frames = self.config, self._collector.frames
        try:
            with closing(Film(self._saver.directory.parent / VIDEOS, 1, ("mp4", "gif"), f"{frames}")) as film:
                self._camera(
                    self._algorithm,
                    episodes=1,
                    seed=cast("int", config.seed),
                    max_steps=config.eval.max_steps,
                    deterministic=config.eval.deterministic,
                    frames=frames,
                    film=film,
                )
            if film.problem is not None:
                raise RltoolError(film.problem)
            self._log_film(film, frames)
        except (Exception, Overtime) as error:
            self._unfilmed += 1
            self._tell(error, f"the video at {frames:,} frames failed", ". Training goes on")

    def _log_film(self, film: Film, frames: int) -> None:
        (path,) = (path for path in film.videos if path.suffix == ".gif")
        self._logger.gif("videos/evaluation", path.read_bytes(), frames)
        self._console.note(f"video at {frames:,} frames: {shown(path.with_suffix('.mp4'))}")

    def _evaluation_failed(self, error: BaseException, frames: int) -> None:
        """Counts it and tells it."""
        self._failed += 1
        self.in_a_row = 0
        self._tell(error, f"the evaluation at {frames:,} frames failed", ". Training goes on")

    def _tell(self, error: BaseException, what: str, after: str = "") -> None:
        """Tells the first error of each type; all of them, with their tracebacks, stand in the log."""
        text = str(error) if isinstance(error, RltoolError) else f"{type(error).__name__}: {error}"
        kind = type(error.__cause__ or error)
        line = f"{what}: {text}{after}"
        if kind in self._told:
            self._console.details(line)
        else:
            self._told.add(kind)
            self._console.warn(line)
        trace = error.trace if isinstance(error, EnvironmentFault) else ""
        self._console.details(trace or "".join(traceback.format_exception(error)))

    @property
    def faults(self) -> dict[str, int]:
        """What failed without ending the run, and how often."""
        return {
            "evaluation": self._failed,
            "video": self._unfilmed,
            "logging": self._logger.faults,
            "nonfinite_batches": self._collector.left_out,
            "nonfinite_gradients": self._algorithm.left_out,
        }

    @property
    def solved(self) -> bool:
        """Whether enough evaluations in a row reached ``stop.return_threshold``."""
        return self.config.stop.return_threshold is not None and self.in_a_row >= self.config.stop.evaluations

    def save(self) -> None:
        """Writes last.ckpt and a numbered checkpoint."""
        self._attempt(self._saver.numbered)

    def _attempt(self, write: Callable[[Algorithm, State], Path]) -> None:
        """A checkpoint that cannot be written now does not end training: the next one may succeed."""
        try:
            write(self._algorithm, self.state())
        except WriteError as error:
            self._console.warn(f"{error}. Training goes on")

    def save_last(self) -> None:
        """Writes last.ckpt, but once the run is over: it has been written, and another policy may be looked at."""
        if self._over:
            return
        self._saver.last(self._algorithm, self.state())

    def state(self) -> State:
        """The state for a checkpoint, as of now."""
        frames = self._collector.frames
        current = self.report is not None and self._report_frames == frames
        return State(
            **self._identity,  # type: ignore[arg-type]
            frames=frames,
            episodes=self.meter.finished,
            best=None if self.best is None else {"mean": self.best.mean, "frames": self.best.frames},
            evaluation=self.report.mean if self.report is not None and current else None,
            solved=self.in_a_row,
            random=random_state(),
            seconds=round(self._seconds, 3),
        )

    @property
    def _seconds(self) -> float:
        """Wall time of the run, earlier sessions included."""
        return self._before + self.clock.elapsed

    def summary(self, status: str, error: str | None) -> dict[str, object]:
        """What summary.json holds."""
        frames = self._collector.frames
        report = self.report
        return {
            "status": status,
            "objective": report.mean if report is not None else self._scalars.get("episode/return"),
            "error": error,
            "env": self._identity["env"],
            "algo": self.config.algo.kind,
            "seed": self.config.seed,
            "frames": frames,
            "updates": self._algorithm.counters.updates,
            "episodes": self.meter.finished,
            "best_evaluation": None if self.best is None else asdict(self.best),
            "last_evaluation": None
            if report is None
            else {
                "mean": report.mean,
                "frames": self._report_frames,
                "episodes": report.episodes,
                "cut": report.cut,
            },
            "final_evaluation": self._final_in_numbers(),
            "reward_threshold": None if self._evaluator is None else self._evaluator.threshold,
            "faults": self.faults,
            "health": [finding.rule for finding in self._checkup.open.values()],
            "seconds": round(self._seconds, 3),
            "frames_per_second": round(frames / max(self._seconds, 1e-9), 1),
            "time_shares": self.clock.all_shares(),
            "compiled": self._identity["compiled"],
            "deterministic": self._determinism.summary(cast("int", self.config.seed)),
            "versions": versions(),
        }

    def _final_in_numbers(self) -> dict[str, object] | None:
        """The evaluation on fresh episodes for summary.json; None where there was none."""
        if not self.final:
            return None
        told = ("mean", "std", "ci_low", "ci_high", "iqm", "median", "min", "max", "success_rate", "episodes", "cut")
        policies = {
            name: {"frames": frames, **{key: getattr(report, key) for key in told}}
            for name, (report, frames) in self.final.items()
        }
        return {
            "seed": self.config.seed,
            "deterministic": self.config.eval.deterministic,
            "best": policies.get("best"),
            "last": policies["last"],
        }

    def finish(self, summary: dict[str, object]) -> None:
        """Writes the hyperparameters with the final numbers."""
        finals = {name: value for name, value in self._scalars.items() if name.startswith(("eval/", "episode/"))}
        if self.best is not None:
            finals["eval/best_return_mean"] = self.best.mean
        for name, (report, _) in self.final.items():
            finals[f"eval/{name}_fresh_return_mean"] = report.mean
        config = self.config.model_dump(mode="json")
        finals = dict(sorted(finals.items(), key=lambda final: not final[0].startswith("eval/")))  # they say most
        self._logger.hparams(
            {key: config[key] for key in _LEARNING},
            finals | {"time/seconds": float(cast("float", summary["seconds"]))},
            first=self._typed,
        )

    def result_rows(self, ended: str) -> list[tuple[str, str]]:
        """Label and value of each line of the end block."""
        frames, seconds = self._collector.frames, self.clock.elapsed
        if self.hopeless is not None:
            ended = f"stopped (stop.on: {self.hopeless.rule})"
        rows = [
            (
                "result",
                f"{ended} after {frames:,} frames, {seconds:,.0f} s, {(frames - self._start) / max(seconds, 1e-9):,.0f} frames/s",
            )
        ]
        if shares := self.clock.in_words():
            rows.append(("time", shares))
        if self.report is not None:
            report = self.report
            spread = f"{report.ci_low:,.2f} to {report.ci_high:,.2f}, {counted(report.episodes, 'episode')}"
            spread += self._cut(report.cut)
            rows.append(("last policy", f"{report.mean:,.2f} mean return ({spread}){self._judged('last')}"))
            if report.threshold is not None:
                reached = "reached" if report.mean >= report.threshold else "not reached"
                rows.append(("solved at", f"{report.threshold:,g}, {reached} by the last policy"))
        elif "last" in self.final:
            rows.append(("last policy", self._judged("last").strip()))
        if self.best is not None:
            text = f"{self.best.mean:,.2f} mean return at {self.best.frames:,} frames{self._cut(self.best.cut)}"
            rows.append(("best policy", text + self._judged("best")))
        rows += [("health", finding.line) for finding in self._checkup.open.values()]
        if self.meter.finished == 0:
            rows.append(("note", "no episode finished"))
        if self._failed:
            rows.append(("faults", f"{self._failed} evaluation{'s' * (self._failed > 1)} failed; see log.txt"))
        if self._unfilmed:
            rows.append(("faults", f"{self._unfilmed} video{'s' * (self._unfilmed > 1)} failed; see log.txt"))
        if count := self._logger.faults:
            rows.append(("faults", f"metrics could not be written {f'{count:,} times' if count > 1 else 'once'}"))
        steps = self._algorithm.left_out
        left_out = {
            "batches": (self._collector.left_out, self._collector.batches),
            "gradient steps": (steps, steps + self._algorithm.counters.updates),
        }
        for name, (count, of) in left_out.items():
            if count:
                rows.append(
                    ("faults", f"{name} that were not finite and are left out: {count:,} of {of:,} (on_nonfinite=skip)")
                )
        if self._algorithm.counters.updates == 0:
            names = [name for name in ("warmup_frames", "learning_starts") if hasattr(self.config.algo, name)]
            first = ", ".join(f"algo.{name}={getattr(self.config.algo, name):,}" for name in names)
            reason = f": it ended before {first} and one batch were over"
            rows.append(("note", "0 gradient updates were made" + reason))
        rows.append(("directory", shown(self._saver.directory.parent)))
        return rows

    def _judged(self, policy: str) -> str:
        """A further line about a policy's fresh episodes."""
        if policy not in self.final:
            return ""
        report, _ = self.final[policy]
        spread = f"{report.ci_low:,.2f} to {report.ci_high:,.2f}"
        over = f"{counted(report.episodes, 'fresh episode')}{self._cut(report.cut)}"
        return f"\n{report.mean:,.2f} ({spread}) over {over}"

    def _cut(self, count: int | None) -> str:
        """How many of an evaluation's episodes were cut, to be set behind it."""
        return f", {count:,} cut at {self.config.eval.max_steps:,} steps" if count else ""

    def next_commands(self) -> list[str]:
        """What to type next."""
        best = self._saver.directory / (BEST if self.best is not None else LAST)
        commands = [f"{program('rltool')} eval checkpoint={shown(best)}"]
        if self.config.logging.kind == "tensorboard":
            commands.append(f"{program('tensorboard')} --logdir {shown(self._saver.directory.parent)}")
        elif self.config.logging.kind == "wandb" and self.config.logging.mode == "offline":  # type: ignore[attr-defined]
            commands.append(f"{program('wandb')} sync {shown(self._saver.directory.parent / 'wandb')}/offline-run-*")
        return commands

"""What a person sees of a run: a live panel on a terminal, plain lines elsewhere, and the same lines in log.txt."""

from __future__ import annotations

import math
import sys
import textwrap
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import IO, Self, cast

from rich.cells import cell_len
from rich.console import Console as RichConsole
from rich.console import Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rltool.figures import counted, duration, number, sparkline
from rltool.schema import RunConfig

_LINE_SECONDS = 2.0
_VIEW_SECONDS = 0.25
_RATE_SECONDS = 30.0
_REFRESHES = 2
_HISTORY = 240
_BACKLOG = 1000

# Shown in this order where they exist; what an algorithm of a plugin reports beyond them comes after.
_KEY_METRICS = (
    "episode/length",
    "policy/epsilon",
    "policy/approx_kl",
    "train/clip_fraction",
    "policy/entropy",
    "critic/explained_variance",
    "critic/value_loss",
    "critic/q_value_mean",
    "train/loss",
    "train/grad_norm",
    "train/learning_rate",
)
_KEY_GROUPS = ("policy/", "critic/", "train/")
_LINE_METRICS = 4
_PANEL_ROWS = 3
_PANEL_FAULTS = 2
_CELL = 30
_NUMBER = 9
_WIDE = 100
_TITLE = 60


@dataclass(frozen=True)
class _Evaluation:
    frames: int
    mean: float
    low: float
    high: float
    episodes: int


@dataclass(frozen=True)
class _View:
    """All that the panel shows, at one moment; never changed, so that the drawing thread needs no lock."""

    frames: int = 0
    rate: float | None = None
    scalars: tuple[tuple[str, float], ...] = ()
    returns: tuple[float, ...] = ()
    best_return: float | None = None
    evaluation: _Evaluation | None = None
    best_evaluation: _Evaluation | None = None
    evaluations: tuple[float, ...] = ()
    shares: tuple[tuple[str, float], ...] = ()
    memory: float | None = None
    faults: tuple[str, ...] = ()


class Console:
    """Shows how a run goes: a live panel on a terminal, timestamped lines elsewhere, little with ``quiet=true``.

    Use it as a context manager, so that the terminal is as before whatever happens. A stream that breaks (a closed pipe,
    a full disk) silences the console and never stops the run.

    Args:
        config: the run's configuration.
        stream: where to write; standard output by default.
        console: a rich console to write to in place of ``stream``.
        clock: seconds from any starting point, never backwards.
        now: the time of day.
    """

    def __init__(
        self,
        config: RunConfig,
        stream: IO[str] | None = None,
        *,
        console: RichConsole | None = None,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self._total = config.total_frames
        self._interval = config.logging.interval
        self._threshold = config.stop.return_threshold
        self._evaluates = config.eval.interval is not None
        self._title = f"{config.algo.kind} on {_environment(config)}"
        self._quiet = config.quiet
        if console is None:
            guarded = cast("IO[str]", _Stream(sys.stdout if stream is None else stream, self._lose_terminal))
            console = RichConsole(file=guarded, highlight=False, emoji=False)
        self._console = console
        self._ascii = console.options.ascii_only
        self._clock = clock
        self._now = now
        self._log: IO[str] | None = None
        self._log_wanted = True
        self._backlog: deque[str] = deque(maxlen=_BACKLOG)
        self._live: Live | None = None
        self._entered = False

        self._started = clock()
        self._frames = 0
        self._samples: deque[tuple[float, int]] = deque([(self._started, 0)])
        self._scalars: dict[str, float] = {}
        self._returns: deque[float] = deque(maxlen=_HISTORY)
        self._best_return: float | None = None
        self._evaluation: _Evaluation | None = None
        self._best_evaluation: _Evaluation | None = None
        self._evaluations: deque[float] = deque(maxlen=_HISTORY)
        self._faults: tuple[str, ...] = ()
        self._view = _View()
        self._view_time = -math.inf
        self._line_time = -math.inf
        self._line_frames = 0

    @property
    def live(self) -> bool:
        """True where this console draws a panel: on a terminal that can move its cursor, and not ``quiet``."""
        return self._console.is_terminal and not self._console.is_dumb_terminal and not self._quiet

    def attach(self, path: Path) -> None:
        """Also write every line, with the time, to the end of a file; lines printed before are added first."""
        try:
            self._log = open(path, "a", encoding="utf-8", errors="backslashreplace")  # noqa: SIM115
        except OSError as error:
            self._lose_log(error)
            return
        backlog, self._backlog = self._backlog, deque(maxlen=_BACKLOG)
        self._write_log("".join(backlog))

    def __enter__(self) -> Self:
        self._entered = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._entered = False
        self._stop_live()
        if self._log is not None:
            log, self._log = self._log, None
            self._log_wanted = False
            try:
                log.close()
            except OSError as fault:
                self._lose_log(fault)

    def start(self, rows: Sequence[tuple[str, str]], frames: int = 0) -> None:
        """Print the block that says what is about to run, then show progress.

        Args:
            rows: label and value of each line; a value may have several lines.
            frames: frames already done, for a resumed run.
        """
        self._block(rows, shown=not self._quiet)
        self._frames = self._line_frames = frames
        self._started = self._clock()
        self._samples = deque([(self._started, frames)])
        self._look(self._started)
        if self.live and self._entered:
            self._live = Live(
                console=self._console,
                get_renderable=self._panel,
                refresh_per_second=_REFRESHES,
                vertical_overflow="crop",
            )
            self._live.start()

    def progress(self, frames: int, scalars: Mapping[str, float]) -> None:
        """Say how far the run is; cheap enough to be called after every batch.

        Args:
            frames: frames collected so far, those before a resume included.
            scalars: metrics measured since the last call, if any; earlier ones stay on display.
        """
        self._frames = frames
        if scalars:
            self._scalars.update(scalars)
            episode_return = scalars.get("episode/return")
            if episode_return is not None and math.isfinite(episode_return):
                self._returns.append(episode_return)
                if self._best_return is None or episode_return > self._best_return:
                    self._best_return = episode_return
        now = self._clock()
        if now - self._view_time >= _VIEW_SECONDS:
            self._look(now)
        crossed = frames // self._interval > self._line_frames // self._interval
        if crossed and now - self._line_time >= _LINE_SECONDS:
            self._look(now)
            self._line_time, self._line_frames = now, frames
            self._line(self._progress_text(), shown=not self._quiet and not self.live)

    def restore_best(self, frames: int, mean: float) -> None:
        """Takes over the best evaluation of the sessions before a resume (its interval is not known any more)."""
        self._best_evaluation = _Evaluation(frames, mean, mean, mean, 0)

    def evaluation(self, frames: int, mean: float, low: float, high: float, episodes: int, best: bool) -> None:
        """Show an evaluation.

        Args:
            frames: frame count of the policy.
            mean: mean return.
            low: lower end of its 95 % interval.
            high: upper end.
            episodes: number of episodes.
            best: True for the best so far.
        """
        self._evaluation = _Evaluation(frames, mean, low, high, episodes)
        if best or (self._best_evaluation is None and math.isfinite(mean)):
            self._best_evaluation = self._evaluation
        if math.isfinite(mean):
            self._evaluations.append(mean)
        self._look(self._clock())
        text = (
            f"evaluation at {frames:,} frames: mean return {number(mean)} "
            f"(95 % interval {number(low)} to {number(high)}, {counted(episodes, 'episode')})"
        )
        if best:
            text += ", best so far"
        elif self._best_evaluation is not None:
            text += f", best {number(self._best_evaluation.mean)}"
        self._line(text, shown=not self._quiet and not self.live)

    def faults(self, lines: Sequence[str]) -> None:
        """Show what is wrong with the run now, a line each, the newest last; a panel has room for two."""
        self._faults = tuple(lines)
        self._look(self._clock())

    def note(self, text: str) -> None:
        """Print one line of information."""
        self._line(text, shown=not self._quiet)

    def details(self, text: str) -> None:
        """Write lines to the log file alone."""
        for line in text.splitlines():
            self._line(line, shown=False)

    def warn(self, text: str) -> None:
        """Print a warning, also with ``quiet=true``."""
        self._line(f"warning: {text}", shown=True, style="bold red")

    def finish(self, rows: Sequence[tuple[str, str]], commands: Sequence[str]) -> None:
        """Print the block that says how the run ended and what to type next; ``quiet=true`` leaves the commands out.

        Args:
            rows: label and value of each line.
            commands: shell commands, printed unbroken so that they can be copied.
        """
        self._look(self._clock())
        self._stop_live()
        self._block(rows, shown=True)
        if commands:
            lines = [Text(f"  {command}") for command in commands]
            self._emit([Text("next:", style="bold"), *lines, Text("")], shown=not self._quiet)

    def discount(self, seconds: float) -> None:
        """Leaves out of the rate, and so of the time left, seconds that will not come again: compilation."""
        self._samples = deque((then + seconds, frames) for then, frames in self._samples)

    def _look(self, now: float) -> None:
        """Renew what the panel shows."""
        self._view_time = now
        self._samples.append((now, self._frames))
        while len(self._samples) > 2 and now - self._samples[1][0] >= _RATE_SECONDS:
            self._samples.popleft()
        then, frames = self._samples[0]
        rate = (self._frames - frames) / (now - then) if now > then and self._frames > frames else None
        self._view = _View(
            self._frames,
            rate,
            tuple(self._key_metrics()),
            tuple(self._returns),
            self._best_return,
            self._evaluation,
            self._best_evaluation,
            tuple(self._evaluations),
            tuple(self._shares()),
            self._scalars.get("time/memory"),
            self._faults,
        )

    def _key_metrics(self) -> list[tuple[str, float]]:
        others = [name for name in self._scalars if name.startswith(_KEY_GROUPS) and name != "train/updates"]
        names = [name for name in _KEY_METRICS if name in self._scalars]
        names += [name for name in others if name not in names]
        return [(_label(name), self._scalars[name]) for name in names]

    def _shares(self) -> list[tuple[str, float]]:
        """Parts of the loop and their shares of the time of the last interval, the largest first."""
        parts = [
            (name.removeprefix("time/").removesuffix("_share"), value)
            for name, value in self._scalars.items()
            if name.endswith("_share") and name.startswith("time/") and value >= 0.005
        ]
        return sorted(parts, key=lambda part: -part[1])

    def _progress_text(self) -> str:
        view = self._view
        parts = [self._frames_text(view.frames)]
        if view.rate is not None:
            parts.append(_rate(view.rate))
        left = self._left(view)
        if left is not None:
            parts.append(f"{duration(left)} left")
        if view.returns:
            parts.append(f"return {number(view.returns[-1])}")
        parts += [f"{label} {number(value)}" for label, value in view.scalars[:_LINE_METRICS]]
        return "  ".join(parts)

    def _frames_text(self, frames: int) -> str:
        if self._total < 0:
            return f"{frames:,} frames"
        # Rounded down: 100 % means done.
        return f"{frames:,}/{self._total:,} frames ({100 * min(frames, self._total) // self._total}%)"

    def _left(self, view: _View) -> float | None:
        if self._total < 0 or not view.rate or view.frames >= self._total:
            return None
        return (self._total - view.frames) / view.rate

    def _panel(self) -> RenderableType:
        """The live display, drawn for the terminal's present width."""
        view = self._view
        inner = max(self._console.width - 4, 20)
        content: list[RenderableType] = [*self._progress_rows(view, inner), Text("")]
        content.append(self._curves(view, inner))
        cells = self._metric_rows(view, inner)
        if cells is not None:
            content += [Text(""), cells]
        content += self._state_rows(view, inner)
        title = Text(_shortened(self._title, min(_TITLE, inner - 4)), style="bold")
        return Panel(Group(*content), title=title, title_align="left", border_style="none")

    def _progress_rows(self, view: _View, inner: int) -> list[RenderableType]:
        elapsed = f"{duration(self._clock() - self._started)} elapsed"
        rate = "- frames/s" if view.rate is None else _rate(view.rate)
        figures = [rate, elapsed]
        if self._total < 0:
            goal = "until stopped" if self._threshold is None else f"until return {number(self._threshold)}"
            head: RenderableType = Text(f"{view.frames:,} frames, {goal}", style="bold", no_wrap=True)
        else:
            label = Text(self._frames_text(view.frames), style="bold")
            bar = ProgressBar(
                self._total,
                min(view.frames, self._total),
                width=max(inner - label.cell_len - 2, 4),
                style="bright_black",
                complete_style="magenta",
                finished_style="green",
            )
            row = Table.grid(padding=(0, 2, 0, 0), pad_edge=False)
            row.add_row(bar, label)
            head = row
            left = self._left(view)
            if left is not None:
                figures.append(f"about {duration(left)} left")
        return [head, Text("   ".join(figures), no_wrap=True)]

    def _curves(self, view: _View, inner: int) -> Table:
        """A row each for the returns in training and in evaluation: newest, curve, best; the interval where it fits."""
        wide = inner >= _WIDE
        width = min(max(inner - 47 - (24 if wide else 0), 8), 40)
        table = Table.grid(padding=(0, 2, 0, 0), pad_edge=False)
        table.add_column(no_wrap=True, width=6)
        table.add_column(no_wrap=True, width=_NUMBER)
        if wide:
            table.add_column(no_wrap=True)  # the interval
        table.add_column(no_wrap=True, min_width=width)
        table.add_column(no_wrap=True)
        table.add_column(no_wrap=True)
        blank = [""] * wide
        if view.returns:
            table.add_row(
                "return",
                Text(number(view.returns[-1]), style="bold"),
                *blank,
                Text(sparkline(view.returns, width, ascii_only=self._ascii), style="magenta"),
                f"best {number(view.best_return)}",
            )
        else:
            # Between two points nothing is known of episodes.
            table.add_row("return", "-", *blank, "no episode has ended yet" if view.scalars else "no point yet")
        latest, best = view.evaluation, view.best_evaluation
        if latest is not None:
            interval = f"{number(latest.low)} to {number(latest.high)} (95 %)"
            table.add_row(
                "eval",
                Text(number(latest.mean), style="bold green" if latest == best else "bold"),
                *([interval] * wide),
                Text(sparkline(view.evaluations, width, ascii_only=self._ascii), style="green"),
                Text("" if best is None else f"best {number(best.mean)} at {best.frames:,}", style="green"),
            )
            if not wide:
                table.add_row("", "", interval)
        elif self._evaluates:
            table.add_row("eval", "-", *blank, "none yet")
        return table

    def _metric_rows(self, view: _View, inner: int) -> Table | None:
        columns = max(inner // _CELL, 1)
        shown = view.scalars[: columns * _PANEL_ROWS]
        if not shown:
            return None
        table = Table.grid(padding=(0, 2, 0, 0), pad_edge=False)
        for _ in range(columns):
            table.add_column(no_wrap=True, width=inner // columns - 4 - _NUMBER)
            table.add_column(no_wrap=True, width=_NUMBER)
        cells = [text for label, value in shown for text in (label, number(value))]
        for start in range(0, len(cells), 2 * columns):
            table.add_row(*cells[start : start + 2 * columns])
        return table

    def _state_rows(self, view: _View, inner: int) -> list[RenderableType]:
        """Where the time goes, the memory, and what is wrong, each in a line that fits."""
        if not view.shares and not view.faults:
            return []
        parts = [f"{part} {share:.0%}" for part, share in view.shares]
        memory = [] if view.memory is None else [f"memory {view.memory:,.0f} MB"]
        rows: list[RenderableType] = [Text("")]
        rows.append(Text(_shortened("time    " + "  ".join([*parts, *memory]), inner), no_wrap=True))
        for line in view.faults[-_PANEL_FAULTS:]:
            rows.append(Text.assemble(("health  ", "bold red"), _shortened(line, inner - 8), no_wrap=True))
        if (more := len(view.faults) - _PANEL_FAULTS) > 0:
            rows.append(Text(f"        and {more} more, see rltool doctor", no_wrap=True))
        return rows

    def _block(self, rows: Sequence[tuple[str, str]], shown: bool) -> None:
        width = max((cell_len(label) for label, _ in rows), default=0)
        lines: list[Text] = []
        for label, value in rows:
            for index, part in enumerate(value.splitlines() or [""]):
                head = label if index == 0 else ""
                padding = " " * (width - cell_len(head) + 2)
                lines.append(Text.assemble((head, "bold"), padding, part))
        self._emit([*lines, Text("")] if lines else [], shown)

    def _line(self, text: str, shown: bool, style: str = "") -> None:
        line = Text(text, style=style)
        self._write_log_line(line.plain)
        if shown:
            # On a terminal the panel shows the time; in a file each line needs it.
            if self.live:
                # Broken at words only: a path stays whole.
                parts = textwrap.wrap(text, self._console.width, break_long_words=False, break_on_hyphens=False)
                self._print(Text("\n".join(parts), style=style))
            else:
                self._print(Text.assemble(f"{self._stamp()}  ", (text, style)))

    def _emit(self, lines: Sequence[Text], shown: bool) -> None:
        for line in lines:
            if line.plain:
                self._write_log_line(line.plain)
            if shown:
                self._print(line)

    def _print(self, line: Text) -> None:
        # Unbroken: a path or a command can be copied from the terminal whatever its width.
        self._console.print(line, soft_wrap=True)

    def _stop_live(self) -> None:
        if self._live is not None:
            live, self._live = self._live, None
            live.stop()

    def _stamp(self) -> str:
        return f"{self._now():%Y-%m-%d %H:%M:%S}"

    def _write_log_line(self, text: str) -> None:
        line = f"{self._stamp()}  {text}\n"
        if self._log is not None:
            self._write_log(line)
        elif self._log_wanted:
            self._backlog.append(line)

    def _write_log(self, text: str) -> None:
        if self._log is None:
            return
        try:
            self._log.write(text)
            self._log.flush()
        except OSError as error:
            self._log = None
            self._lose_log(error)

    def _lose_terminal(self, error: OSError) -> None:
        self._write_log_line(f"warning: cannot write to the terminal: {error.strerror or error}")

    def _lose_log(self, error: OSError) -> None:
        self._log_wanted = False
        self._backlog.clear()
        self.warn(f"cannot write {error.filename or 'log.txt'}: {error.strerror or error}. The run goes on without it")


class _Stream:
    """A text stream that can neither fail nor refuse a character: the console must not end a run.

    The first failure is reported; from then on nothing is written.
    """

    def __init__(self, stream: IO[str], report: Callable[[OSError], None]) -> None:
        self._stream = stream
        self._report = report
        self._broken = False

    def write(self, text: str) -> int:
        if not self._broken:
            with self._guarded():
                try:
                    self._stream.write(text)
                except UnicodeEncodeError:
                    encoding = getattr(self._stream, "encoding", None) or "ascii"
                    self._stream.write(text.encode(encoding, errors="replace").decode(encoding))
        return len(text)

    def flush(self) -> None:
        if not self._broken:
            with self._guarded():
                self._stream.flush()

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._broken = True
            self._report(error)

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


def _environment(config: RunConfig) -> str:
    name = getattr(config.env, "id", None) or getattr(config.env, "entry_point", None)
    return str(name or config.env.kind)


def _label(name: str) -> str:
    group, _, rest = name.partition("/")
    return f"{group} {rest}".replace("_", " ") if group == "episode" else rest.replace("_", " ")


def _rate(rate: float) -> str:
    return f"{number(round(rate, 1 if rate < 10 else 0))} frames/s"


def _shortened(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: max(width - 3, 0)]}..."

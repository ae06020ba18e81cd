"""The console with a clock of its own: what stands on a terminal, in a file, in log.txt."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime, timedelta
from errno import ENOSPC
from pathlib import Path

import pytest
from rich.console import Console as RichConsole

from rltool.console import Console
from rltool.figures import duration, number
from rltool.schema import (
    AdamConfig,
    Anneal,
    DQNConfig,
    EvalConfig,
    GymEnvConfig,
    MLPConfig,
    NoLoggingConfig,
    ReplayBufferConfig,
    RunConfig,
    SaveConfig,
    StopConfig,
)


def config(
    total_frames: int = 10_000, *, quiet: bool = False, threshold: float | None = None, evaluate: bool = True
) -> RunConfig:
    return RunConfig(
        total_frames=total_frames,
        seed=0,
        device="cpu",
        threads=1,
        compile=False,
        on_nonfinite="stop",
        resume=None,
        init=None,
        plugins=[],
        quiet=quiet,
        debug=False,
        env=GymEnvConfig(
            kind="gym",
            id="CartPole-v1",
            num_envs=1,
            kwargs={},
            observation_keys=None,
            action_mask="auto",
            timeout=None,
            transforms=[],
            backend="sync",
            wrappers=[],
            max_episode_steps=None,
        ),
        algo=DQNConfig(
            kind="dqn",
            frames_per_batch=16,
            gamma=0.99,
            normalize_observation=False,
            warmup_frames=0,
            max_grad_norm=None,
            minibatch_size=64,
            learning_starts=100,
            updates_per_frame=0.5,
            target_interval=500,
            tau=None,
            double=False,
            epsilon=Anneal(start=1.0, end=0.1, frames=1000),
            loss_function="l2",
        ),
        network=MLPConfig(
            kind="mlp",
            hidden=[64],
            activation="relu",
            layer_norm=False,
            init="default",
            shared=False,
            precision="float32",
        ),
        buffer=ReplayBufferConfig(kind="replay", size=1000, storage="memory"),
        optim=AdamConfig(kind="adam", lr=1e-3, schedule="constant", eps=1e-8, betas=[0.9, 0.999]),
        logging=NoLoggingConfig(kind="none", interval=1000),
        eval=EvalConfig(
            interval=2000 if evaluate else None,
            episodes=10,
            num_envs=1,
            max_steps=500,
            deterministic=True,
            final_episodes=0,
            video_interval=None,
        ),
        save=SaveConfig(interval=None, keep=0),
        stop=StopConfig(return_threshold=threshold, evaluations=1, on=[]),
    )


class Clock:
    """Time that moves only when told to."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds

    def now(self) -> datetime:
        return datetime(2025, 1, 2, 3, 4, 5) + timedelta(seconds=self.seconds)


def plain(clock: Clock, total_frames: int = 10_000, *, quiet: bool = False) -> tuple[Console, Callable[[], list[str]]]:
    stream = io.StringIO()
    console = Console(config(total_frames, quiet=quiet), stream, clock=clock, now=clock.now)
    return console, lambda: stream.getvalue().splitlines()


def terminal(
    clock: Clock, total_frames: int = 10_000, *, width: int = 80, quiet: bool = False, threshold: float | None = None
) -> tuple[Console, Callable[[], str]]:
    """A console on a pretended terminal, and what its panel looks like now."""
    screen = RichConsole(
        file=io.StringIO(),
        force_terminal=True,
        width=width,
        height=40,
        legacy_windows=False,
        _environ={"TERM": "xterm"},
    )
    console = Console(
        config(total_frames, quiet=quiet, threshold=threshold), console=screen, clock=clock, now=clock.now
    )

    def panel() -> str:
        paper = RichConsole(file=io.StringIO(), width=width, _environ={})
        paper.print(console._panel())
        assert isinstance(paper.file, io.StringIO)
        return paper.file.getvalue()

    return console, panel


def output(console: Console) -> str:
    stream = console._console.file
    assert isinstance(stream, io.StringIO)
    return stream.getvalue()


def test_blocks_are_plain_and_commands_unbroken() -> None:
    console, lines = plain(Clock())
    command = f"rltool eval checkpoint=runs/{'x' * 200}/checkpoints/best.ckpt"
    with console:
        console.start([("environment", "CartPole-v1\nBox(4,)"), ("seed", "0")])
        console.finish([("result", "[bold]475[/bold] :smile:")], [command, "tensorboard --logdir runs"])
    assert lines() == [
        "environment  CartPole-v1",
        "             Box(4,)",
        "seed         0",
        "",
        "result  [bold]475[/bold] :smile:",
        "",
        "next:",
        f"  {command}",
        "  tensorboard --logdir runs",
        "",
    ]


def test_plain_lines_have_the_time_and_come_once_an_interval() -> None:
    clock = Clock()
    console, lines = plain(clock)
    with console:
        console.start([])
        for frames in range(500, 4001, 500):
            clock.seconds += 5
            console.progress(frames, {"episode/return": frames / 10, "policy/epsilon": 0.5} if frames >= 2000 else {})
    assert lines() == [
        "2025-01-02 03:04:15  1,000/10,000 frames (10%)  100 frames/s  0:01:30 left",
        "2025-01-02 03:04:25  2,000/10,000 frames (20%)  100 frames/s  0:01:20 left  return 200  epsilon 0.5",
        "2025-01-02 03:04:35  3,000/10,000 frames (30%)  100 frames/s  0:01:10 left  return 300  epsilon 0.5",
        "2025-01-02 03:04:45  4,000/10,000 frames (40%)  100 frames/s  0:01:00 left  return 400  epsilon 0.5",
    ]


def test_a_fast_run_prints_a_line_every_two_seconds_and_all_evaluations() -> None:
    clock = Clock()
    console, lines = plain(clock, 1_000_000)
    with console:
        console.start([])
        for step in range(1, 101):
            clock.seconds += 0.1
            console.progress(step * 10_000, {})
            if step % 50 == 0:
                console.evaluation(step * 10_000, 400.0 + step, 390.0, 480.5, 10, best=step == 50)
    shown = lines()
    assert sum("frames/s" in line for line in shown) == 5
    assert [line.partition("  ")[2] for line in shown if "evaluation" in line] == [
        "evaluation at 500,000 frames: mean return 450 (95 % interval 390 to 480.5, 10 episodes), best so far",
        "evaluation at 1,000,000 frames: mean return 500 (95 % interval 390 to 480.5, 10 episodes), best 450",
    ]


def test_quiet_prints_warnings_and_the_result_only() -> None:
    clock = Clock()
    console, lines = plain(clock, quiet=True)
    with console:
        console.start([("seed", "0")])
        clock.seconds += 10
        console.progress(5000, {"episode/return": 1.0})
        console.evaluation(5000, 1.0, 0.5, 1.5, 1, best=True)
        console.note("a note")
        console.warn("a warning")
        console.finish([("result", "475")], ["rltool eval"])
    assert lines() == ["2025-01-02 03:04:15  warning: a warning", "result  475", ""]


def test_log_txt_gets_everything_also_what_came_before_it(tmp_path: Path) -> None:
    clock = Clock()
    console, _ = plain(clock, quiet=True)
    path = tmp_path / "log.txt"
    path.write_text("from an earlier process\n")
    with console:
        console.start([("seed", "0"), ("tuned", "none")])
        console.attach(path)
        clock.seconds += 10
        console.progress(5000, {})
        console.warn("a ü and \udcff")
        console.evaluation(5000, 1.0, 0.5, 1.25, 1, best=True)
        console.finish([("result", "475")], ["rltool eval"])
    console.note("after the end")
    assert path.read_text(encoding="utf-8").splitlines() == [
        "from an earlier process",
        "2025-01-02 03:04:05  seed   0",
        "2025-01-02 03:04:05  tuned  none",
        "2025-01-02 03:04:15  5,000/10,000 frames (50%)  500 frames/s  0:00:10 left",
        "2025-01-02 03:04:15  warning: a ü and \\udcff",
        "2025-01-02 03:04:15  evaluation at 5,000 frames: mean return 1 (95 % interval 0.5 to 1.25, 1 episode), best so far",
        "2025-01-02 03:04:15  result  475",
        "2025-01-02 03:04:15  next:",
        "2025-01-02 03:04:15    rltool eval",
    ]


def test_a_log_that_cannot_be_written_is_said_once(tmp_path: Path) -> None:
    console, lines = plain(Clock())
    with console:
        console.attach(tmp_path / "missing" / "log.txt")
        console.note("goes on")
    assert [line.partition("  ")[2] for line in lines()] == [
        f"warning: cannot write {tmp_path}/missing/log.txt: No such file or directory. The run goes on without it",
        "goes on",
    ]


def test_a_disk_that_fills_up_costs_the_log_only() -> None:
    console, lines = plain(Clock())
    with console:
        console.attach(Path("/dev/full"))
        console.note("first")
        console.note("second")
    assert [line.partition("  ")[2] for line in lines()] == [
        "warning: cannot write log.txt: No space left on device. The run goes on without it",
        "first",
        "second",
    ]


class Broken(io.StringIO):
    """A stream that fails from its third write on, as a closed pipe does."""

    writes = 0

    def write(self, text: str) -> int:
        self.writes += 1
        if self.writes > 2:
            raise BrokenPipeError(32, "Broken pipe")
        return super().write(text)


def test_a_broken_stream_silences_the_console_and_nothing_else(tmp_path: Path) -> None:
    stream = Broken()
    console = Console(config(), stream, clock=Clock())
    with console:
        console.attach(tmp_path / "log.txt")
        for number in range(5):
            console.note(f"note {number}")
    assert stream.writes == 3
    log = [line[21:] for line in (tmp_path / "log.txt").read_text().splitlines()]
    assert log == [
        "note 0",
        "note 1",
        "note 2",
        "warning: cannot write to the terminal: Broken pipe",
        "note 3",
        "note 4",
    ]


def test_a_full_disk_behind_standard_output_does_not_end_the_run() -> None:
    with open("/dev/full", "w") as stream:
        console = Console(config(), stream, clock=Clock())
        with console:
            console.note("a")
            console.finish([("result", "475")], [])
        with pytest.raises(OSError, match=os.strerror(ENOSPC)):
            stream.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def test_an_ascii_stream_gets_question_marks() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    console = Console(config(), stream, clock=Clock(), now=Clock().now)
    with console:
        console.note("λ = 0.95, path \udcff")
    assert raw.getvalue() == b"2025-01-02 03:04:05  ? = 0.95, path ?\n"


def test_a_resumed_run_starts_at_its_frame_and_times_only_itself() -> None:
    clock = Clock()
    console, lines = plain(clock, 100_000)
    with console:
        console.start([], frames=90_000)
        clock.seconds += 10
        console.progress(92_000, {})
    assert lines() == ["2025-01-02 03:04:15  92,000/100,000 frames (92%)  200 frames/s  0:00:40 left"]


def test_the_rate_is_of_the_last_half_minute() -> None:
    clock = Clock()
    console, panel = terminal(clock, 1_000_000)
    with console:
        console.start([])
        clock.seconds += 20  # compiling
        console.progress(100, {})
        for step in range(1, 61):
            clock.seconds += 1
            console.progress(100 + step * 1000, {})
    assert "1,000 frames/s   0:01:20 elapsed   about 0:15:39 left" in panel()


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_panel_fits_and_shows_what_matters(width: int) -> None:
    clock = Clock()
    console, panel = terminal(clock, width=width)
    with console:
        console.start([])
        assert "no point yet" in panel()
        assert "none yet" in panel()
        for step in range(1, 9):
            clock.seconds += 5
            console.progress(step * 1000, {"episode/return": step * 1000.5, "policy/epsilon": 0.1, "train/loss": 1.25})
            console.evaluation(step * 1000, 100.0 * step, 90.0, 500.0, 10, best=step <= 4)
        console.progress(8000, {"time/collect_share": 0.38, "time/update_share": 0.62, "time/memory": 812.4})
        console.faults(["the oldest fault", "another one, told at length " * 9, "the newest fault"])
        text = panel()
    assert re.search(r"return +8,004 +▁▂▃▄▅▆▇█ +best 8,004", text)
    assert "8,000/10,000 frames (80%)" in text
    assert "200 frames/s   0:00:40 elapsed   about 0:00:10 left" in text
    interval = r" +90 to 500 \(95 %\)"  # of the newest, and beside it where there is room
    assert re.search(rf"eval +800{interval if width >= 104 else ''} +▁▂▃▄▅▆▇█ +best 400 at 4,000", text)
    assert re.search(interval, text)
    assert re.search(r"time    update 62%  collect 38%  memory 812 MB", text)
    assert "health  " in text
    assert "newest" in text
    assert "oldest" not in text
    assert "and 1 more, see rltool doctor" in text
    assert re.search(r"epsilon +0\.1 ", text)
    assert "dqn on CartPole-v1" in text
    assert {len(line) for line in text.splitlines()} == {width}
    assert "…" not in text


def test_a_long_line_over_the_panel_is_broken_at_words_and_a_path_stays_whole() -> None:
    console, _ = terminal(Clock(), width=60)
    path = f"/{'deep/' * 20}run"
    with console:
        console.start([])
        console.note(f"the policy has stopped exploring and this line is longer than the terminal is wide {path}")
    text = console._console.file.getvalue()  # type: ignore[attr-defined]
    assert path in text
    assert "the policy has stopped exploring and this line is longer\nthan the terminal is wide" in text


def test_without_a_budget_there_is_no_bar() -> None:
    clock = Clock()
    console, panel = terminal(clock, -1, threshold=475.0)
    with console:
        console.start([])
        clock.seconds += 10
        console.progress(5000, {})
    assert "5,000 frames, until return 475" in panel()
    assert "500 frames/s   0:00:10 elapsed " in panel()
    assert "left" not in panel()
    console, lines = plain(clock, -1)
    console.start([])
    clock.seconds += 10
    console.progress(5000, {})
    assert lines() == ["2025-01-02 03:04:25  5,000 frames  500 frames/s"]


def test_long_and_odd_curves() -> None:
    clock = Clock()
    console, panel = terminal(clock)
    with console:
        console.start([])
        for step in range(1000):
            clock.seconds += 1
            console.progress(step, {"episode/return": -1.0 if step < 900 else 0.0})
        console.progress(1000, {"episode/return": -0.5})
        console.progress(1000, {"episode/return": float("nan")})
        clock.seconds += 1
        console.progress(1001, {})
        console.evaluation(1001, float("nan"), float("nan"), float("nan"), 1, best=False)
        text = panel()
    assert re.search(r"return +-0\.5 +▁{16}▃█{12} +best 0 ", text), text
    assert re.search(r"eval +nan +│", text), text


def test_metrics_of_an_unknown_algorithm_are_shown() -> None:
    clock = Clock()
    console, panel = terminal(clock)
    with console:
        console.start([])
        clock.seconds += 1
        console.progress(10, {"policy/my_own": 7.0, "time/x": 1.0, "train/updates": 3.0})
    assert re.search(r"my own +7 ", panel())
    assert "updates" not in panel()


def test_the_terminal_is_as_before_after_an_error() -> None:
    console, _ = terminal(Clock())
    stdout, stderr = sys.stdout, sys.stderr

    def interrupted() -> None:
        with console:
            console.start([("seed", "0")])
            assert sys.stdout is not stdout
            console.note("above the panel")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert (sys.stdout, sys.stderr) == (stdout, stderr)
    text = output(console)
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1
    assert text.rindex("\x1b[?25h") > text.rindex("╰")
    assert "above the panel" in text


def test_after_the_panel_come_the_result_and_unbroken_commands() -> None:
    console, _ = terminal(Clock())
    command = f"rltool eval checkpoint={'x' * 150}"
    with console:
        console.start([])
        console.progress(10_000, {})
        console.finish([("result", "475")], [command])
    text = output(console)
    assert text.rindex("\x1b[?25h") < text.index(command)
    assert "(100%)" in text


@pytest.mark.parametrize(
    ("environment", "live"),
    [({"TERM": "xterm"}, True), ({"TERM": "xterm", "NO_COLOR": "1"}, True), ({"TERM": "dumb"}, False)],
)
def test_what_the_terminal_can_do_is_respected(environment: dict[str, str], live: bool) -> None:
    screen = RichConsole(
        file=io.StringIO(),
        force_terminal=True,
        width=80,
        legacy_windows=False,
        color_system="auto",
        _environ=environment,
    )
    clock = Clock()
    console = Console(config(), console=screen, clock=clock, now=clock.now)
    assert console.live is live
    with console:
        console.start([])
        clock.seconds += 5
        console.progress(1000, {"episode/return": 1.0})
        console.finish([], [])
    text = output(console)
    assert ("╭" in text) is live
    assert ("2025-01-02 03:04:10  1,000/10,000 frames" in text) is not live
    if "NO_COLOR" in environment:
        assert not re.search(r"\x1b\[[0-9;]*3[0-7]m", text)


def test_a_real_terminal() -> None:
    """A run in a pseudo-terminal: the panel is drawn in place and the cursor comes back."""
    script = """
import sys, time
sys.path.insert(0, sys.argv[1])
from test_console import config
from rltool.console import Console
with Console(config()) as console:
    console.start([("seed", "0")])
    for frames in range(0, 10_001, 1000):
        time.sleep(0.06)
        console.progress(frames, {"episode/return": float(frames)})
    print("printed by an environment")
    console.finish([("result", "475")], ["rltool eval"])
"""
    leader, follower = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "80", "LINES": "30"}
    environment.pop("NO_COLOR", None)
    with subprocess.Popen(
        [sys.executable, "-c", script, str(Path(__file__).parent)], stdout=follower, stderr=follower, env=environment
    ) as process:
        os.close(follower)
        received = b""
        while True:
            try:
                chunk = os.read(leader, 65536)
            except OSError:  # Linux's way of saying that the other side has closed
                break
            if not chunk:
                break
            received += chunk
    os.close(leader)
    text = received.decode()
    assert process.returncode == 0, text
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1
    assert "printed by an environment" in text
    assert "10,000/10,000 frames (100%)" in re.sub(r"\x1b\[[0-9;]*m", "", text)
    assert text.rstrip().endswith("rltool eval")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0.0, "0"),
        (9351.24, "9,351.2"),
        (312.44, "312.4"),
        (-1234567.4, "-1,234,567"),
        (5e7, "5e7"),
        (3e-4, "3e-4"),
        (2.5e-5, "2.5e-5"),
        (0.0123, "0.0123"),
        (1.234, "1.23"),
        (500.0, "500"),
        (float("nan"), "nan"),
        (float("-inf"), "-inf"),
    ],
)
def test_numbers(value: float | None, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00:00"), (61.9, "0:01:01"), (3600, "1:00:00"), (90061, "1d 1:01:01")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text

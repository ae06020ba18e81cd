"""Environments that fail in every way, and what is left of the run and of the machine."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import gymnasium
import probes
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from probes import collector, gym_config, run
from safetensors.torch import load_file

from rltool import reporting, watchdog
from rltool.checkpoint import read_header
from rltool.cli import main
from rltool.composition import read_overrides
from rltool.config import load_node
from rltool.configfiles import ConfigFiles
from rltool.errors import EnvironmentFault
from rltool.launch import read_resumption
from rltool.logs import TensorBoardLogger
from rltool.schema import TensorBoardConfig
from rltool.seeding import Stream, seeds
from rltool.training import train
from rltool.watchdog import Watchdog

pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")

# Two whole batches of 30 frames, then the fault in the third: at step 24, after 69 frames.
FAULTY = ("env=gym", "env.id=probes:Probe-v0", "env.num_envs=3", "algo.frames_per_batch=30", "total_frames=120")
AT, FRAME, SAVED = 24, 69, 60
BACKENDS = ("sync", "threads", "async")


def drawn(index: int) -> int:
    """What a probe of a run with seed 0 draws at its first reset."""
    start = seeds(0, Stream.TRAIN_ENV, 3)[index]
    return int(gymnasium.utils.seeding.np_random(start)[0].integers(10))


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    """No process, no thread but one that hangs, and no shared memory outlives a run."""
    yield
    assert not multiprocessing.active_children()
    assert not [thread for thread in threading.enumerate() if thread.name == "watchdog"]
    assert not [thread for thread in threading.enumerate() if not (thread.daemon or thread is threading.main_thread())]
    assert not [name for name in os.listdir("/dev/shm") if str(os.getpid()) in name]


def unexpected(fault: EnvironmentFault) -> None:
    raise AssertionError("it could be interrupted") from fault


def failed(
    backend: str, fault: str, *, index: int = 1, timeout: float | None = None, **changes: object
) -> EnvironmentFault:
    """The fault of one of three environments while they are collected from."""
    config = gym_config(
        num_envs=3, backend=backend, n=None, fault=fault, at=AT, drew=drawn(index), timeout=timeout, **changes
    )
    with closing(config.build(seed=0)) as env, Watchdog(timeout, unexpected):
        collecting = collector(env, frames=30)  # type: ignore[arg-type]
        for _ in range(SAVED // 30):
            collecting.collect()
        with pytest.raises(EnvironmentFault) as caught:
            collecting.collect()
        assert collecting.frames == SAVED
        assert collecting.state_dict() == {}
    assert caught.value.frame == FRAME
    assert str(caught.value).endswith(f". At frame {FRAME} of the run")
    return caught.value


def line_of(text: str) -> int:
    """The number of a line of the probes."""
    lines = Path(probes.__file__).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


def test_the_environments_drew_different_numbers() -> None:
    assert len({drawn(index) for index in range(3)}) == 3


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_an_environment_raises_is_told_with_its_own_traceback(
    backend: str, capsys: pytest.CaptureFixture[str]
) -> None:
    fault = failed(backend, "raise")
    where = line_of('ZeroDivisionError("the probe broke")')
    text = f"step {AT} raised ZeroDivisionError: the probe broke (probes.py:{where})"
    assert str(fault).startswith(f"environment 1 (Probe-v0, Probe): {text}")
    frames = (
        f'  File "{probes.__file__}", line {where}, in step\n    raise ZeroDivisionError("the probe broke")\n'
        "ZeroDivisionError: the probe broke\n"
    )
    assert fault.trace == f"Traceback (most recent call last):\n{frames}", "the environment's frames alone"
    assert frames in "".join(traceback.format_exception(fault)), "what goes into the log"
    assert reporting.show(fault, "rltool train") == 1
    assert capsys.readouterr().err == f"rltool train: {fault}\n{frames}"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("exit", rf"step {AT} raised SystemExit: 0 \(probes\.py:\d+\)"),
        ("observation of another length", rf"observation of step {AT} must have shape \(1,\) .* found shape \(2,\)"),
        ("observation of text", rf"observation of step {AT} must have .*fits float32, found shape \(1,\) of <U4"),
        ("reward None", rf"the reward of step {AT} must be one number, found None"),
        ("info None", rf"the info of step {AT} must be a dict, found NoneType"),
    ],
)
def test_every_breach_names_the_environment_and_the_frame(backend: str, fault: str, message: str) -> None:
    assert re.match(rf"environment 1 \(Probe-v0, Probe\): {message}", str(failed(backend, fault)))


@pytest.mark.parametrize(
    ("fault", "how", "place"),
    [("die", "exit code 9", ""), ("segfault", "SIGSEGV", r" \(probes\.py:\d+\)")],
)
def test_a_worker_that_dies_is_named_with_its_last_place(fault: str, how: str, place: str) -> None:
    found = failed("async", fault)
    who = rf"the worker process of environment 1 \(Probe-v0\) ended \({how}\){place} without an answer"
    assert re.match(who, str(found))
    assert ("string_at" in found.trace and 'probes.py", line' in found.trace) == (fault == "segfault")


@pytest.mark.parametrize("index", [2, pytest.param(0, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("backend", "fault"),
    [
        ("sync", "sleep"),
        ("sync", "loop"),
        ("threads", "sleep"),
        ("async", "loop"),
        pytest.param("async", "deadlock", marks=pytest.mark.long),
    ],
)
def test_an_environment_that_hangs_is_named_with_its_place(backend: str, fault: str, index: int) -> None:
    found = failed(backend, fault, index=index, timeout=0.2)
    line = {"sleep": "time.sleep(60)", "deadlock": "pthread_mutex_lock(mutex)"}.get(fault)
    place = rf"\(probes\.py:{line_of(line) if line else '[0-9]+'}\)"
    who = rf"\(Probe-v0, Probe\): step {AT}" if backend != "async" else r"\(Probe-v0, each in a worker process\)"
    assert re.match(rf"environment {index} {who} gave no answer within 0\.2 s \(env\.timeout\) {place}", str(found))
    assert f'File "{probes.__file__}", line ' in found.trace
    assert f"{os.sep}rltool{os.sep}" not in found.trace


@pytest.mark.long
def test_workers_and_threads_are_told_to_hang_in_any_thread() -> None:
    def fail(backend: str) -> None:
        found.append(str(failed(backend, "sleep", index=2, timeout=0.2)))

    found: list[str] = []
    for backend in ("threads", "async"):
        thread = threading.Thread(target=fail, args=(backend,))
        thread.start()
        thread.join()
    assert [re.match(r"environment 2 .* gave no answer within 0\.2 s", text) is not None for text in found] == [
        True
    ] * 2


def test_an_environment_that_does_not_close_is_killed(capfd: pytest.CaptureFixture[str]) -> None:
    wrappers = [{"name": "probes:Breaks", "kwargs": {"close": True}}]
    with closing(gym_config(num_envs=2, backend="async", timeout=0.2, wrappers=wrappers).build(seed=0)) as env:
        env.reset()  # type: ignore[attr-defined]
    assert "warning: environment 0: its worker did not end and was killed" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("fault", "text"),
    [("raise", "raised ZeroDivisionError: the probe broke"), ("sleep", "gave no answer within 0.2 s")],
)
@pytest.mark.parametrize("kind", ["vector version", "transforms", "TorchRL"])
def test_other_kinds_of_environments_tell_the_frame_as_well(kind: str, fault: str, text: str) -> None:
    arguments = {"n": None, "fault": fault, "at": AT}
    if kind == "TorchRL":
        node = {"entry_point": f"{__name__}:torchrl_probe", "kwargs": arguments, "timeout": 0.2}
        config: Any = load_node("env", ConfigFiles.find_main().read("env", "torchrl").node | node)
    elif kind == "transforms":
        config = gym_config(transforms=["RewardSum"], timeout=0.2, **arguments)
    else:
        config = gym_config("Vector-v0", num_envs=3, backend="vector", timeout=0.2, **arguments)
    with closing(config.build(seed=0)) as env, Watchdog(0.2, unexpected):
        batches = iter(collector(env, frames=10 * env.num_envs))
        next(batches)
        next(batches)
        with pytest.raises(EnvironmentFault, match=re.escape(text)) as caught:
            next(batches)
    assert caught.value.frame == (AT - 1) * env.num_envs
    assert 'probes.py", line' in caught.value.trace


def torchrl_probe(**arguments: Any) -> Any:
    from torchrl.envs import GymWrapper

    return GymWrapper(probes.Probe(**arguments), categorical_action_encoding=True)


def vector_probes(num_envs: int, **arguments: Any) -> SyncVectorEnv:
    return SyncVectorEnv([partial(probes.Probe, **arguments)] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)


gymnasium.register("Vector-v0", entry_point=probes.Probe, vector_entry_point=vector_probes)


# ----------------------------------------------------------------------------------------------------- the whole run


def tensors(directory: Path) -> dict[str, Any]:
    return load_file(directory / "checkpoints/last.ckpt")


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_failed_run_goes_on_from_the_state_before_the_batch(tmp_path: Path, backend: str, dqn_sound: Path) -> None:
    # CartPole's state could be saved, but what it is in the middle of a batch is of no use.
    words = ("env.num_envs=3", "algo.frames_per_batch=30", "total_frames=120", f"env.backend={backend}")
    breaks = f"env.wrappers=[{{name: 'probes:Breaks', kwargs: {{at: {AT}}}}}]"
    with pytest.raises(EnvironmentFault, match=r"environment 0 .* raised LookupError: no such level"):
        run(tmp_path, "dqn", *words, breaks)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["status"], summary["frames"]) == ("failed", SAVED)
    assert summary["error"].startswith(f"EnvironmentFault: environment 0 (CartPole-v1, CartPoleEnv): step {AT} raised")
    log = (tmp_path / "log.txt").read_text()
    assert f'File "{probes.__file__}", line {line_of("no such level")}, in step' in log
    assert f"train resume={tmp_path} goes on from frame {SAVED}, which is saved" in log
    saved, sound = tensors(tmp_path), tensors(dqn_sound)
    assert saved["rng.policy.state"].equal(sound["rng.policy.state"]), "the noise of the lost batch is drawn again"
    for name, tensor in saved.items():
        if name.startswith(("policy.", "target.", "optim.")):
            assert tensor.equal(sound[name]), name
    assert not [name for name in saved if name.startswith("collector.")]
    words = [f"resume={tmp_path}", "total_frames=150", "env.timeout=7"]
    files = ConfigFiles.find_main()
    resumption = read_resumption(read_overrides(words, files, choices_allowed=False), files)
    assert resumption.changes["env.timeout"] == (300, 7)
    with pytest.raises(EnvironmentFault, match="At frame 129 of the run"):
        train(resumption.config, tmp_path)
    assert read_header(tmp_path).frames == 120


@pytest.fixture(scope="module")
def dqn_sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run, ended where the other one was saved."""
    directory = tmp_path_factory.mktemp("sound")
    run(directory, "dqn", "env.num_envs=3", "algo.frames_per_batch=30", f"total_frames={SAVED}")
    return directory


@pytest.mark.parametrize(
    ("backend", "follow"), [("sync", sys.settrace), pytest.param("threads", threading.settrace, marks=pytest.mark.long)]
)
def test_time_in_a_debugger_does_not_count(
    monkeypatch: pytest.MonkeyPatch, backend: str, follow: Callable[[Any], None]
) -> None:
    def debugger(frame: FrameType, event: str, argument: object) -> Any:
        return debugger if frame.f_code.co_filename == probes.__file__ else None

    monkeypatch.setattr(watchdog, "GRACE", 0.2)
    config = gym_config(num_envs=3, backend=backend, n=None, fault="nap", at=3, drew=drawn(2), timeout=0.2)
    follow(debugger)
    try:
        with closing(config.build(seed=0)) as env, Watchdog(0.2, unexpected):
            assert collector(env, frames=30).collect().shape == (3, 10)  # type: ignore[arg-type]
    finally:
        follow(None)


@pytest.mark.long
def test_code_that_keeps_pythons_lock_is_written_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "GRACE", 0.2)
    words = (*FAULTY, f"env.kwargs={{fault: lock, at: {AT}, drew: {drawn(1)}, n: null}}", "env.timeout=0.3")
    assert run(tmp_path, "dqn", *words)["status"] == "finished"
    log = (tmp_path / "log.txt").read_text()
    assert re.search(rf'Timeout .*File "{probes.__file__}", line \d+ in step', log, re.DOTALL)


def forked(directory: Path, *words: str) -> multiprocessing.Process:
    """A run by the command in a process of its own, which waits half a second for what cannot be interrupted; what it
    prints goes into files."""

    def work() -> None:
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(directory / name, os.O_CREAT | os.O_WRONLY), number)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
        watchdog.GRACE = 0.5
        os._exit(main(["train", *probes.tiny("dqn", *FAULTY, *words, f"hydra.run.dir={directory / 'run'}")]))

    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    return process  # type: ignore[return-value]


@pytest.mark.parametrize("fault", ["stubborn", pytest.param("deadlock", marks=pytest.mark.long)])
def test_code_that_cannot_be_interrupted_ends_the_process_with_everything_written(tmp_path: Path, fault: str) -> None:
    only = f"env.kwargs={{fault: {fault}, at: {AT}, drew: {drawn(1)}, n: null}}"
    process = forked(tmp_path, only, "env.timeout=0.3")
    process.join(60)
    said = (tmp_path / "err").read_text()
    assert process.exitcode == 1, said
    assert re.match(rf"rltool train: environment 1 \(Probe-v0, Probe\): step {AT} gave no answer within 0\.3 s", said)
    assert f". At frame {FRAME} of the run\n" in said
    assert f"in _{fault}\n" in said
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert (summary["status"], summary["frames"]) == ("failed", SAVED)
    assert "gave no answer" in summary["error"]
    assert read_header(tmp_path / "run").frames == SAVED
    assert f"in _{fault}\n" in (tmp_path / "run/log.txt").read_text()


def test_workers_end_with_a_process_that_is_killed(tmp_path: Path) -> None:
    process = forked(tmp_path, "env.backend=async", f"env.kwargs={{fault: loop, at: {AT}, n: null}}")
    children: list[int] = []
    while process.is_alive() and not (len(children) == 3 and all(map(busy, children))):
        time.sleep(0.02)
        children = children_of(process.pid or 0)
    assert len(children) == 3, (tmp_path / "err").read_text()
    process.kill()
    process.join()
    end = time.monotonic() + 5
    while any(map(alive, children)) and time.monotonic() < end:
        time.sleep(0.02)
    assert not [child for child in children if alive(child)]


def busy(pid: int) -> bool:
    """Whether a process has used more processor time than a worker does whose environment does not loop."""
    try:
        ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11]
    except FileNotFoundError:
        return False
    return int(ticks) / os.sysconf("SC_CLK_TCK") > 0.2


def children_of(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


# --------------------------------------------------------------------------------------------- evaluation and logging

EVALUATED = ("eval=default", "eval.interval=40", "logging=tensorboard", "total_frames=120", "stop.return_threshold=1")
BROKEN = "env.wrappers=[{{name: 'probes:Breaks', eval: {{{0}}}}}]"


def test_an_evaluation_that_raises_is_told_once_counted_and_no_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = run(tmp_path, "dqn", *EVALUATED, BROKEN.format("at: 3, every: true"), "quiet=false")
    assert summary["status"] == "finished"
    assert {name: count for name, count in summary["faults"].items() if count} == {"evaluation": 3}  # type: ignore[attr-defined]
    assert (summary["last_evaluation"], summary["best_evaluation"]) == (None, None)
    assert not (tmp_path / "checkpoints/best.ckpt").exists()
    out = capsys.readouterr().out
    (told,) = re.findall(r"warning: the evaluation at 40 frames failed: environment .* Training goes on", out)
    assert re.search(r"step 3 raised LookupError: no such level \(probes\.py:\d+\)", told)
    assert re.search(r"faults +3 evaluations failed; see log\.txt", out)
    log = (tmp_path / "log.txt").read_text()
    assert len(re.findall(r"the evaluation at \d+ frames failed", log)) == 3
    assert 'raise LookupError("no such level")' in log


def test_an_evaluation_that_hangs_is_interrupted_and_the_best_stays(tmp_path: Path) -> None:
    # Pendulum's first evaluation ends before the step that hangs.
    words = ("env=pendulum", "eval=default", "eval.interval=64", "eval.max_steps=10", "eval.num_envs=1")
    words = (*words, "eval.episodes=1", "env.timeout=0.3", BROKEN.format("at: 15, hang: true"), "total_frames=192")
    summary: Any = run(tmp_path, "ppo", *words)
    assert (summary["status"], summary["faults"]["evaluation"]) == ("finished", 1)
    assert summary["best_evaluation"] is not None
    assert "step 15 gave no answer within 0.3 s (env.timeout) (probes.py" in (tmp_path / "log.txt").read_text()


def test_whatever_tensorboard_raises_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils.tensorboard import SummaryWriter

    def refuse(*_: object) -> None:
        raise ValueError("not that tag")

    monkeypatch.setattr(SummaryWriter, "add_scalar", refuse)
    warned: list[str] = []
    logger = logger_of(tmp_path, warned)
    for frames in (10, 20, 30):
        logger.scalars({"a": 1.0}, frames)
    logger.hparams({"a": 1}, {"b": 1.0})
    logger.close()
    assert logger.faults >= 1
    assert warned == [
        "cannot write metrics: ValueError: not that tag. Training goes on; points are lost while this lasts"
    ]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3


def logger_of(directory: Path, warned: list[str]) -> TensorBoardLogger:
    config = TensorBoardConfig(kind="tensorboard", interval=10, histogram_interval=None)
    return TensorBoardLogger(config, directory=directory, warn=warned.append)

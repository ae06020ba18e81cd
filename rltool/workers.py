"""Gymnasium environments in worker processes.

Where processes start afresh, each of them imports this module: it needs little.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import queue
import signal
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import wait
from typing import IO, Any, cast

import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode
from gymnasium.vector.async_vector_env import AsyncState, _async_worker

from rltool.collect import Step
from rltool.contract import EnvContract, leaves_of
from rltool.envs import make_env
from rltool.errors import ConfigError, EnvironmentFault, Problem, RltoolError
from rltool.schema import GymEnvConfig
from rltool.seeding import seed_world
from rltool.simulators import Arrays
from rltool.spaces import Array, LeafSpec, Leaves
from rltool.stopping import STOP_SIGNALS
from rltool.tracebacks import dumped_stack, place_in
from rltool.watchdog import CALLS, no_answer

# How worker processes start, said here because importing torchrl changes Python's default: with fork they start at
# once and know what plugins registered. Elsewhere fork is missing or unsafe.
START_METHOD = "fork" if sys.platform == "linux" else "spawn"
# Of prctl: the signal that the kernel sends a process when its parent ends.
_PR_SET_PDEATHSIG = 1
# What has a worker write down where it is.
_WHERE = getattr(signal, "SIGURG", None)
# Signals by which a process ends for faults of its own.
_CRASHES = ("SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGABRT")
# Seconds to wait for what takes milliseconds where all is well: a stack, an error, the end of a process.
_SHORTLY = 1.0


class WorkerVectorEnv:
    """Gymnasium's ``AsyncVectorEnv`` of :class:`EnvContract`; what goes wrong in a worker is raised here, once.

    Args:
        config: the env node.
        leaves: specs of an observation.
        worlds: a seed for the global generators of each worker.

    Raises:
        ConfigError: a worker cannot make the environment.
        EnvironmentFault: here and from ``reset`` and ``step``: an environment raised, broke its contract or gave no
            answer within ``env.timeout``, or its worker ended. Its traceback is that of the worker.
    """

    def __init__(self, config: GymEnvConfig, leaves: tuple[LeafSpec, ...], worlds: Sequence[int]) -> None:
        self._name, self._leaves = config.id.rpartition(":")[2], leaves
        factories = [partial(make_in_worker, config, index, world, os.getpid()) for index, world in enumerate(worlds)]
        with self._reports():
            self._env = _Workers(factories, config.timeout)

    def reset(self, seeds: Sequence[int | None]) -> Leaves:
        """Starts every environment at its own seed, or where its generator stands; leaves ``[num_envs, *shape]``."""
        with self._reports():
            observation, _ = self._env.reset(seed=list(seeds))
        return leaves_of(observation, self._leaves)

    def step(self, action: Array) -> Step:
        """One step of every environment; those whose episode ends with it start the next one."""
        with self._reports():
            observation, reward, terminated, truncated, info = self._env.step(action)
        final: list[tuple[int, Leaves]] = []
        if "final_obs" in info:
            ended = np.flatnonzero(info["_final_obs"])
            final = [(int(index), leaves_of(info["final_obs"][index], self._leaves)) for index in ended]
        return Step(leaves_of(observation, self._leaves), reward, terminated, truncated, final)

    def read_states(self) -> list[Arrays | None]:
        """The state of each environment."""
        with self._reports():
            return list(self._env.call("read_state"))

    def write_states(self, states: Sequence[Arrays]) -> None:
        """Puts back what :meth:`read_states` gave."""
        with self._reports():
            self._env.call("write_state", states)

    def close(self) -> None:
        """Ends the workers."""
        self._env.close()

    @contextmanager
    def _reports(self) -> Iterator[None]:
        try:
            yield
        except (EOFError, ConnectionError):
            self._env.lost = True
            raise self._ended() from None
        except BlockingIOError:
            self._env.lost = True
            raise self._hanging() from None

    def _hanging(self) -> EnvironmentFault:
        """Names the environments that owe an answer, and where the first of them is."""
        pipes = enumerate(self._env.pipes)
        late = [index for index, pipe in pipes if pipe is not None and pipe.owes and not pipe.poll()]
        stack = self._env.stack(late[0]) if late else ""
        who = ", ".join(map(str, late))
        text = f"environment{'s' * (len(late) > 1)} {who} ({self._name}, each in a worker process)"
        return EnvironmentFault(f"{text} {no_answer(self._env.timeout or 0)}{place_in(stack)}", stack)

    def _ended(self) -> EnvironmentFault:
        """Names the workers that have ended, and how; they may still be on their way out."""
        ready = wait([process.sentinel for process in self._env.processes], timeout=_SHORTLY)
        ended, stack = [], ""
        for index, process in enumerate(self._env.processes):
            if process.sentinel in ready:
                process.join(timeout=_SHORTLY)
            if process.exitcode is not None:
                how = f"exit code {process.exitcode}"
                if process.exitcode < 0:
                    name = signal.Signals(-process.exitcode).name
                    how = name if name in _CRASHES else f"{name}: it was killed, or ran out of memory"
                stack = stack or self._env.dumped(index)
                ended.append(f"the worker process of environment {index} ({self._name}) ended ({how}){place_in(stack)}")
        who = " and ".join(ended) or f"a worker process of {self._name} ended"
        return EnvironmentFault(f"{who} without an answer", stack)


class _Workers(AsyncVectorEnv):
    """Gymnasium's worker processes.

    Args:
        factories: make one environment each.
        timeout: seconds that a worker may take for an answer; None: for ever.

    Attributes:
        lost: whether one of them has ended before its time, or hangs.
    """

    lost = False

    def __init__(self, factories: Sequence[Callable[[], EnvContract]], timeout: float | None) -> None:
        self.timeout = timeout
        # Files without a name: nothing stays of them, however this process ends. Only a fork can inherit them.
        inherited = factories if START_METHOD == "fork" else ()
        self._dumps: list[IO[bytes]] = [tempfile.TemporaryFile() for _ in inherited]  # noqa: SIM115 - until close
        super().__init__(
            factories,
            copy=False,
            worker=partial(_work, self._dumps),
            autoreset_mode=AutoresetMode.SAME_STEP,
            context=START_METHOD,
        )
        # From here on: making an environment may take as long as it wants to.
        self.parent_pipes = [_Pipe(pipe, timeout) for pipe in self.parent_pipes]  # type: ignore[misc]

    @property
    def pipes(self) -> list[_Pipe | None]:
        """The ends of the pipes to the workers; None of those whose environment failed."""
        return cast("list[_Pipe | None]", self.parent_pipes)

    def stack(self, index: int) -> str:
        """Where a worker is; empty where it cannot say."""
        pid = self.processes[index].pid
        if not self._dumps or _WHERE is None or pid is None:
            return ""
        os.kill(pid, _WHERE)
        end = time.monotonic() + _SHORTLY
        while not (found := self.dumped(index)) and time.monotonic() < end:
            time.sleep(0.01)
        return found

    def dumped(self, index: int) -> str:
        """The stack that a worker has written down; empty where it has not."""
        if not self._dumps:
            return ""
        self._dumps[index].seek(0)
        return dumped_stack(self._dumps[index].read().decode(errors="replace"))

    def _raise_if_errors(self, successes: Iterable[bool]) -> None:
        # Gymnasium prints the tracebacks of its workers and raises the last error without its own.
        failed = [index for index, success in enumerate(successes) if not success]
        if not failed:
            return
        for index in failed:
            self.parent_pipes[index].close()
            self.parent_pipes[index] = None  # type: ignore[call-overload]  # as Gymnasium does it
        self._state = AsyncState.DEFAULT
        try:
            # They come in any order.
            errors = sorted((self.error_queue.get(timeout=_SHORTLY) for _ in failed), key=lambda each: int(each[0]))
        except queue.Empty:
            raise EOFError from None
        index, kind, value, trace = errors[0]
        if isinstance(value, str):  # of what kept the environment from being made
            raise kind(value)
        if isinstance(value, RltoolError):
            value.add_note(f"In the worker process of environment {index}:\n{trace}")
            raise value
        raise EnvironmentFault(f"environment {index}, in a worker process: {kind.__name__}: {value}", trace)

    def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
        """Ends the workers: their environments are closed; a worker that has not ended in time is killed.

        Gymnasium's own waits for ever for the answer of a worker that hangs or has ended.
        """
        del timeout
        patience = 0.0 if terminate else _SHORTLY if self.lost else self.timeout
        pipes = [pipe for pipe in self.parent_pipes if pipe is not None]
        for pipe in [] if terminate else pipes:
            with suppress(OSError):
                pipe.send(("close", None))
        end = None if patience is None else time.monotonic() + patience
        for index, process in enumerate(self.processes):
            process.join(None if end is None else max(end - time.monotonic(), 0))
            if process.exitcode is None:
                if not (self.lost or terminate):
                    print(f"warning: environment {index}: its worker did not end and was killed", file=sys.stderr)
                process.kill()
                process.join()
        for pipe in pipes:
            pipe.close()
        self.error_queue.close()
        for dump in self._dumps:
            dump.close()


class _Pipe:
    """The parent's end of a pipe: knows whether its worker owes an answer, and does not wait for it for ever.

    Args:
        pipe: the end.
        timeout: seconds that an answer may take, after which ``recv`` raises BlockingIOError; None: for ever.

    Attributes:
        owes: whether an answer is due.
    """

    def __init__(self, pipe: Any, timeout: float | None) -> None:
        self._pipe, self.owes = pipe, False
        self.poll, self.close = pipe.poll, pipe.close
        self._timed = timeout is not None and sys.platform != "win32"
        if timeout is not None and self._timed:
            # By the operating system: to ask before each read whether there is something costs as much as the read.
            seconds, rest = divmod(timeout, 1)
            with socket.socket(fileno=os.dup(pipe.fileno())) as end:
                limit = struct.pack("ll", int(seconds), int(rest * 1e6))
                end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)

    @property
    def closed(self) -> bool:
        """Whether it is closed."""
        return bool(self._pipe.closed)

    def send(self, message: object) -> None:
        """Asks the worker for something."""
        self._pipe.send(message)
        self.owes = True

    def recv(self) -> Any:
        """Its answer."""
        if self._timed:
            CALLS.leave()
        answer = self._pipe.recv()
        self.owes = False
        return answer


def make_in_worker(config: GymEnvConfig, index: int, world: int, parent: int) -> EnvContract:
    """:func:`make_env` for a worker process (picklable; Gymnasium calls the first in the parent, too, for the spaces).

    Args:
        config, index: as for :func:`make_env`.
        world: seeds the worker's global generators; those of the parent are seeded already.
        parent: process id of the parent.
    """
    if os.getpid() == parent:
        return make_env(config, index)
    seed_world(world)
    # These reach every process of a group (Ctrl-C on a terminal, timeout, a scheduler); when to stop is for the process
    # that saves the checkpoint to say. A worker ends with its parent, whose end of the pipe then closes.
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        # Also in the middle of a step, where it looks at no pipe.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
    try:
        return make_env(config, index)
    except ConfigError as error:
        if ":" in config.id:
            raise
        raise ConfigError(
            Problem(
                "env.id",
                f"{config.id} is registered in this process only: worker processes start afresh and do not know it",
                f"Use env.id=module:{config.id} with the module that registers it, or env.backend=sync",
            )
        ) from error


def _work(
    dumps: Sequence[IO[bytes]],
    index: int,
    make: Callable[[], EnvContract],
    pipe: Any,
    parent_pipe: Any,
    shared_memory: Any,
    errors: Any,
    autoreset_mode: AutoresetMode,
    semaphore: Any,
) -> None:
    """Gymnasium's worker, which tells the parent also what keeps the environment from being made, and where it is when it
    dies or is asked.

    Args:
        dumps: a file for each worker's stack; none where files cannot be inherited.
    """
    if dumps:
        faulthandler.enable(dumps[index], all_threads=False)
        if _WHERE is not None:
            faulthandler.register(_WHERE, dumps[index], all_threads=False)
    try:
        env = make()
    except RltoolError as error:
        pipe.recv()
        errors.put((index, type(error), str(error), ""))
        pipe.send((None, False))
        return
    _async_worker(index, lambda: env, pipe, parent_pipe, shared_memory, errors, autoreset_mode, semaphore)

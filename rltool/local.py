"""Gymnasium environments in this process, one after the other or in several threads."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, NoReturn, TypeVar, cast

import numpy as np
from gymnasium.vector.utils import create_empty_array

from rltool.collect import Step
from rltool.contract import EnvContract, leaves_of
from rltool.errors import EnvironmentFault
from rltool.simulators import Arrays
from rltool.spaces import Array, Leaves
from rltool.watchdog import CALLS, LOOKS, debugging, fault_at

Result = TypeVar("Result")


class LocalVectorEnv:
    """Environments stepped one after the other.

    As Gymnasium's ``SyncVectorEnv`` with ``SAME_STEP`` autoreset, without what it gathers from infos, which costs up to a
    fifth of a MuJoCo step. The leaves that it gives are filled anew by the next call.

    Args:
        factories: make one environment each.

    Attributes:
        envs: the environments, in their order.
    """

    def __init__(self, factories: Sequence[Callable[[], EnvContract]]) -> None:
        self.envs: list[EnvContract] = []
        try:
            self.envs += (make() for make in factories)
        except BaseException:
            self.close()
            raise
        count, first = len(self.envs), self.envs[0]
        self._rows: Any = create_empty_array(first.observation_space, count)
        self._leaves = leaves_of(self._rows, first.leaves)
        self._named = isinstance(self._rows, Mapping)

    def reset(self, seeds: Sequence[int | None]) -> Leaves:
        """Starts every environment at its own seed, or where its generator stands; leaves ``[num_envs, *shape]``."""
        for index, (env, seed) in enumerate(zip(self.envs, seeds, strict=True)):
            self._put(index, env.reset(seed=seed)[0])
        return self._leaves

    def step(self, action: Array) -> Step:
        """One step of every environment; those whose episode ends with it start the next one."""
        count = len(self.envs)
        reward, terminated, truncated = np.empty(count), np.empty(count, np.bool_), np.empty(count, np.bool_)
        final: list[tuple[int, Leaves]] = []
        for index, env in enumerate(self.envs):
            observation, reward[index], over, cut, _ = env.step(action[index])
            terminated[index], truncated[index] = over, cut
            if over or cut:
                final.append((index, env.as_leaves(observation)))
                observation, _ = env.reset()
            self._put(index, observation)
        return Step(self._leaves, reward, terminated, truncated, final)

    def read_states(self) -> list[Arrays | None]:
        """The state of each environment; see :meth:`EnvContract.read_state`."""
        return [env.read_state() for env in self.envs]

    def write_states(self, states: Sequence[Arrays]) -> None:
        """Puts back what :meth:`read_states` gave, to be called after a reset."""
        for env in self.envs:
            env.write_state(states)

    def _put(self, index: int, observation: Any) -> None:
        if self._named:
            for name, rows in self._rows.items():
                rows[index] = observation[name]
        else:
            self._rows[index] = observation

    def close(self) -> None:
        """Closes every environment."""
        for env in self.envs:
            env.close()


class ThreadedVectorEnv:
    """Environments in chunks, each a :class:`LocalVectorEnv` with a thread of its own; answers as one of them all would.

    The first chunk is stepped by the calling thread. Every environment is made and stepped by one and the same thread,
    since some (those that draw with OpenGL) do not bear another. Environments that draw from the *global* generators
    of Python or NumPy get their numbers in no fixed order here.

    Args:
        factories: make one environment each.
        threads: how many chunks; more than there are environments are not used.
        timeout: seconds that a thread may take longer than the calling one; None: for ever.

    Raises:
        EnvironmentFault: here and from all methods, but not from close: a thread gives no answer; its place is named.
    """

    def __init__(
        self, factories: Sequence[Callable[[], EnvContract]], threads: int, timeout: float | None = None
    ) -> None:
        parts = [part.tolist() for part in np.array_split(np.arange(len(factories)), min(threads, len(factories)))]
        self._threads = [_Thread(timeout) for _ in parts[1:]]
        self._chunks: list[LocalVectorEnv] = []
        self._slices = [slice(part[0], part[-1] + 1) for part in parts]
        try:
            for place, part in enumerate(parts):
                make = partial(LocalVectorEnv, [factories[index] for index in part])
                # One after the other: what making them touches (imports, warnings) belongs to the whole process.
                self._chunks.append(self._threads[place - 1].call(make) if place else make())
        except BaseException:
            self.close()
            raise

    @property
    def envs(self) -> list[EnvContract]:
        """The environments, in their order."""
        return [env for chunk in self._chunks for env in chunk.envs]

    def reset(self, seeds: Sequence[int | None]) -> Leaves:
        """Starts every environment at its own seed; leaves ``[num_envs, *shape]``."""
        return _joined(self._together([partial(chunk.reset, seeds[part]) for chunk, part in self._parts()]))

    def step(self, action: Array) -> Step:
        """One step of every environment."""
        answers = self._together([partial(chunk.step, action[part]) for chunk, part in self._parts()])
        observations, rewards, terminated, truncated, finals = zip(*answers, strict=True)
        return Step(
            _joined(observations),
            np.concatenate(rewards),
            np.concatenate(terminated),
            np.concatenate(truncated),
            [
                (part.start + index, last)
                for part, final in zip(self._slices, finals, strict=True)
                for index, last in final
            ],
        )

    def read_states(self) -> list[Arrays | None]:
        """The state of each environment."""
        return [state for part in self._together([chunk.read_states for chunk in self._chunks]) for state in part]

    def write_states(self, states: Sequence[Arrays]) -> None:
        """Puts back what :meth:`read_states` gave."""
        self._together([partial(chunk.write_states, states) for chunk in self._chunks])

    def _parts(self) -> zip[tuple[LocalVectorEnv, slice]]:
        return zip(self._chunks, self._slices, strict=True)

    def _together(self, calls: Sequence[Callable[[], Result]]) -> list[Result]:
        """The results of calls, one a chunk, that run at the same time; all have ended when this returns or raises."""
        for thread, call in zip(self._threads, calls[1:], strict=True):
            thread.begin(call)
        try:
            first = calls[0]()
        finally:
            answers = [thread.end() for thread in self._threads]
        return [first, *(answer() for answer in answers)]

    def close(self) -> None:
        """Closes every environment, each in its thread, and ends the threads; those that hang are left behind."""
        for place, chunk in enumerate(self._chunks):
            if not place:
                chunk.close()
            elif not self._threads[place - 1].hangs:
                self._threads[place - 1].begin(chunk.close)
                self._threads[place - 1].end()()
        for thread in self._threads:
            thread.stop()


class _Thread:
    """A thread that makes one call at a time (Python's own pools take several times as long to hand one over).

    Args:
        timeout: seconds to wait for an answer; None: for ever.

    Attributes:
        hangs: whether it gave none.
    """

    def __init__(self, timeout: float | None) -> None:
        self._timeout, self.hangs = timeout, False
        self._calls: SimpleQueue[Callable[[], Any] | None] = SimpleQueue()
        self._answers: SimpleQueue[Callable[[], Any]] = SimpleQueue()
        self._thread = Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        for call in iter(self._calls.get, None):
            try:
                answer = partial(_given, call())
            except BaseException as error:  # raised where the answer is asked for
                answer = partial(_raised, error)
            self._answers.put(answer)
            del call, answer  # nothing is kept alive while waiting

    def begin(self, call: Callable[[], Any]) -> None:
        """Has a call made."""
        self._calls.put(call)

    def end(self) -> Callable[[], Any]:
        """Waits for the end of that call; gives what returns its result or raises its error."""
        if self.hangs:
            return partial(_raised, EnvironmentFault("a thread that hangs was asked once more"))
        if self._timeout is None:
            return self._answers.get()
        CALLS.leave()
        waited = 0
        # Bit by bit: time while the process is stopped (Ctrl-Z) counts for one bit at most.
        while waited < LOOKS or debugging():
            try:
                return self._answers.get(timeout=self._timeout / LOOKS)
            except Empty:
                waited += 1
        self.hangs = True
        frame = sys._current_frames().get(self._thread.ident or 0)
        return partial(_raised, fault_at(frame, self._timeout))

    def call(self, call: Callable[[], Result]) -> Result:
        """The result of a call made in the thread, however long it takes."""
        self.begin(call)
        return cast("Result", self._answers.get()())

    def stop(self) -> None:
        """Ends the thread; one that hangs ends with the process."""
        self._calls.put(None)
        if not self.hangs:
            self._thread.join()


def _given(value: Result) -> Result:
    return value


def _raised(error: BaseException) -> NoReturn:
    raise error


def _joined(parts: Sequence[Leaves]) -> Leaves:
    """Batches of leaves one after the other."""
    return {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}

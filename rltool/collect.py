"""Batches of experience from a vectorised environment.

The inner loop writes a flat mapping of leaves into preallocated arrays: no TensorDict a step, no device-to-host copy but
the action. Only when the batch is full is it given TorchRL's keys and shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, NoReturn, Protocol

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from rltool.choices import best, masked
from rltool.errors import EnvironmentFault, NonFiniteError, Overtime
from rltool.experience import Episodes, RunningEpisodes, Tally
from rltool.importing import raised
from rltool.simulators import Arrays
from rltool.spaces import MASK, Array, Key, LeafSpec, Leaves, nested
from rltool.watchdog import CALLS

if TYPE_CHECKING:
    from rltool.actions import ActionSpec

TensorLeaves = dict[Key, Tensor]


class Step(NamedTuple):
    """What a vectorised environment answers to one step of all its environments.

    Attributes:
        observation: leaves ``[num_envs, *shape]``, already of the next episode where one ended.
        reward: ``[num_envs]``.
        terminated, truncated: ``[num_envs]`` booleans.
        final: (index, leaves ``[*shape]``) of each environment whose episode ended: its true last observation.
    """

    observation: Leaves
    reward: Array
    terminated: Array
    truncated: Array
    final: Sequence[tuple[int, Leaves]]


class Explorer(Protocol):
    """A policy that collects: its random numbers are drawn a batch at a time and handed in step by step."""

    def draw(self, steps: int, num_envs: int, frames: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        """Noise for a batch, on the CPU: tensors ``[steps, num_envs, …]``; ``frames`` is the counter at its start."""

    def __call__(self, leaves: TensorLeaves, noise: tuple[Tensor, ...]) -> Tensor:
        """Actions in policy units for one step: ``[num_envs, *policy_shape]``."""


class Behaviour(Protocol):
    """The part of an algorithm that a collector looks at, anew for each batch."""

    @property
    def explorer(self) -> Explorer:
        """The policy to collect with."""

    @property
    def frames_per_batch(self) -> int:
        """Frames of the next batch."""

    @property
    def batch_frames(self) -> int:
        """Frames of every batch after the warm-up."""

    @property
    def actions(self) -> ActionSpec:
        """The action space in the units that the policy works in."""

    def abandon_episodes(self) -> None:
        """Told that the open episodes do not go on."""


class VectorEnvironment(Protocol):
    """What a collector steps: see :class:`rltool.envs.GymVectorEnv`."""

    num_envs: int
    leaves: tuple[LeafSpec, ...]
    unsaved: str

    def reset(self) -> Leaves:
        """Leaves ``[num_envs, *shape]`` of fresh episodes."""

    def step(self, action: Array) -> Step:
        """One step of every environment."""

    def restart(self) -> Leaves:
        """Leaves of fresh episodes, other ones than before."""

    def read_states(self) -> list[Arrays | None]:
        """The state of each environment in the middle of its episode."""

    def write_states(self, states: Sequence[Arrays]) -> None:
        """Puts them back."""


class Collector:
    """Iterates over batches until ``total_frames`` frames were collected (the last batch is a whole one).

    Args:
        env: a vectorised environment that resets by itself.
        behaviour: where the policy to collect with and the size of the next batch are read.
        total_frames: the budget; negative for no end.
        generator: the policy's random numbers, on the CPU.
        device: where the policy lives and the batches go.
        frames: frames collected by earlier sessions of the run.
        skip: told, a line, of a batch that is not finite; such batches are left out then, and all environments start
            anew. None: they end the run.

    Yields:
        A TensorDict ``[num_envs, steps]`` with TorchRL's keys: the observation's leaves, ``action`` in policy units,
        and under ``next`` the leaves of the *true* next observation, ``reward``, ``terminated``, ``truncated``,
        ``done`` (``[num_envs, steps, 1]``).

    Attributes:
        frames: frames collected, those of earlier sessions included.
        episodes: those that ended in the last batch.
        tally: its rewards and actions.
        continued: whether the open episodes of an earlier session went on here.
        left_out, batches: batches that were left out, and all that were collected here.

    Raises:
        NonFiniteError: an observation, action or reward of the batch is NaN or infinite; the first one is named.
        EnvironmentFault: an environment failed; the frame is named. The collector is then where the batch began, and the
            open episodes are lost.
    """

    def __init__(
        self,
        env: VectorEnvironment,
        behaviour: Behaviour,
        *,
        total_frames: int,
        generator: torch.Generator,
        device: torch.device,
        frames: int = 0,
        skip: Callable[[str], object] | None = None,
    ) -> None:
        self._env = env
        self._behaviour = behaviour
        self._generator = generator
        self._device = device
        self.total_frames = total_frames
        self.frames = frames
        self.episodes, self.tally = Episodes(), Tally()
        self._running = RunningEpisodes(env.num_envs)
        self._current: Leaves | None = None
        self._begin = env.reset
        self.continued = False
        self._skip, self.left_out, self.batches = skip, 0, 0
        self._broken, self._step = False, 0

    @property
    def frame(self) -> int:
        """Frames before the step that the environments are at, in the middle of a batch."""
        return self.frames + self._step * self._env.num_envs

    def state_dict(self) -> dict[str, Tensor]:
        """The open episodes: states of the environments, what was observed last, returns and lengths so far. Nothing where
        the environments cannot be saved, or stand in the middle of a batch that was not finished."""
        lost = self._env.unsaved or self._broken or self._current is None
        states = [] if lost else self._env.read_states()
        known = [state for state in states if state is not None]
        if not known or len(known) < len(states):
            return {}
        arrays = {f"env.{index}.{name}": array for index, state in enumerate(known) for name, array in state.items()}
        arrays |= {f"current.{'.'.join(leaf)}": array for leaf, array in (self._current or {}).items()}
        tensors = {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}
        return tensors | {f"episode.{name}": tensor for name, tensor in self._running.state_dict().items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Goes on with open episodes, where there are any and these environments can.

        Raises:
            KeyError, ValueError, EnvironmentFault: they are of other environments.
        """
        if not state or self._env.unsaved:
            return
        current = self._env.reset()
        states: list[Arrays] = [{} for _ in range(self._env.num_envs)]
        for name, tensor in state.items():
            part, _, rest = name.partition(".")
            if part == "env":
                index, _, inner = rest.partition(".")
                states[int(index)][inner] = tensor.numpy()
        self._env.write_states(states)
        self._current = {}
        for key, array in current.items():
            saved = state[f"current.{'.'.join(key)}"].numpy()
            if saved.shape != array.shape:
                raise ValueError(f"{'.'.join(key)} has shape {saved.shape}, expected {array.shape}")
            self._current[key] = saved
        self._running.load_state_dict({name: state[f"episode.{name}"] for name in ("return", "length")})
        self.continued = True

    def __iter__(self) -> Iterator[TensorDict]:
        while self.total_frames < 0 or self.frames < self.total_frames:
            self.batches += 1
            try:
                batch = self.collect()
            except NonFiniteError as fault:
                if self._skip is None:
                    raise
                self._leave_out(fault, self._skip)
            else:
                yield batch

    def _leave_out(self, fault: NonFiniteError, skip: Callable[[str], object]) -> None:
        """Goes on without a batch: what an environment answers after a NaN is as bad, so all start anew."""
        self.left_out += 1
        if self.left_out == 1:
            skip(left_out_in_words(fault))
        self.frames += fault.batch["reward"].numel()
        self._behaviour.abandon_episodes()
        self.episodes, self.tally = Episodes(), Tally()
        self._running = RunningEpisodes(self._env.num_envs)
        self._current, self._begin = None, self._env.restart

    def collect(self) -> TensorDict:
        """The next batch; ``episodes`` then holds those that ended in it."""
        env, device, actions = self._env, self._device, self._behaviour.actions
        num_envs, explorer = env.num_envs, self._behaviour.explorer
        steps = -(-self._behaviour.frames_per_batch // num_envs)
        on_host = device.type == "cpu"
        # Pinned where there is a GPU, which then fetches its inputs without a copy in between.
        views = {
            spec.key: torch.empty(
                (steps + 1, num_envs, *spec.shape), dtype=getattr(torch, spec.dtype), pin_memory=not on_host
            )
            for spec in env.leaves
        }
        observed = {key: view.numpy() for key, view in views.items()}
        taken = actions.empty(steps, num_envs)
        chosen = taken.numpy()
        reward = np.empty((steps, num_envs), np.float32)
        terminated, truncated = np.empty((steps, num_envs), np.bool_), np.empty((steps, num_envs), np.bool_)
        finals: list[tuple[int, int, Leaves]] = []

        before = self._generator.get_state()
        noise = explorer.draw(steps, num_envs, self.frames, self._generator)
        self._broken, self._step = True, 0  # until the batch is whole
        try:
            if self._current is None:
                with CALLS:
                    self._current = self._begin()
            for key, array in self._current.items():
                observed[key][0] = array
            # All rows at once: taking them one by one costs as much as a small policy.
            rows = {key: view.unbind(0) for key, view in views.items()}
            draws = [part.to(device).unbind(0) for part in noise]
            with torch.no_grad():
                for t in range(steps):
                    self._step = t
                    leaves = {
                        key: row[t] if on_host else row[t].to(device, non_blocking=True) for key, row in rows.items()
                    }
                    action = explorer(leaves, tuple(draw[t] for draw in draws))
                    chosen[t] = action.numpy() if on_host else action.cpu().numpy()
                    with CALLS:
                        step = env.step(actions.to_env(chosen[t]))
                    reward[t], terminated[t], truncated[t] = step.reward, step.terminated, step.truncated
                    for key, array in step.observation.items():
                        observed[key][t + 1] = array
                    for index, final in step.final:
                        finals.append((t, index, final))
        except (EnvironmentFault, Overtime) as error:
            self._generator.set_state(before)
            fail("the environments", error, self.frame)
        self._current = {key: array[steps].copy() for key, array in observed.items()}

        following = {key: view[1:].clone() for key, view in views.items()}
        for t, index, final in finals:
            for key, array in final.items():
                following[key][t, index] = torch.as_tensor(array)
        try:
            self._check_finite(observed, finals, chosen, reward)
        except NonFiniteError:
            if self._skip is None:
                self._generator.set_state(before)  # the run ends where the batch began
            raise
        self.episodes = self._running.add(reward, terminated | truncated)
        self.tally = Tally.of(reward, chosen, actions)
        self.frames += steps * num_envs
        self._broken, self._step = False, 0
        return self._batch(
            {key: view[:-1] for key, view in views.items()}, following, taken, reward, terminated, truncated
        )

    def _batch(
        self,
        observation: Mapping[Key, Tensor],
        following: Mapping[Key, Tensor],
        action: Tensor,
        reward: Array,
        terminated: Array,
        truncated: Array,
    ) -> TensorDict:
        ends = {"reward": reward, "terminated": terminated, "truncated": truncated, "done": terminated | truncated}
        columns: dict[Key, Tensor] = {**observation, ("action",): action}
        columns |= {("next", name): torch.from_numpy(array).unsqueeze(-1) for name, array in ends.items()}
        columns |= {("next", *key): value for key, value in following.items()}
        steps, num_envs = reward.shape
        batch = TensorDict(nested({key: column.transpose(0, 1) for key, column in columns.items()}), [num_envs, steps])
        return batch if self._device.type == "cpu" else batch.to(self._device)

    def _check_finite(
        self, observed: Mapping[Key, Array], finals: Sequence[tuple[int, int, Leaves]], action: Array, reward: Array
    ) -> None:
        # Step, its place among what a step makes, environment, name and array: the first fault is then the cause and not
        # its effect.
        arrays = [*((".".join(key), array) for key, array in observed.items()), ("action", action), ("reward", reward)]
        faults: list[tuple[int, int, int, str, Array]] = []
        for order, (name, array) in enumerate(arrays):
            if not _finite(array):
                step, index = (int(place) for place in np.argwhere(~np.isfinite(array))[0][:2])
                faults.append((step, order, index, name, array[step, index]))
        for t, index, final in finals:
            for key, array in final.items():
                if not _finite(array):
                    faults.append(
                        (t + 1, len(arrays), index, ".".join(key) + " (last of an episode)", np.asarray(array))
                    )
        if faults:
            step, _, index, name, array = min(faults, key=lambda fault: fault[:3])
            value, frame = array[~np.isfinite(array)].flat[0], self.frames + step * reward.shape[1]
            raise NonFiniteError(
                f"{name} of environment {index} is {value} at frame {frame}. Nothing was learned from this batch; mend the "
                "environment, or look at its inputs",
                {name: torch.from_numpy(array) for name, array in arrays},
                learned=False,
            )

    def shutdown(self) -> None:
        """Does nothing: the environment belongs to whoever built it. (TorchRL's collectors have this method.)"""


def left_out_in_words(fault: NonFiniteError) -> str:
    """The line on the first batch that is left out."""
    return (
        f"{fault}. The batch is left out and all environments start anew; the same goes for all that follow like it "
        "(on_nonfinite=skip), and summary.json counts them"
    )


def named(batch: TensorDictBase) -> dict[str, Tensor]:
    """The tensors of a batch by dotted names."""
    return {key if isinstance(key, str) else ".".join(key): value for key, value in batch.items(True, True)}


def fail(who: str, error: BaseException, frame: int) -> NoReturn:
    """Raises what environments raised as an :class:`EnvironmentFault` that knows the frame of the run.

    Args:
        who: names the environments, where the error does not.
        error: what they raised.
        frame: at which it happened.
    """
    fault = error if isinstance(error, EnvironmentFault) else EnvironmentFault(f"{who}: {raised(error)}")
    fault.frame = frame
    raise fault from fault.__cause__ if fault is error else error


def _finite(array: Array) -> bool:
    array = np.asarray(array)
    return array.dtype.kind != "f" or bool(np.isfinite(array).all())


class RandomExplorer:
    """Random actions: valid ones where the environment masks them, else the same whatever is observed."""

    def __init__(self, actions: ActionSpec, *, masked: bool = False) -> None:
        self._actions, self._masked = actions, masked

    def draw(self, steps: int, num_envs: int, frames: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        """The actions themselves; a number for each option where masks are yet to come."""
        del frames
        if self._masked:
            return (torch.rand(steps, num_envs, self._actions.size, generator=generator),)
        return (self._actions.random(steps * num_envs, generator).unflatten(0, (steps, num_envs)),)

    def __call__(self, leaves: TensorLeaves, noise: tuple[Tensor, ...]) -> Tensor:
        """The drawn action, or the valid options with the largest numbers."""
        (drawn,) = noise
        return best(masked(drawn, leaves[MASK]), self._actions.nvec) if self._masked else drawn

"""Where experience waits to be learned from."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from rltool.errors import ConfigError, Problem
from rltool.memory import check_disk, check_memory
from rltool.metrics import Metrics
from rltool.spaces import Array, Key, LeafSpec, Leaves, nested

if TYPE_CHECKING:
    from rltool.actions import ActionSpec
    from rltool.schema import PrioritizedBufferConfig, ReplayBufferConfig, RolloutBufferConfig

Storage = Literal["memory", "memmap"]

# Priorities that are looked at for a metric, at most.
_LOOKED_AT = 4096
# Room for frames aside at first: one for so many rows of the ring.
_ASIDE = 64


class RolloutBuffer:
    """The last batch, drawn without replacement: each frame at most once an epoch.

    Args:
        config: the buffer node.
        generator: the order of the frames, on the CPU.
    """

    def __init__(self, config: RolloutBufferConfig, *, generator: torch.Generator) -> None:
        del config
        self._generator = generator

    def epoch(self, data: Mapping[str, Tensor], size: int) -> Iterator[dict[str, Tensor]]:
        """Minibatches of ``size`` frames in a new order, one gather for all; the remainder sits out.

        Args:
            data: tensors ``[N, …]`` by name; each minibatch holds ``[size, …]`` of them.
        """
        first = next(iter(data.values()))
        count = len(first) // size
        order = torch.randperm(len(first), generator=self._generator)[: count * size].to(first.device)
        shuffled = [column[order].unflatten(0, (count, size)).unbind(0) for column in data.values()]
        for minibatch in zip(*shuffled, strict=True):
            yield dict(zip(data, minibatch, strict=True))


class ReplayBuffer:
    """Uniform replay that stores every observation, and every frame of a stack of frames, once.

    Steps are numbered in order of time over all environments: environment e takes number ``t·num_envs + e`` at step t.
    ``number % capacity`` is the row of a step's action, reward and flags (its ``index`` in what is drawn), so the rows
    are a ring of the newest ``capacity`` steps, all of which can be drawn. The observations are kept, by the same
    numbers, in the rings of :class:`Frames`: one for the leaves of each depth of stack.

    Args:
        config: the buffer node.
        generator: its random numbers, on the CPU.
        device: where minibatches go; the tables stay in host memory.
        leaves: what an observation is made of: entries of a batch, and of its ``next``, that are stored once.
        actions: the action space, in whose policy units actions are stored.

    Raises:
        ConfigError: the buffer would not fit into the memory, or onto the disk, that is free.
    """

    def __init__(
        self,
        config: ReplayBufferConfig | PrioritizedBufferConfig,
        *,
        generator: torch.Generator,
        device: torch.device,
        leaves: Sequence[LeafSpec],
        actions: ActionSpec,
    ) -> None:
        self.size = config.size
        check_room(config, leaves, actions)
        self._generator, self._device, self._storage = generator, device, config.storage
        self._stacks = {
            stack: tuple(leaf.key for leaf in leaves if leaf.stack == stack)
            for stack in sorted({leaf.stack for leaf in leaves})
        }
        self._leaves = {key for leaf in leaves for key in (leaf.key, ("next", *leaf.key))}
        self._num_envs = self._capacity = self._count = 0
        self._columns: Leaves = {}
        self._frames: list[Frames] = []

    def __len__(self) -> int:
        return min(self._count, self._capacity)

    def extend(self, batch: TensorDict) -> None:
        """Stores the transitions of a batch ``[num_envs, steps]``; of a batch larger than the buffer, the newest.

        The first batch says how many environments there are: ``size`` is rounded up to a multiple of them.
        """
        num_envs, steps = batch.batch_size
        if not self._count:
            self._start(num_envs)
        assert num_envs == self._num_envs, "a run keeps its number of environments"
        kept = min(steps, self._capacity // num_envs)
        arrays = {
            (key if isinstance(key, tuple) else (key,)): value.cpu().numpy()[:, steps - kept :].swapaxes(0, 1)
            for key, value in batch.items(True, True)
        }
        columns = {key: array for key, array in arrays.items() if key not in self._leaves}
        if not self._columns:
            self._columns = _tables(self._storage, self._capacity, columns, 2)
        for key, array in columns.items():
            _write(self._columns[key], self._count, array)
        for frames in self._frames:
            frames.write(self._count, arrays)
        self._count += kept * num_envs

    def draw(self, count: int, size: int) -> Iterator[TensorDict]:
        """``count`` minibatches of ``size`` transitions as TensorDicts ``[k, size]``, here all in one.

        Raises:
            ValueError: fewer than ``size`` transitions are stored (they would be drawn with repeats).
        """
        self._check_enough(size)
        if count:
            index = torch.randint(len(self), (count * size,), generator=self._generator)
            yield self._drawn(index.unflatten(0, (count, size)))

    def _check_enough(self, size: int) -> None:
        if len(self) < size:
            raise ValueError(f"{len(self)} transitions are stored, too few for a minibatch of {size}")

    def set_beta(self, frames: int, budget: int) -> float | None:
        """The exponent of the importance weights; none here."""
        del frames, budget
        return None

    def update_priority(self, drawn: TensorDict, td_error: Tensor) -> None:
        """Takes in |δ| ``[k, size]`` of what was drawn; all the same to uniform replay."""
        del drawn, td_error

    def metrics(self, index: Tensor) -> Metrics:
        """How full it is, and the age of a minibatch.

        Args:
            index: the rows ``[size]`` of the minibatch, on any device.
        """
        rows = index.cpu().numpy()
        age = (self._count - 1 - rows) % self._capacity
        filled: Metrics = {"buffer/filled": torch.tensor(len(self) / self._capacity)}
        return filled | ({"buffer/replay_age": torch.tensor(float(age.mean()))} if age.size else {})

    def largest_reward(self) -> float:
        """The largest absolute reward of what is stored."""
        return float(np.abs(self._columns["next", "reward"][: len(self)]).max())

    def state_dict(self) -> dict[str, Tensor]:
        """Everything that later draws depend on, oldest first.

        ``data.<key>`` ``[N, …]``: action, reward, flags; ``count``: how many steps were numbered; ``num_envs``; and what
        :meth:`Frames.state` lists.
        """
        if not len(self):
            return {}
        rows = self._newest() % self._capacity
        state = {f"data.{_dotted(key)}": torch.from_numpy(column[rows]) for key, column in self._columns.items()}
        state |= {"count": torch.tensor(self._count), "num_envs": torch.tensor(self._num_envs)}
        for frames in self._frames:
            state |= frames.state(self._count)
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Fills an empty buffer with what :meth:`state_dict` gave; each transition keeps its row, so draws go on as they
        would have. A smaller buffer takes the newest transitions that fit; a larger one takes all and fills up further.

        Raises:
            KeyError, ValueError: it is not such a state; the buffer is still empty.
        """
        if not state:
            return
        assert not self._count, "only an empty buffer is filled"
        data = {_key(name.removeprefix("data.")): state[name].numpy() for name in state if name.startswith("data.")}
        count, num_envs = int(state["count"]), int(state["num_envs"])
        held = len(next(iter(data.values())))
        if not 0 < num_envs <= held <= count or any(len(column) != held for column in data.values()):
            raise ValueError(f"{held} transitions of {num_envs} environments among {count} are no state of a buffer")
        self._start(num_envs)
        kept = min(held, self._capacity)
        # A ring that is not full is filled from its first row on, so its numbers begin at 0.
        if kept < self._capacity:
            count = kept
        for frames in self._frames:
            frames.load(state, count)
        self._columns = _tables(self._storage, self._capacity, data, 1)
        for key, values in data.items():
            self._columns[key][np.arange(count - kept, count) % self._capacity] = values[held - kept :]
        self._count = count

    def _start(self, num_envs: int) -> None:
        """An empty buffer for so many environments."""
        steps = -(-self.size // num_envs)
        self._num_envs, self._capacity, self._count, self._columns = num_envs, steps * num_envs, 0, {}
        self._frames = [Frames(keys, stack, num_envs, steps, self._storage) for stack, keys in self._stacks.items()]

    def _newest(self) -> Array:
        """Numbers of the transitions that are stored, oldest first."""
        return np.arange(self._count - len(self), self._count)

    def _drawn(self, index: Tensor) -> TensorDict:
        """The transitions ``[k, size]`` of these rows, with ``index``, on the device."""
        data = self._transitions(index).set("index", index)
        return data if self._device.type == "cpu" else data.to(self._device)

    def _transitions(self, index: Tensor) -> TensorDict:
        """The transitions ``[k, size]`` of these rows, whole."""
        rows = index.reshape(-1).numpy()
        numbers = self._count - 1 - (self._count - 1 - rows) % self._capacity
        found = {key: column[rows] for key, column in self._columns.items()}
        for frames in self._frames:
            observation, following = frames.read(numbers)
            found |= observation | {("next", *key): array for key, array in following.items()}
        columns = {key: torch.from_numpy(array).unflatten(0, index.shape) for key, array in found.items()}
        return TensorDict(nested(columns), index.shape)


class PrioritizedBuffer(ReplayBuffer):
    """Replay in proportion to the TD error: P(i) ∝ (|δ_i| + eps)^α (Schaul et al. 2016, arXiv:1511.05952, eq. 1).

    New transitions enter at the largest priority seen. Importance weights (N P(i))^-β are divided by the largest weight
    that a stored transition can have; the loss multiplies them in before the mean.

    Raises:
        ConfigError: TorchRL's compiled part does not load with the installed torch; names both versions.
    """

    def __init__(
        self,
        config: PrioritizedBufferConfig,
        *,
        generator: torch.Generator,
        device: torch.device,
        leaves: Sequence[LeafSpec],
        actions: ActionSpec,
    ) -> None:
        check_compiled_extension()
        super().__init__(config, generator=generator, device=device, leaves=leaves, actions=actions)
        self._config, self._beta = config, config.beta.start

    def _start(self, num_envs: int) -> None:
        from torchrl.data import PrioritizedSampler

        super()._start(num_envs)
        config = self._config
        self._sampler = PrioritizedSampler(self._capacity, alpha=config.alpha, beta=self._beta, eps=config.eps)
        self._sampler._rng = self._generator  # as TorchRL's buffers hand theirs on

    def extend(self, batch: TensorDict) -> None:
        """Stores the transitions of a batch ``[num_envs, steps]`` at the largest priority seen."""
        super().extend(batch)
        self._sampler.mark_update(torch.from_numpy(self._newest()[-batch.numel() :] % self._capacity))

    def draw(self, count: int, size: int) -> Iterator[TensorDict]:
        """``count`` minibatches ``[1, size]`` with ``index`` and ``priority_weight``, one after the other, so that each
        draw knows the priorities that the step before it wrote."""
        self._check_enough(size)
        for _ in range(count):
            index, info = self._sampler.sample(_Length(len(self)), size)
            # Of a single row the sampler's weight has no dimension.
            weight = info["priority_weight"].reshape(1, size).to(self._device)
            yield self._drawn(index.reshape(1, size)).set("priority_weight", weight)

    def set_beta(self, frames: int, budget: int) -> float | None:
        """Sets and returns β of the schedule at this frame."""
        self._beta = float(self._config.beta.at(frames, budget))
        if self._num_envs:
            self._sampler.beta = self._beta
        return self._beta

    def update_priority(self, drawn: TensorDict, td_error: Tensor) -> None:
        """Writes |δ| ``[k, size]`` back as the priorities of what was drawn."""
        self._sampler.update_priority(drawn["index"].reshape(-1).cpu(), td_error.reshape(-1).cpu())

    def metrics(self, index: Tensor) -> Metrics:
        """Those of uniform replay, and how unequal the priorities of what is stored are."""
        rows = torch.from_numpy(self._newest()[:: -(-len(self) // _LOOKED_AT)] % self._capacity)
        found = torch.as_tensor(self._sampler._sum_tree[rows]).double()
        return {**super().metrics(index), "buffer/priority_spread": found.std(correction=0) / found.mean()}

    def priorities(self) -> Tensor:
        """(|δ| + eps)^α of the stored transitions, oldest first."""
        return torch.as_tensor(self._sampler._sum_tree[torch.from_numpy(self._newest() % self._capacity)])

    def state_dict(self) -> dict[str, Tensor]:
        """The state of uniform replay, the priorities (``priority``) and the largest |δ| so far (``max_priority``)."""
        state = super().state_dict()
        if state:
            largest = torch.as_tensor(self._sampler.default_priority, dtype=torch.float32)
            state |= {"priority": self.priorities(), "max_priority": largest.reshape(())}
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Fills an empty buffer with what :meth:`state_dict` gave, as uniform replay does."""
        if state:
            priority, largest = state["priority"], float(state["max_priority"])
            super().load_state_dict(state)
            self._set_priorities(priority, largest)

    def _set_priorities(self, priority: Tensor, largest: float) -> None:
        """Takes priorities over as they are, oldest first; those of transitions that are not stored come before."""
        index = torch.from_numpy(self._newest() % self._capacity)
        for tree in (self._sampler._sum_tree, self._sampler._min_tree):
            tree[index] = priority[len(priority) - len(self) :]
        self._sampler._max_priority = (largest, None)


class _Length:
    """All that the sampler asks of a storage."""

    ndim = 1

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length


class Frames:
    """The observations of all leaves with the same depth k of stack: of each one, the newest frame only.

    Row ``n % rows`` of a ring holds the newest frame of the observation that step n was taken from. Step n + num_envs is
    the next one of the same environment, so that observation is mostly the frames n - (k-1)·num_envs, …, n, and the one
    that the step leads to the frames n - (k-2)·num_envs, …, n + num_envs. Frames for which this is not true lie *aside*,
    in a table that grows: the last observation of an episode, the older frames of its first one. ``where`` says so, in
    the same row, for each of the k-1 older frames of the observation and the k frames of the next one, oldest first: -1
    for the ring, else the row aside. What goes aside is found by comparing bits and never by flags, so that what is read
    is what was written, whatever an environment or a collector does.

    The newest row of each environment is *pending*: the observation that its last step led to, from which no step was
    taken yet. Where the next batch does not begin with it, its frame is put aside for that last step. The ring has k rows
    an environment more than steps that can be read: one pending, k-1 for the older frames of the oldest observation.

    Args:
        keys: of the leaves.
        stack: k, the number of frames along the first axis of a leaf; 1 for leaves without such an axis.
        num_envs, steps: how many steps, of how many environments, can be read.
        storage: where the tables lie.
    """

    def __init__(self, keys: Sequence[Key], stack: int, num_envs: int, steps: int, storage: Storage) -> None:
        self._keys, self._stack, self._num_envs, self._storage = keys, stack, num_envs, storage
        self._rows = (steps + stack) * num_envs
        self._older = stack - 1
        self._back = num_envs * np.arange(self._older, -1, -1)
        self._where = np.full((self._rows, self._older + stack), -1, np.int32)
        self._ring: Leaves = {}
        self._first = 0  # number of the oldest row of the ring that was ever written
        self._aside: Leaves = {}
        self._used = 0  # rows aside

    def write(self, number: int, batch: Leaves) -> None:
        """Stores the leaves ``[steps, num_envs, *shape]`` of a batch and of its ``next``.

        Args:
            batch: with these leaves among others.
            number: of its first step in the first environment.
        """
        led = {key: batch["next", *key] for key in self._keys}
        # The observations of the batch and the one that will be pending.
        seen = {key: np.concatenate([batch[key], led[key][-1:]]) for key in self._keys}
        newest = self._newest(seen, 2)
        if not self._ring:
            self._ring = _tables(self._storage, self._rows, newest, 2)
            self._aside = _tables(self._storage, self._rows // _ASIDE + 1, newest, 2)
        cut, fresh = self._breaks(number, seen, led)
        ended = np.nonzero(cut[1:])
        final = _at(led, ended)
        jumped = ~self._continues(final, _at(seen, ended), 1)
        # All room is made at once, since that moves what lies aside.
        self._make_room(int(cut.sum()) + self._older * int(fresh.sum() + jumped.sum()))

        (left,) = np.nonzero(cut[0])
        pending = number + left
        self._where[(pending - self._num_envs) % self._rows, -1] = self._put(_at(self._ring, pending % self._rows))
        window = self._window(number, seen, fresh)
        following = np.full_like(window, -1)
        following[:-1] = window[1:]
        moved = np.column_stack([window[ended][:, 1:], self._put(self._newest(final, 1))])
        moved[jumped, :-1] = self._put_older(_at(final, jumped))
        following[ended] = moved
        _write(self._where, number, np.concatenate([window[..., :-1], following], -1))
        for key in self._keys:
            _write(self._ring[key], number, newest[key])

    def _breaks(self, number: int, seen: Leaves, led: Leaves) -> tuple[Array, Array]:
        """Where the frames of a batch are not those in the ring.

        Returns:
            Two masks ``[steps + 1, num_envs]``. cut: the observation is not the one that the step before led to (false
            where there is no step before). fresh: its older frames are not those of the observation before.
        """
        steps = len(next(iter(led.values())))
        cut = np.zeros((steps + 1, self._num_envs), np.bool_)
        cut[1:-1] = ~_same(_at(led, slice(-1)), _at(seen, slice(1, -1)), 2)
        fresh = np.zeros_like(cut)
        fresh[1:] = ~self._continues(_at(seen, slice(1, None)), _at(seen, slice(-1)), 2)
        if number == self._first:
            fresh[0] = True
        else:
            pending = number + np.arange(self._num_envs)
            fresh[0] = cut[0] = ~_same(self._observations(pending), _at(seen, 0), 1)
        return cut, fresh

    def _window(self, number: int, seen: Leaves, fresh: Array) -> Array:
        """Where the frames of each observation lie ``[steps + 1, num_envs, k]``; puts aside what has to be."""
        steps, num_envs = fresh.shape
        # As of the last fresh observation: where its older frames lie. Later frames are in the ring.
        begun = np.full((steps, num_envs, self._stack), -1, np.int32)
        if not self._older:
            return begun
        begun[0, :, :-1] = self._where[(number + np.arange(num_envs)) % self._rows, : self._older]
        begun[fresh, :-1] = self._put_older(_at(seen, fresh))
        step = np.arange(steps)[:, None]
        since = np.maximum.accumulate(np.where(fresh, step, 0))
        frame = np.minimum((step - since)[..., None] + np.arange(self._stack), self._older)
        window: Array = begun[since[..., None], np.arange(num_envs)[:, None], frame]
        return window

    def read(self, numbers: Array) -> tuple[Leaves, Leaves]:
        """The leaves ``[n, *shape]`` of the observations that these steps were taken from and of those they led to."""
        where = self._where[numbers % self._rows, self._older :]
        return self._observations(numbers), self._gather(numbers + self._num_envs, where)

    def _observations(self, numbers: Array) -> Leaves:
        where = np.full((len(numbers), self._stack), -1, np.int32)
        where[:, :-1] = self._where[numbers % self._rows, : self._older]
        return self._gather(numbers, where)

    def _gather(self, numbers: Array, where: Array) -> Leaves:
        """Observations from their frames: those of the row and of the rows before it, unless they lie aside."""
        rows = (numbers[:, None] - self._back) % self._rows
        aside = where >= 0
        elsewhere = where[aside]
        found = {}
        for key in self._keys:
            frames = self._ring[key][rows]
            if len(elsewhere):
                frames[aside] = self._aside[key][elsewhere]
            found[key] = frames if self._older else frames[:, 0]
        return found

    def _newest(self, leaves: Leaves, axis: int) -> Leaves:
        """The newest frame of observations whose frames, if they are stacks, lie along this axis."""
        return _at(leaves, (*[slice(None)] * axis, -1)) if self._older else leaves

    def _continues(self, later: Leaves, earlier: Leaves, axis: int) -> Array:
        """Whether the older frames of an observation are the newer ones of another; true of a single frame."""
        if not self._older:
            return np.ones(next(iter(later.values())).shape[:axis], np.bool_)
        every = [slice(None)] * axis
        return _same(_at(later, (*every, slice(-1))), _at(earlier, (*every, slice(1, None))), axis)

    def _put(self, frames: Leaves) -> Array:
        """Puts frames ``[n, …]`` aside; gives their rows ``[n]``."""
        begin, count = self._used, len(next(iter(frames.values())))
        self._used += count
        for key, array in frames.items():
            self._aside[key][begin : self._used] = array
        return np.arange(begin, self._used, dtype=np.int32)

    def _put_older(self, leaves: Leaves) -> Array:
        """Puts the older frames of stacks ``[n, k, …]`` aside; gives their rows ``[n, k-1]``."""
        if not self._older:
            return np.empty((0, 0), np.int32)
        older = {key: array[:, :-1] for key, array in leaves.items()}
        flat = {key: array.reshape(-1, *self._aside[key].shape[1:]) for key, array in older.items()}
        return self._put(flat).reshape(-1, self._older)

    def _make_room(self, count: int) -> None:
        """Sees to it that so many frames can be put aside: those to which no row points any more leave; where that does
        not free half of the table, it grows."""
        size = len(next(iter(self._aside.values())))
        if self._used + count <= size:
            return
        self._where, kept = _renumbered(self._where)
        moved = _at(self._aside, kept)
        if 2 * (len(kept) + count) > size:
            self._aside = _tables(self._storage, 2 * (len(kept) + count), self._aside, 1)
        self._used = 0
        self._put(moved)

    def state(self, count: int) -> dict[str, Tensor]:
        """The ring, oldest first, and what its rows point to aside, in the order in which they do.

        ``frame.<key>`` and ``aside.<key>`` ``[N, …]``: the newest frames and those aside; ``where.<k>`` ``[N, 2k-1]``.

        Args:
            count: the number that the next step will have.
        """
        end = count + self._num_envs
        rows = np.arange(max(self._first, end - self._rows), end) % self._rows
        where, kept = _renumbered(self._where[rows])
        state = {f"where.{self._stack}": torch.from_numpy(where)}
        for key in self._keys:
            state[f"frame.{_dotted(key)}"] = torch.from_numpy(self._ring[key][rows])
            state[f"aside.{_dotted(key)}"] = torch.from_numpy(self._aside[key][kept])
        return state

    def load(self, state: Mapping[str, Tensor], count: int) -> None:
        """Takes back what :meth:`state` gave, as much of the newest as fits.

        Args:
            count: the number that the next step will have.

        Raises:
            KeyError: it is not such a state.
        """
        where = state[f"where.{self._stack}"].numpy()[-self._rows :]
        frames, aside = (
            {key: state[f"{part}.{_dotted(key)}"].numpy() for key in self._keys} for part in ("frame", "aside")
        )
        end = count + self._num_envs
        numbers = np.arange(end - len(where), end)
        self._first = int(numbers[0])
        self._where[numbers % self._rows] = where
        self._ring = _tables(self._storage, self._rows, frames, 1)
        self._aside = _tables(self._storage, max(self._rows // _ASIDE + 1, len(next(iter(aside.values())))), frames, 1)
        for key in self._keys:
            self._ring[key][numbers % self._rows] = frames[key][-self._rows :]
        self._put(aside)


def _renumbered(where: Array) -> tuple[Array, Array]:
    """Numbers the rows aside anew, in the order in which they are first pointed to; gives also the numbers they had."""
    used = where >= 0
    old, first, position = np.unique(where[used], return_index=True, return_inverse=True)
    order = np.argsort(first)
    new = where.copy()
    new[used] = np.argsort(order)[position]
    return new, old[order]


def _tables(storage: Storage, rows: int, like: Leaves, lead: int) -> Leaves:
    """Empty tables of so many rows for arrays whose first ``lead`` axes count rows.

    They are NumPy arrays, in memory or mapped from files that vanish with them: copying rows of bytes by index takes
    torch and TensorDict six to thirty times as long.
    """
    tables = {}
    for key, array in like.items():
        shape = (rows, *array.shape[lead:])
        if storage == "memmap":
            with TemporaryFile(prefix="rltool-") as file:
                tables[key] = np.asarray(np.memmap(file, array.dtype, "w+", shape=shape))
        else:
            tables[key] = np.empty(shape, array.dtype)
    return tables


def _write(table: Array, number: int, values: Array) -> None:
    """Writes rows ``[steps, num_envs, …]`` into a ring, from the row of this number on."""
    steps, num_envs = values.shape[:2]
    ring = table.reshape(-1, num_envs, *table.shape[1:])
    begin = number // num_envs % len(ring)
    fitting = len(ring) - begin
    ring[begin : begin + steps] = values[:fitting]
    ring[: max(steps - fitting, 0)] = values[fitting:]


def _at(leaves: Leaves, index: Any) -> Leaves:
    """The same part of each leaf."""
    return {key: array[index] for key, array in leaves.items()}


def _same(one: Leaves, other: Leaves, lead: int) -> Array:
    """Whether observations agree bit for bit, over their first ``lead`` axes: -0.0 is not 0.0, and NaN is itself."""
    parts = []
    for key, array in one.items():
        bits = f"u{array.dtype.itemsize}"
        equal = array.view(bits) == other[key].view(bits)
        parts.append(equal.all(axis=tuple(range(lead, equal.ndim))))
    same: Array = np.logical_and.reduce(parts)
    return same


def check_compiled_extension() -> None:
    """Prioritised replay needs TorchRL's compiled part, which loads with one torch release only.

    Raises:
        ConfigError: it does not load.
    """
    try:
        from torchrl._torchrl import SumSegmentTreeFp32  # noqa: F401
    except ImportError as error:
        from importlib.metadata import version

        raise ConfigError(
            Problem(
                "buffer",
                f"prioritised replay needs torchrl's compiled extension, and torchrl {version('torchrl')} does not load it "
                f"with torch {version('torch')} ({str(error).splitlines()[0]})",
                "Install the pair that fits: pip install 'torch==2.14.*' torchrl==0.14.1; or use buffer=replay",
            )
        ) from error


def check_room(
    config: ReplayBufferConfig | PrioritizedBufferConfig, leaves: Sequence[LeafSpec], actions: ActionSpec
) -> None:
    """Asks whether a replay buffer fits into what is free now.

    Raises:
        ConfigError: it does not; names the bytes needed and the bytes free.
    """
    tables, rest = room(config, leaves, actions)
    what = f"{config.size:,} transitions"
    if config.storage == "memmap":
        check_disk(tables, "buffer.size", what, "Lower it, or let TMPDIR name a directory with more room")
        check_memory(rest, "buffer.size", f"{what}, though they lie on disk,", "Lower it")
    else:
        hint = "Lower it, or keep the buffer on disk with buffer.storage=memmap"
        check_memory(tables + rest, "buffer.size", what, hint)


def room(
    config: ReplayBufferConfig | PrioritizedBufferConfig, leaves: Sequence[LeafSpec], actions: ActionSpec
) -> tuple[int, int]:
    """Bytes of a full replay buffer, but for the few rows that a ring has more and what lies aside beyond its first room.

    Returns:
        Those of the tables, which lie in memory or in mapped files; and those that are in memory in either case.
    """
    size = config.size
    action = math.prod(actions.policy_shape) * np.dtype(actions.policy_dtype).itemsize
    reward, flags = 4, 3
    frame = sum(math.prod(leaf.shape) // leaf.stack * np.dtype(leaf.dtype).itemsize for leaf in leaves)
    tables = size * (action + reward + flags + frame) + size // _ASIDE * frame
    rest = size * sum(4 * (2 * stack - 1) for stack in {leaf.stack for leaf in leaves})
    if config.kind == "prioritized":
        # Sums and minima: a tree each, of float32, over the next power of two above the size.
        rest += 2 * 2 * 4 * 2 ** size.bit_length()
    return tables, rest


def _dotted(key: str | tuple[str, ...]) -> str:
    """A key as one name; a dot inside a part is escaped."""
    parts = (key,) if isinstance(key, str) else key
    return ".".join(part.replace("%", "%25").replace(".", "%2E") for part in parts)


def _key(name: str) -> tuple[str, ...]:
    """The key that :func:`_dotted` named."""
    return tuple(part.replace("%2E", ".").replace("%25", "%") for part in name.split("."))

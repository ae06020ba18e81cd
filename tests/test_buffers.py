"""Replay buffers against a plain list of whole transitions: what is stored once comes back bit for bit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from types import SimpleNamespace
from typing import Any, Literal, cast

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from rltool import memory
from rltool.actions import ActionSpec
from rltool.buffers import Frames, PrioritizedBuffer, ReplayBuffer, check_room, room
from rltool.errors import ConfigError
from rltool.schema import Anneal, PrioritizedBufferConfig, ReplayBufferConfig
from rltool.spaces import Array, Key, LeafSpec, mask_spec

CAMERA = LeafSpec(("observation", "camera"), "box", (4, 3, 2), "uint8", stack=4)
PAIR = LeafSpec(("observation", "a.b"), "box", (2,), "float32", stack=2)
SPEED = LeafSpec(("observation", "speed"), "box", (3,), "float32")
ROOM = LeafSpec(("observation", "room"), "discrete", (), "int64", (5,), (0,))
MASK = mask_spec(3)
PLAIN = (LeafSpec(("observation",), "box", (4,), "float32"),)
EVERYTHING = (CAMERA, PAIR, SPEED, ROOM, MASK)
NINE = ActionSpec("discrete", (), "int64", (9,), (0,))
BOOLEAN = {MASK.key}  # a mask is stored as it comes

Leaves = dict[Key, Array]


def uniform(size: int, leaves: Sequence[LeafSpec] = PLAIN, storage: str = "memory", seed: int = 0) -> ReplayBuffer:
    config = ReplayBufferConfig(kind="replay", size=size, storage=cast("Any", storage))
    return ReplayBuffer(
        config, generator=torch.Generator().manual_seed(seed), device=torch.device("cpu"), leaves=leaves, actions=NINE
    )


UNIFORM = ReplayBufferConfig(kind="replay", size=999, storage="memory")
PRIORITIZED = PrioritizedBufferConfig(
    kind="prioritized",
    size=999,
    storage="memory",
    alpha=1.0,
    beta=Anneal(start=1.0, end=1.0, frames=None),
    eps=1e-6,
)


def prioritized(
    size: int, leaves: Sequence[LeafSpec] = PLAIN, storage: str = "memory", seed: int = 0, alpha: float = 1.0
) -> PrioritizedBuffer:
    config = PRIORITIZED.model_copy(update={"size": size, "storage": storage, "alpha": alpha})
    return PrioritizedBuffer(
        config, generator=torch.Generator().manual_seed(seed), device=torch.device("cpu"), leaves=leaves, actions=NINE
    )


@dataclass
class World:
    """Environments of random observations.

    Attributes:
        leaves: of the observation.
        num_envs: how many there are.
        padding: what the older frames of the first stack of an episode are.
        ends: probability that a step ends the episode.
        lies: probability that a stack has nothing to do with the one before it.
        values: how many values an entry has; with few, observations are often equal by chance.
    """

    leaves: Sequence[LeafSpec] = PLAIN
    num_envs: int = 3
    padding: Literal["reset", "zero"] = "reset"
    ends: float = 0.1
    lies: float = 0.0
    values: int = 200
    seed: int = 0

    def __post_init__(self) -> None:
        self._random = np.random.default_rng(self.seed)
        self.reset()

    def reset(self) -> None:
        """All episodes start anew."""
        self._current = [self._fresh() for _ in range(self.num_envs)]

    def _array(self, leaf: LeafSpec, shape: tuple[int, ...]) -> Array:
        dtype = np.bool_ if leaf.key in BOOLEAN else np.dtype(leaf.dtype)
        return self._random.integers(self.values, size=shape).astype(dtype)

    def _fresh(self) -> Leaves:
        found = {}
        for leaf in self.leaves:
            found[leaf.key] = self._array(leaf, leaf.shape)
            if leaf.stack > 1:
                found[leaf.key][:-1] = found[leaf.key][-1] if self.padding == "reset" else 0
        return found

    def _next(self, before: Leaves) -> Leaves:
        found = {}
        for leaf in self.leaves:
            found[leaf.key] = self._array(leaf, leaf.shape)
            if leaf.stack > 1 and self._random.random() >= self.lies:
                found[leaf.key][:-1] = before[leaf.key][1:]
        return found

    def batch(self, steps: int) -> TensorDict:
        """``[num_envs, steps]``, as a collector gives it."""
        shape = (steps, self.num_envs)
        data: dict[Key, Array] = {
            ("action",): self._random.integers(9, size=shape),
            ("next", "reward"): self._random.normal(size=(*shape, 1)).astype(np.float32),
            ("next", "terminated"): self._random.random((*shape, 1)) < self.ends / 2,
            ("next", "truncated"): self._random.random((*shape, 1)) < self.ends / 2,
        }
        done = data["next", "done"] = data["next", "terminated"] | data["next", "truncated"]
        rows: list[list[tuple[Leaves, Leaves]]] = []
        for step in range(steps):
            rows.append([])
            for env, before in enumerate(self._current):
                after = self._next(before)
                rows[-1].append((before, after))
                self._current[env] = self._fresh() if done[step, env] else after
        for leaf in self.leaves:
            for side, key in enumerate((leaf.key, ("next", *leaf.key))):
                data[key] = np.stack([np.stack([pair[side][leaf.key] for pair in row]) for row in rows])
        batch = TensorDict({}, shape)
        for key, array in data.items():
            batch.set(key, torch.from_numpy(array))
        return batch.transpose(0, 1)

    def batches(self) -> Iterator[TensorDict]:
        """Batches of one to nine steps for ever."""
        while True:
            yield self.batch(int(self._random.integers(1, 10)))


class Reference:
    """Whole transitions, oldest first; those of one step in the order of the environments."""

    def __init__(self, size: int) -> None:
        self._size = size
        self.rows: TensorDict | None = None

    def extend(self, batch: TensorDict) -> None:
        new = batch.transpose(0, 1).reshape(-1)
        rows = new if self.rows is None else torch.cat([self.rows, new])
        self.rows = rows[-(-(-self._size // len(batch)) * len(batch)) :]


def stored(buffer: ReplayBuffer) -> TensorDict:
    """All that can be drawn, oldest first."""
    return buffer._transitions(torch.from_numpy(buffer._newest() % buffer._capacity))


def flat(data: TensorDict) -> dict[str, Tensor]:
    return {"/".join((key,) if isinstance(key, str) else key): value for key, value in data.items(True, True)}


def assert_same(got: TensorDict, expected: TensorDict | None) -> None:
    """Types, shapes and bits."""
    assert expected is not None
    one, other = flat(got), flat(expected)
    assert set(one) == set(other)
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype, name
        assert tensor.shape == other[name].shape, name
        same = tensor.contiguous().numpy().tobytes() == other[name].contiguous().numpy().tobytes()
        assert same, f"{name} differs"


def fill(buffer: ReplayBuffer, reference: Reference, batches: Iterator[TensorDict], count: int) -> None:
    for batch in islice(batches, count):
        buffer.extend(batch)
        reference.extend(batch)


# ------------------------------------------------------------------------------------------------- what comes back


@pytest.mark.parametrize(("make", "storage"), [(uniform, "memory"), (prioritized, "memmap")])
@pytest.mark.parametrize("padding", ["reset", "zero"])
@pytest.mark.parametrize(
    ("num_envs", "size"),
    [(1, 1), (3, 10), *(pytest.param(*sizes, marks=pytest.mark.long) for sizes in ((1, 37), (3, 300), (8, 100)))],
)
def test_every_transition_comes_back_bit_for_bit(
    make: Any, storage: str, padding: Any, num_envs: int, size: int
) -> None:
    world = World(EVERYTHING, num_envs, padding, seed=size)
    buffer, reference = make(size, EVERYTHING, storage), Reference(size)
    for batch in islice(world.batches(), 40):
        buffer.extend(batch)
        reference.extend(batch)
        assert len(buffer) == len(cast("TensorDict", reference.rows))
        assert_same(stored(buffer), reference.rows)


@pytest.mark.parametrize("leaves", [PLAIN, (CAMERA,), EVERYTHING])
@pytest.mark.parametrize("values", [2, 200])
@pytest.mark.parametrize("lies", [0.0, 0.2, 1.0])
@pytest.mark.parametrize("ends", [0.0, 0.3, 1.0])
def test_nothing_is_taken_for_granted(leaves: Sequence[LeafSpec], values: int, lies: float, ends: float) -> None:
    """Frames that are not shifted, episodes of one step, observations that are equal by chance, and a batch in four that
    does not begin where the last one ended."""
    world = World(leaves, 2, "zero", ends, lies, values)
    buffer, reference = uniform(30, leaves), Reference(30)
    for index, batch in enumerate(islice(world.batches(), 20)):
        if index % 4 == 3:
            world.reset()
        buffer.extend(batch)
        reference.extend(batch)
        assert_same(stored(buffer), reference.rows)


def test_flags_that_say_nothing_of_the_observations_do_not_matter() -> None:
    world = World((CAMERA, SPEED), 2, ends=0.3)
    buffer, reference = uniform(50, (CAMERA, SPEED)), Reference(50)
    for batch in islice(world.batches(), 40):
        for name in ("terminated", "truncated", "done"):
            batch["next", name] = torch.rand(batch["next", name].shape) < 0.5
        buffer.extend(batch)
        reference.extend(batch)
        assert_same(stored(buffer), reference.rows)


def test_signed_zeros_and_nan_come_back() -> None:
    batch = World(num_envs=1, ends=0.0).batch(6)
    batch["observation"][0, 2] = torch.tensor([0.0, -0.0, 1.0, 1.0])
    batch["next", "observation"][0, 1] = torch.tensor([-0.0, 0.0, 1.0, 1.0])  # equal numbers of other bits
    for key, step in (("observation", 4), (("next", "observation"), 3)):
        batch[key][0, step] = torch.tensor([float("nan"), 1.0, 1.0, 1.0])
    buffer = uniform(10)
    buffer.extend(batch)
    assert_same(stored(buffer), batch.reshape(-1))
    assert buffer._frames[0]._used == 1, "NaN is stored once, too"


def test_of_a_batch_larger_than_the_buffer_the_newest_are_kept() -> None:
    world = World((CAMERA,), 2)
    buffer, reference = uniform(20, (CAMERA,)), Reference(20)
    for steps in (3, 25, 10, 11, 4):
        batch = world.batch(steps)
        buffer.extend(batch)
        reference.extend(batch)
        assert_same(stored(buffer), reference.rows)


# ---------------------------------------------------------------------------------------------------- what is drawn


@pytest.mark.parametrize("make", [uniform, prioritized])
def test_what_is_drawn_is_what_was_stored(make: Any) -> None:
    buffer, reference = make(50, EVERYTHING), Reference(50)
    fill(buffer, reference, World(EVERYTHING).batches(), 30)
    position = torch.from_numpy(np.argsort(buffer._newest() % buffer._capacity))
    for drawn in buffer.draw(4, 16):
        assert drawn.batch_size[1] == 16
        order = position[drawn["index"].flatten()]
        assert_same(drawn.exclude("index", "priority_weight").reshape(-1), cast("TensorDict", reference.rows)[order])


def test_uniform_draws_are_uniform_over_what_is_stored() -> None:
    buffer, reference = uniform(60), Reference(60)
    fill(buffer, reference, World(ends=0.4).batches(), 30)
    (drawn,) = buffer.draw(1000, 60)
    counts = torch.bincount(drawn["index"].flatten(), minlength=60).double()
    assert len(counts) == len(buffer) == 60
    # χ² with 59 degrees of freedom: 99.99 % lie below 108.
    assert float(((counts - 1000) ** 2 / 1000).sum()) < 108


def test_uniform_draws_depend_on_the_generator_alone() -> None:
    expected = torch.randint(60, (3 * 8,), generator=torch.Generator().manual_seed(7)).view(3, 8)
    buffer = uniform(60, seed=7)
    buffer.extend(World().batch(40))
    (drawn,) = buffer.draw(3, 8)
    assert torch.equal(drawn["index"], expected)


def test_no_draw_takes_nothing_from_the_generator() -> None:
    buffer = uniform(60)
    buffer.extend(World().batch(40))
    before = buffer._generator.get_state()
    assert list(buffer.draw(0, 8)) == []
    assert torch.equal(before, buffer._generator.get_state())


def test_priorities_follow_their_transitions_round_the_ring() -> None:
    """P(i) ∝ |δ_i| and w_i = (N P(i))^-1 over the largest w, with N the transitions stored; newcomers enter at the top."""
    buffer = prioritized(30)
    world = World(ends=0.3)
    buffer.extend(world.batch(17))  # more than fits
    (drawn,) = buffer.draw(1, 30)
    every = TensorDict({"index": torch.from_numpy(buffer._newest() % buffer._capacity)}, [30])
    buffer.update_priority(every, torch.arange(1.0, 31.0))
    buffer.extend(world.batch(2))
    expected = torch.cat([torch.arange(7.0, 31.0), torch.full((6,), 30.0)])  # six newcomers in place of the oldest six
    torch.testing.assert_close(buffer.priorities(), expected, rtol=1e-5, atol=0)

    counts, position = torch.zeros(30), torch.from_numpy(np.argsort(buffer._newest() % buffer._capacity))
    for drawn in buffer.draw(1000, 30):
        order = position[drawn["index"].flatten()]
        counts += torch.bincount(order, minlength=30)
        weight = (30 * expected[order] / expected.sum()) ** -1 / (30 * 7.0 / expected.sum()) ** -1
        torch.testing.assert_close(drawn["priority_weight"].flatten(), weight, rtol=1e-4, atol=0)
    torch.testing.assert_close(counts / counts.sum(), expected / expected.sum(), atol=5e-3, rtol=0)


# ----------------------------------------------------------------------------------------------------------- saving


@pytest.mark.parametrize(("make", "storage"), [(uniform, "memmap"), (prioritized, "memory")])
@pytest.mark.parametrize("before", [1, 3, 40])
def test_a_loaded_buffer_goes_on_as_the_saved_one(make: Any, storage: str, before: int) -> None:
    buffer, world, reference = make(64, EVERYTHING, storage), World(EVERYTHING, 4, ends=0.2), Reference(64)
    fill(buffer, reference, world.batches(), before)
    for drawn in buffer.draw(3, 4):
        buffer.update_priority(drawn, torch.rand(drawn.batch_size))
    state = {name: tensor.clone() for name, tensor in buffer.state_dict().items()}
    other = make(64, EVERYTHING, storage)
    other.load_state_dict(state)
    other._generator.set_state(buffer._generator.get_state())
    for batch in islice(world.batches(), 12):
        for one, two in zip(buffer.draw(2, 4), other.draw(2, 4), strict=True):
            assert_same(one, two)
            for part in (buffer, other):
                part.update_priority(one, one["next", "reward"].squeeze(-1).abs())
        for part in (buffer, other, reference):
            part.extend(batch)
        assert_same(stored(other), reference.rows)
    one_state, other_state = buffer.state_dict(), other.state_dict()
    assert set(one_state) == set(other_state)
    for name, tensor in one_state.items():
        assert torch.equal(tensor, other_state[name]), name


def test_a_batch_that_does_not_begin_where_the_saved_one_ended_is_linked_right() -> None:
    world, reference = World(EVERYTHING, 2), Reference(30)
    buffer, other = uniform(30, EVERYTHING), uniform(30, EVERYTHING)
    fill(buffer, reference, world.batches(), 10)
    other.load_state_dict(buffer.state_dict())
    world.reset()
    fill(other, reference, world.batches(), 1)
    assert_same(stored(other), reference.rows)


@pytest.mark.parametrize("make", [uniform, prioritized])
@pytest.mark.parametrize("size", [10, 41, *(pytest.param(size, marks=pytest.mark.long) for size in (1, 29, 200))])
@pytest.mark.parametrize("before", [3, 20])
def test_a_buffer_of_another_size_takes_the_newest(make: Any, size: int, before: int) -> None:
    world, reference = World(EVERYTHING, 3, ends=0.2), Reference(40)
    buffer, other = make(40, EVERYTHING), make(size, EVERYTHING)
    fill(buffer, reference, world.batches(), before)
    other.load_state_dict(buffer.state_dict())
    held = cast("TensorDict", reference.rows)
    assert_same(stored(other), held[len(held) - len(other) :])
    assert len(other) == min(len(held), -(-size // 3) * 3)
    if make is prioritized:
        assert torch.equal(other.priorities(), buffer.priorities()[len(held) - len(other) :])
    resized = Reference(size)
    resized.rows = held[len(held) - len(other) :]
    for batch in islice(world.batches(), 12):
        other.extend(batch)
        resized.extend(batch)
        assert_same(stored(other), resized.rows)
        list(other.draw(1, 1))


def test_a_state_that_lacks_something_leaves_the_buffer_empty_and_usable() -> None:
    buffer, world = prioritized(30, (CAMERA, SPEED)), World((CAMERA, SPEED))
    buffer.extend(world.batch(5))
    state = buffer.state_dict()
    for name in state:
        other, reference = prioritized(30, (CAMERA, SPEED)), Reference(30)
        if name.startswith("data."):
            continue
        with pytest.raises(KeyError):
            other.load_state_dict({key: value for key, value in state.items() if key != name})
        assert len(other) == 0
        fill(other, reference, world.batches(), 3)
        assert_same(stored(other), reference.rows)


def test_an_empty_buffer_has_an_empty_state() -> None:
    buffer = uniform(30)
    assert buffer.state_dict() == {}
    buffer.load_state_dict({})
    assert len(buffer) == 0


# ------------------------------------------------------------------------------------------------------------- room


def bytes_of(frames: Frames) -> int:
    tables = [frames._where, *frames._ring.values(), *frames._aside.values()]
    return sum(table.nbytes for table in tables)


@pytest.mark.parametrize(
    ("leaf", "frame"),
    [
        (LeafSpec(("observation",), "box", (84, 84, 3), "uint8"), 84 * 84 * 3),
        (LeafSpec(("observation",), "box", (4, 84, 84), "uint8", stack=4), 84 * 84),
    ],
)
def test_a_transition_takes_the_room_of_one_frame(leaf: LeafSpec, frame: int) -> None:
    world = World((leaf,), 2, ends=0.005)
    buffer = uniform(1000, (leaf,))
    for _ in range(12):
        buffer.extend(world.batch(50))
    assert len(buffer) == 1000
    (frames,) = buffer._frames
    assert frames._ring[leaf.key].dtype == np.uint8
    held = bytes_of(frames) + sum(column.nbytes for column in buffer._columns.values())
    assert 1000 * frame < held < 1.08 * 1000 * frame
    saved = sum(tensor.numel() * tensor.element_size() for tensor in buffer.state_dict().values())
    assert 1000 * frame < saved < 1.05 * 1000 * frame


@pytest.mark.parametrize("leaves", [PLAIN, (CAMERA,)])
def test_what_lies_aside_leaves_with_its_transitions(leaves: Sequence[LeafSpec]) -> None:
    """Room for twice what is in use, however long the run."""
    world, buffer = World(leaves, 2, "zero", ends=0.5), uniform(100, leaves)
    for _ in range(100):
        buffer.extend(world.batch(20))
    (frames,) = buffer._frames
    in_use = int((np.unique(frames._where) >= 0).sum())
    (table,) = frames._aside.values()
    assert 20 < in_use <= len(table) <= 4 * in_use


ACTIONS = {
    "discrete": NINE,
    "pair": ActionSpec("multi_discrete", (2,), "int64", (3, 3), (0, 0)),
    "box": ActionSpec("box", (2, 3), "float64", low=(-1.0,) * 6, high=(1.0,) * 6),
}


@pytest.mark.parametrize("make", [uniform, prioritized])
@pytest.mark.parametrize("name", ACTIONS)
def test_memory_that_is_asked_for_is_memory_that_is_used(monkeypatch: pytest.MonkeyPatch, make: Any, name: str) -> None:
    actions, size = ACTIONS[name], 999
    buffer = make(size, EVERYTHING)
    batch = World(EVERYTHING).batch(1)
    batch["action"] = actions.empty(*batch.batch_size).zero_()
    buffer.extend(batch)
    rings = [table for frames in buffer._frames for table in frames._ring.values()]
    aside = [table for frames in buffer._frames for table in frames._aside.values()]
    where = [frames._where for frames in buffer._frames]
    # Without the few rows that a ring has more than the buffer.
    rows = [table.nbytes // len(table) for table in [*rings, *buffer._columns.values()]]
    tables = size * sum(rows) + size // 64 * sum(table.nbytes // len(table) for table in aside)
    rest = size * sum(table.nbytes // len(table) for table in where)
    # Two trees of float32, over the next power of two.
    rest += 2 * 2 * 1024 * 4 if make is prioritized else 0
    config = PRIORITIZED if make is prioritized else UNIFORM
    assert room(config, EVERYTHING, actions) == (tables, rest)
    check = partial(check_room, leaves=EVERYTHING, actions=actions)

    monkeypatch.setattr(memory, "free_memory", lambda: tables + rest)
    check(config)
    monkeypatch.setattr(memory, "free_memory", lambda: tables + rest - 1)
    with pytest.raises(
        ConfigError, match=r"^buffer\.size: 999 transitions need 0\.0 GiB, and 0\.0 GiB of memory are free"
    ):
        check(config)
    mapped = config.model_copy(update={"storage": "memmap"})
    monkeypatch.setattr(memory, "free_memory", lambda: rest)
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=tables))
    check(mapped)
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=tables - 1))
    with pytest.raises(ConfigError, match=r"0\.0 GiB of disk are free in .*TMPDIR"):
        check(mapped)
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=tables))
    monkeypatch.setattr(memory, "free_memory", lambda: rest - 1)
    with pytest.raises(ConfigError, match=r"though they lie on disk, need 0\.0 GiB"):
        check(mapped)

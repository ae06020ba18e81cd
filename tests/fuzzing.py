"""Inputs that nobody meant: configuration trees and checkpoint files with something changed in them, and what must come of
them. Without torch; each input is a pure function of its number.

Used by tests/test_fuzz.py (some hundreds) and benchmarks/fuzz.py (as many as one likes).
"""

from __future__ import annotations

import copy
import json
import random
import string
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from zlib import crc32

from rltool import checkpoint, config
from rltool.composition import compose
from rltool.errors import CheckpointError, ConfigError

CHOICES = (
    ("algo=dqn", "env=cartpole"),
    ("algo=ppo", "env=pendulum", "network=auto"),
    ("algo=sac", "env=pendulum", "buffer=prioritized"),
    ("algo=ppo", "env=torchrl", "network=module", "env.entry_point=nowhere:make", "network.entry_point=nowhere:Net"),
)


def nested(depth: int) -> object:
    """Lists in lists."""
    value: object = 1
    for _ in range(depth):
        value = [value]
    return value


# What JSON can hold.
PLAIN: tuple[object, ...] = (
    *(None, True, False, 0, 1, -1, 3, 1.0, 0.5, -2.5, 1e308, 5e-324, 1e6, 2**31, 2**63, 10**30, -(10**30)),
    *("", "None", "???", "true", "1e3", "${oc.env:HOME}", "${a", "a:b", "os:system", "a" * 3000, "\x00\x1b[2J", "é†😀"),
    *(
        [],
        [1],
        [[], {}],
        [1, "two", None],
        {},
        {"a": 1},
        {"name": "X"},
        {"start": 1, "end": 0, "frames": 5},
        {"kind": 3},
    ),
    *({"kind": "ppo"}, {"": ""}, {"a.b": {"c": [1]}}, [10**12], [1] * 300),
)
# What only Python can.
FOREIGN: tuple[object, ...] = (
    *(float("nan"), float("inf"), -float("inf"), 10**5000, b"bytes", (1, 2), {3, 4}, {1: 2}, {None: {}}, {("a",): 1}),
    *(object(), int, "\ud800", nested(300), complex(1, 2), range(3)),
)


def value(rng: random.Random, *, foreign: bool) -> object:
    """Any value of any type."""
    kind = rng.randrange(5 if foreign else 4)
    if kind == 0:
        return rng.choice((rng.randrange(-5, 5000), rng.uniform(-2, 2), rng.lognormvariate(0, 9)))
    if kind == 1:
        return "".join(rng.choices(string.printable, k=rng.randrange(12)))
    return copy.deepcopy(rng.choice(FOREIGN if kind == 4 else PLAIN))


def paths(tree: object, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value of a tree."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, item in items:
        yield (*path, key)
        yield from paths(item, (*path, key))


def at(tree: Any, path: tuple[Any, ...]) -> Any:
    for part in path:
        tree = tree[part]
    return tree


def mutated(tree: dict[str, Any], rng: random.Random, *, foreign: bool) -> dict[str, Any]:
    """A copy of a tree with one to three changes: another value, a value from elsewhere, a key less, a key more."""
    tree = copy.deepcopy(tree)
    for _ in range(rng.choice((1, 1, 2, 3))):
        places = list(paths(tree))
        if not places:
            break
        path = rng.choice(places)
        parent, key = at(tree, path[:-1]), path[-1]
        change = rng.randrange(8)
        if change == 0:
            del parent[key]
        elif change == 1 and isinstance(parent, dict):
            parent[str(value(rng, foreign=False))[:9]] = value(rng, foreign=foreign)
        elif change == 2:
            parent[key] = copy.deepcopy(at(tree, rng.choice(places)))
        elif change <= 4 and type(parent[key]) in (int, float) and abs(parent[key]) < 1e300:
            parent[key] = rng.choice((parent[key] + 1, parent[key] * 2, parent[key] * 0.7, -parent[key]))
        elif change <= 4 and type(parent[key]) is bool:
            parent[key] = not parent[key]
        else:
            parent[key] = value(rng, foreign=foreign)
    return tree


@dataclass
class Trees:
    """Configurations of real runs, changed."""

    bases: list[dict[str, Any]]

    @classmethod
    def make(cls) -> Trees:
        return cls([compose([f"++{w}" if "." in w else w for w in (*words, "tuned=none")]).tree for words in CHOICES])

    def __call__(self, number: int) -> dict[str, Any]:
        rng = random.Random(number)
        return mutated(self.bases[number % len(self.bases)], rng, foreign=True)


def loads(tree: dict[str, Any]) -> bool:
    """Whether a configuration is taken; refused by a ConfigError is the only other thing that may happen."""
    try:
        config.load(tree)
    except ConfigError as error:
        refusal = error
    else:
        return True
    assert refusal.problems
    assert all(problem.path and problem.text for problem in refusal.problems)
    str(refusal).encode()  # it can be shown
    return False


# ---------------------------------------------------------------------------------------------------------- checkpoints


@dataclass(frozen=True)
class Parts:
    """A safetensors file: its header, and the bytes of its tensors."""

    header: dict[str, Any]
    data: bytes

    @classmethod
    def read(cls, content: bytes) -> Parts:
        length = int.from_bytes(content[:8], "little")
        return cls(json.loads(content[8 : 8 + length]), content[8 + length :])

    def packed(self, *, checked: bool) -> bytes:
        """The file, with a checksum that fits or without one."""
        header = {key: item for key, item in self.header.items() if key != "__metadata__"}
        metadata = self.header.get("__metadata__")
        if isinstance(metadata, dict):
            metadata = {key: item for key, item in metadata.items() if key != "crc32"}
            header["__metadata__"] = {**metadata, "crc32": "0" * 8} if checked else metadata
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        whole = len(text).to_bytes(8, "little") + text + self.data
        return whole.replace(b'"crc32":"00000000"', b'"crc32":"%08x"' % crc32(whole), 1)


def damaged(content: bytes, rng: random.Random) -> bytes:
    """Bytes changed, cut off, zeroed, put in, swapped."""
    changed = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 9))):
        # Half of the faults hit the beginning, where the header is.
        start = rng.randrange(min(len(changed), rng.choice((8, 400, len(content)))) or 1)
        length = min(rng.choice((1, 1, 8, 500)), len(changed) - start)
        kind = rng.randrange(6)
        if kind == 0:
            del changed[start:]
        elif kind == 1:
            changed[start : start + length] = bytes(length)
        elif kind == 2:
            changed[start:start] = rng.randbytes(length)
        elif kind == 3:
            del changed[start : start + length]
        elif kind == 4:
            changed[start : start + length] = rng.randbytes(length)
        elif changed:
            changed[start] ^= 1 << rng.randrange(8)
    return bytes(changed)


@dataclass
class Files:
    """A real checkpoint and the buffer beside it, changed.

    Attributes:
        content: the bytes of each.
        parts: the same, taken apart.
        state: what the checkpoint says besides tensors.
    """

    content: tuple[bytes, bytes]
    parts: tuple[Parts, Parts]
    state: dict[str, Any]

    @classmethod
    def of(cls, directory: Path) -> Files:
        """Those of a run directory."""
        (buffer,) = directory.glob("checkpoints/buffer-*.safetensors")
        content = (directory / "checkpoints/last.ckpt").read_bytes(), buffer.read_bytes()
        parts = Parts.read(content[0]), Parts.read(content[1])
        return cls(content, parts, json.loads(parts[0].header["__metadata__"]["rltool"]))

    def __call__(self, number: int) -> tuple[bytes, bool]:
        """The bytes of a file, and whether it was a buffer."""
        rng = random.Random(number)
        which = int(number % 4 == 3)
        parts = self.parts[which]
        if number % 4 in (0, 3) and rng.random() < 0.6:
            return damaged(self.content[which], rng), bool(which)
        checked = rng.random() < 0.5
        if number % 4 == 1:  # what safetensors itself reads
            header = mutated(parts.header, rng, foreign=False)
            if rng.random() < 0.5:
                name = rng.choice([name for name in header if name != "__metadata__"] or [""])
                header[name] = {"dtype": rng.choice(DTYPES), "shape": rng.choice(SHAPES), "data_offsets": [0, 0]}
            return Parts(header, parts.data).packed(checked=checked), False
        if which:
            return Parts(mutated(parts.header, rng, foreign=False), parts.data).packed(checked=checked), True
        state = json.dumps(mutated(self.state, rng, foreign=False))
        if rng.random() < 0.2:
            state = damaged(state.encode(), rng).decode(errors="replace")
        elif rng.random() < 0.1:
            old, new = rng.choice(TEXTS)
            state = state.replace(old, new, rng.choice((1, -1)))
        header = {**parts.header, "__metadata__": {**parts.header["__metadata__"], "rltool": state}}
        return Parts(header, parts.data).packed(checked=checked), False


DTYPES = ("F64", "F32", "F16", "BF16", "I64", "I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "U64", "F4", "C64", "X", "")
SHAPES: tuple[list[int], ...] = ([], [0], [0, 2**62], [2**40], [2**63], [1] * 70, [-1], [1, 0])
# JSON that Python's own json.dumps does not write.
TEXTS = (
    ("0", "NaN"),
    ("1", "1e999"),
    ("null", "-Infinity"),
    ("[", "[" * 5000),
    ("null", "[" * 500 + "]" * 500),
    ('"kwargs": {', '"kwargs": {"deep": ' + "[" * 400 + "]" * 400 + ", "),
    ("{", '{"a":' * 3000),
    ('"frames":', '"frames": 1, "frames":'),
    ("1", "1" * 5000),
    ('"', '"\\ud800'),
)


def reads(path: Path, load: Callable[[Path], object]) -> bool:
    """Whether a file is read as a checkpoint; refused by a CheckpointError is the only other thing that may happen.

    Args:
        path: the file.
        load: called with it once its header has been read; may also raise ConfigError.
    """
    try:
        header = checkpoint.read_header(path)
        assert header.leaves
        assert header.actions.size > 0
        load(path)
    except (CheckpointError, ConfigError) as error:
        said = str(error)
    else:
        return True
    said.encode()  # it can be shown
    assert path.name in said
    return False


@dataclass
class Reader:
    """Reads the files of :class:`Files` as evaluation and resuming do.

    Args:
        directory: an empty one, where they are written.
        every: of so many checkpoints whose header is taken, one is loaded as a policy; that takes longest.
    """

    directory: Path
    every: int
    taken: int = 0

    def __call__(self, content: bytes, is_buffer: bool) -> bool:
        """Whether a file is taken."""
        path = self.directory / ("buffer-0.safetensors" if is_buffer else "fuzzed.ckpt")
        path.write_bytes(content)
        return self._fills(path) if is_buffer else reads(path, self._load)

    def _load(self, path: Path) -> None:
        from rltool.policy import load_policy

        self.taken += 1
        if self.taken % self.every == 1 % self.every:
            load_policy(path)

    def _fills(self, path: Path) -> bool:
        """Whether a buffer of CartPole's observations is filled from the file."""
        from torch import Generator, device

        from rltool.actions import ActionSpec
        from rltool.algos.base import Algorithm
        from rltool.buffers import ReplayBuffer
        from rltool.schema import ReplayBufferConfig
        from rltool.spaces import OBSERVATION, LeafSpec

        leaves = (LeafSpec(OBSERVATION, "box", (4,), "float32"),)
        choice = ActionSpec("discrete", (), "int64", (2,), (0,))
        node = ReplayBufferConfig(kind="replay", size=1000, storage="memory")
        buffer = ReplayBuffer(node, generator=Generator(), device=device("cpu"), leaves=leaves, actions=choice)
        algorithm = cast("Algorithm", SimpleNamespace(components=lambda: {"buffer": buffer}))
        filled = checkpoint.load_buffer(algorithm, path, 0)
        assert filled or not len(buffer)  # a refused one leaves nothing behind
        return bool(filled)

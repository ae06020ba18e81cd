"""Random numbers: one seed, streams that never share a number."""

from __future__ import annotations

import random
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum

import numpy as np
import torch


class Stream(IntEnum):
    """What random numbers are drawn for; each has a generator of its own, so that none can move another."""

    POLICY = 0
    BUFFER = 1
    MINIBATCH = 2
    WEIGHTS = 3
    TRAIN_ENV = 4
    EVAL_ENV = 5
    EVAL_POLICY = 6
    WORLD = 7
    TEST_ENV = 8
    TEST_POLICY = 9


def draw_seed() -> int:
    """A fresh seed from the operating system."""
    return secrets.randbits(31)


def seeds(seed: int, stream: Stream, count: int, start: int = 0) -> list[int]:
    """``count`` seeds of a stream, the ``start``-th onwards: 31-bit numbers, unrelated between seeds and streams."""
    states = np.random.SeedSequence([seed, int(stream)]).generate_state(start + count, np.uint32)
    return [int(state) >> 1 for state in states[start:]]


def generator(seed: int, stream: Stream) -> torch.Generator:
    """A torch generator on the CPU for a stream: the same numbers whatever device they end on."""
    return torch.Generator().manual_seed(seeds(seed, stream, 1)[0])


def seed_world(seed: int) -> None:
    """Seeds the global generators of Python, NumPy and torch, for environments that draw from those.

    ``seed`` is a run's, or one of :func:`seeds` where a process or an evaluation needs numbers of its own.
    """
    (value,) = seeds(seed, Stream.WORLD, 1)
    random.seed(value)
    np.random.seed(value)
    torch.manual_seed(value)


@contextmanager
def untouched_world() -> Iterator[None]:
    """Puts the global generators of Python, NumPy and torch back on leaving, whatever drew from them inside."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])

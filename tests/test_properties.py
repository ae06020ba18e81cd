"""What holds for any value: configurations, schedules, checkpoints there and back."""

from __future__ import annotations

import json
import math
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from fuzzing import CHOICES, FOREIGN, Trees, at, paths
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rltool.config import load
from rltool.errors import ConfigError
from rltool.schema import Anneal, OptimConfig, RunConfig
from rltool.wording import dotted

# Each example of a database would belong to one machine; the same examples everywhere make a failure repeatable.
settings.register_profile("here", deadline=None, derandomize=True, database=None, max_examples=60)
settings.load_profile("here")

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
VALUES = JSON | st.sampled_from(FOREIGN) | st.binary(max_size=4) | st.complex_numbers() | st.dates()


@cache
def trees() -> Trees:
    return Trees.make()


@pytest.mark.long
@given(st.integers(0, len(CHOICES) - 1), st.data())
def test_any_value_under_any_key_is_taken_or_refused_with_that_key(which: int, data: st.DataObject) -> None:
    tree: dict[str, Any] = trees().bases[which]
    path = data.draw(st.sampled_from(list(paths(tree))))
    parent, before = at(tree, path[:-1]), at(tree, path)
    parent[path[-1]] = data.draw(VALUES)
    try:
        assert isinstance(load(tree), RunConfig)
    except ConfigError as error:
        problems = error.problems
    else:
        problems = ()
    finally:
        parent[path[-1]] = before
    # The key itself, one that lies in it or that it lies in; rules across keys may name another key of the tree.
    key = dotted(path)
    known = {dotted(other) for other in paths(tree)} | {"buffer"}
    for problem in problems:
        assert problem.path.startswith(key) or key.startswith(problem.path) or problem.path in known, problem
        assert problem.text


NUMBERS = st.floats(-1e6, 1e6)


@given(NUMBERS, NUMBERS, st.none() | st.integers(1, 10**9), st.integers(0, 10**9), st.lists(st.integers(0, 2 * 10**9)))
def test_a_schedule_is_bounded_monotone_and_a_pure_function(
    start: float, end: float, frames: int | None, budget: int, when: list[int]
) -> None:
    anneal = Anneal(start=start, end=end, frames=frames)
    values = [anneal.at(frame, budget) for frame in sorted(when)]
    slack = 1e-9 * max(abs(start), abs(end), 1)
    assert all(min(start, end) - slack <= value <= max(start, end) + slack for value in values)
    steps = [(after - before) * math.copysign(1, end - start) for before, after in pairwise(values)]
    assert all(step >= -slack for step in steps)
    assert [anneal.at(frame, budget) for frame in sorted(when)] == values
    length = budget if frames is None else frames
    assert anneal.at(length, budget) == pytest.approx(end, abs=slack)
    if length > 0:
        assert anneal.at(0, budget) == start or start == end


@given(
    st.floats(1e-9, 1e3),
    st.sampled_from(["constant", "linear", "cosine"]),
    st.integers(0, 10**9),
    st.integers(0, 10**9),
)
def test_a_learning_rate_never_leaves_zero_to_its_start(lr: float, schedule: Any, frame: int, budget: int) -> None:
    rate = OptimConfig(kind="any", lr=lr, schedule=schedule).lr_at(frame, budget)
    assert 0 <= rate <= lr
    assert rate == lr or schedule != "constant"


# ----------------------------------------------------------------------------------------------------------- checkpoints

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
PRINTED = TEXT.filter(str.isprintable)
FINITE = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
COUNTERS = st.integers(0, 2**63 - 1)
MAPPINGS = st.dictionaries(TEXT, FINITE, max_size=3)
DTYPES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")


@st.composite
def states(draw: st.DrawFn) -> dict[str, Any]:
    """The fields of a State of any content."""
    config = draw(MAPPINGS)
    for group in ("env", "algo", "network", "buffer", "optim", "eval"):
        config[group] = draw(MAPPINGS)
    config["env"]["num_envs"], config["eval"]["max_steps"] = draw(st.integers(1, 2**62)), draw(st.integers(1, 2**62))
    box = {"kind": "box", "shape": draw(st.lists(st.integers(0, 9), max_size=3)), "dtype": "float32"}
    leaf = {"key": ["observation", draw(TEXT)], **box, "nvec": [], "start": [], "scale": 1.0, "height": 0, "stack": 1}
    choice = {"kind": "discrete", "shape": [], "dtype": "int64", "nvec": [draw(st.integers(1, 99))], "start": [0]}
    best = {"mean": draw(st.floats(allow_nan=False, allow_infinity=False)), "frames": draw(COUNTERS)}
    return {
        "config": config,
        "leaves": [leaf],
        "actions": {**choice, "low": [], "high": [], "squash": "clip"},
        "env": draw(PRINTED),
        **{name: draw(COUNTERS) for name in ("frames", "budget", "sessions", "episodes", "solved")},
        "compiled": draw(st.booleans()),
        "best": draw(st.none() | st.just(best)),
        "evaluation": draw(st.none() | st.floats(allow_nan=False, allow_infinity=False)),
        "random": draw(MAPPINGS),
        "versions": draw(st.dictionaries(TEXT, PRINTED, max_size=2)),
        "parent": draw(st.none() | PRINTED),
    }


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=20)
@given(states(), st.data())
def test_a_checkpoint_comes_back_as_it_was(tmp_path: Path, fields: dict[str, Any], data: st.DataObject) -> None:
    import safetensors.torch
    import torch

    from rltool.checkpoint import State, read_header, write_tensors

    names = data.draw(st.lists(TEXT.filter(lambda name: name != "__metadata__"), unique=True, max_size=4))
    tensors: dict[str, Any] = {}
    for name in names:
        shape = data.draw(st.lists(st.integers(0, 4), max_size=3))
        dtype = getattr(torch, data.draw(st.sampled_from(DTYPES)))
        tensors[name] = (torch.randn(shape) * 9).to(dtype).T if len(shape) == 2 else (torch.randn(shape) * 9).to(dtype)
    state, path = State(**fields), tmp_path / "any.ckpt"
    write_tensors(path, tensors, {"rltool": json.dumps({**fields, "format": 1})})
    assert read_header(path).state == state
    found = safetensors.torch.load_file(path)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found[name], tensor)

"""When a run compiles, and what happens when it cannot."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from builders import BOX, batch, dqn, masked_leaves, ppo, run_config, sac
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from rltool import compiling
from rltool.actions import ActionSpec
from rltool.algos.base import Algorithm
from rltool.compiling import WORTHWHILE_UPDATES, Compiler
from rltool.devices import describe_device, resolve_device
from rltool.errors import ConfigError
from rltool.spaces import LeafSpec
from rltool.training import too_small_for_a_gpu

SEVERAL = ActionSpec("multi_discrete", (2,), "int64", (2, 3), (0, 0))


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@pytest.mark.parametrize(
    ("mode", "updates", "enabled"),
    [
        ("auto", WORTHWHILE_UPDATES - 1, False),
        ("auto", WORTHWHILE_UPDATES, True),
        ("auto", -1, True),
        (True, 0, True),
        (False, 10**9, False),
    ],
)
def test_auto_compiles_runs_that_are_long_enough(mode: str | bool, updates: int, enabled: bool) -> None:
    notes: list[str] = []
    compiler = Compiler(mode, updates, notes.append)  # type: ignore[arg-type]
    assert compiler.enabled == enabled
    assert not notes


def test_without_a_compiler_training_goes_on_and_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling.shutil, "which", lambda name: None)
    notes: list[str] = []
    compiler = Compiler(True, 0, notes.append)
    assert not compiler.enabled
    assert compiler(double) is double
    assert "apt install g++" in notes[0]
    assert "apt install g++" in Compiler("auto", 10**9, notes.append).reason


def test_a_failing_compilation_falls_back_to_eager_with_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **kwargs: object) -> object:
        raise RuntimeError("the backend has a bug\nand a long traceback")

    monkeypatch.setattr(compiling.torch, "compile", lambda function, **options: broken)
    notes: list[str] = []
    function = Compiler(True, 0, notes.append)(double)
    for _ in range(3):
        assert float(function(torch.tensor(3.0))) == 6.0
    assert notes[0].startswith("compiling double")
    assert function.failed
    assert len(notes) == 2
    assert "the backend has a bug" in notes[1]
    assert "traceback" not in notes[1]


def test_the_private_flag_is_set_only_while_tracing() -> None:
    """A torch release that drops it must fail here, not silently train uncompiled."""
    assert torch._dynamo.config.trace_autograd_ops is False


@pytest.mark.parametrize("name", ["cuda", "cuda:9"])
def test_cuda_without_cuda_is_an_error(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=f"device: {name} was asked for, but torch finds no CUDA device.*device=cpu"):
        resolve_device(name)
    assert resolve_device("auto") == torch.device("cpu")
    assert describe_device(torch.device("cpu"), "auto") == "cpu, chosen by device=auto"


def test_a_cuda_device_that_is_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match="this machine has 2 CUDA devices"):
        resolve_device("cuda:9")
    assert resolve_device("cuda:1") == torch.device("cuda:1")


IMAGE = LeafSpec(("observation",), "image", (3, 84, 84), "uint8", scale=255.0, height=1)


@pytest.mark.parametrize(
    ("words", "leaves", "reason"),
    [
        ((), masked_leaves(BOX)[:1], r"networks of [\d,]+ parameters in minibatches of 64 are faster there"),
        (("network.hidden=[2048, 2048]", "algo.minibatch_size=512"), masked_leaves(BOX)[:1], ""),
        ((), (IMAGE,), ""),
    ],
    ids=["small", "large", "images"],
)
def test_auto_leaves_a_gpu_alone_where_the_networks_are_small(
    words: tuple[str, ...], leaves: tuple[LeafSpec, ...], reason: str
) -> None:
    state = torch.get_rng_state()
    config = run_config("algo=ppo", "algo.minibatch_size=64", *words)
    found = too_small_for_a_gpu(config, SimpleNamespace(leaves=leaves, actions=BOX))  # type: ignore[arg-type]
    assert re.fullmatch(reason, found)
    assert torch.equal(torch.get_rng_state(), state)
    assert describe_device(torch.device("cpu"), "auto", "small").endswith("chosen by device=auto: small")


@pytest.mark.parametrize("name", ["gpu", "cuda:first", "mps"])
def test_another_device_is_answered_with_the_names(name: str) -> None:
    with pytest.raises(ConfigError, match=f"^device: expected auto, cpu, cuda or cuda:N, found '{name}'"):
        resolve_device(name)


COMPILED: dict[str, Callable[..., Algorithm]] = {
    "ppo": partial(
        ppo,
        BOX,
        "algo.frames_per_batch=64",
        "algo.minibatch_size=32",
        "algo.clip_epsilon={start: 0.3, end: 0.1, frames: 192}",
        "algo.clip_value=0.2",
        "algo.normalize_observation=true",
        "algo.warmup_frames=64",
        "total_frames=192",
    ),
    "ppo, shared, masked, several choices": partial(
        ppo,
        SEVERAL,
        "algo.frames_per_batch=64",
        "algo.minibatch_size=32",
        "algo.entropy_coeff=0.01",
        "network.shared=true",
        leaves=masked_leaves(SEVERAL),
    ),
    "dqn": partial(dqn, "algo.double=true", "algo.learning_starts=64", "algo.minibatch_size=16", "algo.target_interval=64"),
    "dqn, soft target, prioritised": partial(
        dqn, "algo.tau=0.1", "algo.target_interval=null", "algo.learning_starts=64", "algo.minibatch_size=16",
        "buffer=prioritized",
    ),
    "sac": partial(sac, "algo.minibatch_size=16", "algo.warmup_frames=64"),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("name", COMPILED)
def test_a_compiled_algorithm_follows_all_that_changes_without_compiling_again(name: str) -> None:
    """Parameters, targets, statistics, learning rate, ε and clipping change under the graphs, which are called without
    Dynamo's checks: what they give must be what eager functions give."""
    plain, compiled = (COMPILED[name](compiled=flag) for flag in (False, True))
    masks = plain.masked
    for number in range(3):
        for algorithm in (plain, compiled):
            metrics = algorithm.update(batch(2, 32, algorithm.actions, masks=masks, seed=number), 64 * (number + 1))
        assert ("train/loss" in metrics) == (number > 0 or name.startswith("ppo, "))
        torch.testing.assert_close(compiled.flat.data, plain.flat.data, rtol=1e-4, atol=1e-5)
        for envs in (2, 3):  # another number of environments is another graph
            seen = batch(envs, 1, plain.actions, masks=masks, seed=9)
            leaves = {key: value[:, 0] for key, value in plain.leaves(seen).items()}
            noise = plain.sampler.draw(1, envs, 64, torch.Generator().manual_seed(number))
            with torch.no_grad():
                wanted, got = (part.sampler(leaves, tuple(row[0] for row in noise)) for part in (plain, compiled))
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
    update, act = compiled._gradient, compiled.sampler._call
    assert not update.failed
    assert not act.failed
    assert (len(update.graphs), len(act.graphs)) == (1, 2)
    assert all(update.graphs.values())
    assert all(act.graphs.values())


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("algo", ["ppo", "dqn", "sac"])
def test_an_update_on_cuda_agrees_with_the_cpu(algo: str) -> None:
    """The same batch, weights and random numbers give the same parameters on both devices."""
    flat = []
    for device in ("cpu", "cuda"):
        if algo == "ppo":
            algorithm: Algorithm = ppo(BOX, "algo.frames_per_batch=64", "algo.minibatch_size=32", device=device)
        elif algo == "sac":
            algorithm = sac("algo.minibatch_size=16", "algo.warmup_frames=64", device=device)
        else:
            algorithm = dqn("algo.learning_starts=64", "algo.minibatch_size=16", device=device)
        algorithm.update(batch(2, 32, algorithm.actions).to(device), 64)
        algorithm.update(batch(2, 32, algorithm.actions, seed=1).to(device), 128)
        flat.append(algorithm.flat.data.detach().cpu())
    torch.testing.assert_close(*flat, rtol=1e-3, atol=1e-5)


def test_compiled_code_is_kept_under_the_users_cache_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also where importing inductor has set its own place under /tmp before; a user's own choice stands."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", default_cache_dir())
    Compiler(True, 0, print)
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "rltool" / "inductor")
    own = str(tmp_path / "elsewhere")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", own)
    Compiler(True, 0, print)
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == own


@pytest.mark.parametrize("name", ["XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR"])
def test_a_cache_that_cannot_be_written_costs_the_cache_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setenv(name, str(tmp_path / "file"))
    notes: list[str] = []
    assert Compiler(True, 0, notes.append).enabled
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == default_cache_dir()
    (note,) = notes
    assert note.startswith(f"compiled code cannot be kept in {tmp_path}/file")
    assert "TORCHINDUCTOR_CACHE_DIR names another place" in note


def test_what_a_failed_compilation_may_have_damaged_is_thrown_away(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Else every later run would fail by it; what a user keeps elsewhere stays."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", default_cache_dir())
    notes: list[str] = []
    compiler = Compiler(True, 0, notes.append)
    kept = tmp_path / "rltool" / "inductor" / "broken.py"
    kept.touch()

    def broken(value: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("Failed to import broken.py") if torch.compiler.is_compiling() else ZeroDivisionError

    with pytest.raises(ZeroDivisionError):  # eager
        compiler(broken)(torch.ones(1))
    assert not kept.exists()
    assert "was removed in case it is damaged: the next run compiles anew" in notes[-1]
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "mine"))
    (tmp_path / "mine").mkdir()
    with pytest.raises(ZeroDivisionError):
        Compiler(True, 0, notes.append)(broken)(torch.ones(1))
    assert (tmp_path / "mine").is_dir()

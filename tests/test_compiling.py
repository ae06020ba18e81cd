"""When a run compiles, and what happens when it cannot."""

from __future__ import annotations

import pytest
import torch
from builders import BOX, batch, dqn, ppo, sac

from rltool import compiling
from rltool.algos.base import Algorithm
from rltool.compiling import WORTHWHILE_UPDATES, Compiler
from rltool.devices import describe_device, resolve_device
from rltool.errors import ConfigError


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


@pytest.mark.parametrize("name", ["gpu", "cuda:first", "mps"])
def test_another_device_is_answered_with_the_names(name: str) -> None:
    with pytest.raises(ConfigError, match=f"^device: expected auto, cpu, cuda or cuda:N, found '{name}'"):
        resolve_device(name)


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

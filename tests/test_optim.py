"""The flat tensor and the optimisers on it."""

from __future__ import annotations

import pytest
import torch
from builders import run_config
from torch import nn

from rltool.optim import ALIGNMENT, FlatParameters, Optimizer


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))


def pair(*overrides: str) -> tuple[nn.Sequential, FlatParameters, Optimizer]:
    net = network()
    flat = FlatParameters({"policy": net})
    optimizer = run_config("algo=ppo", *overrides).optim.build(flat=flat)
    assert isinstance(optimizer, Optimizer)
    return net, flat, optimizer


def gradients(net: nn.Sequential, seed: int) -> tuple[torch.Tensor, ...]:
    x = torch.randn(7, 3, generator=torch.Generator().manual_seed(seed))
    return torch.autograd.grad(net(x).square().mean(), list(net.parameters()))


def test_values_names_and_alignment_survive_flattening() -> None:
    net, expected = network(), network()
    flat = FlatParameters({"policy": net})
    views = flat.views(flat.data.data)
    assert list(views) == [f"policy.{name}" for name, _ in expected.named_parameters()]
    for name, parameter in expected.named_parameters():
        assert torch.equal(views[f"policy.{name}"], parameter)
        assert views[f"policy.{name}"].storage_offset() % ALIGNMENT == 0
    flat.data.data.add_(1.0)
    assert torch.equal(net[0].bias, expected[0].bias + 1.0)


def test_gather_is_the_inverse_of_views() -> None:
    net, flat, _ = pair()
    parts = gradients(net, 0)
    views = flat.views(flat.gather(parts))
    for view, part in zip(views.values(), parts, strict=True):
        assert torch.equal(view, part)


@pytest.mark.parametrize(
    ("override", "make"),
    [
        ("optim=adam", lambda p: torch.optim.Adam(p, lr=1e-2, eps=1e-5)),
        ("optim=rmsprop", lambda p: torch.optim.RMSprop(p, lr=1e-2, eps=1e-5, alpha=0.99)),
        ("optim=sgd", lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9)),
        (
            "optim=adamw",
            lambda p: torch.optim.AdamW(
                [
                    {"params": [q for q in p if q.ndim > 1]},
                    {"params": [q for q in p if q.ndim == 1], "weight_decay": 0.0},
                ],
                lr=1e-2,
                eps=1e-5,
                weight_decay=1e-4,
            ),
        ),
    ],
    ids=["adam", "rmsprop", "sgd", "adamw"],
)
def test_flat_steps_equal_torch_steps_parameter_by_parameter(override: str, make: object) -> None:
    net, flat, optimizer = pair(override, "optim.lr=1e-2")
    reference = network()
    expected = make(list(reference.parameters()))  # type: ignore[operator]
    for seed in range(5):
        optimizer.step(flat.gather(gradients(net, seed)))
        for parameter, gradient in zip(reference.parameters(), gradients(reference, seed), strict=True):
            parameter.grad = gradient
        expected.step()
    for got, wanted in zip(net.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)


def test_state_is_saved_by_name_and_continues_exactly() -> None:
    net, flat, optimizer = pair()
    for seed in range(3):
        optimizer.step(flat.gather(gradients(net, seed)))
    state = {name: tensor.clone() for name, tensor in optimizer.state_dict().items()}
    assert float(state["step"]) == 3
    assert state["exp_avg.policy.0.weight"].shape == (5, 3)

    other, other_flat, restored = pair()
    other.load_state_dict(net.state_dict())
    restored.load_state_dict(state)
    for seed in range(3, 6):
        optimizer.step(flat.gather(gradients(net, seed)))
        restored.step(other_flat.gather(gradients(other, seed)))
    for got, wanted in zip(other.parameters(), net.parameters(), strict=True):
        assert torch.equal(got, wanted)


def test_a_parameter_that_left_the_flat_tensor_is_found() -> None:
    net, flat, optimizer = pair()
    net.load_state_dict(network().state_dict())
    flat.check()
    net.load_state_dict(network().state_dict(), assign=True)
    with pytest.raises(AssertionError, match=r"policy\.0\.weight has left"):
        optimizer.state_dict()


@pytest.mark.parametrize(
    ("schedule", "at_half", "at_end"), [("constant", 1.0, 1.0), ("linear", 0.5, 0.0), ("cosine", 0.5, 0.0)]
)
def test_learning_rate_is_a_function_of_the_frame(schedule: str, at_half: float, at_end: float) -> None:
    _, _, optimizer = pair(f"optim.schedule={schedule}", "optim.lr=0.01")
    assert optimizer.set_lr(0, 1000) == pytest.approx(0.01)
    assert optimizer.set_lr(500, 1000) == pytest.approx(0.01 * at_half)
    assert optimizer.set_lr(1000, 1000) == pytest.approx(0.01 * at_end, abs=1e-12)
    assert optimizer.set_lr(5000, 1000) == pytest.approx(0.01 * at_end, abs=1e-12), "it must not climb again"

"""Units and inputs whose state is known by construction."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rltool.units import LOOKED_AT, input_metrics, sample, saturated_units


def layer(biases: list[float], activation: nn.Module) -> nn.Sequential:
    """Units that see nothing but their bias and a little of the input."""
    linear = nn.Linear(1, len(biases))
    nn.init.constant_(linear.weight, 1.0)
    linear.bias.data = torch.tensor(biases)
    return nn.Sequential(linear, activation)


@pytest.mark.parametrize(
    ("activation", "expected"),
    # The slope of tanh is 1 - tanh²: below 0.05 beyond 2.2; a ReLU is flat below 0, an ELU far below it.
    [(nn.Tanh(), 0.5), (nn.ReLU(), 0.25), (nn.ELU(), 0.25), (nn.ReLU(inplace=True), 0.25)],
)
def test_saturated_units_are_those_with_a_flat_activation(activation: nn.Module, expected: float) -> None:
    inputs = torch.linspace(-0.5, 0.5, 20).unsqueeze(-1)
    net = layer([0.6, 0.7, 9.0, -9.0], activation)
    before = net(inputs)
    share = saturated_units(net, [inputs])
    assert share is not None
    assert float(share) == expected
    assert torch.equal(net(inputs), before)
    assert not net[1]._forward_pre_hooks, "no hook stays behind"


def test_units_of_all_layers_count_and_a_channel_is_one() -> None:
    convolution = nn.Conv2d(1, 2, 1)
    nn.init.constant_(convolution.weight, 0.0)
    convolution.bias.data = torch.tensor([1.0, -1.0])
    images = torch.ones(3, 1, 4, 4)
    share = saturated_units(nn.Sequential(convolution, nn.ReLU(), nn.Conv2d(2, 1, 1, bias=False), nn.Tanh()), [images])
    assert float(share) == pytest.approx(1 / 3)  # type: ignore[arg-type]
    assert saturated_units(nn.Linear(4, 4), [torch.ones(3, 4)]) is None


def test_a_unit_that_learns_in_some_states_is_not_saturated() -> None:
    net = layer([0.0], nn.ReLU())
    inputs = torch.ones(100, 1)
    inputs[:94] = -1.0
    assert float(saturated_units(net, [inputs])) == 0.0  # type: ignore[arg-type]
    inputs[:95] = -1.0
    assert float(saturated_units(net, [inputs])) == 1.0  # type: ignore[arg-type]


def test_inputs_are_looked_at_without_images() -> None:
    inputs = torch.tensor([[1.0, -7.0, 0.0], [2.0, -7.0, 0.0]])
    found = input_metrics([inputs, torch.full((2, 3, 4, 4), 255, dtype=torch.uint8)])
    assert {name: float(value) for name, value in found.items()} == {
        "data/input_abs_max": 7.0,
        "data/input_constant_share": pytest.approx(2 / 3),
    }
    assert input_metrics([torch.zeros(2, 3, 4, 4)]) == {}
    assert input_metrics([inputs[:1]]) == {}, "one state says nothing of change"


def test_a_sample_is_spread_over_all_rows_and_keeps_nothing_alive() -> None:
    columns = {"a": torch.arange(1000), "b": torch.arange(1000) * 2}
    taken = sample(columns)
    assert taken["a"].tolist() == list(range(0, 1000, 8))
    assert torch.equal(taken["b"], 2 * taken["a"])
    assert len(taken["a"]) <= LOOKED_AT
    assert taken["a"].untyped_storage().size() == taken["a"].numel() * 8

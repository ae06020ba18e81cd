"""The running normaliser against NumPy, network inputs and bodies against what is written about them."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from builders import BOX, batch, dqn, ppo
from gymnasium import spaces
from probes import OBSERVATIONS, run_config
from torch import Tensor, nn

from rltool.actions import ActionSpec
from rltool.errors import ConfigError
from rltool.nets import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    Body,
    ConvolutionalEncoder,
    Network,
    Preprocessor,
    ResNetEncoder,
    RunningNormalizer,
    network,
    parameter_count,
)
from rltool.schema import MLPConfig, NetworkConfig
from rltool.spaces import Key, LeafSpec, leaf_specs, mask_spec

OBS = ("observation",)
CONFIG = MLPConfig(
    kind="mlp",
    hidden=[16, 8],
    activation="tanh",
    layer_norm=False,
    init="orthogonal",
    shared=False,
    precision="float32",
)


def chunks(*sizes: int) -> list[Tensor]:
    source = torch.Generator().manual_seed(0)
    scale, shift = torch.tensor([1.0, 10.0, 0.01]), torch.tensor([0.0, 100.0, -5.0])
    return [torch.randn(size, 3, generator=source, dtype=torch.float64) * scale + shift for size in sizes]


@pytest.mark.parametrize("sizes", [(500,), (1, 1, 2), (7, 300, 1, 64), (1000, 5)])
def test_statistics_are_those_of_everything_seen(sizes: tuple[int, ...]) -> None:
    normalizer = RunningNormalizer((3,))
    parts = chunks(*sizes)
    for part in parts:
        normalizer.update(part)
    seen = torch.cat(parts).numpy()
    assert float(normalizer.count) == len(seen)
    np.testing.assert_allclose(normalizer.mean, seen.mean(0), rtol=1e-12)
    np.testing.assert_allclose(normalizer.var, seen.var(0), rtol=1e-9)


def test_small_updates_after_very_many_observations_are_not_lost() -> None:
    normalizer = RunningNormalizer((1,))
    normalizer.count.fill_(1e9)
    normalizer.update(torch.full((1, 1), 1.0))
    np.testing.assert_allclose(normalizer.mean, [1 / (1e9 + 1)], rtol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scores_are_float32_whatever_comes_in(dtype: torch.dtype) -> None:
    normalizer = RunningNormalizer((3,))
    (data,) = chunks(400)
    normalizer.update(data.to(dtype))
    score = normalizer(data.to(dtype))
    assert score.dtype == torch.float32
    expected = (data.numpy() - data.numpy().mean(0)) / data.numpy().std(0)
    np.testing.assert_allclose(score, expected, atol=2e-4)


def test_before_the_first_update_it_is_the_identity() -> None:
    x = torch.tensor([[0.5, -3.0, 9.0]])
    torch.testing.assert_close(RunningNormalizer((3,))(x), x)


def test_scores_are_clipped() -> None:
    normalizer = RunningNormalizer((1,), clip=5.0)
    assert normalizer(torch.tensor([[-1e30], [4.0], [7.0]])).flatten().tolist() == [-5.0, 4.0, 5.0]


def test_a_constant_feature_stays_harmless() -> None:
    normalizer = RunningNormalizer((1,), floor=0.01)
    normalizer.update(torch.full((50, 1), 3.0))
    assert normalizer(torch.tensor([[3.0], [3.2]])).flatten().tolist() == pytest.approx([0.0, 2.0], abs=1e-5)


def test_looking_does_not_move_the_statistics() -> None:
    normalizer = RunningNormalizer((3,))
    normalizer.update(chunks(10)[0])
    before = {name: value.clone() for name, value in normalizer.state_dict().items()}
    normalizer.train()
    normalizer(chunks(10)[0] + 100)
    assert all(torch.equal(value, before[name]) for name, value in normalizer.state_dict().items())


def leaves(count: int = 5) -> dict[Key, Tensor]:
    source = torch.Generator().manual_seed(0)
    return {
        (*OBS, "a", "b"): torch.randn(count, 2, generator=source),
        (*OBS, "a_b"): torch.randn(count, 2, generator=source),
        (*OBS, "c"): torch.randint(1, 4, (count,), generator=source),
    }


def numbers(*sizes: int) -> tuple[LeafSpec, ...]:
    """One leaf of numbers for each size."""
    keys = [OBS] if len(sizes) == 1 else [(*OBS, str(index)) for index in range(len(sizes))]
    return tuple(LeafSpec(key, "box", (size,), "float32") for key, size in zip(keys, sizes, strict=True))


def made(
    config: NetworkConfig, specs: tuple[LeafSpec, ...], outputs: int | None = 2, *, seed: int = 0, **options: Any
) -> Network:
    preprocessor = Preprocessor(specs, normalize=False)
    return network(config, preprocessor, outputs, torch.Generator().manual_seed(seed), **options)


def node(*overrides: str) -> NetworkConfig:
    """A network node of conf/."""
    return run_config("algo=ppo", "env=cartpole", *overrides).network


def inputs(preprocessor: Preprocessor, observed: Mapping[Key, Tensor]) -> list[Tensor]:
    """What a network takes, in its order."""
    features = preprocessor(observed)
    return [features[key] for key in preprocessor.keys]


# ------------------------------------------------------------------------------------------------------- preprocessor


@pytest.mark.parametrize("normalize", [False, True])
def test_every_leaf_moves_the_output(normalize: bool) -> None:
    preprocessor = Preprocessor(leaf_specs(OBSERVATIONS["dict"], "Env-v0"), normalize=normalize)
    net = network(CONFIG, preprocessor, 2, torch.Generator().manual_seed(0))
    base = net(*inputs(preprocessor, leaves()))
    assert base.shape == (5, 2)
    for key in leaves():
        changed = leaves()
        changed[key] = changed[key] % 3 + 1 if key[-1] == "c" else changed[key] + 1
        assert (net(*inputs(preprocessor, changed)) != base).any(-1).all(), key


def test_each_box_leaf_has_statistics_of_its_own() -> None:
    preprocessor = Preprocessor(leaf_specs(OBSERVATIONS["dict"], "Env-v0"), normalize=True)
    data = leaves(400)
    data[*OBS, "a_b"] += 1000
    preprocessor.update(data)
    features = preprocessor(data)
    assert list(features) == ["observation.a.b", "observation.a_b", "observation.c"]
    assert torch.cat([features["observation.a.b"], features["observation.a_b"]], -1).abs().max() < 5
    one_hot = torch.nn.functional.one_hot(data[*OBS, "c"] - 1, 3).float()
    torch.testing.assert_close(features["observation.c"], one_hot)
    assert len(preprocessor.normalizers) == 2


def test_keys_with_dots_and_slashes_stay_apart() -> None:
    keys: list[Key] = [(*OBS, "a.b"), (*OBS, "a", "b"), (*OBS, "a/b"), (*OBS, "a_b"), (*OBS, "a~2b")]
    preprocessor = Preprocessor([LeafSpec(key, "box", (1,), "float32") for key in keys], normalize=True)
    data = {key: torch.full((3, 1), float(index)) for index, key in enumerate(keys)}
    preprocessor.update(data)
    assert len(preprocessor.normalizers) == 5
    features = preprocessor(data)
    assert len(features) == 5
    assert torch.cat(list(features.values()), -1).abs().max() < 1e-3


@pytest.mark.parametrize(("start", "value", "hot"), [(0, 0, 0), (0, 3, 3), (2, 2, 0), (2, 5, 3), (-1, 1, 2)])
def test_discrete_leaves_become_one_hot(start: int, value: int, hot: int) -> None:
    preprocessor = Preprocessor([LeafSpec(OBS, "discrete", (), "int64", (4,), (start,))], normalize=True)
    features = preprocessor({OBS: torch.tensor([value])})["observation"]
    assert features.dtype == torch.float32
    assert features.tolist() == [[float(index == hot) for index in range(4)]]


@pytest.mark.parametrize("batch", [(), (5,), (2, 5)])
def test_several_categories_become_one_hot_side_by_side(batch: tuple[int, ...]) -> None:
    (spec,) = leaf_specs(spaces.MultiDiscrete([[2, 3], [4, 1]], start=[[0, 1], [-2, 7]]), "Env-v0")
    value = torch.tensor([[1, 1], [0, 7]]).expand(*batch, 2, 2)
    features = Preprocessor([spec], normalize=True)({OBS: value})["observation"]
    expected = torch.tensor([0, 1, 1, 0, 0, 0, 0, 1, 0, 1.0])
    torch.testing.assert_close(features, expected.expand(*batch, 10))


def test_bits_become_numbers_and_are_not_normalised() -> None:
    (spec,) = leaf_specs(spaces.MultiBinary([2, 2]), "Env-v0")
    preprocessor = Preprocessor([spec], normalize=True)
    assert not preprocessor.normalizers
    bits = torch.tensor([[[0, 1], [1, 1]]], dtype=torch.int8)
    torch.testing.assert_close(preprocessor({OBS: bits})["observation"], torch.tensor([[0.0, 1.0, 1.0, 1.0]]))


@pytest.mark.parametrize(("shape", "count"), [((), 1), ((3,), 3), ((2, 3), 6)])
@pytest.mark.parametrize("batch", [(), (5,), (2, 5)])
def test_box_leaves_are_flattened_behind_any_batch(shape: tuple[int, ...], count: int, batch: tuple[int, ...]) -> None:
    preprocessor = Preprocessor([LeafSpec(OBS, "box", shape, "float32")], normalize=True)
    value = torch.arange(math.prod(batch) * count).view((*batch, *shape)) / 10
    torch.testing.assert_close(preprocessor({OBS: value})["observation"], value.reshape(*batch, count))


def test_small_pixels_are_numbers_in_the_unit_interval() -> None:
    (spec,) = leaf_specs(spaces.Box(0, 255, (2, 2, 3), np.uint8), "Env-v0")
    value = torch.arange(0, 255, 255 // 12)[:12].to(torch.uint8).view(1, 2, 2, 3)
    features = Preprocessor([spec], normalize=False)({OBS: value})["observation"]
    torch.testing.assert_close(features, value.view(1, 12).float() / 255)


def test_a_batch_of_environments_and_steps_feeds_the_statistics_flat() -> None:
    preprocessor = Preprocessor([LeafSpec(OBS, "box", (3,), "float32")], normalize=True)
    (data,) = chunks(40)
    preprocessor.update({OBS: data.view(4, 10, 3)})
    (normalizer,) = preprocessor.normalizers.values()
    np.testing.assert_allclose(cast("RunningNormalizer", normalizer).mean, data.float().double().mean(0), rtol=1e-9)


def test_the_mask_goes_through_and_is_no_network_input() -> None:
    preprocessor = Preprocessor([*numbers(4), mask_spec(3)], normalize=True)
    mask = torch.tensor([[True, False, True]])
    features = preprocessor({OBS: torch.zeros(1, 4), ("action_mask",): mask})
    assert features["action_mask"] is mask
    assert preprocessor.keys == ("observation",)
    assert preprocessor.masked_keys == ("observation", "action_mask")
    assert Preprocessor(numbers(4), normalize=True).masked_keys == ("observation",)


# Shape of an image, and where its pixel (channel, row, column) lies; with 3 frames of 2 channels, channel = 2 · frame + c.
LAYOUTS: dict[str, tuple[tuple[int, ...], int, Callable[[int, int, int], tuple[int, ...]]]] = {
    "channels first": ((2, 40, 37), 2, lambda c, y, x: (c, y, x)),
    "channels last": ((40, 37, 2), 2, lambda c, y, x: (y, x, c)),
    "gray": ((40, 37), 1, lambda c, y, x: (y, x)),
    "stack of gray": ((3, 40, 37), 3, lambda c, y, x: (c, y, x)),
    "stack, channels last": ((3, 40, 37, 2), 6, lambda c, y, x: (c // 2, y, x, c % 2)),
    "stack, channels first": ((3, 2, 40, 37), 6, lambda c, y, x: (c // 2, c % 2, y, x)),
}


@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_images_get_their_channels_first(layout: str, batch: tuple[int, ...]) -> None:
    shape, channels, place = LAYOUTS[layout]
    (spec,) = leaf_specs(spaces.Box(0, 255, shape, np.uint8), "Env-v0")
    source = torch.Generator().manual_seed(0)
    image = torch.randint(256, (*batch, *shape), generator=source, dtype=torch.uint8)
    moved = Preprocessor([spec], normalize=True)({OBS: image})["observation"]
    assert moved.shape == (*batch, channels, 40, 37)
    assert moved.dtype == torch.uint8, "bytes until the network"
    for c in range(channels):
        for y, x in ((0, 0), (0, 36), (39, 0), (17, 23), (39, 36)):
            assert torch.equal(moved[..., c, y, x], image[(..., *place(c, y, x))])
    assert int(moved.long().sum()) == int(image.long().sum())


@pytest.mark.parametrize(
    ("space", "largest"),
    [
        (spaces.Box(0, 255, (40, 37, 3), np.uint8), 255),
        (spaces.Box(0, 255, (3, 40, 37), np.uint8), 255),
        (spaces.Box(0, 255, (4, 40, 37), np.uint8), 255),
        (spaces.Box(0, 1, (40, 37, 3), np.float32), 1),
        (spaces.Box(0, 255, (40, 37), np.float32), 255),
    ],
    ids=str,
)
def test_a_body_sees_pixels_between_0_and_1_once_divided(space: spaces.Box, largest: int) -> None:
    preprocessor = Preprocessor(leaf_specs(space, "Env-v0"), normalize=True)
    net = network(node("network=nature_cnn"), preprocessor, 2, torch.Generator().manual_seed(0))
    seen: list[Tensor] = []
    net.body.register_forward_pre_hook(lambda part, given: seen.append(given[0]))
    value = torch.rand(2, *space.shape, generator=torch.Generator().manual_seed(0)) * largest
    value.view(2, -1)[:, :2] = torch.tensor([0.0, largest])
    value = value.to(torch.uint8) if space.dtype == np.uint8 else value
    (given,) = inputs(preprocessor, {OBS: value})
    net(given)
    assert (float(seen[0].min()), float(seen[0].max())) == (0.0, pytest.approx(1.0))
    torch.testing.assert_close(seen[0], given.float() / largest)


# ------------------------------------------------------------------------------------------------------------- bodies


def linears(net: nn.Module) -> list[nn.Linear]:
    return [part for part in net.modules() if isinstance(part, nn.Linear)]


def test_an_mlp_has_the_layers_of_its_config() -> None:
    net = made(CONFIG, numbers(4), None)
    body = cast("Body", net.body)
    assert [(part.in_features, part.out_features) for part in linears(body)] == [(4, 16), (16, 8)]
    assert [type(part) for part in body.hidden] == [nn.Linear, nn.Tanh, nn.Linear, nn.Tanh]
    assert net.width == 8
    assert parameter_count(net) == 4 * 16 + 16 + 16 * 8 + 8
    assert made(CONFIG.model_copy(update={"hidden": []}), numbers(4), None).width == 4


def test_several_inputs_are_put_side_by_side_in_their_order() -> None:
    net = made(CONFIG.model_copy(update={"hidden": []}), numbers(2, 1, 3), None)
    parts = [torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0]]), torch.tensor([[4.0, 5.0, 6.0]])]
    assert net(*parts).tolist() == [[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]]


def test_further_inputs_come_after_those_of_the_observation() -> None:
    net = made(CONFIG.model_copy(update={"hidden": []}), numbers(2), None, extra={"action": (1,)})
    assert net(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0]])).tolist() == [[1.0, 2.0, 3.0]]


def test_first_weights_follow_the_given_generator_alone() -> None:
    for init in ("orthogonal", "xavier", "default"):

        def weights(seed: int, init: str = init) -> Tensor:
            net = made(CONFIG.model_copy(update={"init": init}), numbers(4), seed=seed)
            return torch.cat([parameter.flatten() for parameter in net.parameters()])

        before = torch.get_rng_state()
        zero = weights(0)
        assert torch.equal(torch.get_rng_state(), before)
        torch.rand(3)
        assert torch.equal(weights(0), zero)
        assert not torch.equal(weights(1), zero)


def test_orthogonal_weights_have_the_gains_of_ppo() -> None:
    net = made(CONFIG, numbers(32), 4, head_gain=0.01)
    first, second, head = linears(net)
    for layer, gain in ((first, 2**0.5), (second, 2**0.5), (head, 0.01)):
        product = layer.weight @ layer.weight.T
        torch.testing.assert_close(product, gain**2 * torch.eye(len(product)), rtol=1e-4, atol=1e-5)
        assert not layer.bias.any()


def test_orthogonal_convolutions_have_orthogonal_kernels() -> None:
    net = made(node("network=nature_cnn"), leaf_specs(spaces.Box(0, 255, (40, 40, 3), np.uint8), "Env-v0"), 4)
    convolutions = [part for part in net.modules() if isinstance(part, nn.Conv2d)]
    assert len(convolutions) == 3
    for layer in convolutions:
        kernels = layer.weight.flatten(1)
        torch.testing.assert_close(kernels @ kernels.T, 2 * torch.eye(len(kernels)), rtol=1e-4, atol=1e-5)
        assert layer.bias is not None
        assert not layer.bias.any()


def test_xavier_weights_are_uniform_with_the_variance_of_the_paper() -> None:
    """Glorot & Bengio 2010, eq. 16: uniform on ±√6 / √(in + out), whose variance is 2 / (in + out)."""
    config = CONFIG.model_copy(update={"init": "xavier", "hidden": [128, 64]})
    for layer in linears(made(config, numbers(64), 32, head_gain=0.01)):
        fan, weight = layer.in_features + layer.out_features, layer.weight.detach()
        assert float(weight.abs().max()) == pytest.approx((6 / fan) ** 0.5, rel=0.01)
        assert float(weight.var()) == pytest.approx(2 / fan, rel=0.05)
        assert not layer.bias.any()


def test_default_weights_are_torch_s_own() -> None:
    """Uniform on ±1 / √in, biases too."""
    config = CONFIG.model_copy(update={"init": "default", "hidden": [128, 64]})
    for layer in linears(made(config, numbers(64), 32, head_gain=0.01)):
        bound = layer.in_features**-0.5
        for part in (layer.weight.detach(), layer.bias.detach()):
            assert float(part.abs().max()) == pytest.approx(bound, rel=0.1)
            assert float(part.abs().max()) <= bound
        assert float(layer.weight.detach().var()) == pytest.approx(bound**2 / 3, rel=0.05)


def test_layer_norm_stands_before_each_activation() -> None:
    net = made(CONFIG.model_copy(update={"layer_norm": True}), numbers(4), 3)
    hidden = cast("Body", net.body).hidden
    assert [type(part) for part in hidden] == [nn.Linear, nn.LayerNorm, nn.Tanh] * 2
    normalised = hidden[:2](100 * torch.randn(7, 4, generator=torch.Generator().manual_seed(0)))
    torch.testing.assert_close(normalised.mean(-1), torch.zeros(7), atol=1e-5, rtol=0)
    torch.testing.assert_close(normalised.var(-1, correction=0), torch.ones(7), atol=1e-2, rtol=0)
    assert parameter_count(net) == parameter_count(made(CONFIG, numbers(4), 3)) + 2 * 16 + 2 * 8
    words = ["network.layer_norm=true", "network.hidden=[8]"]
    assert any(isinstance(part, nn.LayerNorm) for part in ppo(ACTIONS, *words).critic.modules())
    assert any(isinstance(part, nn.LayerNorm) for part in dqn(*words).net.modules())


ATARI = leaf_specs(spaces.Box(0, 255, (84, 84, 4), np.uint8), "Env-v0")


@pytest.mark.parametrize("name", ["nature_cnn", "auto"])
def test_the_nature_network_has_the_layers_of_its_paper(name: str) -> None:
    """Mnih et al. 2015: 32 8×8/4, 64 4×4/2, 64 3×3/1, 512 units, one output an action (18 at most)."""
    net = made(node(f"network={name}"), ATARI, 18)
    encoder = cast("Body", net.body).encoders[0]
    shapes: list[tuple[int, ...]] = []
    for part in encoder:  # type: ignore[union-attr]
        part.register_forward_hook(lambda part, given, result: shapes.append(tuple(result.shape[1:])))
    image = torch.zeros(1, 4, 84, 84, dtype=torch.uint8)
    assert net(image).shape == (1, 18)
    assert shapes[::2] == [(32, 20, 20), (64, 9, 9), (64, 7, 7), (3136,), (512,)]
    assert net.width == 512
    counts = [sum(p.numel() for p in part.parameters()) for part in net.modules() if not list(part.children())]
    sizes = [8 * 8 * 4 * 32 + 32, 4 * 4 * 32 * 64 + 64, 3 * 3 * 64 * 64 + 64, 3136 * 512 + 512, 512 * 18 + 18]
    assert [count for count in counts if count] == sizes == [8_224, 32_832, 36_928, 1_606_144, 9_234]
    assert parameter_count(net) == 1_693_362


def test_auto_is_the_mlp_for_numbers_and_both_for_both() -> None:
    config = node("network=auto")
    assert parameter_count(made(config, numbers(4), 2)) == 4 * 64 + 64 + 64 * 64 + 64 + 64 * 2 + 2
    image = LeafSpec((*OBS, "camera"), "image", (36, 36), "uint8", scale=255.0)
    both = made(config, (image, LeafSpec((*OBS, "speed"), "box", (3,), "float32")), 2)
    first, *others = linears(cast("Body", both.body).hidden)
    assert first.in_features == 512 + 3
    assert [part.out_features for part in (first, *others)] == [64, 64]
    assert [type(part) for part in cast("Body", both.body).encoders] == [ConvolutionalEncoder, nn.Identity]


@pytest.mark.parametrize(
    ("words", "specs", "message"),
    [
        (
            ["network=mlp"],
            ATARI,
            r"^network: mlp takes numbers, and observation is an image of \(4, 84, 84\).*network=auto",
        ),
        (
            ["network=nature_cnn"],
            numbers(4),
            r"^network: nature_cnn needs an image.*found observation \(4,\).*network=mlp",
        ),
        (
            ["network=nature_cnn", "network.cnn.kernels=[80, 8, 3]"],
            ATARI,
            r"^network\.cnn: these kernels and strides do not fit the images observation \(4, 84, 84\)",
        ),
        (["network=resnet", "network.weights=null"], numbers(4), r"^network: resnet needs an image.*network=mlp"),
        (
            ["network=resnet", "network.weights=null"],
            ATARI,
            r"^network: resnet takes images of 1 or 3 channels.* has 4",
        ),
    ],
)
def test_a_network_that_does_not_fit_the_observations_is_refused(
    words: list[str], specs: tuple[LeafSpec, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match="(?s)" + message):
        made(node(*words), specs)


# ------------------------------------------------------------------------------------------- every leaf, both algorithms

ACTIONS = ActionSpec("discrete", (), "int64", (3,), (0,))
EVERYTHING = leaf_specs(
    spaces.Dict(
        {
            "bits": spaces.MultiBinary([2, 2]),
            "camera": spaces.Box(0, 255, (36, 36, 3), np.uint8),
            "depth": spaces.Box(0, 1, (36, 36), np.float32),
            "inner": spaces.Dict({"joints": spaces.Box(-9, 9, (3,)), "deep": spaces.Tuple((spaces.Discrete(4),))}),
            "pair": spaces.MultiDiscrete([2, 3], start=[0, 5]),
            "pixels": spaces.Box(0, 255, (2, 2), np.uint8),
        }
    ),
    "Env-v0",
)


def everything(count: int = 3) -> dict[Key, Tensor]:
    source = torch.Generator().manual_seed(0)
    observed = {}
    for spec in EVERYTHING:
        if spec.kind == "discrete":
            options = torch.tensor(spec.nvec).view(spec.shape).expand(count, *spec.shape)
            drawn = (torch.rand(count, *spec.shape, generator=source) * options).long()
            value = drawn + torch.tensor(spec.start).view(spec.shape)
        else:
            largest = {"uint8": 250, "int8": 2, "float32": 1}[spec.dtype]
            value = (torch.rand(count, *spec.shape, generator=source) * largest).to(getattr(torch, spec.dtype))
        observed[spec.key] = value
    return observed


def changes(spec: LeafSpec, value: Tensor) -> list[Tensor]:
    """Each entry of a leaf moved by itself; of an image, a corner and a pixel of the last channel."""
    changed = []
    entries = range(math.prod(spec.shape)) if spec.kind != "image" else (0, math.prod(spec.shape) - 1)
    for entry in entries:
        moved = value.reshape(len(value), -1).clone()
        column = moved[:, entry]
        if spec.kind == "discrete":
            start = spec.start[entry]
            moved[:, entry] = (column - start + 1) % spec.nvec[entry] + start
        elif spec.kind == "binary":
            moved[:, entry] = 1 - column
        else:
            moved[:, entry] = column + (5 if spec.dtype == "uint8" else 0.5)
        changed.append(moved.view_as(value))
    return changed


@pytest.mark.parametrize("algo", ["ppo", "dqn"])
def test_every_entry_of_every_leaf_reaches_every_network(algo: str) -> None:
    if algo == "ppo":
        learner: Any = ppo(ACTIONS, "network.hidden=[32]", leaves=EVERYTHING)
        outputs = {"actor": lambda given: learner.actor(*given), "critic": lambda given: learner.critic(*given)}
    else:
        learner = dqn("network.hidden=[32]", "network.activation=tanh", leaves=EVERYTHING)
        outputs = {"net": lambda given: learner.net(*given)}
    preprocessor = learner.preprocessor
    assert [spec.name for spec in EVERYTHING] == [
        "observation.bits",
        "observation.camera",
        "observation.depth",
        "observation.inner.deep.0",
        "observation.inner.joints",
        "observation.pair",
        "observation.pixels",
    ]
    with torch.no_grad():
        base = {name: call(inputs(preprocessor, everything())) for name, call in outputs.items()}
        for spec in EVERYTHING:
            for index, changed in enumerate(changes(spec, everything()[spec.key])):
                given = inputs(preprocessor, everything() | {spec.key: changed})
                for name, call in outputs.items():
                    assert (call(given) != base[name]).any(-1).all(), (name, spec.name, index)


# ------------------------------------------------------------------------------------------------ a module of one's own

MINE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, shapes, width=8):
        super().__init__()
        self.shapes = shapes
        self.layer = nn.Linear(sum(shape[0] for shape in shapes.values()), width)
        with torch.no_grad():
            self.layer.weight.fill_(0.25)

    def forward(self, *inputs):
        return torch.relu(self.layer(torch.cat(inputs, -1)))

class Convolution(nn.Module):
    def __init__(self, shapes):
        super().__init__()
        (shape,) = shapes.values()
        self.layer = nn.Conv2d(shape[0], 4, 3)

    def forward(self, image):
        return self.layer(image)

class Raises(Net):
    def forward(self, *inputs):
        raise KeyError("lidar")

class Pair(Net):
    def forward(self, *inputs):
        return inputs, inputs

class NotMade(nn.Module):
    def __init__(self, shapes):
        raise ValueError("needs a lidar")

class NoModule:
    def __init__(self, shapes):
        pass
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A file with torch modules in the working directory; its module name."""
    (tmp_path / "my_nets.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    monkeypatch.delitem(sys.modules, "my_nets", raising=False)
    return "my_nets"


def test_a_module_of_one_s_own_is_the_body(mine: str) -> None:
    config = node("network=module", f"network.entry_point={mine}:Net", "network.kwargs.width=5")
    net = made(config, numbers(2, 3), 4)
    assert net.width == 5
    assert net.body.shapes == {"observation.0": (2,), "observation.1": (3,)}
    parts = [torch.ones(1, 2), torch.ones(1, 3)]
    torch.testing.assert_close(net.body(*parts), torch.relu(5 * 0.25 + net.body.layer.bias).unsqueeze(0))  # type: ignore[union-attr, operator]
    assert (net.body.layer.weight == 0.25).all(), "it keeps its own weights"  # type: ignore[union-attr, operator]
    assert not net.head.bias.any(), "the head is rltool's"  # type: ignore[union-attr, operator]


@pytest.mark.parametrize("algo", ["ppo", "dqn"])
@pytest.mark.parametrize("shared", ["true", "false"])
def test_a_module_of_one_s_own_learns(mine: str, algo: str, shared: str) -> None:
    words = ["network=module", f"network.entry_point={mine}:Net", f"network.shared={shared}", "algo.minibatch_size=8"]
    if algo == "ppo":
        learner: Any = ppo(ACTIONS, *words, "algo.frames_per_batch=16")
    else:
        learner = dqn(*words, "algo.frames_per_batch=16", "algo.learning_starts=8", "algo.updates_per_frame=1")
    before = learner.flat.data.clone()
    metrics = learner.update(batch(2, 8, ACTIONS), 16)
    assert bool(metrics["train/loss"].isfinite())
    assert not torch.equal(before, learner.flat.data)


@pytest.mark.parametrize(
    ("name", "words", "message"),
    [
        (
            "Convolution",
            [],
            r"my_nets:Convolution must give \(2, features\) of torch.float32 for a batch of 2, gave \(2, 4, 34, 34\)",
        ),
        ("Pair", [], r"my_nets:Pair must give \(2, features\) .*, gave tuple"),
        (
            "Raises",
            [],
            r"my_nets:Raises failed on a batch of 2: KeyError: 'lidar'; its inputs are \{'observation': \(3, 36, 36\)\}",
        ),
        ("NotMade", [], r"my_nets:NotMade.*ValueError: needs a lidar"),
        (
            "NoModule",
            [],
            r"expected a torch\.nn\.Module or a function that returns one, found my_nets:NoModule",
        ),
        ("Net", ["network.kwargs.depth=2"], r"^network\.kwargs: my_nets:Net was called with .*depth"),
        ("Absent", [], r"^network\.entry_point: module my_nets has no Absent"),
    ],
)
def test_a_module_that_does_not_fit_is_refused_in_words(mine: str, name: str, words: list[str], message: str) -> None:
    image = leaf_specs(spaces.Box(0, 255, (36, 36, 3), np.uint8), "Env-v0")
    with pytest.raises(ConfigError, match=message):
        made(node("network=module", f"network.entry_point={mine}:{name}", *words), image)


ODD = """
import torch
from torch import nn

class Odd(nn.Module):
    def __init__(self, inputs, how):
        super().__init__()
        self.linear, self.idle, self.how = nn.Linear(4, 6), nn.Linear(1, 1), how
        self.layers = nn.Sequential(nn.BatchNorm1d(4), self.linear, nn.Dropout(0.5))
        if how != "idle":
            del self.idle
    def forward(self, x):
        y = self.layers(x)
        return {"half": y.half(), "mean": y.mean(0, keepdim=True), "wide": y.repeat(1, len(x))}.get(self.how, y)
"""


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("half", r"must give \(2, features\) of torch.float32 for a batch of 2, gave \(2, 6\) of torch.float16"),
        ("mean", r"gave \(1, 6\) of torch.float32"),
        ("wide", r"gave 12 features for a batch of 2 and 18 for one of 3"),
        ("idle", r"parameters that its output does not depend on \(idle.weight, idle.bias\)"),
    ],
)
def test_a_module_that_would_fail_later_is_refused_at_once(
    how: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "odd_nets.py").write_text(ODD)
    monkeypatch.syspath_prepend(tmp_path)
    words = ("network=module", "network.entry_point=odd_nets:Odd", f"network.kwargs.how={how}")
    with pytest.raises(ConfigError, match=message):
        made(node(*words), numbers(4))


def test_networks_are_the_same_function_in_training_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropout drops nothing and batch normalisation keeps its statistics, whatever mode is asked for."""
    (tmp_path / "odd_nets.py").write_text(ODD)
    monkeypatch.syspath_prepend(tmp_path)
    net = made(node("network=module", "network.entry_point=odd_nets:Odd", "network.kwargs.how=well"), numbers(4))
    x = torch.randn(5, 4)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    assert torch.equal(net.train()(x), net(x))
    assert torch.equal(net(x[:1]), net(x)[:1]) or torch.allclose(net(x[:1]), net(x)[:1])
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_a_module_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^network\.entry_point: module no_such_nets cannot be imported"):
        made(node("network=module", "network.entry_point=no_such_nets:Net"), numbers(4))


# ------------------------------------------------------------------------------------------------------------- resnet

RGB = leaf_specs(spaces.Box(0, 255, (36, 36, 3), np.uint8), "Env-v0")
RESNET = ("network=resnet", "network.weights=null", "network.hidden=[8]")


def test_without_torchvision_resnet_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(ConfigError, match=r"^network: resnet needs torchvision.*pip install 'rltool\[vision\]'"):
        made(node(*RESNET), RGB)


def test_a_backbone_sees_colours_as_on_imagenet() -> None:
    encoder = ResNetEncoder(nn.Flatten(), frozen=True)
    image = torch.rand(2, 3, 5, 4, generator=torch.Generator().manual_seed(0))
    mean, std = (torch.tensor(part).view(3, 1, 1) for part in (IMAGENET_MEAN, IMAGENET_STD))
    torch.testing.assert_close(encoder(image), ((image - mean) / std).flatten(1))
    gray = image[:, :1]
    torch.testing.assert_close(encoder(gray), ((gray.expand(-1, 3, -1, -1) - mean) / std).flatten(1))


def test_a_resnet_has_torchvision_s_layers_and_the_hidden_ones() -> None:
    models = pytest.importorskip("torchvision.models")
    net = made(node(*RESNET, "network.frozen=false"), RGB, 3)
    plain = models.resnet18()
    trunk = sum(p.numel() for name, p in plain.named_parameters() if not name.startswith("fc."))
    assert net.width == 8
    assert parameter_count(net) == trunk + (512 * 8 + 8) + (8 * 3 + 3)
    assert trunk == 11_176_512
    assert net(torch.zeros(2, 3, 36, 36, dtype=torch.uint8)).shape == (2, 3)


@pytest.mark.long
@pytest.mark.parametrize("suffix", ["safetensors", "pth"])
def test_a_backbone_takes_weights_from_a_file(tmp_path: Path, suffix: str) -> None:
    models = pytest.importorskip("torchvision.models")
    from safetensors.torch import save_file

    torch.manual_seed(3)
    plain = models.resnet18()
    plain.bn1.running_mean.fill_(0.5)
    file = tmp_path / f"weights.{suffix}"
    if suffix == "pth":
        torch.save(plain.state_dict(), file)
    else:
        save_file(plain.state_dict(), file)
    net = made(node("network=resnet", f"network.weights={file}", "network.hidden=[]"), RGB, None)
    backbone = cast("ResNetEncoder", cast("Body", net.body).encoders[0]).backbone
    state = plain.state_dict()
    for name, tensor in backbone.state_dict().items():
        assert torch.equal(tensor, state[name]), name

    image = torch.randint(256, (2, 3, 36, 36), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    mean, std = (torch.tensor(part).view(3, 1, 1) for part in (IMAGENET_MEAN, IMAGENET_STD))
    plain.fc = nn.Identity()
    with torch.no_grad():
        torch.testing.assert_close(net(image), plain.eval()((image / 255 - mean) / std))


@pytest.mark.parametrize(
    ("weights", "content"),
    [
        ("absent.safetensors", None),
        ("broken.safetensors", b"no tensors"),
        ("broken.pth", b"none"),
        ("IMAGENET21K", None),
    ],
)
def test_weights_that_cannot_be_had_are_named(tmp_path: Path, weights: str, content: bytes | None) -> None:
    pytest.importorskip("torchvision.models")
    file = str(tmp_path / weights) if "." in weights else weights
    if content is not None:
        Path(file).write_bytes(content)
    with pytest.raises(ConfigError, match=r"^network\.weights: .*cannot be loaded into resnet18") as caught:
        made(node("network=resnet", f"network.weights={file}"), RGB)
    assert weights in str(caught.value)


@pytest.mark.parametrize("frozen", [pytest.param(True, marks=pytest.mark.long), False])
@pytest.mark.parametrize("algo", ["dqn", pytest.param("ppo", marks=pytest.mark.long)])
def test_a_backbone_learns_unless_frozen_and_its_statistics_never_move(algo: str, frozen: bool) -> None:
    pytest.importorskip("torchvision.models")
    words = [*RESNET, f"network.frozen={str(frozen).lower()}", "algo.minibatch_size=4", "algo.frames_per_batch=4"]
    if algo == "ppo":
        learner: Any = ppo(ACTIONS, *words, "network.shared=true", "algo.epochs=1", leaves=RGB)
        body = learner.actor.encoder.body.body
    else:
        learner = dqn(*words, "algo.learning_starts=4", "algo.updates_per_frame=0.25", "buffer.size=100", leaves=RGB)
        body = learner.net.body
    backbone = body.encoders[0].backbone
    assert all(parameter.requires_grad != frozen for parameter in backbone.parameters())
    hidden_and_heads = 512 * 8 + 8 + 8 * 3 + 3 + (8 + 1 if algo == "ppo" else 0)
    learned = sum(parameter.numel() for parameter in learner.flat.parameters)
    assert learned == hidden_and_heads + (0 if frozen else 11_176_512)

    data = batch(2, 2, ACTIONS)
    source = torch.Generator().manual_seed(0)
    for part in (data, data["next"]):
        part["observation"] = torch.randint(256, (2, 2, 36, 36, 3), generator=source, dtype=torch.uint8)
    before = {name: value.clone() for name, value in backbone.state_dict().items()}
    first = body.hidden[0].weight.clone()
    learner.update(data, 4)
    if algo == "dqn":
        learner.update(data, 8)
    after = backbone.state_dict()
    statistics = {name for name, _ in backbone.named_buffers()}
    assert len(statistics) == 3 * 20, "mean, variance and counter of each of 20 layers"
    for name, value in before.items():
        assert torch.equal(value, after[name]) == (frozen or name in statistics), name
    assert not torch.equal(first, body.hidden[0].weight)


@pytest.mark.long
def test_bfloat16_products_give_float32_near_those_of_float32() -> None:
    single, half = ppo(BOX), ppo(BOX, "network.precision=bfloat16")
    observation = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
    expected, found = (part.actor(observation)[0] for part in (single, half))
    value = half.critic(observation)
    assert found.dtype == value.dtype == torch.float32
    assert not torch.equal(found, expected)
    torch.testing.assert_close(value, single.critic(observation), rtol=0.02, atol=0.05)
    half.update(batch(2, 1024, BOX), 2048)
    assert torch.isfinite(half.flat.data).all()

"""The running normaliser against NumPy, and that every leaf reaches the network."""

from __future__ import annotations

import math
from typing import cast

import numpy as np
import pytest
import torch
from probes import OBSERVATIONS
from torch import Tensor, nn

from rltool.nets import MLP, Preprocessor, RunningNormalizer, network, orthogonal_, parameter_count
from rltool.schema import MLPConfig
from rltool.spaces import Key, LeafSpec, leaf_specs

OBS = ("observation",)
CONFIG = MLPConfig(kind="mlp", hidden=[16, 8], activation="tanh")


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


@pytest.mark.parametrize("normalize", [False, True])
def test_every_leaf_moves_the_output(normalize: bool) -> None:
    preprocessor = Preprocessor(leaf_specs(OBSERVATIONS["dict"], "Env-v0"), normalize=normalize)
    net = network(CONFIG, preprocessor.features, 2, torch.Generator().manual_seed(0))
    base = net(preprocessor(leaves()))
    assert base.shape == (5, 2)
    for key in leaves():
        changed = leaves()
        changed[key] = changed[key] % 3 + 1 if key[-1] == "c" else changed[key] + 1
        assert (net(preprocessor(changed)) != base).any(-1).all(), key


def test_each_box_leaf_has_statistics_of_its_own() -> None:
    preprocessor = Preprocessor(leaf_specs(OBSERVATIONS["dict"], "Env-v0"), normalize=True)
    data = leaves(400)
    data[*OBS, "a_b"] += 1000
    preprocessor.update(data)
    features = preprocessor(data)
    assert features[:, :4].abs().max() < 5
    one_hot = torch.nn.functional.one_hot(data[*OBS, "c"] - 1, 3).float()
    torch.testing.assert_close(features[:, 4:], one_hot)
    assert len(preprocessor.normalizers) == 2


def test_keys_with_dots_and_slashes_stay_apart() -> None:
    keys: list[Key] = [(*OBS, "a.b"), (*OBS, "a", "b"), (*OBS, "a/b"), (*OBS, "a_b"), (*OBS, "a~2b")]
    preprocessor = Preprocessor([LeafSpec(key, "box", (1,), "float32") for key in keys], normalize=True)
    data = {key: torch.full((3, 1), float(index)) for index, key in enumerate(keys)}
    preprocessor.update(data)
    assert len(preprocessor.normalizers) == 5
    assert preprocessor(data).abs().max() < 1e-3


@pytest.mark.parametrize(("start", "value", "hot"), [(0, 0, 0), (0, 3, 3), (2, 2, 0), (2, 5, 3), (-1, 1, 2)])
def test_discrete_leaves_become_one_hot(start: int, value: int, hot: int) -> None:
    preprocessor = Preprocessor([LeafSpec(OBS, "discrete", (), "int64", n=4, start=start)], normalize=True)
    features = preprocessor({OBS: torch.tensor([value])})
    assert features.dtype == torch.float32
    assert features.tolist() == [[float(index == hot) for index in range(4)]]


@pytest.mark.parametrize(("shape", "features"), [((), 1), ((3,), 3), ((2, 3), 6)])
@pytest.mark.parametrize("batch", [(), (5,), (2, 5)])
def test_box_leaves_are_flattened_behind_any_batch(
    shape: tuple[int, ...], features: int, batch: tuple[int, ...]
) -> None:
    preprocessor = Preprocessor([LeafSpec(OBS, "box", shape, "float32")], normalize=True)
    value = torch.arange(math.prod(batch) * features).view((*batch, *shape)) / 10
    torch.testing.assert_close(preprocessor({OBS: value}), value.reshape(*batch, features))


def test_a_batch_of_environments_and_steps_feeds_the_statistics_flat() -> None:
    preprocessor = Preprocessor([LeafSpec(OBS, "box", (3,), "float32")], normalize=True)
    (data,) = chunks(40)
    preprocessor.update({OBS: data.view(4, 10, 3)})
    (normalizer,) = preprocessor.normalizers.values()
    np.testing.assert_allclose(cast("RunningNormalizer", normalizer).mean, data.mean(0), rtol=1e-9)


def test_an_mlp_has_the_layers_of_its_config() -> None:
    body = MLP(CONFIG, in_features=4)
    assert [(part.in_features, part.out_features) for part in body if isinstance(part, nn.Linear)] == [(4, 16), (16, 8)]
    assert [type(part) for part in body][1::2] == [nn.Tanh, nn.Tanh]
    assert body.out_features == 8
    assert parameter_count(body) == 4 * 16 + 16 + 16 * 8 + 8
    assert MLP(CONFIG.model_copy(update={"hidden": []}), in_features=4).out_features == 4


def test_first_weights_follow_the_given_generator_alone() -> None:
    def weights(seed: int) -> Tensor:
        net = network(CONFIG, 4, 2, torch.Generator().manual_seed(seed))
        return torch.cat([parameter.flatten() for parameter in net.parameters()])

    before = torch.get_rng_state()
    zero = weights(0)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(3)
    assert torch.equal(weights(0), zero)
    assert not torch.equal(weights(1), zero)


def test_orthogonal_weights_have_the_gains_of_ppo() -> None:
    net = orthogonal_(network(CONFIG, 32, 4, torch.Generator().manual_seed(0)), 0.01, torch.Generator().manual_seed(0))
    first, second, head = (part for part in net.modules() if isinstance(part, nn.Linear))
    for layer, gain in ((first, 2**0.5), (second, 2**0.5), (head, 0.01)):
        product = layer.weight @ layer.weight.T
        torch.testing.assert_close(product, gain**2 * torch.eye(len(product)), rtol=1e-4, atol=1e-5)
        assert not layer.bias.any()

"""From observations to numbers: the running normaliser, the preprocessor, network bodies, initialisation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from rltool.spaces import Key, LeafSpec

if TYPE_CHECKING:
    from rltool.schema import MLPConfig, NetworkConfig

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "elu": nn.ELU,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
}


class RunningNormalizer(nn.Module):
    """Running mean and variance of a vector, and the clipped standard score.

    y = clip((x - mean) / sqrt(max(variance, floor)), -clip, clip)

    Statistics merge by the parallel rule of Chan, Golub & LeVeque (1979), kept in float64 so that long runs do not
    lose the small updates. They change in :meth:`update` alone, never in a forward pass.

    Args:
        shape: shape of one observation.
        floor: smallest variance divided by, so that a constant feature stays harmless.
        clip: largest absolute value given out.
    """

    count: Tensor
    mean: Tensor
    var: Tensor

    def __init__(self, shape: Sequence[int], *, floor: float = 1e-8, clip: float = 10.0) -> None:
        super().__init__()
        self.floor, self.clip = floor, clip
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(tuple(shape), dtype=torch.float64))
        self.register_buffer("var", torch.ones(tuple(shape), dtype=torch.float64))

    @torch.no_grad()
    def update(self, x: Tensor) -> None:
        """Takes in ``[N, *shape]`` more observations (population variance)."""
        x = x.to(self.mean.dtype)
        added = float(len(x))
        mean, var = x.mean(0), x.var(0, correction=0)
        total = self.count + added
        delta = mean - self.mean
        moment = self.var * self.count + var * added + delta.square() * (self.count * added / total)
        self.mean += delta * (added / total)
        self.var.copy_(moment / total)
        self.count.copy_(total)

    def forward(self, x: Tensor) -> Tensor:
        """The standard score of ``[…, *shape]``, float32."""
        scale = self.var.clamp_min(self.floor).rsqrt()
        return ((x - self.mean) * scale).float().clamp(-self.clip, self.clip)


class Preprocessor(nn.Module):
    """Observation leaves to one feature vector, without a trainable part.

    Box leaves are flattened and, where asked for, normalised; discrete leaves become one-hot; all are concatenated in
    the order of the specs. Being outside every network that learns, its statistics are the same for the online and the
    target network, for actor and critic, in training, evaluation and export.
    """

    def __init__(self, leaves: Sequence[LeafSpec], *, normalize: bool) -> None:
        super().__init__()
        self.leaves = tuple(leaves)
        self.features = sum(spec.features for spec in self.leaves)
        self.normalizers = nn.ModuleDict(
            {
                _module_name(spec): RunningNormalizer((spec.features,))
                for spec in self.leaves
                if normalize and spec.kind == "box"
            }
        )

    def forward(self, leaves: Mapping[Key, Tensor]) -> Tensor:
        """Features ``[*batch, features]`` of leaves ``[*batch, *shape]``."""
        parts: list[Tensor] = []
        for spec in self.leaves:
            value = leaves[spec.key]
            if spec.kind == "discrete":
                parts.append(one_hot(value - spec.start, spec.n).float())
                continue
            flat = _flat(value, spec).float()
            name = _module_name(spec)
            parts.append(self.normalizers[name](flat) if name in self.normalizers else flat)
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    def update(self, leaves: Mapping[Key, Tensor]) -> None:
        """Feeds the statistics with leaves ``[*batch, *shape]``; a finished batch, after it has been learned from."""
        for spec in self.leaves:
            name = _module_name(spec)
            if name in self.normalizers:
                cast("RunningNormalizer", self.normalizers[name]).update(
                    _flat(leaves[spec.key], spec).reshape(-1, spec.features)
                )


def _module_name(spec: LeafSpec) -> str:
    """A name without the dot that modules do not allow, different for each key (escaped as in JSON pointers)."""
    return "/".join(part.replace("~", "~0").replace("/", "~1").replace(".", "~2") for part in spec.key)


def _flat(value: Tensor, spec: LeafSpec) -> Tensor:
    batch = value.shape[: value.ndim - len(spec.shape)]
    return value.reshape(*batch, spec.features)


class MLP(nn.Sequential):
    """Linear layers with an activation after each: ``[…, in_features]`` to ``[…, out_features]``.

    Attributes:
        out_features: width of the last hidden layer (``in_features`` where there is none).
    """

    def __init__(self, config: MLPConfig, *, in_features: int) -> None:
        sizes = [in_features, *config.hidden]
        layers: list[nn.Module] = []
        for wide, narrow in pairwise(sizes):
            layers += [nn.Linear(wide, narrow), ACTIVATIONS[config.activation]()]
        super().__init__(*layers)
        self.out_features = sizes[-1]


def network(config: NetworkConfig, features: int, outputs: int, generator: torch.Generator) -> nn.Sequential:
    """A body from the network node and a linear head on top: ``[…, features]`` to ``[…, outputs]``.

    Layers draw their first weights from the global generator; here it is lent a seed of ``generator`` and put back.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(torch.randint(2**31, (), generator=generator)))
        body = cast("nn.Module", config.build(in_features=features))
        return nn.Sequential(body, nn.Linear(cast("int", body.out_features), outputs))


def orthogonal_(module: nn.Sequential, head_gain: float, generator: torch.Generator) -> nn.Sequential:
    """Orthogonal weights, zero biases: gain √2 in the body and ``head_gain`` in the last layer.

    The initialisation of the PPO reference code; the small last layer matters (Andrychowicz et al. 2021, choice C57).
    """
    layers = [part for part in module.modules() if isinstance(part, nn.Linear | nn.Conv2d)]
    for layer in layers:
        nn.init.orthogonal_(layer.weight, head_gain if layer is layers[-1] else 2**0.5, generator=generator)
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)
    return module


def parameter_count(*modules: nn.Module) -> int:
    """Trainable numbers of the modules."""
    return sum(parameter.numel() for module in modules for parameter in module.parameters())

"""From observations to numbers: the running normaliser, the preprocessor, network bodies, initialisation.

    leaves → Preprocessor (nothing to learn) → inputs → Network: body (encoders, hidden layers) → head

A Preprocessor makes one tensor an observation leaf; a Network takes them as positional arguments, in that order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, cast

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn.functional import one_hot

from rltool.errors import ConfigError, Problem
from rltool.importing import import_object, raised
from rltool.spaces import MASK, Key, LeafSpec, inputs_of, is_masked

if TYPE_CHECKING:
    from rltool.schema import AutoConfig, MLPConfig, ModuleConfig, NatureCNNConfig, NetworkConfig, ResNetConfig

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "elu": nn.ELU,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
}
HIDDEN_GAIN = 2**0.5

# What pixels in [0, 1] are standardised by before a backbone that learned on ImageNet: mean and deviation of its colours.
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

Features = dict[str, Tensor]
"""Network inputs by name, ``[*batch, *input_shape]``, then ``action_mask`` where the environment masks actions."""

Shapes = Mapping[str, tuple[int, ...]]
"""Name -> shape of a network input without the batch: ``(channels, rows, columns)`` for an image, else ``(numbers,)``."""


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
    """Observation leaves to the inputs of networks, without a trainable part.

    Numbers are flattened, divided by their scale and, where asked for, normalised; categories become one-hot; images
    get their channels first and stay bytes (a network scales them, see :class:`Network`); the mask of actions passes
    through. Being outside every network that learns, its statistics are the same for the online and the target network,
    for actor and critic, in training, evaluation and export.

    Attributes:
        shapes: name -> shape of each network input.
        scales: name -> what a network divides that input by.
        keys: names of the inputs.
        masked_keys: the same, and ``action_mask`` where there is one.
    """

    def __init__(self, leaves: Sequence[LeafSpec], *, normalize: bool) -> None:
        super().__init__()
        self.leaves = inputs_of(leaves)
        self.shapes: Shapes = {spec.name: spec.input_shape for spec in self.leaves}
        self.scales = {spec.name: spec.scale for spec in self.leaves if spec.kind == "image"}
        self.keys = tuple(self.shapes)
        self.masked_keys = (*self.keys, *MASK) if is_masked(leaves) else self.keys
        self._masked = is_masked(leaves)
        self.normalizers = nn.ModuleDict(
            {
                _module_name(spec): RunningNormalizer(spec.input_shape)
                for spec in self.leaves
                if normalize and spec.kind == "box"
            }
        )

    def forward(self, leaves: Mapping[Key, Tensor]) -> Features:
        """Inputs by name of leaves ``[*batch, *shape]``."""
        features = {spec.name: self._input(leaves[spec.key], spec) for spec in self.leaves}
        if self._masked:
            features["action_mask"] = leaves[MASK]
        return features

    def _input(self, value: Tensor, spec: LeafSpec) -> Tensor:
        if spec.kind == "image":
            return _channels_first(value, spec)
        if spec.kind == "discrete":
            return _one_hot(value, spec)
        flat = _numbers(value, spec)
        name = _module_name(spec)
        return cast("Tensor", self.normalizers[name](flat)) if name in self.normalizers else flat

    def update(self, leaves: Mapping[Key, Tensor]) -> None:
        """Feeds the statistics with leaves ``[*batch, *shape]``; a finished batch, after it has been learned from."""
        for spec in self.leaves:
            name = _module_name(spec)
            if name in self.normalizers:
                numbers = _numbers(leaves[spec.key], spec)
                cast("RunningNormalizer", self.normalizers[name]).update(numbers.reshape(-1, *spec.input_shape))


def _module_name(spec: LeafSpec) -> str:
    """The name without the dots that modules do not allow."""
    return spec.name.replace(".", "/")


def _batch(value: Tensor, spec: LeafSpec) -> torch.Size:
    return value.shape[: value.ndim - len(spec.shape)]


def _numbers(value: Tensor, spec: LeafSpec) -> Tensor:
    flat = value.reshape(*_batch(value, spec), *spec.input_shape).float()
    return flat if spec.scale == 1.0 else flat / spec.scale


def _one_hot(value: Tensor, spec: LeafSpec) -> Tensor:
    """``[*batch, *shape]`` categories as ``[*batch, sum of their numbers]`` zeros and ones."""
    entries = value.reshape(*_batch(value, spec), len(spec.nvec))
    parts = [one_hot(entries[..., i] - spec.start[i], count) for i, count in enumerate(spec.nvec)]
    return torch.cat(parts, -1).float()


def _channels_first(value: Tensor, spec: LeafSpec) -> Tensor:
    """``[*batch, *shape]`` as ``[*batch, channels, rows, columns]``: all axes but rows and columns are channels."""
    first = value.ndim - len(spec.shape)
    rows = first + spec.height
    others = [axis for axis in range(first, value.ndim) if axis not in (rows, rows + 1)]
    moved = value.permute(*range(first), *others, rows, rows + 1)
    return moved.reshape(*_batch(value, spec), *spec.input_shape)


class Network(nn.Module):
    """A body with a linear head on top; scales images on the way in, once for whatever body lies behind.

    Args:
        body: ``(*inputs)`` to ``[N, features]``.
        head: ``[N, width]`` to ``[N, outputs]``; None gives the body's features out.
        width: numbers that the body gives.
        scales: what each input is divided by; None for those that come as they are.
        bfloat16: multiply in that precision (torch's autocast); what comes out is float32 again.
    """

    def __init__(
        self,
        body: nn.Module,
        head: nn.Module | None,
        width: int,
        scales: Sequence[float | None],
        *,
        bfloat16: bool = False,
    ) -> None:
        super().__init__()
        self._bfloat16 = bfloat16
        self.body, self.width = body, width
        self.head = head if head is not None else nn.Identity()
        self._scales = tuple(scales)
        self.eval()

    def train(self, mode: bool = True) -> Network:
        """Stays in evaluation mode, whatever is asked for: a policy that acts, the one that is learned from and the one
        that is evaluated must be the same function, so dropout drops nothing and batch normalisation keeps the statistics
        that it came with (minibatches of experience are no sample of a fixed distribution)."""
        del mode
        return super().train(False)

    def forward(self, *inputs: Tensor) -> Tensor:
        """``[N, outputs]`` of inputs ``[N, *shape]``."""
        scaled = [
            value if scale is None else value.float() * (1.0 / scale)
            for value, scale in zip(inputs, self._scales, strict=True)
        ]
        if not self._bfloat16:
            return cast("Tensor", self.head(self.body(*scaled)))
        with torch.autocast(scaled[0].device.type, torch.bfloat16):
            output: Tensor = self.head(self.body(*scaled))
        return output.float()


class Body(nn.Module):
    """One encoder an input, their outputs concatenated, then hidden layers: ``[N, width]``.

    Args:
        encoders: one for each input, in order, each to ``[N, …]``.
        widths: numbers that each encoder gives.
        hidden: units of each hidden layer.
        activation: after each.
        layer_norm: normalise each hidden layer before its activation (Ba et al. 2016, arXiv:1607.06450).
    """

    def __init__(
        self,
        encoders: Sequence[nn.Module],
        widths: Sequence[int],
        hidden: Sequence[int],
        activation: str,
        *,
        layer_norm: bool,
    ) -> None:
        super().__init__()
        self.encoders = nn.ModuleList(encoders)
        sizes = [sum(widths), *hidden]
        layers: list[nn.Module] = []
        for wide, narrow in pairwise(sizes):
            layers += [
                nn.Linear(wide, narrow),
                *([nn.LayerNorm(narrow)] if layer_norm else []),
                ACTIVATIONS[activation](),
            ]
        self.hidden = nn.Sequential(*layers)

    def forward(self, *inputs: Tensor) -> Tensor:
        """``[N, width]`` of inputs ``[N, *shape]``."""
        encoded = [encoder(value) for encoder, value in zip(self.encoders, inputs, strict=True)]
        return cast("Tensor", self.hidden(encoded[0] if len(encoded) == 1 else torch.cat(encoded, -1)))


class ConvolutionalEncoder(nn.Sequential):
    """Convolutions with an activation after each, then one linear layer: ``[N, C, H, W]`` to ``[N, features]``."""

    def __init__(self, config: NatureCNNConfig | AutoConfig, shape: Sequence[int]) -> None:
        activation = ACTIVATIONS[config.cnn.activation]
        layers: list[nn.Module] = []
        channels = shape[0]
        for wide, kernel, stride in zip(config.cnn.channels, config.cnn.kernels, config.cnn.strides, strict=True):
            layers += [nn.Conv2d(channels, wide, kernel, stride), activation()]
            channels = wide
        layers.append(nn.Flatten())
        super().__init__(*layers)
        (flat,) = output_shape(self, [shape])
        self.extend([nn.Linear(flat, config.cnn.features), activation()])

    def forward(self, images: Tensor) -> Tensor:
        """``[N, features]`` of ``[N, C, H, W]``."""
        # With a pixel's channels side by side in memory, convolutions need not reorder them (some ten per cent of a gradient step).
        features = images.contiguous(memory_format=torch.channels_last)
        for layer in self:
            features = layer(features)
        return features


def mlp(config: MLPConfig, *, shapes: Shapes) -> Body:
    """Hidden layers over all inputs, concatenated.

    Raises:
        ConfigError: an input is an image.
    """
    images = [name for name, shape in shapes.items() if len(shape) == 3]
    if images:
        raise ConfigError(
            Problem(
                "network",
                f"mlp takes numbers, and {', '.join(images)} is an image of {shapes[images[0]]} (channels, rows, columns)",
                "Use network=auto or network=nature_cnn, or flatten it with the wrapper FlattenObservation",
            )
        )
    widths = [shape[0] for shape in shapes.values()]
    return Body([nn.Identity() for _ in shapes], widths, config.hidden, config.activation, layer_norm=config.layer_norm)


def convolutional(config: NatureCNNConfig | AutoConfig, *, shapes: Shapes) -> Body:
    """Convolutions for each image; hidden layers over their outputs and all other inputs.

    Raises:
        ConfigError: the convolutions leave nothing of an image.
    """
    try:
        encoders = [
            ConvolutionalEncoder(config, shape) if len(shape) == 3 else nn.Identity() for shape in shapes.values()
        ]
    except RuntimeError as error:
        found = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise ConfigError(
            Problem(
                "network.cnn", f"these kernels and strides do not fit the images {found}: {error}", "Take smaller ones"
            )
        ) from error
    widths = [config.cnn.features if len(shape) == 3 else shape[0] for shape in shapes.values()]
    return Body(encoders, widths, config.hidden, config.activation, layer_norm=config.layer_norm)


def auto(config: AutoConfig, *, shapes: Shapes) -> Body:
    """What fits the inputs: hidden layers for numbers, the Nature network for images, both for both."""
    if all(len(shape) == 3 for shape in shapes.values()):
        # Images alone: the Nature network ends with its one wide layer.
        config = config.model_copy(update={"hidden": []})
    return convolutional(config, shapes=shapes)


def nature_cnn(config: NatureCNNConfig, *, shapes: Shapes) -> Body:
    """The network of Mnih et al. 2015 (Nature 518): three convolutions and a linear layer.

    Raises:
        ConfigError: no input is an image.
    """
    if not any(len(shape) == 3 for shape in shapes.values()):
        found = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise ConfigError(
            Problem(
                "network",
                f"nature_cnn needs an image among the observations, found {found}",
                "Use network=mlp or network=auto",
            )
        )
    return convolutional(config, shapes=shapes)


class ResNetEncoder(nn.Module):
    """torchvision's ResNet without its last layer (He et al. 2016, arXiv:1512.03385): ``[N, C, H, W]`` to ``[N, features]``.

    Gray images are given to all three colours; stacked frames are not taken.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, backbone: nn.Module, *, frozen: bool) -> None:
        super().__init__()
        self.backbone = backbone
        self.register_buffer("mean", torch.tensor(IMAGENET_MEAN).view(3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(IMAGENET_STD).view(3, 1, 1), persistent=False)
        if frozen:
            backbone.requires_grad_(False)

    def forward(self, image: Tensor) -> Tensor:
        """``[N, features]`` of pixels in [0, 1]."""
        colours = image.expand(-1, 3, -1, -1) if image.shape[-3] == 1 else image
        return cast("Tensor", self.backbone((colours - self.mean) / self.std))


def resnet(config: ResNetConfig, *, shapes: Shapes) -> Body:
    """A torchvision backbone for each image, hidden layers over their outputs and all other inputs.

    Raises:
        ConfigError: torchvision is missing, the weights cannot be had, or an image has neither one nor three channels.
    """
    encoders: list[nn.Module] = []
    widths: list[int] = []
    for name, shape in shapes.items():
        if len(shape) == 3 and shape[0] not in (1, 3):
            raise ConfigError(
                Problem(
                    "network",
                    f"resnet takes images of 1 or 3 channels, and {name} has {shape[0]}",
                    "Leave the frame stack out",
                )
            )
        encoders.append(ResNetEncoder(_backbone(config), frozen=config.frozen) if len(shape) == 3 else nn.Identity())
        widths.append(output_shape(encoders[-1], [shape])[0])
    if all(len(shape) == 1 for shape in shapes.values()):
        raise ConfigError(
            Problem("network", "resnet needs an image among the observations", "Use network=mlp or network=auto")
        )
    return Body(encoders, widths, config.hidden, config.activation, layer_norm=config.layer_norm)


def _backbone(config: ResNetConfig) -> nn.Module:
    try:
        from torchvision import models
    except ImportError as error:
        raise ConfigError(
            Problem("network", f"resnet needs torchvision: {error}", "Install the extra: pip install 'rltool[vision]'")
        ) from error
    try:
        if config.weights is None or Path(config.weights).suffix:
            backbone = models.get_model(config.name, weights=None)
            if config.weights is not None:
                backbone.load_state_dict(_weights_file(Path(config.weights)))
        else:
            backbone = models.get_model(config.name, weights=config.weights)
    except (OSError, ValueError, RuntimeError, KeyError, EOFError, SafetensorError, UnpicklingError) as error:
        raise ConfigError(
            Problem(
                "network.weights",
                f"{config.weights} cannot be loaded into {config.name}: {error}",
                "Expected a name of torchvision's (DEFAULT, IMAGENET1K_V1; downloaded once), a .pth or .safetensors file, or null",
            )
        ) from error
    backbone.fc = nn.Identity()
    return cast("nn.Module", backbone)


def _weights_file(path: Path) -> Mapping[str, Tensor]:
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    return cast("Mapping[str, Tensor]", torch.load(path, map_location="cpu", weights_only=True))


def module(config: ModuleConfig, *, shapes: Shapes) -> nn.Module:
    """A module of the user's own: ``Class(shapes, **kwargs)``.

    Raises:
        ConfigError: it cannot be imported, does not take its arguments, or does not take the inputs.
    """
    made = import_object(config.entry_point, "network.entry_point")
    if not callable(made) or (isinstance(made, type) and not issubclass(made, nn.Module)):
        raise ConfigError(
            Problem(
                "network.entry_point",
                f"expected a torch.nn.Module or a function that returns one, found {config.entry_point}",
            )
        )
    try:
        body = cast("Callable[..., object]", made)(dict(shapes), **config.kwargs)
    except TypeError as error:
        raise ConfigError(
            Problem(
                "network.kwargs",
                f"{config.entry_point} was called with the shapes of its inputs, {dict(shapes)}, and these arguments: {error}",
            )
        ) from error
    except Exception as error:  # the module is the user's own and may raise anything
        raise ConfigError(
            Problem("network.entry_point", f"{config.entry_point}({dict(shapes)}) {raised(error)}")
        ) from error
    if not isinstance(body, nn.Module):
        raise ConfigError(
            Problem(
                "network.entry_point", f"expected a torch.nn.Module, {config.entry_point} gave {type(body).__name__}"
            )
        )
    _check_module(body, shapes, config.entry_point)
    return body


def _check_module(body: nn.Module, shapes: Shapes, name: str) -> None:
    """Tries a user's module on batches of two sizes.

    Raises:
        ConfigError: it fails, gives no ``[N, features]`` of float32, or has a parameter that nothing depends on.
    """

    def refused(text: str) -> ConfigError:
        return ConfigError(
            Problem("network.entry_point", f"{name} {text}; its inputs are {dict(shapes)}, in this order")
        )

    body.eval()
    widths: list[int] = []
    for rows in (2, 3):
        try:
            output = body(*(torch.rand(rows, *shape) for shape in shapes.values()))
        except Exception as error:  # the module is the user's own and may raise anything
            raise refused(f"failed on a batch of {rows}: {type(error).__name__}: {error}") from error
        if not isinstance(output, Tensor) or output.ndim != 2 or len(output) != rows or output.dtype != torch.float32:
            found = f"{tuple(output.shape)} of {output.dtype}" if isinstance(output, Tensor) else type(output).__name__
            raise refused(f"must give ({rows}, features) of torch.float32 for a batch of {rows}, gave {found}")
        widths.append(output.shape[1])
    if widths[0] != widths[1]:
        raise refused(
            f"gave {widths[0]} features for a batch of 2 and {widths[1]} for one of 3; expected the same number"
        )
    named = {key: part for key, part in body.named_parameters() if part.requires_grad}
    reached = torch.autograd.grad(output.sum(), list(named.values()), allow_unused=True) if output.requires_grad else ()
    idle = [key for key, slope in zip(named, reached or [None] * len(named), strict=True) if slope is None]
    if idle:
        raise refused(
            f"has parameters that its output does not depend on ({', '.join(idle)}): take them out or freeze them"
        )


@torch.no_grad()
def output_shape(body: nn.Module, shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Shape that a body gives out for inputs of these shapes, without the batch."""
    body.eval()
    device = next((part.device for part in body.parameters()), torch.device("cpu"))
    output = body(*(torch.zeros(1, *shape, device=device) for shape in shapes))
    if not isinstance(output, Tensor) or output.shape[:1] != (1,):
        raise ValueError(f"expected a tensor [1, features], found {getattr(output, 'shape', type(output).__name__)}")
    return tuple(output.shape[1:])


def network(
    config: NetworkConfig,
    preprocessor: Preprocessor,
    outputs: int | None,
    generator: torch.Generator,
    *,
    head_gain: float = 1.0,
    extra: Shapes | None = None,
) -> Network:
    """A body from the network node and a linear head on top.

    Args:
        config: the network node.
        preprocessor: says which inputs there are.
        outputs: numbers that the head gives; None: no head, the body's features.
        generator: first weights.
        head_gain: see :func:`head`.
        extra: further inputs, of numbers, after those of the observation (a critic's action).
    """
    shapes = {**preprocessor.shapes, **(extra or {})}
    # Layers draw their first weights from the global generator; it is lent a seed of ours and put back.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(torch.randint(2**31, (), generator=generator)))
        body = cast("nn.Module", config.build(shapes=shapes))
        width = output_shape(body, list(shapes.values()))[0]
        top = None if outputs is None else nn.Linear(width, outputs)
    if isinstance(body, Body):
        # A user's module and a backbone keep the weights that they came with.
        for part in (*(part for part in body.encoders if isinstance(part, ConvolutionalEncoder)), body.hidden):
            _initialise(part, config.init, HIDDEN_GAIN, generator)
    if top is not None:
        _initialise(top, config.init, head_gain, generator)
    scales = [preprocessor.scales.get(name) for name in shapes]
    return Network(body, top, width, scales, bfloat16=config.precision == "bfloat16")


def head(
    config: NetworkConfig, width: int, outputs: int, generator: torch.Generator, *, gain: float = 1.0
) -> nn.Linear:
    """A linear layer on top of a body: ``[N, width]`` to ``[N, outputs]``.

    Args:
        gain: gain of its weights where ``init`` is orthogonal; a small one starts a policy near uniform (Andrychowicz et
            al. 2021, choice C57).
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(torch.randint(2**31, (), generator=generator)))
        layer = nn.Linear(width, outputs)
    _initialise(layer, config.init, gain, generator)
    return layer


def _initialise(part: nn.Module, init: str, gain: float, generator: torch.Generator) -> None:
    """First weights of linear layers and convolutions, zero biases; ``default`` leaves them as torch made them."""
    if init == "default":
        return
    for layer in part.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            if init == "orthogonal":
                nn.init.orthogonal_(layer.weight, gain, generator=generator)
            else:
                nn.init.xavier_uniform_(layer.weight, generator=generator)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


def parameter_count(*modules: nn.Module) -> int:
    """Trainable numbers of the modules."""
    unique = {id(p): p.numel() for part in modules for p in part.parameters() if p.requires_grad}
    return sum(unique.values())

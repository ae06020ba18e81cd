"""Optimisers over one flat tensor, and the parameters that live in it.

All parameters are views of one tensor, so that one fused kernel steps them and one copy gathers their gradients; they
are saved by name, so that a checkpoint depends neither on the order nor on the flattening.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import methodcaller
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from rltool.errors import NonFiniteError

if TYPE_CHECKING:
    from rltool.schema import AdamConfig, AdamWConfig, OptimConfig, RMSpropConfig, SGDConfig

# Offsets are multiples of this many numbers (64 bytes of float32), as vector instructions like them.
ALIGNMENT = 16


class FlatParameters:
    """Moves the parameters of modules into one flat tensor; each ``p.data`` becomes a view of it.

    Build it after ``.to(device)``. ``load_state_dict`` keeps the views; ``deepcopy``, ``.to(…)`` and
    ``load_state_dict(assign=True)`` break them silently, which :meth:`check` finds.

    Args:
        modules: name -> module; parameters are named ``<module>.<parameter>``.

    Attributes:
        data: the flat tensor, ``[size]`` with padding (always zero) between parameters.
        parameters: the parameters in their order in ``data``.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        named = {
            f"{module}.{name}": p
            for module, part in modules.items()
            for name, p in part.named_parameters()
            if p.requires_grad
        }
        self.parameters: list[nn.Parameter] = list(named.values())
        self._modules = dict(modules)
        self._slices: dict[str, tuple[int, torch.Size]] = {}
        offset = 0
        for name, parameter in named.items():
            self._slices[name] = (offset, parameter.shape)
            offset += -(-parameter.numel() // ALIGNMENT) * ALIGNMENT
        first = self.parameters[0]
        self.data = nn.Parameter(torch.zeros(offset, dtype=first.dtype, device=first.device))
        for name, view in self.views(self.data.data).items():
            view.copy_(named[name].data)
            named[name].data = view

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Slices of a tensor laid out like ``data``, by parameter name, in the parameters' shapes."""
        return {name: flat[at : at + shape.numel()].view(shape) for name, (at, shape) in self._slices.items()}

    def gather(self, tensors: tuple[Tensor, ...]) -> Tensor:
        """One tensor laid out like ``data`` from one tensor a parameter (compiles into one graph)."""
        parts: list[Tensor] = []
        for tensor in tensors:
            flat = tensor.reshape(-1)
            parts.append(flat)
            if padding := -flat.numel() % ALIGNMENT:
                parts.append(flat.new_zeros(padding))
        return torch.cat(parts)

    def matrices(self) -> Tensor:
        """1 where a weight matrix lies, 0 at biases and other vectors: what weight decay applies to."""
        mask = torch.zeros_like(self.data)
        for view in self.views(mask).values():
            if view.ndim > 1:
                view.fill_(1.0)
        return mask

    def check(self) -> None:
        """Asserts that every parameter still lies in the flat tensor."""
        views = self.views(self.data.data)
        for module, part in self._modules.items():
            for name, parameter in part.named_parameters():
                if (full := f"{module}.{name}") in views:
                    assert parameter.data_ptr() == views[full].data_ptr(), f"{full} has left the flat tensor"


class Optimizer:
    """A torch optimiser on the flat tensor, with the learning rate as a function of the frame counter.

    Args:
        config: the optim node.
        flat: what it steps.
        make: the torch optimiser for the flat parameter.
        decay: weight decay and whether it is decoupled from the gradient.
        advance: steps that optimiser in a shorter way than its own ``step``.
    """

    def __init__(
        self,
        config: OptimConfig,
        flat: FlatParameters,
        make: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        decay: float = 0.0,
        decoupled: bool = False,
        advance: Callable[[torch.optim.Optimizer], object] = methodcaller("step"),
    ) -> None:
        self._config, self._flat = config, flat
        self._optimizer = make([flat.data])
        self._advance = advance
        self._decay, self._decoupled = decay, decoupled
        self._mask = flat.matrices() if decay else None
        self.lr = config.lr

    def set_lr(self, frames: int, budget: int) -> float:
        """Sets and returns the learning rate of the schedule at this frame."""
        self.lr = self._config.lr_at(frames, budget)
        self._optimizer.param_groups[0]["lr"] = self.lr
        return self.lr

    @torch.no_grad()
    def step(self, gradient: Tensor) -> None:
        """One step along a flat gradient (laid out like the flat tensor)."""
        data = self._flat.data
        if self._mask is not None:
            if self._decoupled:
                data.addcmul_(data, self._mask, value=-self.lr * self._decay)
            else:
                gradient = torch.addcmul(gradient, data, self._mask, value=self._decay)
        data.grad = gradient
        self._advance(self._optimizer)

    def check(self, rows: Tensor, names: Sequence[str], frames: int, batch: Callable[[], Mapping[str, Tensor]]) -> None:
        """Asks whether gradient steps and the weights after them are finite.

        Args:
            rows: ``[steps, len(names)]``, what each step reported.
            names: of the columns, causes before effects.
            frames: frames of the run.
            batch: gives what the steps were made on.

        Raises:
            NonFiniteError: one is not; names the first.
        """
        # A sum is finite unless a part of it is not, and takes a tenth of the time of asking each.
        if bool(rows.sum().isfinite()) and bool(self._flat.data.sum().isfinite()):
            return
        places = (~rows.isfinite()).nonzero().tolist()
        views = self._flat.views(self._flat.data.data)
        weight = next((name for name, view in views.items() if not bool(view.isfinite().all())), None)
        if places:
            step, column = places[0]
            what = f"{names[column]} became {float(rows[step, column])} at gradient step {step + 1} of {len(rows)}"
        elif weight is not None:
            what = f"the weights {weight} became NaN or infinite"
        else:
            return
        raise NonFiniteError(
            f"{what} within the frames up to {frames:,}. Lower optim.lr, set algo.max_grad_norm, or scale the rewards; the "
            "last checkpoint is from before",
            batch(),
        )

    def histograms(self) -> dict[str, Tensor]:
        """The parameters (``params/<name>``) and the gradient of the last step (``grads/<name>``), as metrics; none before
        the first step."""
        gradient = self._flat.data.grad
        if gradient is None:
            return {}
        views = {"params": self._flat.views(self._flat.data.data), "grads": self._flat.views(gradient)}
        return {f"{tag}/{name}": view for tag, named in views.items() for name, view in named.items()}

    def state_dict(self) -> dict[str, Tensor]:
        """Moments by parameter name (``exp_avg.<parameter>``) and the step counter (``step``)."""
        self._flat.check()
        state: dict[str, Tensor] = {}
        for key, value in self._optimizer.state.get(self._flat.data, {}).items():
            if not isinstance(value, Tensor):
                continue
            if value.ndim == 0:
                state[key] = value
            else:
                state |= {f"{key}.{name}": view for name, view in self._flat.views(value).items()}
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Takes back what :meth:`state_dict` gave; an empty mapping means that no step was made yet."""
        self._flat.check()
        data = self._flat.data
        restored: dict[str, Tensor] = {}
        for key in {name.partition(".")[0] for name in state}:
            if key in state:
                # A fused optimiser keeps its counter beside the parameters, the others on the CPU.
                restored[key] = state[key].clone().to(data.device if self._optimizer.defaults.get("fused") else "cpu")
                continue
            flat = torch.zeros_like(data)
            for name, view in self._flat.views(flat).items():
                view.copy_(state[f"{key}.{name}"])
            restored[key] = flat
        if restored:
            self._optimizer.state[data] = restored


def _fused_adam(config: AdamConfig | AdamWConfig, parameters: list[nn.Parameter]) -> torch.optim.Adam:
    return torch.optim.Adam(
        parameters, lr=config.lr, betas=(config.betas[0], config.betas[1]), eps=config.eps, fused=True
    )


def _advance_fused_adam(optimizer: torch.optim.Optimizer) -> None:
    """What ``optimizer.step()`` does with one dense parameter and no option set: its kernel, without the Python around it,
    which for small networks takes several times as long."""
    (group,) = optimizer.param_groups
    (parameter,) = group["params"]
    state = optimizer.state[parameter]
    if not state:
        optimizer.step()  # makes the moments, too
        return
    state["step"] += 1
    torch._fused_adam_(
        [parameter],
        [parameter.grad],
        [state["exp_avg"]],
        [state["exp_avg_sq"]],
        [],
        [state["step"]],
        lr=group["lr"],
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        weight_decay=0.0,
        eps=group["eps"],
        amsgrad=False,
        maximize=False,
    )


def adam(config: AdamConfig, *, flat: FlatParameters) -> Optimizer:
    """Adam, one fused kernel."""
    return Optimizer(config, flat, partial(_fused_adam, config), advance=_advance_fused_adam)


def adamw(config: AdamWConfig, *, flat: FlatParameters) -> Optimizer:
    """Adam with decoupled decay of the weight matrices (not of biases and other vectors)."""
    return Optimizer(
        config,
        flat,
        partial(_fused_adam, config),
        decay=config.weight_decay,
        decoupled=True,
        advance=_advance_fused_adam,
    )


def rmsprop(config: RMSpropConfig, *, flat: FlatParameters) -> Optimizer:
    """RMSprop."""
    return Optimizer(
        config,
        flat,
        lambda p: torch.optim.RMSprop(p, lr=config.lr, alpha=config.alpha, eps=config.eps, momentum=config.momentum),
    )


def sgd(config: SGDConfig, *, flat: FlatParameters) -> Optimizer:
    """Stochastic gradient descent; the L2 penalty acts on weight matrices only."""
    return Optimizer(
        config, flat, lambda p: torch.optim.SGD(p, lr=config.lr, momentum=config.momentum), decay=config.weight_decay
    )

"""A trained policy as a function: observation in, action out."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import Tensor

from rltool import checkpoint, trust
from rltool.algos.base import Algorithm, Runtime
from rltool.allocation import limited
from rltool.compiling import Compiler
from rltool.config import import_plugins, load_node
from rltool.devices import quieten_libraries, resolve_device
from rltool.errors import CheckpointError, ConfigError
from rltool.spaces import MASK, Array, entry, flatten, inputs_of, is_masked, mask_rows

if TYPE_CHECKING:
    from rltool.schema import AlgoConfig, BufferConfig, NetworkConfig, OptimConfig

Observation = Array | Tensor | float | tuple[object, ...] | Mapping[str, object]


class LoadedPolicy:
    """The policy of a checkpoint with its normaliser and its units of action, rebuilt from the one file.

    Args:
        path: a checkpoint, or a run directory (its newest one).
        device: where it computes.
        plugins: modules to import first; the code that a checkpoint of somebody else's names must be of one of these.

    Attributes:
        header: what the checkpoint says besides tensors.
        algorithm: the algorithm it was rebuilt into.

    Raises:
        CheckpointError: the file is missing, broken, or not rltool's.
        ConfigError: the device is not there, or the file names code of a stranger's.
    """

    def __init__(self, path: str | Path, *, device: str = "cpu", plugins: Sequence[str] = ()) -> None:
        quieten_libraries()
        self.header = checkpoint.read_header(Path(path))
        for text in self.header.passed_over:
            print(f"warning: passed over: {text}", file=sys.stderr)
        self._device = resolve_device(device)
        typed = {"plugins": list(plugins)} if plugins else {}
        tree = cast("dict[str, dict[str, object]]", trust.configuration(self.header, typed, trust.POLICY))
        if problems := import_plugins(tree.get("plugins")):
            raise ConfigError(problems)
        try:
            nodes = {group: load_node(group, tree[group]) for group in ("algo", "network", "optim", "buffer")}
        except ConfigError as error:
            raise CheckpointError(f"{self.header.path} holds a configuration that is none: {error}") from error
        run = Runtime(
            env=self.header.state.env,
            leaves=self.header.leaves,
            actions=self.header.actions,
            num_envs=int(cast("int", self.env_node["num_envs"])),
            network=cast("NetworkConfig", nodes["network"]).for_loading(),
            optim=cast("OptimConfig", nodes["optim"]),
            buffer=cast("BufferConfig", nodes["buffer"]).for_acting(),
            device=self._device,
            budget=self.header.state.budget,
            seed=0,
            skip_nonfinite=False,
            compiler=Compiler(False, 0, _nobody),
            note=_nobody,
        )
        try:
            with limited(self.header.path):
                self.algorithm = cast("Algorithm", cast("AlgoConfig", nodes["algo"]).build(run=run))
        except (ConfigError, RuntimeError, TypeError, ValueError, ArithmeticError, MemoryError) as error:
            raise CheckpointError(f"{self.header.path} describes networks that cannot be built: {error}") from error
        checkpoint.load(self.algorithm, self.header.path, only=("policy", "normalizer"))
        self._draws = torch.Generator()
        self._draws.seed()  # from the operating system; torch's global generator stays as it is

    @property
    def env_node(self) -> dict[str, object]:
        """The environment that it was trained on, as its config node."""
        return cast("dict[str, object]", self.header.config["env"])

    @property
    def max_steps(self) -> int:
        """The cap on the steps of an evaluation episode that training used."""
        return int(cast("int", cast("dict[str, object]", self.header.config["eval"])["max_steps"]))

    def __call__(
        self,
        observation: Observation,
        *,
        deterministic: bool = True,
        action_mask: Array | Tensor | tuple[Array, ...] | None = None,
    ) -> Array | Tensor:
        """Actions as the environment takes them.

        Args:
            observation: one observation of the environment's space, or a batch of them ``[N, …]``; NumPy or a tensor.
            deterministic: the policy's mode; False samples.
            action_mask: which choices are valid, ``[choices]`` or ``[N, choices]``, where the policy learned with masks
                that are no part of the observation.

        Returns:
            One action, or ``[N, …]``: a tensor on the same device where tensors came in, else NumPy.

        Raises:
            ValueError: the observation has the shape of neither one nor a batch, or the mask is missing.
        """
        specs = self.header.leaves
        tensors: list[Tensor] = []
        try:
            on_host = _on_host(observation, tensors)
            leaves = flatten(on_host, specs)
        except (KeyError, IndexError, TypeError) as error:
            raise ValueError(f"the observation lacks a part; expected {[spec.name for spec in specs]}") from error
        if is_masked(specs):
            first = inputs_of(specs)[0]
            batch_shape = leaves[first.key].shape[: leaves[first.key].ndim - len(first.shape)]
            leaves[MASK] = self._mask(on_host, action_mask, tensors, batch_shape)
        extra = {leaves[spec.key].ndim - len(spec.shape) for spec in specs}
        fits = all(leaves[spec.key].shape[-len(spec.shape) :] == spec.shape or not spec.shape for spec in specs)
        if not fits or extra not in ({0}, {1}):
            expected = ", ".join(f"{spec.name} {spec.shape}" for spec in specs)
            found = ", ".join(f"{spec.name} {leaves[spec.key].shape}" for spec in specs)
            raise ValueError(f"expected one observation ({expected}) or a batch of them, found {found}")
        single = extra == {0}
        batch = {
            spec.key: torch.as_tensor(leaves[spec.key][None] if single else leaves[spec.key], device=self._device).to(
                getattr(torch, spec.dtype)
            )
            for spec in specs
        }
        with torch.no_grad():
            if deterministic:
                chosen = self.algorithm.policy(batch)
            else:
                count = len(next(iter(batch.values())))
                drawn = self.algorithm.sampler.draw(1, count, self.header.frames, self._draws)
                chosen = self.algorithm.sampler(batch, tuple(part[0].to(self._device) for part in drawn))
        action = self.algorithm.actions.to_env(chosen.cpu().numpy())
        result: Array = action[0] if single else action
        return torch.as_tensor(np.asarray(result), device=tensors[0].device) if tensors else result

    def _mask(self, observation: object, given: object | None, tensors: list[Tensor], batch: tuple[int, ...]) -> Array:
        """The mask of actions ``[*batch, choices]``: the one given, else the observation's own entry.

        Raises:
            ValueError: there is none, or none of that size.
        """
        source = str(self.env_node.get("action_mask", "auto"))
        if given is None and source in ("info", "method"):
            what = "info['action_mask']" if source == "info" else "env.unwrapped.action_masks()"
            raise ValueError(f"this policy learned with masks of valid actions; give action_mask={what}")
        value = _on_host(given, tensors) if given is not None else entry(observation, source.split("."))
        try:
            rows = mask_rows(value, math.prod(batch)).astype(np.bool_)
        except ValueError as error:
            raise ValueError(
                f"expected a mask of actions for each of {math.prod(batch)} observations: {error}"
            ) from error
        if not rows.any(-1).all():
            raise ValueError("a mask of actions leaves no valid action")
        return rows.reshape(*batch, rows.shape[-1])

    def __repr__(self) -> str:
        state = self.header.state
        return f"LoadedPolicy({state.env}, {state.frames:,} frames, {self.header.path})"


def _on_host(observation: object, tensors: list[Tensor]) -> object:
    """The observation with every tensor as an array; the tensors are added to the list."""
    if isinstance(observation, Tensor):
        tensors.append(observation)
        return observation.detach().cpu().numpy()
    if isinstance(observation, Mapping):
        return {key: _on_host(part, tensors) for key, part in observation.items()}
    return tuple(_on_host(part, tensors) for part in observation) if isinstance(observation, tuple) else observation


def _nobody(text: str) -> None:
    """Hears the notes of building an algorithm that will not train."""
    del text


def load_policy(path: str | Path, *, device: str = "cpu", plugins: Sequence[str] = ()) -> LoadedPolicy:
    """The policy of a checkpoint: ``action = load_policy("best.ckpt")(observation)``; see :class:`LoadedPolicy`."""
    return LoadedPolicy(path, device=device, plugins=plugins)

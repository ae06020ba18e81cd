"""What the training loop knows of an algorithm, and what every algorithm shares."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from rltool.collect import Explorer, RandomExplorer, TensorLeaves
from rltool.metrics import Metrics
from rltool.nets import Features, Preprocessor
from rltool.seeding import Stream, generator
from rltool.spaces import Key, is_masked

if TYPE_CHECKING:
    from rltool.actions import ActionSpec
    from rltool.compiling import Compiler
    from rltool.schema import AlgoConfig, BufferConfig, NetworkConfig, OptimConfig
    from rltool.spaces import LeafSpec


# Steps of every environment in a batch of random warm-up frames, at most.
_WARMUP_STEPS = 250


class Component(Protocol):
    """A part of an algorithm that a checkpoint keeps, as named tensors."""

    def state_dict(self) -> Mapping[str, Tensor]:
        """Its tensors by name."""

    def load_state_dict(self, state: Mapping[str, Tensor]) -> object:
        """Takes them back."""


@dataclass(frozen=True)
class Runtime:
    """The objects of a run that an algorithm is built from.

    Attributes:
        env: full id of the environment, for messages.
        leaves, actions: its specs.
        num_envs: environments side by side.
        network, optim, buffer: config nodes that the algorithm builds its parts from.
        device: where networks and batches live.
        budget: frames over which schedules run (the budget as first started); 0 where there is no end.
        seed: seed of the run.
        skip_nonfinite: leave out gradient steps that are not finite, instead of stopping.
        compiler: compiles functions where this run compiles.
        note: prints one line for the user.
    """

    env: str
    leaves: Sequence[LeafSpec]
    actions: ActionSpec
    num_envs: int
    network: NetworkConfig
    optim: OptimConfig
    buffer: BufferConfig
    device: torch.device
    budget: int
    seed: int
    skip_nonfinite: bool
    compiler: Compiler
    note: Callable[[str], None]


class Counters:
    """Whole numbers that a checkpoint keeps.

    Attributes:
        updates: gradient steps made.
        warmup: random frames taken in before learning.
    """

    def __init__(self) -> None:
        self.updates = 0
        self.warmup = 0

    def state_dict(self) -> dict[str, Tensor]:
        """Each as a 0-d tensor."""
        return {name: torch.tensor(value) for name, value in vars(self).items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Takes them back."""
        for name in vars(self):
            setattr(self, name, int(state[name]))


class RandomState:
    """The state of a torch generator as a component."""

    def __init__(self, of: torch.Generator) -> None:
        self._of = of

    def state_dict(self) -> dict[str, Tensor]:
        """The state, uint8."""
        return {"state": self._of.get_state()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continues from that state."""
        self._of.set_state(state["state"].cpu())


class Algorithm(ABC):
    """One page of mathematics with its networks, buffer and optimiser.

    The loop reads ``policy``, ``explorer``, ``frames_per_batch``, ``actions``, calls ``update`` once a batch, ``inspect``
    once a point, and keeps ``components()``. An algorithm file adds the rest.

    Attributes:
        actions: the action space in the units its policy works in.
        policy: greedy policy, a module from leaves ``[N, *shape]`` to actions in policy units.
        preprocessor: network inputs from leaves, with the observation statistics.
        masked: whether the environment says which actions are valid.
        counters: what it has done so far.
        weights: random numbers for initial weights.
        batch_frames: frames of a batch, a whole number of steps of all environments.
        extras: components from outside that a checkpoint keeps too (the collector's random numbers).
        left_out: gradient steps that were left out, since they were not finite.
    """

    policy: GreedyPolicy

    def __init__(self, config: AlgoConfig, run: Runtime) -> None:
        self.actions = run.actions
        self.counters = Counters()
        self.extras: dict[str, Component] = {}
        self.preprocessor = Preprocessor(run.leaves, normalize=config.normalize_observation).to(run.device)
        self._leaves = tuple(run.leaves)
        self._keys: tuple[Key, ...] = tuple(spec.key for spec in run.leaves)
        self._num_envs = run.num_envs
        self.batch_frames = config.batch_frames(run.num_envs)
        self._warmup_frames = config.warmup_frames
        self._skips, self._note, self.left_out = run.skip_nonfinite, run.note, 0
        self.masked = is_masked(run.leaves)
        self._random = RandomExplorer(run.actions, masked=self.masked)
        self._minibatch_order = generator(run.seed, Stream.MINIBATCH)
        self.weights = generator(run.seed, Stream.WEIGHTS)

    @property
    @abstractmethod
    def sampler(self) -> Explorer:
        """The policy that explores while learning; evaluation samples from it too, where asked to."""

    @abstractmethod
    def learn(self, batch: TensorDict, frames: int) -> Metrics:
        """Learns from a batch; see :meth:`update`."""

    @abstractmethod
    def components(self) -> dict[str, Component]:
        """Everything a resumed run needs, by name; ``policy`` and ``normalizer`` are enough to act."""

    def store(self, batch: TensorDict) -> None:
        """Takes in random warm-up experience; kept by algorithms that learn from any policy's."""
        del batch

    @property
    def warming_up(self) -> bool:
        """Whether random frames are still to be collected before learning."""
        return self.counters.warmup < self._warmup_frames

    @property
    def explorer(self) -> Explorer:
        """The policy to collect the next batch with: random actions while warming up."""
        return self._random if self.warming_up else self.sampler

    @property
    def frames_per_batch(self) -> int:
        """Frames of the next batch (a collector may round up to whole steps of its environments)."""
        if not self.warming_up:
            return self.batch_frames
        # In pieces, so that a run can be stopped, and shows that it is alive, where environments are slow.
        return min(self._warmup_frames - self.counters.warmup, max(self.batch_frames, _WARMUP_STEPS * self._num_envs))

    def bytes_per_frame(self) -> int:
        """Memory that a frame of a batch takes at least, until it has been learned from: the observation and the one that
        follows, the action, the reward and three flags."""
        observation = sum(math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize for leaf in self._leaves)
        action = math.prod(self.actions.policy_shape) * np.dtype(self.actions.policy_dtype).itemsize
        return 2 * observation + action + 4 + 3

    def update(self, batch: TensorDict, frames: int) -> Metrics:
        """Learns from a batch, then feeds the observation statistics with it.

        The statistics move *after* the gradient steps, so that the log-probabilities of a batch stay those of the
        policy that acted. Batches of random warm-up frames start the statistics and are not learned from.

        Args:
            batch: ``[num_envs, steps]`` as :class:`rltool.collect.Collector` gives it, on the algorithm's device.
            frames: frames of the whole run, this batch included.

        Returns:
            Metrics of the gradient steps made (none of them where no step was made).
        """
        if self.warming_up:
            self.counters.warmup += batch.numel()
            self.store(batch)
            metrics: Metrics = {}
        else:
            metrics = self.learn(batch, frames)
        self.preprocessor.update(self.leaves(batch))
        return metrics

    def abandon_episodes(self) -> None:  # noqa: B027 - most keep nothing of them
        """Forgets what it keeps of open episodes: they do not go on (resumed where environments cannot be saved)."""

    def inspect(self) -> Metrics:
        """What is looked at only where a point is written, since it costs time: of the last update (nothing before)."""
        return {}

    def leaves_out(self, gradient: Tensor, row: Tensor, frames: int) -> bool:
        """Whether to make no step along a gradient: it, or what the step reports, is not finite, and the run goes on in such
        a case."""
        if not self._skips or bool((gradient.sum() + row.sum()).isfinite()):
            return False
        self.left_out += 1
        if self.left_out == 1:
            self._note(
                f"a gradient was not finite within the frames up to {frames:,}: its step is left out, and so are all "
                "that follow like it (on_nonfinite=skip); summary.json counts them"
            )
        return True

    def leaves(self, batch: TensorDict, *, following: bool = False) -> TensorLeaves:
        """The observation leaves of a batch, or of what followed."""
        return {key: batch.get(("next", *key) if following else key) for key in self._keys}


class GreedyPolicy(nn.Module):
    """The deterministic policy: the mode of what the algorithm learned.

    Args:
        preprocessor: network inputs from leaves.
        mode: network inputs to actions in policy units.
    """

    def __init__(self, preprocessor: Preprocessor, mode: Callable[[Features], Tensor]) -> None:
        super().__init__()
        self._parts = (preprocessor, mode)  # a tuple, since the modules belong to the algorithm, not to this one

    def forward(self, leaves: TensorLeaves) -> Tensor:
        """Actions in policy units, ``[N, *policy_shape]``."""
        preprocessor, mode = self._parts
        return mode(preprocessor(leaves))

"""Where experience waits to be learned from."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from rltool.errors import ConfigError, Problem

if TYPE_CHECKING:
    from torchrl.data import PrioritizedSampler, RandomSampler, TensorDictReplayBuffer

    from rltool.schema import PrioritizedBufferConfig, ReplayBufferConfig, RolloutBufferConfig
    from rltool.spaces import LeafSpec


class RolloutBuffer:
    """The last batch, drawn without replacement: each frame at most once an epoch.

    Args:
        config: the buffer node.
        generator: the order of the frames, on the CPU.
    """

    def __init__(self, config: RolloutBufferConfig, *, generator: torch.Generator) -> None:
        del config
        self._generator = generator

    def epoch(self, data: Mapping[str, Tensor], size: int) -> Iterator[dict[str, Tensor]]:
        """Minibatches of ``size`` frames in a new order, one gather for all; the remainder sits out.

        Args:
            data: tensors ``[N, …]`` by name; each minibatch holds ``[size, …]`` of them.
        """
        first = next(iter(data.values()))
        count = len(first) // size
        order = torch.randperm(len(first), generator=self._generator)[: count * size].to(first.device)
        shuffled = {name: column[order].unflatten(0, (count, size)) for name, column in data.items()}
        for index in range(count):
            yield {name: column[index] for name, column in shuffled.items()}


class ReplayBuffer:
    """Uniform replay: TorchRL's storage and sampler, fed and read a whole collection at a time.

    Args:
        config: the buffer node.
        generator: its random numbers, on the CPU.
        device: where minibatches go; the storage itself stays in host memory.
        leaves: what an observation is made of, for the size.

    Raises:
        ConfigError: the buffer would not fit into the memory that is free.
    """

    def __init__(
        self,
        config: ReplayBufferConfig | PrioritizedBufferConfig,
        *,
        generator: torch.Generator,
        device: torch.device,
        leaves: Sequence[LeafSpec],
    ) -> None:
        self.size = config.size
        if config.storage == "memory":
            check_memory(config.size, leaves)
        self._generator, self._device = generator, device
        self._buffer = self._make(config)

    def _make(self, config: ReplayBufferConfig | PrioritizedBufferConfig) -> TensorDictReplayBuffer:
        from torchrl.data import RandomSampler

        return self._torchrl(config.storage, RandomSampler())

    def _torchrl(
        self, storage: Literal["memory", "memmap"], sampler: RandomSampler | PrioritizedSampler
    ) -> TensorDictReplayBuffer:
        from torchrl.data import LazyMemmapStorage, LazyTensorStorage, TensorDictReplayBuffer

        kind = LazyMemmapStorage if storage == "memmap" else LazyTensorStorage
        return TensorDictReplayBuffer(
            storage=kind(self.size), sampler=sampler, priority_key="td_error", generator=self._generator
        )

    def __len__(self) -> int:
        return len(self._buffer)

    def extend(self, batch: TensorDict) -> None:
        """Stores the transitions of a batch ``[num_envs, steps]``, oldest first, on the CPU."""
        rows = batch.transpose(0, 1).reshape(-1).cpu()
        if len(rows) > self.size:
            rows = rows[-self.size :]
        self._buffer.extend(rows)

    def draw(self, count: int, size: int) -> Iterator[TensorDict]:
        """``count`` minibatches of ``size`` transitions as TensorDicts ``[k, size]``, here all in one.

        Raises:
            ValueError: fewer than ``size`` transitions are stored (TorchRL would draw with repeats).
        """
        if len(self) < size:
            raise ValueError(f"{len(self)} transitions are stored, too few for a minibatch of {size}")
        if count:
            yield self._buffer.sample(count * size).to(self._device).unflatten(0, (count, size))

    def set_beta(self, frames: int, budget: int) -> float | None:
        """The exponent of the importance weights; none here."""
        del frames, budget
        return None

    def update_priority(self, drawn: TensorDict, td_error: Tensor) -> None:
        """Takes in |δ| ``[k, size]`` of what was drawn; all the same to uniform replay."""
        del drawn, td_error

    def state_dict(self) -> dict[str, Tensor]:
        """What the buffer holds, oldest first: ``data.<key>`` ``[N, …]`` (and priorities where it has them)."""
        if len(self) == 0:
            return {}
        rows = self._buffer._storage.get(self._order())
        return {f"data.{_dotted(key)}": value for key, value in rows.items(True, True) if key != "index"}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Fills an empty buffer with what :meth:`state_dict` gave."""
        rows = {_key(name.removeprefix("data.")): value for name, value in state.items() if name.startswith("data.")}
        if not rows:
            return
        count = len(next(iter(rows.values())))
        data = TensorDict({}, [count])
        for key, value in rows.items():
            data.set(key, value)
        self._buffer.extend(data)

    def _order(self) -> Tensor:
        """Indices of the storage from the oldest row to the newest."""
        cursor = int(self._buffer._writer._cursor) if len(self) == self.size else 0
        return (torch.arange(len(self)) + cursor) % max(len(self), 1)


class PrioritizedBuffer(ReplayBuffer):
    """Replay in proportion to the TD error: P(i) ∝ (|δ_i| + eps)^α (Schaul et al. 2016, arXiv:1511.05952, eq. 1).

    New transitions enter at the largest priority seen. Importance weights (N P(i))^-β are divided by the largest weight
    that a stored transition can have; the loss multiplies them in before the mean.

    Raises:
        ConfigError: TorchRL's compiled part does not load with the installed torch; names both versions.
    """

    def _make(self, config: ReplayBufferConfig | PrioritizedBufferConfig) -> TensorDictReplayBuffer:
        from torchrl.data import PrioritizedSampler

        check_compiled_extension()
        self._config = config
        sampler = PrioritizedSampler(self.size, alpha=config.alpha, beta=config.beta.start, eps=config.eps)  # type: ignore[union-attr]
        self._sampler = sampler
        return self._torchrl(config.storage, sampler)

    def draw(self, count: int, size: int) -> Iterator[TensorDict]:
        """``count`` minibatches ``[1, size]`` with ``index`` and ``priority_weight``, one after the other, so that each
        draw knows the priorities that the step before it wrote."""
        if len(self) < size:
            raise ValueError(f"{len(self)} transitions are stored, too few for a minibatch of {size}")
        for _ in range(count):
            yield self._buffer.sample(size).to(self._device).unsqueeze(0)

    def set_beta(self, frames: int, budget: int) -> float | None:
        """Sets and returns β of the schedule at this frame."""
        beta = self._config.beta.at(frames, budget)  # type: ignore[union-attr]
        self._sampler.beta = beta
        return float(beta)

    def update_priority(self, drawn: TensorDict, td_error: Tensor) -> None:
        """Writes |δ| ``[k, size]`` back as the priorities of what was drawn."""
        self._buffer.update_priority(drawn["index"].reshape(-1).cpu(), td_error.reshape(-1).cpu())

    def priorities(self) -> Tensor:
        """(|δ| + eps)^α of the stored rows, oldest first."""
        return torch.as_tensor(self._sampler._sum_tree[self._order()])

    def state_dict(self) -> dict[str, Tensor]:
        """The rows, their priorities (``priority``) and the largest one so far (``max_priority``)."""
        state = super().state_dict()
        if state:
            state["priority"] = self.priorities()
            state["max_priority"] = torch.as_tensor(self._sampler.default_priority, dtype=torch.float32).reshape(())
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Fills an empty buffer with what :meth:`state_dict` gave."""
        super().load_state_dict(state)
        if "priority" in state:
            index = torch.arange(len(state["priority"]))
            self._sampler._sum_tree[index] = state["priority"]
            self._sampler._min_tree[index] = state["priority"]
            self._sampler._max_priority = (float(state["max_priority"]), None)


def check_compiled_extension() -> None:
    """Prioritised replay needs TorchRL's compiled part, which loads with one torch release only.

    Raises:
        ConfigError: it does not load.
    """
    try:
        from torchrl._torchrl import SumSegmentTreeFp32  # noqa: F401
    except ImportError as error:
        from importlib.metadata import version

        raise ConfigError(
            Problem(
                "buffer",
                f"prioritised replay needs torchrl's compiled extension, and torchrl {version('torchrl')} does not load it "
                f"with torch {version('torch')} ({str(error).splitlines()[0]})",
                "Install the pair that fits: pip install 'torch==2.14.*' torchrl==0.14.1; or use buffer=replay",
            )
        ) from error


def check_memory(size: int, leaves: Sequence[LeafSpec]) -> None:
    """Asks whether a replay buffer fits into the memory that is free now.

    Raises:
        ConfigError: it does not; names the bytes needed and the bytes free.
    """
    observation = sum(math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize for leaf in leaves)
    # Both observations, the action (int64), the reward (float32) and three flags.
    needed = size * (2 * observation + 8 + 4 + 3)
    free = _free_memory()
    if free is not None and needed > free:
        raise ConfigError(
            Problem(
                "buffer.size",
                f"{size:,} transitions need {needed / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB of memory are free",
                "Lower it, or keep the buffer on disk with buffer.storage=memmap",
            )
        )


def _free_memory() -> int | None:
    """Bytes of memory that can still be had, where the system says so (Linux)."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return found[0] if found else None


def _dotted(key: str | tuple[str, ...]) -> str:
    """A key as one name; a dot inside a part is escaped."""
    parts = (key,) if isinstance(key, str) else key
    return ".".join(part.replace("%", "%25").replace(".", "%2E") for part in parts)


def _key(name: str) -> tuple[str, ...]:
    """The key that :func:`_dotted` named."""
    return tuple(part.replace("%2E", ".").replace("%25", "%") for part in name.split("."))

"""What algorithms that learn from replayed transitions share; each says itself what a gradient step is."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from functools import partial
from typing import ClassVar, cast

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from rltool.algos.base import Algorithm, Component, RandomState, Runtime
from rltool.buffers import PrioritizedBuffer, ReplayBuffer
from rltool.collect import named
from rltool.metrics import Metrics
from rltool.optim import FlatParameters, Optimizer
from rltool.schema import ReplayedAlgoConfig
from rltool.seeding import Stream, generator
from rltool.units import input_metrics, saturated_units

Columns = dict[str, Tensor]


class ReplayedAlgorithm(Algorithm):
    """Stores every batch, then makes the gradient steps that its frames are worth on minibatches of what is stored.

    A subclass builds its networks, calls :meth:`_optimize`, and defines :meth:`gradient`.

    Args:
        config: the algo node.
        run: the runtime objects it is built from.

    Attributes:
        step_metrics: what one gradient step reports, in the order of its row.
        buffer: every transition that is still kept.
        flat: the parameters that are learned.
        optimizer: of them.
        last_step: the states and actions of the last gradient step; None before the first.
    """

    step_metrics: ClassVar[tuple[str, ...]]
    flat: FlatParameters
    optimizer: Optimizer

    def __init__(self, config: ReplayedAlgoConfig, run: Runtime) -> None:
        super().__init__(config, run)
        self._replayed, self._budget = config, run.budget
        self._draws = generator(run.seed, Stream.BUFFER)
        self.last_step: Columns | None = None
        self._drawn = torch.zeros(0, dtype=torch.int64)
        self.buffer = cast(
            "ReplayBuffer | PrioritizedBuffer",
            run.buffer.build(generator=self._draws, device=run.device, leaves=run.leaves, actions=run.actions),
        )

    def _optimize(self, parts: Mapping[str, nn.Module], run: Runtime) -> None:
        """Makes the optimiser of these modules, by the names that their histograms have."""
        self.flat = FlatParameters(parts)
        self.optimizer = cast("Optimizer", run.optim.build(flat=self.flat))
        self._gradient = run.compiler(self.gradient)

    @abstractmethod
    def gradient(self, now: Columns, following: Columns) -> tuple[Tensor, Tensor, Tensor]:
        """The gradient of the loss on a minibatch of what :meth:`columns` gave, flat; the row of :attr:`step_metrics`;
        |δ| ``[size]``, the priorities.

        A pure function of its arguments and the parameters: it compiles into one graph.
        """

    def before_steps(self, before: int, frames: int) -> None:
        """Called ahead of the steps that the frames from ``before`` to ``frames`` are worth."""
        del before, frames

    def after_step(self) -> None:
        """Called after each step."""

    def store(self, batch: TensorDict) -> None:
        """Random warm-up frames are experience like any other."""
        self.buffer.extend(batch)

    def learn(self, batch: TensorDict, frames: int) -> Metrics:
        """Stores a batch, then makes the gradient steps that its frames are worth; new priorities go to the buffer.

        Args:
            batch: ``[num_envs, steps]``; stored: observation, action, next reward / terminated / done / observation.
            frames: frames of the run, this batch included.

        Returns:
            The means of the steps' rows, the |δ| of the last one; without steps only what was done.
        """
        config = self._replayed
        before = frames - batch.numel()
        self.buffer.extend(batch)
        metrics: Metrics = {"policy/actions": batch["action"]}
        if len(self.buffer) < config.first_update:
            return metrics
        learning_rate = self.optimizer.set_lr(before, self._budget)
        self.buffer.set_beta(before, self._budget)
        self.before_steps(before, frames)

        count, rows = config.updates_by(frames) - config.updates_by(before), list[Tensor]()
        for drawn in self.buffer.draw(count, config.minibatch_size):
            td_errors, first = list[Tensor](), len(rows)
            for now, following in zip(*(_rows(columns) for columns in self.columns(drawn)), strict=True):
                gradient, row, td_error = self._gradient(now, following)
                if self.leaves_out(gradient, row, frames):
                    # What cannot be learned from is drawn as seldom as possible.
                    td_errors.append(torch.zeros_like(td_error))
                    continue
                self.optimizer.step(gradient)
                self.after_step()
                rows.append(row)
                td_errors.append(td_error)
                self.last_step = now
            if len(rows) > first:
                self.optimizer.check(torch.stack(rows[first:]), self.step_metrics, frames, partial(named, drawn))
            self.buffer.update_priority(drawn, torch.stack(td_errors))
            self._drawn = drawn["index"][-1]
        self.counters.updates += len(rows)
        metrics["train/updates"] = torch.tensor(float(self.counters.updates))
        metrics["buffer/replay_ratio"] = torch.tensor(len(rows) * config.minibatch_size / batch.numel())
        if rows:
            metrics |= dict(zip(self.step_metrics, torch.stack(rows).mean(0), strict=True))
            metrics["train/learning_rate"] = torch.tensor(learning_rate)
            metrics["critic/td_errors"] = td_errors[-1]
        return metrics

    @torch.no_grad()
    def inspect(self) -> Metrics:
        """Parameters and the last gradient, layer by layer; what the last step was made on, and how old it was."""
        if self.last_step is None:
            return {}
        inputs = [self.last_step[key] for key in self.preprocessor.keys]
        metrics = {**self.optimizer.histograms(), **input_metrics(inputs), **self.buffer.metrics(self._drawn)}
        if (share := saturated_units(self.policy_network, inputs)) is not None:
            metrics["policy/saturated_units"] = share
        return metrics

    @property
    @abstractmethod
    def policy_network(self) -> nn.Module:
        """The network that the policy acts by, from network inputs."""

    def columns(self, drawn: TensorDict) -> tuple[Columns, Columns]:
        """Transitions ``[steps, size]`` as :meth:`gradient` takes them, for all steps at once.

        Returns:
            now: network inputs, ``action``, ``priority_weight`` (1 for uniform replay).
            following: network inputs, ``reward``, ``terminated``, and ``done``, which is the same: a time limit does not
            cut a target.
        """
        weight = drawn.get("priority_weight", None)
        if weight is None:
            weight = torch.ones(drawn.batch_size, device=drawn.device)
        terminated = drawn["next", "terminated"]
        now = {
            **self.preprocessor(self.leaves(drawn)),
            "action": drawn["action"],
            "priority_weight": weight.float(),
        }
        following = {
            **self.preprocessor(self.leaves(drawn, following=True)),
            "reward": drawn["next", "reward"],
            "terminated": terminated,
            "done": terminated,
        }
        return now, following

    def components(self) -> dict[str, Component]:
        """What all of them keep: statistics, moments, counters, generators, and the buffer."""
        return {
            "normalizer": self.preprocessor.normalizers,
            "optim": self.optimizer,
            "counters": self.counters,
            **self.extras,
            "rng.buffer": RandomState(self._draws),
            "buffer": self.buffer,
        }


def _rows(columns: Columns) -> Iterator[Columns]:
    """Columns ``[steps, size, …]`` step by step (all views at once: one by one they cost more than a small network)."""
    for row in zip(*(column.unbind(0) for column in columns.values()), strict=True):
        yield dict(zip(columns, row, strict=True))

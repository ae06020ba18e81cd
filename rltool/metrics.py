"""What is measured: the metrics of an interval gathered on the device, and the one table that explains every name.

``python -m rltool.metrics`` writes the table to docs/metrics.md.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rltool.experience import Episodes, Tally
from rltool.registry import kinds

Metrics = dict[str, Tensor]
"""Name -> detached tensor, still on the device: 0-d is a scalar, 1-d and more a histogram."""

Histogram = npt.NDArray[np.generic]

Gathering = Literal["mean", "last", "min", "max"]


@dataclass(frozen=True)
class Metric:
    """One row of the table.

    Attributes:
        name: the tag; ``<…>`` stands for any text.
        meaning: what the number is.
        unit: its unit; "1" where it has none.
        healthy: what a run that learns shows.
        remedy: what to change when it looks otherwise.
        histogram: a distribution, not a number.
        gathers: what a point holds of the values of its interval.
    """

    name: str
    meaning: str
    unit: str
    healthy: str
    remedy: str
    histogram: bool = False
    gathers: Gathering = "mean"

    def covers(self, name: str) -> bool:
        """True where ``name`` is this metric, or matches its ``<…>``."""
        pattern = re.sub(r"<[a-z]+>", ".+", re.escape(self.name).replace(r"\<", "<").replace(r"\>", ">"))
        return re.fullmatch(pattern, name) is not None


METRICS: tuple[Metric, ...] = (
    Metric(
        "episode/return",
        "mean raw return (sum of rewards, not scaled or clipped) of the training episodes that finished in the interval; "
        "absent where none did",
        "reward",
        "rises, then levels off; noisy, and below eval/return_mean while the policy explores",
        "flat from the start: check the reward, raise optim.lr or exploration; rises and collapses: lower optim.lr",
    ),
    Metric(
        "episode/length",
        "mean length of the same episodes",
        "steps",
        "depends on the task: grows where surviving pays, shrinks where a goal ends the episode",
        "all equal to the time limit and no reward: the task may be unreachable by random exploration",
    ),
    Metric(
        "episode/finished",
        "training episodes finished since the start of the run",
        "episodes",
        "grows steadily",
        "0 for long: episodes never end; set env.max_episode_steps",
        gathers="last",
    ),
    Metric(
        "eval/return_mean",
        "mean return of the evaluation episodes, on environments of their own with frozen statistics",
        "reward",
        "rises towards the task's threshold; this is the number to quote",
        "far below episode/return: with PPO the mean action may be worse than sampling, train longer or lower the entropy bonus",
    ),
    Metric(
        "eval/return_std",
        "standard deviation of the return between evaluation episodes",
        "reward",
        "shrinks as the policy becomes reliable",
        "large at a good mean: some start states fail; train longer, or raise eval.episodes for a surer mean",
    ),
    Metric(
        "eval/best_return_mean",
        "the best eval/return_mean of the run, that of best.ckpt (only as a final value)",
        "reward",
        "at the task's threshold or above",
        "best.ckpt was chosen by this number, so it flatters: quote eval/best_fresh_return_mean",
        gathers="last",
    ),
    Metric(
        "eval/<policy>_fresh_return_mean",
        "mean return of best.ckpt (best) and of the last policy (last) over eval.final_episodes fresh episodes, once the run is over (only as a final value)",
        "reward",
        "at the task's threshold or above; a little below eval/best_return_mean",
        "far below eval/best_return_mean: eval.episodes are too few to choose by",
        gathers="last",
    ),
    Metric(
        "eval/return_<statistic>",
        "another statistic of the same returns: min, max",
        "reward",
        "min close to the mean: no start state fails",
        "a wide interval: raise eval.episodes",
    ),
    Metric(
        "eval/length_<statistic>",
        "length of the evaluation episodes",
        "steps",
        "as episode/length",
        "equal to eval.max_steps: episodes were cut; raise it if they should have ended by themselves",
    ),
    Metric(
        "eval/success_rate",
        "share of evaluation episodes whose return reached the environment's threshold; absent where it has none",
        "share, 0 to 1",
        "towards 1",
        "as eval/return_mean",
    ),
    Metric(
        "eval/episodes_cut",
        "evaluation episodes that had not ended after eval.max_steps steps: their returns are those of the steps until then",
        "episodes",
        "0",
        "above 0: the means understate what such episodes would have brought; raise eval.max_steps, or set env.max_episode_steps",
    ),
    Metric(
        "policy/entropy",
        "entropy of the action distribution, mean over the states of the batch",
        "nats",
        "falls slowly; for continuous actions it may be negative",
        "near its minimum early: raise algo.entropy_coeff or lower optim.lr; does not fall: lower algo.entropy_coeff, raise optim.lr",
    ),
    Metric(
        "policy/ratio_mean",
        "mean probability ratio of the new to the old policy on the actions taken",
        "1",
        "0.95 to 1.05",
        "away from 1: lower optim.lr or algo.epochs",
    ),
    Metric(
        "policy/ratio_min",
        "smallest of these ratios over some states of the last batch, after its epochs",
        "1",
        "above 0.5",
        "near 0: the policy has moved far within one batch; lower optim.lr or algo.epochs, or set algo.target_kl",
        gathers="min",
    ),
    Metric(
        "policy/ratio_max",
        "largest of these ratios over some states of the last batch, after its epochs",
        "1",
        "below 2",
        "far above 2: as policy/ratio_min",
        gathers="max",
    ),
    Metric(
        "policy/approx_kl",
        "estimate of KL(old || new) of an update, mean of (r - 1) - log r (Schulman 2020)",
        "nats",
        "0.002 to 0.02",
        "above 0.05: lower optim.lr or algo.epochs, or set algo.target_kl; below 0.001: raise optim.lr",
    ),
    Metric(
        "policy/approx_kl_max",
        "the largest of these estimates in the interval",
        "nats",
        "below 0.1",
        "single large steps: lower optim.lr or algo.max_grad_norm, or raise algo.minibatch_size",
        gathers="max",
    ),
    Metric(
        "policy/epsilon",
        "share of random actions (DQN)",
        "share, 0 to 1",
        "falls by its schedule",
        "return grows only once it is low: shorten algo.epsilon.frames; stuck: lengthen it",
        gathers="last",
    ),
    Metric(
        "policy/action_share/<option>",
        "share of the frames of the interval in which an option was taken, exploration included (one choice of up to 18 options)",
        "share, 0 to 1",
        "all above 0 early; what the task asks for later",
        "one near 1 early: the policy has settled; more exploration (algo.entropy_coeff, algo.epsilon)",
    ),
    Metric(
        "policy/bound_share",
        "share of the numbers in actions that were at a bound or beyond it",
        "share, 0 to 1",
        "below 0.3, but for tasks that are best driven at full force",
        "near 1: the mean runs away; lower algo.initial_std or optim.lr, or use algo.squash=tanh",
    ),
    Metric(
        "policy/saturated_units",
        "share of the policy network's hidden units whose activation is flat (slope below 0.05) on nearly all of some recent states",
        "share, 0 to 1",
        "below 0.2",
        "towards 1: these units learn nothing more; lower optim.lr, algo.normalize_observation=true, network.layer_norm=true",
    ),
    Metric(
        "policy/actions",
        "the policy's own actions in the last batch (before clipping to the bounds)",
        "action",
        "uses the whole range at first, then settles",
        "all at the bounds: lower algo.initial_std or use algo.squash=tanh; one action only: more exploration",
        histogram=True,
    ),
    Metric(
        "critic/value_loss",
        "loss of the value estimate",
        "reward², or scaled reward² with algo.scale_reward",
        "falls or follows the growth of the return",
        "grows without end: lower optim.lr, set algo.scale_reward=true, lower algo.gamma",
    ),
    Metric(
        "critic/value_target_mean",
        "mean of what the value estimate is trained towards (PPO: advantage + value; DQN: r + γ·max Q)",
        "reward, or scaled reward",
        "grows with the return and settles",
        "runs away: DQN: algo.double=true, larger algo.target_interval; check that the return is bounded",
    ),
    Metric(
        "critic/explained_variance",
        "1 - Var(target - value) / Var(target) on the batch, before its update",
        "1 at most",
        "rises to 0.5 to 1",
        "near 0 or negative for long: larger network, algo.normalize_observation=true, more algo.epochs",
    ),
    Metric(
        "critic/value_return_correlation",
        "correlation of the value estimate with its target on the batch, before its update (scale and offset do not count)",
        "-1 to 1",
        "rises to 0.7 to 1",
        "high while explained_variance is low: the ranking is right, the scale is not yet; more algo.epochs, higher optim.lr",
    ),
    Metric(
        "critic/clip_fraction",
        "share of value estimates that algo.clip_value cut",
        "share, 0 to 1",
        "below 0.3",
        "near 1: the clip keeps the critic from learning; raise algo.clip_value or set it to null",
    ),
    Metric(
        "critic/saturated_units",
        "as policy/saturated_units, of a critic with a network of its own",
        "share, 0 to 1",
        "below 0.2",
        "as policy/saturated_units",
    ),
    Metric(
        "critic/q_value_mean",
        "mean Q value: the largest of each state of the last batch (DQN), the smaller critic's of the policy's own actions (SAC)",
        "reward",
        "rises with the return, at most the return that can be reached, discounted",
        "far above it: algo.double=true, lower optim.lr, larger algo.target_interval",
    ),
    Metric(
        "critic/q_value_max",
        "the largest Q value in the states of the last batch (DQN)",
        "reward",
        "as critic/q_value_mean",
        "as critic/q_value_mean",
        gathers="max",
    ),
    Metric(
        "critic/q_limit_share",
        "the largest absolute Q value there, as a share of the largest that is possible: max |reward| in the buffer / (1 - γ) (DQN)",
        "share",
        "1 at most",
        "above 1: values that no policy can reach; algo.double=true, lower optim.lr, larger algo.target_interval",
    ),
    Metric(
        "critic/target_gap",
        "mean distance of Q from the target network's Q, of the actions of the last minibatch (DQN)",
        "reward",
        "small beside critic/q_value_mean",
        "large: the target lags; smaller algo.target_interval or larger algo.tau; near 0 with unstable Q: the other way",
    ),
    Metric(
        "critic/q_values",
        "Q values of all actions in the states of the last batch (DQN)",
        "reward",
        "within the returns that can be reached",
        "runs away: algo.double=true, lower optim.lr, larger algo.target_interval",
        histogram=True,
    ),
    Metric(
        "critic/td_errors",
        "absolute TD errors of the last minibatch (DQN; SAC: the larger one of its critics)",
        "reward",
        "small beside the Q values, few outliers",
        "heavy tails: algo.loss_function=smooth_l1, algo.max_grad_norm=10; check the reward scale",
        histogram=True,
    ),
    Metric(
        "data/advantage_mean",
        "mean advantage of the batch, before normalisation",
        "scaled reward",
        "around 0",
        "far from 0 for long: the value estimate lags; see critic/explained_variance",
    ),
    Metric(
        "data/advantage_std",
        "standard deviation of the advantages of the batch, before normalisation",
        "scaled reward",
        "steady",
        "near 0: no action matters, the reward may be constant; explodes: algo.scale_reward=true",
    ),
    Metric(
        "data/advantages",
        "advantages of the batch, before normalisation",
        "scaled reward",
        "both signs, few outliers",
        "single spikes: check the environment for rare huge rewards",
        histogram=True,
    ),
    Metric(
        "data/truncated_share",
        "share of the ended episodes of the batch that a time limit cut (these bootstrap; a terminated one does not); 0 where none ended",
        "share, 0 to 1",
        "0 or 1 by the task: 1 where only time ends an episode or the policy survives",
        "0 where you expect time limits: the environment reports them as terminated; 1 where it should end: raise the limit",
    ),
    Metric(
        "data/reward_mean",
        "mean raw reward a frame of the interval",
        "reward",
        "rises with the return",
        "0 throughout: nothing rewards what the policy does; check the environment, explore more",
    ),
    Metric(
        "data/reward_min",
        "smallest raw reward of the interval",
        "reward",
        "of the same size as the others",
        "a rare huge one: algo.scale_reward=true, or clip it with a wrapper",
        gathers="min",
    ),
    Metric(
        "data/reward_max",
        "largest raw reward of the interval",
        "reward",
        "of the same size as the others",
        "as data/reward_min",
        gathers="max",
    ),
    Metric(
        "data/input_abs_max",
        "largest absolute number among the networks' inputs (after normalisation, without images) in some recent states",
        "1",
        "below 10",
        "far above: algo.normalize_observation=true",
        gathers="max",
    ),
    Metric(
        "data/input_constant_share",
        "share of these inputs that have one value in all of those states",
        "share, 0 to 1",
        "0, or a few flags",
        "near 1: the policy sees nothing; check the environment's observation",
    ),
    Metric(
        "buffer/filled",
        "share of the replay buffer that is in use (DQN, SAC)",
        "share, 0 to 1",
        "rises to 1, or to the budget",
        "1 long before the end and returns fall: raise buffer.size",
        gathers="last",
    ),
    Metric(
        "buffer/replay_age",
        "mean age of the transitions of the last minibatch: frames collected since (DQN, SAC)",
        "frames",
        "about half of what is stored",
        "far above the frames in which the policy changes: lower buffer.size",
    ),
    Metric(
        "buffer/replay_ratio",
        "transitions drawn a frame collected (DQN, SAC)",
        "1",
        "0.5 to 16; 256 with SAC at one step a frame",
        "low: learns slowly, raise algo.updates_per_frame; high: overfits old experience, lower it",
    ),
    Metric(
        "buffer/priority_spread",
        "standard deviation of the priorities of what is stored, as a share of their mean (prioritised replay)",
        "1",
        "0.3 to 3",
        "near 0: as uniform replay; far above: few transitions are drawn again and again, lower buffer.alpha",
    ),
    Metric(
        "train/loss",
        "the loss that the optimiser minimises, mean over all updates of the interval",
        "1",
        "finite; its size says little by itself, as the targets move",
        "grows without end: lower optim.lr, set algo.max_grad_norm",
    ),
    Metric(
        "train/grad_norm",
        "global gradient norm before clipping, mean over all updates of the interval",
        "1",
        "around algo.max_grad_norm or below",
        "always far above it: lower optim.lr or scale the reward; 0: nothing is learned, check the loss",
    ),
    Metric(
        "train/clip_fraction",
        "share of samples whose probability ratio was outside the clip range (PPO)",
        "share, 0 to 1",
        "0.05 to 0.25",
        "above 0.3: lower optim.lr or algo.epochs; 0: raise optim.lr",
    ),
    Metric(
        "train/learning_rate",
        "learning rate at the end of the interval",
        "1",
        "constant or falling by optim.schedule",
        "a schedule that reaches 0 early: see optim.schedule and total_frames",
        gathers="last",
    ),
    Metric(
        "train/updates",
        "gradient steps since the start of the run",
        "steps",
        "grows steadily",
        "0: DQN is still filling algo.learning_starts",
        gathers="last",
    ),
    Metric(
        "time/frames_per_second",
        "frames a second over the interval, everything included, in this process",
        "frames/s",
        "steady after the first intervals (compilation)",
        "see the two shares: collecting: env.num_envs, env.backend; updating: larger minibatches, compile, device",
    ),
    Metric(
        "time/collect_share",
        "share of the interval's wall time spent collecting experience",
        "share, 0 to 1",
        "depends on the environment",
        "near 1: raise env.num_envs, or env.backend=async for a slow environment; threads=1",
    ),
    Metric(
        "time/update_share",
        "share of the interval's wall time spent in gradient steps",
        "share, 0 to 1",
        "what collecting and evaluating leave",
        "near 1: larger algo.minibatch_size, fewer algo.epochs, a smaller network, compile=true",
    ),
    Metric(
        "time/<part>_share",
        "share of the interval's wall time spent in another part of the loop: evaluate, log, save",
        "share, 0 to 1",
        "below 0.1",
        "higher: raise eval.interval, logging.interval, logging.histogram_interval or save.interval; lower eval.episodes",
    ),
    Metric(
        "time/memory",
        "resident memory of this process at the point",
        "MB",
        "flat after the first intervals and once a replay buffer is full",
        "grows without end: the environment or a wrapper keeps what it should drop",
        gathers="last",
    ),
    Metric(
        "time/seconds",
        "wall time of the run (only as a final value)",
        "s",
        "",
        "",
        gathers="last",
    ),
    Metric(
        "time/wall",
        "when the point was written (metrics.jsonl and metrics.csv only)",
        "seconds since 1970, UTC",
        "grows",
        "",
        gathers="last",
    ),
    Metric(
        "params/<layer>",
        "weights or biases of a layer",
        "1",
        "spreads slowly from its initialisation",
        "runs away: lower optim.lr, add weight decay (optim=adamw); does not move: the layer gets no gradient",
        histogram=True,
    ),
    Metric(
        "grads/<layer>",
        "gradient of a layer at the last update, before clipping",
        "1",
        "centred on 0, similar size in all layers",
        "0 in a layer: dead units, try network.activation=tanh; huge: lower algo.max_grad_norm or optim.lr",
        histogram=True,
    ),
    Metric(
        "<histogram>/nonfinite",
        "values of a histogram that were NaN, infinite or beyond float32; written once there has been one",
        "values",
        "absent or 0",
        "more: find the tag that turned first; lower optim.lr, check rewards and observations",
        gathers="last",
    ),
    Metric(
        "final/<name>",
        "value of a metric at the end of the run, beside the hyper-parameters in TensorBoard's HPARAMS tab",
        "as <name>",
        "",
        "",
        gathers="last",
    ),
)

_BLOCK = 256
_explained: list[Metric] = list(METRICS)


def explain(*rows: Metric) -> None:
    """Adds rows to the table: an algorithm's own metrics, said in its file."""
    _explained.extend(row for row in rows if row not in _explained)


def explained() -> tuple[Metric, ...]:
    """The whole table: what all algorithms share, and what each registered one adds."""
    import_module("rltool.schema")  # where the algorithms are registered
    for schema in kinds("algo").values():
        import_module(schema.builder.partition(":")[0])
    return tuple(_explained)


def describe(name: str) -> Metric | None:
    """The row of the table that explains a metric name, None where there is none (a plugin's own)."""
    exact = [metric for metric in _explained if metric.name == name]
    return next(iter(exact + [metric for metric in _explained if metric.covers(name)]), None)


@cache  # asked for every value
def _gathering(name: str) -> Gathering:
    row = describe(name)
    return "mean" if row is None else row.gathers


def due(before: int, after: int, interval: int | None) -> bool:
    """True where the frame counter went from ``before`` to ``after`` over a multiple of ``interval`` (None: never)."""
    return interval is not None and after // interval > before // interval


class Meter:
    """Gathers metrics between two logging points without waiting for the device.

    Attributes:
        finished: episodes finished so far.
        since: frames at which the interval began.
    """

    def __init__(self) -> None:
        self.finished = 0
        self.since = 0
        self._pending: dict[str, list[Tensor]] = {}
        self._totals: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}
        self._histograms: Metrics = {}
        self._returns: list[float] = []
        self._lengths: list[int] = []
        self._tally = Tally()

    def add(self, metrics: Metrics) -> None:
        """Take in what an update returned: scalars are summed where they are, of histograms the last one is kept.

        Args:
            metrics: name -> tensor, kept by reference; [] a scalar, [n, …] a histogram.
        """
        for name, value in metrics.items():
            if value.ndim > 0:
                self._histograms[name] = value
            elif _gathering(name) == "last":
                self._pending[name] = [value]
                self._totals.pop(name, None)  # where the interval was looked at for a checkpoint
                self._counts.pop(name, None)
            else:
                # An addition a call would cost DQN, which updates every few frames, a twentieth of its time.
                pending = self._pending.setdefault(name, [])
                pending.append(value)
                if len(pending) == _BLOCK:
                    self._reduce(name)

    def add_experience(self, episodes: Episodes, tally: Tally) -> None:
        """Take in the training episodes that finished in a batch, its rewards and its actions."""
        self._returns.extend(episodes.returns)
        self._lengths.extend(episodes.lengths)
        self.finished += len(episodes.returns)
        self._tally.add(tally)

    def flush(self, histograms: bool) -> tuple[dict[str, float], dict[str, Histogram]]:
        """The means since the last flush, and the last histograms where asked for; then starts a new interval.

        A metric that nothing was added to is absent, never NaN; ``episode/finished`` is always there.

        Args:
            histograms: also return the histograms; otherwise they wait for a flush that asks.

        Returns:
            Scalars by name, and arrays by name that share no memory with the tensors.
        """
        for name in list(self._pending):
            self._reduce(name)
        scalars = {name: total / self._counts[name] for name, total in _to_host(self._totals).items()}
        if self._returns:
            scalars["episode/return"] = sum(self._returns) / len(self._returns)
            scalars["episode/length"] = sum(self._lengths) / len(self._lengths)
        scalars["episode/finished"] = float(self.finished)
        scalars |= self._tally.metrics()
        arrays: dict[str, Histogram] = {}
        if histograms:
            arrays = {name: _array(tensor) for name, tensor in self._histograms.items()}
            self._histograms = {}
        self._totals, self._counts = {}, {}
        self._returns, self._lengths, self._tally = [], [], Tally()
        return scalars, arrays

    def state_dict(self) -> dict[str, Tensor]:
        """The interval so far (but its histograms, of which a later batch brings the last), so that a resumed run logs the
        same means."""
        for name in list(self._pending):
            self._reduce(name)
        state = {f"total.{name}": total for name, total in self._totals.items()}
        state |= {f"count.{name}": torch.tensor(count) for name, count in self._counts.items()}
        state |= {"returns": torch.tensor(self._returns, dtype=torch.float64), "lengths": torch.tensor(self._lengths)}
        state |= {f"tally.{name}": tensor for name, tensor in self._tally.state_dict().items()}
        return state | {"finished": torch.tensor(self.finished), "since": torch.tensor(self.since)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Takes it back."""
        tally: dict[str, Tensor] = {}
        for key, tensor in state.items():
            part, _, name = key.partition(".")
            if part == "total":
                self._totals[name] = tensor
            elif part == "count":
                self._counts[name] = int(tensor)
            elif part == "tally":
                tally[name] = tensor
        self._tally.load_state_dict(tally)
        self._returns, self._lengths = state["returns"].tolist(), state["lengths"].tolist()
        self.finished, self.since = int(state["finished"]), int(state["since"])

    def _reduce(self, name: str) -> None:
        """Bring what waits under a name into its total, in float64, so that counters and long sums stay exact."""
        how, pending = _gathering(name), torch.stack(self._pending.pop(name)).detach().double()
        count = len(pending)
        if name in self._totals:
            pending = torch.cat([self._totals[name].unsqueeze(0), pending])
        self._totals[name] = pending.amin() if how == "min" else pending.amax() if how == "max" else pending.sum()
        # What is not a mean is divided by 1.
        self._counts[name] = self._counts.get(name, 0) + count if how == "mean" else 1


def _to_host(totals: Metrics) -> dict[str, float]:
    """The numbers of 0-d tensors by name, in one copy a device."""
    devices = {tensor.device for tensor in totals.values()}
    numbers: dict[str, float] = {}
    for device in devices:
        names = [name for name, tensor in totals.items() if tensor.device == device]
        numbers.update(zip(names, torch.stack([totals[name] for name in names]).tolist(), strict=True))
    return {name: numbers[name] for name in totals}


def _array(tensor: Tensor) -> Histogram:
    """A copy on the host; bfloat16, which NumPy lacks, becomes float32."""
    tensor = tensor.detach().cpu()
    return np.array((tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy())


def document(metrics: Iterable[Metric]) -> str:
    """The table as Markdown: the whole text of docs/metrics.md."""

    def rows(metrics: Iterable[Metric]) -> list[str]:
        head = ["| name | meaning | unit | healthy | when it is not |", "|---|---|---|---|---|"]
        return head + [
            f"| `{row.name}` | {row.meaning} | {row.unit} | {row.healthy} | {row.remedy} |".replace("||", "\\|\\|")
            for row in metrics
        ]

    metrics = list(metrics)
    newest, extremes = (
        ", ".join(f"`{row.name}`" for row in metrics if row.gathers in kinds) for kinds in (("last",), ("min", "max"))
    )
    lines = [
        "# Metrics",
        "",
        "The x axis of every curve is frames: one frame is one step of one environment. A scalar is the mean over everything",
        "that happened since the last point (all gradient steps, not the last one), except for those that show the newest value:",
        f"{newest}; and those that show the smallest or the largest: {extremes}.",
        "A metric that does not exist for an algorithm or in an interval is absent, never NaN or 0.",
        "",
        "They are in the TensorBoard events and, a line a point, in `metrics.jsonl`; a number that is not finite is `null` there.",
        "What is healthy is a rule of thumb for the usual tasks, not a law.",
        "",
        "This file is written by `python -m rltool.metrics` from the table in `rltool/metrics.py` and the files of the algorithms.",
        "",
        "## Scalars",
        "",
        *rows(row for row in metrics if not row.histogram),
        "",
        "## Histograms",
        "",
        "Written every `logging.histogram_interval` frames, by `logging=tensorboard` and `logging=wandb`.",
        "",
        *rows(row for row in metrics if row.histogram),
        "",
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> None:
    """Write the table to the file named in ``arguments``, docs/metrics.md beside the package by default."""
    target = Path(arguments[0]) if arguments else Path(__file__).resolve().parent.parent / "docs" / "metrics.md"
    target.write_text(document(explained()), encoding="utf-8")
    print(f"wrote {target}")


if __name__ == "__main__":
    from rltool.metrics import main as imported  # the table that the algorithms add to is that of the imported module

    imported(sys.argv[1:])

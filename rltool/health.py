"""What is wrong with a run, in words: rules that look at its points while it trains, and afterwards. No torch.

A rule is a row of :data:`RULES`. It sees a :class:`History`, and says what it saw, with figures; the likely cause and the
keys to change stand beside it. It is asked at every point, so it looks at the newest few values only, and it waits for
enough of them: a rule that is often wrong is read by nobody.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from statistics import fmean, median

# Points that a rule looks back over, unless it says otherwise.
_LATELY = 5
# Points of a metric that are kept; of the older half every second one leaves then, so that a look takes a bounded time.
_MOST = 1000
# A run is looked at as a whole once this share of its budget is used; frames where it has no end.
_EARLY, _HALF = 0.1, 0.5
_LONG = 100_000
# Entropy of a normal distribution of deviation 1, in nats a dimension: ½ ln(2πe).
_NORMAL = 0.5 * math.log(2 * math.pi * math.e)


class History:
    """The points of a run so far, and what it was asked to do.

    Args:
        config: the resolved configuration.
        threshold: mean return at which the environment counts as solved; None where it has none.
    """

    def __init__(self, config: Mapping[str, object], threshold: float | None = None) -> None:
        self._config, self.threshold = config, threshold
        self.frames = 0
        self._series: dict[str, list[tuple[int, float]]] = defaultdict(list)

    def add(self, point: Mapping[str, float], frames: int) -> None:
        """Takes in a point: numbers by name; those that are not finite are no figure to judge by."""
        self.frames = frames
        for name, value in point.items():
            if math.isfinite(value):
                series = self._series[name]
                series.append((frames, float(value)))
                if len(series) > _MOST:
                    del series[1 : _MOST // 2 : 2]

    def values(self, name: str) -> list[float]:
        """All values of a metric, oldest first."""
        return [value for _, value in self._series.get(name, ())]

    def at(self, name: str) -> list[tuple[int, float]]:
        """Frames and values of a metric, oldest first."""
        return self._series.get(name, [])

    def lately(self, name: str, points: int = _LATELY) -> list[float]:
        """The newest values of a metric; none where there are not so many yet."""
        newest = self._series.get(name, [])[-points:]
        return [value for _, value in newest] if len(newest) == points else []

    def key(self, dotted: str) -> object:
        """A value of the configuration; None where there is no such key."""
        node: object = self._config
        for part in dotted.split("."):
            node = node.get(part) if isinstance(node, Mapping) else None
        return node

    def has(self, dotted: str) -> bool:
        """Whether the configuration has such a key."""
        group, _, name = dotted.rpartition(".")
        node = self.key(group) if group else self._config
        return isinstance(node, Mapping) and name in node

    def number(self, dotted: str) -> float | None:
        """The same, where it is a number."""
        value = self.key(dotted)
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None

    def past(self, share: float) -> bool:
        """Whether more than a share of the budget is used (of 100,000 frames where it has no end)."""
        budget = self.number("total_frames") or -1.0
        return self.frames >= share * (budget if budget > 0 else _LONG)

    @property
    def solved(self) -> bool:
        """Whether an evaluation reached the environment's threshold: then much of what looks odd is as it should be."""
        return self.threshold is not None and max(self.values("eval/return_mean"), default=-math.inf) >= self.threshold


@dataclass(frozen=True)
class Rule:
    """A row of the table.

    Attributes:
        name: what ``stop.on`` and health.jsonl call it.
        title: the fault in a few words.
        cause: the likely cause.
        remedies: keys of the configuration and what to do with each, the most likely to help first; those that a
            configuration does not have are left out.
        look: what was seen, with figures; None where there is no such fault (or not yet).
        algos: kinds of algorithms that it is for; empty: all.
    """

    name: str
    title: str
    cause: str
    remedies: tuple[tuple[str, str], ...]
    look: Callable[[History], str | None]
    algos: tuple[str, ...] = ()

    def find(self, history: History) -> Finding | None:
        """The finding, where there is the fault."""
        if self.algos and history.key("algo.kind") not in self.algos:
            return None
        seen = self.look(history)
        return (
            None
            if seen is None
            else Finding(self.name, history.frames, self.title, seen, self.cause, self._advice(history))
        )

    def _advice(self, history: History) -> list[str]:
        advice = []
        for key, change in self.remedies:
            if not history.has(key):
                continue
            if (
                key.startswith("algo.epsilon.")
                and change == "raise"
                and max(history.lately("policy/epsilon", 1), default=0) > 0.3
            ):
                continue  # many actions are random already
            now = history.key(key)
            shown = json.dumps(now) if not isinstance(now, str) else now
            if change != shown and not (now == 0 and change.startswith("lower")):
                advice.append(f"{key}: {change}" + ("" if isinstance(now, Mapping | list) else f" (now {shown})"))
        return advice


@dataclass(frozen=True)
class Finding:
    """A fault of a run.

    Attributes:
        rule: name of the rule.
        frames: at which it was first seen.
        title: the fault in a few words.
        seen: what was seen, with figures.
        cause: the likely cause.
        remedies: what to change, each ``key: direction (now value)``.
        gone: the frame from which on it was not seen any more; None while it lasts.
    """

    rule: str
    frames: int
    title: str
    seen: str
    cause: str
    remedies: list[str]
    gone: int | None = None

    def to_json(self) -> dict[str, object]:
        """All of it as plain values."""
        return asdict(self)

    @property
    def line(self) -> str:
        """It in a line, with the first remedy."""
        remedy = f". Try {self.remedies[0]}" if self.remedies else ""
        return f"{self.title}: {self.seen}{remedy}"


class Checkup:
    """Asks all rules at every point; a fault is told once, when it is first seen, and once when it has gone.

    Args:
        history: filled by :meth:`add`.

    Attributes:
        open: the faults that last, by rule.
        told: all that was found, in order: each fault as it is first seen, and again, with ``gone``, once it has gone.
    """

    def __init__(self, history: History) -> None:
        self.history = history
        self.open: dict[str, Finding] = {}
        self.told: list[Finding] = []

    def add(self, point: Mapping[str, float], frames: int) -> list[Finding]:
        """Takes in a point; gives the faults that are new, and those that have gone with it."""
        self.history.add(point, frames)
        told = []
        for rule in RULES:
            finding = rule.find(self.history)
            if finding is not None and rule.name not in self.open:
                self.open[rule.name] = finding
                told.append(finding)
            elif finding is not None:
                self.open[rule.name] = replace(self.open[rule.name], seen=finding.seen)
            elif finding is None and rule.name in self.open:
                told.append(replace(self.open.pop(rule.name), gone=frames))
        self.told += told
        return told


def examine(
    points: Iterable[Mapping[str, float]], config: Mapping[str, object], threshold: float | None = None
) -> Checkup:
    """The checkup of a run that is on disk.

    Args:
        points: each with its ``frames``, oldest first.
        config, threshold: as for :class:`History`.
    """
    checkup = Checkup(History(config, threshold))
    for point in points:
        checkup.add({name: value for name, value in point.items() if name != "frames"}, int(point["frames"]))
    return checkup


# ----------------------------------------------------------------------------------------------------------- what is seen


def figure(value: float) -> str:
    """A number as it is read: three digits that count."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _entropy_collapsed(history: History) -> str | None:
    entropy = history.values("policy/entropy")
    now = history.lately("policy/entropy", 2)
    if len(entropy) < 3 or not now or history.solved:
        return None
    first, newest = entropy[0], fmean(now)
    if history.at("policy/bound_share"):  # numbers: what entropy is to them goes by the deviation
        spread = history.number("algo.initial_std") or 1.0
        dimensions = max(first / (_NORMAL + math.log(spread)), 1.0)
        deviation = math.exp(newest / dimensions - _NORMAL)
        if deviation < 0.02 * spread:
            return f"the policy's standard deviation is about {figure(deviation)}, it was {figure(spread)} at first"
        return None
    if first > 0 and newest < 0.02 * first:
        return f"policy/entropy is {figure(newest)} nats, it was {figure(first)} at first"
    return None


def _entropy_stays(history: History) -> str | None:
    entropy, now = history.values("policy/entropy"), history.lately("policy/entropy")
    if not now or not history.past(_HALF) or history.solved or history.at("policy/bound_share"):
        return None
    if entropy[0] > 0 and fmean(now) > 0.98 * entropy[0]:
        return f"policy/entropy is {figure(fmean(now))} nats, and was {figure(entropy[0])} at first: actions are as random as ever"
    return None


def _above(name: str, limit: float, points: int = _LATELY) -> Callable[[History], str | None]:
    """Whether the newest values of a metric are all above a limit."""

    def look(history: History) -> str | None:
        now = history.lately(name, points)
        if now and min(now) > limit:
            return f"{name} is {figure(fmean(now))} on the mean of the last {points} points; {figure(limit)} is much"
        return None

    return look


def _kl_high(history: History) -> str | None:
    target, now = history.number("algo.target_kl"), history.lately("policy/approx_kl", 3)
    limit = 0.05 if target is None else max(0.05, 3 * target)
    if now and fmean(now) > 3 * limit:
        return f"policy/approx_kl is {figure(fmean(now))} on the mean of the last {len(now)} points; {figure(limit)} is much"
    return _above("policy/approx_kl", limit)(history)


def _kl_low(history: History) -> str | None:
    now, rate = history.lately("policy/approx_kl", 10), history.values("train/learning_rate")
    annealed = bool(rate) and rate[-1] < 0.2 * rate[0]
    settled = history.solved or _entropy_collapsed(history) is not None  # the other fault then says why
    if now and not annealed and not settled and max(now) < 1e-5:
        return f"policy/approx_kl is {figure(fmean(now))} nats an update: the policy hardly moves"
    return None


def _explained_variance(history: History) -> str | None:
    now = history.lately("critic/explained_variance", 10)
    if now and history.past(_EARLY) and max(now) < 0 and fmean(now[5:]) < fmean(now[:5]) + 0.05:
        return (
            f"critic/explained_variance was below zero at the last {len(now)} points, {figure(fmean(now))} on the mean"
        )
    return None


def _value_loss(history: History) -> str | None:
    losses = history.values("critic/value_loss")
    now = history.lately("critic/value_loss")
    if not now or len(losses) < 4 * _LATELY:
        return None
    windows = [median(losses[start : start + _LATELY]) for start in range(0, len(losses) - _LATELY + 1, _LATELY)]
    low, newest = (
        min(window for window in windows if window > 0) if any(window > 0 for window in windows) else 0.0,
        median(now),
    )
    rising = all(later > earlier for earlier, later in pairwise(windows[-3:]))
    if low > 0 and newest > 1000 * low and rising:
        return f"critic/value_loss has grown from {figure(low)} to {figure(newest)}, and grows"
    return None


def _q_beyond_reach(history: History) -> str | None:
    # Early in training and with a short horizon a sound run overshoots for a while, by less than a half.
    now = history.lately("critic/q_limit_share")
    if now and min(now) > 2:
        return f"the largest Q value is {figure(fmean(now))} times what any policy can reach, max |reward| / (1 - γ)"
    return None


def _always_clipped(history: History) -> str | None:
    limit, now = history.number("algo.max_grad_norm"), history.lately("train/grad_norm", 20)
    if limit is not None and now and min(now) > 10 * limit:
        return f"train/grad_norm is {figure(fmean(now))}, more than ten times algo.max_grad_norm, at the last {len(now)} points"
    return None


def _no_learning_rate(history: History) -> str | None:
    now = history.lately("train/learning_rate", 1)
    if now and now[0] <= 0 and not history.past(0.98):
        return f"train/learning_rate is {figure(now[0])} with budget left"
    return None


def _epsilon_high(history: History) -> str | None:
    now = history.lately("policy/epsilon", 1)
    nothing_pays = _returns_equal(history) is not None or _no_reward(history) is not None  # then exploring is right
    if now and history.past(0.75) and now[0] > 0.3 and not history.solved and not nothing_pays:
        return f"{now[0]:.0%} of the actions are still random"
    return None


def _epsilon_spent(history: History) -> str | None:
    first = history.at("train/updates")
    epsilon, end = history.at("policy/epsilon"), history.number("algo.epsilon.end")
    if not first or end is None or not epsilon:
        return None
    began = next((frames for frames, updates in first if updates > 0), None)
    spent = next((frames for frames, value in epsilon if value <= end * 1.001), None)
    if began is not None and spent is not None and spent < began and end < 0.5:
        return f"ε had fallen to {figure(end)} by {spent:,} frames, and learning began at {began:,}"
    return None


def _advantages_equal(history: History) -> str | None:
    spread, mean = history.lately("data/advantage_std"), history.lately("data/advantage_mean")
    if spread and mean and max(spread) <= 1e-6 + 1e-4 * fmean(map(abs, mean)):
        return f"data/advantage_std is {figure(max(spread))}: no action is better than another"
    return None


def _no_reward(history: History) -> str | None:
    low, high = history.values("data/reward_min"), history.values("data/reward_max")
    if low and high and history.past(_EARLY) and min(low) == 0 == max(high):
        return f"every reward of {history.frames:,} frames was 0"
    return None


def _reward_spike(history: History) -> str | None:
    low, high = history.at("data/reward_min"), history.at("data/reward_max")
    sizes = [max(abs(least), abs(most)) for (_, least), (_, most) in zip(low, high, strict=False)]
    if len(sizes) < 10:
        return None
    usual, largest = median(sizes), max(sizes)
    if usual > 0 and largest > 1e6 * usual:
        return f"a reward of {figure(largest)} at {high[sizes.index(largest)][0]:,} frames or just before; {figure(usual)} is usual"
    return None


def _input_scale(history: History) -> str | None:
    now = history.lately("data/input_abs_max", 3)
    if now and min(now) > 100:
        return f"inputs of the networks are as large as {figure(max(now))}"
    return None


def _input_constant(history: History) -> str | None:
    now = history.lately("data/input_constant_share", 3)
    if now and min(now) > 0.99:
        return "all inputs of the networks had one and the same value in all states that were looked at, at the last 3 points"
    return None


def _at_bound(history: History) -> str | None:
    now = history.lately("policy/bound_share")
    if now and min(now) > 0.95 and not history.solved:
        return f"{fmean(now):.0%} of the numbers in actions are at a bound"
    return None


def _one_action(history: History) -> str | None:
    if history.solved or not history.past(_EARLY):
        return None
    option = 0
    while history.at(name := f"policy/action_share/{option}"):
        now = history.lately(name)
        if now and min(now) > 0.99:
            return f"action {option} is {fmean(now):.1%} of all"
        option += 1
    return None


def _no_episode(history: History) -> str | None:
    finished = history.lately("episode/finished", 1)
    if finished and finished[0] == 0 and history.past(_EARLY) and history.frames >= 10_000:
        return f"no episode has finished in {history.frames:,} frames"
    return None


def _buffer_small(history: History) -> str | None:
    filled, size = history.lately("buffer/filled", 1), history.number("buffer.size")
    if filled and size and filled[0] >= 1 and size < 0.02 * history.frames and size < 50_000 and not history.solved:
        return (
            f"the replay buffer holds {size:,.0f} transitions, the newest {size / history.frames:.1%} of what was seen"
        )
    return None


def _buffer_stale(history: History) -> str | None:
    age = history.lately("buffer/replay_age", 3)
    if age and min(age) > 1_000_000 and not history.solved:
        return f"what is replayed is {figure(fmean(age))} frames old on the mean"
    return None


def _no_updates(history: History) -> str | None:
    if not history.past(_HALF) or not history.at("episode/finished") or any(history.values("train/updates")):
        return None
    return f"no gradient step has been made in {history.frames:,} frames"


def _plateau(history: History) -> str | None:
    name, curve, width = "evaluations", history.at("eval/return_mean"), 3
    if len(curve) < 10:
        name, curve, width = "training returns", history.at("episode/return"), 5
    if len(curve) < 4 * width or not history.past(_HALF) or history.solved:
        return None
    smooth = [
        (frames, fmean(value for _, value in curve[index : index + width]))
        for index, (frames, _) in enumerate(curve[: 1 - width])
    ]
    best = max(smooth, key=lambda point: point[1])
    if best[0] <= 0.5 * history.frames:
        known = "" if history.threshold is None else f" (solved at {figure(history.threshold)})"
        return (
            f"{name}, each mean of {width}, have been no better than {figure(best[1])} since {best[0]:,} frames{known}"
        )
    return None


def _returns_equal(history: History) -> str | None:
    curve = history.values("episode/return")
    if len(curve) < 10 or not history.past(0.25) or max(curve) - min(curve) > 1e-6 * abs(curve[0]):
        return None
    return f"every training episode so far had a return of {figure(curve[0])}"


def _returns_fell(history: History) -> str | None:
    name = "eval/return_mean" if len(history.at("eval/return_mean")) >= 8 else "episode/return"
    curve, now = history.values(name), history.lately(name, 3)
    if not now or len(curve) < 8:
        return None
    smooth = [fmean(curve[index : index + 3]) for index in range(len(curve) - 2)]
    best, first = max(smooth), min(smooth[: smooth.index(max(smooth)) + 1])
    noise = median(abs(later - earlier) for earlier, later in pairwise(curve))
    fallen = best - max(now)
    if fallen > 0.6 * (best - first) > 0 and fallen > 4 * noise and smooth.index(best) < len(smooth) - 3:
        return f"{name} was {figure(best)} and is {figure(fmean(now))}"
    return None


def _eval_below_training(history: History) -> str | None:
    trained, judged = history.values("episode/return"), history.lately("eval/return_mean", 3)
    if len(trained) < 10 or not judged or history.solved:
        return None
    recent, low, high = fmean(trained[-5:]), min(trained), max(trained)
    if high > low and recent - max(judged) > 0.4 * (high - low):
        return f"evaluations give {figure(fmean(judged))}, training episodes {figure(recent)}"
    return None


_PARTS = ("collect", "update", "evaluate", "log", "save")


def _slower(history: History) -> str | None:
    began = next((frames for frames, updates in history.at("train/updates") if updates > 0), None)
    rates = [
        (frames, value)
        for frames, value in history.at("time/frames_per_second")
        if began is not None and frames > began
    ]
    if len(rates) < 25:
        return None
    before, now = median(value for _, value in rates[3:13]), median(value for _, value in rates[-10:])
    if now >= 0.5 * before:
        return None
    grown = []
    for part in _PARTS:
        shares = [value for frames, value in history.at(f"time/{part}_share") if began is not None and frames > began]
        if len(shares) == len(rates) and median(shares[-10:]) / now > 2 * median(shares[3:13]) / before:
            grown.append(part)
    parts = f"; what takes longer a frame: {', '.join(grown)}" if grown else ""
    return f"{figure(now)} frames/s, {figure(before)} earlier{parts}"


def _memory_grows(history: History) -> str | None:
    memory = history.at("time/memory")
    if len(memory) < 40 or not history.past(_HALF):
        return None
    quarters = [
        median(value for _, value in memory[part * len(memory) // 4 : (part + 1) * len(memory) // 4])
        for part in range(4)
    ]
    filled = history.lately("buffer/filled", 1)
    growing = all(later > 1.05 * earlier for earlier, later in pairwise(quarters))
    if growing and quarters[3] - quarters[1] > 300 and (not filled or filled[0] >= 1):
        return f"memory has grown from {quarters[1]:,.0f} to {quarters[3]:,.0f} MB, and grows"
    return None


def _saturated(history: History) -> str | None:
    for network in ("policy", "critic"):
        now = history.lately(f"{network}/saturated_units")
        if now and min(now) > 0.5:
            return f"{fmean(now):.0%} of the hidden units of the {network} are flat in nearly all states"
    return None


# ------------------------------------------------------------------------------------------------------------ the table

_EXPLORE = (
    ("algo.entropy_coeff", "raise, to 0.01 say"),
    ("algo.epsilon.frames", "raise"),
    ("algo.epsilon.end", "raise"),
)
_NORMALISE = (("algo.normalize_observation", "true"),)

RULES: tuple[Rule, ...] = (
    Rule(
        "entropy_collapsed",
        "the policy has stopped exploring",
        "it has settled before it was good: too large steps, or nothing that rewards variety",
        (("algo.entropy_coeff", "raise, to 0.01 say"), ("optim.lr", "lower"), ("algo.target_kl", "0.02")),
        _entropy_collapsed,
        ("ppo",),
    ),
    Rule(
        "entropy_stays",
        "the policy has not begun to choose",
        "the advantages say nothing yet (a sparse reward, a poor value estimate), or the bonus for entropy outweighs them",
        (("algo.entropy_coeff", "lower"), ("optim.lr", "raise"), ("algo.normalize_advantage", "true")),
        _entropy_stays,
        ("ppo",),
    ),
    Rule(
        "kl_high",
        "the policy moves too far in an update",
        "steps that are too large or too many for one batch",
        (("optim.lr", "lower"), ("algo.epochs", "lower"), ("algo.target_kl", "0.02"), ("algo.minibatch_size", "raise")),
        _kl_high,
        ("ppo",),
    ),
    Rule(
        "kl_low",
        "the policy hardly moves",
        "steps that are too small",
        (("optim.lr", "raise"), ("algo.epochs", "raise"), ("algo.max_grad_norm", "raise")),
        _kl_low,
        ("ppo",),
    ),
    Rule(
        "clip_fraction_high",
        "too many samples are clipped",
        "steps that are too large or too many for one batch: most samples give no gradient any more",
        (("optim.lr", "lower"), ("algo.epochs", "lower"), ("algo.minibatch_size", "raise")),
        _above("train/clip_fraction", 0.5),
        ("ppo",),
    ),
    Rule(
        "explained_variance_negative",
        "the value estimate is worse than none",
        "the critic cannot follow: inputs or returns of an odd scale, too small a network, too few steps",
        (*_NORMALISE, ("algo.scale_reward", "true"), ("algo.epochs", "raise"), ("algo.critic_coeff", "raise")),
        _explained_variance,
        ("ppo",),
    ),
    Rule(
        "value_loss_grows",
        "the value loss grows without end",
        "returns that grow, unscaled, or a critic that chases its own estimates",
        (("algo.scale_reward", "true"), ("optim.lr", "lower"), ("algo.gamma", "lower"), ("algo.tau", "lower")),
        _value_loss,
    ),
    Rule(
        "q_beyond_reach",
        "Q values are larger than anything that can be reached",
        "over-estimation: the maximum picks errors, and the target follows them",
        (("algo.double", "true"), ("algo.target_interval", "raise"), ("optim.lr", "lower"), ("algo.tau", "lower")),
        _q_beyond_reach,
    ),
    Rule(
        "gradient_clipped",
        "gradients are always far beyond the clip",
        "the clip sets the length of every step: the scale of the loss, and so of rewards or inputs, is off",
        (("algo.scale_reward", "true"), *_NORMALISE, ("algo.max_grad_norm", "raise"), ("optim.lr", "lower")),
        _always_clipped,
    ),
    Rule(
        "learning_rate_zero",
        "nothing is learned any more",
        "the schedule of the learning rate has ended before the budget",
        (("optim.schedule", "constant"), ("optim.lr", "raise")),
        _no_learning_rate,
    ),
    Rule(
        "epsilon_high",
        "ε is still high",
        "its schedule is too long for the budget",
        (("algo.epsilon.frames", "lower, to a tenth of total_frames say"), ("total_frames", "raise")),
        _epsilon_high,
    ),
    Rule(
        "epsilon_spent",
        "ε had fallen before learning began",
        "its schedule is shorter than the frames that are collected first",
        (("algo.epsilon.frames", "raise"), ("algo.learning_starts", "lower")),
        _epsilon_spent,
    ),
    Rule(
        "advantages_equal",
        "all advantages are equal",
        "the reward does not depend on the actions, or is constant",
        (("algo.gamma", "raise"), ("env.kwargs", "look at the environment's reward: rltool env shows it")),
        _advantages_equal,
        ("ppo",),
    ),
    Rule(
        "rewards_zero",
        "no reward has been seen",
        "exploration never gets to it, or the environment never pays",
        (*_EXPLORE, ("env.kwargs", "a denser reward, if there is one; rltool env shows what is paid")),
        _no_reward,
    ),
    Rule(
        "returns_equal",
        "all episodes pay the same",
        "exploration never gets to what pays (episodes run into their time limit, say), or what is paid does not depend on the "
        "actions",
        (
            *_EXPLORE,
            ("env.kwargs", "a reward that tells actions apart; rltool env shows what is paid"),
            ("env.max_episode_steps", "raise"),
        ),
        _returns_equal,
    ),
    Rule(
        "reward_spike",
        "a single reward dwarfs all others",
        "a fault of the environment, or a bonus of another scale: returns, their scale and the value estimate go by it",
        (
            ("algo.scale_reward", "true"),
            ("env.wrappers", "clip rewards: [{name: ClipReward, kwargs: {…}, eval: false}]"),
        ),
        _reward_spike,
    ),
    Rule(
        "input_scale",
        "inputs of the networks are large",
        "observations that are not normalised: units saturate, and gradients are out of proportion",
        _NORMALISE,
        _input_scale,
    ),
    Rule(
        "input_constant",
        "the networks see nothing",
        "an observation that never changes: a wrapper, observation_keys, or the environment",
        (("env.observation_keys", "the entries that say something"), ("env.wrappers", "look at what they leave")),
        _input_constant,
    ),
    Rule(
        "actions_at_bound",
        "nearly all actions are at a bound",
        "means that have run away beyond the bounds, where their gradient is lost; good only where full force is best",
        (("algo.squash", "tanh"), ("optim.lr", "lower"), ("algo.initial_std", "lower")),
        _at_bound,
        ("ppo", "sac"),
    ),
    Rule(
        "one_action",
        "one action is all that is tried",
        "the policy has settled before it has seen the others pay",
        _EXPLORE,
        _one_action,
    ),
    Rule(
        "no_episode",
        "no episode has finished",
        "episodes have no end, or take longer than the run so far: returns cannot be shown",
        (("env.max_episode_steps", "a limit"),),
        _no_episode,
    ),
    Rule(
        "buffer_small",
        "the replay buffer forgets quickly",
        "it holds a small part of what was seen, and so what the policy did just now",
        (("buffer.size", "raise"), ("buffer.storage", "memmap, where memory is short")),
        _buffer_small,
    ),
    Rule(
        "buffer_stale",
        "what is replayed is old",
        "a large buffer and few steps a frame: most of it is of policies long gone",
        (("buffer.size", "lower"), ("algo.updates_per_frame", "raise")),
        _buffer_stale,
    ),
    Rule(
        "no_updates",
        "learning has not begun",
        "more frames are collected first than the budget leaves for learning",
        (("algo.warmup_frames", "lower"), ("algo.learning_starts", "lower"), ("total_frames", "raise")),
        _no_updates,
    ),
    Rule(
        "plateau",
        "no progress for half of the run",
        "a local optimum, or steps that are too small or too large to get further",
        (*_EXPLORE, ("optim.lr", "half or double"), ("network.hidden", "larger")),
        _plateau,
    ),
    Rule(
        "returns_fell",
        "the returns have fallen from their best",
        "steps that were too large; best.ckpt still holds the best policy",
        (
            ("optim.lr", "lower"),
            ("optim.schedule", "linear"),
            ("algo.target_interval", "raise"),
            ("algo.target_kl", "0.02"),
        ),
        _returns_fell,
    ),
    Rule(
        "evaluation_below_training",
        "evaluations are far below the training episodes",
        "the mode of the policy does worse than its samples, or the evaluation's environment differs",
        (("eval.deterministic", "false, to see whether it is the mode"), ("env.wrappers", "look at their eval")),
        _eval_below_training,
    ),
    Rule(
        "slower",
        "the run has become slower",
        "where all parts take longer, other work on this machine; else longer episodes, a fuller buffer, less memory",
        (
            ("eval.interval", "raise, where evaluate takes longer"),
            ("logging.interval", "raise, where log does"),
            ("env.backend", "auto, where collect does"),
        ),
        _slower,
    ),
    Rule(
        "memory_grows",
        "memory grows without end",
        "the environment or a wrapper keeps what it should drop",
        (("env.wrappers", "leave them out one by one"), ("buffer.size", "lower")),
        _memory_grows,
    ),
    Rule(
        "saturated_units",
        "many hidden units are dead or saturated",
        "weights or inputs that are too large: these units pass no gradient",
        (*_NORMALISE, ("optim.lr", "lower"), ("network.layer_norm", "true"), ("network.activation", "another")),
        _saturated,
    ),
)

NAMES: Sequence[str] = tuple(rule.name for rule in RULES)


def document() -> str:
    """The table of rules as Markdown: the whole text of docs/health.md."""
    rows = [
        f"| `{rule.name}` | {', '.join(rule.algos) or 'all'} | {rule.title} | {rule.cause} | "
        + ", ".join(f"`{key}`: {change}" for key, change in rule.remedies)
        + " |"
        for rule in RULES
    ]
    return "\n".join(
        [
            *_INTRODUCTION,
            "",
            "| fault | algo | what it means | likely cause | what to change |",
            "|---|---|---|---|---|",
            *rows,
            "",
        ]
    )


_INTRODUCTION = (
    "# What is wrong with a run",
    "",
    "While a run trains, rltool looks at every point of its metrics for the faults below. A fault is told in a line when it is",
    "first seen, with the figures that gave it away and the first thing to try; the panel shows those that last, and",
    '`health.jsonl` in the run directory has a line for each as it comes (`"state": "seen"`) and as it goes (`"gone"`).',
    "`summary.json` lists those that lasted to the end under `health`.",
    "",
    "```",
    "rltool doctor                       # the newest run in runs/: every fault, its cause, what to change",
    "rltool doctor runs/cartpole-ppo     # all runs in a directory; running, finished, killed or of an older rltool",
    "rltool doctor runs/… --json         # for programs",
    "rltool doctor --rules               # the faults it knows",
    "```",
    "",
    "`stop.on=[rewards_zero,entropy_collapsed]` ends a run, with status `stopped` and exit code 0, when such a fault is first",
    "seen; `stop=hopeless` names those from which runs seldom recover. A run that is resumed goes on: a fault that is known does",
    "not stop it again. In a YAML file, write the key in quotes or not, `on:` means the same here.",
    "",
    "The limits are rules of thumb and leave room: a rule that cries wolf is read by nobody. A run that has reached the",
    "environment's threshold is not told to explore.",
    "",
    "This file is written by `python -m rltool.health` from the table in `rltool/health.py`.",
)


if __name__ == "__main__":
    from pathlib import Path

    Path(__file__).resolve().parent.parent.joinpath("docs", "health.md").write_text(document(), encoding="utf-8")

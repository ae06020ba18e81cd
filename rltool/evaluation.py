"""Evaluation: episodes fixed beforehand, statistics frozen, training's random numbers untouched."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from rltool import reporting
from rltool.contract import leaves_of
from rltool.envs import single_env
from rltool.errors import ConfigError, EnvironmentFault, NonFiniteError, Problem
from rltool.intervals import bootstrap_interval, interquartile_mean
from rltool.seeding import Stream, generator, seed_world, seeds, untouched_world
from rltool.watchdog import CALLS, Watchdog, end_process

if TYPE_CHECKING:
    from rltool.actions import ActionSpec
    from rltool.checkpoint import Header
    from rltool.collect import Explorer, TensorLeaves
    from rltool.schema import EnvConfig, EvalRunConfig
    from rltool.spaces import LeafSpec, Leaves
    from rltool.trajectories import Trajectories
    from rltool.video import Film


class Actor(Protocol):
    """What is evaluated: an algorithm, or a policy loaded from a file."""

    @property
    def actions(self) -> ActionSpec:
        """Units of action."""

    @property
    def sampler(self) -> Explorer:
        """The policy that explores."""

    def policy(self, leaves: TensorLeaves, /) -> torch.Tensor:
        """The deterministic policy."""


@dataclass(frozen=True)
class EvalReport:
    """What the episodes of an evaluation say.

    Attributes:
        mean, std, median, min, max: of the undiscounted, unscaled returns (std with n-1).
        iqm: mean of the middle half (Agarwal et al. 2021, arXiv:2108.13264).
        ci_low, ci_high: 95 % percentile bootstrap interval of the mean over episodes.
        success_rate: share of episodes at or above ``threshold``; None where the environment has none.
        cut: episodes that had not ended after ``max_steps`` steps.
        device: where the policy computed.
        returns, lengths: of each episode, in the order of their seeds.
        videos: files with the episodes, in that order, where they were filmed.
        video_problem: why episodes are missing among them.
    """

    mean: float
    std: float
    median: float
    iqm: float
    min: float
    max: float
    ci_low: float
    ci_high: float
    success_rate: float | None
    threshold: float | None
    episodes: int
    cut: int
    max_steps: int
    deterministic: bool
    seed: int
    env: str
    checkpoint: str | None
    device: str
    returns: list[float]
    lengths: list[int]
    videos: list[str] = field(default_factory=list)
    video_problem: str | None = None

    def to_json(self) -> dict[str, object]:
        """All of it as plain values."""
        return asdict(self)


@dataclass(frozen=True)
class Limit:
    """What an evaluation may cost: no episode begins after so many steps of all of them together.

    Those that have begun are finished, so that short episodes are not preferred. Steps and not seconds: the same policy
    is judged by the same episodes on every machine.

    Attributes:
        steps: of all episodes together.
        at_least: episodes that are run whatever they cost.
        asked_to_stop: looked at after every step; where it says yes, :class:`Stopped` is raised.
    """

    steps: int
    at_least: int
    asked_to_stop: Callable[[], bool]

    def forbids(self, episode: int, lengths: Sequence[int]) -> bool:
        """Whether an episode may not begin any more, after so many steps of those before it."""
        return episode >= self.at_least and sum(lengths) >= self.steps


class Stopped(Exception):
    """An evaluation was asked to stop before its end."""


class Evaluator:
    """Environments for evaluation, kept open between evaluations.

    Args:
        config: the env node; ``num_envs`` of it is replaced.
        num_envs: episodes run side by side.
        device: where the policy lives.
        render_mode: ``human`` opens a window, for one episode at a time; ``rgb_array`` is for a film.
    """

    def __init__(
        self, config: EnvConfig, *, num_envs: int, device: torch.device, render_mode: str | None = None
    ) -> None:
        with untouched_world():
            count = 1 if render_mode == "human" else num_envs
            self._envs = [single_env(config, index, render_mode) for index in range(count)]
        first = self._envs[0]
        self.id = first.spec.id if first.spec is not None else str(getattr(config, "id", config.kind))
        self.threshold = first.spec.reward_threshold if first.spec is not None else None
        self.leaves, self.actions = first.leaves, first.actions
        self._device = device

    def __call__(
        self,
        actor: Actor,
        *,
        episodes: int,
        seed: int,
        max_steps: int,
        deterministic: bool = True,
        streams: tuple[Stream, Stream] = (Stream.EVAL_ENV, Stream.EVAL_POLICY),
        frames: int = 0,
        checkpoint: str | None = None,
        film: Film | None = None,
        trajectories: Trajectories | None = None,
        limit: Limit | None = None,
    ) -> EvalReport:
        """Runs ``episodes`` episodes; the i-th starts at the i-th seed of the stream, whichever environment runs it.

        Args:
            actor: what is evaluated.
            episodes, seed: how many, and from which seed.
            max_steps: an episode that has not ended by then is cut and counted in ``cut``.
            deterministic: the policy's mode, or samples of it.
            streams: random streams of environments and of sampling.
            frames: frame counter of the policy (an ε schedule samples as it stands there).
            checkpoint: recorded in the report.
            film: films the episodes; the environments must draw (``rgb_array``).
            trajectories: keeps the episodes, step by step.
            limit: what it may cost; fewer episodes are run where that is reached.

        Raises:
            NonFiniteError: a return is NaN or infinite.
            Stopped: ``limit`` was asked to stop.
        """
        starts = seeds(seed, streams[0], episodes)
        with untouched_world(), torch.no_grad():
            seed_world(starts[0])  # some environments draw from the global generators
            returns, lengths, cut = self._run(
                actor,
                starts,
                max_steps,
                deterministic,
                generator(seed, streams[1]),
                frames,
                film,
                trajectories,
                limit,
            )
        for episode, value in enumerate(returns):
            if not np.isfinite(value):
                raise NonFiniteError(
                    f"the return of evaluation episode {episode} on {self.id} is {value}: the environment gave a reward "
                    "that is no finite number, or was given such an action"
                )
        low, high = bootstrap_interval(returns)
        array = np.asarray(returns)
        return EvalReport(
            mean=float(array.mean()),
            std=float(array.std(ddof=1)) if len(array) > 1 else 0.0,
            median=float(np.median(array)),
            iqm=interquartile_mean(returns),
            min=float(array.min()),
            max=float(array.max()),
            ci_low=low,
            ci_high=high,
            success_rate=None if self.threshold is None else float((array >= self.threshold).mean()),
            threshold=self.threshold,
            episodes=len(returns),
            cut=cut,
            max_steps=max_steps,
            deterministic=deterministic,
            seed=seed,
            env=self.id,
            checkpoint=checkpoint,
            device=str(self._device),
            returns=returns,
            lengths=lengths,
            videos=[] if film is None else sorted(map(str, film.videos)),
            video_problem=None if film is None else film.problem,
        )

    def _run(
        self,
        actor: Actor,
        starts: list[int],
        max_steps: int,
        deterministic: bool,
        noise: torch.Generator,
        frames: int,
        film: Film | None,
        trajectories: Trajectories | None,
        limit: Limit | None,
    ) -> tuple[list[float], list[int], int]:
        slots = min(len(self._envs), len(starts))
        returns, lengths, cut = [0.0] * len(starts), [0] * len(starts), 0
        observed = {spec.key: np.zeros((slots, *spec.shape), spec.dtype) for spec in self.leaves}
        running: dict[int, int] = {}  # slot -> episode
        begun = 0

        def begin(slot: int) -> None:
            nonlocal begun
            episode = begun
            if episode == len(starts) or (limit is not None and limit.forbids(episode, lengths)):
                running.pop(slot, None)
                return
            begun += 1
            with CALLS:
                observation, _ = self._envs[slot].reset(seed=starts[episode])
            running[slot] = episode
            if film is not None:
                film.add(episode, self._envs[slot])
            leaves = leaves_of(observation, self.leaves)
            if trajectories is not None:
                trajectories.begin(episode, starts[episode], leaves)
            for key, array in leaves.items():
                observed[key][slot] = array

        for slot in range(slots):
            begin(slot)
        while running:
            if limit is not None and limit.asked_to_stop():
                raise Stopped
            self._check_finite(observed, running)
            leaves = {key: torch.from_numpy(array).to(self._device) for key, array in observed.items()}
            if deterministic:
                chosen = actor.policy(leaves)
            else:
                drawn = actor.sampler.draw(1, slots, frames, noise)
                chosen = actor.sampler(leaves, tuple(part[0].to(self._device) for part in drawn))
            actions = actor.actions.to_env(chosen.cpu().numpy())
            for slot, episode in list(running.items()):
                with CALLS:
                    observation, reward, terminated, truncated, _ = self._envs[slot].step(actions[slot])
                returns[episode] += float(reward)
                lengths[episode] += 1
                if film is not None:
                    film.add(episode, self._envs[slot])
                over = lengths[episode] >= max_steps
                if trajectories is not None:
                    last = leaves_of(observation, self.leaves)
                    cut_here = over and not terminated
                    trajectories.step(episode, actions[slot], reward, terminated, truncated or cut_here, last)
                if terminated or truncated or over:
                    cut += int(over and not (terminated or truncated))
                    if film is not None:
                        film.end(episode)
                    begin(slot)
                else:
                    for key, array in leaves_of(observation, self.leaves).items():
                        observed[key][slot] = array
        return returns[:begun], lengths[:begun], cut

    def _check_finite(self, observed: Leaves, running: Mapping[int, int]) -> None:
        """Raises NonFiniteError where an environment is observed as NaN or infinite: no action of the policy's means anything
        then."""
        for key, array in observed.items():
            if array.dtype.kind != "f" or np.isfinite(array).all():
                continue
            slot = int(np.argwhere(~np.isfinite(array))[0][0])
            if slot in running:
                raise NonFiniteError(
                    f"{'.'.join(key)} of evaluation episode {running[slot]} on {self.id} is NaN or infinite. Mend the "
                    "environment, or look at its inputs"
                )

    def close(self) -> None:
        """Closes the environments."""
        for env in self._envs:
            env.close()


def _in_words(spec: tuple[LeafSpec, ...] | ActionSpec) -> str:
    return ", ".join(map(str, spec)) if isinstance(spec, tuple) else str(spec)


def check_spaces(header: Header, evaluator: Evaluator, warn: Callable[[str], None]) -> None:
    """A policy acts only in spaces of the kind that it was trained on.

    Raises:
        ConfigError: observation or action space differ; names both.
    """
    trained = header.state.env
    pairs: list[tuple[str, tuple[LeafSpec, ...] | ActionSpec, tuple[LeafSpec, ...] | ActionSpec]] = [
        ("observations", header.leaves, evaluator.leaves),
        ("actions", replace(header.actions, squash="clip"), evaluator.actions),
    ]
    for what, expected, found in pairs:
        if expected != found:
            raise ConfigError(
                Problem(
                    "env",
                    f"this {algo_of(header)} policy was trained on {trained} with {what} {_in_words(expected)}; "
                    f"{evaluator.id} has {_in_words(found)}",
                    "Evaluate it on the environment it was trained on",
                )
            )
    if trained != evaluator.id:
        warn(f"the policy was trained on {trained} and is evaluated on {evaluator.id}; their spaces agree")


def evaluate_checkpoint(config: EvalRunConfig) -> EvalReport:
    """Evaluates a checkpoint on fresh episodes, from the one file alone.

    Args:
        config: names one checkpoint, and a mode (``deterministic`` is true or false).

    Raises:
        CheckpointError: the file is missing or broken.
        ConfigError: the environment has other spaces than the one the policy was trained on, or cannot be made or
            filmed, or the file names code of a stranger's.
    """
    from contextlib import ExitStack, closing
    from pathlib import Path
    from typing import cast

    from rltool import trust
    from rltool.config import load_node
    from rltool.devices import resolve_device
    from rltool.policy import LoadedPolicy
    from rltool.trajectories import Trajectories

    if (
        config.render
        and sys.platform == "linux"
        and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
    ):
        # MuJoCo's viewer ends the whole process there.
        raise ConfigError(
            Problem(
                "render",
                "true opens a window, and neither DISPLAY nor WAYLAND_DISPLAY names one",
                "Leave it out, or run where there is a screen",
            )
        )
    if config.video:
        from rltool.opengl import settle_without_screen

        settle_without_screen()
    device = resolve_device(config.device)
    loaded = LoadedPolicy(Path(cast("str", config.checkpoint)), device=str(device), plugins=config.plugins)
    tree = trust.configuration(loaded.header, config.typed, ("plugins", "env"))
    env_config = load_node("env", cast("dict[str, object]", tree["env"]))
    max_steps = config.max_steps if config.max_steps is not None else loaded.max_steps
    render_mode = "human" if config.render else "rgb_array" if config.video else None
    with ExitStack() as stack:
        evaluator = Evaluator(env_config, num_envs=config.num_envs, device=device, render_mode=render_mode)  # type: ignore[arg-type]
        stack.enter_context(closing(evaluator))
        check_spaces(loaded.header, evaluator, lambda text: print(f"warning: {text}", file=sys.stderr))
        film = stack.enter_context(closing(_film(config, loaded.header))) if config.video else None
        kept = None
        if config.trajectories is not None:
            kept = Trajectories(Path(config.trajectories), evaluator.leaves, evaluator.actions)
            stack.enter_context(kept)
        stack.enter_context(Watchdog(env_config.timeout, _lost))  # type: ignore[attr-defined]
        report = evaluator(
            loaded.algorithm,
            episodes=config.episodes,
            seed=config.seed,
            max_steps=max_steps,
            deterministic=config.deterministic is True,
            # Never an episode that training or its evaluations have seen.
            streams=(Stream.TEST_ENV, Stream.TEST_POLICY),
            frames=loaded.header.frames,
            checkpoint=str(loaded.header.path),
            film=film,
            trajectories=kept,
        )
        if kept is not None:
            kept.write(_about(report, loaded.header, tree))
        return report


def _about(report: EvalReport, header: Header, tree: Mapping[str, object]) -> dict[str, object]:
    """What the file of trajectories says of its episodes."""
    from rltool.runs import versions

    told = ("checkpoint", "deterministic", "seed", "max_steps", "cut")
    return {
        "env": report.env,
        "env_config": tree["env"],
        "algo": algo_of(header),
        "frames": header.frames,
        **{name: getattr(report, name) for name in told},
        "versions": versions(),
    }


def algo_of(header: Header) -> str:
    """Kind of the algorithm of a checkpoint."""
    return str(header.config["algo"]["kind"])  # type: ignore[index, call-overload]


def _lost(fault: EnvironmentFault) -> None:
    """Ends the process, whose main thread hangs in an environment."""
    try:
        reporting.show(fault, "rltool eval")
    finally:
        end_process(fault.exit_code)


def _film(config: EvalRunConfig, header: Header) -> Film:
    from pathlib import Path

    from rltool.video import Film, formats, new_directory

    kinds = formats(config.video_format)
    if config.video_dir is not None:
        return Film(Path(config.video_dir).expanduser().absolute(), config.episodes, kinds)
    return Film(new_directory(header.path, header.run_directory), config.episodes, kinds)

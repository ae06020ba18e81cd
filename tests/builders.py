"""Small objects for tests of the algorithms: configurations from conf/, runtimes without an environment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import compositions
import torch
from tensordict import TensorDict

from rltool.actions import ActionSpec
from rltool.algos.base import Runtime
from rltool.algos.dqn import DQN
from rltool.algos.ppo import PPO
from rltool.algos.sac import SAC
from rltool.choices import best, masked
from rltool.compiling import Compiler
from rltool.schema import RunConfig
from rltool.spaces import OBSERVATION, LeafSpec, mask_spec

DISCRETE = ActionSpec("discrete", (), "int64", (3,), (0,))
BOX = ActionSpec("box", (2,), "float32", low=(-1.0, 0.0), high=(1.0, 4.0))


def run_config(*overrides: str) -> RunConfig:
    """A checked configuration; two environments and no tuned file unless the overrides say otherwise."""
    names = {word.partition("=")[0] for word in overrides}
    words = [word for word in ("env=cartpole", "tuned=none", "env.num_envs=2") if word.partition("=")[0] not in names]
    return compositions.run_config(*words, *overrides)


def runtime(
    config: RunConfig,
    actions: ActionSpec,
    observation: int = 4,
    leaves: Sequence[LeafSpec] | None = None,
    compiled: bool = False,
    notes: list[str] | None = None,
    device: str = "cpu",
) -> Runtime:
    """What an algorithm is built from."""
    notes = [] if notes is None else notes
    return Runtime(
        env="Probe-v0",
        leaves=leaves or (LeafSpec(OBSERVATION, "box", (observation,), "float32"),),
        actions=actions,
        num_envs=config.env.num_envs,
        network=config.network,
        optim=config.optim,
        buffer=config.buffer,
        device=torch.device(device),
        budget=config.total_frames,
        seed=0,
        skip_nonfinite=config.on_nonfinite == "skip",
        compiler=Compiler(compiled, 1, notes.append),
        note=notes.append,
    )


def ppo(
    actions: ActionSpec,
    *overrides: str,
    leaves: Sequence[LeafSpec] | None = None,
    compiled: bool = False,
    notes: list[str] | None = None,
    device: str = "cpu",
) -> PPO:
    """PPO on four numbers unless other leaves are given, without normalisation unless asked for."""
    config = run_config("algo=ppo", "algo.normalize_observation=false", "algo.warmup_frames=0", *overrides)
    run = runtime(config, actions, leaves=leaves, compiled=compiled, notes=notes, device=device)
    return cast("PPO", config.algo.build(run=run))


def dqn(
    *overrides: str,
    actions: ActionSpec = DISCRETE,
    leaves: Sequence[LeafSpec] | None = None,
    compiled: bool = False,
    device: str = "cpu",
) -> DQN:
    """DQN on four numbers unless other leaves are given, and three actions."""
    config = run_config("algo=dqn", *overrides)
    return cast("DQN", config.algo.build(run=runtime(config, actions, leaves=leaves, compiled=compiled, device=device)))


def sac(*overrides: str, compiled: bool = False, device: str = "cpu") -> SAC:
    """SAC on four numbers and two dimensions of action, hidden layers of 16."""
    config = run_config("algo=sac", "network.hidden=[16, 16]", *overrides)
    return cast("SAC", config.algo.build(run=runtime(config, BOX, compiled=compiled, device=device)))


def masked_leaves(actions: ActionSpec) -> tuple[LeafSpec, ...]:
    """Four numbers, and which actions are valid."""
    return LeafSpec(OBSERVATION, "box", (4,), "float32"), mask_spec(actions.size)


def random_masks(actions: ActionSpec, *count: int, seed: int = 0) -> torch.Tensor:
    """Masks ``[*count, size]`` with about half the options of each choice, one at least."""
    source = torch.Generator().manual_seed(seed)
    valid = torch.rand(*count, actions.size, generator=source) < 0.5
    for part in valid.split(list(actions.nvec), -1):
        sure = torch.randint(part.shape[-1], (*count, 1), generator=source)
        part.scatter_(-1, sure, True)
    return valid


def batch(
    num_envs: int,
    steps: int,
    actions: ActionSpec,
    *,
    reward: torch.Tensor | None = None,
    terminated: torch.Tensor | None = None,
    truncated: torch.Tensor | None = None,
    masks: bool = False,
    seed: int = 0,
) -> TensorDict:
    """A batch ``[num_envs, steps]`` of random observations in a row: what follows a step is the next row.

    With ``masks`` it has masks of actions, too, and its actions are valid.
    """
    source = torch.Generator().manual_seed(seed)
    observation = torch.randn(num_envs, steps + 1, 4, generator=source)
    action = actions.random(num_envs * steps, source).unflatten(0, (num_envs, steps))
    if masks:
        valid = random_masks(actions, num_envs, steps + 1, seed=seed)
        action = best(masked(torch.rand(num_envs, steps, actions.size, generator=source), valid[:, :-1]), actions.nvec)
    flags = {"terminated": terminated, "truncated": truncated}
    ends = {
        name: torch.zeros(num_envs, steps, dtype=torch.bool) if flag is None else flag for name, flag in flags.items()
    }
    following = {
        "observation": observation[:, 1:].clone(),
        "reward": (torch.randn(num_envs, steps, generator=source) if reward is None else reward).unsqueeze(-1),
        **{name: flag.unsqueeze(-1) for name, flag in ends.items()},
        "done": (ends["terminated"] | ends["truncated"]).unsqueeze(-1),
    }
    now = {"observation": observation[:, :-1].clone(), "action": action}
    if masks:
        now["action_mask"], following["action_mask"] = valid[:, :-1].clone(), valid[:, 1:].clone()
    return TensorDict({**now, "next": following}, [num_envs, steps])

"""The vectorised version that an environment brings itself (``vector_entry_point`` of its registration)."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv

from rltool.collect import Step
from rltool.contract import EnvContract
from rltool.envs import gym_made, make_env
from rltool.errors import ConfigError, EnvironmentFault, Problem
from rltool.importing import raised
from rltool.schema import GymEnvConfig
from rltool.spaces import MASK, Array, Leaves, flatten, nth
from rltool.vectorized import VectorEnvBase, restarted

# Steps before a trial restart: enough that an environment has moved away from its first observation.
_TRIAL_STEPS = 3


class VectorVersionEnv(VectorEnvBase):
    """An environment's own vectorised version; evaluation steps its single one.

    Its autoreset must leave no step that is none: SAME_STEP, or a ``reset`` with ``options={"reset_mask": …}`` that
    restarts some environments and leaves the others where they are (Gymnasium's meaning of it).

    Args:
        config, seed, session: as for :class:`rltool.vectorized.GymVectorEnv`.

    Raises:
        ConfigError: there is no such version, it cannot be made, has other spaces than the single environment, or
            restarts in another way.
    """

    unsaved = "the vector version"

    def __init__(self, config: GymEnvConfig, *, seed: int, session: int = 0) -> None:
        with closing(make_env(config, 0, tell=True)) as contract:
            super().__init__(config, contract, seed=seed, session=session)
            self._contract = contract
        if contract.spec is None or contract.spec.vector_entry_point is None:
            raise _refused(self.id, "has no vector version of its own")
        make = partial(
            gymnasium.make_vec, num_envs=self.num_envs, vectorization_mode=gymnasium.VectorizeMode.VECTOR_ENTRY_POINT
        )
        self._env: VectorEnv[Any, Any, Any] = gym_made(self.resolved_config, make)
        try:
            self._same_step = self._env.metadata.get("autoreset_mode") == AutoresetMode.SAME_STEP
            self._check(contract)
        except BaseException:
            self.close()
            raise

    @staticmethod
    def single(config: GymEnvConfig, index: int, render_mode: str | None = None) -> EnvContract:
        """One single environment, as evaluation wants it; see :func:`rltool.envs.single_env`."""
        return make_env(config, index, render_mode, evaluation=True)

    def _check(self, contract: EnvContract) -> None:
        pairs = [
            ("observations", self._env.single_observation_space, contract.env.observation_space),
            ("actions", self._env.single_action_space, contract.action_space),
        ]
        for what, vector, single in pairs:
            if vector != single:
                raise _refused(
                    self.id, f"has a vector version with the {what} {vector}, and a single one with {single}"
                )
        if not self._same_step and self.num_envs > 1 and not self._restarts_singly():
            raise _refused(
                self.id,
                "has a vector version that restarts an environment only with the step after its end, which would be learned "
                "as a transition, or all environments at once",
            )

    def _restarts_singly(self) -> bool:
        """Tries whether a reset with a mask leaves the other environments where they are."""
        self.reset()
        noise = np.random.default_rng(self._seeds[0])
        for _ in range(_TRIAL_STEPS):
            self._env.action_space.seed(int(noise.integers(2**31)))
            observation, *_, info = self._env.step(self._env.action_space.sample())
        before = {key: array[1:].copy() for key, array in self._leaves(observation, info).items()}
        try:
            after = self._reset_at(np.array([0]))
        except EnvironmentFault:
            return False
        return all(np.array_equal(array, after[key][1:]) for key, array in before.items() if key != MASK)

    def reset(self) -> Leaves:
        return self._leaves(*self._called("reset", seed=self._seeds[0]))

    def restart(self) -> Leaves:
        return self._leaves(*self._called("reset"))

    def step(self, action: Array) -> Step:
        observation, *outcome, info = self._called("step", action)
        reward, terminated, truncated = (np.asarray(part) for part in outcome)
        leaves = self._leaves(observation, info)
        if not self._same_step:
            return restarted(leaves, reward, terminated, truncated, self._restart)
        ended = np.flatnonzero(terminated | truncated)
        final = [(int(index), self._final(nth(info["final_obs"], int(index)))) for index in ended]
        return Step(leaves, reward, terminated, truncated, final)

    def _reset_at(self, ended: Array) -> Leaves:
        """Restarts the environments with these numbers; the leaves of all."""
        mask = np.zeros(self.num_envs, np.bool_)
        mask[ended] = True
        return self._leaves(*self._called("reset", options={"reset_mask": mask}))

    def _restart(self, ended: Array) -> Leaves:
        return {key: array[ended] for key, array in self._reset_at(ended).items()}

    def _final(self, observation: object) -> Leaves:
        """The leaves of one last observation; what would be valid after it nobody asks."""
        leaves = flatten(observation, self.leaves)
        return leaves | {spec.key: np.ones(spec.shape, np.bool_) for spec in self.leaves if spec.key == MASK}

    def _leaves(self, observation: object, info: Mapping[str, object]) -> Leaves:
        return self._contract.batched(observation, info, self.num_envs)

    def _called(self, method: str, *args: object, **kwargs: object) -> Any:
        try:
            return getattr(self._env, method)(*args, **kwargs)
        except BaseException as error:
            raise EnvironmentFault(f"{self.id}, {self.num_envs} side by side: {method}() {raised(error)}") from error

    def close(self) -> None:
        self._env.close()


def _refused(env_id: str, reason: str) -> ConfigError:
    return ConfigError(Problem("env.backend", f"vector: {env_id} {reason}", "Use env.backend=sync, threads or async"))

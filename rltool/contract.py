"""One environment, held to Gymnasium's contract, its observations as leaves."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any, TypeVar, cast

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.wrappers import FrameStackObservation

from rltool.actions import ActionSpec, action_spec
from rltool.errors import ConfigError, EnvironmentFault, Problem
from rltool.importing import raised
from rltool.simulators import Arrays, read_state, write_state
from rltool.spaces import (
    MASK,
    OBSERVATION,
    Array,
    Key,
    LeafSpec,
    Leaves,
    entry,
    flatten,
    leaf_specs,
    mask_rows,
    mask_spec,
)

# How many steps of each environment are checked in full; after that only what costs nothing.
CHECKED_STEPS = 100

GymEnv = gymnasium.Env[Any, Any]
Observation = Array | dict[str, Array]
Result = TypeVar("Result")


class EnvContract(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Holds one environment to Gymnasium's contract, names what breaks it, and gives its observations as leaves.

    An observation of one leaf goes through as it is; any other becomes a flat mapping from the leaves' names to arrays,
    the mask of actions among them, so that what stands side by side can be batched whatever it was. Rewards come out as
    Python floats; the info mapping is dropped, since gathering it costs more than a simulator step.

    Args:
        env: the environment with its wrappers.
        name: its id, for messages.
        index: which of several side by side it is, for messages.
        keys: entries of the observation to keep; None: all.
        action_mask: where the mask of actions is found (``env.action_mask``).
        skip: leave out entries that no network takes, instead of refusing them.

    Attributes:
        leaves, actions: the specs.
        mask_source: where the mask is found, never ``auto``: a value for ``env.action_mask``.

    Raises:
        EnvironmentFault: it declares no spaces, or resets as before Gymnasium.
        ConfigError: a space that rltool does not take, or a key or mask that is not there.
    """

    def __init__(
        self,
        env: GymEnv,
        name: str,
        index: int,
        *,
        keys: list[str] | None = None,
        action_mask: str = "none",
        skip: bool = False,
    ) -> None:
        super().__init__(env)
        self._id, self._name = name, f"environment {index} ({name}, {type(env.unwrapped).__name__})"
        for space in ("observation_space", "action_space"):
            if not isinstance(getattr(env, space, None), gymnasium.Space):
                raise EnvironmentFault(f"{self._name}: it declares no {space}. Set self.{space} in its __init__")
        parameters = inspect.signature(env.unwrapped.reset).parameters
        if not {"seed", "options"} <= set(parameters) and not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            raise EnvironmentFault(f"{self._name}: reset() must take seed and options, found ({', '.join(parameters)})")
        self._index, self._stack = index, _stacked(env)
        self.actions: ActionSpec = action_spec(env.action_space, name)
        self.mask_source = self._find_mask(action_mask, name)
        in_observation = self.mask_source not in ("none", "info", "method")
        self._mask_key: Key | None = (*OBSERVATION, *self.mask_source.split(".")) if in_observation else None
        inputs = leaf_specs(
            env.observation_space, name, keys=keys, without=self._mask_key, stack=self._stack, skip=skip
        )
        if not inputs or any(math.prod(spec.shape) == 0 for spec in inputs):
            raise ConfigError(
                Problem("env.id", f"{name} gives a policy nothing to observe: its space is {env.observation_space}")
            )
        self._inputs = inputs
        self._masks: Callable[[], object] | None = None
        if self.mask_source == "method":
            self._masks = env.get_wrapper_attr("action_masks")
        self._masked = self.mask_source != "none"
        self.leaves: tuple[LeafSpec, ...] = (*inputs, mask_spec(self.actions.size)) if self._masked else inputs
        self._plain = inputs[0].shape if not self._masked and [spec.key for spec in inputs] == [OBSERVATION] else None
        if self._plain is None:
            self.observation_space = spaces.Dict({spec.name: _storage(spec) for spec in self.leaves})
        self._steps = 0
        # The type that a plain observation was found to have: as long as shape and type stay, nothing else is looked at.
        # What must be one of a few values is looked at each time.
        self._dtype: object = None
        self._numeric = self._plain is not None and inputs[0].kind in ("box", "image")

    def as_leaves(self, observation: Any) -> Leaves:
        """The leaves of what :meth:`reset` or :meth:`step` gave, or of a batch of them."""
        return leaves_of(observation, self.leaves)

    def batched(self, observation: object, info: Mapping[str, object], count: int) -> Leaves:
        """The leaves ``[count, *shape]`` of what a vectorised version of this environment gave, by its own spaces.

        Raises:
            EnvironmentFault: something is missing or has another shape or type than this environment's.
        """
        where = f"{self._id}, {count} side by side"
        try:
            leaves = flatten(observation, self._inputs)
            if self._masked:
                mask = entry(observation, self._mask_key[1:]) if self._mask_key is not None else info[MASK[0]]
                leaves[MASK] = np.asarray(mask).astype(np.bool_)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise EnvironmentFault(f"{where}: an observation or a mask of actions lacks a part: {error!r}") from error
        for spec in self.leaves:
            found = leaves[spec.key]
            fits = found.size == count * math.prod(spec.shape) and np.can_cast(found.dtype, spec.dtype, "same_kind")
            if not fits:
                raise EnvironmentFault(
                    f"{where}: {spec.name} must have shape {(count, *spec.shape)} and a type that fits {spec.dtype}, found "
                    f"shape {found.shape} of {found.dtype}"
                )
            leaves[spec.key] = found.reshape(count, *spec.shape)
        return leaves

    def asked(self, method: str) -> str:
        """Names the environment and what it is doing while a method of this class runs."""
        return f"{self._name}: {f'step {self._steps + 1}' if method == 'step' else 'reset()'}"

    def reset(
        self, *, seed: int | None = None, options: dict[str, object] | None = None
    ) -> tuple[Observation, dict[str, object]]:
        observation, info = self._reset(seed, options)
        return self._answer(observation, info, "reset()", over=False), {}

    def _reset(self, seed: int | None, options: dict[str, object] | None) -> tuple[Any, dict[str, Any]]:
        try:
            result = self.env.reset(seed=seed, options=options)
        except BaseException as error:
            raise EnvironmentFault(f"{self._name}: reset() {raised(error)}") from error
        if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):
            raise EnvironmentFault(f"{self._name}: reset() must return (observation, info), found {_shown(result)}")
        return result

    def step(self, action: object) -> tuple[Observation, float, bool, bool, dict[str, object]]:
        try:
            result: Any = self.env.step(action)  # whatever the environment makes of it
        except BaseException as error:
            raise EnvironmentFault(f"{self._name}: step {self._steps + 1} {raised(error)}") from error
        if not (isinstance(result, tuple) and len(result) == 5):
            raise EnvironmentFault(
                f"{self._name}: step() must return (observation, reward, terminated, truncated, info), found {_shown(result)}"
            )
        observation, reward, terminated, truncated, info = result
        self._steps += 1
        if not isinstance(info, dict):
            raise EnvironmentFault(
                f"{self._name}: the info of step {self._steps} must be a dict, found {type(info).__name__}"
            )
        if type(terminated) is not bool:
            terminated = self._flag(terminated, "terminated")
        if type(truncated) is not bool:
            truncated = self._flag(truncated, "truncated")
        if (
            not self._numeric
            or self._steps <= CHECKED_STEPS
            or getattr(observation, "shape", None) != self._plain
            or observation.dtype != self._dtype
        ):
            observation = self._answer(observation, info, f"step {self._steps}", over=terminated)
        if terminated or truncated:
            # An environment may fill one array again and again; its last observation must outlive the reset that follows.
            observation = deepcopy(observation)
        return (
            observation,
            reward if type(reward) is float else self._number(reward),
            terminated,
            truncated,
            {},
        )

    def read_state(self) -> Arrays | None:
        """The state in the middle of an episode, as arrays by name; None where a part of it cannot be saved."""
        return self._called("reading its state", read_state, self.env)

    def write_state(self, states: Sequence[Arrays]) -> None:
        """Goes on from where environments side by side were: of their states takes its own.

        Raises:
            EnvironmentFault: it is another environment's, or the environment's own code refuses it.
        """
        self._called("putting back its state", write_state, self.env, states[self._index])

    def _called(self, doing: str, call: Callable[..., Result], *arguments: object) -> Result:
        try:
            return call(*arguments)
        except BaseException as error:
            raise EnvironmentFault(f"{self._name}: {doing} {raised(error)}") from error

    def close(self) -> None:
        """Closes the environment; what it raises then ends nothing."""
        try:
            self.env.close()
        except BaseException as error:
            print(f"warning: {self._name}: close() {raised(error)}", file=sys.stderr)

    def render(self) -> Any:
        """What the environment draws; its random numbers stay where they are (some wrappers draw noise from them)."""
        generator = self.env.unwrapped.np_random
        state = generator.bit_generator.state
        try:
            return self.env.render()
        finally:
            generator.bit_generator.state = state

    def _answer(self, observation: object, info: object, when: str, *, over: bool) -> Observation:
        """Checks an observation, and gives it as it goes on from here."""
        try:
            leaves = flatten(observation, self._inputs)
        except ValueError as error:
            raise EnvironmentFault(
                f"{self._name}: the observation of {when} cannot be an array: {error}. Its space is {self.env.observation_space}"
            ) from error
        except (KeyError, IndexError, TypeError) as error:
            raise EnvironmentFault(
                f"{self._name}: the observation of {when} lacks a part of its space {self.env.observation_space}: {error!r}"
            ) from error
        for spec in self._inputs:
            self._check(leaves[spec.key], spec, when)
        if self._plain is not None:
            self._dtype = leaves[OBSERVATION].dtype
            return cast("Observation", observation)
        named = {spec.name: leaves[spec.key] for spec in self._inputs}
        if self._masked:
            named[MASK[0]] = self._mask(observation, info, when, over=over)
        return named

    def _check(self, found: Array, spec: LeafSpec, when: str) -> None:
        if found.shape != spec.shape or not np.can_cast(found.dtype, spec.dtype, casting="same_kind"):
            raise EnvironmentFault(
                f"{self._name}: {spec.name} of {when} must have shape {spec.shape} and a type that fits {spec.dtype}, "
                f"found shape {found.shape} of {found.dtype}. Declare the right observation_space or mend the environment"
            )
        if spec.kind == "binary" and ((found < 0) | (found > 1)).any():
            raise EnvironmentFault(f"{self._name}: {spec.name} of {when} must be 0 or 1, found {found.tolist()}")
        if spec.kind == "discrete":
            low = np.reshape(spec.start, spec.shape)
            high = low + np.reshape(spec.nvec, spec.shape) - 1
            if ((found < low) | (found > high)).any():
                raise EnvironmentFault(
                    f"{self._name}: {spec.name} of {when} must be in {low.tolist()} … {high.tolist()}, found {found.tolist()}"
                )

    def _number(self, reward: object) -> float:
        number = _one_number(reward)
        if number is None:
            raise EnvironmentFault(
                f"{self._name}: the reward of step {self._steps} must be one number, found {reward!r}"
            )
        return number

    def _flag(self, value: object, name: str) -> bool:
        number = _one_number(value)
        if number not in (0, 1):
            raise EnvironmentFault(f"{self._name}: {name} of step {self._steps} must be True or False, found {value!r}")
        return bool(number)

    # ------------------------------------------------------------------------------------------- the mask of actions

    def _find_mask(self, choice: str, name: str) -> str:
        """Where the mask of actions is found.

        Raises:
            ConfigError: it is asked for and not there.
        """
        if choice == "none" or (choice == "auto" and self.actions.continuous):
            return "none"
        space = self.env.observation_space
        has_method = callable(getattr(self.env.unwrapped, "action_masks", None)) or self.env.has_wrapper_attr(
            "action_masks"
        )
        sizes = (self.actions.size, self._stack * self.actions.size)
        if choice == "auto":
            part = _entry(space, MASK[0])
            if part is not None and part.shape is not None and np.prod(part.shape) in sizes:
                return MASK[0]
            if has_method:
                return "method"
            return "info" if MASK[0] in self._reset(0, None)[1] else "none"
        problem = None
        if self.actions.continuous:
            problem = f"masks are for choices, and {name} has the actions {self.env.action_space}"
        elif choice == "method" and not has_method:
            problem = f"{name} has no method action_masks()"
        elif choice == "info" and not self._index and MASK[0] not in self._reset(0, None)[1]:
            problem = f"the info of {name} has no action_mask"
        elif choice not in ("method", "info"):
            part = _entry(space, choice)
            if part is None or part.shape is None:
                problem = f"expected auto, none, info, method or an entry of the observation, found {choice!r}; {name} has {space}"
            elif np.prod(part.shape) not in sizes:
                problem = f"the mask of {self.env.action_space} has {self.actions.size} entries, and {choice} of {name} is {part}"
        if problem is not None:
            raise ConfigError(Problem("env.action_mask", problem, "auto finds out; none goes without"))
        return choice

    def _mask(self, observation: object, info: object, when: str, *, over: bool) -> Array:
        """Which choices are valid, ``[size]``; of an episode that is over, any will do."""
        if self._mask_key is not None:
            value: object = entry(observation, self._mask_key[1:])
            if self._stack > 1 and np.asarray(value).size != self.actions.size:
                value = np.asarray(value)[-1]  # of stacked frames the newest
        elif self._masks is not None:
            try:
                value = self._masks()
            except BaseException as error:
                raise EnvironmentFault(f"{self._name}: action_masks() after {when} {raised(error)}") from error
        else:
            value = cast("Mapping[str, object]", info).get(MASK[0])
            if value is None and over:
                return np.ones(self.actions.size, np.bool_)
            if value is None:
                raise EnvironmentFault(
                    f"{self._name}: the info of {when} lacks action_mask. Give it at every step, or set env.action_mask=none"
                )
        (mask,) = mask_rows(value, 1)
        if mask.size != self.actions.size or mask.dtype.kind not in "biuf":
            raise EnvironmentFault(
                f"{self._name}: the mask of actions after {when} must have {self.actions.size} entries of 0 or 1 for "
                f"{self.env.action_space}, found {mask.size} of {mask.dtype}"
            )
        valid = mask.astype(np.bool_)
        starts = np.cumsum([0, *self.actions.nvec[:-1]])
        if not over and not np.logical_or.reduceat(valid, starts).all():
            raise EnvironmentFault(
                f"{self._name}: the mask of actions after {when} leaves no valid action, and the episode goes on"
            )
        return cast("Array", valid)


def _one_number(value: object) -> float | None:
    """The number that a value is, whatever holds it; None where it is none, or several."""
    try:
        array = np.asarray(value)
    except (TypeError, ValueError):  # lists of unlike lengths
        return None
    return float(array.reshape(())) if array.size == 1 and array.dtype.kind in "fiub" else None


def leaves_of(observation: Any, specs: tuple[LeafSpec, ...]) -> Leaves:
    """The leaves of an observation as :class:`EnvContract` gives it, single or batched (no copy)."""
    if isinstance(observation, Mapping):
        return {spec.key: np.asarray(observation[spec.name]) for spec in specs}
    return {specs[0].key: np.asarray(observation)}


def _storage(spec: LeafSpec) -> spaces.Box:
    """A space whose batches hold a leaf; its bounds say nothing."""
    if spec.kind == "mask":
        return spaces.Box(0, 1, spec.shape, np.uint8)
    dtype = np.dtype(spec.dtype)
    low, high = (-np.inf, np.inf) if dtype.kind == "f" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    return spaces.Box(low, high, spec.shape, dtype.type)


def _stacked(env: GymEnv) -> int:
    """How many frames the outermost frame-stacking wrapper stacks, or the environment itself (its ``stacked``)."""
    while isinstance(env, gymnasium.Wrapper):
        if isinstance(env, FrameStackObservation):
            return int(env.stack_size)
        env = env.env
    return int(getattr(env, "stacked", 1))


def _entry(space: spaces.Space[Any], dotted: str) -> spaces.Space[Any] | None:
    for part in dotted.split("."):
        if isinstance(space, spaces.Dict) and part in space.spaces:
            space = space.spaces[part]
        elif isinstance(space, spaces.Tuple) and part.isdigit() and int(part) < len(space.spaces):
            space = space.spaces[int(part)]
        else:
            return None
    return space


def _shown(result: object) -> str:
    if isinstance(result, tuple):
        return f"a tuple of {len(result)}: ({', '.join(type(part).__name__ for part in result)})"
    return type(result).__name__

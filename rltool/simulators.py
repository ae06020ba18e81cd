"""The state of a simulator in the middle of an episode, as arrays: what an exact resume needs of an environment.

Known are Gymnasium's classic control and MuJoCo environments under its own wrappers, and every environment or wrapper
that has the two methods ``state_dict()`` and ``load_state_dict(state)``, for mappings from names to NumPy arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium.wrappers import OrderEnforcing, TimeLimit

from rltool.spaces import Array

Arrays = dict[str, Array]
GymEnv = gymnasium.Env[Any, Any]

# Gymnasium's wrappers that keep nothing from one step to the next.
_STATELESS = tuple(f"gymnasium.wrappers.transform_{what}" for what in ("observation", "action", "reward"))
_WORD = 2**64


@dataclass(frozen=True)
class _Part:
    """How the state of one layer of an environment is read and put back."""

    read: Callable[[], Arrays]
    write: Callable[[Mapping[str, Array]], object]


def unknown_part(env: GymEnv) -> str:
    """The first wrapper or environment, from the outside, whose state cannot be saved; empty where all can."""
    for layer in _layers(env):
        if _part(layer) is None:
            return type(layer).__name__
    generator = getattr(getattr(env.unwrapped, "np_random", None), "bit_generator", None)
    return "" if isinstance(generator, np.random.PCG64) else f"the random generator of {type(env.unwrapped).__name__}"


def read_state(env: GymEnv) -> Arrays | None:
    """The state of an environment and its wrappers, ``<layer>.<name>``; None where a part cannot be saved.

    Args:
        env: after its first reset.
    """
    if unknown_part(env):
        return None
    state: Arrays = {"np_random": _generator_state(env.unwrapped.np_random)}
    for depth, layer in enumerate(_layers(env)):
        part = _part(layer)
        assert part is not None
        state |= {f"{depth}.{name}": np.asarray(value) for name, value in part.read().items()}
    return state


def write_state(env: GymEnv, state: Mapping[str, Array]) -> None:
    """Puts back what :func:`read_state` gave.

    Args:
        env: made of the same layers, after a reset.

    Raises:
        KeyError, ValueError: the state is another environment's.
    """
    for depth, layer in enumerate(_layers(env)):
        part = _part(layer)
        if part is None:
            raise ValueError(f"{type(layer).__name__} takes no state")
        prefix = f"{depth}."
        part.write({name[len(prefix) :]: value for name, value in state.items() if name.startswith(prefix)})
    _set_generator(env.unwrapped.np_random, state["np_random"])


def _layers(env: GymEnv) -> list[GymEnv]:
    """The wrappers, outermost first, then the environment itself."""
    layers = [env]
    while isinstance(env, gymnasium.Wrapper):
        env = env.env
        layers.append(env)
    return layers


def _part(layer: GymEnv) -> _Part | None:
    if callable(getattr(layer, "state_dict", None)) and callable(getattr(layer, "load_state_dict", None)):
        return _Part(layer.state_dict, layer.load_state_dict)  # type: ignore[attr-defined]
    module = type(layer).__module__
    if isinstance(layer, gymnasium.Wrapper):
        if type(layer) is TimeLimit:
            return _attributes(layer, "_elapsed_steps")
        if type(layer) is OrderEnforcing:
            return _attributes(layer, "_has_reset")
        return _attributes(layer) if module in _STATELESS else None
    if module.startswith("gymnasium.envs.classic_control."):
        return _attributes(layer, *(name for name in ("state", "steps_beyond_terminated") if hasattr(layer, name)))
    if module.startswith("gymnasium.envs.mujoco."):
        return _Part(partial(_read_mujoco, layer), partial(_write_mujoco, layer))
    return None


def _attributes(layer: GymEnv, *names: str) -> _Part:
    """Attributes that are a number, a row of numbers, or None (which is left out)."""

    def read() -> Arrays:
        values = {name: getattr(layer, name) for name in names}
        return {name: np.array(value) for name, value in values.items() if value is not None}

    def write(state: Mapping[str, Array]) -> None:
        for name in names:
            value = state.get(name)
            scalar = value is not None and value.ndim == 0
            setattr(layer, name, value.item() if scalar and value is not None else value)

    return _Part(read, write)


def _read_mujoco(layer: GymEnv) -> Arrays:
    import mujoco

    model, data = layer.model, layer.data  # type: ignore[attr-defined]
    state = np.empty(mujoco.mj_stateSize(model, mujoco.mjtState.mjSTATE_INTEGRATION))
    mujoco.mj_getState(model, data, state, mujoco.mjtState.mjSTATE_INTEGRATION)
    # What is derived from the state lags behind it by a part of a step, and the reward of Ant and Humanoid is made of
    # it: computing it anew would change the next reward.
    return {"integration": state} | {name: array.copy() for name, array in _derived(model, data).items()}


def _write_mujoco(layer: GymEnv, state: Mapping[str, Array]) -> None:
    import mujoco

    model, data = layer.model, layer.data  # type: ignore[attr-defined]
    mujoco.mj_setState(model, data, state["integration"], mujoco.mjtState.mjSTATE_INTEGRATION)
    for name, array in _derived(model, data).items():
        array[...] = state[name]


def _derived(model: Any, data: Any) -> Arrays:
    """The arrays of MuJoCo's data whose size the model settles; those of contacts and constraints are made each step."""
    import mujoco

    empty = mujoco.MjData(model)
    names = [name for name in dir(empty) if isinstance(getattr(empty, name), np.ndarray)]
    return {name: getattr(data, name) for name in names if getattr(empty, name).size}


def _generator_state(generator: np.random.Generator) -> Array:
    """PCG64's state as six numbers of 64 bits (safetensors knows no longer ones)."""
    state = generator.bit_generator.state
    numbers = [state["state"]["state"], state["state"]["inc"]]
    words = [word for number in numbers for word in divmod(number, _WORD)]
    return np.array([*words, state["has_uint32"], state["uinteger"]], np.uint64)


def _set_generator(generator: np.random.Generator, words: Array) -> None:
    high, low, inc_high, inc_low, has_uint32, uinteger = (int(word) for word in words)
    generator.bit_generator.state = {
        "bit_generator": "PCG64",
        "state": {"state": high * _WORD + low, "inc": inc_high * _WORD + inc_low},
        "has_uint32": has_uint32,
        "uinteger": uinteger,
    }

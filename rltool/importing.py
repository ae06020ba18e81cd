"""Modules and objects that a configuration names, also from the working directory."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Container
from importlib import import_module
from pathlib import Path
from types import ModuleType

from rltool.errors import ConfigError, Overtime, Problem
from rltool.tracebacks import users_trace

# A module that an environment may lack -> the extra of rltool that brings it.
EXTRAS = {
    "box2d": "box2d",
    "gymnasium[box2d]": "box2d",
    "ale_py": "atari",
    "ale-py": "atari",
    "opencv": "atari",
    "cv2": "atari",
    "minigrid": "minigrid",
    "envpool": "envpool",
    "shimmy": "dm_control",
    "dm_control": "dm_control",
    "dm-control": "dm_control",
    "imageio_ffmpeg": "video",
    "torchvision": "vision",
    "wandb": "wandb",
    "matplotlib": "plots",
    "uniplot": "plots",
    "optuna": "sweep",
    "plotly": "sweep",
    "submitit": "slurm",
    "hydra_ray": "ray",
}


def import_user_module(name: str, path: str) -> ModuleType:
    """Imports a module that a config names, also from the working directory.

    Args:
        name: the module.
        path: the key that names it, for the message.

    Raises:
        ConfigError: there is no such module, or it raises while it is imported.
    """
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)
    try:
        return import_module(name)
    except ImportError as error:
        hint = extra_for(f"{name} {error}") or "Install it, or run where its file lies"
        raise ConfigError(Problem(path, f"module {name} cannot be imported: {error}", hint)) from error
    except BaseException as error:
        raise ConfigError(Problem(path, f"importing module {name} {raised(error)}")) from error


def import_object(entry_point: str, path: str) -> object:
    """What ``module:name`` stands for.

    Raises:
        ConfigError: the module cannot be imported, or has no such name.
    """
    module, _, name = entry_point.partition(":")
    try:
        return getattr(import_user_module(module, path), name)
    except AttributeError as error:
        raise ConfigError(Problem(path, f"module {module} has no {name}: {error}")) from error


def base_among(cls: object, names: Container[str], package: str) -> str | None:
    """The name of the first of a class and its bases that is among the names and of a package; None where none is."""
    bases = getattr(cls, "__mro__", ())
    return next((b.__name__ for b in bases if b.__name__ in names and b.__module__.startswith(f"{package}.")), None)


def missing_package(path: str, name: str, error: Exception) -> ConfigError:
    """The refusal of what needs a package that is not there; names the extra that brings it, where one does.

    Args:
        path: the key that names it.
        name: what needs the package.
        error: what its import raised.
    """
    text = f"{name} needs a package that is not installed: {error}"
    return ConfigError(Problem(path, text, extra_for(f"{name} {error}")))


def extra_for(message: str) -> str:
    """Which extra of rltool brings the package that a message speaks of; empty where none does."""
    for module, extra in EXTRAS.items():
        if module in message.lower():
            return f"Install the extra: pip install 'rltool[{extra}]'"
    return ""


def raised(error: BaseException) -> str:
    """What code of the user's raised, and the line of it.

    Such code is called under ``except BaseException``: sys.exit() and the panics of extensions are no ``Exception``.

    Raises:
        KeyboardInterrupt: it was Ctrl-C, which is no fault of the code's.
    """
    if isinstance(error, KeyboardInterrupt):
        raise error
    frames = traceback.extract_tb(users_trace(error.__traceback__) or error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    if isinstance(error, Overtime):
        return f"{error}{where}"
    try:
        text = f": {error}" if str(error) else ""
    except Exception as unreadable:
        text = f" (its text raises {type(unreadable).__name__})"
    return f"raised {type(error).__name__}{text}{where}"

"""rltool trains reinforcement-learning agents from a config.

``from rltool import load_policy, train``: both are imported on first use, so that ``import rltool`` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rltool.api import train as train
    from rltool.policy import load_policy as load_policy

__version__ = "0.1.0"
__all__ = ["__version__", "load_policy", "train"]

_EXPORTS = {"load_policy": "rltool.policy", "train": "rltool.api"}


def __getattr__(name: str) -> object:
    if name in _EXPORTS:
        return getattr(import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

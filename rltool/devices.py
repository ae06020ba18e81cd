"""Where a run computes, and the libraries' own noise."""

from __future__ import annotations

import logging
import os
import re
import warnings

import torch

from rltool.errors import ConfigError, Problem
from rltool.opengl import settle as settle_opengl


def resolve_device(name: str) -> torch.device:
    """``auto``, ``cpu``, ``cuda`` or ``cuda:N`` to a device that is there.

    Raises:
        ConfigError: another name, or CUDA was asked for by name and there is none, or fewer devices than that.
    """
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", name):
        raise ConfigError(Problem("device", f"expected auto, cpu, cuda or cuda:N, found {name!r}"))
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        return torch.device("cuda" if count else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and (count == 0 or (device.index or 0) >= count):
        found = f"this machine has {count} CUDA devices" if count else "torch finds no CUDA device"
        raise ConfigError(Problem("device", f"{name} was asked for, but {found}", "Use device=cpu or device=auto"))
    return device


def describe_device(device: torch.device, asked: str, reason: str = "") -> str:
    """The device in words, and that ``auto`` chose it, and why."""
    name = f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)
    return f"{name}, chosen by device=auto{f': {reason}' if reason else ''}" if asked == "auto" else name


def quieten_libraries() -> None:
    """Turns off messages of the libraries that tell a user of rltool nothing he could act on."""
    settle_opengl()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import torchrl  # noqa: F401 - sets its log level when it is imported

    os.environ.setdefault("RL_LOGGING_LEVEL", "WARNING")  # torchrl reads it as it is imported, which comes later
    logging.getLogger("torchrl").setLevel(os.environ["RL_LOGGING_LEVEL"])
    warnings.filterwarnings("ignore", message=".*inline_inbuilt_nn_modules.*", category=FutureWarning)
    # Our targets follow without its updaters.
    warnings.filterwarnings("ignore", message="No target network updater", category=UserWarning)

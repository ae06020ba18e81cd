"""How much memory may be taken for what a file describes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from rltool.errors import CheckpointError

_MAKERS = (torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn, torch.arange, torch.eye)

# Building takes a few times what is then loaded (first weights, targets, the flat copy an optimiser steps on).
_TIMES, _ALWAYS = 32, 2**26
# What a tensor costs at least, with the module around it: so many small ones are noticed, too.
_LEAST = 2**14


@contextmanager
def limited(path: Path) -> Iterator[None]:
    """While it lasts, tensors that are made take no more memory than the weights in a checkpoint account for.

    What a checkpoint says of its networks is only compared with its tensors once both are there; until then ten bytes of
    JSON could ask for a terabyte.

    Raises:
        CheckpointError: more is asked for.
    """
    room = _ALWAYS + _TIMES * path.stat().st_size
    try:
        with _Limit(room):
            yield
    except _TooMuch as error:
        raise CheckpointError(
            f"{path} describes networks that its weights cannot fill: they need more than {room / 2**20:,.0f} MiB"
        ) from error


class _TooMuch(Exception):
    """More memory is asked for than there is room."""


class _Limit(TorchFunctionMode):
    """Counts the bytes of tensors before they are made."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self._room = room

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _MAKERS:
            sizes = {name: value for name, value in kwargs.items() if name not in ("generator", "out", "pin_memory")}
            shape = func(*args, **{**sizes, "device": "meta"})  # takes no memory
            self._room -= max(shape.numel() * shape.element_size(), _LEAST)
            if self._room < 0:
                raise _TooMuch
        return func(*args, **kwargs)

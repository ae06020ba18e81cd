"""Memory and disk space that can still be had; what would not fit is refused before training starts. No torch."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import gettempdir

from rltool.errors import ConfigError, Problem

# Of the two versions of control groups: where they lie, their limits, what is in use, and the part of that which the
# kernel gives back where it is needed: files read a while ago.
_GROUPS = {
    "": ("sys/fs/cgroup", ("memory.max", "memory.high"), "memory.current", "inactive_file"),
    "memory": ("sys/fs/cgroup/memory", ("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file"),
}


def check_memory(needed: int, key: str, what: str, hint: str) -> None:
    """Asks whether so many bytes of memory can be had now.

    Args:
        needed: bytes.
        key: the dotted key that asks for them.
        what: the thing that needs them, in words.
        hint: what to do where they are not there.

    Raises:
        ConfigError: they cannot; names the bytes needed and the bytes free.
    """
    free = free_memory()
    if free is not None and needed > free:
        raise ConfigError(Problem(key, f"{what} need {_gib(needed)}, and {_gib(free)} of memory are free", hint))


def check_disk(needed: int, key: str, what: str, hint: str) -> None:
    """Asks whether so many bytes fit into the directory for temporary files; arguments as for :func:`check_memory`.

    A mapped file takes its room only as it is written, and a write that finds none ends the process.

    Raises:
        ConfigError: they do not; names the bytes needed and the bytes free.
    """
    directory = gettempdir()
    free = shutil.disk_usage(directory).free
    if needed > free:
        raise ConfigError(
            Problem(key, f"{what} need {_gib(needed)}, and {_gib(free)} of disk are free in {directory}", hint)
        )


def resident_memory() -> int | None:
    """Bytes of this process that are in memory. None where the system does not say; Linux does."""
    with suppress(OSError):
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return None


def free_memory(root: Path = Path("/")) -> int | None:
    """Bytes of memory that can still be had: what is free on the machine, or what a control group (a container, a batch
    job) leaves where that is less. None where the system does not say; Linux does.

    Args:
        root: where ``proc`` and ``sys`` lie.
    """
    return min((*_on_machine(root), *_left_in_groups(root)), default=None)


def _on_machine(root: Path) -> Iterator[int]:
    for name, size in _pairs(root / "proc/meminfo").items():
        if name == "MemAvailable:":
            yield size * 1024


def _left_in_groups(root: Path) -> Iterator[int]:
    """What is left under each limit of the groups that this process is in."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in _GROUPS.keys() & controllers.split(","):
            place, limits, usage, cache = _GROUPS[controller]
            home = root / place
            group = home / path.lstrip("/")
            # The groups above limit it too. In a container the path may be the host's, and then only the last one is there.
            for directory in (group, *(parent for parent in group.parents if parent.is_relative_to(home))):
                bounds = [_text(directory / limit).strip() for limit in limits]
                used = _text(directory / usage).strip()
                if used:
                    kept = int(used) - _pairs(directory / "memory.stat").get(cache, 0)
                    yield from (max(int(bound) - kept, 0) for bound in bounds if bound.isdigit())


def _pairs(path: Path) -> dict[str, int]:
    """Names and numbers of a file with one of each a line."""
    return {words[0]: int(words[1]) for words in map(str.split, _text(path).splitlines()) if len(words) > 1}


def _text(path: Path) -> str:
    """What a file of the kernel's says; nothing where there is no such file, or none that may be read."""
    try:
        return path.read_text()
    except OSError:
        return ""


def _gib(size: int) -> str:
    return f"{size / 2**30:,.1f} GiB"

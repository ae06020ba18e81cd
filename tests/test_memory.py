"""How much memory can still be had, read from a file system like the kernel's; and that a run keeps to what it has."""

from __future__ import annotations

from pathlib import Path

import pytest

from rltool.memory import free_memory

GIB = 2**30
MEMINFO = f"MemTotal:       {64 * GIB // 1024} kB\nMemAvailable:   {32 * GIB // 1024} kB\nHugePages_Total:  0\n"


def written(root: Path, files: dict[str, str]) -> Path:
    for name, text in {"proc/meminfo": MEMINFO, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


V2, V1 = "sys/fs/cgroup", "sys/fs/cgroup/memory"


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({}, 32),
        # A container sees its own group as the root.
        ({"proc/self/cgroup": "0::/\n", f"{V2}/memory.max": f"{8 * GIB}\n", f"{V2}/memory.high": "max\n", f"{V2}/memory.current": f"{5 * GIB}\n"}, 3),
        # Files read a while ago are given back where they are in the way.
        ({"proc/self/cgroup": "0::/\n", f"{V2}/memory.max": f"{8 * GIB}\n", f"{V2}/memory.current": f"{5 * GIB}\n", f"{V2}/memory.stat": f"anon 7\ninactive_file {2 * GIB}\n"}, 5),
        # The lower of two limits, of a group above.
        ({"proc/self/cgroup": "0::/job/step\n", f"{V2}/job/step/memory.max": "max\n", f"{V2}/job/step/memory.current": "0\n", f"{V2}/job/memory.max": f"{8 * GIB}\n", f"{V2}/job/memory.high": f"{6 * GIB}\n", f"{V2}/job/memory.current": f"{2 * GIB}\n"}, 4),
        # Nothing is left, and more than that is in use.
        ({"proc/self/cgroup": "0::/\n", f"{V2}/memory.high": f"{1 * GIB}\n", f"{V2}/memory.current": f"{2 * GIB}\n"}, 0),
        # The first version; the host's path, of which the container shows the end.
        ({"proc/self/cgroup": "9:name=systemd:/\n4:memory:/docker/abc\n", f"{V1}/memory.limit_in_bytes": f"{4 * GIB}\n", f"{V1}/memory.usage_in_bytes": f"{3 * GIB}\n", f"{V1}/memory.stat": f"total_inactive_file {1 * GIB}\n"}, 2),
        ({"proc/self/cgroup": "5:cpu,memory:/a\n", f"{V1}/a/memory.limit_in_bytes": f"{4 * GIB}\n", f"{V1}/a/memory.usage_in_bytes": f"{3 * GIB}\n"}, 1),
        # No limit.
        ({"proc/self/cgroup": "4:memory:/\n", f"{V1}/memory.limit_in_bytes": "9223372036854771712\n", f"{V1}/memory.usage_in_bytes": "5\n"}, 32),
        ({"proc/self/cgroup": "0::/\n", f"{V2}/memory.max": "max\n", f"{V2}/memory.current": "5\n"}, 32),
        # A limit above what the machine has.
        ({"proc/self/cgroup": "0::/\n", f"{V2}/memory.max": f"{100 * GIB}\n", f"{V2}/memory.current": "5\n"}, 32),
    ],
)  # fmt: skip
def test_the_lowest_limit_counts(tmp_path: Path, files: dict[str, str], free: int) -> None:
    assert free_memory(written(tmp_path, files)) == free * GIB


def test_where_the_system_does_not_say_nothing_is_known(tmp_path: Path) -> None:
    assert free_memory(tmp_path) is None


def test_this_machine_has_some() -> None:
    free = free_memory()
    assert free is None or 0 < free < 2**50

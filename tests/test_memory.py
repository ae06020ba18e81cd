"""How much memory can still be had, read from a file system like the kernel's; and that a run keeps to what it has."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from probes import run

from rltool.collect import Collector
from rltool.errors import ConfigError
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


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="only Linux says how much memory is in use")
def test_a_longer_run_takes_no_more_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From 5,000 to 20,000 frames, with a point every 500 and histograms every 1,000 of them."""
    sizes: list[tuple[int, int]] = []
    collect = Collector.collect

    def watched(self: Collector) -> object:
        batch = collect(self)
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        sizes.append((self.frames, pages * os.sysconf("SC_PAGE_SIZE")))
        return batch

    monkeypatch.setattr(Collector, "collect", watched)
    words = ("env.num_envs=16", "algo.frames_per_batch=400", "algo.updates_per_frame=0.01", "buffer.size=1000")
    words = (*words, "logging=tensorboard", "logging.interval=500", "logging.histogram_interval=1000")
    run(tmp_path, "dqn", *words, "total_frames=20_000", "save.interval=5000", "save.keep=1")
    early = next(size for frames, size in sizes if frames >= 5000)
    assert sizes[-1][0] == 20_000
    assert sizes[-1][1] - early < 30e6


@pytest.mark.parametrize(
    ("algo", "words", "said"),
    [
        # An observation of four numbers, twice, and twice as input of a network; an action, a reward, three flags.
        ("ppo", ["algo.frames_per_batch=2e9"], r"algo.frames_per_batch: 2,000,000,000 frames at a time need 147.1 GiB"),
        ("dqn", ["algo.frames_per_batch=2e9"], r"algo.frames_per_batch: 2,000,000,000 frames at a time need 87.5 GiB"),
        ("dqn", ["buffer.size=2e9"], r"buffer.size: 2,000,000,000 transitions need 65.7 GiB"),
    ],
)
def test_what_does_not_fit_is_refused_before_the_first_frame(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algo: str, words: list[str], said: str
) -> None:
    monkeypatch.setattr("rltool.memory.free_memory", lambda: 40 * GIB)
    with pytest.raises(ConfigError, match=rf"^{said}, and 40\.0 GiB of memory are free\. Lower it"):
        run(tmp_path, algo, *words, "total_frames=4e9")
    assert not list(tmp_path.iterdir())


def test_a_run_takes_the_room_on_disk_of_what_it_holds(tmp_path: Path) -> None:
    """A thousand transitions in a buffer for a million, five numbered checkpoints: one buffer, and less than a megabyte."""
    run(tmp_path, "dqn", "buffer.size=1_000_000", "total_frames=1000", "save.interval=200", "save.keep=5")
    files = {path.name: path.stat().st_size for path in (tmp_path / "checkpoints").iterdir()}
    assert set(files) == {
        "last.ckpt",
        "buffer-1000.safetensors",
        *(f"{frames}.ckpt" for frames in range(200, 1200, 200)),
    }
    # An observation of four numbers, a pointer, an action, a reward, three flags; the header and the ends of episodes.
    assert 35_000 <= files["buffer-1000.safetensors"] < 35_000 + 5000
    assert sum(files.values()) < 1e6

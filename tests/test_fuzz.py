"""Whatever is in a configuration or in a file: it is taken, or refused by the error that says where and why."""

from __future__ import annotations

from pathlib import Path

import pytest
from fuzzing import Files, Reader, Trees, loads, reads

INPUTS = 500


@pytest.mark.long
def test_any_change_of_a_configuration_is_taken_or_refused_with_its_key() -> None:
    trees = Trees.make()
    taken = [loads(trees(number)) for number in range(INPUTS)]
    assert all(loads(tree) for tree in trees.bases)
    # The changes are neither all harmless nor all fatal.
    assert INPUTS * 0.05 < sum(taken) < INPUTS * 0.6


@pytest.mark.long
def test_any_change_of_a_checkpoint_is_taken_or_refused_with_its_file(dqn_run: Path, tmp_path: Path) -> None:
    files, reader = Files.of(dqn_run), Reader(tmp_path, every=10)
    assert reader(files.content[0], False)
    assert reader(files.content[1], True)
    taken = [reader(*files(number)) for number in range(INPUTS)]
    assert INPUTS * 0.02 < sum(taken) < INPUTS * 0.6


@pytest.mark.parametrize("which", ["checkpoint", "buffer"])
def test_a_flipped_bit_anywhere_is_noticed(dqn_run: Path, tmp_path: Path, which: str) -> None:
    content = Files.of(dqn_run).content[which == "buffer"]
    path, reader = tmp_path / "flipped.ckpt", Reader(tmp_path, every=1)
    step = len(content) // 100
    for place in [*range(64), *range(64, len(content), step)]:
        flipped = content[:place] + bytes([content[place] ^ (1 << place % 8)]) + content[place + 1 :]
        if which == "buffer":
            assert not reader(flipped, True), place
        else:
            path.write_bytes(flipped)
            assert not reads(path, lambda _: None), place

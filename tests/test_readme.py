"""What the README says, run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"


def test_the_python_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (source,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert "total_frames=20_000" in source
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(source.replace("total_frames=20_000", "total_frames=600"), names)
    assert names["reward"] == 1.0
    assert len(list(tmp_path.glob("runs/cartpole-ppo/*/checkpoints/best.ckpt"))) == 1

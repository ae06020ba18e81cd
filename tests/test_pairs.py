"""Every environment with every algorithm: a short run, or a refusal in words."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from probes import TINY, run, run_config, tiny

from rltool.configfiles import ConfigFiles
from rltool.envs import single_env
from rltool.errors import ConfigError

FILES = ConfigFiles.find_main()
# Options that need a name first; tests of their own run them.
UNNAMED = {"gym", "torchrl"}
SUPPORTED = {
    "ppo": {"discrete", "multi_discrete", "multi_binary", "box"},
    "dqn": {"discrete"},
    "sac": {"box"},
}


def test_every_algorithm_is_among_the_pairs() -> None:
    assert set(FILES.options("algo")) == set(SUPPORTED) == set(TINY)


@pytest.mark.long
@pytest.mark.smoke
@pytest.mark.parametrize("algo", list(SUPPORTED))
@pytest.mark.parametrize("env", [name for name in FILES.options("env") if name not in UNNAMED])
def test_it_runs_or_is_refused(env: str, algo: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # MuJoCo writes its log there
    words = [
        f"env={env}",
        "network=auto",
        "network.hidden=[16]",
        "network.cnn={channels: [4, 4, 4], features: 8}",
        "logging=none",
        "eval=none",
    ]
    words += ["total_frames=200", "buffer.size=1000"] if algo != "ppo" else ["total_frames=200"]
    try:
        single = single_env(run_config(*tiny(algo, *words)).env, 0)
    except ConfigError as error:
        if re.search(r"pip install 'rltool\[\w+\]'", str(error)):
            pytest.skip(str(error))
        raise
    kind = single.actions.kind
    single.close()
    if kind in SUPPORTED[algo]:
        summary = run(tmp_path, algo, *words)
        assert summary["status"] == "finished"
        assert 200 <= int(str(summary["frames"])) < 300
    else:
        with pytest.raises(ConfigError, match=rf"^algo: {algo} needs a (Discrete|Box) action space.*algo=ppo"):
            run(tmp_path, algo, *words)

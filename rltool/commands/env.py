"""``rltool env``: makes an environment and says what it is, what rltool makes of it, and what is wrong with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rltool.composition import read_overrides
from rltool.launch import check_command
from rltool.schema import EnvCheckConfig, GymEnvConfig, TorchRLEnvConfig

if TYPE_CHECKING:
    from rltool.cli import Options


def main(options: Options) -> int:
    """Runs the command; returns the exit code: 0, 1 where the environment is faulty, 2 where it cannot be made."""
    files = options.files()
    line = read_overrides(options.overrides, files, name="env")
    config = check_command(EnvCheckConfig, line, files, "env")

    # TorchRL sets the level of its messages when it is imported; only after that can it be lowered.
    import torchrl.envs  # noqa: F401

    from rltool.devices import quieten_libraries

    quieten_libraries()
    from rltool import inspection

    findings = inspection.Findings(config.debug)
    if isinstance(config.env, TorchRLEnvConfig) or (isinstance(config.env, GymEnvConfig) and config.env.transforms):
        inspection.look_at_torchrl(config, config.env, findings)
    elif isinstance(config.env, GymEnvConfig):
        inspection.look_at_gymnasium(config, config.env, findings)
    else:
        findings.row("environment", f"kind {config.env.kind}, from a plugin: nothing is known about how to look at it")
    return findings.print()

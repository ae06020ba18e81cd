"""``rltool tune-speed``: tries settings for a few seconds each and prints the fastest as overrides."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rltool.composition import read_overrides
from rltool.errors import ConfigError, Problem
from rltool.launch import check_jobs

if TYPE_CHECKING:
    from rltool.cli import Options


def main(options: Options) -> int:
    """Runs the command; returns the exit code."""
    files = options.files()
    line = read_overrides(options.overrides, files)
    if resume := line.resume:
        raise ConfigError(
            Problem(
                "resume",
                f"tune-speed tries a run that would start, found {resume.word}",
                "Give the words that the run was started with: they are in its overrides.txt",
            )
        )
    if init := line.get("init"):
        raise ConfigError(
            Problem("init", f"weights make no difference to speed, found {init.word}", "Leave it out of tune-speed")
        )
    (job,) = check_jobs(line, files)

    from rltool import speed

    def say(text: str) -> None:
        print(text, flush=True)

    present, *rates = speed.tune(job.config, options.seconds, say)
    best = rates[0]
    say("")
    say(f"now      {present.frames:>8,.0f} frames/s   {present.words}")
    say(f"fastest  {best.frames:>8,.0f} frames/s   {best.words}")
    eager = next((rate for rate in rates if rate.overrides == {**best.overrides, "compile": False}), best)
    if eager is not best:
        frames = max(best.start, 0.0) / (1 / eager.frames - 1 / best.frames)
        say(f"         compiling it took {best.start:,.1f} s here, which pays from {frames:,.0f} frames on")
    if "env.num_envs" in best.overrides and best.overrides["env.num_envs"] != present.overrides["env.num_envs"]:
        say("         another env.num_envs is another way to learn: compare what it reaches, not only how fast")
    if best.overrides.get("env.backend") == "envpool":
        say("         EnvPool has its own version of the environment: compare what is learned on it with Gymnasium's")
    return 0

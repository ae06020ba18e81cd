"""The help pages: usage, examples, groups with their options, every key with its meaning and its default.

Meanings come from the schemas, defaults from conf/. Neither torch nor Hydra is imported, so a page is there at once.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from rltool.cli import COMMANDS

if TYPE_CHECKING:
    from rltool.cli import Options
    from rltool.configfiles import ConfigFiles
    from rltool.registry import Schema

_EXAMPLES = {
    "train": (
        ("rltool train algo=ppo env=inverted_double_pendulum", ""),
        ("rltool train algo=dqn env=cartpole optim.lr=1e-3 algo.double=true", ""),
        ("rltool train -m algo=ppo env=cartpole seed=0,1,2", "a sweep: a run for each value"),
        ("rltool train -m tune=ppo algo=ppo env=cartpole", "a search for good values (extra: sweep)"),
        ("rltool train algo=ppo env=gym env.id=my_module:MyEnv-v0", "an environment of your own"),
        ("rltool train resume=runs/cartpole-ppo/… total_frames=2e6", "go on from its last checkpoint"),
    ),
    "eval": (
        ("rltool eval runs/cartpole-ppo/…", "the best.ckpt of a run"),
        ("rltool eval runs/cartpole-ppo", "of every run below, and over all of them"),
        ("rltool eval 'runs/*/*/checkpoints/last.ckpt' deterministic=both", ""),
        ("rltool eval checkpoint=[a.ckpt,b.ckpt] episodes=20 out=report.json", ""),
        ("rltool eval best.ckpt render=true episodes=3", "watch it"),
        ("rltool eval best.ckpt video=true episodes=3", "a video of each"),
        ("rltool eval best.ckpt trajectories=episodes.npz", "every step, for NumPy"),
        ("rltool eval best.ckpt env.kwargs.sutton_barto_reward=true", ""),
    ),
    "runs": (
        ("rltool runs", "those below runs/, the newest first"),
        ("rltool runs algo=ppo env=cartpole status=finished sort=-best limit=5", ""),
        ("rltool runs runs/sweeps best=475.. columns=optim.lr", "a mean return of 475 or more"),
        ("rltool runs status=failed,killed --json", "for programs"),
    ),
    "show": (
        ("rltool show a1b2c3", "by its name, as rltool runs prints it"),
        ("rltool show runs/cartpole-ppo/…/checkpoints/best.ckpt", "the run of a file"),
        ("rltool show runs/cartpole-ppo/… --json", "for programs"),
    ),
    "diff": (
        ("rltool diff a1b2c3 d4e5f6", ""),
        ("rltool diff runs/sweeps/…/*/", "all jobs of a sweep"),
    ),
    "rerun": (
        ("rltool rerun a1b2c3", "the same again"),
        ("rltool rerun a1b2c3 seed=1 optim.lr=1e-3", "with changes; they are shown"),
        ("rltool rerun a1b2c3 hydra.run.dir=runs/again", "in a directory of your choice"),
    ),
    "checkpoint": (
        ("rltool checkpoint runs/cartpole-dqn/…", "the newest of a run"),
        ("rltool checkpoint best.ckpt --json", "for programs"),
        ("rltool checkpoint runs/…/checkpoints/buffer-50000.safetensors", ""),
    ),
    "doctor": (
        ("rltool doctor", "the newest run in runs/"),
        ("rltool doctor runs/cartpole-ppo", "every run in it"),
        ("rltool doctor runs/… --json", "for programs"),
        ("rltool doctor --rules", "the faults it knows, by the names that stop.on takes"),
    ),
    "plot": (
        ("rltool plot runs/cartpole-ppo", "in the terminal; runs that differ in the seed are one curve"),
        ("rltool plot runs/cartpole-* out=curves.pdf", ""),
        ("rltool plot runs/… metric=eval/return_mean,episode/return", "a panel each"),
        ("rltool plot runs/sweeps/… group=optim.lr out=lr.svg width=7", "a curve for each value"),
        ("rltool plot 'ours=runs/a/*' 'baseline=runs/b/*' x=seconds", "names of your own"),
    ),
    "compare": (
        ("rltool compare runs/cartpole-ppo -- runs/cartpole-dqn", ""),
        ("rltool compare ppo=runs/cartpole-ppo -- dqn=runs/cartpole-dqn", "names of your own"),
        ("rltool compare runs/sweeps/… group=optim.lr out=tables", "files for a paper, too"),
        ("rltool compare runs/cartpole-ppo -- runs/cartpole-dqn --json", "for programs"),
    ),
    "sweep": (
        ("rltool sweep", "the sweeps in runs/, the newest first"),
        ("rltool sweep runs/sweeps/…", "the answer, again, also while it runs"),
        ("rltool sweep a1b2c3", "by the end of its name"),
        ("rltool sweep runs/sweeps/… --json", "for programs"),
        ("rltool train --config-dir runs/sweeps/… experiment=best", "the best configuration"),
    ),
    "list": (("rltool list", "the groups and their options"), ("rltool list envs", "")),
    "config": (
        ("rltool config algo=ppo env=cartpole optim.lr=1e-3", "YAML, with the source of each value"),
        ("rltool config algo=ppo env=cartpole --json", "for programs"),
    ),
    "env": (
        ("rltool env env=cartpole", ""),
        ("rltool env env=gym env.id=my_module:MyEnv-v0", "before you train on it"),
        ("rltool env env=gym env.id=my_module:MyEnv-v0 check=full", "Gymnasium's own check too"),
    ),
    "tune-speed": (
        ("rltool tune-speed algo=ppo env=inverted_double_pendulum", ""),
        ("rltool tune-speed algo=dqn env=cartpole --seconds 5", "each setting for longer"),
    ),
    "init": (("rltool init my_project", "then read my_project/README.md"),),
}
_USAGE = {
    "train": "rltool train algo=ALGO env=ENV [KEY=VALUE …] [options]",
    "eval": "rltool eval PATH… [KEY=VALUE …]",
    "runs": "rltool runs [DIR …] [KEY=VALUE …] [options]",
    "show": "rltool show RUN [options]",
    "diff": "rltool diff RUN RUN [RUN …] [options]",
    "rerun": "rltool rerun RUN [KEY=VALUE …] [options]",
    "checkpoint": "rltool checkpoint PATH [options]",
    "doctor": "rltool doctor [RUN …] [options]",
    "plot": "rltool plot [NAME=]RUN… [-- [NAME=]RUN… …] [KEY=VALUE …]",
    "compare": "rltool compare [NAME=]RUN… -- [NAME=]RUN… [-- …] [KEY=VALUE …] [options]",
    "sweep": "rltool sweep [SWEEP] [options]",
    "list": "rltool list [GROUP] [options]",
    "config": "rltool config algo=ALGO env=ENV [KEY=VALUE …] [options]",
    "env": "rltool env env=ENV [KEY=VALUE …] [options]",
    "tune-speed": "rltool tune-speed algo=ALGO env=ENV [KEY=VALUE …] [options]",
    "init": "rltool init NAME",
}
_ABOUT = {
    "train": "Trains an agent. What it does is one configuration: an option chosen from each group and any key changed on "
    "top. A run gets a directory under runs/ with its checkpoints, metrics and TensorBoard events.",
    "eval": "Evaluates the policies in checkpoints, all on the same episodes. Environment and network come from each checkpoint "
    "itself, which can lie anywhere. PATH is a .ckpt file, a run directory (its best.ckpt), a directory of runs, or a pattern; "
    "checkpoint=PATH is the same.",
    "runs": "Lists the runs in and below the directories DIR, runs/ unless given: those of sweeps too, finished, running, "
    "killed or damaged. KEY is a column or any key of the configuration. The name in the first column stands for the run in "
    "all other commands.",
    "show": "Prints what a run was, how it went, its evaluations and last numbers, its files, what went wrong, and what to "
    "type next. RUN is a run directory, a checkpoint or another file in one, or the end of its path, such as the six characters "
    "that rltool runs prints.",
    "diff": "Prints the keys of the configuration, the versions, the commit and the spaces that differ between runs, and "
    "their results side by side. RUN is named as in rltool show.",
    "rerun": "Starts a new run with the configuration that a run wrote down, not that of today's conf/, and KEY=VALUE laid over "
    "it. The same seed and nothing changed gives the same numbers where the run repeats (rltool show says so). RUN is named as "
    "in rltool show; it needs no checkpoint.",
    "checkpoint": "Prints what a checkpoint holds: the run, how far it is, its evaluations, its tensors, whether open episodes and a "
    "replay buffer go with it, and what to type next. PATH is a .ckpt file, a run directory (its newest whole checkpoint), or "
    "a stored replay buffer. torch is not imported.",
    "doctor": "Reads the metrics of runs and says what is wrong with them: what was seen, the likely cause, and which keys to "
    "change in which direction. It works while a run trains, too, where the same findings are told as they come and written "
    "to health.jsonl. RUN is a run directory, or a directory of them. torch is not imported.",
    "plot": "Draws learning curves. RUN is a run, a directory with runs in it, or a pattern ('runs/cartpole-*'). Runs with the same "
    "configuration but the seed make one curve: a line over the seeds and a band, the 95 % interval of a bootstrap; a "
    "curve goes as far as all its seeds reach. A panel for each metric and environment. Extra: plots.",
    "compare": "Compares groups of runs: mean, median and interquartile mean of their scores with 95 % intervals, how probably one "
    "is better than the other, frames and seconds to the threshold, as Markdown. -- stands between groups; without it, "
    "runs with the same configuration but the seed are one. RUN is a run, a directory with runs in it, or a pattern. "
    "out=… needs the extra plots.",
    "sweep": "Says what the jobs of rltool train -m have found: configurations over their seeds with 95 % intervals, best first, "
    "frames and seconds to the threshold, whether the second is really worse, what failed and how to go on. Writes "
    "results.csv, summary.md, experiment/best.yaml and pictures (extra: sweep) into the sweep's directory SWEEP; without "
    "one, lists the sweeps. Returns 1 where a job failed.",
    "list": "Lists the options of a group (env, algo, network, …; plurals are fine) with a line about each, or all groups.",
    "config": "Prints the configuration that rltool train would run with the same words, and where each value came from. "
    "Trains nothing.",
    "env": "Makes an environment and looks at it: observation and action spaces, a sample of each, TorchRL's check of its "
    "specs, a short random rollout, and what is wrong if anything is.",
    "tune-speed": "Tries numbers of environments and ways to run them, then the whole training loop with one and several "
    "torch threads, with and without compilation, for a few seconds each, and prints the fastest as overrides. Nothing is "
    "written; use it on a machine that does nothing else meanwhile.",
    "init": "Writes a small project that works as it stands into a new directory NAME: an environment and a network of your "
    "own in a Python package NAME, config files, tests, and a README whose commands can be typed as they are.",
}
_OPTIONS = {
    "--multirun": ("-m, --multirun", "run every combination of values separated by commas: seed=0,1,2"),
    "--config-dir": ("--config-dir DIR", "a directory of your own config files, e.g. DIR/algo/my_ppo.yaml"),
    "--cfg": ("--cfg job", "print the composed configuration and stop"),
    "--info": ("--info [WHAT]", "how it was composed: all, defaults, searchpath, …"),
    "--hydra-help": ("--hydra-help", "what Hydra's own settings are (hydra.run.dir=…, hydra/launcher=…)"),
    "--json": ("--json", "as JSON, for programs"),
    "--rules": ("--rules", "every fault that is looked for, by name"),
    "--yaml": ("--yaml", "as plain YAML, without sources"),
    "--seconds": ("--seconds SECONDS", "how long each setting is tried; 2 unless given"),
    "--help": ("-h, --help", "this page; with algo=dqn, optim=sgd, … the keys of that choice"),
}
_RUN_WORDS = (
    ("algo=ppo,dqn", "one of them; upper and lower case are alike"),
    ("env=cart*", "text with * and ?; an environment by its option or by its id"),
    ("seed=0..4", "a range; best=475.. and best=..475 have one end"),
    ("optim.lr=3e-4", "any key of the configuration; of a group its kind: optim=adam"),
    ("status!=finished", "not so"),
    ("'best>=475'", "<, <=, > and >= in quotes, which your shell needs"),
    ("'time>10m'", "a time in s, m, h or d"),
    ("sort=-best", "by a column or key; with - the largest first"),
    ("limit=10", "so many at most"),
    ("columns=optim.lr", "columns beside the usual ones, with commas between"),
)
# The commands that choose options of groups.
_CHOOSING = ("train", "config", "env", "tune-speed")
_SYNTAX = (
    ("optim.lr=1e-3", "a number; 1e6 is fine where a whole number is wanted"),
    ("network.hidden=[128,128]", "a list; quote it where your shell minds brackets"),
    ("algo.target_kl=null", "nothing; None is the same"),
    ("env.kwargs.gravity=9.8", "a key of a free mapping"),
)


def overview() -> str:
    """The page of ``rltool --help``."""
    lines = [
        "rltool trains reinforcement-learning agents from a config, on a command line.",
        "",
        _heading("usage"),
        "  rltool COMMAND [KEY=VALUE …] [options]",
        "",
        _heading("commands"),
        *_columns(COMMANDS.items(), 12),
        "",
        _heading("examples"),
        "  rltool train algo=ppo env=inverted_double_pendulum",
        "  rltool train algo=dqn env=cartpole optim.lr=1e-3",
        "  rltool eval runs/cartpole-dqn/…",
        "  tensorboard --logdir runs",
        "",
        _heading("options"),
        *_columns(
            [
                ("-h, --help", "this page; after a command, its page"),
                ("--version", "the versions of rltool, torch, torchrl, gymnasium, python"),
                ("-sc install=bash", 'shell completion: eval "$(rltool -sc install=bash)"'),
            ],
            18,
        ),
    ]
    return "\n".join(lines)


def page(command: str, options: Options) -> str:
    """The page of ``rltool COMMAND --help``; choices among the overrides select the keys that are shown."""
    from rltool.cli import OPTIONS

    lines = [_heading("usage"), f"  {_USAGE[command]}", "", *_wrapped(_ABOUT[command], "")]
    lines += ["", _heading("examples")]
    for example, remark in _EXAMPLES[command]:
        lines.append(
            f"  {example}" + (f"   # {remark}" if remark and len(example) + len(remark) < _width() - 6 else "")
        )
    files = options.files()
    choices = dict(word.lstrip("+").split("=", 1) for word in options.overrides if "=" in word)
    if command in ("train", "config", "tune-speed"):
        lines += ["", *_train_keys(files, choices)]
    elif command == "eval":
        from rltool.schema import EvalRunConfig

        lines += ["", _heading("keys"), *_keys(EvalRunConfig, files.primary("eval"), "")]
    elif command in ("plot", "compare"):
        from rltool.schema import CompareConfig, PlotConfig

        schema = PlotConfig if command == "plot" else CompareConfig
        lines += ["", _heading("keys"), *_keys(schema, files.primary(command), "")]
    elif command == "env":
        from rltool.schema import EnvCheckConfig

        lines += ["", *_groups(files, {"env": "???"}), "", _heading("keys")]
        lines += _keys(EnvCheckConfig, files.primary("env"), "", skip={"env"})
        lines += _group_keys(files, "env", choices.get("env"), "???")
    elif command == "list":
        lines += ["", *_groups(files, dict.fromkeys(files.groups(), ""))]
    elif command == "runs":
        from rltool.selection import COLUMNS

        lines += ["", _heading("columns"), *_wrapped(", ".join(COLUMNS), "  ")]
        lines += ["", _heading("words"), *_columns(_RUN_WORDS, 18)]
    if command == "train":
        lines += ["", *_sweep_keys(files, choices)]
    if command in ("train", "config"):
        lines += ["", _heading("values"), *_columns(_SYNTAX, 26)]
    told = {**_OPTIONS, "--help": _OPTIONS["--help"] if command in _CHOOSING else ("-h, --help", "this page")}
    lines += ["", _heading("options"), *_columns([told[name] for name in OPTIONS[command] if name in told], 18)]
    return "\n".join(lines)


def _train_keys(files: ConfigFiles, choices: Mapping[str, str]) -> list[str]:
    from rltool.config import group_names
    from rltool.schema import RunConfig
    from rltool.wording import Shape

    algo = choices.get("algo")
    # What the chosen algorithm brings along decides the defaults of the other groups.
    implied = files.read("algo", algo).overrides if algo else {}
    defaults = {**files.defaults("train"), **implied}
    defaults = {group: defaults[group] for group in sorted(defaults, key=lambda group: defaults[group] != "???")}
    lines = _groups(files, defaults)
    primary = files.primary("train")
    nodes = {name for name, field in RunConfig.model_fields.items() if Shape.of(field).schema is not None}
    lines += ["", _heading("keys"), *_wrapped("KEY=VALUE sets any of them. Shown with the default.", "  ")]
    lines += _keys(RunConfig, primary, "", skip=nodes)
    for group in defaults:
        if group in nodes and group in group_names():
            lines += _group_keys(files, group, choices.get(group), defaults[group])
        elif group in nodes:
            schema = Shape.of(RunConfig.model_fields[group]).schema
            option = files.read(group, choices.get(group, defaults[group]))
            if schema is not None:
                lines += [
                    "",
                    f"  {group}={option.name}: {option.description}",
                    *_keys(schema, option.node, f"{group}."),
                ]
    return lines


def _sweep_keys(files: ConfigFiles, choices: Mapping[str, str]) -> list[str]:
    """What concerns the jobs of a sweep together."""
    from rltool.configfiles import OF_SWEEPS
    from rltool.schema import JobsConfig, TuneConfig

    lines = [_heading("with -m"), *_wrapped("A run for each combination of values, and an answer: rltool sweep.", "  ")]
    for group in OF_SWEEPS:
        options = [files.read(group, name) for name in files.options(group)]
        lines += ["", *_columns([(f"{group}={option.name}", option.description) for option in options], 28)]
    sweep = files.primary("train")["sweep"]
    assert isinstance(sweep, Mapping)
    lines += ["", *_keys(JobsConfig, sweep, "sweep.")]
    tune = files.read("tune", choices.get("tune", files.defaults("train")["tune"]))
    return [
        *lines,
        "",
        *_wrapped(f"tune={tune.name}: {tune.description}", "  "),
        *_keys(TuneConfig, tune.node, "tune."),
    ]


def _groups(files: ConfigFiles, defaults: Mapping[str, str]) -> list[str]:
    lines = [
        _heading("groups"),
        *_wrapped("GROUP=OPTION chooses. `rltool list GROUP` has a line about each option.", "  "),
    ]
    width = max(len(group) for group in defaults) + 2
    for group, default in defaults.items():
        options = list(files.options(group))
        if group == "tuned":
            text = "none, or values for one env and algo, applied by themselves where there are any"
        elif default == "???":
            text = f"{', '.join(options)} (required)"
        elif default and len(options) > 1:
            text = ", ".join(f"{option} (default)" if option == default != "default" else option for option in options)
        else:
            text = ", ".join(options)
        lines += _columns([(group, text)], width)
    return lines


def _group_keys(files: ConfigFiles, group: str, choice: str | None, default: str) -> list[str]:
    """The keys of the chosen option, else of the default, else of one option of each kind."""
    from rltool import registry

    names = [choice or default]
    if names == ["???"]:
        by_kind: dict[str, str] = {}
        for name in files.options(group):
            kind = str(files.read(group, name).node.get("kind"))
            # The option called like its kind is the general one: env=gym takes any id.
            by_kind[kind] = name if name == kind else by_kind.get(kind, name)
        names = list(by_kind.values())
    lines: list[str] = []
    for name in names:
        option = files.read(group, name)
        schema = registry.kinds(group).get(str(option.node.get("kind")))
        lines += ["", *_wrapped(f"{group}={name}: {option.description}", "  ")]
        lines += (
            _keys(schema, option.node, f"{group}.")
            if schema is not None
            else _columns([("", "a plugin's own keys")], 4)
        )
    return lines


def _keys(schema: type[Schema], node: Mapping[str, object], prefix: str, skip: Iterable[str] = ("kind",)) -> list[str]:
    from rltool.wording import Shape

    lines: list[str] = []
    for name, field in schema.model_fields.items():
        if name in skip or name == "kind":
            continue
        value = node.get(name)
        if isinstance(value, Mapping) and Shape.of(field).schema is not None:
            text = " ".join(f"{prefix}{name}.{key}={_shown(item)}" for key, item in value.items())
        else:
            text = f"{prefix}{name}={_shown(value)}"
        # Kept together, but for a list of choices, which may be longer than a line.
        bounds = Shape.of(field).range.replace(" | ", " |\n").replace(" ", "\N{NO-BREAK SPACE}").replace("\n", " ")
        lines += _key(text, f"{field.description} [{bounds}]" if bounds else field.description or "")
    return lines


def _key(text: str, meaning: str) -> list[str]:
    """A key with its default at the left, its meaning at the right; below each other where the left side is long."""
    left = 32
    if len(text) + 4 < left:
        return _columns([(text, meaning)], left - 4, indent=4)
    return [f"    {text}", *_wrapped(meaning, " " * left)]


def _shown(value: object) -> str:
    if value == "???":
        return "…"
    if isinstance(value, str):
        return value
    if isinstance(value, float) and value.is_integer() and abs(value) >= 1e3:
        return str(int(value))
    return json.dumps(value, ensure_ascii=False)


def _width() -> int:
    return min(shutil.get_terminal_size().columns, 100)


def _wrapped(text: str, indent: str) -> list[str]:
    lines = textwrap.wrap(
        text, _width(), initial_indent=indent, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in lines]


def _columns(rows: Iterable[Sequence[str]], width: int, indent: int = 2) -> list[str]:
    lines: list[str] = []
    for left, right in rows:
        margin = " " * (indent + width)
        wrapped = _wrapped(right, margin) or [margin]
        lines.append((" " * indent + f"{left:<{width}}" + wrapped[0][len(margin) :]).rstrip())
        lines += wrapped[1:]
    return lines


def _heading(text: str) -> str:
    return f"\033[1m{text}\033[0m" if sys.stdout.isatty() and not os.environ.get("NO_COLOR") else text

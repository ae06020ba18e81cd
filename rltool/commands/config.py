"""``rltool config``: the resolved configuration of a run, and where each value came from."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import yaml

from rltool.composition import Line, compose, read_overrides
from rltool.configfiles import flat
from rltool.launch import Job, check_jobs, read_resumption

if TYPE_CHECKING:
    from rltool.cli import Options
    from rltool.configfiles import ConfigFiles

COMMAND_LINE = "command line"

# The groups whose files change keys of other groups, in the order in which they are applied.
_PARTIAL = ("tuned", "experiment")


def main(options: Options) -> int:
    """Prints the configuration; returns the exit code."""
    files = options.files()
    line = read_overrides(options.overrides, files)
    if line.resume is not None:
        resumption = read_resumption(read_overrides(options.overrides, files, choices_allowed=False), files)
        tree = resumption.config.model_dump(mode="json")
        sources = {key: COMMAND_LINE if key in resumption.changes else "checkpoint" for key in flat(tree)}
        sources["resume"] = COMMAND_LINE
    else:
        job = check_jobs(line, files)[0]
        tree = job.config.model_dump(mode="json")
        sources = provenance(job, line, files)
    if "json" in options.flags:
        print(
            json.dumps(
                {key: {"value": value, "source": sources[key]} for key, value in flat(tree).items()},
                indent=2,
                ensure_ascii=False,
            )
        )
    elif "yaml" in options.flags:
        print(yaml.safe_dump(tree, sort_keys=False, allow_unicode=True), end="")
    else:
        rows = list(_rows(tree, sources))
        width = min(max(len(text) for text, _ in rows), 44)
        for text, source in rows:
            print(f"{text:<{width}}  # {source}" if source else text)
    return 0


def provenance(job: Job, line: Line, files: ConfigFiles) -> dict[str, str]:
    """The source of each dotted key: the last stage of the composition that changed its value.

    The stages are the primary config with the chosen options, the tuned file, the experiment, and the command line.
    """
    choices = {
        group: job.composition.choices[group] for group in files.defaults("train") if group in job.composition.choices
    }
    # Hydra writes None for a group of which an experiment chooses nothing.
    words = [
        f"{group}={'null' if option == 'None' else option}"
        for group, option in choices.items()
        if group not in _PARTIAL
    ]
    stage = {group: f"{group}=none" for group in _PARTIAL if group in choices}
    leaves = flat(compose([*words, *stage.values()], files).tree)
    sources = {}
    for key in leaves:
        group = key.partition(".")[0]
        sources[key] = _source(files, group, choices[group]) if group in choices else "train.yaml"
    for group in _PARTIAL:
        option = job.composition.tuned if group == "tuned" else choices.get(group)
        if option not in (None, "none", "None") and group in stage:
            stage[group] = f"{group}={option}"
            changed = flat(compose([*words, *stage.values()], files).tree)
            sources |= {
                key: _source(files, group, str(option))
                for key in changed
                if key not in leaves or changed[key] != leaves[key]
            }
            leaves = changed
    typed = [one.key for one in line.typed if not one.is_choice]
    for key, value in flat(job.composition.tree).items():
        named = any(key == name or key.startswith(f"{name}.") for name in typed)
        if named or key not in leaves or leaves[key] != value:
            sources[key] = COMMAND_LINE
    return sources


def _source(files: ConfigFiles, group: str, option: str) -> str:
    path = files.find(group, option)
    own = path is not None and not path.is_relative_to(files.main)
    return str(path) if own else f"{group}/{option}.yaml"


def _rows(
    tree: Mapping[str, object], sources: Mapping[str, str], prefix: str = "", indent: str = ""
) -> Iterator[tuple[str, str]]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield f"{indent}{_flow(key)}:", ""
            yield from _rows(value, sources, f"{prefix}{key}.", f"{indent}  ")
        else:
            yield f"{indent}{_flow(key)}: {_flow(value)}", sources.get(f"{prefix}{key}", "")


def _flow(value: object) -> str:
    """A key or a value in a line of YAML: ``on`` in quotes, which is true without."""
    text: str = yaml.safe_dump(value, default_flow_style=True, width=10_000, allow_unicode=True)
    return text.removesuffix("...\n").strip()

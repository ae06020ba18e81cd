"""The best configuration of a sweep as a file that is chosen by ``experiment=best``: all its values but the seed. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import cast

from omegaconf import OmegaConf
from pydantic import JsonValue

from rltool.configfiles import ConfigFiles, Option
from rltool.runs import escaped

# What a run is given anew.
_OWN = ("seed", "resume")
# Groups without a node of their own.
_PARTIAL = ("experiment", "tuned", "tune")


def experiment(
    heading: Sequence[str], config: Mapping[str, JsonValue], words: Sequence[str], files: ConfigFiles | None = None
) -> str:
    """A YAML file that composes to a configuration, with the seed of whoever uses it.

    Every value stands in it. An option of each group lies below, for its name and since Hydra wants one: what it sets is
    set again, so none that sets a key that the configuration lacks will do, and where there is no other, none is chosen.

    Args:
        heading: what it is, line by line.
        config: the whole checked configuration.
        words: the overrides that it was made with; the options in them are preferred.
        files: where options lie; rltool's own.
    """
    files = files or ConfigFiles.find_main()
    lines = ["# @package _global_", *(f"# {line}" for line in heading), "defaults:"]
    for group, option in _options(config, words, files):
        lines.append(f"  - override /{group}: {option}")
    lines += ["  - override /tuned: none", "  - _self_", ""]
    values = escaped({key: value for key, value in config.items() if key not in _OWN})
    return "\n".join(lines) + "\n" + OmegaConf.to_yaml(OmegaConf.create(cast("dict[str, object]", values)))


def _options(config: Mapping[str, JsonValue], words: Sequence[str], files: ConfigFiles) -> Iterator[tuple[str, str]]:
    """Each group of a run, and an option that sets nothing else than the configuration does; ``null`` for none."""
    typed = {key.lstrip("+"): value for key, equals, value in (word.partition("=") for word in words) if equals}
    defaults = files.defaults("train")
    algo = typed.get("algo", "")
    implied = files.read("algo", algo).overrides if files.find("algo", algo) is not None else {}
    for group, default in defaults.items():
        node = config.get(group)
        if group in _PARTIAL or not isinstance(node, Mapping):
            continue
        wanted = (typed.get(group), implied.get(group), default, str(node.get("kind")), *files.options(group))
        known = (files.read(group, name) for name in wanted if name and files.find(group, name) is not None)
        yield group, next((option.name for option in known if _fits(option, node)), "null")


def _fits(option: Option, node: Mapping[str, JsonValue]) -> bool:
    return option.node.get("kind") == node.get("kind") and not _left_over(option.node, node)


def _left_over(below: Mapping[str, object], above: Mapping[str, JsonValue]) -> bool:
    """Whether something of one tree is left when another one is laid over it, or a list would meet a mapping."""
    for key, value in below.items():
        if key not in above:
            return True
        over = above[key]
        kinds = {kind for side in (value, over) for kind in (Mapping, list) if isinstance(side, kind)}
        if len(kinds) == 2 or (isinstance(value, Mapping) and isinstance(over, Mapping) and _left_over(value, over)):
            return True
    return False

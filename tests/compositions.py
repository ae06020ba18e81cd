"""Configurations for tests: what the choices of a command line compose to is kept, since that takes a quarter of a second."""

from __future__ import annotations

from functools import cache
from typing import cast

from hydra.core.override_parser.types import OverrideType
from omegaconf import DictConfig, OmegaConf

from rltool.composition import TOGETHER, compose, read_overrides
from rltool.config import Tree, load
from rltool.configfiles import ConfigFiles
from rltool.schema import RunConfig

FILES = ConfigFiles.find_main()


@cache
def _composed(*choices: str) -> DictConfig:
    """What the choices compose to, with its ${…} as they are: a value that is laid over may be what they stand for."""
    config = compose(choices, FILES).hydra  # all of it
    return OmegaConf.masked_copy(config, [str(key) for key in config if key not in ("hydra", *TOGETHER)])


@cache
def run_config(*words: str) -> RunConfig:
    """The checked configuration of a command line: values are laid over what its choices compose to, as Hydra does it."""
    line = read_overrides(words, FILES)
    assert not line.problems
    tree = _composed(*(one.hydra for one in line.typed if one.is_choice)).copy()
    for one in line.typed:
        assert one.override.type in (OverrideType.CHANGE, OverrideType.ADD, OverrideType.FORCE_ADD)
        if not one.is_choice:
            OmegaConf.update(tree, one.key, one.override.value(), merge=True, force_add=True)
    return load(cast("Tree", OmegaConf.to_container(tree, resolve=True)))

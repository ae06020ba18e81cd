"""The files of conf/ agree with the schemas, and a configuration is checked as a whole."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import cast

import pytest
from omegaconf import DictConfig, OmegaConf

from rltool import config, registry
from rltool.commands.config import provenance
from rltool.composition import Composer, compose, read_overrides
from rltool.config import Tree, load, load_as, load_node, schema_of
from rltool.configfiles import ConfigFiles, conf_dir, flat
from rltool.errors import ConfigError
from rltool.launch import check, check_jobs
from rltool.registry import Schema
from rltool.schema import CompareConfig, EnvCheckConfig, EvalRunConfig, PlotConfig, RunConfig, SweepConfig, TuneConfig
from rltool.wording import Shape

FILES = ConfigFiles.find_main()
PARTIAL = ("tuned", "experiment")
APART = (*PARTIAL, "tune")  # of a sweep, in no run's configuration
OPTIONS = {group: list(FILES.options(group)) for group in FILES.groups() if group not in APART}
OTHERS = {"eval": EvalRunConfig, "env": EnvCheckConfig, "plot": PlotConfig, "compare": CompareConfig}
# A run that every option can be part of.
BASE = {"env": "cartpole", "algo": "dqn"}


def words(*typed: str, **choices: str) -> list[str]:
    """Overrides as Hydra gets them, for a run that is complete and has no tuned values unless asked for."""
    choices = {**BASE, "tuned": "none", **choices}
    line = read_overrides([*(f"{key}={value}" for key, value in choices.items()), *typed], FILES)
    assert not line.problems
    return line.words


def tree(*typed: str, **choices: str) -> Tree:
    return compose(words(*typed, **choices), FILES).tree


def problems(error: pytest.ExceptionInfo[ConfigError]) -> dict[str, str]:
    return {problem.path: f"{problem.text}. {problem.hint}" for problem in error.value.problems}


@cache
def base(algo: str = "dqn") -> DictConfig:
    return OmegaConf.create(tree(algo=algo))


def laid_over(*typed: str, algo: str = "dqn") -> Tree:
    """The tree that Hydra would compose, without composing it once more for each row of a table."""
    config = base(algo).copy()
    line = read_overrides([*(f"{key}={value}" for key, value in BASE.items()), *typed], FILES)
    for one in line.typed:
        if not one.is_choice:
            OmegaConf.update(config, one.key, one.override.value(), merge=True, force_add=True)
    return cast("Tree", OmegaConf.to_container(config))


def load_problems(tree: Tree, algo: str = "dqn") -> dict[str, str]:
    with pytest.raises(ConfigError) as error:
        load(tree, defaults=cast("Tree", OmegaConf.to_container(base(algo))))
    return problems(error)


def user_files(directory: Path, **files: str) -> ConfigFiles:
    """A user's directory of config files: ``algo__ddqn="…"`` is algo/ddqn.yaml."""
    for name, text in files.items():
        path = directory / f"{name.replace('__', '/')}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return ConfigFiles.find_main((directory,))


# ------------------------------------------------------------------------------------------------ conf/ and the schemas


def check_option(group: str, option: str, composed: Mapping[str, object]) -> None:
    """An option has exactly the keys of its schema, valid values, and reads without Hydra (for help and lists) as it composes."""
    node = composed[group]
    assert isinstance(node, dict)
    schema = schema_of(group, node)
    assert schema is not None, f"conf/{group}/{option}.yaml names no registered kind"
    assert set(node) == set(schema.model_fields), f"conf/{group}/{option}.yaml"
    for name, field in schema.model_fields.items():
        below = Shape.of(field).schema
        value = node[name]
        if below is not None and isinstance(value, Mapping):
            assert set(value) == set(below.model_fields), f"{group}.{name}"
    read = FILES.read(group, option)
    assert OmegaConf.to_container(OmegaConf.create(read.node), resolve=True) == node
    assert read.description
    missing = {"gym": {"id": "CartPole-v1"}, "torchrl": {"entry_point": "a:b"}, "module": {"entry_point": "a:B"}}
    schema.model_validate({**node, **missing.get(option, {})})


@pytest.mark.long
@pytest.mark.parametrize("row", range(max(len(options) for options in OPTIONS.values())))
def test_every_option_of_every_group(row: int) -> None:
    """Each row composes the next option of every group, so that all are reached with the fewest compositions."""
    choices = {group: options[row % len(options)] for group, options in OPTIONS.items()}
    composed = tree(**choices)
    for group, option in choices.items():
        check_option(group, option, composed)


@pytest.mark.parametrize("algo", OPTIONS["algo"])
def test_an_algorithm_is_valid_with_what_it_brings_along(algo: str) -> None:
    assert load(tree(algo=algo)).algo.kind


@pytest.mark.parametrize(("name", "schema"), OTHERS.items())
def test_the_config_of_another_command_has_exactly_the_keys_of_its_schema(name: str, schema: type[Schema]) -> None:
    choices = [f"{group}=cartpole" for group in FILES.defaults(name)]
    assert set(compose(choices, FILES, name).tree) == set(schema.model_fields)


@pytest.mark.parametrize("option", FILES.options("tune"))
def test_a_search_has_exactly_the_keys_of_its_schema(option: str) -> None:
    algo = "ppo" if option == "default" else option
    composed = compose(["env=pendulum" if algo == "sac" else "env=cartpole", f"algo={algo}", f"tune={option}"], FILES)
    node = composed.together["tune"]
    assert isinstance(node, dict)
    assert set(node) == set(TuneConfig.model_fields)
    assert SweepConfig.model_validate(composed.together).tune.trials > 0
    assert composed.choices["hydra/sweeper"] == ("grid" if option == "default" else "tune")


def test_the_primary_config_has_every_key_that_no_group_has() -> None:
    assert set(FILES.primary("train")) == {*RunConfig.model_fields, *SweepConfig.model_fields} - set(
        FILES.defaults("train")
    )


def test_every_field_says_what_it_means() -> None:
    schemas: list[type[Schema]] = [RunConfig, *OTHERS.values()]
    for group in FILES.groups():
        schemas += registry.kinds(group).values()
    for schema in schemas:
        for name, field in schema.model_fields.items():
            assert field.description, f"{schema.__name__}.{name}"


def test_values_are_in_yaml_only() -> None:
    for group in FILES.groups():
        for schema in registry.kinds(group).values():
            assert all(field.is_required() for field in schema.model_fields.values()), schema.__name__


@pytest.mark.parametrize("group", PARTIAL)
def test_the_keys_of_partial_files_exist(group: str) -> None:
    for option in FILES.options(group):
        node = FILES.read(group, option).node
        known = dict.fromkeys(RunConfig.model_fields)
        for key, value in node.items():
            assert key in known, f"{group}/{option}.yaml: {key}"
            if isinstance(value, Mapping):
                declared = Shape.of(RunConfig.model_fields[key]).schema
                schemas = [*registry.kinds(key).values(), *([declared] if declared is not None else [])]
                assert set(value) <= {name for schema in schemas for name in schema.model_fields}, (
                    f"{group}/{option}.yaml: {key}"
                )


@pytest.mark.parametrize("option", [option for option in FILES.options("tuned") if option != "none"])
def test_a_tuned_file_is_valid_with_its_env_and_algo_and_applied_by_itself(option: str) -> None:
    pairs = [
        pair for pair in itertools.product(FILES.options("env"), FILES.options("algo")) if "-".join(pair) == option
    ]
    assert len(pairs) == 1, f"tuned/{option}.yaml belongs to no env and algo"
    env, algo = pairs[0]
    job = check([f"env={env}", f"algo={algo}"], FILES)
    assert job.composition.tuned == option
    composed = flat(job.composition.tree)
    for key, value in flat(FILES.read("tuned", option).node).items():
        assert composed[key] == value, f"tuned/{option}.yaml: {key}"


def test_hydras_config_store_holds_nothing_of_ours() -> None:
    from hydra.core.config_store import ConfigStore

    tree()
    known = {"hydra", "_dummy_empty_config_.yaml", "hydra_config.yaml"}
    assert set(ConfigStore.instance().repo) <= known


# ---------------------------------------------------------------------------------------------------------------- tuned


TUNED = "# @package _global_\n# mine\ntotal_frames: 77_777\nalgo:\n  gamma: 0.5\n"


def test_a_tuned_file_sets_top_level_keys_and_keys_of_groups(tmp_path: Path) -> None:
    files = user_files(tmp_path, **{"tuned__acrobot-dqn": TUNED})
    job = check(["env=acrobot", "algo=dqn"], files)
    assert (job.config.total_frames, job.config.algo.gamma) == (77_777, 0.5)
    assert job.composition.tuned == "acrobot-dqn"


def test_the_command_line_wins_over_a_tuned_file(tmp_path: Path) -> None:
    files = user_files(tmp_path, **{"tuned__acrobot-dqn": TUNED})
    job = check(["env=acrobot", "algo=dqn", "++total_frames=5000", "++algo.gamma=0.75"], files)
    assert (job.config.total_frames, job.config.algo.gamma) == (5000, 0.75)


def test_tuned_none_turns_it_off(tmp_path: Path) -> None:
    files = user_files(tmp_path, **{"tuned__acrobot-dqn": TUNED})
    job = check(["env=acrobot", "algo=dqn", "tuned=none"], files)
    assert job.config.total_frames != 77_777
    assert job.composition.tuned is None


def test_no_tuned_file_is_no_error() -> None:
    job = check(["env=acrobot", "algo=ppo"], FILES)
    assert job.composition.tuned is None


def test_a_preset_falls_back_to_the_tuned_file_of_its_kind(tmp_path: Path) -> None:
    preset = "# mine\ndefaults: [dqn, _self_]\ndouble: true\n"
    files = user_files(tmp_path, algo__ddqn=preset, **{"tuned__acrobot-dqn": TUNED})
    job = check(["env=acrobot", "algo=ddqn"], files)
    assert job.composition.tuned == "acrobot-dqn"
    assert job.config.model_dump()["algo"]["double"] is True
    assert job.config.total_frames == 77_777
    own = user_files(tmp_path, **{"tuned__acrobot-ddqn": TUNED.replace("77_777", "88_888")})
    assert check(["env=acrobot", "algo=ddqn"], own).config.total_frames == 88_888


def test_a_preset_is_not_changed_by_the_tuned_file_of_its_kind(tmp_path: Path) -> None:
    files = user_files(
        tmp_path,
        algo__near="defaults: [dqn, _self_]\ngamma: 0.9\n",
        algo__nearer="defaults: [near, _self_]\ndouble: true\n",
        **{"tuned__acrobot-dqn": TUNED},
    )
    for option in ("near", "nearer"):
        job = check(["env=acrobot", f"algo={option}"], files)
        assert job.composition.tuned is None
        assert job.config.algo.gamma == 0.9


def test_an_algorithm_brings_its_buffer_and_network_and_the_command_line_still_chooses() -> None:
    brought = check(["env=acrobot", "algo=dqn"], FILES).composition.choices
    assert (brought["buffer"], brought["network"]) == ("replay", "auto_256")
    job = check(["env=acrobot", "algo=dqn", "network=mlp", "buffer=prioritized"], FILES)
    assert job.config.model_dump()["network"]["hidden"] == [64, 64]
    assert job.config.buffer.kind == "prioritized"


def test_a_key_that_the_tuned_file_brings_to_another_choice_says_so(tmp_path: Path) -> None:
    files = user_files(tmp_path, **{"tuned__acrobot-dqn": "# @package _global_\n# mine\noptim:\n  eps: 1e-7\n"})
    with pytest.raises(ConfigError) as error:
        check(["env=acrobot", "algo=dqn", "optim=sgd"], files)
    assert "The tuned file acrobot-dqn brings it along" in problems(error)["optim.eps"]
    with pytest.raises(ConfigError) as error:
        check(["env=acrobot", "algo=dqn", "optim=sgd", "++optim.eps=1e-5"], files)
    assert "It is a key of adam" in problems(error)["optim.eps"]


def test_env_and_algo_can_be_swept_with_tuned_files(tmp_path: Path) -> None:
    files = user_files(tmp_path, **{"tuned__acrobot-dqn": TUNED})
    line = read_overrides(["env=acrobot,cartpole", "algo=dqn,ppo"], files, multirun=True)
    jobs = check_jobs(line, files, multirun=True)
    assert [job.composition.choices["env"] for job in jobs] == ["acrobot", "acrobot", "cartpole", "cartpole"]
    assert [job.composition.tuned == "acrobot-dqn" for job in jobs] == [True, False, False, False]


# ------------------------------------------------------------------------------------------------------------ one value


@pytest.mark.parametrize(
    ("typed", "key", "value"),
    [
        ("total_frames=1e6", "total_frames", 1_000_000),
        ("total_frames=2_000", "total_frames", 2000),
        ("seed=null", "seed", None),
        ("seed=None", "seed", None),
        ("optim.lr=1", "optim.lr", 1.0),
        ("compile=true", "compile", True),
        ("compile=auto", "compile", "auto"),
        ("network.hidden=[32,16]", "network.hidden", [32, 16]),
        ("env.kwargs.a.b=None", "env.kwargs.a.b", None),
        ("env.kwargs={a:[1,{b:true}]}", "env.kwargs.a", [1, {"b": True}]),
        ("+env.kwargs.x=1", "env.kwargs.x", 1),
        ("env.wrappers=[{name:X,kwargs:{a:1}}]", "env.wrappers", [{"name": "X", "kwargs": {"a": 1}, "eval": True}]),
        ("env.wrappers=[{name:X}]", "env.wrappers", [{"name": "X", "kwargs": {}, "eval": True}]),
        ("env.wrappers=[X]", "env.wrappers", [{"name": "X", "kwargs": {}, "eval": True}]),
        ("env.wrappers=[{name:X,eval:false},m:Y]", "env.wrappers", [{"name": "X", "kwargs": {}, "eval": False}, {"name": "m:Y", "kwargs": {}, "eval": True}]),
        ("env.wrappers=[{name:X,eval:{a:2}}]", "env.wrappers", [{"name": "X", "kwargs": {}, "eval": {"a": 2}}]),
        ("env.observation_keys=[camera,arm.angles]", "env.observation_keys", ["camera", "arm.angles"]),
        ("env.action_mask=info", "env.action_mask", "info"),
        ("network.init=xavier", "network.init", "xavier"),
        ("algo.epsilon.frames=500", "algo.epsilon.frames", 500),
        ("algo.epsilon={start:0.5}", "algo.epsilon.start", 0.5),
        ("device=cuda:1", "device", "cuda:1"),
    ],
)  # fmt: skip
def test_values_that_are_taken(typed: str, key: str, value: object) -> None:
    assert flat(load(laid_over(typed)).model_dump())[key] == value


@pytest.mark.parametrize(
    ("typed", "key", "said"),
    [
        ("total_frames=1.5", "total_frames", "a whole number, -1 or more, found 1.5"),
        ("total_frames=true", "total_frames", "found true"),
        ("total_frames='5'", "total_frames", "found the text '5'"),
        ("total_frames=0", "total_frames", "found 0"),
        ("total_frames=-5", "total_frames", "found -5"),
        ("seed='0'", "seed", "found the text '0'"),
        ("seed=true", "seed", "found true"),
        ("seed=-1", "seed", "found -1"),
        ("env.num_envs=0", "env.num_envs", "a whole number from 1 to 100000, found 0"),
        ("env.num_envs=-2", "env.num_envs", "found -2"),
        ("optim.lr=-1", "optim.lr", "a number above 0, found -1"),
        ("optim.lr=high", "optim.lr", "found 'high'"),
        ("optim.lr=inf", "optim.lr", "a number above 0"),
        ("optim.lr=null", "optim.lr", "found null"),
        ("algo.gamma=1.5", "algo.gamma", "a number from 0 to 1, found 1.5"),
        ("algo.gamma=true", "algo.gamma", "found true"),
        ("algo.minibatch_size=0", "algo.minibatch_size", "found 0"),
        ("algo.double=1", "algo.double", "true or false, found 1"),
        ("algo.loss_function=l3", "algo.loss_function", "one of l2, smooth_l1, found 'l3'"),
        ("device=gpu", "device", "auto, cpu, cuda or cuda:N"),
        ("compile=yes", "compile", "auto or true or false, found 'yes'"),
        ("network.hidden=64", "network.hidden", "a list [a whole number, 1 or more, …], found 64"),
        ("network.hidden=[64,-1]", "network.hidden[1]", "found -1"),
        ("network.activation=reul", "network.activation", "relu"),
        ("env.wrappers=[{kwargs:{}}]", "env.wrappers[0].name", "a value is required"),
        ("env.wrappers=[3]", "env.wrappers[0]", "found 3"),
        ("env.kwargs.max_episode_steps=5", "env.kwargs", "Give env.max_episode_steps instead"),
        ("env.kwargs.id=Other-v0", "env.kwargs", "Give env.id instead"),
        ("env.id=", "env.id", "expected text (Gymnasium id, `module:Id` imports the module first), found the text ''"),
        ("env.action_mask=''", "env.action_mask", "found the text ''"),
        ("env.observation_keys=camera", "env.observation_keys", "a list"),
        ("network.init=zeros", "network.init", "one of orthogonal, xavier, default, found 'zeros'"),
        ("network.cnn.kernels=[8,4]", "network.cnn.kernels", "one for each of the 3 entries of network.cnn.channels, found 2"),
        ("network.cnn.channels=[]", "network.cnn.channels", "found"),
        ("env.id=???", "env.id", "a value is required. Give env.id=VALUE"),
        ("algo.kind=ppp", "algo.kind", "Did you mean ppo"),
        ("algo.epsilon=0.1", "algo.epsilon", "a mapping {start: …, end: …, frames: …}, found 0.1"),
        ("algo.epsilon.ende=0.1", "algo.epsilon.ende", "Did you mean algo.epsilon.end?"),
        ("env.kwargs=3", "env.kwargs", "a mapping {key: value, …}, found 3"),
        ("plugins=my_module", "plugins", "a list"),
    ],
)  # fmt: skip
def test_values_that_are_refused(typed: str, key: str, said: str) -> None:
    found = load_problems(laid_over(typed))
    assert list(found) == [key]
    assert said in found[key]


def test_a_schedule_is_judged_as_the_mapping_it_tries_to_be() -> None:
    found = load_problems(laid_over("algo.clip_epsilon={start:0.3,ende:0.1}", algo="ppo"), "ppo")
    assert set(found) == {"algo.clip_epsilon.end", "algo.clip_epsilon.frames", "algo.clip_epsilon.ende"}
    found = load_problems(laid_over("algo.clip_epsilon=2", algo="ppo"), "ppo")
    assert found["algo.clip_epsilon"].startswith("expected a number above 0")


# ---------------------------------------------------------------------------------------------------------- unknown keys


@pytest.mark.parametrize(
    ("typed", "key", "said"),
    [
        ("algo.gama=0.9", "algo.gama", "Did you mean algo.gamma?"),
        ("+algo.foo=1", "algo.foo", "Keys of algo: "),
        ("total_framez=10", "total_framez", "Did you mean total_frames?"),
        ("alog.gamma=0.9", "alog", "Did you mean algo"),
        ("lr=1e-3", "lr", "Did you mean optim.lr?"),
        ("algo.lr=1e-3", "algo.lr", "Did you mean optim.lr?"),
        ("algo.gae_lambda=0.9", "algo.gae_lambda", "no such key for algo kind dqn. It is a key of ppo"),
        ("buffer.alpha=0.5", "buffer.alpha", "It is a key of prioritized"),
        ("eval.intervall=5", "eval.intervall", "Did you mean eval.interval or eval.video_interval?"),
    ],
)
def test_an_unknown_key_gets_the_nearest_known_one(typed: str, key: str, said: str) -> None:
    found = load_problems(laid_over(typed))
    assert list(found) == [key]
    assert said in found[key]


def test_all_problems_of_all_groups_come_together_and_rules_across_keys_too() -> None:
    typed = [
        "optim.lr=-1",
        "algo.gama=1",
        "seed=true",
        "network.hidden=[0]",
        "env.num_envs=0",
        "buffer.size=10",
        "foo=1",
    ]
    with pytest.raises(ConfigError) as error:
        check(words(*typed), FILES)
    found = problems(error)
    assert set(found) == {"optim.lr", "algo.gama", "seed", "network.hidden[0]", "env.num_envs", "buffer.size", "foo"}
    assert "algo.learning_starts=1000" in found["buffer.size"]  # a rule between two keys that are well in themselves


@pytest.mark.parametrize(
    ("typed", "key", "algo"),
    [
        (["algo.minibatch_size=4096"], "algo.minibatch_size", "ppo"),
        (["algo.frames_per_batch=4", "env.num_envs=8"], "algo.frames_per_batch", "dqn"),
        (["algo.tau=0.1", "algo.target_interval=100"], "algo.tau", "dqn"),
        (["algo.tau=null", "algo.target_interval=null"], "algo.tau", "dqn"),
        (["buffer=replay"], "buffer", "ppo"),
        (["buffer=rollout"], "buffer", "dqn"),
        (["total_frames=-1", "algo.epsilon.frames=null"], "algo.epsilon.frames", "dqn"),
        (["total_frames=-1", "optim.schedule=linear"], "optim.schedule", "dqn"),
        (["stop.return_threshold=5", "eval=none"], "stop.return_threshold", "ppo"),
        (["resume=a", "init=b"], "init", "ppo"),
    ],
)
def test_rules_across_keys(typed: list[str], key: str, algo: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(tree(*typed, algo=algo))
    assert key in problems(error)


def test_a_rule_does_not_complain_about_a_repaired_key() -> None:
    # frames_per_batch is too small only for the eight environments that stand in for the wrong value.
    assert set(load_problems(laid_over("env.num_envs=-1", "algo.frames_per_batch=4"))) == {"env.num_envs"}


def test_a_configuration_cannot_be_changed() -> None:
    run = load(laid_over())
    with pytest.raises(ValueError, match="frozen"):
        run.seed = 3


def test_load_takes_back_what_it_gave() -> None:
    run = load(laid_over())
    assert load(run.model_dump(mode="json")) == run


def test_load_node_and_load_as_report_like_load() -> None:
    node = {**cast("Tree", laid_over()["env"]), "num_envs": 0, "ide": "x"}
    with pytest.raises(ConfigError) as error:
        load_node("env", node)
    assert set(problems(error)) == {"env.num_envs", "env.ide"}
    with pytest.raises(ConfigError) as error:
        load_as(EnvCheckConfig, {**compose(["env=cartpole"], FILES, "env").tree, "steps": 0, "env": node})
    assert set(problems(error)) == {"steps", "env.num_envs", "env.ide"}


def test_paths_of_a_sweep_are_absolute_and_null_stays_null(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    typed = ["env=cartpole", "algo=dqn", "init=a.ckpt,'./b c.ckpt'", "resume=null", "~optim.eps"]
    line = read_overrides(typed, FILES, multirun=True)
    assert [[word for word in job if "init" in word] for job in line.jobs()] == [
        [f"++init='{tmp_path / 'a.ckpt'}'"],
        [f"++init='{tmp_path / 'b c.ckpt'}'"],
    ]
    assert "++resume=null" in line.words
    assert [one.word for one in line.typed] == typed


# -------------------------------------------------------------------------------------------------------------- plugins


PLUGIN = """
from typing import Literal
from pydantic import Field
from rltool.registry import register
from rltool.schema import NetworkConfig

@register("network", "wide", builder="nowhere:Wide")
class WideConfig(NetworkConfig):
    kind: Literal["wide"] = Field(description="wide")
    width: int = Field(description="units")
"""


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ConfigFiles]:
    (tmp_path / "wide_plugin.py").write_text(PLUGIN)
    (tmp_path / "broken_plugin.py").write_text("\nraise RuntimeError('no luck')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "_schemas", {group: registry.kinds(group) for group in registry._schemas})
    yield user_files(
        tmp_path / "conf",
        network__wide="# Wide\nkind: wide\nwidth: 5\ninit: default\nshared: false\nprecision: float32\n",
    )
    sys.modules.pop("wide_plugin", None)


def test_a_plugin_is_imported_before_the_check(plugin: ConfigFiles) -> None:
    line = read_overrides(["env=cartpole", "algo=ppo", "network=wide", "network.width=7"], plugin)
    with pytest.raises(ConfigError) as error:
        check(line.words, plugin)
    assert "plugins" in problems(error)["network.kind"]
    job = check([*line.words, "++plugins=[wide_plugin]"], plugin)
    expected = {"kind": "wide", "init": "default", "shared": False, "precision": "float32", "width": 7}
    assert job.config.model_dump()["network"] == expected


def test_a_plugin_that_cannot_be_imported_is_named_with_the_others_problems(plugin: ConfigFiles) -> None:
    with pytest.raises(ConfigError) as error:
        check([*words(), "++plugins=[broken_plugin,not_there]", "++optim.lr=-1"], plugin)
    found = problems(error)
    assert set(found) == {"plugins.0", "plugins.1", "optim.lr"}
    assert "RuntimeError: no luck" in found["plugins.0"]
    assert "broken_plugin.py:2" in found["plugins.0"]


def test_entry_points_of_installed_plugins_are_imported(plugin: ConfigFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = metadata.EntryPoint(name="wide", value="wide_plugin", group="rltool.plugins")
    monkeypatch.setattr(metadata, "entry_points", lambda *, group: [entry] if group == "rltool.plugins" else [])
    config._entry_points.cache_clear()
    try:
        assert check(["env=cartpole", "algo=ppo", "network=wide"], plugin).config.network.kind == "wide"
    finally:
        monkeypatch.undo()
        config._entry_points.cache_clear()


# ---------------------------------------------------------------------------------------------------- files and sources


def test_conf_dir_is_the_checkouts() -> None:
    assert conf_dir() == Path(__file__).resolve().parents[1] / "conf"


def test_a_users_file_does_not_replace_a_built_in_one(tmp_path: Path) -> None:
    files = user_files(tmp_path, env__cartpole="# Mine\nkind: gym\n")
    assert files.find("env", "cartpole") == conf_dir() / "env" / "cartpole.yaml"
    assert check(["env=cartpole", "algo=ppo"], files).config.env.num_envs >= 1


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    files = user_files(tmp_path, algo__broken="kind: [\n", algo__loop="# Loop\ndefaults: [loop]\n")
    for option, said in (("broken", "no valid YAML"), ("loop", "inherits from itself")):
        with pytest.raises(ConfigError, match=said):
            files.read("algo", option)


def test_the_source_of_each_value_is_the_last_stage_that_changed_it(tmp_path: Path) -> None:
    files = user_files(
        tmp_path,
        **{
            "tuned__acrobot-dqn": TUNED,
            "experiment__short": "# @package _global_\n# Short\ntotal_frames: 10\nsave:\n  keep: 9\n",
        },
    )
    line = read_overrides(
        ["env=acrobot", "algo=dqn", "experiment=short", "optim.lr=1e-4", "seed=0", "env.kwargs.x=1"], files
    )
    sources = provenance(check_jobs(line, files)[0], line, files)
    assert sources["algo.gamma"] == str(tmp_path / "tuned" / "acrobot-dqn.yaml")
    # What somebody chose lies over what applies by itself.
    assert sources["total_frames"] == str(tmp_path / "experiment" / "short.yaml")
    assert sources["save.keep"] == str(tmp_path / "experiment" / "short.yaml")
    assert sources["algo.double"] == "algo/dqn.yaml"
    assert sources["buffer.size"] == "buffer/replay.yaml"
    assert sources["device"] == "train.yaml"
    # Typed, though it is what the file says as well.
    assert sources["seed"] == sources["optim.lr"] == sources["env.kwargs.x"] == "command line"
    assert set(sources) >= set(flat(check_jobs(line, files)[0].config.model_dump()))


@pytest.mark.parametrize("value", ["nan", "inf", "[1, -inf]", "{deep: {down: nan}}"])
def test_arguments_that_no_checkpoint_could_hold_are_refused(value: str) -> None:
    with pytest.raises(ConfigError, match=r"env\.kwargs.*expected finite numbers, found (nan|-?inf)"):
        load(compose(["algo=ppo", "env=cartpole", f"++env.kwargs.x={value}"]).tree)


@pytest.mark.parametrize(
    "words",
    [
        ("algo=ppo", "env=cartpole", "optim.lr=0.25", "algo.entropy_coeff=0"),
        ("algo=dqn", "env=cartpole", "network.hidden=[8,8]", "algo.epsilon={start: 0.5}", "env.kwargs.x=a b"),
        ("algo=sac", "env=pendulum", "env.kwargs={a: [1, 2], b: null}", "logging=csv", "total_frames=1e3"),
        ("algo=ppo", "env=gym", "env.id=a:B-v0", "device=${logging.kind}", "tuned=none", "plugins=[m]", "stop.on=[q_beyond_reach]"),
        ("algo=ppo", "env=cartpole", "stop=hopeless", "quiet=null", "env.wrappers=[{name: W, kwargs: {x: 1}}]"),
    ],
)  # fmt: skip
def test_values_laid_over_choices_are_what_hydra_composes(words: tuple[str, ...]) -> None:
    line = read_overrides(words, FILES)
    assert not line.problems
    composer = Composer(FILES)
    composer(["algo=ppo", "env=cartpole", "++optim.lr=7"])  # leaves nothing behind
    both = compose(line.words, FILES), composer(line.words)
    assert both[0].tree == both[1].tree
    assert both[0].choices == both[1].choices

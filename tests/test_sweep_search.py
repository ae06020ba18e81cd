"""Searches: spaces from words, what trials are worth, and a study that outlives its processes."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import JsonValue
from recorded import recorded

from rltool.composition import compose, read_overrides
from rltool.config import load, load_as
from rltool.configfiles import ConfigFiles
from rltool.errors import ConfigError
from rltool.schema import SweepConfig, TuneConfig
from rltool.sweeps.jobs import SweepJob
from rltool.sweeps.scores import immeasurable, progress, score

optuna = pytest.importorskip("optuna")
distributions = optuna.distributions
FloatDistribution, IntDistribution = distributions.FloatDistribution, distributions.IntDistribution

from rltool.sweeps.space import Space, word_of  # noqa: E402
from rltool.sweeps.study import Proposal, Search  # noqa: E402

FILES = ConfigFiles.find_main()
LR = "optim.lr=tag(log,interval(1e-5,1e-2))"
BASE: dict[str, JsonValue] = {
    "total_frames": 1000,
    "seed": 0,
    "device": "cpu",
    "env": {"kind": "gym", "id": "CartPole-v1"},
    "algo": {"kind": "ppo", "gamma": 0.99},
    "optim": {"kind": "adam", "lr": 3e-4},
    "eval": {"interval": 100, "final_episodes": 100},
    "stop": {"return_threshold": None},
}


def space(*words: str, more: Mapping[str, str | list[JsonValue]] | None = None) -> Space:
    return Space.read(read_overrides(["algo=ppo", "env=cartpole", *words], FILES, multirun=True), more or {}, FILES)


def problems(*words: str, more: Mapping[str, str | list[JsonValue]] | None = None) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        space(*words, more=more)
    return {problem.path: problem.text for problem in caught.value.problems}


# -------------------------------------------------------------------------------------------------------------- spaces


@pytest.mark.parametrize(
    ("values", "expected", "shown"),
    [
        ("interval(0,1)", FloatDistribution(0, 1), "interval(0.0,1.0)"),
        ("tag(log,interval(1e-5,1e-2))", FloatDistribution(1e-5, 1e-2, log=True), "tag(log,interval(1e-05,0.01))"),
        ("int(interval(1,8))", IntDistribution(1, 8), "int(interval(1,8))"),
        ("tag(log,int(interval(1,8)))", IntDistribution(1, 8, log=True), "tag(log,int(interval(1,8)))"),
        ("range(1,9)", IntDistribution(1, 8), "int(interval(1,8))"),  # a range does not hold its end
        ("range(1,9,3)", IntDistribution(1, 7, step=3), "range(1,10,3)"),
        ("range(8,0,-4)", IntDistribution(4, 8, step=4), "range(4,12,4)"),
        ("shuffle(range(1,9,3))", IntDistribution(1, 7, step=3), "range(1,10,3)"),
        ("range(0,1,0.25)", FloatDistribution(0, 0.75, step=0.25), "range(0.0,1.0,0.25)"),
        ("range(0.1,0.4,0.1)", FloatDistribution(0.1, 0.3, step=0.1), "range(0.1,0.4,0.1)"),
    ],
)
def test_words_become_distributions(values: str, expected: object, shown: str) -> None:
    (parameter,) = space(f"optim.lr={values}").parameters
    assert (parameter.distribution, str(parameter)) == (expected, shown)


def test_choices_are_words_for_optuna_and_values_for_the_configuration() -> None:
    (parameter,) = space("env.kwargs.x=[64,64],'a b',null,true,1,1.0,'1',{a:[x]}").parameters
    assert list(parameter.choices) == ["[64,64]", "'a b'", "null", "true", "1", "1.0", "'1'", "{a:[x]}"]
    values = [parameter.value(word) for word in parameter.choices]
    assert repr(values) == repr([[64, 64], "a b", None, True, 1, 1.0, "1", {"a": ["x"]}])
    assert [parameter.word(value) for value in values] == [f"++env.kwargs.x={word}" for word in parameter.choices]


def test_the_option_of_a_group_can_be_searched() -> None:
    found = space("optim=adam,sgd")
    assert found.words({"optim": "sgd"}) == ["optim=sgd"]
    assert compose(["algo=ppo", "env=cartpole", *found.words({"optim": "sgd"})]).choices["optim"] == "sgd"


def test_numbers_are_written_so_that_they_are_read_back() -> None:
    found = space(LR, "algo.epochs=int(interval(1,8))", "algo.gae_lambda=range(0.1,0.5,0.1)")
    drawn = {"optim.lr": 0.1 + 0.2, "algo.epochs": 3, "algo.gae_lambda": 0.1 + 0.2}
    values = found.values(drawn)
    assert found.words(values) == ["++optim.lr=0.30000000000000004", "++algo.epochs=3", "++algo.gae_lambda=0.3"]


PLAIN = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8)
)


@settings(max_examples=30, deadline=None)
@given(PLAIN | st.lists(PLAIN, max_size=3))
def test_every_value_is_read_back_from_its_word(value: JsonValue) -> None:
    from hydra.core.override_parser.overrides_parser import OverridesParser

    assert repr(OverridesParser.create().parse_override(f"key={word_of(value)}").value()) == repr(value)


def test_what_is_typed_wins_over_the_space_of_the_configuration() -> None:
    more: dict[str, str | list[JsonValue]] = {
        "optim.lr": "tag(log,interval(1e-5,1e-2))",
        "algo.gamma": [0.9, 0.99],
        "algo.epochs": "int(interval(1,8))",
        "network.hidden": [[64], [64, 64]],
    }
    found = space("optim.lr=1e-3", "algo.gamma=0.95,0.98", "tune.space.algo.clip_epsilon=0.1,0.2", more=more)
    assert found.to_json() == {
        "algo.gamma": "0.95,0.98",
        "algo.clip_epsilon": "0.1,0.2",
        "algo.epochs": "int(interval(1,8))",
        "network.hidden": "[64],[64,64]",
    }


def test_every_problem_of_a_space_is_told_at_once() -> None:
    more: dict[str, str | list[JsonValue]] = {"algo.target_kl": "0.1", "algo.clip_value": [], "tune.seeds": "1,2"}
    told = problems(
        "optim.lr=tag(lgo,interval(1e-5,1e-2))", "algo.gamma=tag(log,interval(0,1))", "seed=0,1", "env=cartpole,acrobot",
        "hydra.job.chdir=true,false", "algo.epochs=interval(8,1)", "algo.clip_epsilon=range(0,5,0)", "total_frames=1,2",
        "algo.gae_lambda=range(5,1)", "optim=adam,foo", "network.hidden=glob(*)", "algo.critic_coeff=tag(log,choice(1,2))",
        "algo.minibatch_size=tag(log,range(1,9,2))", "eval=default,none", "stop.return_threshold=1,2",
        "env.kwargs.x=interval(0,inf)", more=more,
    )  # fmt: skip
    assert {key: text for key, text in told.items() if "is the same for all trials" not in text} == {
        "optim.lr": "expected no tag but log, found lgo",
        "algo.gamma": "expected a lower end above 0 with tag(log,…), found 0.0",
        "seed": "each trial runs with the same seeds, found 0,1",
        "hydra.job.chdir": "is Hydra's, not the runs', found true,false",
        "algo.epochs": "expected a lower end below the upper one, both finite, found interval(8.0,1.0)",
        "algo.clip_epsilon": "expected finite ends and a step that is not 0, found range(0,5,0)",
        "algo.gae_lambda": "expected at least one value, found none in range(5,1,1)",
        "optim": "there is no option 'foo'",
        "network.hidden": "glob(…) cannot be searched",
        "algo.critic_coeff": "tag(log,…) is for numbers between two ends, found choices",
        "algo.minibatch_size": "expected a step of 1 with tag(log,…), found 2",
        "env.kwargs.x": "expected a lower end below the upper one, both finite, found interval(0.0,inf)",
        "tune.space.algo.target_kl": "expected several values, found 0.1",
        "tune.space.algo.clip_value": "expected values, found an empty list",
        "tune.seeds": "expected one value, found tune.seeds=1,2",
    }
    same = [key for key, text in told.items() if "is the same for all trials" in text]
    assert same == ["env", "total_frames", "eval", "stop.return_threshold"]


def test_intervals_do_not_stand_between_commas() -> None:
    assert problems("optim.lr=interval(1,2),3") == {
        "optim.lr": "expected single values between the commas, found interval(1,2),3"
    }


def test_a_search_needs_something_to_search() -> None:
    assert problems("optim.lr=1e-3") == {"tune.space": "expected values to search, found none"}


def test_a_grid_has_an_end() -> None:
    assert space("optim=adam,sgd", "algo.epochs=int(interval(1,8))").combinations == 16
    assert not list(space("optim=adam,sgd", "algo.gae_lambda=range(0.8,1,0.05)").problems("grid"))
    (problem,) = space("optim=adam,sgd", LR).problems("grid")
    assert problem.path == "optim.lr"
    (problem,) = space("algo.epochs=int(interval(1,1000))", "algo.minibatch_size=int(interval(1,1000))").problems(
        "grid"
    )
    assert "found 1,000,000" in problem.text
    assert not list(space(LR).problems("tpe"))


def test_corners_hold_every_extreme_and_every_choice_once() -> None:
    found = space(LR, "algo.epochs=int(interval(3,9))", "optim=adam,sgd,rmsprop", "algo.gae_lambda=range(0.8,1,0.05)")
    corners = found.corners()
    assert corners[0] == {"optim.lr": 1e-5, "algo.epochs": 3, "optim": "adam", "algo.gae_lambda": 0.8}
    assert len(corners) == 7
    inner = 1e-5 + (1e-2 - 1e-5) * (3 - 5**0.5) / 2  # no round number, where a key may want one
    assert {corner["optim.lr"] for corner in corners} == {1e-5, inner, 1e-2}
    assert {corner["algo.epochs"] for corner in corners} == {3, 9}
    assert {corner["optim"] for corner in corners} == {"adam", "sgd", "rmsprop"}
    assert {corner["algo.gae_lambda"] for corner in corners} == {0.8, 0.95}


def _space_of(algo: str) -> tuple[list[str], Space]:
    words = [f"algo={algo}", f"env={'pendulum' if algo == 'sac' else 'cartpole'}", f"tune={algo}"]
    composition = compose(words)
    assert composition.choices["hydra/sweeper"] == "tune"
    more = load_as(SweepConfig, composition.together).tune.space
    return words, Space.read(read_overrides(words, FILES, multirun=True), more, FILES)


@pytest.mark.parametrize("algo", ["ppo", "dqn", "sac"])
def test_a_shipped_space_names_keys_that_there_are(algo: str) -> None:
    words, found = _space_of(algo)
    last = {one.key: one.extremes[-1] for one in found.parameters}
    for values in (found.corners()[0], last):
        config = load(compose([*words, *found.words(values)]).tree).model_dump(mode="json")
        for key, value in values.items():
            node: Any = config
            for part in key.split("."):
                node = node[part]
            assert node == value, key


@pytest.mark.long
@pytest.mark.parametrize("algo", ["ppo", "dqn", "sac"])
def test_every_corner_of_a_shipped_space_is_a_valid_configuration(algo: str) -> None:
    words, found = _space_of(algo)
    for values in found.corners():
        load(compose([*words, *found.words(values)]).tree)


def test_no_minibatch_of_the_space_for_ppo_is_larger_than_a_batch() -> None:
    extremes = {one.key: one.extremes for one in _space_of("ppo")[1].parameters}
    assert max(cast("list[int]", extremes["algo.minibatch_size"])) <= min(
        cast("list[int]", extremes["algo.frames_per_batch"])
    )


def test_a_search_is_asked_for_by_its_space_and_can_be_refused() -> None:
    base = ["algo=ppo", "env=cartpole"]
    assert compose(base).choices["hydra/sweeper"] == "grid"
    assert compose([*base, "tune=ppo", "hydra/sweeper=grid"]).choices["hydra/sweeper"] == "grid"
    assert compose([*base, "hydra/sweeper=tune"]).choices["hydra/sweeper"] == "tune"


# -------------------------------------------------------------------------------------------------------------- scores


def written(
    directory: Path,
    curve: Sequence[float],
    *,
    status: str | None = "finished",
    final: float | None = None,
    step: int = 100,
    error: str | None = None,
    **changes: JsonValue,
) -> SweepJob:
    """A job with an evaluation every ``step`` frames; a status of None is that of a run that has not ended."""
    points = [{"frames": step * number, "eval/return_mean": value} for number, value in enumerate(curve, 1)]
    frames = step * len(curve)
    summary: dict[str, object] = {"status": status, "frames": frames, "error": error}
    if curve:
        summary["best_evaluation"] = {"mean": max(curve), "frames": frames}
        summary["last_evaluation"] = {"mean": curve[-1], "frames": frames}
    if final is not None:
        summary["final_evaluation"] = {"last": {"mean": final}}
    recorded(directory, summary=summary if status is not None else None, points=points)
    job = SweepJob(directory, (), {}, {**BASE, **changes})
    job.write()
    return job


@pytest.fixture
def runs(tmp_path: Path) -> Any:
    """Makes jobs, each in a directory of its own."""
    numbers = count()

    def make(curve: Sequence[float], **words: Any) -> SweepJob:
        return written(tmp_path / "runs" / str(next(numbers)), curve, **words)

    return make


def test_final_is_the_mean_of_fresh_episodes_else_of_the_last_evaluation(runs: Any) -> None:
    assert score("final", [runs([1, 9, 5], final=7.0), runs([1, 2, 3])]) == 5.0
    assert score("final", [runs([]), runs([1, 2, 3])]) is None


def test_auc_is_the_area_under_the_evaluations_over_the_budget(runs: Any) -> None:
    # 10 up to frame 100; a line from 10 to 30 over 100 frames, of mean 20; 30 from frame 200 to the budget of 1000.
    expected = (10 * 100 + 20 * 100 + 30 * 800) / 1000
    assert score("auc", [runs([10, 30], status="solved")]) == pytest.approx(expected)
    assert score("auc", [runs([4] * 10), runs([6] * 10)]) == pytest.approx(5.0)
    # The last batch may go beyond the budget.
    assert score("auc", [runs([5] * 3, step=400)]) == pytest.approx(5.0)


def test_frames_are_those_of_the_first_evaluation_at_the_goal(runs: Any) -> None:
    stop: JsonValue = {"return_threshold": 5.0}
    assert score("frames", [runs([1, 5, 4, 6], stop=stop)]) == 200
    # One run that never reaches it counts twice its budget.
    assert score("frames", [runs([1, 5], stop=stop), runs([1, 2], stop=stop)]) == (200 + 2 * 1000) / 2
    # Without a return to stop at, the environment's own counts: 475 of CartPole.
    assert score("frames", [runs([100, 200, 475])]) == 300
    assert score("frames", [runs([], stop=stop)]) is None


def test_progress_is_the_mean_over_seeds_where_all_have_come_to(runs: Any) -> None:
    jobs = [runs([1, 2, 3, 4], status=None), runs([3, 4], status=None)]
    assert progress(jobs) == [(1, 2.0), (2, 3.0)]
    assert progress([*jobs, runs([], status=None)]) == []


def test_a_run_that_is_over_stays_at_its_last_evaluation(runs: Any) -> None:
    jobs = [runs([1, 2, 3, 4], status=None), runs([3, 4], status="solved")]
    assert progress(jobs) == [(1, 2.0), (2, 3.0), (3, 3.5), (4, 4.0)]
    assert progress([runs([1, 2], status="failed"), jobs[0]]) == [(1, 1.0), (2, 2.0)]


def test_evaluations_are_numbered_alike_whatever_the_batch(runs: Any) -> None:
    assert progress([runs([1, 2, 3], step=104, status=None)]) == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert progress([runs([1, 2], step=250, status=None)]) == [(2, 1.0), (5, 2.0)]


@pytest.mark.parametrize(
    ("objectives", "changes", "key"),
    [
        (("frames",), {"env": {"id": "Pendulum-v1"}}, "tune.objective"),
        (("auc",), {"eval": {"interval": None, "final_episodes": 0}}, "eval.interval"),
        (("final",), {"eval": {"interval": None, "final_episodes": 0}}, "eval.interval"),
        (("final",), {"total_frames": -1}, "total_frames"),
        (("final", "final"), {}, "tune.objective"),
        ((), {}, "tune.objective"),
    ],
)
def test_what_cannot_be_measured_is_told(objectives: tuple[str, ...], changes: dict[str, JsonValue], key: str) -> None:
    assert [problem.path for problem in immeasurable(objectives, BASE | changes, pruned=False)] == [key]


def test_the_end_of_a_run_alone_can_be_measured_but_nothing_pruned() -> None:
    config = BASE | {"eval": {"interval": None, "final_episodes": 10}}
    assert not immeasurable(("final",), config, pruned=False)
    assert [problem.path for problem in immeasurable(("final",), config, pruned=True)] == ["eval.interval"]


# --------------------------------------------------------------------------------------------------------------- study


def tune(**changes: object) -> TuneConfig:
    node = FILES.read("tune", "default").node | {"trials": 100, "startup_trials": 0, "seeds": 1} | changes
    return load_as(SweepConfig, {"sweep": FILES.primary("train")["sweep"], "tune": node}).tune


@pytest.fixture(autouse=True)
def hasty() -> Iterator[None]:
    """No waiting for the disk: what a power cut would leave is not asked here."""
    from sqlalchemy import Engine, event

    def speed_up(connection: Any, _: object) -> None:
        connection.execute("PRAGMA synchronous=OFF")

    event.listen(Engine, "connect", speed_up)
    yield
    event.remove(Engine, "connect", speed_up)


@pytest.fixture
def search(tmp_path: Path) -> Iterator[Any]:
    """Opens searches, by default of the learning rate, in one directory, and closes them."""
    with ExitStack() as stack:

        def make(*words: str, base: Mapping[str, JsonValue] = BASE, path: Path = tmp_path, **changes: object) -> Search:
            (path / "sweep").mkdir(exist_ok=True)
            return stack.enter_context(Search.open(tune(**changes), path / "sweep", space(*(words or (LR,))), base))

        yield make


def asked(search: Search) -> Proposal:
    proposal = search.ask()
    assert proposal is not None
    return proposal


@pytest.mark.long
def test_a_search_ends_with_as_many_trials_as_there_are_to_be(search: Any, runs: Any) -> None:
    first = search(trials=3)
    for number, value in enumerate([1.0, 3.0, 3.0]):
        proposal = asked(first)
        assert (proposal.number, proposal.again) == (number, False)
        assert 1e-5 <= cast("float", proposal.values["optim.lr"]) <= 1e-2
        trial = first.tell(number, [runs([0.0, value], seed=4)])
        assert (trial.state, trial.scores, trial.seeds) == ("finished", (value,), (4,))
    assert first.ask() is None
    assert [trial.number for trial in first.best()] == [1]  # of equal ones the earliest
    assert search(trials=4).ask().number == 3


@pytest.mark.long
def test_every_combination_of_a_grid_is_tried_once(search: Any, runs: Any) -> None:
    words = ("optim=adam,sgd", "algo.epochs=range(1,4)")
    seen = []
    for _ in range(2):  # the second goes on where the first was closed
        here = search(*words, sampler="grid", sampler_seed=len(seen))
        for _ in range(3):
            proposal = asked(here)
            seen.append(tuple(proposal.values.values()))
            # The first combination fails: it is not tried again.
            here.tell(proposal.number, [runs([1.0], status="finished" if len(seen) > 1 else "failed")])
    assert here.ask() is None
    assert sorted(seen) == sorted((option, epochs) for option in ("adam", "sgd") for epochs in (1, 2, 3))  # type: ignore[type-var]


@pytest.mark.parametrize("sampler", ["random", "tpe"])
@pytest.mark.long
def test_a_resumed_study_asks_for_other_points(search: Any, runs: Any, sampler: str) -> None:
    values = set()
    for number in range(4):  # each by a process of its own
        here = search(sampler=sampler, startup_trials=2)
        proposal = asked(here)
        values.add(proposal.values["optim.lr"])
        here.tell(proposal.number, [runs([float(number)])])
        here.close()
    assert len(values) == 4


@pytest.mark.long
def test_proposals_depend_on_seed_number_and_history_alone(search: Any, runs: Any, tmp_path: Path) -> None:
    def values(name: str, seed: int, sessions: int) -> list[JsonValue]:
        (tmp_path / name).mkdir()
        found = []
        for _ in range(sessions):
            here = search(sampler_seed=seed, startup_trials=2, path=tmp_path / name)
            for _ in range(4 // sessions):
                proposal = asked(here)
                found.append(proposal.values["optim.lr"])
                here.tell(proposal.number, [runs([-math.log10(cast("float", found[-1]))])])
            here.close()
        return found

    assert values("a", 0, 1) == values("b", 0, 2)
    assert not set(values("c", 0, 1)) & set(values("d", 1, 1))


@pytest.mark.long
def test_a_search_finds_what_is_better(search: Any, runs: Any) -> None:
    here = search("algo.gamma=interval(0,1)", startup_trials=5, pruner="none")
    distances = []
    for number in range(25):
        gamma = cast("float", asked(here).values["algo.gamma"])
        distances.append(abs(gamma - 0.7))
        here.tell(number, [runs([-distances[-1]])])
    assert min(distances) < 0.02
    by_chance = (0.7**2 + 0.3**2) / 2
    assert sum(distances[15:]) / 10 < 0.6 * by_chance


CHILD = """
import json, os, sys, time
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_sweep_search import BASE, LR, space, tune, written
from rltool.sweeps.study import Search
mode, path, trials, name = sys.argv[1:]
search = Search.open(tune(trials=int(trials), sampler="random"), Path(path), space(LR), BASE)
asked = []
while (proposal := search.ask()) is not None:
    asked.append([proposal.number, proposal.values["optim.lr"], proposal.again])
    if mode == "hang":
        print(json.dumps(asked), flush=True)
        time.sleep(600)
    search.tell(proposal.number, [written(Path(path) / name / str(proposal.number), [1.0])])
print(json.dumps(asked))
"""


def child(mode: str, path: Path, trials: int, name: str) -> subprocess.Popen[str]:
    code = CHILD.format(tests=str(Path(__file__).parent))
    words = [sys.executable, "-c", code, mode, str(path), str(trials), name]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def heard(process: subprocess.Popen[str]) -> list[list[Any]]:
    out, err = process.communicate(timeout=60)
    assert err == ""  # nothing of Optuna's is on the screen
    return cast("list[list[Any]]", json.loads(out))


@pytest.mark.long
def test_what_a_killed_process_had_begun_goes_on_with_number_and_values(search: Any, runs: Any, tmp_path: Path) -> None:
    (tmp_path / "sweep").mkdir()
    process = child("hang", tmp_path / "sweep", 5, "a")
    assert process.stdout is not None
    ((number, value, _),) = json.loads(process.stdout.readline())
    here = search(trials=5)
    other = asked(here)
    assert (other.number, other.again) == (1, False)  # while it lives, its trial is its own
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert here.ask() == Proposal(number, {"optim.lr": value}, again=True)
    assert asked(here).number == 2  # and only once
    assert here.tell(number, [runs([2.0])]).state == "finished"
    assert [trial.number for trial in here.best()] == [0]


@pytest.mark.long
def test_a_process_that_ends_leaves_its_trials_to_others(search: Any) -> None:
    first, second = search(), search()
    begun = asked(first)
    assert asked(second).number == 1
    first.close()
    assert asked(second) == Proposal(begun.number, begun.values, again=True)


def test_a_trial_whose_values_were_never_drawn_is_given_up(search: Any) -> None:
    here = search()
    here._study.ask()  # as if killed before anything is drawn
    here.close()
    other = search()
    assert asked(other).number == 1
    (trial, _) = other.trials()
    assert (trial.state, trial.values, trial.reason) == ("failed", {}, "its process ended before its values were drawn")


def test_a_trial_of_another_directory_is_left_alone(search: Any, tmp_path: Path) -> None:
    storage = f"sqlite:///{tmp_path / 'shared.db'}"
    (tmp_path / "other").mkdir()
    first, second = search(storage=storage), search(storage=storage, path=tmp_path / "other")
    asked(first)
    first.close()
    assert asked(second).number == 1
    assert second.trials()[0].state == "running"


@pytest.mark.long
def test_two_processes_share_a_study(tmp_path: Path) -> None:
    processes = [child("work", tmp_path, 12, name) for name in "ab"]
    both = [trial for process in processes for trial in heard(process)]
    assert sorted(number for number, _, _ in both) == list(range(12))
    assert len({value for _, value, _ in both}) == 12
    assert not any(again for _, _, again in both)


@pytest.mark.parametrize(
    ("words", "changes", "base", "told"),
    [
        (("optim.lr=tag(log,interval(1e-4,1e-2))",), {}, {}, {"optim.lr": "tag(log,interval(1e-05,0.01)), found tag(log,interval(0.0001,0.01))"}),
        ((LR, "algo.epochs=1,2"), {}, {}, {"algo.epochs": "one value, found 1,2"}),
        ((LR,), {"objective": "auc"}, {}, {"tune.objective": '["final"], found ["auc"]'}),
        ((LR,), {"seeds": 2}, {}, {"tune.seeds": "1, found 2"}),
        ((LR,), {}, {"total_frames": 2000, "algo": {"kind": "ppo", "gamma": 0.9}}, {"total_frames": "1000, found 2000", "algo.gamma": "0.99, found 0.9"}),
    ],
)  # fmt: skip
def test_another_search_under_the_same_name_is_refused(
    search: Any, words: tuple[str, ...], changes: dict[str, object], base: dict[str, JsonValue], told: dict[str, str]
) -> None:
    search()
    with pytest.raises(ConfigError) as caught:
        search(*words, base=BASE | base, **changes)
    *differences, rest = caught.value.problems
    assert {one.path: one.text for one in differences} == {
        key: f"the search was begun with {text}" for key, text in told.items()
    }
    assert rest.text.startswith("Type it as before, or begin another search")
    search(*words, base=BASE | base, study="another", **changes)  # beside it, in the same database


def test_what_changes_no_result_may_change(search: Any) -> None:
    search()
    base = BASE | {"device": "cuda", "optim": {"kind": "adam", "lr": 7e-4}}  # the learning rate is searched
    search(trials=7, sampler="random", pruner="none", prune_after=0.1, final_seeds=0, base=base)


@pytest.mark.parametrize(
    ("storage", "text"),
    [
        ("study.db", "expected the URL of a database, found 'study.db'"),
        ("sqlite://", "expected a file, found a database in memory"),
        ("sqlite:///{here}/text.db", "cannot use sqlite:///{here}/text.db: "),
        ("nosuch://user:secret@host/name", "cannot use nosuch://user:***@host/name: "),
    ],
)
def test_a_database_that_cannot_be_used_is_named(search: Any, tmp_path: Path, storage: str, text: str) -> None:
    (tmp_path / "text.db").write_text("no database " * 100)
    with pytest.raises(ConfigError) as caught:
        search(storage=storage.format(here=tmp_path))
    (problem,) = caught.value.problems
    assert problem.path == "tune.storage"
    assert problem.text.startswith(text.format(here=tmp_path))
    assert "secret" not in str(caught.value)
    assert [path for path in tmp_path.rglob("*") if path.name.startswith(".")] == []


def test_runs_of_another_search_are_no_runs_of_this_one(search: Any, runs: Any, tmp_path: Path) -> None:
    """A trial finds its runs by their names: those of a study that is gone would be taken for what it proposes."""
    here = search(trials=3)
    first = asked(here)

    def job(trial: int, values: dict[str, JsonValue]) -> SweepJob:
        return SweepJob(tmp_path / f"{trial}-0", (), {**values, "seed": 0}, {}, None, trial)

    known = job(first.number, first.values)
    other = job(first.number, {**first.values, "optim.lr": 0.123})
    assert here.strangers([known, other, job(7, first.values)]) == [other, job(7, first.values)]


def test_a_failed_run_fails_its_trial_and_the_search_goes_on(search: Any, runs: Any) -> None:
    here = search(trials=3)
    trial = here.tell(asked(here).number, [runs([1.0]), runs([1.0], status="failed", error="trace\nValueError: no")])
    assert (trial.state, trial.scores) == ("failed", None)
    assert trial.reason == "1 failed: ValueError: no"
    trial = here.tell(asked(here).number, [runs([])])
    assert (trial.state, trial.reason) == (
        "failed",
        "a run has no final: it has no evaluations, or they are not finite",
    )
    here.fail(asked(here).number, "its configuration is none")
    assert here.trials()[2].reason == "its configuration is none"
    assert here.best() == ()
    assert here.ask() is None


def test_what_was_told_is_not_told_otherwise(search: Any, runs: Any) -> None:
    here = search()
    number = asked(here).number
    told = here.tell(number, [runs([1.0])])
    assert here.tell(number, [runs([2.0])]) == told
    here.fail(number, "too late")
    assert here.trials() == (told,)


# ------------------------------------------------------------------------------------------------------------- pruning


def finished(here: Search, runs: Any, *curves: Sequence[float]) -> None:
    for curve in curves:
        here.tell(asked(here).number, [runs(curve)])


def test_a_trial_below_the_median_is_pruned(search: Any, runs: Any) -> None:
    here = search(prune_after=0.3)
    finished(here, runs, [5] * 4, [6] * 4, [7] * 4)
    number = asked(here).number
    assert not here.pruned(number, [runs([0, 0], status=None)])  # below it, and before prune_after
    assert not here.pruned(number, [runs([0, 0, 6], status=None)])  # at it
    jobs = [runs([0, 0, 5.9], status=None)]
    other = asked(here).number
    assert here.pruned(other, jobs)
    here.close()
    again = search(prune_after=0.3)
    assert asked(again).number in (number, other)
    assert again.pruned(other, jobs)  # it stays so
    assert not again.pruned(number, [runs([0, 0, 6], status=None)])
    trial = again.tell(other, [runs([0, 0, 5.9], status="interrupted")])
    assert (trial.state, trial.scores) == ("pruned", None)
    assert 3 not in [trial.number for trial in again.best()]


def test_evaluations_that_come_together_are_judged_one_by_one(search: Any, runs: Any) -> None:
    here = search(prune_after=0.3)
    finished(here, runs, *([[5] * 4] * 3))
    # Below the median at 3, above it at 4: it would have been pruned, had anybody looked.
    assert here.pruned(asked(here).number, [runs([0, 0, 4, 9], status=None)])


def test_the_mean_over_the_seeds_is_what_is_judged(search: Any, runs: Any) -> None:
    here = search(prune_after=0.3, seeds=2)
    finished(here, runs, *([[5] * 4] * 3))
    number = asked(here).number
    ahead = runs([9, 9, 9, 9], status=None)
    assert not here.pruned(number, [ahead])
    assert not here.pruned(number, [ahead, runs([1, 1], status=None)])  # not all have come to the third
    assert not here.pruned(number, [ahead, runs([1, 1, 1], status=None)])  # (9 + 1) / 2 is the median
    other = asked(here).number
    assert here.pruned(other, [ahead, runs([0, 0, 0], status=None)])


@pytest.mark.parametrize("pruner", ["median", "asha"])
@pytest.mark.long
def test_the_first_trials_are_never_pruned(search: Any, runs: Any, pruner: str) -> None:
    here = search(startup_trials=3, prune_after=0.3, pruner=pruner)
    finished(here, runs, *([[5] * 3] * 2))
    assert not here.pruned(asked(here).number, [runs([0] * 3, status=None)])
    here.tell(2, [runs([0] * 3)])
    assert here.pruned(asked(here).number, [runs([-1] * 3, status=None)])


def test_successive_halving_keeps_the_best_third(search: Any, runs: Any) -> None:
    here = search(pruner="asha", prune_after=0.3)
    verdicts = []
    for value in (5, 4, 6, 5.5, 7):
        number = asked(here).number
        verdicts.append(here.pruned(number, [runs([0, 0, value], status=None)]))
    # Alone; below the best; the best; second of four, of which one third is one; the best.
    assert verdicts == [False, True, False, True, False]


@pytest.mark.long
def test_hyperband_prunes_in_some_of_its_brackets(search: Any, runs: Any) -> None:
    here = search(pruner="hyperband", prune_after=0.3)
    finished(here, runs, [5] * 3, [6] * 3)
    verdicts = [here.pruned(asked(here).number, [runs([-value] * 3, status=None)]) for value in range(6)]
    assert set(verdicts) == {True, False}


@pytest.mark.parametrize("changes", [{"pruner": "none"}, {"objective": ["final", "auc"]}])
def test_nobody_is_pruned_without_a_pruner_or_with_several_objectives(
    search: Any, runs: Any, changes: dict[str, object]
) -> None:
    here = search(prune_after=0.1, **changes)
    finished(here, runs, *([[5] * 4] * 3))
    assert not here.prunes
    assert not here.pruned(asked(here).number, [runs([0] * 4, status=None)])
    assert here.to_json()["pruner"] == "none"


@pytest.mark.long
def test_where_few_frames_are_sought_low_returns_are_pruned(search: Any, runs: Any) -> None:
    here = search(objective="frames", prune_after=0.3)
    finished(here, runs, *([[100, 200, 300, 475]] * 3))
    assert here.trials()[0].scores == (400.0,)
    assert not here.pruned(asked(here).number, [runs([400, 400, 400], status=None)])
    assert here.pruned(asked(here).number, [runs([9, 9, 9], status=None)])
    here.tell(3, [runs([475])])
    assert here.best()[0].number == 3  # fewer frames are better


def test_a_run_that_somebody_called_off_prunes_its_trial(search: Any, runs: Any) -> None:
    here = search(pruner="none")
    assert here.tell(asked(here).number, [runs([1.0], status="pruned"), runs([1.0])]).state == "pruned"


def test_several_objectives_have_a_front(search: Any, runs: Any) -> None:
    here = search(objective=["final", "frames"])
    stop: JsonValue = {"return_threshold": 5.0}
    # (final, frames): slow and good; fast and less good; slow and bad, which the first beats in both.
    for curve, final in (([1, 1, 5], 9.0), ([5, 5, 5], 6.0), ([1, 1, 1, 5], 8.0)):
        here.tell(asked(here).number, [runs(curve, final=final, stop=stop)])
    assert [(trial.number, trial.scores) for trial in here.best()] == [(0, (9.0, 300.0)), (1, (6.0, 100.0))]


@pytest.mark.long
def test_a_gaussian_process_proposes_too(search: Any, runs: Any) -> None:
    here = search(sampler="gp", startup_trials=2)
    for number in range(4):
        here.tell(asked(here).number, [runs([float(number)])])
    assert len({trial.values["optim.lr"] for trial in here.trials()}) == 4

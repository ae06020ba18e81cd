"""Every rule on a run that has the fault and on one that has not."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from compositions import run_config
from probes import PROBE_ACTIONS, run

from rltool.commands import doctor
from rltool.errors import ConfigError
from rltool.health import NAMES, RULES, Checkup, Finding, History, document, examine
from rltool.logs import HealthLog
from rltool.records import Record

Series = Mapping[str, list[float]]
POINTS = 40
PPO = {
    "total_frames": 40_000,
    "algo": {
        "kind": "ppo",
        "entropy_coeff": 0.0,
        "initial_std": 1.0,
        "max_grad_norm": 0.5,
        "target_kl": None,
        "normalize_observation": False,
    },
    "optim": {"lr": 3e-4, "schedule": "constant"},
    "env": {"kwargs": {}, "wrappers": []},
}
DQN = {
    "total_frames": 40_000,
    "algo": {
        "kind": "dqn",
        "epsilon": {"start": 1.0, "end": 0.05, "frames": 10_000},
        "learning_starts": 1000,
        "double": False,
    },
    "buffer": {"size": 500},
    "optim": {"lr": 3e-4},
}


def flat(value: float) -> list[float]:
    return [value] * POINTS


def line(start: float, end: float) -> list[float]:
    return [start + (end - start) * index / (POINTS - 1) for index in range(POINTS)]


def powers(start: float, factor: float) -> list[float]:
    return [start * factor**index for index in range(POINTS)]


STEPS = {"train/updates": line(0, 1000)}
# Rule -> configuration, what a run with the fault shows, what one without shows.
CASES: dict[str, tuple[dict[str, Any], Series, Series]] = {
    "entropy_collapsed": (PPO, {"policy/entropy": powers(0.69, 0.8)}, {"policy/entropy": line(0.69, 0.3)}),
    "entropy_stays": (PPO, {"policy/entropy": flat(0.69)}, {"policy/entropy": line(0.69, 0.5)}),
    "kl_high": (PPO, {"policy/approx_kl": flat(0.08)}, {"policy/approx_kl": flat(0.01)}),
    "kl_low": (PPO, {"policy/approx_kl": flat(1e-7)}, {"policy/approx_kl": flat(0.003)}),
    "clip_fraction_high": (PPO, {"train/clip_fraction": flat(0.6)}, {"train/clip_fraction": flat(0.2)}),
    "explained_variance_negative": (
        PPO,
        {"critic/explained_variance": flat(-0.5)},
        {"critic/explained_variance": line(-0.5, 0.9)},
    ),
    "value_loss_grows": (PPO, {"critic/value_loss": powers(0.1, 1.5)}, {"critic/value_loss": line(0.1, 3.0)}),
    "q_beyond_reach": (DQN, {"critic/q_limit_share": line(0.1, 3.0)}, {"critic/q_limit_share": line(0.1, 1.0)}),
    "gradient_clipped": (PPO, {"train/grad_norm": flat(30.0)}, {"train/grad_norm": flat(0.9)}),
    "learning_rate_zero": (
        PPO,
        {"train/learning_rate": [*line(3e-4, 0.0)[:-10], *[0.0] * 9]},
        {"train/learning_rate": line(3e-4, 0.0)},
    ),
    "epsilon_high": (DQN, {"policy/epsilon": line(1.0, 0.5)}, {"policy/epsilon": line(1.0, 0.05)}),
    "epsilon_spent": (
        DQN,
        {"policy/epsilon": flat(0.05), "train/updates": [0.0, 0.0, *line(1, 1000)[2:]]},
        {"policy/epsilon": line(1.0, 0.05), **STEPS},
    ),
    "advantages_equal": (
        PPO,
        {"data/advantage_std": flat(0.0), "data/advantage_mean": flat(0.0)},
        {"data/advantage_std": flat(0.7), "data/advantage_mean": flat(0.0)},
    ),
    "rewards_zero": (
        PPO,
        {"data/reward_min": flat(0.0), "data/reward_max": flat(0.0)},
        {"data/reward_min": flat(0.0), "data/reward_max": [*flat(0.0)[:2], 1.0, *flat(0.0)[3:]]},
    ),
    "reward_spike": (
        PPO,
        {"data/reward_min": flat(0.0), "data/reward_max": [*flat(1.0)[:20], 1e30, *flat(1.0)[21:]]},
        {"data/reward_min": flat(0.0), "data/reward_max": [*flat(1.0)[:20], 100.0, *flat(1.0)[21:]]},
    ),
    "input_scale": (PPO, {"data/input_abs_max": flat(4000.0)}, {"data/input_abs_max": flat(8.0)}),
    "input_constant": (PPO, {"data/input_constant_share": flat(1.0)}, {"data/input_constant_share": flat(0.5)}),
    "actions_at_bound": (PPO, {"policy/bound_share": flat(0.99)}, {"policy/bound_share": flat(0.3)}),
    "one_action": (
        DQN,
        {"policy/action_share/0": flat(0.001), "policy/action_share/1": flat(0.999)},
        {"policy/action_share/0": flat(0.3), "policy/action_share/1": flat(0.7)},
    ),
    "no_episode": (PPO, {"episode/finished": flat(0.0)}, {"episode/finished": line(0, 90)}),
    "buffer_small": (DQN, {"buffer/filled": flat(1.0)}, {"buffer/filled": line(0.0, 0.9)}),
    "buffer_stale": (DQN, {"buffer/replay_age": flat(2e6)}, {"buffer/replay_age": flat(2e4)}),
    "no_updates": (
        DQN,
        {"episode/finished": line(1, 90), "train/updates": flat(0.0)},
        {"episode/finished": line(1, 90), **STEPS},
    ),
    "plateau": (PPO, {"eval/return_mean": [*line(0, 100)[:10], *flat(20.0)[10:]]}, {"eval/return_mean": line(0, 100)}),
    "returns_equal": (
        PPO,
        {"episode/return": flat(-200.0)},
        {"episode/return": [*flat(-200.0)[:9], *flat(-199.0)[9:]]},
    ),
    "returns_fell": (
        PPO,
        {"eval/return_mean": [*line(0, 400)[:30], *flat(20.0)[30:]]},
        {"eval/return_mean": [*line(0, 400)[:30], *flat(250.0)[30:]]},
    ),
    "evaluation_below_training": (
        PPO,
        {"episode/return": line(0, 100), "eval/return_mean": flat(10.0)},
        {"episode/return": line(0, 100), "eval/return_mean": line(0, 90)},
    ),
    "slower": (
        DQN,
        {**STEPS, "time/frames_per_second": line(1000, 100)},
        {**STEPS, "time/frames_per_second": [5000.0, *flat(900.0)[1:]]},
    ),
    "memory_grows": (PPO, {"time/memory": line(500, 3000)}, {"time/memory": [*line(500, 900)[:10], *flat(900.0)[10:]]}),
    "saturated_units": (PPO, {"policy/saturated_units": flat(0.8)}, {"policy/saturated_units": flat(0.1)}),
}


def examined(series: Series, config: Mapping[str, object], threshold: float | None = None) -> Checkup:
    points = [
        {
            "frames": float(1000 * (index + 1)),
            **{name: values[index] for name, values in series.items() if index < len(values)},
        }
        for index in range(POINTS)
    ]
    return examine(points, config, threshold)


def all_told(checkup: Checkup) -> set[str]:
    return {finding.rule for finding in checkup.told}


@pytest.mark.parametrize("name", NAMES)
def test_a_fault_is_found_where_it_is_and_only_there(name: str) -> None:
    config, faulty, sound = CASES[name]
    finding = next(finding for finding in examined(faulty, config).told if finding.rule == name)
    assert any(character.isdigit() for character in finding.seen), "with figures"
    assert name not in all_told(examined(sound, config))


@pytest.mark.parametrize("name", NAMES)
def test_a_remedy_names_keys_that_there_are(name: str) -> None:
    """Every key is one of some algorithm's configuration."""
    configs = [
        run_config(f"algo={algo}", f"env={env}").model_dump()
        for algo, env in (("ppo", "cartpole"), ("dqn", "cartpole"), ("sac", "pendulum"))
    ]
    (rule,) = (rule for rule in RULES if rule.name == name)
    keys = [key for key, _ in rule.remedies]
    assert keys
    for key in keys:
        assert any(History(config).has(key) for config in configs) or key == "env.observation_keys", key


def test_names_are_told_once_and_well() -> None:
    assert len(set(NAMES)) == len(NAMES) == len(CASES)


def test_a_fault_is_told_when_it_comes_and_when_it_goes() -> None:
    checkup = Checkup(History(PPO))
    told: list[tuple[int, str, int | None]] = []
    for index, value in enumerate([0.08] * 7 + [0.01] * 3):
        told += [(index, one.rule, one.gone) for one in checkup.add({"policy/approx_kl": value}, 100 * (index + 1))]
    assert told == [(4, "kl_high", None), (7, "kl_high", 800)]
    assert not checkup.open


def test_advice_names_what_is_set_now_and_leaves_out_what_is_set_so_already() -> None:
    (finding,) = examined({"data/input_abs_max": flat(4000.0)}, PPO).open.values()
    assert finding.remedies == ["algo.normalize_observation: true (now false)"]
    config = {**PPO, "algo": {**PPO["algo"], "normalize_observation": True}}  # type: ignore[dict-item]
    (finding,) = examined({"data/input_abs_max": flat(4000.0)}, config).open.values()
    assert finding.remedies == []
    assert finding.line.startswith("inputs of the networks are large: inputs of the networks are as large as 4,000")


def test_what_is_solved_need_not_explore() -> None:
    collapsed = {"policy/entropy": powers(0.69, 0.8), "eval/return_mean": flat(500.0)}
    assert "entropy_collapsed" not in all_told(examined(collapsed, PPO, threshold=475.0))
    assert "entropy_collapsed" in all_told(examined(collapsed, PPO, threshold=600.0))


def test_returns_fall_in_training_too_where_evaluations_are_few() -> None:
    training = [*line(20, 500)[:30], *flat(150.0)[30:]]
    few = {"episode/return": training, "eval/return_mean": [500.0, 200.0, 150.0]}
    assert "episode/return was" in examined(few, PPO).open["returns_fell"].seen


def test_returns_that_are_only_noisy_have_not_fallen() -> None:
    """As those of a random policy on CartPole."""
    noisy = {"episode/return": [22.0, 35.0, 19.0, 41.0, 28.0, 17.0, 25.0, 33.0, 20.0, 14.0, 16.0, 12.0]}
    assert "returns_fell" not in all_told(examined(noisy, DQN))


def test_a_short_overshoot_of_q_is_no_fault() -> None:
    """As double DQN does it on CartPole with γ = 0.98, on its way to 500."""
    assert "q_beyond_reach" not in all_told(
        examined({"critic/q_limit_share": [0.2, 0.9, 1.3, 1.4, 1.25, *flat(1.0)]}, DQN)
    )


def test_what_is_seen_is_of_now_and_since_when_is_of_then() -> None:
    checkup = examined({"data/reward_min": flat(0.0), "data/reward_max": flat(0.0)}, PPO)
    finding = checkup.open["rewards_zero"]
    assert (finding.frames, finding.seen) == (4000, "every reward of 40,000 frames was 0")
    assert checkup.told[0].seen == "every reward of 4,000 frames was 0"


def test_the_deviation_of_numbers_is_read_from_their_entropy() -> None:
    """A Gaussian of d dimensions and deviation σ has d (½ ln 2πe + ln σ) nats."""
    normal = 0.5 * math.log(2 * math.pi * math.e)
    entropy = [3 * (normal + math.log(sigma)) for sigma in line(1.0, 0.001)]
    bounds = {"policy/bound_share": flat(0.0)}
    checkup = examined({"policy/entropy": entropy, **bounds}, {**PPO, "total_frames": 400_000})
    assert "standard deviation is about 0.005" in checkup.open["entropy_collapsed"].seen
    negative = [3 * (normal + math.log(sigma)) for sigma in line(1.0, 0.1)]
    assert "entropy_collapsed" not in all_told(examined({"policy/entropy": negative, **bounds}, PPO))


def test_a_long_history_stays_small_and_keeps_its_first_point() -> None:
    history = History(PPO)
    for index in range(5000):
        history.add({"policy/entropy": float(index)}, index)
    kept = history.at("policy/entropy")
    assert len(kept) <= 1000
    assert kept[0] == (0, 0.0)
    assert kept[-1] == (4999, 4999.0)
    assert kept == sorted(kept)


def test_no_figure_is_no_fault() -> None:
    assert not examined({"policy/approx_kl": flat(math.nan), "data/input_abs_max": flat(math.inf)}, PPO).told
    assert not examine([], PPO).told
    assert not examine([{"frames": 10.0}], {}).told


# ------------------------------------------------------------------------------------------------------- in a whole run


def lines(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "health.jsonl").read_text().splitlines()]


HOPELESS = ("env=gym", "env.id=probes:Probe-v0", "env.kwargs={n: 5, reward: 0.0}", "logging.interval=40")


def test_a_run_says_what_is_wrong_and_stops_where_asked_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (*HOPELESS, "total_frames=1000", "stop.on=[rewards_zero]", "eval.interval=1000", "quiet=false")
    result = run(tmp_path / "run", "dqn", *words)
    assert (result["status"], result["error"]) == ("stopped", None)
    assert 100 <= result["frames"] < 200  # type: ignore[operator]
    assert "rewards_zero" in result["health"]  # type: ignore[operator]
    (finding,) = (line for line in lines(tmp_path / "run") if line["rule"] == "rewards_zero")
    assert (finding["state"], finding["frames"], finding["since"]) == ("seen", result["frames"], result["frames"])
    out = capsys.readouterr().out
    assert f"health: no reward has been seen: every reward of {result['frames']} frames was 0. Try env.kwargs" in out
    assert "stopped (stop.on: rewards_zero) after" in out
    assert (tmp_path / "run/checkpoints/last.ckpt").is_file()
    # It goes on where it is resumed: the fault is known.
    from rltool import train

    again = train(f"resume={tmp_path / 'run'}")
    assert (again["status"], again["frames"]) == ("finished", 1000)
    assert [line for line in lines(tmp_path / "run") if line["rule"] == "rewards_zero"] == [finding]


def test_the_same_is_found_afterwards(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path / "run", "ppo", *HOPELESS, "total_frames=640")
    capsys.readouterr()
    from rltool.cli import parse

    assert doctor.main(parse("doctor", [str(tmp_path), "--json"])) == 0
    (told,) = json.loads(capsys.readouterr().out)
    assert told["status"] == "finished"
    assert "rewards_zero" in [finding["rule"] for finding in told["open"]]
    live = [(line["rule"], line["state"]) for line in lines(tmp_path / "run")]
    assert [(one["rule"], "seen") for one in told["open"]] == [each for each in live if each[1] == "seen"]
    assert doctor.main(parse("doctor", [str(tmp_path / "run/checkpoints/last.ckpt")])) == 0
    text = capsys.readouterr().out
    assert "no reward has been seen (rewards_zero)" in text
    assert "try algo.entropy_coeff: raise, to 0.01 say (now 0.0)" in text
    assert max(map(len, text.splitlines()[1:])) <= 100
    with pytest.raises(ConfigError, match=r"there is no .*nothing"):
        doctor.main(parse("doctor", [str(tmp_path / "nothing")]))


def test_a_damaged_health_file_is_written_anew(tmp_path: Path) -> None:
    (tmp_path / "health.jsonl").write_text('{"frames": 10, "sta')
    finding = Finding("kl_high", 500, "title", "seen", "cause", [])
    log = HealthLog(tmp_path, [finding])
    log.add(Finding("kl_high", 500, "title", "seen", "cause", [], gone=900))
    log.close()
    assert [(line["frames"], line["state"], line["since"]) for line in lines(tmp_path)] == [
        (500, "seen", 500),
        (900, "gone", 500),
    ]


def test_a_name_that_is_none_is_refused_with_the_nearest() -> None:
    with pytest.raises(
        ConfigError, match=r"stop\.on\[0\]: expected the name of a fault, found 'kl_hihg'\. Did you mean kl_high"
    ):
        run_config("algo=ppo", "env=cartpole", "stop.on=[kl_hihg]")


@pytest.mark.long
@pytest.mark.parametrize("algo", list(PROBE_ACTIONS))
def test_a_short_sound_run_has_no_fault(tmp_path: Path, algo: str) -> None:
    run(tmp_path, algo, "total_frames=2000", "eval=default", "eval.interval=500")
    record = Record(tmp_path)
    # What is true of any run so short: it learns nothing, and a machine may be busy.
    short = {"plateau", "learning_rate_zero", "entropy_stays", "kl_low", "slower", "returns_fell"}
    assert examine(record.points, record.config).open.keys() <= short


def test_the_document_is_written_from_the_table() -> None:
    assert (Path(__file__).parents[1] / "docs/health.md").read_text(encoding="utf-8") == document()

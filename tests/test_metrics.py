"""The meter against sums by hand; the table against the sources and its document."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from rltool import metrics
from rltool.actions import ActionSpec
from rltool.experience import Episodes, Tally
from rltool.metrics import Meter, describe, document, due, explained

ROOT = Path(__file__).resolve().parent.parent


CHOICE = ActionSpec("discrete", (), "int64", (3,), (0,))
BOX = ActionSpec("box", (2,), "float32", low=(-1.0, 0.0), high=(1.0, 4.0))


def test_rewards_and_actions_are_counted_over_the_interval() -> None:
    tally = Tally.of(np.array([[1.0, 2.0], [0.0, -5.0]]), np.array([[0, 0], [2, 0]]), CHOICE)
    tally.add(Tally.of(np.array([[4.0]]), np.array([[2]]), CHOICE))
    assert tally.metrics() == {
        "data/reward_mean": 0.4,
        "data/reward_min": -5.0,
        "data/reward_max": 4.0,
        "policy/action_share/0": 0.6,
        "policy/action_share/1": 0.0,
        "policy/action_share/2": 0.4,
    }
    numbers = Tally.of(np.ones((1, 2)), np.array([[[-1.0, 0.5], [0.9999, 3.0]]]), BOX)
    assert numbers.metrics()["policy/bound_share"] == 0.75
    unbounded = ActionSpec("box", (1,), "float32", low=(-np.inf,), high=(1.0,))
    assert set(Tally.of(np.ones((1, 1)), np.ones((1, 1, 1)), unbounded).metrics()) == {
        "data/reward_mean",
        "data/reward_min",
        "data/reward_max",
    }
    assert Tally().metrics() == {}


def test_scalars_are_means_over_everything_added() -> None:
    meter = Meter()
    for loss in (1.0, 2.0, 6.0):
        meter.add({"train/loss": torch.tensor(loss)})
    meter.add({"train/grad_norm": torch.tensor(4, dtype=torch.int64)})
    scalars, histograms = meter.flush(histograms=True)
    assert scalars == {"train/loss": 3.0, "train/grad_norm": 4.0, "episode/finished": 0.0}
    assert histograms == {}


def test_a_flush_starts_a_new_interval() -> None:
    meter = Meter()
    meter.add({"train/loss": torch.tensor(1.0)})
    meter.add_experience(Episodes([10.0], [5]), Tally())
    meter.flush(histograms=False)
    meter.add({"train/loss": torch.tensor(5.0)})
    assert meter.flush(histograms=False)[0] == {"train/loss": 5.0, "episode/finished": 1.0}
    assert meter.flush(histograms=False)[0] == {"episode/finished": 1.0}


def test_counters_and_schedules_show_their_last_value() -> None:
    meter = Meter()
    for updates in (1.0, 2.0, 30_000_001.0):
        meter.add(
            {"train/updates": torch.tensor(updates, dtype=torch.float64), "policy/epsilon": torch.tensor(1 / updates)}
        )
    scalars, _ = meter.flush(histograms=False)
    assert scalars["train/updates"] == 30_000_001.0
    assert scalars["policy/epsilon"] == pytest.approx(1 / 30_000_001)


def test_extremes_are_those_of_the_whole_interval_also_over_a_stop() -> None:
    meter = Meter()
    for number in range(300):
        meter.add({"policy/ratio_max": torch.tensor(1.0 + (number == 7)), "policy/ratio_min": torch.tensor(1.0)})
    resumed = Meter()
    resumed.load_state_dict(meter.state_dict())
    for each in (meter, resumed):
        each.add({"policy/ratio_max": torch.tensor(1.5), "policy/ratio_min": torch.tensor(0.25)})
        scalars, _ = each.flush(histograms=False)
        assert (scalars["policy/ratio_max"], scalars["policy/ratio_min"]) == (2.0, 0.25)
        each.add({"policy/ratio_max": torch.tensor(1.1)})
        assert each.flush(histograms=False)[0]["policy/ratio_max"] == pytest.approx(1.1)


def test_long_intervals_are_summed_in_blocks() -> None:
    meter = Meter()
    for number in range(1, 1001):
        meter.add({"train/loss": torch.tensor(float(number)), "train/updates": torch.tensor(number)})
    assert all(len(pending) < 256 for pending in meter._pending.values())
    scalars, _ = meter.flush(histograms=False)
    assert (scalars["train/loss"], scalars["train/updates"]) == (500.5, 1000.0)


def test_an_interval_goes_on_in_another_process() -> None:
    """The means of a run that was stopped in the middle of an interval are those of one that was not."""
    whole, first, second = Meter(), Meter(), Meter()
    values = [0.1, 0.7, 3e8, -2.0]
    for meter, part in ((whole, values), (first, values[:3])):
        for value in part:
            meter.add({"train/loss": torch.tensor(value), "policy/epsilon": torch.tensor(value)})
        meter.add_experience(
            Episodes([1.5, 2.0], [3, 4]), Tally.of(np.array([[1.0, -3.0]]), np.array([[0, 1]]), CHOICE)
        )
    first.since = 12
    second.load_state_dict(first.state_dict())
    for meter in (first, second):
        meter.add({"train/loss": torch.tensor(values[3]), "policy/epsilon": torch.tensor(values[3])})
    assert second.since == 12
    assert first.flush(histograms=False) == second.flush(histograms=False) == whole.flush(histograms=False)


def test_episode_statistics_exist_only_where_an_episode_ended() -> None:
    meter = Meter()
    meter.finished = 7
    assert meter.flush(histograms=False)[0] == {"episode/finished": 7.0}
    meter.add_experience(Episodes([300.0, 100.0], [3, 5]), Tally())
    meter.add_experience(Episodes(), Tally())
    meter.add_experience(Episodes([200.0], [4]), Tally())
    assert meter.flush(histograms=False)[0] == {
        "episode/return": 200.0,
        "episode/length": 4.0,
        "episode/finished": 10.0,
    }
    assert meter.finished == 10


def test_the_last_histogram_waits_for_a_flush_that_asks() -> None:
    meter = Meter()
    meter.add({"policy/actions": torch.tensor([1.0, 2.0])})
    meter.add({"policy/actions": torch.tensor([3.0, 4.0])})
    assert meter.flush(histograms=False)[1] == {}
    actions = meter.flush(histograms=True)[1]["policy/actions"]
    np.testing.assert_array_equal(actions, [3.0, 4.0])
    assert meter.flush(histograms=True)[1] == {}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool])
def test_histograms_of_every_type_are_copies(dtype: torch.dtype) -> None:
    meter = Meter()
    values = torch.tensor([[0, 1], [1, 1]]).to(dtype)
    meter.add({"policy/actions": values})
    array = meter.flush(histograms=True)[1]["policy/actions"]
    values.zero_()
    np.testing.assert_array_equal(array.astype(float), [[0.0, 1.0], [1.0, 1.0]])


def test_gradients_are_not_kept_alive() -> None:
    meter = Meter()
    weight = torch.tensor(2.0, requires_grad=True)
    meter.add({"train/loss": weight * 2, "policy/actions": torch.ones(2) * weight})
    scalars, histograms = meter.flush(histograms=True)
    assert scalars["train/loss"] == 4.0
    np.testing.assert_array_equal(histograms["policy/actions"], [2.0, 2.0])


def test_nan_stays_visible() -> None:
    meter = Meter()
    meter.add({"train/loss": torch.tensor(1.0)})
    meter.add({"train/loss": torch.tensor(math.nan)})
    assert math.isnan(meter.flush(histograms=False)[0]["train/loss"])


def test_all_scalars_leave_the_device_in_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[int] = []
    tolist = torch.Tensor.tolist

    def counted(tensor: torch.Tensor) -> object:
        copies.append(tensor.numel())
        return tolist(tensor)

    meter = Meter()
    for _ in range(3):
        meter.add({f"train/{number}": torch.tensor(float(number)) for number in range(20)})
    monkeypatch.setattr(torch.Tensor, "tolist", counted)
    for name in ("item", "cpu", "__float__"):
        monkeypatch.setattr(torch.Tensor, name, None)
    scalars, _ = meter.flush(histograms=False)
    assert copies == [20]
    assert scalars["train/13"] == 13.0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_metrics_of_several_devices() -> None:
    meter = Meter()
    for _ in range(2):
        meter.add({"train/loss": torch.tensor(3.0, device="cuda"), "policy/epsilon": torch.tensor(0.5)})
    meter.add({"critic/q_values": torch.ones(3, device="cuda", dtype=torch.bfloat16)})
    scalars, histograms = meter.flush(histograms=True)
    assert (scalars["train/loss"], scalars["policy/epsilon"]) == (3.0, 0.5)
    np.testing.assert_array_equal(histograms["critic/q_values"], [1.0, 1.0, 1.0])


@pytest.mark.parametrize(
    ("before", "after", "interval", "expected"),
    [
        (0, 99, 100, False),
        (0, 100, 100, True),
        (99, 100, 100, True),
        (100, 199, 100, False),
        (100, 350, 100, True),
        (100, 100, 100, False),
        (0, 10**9, None, False),
    ],
)
def test_due(before: int, after: int, interval: int | None, expected: bool) -> None:
    assert due(before, after, interval) is expected


def test_every_metric_in_the_sources_is_explained() -> None:
    pattern = re.compile(r"[\"']((?:episode|policy|critic|data|train|eval|time|params|grads)/[\w{}]+)[\"']")
    names = {
        re.sub(r"\{\w+\}", "anything", name)
        for path in (ROOT / "rltool").rglob("*.py")
        for name in pattern.findall(path.read_text(encoding="utf-8"))
    }
    assert "train/loss" in names
    explained()  # every algorithm adds its own
    assert [name for name in sorted(names) if describe(name) is None] == []


def test_describe_prefers_the_exact_row() -> None:
    rows = {
        name: describe(name) for name in ("eval/return_mean", "eval/return_min", "params/net.0.weight", "own/thing")
    }
    assert {name: row.name if row else None for name, row in rows.items()} == {
        "eval/return_mean": "eval/return_mean",
        "eval/return_min": "eval/return_<statistic>",
        "params/net.0.weight": "params/<layer>",
        "own/thing": None,
    }


def test_names_are_explained_once() -> None:
    names = [metric.name for metric in explained()]
    assert len(names) == len(set(names))


def test_the_document_is_written_from_the_table() -> None:
    assert (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8") == document(explained()), (
        "run python -m rltool.metrics"
    )


def test_main_writes_the_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metrics.main([str(tmp_path / "metrics.md")])
    assert (tmp_path / "metrics.md").read_text(encoding="utf-8") == document(explained())
    assert str(tmp_path) in capsys.readouterr().out

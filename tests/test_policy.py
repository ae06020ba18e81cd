"""A checkpoint as a function: the same action as in training and evaluation, for one observation or many."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from probes import ALGORITHMS, run
from torch import Tensor

from rltool import checkpoint
from rltool.errors import CheckpointError, ConfigError
from rltool.policy import LoadedPolicy, load_policy

OBS = ("observation",)


def observations(count: int, size: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.random.default_rng(0).normal(0, 0.5, (count, size)).astype(np.float32)


@pytest.fixture(scope="module")
def pendulum(ppo_run: Path) -> LoadedPolicy:
    return load_policy(ppo_run / "checkpoints/last.ckpt")


@pytest.fixture(scope="module")
def cartpole(dqn_run: Path) -> LoadedPolicy:
    return load_policy(str(dqn_run / "checkpoints/last.ckpt"))


def test_the_package_exports_it() -> None:
    import rltool

    assert rltool.load_policy is load_policy


def test_one_observation_gives_one_action(pendulum: LoadedPolicy, cartpole: LoadedPolicy) -> None:
    action = pendulum(observations(1, 3)[0])
    assert (type(action), action.shape, action.dtype) == (np.ndarray, (1,), np.float32)
    choice = cartpole(observations(1, 4)[0])
    assert (choice.shape, choice.dtype) == ((), np.int64)
    for policy, one in ((pendulum, action), (cartpole, choice)):
        with gymnasium.make(str(policy.env_node["id"])) as env:
            env.reset(seed=0)
            assert env.action_space.contains(one)
            env.step(one)


@pytest.mark.parametrize("count", [1, 5])
def test_a_batch_gives_a_batch_of_the_same_actions(pendulum: LoadedPolicy, cartpole: LoadedPolicy, count: int) -> None:
    for policy, size in ((pendulum, 3), (cartpole, 4)):
        data = observations(count, size)
        together = policy(data)
        assert together.shape[0] == count
        np.testing.assert_allclose(together, np.stack([policy(row) for row in data]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("single", [True, False])
def test_a_tensor_gives_a_tensor(pendulum: LoadedPolicy, single: bool) -> None:
    data = observations(4, 3)[0] if single else observations(4, 3)
    action = pendulum(torch.from_numpy(data).requires_grad_())
    assert isinstance(action, Tensor)
    assert not action.requires_grad
    np.testing.assert_array_equal(action, pendulum(data))


def test_lists_and_float64_are_taken_too(pendulum: LoadedPolicy) -> None:
    data = observations(1, 3)[0]
    expected = pendulum(data)
    np.testing.assert_array_equal(pendulum(data.tolist()), expected)  # type: ignore[arg-type]
    np.testing.assert_array_equal(pendulum(data.astype(np.float64)), expected)


@pytest.mark.parametrize("shape", [(), (2,), (4, 2), (2, 2, 3)])
def test_another_shape_is_refused_with_both(pendulum: LoadedPolicy, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"expected one observation \(observation \(3,\)\) or a batch of them, found"):
        pendulum(np.zeros(shape, np.float32))


def test_actions_are_in_the_environment_s_units(pendulum: LoadedPolicy) -> None:
    data = observations(200, 3)
    units = pendulum.algorithm.policy({OBS: torch.from_numpy(data)}).detach().numpy()
    np.testing.assert_allclose(pendulum(data), 2 * np.clip(units, -1, 1), rtol=1e-6, atol=1e-7)
    sampled = pendulum(data, deterministic=False)
    assert np.abs(sampled).max() == 2.0


def test_samples_vary_and_the_mode_does_not(pendulum: LoadedPolicy, cartpole: LoadedPolicy) -> None:
    for policy, size in ((pendulum, 3), (cartpole, 4)):
        data = observations(100, size)
        np.testing.assert_array_equal(policy(data), policy(data))
        assert (policy(data, deterministic=False) != policy(data, deterministic=False)).any()


def test_the_normaliser_is_inside(pendulum: LoadedPolicy) -> None:
    data = observations(3, 3)
    (normalizer,) = pendulum.algorithm.preprocessor.normalizers.values()
    mean, scale = normalizer.mean.clone(), normalizer.var.sqrt()  # type: ignore[operator, union-attr]
    assert float(normalizer.count) == 352  # type: ignore[arg-type]
    scores = ((torch.from_numpy(data) - mean) / scale).float()
    expected = pendulum.algorithm.components()["policy"].mode({"observation": scores}).detach()  # type: ignore[attr-defined]
    np.testing.assert_allclose(pendulum(data), 2 * expected.clamp(-1, 1), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_training_evaluation_and_the_loaded_policy_act_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algo: str
) -> None:
    """One observation through the object that trained, through what evaluation asks it, and through the file."""
    seen: dict[str, Any] = {}
    save = checkpoint.Saver.last

    def spy(saver: checkpoint.Saver, algorithm: Any, state: checkpoint.State) -> Path:
        seen["algorithm"] = algorithm
        return save(saver, algorithm, state)

    monkeypatch.setattr(checkpoint.Saver, "last", spy)
    overrides = ["env=gym", "env.id=Probe-v0", "env.kwargs={obs: noise, n: 20}", "algo.normalize_observation=true"]
    if algo != "dqn":
        overrides += ["env.kwargs={obs: noise, n: 20, actions: box}"]
    run(tmp_path, algo, *overrides, "algo.warmup_frames=40", "total_frames=200")

    trained, loaded = seen["algorithm"], load_policy(tmp_path)
    data = np.random.default_rng(0).normal(105, 10, (50, 3))
    in_training = trained.actions.to_env(
        trained.policy({OBS: torch.from_numpy(data.astype(np.float32))}).detach().numpy()
    )
    np.testing.assert_array_equal(loaded(data), in_training)
    (mine,), (its,) = (part.preprocessor.normalizers.values() for part in (trained, loaded.algorithm))
    assert float(mine.count) == float(its.count) >= 200  # type: ignore[arg-type]
    np.testing.assert_allclose(its.mean, [100, 100, 100], atol=3)  # type: ignore[arg-type]
    assert (np.ptp(in_training, axis=0) > 0).all()


@pytest.mark.parametrize(
    ("obs", "single", "batch"),
    [
        (
            "dict",
            {"a": {"b": np.zeros(2)}, "a_b": np.ones(2), "c": 2},
            {"a": {"b": np.zeros((3, 2))}, "a_b": np.ones((3, 2)), "c": np.array([2, 2, 2])},
        ),
        ("tuple", (1, np.zeros(2)), (np.array([1, 1, 1]), np.zeros((3, 2)))),
        (
            "all",
            {
                "bits": np.ones(3, np.int8),
                "camera": np.full((36, 40), 9, np.uint8),
                "inner": {"c": 2, "x": np.zeros(2)},
                "several": np.array([1, 3]),
            },
            {
                "bits": np.ones((3, 3), np.int8),
                "camera": np.full((3, 36, 40), 9, np.uint8),
                "inner": {"c": np.array([2, 2, 2]), "x": np.zeros((3, 2))},
                "several": np.array([[1, 3]] * 3),
            },
        ),
        ("camera", np.full((36, 40, 3), 9, np.uint8), np.full((3, 36, 40, 3), 9, np.uint8)),
        ("discrete", 3, np.array([3, 3, 3])),
        ("scalar", 0.5, np.array([0.5, 0.5, 0.5])),
    ],
)
def test_observations_of_every_space(tmp_path: Path, obs: str, single: Any, batch: Any) -> None:
    run(tmp_path, "dqn", "env=gym", "env.id=Probe-v0", f"env.kwargs={{obs: {obs}}}", "total_frames=80")
    policy = load_policy(tmp_path)
    one, many = policy(single), policy(batch)
    assert (one.shape, many.shape) == ((), (3,))
    assert (np.asarray(many) == np.asarray(one)).all()
    assert isinstance(policy(as_tensors(batch)), Tensor)
    if obs in ("dict", "tuple", "all"):
        with pytest.raises(ValueError, match="lacks a part"):
            policy({"a": single.get("a", 0)} if isinstance(single, Mapping) else single[:1])
    assert repr(policy) == f"LoadedPolicy(Probe-v0, 80 frames, {tmp_path / 'checkpoints/last.ckpt'})"


@pytest.mark.parametrize("where", ["info", "method"])
def test_a_policy_that_learned_with_masks_asks_for_them(tmp_path: Path, where: str) -> None:
    run(tmp_path, "dqn", "env=gym", "env.id=Masked-v0", f"env.kwargs={{where: {where}}}", "total_frames=80")
    policy = load_policy(tmp_path)
    source = "env.unwrapped.action_masks()" if where == "method" else "info['action_mask']"
    with pytest.raises(ValueError, match=re.escape(f"give action_mask={source}")):
        policy(np.ones(1))
    for only in range(3):
        mask = np.arange(3) == only
        assert policy(np.ones(1), action_mask=mask) == only
        assert policy(np.ones(1), action_mask=mask.astype(np.int8), deterministic=False) == only
    several = policy(np.ones((3, 1)), action_mask=np.eye(3))
    np.testing.assert_array_equal(several, [0, 1, 2])
    assert isinstance(policy(torch.ones(3, 1), action_mask=torch.eye(3)), Tensor)
    with pytest.raises(ValueError, match=r"expected one observation .*action_mask \(3,\).*found .*action_mask \(2,\)"):
        policy(np.ones(1), action_mask=np.ones(2))


@pytest.mark.parametrize("algo", ["ppo", "dqn"])
def test_a_mask_that_is_in_the_observation_is_found_there(tmp_path: Path, algo: str) -> None:
    run(tmp_path, algo, "env=gym", "env.id=Masked-v0", "env.kwargs={where: key}", "total_frames=80")
    policy = load_policy(tmp_path)
    for only in range(3):
        mask = (np.arange(3) == only).astype(np.int8)
        assert policy({"seen": np.ones(1), "action_mask": mask}) == only
        assert policy({"seen": np.ones(1), "action_mask": np.ones(3)}, action_mask=mask) == only, "the one given counts"
    batch = {"seen": np.ones((3, 1)), "action_mask": np.eye(3, dtype=np.int8)}
    np.testing.assert_array_equal(policy(batch, deterministic=False), [0, 1, 2])


def test_a_mask_of_a_row_a_choice_is_found_in_the_observation(tmp_path: Path) -> None:
    words = ["env.id=Masked-v0", "env.kwargs={where: key, actions: pair}", "total_frames=80"]
    run(tmp_path, "ppo", "env=gym", *words)
    policy = load_policy(tmp_path)
    mask = np.array([[0, 1, 0], [0, 0, 1]], np.int8)
    one = {"seen": np.ones(1), "action_mask": mask}
    batch = {"seen": np.ones((2, 1)), "action_mask": np.stack([mask, mask[::-1]])}
    assert policy(one, deterministic=False).tolist() == [1, 2]
    assert policy(batch, deterministic=False).tolist() == [[1, 2], [2, 1]]


MASKS: dict[str, Any] = {
    "flat": np.array([1, 0, 1, 1, 0, 0, 1, 0, 0, 0, 1, 0, 0, 1]),
    "a row a choice": (np.array([1, 0]), np.array([1, 1, 0]), np.array([0, 1, 0, 0]), np.array([0, 1, 0, 0, 1])),
}


@pytest.mark.parametrize("form", MASKS)
def test_masks_of_several_choices_are_taken_as_environments_give_them(tmp_path: Path, form: str) -> None:
    run(tmp_path, "ppo", "env=gym", "env.id=Masked-v0", "env.kwargs={actions: matrix}", "total_frames=80")
    policy = load_policy(tmp_path)
    for _ in range(20):
        action = policy(np.ones(1), action_mask=MASKS[form], deterministic=False)
        assert action.shape == (2, 2)
        assert [int(action[0, 0]), int(action[1, 0])] == [0, 1]
        assert int(action[0, 1]) in (0, 1)
        assert int(action[1, 1]) in (1, 4)


def as_tensors(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: as_tensors(part) for key, part in value.items()}
    return tuple(map(as_tensors, value)) if isinstance(value, tuple) else torch.as_tensor(value)


def test_loading_leaves_the_global_generator_alone(ppo_run: Path) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    policy = load_policy(ppo_run)
    policy(observations(2, 3), deterministic=False)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.initial_seed() == 5


def test_a_policy_of_a_large_or_prioritised_buffer_needs_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path, "dqn", "buffer=prioritized", "buffer.storage=memmap", "total_frames=80")

    def refuse(*_: object) -> None:
        raise ConfigError("the compiled extension is missing")

    monkeypatch.setattr("rltool.buffers.check_compiled_extension", refuse)
    monkeypatch.setattr("rltool.memory.free_memory", lambda: 1000)
    assert load_policy(tmp_path)(observations(2, 4)).shape == (2,)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"there is no file .*nothing\.ckpt"):
        load_policy(tmp_path / "nothing.ckpt")


def test_a_device_that_is_not_there_is_refused(ppo_run: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    with pytest.raises(ConfigError, match="cuda was asked for"):
        load_policy(ppo_run, device="cuda")

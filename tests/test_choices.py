"""Choices: log-probabilities, entropies and samples against algebra, with and without masks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from builders import masked_leaves, ppo, random_masks
from gymnasium import spaces
from torch import Tensor
from torch.distributions import Categorical

from rltool.actions import ActionSpec, action_spec
from rltool.choices import LOWEST, Choices, apart, best, gumbel, masked

SPACES: list[tuple[spaces.Space[Any], float]] = [
    (spaces.Discrete(3), math.log(3)),
    (spaces.MultiDiscrete([5, 5]), 3.2189),
    (spaces.MultiDiscrete([2, 3]), 1.7918),
    (spaces.MultiBinary(4), 4 * math.log(2)),
    (spaces.MultiDiscrete([[2], [2]]), 2 * math.log(2)),
]
UNIFORM = pytest.mark.parametrize(("space", "expected"), SPACES, ids=[str(space) for space, _ in SPACES])
SEVERAL = ActionSpec("multi_discrete", (2,), "int64", (2, 3), (0, 0))
FIVE = ActionSpec("discrete", (), "int64", (5,), (0,))


def scores(count: int, options: int, seed: int = 0) -> Tensor:
    return 2 * torch.randn(count, options, generator=torch.Generator().manual_seed(seed))


@UNIFORM
def test_a_uniform_choice_has_the_entropy_of_its_options(space: spaces.Space[Any], expected: float) -> None:
    spec = action_spec(space, "Env-v0")
    policy = (
        Categorical(logits=torch.zeros(7, spec.size))
        if spec.kind == "discrete"
        else Choices(apart(torch.zeros(7, spec.size), spec.nvec))
    )
    actions = spec.random(7, torch.Generator().manual_seed(0))
    torch.testing.assert_close(policy.log_prob(actions), torch.full((7,), -expected), rtol=0, atol=1e-4)
    torch.testing.assert_close(policy.entropy(), torch.full((7,), expected), rtol=0, atol=1e-4)


@pytest.mark.parametrize("shared", ["false", "true"])
@UNIFORM
def test_an_untrained_policy_is_nearly_uniform(space: spaces.Space[Any], expected: float, shared: str) -> None:
    """The gain of 0.01 on a policy's head; within 1 %."""
    spec = action_spec(space, "Env-v0")
    algorithm = ppo(spec, f"network.shared={shared}")
    features = {"observation": torch.randn(50, 4, generator=torch.Generator().manual_seed(0))}
    with torch.no_grad():
        policy = algorithm.actor.distribution(algorithm.actor.encoder(features))
        actions = spec.random(50, torch.Generator().manual_seed(1))
        log_prob, entropy = policy.log_prob(actions), policy.entropy()
    assert log_prob.shape == entropy.shape == (50,)
    torch.testing.assert_close(log_prob, torch.full((50,), -expected), rtol=0.01, atol=0)
    torch.testing.assert_close(entropy, torch.full((50,), expected), rtol=0.01, atol=0)


def test_several_choices_are_a_product_of_softmaxes() -> None:
    nvec, row = (2, 3, 1), scores(6, 6)
    policy = Choices(apart(row, nvec))
    parts = [Categorical(logits=part) for part in row.split(list(nvec), -1)]
    total = torch.zeros(6)
    for first in range(2):
        for second in range(3):
            action = torch.tensor([first, second, 0]).expand(6, 3)
            expected = sum(part.log_prob(action[:, index]) for index, part in enumerate(parts))
            torch.testing.assert_close(policy.log_prob(action), expected)
            total += policy.log_prob(action).exp()
    torch.testing.assert_close(total, torch.ones(6))
    torch.testing.assert_close(policy.entropy(), sum(part.entropy() for part in parts))


def test_what_fills_up_a_short_choice_is_never_chosen() -> None:
    filled = apart(scores(4, 5), (2, 3))
    assert filled.shape == (4, 2, 3)
    assert (filled[:, 0, 2] == LOWEST).all()
    assert (Choices(filled).base_dist.probs[:, 0, 2] == 0).all()  # type: ignore[attr-defined]
    assert torch.equal(filled[:, 0, :2], scores(4, 5)[:, :2])
    assert torch.equal(filled[:, 1], scores(4, 5)[:, 2:])


def test_the_best_option_of_each_choice() -> None:
    row = torch.tensor([[0.0, 3.0, 5.0, 1.0, 2.0], [4.0, 3.0, 0.0, 1.0, 2.0]])
    assert best(row, (5,)).tolist() == [2, 0]
    assert best(row, (2, 3)).tolist() == [[1, 0], [0, 2]]
    assert best(row.view(2, 1, 5), (2, 3)).tolist() == [[[1, 0]], [[0, 2]]]


@pytest.mark.parametrize("nvec", [(5,), (2, 3)], ids=str)
@pytest.mark.parametrize("with_mask", [False, True], ids=["free", "masked"])
def test_samples_are_as_frequent_as_their_softmax(nvec: tuple[int, ...], with_mask: bool) -> None:
    row = scores(1, 5)
    mask = torch.tensor([[True, True, True, False, True]]) if with_mask else None
    source = torch.Generator().manual_seed(0)
    drawn = best(masked(row, mask) + gumbel((40_000, 5), source), nvec).view(40_000, len(nvec))
    start = 0
    for column, count in zip(drawn.T, nvec, strict=True):
        weights = row[0, start : start + count].exp() * (mask[0, start : start + count] if mask is not None else 1)
        shares = torch.bincount(column, minlength=count) / 40_000
        torch.testing.assert_close(shares, weights / weights.sum(), atol=0.01, rtol=0)
        start += count
    if len(nvec) == 2:
        joint = torch.bincount(drawn[:, 0] * 3 + drawn[:, 1], minlength=6).view(2, 3) / 40_000
        torch.testing.assert_close(joint, joint.sum(1, keepdim=True) * joint.sum(0, keepdim=True), atol=0.01, rtol=0)


def test_gumbel_noise_is_finite_and_has_the_mean_of_its_distribution() -> None:
    noise = gumbel((200_000,), torch.Generator().manual_seed(0))
    assert bool(noise.isfinite().all())
    assert float(noise.mean()) == pytest.approx(0.5772, abs=0.01)  # Euler's constant
    assert float(noise.var()) == pytest.approx(math.pi**2 / 6, rel=0.02)


@pytest.mark.parametrize("options", [[0], [1, 3], [0, 1, 2, 3, 4]], ids=str)
def test_a_masked_uniform_choice_has_the_entropy_of_its_valid_options(options: list[int]) -> None:
    mask = torch.zeros(1, 5, dtype=torch.bool)
    mask[0, options] = True
    policy = Categorical(logits=masked(torch.zeros(1, 5), mask), validate_args=False)
    assert policy.probs[~mask].tolist() == [0.0] * (5 - len(options))
    torch.testing.assert_close(policy.probs[mask], torch.full((len(options),), 1 / len(options)))
    assert float(policy.entropy()) == pytest.approx(math.log(len(options)), abs=1e-6)


def test_a_masked_choice_of_several_has_the_sum_of_entropies() -> None:
    mask = torch.tensor([[True, False, True, False, True]])
    policy = Choices(apart(masked(torch.zeros(1, 5), mask), (2, 3)), validate_args=False)
    assert float(policy.entropy()) == pytest.approx(math.log(1) + math.log(2), abs=1e-6)
    assert float(policy.log_prob(torch.tensor([[0, 2]]))) == pytest.approx(-math.log(2), abs=1e-6)
    assert float(policy.log_prob(torch.tensor([[1, 2]]))) < -1e30


@pytest.mark.parametrize("size", [1e-3, 1.0, 50.0])
@pytest.mark.parametrize("nvec", [(5,), (2, 3)], ids=str)
def test_gradients_under_masks_are_finite_and_none_reaches_an_invalid_option(
    nvec: tuple[int, ...], size: float
) -> None:
    spec = FIVE if len(nvec) == 1 else SEVERAL
    mask = random_masks(spec, 20)
    row = (size * scores(20, 5)).requires_grad_()
    logits = masked(row, mask)
    policy: Any = (
        Categorical(logits=logits, validate_args=False)
        if len(nvec) == 1
        else Choices(apart(logits, nvec), validate_args=False)
    )
    action = best(logits.detach() + gumbel((20, 5), torch.Generator().manual_seed(0)), nvec)
    loss = (policy.log_prob(action) + policy.entropy()).sum()
    (gradient,) = torch.autograd.grad(loss, row)
    assert bool(loss.isfinite())
    assert bool(gradient.isfinite().all())
    assert not gradient[~mask].any()


@pytest.mark.parametrize("actions", [FIVE, SEVERAL], ids=str)
def test_a_policy_never_takes_an_invalid_action(actions: ActionSpec) -> None:
    algorithm = ppo(actions, "network.init=xavier", leaves=masked_leaves(actions))
    source = torch.Generator().manual_seed(0)
    mask = random_masks(actions, 2000)
    leaves = {("observation",): 3 * torch.randn(2000, 4, generator=source), ("action_mask",): mask}
    (noise,) = algorithm.sampler.draw(1, 2000, 0, source)
    random = algorithm._random.draw(1, 2000, 0, source)
    starts = torch.tensor([0, *actions.nvec[:-1]]).cumsum(0)
    with torch.no_grad():
        chosen = {
            "greedy": algorithm.policy(leaves),
            "sampled": algorithm.sampler(leaves, (noise[0],)),
            "random": algorithm._random(leaves, (random[0][0],)),
        }
        policy: Any = algorithm.actor.distribution(algorithm.actor.encoder(algorithm.preprocessor(leaves)))
    for name, action in chosen.items():
        assert action.shape == (2000, *actions.policy_shape), name
        columns = action.view(2000, -1) + starts
        assert bool(mask.gather(-1, columns).all()), name
    assert not torch.equal(chosen["greedy"], chosen["sampled"])
    if actions is FIVE:
        assert not policy.probs[~mask].any(), "exactly 0"
    else:
        for index, (part, valid) in enumerate(
            zip(policy.base_dist.probs.unbind(1), mask.split(list(actions.nvec), -1), strict=True)
        ):
            assert not part[:, : valid.shape[-1]][~valid].any(), index
            assert not part[:, valid.shape[-1] :].any(), index


def test_a_terminal_state_without_a_valid_action_has_finite_numbers() -> None:
    """Its value is not used, yet it goes through the same networks as the others."""
    algorithm = ppo(FIVE, leaves=masked_leaves(FIVE))
    features = {"observation": torch.zeros(1, 4), "action_mask": torch.zeros(1, 5, dtype=torch.bool)}
    policy = algorithm.actor.distribution(features)
    assert bool(policy.entropy().isfinite().all())
    assert bool(policy.log_prob(torch.tensor([2])).isfinite().all())

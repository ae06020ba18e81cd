"""PPO against its written equations."""

from __future__ import annotations

import math

import pytest
import torch
from builders import BOX, DISCRETE, batch, masked_leaves, ppo, random_masks
from tensordict import TensorDict
from torch import Tensor, nn

from rltool.actions import ActionSpec
from rltool.algos.ppo import PPO, STEP_METRICS, ReturnScale, Trunk
from rltool.choices import best, masked
from rltool.nets import parameter_count


def minibatch(algorithm: PPO, actions: ActionSpec, rows: int = 6, shift: float = 0.3) -> dict[str, Tensor]:
    """Rows whose old log-probability is off, so that some ratios lie outside the clip range."""
    source = torch.Generator().manual_seed(1)
    data = {"observation": torch.randn(rows, 4, generator=source)}
    action = actions.random(rows, source)
    if algorithm.masked:
        data["action_mask"] = random_masks(actions, rows)
        action = best(masked(torch.rand(rows, actions.size, generator=source), data["action_mask"]), actions.nvec)
    with torch.no_grad():
        old = algorithm.actor.distribution(algorithm.actor.encoder(data)).log_prob(action)
    data |= {"action": action, "action_log_prob": old + shift * torch.randn(rows, generator=source)}
    return data | {
        name: torch.randn(rows, 1, generator=source) for name in ("advantage", "value_target", "state_value")
    }


def written_choice(scores: Tensor, action: Tensor, valid: Tensor, nvec: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies ``[N]``, row by row over the valid options of each choice alone."""
    log_probs, entropies = [], []
    for row in range(len(scores)):
        log_prob, entropy, start = torch.zeros(()), torch.zeros(()), 0
        for index, count in enumerate(nvec):
            allowed = valid[row, start : start + count].nonzero().flatten().tolist()
            logs = scores[row, start : start + count][allowed].log_softmax(-1)
            log_prob = log_prob + logs[allowed.index(int(action[row].reshape(-1)[index]))]
            entropy = entropy - (logs.exp() * logs).sum()
            start += count
        log_probs.append(log_prob)
        entropies.append(entropy)
    return torch.stack(log_probs), torch.stack(entropies)


def written_loss(algorithm: PPO, data: dict[str, Tensor], **values: float | bool | str | None) -> Tensor:
    """Equations 7 and 9 of the paper, in plain torch."""
    features, action, old, advantage, target, value = (
        data[name] for name in ("observation", "action", "action_log_prob", "advantage", "value_target", "state_value")
    )
    if isinstance(algorithm.actor.encoder, Trunk):
        features = algorithm.actor.encoder.body(features)
    logits_or_mean = algorithm.actor.net(features)
    if not algorithm.actions.continuous:
        valid = data.get("action_mask", torch.ones_like(logits_or_mean, dtype=torch.bool))
        log_prob, entropy = written_choice(logits_or_mean, action, valid, algorithm.actions.nvec)
    else:
        log_std = algorithm.actor.log_std
        z = (action - logits_or_mean) / log_std.exp()
        log_prob = (-0.5 * z**2 - log_std - 0.5 * math.log(2 * math.pi)).sum(-1)
        entropy = (log_std + 0.5 * math.log(2 * math.pi * math.e)).sum().expand(len(features))
    weight = advantage.squeeze(-1)
    if values.get("normalize"):
        weight = (weight - weight.mean()) / weight.std()
    ratio = (log_prob - old).exp()
    surrogate = torch.minimum(ratio * weight, ratio.clamp(0.8, 1.2) * weight).mean()
    predicted = algorithm.critic(features)  # of the shared body where there is one
    distance = nn.SmoothL1Loss(reduction="none") if values.get("huber") else nn.MSELoss(reduction="none")
    error = distance(predicted, target)
    if (clip := values.get("clip_value")) is not None:
        near = value + (predicted - value).clamp(-float(clip), float(clip))
        error = torch.maximum(error, distance(near, target))
    return -surrogate + 0.5 * error.mean() - float(values.get("entropy") or 0.0) * entropy.mean()


SEVERAL = ActionSpec("multi_discrete", (2,), "int64", (2, 3), (0, 0))
BITS = ActionSpec("multi_binary", (4,), "int8", (2, 2, 2, 2), (0, 0, 0, 0))
FIVE = ActionSpec("discrete", (), "int64", (5,), (0,))
KINDS = pytest.mark.parametrize("actions", [DISCRETE, BOX, SEVERAL, BITS], ids=lambda actions: actions.kind)


@KINDS
@pytest.mark.parametrize(
    ("overrides", "values"),
    [
        (["algo.normalize_advantage=false"], {}),
        (["algo.normalize_advantage=true"], {"normalize": True}),
        (["algo.normalize_advantage=false", "algo.entropy_coeff=0.02"], {"entropy": 0.02}),
        (["algo.normalize_advantage=false", "algo.loss_critic_type=smooth_l1"], {"huber": True}),
        (["algo.normalize_advantage=false", "algo.clip_value=0.05"], {"clip_value": 0.05}),
    ],
    ids=["plain", "normalised", "entropy", "huber", "value-clip"],
)
def test_loss_and_gradient_are_those_of_the_written_equation(
    actions: ActionSpec, overrides: list[str], values: dict[str, float | bool]
) -> None:
    algorithm = ppo(actions, "algo.max_grad_norm=null", "algo.initial_std=0.7", *overrides)
    with torch.no_grad():
        algorithm.critic.head.weight.mul_(3.0)  # so that the value differs from the old one by more than its clip
    data = minibatch(algorithm, actions)
    gradient, row = algorithm.gradient(data)

    loss = written_loss(algorithm, data, **values)
    expected = algorithm.flat.gather(torch.autograd.grad(loss, algorithm.flat.parameters))
    torch.testing.assert_close(row[STEP_METRICS.index("train/loss")], loss.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(row[STEP_METRICS.index("train/grad_norm")], expected.norm(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("masks", [False, True], ids=["free", "masked"])
@pytest.mark.parametrize("shared", [False, True], ids=["apart", "shared"])
@pytest.mark.parametrize("actions", [FIVE, SEVERAL, BITS], ids=lambda actions: actions.kind)
def test_the_written_equation_holds_with_masks_and_a_shared_body(
    actions: ActionSpec, shared: bool, masks: bool
) -> None:
    algorithm = ppo(
        actions,
        "algo.max_grad_norm=null",
        "algo.entropy_coeff=0.02",
        "network.init=xavier",
        f"network.shared={str(shared).lower()}",
        leaves=masked_leaves(actions) if masks else None,
    )
    data = minibatch(algorithm, actions)
    gradient, row = algorithm.gradient(data)
    loss = written_loss(algorithm, data, normalize=True, entropy=0.02)
    expected = algorithm.flat.gather(torch.autograd.grad(loss, algorithm.flat.parameters))
    torch.testing.assert_close(row[STEP_METRICS.index("train/loss")], loss.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("actions", [DISCRETE, BOX], ids=["discrete", "continuous"])
def test_a_shared_body_is_one_and_both_heads_train_it(actions: ActionSpec) -> None:
    algorithm = ppo(actions, "network.shared=true", "network.hidden=[8]", "algo.max_grad_norm=null")
    size = 3 if actions is DISCRETE else 2
    own = size if actions is BOX else 0  # the standard deviations
    body = 4 * 8 + 8
    assert parameter_count(algorithm.actor, algorithm.critic) == body + (8 * size + size) + own + (8 + 1)
    apart = ppo(actions, "network.hidden=[8]")
    assert parameter_count(apart.actor, apart.critic) == 2 * body + (8 * size + size) + own + (8 + 1)
    assert isinstance(algorithm.actor.encoder, Trunk)
    assert sum(p.numel() for p in algorithm.flat.parameters) == parameter_count(algorithm.actor, algorithm.critic)

    data = minibatch(algorithm, actions)
    weight = algorithm.actor.encoder.body.body.hidden[0].weight  # type: ignore[union-attr, index]
    parts = []
    for silent in ("advantage", "value_target"):
        # Without an advantage only the value moves the body; where the value is right, only the policy does.
        changed = dict(data)
        with torch.no_grad():
            value = algorithm.critic(*algorithm.actor.encoder(data).values())
            changed[silent] = torch.zeros_like(value) if silent == "advantage" else value
        losses = algorithm.loss(TensorDict(changed | algorithm.actor.encoder(changed), [6]))
        total = losses["loss_objective"] + losses["loss_critic"]
        (part,) = torch.autograd.grad(total, weight)
        assert float(part.norm()) > 1e-5, silent
        parts.append(part)
    full = algorithm.flat.views(algorithm.gradient(data)[0])["policy.encoder.body.body.hidden.0.weight"]
    torch.testing.assert_close(full, parts[0] + parts[1], rtol=1e-3, atol=1e-6)


def test_gradient_is_clipped_to_its_global_norm() -> None:
    free, clipped = (ppo(BOX, f"algo.max_grad_norm={limit}") for limit in ("null", "0.01"))
    data = minibatch(free, BOX)
    full, row = free.gradient(data)
    cut, _ = clipped.gradient(data)
    assert float(row[STEP_METRICS.index("train/grad_norm")]) > 0.01
    assert float(cut.norm()) == pytest.approx(0.01, rel=1e-3)
    torch.testing.assert_close(cut / cut.norm(), full / full.norm())


def test_kl_metric_is_the_low_variance_estimate() -> None:
    algorithm = ppo(DISCRETE)
    data = minibatch(algorithm, DISCRETE)
    action, old = data["action"], data["action_log_prob"]
    log_ratio = algorithm.actor.distribution({"observation": data["observation"]}).log_prob(action).detach() - old
    _, row = algorithm.gradient(data)
    expected = (log_ratio.exp() - 1 - log_ratio).mean()
    assert float(row[STEP_METRICS.index("policy/approx_kl")]) == pytest.approx(float(expected), rel=1e-4)


@pytest.mark.parametrize("shared", ["true", "false"])
@pytest.mark.parametrize(
    ("actions", "masks"),
    [(DISCRETE, False), (BOX, False), (SEVERAL, False), (FIVE, True), (SEVERAL, True), (BITS, True)],
)
def test_first_minibatch_has_ratio_one(actions: ActionSpec, masks: bool, shared: str) -> None:
    algorithm = ppo(
        actions,
        "algo.frames_per_batch=16",
        "algo.minibatch_size=16",
        "algo.epochs=1",
        f"network.shared={shared}",
        leaves=masked_leaves(actions) if masks else None,
    )
    metrics = algorithm.update(batch(2, 8, actions, masks=masks), 16)
    assert float(metrics["policy/ratio_mean"]) == pytest.approx(1.0, abs=1e-6)
    assert float(metrics["train/clip_fraction"]) == 0.0
    assert float(metrics["policy/approx_kl"]) == pytest.approx(0.0, abs=1e-6)


def constant_value(algorithm: PPO, value: float) -> None:
    with torch.no_grad():
        for parameter in algorithm.critic.parameters():
            parameter.zero_()
        algorithm.critic.head.bias.fill_(value)


def flags(*at: tuple[int, int], shape: tuple[int, int] = (1, 4)) -> Tensor:
    result = torch.zeros(*shape, dtype=torch.bool)
    for index in at:
        result[index] = True
    return result


@pytest.mark.parametrize(
    ("terminated", "truncated", "advantages"),
    [
        # γ = λ = 0.5, V = 2 everywhere, r = 1: δ = 1 + 0.5·2 - 2 = 0 where V(s') counts, 1 - 2 = -1 where it is cut.
        ([], [], [0.0, 0.0, 0.0, 0.0]),
        ([(0, 3)], [], [-1 / 64, -1 / 16, -1 / 4, -1.0]),
        ([(0, 1)], [], [-1 / 4, -1.0, 0.0, 0.0]),
        ([], [(0, 1)], [0.0, 0.0, 0.0, 0.0]),
        ([(0, 1)], [(0, 1)], [-1 / 4, -1.0, 0.0, 0.0]),
    ],
    ids=["batch-end", "terminal-end", "terminal-inside", "truncated-inside", "both-flags"],
)
def test_advantages_at_ends(
    terminated: list[tuple[int, int]], truncated: list[tuple[int, int]], advantages: list[float]
) -> None:
    algorithm = ppo(DISCRETE, "algo.gamma=0.5", "algo.gae_lambda=0.5", "algo.scale_reward=false", "env.num_envs=1")
    constant_value(algorithm, 2.0)
    data, _ = algorithm.prepare(
        batch(1, 4, DISCRETE, reward=torch.ones(1, 4), terminated=flags(*terminated), truncated=flags(*truncated))
    )
    torch.testing.assert_close(data["advantage"].flatten(), torch.tensor(advantages), atol=1e-6, rtol=0)
    torch.testing.assert_close(data["value_target"], data["advantage"] + 2.0)


def test_truncation_bootstraps_from_the_true_last_observation_and_cuts_the_chain() -> None:
    """The observation after a truncation in the batch is the next episode's; the last one of the episode counts."""
    algorithm = ppo(DISCRETE, "algo.gamma=0.9", "algo.gae_lambda=1.0", "algo.scale_reward=false", "env.num_envs=1")
    data = batch(1, 4, DISCRETE, reward=torch.ones(1, 4), truncated=flags((0, 1)))
    data["next", "observation"][0, 1] = torch.full((4,), 5.0)
    with torch.no_grad():
        value = algorithm.critic(data["observation"][0]).flatten()
        last = float(algorithm.critic(torch.full((1, 4), 5.0)))
        end = float(algorithm.critic(data["next", "observation"][0, 3:]))
    expected = [1 + 0.9 * (1 + 0.9 * last), 1 + 0.9 * last, 1 + 0.9 * (1 + 0.9 * end), 1 + 0.9 * end]
    prepared, _ = algorithm.prepare(data)
    torch.testing.assert_close(prepared["value_target"].flatten(), torch.tensor(expected), atol=1e-5, rtol=0)
    torch.testing.assert_close(prepared["advantage"].flatten(), torch.tensor(expected) - value, atol=1e-5, rtol=0)


def test_a_batch_goes_through_the_networks_in_pieces_of_a_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    source = batch(2, 8, DISCRETE, terminated=flags((0, 3), (1, 5), shape=(2, 8)))
    algorithm = ppo(DISCRETE, "algo.scale_reward=false")
    whole, _ = algorithm.prepare(source)
    monkeypatch.setattr("rltool.algos.ppo.FORWARD_BYTES", 3 * 4 * 4)  # three observations of four float32
    algorithm.critic.register_forward_hook(lambda module, inputs, output: sizes.append(len(output)))
    parts, _ = algorithm.prepare(source)
    assert sizes == [3, 3, 3, 3, 3, 1, 3, 1]  # 16 frames, then what followed two ends and two batch ends
    for name, column in whole.items():
        torch.testing.assert_close(parts[name], column)


def test_advantages_keep_environments_apart() -> None:
    algorithm = ppo(DISCRETE, "algo.scale_reward=false")
    both = batch(2, 5, DISCRETE, terminated=flags((0, 2), (1, 4), shape=(2, 5)))
    together, _ = algorithm.prepare(both)
    apart = torch.cat([algorithm.prepare(both[index : index + 1])[0]["advantage"] for index in range(2)])
    torch.testing.assert_close(together["advantage"], apart)


def test_reward_is_divided_by_the_deviation_of_the_discounted_return() -> None:
    scale = ReturnScale(1, 0.5, clip=100.0)
    reward, done = torch.tensor([[[1.0], [1.0], [3.0], [1.0]]]), torch.tensor([[[False], [True], [False], [False]]])
    returns = torch.tensor([1.0, 1.5, 3.0, 2.5], dtype=torch.float64)
    scaled = scale(reward, done)
    torch.testing.assert_close(scaled, reward / float(returns.std(correction=0)), rtol=1e-6, atol=0)
    # The next batch goes on from the open episode and from the statistics.
    everything = torch.cat([returns, torch.tensor([0.5 * 2.5 + 2.0], dtype=torch.float64)])
    torch.testing.assert_close(
        scale(torch.tensor([[[2.0]]]), torch.tensor([[[False]]])),
        torch.tensor([[[2.0 / float(everything.std(correction=0))]]]),
        rtol=1e-6,
        atol=0,
    )


def test_reward_scaling_subtracts_no_mean() -> None:
    scale = ReturnScale(1, 0.9)
    assert float(scale(torch.full((1, 8, 1), 2.0), torch.zeros(1, 8, 1, dtype=torch.bool)).min()) > 0


@pytest.mark.parametrize(("frames", "size", "updates", "dropped"), [(64, 16, 4, 0), (60, 16, 3, 12), (16, 16, 1, 0)])
def test_remainder_of_a_batch_sits_out_and_is_announced(frames: int, size: int, updates: int, dropped: int) -> None:
    notes: list[str] = []
    algorithm = ppo(
        DISCRETE, f"algo.frames_per_batch={frames}", f"algo.minibatch_size={size}", "algo.epochs=2", notes=notes
    )
    metrics = algorithm.update(batch(2, frames // 2, DISCRETE), frames)
    assert algorithm.counters.updates == float(metrics["train/updates"]) == 2 * updates
    assert any(f"other {dropped} frames" in note for note in notes) == bool(dropped)


def test_no_frame_is_used_twice_in_an_epoch() -> None:
    algorithm = ppo(DISCRETE)
    data = {"index": torch.arange(100)}
    first = torch.cat([part["index"] for part in algorithm._buffer.epoch(data, 16)])
    second = torch.cat([part["index"] for part in algorithm._buffer.epoch(data, 16)])
    assert len(first) == len(first.unique()) == 96
    assert not torch.equal(first, second)


def test_target_kl_stops_the_epochs() -> None:
    common = ["algo.frames_per_batch=64", "algo.minibatch_size=64", "algo.epochs=50", "optim.lr=0.05"]
    free, bound = ppo(DISCRETE, *common), ppo(DISCRETE, *common, "algo.target_kl=0.01")
    for algorithm in (free, bound):
        algorithm.update(batch(2, 32, DISCRETE), 64)
    assert free.counters.updates == 50
    assert 1 < bound.counters.updates < 50


def test_clip_range_follows_its_schedule() -> None:
    algorithm = ppo(
        DISCRETE,
        "total_frames=1000",
        "algo.clip_epsilon={start: 0.2, end: 0.0, frames: null}",
        "algo.frames_per_batch=100",
        "optim.schedule=linear",
    )
    algorithm.update(batch(2, 50, DISCRETE), 100)
    assert float(algorithm.loss.clip_epsilon) == pytest.approx(0.2)
    metrics = algorithm.update(batch(2, 50, DISCRETE), 600)
    assert float(algorithm.loss.clip_epsilon) == pytest.approx(0.1)
    assert float(metrics["train/learning_rate"]) == pytest.approx(3e-4 * 0.5)


def test_initial_policy_is_nearly_uniform_and_the_head_small() -> None:
    algorithm = ppo(DISCRETE)
    weights = algorithm.actor.net.head.weight
    torch.testing.assert_close(weights @ weights.T, 1e-4 * torch.eye(3), atol=1e-7, rtol=0)
    hidden = algorithm.actor.net.body.hidden[0].weight
    torch.testing.assert_close(hidden.T @ hidden, 2 * torch.eye(4), atol=1e-5, rtol=0)
    entropy = algorithm.actor.distribution({"observation": torch.randn(5, 4)}).entropy()
    torch.testing.assert_close(entropy, torch.full((5,), math.log(3)), atol=1e-3, rtol=0)


def test_samples_follow_the_policy() -> None:
    """Gumbel noise and the argmax draw each action as often as its probability says."""
    algorithm = ppo(DISCRETE)
    with torch.no_grad():
        for parameter in algorithm.actor.parameters():
            parameter.zero_()
        algorithm.actor.net.head.bias.copy_(torch.tensor([0.5, 0.3, 0.2]).log())
    noise = algorithm.sampler.draw(1, 20_000, 0, torch.Generator().manual_seed(0))
    action = algorithm.sampler({("observation",): torch.zeros(20_000, 4)}, (noise[0][0],))
    shares = torch.bincount(action, minlength=3) / 20_000
    torch.testing.assert_close(shares, torch.tensor([0.5, 0.3, 0.2]), atol=0.015, rtol=0)


def test_statistics_move_after_the_update_only() -> None:
    algorithm = ppo(
        DISCRETE,
        "algo.normalize_observation=true",
        "algo.warmup_frames=20",
        "algo.frames_per_batch=20",
        "algo.minibatch_size=10",
    )
    assert algorithm.warming_up
    assert algorithm.frames_per_batch == 20
    warmup = batch(2, 10, DISCRETE)
    assert algorithm.update(warmup, 20) == {}
    assert not algorithm.warming_up
    (normalizer,) = algorithm.preprocessor.normalizers.values()
    torch.testing.assert_close(normalizer.mean.float(), warmup["observation"].reshape(-1, 4).mean(0))
    later = batch(2, 10, DISCRETE, seed=1)
    with torch.no_grad():
        before = algorithm.preprocessor({("observation",): later["observation"]})["observation"]
        data, _ = algorithm.prepare(later)
    torch.testing.assert_close(data["observation"], before.flatten(0, 1))
    algorithm.update(later, 40)
    assert float(normalizer.count) == 40


def test_random_warm_up_comes_in_pieces() -> None:
    """Of 250 steps of each environment, or of a batch where that is more; the last piece is what is left."""
    algorithm = ppo(DISCRETE, "algo.frames_per_batch=64", "algo.minibatch_size=32", "algo.warmup_frames=2e9")
    assert algorithm.frames_per_batch == 2 * 250
    algorithm.counters.warmup = 2 * 10**9 - 30
    assert algorithm.frames_per_batch == 30
    assert ppo(DISCRETE, "algo.frames_per_batch=1024", "algo.warmup_frames=2e9").frames_per_batch == 1024


# ------------------------------------------------------------------------------------------------------------ metrics


def test_what_the_epochs_made_of_the_policy_is_looked_at() -> None:
    """Without a step's length nothing moves: every ratio is 1, the estimate of the KL 0, and no value is clipped."""
    algorithm = ppo(
        DISCRETE, "algo.frames_per_batch=32", "algo.minibatch_size=16", "algo.clip_value=0.2", "optim.lr=1e-30"
    )
    assert algorithm.inspect() == {}, "before the first update"
    metrics = algorithm.update(batch(2, 16, DISCRETE), 32)
    looked = algorithm.inspect()
    for name in ("policy/ratio_min", "policy/ratio_max"):
        assert float(looked[name]) == pytest.approx(1.0, abs=1e-5)
    assert float(metrics["policy/approx_kl_max"]) == pytest.approx(0.0, abs=1e-5)
    assert float(metrics["critic/clip_fraction"]) == 0.0
    assert {"policy/saturated_units", "critic/saturated_units", "data/input_abs_max"} <= set(looked)


def test_the_ratio_is_that_of_the_new_to_the_old_policy() -> None:
    algorithm = ppo(DISCRETE, "algo.frames_per_batch=32", "algo.minibatch_size=32", "optim.lr=1e-30")
    data = batch(2, 16, DISCRETE)
    algorithm.update(data, 32)
    before = algorithm.actor.distribution({"observation": data["observation"].flatten(0, 1)}).logits.detach()
    algorithm.actor.net.head.bias.data += torch.tensor([0.0, 1.0, -1.0])
    after = (before + torch.tensor([0.0, 1.0, -1.0])).log_softmax(-1)
    action = data["action"].flatten().unsqueeze(-1)
    ratio = (after - before).gather(-1, action).exp()
    looked = algorithm.inspect()
    assert float(looked["policy/ratio_min"]) == pytest.approx(float(ratio.min()), rel=1e-4)
    assert float(looked["policy/ratio_max"]) == pytest.approx(float(ratio.max()), rel=1e-4)


RAW = ("algo.frames_per_batch=32", "algo.minibatch_size=32", "algo.scale_reward=false")


@pytest.mark.parametrize(("gamma", "gae_lambda"), [(0.9, 0.0), (0.0, 0.95), (0.0, 0.0), (0.5, 1e-8)])
def test_advantages_without_a_trace_are_the_errors_of_single_steps(gamma: float, gae_lambda: float) -> None:
    """A = r + γ (1 - terminated) V(s') - V(s)."""
    algorithm = ppo(DISCRETE, *RAW, f"algo.gamma={gamma}", f"algo.gae_lambda={gae_lambda}")
    terminated = torch.zeros(2, 16, dtype=torch.bool)
    terminated[0, 5] = terminated[1, 15] = True
    data = batch(2, 16, DISCRETE, terminated=terminated)
    prepared, _ = algorithm.prepare(data)
    value, following = (
        algorithm.critic(observed.flatten(0, 1)).detach()
        for observed in (data["observation"], data["next", "observation"])
    )
    ends, reward = terminated.flatten().unsqueeze(-1), data["next", "reward"].flatten(0, 1)
    torch.testing.assert_close(prepared["advantage"], reward + gamma * ~ends * following - value)


def test_value_and_return_correlate_whatever_their_scale() -> None:
    """With γ = 0 the target is the reward; the value is made half of it, plus one."""
    algorithm = ppo(DISCRETE, *RAW, "algo.gamma=0.0", "algo.gae_lambda=0.0")
    data = batch(2, 16, DISCRETE)
    head = nn.Linear(4, 1)
    head.weight.data, head.bias.data = torch.tensor([[0.5, 0.0, 0.0, 0.0]]), torch.tensor([1.0])
    algorithm.critic = head
    data["next", "reward"] = data["observation"][..., :1].clone()
    _, metrics = algorithm.prepare(data)
    assert float(metrics["critic/value_return_correlation"]) == pytest.approx(1.0)
    assert float(metrics["critic/explained_variance"]) == pytest.approx(0.75)
    head.weight.data.zero_()
    assert float(algorithm.prepare(data)[1]["critic/value_return_correlation"]) == 0.0

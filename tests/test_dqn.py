"""DQN and its buffers against their written equations."""

from __future__ import annotations

import pytest
import torch
from builders import BOX, DISCRETE, batch, dqn, masked_leaves, random_masks, run_config, runtime
from torch import Tensor, nn

from rltool.actions import ActionSpec
from rltool.algos.dqn import DQN
from rltool.choices import best, masked
from rltool.errors import ConfigError
from rltool.seeding import Stream, generator


def minibatch(rows: int = 6) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What :meth:`DQN.gradient` takes: now, following."""
    source = torch.Generator().manual_seed(1)
    features, following = (torch.randn(rows, 4, generator=source) for _ in range(2))
    action = torch.randint(3, (rows,), generator=source)
    reward = 3 * torch.randn(rows, 1, generator=source)
    terminated = torch.tensor([[False], [True], [False], [False], [True], [False]])
    weight = torch.rand(rows, generator=source)
    now = {"observation": features, "action": action, "priority_weight": weight}
    return now, {"observation": following, "reward": reward, "terminated": terminated, "done": terminated}


def other_target(algorithm: DQN, actions: ActionSpec = DISCRETE) -> nn.Module:
    """Gives the target weights of its own; returns a network with them."""
    with torch.no_grad():
        for tensor in algorithm.target.state_dict().values():
            tensor.add_(0.1 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(2)))
    twin = dqn(actions=actions)
    twin.net.load_state_dict(algorithm.target.state_dict())
    return twin.net


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("huber", [False, True])
def test_loss_and_gradient_are_those_of_the_written_equation(double: bool, huber: bool) -> None:
    algorithm = dqn(
        f"algo.double={double}", f"algo.loss_function={'smooth_l1' if huber else 'l2'}", "algo.max_grad_norm=null"
    )
    target = other_target(algorithm)
    now, after = minibatch()
    action, weight, following = now["action"], now["priority_weight"], after["observation"]

    q = algorithm.net(now["observation"]).gather(-1, action.unsqueeze(-1)).squeeze(-1)
    with torch.no_grad():
        values = target(following)
        chooser = algorithm.net(following) if double else values
        highest = values.gather(-1, chooser.argmax(-1, keepdim=True)).squeeze(-1)
        y = after["reward"].squeeze(-1) + 0.99 * (~after["terminated"].squeeze(-1)) * highest
    distance = nn.SmoothL1Loss(reduction="none") if huber else nn.MSELoss(reduction="none")
    loss = (weight * distance(q, y)).mean()
    expected = algorithm.flat.gather(torch.autograd.grad(loss, algorithm.flat.parameters))

    gradient, row, td_error = algorithm.gradient(now, after)
    torch.testing.assert_close(row[DQN.step_metrics.index("train/loss")], loss.detach())
    torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(td_error, (q - y).abs().detach())


def test_halved_importance_weights_halve_the_loss() -> None:
    algorithm = dqn("buffer=prioritized")
    now, after = minibatch()
    weight = now["priority_weight"]
    whole, half = (
        algorithm.gradient({**now, "priority_weight": factor * weight}, after)[1][0] for factor in (1.0, 0.5)
    )
    torch.testing.assert_close(half, whole / 2)


def test_a_time_limit_does_not_cut_the_target() -> None:
    """What is stored under ``terminated`` decides, never ``truncated`` or ``done``."""
    algorithm = dqn("env.num_envs=1", "algo.learning_starts=4", "algo.minibatch_size=4")
    ends = torch.tensor([[False, True, False, False]])
    algorithm.buffer.extend(batch(1, 4, algorithm.actions, truncated=ends))
    (drawn,) = algorithm.buffer.draw(4, 4)
    _, following = algorithm.columns(drawn)
    assert bool(drawn["next", "done"].any())
    assert not bool(following["terminated"].any())
    assert not bool(following["done"].any())


def test_continuous_actions_are_refused_by_name() -> None:
    config = run_config("algo=dqn")
    with pytest.raises(ConfigError, match=r"dqn needs a Discrete action space.*Box\(2,\).*Use algo=ppo"):
        config.algo.build(run=runtime(config, BOX))


# -------------------------------------------------------------------------------------------------------------- masks

FIVE = ActionSpec("discrete", (), "int64", (5,), (0,))


@pytest.mark.parametrize("double", [False, True])
def test_the_target_takes_the_best_valid_action_only(double: bool) -> None:
    """Written out row by row; the last row ended and has no valid action, the one before has a single one."""
    algorithm = dqn(
        f"algo.double={double}",
        "algo.loss_function=l2",
        "algo.max_grad_norm=null",
        actions=FIVE,
        leaves=masked_leaves(FIVE),
    )
    target = other_target(algorithm, FIVE)
    source = torch.Generator().manual_seed(1)
    now_valid, next_valid = random_masks(FIVE, 6, seed=3), random_masks(FIVE, 6, seed=4)
    next_valid[4] = torch.tensor([False, False, True, False, False])
    next_valid[5] = False
    terminated = torch.tensor([False, False, True, False, False, True]).unsqueeze(-1)
    action = best(masked(torch.rand(6, 5, generator=source), now_valid), FIVE.nvec)
    observation, following = (3 * torch.randn(6, 4, generator=source) for _ in range(2))
    reward, weight = torch.randn(6, 1, generator=source), torch.rand(6, generator=source)

    q = algorithm.net(observation)[torch.arange(6), action]
    targets, free = [], []
    with torch.no_grad():
        values, online = target(following), algorithm.net(following)
        chooser = online if double else values
        for row in range(6):
            valid = next_valid[row].nonzero().flatten().tolist()
            y = float(reward[row])
            if not terminated[row]:
                chosen = max(valid, key=lambda option: float(chooser[row, option]))
                y += 0.99 * float(values[row, chosen])
                free.append(int(chooser[row].argmax()) not in valid)
            targets.append(y)
    assert any(free), "some row's best action is invalid, or the mask is not tested"
    loss = (weight * (q - torch.tensor(targets)) ** 2).mean()
    expected = algorithm.flat.gather(torch.autograd.grad(loss, algorithm.flat.parameters))

    gradient, row_of_metrics, td_error = algorithm.gradient(
        {"observation": observation, "action_mask": now_valid, "action": action, "priority_weight": weight},
        {
            "observation": following,
            "action_mask": next_valid,
            "reward": reward,
            "terminated": terminated,
            "done": terminated,
        },
    )
    torch.testing.assert_close(td_error, (q.detach() - torch.tensor(targets)).abs(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        row_of_metrics[DQN.step_metrics.index("train/loss")], loss.detach(), rtol=1e-4, atol=1e-6
    )
    torch.testing.assert_close(gradient, expected, rtol=1e-3, atol=1e-5)


def test_what_is_stored_and_drawn_keeps_its_masks() -> None:
    algorithm = dqn("algo.learning_starts=10", "algo.minibatch_size=4", actions=FIVE, leaves=masked_leaves(FIVE))
    given = batch(2, 10, FIVE, masks=True)
    metrics = algorithm.update(given, 20)
    assert bool(metrics["train/loss"].isfinite())
    (drawn,) = algorithm.buffer.draw(3, 4)
    now, following = algorithm.columns(drawn)
    for row in range(12):
        step, column = divmod(row, 4)
        found = (given["observation"] == now["observation"][step, column]).all(-1).nonzero()[0].tolist()
        assert torch.equal(now["action_mask"][step, column], given["action_mask"][found[0], found[1]])
        assert torch.equal(following["action_mask"][step, column], given["next", "action_mask"][found[0], found[1]])


@pytest.mark.parametrize("phase", ["greedy", "epsilon", "warm-up"])
def test_no_invalid_action_is_ever_taken(phase: str) -> None:
    algorithm = dqn(
        "algo.epsilon={start: 0.5, end: 0.5, frames: null}",
        "algo.normalize_observation=true",
        "algo.warmup_frames=20",
        actions=FIVE,
        leaves=masked_leaves(FIVE),
    )
    assert algorithm.warming_up
    source = torch.Generator().manual_seed(0)
    valid = random_masks(FIVE, 2000)
    leaves = {("observation",): torch.randn(2000, 4, generator=source), ("action_mask",): valid}
    explorer = algorithm.explorer if phase == "warm-up" else algorithm.sampler
    noise = tuple(part[0] for part in explorer.draw(1, 2000, 0, source))
    with torch.no_grad():
        action = algorithm.policy(leaves) if phase == "greedy" else explorer(leaves, noise)
        values = algorithm.net(leaves["observation",])
    assert action.shape == (2000,)
    assert bool(valid.gather(-1, action.unsqueeze(-1)).all())
    greedy = torch.where(valid, values, -torch.inf).argmax(-1)
    assert (action == greedy).all() == (phase == "greedy")
    if phase == "epsilon":
        # Half the time the best one, else one of the valid ones, each as likely as the others.
        share = 0.5 + 0.5 * float((1 / valid.sum(-1)).mean())
        assert float((action == greedy).float().mean()) == pytest.approx(share, abs=0.04)


def test_random_actions_are_even_over_the_valid_ones() -> None:
    algorithm = dqn(
        "algo.normalize_observation=true", "algo.warmup_frames=20", actions=FIVE, leaves=masked_leaves(FIVE)
    )
    valid = torch.tensor([[True, False, True, True, False]]).expand(3000, 5)
    noise = algorithm.explorer.draw(1, 3000, 0, torch.Generator().manual_seed(0))
    action = algorithm.explorer({("observation",): torch.zeros(3000, 4), ("action_mask",): valid}, (noise[0][0],))
    shares = torch.bincount(action, minlength=5) / 3000
    torch.testing.assert_close(shares, torch.tensor([1 / 3, 0, 1 / 3, 1 / 3, 0]), atol=0.03, rtol=0)


# ------------------------------------------------------------------------------------------------------------- target


def weights(algorithm: DQN) -> tuple[Tensor, Tensor]:
    """The first weight of the network and of the target."""
    name = "body.hidden.0.weight"
    return dict(algorithm.net.named_parameters())[name].detach(), algorithm.target.state_dict()[name]


def test_soft_update_moves_by_tau() -> None:
    algorithm = dqn("algo.target_interval=null", "algo.tau=0.05")
    online, target = weights(algorithm)
    with torch.no_grad():
        online.fill_(1.0)
        target.fill_(0.0)
    algorithm.after_step()
    torch.testing.assert_close(target, torch.full_like(target, 0.05))


def test_hard_update_counts_frames_whatever_the_number_of_environments() -> None:
    for num_envs in (1, 4):
        algorithm = dqn(
            f"env.num_envs={num_envs}",
            "algo.target_interval=100",
            "algo.frames_per_batch=20",
            "algo.learning_starts=20",
            "algo.minibatch_size=4",
            "algo.updates_per_frame=0.05",
        )
        copied = []
        for frames in range(20, 420, 20):
            _, target = weights(algorithm)
            before = target.clone()
            algorithm.update(batch(num_envs, 20 // num_envs, algorithm.actions, seed=frames), frames)
            if not torch.equal(before, target):
                copied.append(frames)
        assert copied == [100, 200, 300, 400]


def test_target_starts_equal_and_shares_no_memory() -> None:
    algorithm = dqn()
    for name, parameter in algorithm.net.named_parameters():
        target = algorithm.target.state_dict()[name]
        assert torch.equal(target, parameter)
        assert target.data_ptr() != parameter.data_ptr()


def test_online_and_target_agree_for_equal_weights_with_a_moving_normaliser() -> None:
    algorithm = dqn(
        "algo.normalize_observation=true",
        "algo.warmup_frames=20",
        "algo.learning_starts=1000",
        "algo.frames_per_batch=20",
    )
    for frames in (20, 40, 60):
        algorithm.update(batch(2, 10, algorithm.actions, seed=frames), frames)
    (normalizer,) = algorithm.preprocessor.normalizers.values()
    assert float(normalizer.count) == 60
    assert len(algorithm.buffer) == 60, "random warm-up frames are experience too"
    observation = {("observation",): 100 * torch.randn(5, 4)}
    features = algorithm.preprocessor(observation)["observation"]
    twin = dqn()
    twin.net.load_state_dict(algorithm.target.state_dict())
    torch.testing.assert_close(algorithm.net(features), twin.net(features))


# -------------------------------------------------------------------------------------------------- epsilon and updates


@pytest.mark.parametrize("num_envs", [1, 4])
@pytest.mark.parametrize("frames_per_batch", [20, 100])
def test_epsilon_is_a_function_of_frames(num_envs: int, frames_per_batch: int) -> None:
    algorithm = dqn(
        f"env.num_envs={num_envs}",
        f"algo.frames_per_batch={frames_per_batch}",
        "algo.epsilon={start: 1.0, end: 0.1, frames: 1000}",
        "algo.learning_starts=100000",
    )
    seen = {}
    for frames in range(frames_per_batch, 1301, frames_per_batch):
        metrics = algorithm.update(batch(num_envs, frames_per_batch // num_envs, algorithm.actions), frames)
        seen[frames] = float(metrics["policy/epsilon"])
    assert seen[500] == pytest.approx(0.55)
    assert seen[1000] == pytest.approx(0.1)
    assert seen[1300] == pytest.approx(0.1)


def test_share_of_random_actions_is_epsilon_also_inside_a_batch() -> None:
    algorithm = dqn("algo.epsilon={start: 1.0, end: 0.0, frames: 20000}", "env.num_envs=20", "algo.frames_per_batch=20")
    explore, choice = algorithm.sampler.draw(1000, 20, 0, torch.Generator().manual_seed(0))
    assert explore.shape == choice.shape == (1000, 20)
    assert float(explore[:10].float().mean()) == pytest.approx(1.0, abs=0.02)
    assert float(explore[495:505].float().mean()) == pytest.approx(0.5, abs=0.1)
    assert float(explore.float().mean()) == pytest.approx(0.5, abs=0.01)
    greedy = algorithm.policy({("observation",): torch.zeros(20, 4)})
    chosen = algorithm.sampler({("observation",): torch.zeros(20, 4)}, (torch.zeros(20, dtype=torch.bool), choice[0]))
    assert torch.equal(chosen, greedy)


@pytest.mark.parametrize("frames_per_batch", [4, 16, 100])
def test_updates_follow_frames_whatever_the_batch(frames_per_batch: int) -> None:
    algorithm = dqn(
        "env.num_envs=4",
        f"algo.frames_per_batch={frames_per_batch}",
        "algo.learning_starts=100",
        "algo.minibatch_size=8",
        "algo.updates_per_frame=0.25",
        "network.hidden=[8]",
    )
    for frames in range(frames_per_batch, 401, frames_per_batch):
        algorithm.update(batch(4, frames_per_batch // 4, algorithm.actions, seed=frames), frames)
    assert algorithm.counters.updates == (400 - 100) * 0.25


def test_nothing_is_learned_before_learning_starts() -> None:
    algorithm = dqn("algo.learning_starts=100", "algo.minibatch_size=8", "algo.frames_per_batch=20")
    before = algorithm.flat.data.clone()
    metrics = algorithm.update(batch(2, 10, algorithm.actions), 20)
    assert "train/loss" not in metrics
    assert torch.equal(before, algorithm.flat.data)


# ------------------------------------------------------------------------------------------------------------- buffers


def test_a_minibatch_larger_than_what_is_stored_is_never_drawn() -> None:
    for kind in ("replay", "prioritized"):
        algorithm = dqn(f"buffer={kind}")
        algorithm.buffer.extend(batch(2, 3, algorithm.actions))
        with pytest.raises(ValueError, match="6 transitions are stored, too few for a minibatch of 32"):
            next(iter(algorithm.buffer.draw(1, 32)))


def test_buffer_keeps_the_newest_and_saves_them_oldest_first() -> None:
    algorithm = dqn("env.num_envs=1", "buffer.size=1000", "algo.learning_starts=10")
    reward = torch.arange(1500.0).unsqueeze(0)
    for start in range(0, 1500, 300):
        algorithm.buffer.extend(batch(1, 300, algorithm.actions, reward=reward[:, start : start + 300]))
    assert len(algorithm.buffer) == 1000
    state = algorithm.buffer.state_dict()
    assert torch.equal(state["data.next.reward"].flatten(), torch.arange(500.0, 1500.0))
    other = dqn("env.num_envs=1", "buffer.size=1000", "algo.learning_starts=10")
    other.buffer.load_state_dict(state)
    assert torch.equal(other.buffer.state_dict()["frame.observation"], state["frame.observation"])


def test_saved_buffer_is_as_large_as_what_it_holds() -> None:
    algorithm = dqn("buffer.size=1000000")
    algorithm.buffer.extend(batch(2, 500, algorithm.actions))
    held = sum(tensor.numel() * tensor.element_size() for tensor in algorithm.buffer.state_dict().values())
    assert held < 100_000


def test_an_impossible_size_is_refused_with_bytes_needed_and_free() -> None:
    with pytest.raises(ConfigError, match=r"buffer\.size: .* need .* GiB, and .* GiB of memory are free"):
        dqn("buffer.size=1000000000000")


def test_new_transitions_enter_at_the_largest_priority() -> None:
    algorithm = dqn("buffer=prioritized", "buffer.alpha=1.0", "buffer.eps=1e-6")
    buffer = algorithm.buffer
    buffer.extend(batch(2, 32, algorithm.actions))
    (drawn,) = buffer.draw(1, 64)
    buffer.update_priority(drawn, torch.full((1, 64), 5.0))
    buffer.extend(batch(2, 1, algorithm.actions, seed=1))
    torch.testing.assert_close(buffer.priorities()[-2:], torch.full((2,), 5.0), rtol=1e-4, atol=0)


def prioritised(alpha: float, beta: float) -> tuple[DQN, Tensor]:
    """Ten transitions with priorities 1 … 10."""
    algorithm = dqn(
        "buffer=prioritized", f"buffer.alpha={alpha}", f"buffer.beta={{start: {beta}, end: {beta}, frames: null}}"
    )
    algorithm.buffer.extend(batch(1, 10, algorithm.actions))
    priority = torch.arange(1.0, 11.0)
    algorithm.buffer._sampler.update_priority(torch.arange(10), priority)
    return algorithm, priority


@pytest.mark.parametrize("alpha", [0.6, *(pytest.param(alpha, marks=pytest.mark.long) for alpha in (0.0, 1.0))])
def test_sampling_follows_priorities(alpha: float) -> None:
    algorithm, priority = prioritised(alpha, 1.0)
    (drawn,) = algorithm.buffer.draw(1, 10)
    counts = torch.zeros(10)
    for drawn in algorithm.buffer.draw(2000, 10):
        counts += torch.bincount(drawn["index"].flatten(), minlength=10)
    expected = priority**alpha / (priority**alpha).sum()
    torch.testing.assert_close(counts / counts.sum(), expected, atol=0.01, rtol=0)


@pytest.mark.parametrize("beta", [0.4, 1.0])
def test_importance_weights_are_those_of_the_paper(beta: float) -> None:
    """w_i = (N P(i))^-β, divided by the largest one."""
    algorithm, priority = prioritised(1.0, beta)
    probability = priority / priority.sum()
    weight = (10 * probability) ** -beta
    expected = weight / weight.max()
    (drawn,) = algorithm.buffer.draw(1, 10)
    torch.testing.assert_close(
        drawn["priority_weight"].flatten(), expected[drawn["index"].flatten()], rtol=1e-4, atol=0
    )
    assert float(drawn["priority_weight"].max()) <= 1.0 + 1e-6


def test_priorities_are_the_td_errors_after_an_update() -> None:
    algorithm = dqn(
        "buffer=prioritized",
        "buffer.alpha=1.0",
        "algo.learning_starts=20",
        "algo.minibatch_size=8",
        "algo.frames_per_batch=20",
        "algo.updates_per_frame=0.05",
    )
    algorithm.update(batch(2, 10, algorithm.actions), 20)
    before = algorithm.buffer.priorities().clone()
    metrics = algorithm.update(batch(2, 10, algorithm.actions, seed=1), 40)
    changed = (algorithm.buffer.priorities()[:20] != before).nonzero().flatten()
    assert 0 < len(changed) <= 8
    errors = set((metrics["critic/td_errors"] + 1e-6).tolist())
    for value in algorithm.buffer.priorities()[changed].tolist():
        assert min(abs(value - error) for error in errors) < 1e-5


def test_zero_errors_keep_priorities_and_weights_finite() -> None:
    algorithm = dqn("buffer=prioritized")
    algorithm.buffer.extend(batch(2, 20, algorithm.actions, reward=torch.zeros(2, 20)))
    for _ in range(50):
        for drawn in algorithm.buffer.draw(1, 32):
            assert int(drawn["index"].max()) < 40
            assert bool(drawn["priority_weight"].isfinite().all())
            algorithm.buffer.update_priority(drawn, torch.zeros(1, 32))
    assert float(algorithm.buffer.priorities().min()) > 0


def test_beta_is_annealed_by_frames() -> None:
    algorithm = dqn("buffer=prioritized", "total_frames=1000", "buffer.beta={start: 0.4, end: 1.0, frames: null}")
    assert algorithm.buffer.set_beta(0, 1000) == pytest.approx(0.4)
    assert algorithm.buffer.set_beta(500, 1000) == pytest.approx(0.7)
    algorithm.buffer.extend(batch(2, 10, algorithm.actions))  # which makes the sampler
    assert algorithm.buffer._sampler.beta == pytest.approx(0.7)
    assert algorithm.buffer.set_beta(2000, 1000) == algorithm.buffer._sampler.beta == pytest.approx(1.0)


def test_priorities_survive_saving() -> None:
    algorithm, _ = prioritised(0.6, 0.4)
    state = algorithm.buffer.state_dict()
    other = dqn("buffer=prioritized", "buffer.alpha=0.6")
    other.buffer.load_state_dict(state)
    torch.testing.assert_close(other.buffer.priorities(), algorithm.buffer.priorities())
    assert float(other.buffer._sampler.default_priority) == pytest.approx(10.0)
    one, two = (part.buffer for part in (algorithm, other))
    for part in (one, two):
        part._generator.set_state(generator(5, Stream.BUFFER).get_state())
    (first,), (second,) = one.draw(1, 8), two.draw(1, 8)
    assert torch.equal(first["index"], second["index"])


def test_extension_that_does_not_load_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    import builtins

    original = builtins.__import__

    def broken(name: str, *args: object) -> object:
        if name == "torchrl._torchrl":
            raise ImportError("undefined symbol: _ZN5torch")
        return original(name, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", broken)
    with pytest.raises(ConfigError, match=r"torchrl .* does not load it with torch .*undefined symbol.*pip install"):
        dqn("buffer=prioritized")
    dqn("buffer=replay")


def test_memmap_storage_gives_the_same_minibatches(tmp_path: object) -> None:
    memory, memmap = (dqn(f"buffer.storage={kind}", "buffer.size=2000") for kind in ("memory", "memmap"))
    for algorithm in (memory, memmap):
        algorithm.buffer.extend(batch(2, 50, algorithm.actions))
    (one,), (two,) = memory.buffer.draw(2, 16), memmap.buffer.draw(2, 16)
    assert torch.equal(one["observation"], two["observation"])


# ------------------------------------------------------------------------------------------------------------ metrics


def test_values_are_looked_at_beside_the_target_and_what_is_possible() -> None:
    """The network is made to give 3, -6 and 1 in every state, its target 1 more; the largest reward is 2 and γ 0.9: 20 is
    the most that can be reached."""
    algorithm = dqn(
        "algo.gamma=0.9",
        "algo.learning_starts=0",
        "algo.frames_per_batch=20",
        "algo.minibatch_size=10",
        "algo.updates_per_frame=0.1",
        "algo.target_interval=1000",
        "optim.lr=1e-30",
        "env.num_envs=1",
        "buffer.size=40",
    )
    assert algorithm.inspect() == {}, "before the first step"
    reward = torch.full((1, 20), -2.0)
    algorithm.net.head.weight.data.zero_()
    algorithm.net.head.bias.data = torch.tensor([3.0, -6.0, 1.0])
    algorithm.target.copy()
    algorithm.net.head.bias.data -= 1.0
    metrics = algorithm.update(batch(1, 20, DISCRETE, reward=reward), 20)
    looked = algorithm.inspect()
    assert float(looked["critic/q_value_max"]) == pytest.approx(2.0)
    assert float(looked["critic/target_gap"]) == pytest.approx(1.0)
    assert float(looked["critic/q_limit_share"]) == pytest.approx(7.0 / 20.0)
    assert algorithm.counters.updates >= 1
    assert float(metrics["buffer/replay_ratio"]) == pytest.approx(algorithm.counters.updates * 10 / 20)
    assert float(looked["buffer/filled"]) == pytest.approx(0.5)
    assert 0 <= float(looked["buffer/replay_age"]) <= 19


def test_the_spread_of_priorities_is_their_deviation_over_their_mean() -> None:
    algorithm, priority = prioritised(1.0, 1.0)
    looked = algorithm.buffer.metrics(torch.tensor([9, 8]))
    assert float(looked["buffer/priority_spread"]) == pytest.approx(
        float(priority.std(correction=0) / priority.mean()), rel=1e-3
    )
    assert float(looked["buffer/replay_age"]) == pytest.approx(0.5), "the newest, and the one before"

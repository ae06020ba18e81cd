"""SAC against its written equations."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from builders import BOX, DISCRETE, batch, run_config, runtime, sac
from torch import Tensor
from torch.nn.functional import linear, relu

from rltool.actions import ActionSpec
from rltool.algos.sac import SAC, SquashedGaussian
from rltool.errors import ConfigError


def minibatch(rows: int = 6) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What :meth:`SAC.gradient` takes: now, following."""
    source = torch.Generator().manual_seed(1)
    observation, following = (torch.randn(rows, 4, generator=source) for _ in range(2))
    noise, next_noise = (torch.randn(rows, 2, generator=source) for _ in range(2))
    terminated = torch.tensor([[False], [True], [False], [False], [True], [False]])
    now = {
        "observation": observation,
        "noise": noise,
        "action": 2 * torch.rand(rows, 2, generator=source) - 1,
        "priority_weight": torch.rand(rows, generator=source),
    }
    after = {"observation": following, "noise": next_noise, "terminated": terminated, "done": terminated}
    return now, {**after, "reward": torch.randn(rows, 1, generator=source)}


def mlp(weights: dict[str, Tensor], x: Tensor) -> Tensor:
    x = relu(linear(x, weights["body.hidden.0.weight"], weights["body.hidden.0.bias"]))
    x = relu(linear(x, weights["body.hidden.2.weight"], weights["body.hidden.2.bias"]))
    return linear(x, weights["head.weight"], weights["head.bias"])


def q_values(weights: dict[str, Tensor], observation: Tensor, action: Tensor) -> Tensor:
    """Q of both critics, ``[2, N]``."""
    both = [{name: tensor[index] for name, tensor in weights.items()} for index in range(2)]
    return torch.stack([mlp(one, torch.cat([observation, action], -1)).squeeze(-1) for one in both])


def sample(algorithm: SAC, observation: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """The action and its log-probability by the change of variables, in float64."""
    mean, log_std = algorithm.actor.net(observation).chunk(2, -1)
    x = mean + log_std.exp() * noise
    gaussian = torch.distributions.Normal(mean.double(), log_std.exp().double()).log_prob(x.double())
    return x.tanh(), (gaussian - (1 - x.double().tanh().square()).log()).sum(-1).float()


def test_losses_and_gradient_are_those_of_the_written_equations() -> None:
    algorithm = sac("algo.alpha=0.3", "algo.max_grad_norm=null")
    with torch.no_grad():
        for tensor in algorithm.target.state_dict().values():
            tensor.add_(0.1 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(2)))
    now, after = minibatch()
    critic, target = dict(algorithm.critic.named_parameters()), algorithm.target.state_dict()
    log_alpha = algorithm.temperature["log_alpha"]
    alpha = log_alpha.detach().exp()

    with torch.no_grad():
        next_action, next_log_prob = sample(algorithm, after["observation"], after["noise"])
        value = q_values(target, after["observation"], next_action).min(0).values - alpha * next_log_prob
        y = after["reward"].squeeze(-1) + 0.99 * ~after["terminated"].squeeze(-1) * value
    q = q_values(critic, now["observation"], now["action"])
    value_loss = (now["priority_weight"] * (q - y).square().sum(0)).mean()
    action, log_prob = sample(algorithm, now["observation"], now["noise"])
    frozen = {name: tensor.detach() for name, tensor in critic.items()}
    policy_loss = (alpha * log_prob - q_values(frozen, now["observation"], action).min(0).values).mean()
    alpha_loss = -(log_alpha * (log_prob.detach() - 2.0)).mean()
    total = value_loss + policy_loss + alpha_loss
    expected = algorithm.flat.gather(torch.autograd.grad(total, algorithm.flat.parameters))

    gradient, row, td_error = algorithm.gradient(now, after)
    torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(td_error, (q - y).abs().max(0).values.detach())
    metrics = dict(zip(SAC.step_metrics, row.tolist(), strict=True))
    assert metrics["critic/value_loss"] == pytest.approx(float(value_loss.detach()), rel=1e-5)
    assert metrics["policy/loss"] == pytest.approx(float(policy_loss.detach()), rel=1e-4)
    assert metrics["policy/entropy"] == pytest.approx(-float(log_prob.detach().mean()), rel=1e-4)
    assert metrics["policy/alpha"] == pytest.approx(0.3)
    assert metrics["critic/q_value_mean"] == pytest.approx(
        float(q_values(frozen, now["observation"], action).detach().min(0).values.mean()), rel=1e-4
    )


def test_the_critics_start_different() -> None:
    """Two equal critics would stay equal, and their minimum would correct nothing."""
    for name, tensor in sac().critic.named_parameters():
        assert "bias" in name or not torch.equal(tensor[0], tensor[1])


@pytest.mark.parametrize("x", [0.0, 1.5, -3.0, 12.0, -30.0])
def test_the_density_is_that_of_a_squashed_gaussian_also_where_tanh_rounds_to_one(x: float) -> None:
    loc, scale = torch.tensor([[x - 0.2]]), torch.tensor([[0.4]])
    action, log_prob = SquashedGaussian(loc, scale, torch.tensor([[0.5]])).rsample_and_log_prob()
    # In float64, with 1 - tanh² = 4 / (e^x + e^-x)².
    jacobian = math.log(4) - 2 * np.logaddexp(x, -x)
    expected = -0.5 * 0.5**2 - math.log(0.4) - 0.5 * math.log(2 * math.pi) - jacobian
    assert float(log_prob) == pytest.approx(expected, rel=1e-5)
    assert float(action) == pytest.approx(math.tanh(x), abs=1e-6)


def test_a_time_limit_does_not_cut_the_target() -> None:
    algorithm = sac("env.num_envs=1", "algo.minibatch_size=4")
    algorithm.buffer.extend(batch(1, 4, BOX, truncated=torch.tensor([[False, True, False, False]])))
    (drawn,) = algorithm.buffer.draw(4, 4)
    _, following = algorithm.columns(drawn)
    assert bool(drawn["next", "done"].any())
    assert not bool(following["terminated"].any())
    assert not bool(following["done"].any())


def test_the_temperature_moves_towards_the_target_entropy() -> None:
    """α falls while the policy's entropy is above the target, and rises while it is below."""
    for target, falls in ((-20.0, True), (20.0, False)):
        algorithm = sac(f"algo.target_entropy={target}")
        gradient, *_ = algorithm.gradient(*minibatch())
        slope = float(algorithm.flat.views(gradient)["temperature.log_alpha"])
        assert (slope > 0) == falls


def test_a_fixed_temperature_stays() -> None:
    algorithm = sac("algo.learn_alpha=false", "algo.alpha=0.25")
    assert not any("temperature" in name for name in algorithm.flat.views(algorithm.flat.data.data))
    _, row, _ = algorithm.gradient(*minibatch())
    assert float(row[SAC.step_metrics.index("policy/alpha")]) == pytest.approx(0.25)


def test_targets_follow_by_tau() -> None:
    algorithm = sac("algo.tau=0.05")
    before = {name: tensor.clone() for name, tensor in algorithm.target.state_dict().items()}
    with torch.no_grad():
        algorithm.flat.data.add_(1.0)
    algorithm.after_step()
    for name, tensor in algorithm.target.state_dict().items():
        torch.testing.assert_close(tensor, before[name] + 0.05)


def test_noise_comes_from_a_generator_of_the_run() -> None:
    """No random numbers of torch's own, so that eager, compiled and resumed runs agree."""
    algorithm = sac("env.num_envs=1", "algo.minibatch_size=4", "algo.warmup_frames=4")
    state = torch.get_rng_state()
    algorithm.update(batch(1, 4, BOX), 4)
    algorithm.update(batch(1, 4, BOX), 8)
    assert algorithm.counters.updates == 4
    assert torch.equal(torch.get_rng_state(), state)


UNBOUNDED = ActionSpec("box", (2,), "float32", low=(-1.0, -math.inf), high=(1.0, 2.0))


@pytest.mark.parametrize(
    ("actions", "use"),
    [
        (DISCRETE, r"Discrete\(3\).*Use algo=dqn or algo=ppo"),
        (UNBOUNDED, r"Box\(2,\).*Use algo=ppo, or bound them"),
        (ActionSpec("multi_discrete", (2,), "int64", (2, 3), (0, 0)), r"MultiDiscrete\(\[2, 3\]\).*Use algo=ppo$"),
        (ActionSpec("multi_binary", (2,), "int8", (2, 2), (0, 0)), r"MultiBinary\(2\).*Use algo=ppo$"),
    ],
)
def test_actions_without_two_bounds_are_refused_by_name(actions: ActionSpec, use: str) -> None:
    config = run_config("algo=sac")
    with pytest.raises(ConfigError, match=f"sac needs a Box action space with finite bounds; Probe-v0 has {use}"):
        config.algo.build(run=runtime(config, actions))


@pytest.mark.parametrize(
    ("override", "path"), [("buffer=rollout", "buffer"), ("network.shared=true", "network.shared")]
)
def test_what_sac_cannot_use_is_refused(override: str, path: str) -> None:
    with pytest.raises(ConfigError) as caught:
        run_config("algo=sac", override)
    assert [problem.path for problem in caught.value.problems] == [path]

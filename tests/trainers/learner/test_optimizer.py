"""AdamW by hand, the schedule, clipping, which parameters Muon takes, and a resumed run that is bitwise the same."""

from __future__ import annotations

import io
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers import get_cosine_schedule_with_warmup

from agentgym.errors import ConfigError
from agentgym.model.decoder import Decoder
from agentgym.trainers.learner.optimizer import PolicyOptimizer, check_optimizer
from agentgym.trainers.settings.optimizer import OptimizerConfig


class Two(nn.Module):
    """A vector of two weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, -2.0]))


def give_gradients(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def test_the_first_adamw_step_moves_every_weight_by_the_rate_against_its_gradient() -> None:
    # Bias-corrected, the first step is g / (|g| + 1e-8) = sign(g), and weight decay takes rate * decay of the weight.
    model = Two()
    config = OptimizerConfig(learning_rate=0.1, warmup_steps=1, weight_decay=0.5, max_grad_norm=1e9)
    optimizer = PolicyOptimizer(model, config, total_steps=10)
    model.weight.grad = torch.tensor([3.0, -4.0])
    assert optimizer.step() == pytest.approx(5.0)
    assert model.weight.tolist() == pytest.approx([1.0 * 0.95 - 0.1, -2.0 * 0.95 + 0.1], rel=1e-5)
    assert model.weight.grad is None
    assert optimizer.num_steps == 1


def test_the_second_step_is_the_formula_of_adam() -> None:
    model = Two()
    config = OptimizerConfig(learning_rate=0.1, warmup_steps=1, betas=(0.9, 0.98), max_grad_norm=1e9)
    optimizer = PolicyOptimizer(model, config, total_steps=10)
    value = 1.0
    mean = square = 0.0
    for step, gradient in enumerate((3.0, -1.0), start=1):
        model.weight.grad = torch.tensor([gradient, 0.0])
        optimizer.step()
        mean, square = 0.9 * mean + 0.1 * gradient, 0.98 * square + 0.02 * gradient**2
        value -= 0.1 * (mean / (1 - 0.9**step)) / (math.sqrt(square / (1 - 0.98**step)) + 1e-8)
    assert model.weight[0].item() == pytest.approx(value, rel=1e-5)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_step_counts_as_a_change_of_each_weight(name: str, tiny: Callable[..., Decoder]) -> None:
    model = tiny()
    optimizer = PolicyOptimizer(model, OptimizerConfig(name=name), total_steps=10)
    before = [parameter._version for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    after = [parameter._version for parameter in model.parameters()]
    assert all(new > old for new, old in zip(after, before, strict=True))


def test_gradients_are_scaled_down_to_the_norm_before_the_step() -> None:
    # A second step tells a gradient of 10 from one of 1 in Adam's averages, so equal weights mean equal gradients.
    results = []
    for scale in (1.0, 10.0):
        model = Two()
        optimizer = PolicyOptimizer(model, OptimizerConfig(learning_rate=0.1, max_grad_norm=0.5), total_steps=10)
        norms = []
        for gradient in ([3.0, 4.0], [4.0, 3.0]):
            model.weight.grad = scale * torch.tensor(gradient)
            norms.append(optimizer.step())
        assert norms == pytest.approx([5.0 * scale] * 2)
        results.append(model.weight.tolist())
    assert results[0] == pytest.approx(results[1], rel=1e-4)


@pytest.mark.parametrize("gradient", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_gradient_that_is_not_finite_is_reported_and_changes_no_weight(
    name: str, gradient: float, tiny: Callable[..., Decoder]
) -> None:
    model = tiny()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = PolicyOptimizer(model, OptimizerConfig(name=name), total_steps=10)  # type: ignore[arg-type]
    give_gradients(model, 0)
    assert model.embed.grad is not None
    model.embed.grad[3, 1] = gradient
    assert not math.isfinite(optimizer.step())
    assert optimizer.num_steps == 0
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_rate_warms_up_and_falls_linearly_over_the_second_half() -> None:
    model = Two()
    config = OptimizerConfig(learning_rate=1.0, warmup_steps=2, decay="linear")
    optimizer = PolicyOptimizer(model, config, total_steps=8)
    rates = []
    for _ in range(8):
        rates.append(optimizer.learning_rate)
        model.weight.grad = torch.ones(2)
        optimizer.step()
    assert rates == pytest.approx([0.5, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25])


@pytest.mark.parametrize("warmup_steps", [1, 3])
def test_after_the_warm_up_a_cosine_is_that_of_transformers(warmup_steps: int) -> None:
    model, total_steps = Two(), 12
    config = OptimizerConfig(learning_rate=0.3, warmup_steps=warmup_steps, decay="cosine")
    optimizer = PolicyOptimizer(model, config, total_steps=total_steps)
    theirs = torch.optim.SGD(Two().parameters(), lr=0.3)
    schedule = get_cosine_schedule_with_warmup(theirs, warmup_steps, total_steps)
    for step in range(total_steps + 2):
        if step >= warmup_steps:
            assert optimizer.learning_rate == pytest.approx(min(schedule.get_last_lr()[0], 0.3), abs=1e-12)
        if step >= total_steps:
            assert optimizer.learning_rate == 0.0
            break
        model.weight.grad = torch.ones(2)
        optimizer.step()
        theirs.step()
        schedule.step()


def test_a_constant_rate_stays_and_the_step_uses_it() -> None:
    model = Two()
    optimizer = PolicyOptimizer(model, OptimizerConfig(learning_rate=0.2, warmup_steps=4), total_steps=2)
    model.weight.grad = torch.ones(2)
    optimizer.step()
    assert model.weight[0].item() == pytest.approx(1.0 - 0.2 / 4, rel=1e-5)
    assert optimizer.learning_rate == pytest.approx(0.1)


def test_muon_makes_matrix_updates_orthogonal_and_leaves_the_rest_to_adamw(
    tiny: Callable[..., Decoder],
) -> None:
    model = tiny(tied=False)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = PolicyOptimizer(
        model, OptimizerConfig(name="muon", learning_rate=0.01, warmup_steps=1, max_grad_norm=1e9), 10
    )
    give_gradients(model, 1)
    optimizer.step()
    for name, parameter in model.named_parameters():
        update = before[name] - parameter.detach()
        if parameter.ndim == 2 and name not in ("embed", "head"):
            spread = torch.linalg.svdvals(update / update.norm())
            assert spread.min() > 0.4 * spread.max(), f"{name}: the singular values of Muon's update are nearly equal"
        else:
            assert update.abs().flatten().tolist() == pytest.approx([0.01] * update.numel(), rel=2e-2), name


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_resumed_optimizer_goes_on_bitwise(name: str, tiny: Callable[..., Decoder]) -> None:
    config = OptimizerConfig(name=name, warmup_steps=3, decay="linear", weight_decay=0.1)  # type: ignore[arg-type]
    whole = tiny()
    optimizer = PolicyOptimizer(whole, config, total_steps=6)
    for step in range(3):
        give_gradients(whole, step)
        optimizer.step()
    saved = io.BytesIO()
    torch.save(optimizer.state_dict(), saved)
    resumed = tiny()
    resumed.load_state_dict(whole.state_dict())
    second_optimizer = PolicyOptimizer(resumed, config, total_steps=6)
    saved.seek(0)
    second_optimizer.load_state_dict(torch.load(saved, weights_only=True))
    assert second_optimizer.learning_rate == optimizer.learning_rate
    for step in range(3, 6):
        for model, its in ((whole, optimizer), (resumed, second_optimizer)):
            give_gradients(model, step)
            its.step()
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))


@pytest.mark.parametrize("name", ["learning_rate", "max_grad_norm"])
def test_settings_that_cannot_work_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        OptimizerConfig(**{name: 0.0})


def plain_rprop(parameters: Sequence[torch.Tensor], learning_rate: float) -> torch.optim.Optimizer:
    """An optimizer whose class in torch has no weight decay."""
    return torch.optim.Rprop(parameters, lr=learning_rate)


def moved(config: OptimizerConfig, num_steps: int = 1) -> torch.Tensor:
    """The weights of a matrix of ones after steps on gradients of 1, -2, 4, ..."""
    model = nn.Linear(3, 3, bias=False)
    optimizer = PolicyOptimizer(model, config, total_steps=10)
    with torch.no_grad():
        model.weight.fill_(1.0)
    for step in range(num_steps):
        model.weight.grad = torch.eye(3) * (-2.0) ** step
        optimizer.step()
    return model.weight.detach()


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("adamw", {}),
        ("muon", {}),
        ("sgd", {}),
        ("sgd", {"momentum": 0.9}),
        ("adafactor", {}),
        (f"{__file__}:plain_rprop", {}),
    ],
)
def test_weight_decay_takes_its_share_of_each_weight_whatever_the_optimizer(
    name: str, settings: dict[str, object]
) -> None:
    config = OptimizerConfig(name=name, settings=settings, learning_rate=0.1, warmup_steps=1, max_grad_norm=1e9)
    plain, decayed = moved(config), moved(replace(config, weight_decay=0.5))
    torch.testing.assert_close(plain - decayed, torch.full((3, 3), 0.05))  # rate x decay of a weight of 1
    by_name = moved(replace(config, weight_decay=0.5, weight_decays={"weight": 0.0}))
    assert torch.equal(by_name, plain)


def test_betas_count_where_an_optimizer_has_such_means_and_are_refused_elsewhere() -> None:
    for name in ("adamw", "muon", f"{__file__}:plain_adam"):
        config = OptimizerConfig(name=name, learning_rate=0.1, warmup_steps=1, betas=(0.5, 0.6))
        check_optimizer(config)
        if name != "muon":  # of which AdamW takes no matrix here
            expected = moved(replace(config, name="adamw"), 3)
            torch.testing.assert_close(moved(config, 3), expected)
            assert not torch.allclose(
                expected, moved(OptimizerConfig(name="adamw", learning_rate=0.1, warmup_steps=1), 3)
            )
    for name in ("sgd", "adafactor"):
        with pytest.raises(ConfigError, match=rf"betas have no effect on {name}"):
            check_optimizer(OptimizerConfig(name=name, betas=(0.9, 0.999)))


def plain_adam(parameters: Sequence[torch.Tensor], learning_rate: float) -> torch.optim.Optimizer:
    """A user's own AdamW without weight decay."""
    return torch.optim.AdamW(parameters, lr=learning_rate, weight_decay=0.0)


def test_a_run_that_began_when_these_settings_had_no_effect_goes_on_as_it_began(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = OptimizerConfig(name="sgd", learning_rate=0.1, warmup_steps=1, betas=(0.8, 0.98), weight_decay=0.5)
    with caplog.at_level(logging.WARNING):
        check_optimizer(config, is_resumed=True)
        old = PolicyOptimizer(Two(), replace(config, weight_decay=0.0), total_steps=10).state_dict()
        model = Two()
        optimizer = PolicyOptimizer(model, config, total_steps=10)
        optimizer.load_state_dict(old)
        model.weight.grad = torch.zeros(2)
        optimizer.step()
    assert model.weight.tolist() == [1.0, -2.0]
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        "optimizer.betas have no effect on sgd, which has no such means",
        "optimizer.weight_decay had no effect on sgd when the run began",
    ]
    with pytest.raises(
        ConfigError, match=r"optimizer.weight_decay has no effect, since optimizer.settings has one too"
    ):
        check_optimizer(OptimizerConfig(name="sgd", weight_decay=0.5, settings={"weight_decay": 0.1}))


@pytest.mark.parametrize("setting", [{"weight_decay": -0.1}, {"betas": (1.0, 0.98)}, {"betas": (0.9, -0.5)}])
def test_a_weight_decay_or_beta_out_of_range_is_refused_for_every_optimizer(setting: dict[str, object]) -> None:
    for name in ("adamw", "muon", "sgd", "adafactor"):
        with pytest.raises(ConfigError, match=rf"optimizer.{next(iter(setting))} must be"):
            OptimizerConfig(name=name, **setting)  # type: ignore[arg-type]

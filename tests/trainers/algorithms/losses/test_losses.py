"""The clipped loss region by region: value, gradient, statistics; and numbers that would break a naive form."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentgym.errors import ConfigError, UnknownName
from agentgym.trainers.algorithms.losses import LOSSES, PolicyLoss, loss_with, ppo_clip

Settings = dict[str, float | None]
SETTINGS: Settings = {"clip_low": 0.2, "clip_high": 0.3, "dual_clip": 3.0}
UNBOUNDED: Settings = {**SETTINGS, "dual_clip": None}

# (ratio, advantage, loss, gradient of the loss by logp); where nothing is clipped that gradient is -ratio * advantage
REGIONS = [
    pytest.param(1.0, 2.0, -2.0, -2.0, id="on policy, good"),
    pytest.param(1.0, -2.0, 2.0, 2.0, id="on policy, bad"),
    pytest.param(1.2, 2.0, -2.4, -2.4, id="good, up inside the bound"),
    pytest.param(1.5, 2.0, -2.6, 0.0, id="good, up past clip_high"),
    pytest.param(0.5, 2.0, -1.0, -1.0, id="good, down is never clipped"),
    pytest.param(0.9, -2.0, 1.8, 1.8, id="bad, down inside the bound"),
    pytest.param(0.5, -2.0, 1.6, 0.0, id="bad, down past clip_low"),
    pytest.param(2.0, -2.0, 4.0, 4.0, id="bad, up below the dual clip"),
    pytest.param(5.0, -2.0, 6.0, 0.0, id="bad, up past the dual clip"),
    pytest.param(5.0, 0.0, 0.0, 0.0, id="no advantage"),
]


def one_token(ratio: float, advantage: float, settings: Settings) -> tuple[PolicyLoss, float]:
    """The loss of a single token in float64, and its gradient by logp."""
    old_logp_N = torch.tensor([-4.0], dtype=torch.float64)
    logp_N = (old_logp_N + math.log(ratio)).requires_grad_()
    advantage_N = torch.tensor([advantage], dtype=torch.float64)
    result = ppo_clip(logp_N, old_logp_N, advantage_N, torch.tensor([True]), **settings)
    (gradient_N,) = torch.autograd.grad(result.loss.sum(), logp_N)
    return result, gradient_N.item()


@pytest.mark.parametrize(("ratio", "advantage", "loss", "gradient"), REGIONS)
def test_value_and_gradient_in_every_region(ratio: float, advantage: float, loss: float, gradient: float) -> None:
    result, own_gradient = one_token(ratio, advantage, SETTINGS)
    assert result.loss.item() == pytest.approx(loss)
    assert own_gradient == pytest.approx(gradient)


@pytest.mark.parametrize(("ratio", "advantage", "loss", "gradient"), REGIONS)
@pytest.mark.parametrize("settings", [SETTINGS, UNBOUNDED], ids=["dual clip", "no dual clip"])
def test_gradients_agree_with_finite_differences(
    settings: Settings, ratio: float, advantage: float, loss: float, gradient: float
) -> None:
    old_logp_N = torch.tensor([-4.0], dtype=torch.float64)
    logp_N = (old_logp_N + math.log(ratio)).requires_grad_()
    advantage_N, mask_N = torch.tensor([advantage], dtype=torch.float64), torch.tensor([True])
    assert torch.autograd.gradcheck(
        lambda value_N: ppo_clip(value_N, old_logp_N, advantage_N, mask_N, **settings).loss, (logp_N,)
    )


def test_without_dual_clip_a_bad_token_is_not_bounded() -> None:
    result, gradient = one_token(5.0, -2.0, UNBOUNDED)
    assert result.loss.item() == pytest.approx(10.0)
    assert gradient == pytest.approx(10.0)
    assert result.stats.dual_clip_fraction == 0.0


@given(ratio=st.floats(1e-3, 1e3), advantage=st.floats(-10, 10))
def test_the_loss_is_the_formula_of_the_papers(ratio: float, advantage: float) -> None:
    result, _ = one_token(ratio, advantage, SETTINGS)
    surrogate = min(ratio * advantage, min(max(ratio, 0.8), 1.3) * advantage)
    objective = max(surrogate, 3.0 * advantage) if advantage < 0 else surrogate
    assert result.loss.item() == pytest.approx(-objective, rel=1e-9, abs=1e-12)


def test_statistics_count_the_trained_tokens_alone() -> None:
    ratio_N = torch.tensor([1.0, 1.5, 5.0, 0.5, 9.0])
    advantage_N = torch.tensor([1.0, 1.0, -1.0, 1.0, 1.0])
    mask_N = torch.tensor([True, True, True, True, False])
    stats = ppo_clip(ratio_N.log(), torch.zeros(5), advantage_N, mask_N, **SETTINGS).stats
    assert stats.clip_fraction == 0.25  # the second
    assert stats.dual_clip_fraction == 0.25  # the third
    assert stats.ratio_mean == pytest.approx(2.0)
    assert stats.ratio_max.item() == pytest.approx(5.0)
    assert stats.approx_kl == pytest.approx(sum(r - 1 - math.log(r) for r in (1.0, 1.5, 5.0, 0.5)) / 4)


def test_statistics_of_parts_add_up_to_those_of_the_whole() -> None:
    generator = torch.Generator().manual_seed(1)
    logp_N, advantage_N = torch.randn(2, 40, generator=generator)
    mask_N = torch.rand(40, generator=generator) < 0.6
    whole = ppo_clip(logp_N, torch.zeros(40), advantage_N, mask_N, **SETTINGS).stats
    parts = [
        ppo_clip(logp_N[s], torch.zeros(40)[s], advantage_N[s], mask_N[s], **SETTINGS).stats
        for s in (slice(0, 7), slice(7, 40))
    ]
    total = parts[0] + parts[1]
    assert total.clip_fraction == whole.clip_fraction > 0
    assert total.dual_clip_fraction == whole.dual_clip_fraction > 0
    assert total.ratio_mean == pytest.approx(whole.ratio_mean)
    assert total.ratio_max.item() == whole.ratio_max.item()
    assert total.approx_kl == pytest.approx(whole.approx_kl)


def test_on_the_first_minibatch_the_ratio_is_one_to_rounding() -> None:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(64, 100, generator=generator)
    sampled = logits.log_softmax(-1)[:, 3]
    learned = (logits[:, 3] - logits.logsumexp(-1)).requires_grad_()  # another order of the same arithmetic
    advantage_N = torch.randn(64, generator=generator)
    result = ppo_clip(learned, sampled, advantage_N, torch.ones(64, dtype=torch.bool), **SETTINGS)
    assert result.stats.ratio_mean == pytest.approx(1.0, abs=1e-5)
    assert result.stats.approx_kl < 1e-9
    assert result.stats.clip_fraction == 0.0
    (gradient_N,) = torch.autograd.grad(result.loss.sum(), learned)
    torch.testing.assert_close(gradient_N, -advantage_N, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("poison", [0.0, -1e30, -math.inf])
def test_tokens_outside_the_mask_have_exactly_no_loss_and_no_gradient(poison: float) -> None:
    logp_N = torch.tensor([-1.0, poison, -2.0], requires_grad=True)
    advantage_N = torch.tensor([1.0, 5.0, -1.0])
    result = ppo_clip(logp_N, torch.full((3,), -1.5), advantage_N, torch.tensor([True, False, True]), **SETTINGS)
    (gradient_N,) = torch.autograd.grad(result.loss.sum(), logp_N)
    assert result.loss[1].item() == 0.0
    assert gradient_N[1].item() == 0.0
    assert gradient_N.isfinite().all()
    assert result.stats.num_tokens.item() == 2


@given(logp=st.floats(-1e4, 0, width=32), old_logp=st.floats(-1e4, 0, width=32), advantage=st.sampled_from([-3.0, 3.0]))
def test_log_ratios_of_any_size_stay_finite(logp: float, old_logp: float, advantage: float) -> None:
    logp_N = torch.tensor([logp], requires_grad=True)
    result = ppo_clip(logp_N, torch.tensor([old_logp]), torch.tensor([advantage]), torch.tensor([True]), **UNBOUNDED)
    (gradient_N,) = torch.autograd.grad(result.loss.sum(), logp_N)
    assert result.loss.isfinite().all()
    assert gradient_N.isfinite().all()
    assert math.isfinite(result.stats.approx_kl)


def test_old_logprobs_and_advantages_get_no_gradient() -> None:
    logp_N, old_logp_N, advantage_N = (torch.tensor([-1.0], requires_grad=True) for _ in range(3))
    ppo_clip(logp_N, old_logp_N, advantage_N, torch.tensor([True]), **SETTINGS).loss.sum().backward()
    assert logp_N.grad is not None
    assert old_logp_N.grad is None
    assert advantage_N.grad is None


def test_no_tokens_give_an_empty_loss_and_zero_statistics() -> None:
    empty_N = torch.zeros(0)
    result = ppo_clip(empty_N, empty_N, empty_N, torch.zeros(0, dtype=torch.bool), **SETTINGS)
    assert result.loss.shape == (0,)
    assert (result.stats.clip_fraction, result.stats.ratio_mean, result.stats.approx_kl) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("setting", "value"),
    [("clip_low", 0.0), ("clip_low", 1.0), ("clip_high", 0.0), ("clip_high", math.nan), ("dual_clip", 1.0)],
)
def test_bounds_that_cannot_work_are_refused(setting: str, value: float) -> None:
    with pytest.raises(ConfigError, match=setting):
        loss = loss_with("ppo_clip", {setting: value})
        loss(*[torch.zeros(1)] * 3, torch.ones(1, dtype=torch.bool))


def test_an_unknown_loss_names_the_nearest() -> None:
    with pytest.raises(UnknownName, match="did you mean 'ppo_clip'"):
        LOSSES["ppo-clip"]

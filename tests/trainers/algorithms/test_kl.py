"""Every penalty: its values and, by enumerating a small vocabulary, the gradients their docstrings state.

Shapes: `V` vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from agentgym.errors import ConfigError
from agentgym.trainers.algorithms.kl import KL_PENALTIES, k1, k2, k3
from agentgym.trainers.algorithms.kl_controllers import AdaptiveKL, FixedKL

ALL = sorted(KL_PENALTIES)
STRAIGHT_THROUGH = {"k1_st": "k1", "k3_st": "k3", "low_var_st": "low_var"}


def logits(seed: int) -> Tensor:
    return torch.randn(6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def expected_gradient(estimator: str, seed: int) -> Tensor:
    """The gradient of the estimator as a loss, averaged exactly over tokens of the policy held fixed."""
    theta_V = logits(seed).requires_grad_()
    logp_V, ref_logp_V = theta_V.log_softmax(0), logits(seed + 1).log_softmax(0)
    loss = (logp_V.exp().detach() * KL_PENALTIES[estimator](logp_V, ref_logp_V)).sum()
    (gradient_V,) = torch.autograd.grad(loss, theta_V)
    return gradient_V


def divergence_gradient(divergence: Callable[[Tensor, Tensor], Tensor], seed: int) -> Tensor:
    theta_V = logits(seed).requires_grad_()
    (gradient_V,) = torch.autograd.grad(divergence(theta_V.log_softmax(0), logits(seed + 1).log_softmax(0)), theta_V)
    return gradient_V


def kl_of_policy(logp_V: Tensor, ref_logp_V: Tensor) -> Tensor:
    return (logp_V.exp() * (logp_V - ref_logp_V)).sum()


def kl_of_reference(logp_V: Tensor, ref_logp_V: Tensor) -> Tensor:
    return (ref_logp_V.exp() * (ref_logp_V - logp_V)).sum()


def test_values_worked_by_hand() -> None:
    # log r = log 2: the reference finds the token twice as likely as the policy
    logp_N, ref_logp_N = torch.tensor([math.log(0.25)]), torch.tensor([math.log(0.5)])
    assert k1(logp_N, ref_logp_N).item() == pytest.approx(-0.693147, abs=1e-6)
    assert k2(logp_N, ref_logp_N).item() == pytest.approx(0.240227, abs=1e-6)
    assert k3(logp_N, ref_logp_N).item() == pytest.approx(0.306853, abs=1e-6)


@pytest.mark.parametrize("estimator", ["k1", "k1_st", "k3", "k3_st"])
def test_k1_and_k3_are_unbiased(estimator: str) -> None:
    logp_V, ref_logp_V = logits(3).log_softmax(0), logits(4).log_softmax(0)
    mean = (logp_V.exp() * KL_PENALTIES[estimator](logp_V, ref_logp_V)).sum()
    assert mean.item() == pytest.approx(kl_of_policy(logp_V, ref_logp_V).item(), abs=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_k1_as_a_loss_has_no_gradient_on_average(seed: int) -> None:
    assert expected_gradient("k1", seed).abs().max() < 1e-12


@pytest.mark.parametrize("estimator", ["k2", *STRAIGHT_THROUGH])
@pytest.mark.parametrize("seed", range(3))
def test_k2_and_straight_through_forms_have_the_gradient_of_the_policys_divergence(estimator: str, seed: int) -> None:
    torch.testing.assert_close(expected_gradient(estimator, seed), divergence_gradient(kl_of_policy, seed))


@pytest.mark.parametrize("seed", range(3))
def test_k3_as_a_loss_has_the_gradient_of_the_reverse_divergence(seed: int) -> None:
    torch.testing.assert_close(expected_gradient("k3", seed), divergence_gradient(kl_of_reference, seed))


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@given(logp=st.floats(-8, 0), ref_logp=st.floats(-8, 0))
def test_gradients_agree_with_finite_differences(estimator: str, logp: float, ref_logp: float) -> None:
    logp_N = torch.tensor([logp], dtype=torch.float64, requires_grad=True)
    ref_logp_N = torch.tensor([ref_logp], dtype=torch.float64)
    function = KL_PENALTIES[estimator]
    assert torch.autograd.gradcheck(lambda value_N: function(value_N, ref_logp_N), (logp_N,))


@pytest.mark.parametrize("estimator", ALL)
def test_equal_distributions_diverge_by_zero(estimator: str) -> None:
    logp_N = torch.tensor([-0.1, -3.0, -30.0])
    assert KL_PENALTIES[estimator](logp_N, logp_N).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("estimator", [name for name in ALL if not name.startswith("k1")])
@given(logp=st.floats(-1e4, 0, width=32), ref_logp=st.floats(-1e4, 0, width=32))
def test_all_but_k1_are_finite_and_never_negative(estimator: str, logp: float, ref_logp: float) -> None:
    value = KL_PENALTIES[estimator](torch.tensor([logp]), torch.tensor([ref_logp])).item()
    assert math.isfinite(value)
    assert value >= 0


@pytest.mark.parametrize("estimator", ALL)
def test_the_reference_gets_no_gradient(estimator: str) -> None:
    logp_N = torch.tensor([-1.0], requires_grad=True)
    ref_logp_N = torch.tensor([-2.0], requires_grad=True)
    KL_PENALTIES[estimator](logp_N, ref_logp_N).sum().backward()
    assert logp_N.grad is not None
    assert ref_logp_N.grad is None


def scalar(name: str, logp: float, ref_logp: float) -> float:
    """Each penalty by its formula, over floats."""
    log_ratio = ref_logp - logp
    clamped = min(max(log_ratio, -20.0), 20.0)
    values = {
        "k1": -log_ratio,
        "k2": log_ratio**2 / 2,
        "k3": math.exp(clamped) - clamped - 1,
        "low_var": min(math.exp(clamped) - clamped - 1, 10.0),
        "abs": abs(log_ratio),
    }
    return values[name.removesuffix("_st")]


@pytest.mark.parametrize("penalty", ALL)
@given(logp=st.floats(-40, 0), ref_logp=st.floats(-40, 0))
def test_values_are_those_of_the_formulas(penalty: str, logp: float, ref_logp: float) -> None:
    inputs_N = [torch.tensor([x], dtype=torch.float64) for x in (logp, ref_logp)]
    assert KL_PENALTIES[penalty](*inputs_N).item() == pytest.approx(scalar(penalty, logp, ref_logp), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("penalty", ["abs", "low_var"])
@pytest.mark.parametrize("gap", [-15.0, -3.0, -0.5, 0.7, 2.0, 2.5, 2.6, 6.0])
def test_slopes_agree_with_finite_differences_on_both_sides_of_the_cut(penalty: str, gap: float) -> None:
    ref_logp_N = torch.tensor([-2.0 + gap], dtype=torch.float64)
    logp_N = torch.tensor([-2.0], dtype=torch.float64, requires_grad=True)
    (slope_N,) = torch.autograd.grad(KL_PENALTIES[penalty](logp_N, ref_logp_N).sum(), logp_N)
    up, down = (scalar(penalty, -2.0 + step, -2.0 + gap) for step in (1e-6, -1e-6))
    assert slope_N.item() == pytest.approx((up - down) / 2e-6, abs=1e-6)


@pytest.mark.parametrize(("penalty", "value"), STRAIGHT_THROUGH.items())
@given(logp=st.floats(-1000, 0), ref_logp=st.floats(-1000, 0))
def test_a_straight_through_form_has_one_value_and_the_slope_of_k2(
    penalty: str, value: str, logp: float, ref_logp: float
) -> None:
    logp_N = torch.tensor([logp], dtype=torch.float64, requires_grad=True)
    ref_logp_N = torch.tensor([ref_logp], dtype=torch.float64)
    penalty_N = KL_PENALTIES[penalty](logp_N, ref_logp_N)
    (slope_N,) = torch.autograd.grad(penalty_N.sum(), logp_N)
    assert penalty_N.item() == KL_PENALTIES[value](logp_N, ref_logp_N).item()
    assert slope_N.item() == pytest.approx(logp - ref_logp)


def test_the_gradient_of_abs_is_that_of_the_probability_of_likelier_tokens() -> None:
    theta_V = logits(5).requires_grad_()
    likelier_V = theta_V.log_softmax(0) > logits(6).log_softmax(0)
    (slope_V,) = torch.autograd.grad(2 * theta_V.softmax(0)[likelier_V].sum(), theta_V)
    torch.testing.assert_close(expected_gradient("abs", 5), slope_V)


@pytest.mark.parametrize("penalty", ALL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_shape_and_type_are_those_of_the_logprobs(penalty: str, dtype: torch.dtype) -> None:
    logp_BT = -torch.rand(2, 3, dtype=dtype)
    result = KL_PENALTIES[penalty](logp_BT, logp_BT - 0.5)
    assert (result.shape, result.dtype) == (logp_BT.shape, dtype)
    assert KL_PENALTIES[penalty](logp_BT[:0], logp_BT[:0]).shape == (0, 3)


def test_a_fixed_coefficient_stays() -> None:
    assert FixedKL(0.1).update(100.0, 5) == FixedKL(0.1)
    with pytest.raises(ConfigError, match="coefficient must be at least 0, got -1"):
        FixedKL(-1.0)


@pytest.mark.parametrize(
    ("kl", "factor"),
    [(6.0, 1.0), (6.6, 1.01), (12.0, 1.02), (1e9, 1.02), (5.4, 0.99), (0.0, 0.98), (-3.0, 0.98)],
)
def test_the_coefficient_moves_against_the_error_which_is_bounded(kl: float, factor: float) -> None:
    before = AdaptiveKL(coefficient=0.1, target=6.0, horizon=10_000)
    assert before.update(kl, 1000).coefficient == pytest.approx(0.1 * factor)
    assert before.coefficient == 0.1


def test_the_coefficient_settles_where_the_divergence_is_the_target() -> None:
    controller = AdaptiveKL(coefficient=0.01, target=2.0, horizon=1000)
    for _ in range(2000):
        controller = controller.update(1.0 / controller.coefficient, 100)  # a policy that yields to the penalty
    assert 1.0 / controller.coefficient == pytest.approx(2.0, rel=1e-3)


@pytest.mark.parametrize("setting", ["coefficient", "target", "horizon"])
def test_controllers_that_cannot_work_are_refused(setting: str) -> None:
    with pytest.raises(ConfigError, match=f"{setting} must be .*, got 0"):
        AdaptiveKL(**{"coefficient": 0.1, "target": 6.0, "horizon": 10, setting: 0})
    with pytest.raises(ConfigError, match="needs a horizon above 20"):
        AdaptiveKL(coefficient=0.1, target=6.0, horizon=20).update(0.0, 100)

"""The three estimators: their values and, by enumerating a small vocabulary, the gradients their docstrings state.

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

from agentgym.trainers.kl import KL_ESTIMATORS, k1, k2, k3

ESTIMATORS = ["k1", "k2", "k3"]


def logits(seed: int) -> Tensor:
    return torch.randn(6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def expected_gradient(estimator: str, seed: int) -> Tensor:
    """The gradient of the estimator as a loss, averaged exactly over tokens of the policy held fixed."""
    theta_V = logits(seed).requires_grad_()
    logp_V, ref_logp_V = theta_V.log_softmax(0), logits(seed + 1).log_softmax(0)
    loss = (logp_V.exp().detach() * KL_ESTIMATORS[estimator](logp_V, ref_logp_V)).sum()
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


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_k1_and_k3_are_unbiased(estimator: str) -> None:
    logp_V, ref_logp_V = logits(3).log_softmax(0), logits(4).log_softmax(0)
    mean = (logp_V.exp() * KL_ESTIMATORS[estimator](logp_V, ref_logp_V)).sum()
    assert mean.item() == pytest.approx(kl_of_policy(logp_V, ref_logp_V).item(), abs=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_k1_as_a_loss_has_no_gradient_on_average(seed: int) -> None:
    assert expected_gradient("k1", seed).abs().max() < 1e-12


@pytest.mark.parametrize("seed", range(3))
def test_k2_as_a_loss_has_the_gradient_of_the_policys_divergence(seed: int) -> None:
    torch.testing.assert_close(expected_gradient("k2", seed), divergence_gradient(kl_of_policy, seed))


@pytest.mark.parametrize("seed", range(3))
def test_k3_as_a_loss_has_the_gradient_of_the_reverse_divergence(seed: int) -> None:
    torch.testing.assert_close(expected_gradient("k3", seed), divergence_gradient(kl_of_reference, seed))


@pytest.mark.parametrize("estimator", ESTIMATORS)
@given(logp=st.floats(-8, 0), ref_logp=st.floats(-8, 0))
def test_gradients_agree_with_finite_differences(estimator: str, logp: float, ref_logp: float) -> None:
    logp_N = torch.tensor([logp], dtype=torch.float64, requires_grad=True)
    ref_logp_N = torch.tensor([ref_logp], dtype=torch.float64)
    function = KL_ESTIMATORS[estimator]
    assert torch.autograd.gradcheck(lambda value_N: function(value_N, ref_logp_N), (logp_N,))


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_equal_distributions_diverge_by_zero(estimator: str) -> None:
    logp_N = torch.tensor([-0.1, -3.0, -30.0])
    assert KL_ESTIMATORS[estimator](logp_N, logp_N).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("estimator", ["k2", "k3"])
@given(logp=st.floats(-1e4, 0, width=32), ref_logp=st.floats(-1e4, 0, width=32))
def test_k2_and_k3_are_finite_and_never_negative(estimator: str, logp: float, ref_logp: float) -> None:
    value = KL_ESTIMATORS[estimator](torch.tensor([logp]), torch.tensor([ref_logp])).item()
    assert math.isfinite(value)
    assert value >= 0


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_reference_gets_no_gradient(estimator: str) -> None:
    logp_N = torch.tensor([-1.0], requires_grad=True)
    ref_logp_N = torch.tensor([-2.0], requires_grad=True)
    KL_ESTIMATORS[estimator](logp_N, ref_logp_N).sum().backward()
    assert logp_N.grad is not None
    assert ref_logp_N.grad is None

"""The critic's loss region by region, against the formula, and outside of the mask."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentgym.errors import ConfigError, InvalidTrajectory
from agentgym.trainers.algorithms.losses import value_clip

NUMBERS = st.floats(-5, 5)


@given(value=NUMBERS, old=NUMBERS, target=NUMBERS, clip=st.floats(0.01, 2))
def test_the_loss_is_half_the_larger_square(value: float, old: float, target: float, clip: float) -> None:
    values_N, old_N, target_N = (torch.tensor([x], dtype=torch.float64) for x in (value, old, target))
    result = value_clip(values_N, old_N, target_N, torch.tensor([True]), clip=clip)
    near = min(max(value, old - clip), old + clip)
    assert result.loss.item() == pytest.approx(max((value - target) ** 2, (near - target) ** 2) / 2, abs=1e-9)


@pytest.mark.parametrize(
    ("value", "old", "target", "slope"),
    [
        pytest.param(1.2, 1.0, 3.0, -1.8, id="near what it was"),
        pytest.param(2.0, 1.0, 3.0, 0.0, id="far, on the way to the target: held"),
        pytest.param(4.0, 1.0, 3.0, 0.0, id="far and past the target, less wrong than the clipped: held"),
        pytest.param(6.0, 1.0, 3.0, 3.0, id="far and more wrong than the clipped: drawn back"),
        pytest.param(0.0, 1.0, 3.0, -3.0, id="far, on the other side: drawn back"),
    ],
)
def test_the_gradient_in_every_region(value: float, old: float, target: float, slope: float) -> None:
    values_N = torch.tensor([value], dtype=torch.float64, requires_grad=True)
    old_N, target_N = (torch.tensor([x], dtype=torch.float64) for x in (old, target))
    mask_N = torch.tensor([True])
    result = value_clip(values_N, old_N, target_N, mask_N, clip=0.5)
    (slope_N,) = torch.autograd.grad(result.loss.sum(), values_N)
    assert slope_N.item() == pytest.approx(slope)
    assert bool(result.clipped) == (slope == 0.0)
    assert torch.autograd.gradcheck(lambda x_N: value_clip(x_N, old_N, target_N, mask_N, clip=0.5).loss, (values_N,))


def test_without_a_bound_it_is_half_the_square() -> None:
    values_N, zero_N = torch.tensor([3.0, -2.0]), torch.zeros(2)
    result = value_clip(values_N, zero_N, zero_N + 1, torch.ones(2, dtype=torch.bool), clip=None)
    assert result.loss.tolist() == [2.0, 4.5]
    assert int(result.clipped) == 0


def test_outside_of_the_mask_nothing_counts() -> None:
    values_BT = torch.tensor([[1.0, math.nan], [math.inf, 2.0]], requires_grad=True)
    other_BT = torch.tensor([[0.0, math.nan], [math.nan, 0.0]])
    mask_BT = torch.tensor([[True, False], [False, True]])
    result = value_clip(values_BT, other_BT, other_BT, mask_BT)
    (slope_BT,) = torch.autograd.grad(result.loss.sum(), values_BT)
    assert result.loss.tolist() == [[0.5, 0.0], [0.0, 2.0]]
    assert slope_BT.tolist() == [[1.0, 0.0], [0.0, 2.0]]
    assert int(result.num_tokens) == 2


def test_only_the_values_get_a_gradient() -> None:
    values, old_values, returns = (torch.tensor([x], requires_grad=True) for x in (1.0, 1.2, 3.0))
    value_clip(values, old_values, returns, torch.tensor([True])).loss.sum().backward()
    assert values.grad is not None and old_values.grad is None and returns.grad is None


def test_what_does_not_fit_is_refused() -> None:
    returns, mask = torch.zeros(3), torch.ones(3, dtype=torch.bool)
    with pytest.raises(ConfigError, match="clip is 0"):
        value_clip(returns, returns, returns, mask, clip=0)
    with pytest.raises(InvalidTrajectory, match="one shape"):
        value_clip(returns, returns, torch.zeros(2), mask)

"""The copies of weights that the in-process engine keeps in oneDNN's order: they are never older than the weights."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

from agentgym.model import linear
from agentgym.model.linear import Products, forget_packed, keep_packed, row_linear

SIZE = 1024, 512  # oneDNN multiplies it with any number of rows


@pytest.fixture
def weight_OI() -> nn.Parameter:
    """A weight that nothing else holds."""
    drawn = torch.randn(SIZE, generator=torch.Generator().manual_seed(0))
    return nn.Parameter(drawn, requires_grad=False)


@pytest.fixture
def x_NI() -> Tensor:
    """Rows to multiply."""
    return torch.randn(32, SIZE[1], generator=torch.Generator().manual_seed(1))


def copy_of(weight: Tensor) -> Tensor | None:
    """The copy that is kept of a weight."""
    kept = linear._packed_by_weight.get(weight)
    return kept and kept[1]


def right(x_NI: Tensor, weight_OI: Tensor) -> Tensor:
    return (x_NI.double() @ weight_OI.double().t()).float()


@pytest.mark.parametrize("num_rows", [4, 8, 32])
def test_products_use_the_copy_and_are_the_same(num_rows: int, weight_OI: nn.Parameter, x_NI: Tensor) -> None:
    keep_packed([weight_OI])
    assert copy_of(weight_OI) is None
    rows_NI = x_NI[:num_rows]
    product_NO = Products(weight_OI).linear(rows_NI, weight_OI)
    kept = copy_of(weight_OI)
    assert kept is not None and kept.is_mkldnn
    torch.testing.assert_close(product_NO, right(rows_NI, weight_OI), rtol=1e-4, atol=1e-4)
    assert torch.equal(row_linear(rows_NI, weight_OI), product_NO)
    assert copy_of(weight_OI) is kept
    added_NO = Products(weight_OI).add_linear(torch.ones_like(product_NO), rows_NI, weight_OI)
    torch.testing.assert_close(added_NO, 1 + product_NO, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="the processor has no bfloat16")
def test_a_copy_in_bfloat16_gives_a_row_the_same_bits_whatever_the_others_are() -> None:
    drawn = torch.Generator().manual_seed(0)
    weight_OI, x_NI = (torch.randn(size, generator=drawn).bfloat16() for size in (SIZE, (64, SIZE[1])))
    keep_packed([weight_OI])
    products = Products(weight_OI)
    whole_NO = products.linear(x_NI, weight_OI)
    assert copy_of(weight_OI) is not None
    torch.testing.assert_close(whole_NO.float(), x_NI.float() @ weight_OI.float().t(), rtol=1e-2, atol=0.3)
    for num_rows in (4, 12, 32):
        assert torch.equal(products.linear(x_NI[:num_rows], weight_OI), whole_NO[:num_rows])


def test_a_weight_that_changes_in_place_is_copied_again(weight_OI: nn.Parameter, x_NI: Tensor) -> None:
    keep_packed([weight_OI])
    products = Products(weight_OI)
    products.linear(x_NI, weight_OI)
    with torch.no_grad():
        weight_OI.mul_(0.5)
    with torch.inference_mode():
        torch.testing.assert_close(products.linear(x_NI, weight_OI), right(x_NI, weight_OI), rtol=1e-4, atol=1e-4)


def test_a_change_that_autograd_does_not_count_is_seen_after_forgetting(weight_OI: nn.Parameter, x_NI: Tensor) -> None:
    keep_packed([weight_OI])
    products = Products(weight_OI)
    products.linear(x_NI, weight_OI)
    weight_OI.data.mul_(2)
    forget_packed([weight_OI])
    assert copy_of(weight_OI) is None
    torch.testing.assert_close(products.linear(x_NI, weight_OI), right(x_NI, weight_OI), rtol=1e-4, atol=1e-4)


def test_other_tensors_are_multiplied_without_a_copy(weight_OI: nn.Parameter, x_NI: Tensor) -> None:
    with torch.inference_mode():  # whose tensors count no changes
        uncounted = torch.zeros(SIZE)
    others = weight_OI.t(), weight_OI.to(torch.float16), torch.zeros(3), uncounted
    keep_packed(others)
    Products(weight_OI).linear(x_NI, weight_OI)
    assert not any(other in linear._packed_by_weight for other in (weight_OI, *others))


def test_the_copy_ends_with_its_weight(weight_OI: nn.Parameter, x_NI: Tensor) -> None:
    own = nn.Parameter(weight_OI.detach().clone(), requires_grad=False)
    keep_packed([own])
    Products(own).linear(x_NI, own)
    copy = weakref.ref(linear._packed_by_weight[own][1])
    assert copy() is not None
    del own
    gc.collect()
    assert copy() is None

"""The engine's products give a row the same bits in any company, from copies that are never older than the weights."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from agentgym.engines.local.kernels import row_products
from agentgym.engines.local.kernels.row_products import forget_packed, keep_packed, row_product

SIZE = 1024, 512


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
    copy = row_products._packed_by_weight[weight]
    return copy.numbers if copy.version >= 0 else None


def right(x_NI: Tensor, weight_OI: Tensor) -> Tensor:
    return (x_NI.double() @ weight_OI.double().t()).to(x_NI.dtype)


def multiplies(dtype: torch.dtype) -> bool:
    return row_products._kernel(dtype, None) is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@given(
    num_rows=st.integers(1, 70),
    num_outputs=st.integers(1, 200),
    num_inputs=st.integers(1, 90).map(lambda half: 2 * half) | st.sampled_from([1022, 1024, 1600]),
    turned=st.booleans(),
    threads=st.sampled_from([1, 2]),
)
@settings(deadline=None)
def test_a_row_has_the_bits_that_it_has_alone_whatever_the_sizes_and_the_copy(
    dtype: torch.dtype, num_rows: int, num_outputs: int, num_inputs: int, turned: bool, threads: int
) -> None:
    drawn = torch.Generator().manual_seed(num_rows)
    weight_OI = torch.randn(num_inputs, num_outputs, generator=drawn).to(dtype).t()
    weight_OI = weight_OI if turned else weight_OI.contiguous()
    x_NI, addend_NO = (torch.randn(num_rows, n, generator=drawn).to(dtype) for n in (num_inputs, num_outputs))
    assert multiplies(dtype)
    usual = torch.get_num_threads()
    torch.set_num_threads(threads)
    whole_NO = row_product(x_NI, weight_OI)
    added = row_product(x_NI, weight_OI, addend_NO)
    keep_packed([weight_OI])
    assert torch.equal(row_product(x_NI, weight_OI), whole_NO) and copy_of(weight_OI) is not None
    assert torch.equal(row_product(x_NI, weight_OI, addend_NO), added)
    for first, last in ((0, 1), (num_rows - 1, num_rows), (num_rows // 3, num_rows)):
        assert torch.equal(row_product(x_NI[first:last], weight_OI), whole_NO[first:last])
        assert torch.equal(row_product(x_NI[first:last], weight_OI, addend_NO[first:last]), added[first:last])
    torch.set_num_threads(usual)
    exact_NO, tolerance = x_NI.double() @ weight_OI.double().t(), 1e-5 if dtype == torch.float32 else 1e-2
    scale = num_inputs**0.5
    torch.testing.assert_close(whole_NO.double() / scale, exact_NO / scale, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(added.double() / scale, (exact_NO + addend_NO) / scale, rtol=tolerance, atol=tolerance)


def test_numbers_that_are_not_finite_stay_in_their_rows(weight_OI: nn.Parameter, x_NI: Tensor) -> None:
    clean_NO = row_product(x_NI, weight_OI)
    x_NI[3, 7] = float("nan")
    x_NI[4, 8] = float("inf")
    product_NO = row_product(x_NI, weight_OI)
    assert product_NO[3].isnan().all() and not product_NO[4].isfinite().any()
    others = [row for row in range(len(x_NI)) if row not in (3, 4)]
    assert torch.equal(product_NO[others], clean_NO[others])


@pytest.mark.parametrize("num_rows", [4, 8, 32])
def test_products_use_the_copy_and_are_the_same(num_rows: int, weight_OI: nn.Parameter, x_NI: Tensor) -> None:
    keep_packed([weight_OI])
    assert copy_of(weight_OI) is None
    rows_NI = x_NI[:num_rows]
    product_NO = row_product(rows_NI, weight_OI)
    copy = copy_of(weight_OI)
    assert copy is not None and copy.numel() == weight_OI.numel()
    torch.testing.assert_close(product_NO, right(rows_NI, weight_OI), rtol=1e-4, atol=1e-4)
    assert copy_of(weight_OI) is copy
    sum_NO = row_product(rows_NI, weight_OI, torch.ones_like(product_NO))
    torch.testing.assert_close(sum_NO, 1 + product_NO, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_products_without_a_compiler_are_right_too(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/hidden/by/the/tests")
    drawn = torch.Generator().manual_seed(0)
    weight_OI, x_NI, addend_NO = (
        torch.randn(size, generator=drawn).to(dtype) for size in (SIZE, (4, SIZE[1]), (4, SIZE[0]))
    )
    keep_packed([weight_OI])
    assert weight_OI not in row_products._packed_by_weight
    product_NO, exact_NO = row_product(x_NI, weight_OI), x_NI.double() @ weight_OI.double().t()
    torch.testing.assert_close(product_NO.double(), exact_NO, rtol=1e-2, atol=0.3)
    sum_NO = row_product(x_NI, weight_OI, addend_NO)
    torch.testing.assert_close(sum_NO.double(), exact_NO + addend_NO, rtol=1e-2, atol=0.3)


def test_tensors_that_do_not_fit_raise_what_torch_raises(weight_OI: nn.Parameter, x_NI: Tensor) -> None:
    with pytest.raises(RuntimeError):
        row_product(x_NI[:, 1:], weight_OI)
    with pytest.raises(RuntimeError):
        row_product(x_NI.bfloat16(), weight_OI)
    with pytest.raises(RuntimeError):
        row_product(x_NI, weight_OI, torch.ones(3, 4))
    odd_OI, odd_NI = weight_OI[:, 1:].bfloat16(), x_NI[:, 1:].bfloat16()
    torch.testing.assert_close(row_product(odd_NI, odd_OI), odd_NI @ odd_OI.t(), rtol=1e-2, atol=0.3)


def test_a_weight_that_changes_in_place_is_copied_again(weight_OI: nn.Parameter, x_NI: Tensor) -> None:
    keep_packed([weight_OI])
    row_product(x_NI, weight_OI)
    with torch.no_grad():
        weight_OI.mul_(0.5)
    with torch.inference_mode():
        torch.testing.assert_close(row_product(x_NI, weight_OI), right(x_NI, weight_OI), rtol=1e-4, atol=1e-4)


def test_a_change_that_autograd_does_not_count_is_seen_after_forgetting(weight_OI: nn.Parameter, x_NI: Tensor) -> None:
    keep_packed([weight_OI])
    row_product(x_NI, weight_OI)
    weight_OI.data.mul_(2)
    forget_packed([weight_OI])
    assert copy_of(weight_OI) is None
    torch.testing.assert_close(row_product(x_NI, weight_OI), right(x_NI, weight_OI), rtol=1e-4, atol=1e-4)


def test_other_tensors_are_multiplied_without_a_copy(weight_OI: nn.Parameter, x_NI: Tensor) -> None:
    with torch.inference_mode():  # whose tensors count no changes
        uncounted = torch.zeros(SIZE)
    others = weight_OI.to(torch.float16), torch.zeros(3), uncounted
    keep_packed(others)
    row_product(x_NI, weight_OI)
    assert not any(tensor in row_products._packed_by_weight for tensor in (weight_OI, *others))


def test_the_copy_ends_with_its_weight(weight_OI: nn.Parameter, x_NI: Tensor) -> None:
    own = nn.Parameter(weight_OI.detach().clone(), requires_grad=False)
    keep_packed([own])
    row_product(x_NI, own)
    copy = weakref.ref(row_products._packed_by_weight[own].numbers)
    assert copy() is not None
    del own
    gc.collect()
    assert copy() is None

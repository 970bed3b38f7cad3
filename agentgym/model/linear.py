"""Matrix products of the in-process engine and of training, with the fastest kernel of the device.

The engine's products treat all rows alike, whatever their number.

On x86, MKL (used by `F.linear`) runs at half of oneDNN's speed on processors that are not Intel's, and oneDNN costs
some microseconds more per call. If both give the same bits (short inner dimensions; probed once per weight shape),
small steps use MKL and large ones oneDNN. Otherwise everything uses oneDNN, so the size of a step never changes a
result.

oneDNN orders a weight anew at each call, which is half of the time of a step with few rows. An engine may have copies
in its order kept (`keep_packed`), which are made again when the weight changes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

__all__ = [
    "Products",
    "forget_packed",
    "keep_packed",
    "linear",
    "padded_rows",
    "padded_size",
    "row_linear",
    "weight_gradient",
]

# Shape suffixes: N rows, I inputs, O outputs.

MIN_ROWS = 4
"""Products of fewer rows use other code paths with other bits, so a step is padded to this many rows."""
_ONEDNN_WORK = 1 << 20  # multiplications above which oneDNN's speed outweighs its overhead


def padded_rows(num_rows: int) -> int:
    """Returns the number of rows to compute for `num_rows`: at least MIN_ROWS, and few distinct numbers.

    oneDNN compiles a kernel for each number of rows and keeps a thousand of them, which would be half a gigabyte.
    """
    if num_rows <= 32:
        return max(MIN_ROWS, -(-num_rows // 4) * 4)
    return -(-num_rows // 32) * 32


def padded_size(num_rows: int) -> int:
    """Returns the number of rows that training computes for `num_rows`, for the same reason: 8 sizes per octave."""
    step = max(32, 1 << max(0, num_rows - 1).bit_length() >> 4)
    return -(-num_rows // step) * step


def linear(x_NI: Tensor, weight_OI: Tensor) -> Tensor:
    """Computes a differentiable `x @ weight.T`, `[N, O]`: `F.linear`, or on CPU in fp32 oneDNN forward and backward."""
    if _is_onednn(x_NI) and len(x_NI):
        product: Tensor = _OneDnnLinear.apply(x_NI, weight_OI)  # type: ignore[no-untyped-call]
        return product
    return F.linear(x_NI, weight_OI)


def _is_onednn(like: Tensor) -> bool:
    return like.device.type == "cpu" and like.dtype == torch.float32 and torch.backends.mkldnn.is_available()


def _is_packable(like: Tensor) -> bool:
    """Returns whether the engine multiplies with oneDNN: in float32, and in bfloat16 where the processor has it."""
    if like.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    is_bfloat16 = like.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return like.dtype == torch.float32 or bool(is_bfloat16)


class _OneDnnLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, weight_OI: Tensor) -> Tensor:
        ctx.save_for_backward(x_NI, weight_OI)
        return _onednn(x_NI, weight_OI)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x_NI, weight_OI = ctx.saved_tensors
        grad_NO = grads[0].contiguous()
        grad_x_NI = _onednn(grad_NO, weight_OI.t()) if ctx.needs_input_grad[0] else None
        grad_weight_OI = weight_gradient(grad_NO, x_NI) if ctx.needs_input_grad[1] else None
        return grad_x_NI, grad_weight_OI


def weight_gradient(grad_NO: Tensor, x_NI: Tensor) -> Tensor:
    """Computes `grad.T @ x`, `[O, I]`, contiguous, without a graph: the gradient of the weight of `linear`."""
    if not _is_onednn(x_NI):
        return grad_NO.t() @ x_NI
    if grad_NO.shape[1] < x_NI.shape[1]:
        return _onednn(grad_NO.t(), x_NI.t())
    return _onednn(x_NI.t(), grad_NO.t()).t().contiguous()  # the kernel is a third faster with the longer side last


def _onednn(x_NI: Tensor, weight_OI: Tensor) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x_NI, weight_OI, None, "none", [], "")
    return product


class Products:
    """The matrix products with the weights of one model, all of one dtype on one device."""

    def __init__(self, like: Tensor) -> None:
        self._onednn = _is_packable(like)
        self._agree: dict[torch.Size, bool] = {}

    def linear(self, x_NI: Tensor, weight_OI: Tensor) -> Tensor:
        """Computes `x @ weight.T`, `[N, O]`; `N` is at least `MIN_ROWS`."""
        if not self._takes_onednn(x_NI, weight_OI):
            return x_NI.mm(weight_OI.t())
        return _onednn(x_NI, _packed_copy(weight_OI))

    def add_linear(self, residual_NO: Tensor, x_NI: Tensor, weight_OI: Tensor) -> Tensor:
        """Computes `residual + x @ weight.T`, `[N, O]`."""
        if not self._takes_onednn(x_NI, weight_OI):
            return residual_NO + x_NI.mm(weight_OI.t())
        total: Tensor = torch.ops.mkldnn._linear_pointwise.binary(
            x_NI, residual_NO, _packed_copy(weight_OI), None, "add"
        )
        return total

    def _takes_onednn(self, x_NI: Tensor, weight_OI: Tensor) -> bool:
        if not self._onednn:
            return False
        if x_NI.shape[0] * weight_OI.numel() >= _ONEDNN_WORK or x_NI.dtype == torch.bfloat16:
            return True
        agree = self._agree.get(weight_OI.shape)
        if agree is None:
            agree = self._agree[weight_OI.shape] = _kernels_agree(weight_OI.shape)
        return not agree


_packed_by_weight = WeakIdKeyDictionary()
"""The version of a weight that was copied, and the copy in the order of oneDNN; None before the first use."""


def keep_packed(weights: Iterable[Tensor]) -> None:
    """Has `Products` keep copies of those weights that oneDNN multiplies, which take as much memory again."""
    for weight in weights:
        if weight.ndim == 2 and weight.is_contiguous() and not weight.is_inference() and _is_packable(weight):
            _packed_by_weight.setdefault(weight, None)


def forget_packed(weights: Iterable[Tensor]) -> None:
    """Frees the copies of weights, which are made again when they are needed.

    This is done by itself after each change in place that autograd counts.
    """
    for weight in weights:
        if weight in _packed_by_weight:
            _packed_by_weight[weight] = None


def _packed_copy(weight_OI: Tensor) -> Tensor:
    """Returns the copy of a weight, or the weight itself if it is given without one."""
    kept: tuple[int, Tensor] | None = _packed_by_weight.get(weight_OI, (-1, weight_OI))
    if kept is None or kept[0] not in (-1, weight_OI._version):
        copy = torch.ops.mkldnn._reorder_linear_weight(weight_OI.detach())
        kept = _packed_by_weight[weight_OI] = weight_OI._version, copy
    return kept[1]


_library = torch.library.Library("agentgym", "DEF")
_library.define("row_linear(Tensor x, Tensor weight) -> Tensor")


def row_linear(x_NI: Tensor, weight_OI: Tensor) -> Tensor:
    """Computes `Products.linear` on CPU, as one operator that a graph compiled by `torch.compile` calls unchanged."""
    product: Tensor = torch.ops.agentgym.row_linear.default(x_NI, weight_OI)
    return product


@torch.library.impl(_library, "row_linear", "CPU")
def _row_linear_cpu(x_NI: Tensor, weight_OI: Tensor) -> Tensor:
    products = _products.get(weight_OI.dtype) or _products.setdefault(weight_OI.dtype, Products(weight_OI))
    return products.linear(x_NI, weight_OI)


@torch.library.impl(_library, "row_linear", "Meta")
def _row_linear_shape(x_NI: Tensor, weight_OI: Tensor) -> Tensor:
    return x_NI.new_empty(x_NI.shape[0], weight_OI.shape[0])


_products: dict[torch.dtype, Products] = {}


def _kernels_agree(shape: torch.Size) -> bool:
    generator = torch.Generator().manual_seed(0)
    x_NI = torch.randn(16, shape[1], generator=generator)
    weight_OI = torch.randn(shape, generator=generator)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight_OI)
    for weight in (weight_OI, packed):
        onednn_NO = _onednn(x_NI, weight)
        if not all(torch.equal(F.linear(x_NI[:n], weight_OI), onednn_NO[:n]) for n in (MIN_ROWS, 7, 16)):
            return False
    return True

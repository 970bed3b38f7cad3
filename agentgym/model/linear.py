"""Matrix products of training, differentiable, with the fastest kernel of the device.

On x86, MKL (used by `F.linear`) runs at half of oneDNN's speed on processors that are not Intel's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

__all__ = ["FastProducts", "linear", "padded_size", "weight_gradient"]

# Shape suffixes: N rows, I inputs, O outputs.


def padded_size(num_rows: int) -> int:
    """Returns the number of rows that training computes for `num_rows`: 8 sizes per octave.

    oneDNN compiles a kernel for each number of rows and keeps a thousand of them, which would be half a gigabyte.
    """
    step = max(32, 1 << max(0, num_rows - 1).bit_length() >> 4)
    return -(-num_rows // step) * step


def linear(x_NI: Tensor, weight_OI: Tensor) -> Tensor:
    """Computes a differentiable `x @ weight.T`, `[N, O]`: `F.linear`, or on CPU in fp32 oneDNN forward and backward."""
    if _is_onednn(x_NI) and len(x_NI):
        product: Tensor = _OneDnnLinear.apply(x_NI, weight_OI)  # type: ignore[no-untyped-call]
        return product
    return F.linear(x_NI, weight_OI)


class FastProducts(TorchFunctionMode):
    """Has `F.linear` in other code, such as the layers of transformers, computed by `linear` inside the context."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Calls the function, or `linear` on as many rows as `padded_size` says."""
        keywords = kwargs or {}
        if func is not F.linear or len(args) < 2 or not all(type(tensor) in _PLAIN for tensor in args[:2]):
            return func(*args, **keywords)
        x, weight_OI = args[:2]
        num_rows = x.numel() // max(1, x.shape[-1])
        padding = padded_size(num_rows) - num_rows
        if not _is_onednn(x) or num_rows < _FEW_ROWS or (padding and weight_OI.numel() < _WIDE):
            return func(*args, **keywords)
        x_NI = x.reshape(num_rows, -1)
        product_NO = linear(F.pad(x_NI, (0, 0, 0, padding)) if padding else x_NI, weight_OI)[:num_rows]
        product = product_NO.view(*x.shape[:-1], -1)
        bias_O = args[2] if len(args) > 2 else keywords.get("bias")
        return product if bias_O is None else product + bias_O


_PLAIN = (Tensor, nn.Parameter)
_FEW_ROWS = 32
"""Below this many rows padding costs more than the faster kernel saves."""
_WIDE = 1 << 17
"""Below this many weights a product of as many rows as no other has, such as an expert's, is not worth its kernel."""


def _is_onednn(like: Tensor) -> bool:
    return like.device.type == "cpu" and like.dtype == torch.float32 and torch.backends.mkldnn.is_available()


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

"""The rotation of queries and keys and the gate of the feed-forward on a GPU, each a Triton kernel in either direction.

Torch's operators take four kernels for the rotation and two for the gate, and as many again backward, each of which
reads and writes all of a layer's states.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["gate", "rotate"]

# Shape suffixes: N tokens, H heads, D head width, F width of the feed-forward.

_BLOCK = 1024


def rotate(x_NHD: Tensor, cos_ND: Tensor, sin_ND: Tensor) -> Tensor:
    """Computes `decoder.apply_rope`, differentiable by its first argument, whose heads may be a view of wider rows."""
    rotated_NHD: Tensor = _Rotation.apply(x_NHD, cos_ND, sin_ND)  # type: ignore[no-untyped-call]
    return rotated_NHD


def gate(flat_NF: Tensor) -> Tensor:
    """Computes `silu(a) * b` of the halves `a` and `b` of each row, `[N, F / 2]`, differentiable."""
    gated_NF: Tensor = _Gate.apply(flat_NF)  # type: ignore[no-untyped-call]
    return gated_NF


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NHD: Tensor, cos_ND: Tensor, sin_ND: Tensor) -> Tensor:
        ctx.save_for_backward(cos_ND, sin_ND)
        return _rotate(x_NHD, cos_ND, sin_ND, is_back=False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _rotate(grads[0], *ctx.saved_tensors, is_back=True), None, None


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, flat_NF: Tensor) -> Tensor:
        flat_NF = flat_NF.contiguous()
        ctx.save_for_backward(flat_NF)
        num_rows, width = flat_NF.shape[0], flat_NF.shape[1] // 2
        out_NF = flat_NF.new_empty(num_rows, width)
        if num_rows:
            _gate_kernel[(num_rows, triton.cdiv(width, _BLOCK))](flat_NF, out_NF, width, BLOCK=_BLOCK)
        return out_NF

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (flat_NF,) = ctx.saved_tensors
        grad_NF, out_NF = grads[0].contiguous(), torch.empty_like(flat_NF)
        num_rows, width = grad_NF.shape
        if num_rows:
            _gate_back_kernel[(num_rows, triton.cdiv(width, _BLOCK))](grad_NF, flat_NF, out_NF, width, BLOCK=_BLOCK)
        return out_NF


def _rotate(x_NHD: Tensor, cos_ND: Tensor, sin_ND: Tensor, *, is_back: bool) -> Tensor:
    x_NHD = x_NHD if x_NHD.stride(2) == 1 else x_NHD.contiguous()
    num_tokens, num_heads, width = x_NHD.shape
    out_NHD = x_NHD.new_empty(x_NHD.shape)
    if num_tokens:
        padded = {"HEADS": triton.next_power_of_2(num_heads), "PADDED": triton.next_power_of_2(width // 2)}
        tables = cos_ND.contiguous(), sin_ND.contiguous()
        _rotate_kernel[(num_tokens,)](
            *(x_NHD, out_NHD, *tables, *x_NHD.stride()[:2], num_heads), HALF=width // 2, IS_BACK=is_back, **padded
        )
    return out_NHD


@triton.jit  # type: ignore[untyped-decorator]
def _rotate_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0913  # kernels take no objects
    x, out, cos, sin, x_n, x_h, num_heads, HALF: tl.constexpr, HEADS: tl.constexpr, PADDED: tl.constexpr,
    IS_BACK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    h, d = tl.arange(0, HEADS)[:, None], tl.arange(0, PADDED)[None, :]
    inside, in_table = (h < num_heads) & (d < HALF), d < HALF
    source, turn = x + token * x_n + h * x_h + d, token * 2 * HALF + d
    a = tl.load(source, inside, 0.0).to(tl.float32)
    b = tl.load(source + HALF, inside, 0.0).to(tl.float32)
    cos_a = tl.load(cos + turn, in_table, 0.0).to(tl.float32)
    cos_b = tl.load(cos + turn + HALF, in_table, 0.0).to(tl.float32)
    sin_a = tl.load(sin + turn, in_table, 0.0).to(tl.float32)
    sin_b = tl.load(sin + turn + HALF, in_table, 0.0).to(tl.float32)
    if IS_BACK:  # the rotation the other way, with the same factor
        sin_a, sin_b = sin_b, sin_a
    target = out + (token * num_heads + h) * 2 * HALF + d
    tl.store(target, a * cos_a + b * sin_a, inside)
    tl.store(target + HALF, b * cos_b + a * sin_b, inside)


@triton.jit  # type: ignore[untyped-decorator]
def _gate_kernel(flat, out, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    a = tl.load(flat + row * 2 * width + column, inside, 0.0).to(tl.float32)
    b = tl.load(flat + row * 2 * width + width + column, inside, 0.0).to(tl.float32)
    tl.store(out + row * width + column, a * tl.sigmoid(a) * b, inside)


@triton.jit  # type: ignore[untyped-decorator]
def _gate_back_kernel(grad, flat, out, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, offset = column < width, row * 2 * width + column
    a = tl.load(flat + offset, inside, 0.0).to(tl.float32)
    b = tl.load(flat + offset + width, inside, 0.0).to(tl.float32)
    g = tl.load(grad + row * width + column, inside, 0.0).to(tl.float32)
    share = tl.sigmoid(a)
    tl.store(out + offset, g * b * share * (1 + a * (1 - share)), inside)
    tl.store(out + offset + width, g * a * share, inside)

"""Attention over the parts of a packed layout on a CPU: whole rectangles and causal squares, without a mask.

Each part is one call of torch's kernel of flash attention. A row that attends in several parts gets the mean of their
outputs, weighted by their sums of exponentials; the backward pass of a part needs only those of the whole row (as in
ring attention, Liu et al. 2023). So keys are neither copied for each block of rows nor padded, and no score is computed
for a pair of tokens that do not see each other, except in the smallest squares.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["AttentionPart", "causal_parts", "is_tree_attention", "tree_attention"]

# Shape suffixes: R rows (queries), N keys, T rows of a part, L keys of a part, H query heads, K key/value heads, D head
# width.

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

SMALLEST = 128
"""Rows of a causal square that is not split further: the kernel computes about half of it in vain."""


@dataclass(frozen=True)
class AttentionPart:
    """Consecutive rows, and the consecutive keys that they attend to."""

    first_row: int
    num_rows: int
    first_key: int
    num_keys: int
    is_causal: bool = False
    """True if each row attends to the keys up to its own, of as many keys as rows; otherwise to all."""


def causal_parts(first_row: int, num_rows: int, first_key: int) -> list[AttentionPart]:
    """Returns parts that together are causal attention of rows to as many keys: small squares, and what is between."""
    if num_rows <= SMALLEST:
        return [AttentionPart(first_row, num_rows, first_key, num_rows, True)]
    half = SMALLEST << ((num_rows - 1) // SMALLEST).bit_length() - 1
    return [
        *causal_parts(first_row, half, first_key),
        *causal_parts(first_row + half, num_rows - half, first_key + half),
        AttentionPart(first_row + half, num_rows - half, first_key, half),
    ]


def is_tree_attention(q_RHD: Tensor, v_NKD: Tensor) -> bool:
    """Returns whether `tree_attention` can compute these queries and values."""
    return q_RHD.device.type == "cpu" and q_RHD.shape[-1] == v_NKD.shape[-1]


def tree_attention(
    q_RHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, parts: Sequence[AttentionPart], scale: float | None = None
) -> Tensor:
    """Returns the attention outputs `[R, H, D]`; those of rows in no part are 0.

    Every row is in one causal part at most, and that is before its others. Scores and sums are float32 for any dtype.
    """
    attended_RHD: Tensor = _TreeAttention.apply(q_RHD, k_NKD, v_NKD, parts, scale)  # type: ignore[no-untyped-call]
    return attended_RHD


class _TreeAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_RHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, parts: Sequence[AttentionPart], scale: float | None
    ) -> Tensor:
        q, k, v = _same_heads(q_RHD, k_NKD, v_NKD)
        attended_RHD, sum_RH = torch.zeros_like(q), q.new_empty(q.shape[:2])
        for part in parts:
            rows, keys = _slices(part)
            out, log_sum = _forward(_call(q[rows]), _call(k[keys]), _call(v[keys]), 0.0, part.is_causal, scale=scale)
            part_THD, log_sum_TH = out[0].transpose(0, 1), log_sum[0].t()
            if part.is_causal:
                attended_RHD[rows], sum_RH[rows] = part_THD, log_sum_TH
                continue
            share_TH = torch.sigmoid(log_sum_TH - sum_RH[rows])
            attended_RHD[rows].lerp_(part_THD, share_TH[..., None])
            torch.logaddexp(sum_RH[rows], log_sum_TH, out=sum_RH[rows])
        ctx.save_for_backward(q_RHD, k_NKD, v_NKD, attended_RHD, sum_RH)
        ctx.parts, ctx.scale = parts, scale
        return attended_RHD.to(q_RHD.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q_RHD, k_NKD, v_NKD, attended_RHD, sum_RH = ctx.saved_tensors
        q, k, v = _same_heads(q_RHD, k_NKD, v_NKD)
        grad_RHD = grads[0].to(q.dtype)
        grad_q, grad_k, grad_v = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for part in ctx.parts:
            rows, keys = _slices(part)
            of_rows = (_call(x[rows]) for x in (grad_RHD, q))
            of_keys = (_call(x[keys]) for x in (k, v))
            results = _call(attended_RHD[rows]), sum_RH[rows].t()[None]
            gradients = _backward(*of_rows, *of_keys, *results, 0.0, part.is_causal, scale=ctx.scale)
            for total, index, added in zip((grad_q, grad_k, grad_v), (rows, keys, keys), gradients, strict=True):
                total[index].add_(added[0].transpose(0, 1))
        num_heads = k_NKD.shape[1]
        grad_k, grad_v = (x.unflatten(1, (num_heads, -1)).sum(2) for x in (grad_k, grad_v))
        return grad_q.to(q_RHD.dtype), grad_k.to(k_NKD.dtype), grad_v.to(v_NKD.dtype), None, None


def _same_heads(q_RHD: Tensor, k_NKD: Tensor, v_NKD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns float32 queries, keys and values, the latter once for each query head."""
    dtype = torch.promote_types(q_RHD.dtype, torch.float32)
    repeats = q_RHD.shape[1] // k_NKD.shape[1]
    k_NHD, v_NHD = (x if repeats == 1 else x.repeat_interleave(repeats, 1) for x in (k_NKD.to(dtype), v_NKD.to(dtype)))
    return q_RHD.to(dtype), k_NHD, v_NHD


def _slices(part: AttentionPart) -> tuple[slice, slice]:
    rows = slice(part.first_row, part.first_row + part.num_rows)
    return rows, slice(part.first_key, part.first_key + part.num_keys)


def _call(x_THD: Tensor) -> Tensor:
    """Returns the view that torch's kernels take, `[1, H, T, D]`."""
    return x_THD.transpose(0, 1)[None]

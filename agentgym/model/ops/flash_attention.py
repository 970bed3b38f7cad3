"""Attention over the segments of a packed layout on a GPU: one call of torch's flash kernel for each depth of the tree.

The first call computes every segment's attention to itself. Each further call attends the rows after all segments of
one depth to these: their rows are apart, so they are one call with variable lengths. Outputs are merged by their sums
of exponentials, and the backward pass of each call is given those of the whole row (as in ring attention, Liu et al.
2023). No keys are copied for each row or head, and no bias is made. Sliding windows and chunks of positions are one
call, for which the keys of each segment's path are copied as far as the window reaches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["AttentionLevel", "flash_attention", "is_flash_attention"]

# Shape suffixes: R rows (queries), N keys, T rows of a level, L keys of a level, B runs, H query heads, K key/value
# heads, D head width.

_MAX_WIDTH = 256  # of a head, in the kernel


@dataclass(frozen=True, eq=False)
class AttentionLevel:
    """Runs of rows, each of which attends to a run of keys."""

    row_T: Tensor
    key_L: Tensor
    row_end_B: Tensor
    """int32 `[B + 1]`, from 0: where the rows of each run end; `key_end_B` likewise."""
    key_end_B: Tensor
    max_rows: int
    max_keys: int
    is_causal: bool
    """True if the last row of a run attends to all its keys, and each row to one key more than the row before it."""
    window: int | None = None
    """The most keys of a row, which are those up to its own; None for all. Only with `is_causal`."""

    @classmethod
    def of(
        cls,
        rows: Sequence[NDArray[np.int64]],
        keys: Sequence[NDArray[np.int64]],
        device: torch.device | str,
        *,
        is_causal: bool,
        window: int | None = None,
    ) -> AttentionLevel:
        """Returns the level in which each run of rows attends to the run of keys at the same place."""
        indices = (torch.from_numpy(np.concatenate(runs)) for runs in (rows, keys))
        sizes = [[len(run) for run in runs] for runs in (rows, keys)]
        ends = (torch.tensor([0, *np.cumsum(size)], dtype=torch.int32) for size in sizes)
        row_T, key_L, row_end_B, key_end_B = (tensor.to(device) for tensor in (*indices, *ends))
        return cls(row_T, key_L, row_end_B, key_end_B, max(sizes[0]), max(sizes[1]), is_causal, window)

    @property
    def is_itself(self) -> bool:
        """True if the keys are the rows, in a level of all rows each of which attends to itself."""
        return len(self.key_L) == len(self.row_T)


def is_flash_attention(q_RHD: Tensor, v_NKD: Tensor) -> bool:
    """Returns whether `flash_attention` can compute these queries and values: in half precision on a GPU of NVIDIA.

    It needs torch 2.10.
    """
    width = q_RHD.shape[-1]
    fits = v_NKD.shape[-1] <= width and width % 8 == 0 and width <= _MAX_WIDTH
    return _HAS_KERNEL and q_RHD.is_cuda and q_RHD.dtype in _HALF and fits


_HALF = (torch.bfloat16, torch.float16)
_HAS_KERNEL = find_spec("torch.nn.attention.varlen") is not None and torch.version.hip is None


def flash_attention(
    q_RHD: Tensor,
    k_NKD: Tensor,
    v_NKD: Tensor,
    levels: Sequence[AttentionLevel],
    scale: float | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Returns the attention outputs `[R, H, D]` of all rows; those of rows in no level are 0.

    The first level has every row that counts, in order, each of which attends at least to itself. `sinks_H` are the
    logits of attending to nothing, by head. Values may be narrower than keys.
    """
    width, scale = v_NKD.shape[-1], q_RHD.shape[-1] ** -0.5 if scale is None else scale
    v_NKD = F.pad(v_NKD, (0, k_NKD.shape[-1] - width))
    attended_RHD: Tensor = _FlashAttention.apply(q_RHD, k_NKD, v_NKD, sinks_H, (levels, scale))  # type: ignore[no-untyped-call]
    return attended_RHD[..., :width]


class _FlashAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_RHD: Tensor,
        k_NKD: Tensor,
        v_NKD: Tensor,
        sinks_H: Tensor | None,
        how: tuple[Sequence[AttentionLevel], float],
    ) -> Tensor:
        (own, *others), scale = how
        size = len(own.row_T)
        q, k, v = q_RHD[:size], k_NKD[:size], v_NKD[:size]
        attended_RHD, sum_HR, *random = _forward(q, *_keys_of(own, k, v), own, scale)
        for level in others:
            rows, keys = level.row_T, level.key_L
            part_THD, part_HT, *_ = _forward(q[rows], k[keys], v[keys], level, scale)
            before_HT = sum_HR[:, rows]
            share_TH1 = torch.sigmoid(part_HT - before_HT).t()[..., None]
            merged_THD = torch.lerp(attended_RHD[rows].to(sum_HR.dtype), part_THD.to(sum_HR.dtype), share_TH1)
            attended_RHD[rows] = merged_THD.to(attended_RHD.dtype)
            sum_HR[:, rows] = torch.logaddexp(before_HT, part_HT)
        if sinks_H is not None:
            share_RH1 = torch.sigmoid(sum_HR - sinks_H[:, None]).t()[..., None]
            attended_RHD = (attended_RHD * share_RH1).to(attended_RHD.dtype)
            sum_HR = torch.logaddexp(sum_HR, sinks_H[:, None].to(sum_HR.dtype))
        ctx.save_for_backward(q_RHD, k_NKD, v_NKD, sinks_H, attended_RHD, sum_HR, *random)
        ctx.how = how
        return _pad(attended_RHD, len(q_RHD))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q_RHD, k_NKD, v_NKD, sinks_H, attended_RHD, sum_HR, *random = ctx.saved_tensors
        (own, *others), scale = ctx.how
        size = len(own.row_T)
        grad_RHD = grads[0][:size].contiguous()
        q, k, v = q_RHD[:size], k_NKD[:size], v_NKD[:size]
        gradients = _backward(grad_RHD, (q, *_keys_of(own, k, v)), (attended_RHD, sum_HR), random, own, scale)
        if not own.is_itself:
            gradients = gradients[0], *(k.new_zeros(k.shape).index_add_(0, own.key_L, more) for more in gradients[1:])
        likes = q_RHD, k_NKD, v_NKD
        grad_q, grad_k, grad_v = (_pad(x, len(like)) for x, like in zip(gradients, likes, strict=True))
        for level in others:
            rows, keys = level.row_T, level.key_L
            results = attended_RHD[rows], sum_HR[:, rows].contiguous()
            added = _backward(grad_RHD[rows], (q[rows], k[keys], v[keys]), results, random, level, scale)
            for total, index, more in zip((grad_q, grad_k, grad_v), (rows, keys, keys), added, strict=True):
                total.index_add_(0, index, more)
        grad_H = None
        if sinks_H is not None:
            of_sum_HR = torch.linalg.vecdot(grad_RHD.to(sum_HR.dtype), attended_RHD.to(sum_HR.dtype)).t()
            grad_H = -(of_sum_HR * (sinks_H[:, None] - sum_HR).exp()).sum(1).to(sinks_H.dtype)
        return grad_q, grad_k, grad_v, grad_H, None


def _keys_of(own: AttentionLevel, k_NKD: Tensor, v_NKD: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the keys and values of the first level."""
    return (k_NKD, v_NKD) if own.is_itself else (k_NKD[own.key_L], v_NKD[own.key_L])


def _pad(x: Tensor, size: int) -> Tensor:
    return x if len(x) == size else torch.cat([x, x.new_zeros(size - len(x), *x.shape[1:])])


def _forward(q: Tensor, k: Tensor, v: Tensor, level: AttentionLevel, scale: float) -> Sequence[Tensor]:
    """Returns outputs `[T, H, D]`, the logs of the sums of exponentials `[H, T]`, and the state of random numbers."""
    sizes = level.row_end_B, level.key_end_B, level.max_rows, level.max_keys
    results: Sequence[Tensor] = torch.ops.aten._flash_attention_forward(
        q, k, v, *sizes, 0.0, level.is_causal, False, scale=scale, **_window(level)
    )
    return results[:4]


def _window(level: AttentionLevel) -> dict[str, int]:
    return {} if level.window is None else {"window_size_left": level.window - 1, "window_size_right": 0}


def _backward(
    grad_THD: Tensor,
    qkv: Sequence[Tensor],
    results: Sequence[Tensor],
    random: Sequence[Tensor],
    level: AttentionLevel,
    scale: float,
) -> Sequence[Tensor]:
    """Returns the gradients by queries, keys and values; `results` are outputs and logs of sums of whole rows."""
    sizes = level.row_end_B, level.key_end_B, level.max_rows, level.max_keys
    gradients: Sequence[Tensor] = torch.ops.aten._flash_attention_backward(
        grad_THD, *qkv, *results, *sizes, 0.0, level.is_causal, *random, scale=scale, **_window(level)
    )
    return gradients

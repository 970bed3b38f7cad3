"""Attention of one step over the slot cache; each row's bits are independent of other rows and of padded keys.

With a C++ compiler, a CPU computes it as one operator (`slot_attention`), and with Triton a GPU as two kernels
(`gpu_attention`). Without them, and for masks that hide keys between others, it is made of products of torch. Decoded
rows then go through one padded product over many slots, and the rows of a prompt through the same products, one row
each, their common keys expanded by a zero stride. This is slower than one product for the whole prompt, but on a CPU a
token gets the same bits whether it was read or sampled, and the cache has no history that a reply could depend on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentgym.engines.local.kernels.gpu_tiles import GpuTiles, cut_prompts
from agentgym.engines.local.kernels.slot_attention import SlotRows, attend_slots
from agentgym.engines.local.kv_cache import L_BLOCK, SlotCache, round_up
from agentgym.engines.local.rows import Rows, pad_rows
from agentgym.model.pass_attention import PositionMask, Scores, first_keys

__all__ = ["SlotAttention"]

# Shape suffixes: N rows of the step, A attended slots, C rows of a prompt's chunk, B products, L padded keys, H query
# heads, K key/value heads, G query heads per key/value head (g: as many as one product takes), D head width.

KeysValues: TypeAlias = "tuple[Tensor, Tensor]"
"""The keys and the values of one layer, `[S, K, W, D]` each."""
_SPAN = 16  # decoded rows attended at once
_CHUNK = 64  # rows of a prompt attended at once
_QUERIES = 2  # query heads per product: with more, other kernels run, and their bits depend on the padding
_KEYS = 256  # keys per sum: MKL halves the sum of 400, in the middle of the padded keys


class SlotAttention:
    """Attention of each row of a step to the keys of its own slot."""

    def __init__(self, cache: SlotCache, rows: Rows, *, compiled: bool, pads: bool = True) -> None:
        """Reads the rows of a pass; with `pads` there are further ones, in the scratch slot.

        `compiled` chooses the operator, if `attends_compiled`.
        """
        of_rows = [rows.slot_N, rows.position_N, *cache.common.of(rows.slot_N, rows.num_decode)]
        if pads:
            scratch = cache.num_slots, 0, cache.num_slots, 0
            of_rows = [pad_rows(of_N, value) for of_N, value in zip(of_rows, scratch, strict=True)]
        device = cache.kv[0].device
        self._slot_N, self.position_N, *self._roots = (torch.from_numpy(of_N).to(device) for of_N in of_rows)
        self._cache, self._rows = cache, rows
        self._compiled = compiled
        self._tiles: dict[int, Any] = {}  # by the number of query heads to a key/value head; `GpuTiles`
        self._firsts: dict[int, Tensor | None] = {}
        self._plans: dict[int, AttentionPlan] = {}

    def attend(
        self,
        kv: Tensor,
        q_NHD: Tensor,
        k_NKD: Tensor,
        v_NKD: Tensor,
        scores: Scores | None = None,
        mask: PositionMask | None = None,
    ) -> Tensor:
        """Stores keys and values in a layer's `[2, S, K, W, D]`; returns the outputs `[N, H, D]` of scaled queries.

        `scores` has the soft cap and the sinks of the layer, if it has any; `mask` is the model's own rule of which
        keys a row sees, if it is not causal.
        """
        mask = None if mask is None or mask.is_causal else mask
        if self._compiled and (mask is None or self._first_N(mask) is not None):
            first_N = None if mask is None else self._first_N(mask)
            if kv.is_cuda:
                return self._attend_tiles((q_NHD, k_NKD, v_NKD), kv, scores, first_N)
            rows = SlotRows(self._slot_N, self.position_N, first_N, *self._roots)
            sinks_H, softcap = (None, None) if scores is None else (scores.sinks_H, scores.softcap)
            return attend_slots((q_NHD, k_NKD, v_NKD), kv, rows, sinks_H, softcap)
        keys, values = kv[0, ..., : k_NKD.shape[-1]], kv[1, ..., : v_NKD.shape[-1]]
        keys[self._slot_N, :, self.position_N] = k_NKD
        values[self._slot_N, :, self.position_N] = v_NKD
        return self._plan(mask).attend(q_NHD, (keys, values), scores)

    def _attend_tiles(
        self, qkv: tuple[Tensor, Tensor, Tensor], kv: Tensor, scores: Scores | None, first_N: Tensor | None
    ) -> Tensor:
        from agentgym.engines.local.kernels.gpu_attention import attend_tiles

        group = qkv[0].shape[1] // qkv[1].shape[1]
        if group not in self._tiles:
            num_decode, sizes = self._rows.num_decode, [extend[2] for extend in self._rows.extends]
            tiles = torch.from_numpy(cut_prompts(num_decode, sizes, group)).to(kv.device)
            self._tiles[group] = GpuTiles(self._slot_N, self.position_N, num_decode, *tiles)
        return attend_tiles(qkv, kv, self._tiles[group], scores, first_N)

    def _first_N(self, mask: PositionMask) -> Tensor | None:
        if id(mask) not in self._firsts:
            self._firsts[id(mask)] = first_keys(mask.rule, self.position_N)
        return self._firsts[id(mask)]

    def _plan(self, mask: PositionMask | None) -> AttentionPlan:
        """Returns the plan of all layers with the same mask."""
        rows = self._rows
        if id(mask) not in self._plans:
            self._plans[id(mask)] = AttentionPlan(
                self._cache, rows.slot_N, rows.position_N, rows.num_decode, rows.extends, mask
            )
        return self._plans[id(mask)]


class AttentionPlan:
    """The data that all layers of a step share: which slots are attended, and the biases that hide later keys."""

    def __init__(
        self,
        cache: SlotCache,
        slot_N: NDArray[np.int64],
        position_N: NDArray[np.int64],
        num_decode: int,
        extends: Sequence[tuple[int, int, int]],
        mask: PositionMask | None = None,
    ) -> None:
        """`mask` is the model's own rule of which keys a row sees; None is causal attention."""
        self._mask = mask
        self._num_decode, self._num_rows = num_decode, len(slot_N)
        self._like = cache.kv[0]
        self._chunks = [
            chunk for start, extend in _with_rows(num_decode, extends) for chunk in self._cut(start, extend)
        ]
        # Blocks of neighbouring slots read their own longest sequence only, and fit a processor's cache.
        size = _SPAN if cache.kv[0].device.type == "cpu" else max(num_decode, 1)
        self._spans = [
            self._span(first, slot_N[first : min(first + size, num_decode)], position_N)
            for first in range(0, num_decode, size)
        ]

    def attend(self, q_NHD: Tensor, kv: KeysValues, scores: Scores | None = None) -> Tensor:
        """Returns attention outputs `[N, H, D]` for scaled queries over one layer's keys and values `[S, K, W, D]`.

        `scores` has the soft cap and the sinks of the layer, if it has any.
        """
        if len(self._spans) == 1 and self._num_decode == q_NHD.shape[0]:
            return _attend_span(q_NHD, kv, self._spans[0], scores)
        out_NHD = q_NHD.new_empty(*q_NHD.shape[:2], kv[1].shape[-1])
        out_NHD[self._num_rows :] = 0.0
        for span in self._spans:
            out_NHD[span.first : span.last] = _attend_span(q_NHD[span.first : span.last], kv, span, scores)
        for chunk in self._chunks:
            rows = slice(chunk.first, chunk.last)
            _attend_chunk(q_NHD[rows], kv, chunk, out_NHD[rows], scores)
        return out_NHD

    def _cut(self, first: int, extend: tuple[int, int, int]) -> list[_Chunk]:
        slot, start, num_rows = extend
        chunks = []
        for done in range(0, num_rows, _CHUNK):
            size = min(_CHUNK, num_rows - done)
            position_C = torch.arange(start + done, start + done + size, device=self._like.device)
            bias_CL = self._bias(position_C, round_up(start + done + size, L_BLOCK))
            chunks.append(_Chunk(slot, first + done, first + done + size, bias_CL[:, None]))
        return chunks

    def _span(self, first: int, slot_A: NDArray[np.int64], position_N: NDArray[np.int64]) -> _Span:
        last, device = first + len(slot_A), self._like.device
        position_A, low, high = position_N[first:last], int(slot_A[0]), int(slot_A[-1]) + 1
        num_keys = round_up(int(position_A.max()) + 1, L_BLOCK)
        copied = 2 * (high - low) > 3 * len(slot_A)
        inside_A = None
        if high - low > len(slot_A) and not copied:
            inside_A = torch.from_numpy(slot_A - low).to(device)
            spread_A = np.zeros(high - low, np.int64)
            spread_A[slot_A - low] = position_A
            position_A = spread_A
        bias_AL = self._bias(torch.from_numpy(position_A).to(device), num_keys)
        return _Span(first, last, low, high, slot_A.tolist() if copied else None, inside_A, bias_AL)

    def _bias(self, position_A: Tensor, num_keys: int) -> Tensor:
        if self._mask is None:
            hidden_AL = torch.arange(num_keys, device=position_A.device) > position_A[:, None]
        else:
            hidden_AL = ~self._mask.allowed_TL(position_A, num_keys)
        bias_AL = torch.zeros(hidden_AL.shape, dtype=self._like.dtype, device=position_A.device)
        return bias_AL.masked_fill_(hidden_AL, -torch.inf)


@dataclass(frozen=True, eq=False)
class _Span:
    """The decoded rows `[first, last)` of the step; their slots are in `[low, high)`."""

    first: int
    last: int
    low: int
    high: int
    copied: list[int] | None
    """The slots if they are few in a wide range; their keys are then copied together."""
    inside_A: Tensor | None
    """The indices of the rows in a range with a few idle slots, which are computed but not read."""
    bias_AL: Tensor


def _attend_span(q_AHD: Tensor, kv: KeysValues, span: _Span, scores: Scores | None) -> Tensor:
    num_heads, width = q_AHD.shape[1:]
    (num_slots, num_keys), num_kv_heads = span.bias_AL.shape, kv[0].shape[1]
    k_SKLD, v_SKLD = (x[:, :, :num_keys] for x in kv)
    if span.copied is not None:
        k_SKLD, v_SKLD = (torch.cat([x[slot : slot + 1] for slot in span.copied]) for x in (k_SKLD, v_SKLD))
    else:
        k_SKLD, v_SKLD = k_SKLD[span.low : span.high], v_SKLD[span.low : span.high]
    if span.inside_A is not None:
        q_AHD = q_AHD.new_zeros(num_slots, num_heads, width).index_copy_(0, span.inside_A, q_AHD)
    q_BGD = q_AHD.reshape(num_slots * num_kv_heads, -1, width)
    bias_BgL = span.bias_AL[:, None].expand(-1, num_kv_heads, -1).reshape(q_BGD.shape[0], 1, -1)
    extra = _Extra.of(scores, num_slots, num_kv_heads)
    out_BGD = _attend(q_BGD, k_SKLD.flatten(0, 1), v_SKLD.flatten(0, 1), bias_BgL, extra)
    out_AHD = out_BGD.view(num_slots, num_heads, -1)
    return out_AHD if span.inside_A is None else out_AHD[span.inside_A]


@dataclass(frozen=True, eq=False)
class _Extra:
    """The soft cap and the sinks of some products; `sink_BG` is None for none."""

    softcap: float | None
    sink_BG: Tensor | None

    @classmethod
    def of(cls, scores: Scores | None, num_rows: int, num_kv_heads: int) -> _Extra | None:
        """Returns those of `num_rows` rows, each with products for all key/value heads; None for plain attention."""
        if scores is None or (scores.softcap is None and scores.sinks_H is None):
            return None
        sinks_H = scores.sinks_H
        return cls(scores.softcap, None if sinks_H is None else sinks_H.view(num_kv_heads, -1).repeat(num_rows, 1))


@dataclass(frozen=True, eq=False)
class _Chunk:
    """The rows `[first, last)` of the step, all of `slot`; each sees the keys up to its own position."""

    slot: int
    first: int
    last: int
    bias_CgL: Tensor


def _with_rows(num_decode: int, extends: Sequence[tuple[int, int, int]]) -> list[tuple[int, tuple[int, int, int]]]:
    first_rows = np.cumsum([num_decode, *(extend[2] for extend in extends)]).tolist()
    return list(zip(first_rows, extends, strict=False))


def _attend(q_BGD: Tensor, k_BLD: Tensor, v_BLD: Tensor, bias_BgL: Tensor, extra: _Extra | None = None) -> Tensor:
    parts = []
    for start in range(0, q_BGD.shape[1], _QUERIES):
        queries = slice(start, start + _QUERIES)
        score_BgL = torch.bmm(q_BGD[:, queries], k_BLD.transpose(1, 2))
        if extra is not None and extra.softcap is not None:
            score_BgL = score_BgL.div_(extra.softcap).tanh_().mul_(extra.softcap)
        score_BgL.add_(bias_BgL)
        if extra is None or extra.sink_BG is None:
            weight_BgL = torch.softmax(score_BgL, -1, dtype=torch.float32)
        else:
            sink_Bg1 = extra.sink_BG[:, queries, None].to(score_BgL.dtype)
            weight_BgL = torch.softmax(torch.cat([score_BgL, sink_Bg1], -1), -1, dtype=torch.float32)[..., :-1]
        parts.append(_weighted_sum(weight_BgL.to(v_BLD.dtype), v_BLD))
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _weighted_sum(weight_BgL: Tensor, v_BLD: Tensor) -> Tensor:
    """Sums the values in parts of `_KEYS`, one after the other: hidden keys add zero, however many there are."""
    first, *others = zip(weight_BgL.split(_KEYS, 2), v_BLD.split(_KEYS, 1), strict=True)
    total_BgD = torch.bmm(*first)
    for weight, v in others:
        total_BgD += torch.bmm(weight, v)
    return total_BgD


def _attend_chunk(q_CHD: Tensor, kv: KeysValues, chunk: _Chunk, out_CHD: Tensor, scores: Scores | None) -> None:
    num_rows, _, num_keys = chunk.bias_CgL.shape
    num_kv_heads = kv[0].shape[1]
    outs = out_CHD.chunk(num_kv_heads, 1)
    extra = _Extra.of(scores, 1, num_kv_heads)
    for head, q_CGD in enumerate(q_CHD.chunk(num_kv_heads, 1)):
        k_CLD, v_CLD = (x[chunk.slot, head, :num_keys].expand(num_rows, num_keys, x.shape[-1]) for x in kv)
        own = extra
        if extra is not None and extra.sink_BG is not None:
            own = _Extra(extra.softcap, extra.sink_BG[head].expand(num_rows, -1))
        outs[head].copy_(_attend(q_CGD, k_CLD, v_CLD, chunk.bias_CgL, own))

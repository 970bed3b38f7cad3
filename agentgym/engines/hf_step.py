"""One forward pass of the in-process engine over whatever tokens are due, with bits that no neighbour can change.

Every row (a token at a position of a slot) gets the same bits however the step is composed: linear layers and norms
treat rows alike from `MIN_ROWS` rows on, and attention is one small matrix product per row and key/value head, whether
the row is decoded alone or is one of many of a prompt (there the keys are shared by a zero stride). So keys and values
at a position depend on the tokens up to it and the weights alone, and any prefix may be shared, dropped or recomputed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from agentgym.engines.hf_cache import L_BLOCK, SlotCache, round_up
from agentgym.engines.hf_model import Decoder, DecoderLayer

__all__ = ["MIN_ROWS", "Rows", "forward"]

# Shape suffixes: N rows of the step, R rows whose logits are wanted, C rows of an extend chunk, A attended slots,
# L padded keys, H query heads, K key/value heads, G query heads per key/value head, D head width, V vocabulary.

MIN_ROWS = 4
"""Matrix products of fewer rows take other code paths with other bits, so a step is padded to this many."""
_CHUNK = 64  # rows of a prompt attended at once
_QUERIES = 2  # query heads per product: more share a key/value head through other kernels, whose bits depend on padding


@dataclass(frozen=True, eq=False)
class Rows:
    """The tokens due in one step: row `i` is the token at `position_N[i]` of `slot_N[i]`.

    The first `num_decode` rows belong to distinct slots, ascending; the rest are `extends`: (slot, first position,
    number of rows), one after the other. `wanted_R` are the rows to sample from.
    Example: slots 0 and 2 decode at positions 9 and 4, slot 5 reads a prompt of 3: `Rows(slot_N=[0, 2, 5, 5, 5],
    position_N=[9, 4, 0, 1, 2], num_decode=2, extends=((5, 0, 3),), wanted_R=[0, 1, 4])`.
    """

    slot_N: NDArray[np.int64]
    position_N: NDArray[np.int64]
    num_decode: int
    extends: tuple[tuple[int, int, int], ...]
    wanted_R: NDArray[np.int64]


def forward(model: Decoder, cache: SlotCache, rows: Rows) -> Tensor:
    """Logits `[R, V]` of the wanted rows; writes the keys and values of all rows into the cache."""
    num_rows, device = len(rows.slot_N), model.embed.device
    padding = max(0, MIN_ROWS - num_rows)
    ids_N = np.pad(cache.tokens_SW[rows.slot_N, rows.position_N], (0, padding))
    slot_N = torch.from_numpy(np.pad(rows.slot_N, (0, padding), constant_values=cache.num_slots)).to(device)
    position_N = torch.from_numpy(np.pad(rows.position_N, (0, padding))).to(device)
    views = _decode_view(cache, rows, device), [_extend_views(rows, cache.kv.dtype, device)]
    cos_ND, sin_ND = model.cos_TD[position_N], model.sin_TD[position_N]
    x_NE = F.embedding(torch.from_numpy(ids_N).to(device), model.embed)
    for layer, kv in zip(model.layers, cache.kv, strict=True):
        assert isinstance(layer, DecoderLayer)
        q_NHD, k_NKD, v_NKD = layer.project(x_NE, cos_ND, sin_ND)
        kv[0].index_put_((slot_N[:, None], _heads(kv), position_N[:, None]), k_NKD)
        kv[1].index_put_((slot_N[:, None], _heads(kv), position_N[:, None]), v_NKD)
        q_NHD = q_NHD * q_NHD.shape[-1] ** -0.5
        attended_NHD = torch.zeros_like(q_NHD)
        if rows.num_decode:
            attended_NHD[: rows.num_decode] = _decode(q_NHD[: rows.num_decode], kv, views[0])
        for view in views[1][0]:
            attended_NHD[view.first : view.last] = _extend(q_NHD[view.first : view.last], kv, view)
        x_NE = layer.mix(x_NE, attended_NHD)
    return _logits(model, x_NE, rows.wanted_R)


def _heads(kv: Tensor) -> Tensor:
    return torch.arange(kv.shape[2], device=kv.device)[None, :]


def _logits(model: Decoder, x_NE: Tensor, wanted_R: NDArray[np.int64]) -> Tensor:
    padding = max(0, MIN_ROWS - len(wanted_R))
    row_R = torch.from_numpy(np.pad(wanted_R, (0, padding))).to(x_NE.device)
    h_RE = F.rms_norm(x_NE[row_R], (model.config.width,), model.final_norm, model.config.norm_eps)
    return model.logits(h_RE)[: len(wanted_R)]


@dataclass(frozen=True, eq=False)
class _DecodeView:
    """Which slots one padded product attends: the whole range `[low, high)`, or only the rows' own slots, copied."""

    low: int
    high: int
    own_A: Tensor | None  # the slots to copy, when the range holds too many idle ones
    inside_A: Tensor | None  # where the rows lie in the range, when it holds some idle ones
    bias_AL: Tensor


def _decode_view(cache: SlotCache, rows: Rows, device: torch.device) -> _DecodeView:
    slot_A, position_A = rows.slot_N[: rows.num_decode], rows.position_N[: rows.num_decode]
    if not rows.num_decode:
        return _DecodeView(0, 0, None, None, torch.empty(0, device=device))
    low, high = int(slot_A[0]), int(slot_A[-1]) + 1
    padded = round_up(int(position_A.max()) + 1, L_BLOCK)
    dense, copied = high - low == len(slot_A), 2 * (high - low) > 3 * len(slot_A)
    if not dense and not copied:
        spread = np.zeros(high - low, np.int64)
        spread[slot_A - low] = position_A
        position_A = spread
    bias_AL = _bias(torch.from_numpy(position_A).to(device), padded, cache.kv.dtype)
    index_A = torch.from_numpy(slot_A).to(device)
    return _DecodeView(low, high, index_A if copied else None, None if dense or copied else index_A - low, bias_AL)


def _bias(position_A: Tensor, padded: int, dtype: torch.dtype) -> Tensor:
    hidden_AL = torch.arange(padded, device=position_A.device) > position_A[:, None]
    return torch.zeros(hidden_AL.shape, dtype=dtype, device=position_A.device).masked_fill_(hidden_AL, -torch.inf)


def _decode(q_NHD: Tensor, kv: Tensor, view: _DecodeView) -> Tensor:
    num_slots, num_keys = view.bias_AL.shape
    num_heads, width = q_NHD.shape[1:]
    if view.own_A is not None:
        kv = kv[:, :, :, :num_keys].index_select(1, view.own_A)
    else:
        kv = kv[:, view.low : view.high, :, :num_keys]
    if view.inside_A is not None:
        q_NHD = q_NHD.new_zeros(num_slots, num_heads, width).index_copy_(0, view.inside_A, q_NHD)
    k_BLD, v_BLD = kv[0].flatten(0, 1), kv[1].flatten(0, 1)
    q_BGD = q_NHD.reshape(len(k_BLD), -1, width)
    bias_BGL = view.bias_AL[:, None].expand(-1, num_heads // q_BGD.shape[1], -1).reshape(len(k_BLD), 1, num_keys)
    out_AHD = _attend(q_BGD, k_BLD, v_BLD, bias_BGL).view(num_slots, num_heads, width)
    return out_AHD if view.inside_A is None else out_AHD[view.inside_A]


def _attend(q_BGD: Tensor, k_BLD: Tensor, v_BLD: Tensor, bias_BGL: Tensor) -> Tensor:
    parts = []
    for q_BgD in q_BGD.split(_QUERIES, 1):
        score_BgL = torch.bmm(q_BgD, k_BLD.transpose(1, 2)).add_(bias_BGL)
        weight_BgL = torch.softmax(score_BgL, -1, dtype=torch.float32).to(v_BLD.dtype)
        parts.append(torch.bmm(weight_BgL, v_BLD))
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


@dataclass(frozen=True, eq=False)
class _ExtendView:
    """A chunk of a prompt: rows `[first, last)` of the step, all of `slot`, each seeing the keys up to its own."""

    slot: int
    first: int
    last: int
    bias_C1L: Tensor


def _extend_views(rows: Rows, dtype: torch.dtype, device: torch.device) -> list[_ExtendView]:
    views = []
    first = rows.num_decode
    for slot, start, num_rows in rows.extends:
        for done in range(0, num_rows, _CHUNK):
            size = min(_CHUNK, num_rows - done)
            position_C = torch.arange(start + done, start + done + size, device=device)
            padded = round_up(start + done + size, L_BLOCK)
            bias_C1L = _bias(position_C, padded, dtype)[:, None]
            views.append(_ExtendView(slot, first + done, first + done + size, bias_C1L))
        first += num_rows
    return views


def _extend(q_CHD: Tensor, kv: Tensor, view: _ExtendView) -> Tensor:
    num_rows, _, num_keys = view.bias_C1L.shape
    num_kv_heads, width = kv.shape[2], kv.shape[-1]
    heads = []
    for head, q_CGD in enumerate(q_CHD.chunk(num_kv_heads, 1)):
        k_CLD = kv[0, view.slot, head, :num_keys].expand(num_rows, num_keys, width)
        v_CLD = kv[1, view.slot, head, :num_keys].expand(num_rows, num_keys, width)
        heads.append(_attend(q_CGD, k_CLD, v_CLD, view.bias_C1L))
    return torch.cat(heads, 1)

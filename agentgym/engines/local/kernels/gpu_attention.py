"""Attention of tokens to the keys of their own slots on a GPU, as Triton kernels.

Tokens are attended in tiles: a decoded token alone, those of a prompt many at once, so that their common keys are read
once. A tile reads blocks of keys from the first that it sees, with a running softmax in float32 (Milakov and Gimelshein
2018). If few tokens are decoded, the keys of each are split over several programs, and their results merged (Dao et al.
2023, "Flash-Decoding"). What is launched does not depend on the tokens, so that a step can be a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from agentgym.engines.local.kernels.gpu_tiles import PROMPT_ROWS, GpuTiles, tile_rows
from agentgym.model.pass_attention import Scores

__all__ = ["attend_stored", "attend_tiles"]

# Shape suffixes: N tokens, C tiles, H query heads, K key/value heads, D width of a key or a value, S slots, W window, P
# splits.

_KEYS, _STAGES = {2: 64, 4: 32}, {2: 3, 4: 1}  # keys of a block, and blocks in flight, by the bytes of a number
_DECODE_ROWS = 16  # the least number of rows of a decoded token's tile: `tl.dot` takes no fewer


def attend_tiles(
    qkv: Sequence[Tensor], stored: Tensor, tiles: GpuTiles, scores: Scores | None = None, first_N: Tensor | None = None
) -> Tensor:
    """Stores keys and values of the tokens, and returns the attention outputs `[N, H, D]` of their scaled queries.

    See `attend_slots`, which does the same on a CPU. The outputs of tokens in no tile are 0.
    """
    q_NHD, k_NKD, v_NKD = (x if x.stride(-1) == 1 else x.contiguous() for x in qkv)
    keys, values = stored[0], stored[1]
    _store[(len(k_NKD), k_NKD.shape[1])](
        *(k_NKD, v_NKD, keys, values, tiles.slot_N, tiles.position_N),
        *(*k_NKD.stride()[:2], *v_NKD.stride()[:2], *keys.stride()[:3]),
        *(k_NKD.shape[2], v_NKD.shape[2]),
        PADDED=triton.next_power_of_2(max(k_NKD.shape[2], v_NKD.shape[2])),
    )
    out_NHD = q_NHD.new_zeros(*q_NHD.shape[:2], v_NKD.shape[2])
    attend_stored(q_NHD, stored, tiles, out_NHD, scores, first_N)
    return out_NHD


def attend_stored(
    q_NHD: Tensor,
    stored: Tensor,
    tiles: GpuTiles,
    out_NHD: Tensor,
    scores: Scores | None = None,
    first_N: Tensor | None = None,
) -> None:
    """Writes the attention outputs of the tokens in tiles, whose keys and values are stored already."""
    num_tokens, num_heads, key_width = q_NHD.shape
    keys, values, value_width = stored[0], stored[1], out_NHD.shape[2]
    num_kv_heads, splits = keys.shape[1], tiles.num_splits
    group = num_heads // num_kv_heads
    softcap = 0.0 if scores is None or scores.softcap is None else scores.softcap
    sinks_H = None if scores is None or scores.sinks_H is None else scores.sinks_H.float()

    def launch(num_tiles: int, out: Tensor, of_tiles: Sequence[Tensor | None], rows: int, num_splits: int) -> None:
        sums_PNH = q_NHD.new_empty(num_splits, num_tokens, num_heads, dtype=torch.float32) if num_splits > 1 else None
        _attend[(num_tiles, num_kv_heads, num_splits)](
            *(q_NHD, keys, values, out, sums_PNH, tiles.slot_N, tiles.position_N, first_N, *of_tiles, sinks_H),
            *(softcap, num_tokens, *q_NHD.stride()[:2], *keys.stride()[:3], *out.stride()[-3:-1]),
            GROUP=group,
            ROWS=tile_rows(rows, group),
            KEYS=_KEYS[q_NHD.element_size()],
            SPLITS=num_splits,
            KEY_WIDTH=key_width,
            VALUE_WIDTH=value_width,
            KEY_PADDED=max(16, triton.next_power_of_2(key_width)),
            VALUE_PADDED=max(16, triton.next_power_of_2(value_width)),
            HAS_SOFTCAP=softcap > 0,
            PRECISION="ieee" if q_NHD.dtype == torch.float32 else "tf32",
            num_stages=_STAGES[q_NHD.element_size()],
        )
        if sums_PNH is not None:
            _merge[(num_tiles, num_heads)](
                *(out, sums_PNH, out_NHD, num_tokens, *out_NHD.stride()[:2], value_width),
                SPLITS=triton.next_power_of_2(num_splits),
                NUM_SPLITS=num_splits,
                PADDED=triton.next_power_of_2(value_width),
            )

    if tiles.num_decode:
        out = out_NHD if splits == 1 else q_NHD.new_empty(splits, *out_NHD.shape, dtype=torch.float32)
        launch(tiles.num_decode, out, (None, None, tiles.decoded), _DECODE_ROWS, splits)
    if tiles.first_C is not None and len(tiles.first_C):
        launch(len(tiles.first_C), out_NHD, (tiles.first_C, tiles.count_C, None), PROMPT_ROWS, 1)


# The kernels: numbers of one letter are strides, of tokens (n), heads, slots and positions in the window (w).


@triton.jit  # type: ignore[untyped-decorator]
def _store(  # type: ignore[no-untyped-def]  # noqa: PLR0913  # kernels take no objects
    k, v, keys, values, slot_N, position_N, k_n, k_h, v_n, v_h, s, h, w, key_width, value_width, PADDED: tl.constexpr
):
    token, head = tl.program_id(0), tl.program_id(1)
    offset = tl.load(slot_N + token) * s + head * h + tl.load(position_N + token) * w
    d = tl.arange(0, PADDED)
    tl.store(keys + offset + d, tl.load(k + token * k_n + head * k_h + d, d < key_width), d < key_width)
    tl.store(values + offset + d, tl.load(v + token * v_n + head * v_h + d, d < value_width), d < value_width)


@triton.jit  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]  # noqa: PLR0913
    q, keys, values, out, sums, slot_N, position_N, first_N, first_C, count_C, decoded, sinks_H, softcap, num_tokens,
    q_n, q_h, s, h, w, out_n, out_h,
    GROUP: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, SPLITS: tl.constexpr, KEY_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr, KEY_PADDED: tl.constexpr, VALUE_PADDED: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    tile, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    begin = tile.to(tl.int64)
    count = begin * 0 + 1
    if first_C is not None:
        begin, count = tl.load(first_C + tile), tl.load(count_C + tile)
    if decoded is not None:
        count = tl.where(tile < tl.load(decoded), count, 0)
    row, d = tl.arange(0, ROWS), tl.arange(0, VALUE_PADDED)
    token, query = begin + row // GROUP, head * GROUP + row % GROUP
    is_real = row < count * GROUP
    last = tl.load(position_N + token, is_real, -1)
    first, start, seen_by_all, end = _keys_of(last, first_N, token, is_real, KEYS, SPLITS)
    base = tl.load(slot_N + begin, count > 0, 0) * s + head * h
    max_score, total = tl.full((ROWS,), float("-inf"), tl.float32), tl.zeros((ROWS,), tl.float32)
    if sinks_H is not None:  # noqa: SIM102  # the compiler knows this, and each program finds the next
        if split == 0:
            max_score, total = tl.load(sinks_H + query, is_real, 0.0), total + 1.0
    q_block = _load_rows(q + token * q_n + query * q_h, is_real, KEY_WIDTH, KEY_PADDED)
    mixed = tl.zeros((ROWS, VALUE_PADDED), tl.float32)
    for block in range(start, seen_by_all, KEYS):
        offset = base + (block + tl.arange(0, KEYS)).to(tl.int64) * w
        mixed, max_score, total = _add(
            q_block, keys + offset, values + offset, None, None, mixed, max_score, total, softcap,
            KEY_WIDTH, VALUE_WIDTH, KEY_PADDED, VALUE_PADDED, HAS_SOFTCAP, PRECISION,
        )  # fmt: skip
    for block in range(seen_by_all, end, KEYS):
        key = block + tl.arange(0, KEYS)
        offset = base + key.to(tl.int64) * w
        sees = (key[None] <= last[:, None]) & (key[None] >= first[:, None]) & (key < end)[None]
        mixed, max_score, total = _add(
            q_block, keys + offset, values + offset, key < end, sees, mixed, max_score, total, softcap,
            KEY_WIDTH, VALUE_WIDTH, KEY_PADDED, VALUE_PADDED, HAS_SOFTCAP, PRECISION,
        )  # fmt: skip
    to = token
    if SPLITS > 1:
        to = token + split * num_tokens
        tl.store(sums + to * out_n // VALUE_WIDTH + query, max_score + tl.log(total), is_real)
    offset = out + to[:, None] * out_n + query[:, None] * out_h + d[None]
    mixed = mixed / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(offset, mixed, is_real[:, None] & (d < VALUE_WIDTH)[None])


@triton.jit  # type: ignore[untyped-decorator]
def _keys_of(last, first_N, token, is_real, KEYS: tl.constexpr, SPLITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the first key that each row sees, and for the program its first, its first with masks, and its end."""
    end = tl.max(last, 0) + 1
    start, first = end * 0, last * 0
    if first_N is not None:
        first = tl.load(first_N + token, is_real, 1 << 40)
        start = tl.minimum(tl.min(first, 0) // KEYS * KEYS, end)
    if SPLITS > 1:
        part = tl.cdiv(tl.cdiv(end - start, SPLITS), KEYS) * KEYS
        start = start + tl.program_id(2) * part
        end = tl.minimum(end, start + part)
    seen_by_all = start
    if first_N is None:
        min_end = tl.min(tl.where(is_real, last, end - 1), 0) + 1
        seen_by_all = tl.maximum(start, start + (tl.minimum(min_end, end) - start) // KEYS * KEYS)
    return first, start, seen_by_all, end


@triton.jit  # type: ignore[untyped-decorator]
def _load_rows(pointer, is_real, WIDTH: tl.constexpr, PADDED: tl.constexpr):  # type: ignore[no-untyped-def]
    d = tl.arange(0, PADDED)
    if is_real is not None:
        return tl.load(pointer[:, None] + d[None], is_real[:, None] & (d < WIDTH)[None], 0.0)
    if WIDTH < PADDED:
        return tl.load(pointer[:, None] + d[None], (d < WIDTH)[None], 0.0)
    return tl.load(pointer[:, None] + d[None])


@triton.jit  # type: ignore[untyped-decorator]
def _load_columns(pointer, is_real, WIDTH: tl.constexpr, PADDED: tl.constexpr):  # type: ignore[no-untyped-def]
    d = tl.arange(0, PADDED)
    if is_real is not None:
        return tl.load(pointer[None] + d[:, None], is_real[None] & (d < WIDTH)[:, None], 0.0)
    if WIDTH < PADDED:
        return tl.load(pointer[None] + d[:, None], (d < WIDTH)[:, None], 0.0)
    return tl.load(pointer[None] + d[:, None])


@triton.jit  # type: ignore[untyped-decorator]
def _add(  # type: ignore[no-untyped-def]  # noqa: PLR0913
    q_block, keys, values, is_key, sees, mixed, max_score, total, softcap,
    KEY_WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, KEY_PADDED: tl.constexpr, VALUE_PADDED: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds a block of keys to a running softmax: the mixed values, the greatest score and the sum of exponentials.

    `is_key` is None for a block within the slot, `sees` None for one that every row sees.
    """
    score = tl.dot(q_block, _load_columns(keys, is_key, KEY_WIDTH, KEY_PADDED), input_precision=PRECISION)
    if HAS_SOFTCAP:
        score = softcap * (2 * tl.sigmoid(2 * score / softcap) - 1)
    if sees is not None:
        score = tl.where(sees, score, float("-inf"))
    v_block = _load_rows(values, is_key, VALUE_WIDTH, VALUE_PADDED)
    higher = tl.maximum(max_score, tl.max(score, 1))
    safe = tl.where(higher == float("-inf"), 0.0, higher)
    weight, shrink = tl.exp(score - safe[:, None]), tl.exp(max_score - safe)
    mixed = mixed * shrink[:, None] + tl.dot(weight.to(v_block.dtype), v_block, input_precision=PRECISION)
    return mixed, higher, total * shrink + tl.sum(weight, 1)


@triton.jit  # type: ignore[untyped-decorator]
def _merge(  # type: ignore[no-untyped-def]  # noqa: PLR0913
    parts, sums, out, num_tokens, out_n, out_h, width,
    SPLITS: tl.constexpr, NUM_SPLITS: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0), tl.program_id(1)
    num_heads = tl.num_programs(1)
    p, d = tl.arange(0, SPLITS), tl.arange(0, PADDED)
    offset = (p * num_tokens + token) * num_heads + head
    total = tl.load(sums + offset, p < NUM_SPLITS, float("-inf"))
    weight = tl.exp(total - tl.max(total, 0))
    part = tl.load(parts + offset[:, None] * width + d[None], (p < NUM_SPLITS)[:, None] & (d < width)[None], 0.0)
    mixed = tl.sum(part * weight[:, None], 0) / tl.sum(weight, 0)
    tl.store(out + token * out_n + head * out_h + d, mixed, d < width)

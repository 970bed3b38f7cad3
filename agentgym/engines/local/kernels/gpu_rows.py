"""The norms, rotation and storing of an engine's queries, keys and values on a GPU, as one Triton kernel."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

__all__ = ["rotate_and_store"]

# Shape suffixes: N tokens, O outputs of the product (H query heads, K key and K value heads of width D), S slots, W
# window, T positions.


def rotate_and_store(
    flat_NO: Tensor,
    stored: Tensor,
    indices: Sequence[Tensor],
    tables: Sequence[Tensor],
    norms: Sequence[Tensor | None],
    eps: float,
) -> Tensor:
    """Returns the queries `[N, H, D]`, normed, rotated and scaled; stores keys (normed, rotated) and values.

    `flat_NO` are queries, keys and values as the product gives them, `stored` is a layer's `[2, S, K, W, D]`, `indices`
    the slots and positions of the tokens, `tables` the `[T, D]` cosines and sines of the rotation (see `apply_rope`),
    `norms` the weights of the norms of queries and keys, if there are any.
    """
    keys, values = stored[0], stored[1]
    num_kv_heads, width = keys.shape[1], keys.shape[3]
    num_rows = flat_NO.shape[1] // width
    num_heads = num_rows - 2 * num_kv_heads
    q_NHD = flat_NO.new_empty(len(flat_NO), num_heads, width)
    _rotate_and_store[(len(flat_NO), num_rows)](
        *(flat_NO, q_NHD, keys, values, *indices, *tables, *norms),
        *(flat_NO.stride(0), *keys.stride()[:3], num_heads, num_kv_heads, eps, width**-0.5),
        WIDTH=width,
        PADDED=triton.next_power_of_2(width),
    )
    return q_NHD


# The kernels: numbers of one letter are strides, of slots, heads and positions in the window (w).


@triton.jit  # type: ignore[untyped-decorator]
def _rotate_and_store(  # type: ignore[no-untyped-def]  # noqa: PLR0913  # kernels take no objects
    flat, q, keys, values, slot_N, position_N, cos, sin, q_norm, k_norm, flat_n, s, h, w, num_heads, num_kv_heads, eps,
    scale, WIDTH: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    token, row = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = tl.arange(0, PADDED)
    other = (d + WIDTH // 2) % WIDTH
    inside = d < WIDTH
    source = flat + token * flat_n + row * WIDTH
    x = tl.load(source + d, inside, 0.0)
    position = tl.load(position_N + token)
    offset = tl.load(slot_N + token) * s + position * w + d
    if row >= num_heads + num_kv_heads:
        tl.store(values + offset + (row - num_heads - num_kv_heads) * h, x, inside)
    else:
        own = x.to(tl.float32)
        half = tl.load(source + other, inside, 0.0).to(tl.float32)
        if q_norm is not None:
            shrink = tl.rsqrt(tl.sum(own * own, 0) / WIDTH + eps)
            weight = q_norm if row < num_heads else k_norm
            own = own * shrink * tl.load(weight + d, inside, 0.0).to(tl.float32)
            half = half * shrink * tl.load(weight + other, inside, 0.0).to(tl.float32)
        turn = position * WIDTH + d
        rotated = own * tl.load(cos + turn, inside, 0.0).to(tl.float32)
        rotated += half * tl.load(sin + turn, inside, 0.0).to(tl.float32)
        if row < num_heads:
            tl.store(q + (token * num_heads + row) * WIDTH + d, rotated * scale, inside)
        else:
            tl.store(keys + offset + (row - num_heads) * h, rotated, inside)

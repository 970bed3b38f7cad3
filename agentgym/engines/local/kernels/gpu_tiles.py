"""The tiles of attention on a GPU: the tokens that one program of `gpu_attention` attends. Imports no Triton."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["PROMPT_ROWS", "GpuTiles", "cut_prompts", "max_tiles", "tile_rows", "tile_tokens"]

# Shape suffixes: N tokens, C tiles.

PROMPT_ROWS = 64
"""The least number of rows of a tile of a prompt.

A row is one query head of one token; a tile has those query heads of its tokens that share one key/value head.
"""


@dataclass(frozen=True, eq=False)
class GpuTiles:
    """The tokens of a step and their tiles: decoded tokens first, each a tile of its own, then those of prompts."""

    slot_N: Tensor
    """int64; the slot of the KV cache that each token is in."""
    position_N: Tensor
    """int64; the position of each token in its slot."""
    num_decode: int
    """The number of decoded tokens, or an upper bound if `decoded` is set."""
    first_C: Tensor | None = None
    """int64; the index of the first token of each tile of a prompt, or None without prompts."""
    count_C: Tensor | None = None
    """int64; the number of tokens of each tile of a prompt; a tile without any is padding."""
    decoded: Tensor | None = None
    """int64 `[1]`, on the GPU: the number of decoded tokens, for a CUDA graph that is recorded for up to `num_decode`.
    None if it is `num_decode`."""
    num_splits: int = 1
    """The number of programs that share the keys of a decoded token (Flash-Decoding)."""


def cut_prompts(num_decode: int, sizes: Sequence[int], group: int) -> NDArray[np.int64]:
    """Returns the tiles of prompts of `sizes` tokens, `[2, C]` int64: the first token and the number of tokens of each.

    The tokens of the prompts follow `num_decode` decoded ones. `group` query heads share a key/value head.
    """
    max_tokens = tile_tokens(group)
    firsts, counts, prompt_start = [], [], num_decode
    for size in sizes:
        start_C = np.arange(0, size, max_tokens)
        firsts.append(prompt_start + start_C)
        counts.append(np.minimum(max_tokens, size - start_C))
        prompt_start += size
    return np.stack([np.concatenate(firsts), np.concatenate(counts)]) if sizes else np.zeros((2, 0), np.int64)


def max_tiles(num_tokens: int, num_prompts: int, group: int) -> int:
    """Returns the greatest number of tiles of `num_prompts` prompts with `num_tokens` tokens in total."""
    return min(num_tokens, num_tokens // tile_tokens(group) + num_prompts)


def tile_tokens(group: int) -> int:
    """Returns the greatest number of tokens of a prompt's tile."""
    return max(1, tile_rows(PROMPT_ROWS, group) // group)


def tile_rows(min_rows: int, group: int) -> int:
    """Returns the number of rows of a tile: a power of two, as Triton's blocks, with room for the `group` of a token.

    `min_rows` is a power of two.
    """
    return max(min_rows, 1 << (group - 1).bit_length())

"""The tiles of attention on a GPU (`gpu_attention`): which tokens are attended together. This needs no Triton."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["PROMPT_ROWS", "GpuTiles", "cut_prompts", "max_tiles", "tile_rows", "tile_tokens"]

# Shape suffixes: N tokens, C tiles.

PROMPT_ROWS = 64
"""The fewest rows of a tile of a prompt: query heads of one key/value head, for each of its tokens."""


@dataclass(frozen=True, eq=False)
class GpuTiles:
    """The slots and positions of the tokens of a step, and its tiles."""

    slot_N: Tensor
    position_N: Tensor
    num_decode: int
    """The first tokens, at most so many of which are decoded."""
    first_C: Tensor | None = None
    """The first token of each tile of a prompt, `count_C` the number of its tokens; None without prompts."""
    count_C: Tensor | None = None
    decoded: Tensor | None = None
    """The number of decoded tokens, on the GPU; None if it is `num_decode`."""
    num_splits: int = 1


def cut_prompts(num_decode: int, sizes: Sequence[int], group: int) -> NDArray[np.int64]:
    """Returns the tiles of prompts of these sizes after the decoded tokens, `[2, C]`: first token and number of tokens.

    `group` query heads share a key/value head.
    """
    most = tile_tokens(group)
    firsts, counts, done = [], [], num_decode
    for size in sizes:
        start_C = np.arange(0, size, most)
        firsts.append(done + start_C)
        counts.append(np.minimum(most, size - start_C))
        done += size
    return np.stack([np.concatenate(firsts), np.concatenate(counts)]) if sizes else np.zeros((2, 0), np.int64)


def max_tiles(num_tokens: int, num_prompts: int, group: int) -> int:
    """Returns the most tiles that so many prompts with so many tokens in all are cut into."""
    return min(num_tokens, num_tokens // tile_tokens(group) + num_prompts)


def tile_tokens(group: int) -> int:
    """Returns the most tokens of a prompt in a tile."""
    return max(1, tile_rows(PROMPT_ROWS, group) // group)


def tile_rows(fewest: int, group: int) -> int:
    """Returns the rows of a tile, of which each token has `group`: a power of two."""
    return max(fewest, 1 << (group - 1).bit_length())

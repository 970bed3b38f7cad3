"""The tiles of prompts: every token is in one, and a step has no more of them than it makes room for."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from agentgym.engines.local.kernels.gpu_tiles import cut_prompts, max_tiles, tile_rows, tile_tokens

GROUPS = st.sampled_from([1, 2, 3, 4, 6, 8, 16, 64, 100])


@given(st.lists(st.integers(1, 400), min_size=1, max_size=6), st.integers(0, 5), GROUPS, st.integers(0, 50))
def test_every_token_is_in_one_tile_and_there_is_room_for_all(
    sizes: list[int], decoded: int, group: int, padding: int
) -> None:
    first_C, count_C = cut_prompts(decoded, sizes, group)
    tokens = np.concatenate([np.arange(first, first + count) for first, count in zip(first_C, count_C, strict=True)])
    assert tokens.tolist() == list(range(decoded, decoded + sum(sizes)))
    assert count_C.min() > 0 and count_C.max() * group <= tile_rows(64, group)
    num_rows = decoded + sum(sizes) + padding
    assert len(first_C) <= max_tiles(num_rows, decoded + len(sizes), group) <= num_rows


def test_a_long_prompt_has_few_tiles() -> None:
    assert tile_tokens(2) == 32
    assert max_tiles(1024, 128, 2) == 160

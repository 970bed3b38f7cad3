"""Packed sequences that share prefixes are computed as if each were alone."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentgym.model.decoder import Decoder, DecoderConfig
from agentgym.model.packed_layout import PackedLayout, shared_length

FAMILIES = {"qwen3": {"qk_norm": True}, "qwen2": {"qkv_bias": True}, "llama": {"tied": False}}

few = settings(deadline=None, max_examples=60)
ROWS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=8)


def packed(rows: list[list[int]]) -> tuple[torch.Tensor, list[int]]:
    return torch.tensor([token for row in rows for token in row]), [len(row) for row in rows]


def histories(ids_N: torch.Tensor, layout: PackedLayout) -> list[list[int]]:
    """For every computed token, the tokens that it sees, itself last."""
    ids_U, seen = ids_N[layout.source_U], []
    for segment in layout.segments:
        parts = [layout.segments[number] for number in segment.ancestors]
        before = [i for part in parts for i in ids_U[part.start : part.start + part.length].tolist()]
        own = ids_U[segment.start : segment.start + segment.length].tolist()
        seen += [before + own[: end + 1] for end in range(segment.length)]
    return seen


@few
@given(ROWS, st.integers(1, 4))
def test_every_entry_sees_its_own_row_up_to_itself_and_nothing_else(rows: list[list[int]], min_shared: int) -> None:
    ids_N, seqlens = packed(rows)
    layout = PackedLayout(seqlens, ids_N=ids_N, min_shared=min_shared)
    seen = histories(ids_N, layout)
    expected = [row[: end + 1] for row in rows for end in range(len(row))]
    assert [seen[place] for place in layout.entry_M.tolist()] == expected
    assert [len(tokens) - 1 for tokens in seen] == layout.every.position_U[: layout.num_tokens].tolist()
    assert layout.num_tokens <= len(ids_N)


def test_a_group_s_prompt_is_one_segment_and_its_replies_are_its_branches() -> None:
    prompt, replies = list(range(40)), [[7] * 5, [8] * 6, [9] * 7]
    ids_N, seqlens = packed([prompt + reply for reply in replies])
    layout = PackedLayout(seqlens, ids_N=ids_N)
    assert [(segment.length, segment.ancestors) for segment in layout.segments] == [
        (40, ()),
        (5, (0,)),
        (6, (0,)),
        (7, (0,)),
    ]
    assert PackedLayout(seqlens).num_tokens == sum(seqlens)  # without ids nothing is shared


def test_a_long_row_hides_later_keys_in_memory_that_grows_with_its_length_alone() -> None:
    layout = PackedLayout([5000], mask_N=torch.arange(5000) % 700 > 300)
    for rows in (layout.every, layout.wanted):
        place, biases = 0, {}
        for block in rows.blocks:
            assert block.bias_TL is not None
            place_T = rows.position_U[place : place + block.num_rows]
            bias_TL = torch.where(torch.arange(block.num_keys) > place_T[:, None], -torch.inf, 0.0)
            assert torch.equal(block.bias_TL, bias_TL)
            biases[block.bias_TL.untyped_storage().data_ptr()] = block.bias_TL.untyped_storage().nbytes()
            place += block.num_rows
        if rows is layout.every:
            assert sum(biases.values()) < 2 * 4 * 128 * 5000 * 2, "twice as much while it grows"


def decoder(family: str) -> Decoder:
    shape = {"vocab_size": 50, "width": 32, "num_layers": 3, "num_heads": 4, "num_kv_heads": 2, "head_width": 8}
    model = Decoder(DecoderConfig(family=family, ffn_width=40, context_window=600, **shape, **FAMILIES[family]))
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.5 if parameter.ndim == 1 else 0.0, 0.3)
    return model


def states_and_gradients(
    model: Decoder, ids_N: torch.Tensor, layout: PackedLayout, mask_N: torch.Tensor, weights_ME: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    hidden_ME = model.hidden_states(ids_N, layout)
    if len(hidden_ME) == len(ids_N):
        hidden_ME = hidden_ME[mask_N]
    parameters = [parameter for name, parameter in model.named_parameters() if name != "head"]
    return hidden_ME, *torch.autograd.grad((hidden_ME * weights_ME).sum(), parameters)


@pytest.mark.parametrize("family", FAMILIES)
def test_shared_prefixes_and_wanted_entries_change_no_state_or_gradient(family: str) -> None:
    generator = torch.Generator().manual_seed(0)

    def draw(count: int) -> list[int]:
        return [int(token) for token in torch.randint(0, 50, (count,), generator=generator)]

    tools, first, second = draw(70), draw(130), draw(50)
    rows = [tools + first + draw(200), tools + first + draw(3), tools + second + draw(150), tools + second + draw(90)]
    rows += [rows[1], rows[2][:160], tools[:20]]
    ids_N, seqlens = packed(rows)
    mask_N = torch.rand(len(ids_N), generator=generator) < 0.3
    mask_N[: seqlens[0]] = False  # a row without a wanted entry
    weights_ME = torch.randn(int(mask_N.sum()), 32, generator=generator)
    model = decoder(family)
    plain = states_and_gradients(model, ids_N, PackedLayout(seqlens), mask_N, weights_ME)
    shared_layout = PackedLayout(seqlens, ids_N=ids_N, mask_N=mask_N)
    assert shared_layout.num_tokens < 0.7 * len(ids_N)
    shared = states_and_gradients(model, ids_N, shared_layout, mask_N, weights_ME)
    for left, right in zip(shared, plain, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-3, atol=1e-3 * float(right.detach().abs().max()))


def test_no_wanted_entry_gives_no_state() -> None:
    ids_N, seqlens = packed([[1, 2, 3], [4]])
    layout = PackedLayout(seqlens, ids_N=ids_N, mask_N=torch.zeros(4, dtype=torch.bool))
    assert decoder("qwen3").hidden_states(ids_N, layout).shape == (0, 32)


@few
@given(ROWS)
def test_shared_length_counts_equal_leading_elements(rows: list[list[int]]) -> None:
    for a, b in pairwise([*rows, rows[0]]):
        alike = list(accumulate((x == y for x, y in zip(a, b, strict=False)), lambda so_far, next_: so_far and next_))
        assert shared_length(torch.tensor(a).numpy(), torch.tensor(b).numpy()) == sum(alike)

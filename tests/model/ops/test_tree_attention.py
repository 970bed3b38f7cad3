"""Attention by parts is that of a mask over all tokens."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from agentgym.model.ops.tree_attention import causal_parts, tree_attention
from agentgym.model.packed_layout import PackedLayout


def masked(q_RHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, visible_RN: Tensor) -> Tensor:
    """Attention by its definition, with a mask of the keys that each row sees."""
    k_NHD, v_NHD = (x.repeat_interleave(q_RHD.shape[1] // x.shape[1], 1) for x in (k_NKD, v_NKD))
    score_HRN = torch.einsum("rhd,nhd->hrn", q_RHD, k_NHD) * q_RHD.shape[-1] ** -0.5
    return torch.einsum("hrn,nhd->rhd", score_HRN.masked_fill(~visible_RN, -torch.inf).softmax(-1), v_NHD)


def seen_by(layout: PackedLayout) -> Tensor:
    """Returns the keys that each computed token sees, `[U, U]`."""
    visible_UU = torch.zeros(layout.num_tokens, layout.num_tokens, dtype=torch.bool)
    for segment in layout.segments:
        rows = slice(segment.start, segment.start + segment.length)
        visible_UU[rows, rows] = torch.ones(segment.length, segment.length, dtype=torch.bool).tril()
        for ancestor in segment.ancestors:
            start = layout.segments[ancestor].start
            visible_UU[rows, start : start + layout.segments[ancestor].length] = True
    return visible_UU


@pytest.mark.parametrize("is_partial", [False, True])
def test_outputs_and_gradients_are_those_of_masked_attention(is_partial: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    tools, first, second = (torch.randint(0, 50, (n,), generator=generator) for n in (300, 250, 40))
    replies = [torch.randint(50, 90, (n,), generator=generator) for n in (200, 3, 131, 90)]
    rows = [torch.cat([tools, (first, first, second, second)[i], reply]) for i, reply in enumerate(replies)]
    ids_N, seqlens = torch.cat(rows), [len(row) for row in rows]
    mask_N = torch.arange(len(ids_N)) % 90 > 40 if is_partial else torch.ones(len(ids_N), dtype=torch.bool)
    layout = PackedLayout(seqlens, ids_N=ids_N, mask_N=mask_N)
    index_R = layout.wanted.index_U[: len(layout.wanted.index_U) - layout.wanted.num_padding]
    assert layout.wanted.parts and layout.num_tokens < 0.6 * len(ids_N)
    shapes = (len(index_R), 4, 8), (layout.num_tokens, 2, 8), (layout.num_tokens, 2, 8)
    inputs = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    weights_RHD = torch.randn(shapes[0], generator=generator)
    actual_RHD = tree_attention(*inputs, layout.wanted.parts)
    doubles = [x.detach().double().requires_grad_() for x in inputs]
    expected_RHD = masked(*doubles, seen_by(layout)[index_R])
    torch.testing.assert_close(actual_RHD.double(), expected_RHD, rtol=1e-5, atol=1e-5)
    gradients = torch.autograd.grad((actual_RHD * weights_RHD).sum(), inputs)
    for gradient, expected in zip(
        gradients, torch.autograd.grad((expected_RHD * weights_RHD).sum(), doubles), strict=True
    ):
        torch.testing.assert_close(gradient.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_rows", [1, 128, 129, 256, 700])
def test_causal_parts_cover_each_pair_of_a_row_and_an_earlier_key_once(num_rows: int) -> None:
    count_TL = torch.zeros(num_rows, num_rows, dtype=torch.int64)
    for part in causal_parts(0, num_rows, 0):
        seen = torch.ones(part.num_rows, part.num_keys, dtype=torch.int64)
        rows, keys = (
            slice(part.first_row, part.first_row + part.num_rows),
            slice(part.first_key, part.first_key + part.num_keys),
        )
        count_TL[rows, keys] += seen.tril() if part.is_causal else seen
    assert torch.equal(count_TL, torch.ones_like(count_TL).tril())

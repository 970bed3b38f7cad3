"""Attention by levels, with the GPU's kernel computed by its definition, is that of a mask over all tokens."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from agentgym.model import decoder
from agentgym.model.decoder import Decoder, DecoderConfig
from agentgym.model.ops import flash_attention as ops
from agentgym.model.ops.flash_attention import AttentionLevel, flash_attention
from agentgym.model.packed_layout import PackedLayout
from tests.model.ops.test_tree_attention import masked, seen_by


def runs_of(level: AttentionLevel) -> list[tuple[slice, slice]]:
    rows, keys = level.row_end_B.tolist(), level.key_end_B.tolist()
    return [(slice(*rows[i : i + 2]), slice(*keys[i : i + 2])) for i in range(len(rows) - 1)]


def scores_of(q_THD: Tensor, k_LKD: Tensor, level: AttentionLevel, scale: float | None) -> Tensor:
    """Returns the scores `[H, T, L]` of the runs of a level, -inf where a row does not attend."""
    k_LHD = k_LKD.repeat_interleave(q_THD.shape[1] // k_LKD.shape[1], 1)
    score_HTL = torch.einsum("thd,lhd->htl", q_THD, k_LHD) * (scale or q_THD.shape[-1] ** -0.5)
    seen_TL = torch.zeros(score_HTL.shape[1:], dtype=torch.bool)
    for rows, keys in runs_of(level):
        seen = torch.ones(rows.stop - rows.start, keys.stop - keys.start, dtype=torch.bool)
        seen_TL[rows, keys] = seen.tril() if level.is_causal else seen
    return score_HTL.masked_fill(~seen_TL, -torch.inf)


def forward(q: Tensor, k: Tensor, v: Tensor, level: AttentionLevel, scale: float | None) -> Sequence[Tensor]:
    score_HTL = scores_of(q, k, level, scale)
    v_LHD = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    out_THD = torch.einsum("htl,lhd->thd", score_HTL.softmax(-1), v_LHD)
    return out_THD, score_HTL.logsumexp(-1), torch.zeros(2), torch.zeros(0)


def backward(
    grad: Tensor,
    qkv: Sequence[Tensor],
    results: Sequence[Tensor],
    random: Sequence[Tensor],
    level: AttentionLevel,
    scale: float | None,
) -> Sequence[Tensor]:
    """Returns the gradients, by the outputs and sums of whole rows (Dao et al. 2022, algorithm 4)."""
    (q, k, v), (out, log_sum) = qkv, results
    repeats, factor = q.shape[1] // k.shape[1], scale or q.shape[-1] ** -0.5
    k_LHD, v_LHD = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    weight_HTL = (scores_of(q, k, level, scale) - log_sum[..., None]).exp()
    of_weight_HTL = torch.einsum("thd,lhd->htl", grad, v_LHD)
    of_score_HTL = weight_HTL * (of_weight_HTL - (grad * out).sum(-1).t()[..., None]) * factor
    grad_q = torch.einsum("htl,lhd->thd", of_score_HTL, k_LHD)
    grad_k = torch.einsum("htl,thd->lhd", of_score_HTL, q).unflatten(1, (-1, repeats)).sum(2)
    grad_v = torch.einsum("htl,thd->lhd", weight_HTL, grad).unflatten(1, (-1, repeats)).sum(2)
    return grad_q, grad_k, grad_v


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "_forward", forward)
    monkeypatch.setattr(ops, "_backward", backward)


def rows_of_a_tree() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    tools, first, second = (torch.randint(0, 50, (n,), generator=generator) for n in (70, 60, 40))
    replies = [torch.randint(50, 90, (n,), generator=generator) for n in (50, 3, 71, 40, 20)]
    alone = torch.randint(0, 50, (45,), generator=generator)
    shared = [torch.cat([tools, (first, first, second, second, second)[i], reply]) for i, reply in enumerate(replies)]
    return [*shared, alone]


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("num_padding", [0, 5])
def test_outputs_and_gradients_are_those_of_masked_attention(num_padding: int) -> None:
    rows = rows_of_a_tree()
    layout = PackedLayout([len(row) for row in rows], ids_N=torch.cat(rows))
    assert [len(level.row_end_B) - 1 for level in layout.levels] == [9, 1, 2]
    generator, size = torch.Generator().manual_seed(1), layout.num_tokens + num_padding
    shapes = (size, 4, 8), (size, 2, 8), (size, 2, 8)
    inputs = [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]
    weights_RHD = torch.randn(shapes[0], generator=generator, dtype=torch.float64)
    found_RHD = flash_attention(*inputs, layout.levels)
    wanted_RHD = masked(*(x[: layout.num_tokens] for x in inputs), seen_by(layout))
    assert not found_RHD[layout.num_tokens :].any()
    torch.testing.assert_close(found_RHD[: layout.num_tokens], wanted_RHD, rtol=1e-6, atol=1e-6)
    gradients = torch.autograd.grad((found_RHD * weights_RHD).sum(), inputs)
    wanted = torch.autograd.grad((wanted_RHD * weights_RHD[: layout.num_tokens]).sum(), inputs)
    for gradient, other in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-6, atol=1e-6)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("is_partial", [False, True])
def test_a_model_that_attends_by_levels_has_the_same_states_and_gradients(
    is_partial: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"width": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_width": 8, "ffn_width": 48}
    config = DecoderConfig(family="qwen3", vocab_size=90, context_window=512, rope_theta=1e4, qk_norm=True, **sizes)
    model = Decoder(config).initialize(0).double()
    rows = rows_of_a_tree()
    ids_N = torch.cat(rows)
    wanted_N = torch.arange(len(ids_N)) % 9 > 5 if is_partial else None
    layout = PackedLayout([len(row) for row in rows], ids_N=ids_N, wanted_N=wanted_N)

    def gradients() -> list[Tensor]:
        states_ME = model.hidden_states(ids_N, layout)
        return [states_ME, *torch.autograd.grad(states_ME.sin().sum(), [*model.parameters()])]

    wanted = gradients()
    monkeypatch.setattr(decoder, "is_tree_attention", lambda *_: False)
    monkeypatch.setattr(decoder, "is_flash_attention", lambda *_: True)
    for found, other in zip(gradients(), wanted, strict=True):
        torch.testing.assert_close(found, other, rtol=1e-6, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("num_padding", [0, 5])
def test_the_kernel_of_a_gpu_gives_masked_attention(num_padding: int) -> None:
    rows = rows_of_a_tree()
    layout = PackedLayout([len(row) for row in rows], "cuda", ids_N=torch.cat(rows))
    generator, size = torch.Generator().manual_seed(1), layout.num_tokens + num_padding
    shapes = (size, 4, 64), (size, 2, 64), (size, 2, 64)
    inputs = [torch.randn(shape, generator=generator).cuda().bfloat16().requires_grad_() for shape in shapes]
    weights_RHD = torch.randn(shapes[0], generator=generator).cuda().bfloat16()
    found_RHD = flash_attention(*inputs, layout.levels)
    doubles = [x.detach().double().cpu().requires_grad_() for x in inputs]
    wanted_RHD = masked(*(x[: layout.num_tokens] for x in doubles), seen_by(layout))
    gradients = torch.autograd.grad((found_RHD * weights_RHD).sum(), inputs)
    wanted = torch.autograd.grad((wanted_RHD * weights_RHD.double().cpu()[: layout.num_tokens]).sum(), doubles)
    found = [found_RHD[: layout.num_tokens], *gradients]
    for result, other in zip(found, [wanted_RHD, *wanted], strict=True):
        assert (result.double().cpu() - other).norm() < 0.01 * other.norm()

"""Attention by levels, with the GPU's kernel computed by its definition, is that of a mask over all tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from agentgym.model import decoder, pass_attention
from agentgym.model.decoder import Decoder, DecoderConfig
from agentgym.model.ops import flash_attention as ops
from agentgym.model.ops.flash_attention import AttentionLevel, flash_attention
from agentgym.model.packed_layout import PackedLayout
from agentgym.model.policy import load_policy
from agentgym.trainers.model_check.small_models import save_small_model
from tests.model.ops.test_tree_attention import seen_by


def runs_of(level: AttentionLevel) -> list[tuple[slice, slice]]:
    rows, keys = level.row_end_B.tolist(), level.key_end_B.tolist()
    return [(slice(*rows[i : i + 2]), slice(*keys[i : i + 2])) for i in range(len(rows) - 1)]


def scores_of(q_THD: Tensor, k_LKD: Tensor, level: AttentionLevel, scale: float | None) -> Tensor:
    """Returns the scores `[H, T, L]` of the runs of a level, -inf where a row does not attend."""
    k_LHD = k_LKD.repeat_interleave(q_THD.shape[1] // k_LKD.shape[1], 1)
    score_HTL = torch.einsum("thd,lhd->htl", q_THD, k_LHD) * (scale or q_THD.shape[-1] ** -0.5)
    visible_TL = torch.zeros(score_HTL.shape[1:], dtype=torch.bool)
    for rows, keys in runs_of(level):
        seen = torch.ones(rows.stop - rows.start, keys.stop - keys.start, dtype=torch.bool)
        if level.is_causal:
            before = seen.shape[1] - seen.shape[0]
            seen = seen.tril(before) & seen.triu(before + 1 - (level.window or len(visible_TL) + seen.shape[1]))
        visible_TL[rows, keys] = seen
    return score_HTL.masked_fill(~visible_TL, -torch.inf)


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


RULES: dict[str, Callable[[Tensor], Tensor]] = {
    "causal": torch.zeros_like,
    "window": lambda position_U: (position_U - 29).clamp(min=0),
    "wide window": lambda position_U: (position_U - 149).clamp(min=0),
    "chunks": lambda position_U: position_U // 48 * 48,
}
"""The first key of a token at each position."""


@dataclass(frozen=True)
class Case:
    """Rows of a tree, a rule, and inputs of as many tokens."""

    layout: PackedLayout
    levels: Sequence[AttentionLevel]
    inputs: list[Tensor]
    """Queries, keys, values, and sinks."""
    weights_RHD: Tensor
    visible_UU: Tensor

    @classmethod
    def of(cls, rule: str, width: int, num_padding: int, device: str = "cpu") -> Case:
        rows = rows_of_a_tree()
        layout = PackedLayout([len(row) for row in rows], device, ids_N=torch.cat(rows))
        levels = layout.levels_from(RULES[rule](torch.arange(max(map(len, rows)))).numpy())
        generator, size = torch.Generator().manual_seed(1), layout.num_tokens + num_padding
        shapes = (size, 4, width), (size, 2, width), (size, 2, width - 8), (4,)
        inputs = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
        weights_RHD = torch.randn(size, 4, width - 8, generator=generator, dtype=torch.float64)
        position_U = layout.every.position_U[: layout.num_tokens].cpu()
        visible_UU = seen_by(layout) & (position_U >= RULES[rule](position_U)[:, None])
        return cls(layout, levels, inputs, weights_RHD, visible_UU)

    def wanted(self, has_sinks: bool) -> list[Tensor]:
        """Returns outputs and gradients by a mask over all tokens; a sink is a key without a value."""
        size = self.layout.num_tokens
        q, k, v, sinks_H = (x.clone().requires_grad_() for x in self.inputs)
        k_NHD, v_NHD = (x[:size].repeat_interleave(2, 1) for x in (k, v))
        score_HRN = torch.einsum("rhd,nhd->hrn", q[:size], k_NHD) * q.shape[-1] ** -0.5
        score_HRN = score_HRN.masked_fill(~self.visible_UU, -torch.inf)
        if has_sinks:
            score_HRN = torch.cat([score_HRN, sinks_H[:, None, None].expand(-1, size, 1)], -1)
        out_RHD = torch.einsum("hrn,nhd->rhd", score_HRN.softmax(-1)[..., :size], v_NHD)
        total = (out_RHD * self.weights_RHD[:size]).sum()
        return [out_RHD, *torch.autograd.grad(total, [q, k, v, *[sinks_H] * has_sinks])]

    def found(self, has_sinks: bool, device: str, dtype: torch.dtype) -> list[Tensor]:
        """Returns outputs and gradients by levels; outputs of padding are 0."""
        q, k, v, sinks_H = (x.to(device, dtype).requires_grad_() for x in self.inputs)
        out_RHD = flash_attention(q, k, v, self.levels, None, sinks_H if has_sinks else None)
        assert not out_RHD[self.layout.num_tokens :].any()
        total = (out_RHD * self.weights_RHD.to(device, dtype)).sum()
        return [out_RHD[: self.layout.num_tokens], *torch.autograd.grad(total, [q, k, v, *[sinks_H] * has_sinks])]


def test_levels_are_one_call_where_tokens_see_a_stretch_of_positions() -> None:
    cases = {rule: Case.of(rule, 16, 0) for rule in RULES}
    assert [len(level.row_end_B) - 1 for level in cases["causal"].levels] == [9, 1, 2]
    for rule in ("window", "wide window", "chunks"):
        (level,) = cases[rule].levels
        assert (level.window is None) == (rule == "chunks") and len(level.row_T) == cases[rule].layout.num_tokens


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("num_padding", [0, 5])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_outputs_and_gradients_are_those_of_masked_attention(rule: str, has_sinks: bool, num_padding: int) -> None:
    case = Case.of(rule, 16, num_padding)
    for own, expected in zip(case.found(has_sinks, "cpu", torch.float64), case.wanted(has_sinks), strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.long
@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("kind", ["mistral", "gemma3_text", "gpt_oss", "llama4_text", "deepseek_v3"])
def test_models_of_transformers_attend_by_levels(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_small_model(kind, tmp_path)
    model = load_policy(tmp_path, backend="transformers").double()
    rows = rows_of_a_tree()
    ids_N = torch.cat(rows)
    layout = PackedLayout([len(row) for row in rows], ids_N=ids_N)

    def results() -> list[Tensor]:
        states_NE = model.hidden_states(ids_N, layout)
        parameters = [parameter.requires_grad_() for parameter in model.parameters()]
        gradients = torch.autograd.grad(states_NE.sin().sum(), parameters, materialize_grads=True)
        return [states_NE, *gradients]

    monkeypatch.setattr(pass_attention, "is_tree_attention", lambda *_: False)
    expected, calls = results(), []
    monkeypatch.setattr(pass_attention, "is_flash_attention", lambda *_: True)
    monkeypatch.setattr(pass_attention, "attend", lambda *_: calls.append(1))
    for own, theirs in zip(results(), expected, strict=True):
        assert (own - theirs).norm() <= 1e-6 * theirs.norm()
    assert not calls


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
    mask_N = torch.arange(len(ids_N)) % 9 > 5 if is_partial else None
    layout = PackedLayout([len(row) for row in rows], ids_N=ids_N, mask_N=mask_N)

    def gradients() -> list[Tensor]:
        states_ME = model.hidden_states(ids_N, layout)
        return [states_ME, *torch.autograd.grad(states_ME.sin().sum(), [*model.parameters()])]

    expected = gradients()
    monkeypatch.setattr(decoder, "is_tree_attention", lambda *_: False)
    monkeypatch.setattr(decoder, "is_flash_attention", lambda *_: True)
    for own, theirs in zip(gradients(), expected, strict=True):
        torch.testing.assert_close(own, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("num_padding", [0, 5])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_the_kernel_of_a_gpu_gives_masked_attention(rule: str, has_sinks: bool, num_padding: int) -> None:
    case = Case.of(rule, 64, num_padding, "cuda")
    for own, expected in zip(case.found(has_sinks, "cuda", torch.bfloat16), case.wanted(has_sinks), strict=True):
        assert (own.double().cpu() - expected).norm() < 0.01 * expected.norm()

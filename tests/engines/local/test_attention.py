"""Attention without a compiler: a row has the same bits beside rows of any length."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from agentgym.embedded import embedded_folder
from agentgym.engines.local import attention
from agentgym.engines.local.attention import AttentionPlan
from agentgym.engines.local.batch_invariance import batch_invariance_findings
from agentgym.engines.local.kv_cache import SlotCache
from agentgym.engines.local.step import StepRunner
from agentgym.model.model_folder import load_decoder


@pytest.mark.parametrize("position", [30, 300, 700])
def test_padding_changes_no_bit(position: int) -> None:
    torch.manual_seed(0)
    cache = SlotCache(load_decoder(embedded_folder()), 2, 2048)
    for kv in cache.kv:
        kv.normal_()
    keys, values = cache.kv[0]
    queries = torch.randn(2, 2 * keys.shape[1], keys.shape[3])

    def attended(longest: int) -> torch.Tensor:
        plan = AttentionPlan(cache, np.array([0, 1]), np.array([position, longest]), 2, ())
        return plan.attend(queries, (keys, values))[0]

    alone = attended(position)
    assert [longest for longest in range(position, 2048, 64) if not torch.equal(attended(longest), alone)] == []


def test_values_are_summed_one_part_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_KEYS", 64)
    weights, values = torch.rand(3, 2, 320, dtype=torch.float64), torch.randn(3, 320, 8, dtype=torch.float64)
    assert torch.allclose(attention._weighted_sum(weights, values), weights @ values, rtol=1e-12, atol=1e-12)


def test_an_engine_would_notice_a_product_whose_bits_depend_on_the_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = StepRunner(load_decoder(embedded_folder()), SlotCache(load_decoder(embedded_folder()), 6, 1024))
    assert batch_invariance_findings(runner) == []

    def halved(weight_BgL: torch.Tensor, v_BLD: torch.Tensor) -> torch.Tensor:  # as MKL sums 400 numbers and more
        half = v_BLD.shape[1] if v_BLD.shape[1] < 400 else v_BLD.shape[1] // 2
        parts = zip(weight_BgL.split(half, 2), v_BLD.split(half, 1), strict=True)
        return torch.stack([torch.bmm(weight, v) for weight, v in parts]).sum(0)

    monkeypatch.setattr(attention, "_weighted_sum", halved)
    assert len(batch_invariance_findings(runner)) > 0

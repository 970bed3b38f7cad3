"""Muon's numbers are torch's, in whichever type it iterates."""

from __future__ import annotations

import pytest
import torch

from agentgym.trainers.learner import plain_optimizers
from agentgym.trainers.learner.plain_optimizers import PlainMuon

SHAPES = ((6, 24), (24, 6), (8, 8))


def stepped(kind: type[torch.optim.Muon], dtype: torch.dtype) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(shape, generator=random).to(dtype)) for shape in SHAPES]
    optimizer = kind(parameters, lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for _ in range(3):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=random).to(dtype)
        optimizer.step()
    state = [optimizer.state[parameter]["momentum_buffer"] for parameter in parameters]
    return [*(parameter.detach() for parameter in parameters), *state]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bits_are_torchs_where_bfloat16_is_fast(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    monkeypatch.setattr(plain_optimizers, "has_bfloat16_products", lambda: True)
    for own, theirs in zip(stepped(PlainMuon, dtype), stepped(torch.optim.Muon, dtype), strict=True):
        assert torch.equal(own, theirs)


def test_elsewhere_the_numbers_are_torchs_without_its_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_optimizers, "has_bfloat16_products", lambda: False)
    own, theirs = stepped(PlainMuon, torch.float32), stepped(torch.optim.Muon, torch.float32)
    for number, parts in enumerate(zip(own, theirs, strict=True)):
        torch.testing.assert_close(*parts, atol=1e-3, rtol=1e-2)
        assert torch.equal(*parts) == (number >= len(SHAPES))  # momentum is float32 in both

"""Liger's fused linear cross-entropy in the place of ours; where Liger has no kernel, it computes chunks in PyTorch."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch

from agentgym.errors import ConfigError
from agentgym.model.decoder import Decoder
from agentgym.trainers.batch.batch import TrainingBatch
from agentgym.trainers.learner.learner import Learner, LearnerConfig
from agentgym.trainers.learner.token_logprobs import score_targets, scorer
from agentgym.trainers.settings.optimizer import OptimizerConfig

WHY = "Liger is not installed: pip install '.[liger]'"
Tiny = Callable[..., Decoder]


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_logprobs_entropies_and_gradients_are_those_of_torch(temperature: float) -> None:
    pytest.importorskip("liger_kernel", reason=WHY)
    generator = torch.Generator().manual_seed(0)
    target_N = torch.randint(0, 301, (600,), generator=generator)  # over more than one of its chunks
    share_N, entropy_share_N = torch.randn(2, 600, generator=generator)
    results = []
    for score in (score_targets, scorer("liger")):
        generator.manual_seed(1)
        hidden_NE = torch.randn(600, 32, generator=generator).requires_grad_()
        head_VE = torch.randn(301, 32, generator=generator).mul_(0.3).requires_grad_()
        scores = score(hidden_NE, head_VE, target_N, temperature)
        loss = (share_N * scores.logp_N + entropy_share_N * scores.entropy_N).sum()
        results.append((scores.logp_N, scores.entropy_N, *torch.autograd.grad(loss, (hidden_NE, head_VE))))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(theirs, ours, rtol=1e-5, atol=3e-5)


def test_no_targets_have_no_scores() -> None:
    pytest.importorskip("liger_kernel", reason=WHY)
    hidden_NE = torch.zeros(0, 4, requires_grad=True)
    scores = scorer("liger")(hidden_NE, torch.zeros(7, 4), torch.zeros(0, dtype=torch.int64), 1.0)
    assert scores.logp_N.shape == scores.entropy_N.shape == (0,)
    (scores.logp_N.sum() + scores.entropy_N.sum()).backward()


def test_a_step_with_liger_is_the_step_without(make_tiny: Tiny, make_batch: Callable[..., TrainingBatch]) -> None:
    pytest.importorskip("liger_kernel", reason=WHY)
    stats = []
    for kernel in ("torch", "liger"):
        model = make_tiny()
        config = LearnerConfig(head_kernel=kernel, entropy_coefficient=0.01, threads=1)
        learner = Learner(model, config, OptimizerConfig(), total_steps=1, temperature=0.8)
        stats.append(learner.update(make_batch(model)))
        learner.close()
    assert stats[1].loss == pytest.approx(stats[0].loss, rel=1e-5, abs=1e-7)
    assert stats[1].grad_norm == pytest.approx(stats[0].grad_norm, rel=1e-5)
    assert stats[1].entropy == pytest.approx(stats[0].entropy, rel=1e-5)


def test_without_liger_the_message_explains_how_to_get_it(make_tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "agentgym.trainers.learner.liger_head", raising=False)
    monkeypatch.setitem(sys.modules, "liger_kernel.ops", None)
    with pytest.raises(ConfigError, match=r"learner\.head_kernel liger needs Liger .*\[liger\]"):
        Learner(make_tiny(), LearnerConfig(head_kernel="liger"), OptimizerConfig(), total_steps=1)

"""Weights in bfloat16 learn as float32 ones do, up to their rounding, and a resumed run has their masters."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch

from agentgym.errors import ConfigError
from agentgym.model.decoder import Decoder
from agentgym.trainers.batch.batch import TrainingBatch
from agentgym.trainers.learner.learner import Learner, LearnerConfig
from agentgym.trainers.learner.master_weights import MasterWeights
from agentgym.trainers.learner.optimizer import PolicyOptimizer
from agentgym.trainers.settings.optimizer import OptimizerConfig

Tiny = Callable[..., Decoder]
SMALL = OptimizerConfig(learning_rate=1e-4, warmup_steps=1)


def stepped(model: Decoder, steps: int, config: OptimizerConfig = SMALL) -> PolicyOptimizer:
    """Steps by the same gradient each, so that AdamW moves every weight by the learning rate."""
    optimizer = PolicyOptimizer(model, config, steps)
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter, dtype=torch.float32)
        optimizer.step()
    return optimizer


def test_steps_below_the_rounding_of_bfloat16_add_up(tiny: Tiny) -> None:
    half = tiny().bfloat16()
    whole = copy.deepcopy(half).float()
    ones = half.layers[0].input_norm
    before = ones.detach().clone()
    assert torch.equal((before.float() - 1e-4).bfloat16(), before), "one step alone is lost"
    stepped(half, 60)
    stepped(whole, 60)
    for rounded, exact in zip(half.parameters(), whole.parameters(), strict=True):
        assert rounded.dtype == torch.bfloat16
        assert torch.equal(rounded, exact.bfloat16())
    assert not torch.equal(ones, before)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_resumed_optimizer_has_the_masters(tiny: Tiny, name: str) -> None:
    config = OptimizerConfig(name=name, learning_rate=1e-5, warmup_steps=1)
    model = tiny().bfloat16()
    state = copy.deepcopy(stepped(model, 3, config).state_dict())
    resumed = PolicyOptimizer(copy.deepcopy(model), config, 3)
    assert any(
        not torch.equal(master, own.float()) for master, own in zip(state["masters"], model.parameters(), strict=True)
    )
    resumed.load_state_dict(state)
    for left, right in zip(resumed.state_dict()["masters"], state["masters"], strict=True):
        assert torch.equal(left, right)


def test_the_state_of_weights_in_another_type_is_refused(tiny: Tiny) -> None:
    whole = PolicyOptimizer(tiny(), OptimizerConfig(learning_rate=1e-3), 10)
    half = PolicyOptimizer(tiny().to(torch.bfloat16), OptimizerConfig(learning_rate=1e-3), 10)
    with pytest.raises(ConfigError, match="has 0 float32 copies of weights, and these weights need"):
        half.load_state_dict(whole.state_dict())


def test_weights_in_float32_have_no_masters(tiny: Tiny) -> None:
    model = tiny()
    masters = MasterWeights(list(model.parameters()))
    assert not len(masters)
    assert masters.of(model.embed) is model.embed
    assert "masters" not in PolicyOptimizer(model, SMALL, 1).state_dict()


def test_micro_batches_of_a_bfloat16_model_add_up_in_float32(
    tiny: Tiny, make_batch: Callable[..., TrainingBatch]
) -> None:
    # 64 micro-batches: summed in bfloat16, the last ones would be rounded to an eighth of a percent of the sum each.
    model = tiny()
    batch = make_batch(model, num_groups=16)
    norms = []
    for tokens in (1, 100_000):
        half = copy.deepcopy(model).bfloat16()
        learner = Learner(half, LearnerConfig(micro_batch_tokens=tokens, threads=1), SMALL, total_steps=1)
        norms.append(learner.update(batch).grad_norm)
        learner.close()
    exact = Learner(copy.deepcopy(model), LearnerConfig(threads=1), SMALL, total_steps=1)
    norms.append(exact.update(batch).grad_norm)
    exact.close()
    assert norms[0] == pytest.approx(norms[1], rel=5e-3)
    assert norms[0] == pytest.approx(norms[2], rel=2e-2)

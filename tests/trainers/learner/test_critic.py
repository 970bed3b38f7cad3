"""A critic's values stand where they belong, its fitting is the plain formula's, and it learns what is to come."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from agentgym.errors import TrainingHalted
from agentgym.model.decoder import Decoder
from agentgym.model.packed_layout import PackedLayout
from agentgym.trainers.batch.batch import TrainingBatch
from agentgym.trainers.learner.critic import Critic
from agentgym.trainers.learner.learner import Learner
from agentgym.trainers.parallel.learner_ranks import OneProcess
from agentgym.trainers.settings.critic import CriticConfig
from agentgym.trainers.settings.learner import LearnerConfig
from agentgym.trainers.settings.optimizer import OptimizerConfig

Tiny = Callable[..., Decoder]
Fresh = Callable[..., TrainingBatch]
STEP = OptimizerConfig(learning_rate=1e-2, warmup_steps=1, max_grad_norm=1e9)


def learner_of(model: Decoder, *, trunk: str = "own", step: OptimizerConfig = STEP, **settings: object) -> Learner:
    critic = CriticConfig(trunk=trunk, clip=None)  # type: ignore[arg-type]
    config = LearnerConfig(critic=critic, threads=1, **settings)  # type: ignore[arg-type]
    return Learner(model, config, step, total_steps=10)


def shaken(critic: Critic) -> None:
    """A head that says something."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        critic.head.weight_E.copy_(torch.randn(critic.head.weight_E.shape, generator=generator))
        critic.head.bias.fill_(0.25)


def with_returns(batch: TrainingBatch) -> TrainingBatch:
    """Returns that the position in the row tells."""
    return replace(batch, return_N=torch.where(batch.mask_N, 0.1 * batch.position_N.float(), 0.0))


def plain_values(critic: Critic, batch: TrainingBatch, row: int) -> Tensor:
    """The value after each id of one row, from a forward pass of that row alone."""
    part = batch.select([row])
    ids_T = torch.cat([part.ids_N, part.target_N[-1:]])
    with torch.no_grad():
        hidden_TE = critic.backbone.hidden_states(ids_T, PackedLayout([len(ids_T)]))
        return hidden_TE @ critic.head.weight_E + critic.head.bias


@pytest.mark.parametrize("trunk", ["own", "shared"])
@pytest.mark.parametrize("micro_batch_tokens", [10_000, 30, 1])
def test_a_value_is_read_before_its_token_and_one_after_the_last(
    trunk: str, micro_batch_tokens: int, tiny: Tiny, fresh_batch: Fresh
) -> None:
    model = tiny()
    batch = fresh_batch(model)
    learner = learner_of(model, trunk=trunk, micro_batch_tokens=micro_batch_tokens)
    assert learner.critic is not None
    shaken(learner.critic)
    values_M, end_R = learner.critic.read(batch)
    expected, ends = [], []
    for row, mask_T in enumerate(batch.mask_N.split(batch.seqlens)):
        after_T = plain_values(learner.critic, batch, row)
        expected.append(after_T[:-1][mask_T])
        ends.append(after_T[-1])
    torch.testing.assert_close(values_M, torch.cat(expected), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(end_R, torch.stack(ends), rtol=1e-4, atol=1e-4)
    learner.close()


def test_a_new_critic_predicts_zero(tiny: Tiny, fresh_batch: Fresh) -> None:
    learner = learner_of(tiny())
    assert learner.critic is not None
    values_M, end_R = learner.critic.read(fresh_batch(tiny()))
    assert not values_M.any() and not end_R.any() and len(values_M)
    learner.close()


def test_the_gradient_is_that_of_half_the_squared_error(tiny: Tiny, fresh_batch: Fresh) -> None:
    model = tiny()
    batch = with_returns(fresh_batch(model))
    for micro_batch_tokens in (10_000, 30):
        critic = Critic(
            model,
            CriticConfig(trunk="own", clip=None),
            STEP,
            total_steps=10,
            micro_batch_tokens=micro_batch_tokens,
            ranks=OneProcess(torch.device("cpu"), 2),
        )
        shaken(critic)
        total = torch.zeros(())
        weight_N, return_N = batch.weight_N.split(batch.seqlens), batch.return_N.split(batch.seqlens)
        for row in range(batch.num_rows):
            part = batch.select([row])
            hidden_TE = critic.backbone.hidden_states(part.ids_N, PackedLayout(part.seqlens))
            value_T = hidden_TE @ critic.head.weight_E + critic.head.bias
            total = total + 0.5 * (weight_N[row] * (value_T - return_N[row]).square()).sum()
        assert critic.optimizer is not None
        expected = torch.autograd.grad(total, critic.optimizer.parameters, allow_unused=True)
        norm = math.sqrt(sum(float(slope.square().sum()) for slope in expected if slope is not None))
        assert critic.update(batch) == pytest.approx(norm, rel=1e-4)


def moved(critic: Critic, name: str, place: int, by: float) -> None:
    """One weight of the critic, moved."""
    own = {"trunk": critic.backbone.embed, "weight": critic.head.weight_E, "bias": critic.head.bias}[name]
    with torch.no_grad():
        own.view(-1)[place] += by


@pytest.mark.parametrize(("name", "place"), [("weight", 3), ("bias", 0), ("trunk", 32 * 7 + 5)])
def test_the_gradient_under_a_bound_is_the_slope_of_the_clipped_error(
    name: str, place: int, tiny: Tiny, fresh_batch: Fresh
) -> None:
    model = tiny()
    batch = with_returns(fresh_batch(model))
    config = LearnerConfig(critic=CriticConfig(trunk="own", clip=0.2), threads=1, micro_batch_tokens=30)
    learner = Learner(model, config, STEP, total_steps=10)
    critic = learner.critic
    assert critic is not None and critic.optimizer is not None
    shaken(critic)
    near_M = critic.read(batch)[0] + torch.linspace(-0.5, 0.5, int(batch.mask_N.sum()))
    batch = replace(batch, old_value_N=torch.zeros_like(batch.return_N).masked_scatter(batch.mask_N, near_M))

    def error() -> float:
        value_M, old_M, return_M = critic.read(batch)[0].double(), near_M.double(), batch.return_N[batch.mask_N]
        clamp_M = old_M + (value_M - old_M).clamp(-0.2, 0.2)
        loss_M = 0.5 * torch.maximum((value_M - return_M) ** 2, (clamp_M - return_M) ** 2)
        return float((batch.weight_N[batch.mask_N].double() * loss_M).sum())

    step = 1e-3
    moved(critic, name, place, step)
    above = error()
    moved(critic, name, place, -2 * step)
    slope = (above - error()) / (2 * step)
    moved(critic, name, place, step)
    loss = torch.zeros(())
    for part in batch.split(30):
        layout = PackedLayout(part.seqlens, ids_N=part.ids_N, mask_N=part.mask_N)
        loss = loss + critic.loss(critic.backbone.hidden_states(part.ids_N, layout), part)
    loss.backward()
    owner = {"trunk": critic.backbone.embed, "weight": critic.head.weight_E, "bias": critic.head.bias}[name]
    assert owner.grad is not None and abs(slope) > 1e-3
    assert float(owner.grad.view(-1)[place]) == pytest.approx(slope, rel=0.02, abs=1e-4)
    learner.close()


def test_a_shared_trunk_has_the_gradient_of_the_policy_and_so_much_of_the_critics(
    tiny: Tiny, fresh_batch: Fresh
) -> None:
    norms = []
    for coefficient in (0.1, 0.7):
        model = tiny()
        batch = with_returns(fresh_batch(model))
        critic = CriticConfig(trunk="shared", clip=None, coefficient=coefficient)
        learner = Learner(model, LearnerConfig(critic=critic, threads=1, minibatches=1), STEP, total_steps=10)
        assert learner.critic is not None
        shaken(learner.critic)
        hidden_NE = model.hidden_states(batch.ids_N, PackedLayout(batch.seqlens))
        logp_N = model.logits(hidden_NE).log_softmax(-1).gather(1, batch.target_N[:, None])[:, 0]
        policy = -(batch.weight_N * batch.advantage_N * logp_N).sum()  # fresh samples: the ratio is 1
        values_N = hidden_NE @ learner.critic.head.weight_E + learner.critic.head.bias
        value = 0.5 * (batch.weight_N * (values_N - batch.return_N).square()).sum()
        parameters = learner.optimizer.parameters
        gradient = torch.autograd.grad(policy + coefficient * value, parameters, allow_unused=True)
        expected = math.sqrt(sum(float(slope.square().sum()) for slope in gradient if slope is not None))
        norms.append(learner.update(batch).grad_norm)
        assert norms[-1] == pytest.approx(expected, rel=1e-4)
        learner.close()
    assert norms[1] > 1.1 * norms[0]


@pytest.mark.long
@pytest.mark.parametrize("trunk", [pytest.param("own", marks=pytest.mark.slow), "shared"])
def test_a_critic_learns_the_returns_that_it_is_shown(trunk: str, tiny: Tiny, fresh_batch: Fresh) -> None:
    model = tiny()
    batch = with_returns(fresh_batch(model))
    still = replace(batch, advantage_N=torch.zeros_like(batch.advantage_N))
    learner = learner_of(model, trunk=trunk, step=replace(STEP, learning_rate=3e-3))
    assert learner.critic is not None
    mask_N = batch.mask_N
    errors = []
    for _ in range(40):
        values_M = learner.critic.read(still)[0]
        errors.append(float((values_M - batch.return_N[mask_N]).square().mean()))
        target = replace(still, old_value_N=torch.zeros_like(batch.return_N).masked_scatter(mask_N, values_M))
        learner.update(target)
        stats = learner.update_critic(target)
        assert stats is not None
    assert errors[-1] < 0.1 * errors[0]
    assert stats.explained_variance > 0.8 and stats.value_loss == pytest.approx(errors[-1] / 2, rel=1e-3)
    learner.close()


def test_a_critic_of_its_own_leaves_the_policy_alone(tiny: Tiny, fresh_batch: Fresh) -> None:
    model = tiny()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    learner = learner_of(model)
    learner.update_critic(with_returns(fresh_batch(model)))
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    learner.close()


@pytest.mark.parametrize("trunk", ["own", "shared"])
def test_the_state_of_a_critic_goes_on_where_it_was(trunk: str, tiny: Tiny, fresh_batch: Fresh) -> None:
    def step(learner: Learner, batch: TrainingBatch) -> None:
        learner.update(batch)
        learner.update_critic(batch)

    model, twin = tiny(), tiny()
    batch = with_returns(fresh_batch(model))
    learner, again = learner_of(model, trunk=trunk), learner_of(twin, trunk=trunk)
    step(learner, batch)
    twin.load_state_dict(model.state_dict())
    again.load_state_dict(copy.deepcopy(learner.state_dict()))
    for any_learner in (learner, again):
        step(any_learner, batch)
    assert learner.critic is not None and again.critic is not None
    assert torch.equal(learner.critic.read(batch)[0], again.critic.read(batch)[0])
    learner.close()
    again.close()


def test_a_return_that_is_no_number_is_refused_and_one_that_explodes_halts(tiny: Tiny, fresh_batch: Fresh) -> None:
    model = tiny()
    learner = learner_of(model)
    assert learner.critic is not None
    batch = fresh_batch(model)
    huge = replace(batch, return_N=torch.where(batch.mask_N, 3e38, 0.0))
    before = learner.critic.read(batch)[0]
    with pytest.raises(TrainingHalted, match="the critic's loss"):
        learner.update_critic(huge)
    assert torch.equal(learner.critic.read(batch)[0], before)
    learner.close()

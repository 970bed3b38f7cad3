"""A step against the plain formula, however it is cut; what it reports; and what stops it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from agentgym.errors import ConfigError, TrainingHalted, UnknownName
from agentgym.model.decoder import Decoder
from agentgym.model.packed_layout import PackedLayout
from agentgym.trainers.algorithms.losses import LOSSES
from agentgym.trainers.batch.batch import TrainingBatch
from agentgym.trainers.learner.learner import Learner, LearnerConfig, StepStats
from agentgym.trainers.learner.objective import balance_weight, needs_all_rows, policy_loss
from agentgym.trainers.settings.critic import CriticConfig
from agentgym.trainers.settings.kl import KLConfig
from agentgym.trainers.settings.optimizer import OptimizerConfig
from agentgym.trainers.settings.router import RouterConfig

Tiny = Callable[..., Decoder]
Fresh = Callable[..., TrainingBatch]
STEP = OptimizerConfig(learning_rate=1e-2, warmup_steps=1, max_grad_norm=1e9)


def learned(model: Decoder, batch: TrainingBatch, config: LearnerConfig, temperature: float = 1.0) -> StepStats:
    learner = Learner(model, config, STEP, total_steps=10, temperature=temperature)
    try:
        return learner.update(batch)
    finally:
        learner.close()


def weights(model: Decoder) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def with_gradient(model: Decoder, batch: TrainingBatch, config: LearnerConfig) -> tuple[StepStats, list[Tensor]]:
    """A step, and the gradient that it hands to the optimizer."""
    learner = Learner(model, config, STEP, total_steps=10)
    gradients: list[Tensor] = []
    step = learner.optimizer.step

    def seen() -> float:
        gradients.extend(parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None)
        return step()

    learner.optimizer.step = seen  # type: ignore[method-assign]
    stats = learner.update(batch)
    learner.close()
    return stats, gradients


def plain_gradient(model: Decoder, batch: TrainingBatch, entropy: float = 0.0) -> list[Tensor]:
    """Of `-sum(weight * (advantage * logp + entropy * H))`, which is the step's gradient on fresh samples."""
    logits_NV = model.logits(model.hidden_states(batch.ids_N, PackedLayout(batch.seqlens)))
    logp_NV = logits_NV.log_softmax(-1)
    logp_N = logp_NV.gather(1, batch.target_N[:, None])[:, 0]
    entropy_N = -(logp_NV.exp() * logp_NV).sum(-1)
    loss = -(batch.weight_N * (batch.advantage_N * logp_N + entropy * entropy_N)).sum()
    return list(torch.autograd.grad(loss, list(model.parameters())))


@pytest.mark.parametrize("entropy", [0.0, 0.3])
def test_the_first_step_on_fresh_samples_is_the_policy_gradient(entropy: float, tiny: Tiny, fresh_batch: Fresh) -> None:
    model = tiny()
    batch = fresh_batch(model)
    gradient = plain_gradient(model, batch, entropy)
    norm = float(torch.stack([slope.norm() for slope in gradient]).norm())
    before = weights(model)
    stats = learned(model, batch, LearnerConfig(entropy_coefficient=entropy, threads=1))
    assert stats.grad_norm == pytest.approx(norm, rel=1e-4)
    for old, new, slope in zip(before, model.parameters(), gradient, strict=True):
        clear = slope.abs() > 1e-4 * norm  # elsewhere the sign of rounding decides Adam's first step
        torch.testing.assert_close((old - new.detach())[clear], 1e-2 * slope.sign()[clear], rtol=1e-2, atol=1e-6)


def test_what_a_step_reports_on_fresh_samples(
    tiny: Tiny, fresh_batch: Fresh, plain_logprobs: Callable[..., list[float]]
) -> None:
    model = tiny()
    batch = fresh_batch(model)
    logits_NV = model.logits(model.hidden_states(batch.ids_N, PackedLayout(batch.seqlens))).detach()
    logp_NV = logits_NV.log_softmax(-1)
    entropy = float(-(logp_NV.exp() * logp_NV).sum(-1)[batch.mask_N].mean())
    loss = -float((batch.weight_N * batch.advantage_N).sum())  # every ratio is 1
    stats = learned(model, batch, LearnerConfig(threads=1))
    assert stats.loss == pytest.approx(loss, abs=1e-6)
    assert stats.entropy == pytest.approx(entropy, rel=1e-5)
    assert stats.mismatch_max < 1e-5 and stats.mismatch_mean <= stats.mismatch_max
    assert stats.ratio_max == pytest.approx(1.0, abs=1e-5)
    assert stats.clip_fraction == 0.0
    assert stats.kl == 0.0
    assert stats.learning_rate == 1e-2


def test_a_policy_that_moved_away_shows_in_mismatch_ratio_and_clipping(tiny: Tiny, fresh_batch: Fresh) -> None:
    model = tiny()
    batch = fresh_batch(model)
    sampled_logp_N = torch.where(batch.mask_N, batch.old_logp_N - 0.5, 0.0)
    moved = replace(batch, sampled_logp_N=sampled_logp_N, old_logp_N=sampled_logp_N)
    stats = learned(model, moved, LearnerConfig(threads=1))
    assert stats.mismatch_mean == pytest.approx(0.5, abs=1e-4)
    assert stats.ratio_max == pytest.approx(1.6487, abs=1e-3)
    good = (batch.advantage_N > 0).sum() / batch.mask_N.sum()
    assert stats.clip_fraction == pytest.approx(float(good)), "a ratio of 1.65 is clipped where the advantage is good"


def test_logprobs_are_those_of_the_tempered_distribution(
    tiny: Tiny, fresh_batch: Fresh, plain_logprobs: Callable[..., list[float]]
) -> None:
    model = tiny()
    batch = fresh_batch(model, num_groups=1).select([0])
    learner = Learner(model, LearnerConfig(threads=1), STEP, total_steps=1, temperature=0.7)
    ids = [int(batch.ids_N[0]), *batch.target_N.tolist()]
    expected = [x for x, is_own in zip(plain_logprobs(model, ids, 0.7), batch.mask_N.tolist(), strict=True) if is_own]
    assert learner.logprobs(batch).tolist() == pytest.approx(expected, abs=1e-5)
    learner.close()


@pytest.mark.parametrize("settings", [{}, {"kl": KLConfig(coefficient=0.1)}, {"entropy_coefficient": 0.1}], ids=str)
def test_cutting_a_step_into_micro_batches_changes_it_only_by_rounding(
    settings: dict[str, float], tiny: Tiny, fresh_batch: Fresh
) -> None:
    results = []
    for micro_batch_tokens in (10_000, 40, 1):
        model = tiny()
        config = LearnerConfig(micro_batch_tokens=micro_batch_tokens, threads=2, **settings)  # type: ignore[arg-type]
        stats = learned(model, fresh_batch(model), config)
        results.append((stats, weights(model)))
    whole, whole_weights = results[0]
    for stats, cut_weights in results[1:]:
        for name in ("loss", "grad_norm", "entropy", "kl", "mismatch_mean"):
            assert getattr(stats, name) == pytest.approx(getattr(whole, name), rel=1e-4, abs=1e-6), name
        for left, right in zip(whole_weights, cut_weights, strict=True):
            assert float((left - right).abs().quantile(0.99)) < 1e-4  # a step is 1e-2; gradients near 0 may change sign


def test_cutting_a_step_into_shares_changes_it_only_by_rounding(tiny: Tiny, fresh_batch: Fresh) -> None:
    results = []
    for shares in (None, 1, 2, 3, 100):  # more shares than rows leave some empty
        model = tiny()
        settings = LearnerConfig(micro_batch_tokens=40, threads=2, shares=shares, critic=CriticConfig(trunk="own"))
        learner = Learner(model, settings, STEP, total_steps=10)
        stats = learner.update(fresh_batch(model))
        learner.close()
        results.append((stats, weights(model)))
    plain, plain_weights = results[0]
    assert all(torch.equal(left, right) for left, right in zip(plain_weights, results[1][1], strict=True))
    for stats, cut_weights in results[2:]:
        for name in ("loss", "grad_norm", "entropy", "mismatch_mean"):
            assert getattr(stats, name) == pytest.approx(getattr(plain, name), rel=1e-4, abs=1e-6), name
        for left, right in zip(plain_weights, cut_weights, strict=True):
            assert float((left - right).abs().quantile(0.99)) < 1e-4


@pytest.mark.parametrize(
    ("loss", "settings"),
    [
        ("gspo", {"clip_low": 0.5, "clip_high": 0.5}),
        ("geo_mean", {}),
        ("clip_cov", {"fraction": 0.2, "cov_low": 0.0}),
        ("kl_cov", {"fraction": 0.2}),
        ("dro", {"beta": 0.5}),
    ],
)
def test_any_loss_has_the_gradient_of_the_whole_step_however_the_step_is_cut(
    loss: str, settings: dict[str, float], tiny: Tiny, fresh_batch: Fresh
) -> None:
    model = tiny()
    batch = fresh_batch(model)
    moved = 0.3 * torch.randn(batch.num_tokens, generator=torch.Generator().manual_seed(1))
    old_logp_N = torch.where(batch.mask_N, (batch.old_logp_N + moved).clamp(max=0.0), 0.0)
    batch = replace(batch, old_logp_N=old_logp_N, trajectory_N=batch.trajectory_N // 2)  # two rows a trajectory

    logits_NV = model.logits(model.hidden_states(batch.ids_N, PackedLayout(batch.seqlens)))
    logp_N = logits_NV.log_softmax(-1).gather(1, batch.target_N[:, None])[:, 0]
    inputs = (logp_N, old_logp_N, batch.advantage_N, batch.mask_N)
    policy = LOSSES[loss](*inputs, sequences=batch.trajectory_N, **settings)
    whole = (batch.weight_N * policy.loss).sum()
    expected = torch.autograd.grad(whole, list(model.parameters()))
    norm = float(torch.stack([slope.norm() for slope in expected]).norm())

    for micro_batch_tokens in (10_000, 40, 1):
        config = LearnerConfig(loss=loss, loss_settings=settings, micro_batch_tokens=micro_batch_tokens, threads=2)
        stats, gradients = with_gradient(tiny(), batch, config)
        assert stats.loss == pytest.approx(whole.item(), rel=1e-4, abs=1e-6)
        assert stats.grad_norm == pytest.approx(norm, rel=1e-4)
        assert stats.clip_fraction == pytest.approx(policy.stats.clip_fraction)
        assert stats.ratio_max == pytest.approx(policy.stats.ratio_max.item(), rel=1e-4)
        for left, right in zip(gradients, expected, strict=True):
            torch.testing.assert_close(left, right, rtol=1e-3, atol=1e-5 * norm)


@pytest.mark.parametrize("loss", ["ppo_clip", "gspo"])
def test_a_setting_that_cannot_work_or_does_not_exist_is_refused(loss: str) -> None:
    with pytest.raises(ConfigError, match="clip_high is -1"):
        policy_loss(LearnerConfig(loss=loss, loss_settings={"clip_high": -1}))
    with pytest.raises(ConfigError, match="clip_high"):
        policy_loss(LearnerConfig(loss=loss, loss_settings={"clip_hihg": 0.3}))


def test_dropped_rows_of_no_advantage_change_nothing(tiny: Tiny, fresh_batch: Fresh) -> None:
    model, twin = tiny(), tiny()
    batch = fresh_batch(model)
    row = torch.repeat_interleave(torch.arange(batch.num_rows), torch.tensor(batch.seqlens))
    batch = replace(batch, advantage_N=torch.where(row < 4, 0.0, batch.advantage_N))
    whole = learned(model, batch, LearnerConfig(threads=1))
    fewer = learned(twin, batch.select(range(4, batch.num_rows)), LearnerConfig(threads=1))
    assert fewer.grad_norm == pytest.approx(whole.grad_norm, rel=1e-5)


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_kl_is_measured_against_the_model_that_training_began_with(
    estimator: str, tiny: Tiny, fresh_batch: Fresh
) -> None:
    model = tiny()
    batch = fresh_batch(model)
    config = LearnerConfig(kl=KLConfig(coefficient=0.5, penalty=estimator), threads=1)
    learner = Learner(model, config, STEP, total_steps=10)
    began = learner.logprobs(batch)
    assert learner.update(batch).kl == pytest.approx(0.0, abs=1e-6)
    log_ratio = (began - learner.logprobs(batch)).double()
    values = {"k2": log_ratio.square() / 2, "k3": log_ratio.exp() - 1 - log_ratio}
    assert learner.update(batch).kl == pytest.approx(float(values[estimator].mean()), rel=1e-3)
    learner.close()


def test_a_kl_term_alone_brings_the_policy_back(tiny: Tiny, fresh_batch: Fresh) -> None:
    model = tiny()
    batch = fresh_batch(model)
    still = replace(batch, advantage_N=torch.zeros_like(batch.advantage_N))
    optimizer = OptimizerConfig(learning_rate=1e-3, warmup_steps=1)
    learner = Learner(
        model, LearnerConfig(kl=KLConfig(coefficient=1.0, penalty="k2"), threads=1), optimizer, total_steps=99
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.05)
    kls = [learner.update(still).kl for _ in range(15)]
    learner.close()
    assert kls[-1] < 0.3 * kls[0]


def test_without_a_kl_term_no_reference_model_is_kept(tiny: Tiny) -> None:
    learner = Learner(tiny(), LearnerConfig(threads=1), STEP, total_steps=1)
    assert learner.reference is None
    learner.close()


def test_a_loss_that_is_not_finite_halts_with_the_weights_untouched(tiny: Tiny, fresh_batch: Fresh) -> None:
    model = tiny()
    batch = fresh_batch(model)
    with torch.no_grad():
        model.embed[5] = torch.nan
    before = weights(model)
    learner = Learner(model, LearnerConfig(threads=1), STEP, total_steps=10)
    with pytest.raises(TrainingHalted, match="not finite"):
        learner.update(batch)
    for old, new in zip(before, model.parameters(), strict=True):
        assert torch.equal(old.nan_to_num(7.0), new.detach().nan_to_num(7.0))
    assert learner.optimizer.num_steps == 0
    with torch.no_grad():
        model.embed[5] = 0.1
    learner.update(fresh_batch(model))  # nothing of the refused step is left in the gradients
    learner.close()


def test_repeated_steps_make_good_replies_likelier_and_bad_ones_less(tiny: Tiny, fresh_batch: Fresh) -> None:
    model = tiny()
    batch = fresh_batch(model)
    good = batch.advantage_N[batch.mask_N] > 0
    optimizer = OptimizerConfig(learning_rate=1e-3, warmup_steps=1)
    learner = Learner(model, LearnerConfig(threads=1), optimizer, total_steps=10)
    before = learner.logprobs(batch)
    for _ in range(3):
        learner.update(batch)
    gained = learner.logprobs(batch) - before
    learner.close()
    assert gained[good].mean() > 0 > gained[~good].mean()


@pytest.mark.parametrize("setting", [{"micro_batch_tokens": 0}, {"threads": 0}], ids=str)
def test_sizes_that_cannot_work_are_refused(setting: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=next(iter(setting))):
        policy_loss(LearnerConfig(**setting))  # type: ignore[arg-type]


def test_an_unknown_loss_is_named() -> None:
    with pytest.raises(UnknownName, match="ppo_clip"):
        policy_loss(LearnerConfig(loss="ppo_clop"))


def test_rows_without_advantage_are_needed_where_they_have_a_gradient() -> None:
    assert not needs_all_rows(LearnerConfig())
    assert needs_all_rows(LearnerConfig(kl=KLConfig(coefficient=0.1)))
    assert needs_all_rows(LearnerConfig(entropy_coefficient=0.1))
    assert not needs_all_rows(LearnerConfig(loss="gspo"))
    assert needs_all_rows(LearnerConfig(loss="dro")), "its spring pulls at every token"
    assert needs_all_rows(LearnerConfig(loss="kl_cov")), "every token enters the mean"


@pytest.mark.parametrize(
    ("setting", "own", "expected"), [(None, 0.0, 0.0), (None, 0.02, 0.02), (0.01, 0.0, 0.01), (0.0, 0.02, 0.0)]
)
def test_the_balance_of_experts_counts_all_rows_wherever_its_weight_comes_from(
    setting: float | None, own: float, expected: float
) -> None:
    config = LearnerConfig(router=RouterConfig(balance=setting))
    assert balance_weight(config, own) == expected
    assert needs_all_rows(config, own) is (expected > 0)


@pytest.mark.parametrize("trunk", ["none", "own"])
def test_a_schedule_ends_with_the_run_however_few_steps_its_batches_take(
    trunk: str, tiny: Tiny, fresh_batch: Fresh
) -> None:
    model = tiny()
    batch = fresh_batch(model, num_groups=1).select([0])  # one trajectory: one step of the four that are counted
    config = LearnerConfig(minibatches=4, critic=CriticConfig(trunk=trunk))  # type: ignore[arg-type]
    learner = Learner(model, config, replace(STEP, warmup_steps=0, decay="linear"), total_steps=4)
    rates = []
    for version in (0, 2, 3):  # the batch of version 1 had nothing to learn from
        learner.optimizer.load_state_dict(learner.optimizer.state_dict())
        rates.append(learner.update(batch, version=version).learning_rate)
        learner.update_critic(batch)
    learner.close()
    assert rates == pytest.approx([0.01, 0.01, 0.005])
    assert learner.optimizer.num_steps == 3 and learner.optimizer.learning_rate == 0.0
    if learner.critic is not None and learner.critic.optimizer is not None:
        assert (learner.critic.optimizer.num_steps, learner.critic.optimizer.position) == (3, 12)

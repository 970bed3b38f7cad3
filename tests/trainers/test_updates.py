"""Going over a step's episodes more than once, in parts, and correcting for other weights than those that sampled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from agentgym.errors import ConfigError, UnknownName
from agentgym.model.decoder import Decoder
from agentgym.model.packed_layout import PackedLayout
from agentgym.trainers import CORRECTIONS
from agentgym.trainers.batch.batch import TrainingBatch
from agentgym.trainers.learner.learner import Learner, LearnerConfig
from agentgym.trainers.learner.objective import needs_all_rows, policy_loss
from agentgym.trainers.settings.kl import KLConfig
from agentgym.trainers.settings.optimizer import OptimizerConfig

Tiny = Callable[..., Decoder]
Fresh = Callable[..., TrainingBatch]
STEP = OptimizerConfig(learning_rate=1e-2, warmup_steps=1, max_grad_norm=1e9)


def learner_of(model: Decoder, **settings: object) -> Learner:
    return Learner(model, LearnerConfig(threads=1, **settings), STEP, total_steps=10)  # type: ignore[arg-type]


def shifted(batch: TrainingBatch, nats: float) -> TrainingBatch:
    """As if the engine had found every token less likely by so much."""
    sampled_N = torch.where(batch.mask_N, batch.sampled_logp_N - nats, 0.0)
    return replace(batch, sampled_logp_N=sampled_N, old_logp_N=sampled_N)


@pytest.mark.parametrize("number", [1, 2, 3, 5, 12, 99])
def test_minibatches_hold_each_trajectory_once_and_sum_to_the_whole_weight(
    number: int, tiny: Tiny, fresh_batch: Fresh
) -> None:
    batch = fresh_batch(tiny())
    batch = replace(batch, trajectory_N=batch.row_N // 2)  # two rows a trajectory
    parts = batch.minibatches(number)
    assert len(parts) == min(number, 6)
    sets = [set(part.trajectory_N.tolist()) for part in parts]
    assert sum(map(len, sets)) == len(set.union(*sets)) == 6 and max(map(len, sets)) - min(map(len, sets)) <= 1
    assert sum(part.num_rows for part in parts) == batch.num_rows
    total = sum(float(part.weight_N.sum()) for part in parts) / len(parts)
    assert total == pytest.approx(float(batch.weight_N.sum()))


def test_every_minibatch_is_an_optimizer_step_with_the_ratio_to_the_first_weights(
    tiny: Tiny, fresh_batch: Fresh
) -> None:
    model = tiny()
    batch = fresh_batch(model)
    learner = learner_of(model, epochs=2, minibatches=3)
    stats = learner.update(batch)
    assert learner.optimizer.num_steps == 6 and learner.optimizer.total_steps == 60
    logits_NV = model.logits(model.hidden_states(batch.ids_N, PackedLayout(batch.seqlens)))
    logp_N = logits_NV.log_softmax(-1).gather(1, batch.target_N[:, None])[:, 0]
    moved = float((logp_N - batch.old_logp_N)[batch.mask_N].detach().exp().max())
    assert stats.ratio_max > 1.1 and moved > 1.1
    assert stats.mismatch_max < 1e-4, "the engine is compared with the weights that sampled, not with later ones"
    learner.close()


def test_one_epoch_of_one_part_is_one_plain_step(tiny: Tiny, fresh_batch: Fresh) -> None:
    model, twin = tiny(), tiny()
    batch = fresh_batch(model)
    plain, parts = learner_of(model), learner_of(twin, epochs=1, minibatches=1)
    assert plain.update(batch) == parts.update(batch)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    plain.close()
    parts.close()


@pytest.mark.parametrize(
    ("loss", "nats", "factor"), [("ppo_clip", 0.5, 1.6487213), ("gspo", 0.5, 1.6487213), ("ppo_clip", 1.0, 2.0)]
)
def test_a_correction_weighs_samples_and_the_ratio_is_to_the_weights_before_the_step(
    loss: str, nats: float, factor: float, tiny: Tiny, fresh_batch: Fresh
) -> None:
    model, twin = tiny(), tiny()
    batch = fresh_batch(model)
    plain = learner_of(model, loss=loss)
    corrected = learner_of(twin, loss=loss, correction="tis_token", correction_settings={"cap": 2.0})
    plain_stats, stats = plain.update(batch), corrected.update(shifted(batch, nats))
    assert stats.grad_norm == pytest.approx(factor * plain_stats.grad_norm, rel=1e-3)
    assert stats.ratio_max == pytest.approx(1.0, abs=1e-4) and stats.clip_fraction == 0.0
    assert stats.correction_mean == pytest.approx(factor, rel=1e-4) and stats.corrected_away == 0.0
    assert stats.mismatch_mean == pytest.approx(nats, abs=1e-4), "the engine is still held against the trainer"
    plain.close()
    corrected.close()


def test_a_correction_that_rejects_everything_leaves_nothing_to_learn(tiny: Tiny, fresh_batch: Fresh) -> None:
    model = tiny()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    learner = learner_of(model, correction="mis_token", correction_settings={"cap": 0.5})
    stats = learner.update(fresh_batch(model))
    assert stats.corrected_away == 1.0 and stats.grad_norm == 0.0
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    learner.close()


@pytest.mark.parametrize("name", ["sgd", "adamw"])
@pytest.mark.parametrize("loss", ["ppo_clip", "gspo"])
def test_a_step_of_rejected_tokens_takes_no_optimizer_step_whatever_its_momentum(
    loss: str, name: str, tiny: Tiny, fresh_batch: Fresh
) -> None:
    model = tiny()
    settings = {"momentum": 0.9} if name == "sgd" else {}
    optimizer = OptimizerConfig(name=name, settings=settings, learning_rate=1e-3, warmup_steps=4)
    config = LearnerConfig(threads=1, loss=loss, correction="mis_token", correction_settings={"cap": 1.5})
    learner = Learner(model, config, optimizer, total_steps=10)
    assert learner.update(fresh_batch(model)).optimizer_steps == 1
    before, state = [parameter.detach().clone() for parameter in model.parameters()], learner.state_dict()
    rate = learner.optimizer.learning_rate
    batch = shifted(fresh_batch(model), 1.0)
    stats = learner.update(batch)
    assert (stats.optimizer_steps, stats.corrected_away, stats.loss, stats.grad_norm) == (0, 1.0, 0.0, 0.0)
    assert stats.mismatch_mean == pytest.approx(1.0, abs=1e-3) and stats.learned_tokens == batch.num_trained_tokens
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    assert learner.optimizer.learning_rate == rate, "the schedule counts the steps that were taken"
    assert learner.state_dict()["optimizer"]["num_steps"] == state["optimizer"]["num_steps"] == 1
    assert all(parameter.grad is None for parameter in model.parameters())
    learner.close()


def test_a_minibatch_of_rejected_tokens_takes_no_step_and_the_others_do(tiny: Tiny, fresh_batch: Fresh) -> None:
    model = tiny()
    batch = fresh_batch(model)
    nats_N = torch.where(batch.row_N < 6, 1.0, 0.0)
    sampled_N = torch.where(batch.mask_N, batch.sampled_logp_N - nats_N, 0.0)
    batch = replace(batch, sampled_logp_N=sampled_N, old_logp_N=sampled_N)
    learner = learner_of(model, minibatches=2, epochs=2, correction="mis_token", correction_settings={"cap": 1.5})
    stats = learner.update(batch)
    assert stats.optimizer_steps == learner.num_steps == 2 and stats.corrected_away == 0.5
    assert stats.learned_tokens == batch.num_trained_tokens
    learner.close()


@pytest.mark.parametrize("further", [{"entropy_coefficient": 0.1}, {"kl": KLConfig(coefficient=0.1)}])
def test_rejected_tokens_are_learned_from_by_the_other_terms_of_the_loss(
    further: dict[str, Any], tiny: Tiny, fresh_batch: Fresh
) -> None:
    model = tiny()
    correction = {"correction": "mis_token", "correction_settings": {"cap": 1.5}}
    config = LearnerConfig(threads=1, **correction, **further)  # type: ignore[arg-type]
    learner = Learner(model, config, STEP, total_steps=10, reference=tiny(seed=1))
    stats = learner.update(shifted(fresh_batch(model), 1.0))
    assert stats.corrected_away == 1.0 and stats.optimizer_steps == 1 and stats.grad_norm > 0
    learner.close()


@pytest.mark.parametrize("minibatches", [1, 2, 3])
def test_the_tokens_of_an_update_are_counted_once_whatever_its_passes(
    minibatches: int, tiny: Tiny, fresh_batch: Fresh
) -> None:
    model = tiny()
    batch = fresh_batch(model)
    old_N = (batch.row_N % 3 == 0) & batch.mask_N
    version_N = torch.where(batch.mask_N, torch.where(old_N, 0, 1), -1)
    batch = replace(batch, policy_version_N=version_N, reply_version_N=version_N)
    learner = learner_of(model, minibatches=minibatches, epochs=2)
    stats = learner.update(batch, version=1)
    assert (stats.learned_tokens, stats.stale_tokens) == (batch.num_trained_tokens, int(old_N.sum()))
    first = batch.minibatches(minibatches)[0]
    assert stats.mismatch_tokens == int((first.reply_version_N == 1).sum())
    learner.close()


@pytest.mark.long
@pytest.mark.parametrize("name", CORRECTIONS)
def test_every_correction_leaves_samples_of_the_same_weights_as_they_are(
    name: str, tiny: Tiny, fresh_batch: Fresh
) -> None:
    model, twin = tiny(), tiny()
    batch = fresh_batch(model)
    plain, corrected = learner_of(model), learner_of(twin, correction=name)
    plain_stats, corrected_stats = plain.update(batch), corrected.update(batch)
    assert corrected_stats.grad_norm == pytest.approx(plain_stats.grad_norm, rel=1e-4)
    assert corrected_stats.corrected_away == 0.0
    plain.close()
    corrected.close()


def test_a_penalty_in_the_rewards_is_reported_with_its_coefficient(tiny: Tiny, fresh_batch: Fresh) -> None:
    model = tiny()
    batch = fresh_batch(model)
    kl = KLConfig(coefficient=0.1, penalty="k1", place="reward", target=1e-6, horizon=100)
    settings = LearnerConfig(threads=1, kl=kl)
    learner = Learner(model, settings, STEP, total_steps=10, reference=tiny(seed=1))
    for before in (0.1, 0.1 * (1 + 0.2 * 12 / 100)):
        nats_M = learner.penalties(batch) / before
        stats = learner.update(batch)
        assert learner.penalties(batch).shape == nats_M.shape, "asking once more changes nothing"
        assert stats.kl_coefficient == pytest.approx(before) and stats.kl == pytest.approx(float(nats_M.mean()))
        assert learner.kl.coefficient == pytest.approx(before * (1 + 0.2 * 12 / 100)), "of the next step"
    learner.close()


@pytest.mark.long
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("name", ["tis_token", "tis_sequence", "mis_token", "mis_sequence", "icepop"])
def test_leaving_out_rows_without_a_gradient_changes_no_weight(
    name: str, normalize: bool, tiny: Tiny, fresh_batch: Fresh
) -> None:
    norms = []
    for may_drop in (False, True):
        model = tiny()
        learner = learner_of(model, correction=name, correction_settings={"normalize": normalize})
        batch = fresh_batch(model)
        batch = replace(batch, advantage_N=batch.advantage_N * (batch.row_N > 3))
        nats_N = ((batch.target_N * 31 + batch.position_N * 7) % 17).float() / 17 - 0.5
        sampled_N = torch.where(batch.mask_N, (batch.sampled_logp_N - nats_N).clamp(max=0), 0.0)
        elsewhere = replace(batch, sampled_logp_N=sampled_N, old_logp_N=sampled_N)
        drops = may_drop and not needs_all_rows(learner.config)
        norms.append(learner.update(elsewhere.select(range(4, 12)) if drops else elsewhere).grad_norm)
        learner.close()
        assert needs_all_rows(learner.config) is normalize
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)


def test_corrections_that_cannot_work_are_refused() -> None:
    with pytest.raises(UnknownName, match="did you mean 'icepop'"):
        policy_loss(LearnerConfig(correction="icepob"))
    with pytest.raises(ConfigError, match="cap is -1"):
        policy_loss(LearnerConfig(correction="tis_token", correction_settings={"cap": -1.0}))
    with pytest.raises(ConfigError, match="has no setting 'versions'"):
        policy_loss(LearnerConfig(correction="proximal_by_version", correction_settings={"versions": None}))
    with pytest.raises(ConfigError, match="name it with correction"):
        LearnerConfig(correction_settings={"cap": 2.0})


def test_an_adaptive_coefficient_moves_toward_its_target_and_is_part_of_the_state(
    tiny: Tiny, fresh_batch: Fresh
) -> None:
    model = tiny()
    kl = KLConfig(coefficient=0.1, penalty="k2", target=1e-6, horizon=100)
    learner = learner_of(model, kl=kl)
    batch = fresh_batch(model)
    assert learner.update(batch).kl_coefficient == 0.1
    first = learner.kl.coefficient
    assert first == pytest.approx(0.1 * (1 - 0.2 * 12 / 100)), "nothing has moved yet: below the target"
    assert learner.update(batch).kl > 1e-6 and learner.kl.coefficient > first
    again = learner_of(tiny(), kl=kl)
    again.load_state_dict(learner.state_dict())
    assert again.kl == learner.kl
    learner.close()
    again.close()

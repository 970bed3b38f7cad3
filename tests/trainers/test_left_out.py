"""Episodes that are left out by a setting are in no loss, no baseline and no denominator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from agentgym.errors import ConfigError
from agentgym.model.decoder import Decoder
from agentgym.trainers.algorithms.aggregation import AGGREGATIONS
from agentgym.trainers.batch.batch import TrainingBatch, build_batch
from agentgym.trainers.config import TrainConfig
from agentgym.trainers.learner.learner import Learner
from agentgym.trainers.loop.step_credit import credit_step
from agentgym.trainers.monitoring.metrics import RolloutSummary
from agentgym.trainers.resolve import resolve_config
from agentgym.trainers.settings.learner import LearnerConfig
from agentgym.trainers.settings.optimizer import OptimizerConfig
from agentgym.trainers.tasks.filtering import is_live
from agentgym.trajectory import Group, Row, Source, Status, StopReason, TokenSpan, Trajectory, Turn
from agentgym.types import Message, Task
from tests.trainers.conftest import logprobs_of

Tiny = Callable[..., Decoder]
TASK = Task("TextGame-v0", seed=7)
PROMPT = (1, 2)
NORM = 10
WEIGHTS = {
    "token-mean": [[1 / 5] * 2, [1 / 5], [1 / 5] * 2],
    "token-sum": [[1.0] * 2, [1.0], [1.0] * 2],
    "seq-mean-token-mean": [[1 / 6] * 2, [1 / 6], [1 / 4] * 2],
    "seq-mean-token-sum": [[1 / 2] * 2, [1 / 2], [1 / 2] * 2],
    "seq-mean-token-sum-norm": [[1 / 20] * 2, [1 / 20], [1 / 20] * 2],
    "turn-mean": [[1 / 6] * 2, [1 / 3], [1 / 6] * 2],
}
"""By hand: an episode with turns of 2 and 1 tokens and one with a turn of 2, and nothing else in the step."""


@pytest.fixture
def tiny_model(tiny: Tiny) -> Decoder:
    """A model of its own for each test."""
    return tiny()


def episode(
    model: Decoder,
    member: int,
    replies: list[tuple[int, ...]],
    reward: float,
    *,
    off: float = 0.0,
    truncated: bool = False,
) -> Trajectory:
    """One row, sampled with the model's own logprobs plus `off`."""
    ids, spans = [*PROMPT], [TokenSpan(PROMPT, Source.PROMPT)]
    for number, reply in enumerate(replies):
        if number:
            spans.append(TokenSpan((5,), Source.ENV))
            ids.append(5)
        logprobs = logprobs_of(model, [*ids, *reply])[len(ids) - 1 :]
        spans.append(
            TokenSpan(reply, Source.POLICY, tuple(min(0.0, logprob + off) for logprob in logprobs), (0,) * len(reply))
        )
        ids += reply
    return Trajectory(
        task=TASK,
        group="g",
        member=member,
        rows=(Row(tuple(spans)),),
        turns=tuple(Turn(Message("assistant", "x"), reward / len(replies)) for _ in replies),
        status=Status.TRUNCATED if truncated else Status.COMPLETED,
        stop_reason=StopReason.TURN_TOKENS if truncated else StopReason.TERMINATED,
    )


def group_of(model: Decoder, **odd: Any) -> Group:
    """Two episodes of rewards 1 and 0, and an odd one of reward 5 between them."""
    return Group(
        "g",
        TASK,
        (
            episode(model, 0, [(6, 7), (8,)], 1.0),
            episode(model, 1, [(9, 10, 11, 12)], 5.0, **odd),
            episode(model, 2, [(13, 14)], 0.0),
        ),
    )


def learned(group: Group, model: Decoder, config: TrainConfig) -> tuple[TrainingBatch, tuple[Any, ...]]:
    """The batch of a step on the group, and the mean advantage of each member."""
    learner = Learner(model, config.learner, OptimizerConfig(), total_steps=1)
    (credit,) = credits = credit_step([group], config, learner)
    batch = build_batch([group], credits, aggregation=config.aggregation or "", norm_tokens=config.norm_tokens)
    assert RolloutSummary.of([group], credits).left_out == credit.members.count(None)
    learner.close()
    return batch, credit.means


def config_of(aggregation: str, **settings: Any) -> TrainConfig:
    norm = NORM if aggregation.endswith("norm") else None
    return resolve_config(TrainConfig(env="X", algo="dr_grpo", aggregation=aggregation, norm_tokens=norm, **settings))


def weights_of(batch: TrainingBatch) -> list[float]:
    weights: list[float] = batch.weight_N[batch.mask_N].tolist()
    return weights


def test_every_aggregation_has_its_hand_worked_weights() -> None:
    assert WEIGHTS.keys() == set(AGGREGATIONS)


@pytest.mark.parametrize("aggregation", WEIGHTS)
def test_truncated_episodes_are_in_no_loss_baseline_or_denominator(aggregation: str, tiny_model: Decoder) -> None:
    group = group_of(tiny_model, truncated=True)
    batch, means = learned(group, tiny_model, config_of(aggregation, truncated_episodes="leave_out"))
    assert means == (0.5, None, -0.5)
    assert weights_of(batch) == pytest.approx([weight for turn in WEIGHTS[aggregation] for weight in turn])
    _, means = learned(group, tiny_model, config_of(aggregation))
    assert means == (-1.0, 3.0, -2.0)


@pytest.mark.parametrize("aggregation", WEIGHTS)
def test_rejected_episodes_are_in_no_loss_baseline_or_denominator(aggregation: str, tiny_model: Decoder) -> None:
    group = group_of(tiny_model, off=-3.0)
    rejecting = {"threads": 1, "correction": "reject_k1"}
    left_out = LearnerConfig(**rejecting, rejected_episodes="leave_out")  # type: ignore[arg-type]
    batch, means = learned(group, tiny_model, config_of(aggregation, learner=left_out))
    assert means == (0.5, None, -0.5)
    assert weights_of(batch) == pytest.approx([weight for turn in WEIGHTS[aggregation] for weight in turn])
    counted = LearnerConfig(**rejecting)  # type: ignore[arg-type]
    batch, means = learned(group, tiny_model, config_of(aggregation, learner=counted))
    assert means == (-1.0, 3.0, -2.0) and batch.num_trained_tokens == 9


@pytest.mark.parametrize("algo", ["grpo", "rloo", "gpg", "opo", "reinforce++"])
def test_what_is_left_out_changes_no_credit_of_the_others(algo: str, tiny_model: Decoder) -> None:
    group = group_of(tiny_model, truncated=True)
    config = resolve_config(TrainConfig(env="X", algo=algo, truncated_episodes="leave_out"))
    _, means = learned(group, tiny_model, config)
    alone = Group("g", TASK, (group.trajectories[0], group.trajectories[2]))
    _, expected = learned(alone, tiny_model, config)
    assert means == (expected[0], None, expected[1])


def test_a_group_of_truncated_episodes_is_not_learned_from_and_carries_no_signal(tiny_model: Decoder) -> None:
    group = Group("g", TASK, tuple(episode(tiny_model, n, [(6, 7)], float(n), truncated=True) for n in range(3)))
    batch, means = learned(group, tiny_model, config_of("token-mean", truncated_episodes="leave_out"))
    assert means == (None,) * 3 and batch.num_rows == 0
    assert is_live(group, "reward") and not is_live(group, "reward", "leave_out")


def test_rejected_episodes_without_a_correction_are_refused() -> None:
    with pytest.raises(ConfigError, match="name it with correction"):
        LearnerConfig(rejected_episodes="leave_out")


def test_an_update_on_what_is_left_is_the_update_without_the_rejected_episode(tiny_model: Decoder) -> None:
    group = group_of(tiny_model, off=-3.0)
    alone = Group("g", TASK, (group.trajectories[0], group.trajectories[2]))
    models = []
    for played in (group, alone):
        model = Decoder(tiny_model.config)
        model.load_state_dict(tiny_model.state_dict())
        config = config_of(
            "seq-mean-token-mean",
            learner=LearnerConfig(threads=1, correction="reject_k1", rejected_episodes="leave_out"),
        )
        learner = Learner(model, config.learner, OptimizerConfig(learning_rate=1e-2), total_steps=1)
        credits = credit_step([played], config, learner)
        learner.update(build_batch([played], credits, aggregation=config.aggregation or ""))
        learner.close()
        models.append(model)
    assert all(torch.equal(left, right) for left, right in zip(*(model.parameters() for model in models), strict=True))

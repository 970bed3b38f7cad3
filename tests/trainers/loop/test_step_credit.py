"""What an estimator takes beyond the episodes reaches it at the right tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from agentgym.errors import ConfigError
from agentgym.model.decoder import Decoder
from agentgym.model.packed_layout import PackedLayout
from agentgym.trainers import ADVANTAGES
from agentgym.trainers.algorithms.advantages import Credit
from agentgym.trainers.batch.batch import build_batch, plain_batch
from agentgym.trainers.batch.credits import CreditInputs, credit_groups
from agentgym.trainers.config import AdvantageConfig, TrainConfig
from agentgym.trainers.learner.learner import Learner
from agentgym.trainers.loop.step_credit import credit_step
from agentgym.trainers.resolve import resolve_config
from agentgym.trainers.settings.critic import CriticConfig
from agentgym.trainers.settings.kl import KLConfig
from agentgym.trainers.settings.learner import LearnerConfig
from agentgym.trainers.settings.optimizer import OptimizerConfig
from agentgym.trajectory import Group, Row, Source, Status, StopReason, TokenSpan, Trajectory, Turn
from agentgym.types import Message, Task

Tiny = Callable[..., Decoder]
TASK = Task("TextGame-v0", seed=7)


def episode(member: int, rows: list[list[list[int]]], rewards: list[float], *, truncated: bool = False) -> Trajectory:
    """Rows of spans, which are by turns of the prompt or environment and of the policy."""
    built = []
    for row in rows:
        spans = [TokenSpan(tuple(row[0]), Source.PROMPT)]
        for number, ids in enumerate(row[1:]):
            policy = TokenSpan(tuple(ids), Source.POLICY, (-0.5,) * len(ids), (0,) * len(ids))
            spans.append(policy if number % 2 == 0 else TokenSpan(tuple(ids), Source.ENV))
        built.append(Row(tuple(spans)))
    return Trajectory(
        task=TASK,
        group="g",
        member=member,
        rows=tuple(built),
        turns=tuple(Turn(Message("assistant", "x"), reward) for reward in rewards),
        status=Status.TRUNCATED if truncated else Status.COMPLETED,
        stop_reason=StopReason.MAX_TURNS if truncated else StopReason.TERMINATED,
    )


FIRST = episode(0, [[[1, 2], [3, 4], [5], [6]], [[7, 8], [9]]], [0.0, 0.5, 1.0])
SECOND = episode(1, [[[1, 2], [3], [4, 5], [6, 7, 8]]], [0.25, 0.0], truncated=True)
GROUP = Group("g", TASK, (FIRST, SECOND))


def learner_of(model: Decoder, **settings: object) -> Learner:
    config = LearnerConfig(threads=1, **settings)  # type: ignore[arg-type]
    return Learner(model, config, OptimizerConfig(), total_steps=10)


def config_of(advantage: str, **settings: object) -> TrainConfig:
    return resolve_config(TrainConfig(env="X", algo=advantage, advantage=AdvantageConfig(settings=settings)))


def value_after(learner: Learner, ids: list[int]) -> float:
    """The critic's value after these ids, from a forward pass of them alone."""
    assert learner.critic is not None
    with torch.no_grad():
        hidden_TE = learner.critic.backbone.hidden_states(torch.tensor(ids), PackedLayout([len(ids)]))
        return float(learner.critic.head(hidden_TE)[-1])


def with_critic(model: Decoder) -> Learner:
    learner = learner_of(model, critic=CriticConfig(trunk="own"))
    assert learner.critic is not None
    with torch.no_grad():
        learner.critic.head.weight_E.copy_(torch.linspace(-1, 1, len(learner.critic.head.weight_E)))
    return learner


def test_generalized_advantages_span_two_rows_and_a_budget_end(tiny: Tiny) -> None:
    learner = with_critic(tiny())
    config = config_of("gae", gamma=1.0, lam=0.5, whiten_advantages=False)
    (credit,) = credit_step([GROUP], config, learner)
    learner.close()

    def worked(before: list[list[int]], rewards: list[float], end: float) -> tuple[list[float], list[float]]:
        values = [value_after(learner, ids) for ids in before]
        advantages, running, following = [], 0.0, end
        for value, reward in zip(reversed(values), reversed(rewards), strict=True):
            running = reward + following - value + 0.5 * running
            following = value
            advantages.append(running)
        advantages.reverse()
        return advantages, [advantage + value for advantage, value in zip(advantages, values, strict=True)]

    before = [[1, 2], [1, 2, 3], [1, 2, 3, 4, 5], [7, 8]]
    advantages, returns = worked(before, [0.0, 0.0, 0.5, 1.0], 0.0)
    assert credit.members[0] is not None and credit.returns is not None and credit.returns[0] is not None
    np.testing.assert_allclose(np.concatenate(credit.members[0]), advantages, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(np.concatenate(credit.returns[0]), returns, rtol=1e-4, atol=1e-5)
    prompt = [1, 2, 3, 4, 5]
    before = [[1, 2], prompt, [*prompt, 6], [*prompt, 6, 7]]
    end = value_after(learner, [*prompt, 6, 7, 8])
    advantages, _ = worked(before, [0.25, 0.0, 0.0, 0.0], end)
    assert credit.members[1] is not None
    np.testing.assert_allclose(np.concatenate(credit.members[1]), advantages, rtol=1e-4, atol=1e-5)


def test_returns_and_values_reach_the_batch_at_their_targets(tiny: Tiny) -> None:
    learner = with_critic(tiny())
    credits = credit_step([GROUP], config_of("gae"), learner)
    batch = build_batch([GROUP], credits, aggregation="token-mean")
    assert learner.critic is not None
    values_M, _ = learner.critic.read(plain_batch(GROUP.trajectories))
    learner.close()
    torch.testing.assert_close(batch.old_value_N[batch.mask_N], values_M, rtol=1e-4, atol=1e-5)
    returns = [row for member in credits[0].returns or () for row in member or ()]
    np.testing.assert_allclose(batch.return_N[batch.mask_N].numpy(), np.concatenate(returns), rtol=1e-6)
    assert not batch.return_N[~batch.mask_N].any() and not batch.old_value_N[~batch.mask_N].any()


def test_a_penalty_in_the_reward_is_taken_off_each_token_before_anything_is_computed(tiny: Tiny) -> None:
    model, reference = tiny(), tiny(seed=1)
    kl = KLConfig(coefficient=0.3, penalty="k1", place="reward")
    learner = Learner(model, LearnerConfig(threads=1, kl=kl), OptimizerConfig(), total_steps=1, reference=reference)
    (credit,) = credit_step([GROUP], config_of("turn_returns"), learner)
    learner.close()
    batch = plain_batch(GROUP.trajectories)
    logits_NV = reference.logits(reference.hidden_states(batch.ids_N, PackedLayout(batch.seqlens)))
    logp_N = logits_NV.log_softmax(-1).gather(1, batch.target_N[:, None])[:, 0].detach()
    penalty_M = 0.3 * (-0.5 - logp_N[batch.mask_N])
    first, second = penalty_M[:4].tolist(), penalty_M[4:].tolist()
    assert credit.members[0] is not None and credit.members[1] is not None
    turns = [sum(first[:2]), first[2], first[3]]
    to_go = [1.5 - sum(turns), 1.5 - sum(turns[1:]), 1.0 - turns[2]]
    expected = [to_go[0], to_go[0], to_go[1], to_go[2]]
    np.testing.assert_allclose(np.concatenate(credit.members[0]), expected, rtol=1e-4)
    expected = [0.25 - sum(second), *[-sum(second[1:])] * 3]
    np.testing.assert_allclose(np.concatenate(credit.members[1]), expected, rtol=1e-4)


def test_the_proxy_is_the_squared_norm_of_the_gradient_by_the_logits(tiny: Tiny) -> None:
    model = tiny()
    learner = learner_of(model)
    batch = plain_batch(GROUP.trajectories)
    proxy_M = learner.gradient_proxies(batch)
    learner.close()
    hidden_ME = model.hidden_states(batch.ids_N, PackedLayout(batch.seqlens))[batch.mask_N]
    for hidden_E, target, proxy in zip(hidden_ME, batch.target_N[batch.mask_N], proxy_M, strict=True):
        logits_V = model.logits(hidden_E[None])[0].detach().requires_grad_()
        (slope_V,) = torch.autograd.grad(logits_V.log_softmax(-1)[target], logits_V)
        assert float(proxy) == pytest.approx(float(slope_V.square().sum()), rel=1e-4)
    assert credit_step([GROUP], config_of("optimal_token_baseline"), learner_of(model))[0].members[0] is not None


def test_a_greedy_episode_is_the_baseline_and_a_task_without_one_is_not_trained() -> None:
    second_group = Group("h", TASK, tuple(replace(trajectory, group="h") for trajectory in GROUP.trajectories))
    credits = credit_groups([GROUP, second_group], "remax", inputs=CreditInputs(greedy={"g": 0.5}))
    first, second = credits[0].members
    assert first is not None and second is not None
    np.testing.assert_allclose(np.concatenate(first), [1.0, 1.0, 1.0, 0.5])
    np.testing.assert_allclose(np.concatenate(second), [-0.25, -0.5, -0.5, -0.5])
    assert credits[1].members == (None, None)


def test_components_of_a_reward_are_weighed_by_their_own() -> None:
    parts = [{"reward/right": 1.0, "reward/short": 0.0}, {"reward/right": 0.0, "reward/short": 0.5}]
    members = tuple(
        replace(trajectory, metrics=part) for trajectory, part in zip(GROUP.trajectories, parts, strict=True)
    )
    group = replace(GROUP, trajectories=members)
    (credit,) = credit_groups([group], "gdpo")
    means = [mean or 0.0 for mean in credit.means]
    assert all(np.isfinite(means)) and credit.members[0] is not None
    with pytest.raises(ConfigError, match="no episode has any: return Reward"):
        credit_groups([GROUP], "gdpo")


def test_an_estimator_that_credits_what_is_not_trained_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def everywhere(rewards_BT: torch.Tensor, mask_BT: torch.Tensor, groups_B: torch.Tensor) -> Credit:
        return Credit(torch.ones_like(rewards_BT), torch.ones_like(rewards_BT))

    monkeypatch.setitem(vars(ADVANTAGES)["_entries"], "everywhere", everywhere)
    summary = TokenSpan((9,), Source.POLICY, (-0.5,), (0,), excluded="summary")
    spans = (TokenSpan((1,), Source.PROMPT), summary, TokenSpan((2,), Source.ENV), FIRST.rows[0].spans[1])
    odd = replace(FIRST, rows=(Row(spans),), turns=FIRST.turns[:2])
    (credit,) = credit_groups([replace(GROUP, trajectories=(odd,))], "everywhere")
    assert credit.members[0] is not None and credit.members[0][0].tolist() == [0.0, 1.0, 1.0]

"""What a step's episodes earned: gathers what the estimator takes beyond the episodes, and credits every token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from agentgym.trainers.batch import plain_batch
from agentgym.trainers.config import TrainConfig
from agentgym.trainers.credits import CreditInputs, GroupCredit, credit_groups, trained_episodes
from agentgym.trainers.estimators import needs_input
from agentgym.trainers.policy_learner import PolicyLearner
from agentgym.trajectory import Group, Status, Trajectory

__all__ = ["credit_step"]


def credit_step(
    groups: Sequence[Group], config: TrainConfig, learner: PolicyLearner, greedy: Mapping[str, float] | None = None
) -> list[GroupCredit]:
    """The credit of the groups that a step learns from, with what the learner's models say of them before it.

    `greedy` has the rewards of greedy episodes by group, for an estimator that takes them.
    """
    name = config.estimator
    trained = trained_episodes(groups, name, greedy)
    inputs = _inputs(trained, name, learner, greedy or {})
    return credit_groups(groups, name, config.advantage.settings, allow_single=config.allow_single, inputs=inputs)


def _inputs(
    trained: Sequence[Trajectory], name: str, learner: PolicyLearner, greedy: Mapping[str, float]
) -> CreditInputs:
    penalizes = learner.config.kl.coefficient > 0 and learner.config.kl.place == "reward"
    wants_proxy = needs_input(name, "proxy_BT")
    if not trained or not (penalizes or wants_proxy or learner.critic):
        return CreditInputs(greedy=greedy)
    batch = plain_batch(trained)
    penalties = values = bootstrap = proxy = None
    if penalizes:
        penalties = _by_episode(learner.penalties(batch), trained)
    if wants_proxy:
        proxy = _by_episode(learner.gradient_proxies(batch), trained)
    if learner.critic is not None:
        values_M, end_R = learner.critic.read(batch)
        values, bootstrap = _by_episode(values_M, trained), _after(end_R, trained)
        if not learner.config.critic.bootstrap:
            bootstrap = [0.0] * len(trained)
    return CreditInputs(penalties=penalties, values=values, bootstrap=bootstrap, proxy=proxy, greedy=greedy)


def _by_episode(numbers_M: Tensor, trained: Sequence[Trajectory]) -> list[NDArray[np.float64]]:
    """Numbers of the trained targets of all episodes, at the ids that each has sampled; 0 at those not trained."""
    numbers = numbers_M.double().cpu().numpy()
    found, start = [], 0
    for one in trained:
        mask = np.concatenate([row.mask[row.sampled] for row in one.rows])
        own = np.zeros(len(mask))
        own[mask] = numbers[start : start + one.num_trained_tokens]
        start += one.num_trained_tokens
        found.append(own)
    return found


def _after(end_R: Tensor, trained: Sequence[Trajectory]) -> list[float]:
    """The value after each episode: 0 where the environment ended it, that of its last row where a budget did."""
    num_rows = [sum(row.num_trained_tokens > 0 for row in one.rows) for one in trained]
    ends = end_R.double().tolist()
    last = [ends[place - 1] if count else 0.0 for place, count in zip(accumulate(num_rows), num_rows, strict=True)]
    return [value if one.status is Status.TRUNCATED else 0.0 for value, one in zip(last, trained, strict=True)]

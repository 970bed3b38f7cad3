"""What a step's episodes earned: gathers what the estimator takes beyond the episodes, and credits every token."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from agentgym.trainers.algorithms.estimators import needs_input
from agentgym.trainers.batch.batch import plain_batch
from agentgym.trainers.batch.credits import Advantages, CreditInputs, GroupCredit, credit_groups, trained_episodes
from agentgym.trainers.batch.off_policy import corrected_batch
from agentgym.trainers.config import TrainConfig
from agentgym.trainers.learner.policy_learner import PolicyLearner
from agentgym.trajectory import Group, Status, Trajectory

__all__ = ["credit_step"]


def credit_step(
    groups: Sequence[Group],
    config: TrainConfig,
    learner: PolicyLearner,
    greedy: Mapping[str, float] | None = None,
    *,
    version: int = 0,
) -> list[GroupCredit]:
    """The credit of the groups that a step learns from, with what the learner's models say of them before it.

    `greedy` has the rewards of greedy episodes by group, for an estimator that takes them; `version` is the policy's.
    Episodes that the settings leave out (`truncated_episodes`, `learner.rejected_episodes`) have no credit: they are in
    no baseline, loss or denominator, as if they had failed.
    """
    name = config.estimator
    left_out = _truncated(groups) if config.truncated_episodes == "leave_out" else set()
    if config.learner.correction is not None and config.learner.rejected_episodes == "leave_out":
        left_out |= _rejected(trained_episodes(_without(groups, left_out), name, greedy), learner, version)
    counted = _without(groups, left_out)
    trained = trained_episodes(counted, name, greedy)
    inputs = _inputs(trained, name, learner, greedy or {})
    single = config.allow_single or bool(left_out)
    credits = credit_groups(counted, name, config.advantage.settings, allow_single=single, inputs=inputs)
    return [_with_gaps(group, credit, left_out) for group, credit in zip(groups, credits, strict=True)]


def _truncated(groups: Sequence[Group]) -> set[int]:
    """The truncated episodes, as `id` numbers them."""
    return {id(one) for group in groups for one in group.trajectories if one.status is Status.TRUNCATED}


def _rejected(trained: Sequence[Trajectory], learner: PolicyLearner, version: int) -> set[int]:
    """The episodes of which the off-policy correction keeps no token, as `id` numbers them."""
    config = learner.config
    if not trained or config.correction is None:
        return set()
    batch = plain_batch(trained)
    batch = corrected_batch(
        batch, learner.logprobs(batch).cpu(), version, config.correction, config.correction_settings
    )
    mask_N = batch.mask_N.cpu()
    is_kept_M = batch.correction_N.cpu()[mask_N] > 0
    kept = set(batch.trajectory_N.cpu()[mask_N][is_kept_M].tolist())
    return {id(one) for number, one in enumerate(trained) if number not in kept and one.num_trained_tokens}


def _without(groups: Sequence[Group], left_out: Collection[int]) -> list[Group]:
    return [
        replace(group, trajectories=tuple(one for one in group.trajectories if id(one) not in left_out))
        for group in groups
    ]


def _with_gaps(group: Group, credit: GroupCredit, left_out: Collection[int]) -> GroupCredit:
    """The credit of a group of which some members were left out: theirs is None."""

    def spread(of_counted: Sequence[Advantages | None]) -> tuple[Advantages | None, ...]:
        rest = iter(of_counted)
        return tuple(None if id(one) in left_out else next(rest) for one in group.trajectories)

    returns, values = (None if one is None else spread(one) for one in (credit.returns, credit.values))
    return GroupCredit(spread(credit.members), returns=returns, values=values)


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

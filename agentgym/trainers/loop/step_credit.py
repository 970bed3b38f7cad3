"""Credits every token of a step's episodes, with the inputs that the estimator needs beyond the episodes."""

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
    """Returns the credit of the groups that a step learns from, with the outputs of the learner's models before it.

    `greedy` has the rewards of greedy episodes by group, for an estimator that takes them; `version` is the policy's.
    Episodes that the settings leave out (`truncated_episodes`, `learner.rejected_episodes`) have no credit: like failed
    episodes, they are in no baseline, loss or denominator.
    """
    name = config.estimator
    left_out = _truncated_episodes(groups) if config.truncated_episodes == "leave_out" else set()
    if config.learner.correction is not None and config.learner.rejected_episodes == "leave_out":
        left_out |= _rejected_episodes(trained_episodes(_without(groups, left_out), name, greedy), learner, version)
    counted = _without(groups, left_out)
    trained = trained_episodes(counted, name, greedy)
    inputs = _inputs(trained, name, learner, greedy or {})
    single = config.allow_single or bool(left_out)
    credits = credit_groups(counted, name, config.advantage.settings, allow_single=single, inputs=inputs)
    return [_with_gaps(group, credit, left_out) for group, credit in zip(groups, credits, strict=True)]


def _truncated_episodes(groups: Sequence[Group]) -> set[int]:
    """Returns the `id`s of the truncated episodes."""
    return {
        id(trajectory) for group in groups for trajectory in group.trajectories if trajectory.status is Status.TRUNCATED
    }


def _rejected_episodes(trained: Sequence[Trajectory], learner: PolicyLearner, version: int) -> set[int]:
    """Returns the `id`s of the episodes of which the off-policy correction keeps no token."""
    config = learner.config
    if not trained or config.correction is None:
        return set()
    batch = plain_batch(trained)
    batch = corrected_batch(
        batch, learner.logprobs(batch).cpu(), version, config.correction, config.correction_settings
    )
    mask_N = batch.mask_N.cpu()
    is_kept_M = batch.correction_N.cpu()[mask_N] > 0
    kept_numbers = set(batch.trajectory_N.cpu()[mask_N][is_kept_M].tolist())
    return {
        id(trajectory)
        for number, trajectory in enumerate(trained)
        if number not in kept_numbers and trajectory.num_trained_tokens
    }


def _without(groups: Sequence[Group], left_out: Collection[int]) -> list[Group]:
    return [
        replace(group, trajectories=tuple(member for member in group.trajectories if id(member) not in left_out))
        for group in groups
    ]


def _with_gaps(group: Group, credit: GroupCredit, left_out: Collection[int]) -> GroupCredit:
    """Returns the credit of a whole group, with None for the members that were left out."""

    def spread(of_counted: Sequence[Advantages | None]) -> tuple[Advantages | None, ...]:
        rest = iter(of_counted)
        return tuple(None if id(member) in left_out else next(rest) for member in group.trajectories)

    returns, values = (None if numbers is None else spread(numbers) for numbers in (credit.returns, credit.values))
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
    """Splits the numbers of all trained targets by episode, at the ids that each sampled; 0 at untrained ids."""
    numbers = numbers_M.double().cpu().numpy()
    parts, start = [], 0
    for trajectory in trained:
        mask = np.concatenate([row.mask[row.sampled_mask] for row in trajectory.rows])
        own = np.zeros(len(mask))
        own[mask] = numbers[start : start + trajectory.num_trained_tokens]
        start += trajectory.num_trained_tokens
        parts.append(own)
    return parts


def _after(end_R: Tensor, trained: Sequence[Trajectory]) -> list[float]:
    """Returns the value after each episode: 0 if the environment ended it, its last row's value if a budget did."""
    num_rows = [sum(row.num_trained_tokens > 0 for row in trajectory.rows) for trajectory in trained]
    ends = end_R.double().tolist()
    last = [ends[place - 1] if count else 0.0 for place, count in zip(accumulate(num_rows), num_rows, strict=True)]
    return [
        value if trajectory.status is Status.TRUNCATED else 0.0 for value, trajectory in zip(last, trained, strict=True)
    ]

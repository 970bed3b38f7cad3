"""Estimators on rewards to go against loops over lists."""

from __future__ import annotations

import math
import statistics
from typing import Any

import pytest
import torch

from agentgym.trainers.algorithms.advantages import gae, optimal_token_baseline, reinforce_plus_plus

SEEDS = range(6)
DISCOUNTS = [(1.0, 1.0, True), (1.0, 1.0, False), (0.9, 0.8, True), (0.9, 0.8, False), (0.5, 0.0, False)]


def whitened(rows: list[list[float]]) -> list[list[float]]:
    flat = [number for row in rows for number in row]
    mean, variance = statistics.fmean(flat), statistics.variance(flat)
    return [[(number - mean) / math.sqrt(variance + 1e-8) for number in row] for row in rows]


@pytest.mark.parametrize("discounts", DISCOUNTS)
@pytest.mark.parametrize("seed", SEEDS)
def test_gae_is_the_discounted_sum_of_residuals(
    seed: int, discounts: tuple[float, float, bool], make_batch: Any, episodes_of: Any, check_credit: Any
) -> None:
    gamma, lam, whiten = discounts
    batch = make_batch(seed)
    rows, returns = [], []
    for episode in episodes_of(batch):
        after = [*episode.values[1:], episode.bootstrap][: len(episode.values)]
        deltas = [r + gamma * n - v for r, n, v in zip(episode.rewards, after, episode.values, strict=True)]
        row = [
            sum((gamma * lam) ** (j - t) * deltas[j] for j in range(t, len(deltas)))
            for t in range(len(episode.rewards))
        ]
        rows.append(row)
        returns.append([a + v for a, v in zip(row, episode.values, strict=True)])
    credit = batch.estimate("gae", gamma=gamma, lam=lam, whiten_advantages=whiten)
    check_credit(credit, batch, whitened(rows) if whiten else rows, returns)


@pytest.mark.parametrize("gamma", [1.0, 0.7])
@pytest.mark.parametrize("seed", SEEDS)
def test_reinforce_plus_plus_whitens_discounted_rewards_to_go(
    seed: int, gamma: float, make_batch: Any, episodes_of: Any, check_credit: Any
) -> None:
    batch = make_batch(seed)
    rows = [
        [
            sum(gamma ** (j - t) * episode.rewards[j] for j in range(t, len(episode.rewards)))
            for t in range(len(episode.rewards))
        ]
        for episode in episodes_of(batch)
    ]
    check_credit(batch.estimate("reinforce_plus_plus", gamma=gamma), batch, whitened(rows), rows)


@pytest.mark.parametrize("seed", SEEDS)
def test_remax_takes_the_greedy_reward_off_the_reward_to_go(
    seed: int, make_batch: Any, episodes_of: Any, check_credit: Any
) -> None:
    batch = make_batch(seed)
    episodes = episodes_of(batch)
    rows = [[number - episode.greedy for number in episode.to_go] for episode in episodes]
    check_credit(batch.estimate("remax"), batch, rows, [episode.to_go for episode in episodes])


@pytest.mark.parametrize("zero_tail", [True, False, None])
@pytest.mark.parametrize("name", ["optimal_token_baseline", "tir_optimal_token_baseline"])
@pytest.mark.parametrize("seed", SEEDS)
def test_the_optimal_token_baseline_weighs_returns_by_the_gradient_spent(
    seed: int, name: str, zero_tail: bool | None, make_batch: Any, episodes_of: Any, check_credit: Any
) -> None:
    batch = make_batch(seed)
    episodes = episodes_of(batch)
    tail = name.startswith("tir") if zero_tail is None else zero_tail
    rows = []
    for episode in episodes:
        row = []
        for place, to_go in enumerate(episode.to_go):
            group = [mate for mate in episodes if mate.group == episode.group and len(mate.places) > place]
            weights = [sum(mate.proxy[: place + 1]) for mate in group]
            weighted = sum(w * mate.to_go[place] for w, mate in zip(weights, group, strict=True))
            alone = tail and len(group) == 1
            compared = sum(1 for mate in episodes if mate.group == episode.group and mate.places) > 1
            row.append(to_go - (0.0 if alone else weighted / (sum(weights) + 1e-8)) if compared else 0.0)
        rows.append(row)
    settings = {} if zero_tail is None else {"zero_tail": zero_tail}
    check_credit(batch.estimate(name, **settings), batch, rows, [episode.to_go for episode in episodes])


def test_the_tail_of_the_longest_episode_gets_its_raw_return_only_with_zero_tail() -> None:
    rewards_BT = torch.tensor([[0.0, 0.0, 2.0], [1.0, 0.0, 0.0]])
    mask_BT = torch.tensor([[True, True, True], [True, False, False]])
    inputs = (rewards_BT, mask_BT, torch.zeros(2, dtype=torch.int64), torch.ones(2, 3))
    with_tail, zeroed = (
        optimal_token_baseline(*inputs, zero_tail=zero_tail).advantages_BT for zero_tail in (False, True)
    )
    assert with_tail[0].tolist() == pytest.approx([0.5, 0.0, 0.0], abs=1e-6)
    assert zeroed[0].tolist() == pytest.approx([0.5, 2.0, 2.0], abs=1e-6)


def test_an_episode_whose_mates_have_nothing_trained_has_no_baseline_and_gets_zero() -> None:
    rewards_BT = torch.tensor([[0.0, 2.0], [1.0, 0.0]])
    mask_BT = torch.tensor([[True, True], [False, False]])
    credit = optimal_token_baseline(
        rewards_BT, mask_BT, torch.zeros(2, dtype=torch.int64), torch.ones(2, 2), zero_tail=True
    )
    assert not credit.advantages_BT.any()


def test_gae_skips_environment_tokens_and_bootstraps_a_truncated_episode() -> None:
    # token, environment, token: delta_0 = 0 + 2 - 1, delta_1 = 1 + 8 - 2 (the reward stands on the environment's token
    # behind the last); with lam 0.5: A_1 = 7, A_0 = 1 + 0.5 * 7
    rewards_BT = torch.tensor([[0.0, 0.0, 0.0, 1.0]], dtype=torch.float64)
    mask_BT = torch.tensor([[True, False, True, False]])
    values_BT = torch.tensor([[1.0, 99.0, 2.0, 99.0]])
    credit = gae(
        rewards_BT, mask_BT, torch.zeros(1, dtype=torch.int64), values_BT, torch.tensor([8.0]),
        lam=0.5, whiten_advantages=False,
    )  # fmt: skip
    assert credit.advantages_BT.tolist() == [[4.5, 0.0, 7.0, 0.0]]
    assert credit.returns_BT.tolist() == [[5.5, 0.0, 9.0, 0.0]]


def test_rewards_count_at_the_nearest_trained_token_before_or_else_at_the_first() -> None:
    rewards_BT = torch.tensor([[1.0, 2.0, 4.0, 8.0, 16.0, 32.0], [1.0, 1.0, 1.0, 1.0, 1.0, 1.0]])
    mask_BT = torch.tensor([[False, True, False, False, True, False], [False] * 6])
    credit = reinforce_plus_plus(rewards_BT, mask_BT, torch.zeros(2, dtype=torch.int64))
    assert credit.returns_BT.tolist() == [[0.0, 63.0, 0.0, 0.0, 48.0, 0.0], [0.0] * 6]

"""Estimators whose steps are turns against loops over lists."""

from __future__ import annotations

import math
import statistics
from typing import Any

import pytest
import torch

from agentgym.errors import InvalidTrajectory
from agentgym.trainers.algorithms.advantages import turn_gae, turn_group, turn_returns

SEEDS = range(6)


def at_tokens(episodes: list[Any], per_turn: list[list[float]]) -> list[list[float]]:
    """Each turn's number at each of its tokens."""
    return [
        [number for span, number in zip(episode.spans, numbers, strict=True) for _ in span]
        for episode, numbers in zip(episodes, per_turn, strict=True)
    ]


def relative(number: float, group: list[float], normalize: bool) -> float:
    if len(group) == 1:
        return 0.0
    distance = number - statistics.fmean(group)
    return distance / (statistics.stdev(group) + 1e-6) if normalize else distance


@pytest.mark.parametrize("gamma", [1.0, 0.6])
@pytest.mark.parametrize("seed", SEEDS)
def test_turn_returns_discount_by_turn(
    seed: int, gamma: float, make_batch: Any, episodes_of: Any, check_credit: Any
) -> None:
    batch = make_batch(seed)
    episodes = episodes_of(batch)
    returns = at_tokens(episodes, [episode.turn_returns(gamma) for episode in episodes])
    check_credit(batch.estimate("turn_returns", gamma=gamma), batch, returns, returns)


@pytest.mark.parametrize("seed", SEEDS)
def test_return_batch_norm_counts_every_turn_once(
    seed: int, make_batch: Any, episodes_of: Any, check_credit: Any
) -> None:
    batch = make_batch(seed)
    episodes = episodes_of(batch)
    returns = [episode.turn_returns(0.9) for episode in episodes]
    flat = [number for row in returns for number in row]
    mean, scale = statistics.fmean(flat), math.sqrt(statistics.variance(flat) + 1e-8)
    advantages = [[(number - mean) / scale for number in row] for row in returns]
    expected = at_tokens(episodes, advantages), at_tokens(episodes, returns)
    check_credit(batch.estimate("return_batch_norm"), batch, *expected)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("seed", SEEDS)
def test_turn_group_holds_a_turn_against_the_same_turn_of_the_others(
    seed: int, normalize: bool, make_batch: Any, episodes_of: Any, check_credit: Any
) -> None:
    batch = make_batch(seed)
    episodes = episodes_of(batch)
    returns = [episode.turn_returns(0.9) for episode in episodes]
    numbers = [[episode.turns[span[0]] for span in episode.spans] for episode in episodes]
    advantages = []
    for episode, own_returns, own_numbers in zip(episodes, returns, numbers, strict=True):
        row = []
        for number, turn in zip(own_returns, own_numbers, strict=True):
            group = [
                other_return
                for mate, mate_returns, mate_numbers in zip(episodes, returns, numbers, strict=True)
                for other_return, other_turn in zip(mate_returns, mate_numbers, strict=True)
                if mate.group == episode.group and other_turn == turn
            ]
            row.append(relative(number, group, normalize))
        advantages.append(row)
    credit = batch.estimate("turn_group", gamma=0.9, normalize_by_std=normalize)
    check_credit(credit, batch, at_tokens(episodes, advantages), at_tokens(episodes, returns))


@pytest.mark.parametrize("settings", [{}, {"normalize_by_std": False, "step_weight": 0.3, "gamma": 0.5}])
@pytest.mark.parametrize("seed", SEEDS)
def test_gigpo_adds_the_episode_and_the_turns_sampled_in_the_same_state(
    seed: int, settings: dict[str, Any], make_batch: Any, episodes_of: Any, check_credit: Any
) -> None:
    batch = make_batch(seed)
    episodes = episodes_of(batch)
    normalize, weight = settings.get("normalize_by_std", True), settings.get("step_weight", 1.0)
    returns = [episode.turn_returns(settings.get("gamma", 0.95)) for episode in episodes]
    visited: dict[tuple[int, int], list[float]] = {}
    for episode, row in zip(episodes, returns, strict=True):
        for span, number in zip(episode.spans, row, strict=True):
            visited.setdefault((episode.group, episode.states[span[0]]), []).append(number)
    advantages = []
    for episode, row in zip(episodes, returns, strict=True):
        whole = relative(episode.score, [mate.score for mate in episodes if mate.group == episode.group], normalize)
        steps = [
            relative(number, visited[episode.group, episode.states[span[0]]], normalize)
            if episode.states[span[0]] >= 0
            else 0.0
            for span, number in zip(episode.spans, row, strict=True)
        ]
        advantages.append([whole + weight * step for step in steps])
    expected = at_tokens(episodes, advantages), at_tokens(episodes, returns)
    check_credit(batch.estimate("gigpo", **settings), batch, *expected)


@pytest.mark.parametrize("whiten", [True, False])
@pytest.mark.parametrize("seed", SEEDS)
def test_turn_gae_has_one_value_a_turn(
    seed: int, whiten: bool, make_batch: Any, episodes_of: Any, check_credit: Any
) -> None:
    gamma, lam = 0.99, 0.9
    batch = make_batch(seed)
    episodes = episodes_of(batch)
    advantages, returns = [], []
    for episode in episodes:
        values = [episode.values[span[0]] for span in episode.spans]
        rewards = [sum(episode.rewards[index] for index in span) for span in episode.spans]
        after = [*values[1:], episode.bootstrap][: len(values)]
        deltas = [r + gamma * n - v for r, n, v in zip(rewards, after, values, strict=True)]
        row = [sum((gamma * lam) ** (j - k) * deltas[j] for j in range(k, len(deltas))) for k in range(len(deltas))]
        advantages.append(row)
        returns.append([a + v for a, v in zip(row, values, strict=True)])
    tokens = at_tokens(episodes, advantages)
    if whiten:
        flat = [number for row in tokens for number in row]
        mean, scale = statistics.fmean(flat), math.sqrt(statistics.variance(flat) + 1e-8)
        tokens = [[(number - mean) / scale for number in row] for row in tokens]
    credit = batch.estimate("turn_gae", whiten_advantages=whiten)
    check_credit(credit, batch, tokens, at_tokens(episodes, returns))


def test_what_the_environment_pays_after_a_turn_belongs_to_that_turn() -> None:
    # reply (0, 0), environment pays 5, reply (1), environment pays 7: the second turn must not get the 5
    rewards_BT = torch.tensor([[0.0, 0.0, 5.0, 0.0, 7.0]])
    mask_BT = torch.tensor([[True, True, False, True, False]])
    turns_BT = torch.tensor([[0, 0, -1, 1, -1]])
    credit = turn_returns(rewards_BT, mask_BT, torch.zeros(1, dtype=torch.int64), turns_BT, gamma=0.5)
    assert credit.advantages_BT.tolist() == [[8.5, 8.5, 0.0, 7.0, 0.0]]


def test_turn_gae_by_hand() -> None:
    # values 1 and 2 at the turns' first tokens, bootstrap 4: delta_1 = 3 + 4 - 2 = 5, delta_0 = 1 + 2 - 1 = 2
    rewards_BT = torch.tensor([[0.0, 1.0, 0.0, 3.0]])
    mask_BT = torch.tensor([[True, True, False, True]])
    values_BT, turns_BT = torch.tensor([[1.0, 50.0, 60.0, 2.0]]), torch.tensor([[0, 0, -1, 1]])
    credit = turn_gae(
        rewards_BT, mask_BT, torch.zeros(1, dtype=torch.int64), values_BT, turns_BT, torch.tensor([4.0]),
        gamma=1.0, lam=0.5, whiten_advantages=False,
    )  # fmt: skip
    assert credit.advantages_BT.tolist() == [[4.5, 4.5, 0.0, 5.0]]
    assert credit.returns_BT.tolist() == [[5.5, 5.5, 0.0, 7.0]]


def test_a_turn_that_nobody_else_has_gets_zero_and_not_its_return() -> None:
    rewards_BT = torch.tensor([[0.0, 9.0], [1.0, 0.0]])
    mask_BT = torch.tensor([[True, True], [True, False]])
    turns_BT = torch.tensor([[0, 1], [0, -1]])
    credit = turn_group(rewards_BT, mask_BT, torch.zeros(2, dtype=torch.int64), turns_BT, normalize_by_std=False)
    assert credit.advantages_BT.tolist() == [[4.0, 0.0], [-4.0, 0.0]]


@pytest.mark.parametrize(
    ("turns", "message"), [([[0, -1]], "every trained token belongs to a turn"), ([[1, 0]], "count up")]
)
def test_turns_that_cannot_be_are_refused(turns: list[list[int]], message: str) -> None:
    rewards_BT = torch.zeros(1, 2)
    with pytest.raises(InvalidTrajectory, match=message):
        turn_returns(rewards_BT, rewards_BT == 0, torch.zeros(1, dtype=torch.int64), torch.tensor(turns))

"""Estimators on whole episodes against loops over lists."""

from __future__ import annotations

import math
import statistics
from typing import Any

import pytest
import torch

from agentgym.errors import ConfigError, InvalidTrajectory
from agentgym.trainers.algorithms.advantages import ADVANTAGES, grpo

SEEDS = range(6)


def mates(episodes: list[Any], episode: Any) -> list[Any]:
    return [mate for mate in episodes if mate.group == episode.group]


def by_group(name: str, episodes: list[Any], episode: Any, settings: dict[str, Any]) -> float:
    """The advantage of one episode, for the estimators that look at no more than its group's returns and lengths."""
    group = mates(episodes, episode)
    scores = [mate.score for mate in group]
    mean, deviation = statistics.fmean(scores), statistics.stdev(scores)
    others = [mate.score for mate in group if mate is not episode]
    if name == "grpo" and settings.get("normalize_by_std", True):
        return (episode.score - mean) / (deviation + 1e-6)
    if name in ("grpo", "dr_grpo"):
        return episode.score - mean
    if name == "rloo":
        return episode.score - statistics.fmean(others)
    if name == "opo":
        length = sum(len(mate.places) for mate in group)
        return episode.score - sum(len(mate.places) * mate.score for mate in group) / length
    if name == "gpg":
        scored = sum(1 for mate in episodes if mate.score != 0)
        return len(episodes) / scored * (episode.score - mean) / settings.get("norm", 1.0)
    if name == "grpo_passk":
        lead = max(0.0, episode.score - max(others))
        return lead / (deviation + 1e-6) if settings.get("normalize_by_std", True) else lead
    assert name == "maxrl"
    return (episode.score - mean) / mean if mean else 0.0


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("grpo", {}),
        ("grpo", {"normalize_by_std": False}),
        ("dr_grpo", {}),
        ("rloo", {}),
        ("opo", {}),
        ("gpg", {}),
        ("gpg", {"norm": 2.5}),
        ("grpo_passk", {}),
        ("grpo_passk", {"normalize_by_std": False}),
        ("maxrl", {}),
    ],
)
def test_each_episode_is_held_against_its_group(
    name: str, settings: dict[str, Any], seed: int, make_batch: Any, episodes_of: Any, check_credit: Any
) -> None:
    batch = make_batch(seed, positive=name == "maxrl")
    if seed % 2:  # some returns of exactly 0, for gpg
        batch.rewards_BT[torch.arange(len(batch.groups_B)) % 3 == 0] = 0.0
    episodes = episodes_of(batch)
    advantages = [[by_group(name, episodes, episode, settings)] * len(episode.places) for episode in episodes]
    returns = [[episode.score] * len(episode.places) for episode in episodes]
    check_credit(batch.estimate(name, **settings), batch, advantages, returns)


def whitened(rows: list[list[float]]) -> list[list[float]]:
    flat = [number for row in rows for number in row]
    mean, variance = statistics.fmean(flat), statistics.variance(flat)
    return [[(number - mean) / math.sqrt(variance + 1e-8) for number in row] for row in rows]


@pytest.mark.parametrize("seed", SEEDS)
def test_reinforce_plus_plus_baseline_whitens_over_trained_tokens(
    seed: int, make_batch: Any, episodes_of: Any, check_credit: Any
) -> None:
    batch = make_batch(seed)
    episodes = episodes_of(batch)
    centred = [
        [episode.score - statistics.fmean(mate.score for mate in mates(episodes, episode))] * len(episode.places)
        for episode in episodes
    ]
    returns = [[episode.score] * len(episode.places) for episode in episodes]
    check_credit(batch.estimate("reinforce_plus_plus_baseline"), batch, whitened(centred), returns)


@pytest.mark.parametrize("weights", [None, [1.0, -0.5, 3.0]])
@pytest.mark.parametrize("seed", SEEDS)
def test_gdpo_normalizes_each_component_before_it_adds_them(
    weights: list[float] | None, seed: int, make_batch: Any, episodes_of: Any, check_credit: Any
) -> None:
    batch = make_batch(seed)
    episodes = episodes_of(batch)
    combined = []
    for episode in episodes:
        total = 0.0
        for k, weight in enumerate(weights or [1.0, 1.0, 1.0]):
            scores = [mate.components[k] for mate in mates(episodes, episode)]
            total += weight * (episode.components[k] - statistics.fmean(scores)) / (statistics.stdev(scores) + 1e-6)
        combined.append([total] * len(episode.places))
    returns = [[episode.score] * len(episode.places) for episode in episodes]
    check_credit(batch.estimate("gdpo", weights=weights), batch, whitened(combined), returns)


def test_gdpo_counts_a_component_among_the_episodes_that_have_it() -> None:
    # The first component is known of 0, 2 (mean 1, deviation 1.414) in group 0, and of one episode in group 1. The
    # second is known of 1, 4 (mean 2.5, deviation 2.121) in group 1, and of one episode in group 0; the third of none.
    nan = math.nan
    parts = [(0.0, nan, nan), (2.0, nan, nan), (nan, 9.0, nan), (7.0, 1.0, nan), (nan, 4.0, nan), (nan, nan, nan)]
    components_BTK = torch.tensor([[part] for part in parts], dtype=torch.float64)
    rewards_BT = torch.ones(6, 1, dtype=torch.float64)
    groups_B = torch.tensor([0, 0, 0, 1, 1, 1])
    credit = ADVANTAGES["gdpo"](
        rewards_BT, rewards_BT > 0, groups_B, components_BTK=components_BTK, weights=[1.0, 2.0, 5.0]
    )
    combined = [-(0.5**0.5), 0.5**0.5, 0.0, -(2.0**0.5), 2.0**0.5, 0.0]
    deviation = statistics.stdev(combined)
    expected = [value / deviation for value in combined]
    assert credit.advantages_BT[:, 0].tolist() == pytest.approx(expected, abs=1e-5)


def test_gdpo_wants_a_weight_for_each_component(make_batch: Any) -> None:
    with pytest.raises(ConfigError, match="3 components of the reward need as many weights, got 2"):
        make_batch(0).estimate("gdpo", weights=[1.0, 2.0])


def test_maxrl_refuses_a_negative_return(make_batch: Any) -> None:
    batch = make_batch(0, positive=True)
    batch.rewards_BT[1, 0] = -100.0
    with pytest.raises(InvalidTrajectory, match="maxrl takes returns of at least 0"):
        batch.estimate("maxrl")


def test_ties_for_the_best_episode_give_nobody_a_lead() -> None:
    rewards_BT = torch.tensor([[1.0], [3.0], [3.0], [0.0], [2.0]])
    groups_B = torch.tensor([0, 0, 0, 1, 1])
    credit = ADVANTAGES["grpo_passk"](rewards_BT, rewards_BT > -1, groups_B, normalize_by_std=False)
    assert credit.advantages_BT[:, 0].tolist() == [0.0, 0.0, 0.0, 0.0, 2.0]


def test_grpo_by_hand() -> None:
    # returns 0, 2, 4 (a reward of 3 at a token that is not trained counts): mean 2, deviation 2
    rewards_BT = torch.tensor([[0.0, 0.0, 0.0], [2.0, 0.0, 0.0], [0.0, 1.0, 3.0]])
    mask_BT = torch.tensor([[True, True, False]]).expand(3, 3)
    credit = grpo(rewards_BT, mask_BT, torch.zeros(3, dtype=torch.int64))
    assert credit.advantages_BT[:, 0].tolist() == pytest.approx([-1.0, 0.0, 1.0], abs=1e-5)
    assert credit.returns_BT.tolist() == [[0.0, 0.0, 0.0], [2.0, 2.0, 0.0], [4.0, 4.0, 0.0]]


@pytest.mark.parametrize("name", ["reinforce_plus_plus_baseline", "gdpo"])
def test_a_group_of_one_has_no_part_in_the_statistics_of_the_batch(name: str, make_batch: Any) -> None:
    batch = make_batch(3, sizes=(3, 1, 4))
    lone = batch.groups_B.tolist().index(-2)
    others = [row for row in range(8) if row != lone]
    whole = batch.estimate(name, allow_single=True)
    assert not whole.advantages_BT[lone].any()
    torch.testing.assert_close(whole.advantages_BT[others], batch.take(others).estimate(name).advantages_BT)

"""The example of a reward gives what it says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentgym.rewards import RewardConfig, open_rewards
from agentgym.trajectory import Trajectory

FILE = Path(__file__).parents[2] / "examples" / "custom_reward.py"


def score(name: str, played: list[Trajectory], manner: Any = "auto", **settings: object) -> list[Trajectory]:
    async def main() -> list[Trajectory]:
        config = RewardConfig(function=f"{FILE}:{name}", settings=settings, manner=manner, concurrency=1)
        async with open_rewards(config) as rewards:
            return await rewards.score(played)

    return asyncio.run(main())


@pytest.mark.parametrize("manner", ["plain", "pool"])
def test_turns_cost(episode: Callable[..., Trajectory], manner: str) -> None:
    (scored,) = score("brief", [episode("c", replies=["a", "b"])], manner, per_turn=0.1)
    assert [turn.reward for turn in scored.turns] == pytest.approx([0.25, 0.15, 0.15])
    assert scored.metrics == pytest.approx({"reward/environment": 0.75, "reward/brevity": -0.2})


def test_the_shortest_episode_of_a_task_earns_all(episode: Callable[..., Trajectory]) -> None:
    played = [episode("a", metrics={"success": 1.0}), episode("b", replies=["a"], metrics={"success": 1.0})]
    assert [episode.reward for episode in score("shortest", played)] == [0.25, 0.25]

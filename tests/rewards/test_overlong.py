"""The soft punishment of long episodes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentgym.errors import ConfigError
from agentgym.rewards import Reward, RewardConfig, open_rewards, overlong_penalty
from agentgym.rewards.overlong import OverlongConfig
from agentgym.trajectory import Trajectory

Make = Callable[..., Trajectory]


def score(config: RewardConfig, played: Trajectory, function: Callable[..., object] | None = None) -> Trajectory:
    async def main() -> Trajectory:
        async with open_rewards(config, function) as rewards:
            return (await rewards.score([played]))[0]

    return asyncio.run(main())


@given(st.integers(0, 30000), st.integers(1, 4096), st.integers(4096, 20480), st.floats(0.0, 4.0))
def test_it_is_the_papers_formula(length: int, cache: int, longest: int, penalty: float) -> None:
    if length <= longest - cache:
        expected = 0.0
    elif length <= longest:
        expected = ((longest - cache) - length) / cache
    else:
        expected = -1.0
    config = OverlongConfig(buffer_tokens=cache, max_tokens=longest, penalty=penalty)
    assert overlong_penalty(length, config) == pytest.approx(penalty * expected, abs=1e-12)


@pytest.mark.parametrize("settings", [{"buffer_tokens": 8}, {"buffer_tokens": 8, "max_tokens": 4}, {"penalty": -1.0}])
def test_a_buffer_without_a_budget_is_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="overlong"):
        OverlongConfig(**settings)  # type: ignore[arg-type]


def test_sampled_tokens_of_all_turns_are_counted_and_the_last_turn_is_punished(episode: Make) -> None:
    config = RewardConfig(overlong=OverlongConfig(buffer_tokens=8, max_tokens=10))
    shaped = score(config, episode("c", replies=["a", "b"], turn_tokens=2))
    assert [turn.reward for turn in shaped.turns] == [0.25, 0.25, 0.25 - 4 / 8]
    assert shaped.metrics["reward/overlong"] == -0.5


def test_a_punished_answer_is_as_right_as_before(episode: Make) -> None:
    config = RewardConfig(overlong=OverlongConfig(buffer_tokens=4, max_tokens=4))
    played = episode("a", turn_tokens=9)
    right = score(config, played, lambda trajectory, task: 1.0)
    assert (right.reward, right.success) == (0.0, True)
    result = score(config, played, lambda trajectory, task: Reward(1.0, {"answer": 1.0}, success=False))
    assert (result.success, result.metrics["reward/answer"]) == (False, 1.0)
    by_environment = score(config, episode("a", metrics={"success": 0.0}), lambda trajectory, task: 1.0)
    assert by_environment.success is False

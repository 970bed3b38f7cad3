"""Rewards of single turns, of a server or a judge, reach the tokens of their turns."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from agentgym.engines.openai.endpoint import ChatEndpointConfig
from agentgym.rewards import RewardConfig, open_rewards
from agentgym.rewards.judge.config import JudgeConfig
from agentgym.rewards.remote import RemoteConfig
from agentgym.testing.fake_server.http import FakeHost, HttpAnswer, HttpCall
from agentgym.trainers.batch.credits import credit_groups
from agentgym.trajectory import Group, Trajectory

Make = Callable[..., Trajectory]


def advantages(scored: Trajectory, estimator: str = "turn_returns") -> list[float]:
    group = Group(scored.group, scored.task, (scored,))
    (credited,) = credit_groups([group], estimator, allow_single=True)
    (rows,) = credited.members
    assert rows is not None
    return [float(number) for row in rows for number in row]


def score(config: RewardConfig, played: Trajectory) -> Coroutine[Any, Any, list[Trajectory]]:
    async def main() -> list[Trajectory]:
        async with open_rewards(config) as rewards:
            return await rewards.score([played])

    return main()


def test_a_servers_rewards_of_turns_are_the_returns_of_their_tokens(episode: Make) -> None:
    async def answer(call: HttpCall) -> HttpAnswer:
        turns = [0.5 * (turn["message"]["content"] != "a") for turn in call.body["trajectory"]["turns"]]
        return HttpAnswer({"value": sum(turns), "turns": turns})

    async def main() -> list[Trajectory]:
        host = FakeHost({"/score": answer}, "127.0.0.1", 0)
        url = await host.start()
        try:
            return await score(RewardConfig(remote=RemoteConfig(url=f"{url}/score")), episode("c", replies=["b", "a"]))
        finally:
            await host.close()

    (scored,) = asyncio.run(main())
    assert [turn.reward for turn in scored.turns] == [0.5, 0.0, 0.5]
    assert advantages(scored) == [1.0, 1.0, 0.5, 0.5, 0.5, 0.5]


def test_a_judges_scores_of_turns_are_the_returns_of_their_tokens(chat_endpoint: Any, episode: Make) -> None:
    endpoint = chat_endpoint(lambda body, number: chat_endpoint.make_reply("Turn 1: 0\nTurn 2: 10"))
    judge = JudgeConfig(url=endpoint.url, endpoint=ChatEndpointConfig(token_ids=False), unit="turn")
    (scored,) = asyncio.run(score(RewardConfig(judge=judge), episode("b", replies=["a"])))
    assert [turn.reward for turn in scored.turns] == [0.0, 0.5]
    assert advantages(scored) == pytest.approx([0.5] * 4)
    (flipped,) = asyncio.run(
        score(
            RewardConfig(judge=JudgeConfig(url=judge.url, endpoint=judge.endpoint, unit="turn", scale=(-10, 10))),
            episode("b", replies=["a"]),
        )
    )
    assert [turn.reward for turn in flipped.turns] == [0.25, 0.5]
    assert advantages(flipped) == pytest.approx([0.75, 0.75, 0.5, 0.5])

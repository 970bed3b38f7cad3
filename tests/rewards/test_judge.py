"""A judge's score is read strictly: what is no verdict is no reward."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentgym.engines.openai.endpoint import ChatEndpointConfig
from agentgym.errors import ConfigError
from agentgym.rewards import RewardConfig, open_rewards
from agentgym.rewards.judge import JudgeConfig
from agentgym.trajectory import Status, Trajectory
from agentgym.types import Message, ToolCall, ToolResult

Make = Callable[..., Trajectory]
PLAIN = ChatEndpointConfig(token_ids=False, max_retries=1)


def judge(url: str, played: list[Trajectory], **settings: Any) -> list[Trajectory]:
    config = RewardConfig(judge=JudgeConfig(url=url, endpoint=PLAIN, **settings))

    async def main() -> list[Trajectory]:
        async with open_rewards(config) as rewards:
            return await rewards.score(played)

    return asyncio.run(main())


def test_the_score_on_the_last_line_is_the_reward(chat_endpoint: Any, episode: Make) -> None:
    endpoint = chat_endpoint(lambda body, number: chat_endpoint.said("It is right.\n**Score: 7.5**\n"))
    (scored,) = judge(endpoint.url, [episode("It is 42.")])
    assert (scored.reward, scored.metrics["reward/judge"]) == (0.75, 7.5)
    assert scored.info["reward"] == {"verdict": "It is right.\n**Score: 7.5**\n"}
    (asked,) = endpoint.bodies[0]["messages"]
    assert "Six times seven?" in asked["content"] and "<answer>\nIt is 42.\n</answer>" in asked["content"]
    assert endpoint.bodies[0]["temperature"] == 0


@pytest.mark.parametrize(
    "verdict",
    ["", "It is right.", "Score: high", "Score: 11", "Score: -1", "Score: 7 of 10", "Score: 7\nOr maybe not.", "7"],
)
def test_what_cannot_be_read_is_a_failure_and_no_zero(chat_endpoint: Any, episode: Make, verdict: str) -> None:
    endpoint = chat_endpoint(lambda body, number: chat_endpoint.said(verdict))
    (scored,) = judge(endpoint.url, [episode("Score: 10")])
    assert (scored.status, scored.reward) == (Status.ENV_ERROR, None)
    assert scored.error is not None and "no score from 0 to 10" in scored.error


def test_a_verdict_that_is_cut_is_none(chat_endpoint: Any, episode: Make) -> None:
    endpoint = chat_endpoint(lambda body, number: chat_endpoint.said("Score: 1", finish="length"))
    (scored,) = judge(endpoint.url, [episode("a")], max_tokens=5)
    assert scored.error == "the reward failed: the judge's verdict was cut at 5 tokens (judge.max_tokens)"


def test_an_endpoint_that_fails_fails_the_episode(chat_endpoint: Any, episode: Make) -> None:
    endpoint = chat_endpoint(lambda body, number: chat_endpoint.said(status=500, body={"error": "broken"}))
    (scored,) = judge(endpoint.url, [episode("a")])
    assert scored.status is Status.ENV_ERROR
    assert scored.error is not None and "gave no verdict" in scored.error and "(after 2 requests)" in scored.error


def test_a_template_of_ones_own_shows_what_it_names(chat_endpoint: Any, episode: Make, tmp_path: Path) -> None:
    path = tmp_path / "judge.md"
    path.write_text('True: {ground_truth}\nSaid:\n{conversation}\nAnswer with {"points": N}', encoding="utf-8")
    endpoint = chat_endpoint(lambda body, number: chat_endpoint.said('{"points": 3}'))
    played = episode("{reply} {ground_truth}", replies=["look"], truth="42")
    call = ToolCall("c", "look", {"at": "map"})
    first = replace(
        played.turns[0],
        message=Message("assistant", "", tool_calls=(call,)),
        tool_results=(ToolResult("c", "look", "a river"),),
    )
    played = replace(played, turns=(first, played.turns[1]))
    pattern = r'\{"points": (\d+)\}'
    (scored,) = judge(endpoint.url, [played], template=str(path), score=pattern, lowest=1, highest=5)
    assert scored.reward == 0.5
    (asked,) = endpoint.bodies[0]["messages"]
    assert asked["content"] == (
        "True: 42\nSaid:\n[system]\nBe right.\n\n[user]\nSix times seven?\n\n[assistant]\nlook({'at': 'map'})\n\n"
        '[tool]\na river\n\n[assistant]\n{reply} {ground_truth}\nAnswer with {"points": N}'
    )


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"template": "Rate {reply} for {qestion}"}, "did you mean 'question'"),
        ({"template": "Rate it."}, "nothing to judge"),
        ({"template": "none.txt"}, "no file 'none.txt'"),
        ({"score": "(\\d"}, "regular expression"),
        ({"score": "\\d+"}, "has a group"),
        ({"lowest": 5.0, "highest": 5.0}, "below its highest"),
    ],
)
def test_a_judge_that_cannot_judge_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        judge("http://127.0.0.1:1", [], **settings)

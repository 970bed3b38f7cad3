"""A judge's score is read strictly: what is no verdict is no reward."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentgym.engines.openai.endpoint import ChatEndpointConfig
from agentgym.errors import ConfigError
from agentgym.evaluation.play.config import EvalConfig
from agentgym.rewards import RewardConfig, open_rewards
from agentgym.rewards.judge.config import JudgeConfig
from agentgym.trainers.config import TrainConfig
from agentgym.trainers.settings.held_out import HeldOutConfig
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
    endpoint = chat_endpoint(lambda body, number: chat_endpoint.make_reply("It is right.\n**Score: 7.5**\n"))
    (scored,) = judge(endpoint.url, [episode("It is 42.")])
    assert (scored.reward, scored.metrics["reward/judge"]) == (0.75, 7.5)
    assert scored.info["reward"] == {"verdict": "It is right.\n**Score: 7.5**\n"}
    (question,) = endpoint.bodies[0]["messages"]
    assert "Six times seven?" in question["content"] and "<answer>\nIt is 42.\n</answer>" in question["content"]
    assert endpoint.bodies[0]["temperature"] == 0


@pytest.mark.parametrize(
    "verdict",
    ["", "It is right.", "Score: high", "Score: 11", "Score: -1", "Score: 7 of 10", "Score: 7\nOr maybe not.", "7"],
)
def test_what_cannot_be_read_is_a_failure_and_no_zero(chat_endpoint: Any, episode: Make, verdict: str) -> None:
    endpoint = chat_endpoint(lambda body, number: chat_endpoint.make_reply(verdict))
    (scored,) = judge(endpoint.url, [episode("Score: 10")])
    assert (scored.status, scored.reward) == (Status.ENV_ERROR, None)
    assert scored.error is not None and "no score from 0 to 10" in scored.error


def test_a_verdict_that_is_cut_is_none(chat_endpoint: Any, episode: Make) -> None:
    endpoint = chat_endpoint(lambda body, number: chat_endpoint.make_reply("Score: 1", finish="length"))
    (scored,) = judge(endpoint.url, [episode("a")], max_tokens=5)
    assert scored.error == "the reward failed: the judge's verdict was cut at 5 tokens (judge.max_tokens)"


def test_an_endpoint_that_fails_fails_the_episode(chat_endpoint: Any, episode: Make) -> None:
    endpoint = chat_endpoint(lambda body, number: chat_endpoint.make_reply(status=500, body={"error": "broken"}))
    (scored,) = judge(endpoint.url, [episode("a")])
    assert scored.status is Status.ENV_ERROR
    assert scored.error is not None and "gave no verdict" in scored.error and "(after 2 requests)" in scored.error


def test_a_judge_that_takes_its_own_temperature_alone_judges_and_is_warned_of(
    chat_endpoint: Any, episode: Make, caplog: pytest.LogCaptureFixture
) -> None:
    words = "Unsupported value: 'temperature' does not support 0 with this model. Only the default (1) is supported."
    refusal = chat_endpoint.make_reply(status=400, body={"error": {"message": words, "code": "unsupported_value"}})
    endpoint = chat_endpoint(
        lambda body, number: refusal if "temperature" in body else chat_endpoint.make_reply("Score: 5")
    )
    (scored,) = judge(endpoint.url, [episode("a")])
    assert scored.reward == 0.5
    assert "refuses temperature=0: it is asked without, which changes the results" in caplog.text


def test_a_verdict_that_a_filter_withholds_is_a_failure_that_names_it(chat_endpoint: Any, episode: Make) -> None:
    endpoint = chat_endpoint(lambda body, number: chat_endpoint.make_reply("Score: 0", finish="SAFETY"))
    (scored,) = judge(endpoint.url, [episode("a")])
    assert (scored.status, scored.reward) == (Status.ENV_ERROR, None)
    assert "content filter: the reply was withheld (finish reason SAFETY)" in str(scored.error)


def test_a_template_of_ones_own_shows_what_it_names(chat_endpoint: Any, episode: Make, tmp_path: Path) -> None:
    path = tmp_path / "judge.md"
    path.write_text('True: {ground_truth}\nSaid:\n{conversation}\nAnswer with {"points": N}', encoding="utf-8")
    endpoint = chat_endpoint(lambda body, number: chat_endpoint.make_reply('{"points": 3}'))
    played = episode("{reply} {ground_truth}", replies=["look"], truth="42")
    call = ToolCall("c", "look", {"at": "map"})
    first = replace(
        played.turns[0],
        message=Message("assistant", "", tool_calls=(call,)),
        tool_results=(ToolResult("c", "look", "a river"),),
    )
    played = replace(played, turns=(first, played.turns[1]))
    pattern = r'\{"points": (\d+)\}'
    (scored,) = judge(endpoint.url, [played], template=str(path), score=pattern, scale=(1, 5))
    assert scored.reward == 0.5
    (question,) = endpoint.bodies[0]["messages"]
    assert question["content"] == (
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
        ({"scale": (5.0, 5.0)}, "below its highest"),
        ({"scale": (5.0,)}, r"judge\.scale is two numbers, got 5\.0"),
    ],
)
def test_a_judge_that_cannot_judge_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        judge("http://127.0.0.1:1", [], **settings)


@pytest.mark.parametrize("verdict", ["Score: 7/10", "**Score: 7 / 10**", "Fine.\n\nscore: 7.0/10."])
def test_a_score_out_of_the_highest_is_one(chat_endpoint: Any, episode: Make, verdict: str) -> None:
    endpoint = chat_endpoint(lambda body, number: chat_endpoint.make_reply(verdict))
    (scored,) = judge(endpoint.url, [episode("a")])
    assert scored.reward == 0.7
    (failure,) = judge(endpoint.url, [episode("a")], scale=(0, 5))
    assert failure.error is not None and "no score from 0 to 5" in failure.error


RUBRIC = {"right": {"text": "Is it right?", "weight": 3}, "clear and brief": "Is it short?"}


@pytest.mark.parametrize(
    "verdict",
    [
        "Well.\nright: 8\nClear and brief: 4",
        "- **clear and brief:** 4/10\n- **right**: 8.0",
        '{"no": 1}\nThat was a start.\n```json\n{"right": 8, "clear and brief": {"why": "long", "score": 4}}\n```',
        'So\n{\n  "clear and brief": 4,\n  "right": 8\n}',
    ],
)
def test_a_rubric_has_a_score_for_each_criterion(
    chat_endpoint: Any, episode: Make, verdict: str, tmp_path: Path
) -> None:
    endpoint = chat_endpoint(lambda body, number: chat_endpoint.make_reply(verdict))
    (scored,) = judge(endpoint.url, [episode("a")], rubric=RUBRIC)
    assert scored.reward == pytest.approx((3 * 0.8 + 0.4) / 4)
    metrics = {name: value for name, value in scored.metrics.items() if name.startswith("reward/")}
    assert metrics == {"reward/right": 8.0, "reward/clear and brief": 4.0}
    (question,) = endpoint.bodies[0]["messages"]
    assert "- right: Is it right?\n- clear and brief: Is it short?\n" in question["content"]
    assert "a number from 0 (not met at all) to 10" in question["content"]
    (tmp_path / "rubric.yaml").write_text("right: {text: 'Is it right?', weight: 3}\nclear and brief: Is it short?\n")
    (again,) = judge(endpoint.url, [episode("a")], rubric=str(tmp_path / "rubric.yaml"))
    assert again == scored


@pytest.mark.parametrize(
    "verdict",
    [
        "",
        "right: 8",
        "right: 8\nclear and brief: 11",
        "right: 8\nclear and brief: 4\nOr so.",
        "right: 8\nright: 8",
        "right: 8\nbrief: 4",
        '{"right": 8}',
        '{"right": 8, "clear and brief": "4"}',
        '{"right": 8, "clear and brief": true}',
        '{"right": 8, "clear and brief": 4, "kind": 1}',
        '{"right": 8, "right": 4}',
        '{"right": 8, "clear and brief": NaN}',
    ],
)
def test_a_verdict_without_each_criterion_is_a_failure(chat_endpoint: Any, episode: Make, verdict: str) -> None:
    endpoint = chat_endpoint(lambda body, number: chat_endpoint.make_reply(verdict))
    (scored,) = judge(endpoint.url, [episode("a")], rubric=RUBRIC)
    assert scored.status is Status.ENV_ERROR and "the judge's" in str(scored.error)


def test_each_turn_has_a_score_that_reaches_its_tokens(chat_endpoint: Any, episode: Make) -> None:
    endpoint = chat_endpoint(lambda body, number: chat_endpoint.make_reply("Turn 1: 10\nTurn 2: 0\nTurn 3: 5/10"))
    (scored,) = judge(endpoint.url, [episode("c", replies=["a", "b"])], unit="turn")
    assert [turn.reward for turn in scored.turns] == pytest.approx([1 / 3, 0, 0.5 / 3])
    assert (scored.reward, scored.metrics["reward/judge"]) == (pytest.approx(0.5), 5.0)
    (question,) = endpoint.bodies[0]["messages"]
    assert "Turn 1\n\n[assistant]\na\n\n[user]\ngo on\n\nTurn 2\n\n[assistant]\nb" in question["content"]


def test_the_members_of_a_group_are_ranked_in_an_order_that_the_seed_gives(chat_endpoint: Any, episode: Make) -> None:
    quality = {"good": 2, "fair": 1, "also fair": 1, "bad": 0}

    def rank(body: Any, number: int) -> Any:
        text = body["messages"][0]["content"]
        answers = re.findall(r"<answer (\d)>\n(.*?)\n</answer \1>", text)
        orders.append([answer for _, answer in answers])
        by_quality = {
            level: [place for place, answer in answers if quality[answer] == level] for level in quality.values()
        }
        return chat_endpoint.make_reply("Ranking: " + " > ".join(" = ".join(places) for places in by_quality.values()))

    orders: list[list[str]] = []
    endpoint = chat_endpoint(rank)
    played = [episode(answer, member=index) for index, answer in enumerate(quality)]
    others = [replace(each, group=f"0/{number}") for number in range(1, 6) for each in played]
    scored = judge(endpoint.url, [*played, *others], unit="group")
    assert [each.reward for each in scored] == [1.0, 0.5, 0.5, 0.0] * 6
    assert len(endpoint.bodies) == 6 and len({tuple(order) for order in orders}) > 2
    assert scored[0].metrics["reward/judge"] == 1.0
    judge(endpoint.url, played, unit="group")
    assert orders[-1] in orders[:-1]
    alone = judge(endpoint.url, played[:1], unit="group")
    assert "needs two members" in str(alone[0].error)


@pytest.mark.parametrize(
    "verdict", ["", "Ranking: 1", "Ranking: 1 > 1", "Ranking: 1 > 2 > 3", "1 > 2", "Ranking: 1, 2"]
)
def test_a_ranking_that_leaves_one_out_fails_all(chat_endpoint: Any, episode: Make, verdict: str) -> None:
    endpoint = chat_endpoint(lambda body, number: chat_endpoint.make_reply(verdict))
    scored = judge(endpoint.url, [episode("a"), episode("b", member=1)], unit="group")
    assert all("no ranking of the answers 1 to 2, each once" in str(each.error) for each in scored)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"rubric": {"a": "b"}, "unit": "turn"}, "leave judge.rubric or judge.unit=turn out"),
        ({"rubric": {"a": 3}}, "a criterion is a text, or"),
        ({"rubric": {"a": {"text": "b", "weight": 0}}}, "weight of criterion 'a' is a number above 0"),
        ({"rubric": {"a": {"text": "b", "wieght": 1}}}, "a criterion is a text, or"),
        ({"rubric": {"a:b": "c"}}, "has no colon"),
        ({"rubric": "none.yaml"}, "no file 'none.yaml' for the judge's rubric"),
        ({"rubric": {"a": "b"}, "template": "Rate {reply}"}, r"does not show the \{rubric\}"),
        ({"unit": "turn", "template": "Rate {reply}"}, r"shows no \{turns\}"),
        ({"unit": "group", "score": r"(\d)"}, "format of a single score"),
    ],
)
def test_a_rubric_or_unit_that_cannot_be_judged_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        judge("http://127.0.0.1:1", [], **settings)


def test_a_ranking_of_tasks_that_are_played_once_is_refused_before_the_run() -> None:
    ranks = RewardConfig(judge=JudgeConfig(url="http://127.0.0.1:1", unit="group"))
    with pytest.raises(ConfigError, match="needs two of each task, got num_repeats=1: set it to 2 or more"):
        EvalConfig(env="TextGame-v0", reward=ranks)
    with pytest.raises(ConfigError, match=r"needs two of each task, got eval\.repeats=1"):
        TrainConfig(env="TextGame-v0", reward=ranks)
    assert EvalConfig(env="TextGame-v0", reward=ranks, num_repeats=2).reward == ranks
    assert TrainConfig(env="TextGame-v0", reward=ranks, eval=HeldOutConfig(repeats=2)).reward == ranks

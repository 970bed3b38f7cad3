"""Reward functions are called as they were written, and wrong ones are taught errors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentgym.errors import ConfigError, UnknownName
from agentgym.rewards.function import RewardCall, find_reward
from agentgym.rewards.reward import InvalidReward
from agentgym.trajectory import Trajectory
from agentgym.types import Message, Task, ToolCall

Make = Callable[..., Trajectory]


def by_length(trajectory: Trajectory, task: Task, *, per_turn: float = 1.0, offset: int) -> float:
    return per_turn * len(trajectory.turns) + offset + task.seed


def of_all(trajectories: Sequence[Trajectory], tasks: Sequence[Task]) -> list[float]:
    return [float(len(tasks) * task.seed) for task in tasks]


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> Any:
    return {"score": float(solution_str == ground_truth), "seen": data_source, "index": extra_info["index"]}


def short_score(data_source: str, solution_str: str, ground_truth: str, weight: float = 1.0) -> float:
    return weight * (solution_str == ground_truth)


def batch_score(data_sources: Any, solution_strs: Any, ground_truths: Any, extra_infos: Any) -> list[float]:
    return [float(solution == true) for solution, true in zip(solution_strs, ground_truths, strict=True)]


def test_settings_are_the_keyword_only_parameters(episode: Make) -> None:
    call = RewardCall.of(by_length, {"per_turn": 2.0, "offset": 10})
    assert call([episode("b", replies=["a"])]) == 2.0 * 2 + 10 + 3
    for settings, words in [
        ({}, "needs the settings offset"),
        ({"offset": "x"}, "setting 'offset' .* is int, got 'x'"),
        ({"offset": 1, "per_trun": 1.0}, "did you mean 'per_turn'"),
    ]:
        with pytest.raises(ConfigError, match=words):
            RewardCall.of(by_length, settings)


def test_a_positional_setting_is_refused_with_advice() -> None:
    def scaled(trajectory: Trajectory, task: Task, scale: float = 1.0) -> float:
        return scale

    with pytest.raises(ConfigError, match=r"'scale' of reward .* after a `\*` in scaled\(trajectory"):
        RewardCall.of(scaled, {"scale": 2.0})


def test_a_function_of_trajectories_takes_all_of_them(episode: Make) -> None:
    call = RewardCall.of(of_all, {})
    played = [episode("a"), episode("b")]
    assert call.together
    assert call.values(call(played), 2) == [6.0, 6.0]
    for result in ([1.0], 1.0, "ab", {"a": 1, "b": 2}, None):
        with pytest.raises(InvalidReward, match="of_all"):
            call.values(result, 2)


def test_a_function_with_other_names_is_a_batch_where_that_is_said(episode: Make) -> None:
    def scores(played: list[Trajectory], exercises: list[Task]) -> list[int]:
        return [len(played)] * len(exercises)

    with pytest.raises(ConfigError, match="takes 'played', which no reward is given"):
        RewardCall.of(scores, {})
    assert RewardCall.of(scores, {}, batch=True)([episode("a"), episode("b")]) == [2, 2]
    with pytest.raises(ConfigError, match="takes one trajectory"):
        RewardCall.of(by_length, {"offset": 1}, batch=True)


def test_verls_functions_are_taken_as_they_are(episode: Make) -> None:
    played = episode("42", truth="42", options={"data_source": "openai/gsm8k", "extra_info": {"index": 5}})
    assert RewardCall.of(compute_score, {})([played]) == {"score": 1.0, "seen": "openai/gsm8k", "index": 5}
    assert RewardCall.of(short_score, {"weight": 0.5})([played]) == 0.5
    with pytest.raises(ConfigError, match="did you mean 'weight'"):
        RewardCall.of(short_score, {"wieght": 0.5})
    batch = RewardCall.of(batch_score, {})
    assert batch.together
    assert batch([played, episode("41", truth="42")]) == [1.0, 0.0]


def test_verls_functions_see_the_reasoning_as_it_was_written(episode: Make) -> None:
    solutions: list[str] = []

    def keep(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **more: Any) -> float:
        solutions.append(solution_str)
        return float(more["bonus"])

    assert RewardCall.of(keep, {"bonus": 2})([episode("42", truth="42", reasoning="6 * 7")]) == 2.0
    assert solutions == ["<think>6 * 7</think>42"]


def test_trls_functions_are_taken_as_they_are(episode: Make) -> None:
    def accuracy(completions: list[Any], solution: list[str], **columns: Any) -> list[float]:
        texts = [completion[-1]["content"] for completion in completions]
        assert columns["prompts"][0][-1] == {"role": "user", "content": "Six times seven?"}
        assert [len(ids) for ids in columns["completion_ids"]] == [2, 2]
        assert columns["level"] == [3, 5]
        return [float(text == truth) for text, truth in zip(texts, solution, strict=True)]

    played = [
        episode(reply, truth="42", options={"extra_info": {"level": level}}) for reply, level in (("42", 3), ("41", 5))
    ]
    call = RewardCall.of(accuracy, {})
    assert call.together
    assert call(played) == [1.0, 0.0]


def test_columns_and_settings_of_trls_functions_are_asked_for_by_name(episode: Make) -> None:
    def length(completions: list[Any], target: list[int], weight: float = 1.0) -> list[float]:
        return [
            weight * (len(messages[0]["content"]) == goal) for messages, goal in zip(completions, target, strict=True)
        ]

    played = [episode("abc", options={"extra_info": {"target": 3}})]
    assert RewardCall.of(length, {"weight": 2.0})(played) == [2.0]
    with pytest.raises(ConfigError, match="did you mean 'weight'"):
        RewardCall.of(length, {"wieght": 2.0})
    with pytest.raises(InvalidReward, match="takes a column 'target', and the tasks have: answer, ground_truth"):
        RewardCall.of(length, {})([episode("abc", truth=3)])


def test_a_turn_of_tools_is_part_of_trls_completion(episode: Make) -> None:
    def roles(prompts: list[Any], completions: list[Any]) -> list[str]:
        return [" ".join(message["role"] for message in completion) for completion in completions]

    assert RewardCall.of(roles, {})([episode("b", replies=["a"])]) == ["assistant user assistant"]


def test_a_call_without_a_text_has_an_empty_one_in_trls_completion(episode: Make) -> None:
    def contents(completions: list[Any]) -> list[str]:
        return ["".join(message["content"] for message in completion) for completion in completions]

    played = episode("")
    called = Message("assistant", "", tool_calls=(ToolCall("0", "look", {}),))
    played = replace(played, turns=(replace(played.turns[0], message=called),))
    assert RewardCall.of(contents, {})([played]) == [""]


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ("trajectory", "T"),
        ("task", "K"),
        ("environment, trajectory", "ET"),
        ("task, environment, trajectory", "KET"),
        ("trajectory, /, environment, *, task", "TEK"),
        ("_, task", "TK"),
        ("trajectory, _task", "TK"),
        ("t, k", "TK"),
        ("t, environment", "TE"),
    ],
)
def test_a_function_of_an_episode_is_given_its_parts_by_name(parameters: str, expected: str, episode: Make) -> None:
    scope: dict[str, Any] = {}
    names = [name for name in parameters.replace(",", " ").split() if name not in "/*"]
    exec(f"def parts({parameters}): return ({', '.join(names)},)", scope)
    call, played = RewardCall.of(scope["parts"], {}), episode("a")
    letters = {id(played): "T", id(played.task): "K", id(scope): "E"}
    result = call([played], scope)
    assert isinstance(result, tuple)
    assert "".join(letters[id(part)] for part in result) == expected
    assert call.takes_environment == ("E" in expected)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ("", "takes nothing of an episode"),
        ("trajectory, env", "takes 'env', which no reward is given: write environment"),
        ("trajectory, environmen", "takes 'environmen', .*: did you mean 'environment'"),
        ("a, b, c", "takes 'c'"),
        ("task, k", "takes 'k'"),
        ("prompt, completion", "takes 'prompt'"),
        ("solution_str, ground_truth", "takes 'solution_str'"),
        ("trajectories, environments", "takes 'trajectories'|takes 'environments'"),
        ("trajectory, task, tools", "takes 'tools'"),
    ],
)
def test_other_signatures_are_refused_with_the_right_ones(parameters: str, message: str) -> None:
    scope: dict[str, Any] = {}
    exec(f"def wrong({parameters}): return 1.0", scope)
    with pytest.raises(ConfigError, match=message) as refused:
        RewardCall.of(scope["wrong"], {})
    assert "any of trajectory, task and environment, (trajectories, tasks), verl's" in str(refused.value)


def test_a_class_is_no_reward() -> None:
    with pytest.raises(ConfigError, match="is a function"):
        RewardCall.of(Task, {})


def test_callable_objects_and_partials_are_functions(episode: Make) -> None:
    class Weighted:
        def __call__(self, trajectory: Trajectory, task: Task, *, weight: float = 1.0) -> float:
            return weight

    assert RewardCall.of(Weighted(), {"weight": 3.0})([episode("a")]) == 3.0
    assert RewardCall.of(functools.partial(by_length, offset=1), {})([episode("a")]) == 5.0


def test_a_function_is_found_by_name_file_and_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "my_reward.py"
    path.write_text("def score(trajectory, task):\n    return 1.0\n\nLIMIT = 3\n", encoding="utf-8")
    assert find_reward(f"{path}:score")(None, None) == 1.0
    assert find_reward("agentgym.rewards.scorers.gsm8k:gsm8k") is find_reward("gsm8k")
    for name, words in [
        ("gsm8", "did you mean 'gsm8k'"),
        (f"{path}:scor", "did you mean 'score'"),
        (f"{tmp_path}/none.py:score", "no file"),
        ("no_such_module:score", "no module 'no_such_module' for the reward function"),
    ]:
        with pytest.raises(UnknownName, match=words):
            find_reward(name)
    with pytest.raises(ConfigError, match="is a int, not a reward function"):
        find_reward(f"{path}:LIMIT")

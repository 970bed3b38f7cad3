"""Rewards reach the episodes, or fail them, however they are computed."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from agentgym.cli.options import parse_options
from agentgym.errors import ConfigError, UnknownName
from agentgym.rewards import Reward, RewardConfig, UnusableReward, open_rewards
from agentgym.rewards.judge.config import JudgeConfig
from agentgym.rewards.overlong import OverlongConfig
from agentgym.rewards.remote import RemoteConfig
from agentgym.settings.config_class import config_from_mapping
from agentgym.trajectory import Group, Status, Trajectory
from agentgym.types import Task

Make = Callable[..., Trajectory]


def score(
    function: Callable[..., object] | None, played: Sequence[Trajectory], config: RewardConfig | None = None
) -> list[Trajectory]:
    async def main() -> list[Trajectory]:
        async with open_rewards(config or RewardConfig(), function) as rewards:
            return await rewards.score(played)

    return asyncio.run(main())


def test_a_sync_an_async_and_a_batch_function_score_alike(episode: Make) -> None:
    played = [episode("1"), episode("22", replies=["a"]), episode("333")]

    def sync(trajectory: Trajectory, task: Task) -> int:
        return len(trajectory.turns[-1].message.content)

    async def awaited(trajectory: Trajectory, task: Task) -> Reward:
        await asyncio.sleep(0)
        return Reward(sync(trajectory, task))

    def batch(trajectories: list[Trajectory], tasks: list[Task]) -> list[int]:
        return [sync(trajectory, task) for trajectory, task in zip(trajectories, tasks, strict=True)]

    async def awaited_batch(trajectories: list[Trajectory], tasks: list[Task]) -> list[int]:
        await asyncio.sleep(0)
        return batch(trajectories, tasks)

    results = [score(function, played) for function in (sync, awaited, batch, awaited_batch)]
    assert all(result == results[0] for result in results)
    assert [trajectory.reward for trajectory in results[0]] == [1.0, 2.0, 3.0]
    assert [turn.reward for turn in results[0][1].turns] == [0.0, 2.0]


def test_a_reward_that_raises_fails_its_episode_with_its_traceback(episode: Make) -> None:
    def breaks(trajectory: Trajectory, task: Task) -> float:
        if trajectory.turns[-1].message.content == "b":
            raise ZeroDivisionError("no\nway")
        return 1.0

    good, bad = score(breaks, [episode("a"), episode("b")])
    assert (good.status, good.reward) == (Status.COMPLETED, 1.0)
    assert (bad.status, bad.reward) == (Status.ENV_ERROR, None)
    assert bad.error == "the reward failed: ZeroDivisionError: no way"
    trace = str(bad.info["traceback"])
    assert 'raise ZeroDivisionError("no\\nway")' in trace
    assert trace.splitlines()[1].count(__file__) == 1, "the function's own frame is the first"


@pytest.mark.parametrize(
    "value",
    [math.nan, -math.inf, "0.5", None, [1.0], Reward(1.0, turns=(0.5, 0.5)), {"value": None}, {"score": None}, 10**400],
)
def test_what_is_no_reward_fails_its_episode_alone(episode: Make, value: object) -> None:
    alone = score(lambda trajectory, task: value, [episode("a")])[0]
    assert (alone.status, alone.reward) == (Status.ENV_ERROR, None)
    assert alone.error is not None and alone.error.startswith("the reward failed: InvalidReward: ")
    both = score(lambda trajectories, tasks: [value, 0.5], [episode("a"), episode("b")])
    assert [trajectory.status for trajectory in both] == [Status.ENV_ERROR, Status.COMPLETED]


@pytest.mark.parametrize(
    "error", [SystemExit(1), RecursionError(), KeyError("x")], ids=lambda error: type(error).__name__
)
def test_what_raises_while_it_gives_its_rewards_fails_the_episodes(episode: Make, error: BaseException) -> None:
    def lazily(trajectories: list[Trajectory], tasks: list[Task]) -> Iterator[float]:
        yield 1.0
        raise error

    async def later(trajectory: Trajectory, task: Task) -> float:
        raise error

    for function in (lazily, later):
        scored = score(function, [episode("a"), episode("b", member=1)])
        assert [trajectory.status for trajectory in scored] == [Status.ENV_ERROR] * 2
        assert f"the reward failed: {type(error).__name__}" in str(scored[0].error)


def test_a_batch_of_another_number_fails_all_of_it(episode: Make) -> None:
    scored = score(lambda trajectories, tasks: [1.0], [episode("a"), episode("b")])
    assert [trajectory.status for trajectory in scored] == [Status.ENV_ERROR] * 2
    assert scored[0].error is not None and "1 rewards for 2 episodes" in scored[0].error


def test_a_failed_episode_is_not_scored(episode: Make) -> None:
    seen: list[int] = []

    def count(trajectories: list[Trajectory], tasks: list[Task]) -> list[float]:
        seen.append(len(trajectories))
        return [1.0] * len(trajectories)

    played = [episode("a", status=status) for status in Status]
    scored = score(count, played)
    assert seen == [2]
    assert [trajectory.reward for trajectory in scored] == [1.0, 1.0, *[None] * (len(Status) - 2)]
    assert scored[2:] == played[2:]
    assert score(lambda trajectory, task: 1.0, played)[2:] == played[2:]
    assert score(count, played[2:]) == played[2:]
    assert seen == [2]


@pytest.mark.long
def test_a_hang_fails_its_episode_and_holds_up_no_other(episode: Make) -> None:
    released = threading.Event()

    def hangs(trajectory: Trajectory, task: Task) -> float:
        if trajectory.turns[-1].message.content == "slow":
            released.wait(60)
        return 1.0

    async def sleeps(trajectory: Trajectory, task: Task) -> float:
        if trajectory.turns[-1].message.content == "slow":
            await asyncio.sleep(60)
        return 1.0

    try:
        for function in (hangs, sleeps):
            config = RewardConfig(timeout_s=1.5, concurrency=1)
            slow, fast = score(function, [episode("slow"), episode("fast")], config)
            assert (slow.status, fast.reward) == (Status.ENV_ERROR, 1.0)
            assert slow.error is not None and "no reward within 1.5 s" in slow.error
    finally:
        released.set()


def test_a_time_out_that_the_function_raises_is_its_own_error(episode: Make) -> None:
    async def gives_up(trajectory: Trajectory, task: Task) -> float:
        raise TimeoutError("the database is slow")

    (failed,) = score(gives_up, [episode("a")])
    assert failed.error == "the reward failed: TimeoutError: the database is slow"


def test_no_more_calls_run_at_once_than_are_allowed(episode: Make) -> None:
    running: list[int] = []
    most: list[int] = []

    async def count(trajectory: Trajectory, task: Task) -> float:
        running.append(1)
        most.append(len(running))
        await asyncio.sleep(0.01)
        running.pop()
        return 1.0

    score(count, [episode(str(index)) for index in range(9)], RewardConfig(concurrency=3))
    assert max(most) == 3


def test_groups_are_scored_in_their_order(episode: Make) -> None:
    members = tuple(episode(text, member=index) for index, text in enumerate("abc"))
    group = Group("0/0", members[0].task, members)

    async def main() -> list[Group]:
        async with open_rewards(RewardConfig(), lambda trajectories, tasks: range(len(tasks))) as rewards:
            assert rewards.together
            return await rewards.score_groups([group])

    (scored,) = asyncio.run(main())
    assert [trajectory.reward for trajectory in scored.trajectories] == [0.0, 1.0, 2.0]
    assert (scored.id, scored.task) == (group.id, group.task)


def test_without_a_reward_the_environments_stays(episode: Make) -> None:
    played = episode("b", replies=["a"])
    (same,) = score(None, [played])
    assert ([turn.reward for turn in same.turns], same.reward) == ([0.25, 0.25], 0.5)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"timeout_s": 0}, "timeout_s must be above 0"),
        ({"concurrency": 0}, "concurrency must be at least 1"),
        ({"function": "f1", "remote": RemoteConfig(url="http://127.0.0.1:1")}, "one reward, got function and remote"),
        ({"function": "f1", "manner": "judge"}, "manner=judge needs a judge, got a function"),
        ({"judge": JudgeConfig(url="http://127.0.0.1:1"), "manner": "pool"}, "manner=pool needs a function"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        RewardConfig(**settings)


@pytest.mark.parametrize(
    ("config", "function", "words"),
    [
        (RewardConfig(manner="pool"), None, "needs a function"),
        (RewardConfig(settings={"method": "strict"}), None, "needs a function"),
        (RewardConfig(manner="pool"), lambda trajectory, task: 1.0, "by name"),
        (RewardConfig(function="f1"), lambda trajectory, task: 1.0, "a function in Python and the function"),
        (RewardConfig(function="gsm8k", settings={"metod": "strict"}), None, "did you mean 'method'"),
        (
            RewardConfig(function="gsm8k", settings={"method": "lenient"}),
            None,
            "is 'strict' or 'flexible', got 'lenient'",
        ),
        (RewardConfig(judge=JudgeConfig(url="http://127.0.0.1:1"), settings={"a": 1}), None, "judge has its own"),
    ],
)
def test_what_can_give_no_reward_is_refused_before_any_episode(
    config: RewardConfig, function: Callable[..., object] | None, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        score(function, [], config)


def test_a_reward_that_no_episode_can_get_ends_the_run(episode: Make) -> None:
    for manner in ("plain", "pool"):
        with pytest.raises(UnusableReward, match="needs the setting pattern or tags"):
            score(None, [episode("a")], RewardConfig(function="format", manner=manner, concurrency=1))


def test_an_unknown_scorer_names_the_nearest() -> None:
    with pytest.raises(UnknownName, match="did you mean 'exact_match'"):
        score(None, [], RewardConfig(function="exact_macth"))


def test_the_command_line_reads_all_of_the_settings() -> None:
    words = "--function gsm8k --settings method=flexible score=2 --overlong.buffer-tokens 4 --overlong.max-tokens 16"
    config = parse_options(RewardConfig, words.split(), prog="agentgym train")
    overlong = OverlongConfig(buffer_tokens=4, max_tokens=16)
    assert config == RewardConfig(function="gsm8k", settings={"method": "flexible", "score": 2}, overlong=overlong)
    settings = {"function": "gsm8k", "settings": {"method": "flexible", "score": 2}}
    assert config_from_mapping(RewardConfig, {**settings, "overlong": {"buffer_tokens": 4, "max_tokens": 16}}) == config
    url = "http://127.0.0.1:8000/v1"
    judged = parse_options(RewardConfig, ["--judge.url", url, "--judge.endpoint.model", "m"], prog="agentgym train")
    assert (judged.judge.url, judged.judge.endpoint.model) == (url, "m")

"""A reward on another machine gives the numbers that it gives in this process, and its failures are named."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest

from agentgym.errors import ConfigError
from agentgym.rewards import Reward, RewardConfig, UnusableReward, open_rewards
from agentgym.rewards.remote import RemoteConfig
from agentgym.rewards.server import RewardServer
from agentgym.rollout.record.episodes_file import trajectory_to_json
from agentgym.trajectory import Status, Trajectory
from agentgym.types import Task

Make = Callable[..., Trajectory]
TOKEN = "a-token-of-sixteen-and-more"


def score(trajectory: Trajectory, task: Task) -> Reward:
    text = trajectory.turns[-1].message.content
    if text == "bad":
        raise ValueError("no number in it")
    if text == "unusable":
        raise UnusableReward("the library is missing")
    turns = tuple(float(len(turn.message.content)) for turn in trajectory.turns)
    return Reward(
        sum(turns), {"length": turns[-1]}, turns, success=text == str(task.options["ground_truth"]), info={"n": 1}
    )


async def scored(played: Trajectory, token: str | None = None, **remote: Any) -> Trajectory:
    """The episode with the reward of a server."""
    async with open_rewards(RewardConfig(), score) as served, RewardServer(served, token=token) as server:
        config = RewardConfig(remote=RemoteConfig(url=f"{server.url}/", **remote))
        async with open_rewards(config) as rewards:
            (trajectory,) = await rewards.score([played])
        return trajectory


async def scored_here(played: Trajectory) -> Trajectory:
    async with open_rewards(RewardConfig(), score) as rewards:
        (trajectory,) = await rewards.score([played])
    return trajectory


@pytest.mark.parametrize("turn_tokens", [2, 3000])
def test_a_reward_of_a_server_is_that_of_this_process(episode: Make, turn_tokens: int) -> None:
    played = episode("42", replies=["go", "on"], truth="42", turn_tokens=turn_tokens)
    result = asyncio.run(scored(played))
    assert result == asyncio.run(scored_here(played)) and result != played
    assert (result.reward, result.success, result.metrics["reward/length"]) == (6.0, True, 2.0)


def test_an_episode_that_cannot_be_scored_fails_with_the_reason(episode: Make) -> None:
    result = asyncio.run(scored(episode("bad")))
    assert result.status is Status.ENV_ERROR and "ValueError: no number in it" in (result.error or "")


def test_a_reward_that_cannot_be_computed_at_all_ends_the_run(episode: Make) -> None:
    with pytest.raises(ConfigError, match="the library is missing"):
        asyncio.run(scored(episode("unusable")))


def test_a_token_is_demanded(episode: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="a token is needed"):
        asyncio.run(scored(episode("42", truth="42"), TOKEN))
    monkeypatch.setenv("AGENTGYM_TOKEN", TOKEN)
    result = asyncio.run(scored(episode("42", truth="42"), TOKEN, api_key_env="AGENTGYM_TOKEN"))
    assert result.success


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"trajectory": 5}, "TypeError: an object was wanted, got int"),
        ({"trajectory": {"task": {}}}, "the trajectory is not one"),
        ({"settings": {"a": 1}}, "leave reward.settings out"),
        ({}, "an object was wanted"),
    ],
)
def test_what_is_no_episode_is_refused_and_the_server_lives_on(episode: Make, body: Any, words: str) -> None:
    async def talk() -> None:
        async with (
            open_rewards(RewardConfig(), score) as rewards,
            RewardServer(rewards) as server,
            aiohttp.ClientSession() as session,
        ):
            async with session.post(server.url, json=body) as answer:
                assert answer.status == 400 and words in (await answer.json())["error"]["message"]
            whole = {"trajectory": trajectory_to_json(episode("ab", truth="ab"))}
            async with session.post(server.url, json=whole) as answer:
                assert (await answer.json())["value"] == 2.0
            async with session.get(f"{server.url}/health") as answer:
                assert await answer.json() == {"status": "ok", "scored": 1, "failed": 0}

    asyncio.run(talk())


def test_a_reward_that_compares_episodes_is_not_served() -> None:
    def compare(trajectories: Any, tasks: Any) -> list[float]:
        return [0.0 for _ in trajectories]

    async def serve(config: RewardConfig, function: Any) -> None:
        async with open_rewards(config, function) as rewards:
            RewardServer(rewards)

    with pytest.raises(ConfigError, match="compares the episodes of a step"):
        asyncio.run(serve(RewardConfig(manner="batch"), compare))
    with pytest.raises(ConfigError, match="leave environment out"):
        asyncio.run(serve(RewardConfig(), lambda trajectory, environment: 1.0))


@pytest.mark.long
def test_the_command_scores_until_it_is_ended(episode: Make) -> None:
    words = [sys.executable, "-m", "agentgym", "reward-server", "--port", "0", "--reward.function", "exact_match"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        match = re.search(r"http://\S+", first)
        assert match is not None, first

        async def ask() -> Trajectory:
            config = RewardConfig(remote=RemoteConfig(url=f"{match.group()}/"))
            async with open_rewards(config) as rewards:
                return (await rewards.score([episode("42", truth="42")]))[0]

        assert asyncio.run(ask()).reward == 1.0
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read()
        assert process.wait(30) == 0 and "ended after 1 episodes" in rest
    done = subprocess.run(words[:4], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and "name the reward: --reward.function NAME" in done.stderr

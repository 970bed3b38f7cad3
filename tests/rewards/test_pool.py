"""Reward functions in processes: hangs are killed, memory is bounded, and what dies is replaced."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from agentgym.errors import ConfigError, UnknownName
from agentgym.rewards import RewardConfig, Rewards, open_rewards
from agentgym.trajectory import Status, Trajectory

Make = Callable[..., Trajectory]

REWARDS = """
import asyncio, os, subprocess, sys, time
from agentgym.rewards import Reward

def by_word(trajectory, task, *, bonus: float = 0.0):
    print("a print is no answer")
    word = trajectory.turns[-1].message.content
    if word == "hang":
        subprocess.Popen(["sleep", "600"])
        while True: pass
    if word == "spin":
        print("spinning", flush=True)
        while True: pass
    if word == "eat": return len(bytearray(8 << 30))
    if word == "die": os._exit(3)
    if word == "raise": raise LookupError("no such word")
    if word == "nan": return float("nan")
    if word == "forge": os.write(1, b"x" * 100); sys.stdin.read()
    if word == "exit": sys.exit()
    if word == "whole": return Reward(1.0, {"part": 0.5}, turns=(1.0,), success=True, info={"said": "yes"})
    return os.getpid() + bonus

async def later(trajectory, task):
    await asyncio.sleep(0)
    return 2.0

def lengths(trajectories, tasks):
    return [len(one.turns) for one in trajectories]
"""


@pytest.fixture
def written(tmp_path: Path) -> str:
    (tmp_path / "pooled.py").write_text(REWARDS, encoding="utf-8")
    return f"{tmp_path / 'pooled.py'}"


def run(config: RewardConfig, talk: Callable[[Rewards], Any]) -> Any:
    async def main() -> Any:
        async with open_rewards(config) as rewards:
            return await talk(rewards)

    result = asyncio.run(main())
    assert not [
        process
        for process in psutil.Process().children(recursive=True)
        if "pool_process" in " ".join(process.cmdline())
    ]
    return result


def pool(function: str, **settings: Any) -> RewardConfig:
    return RewardConfig(function=function, manner="pool", **{"concurrency": 1, "timeout_s": 30.0, **settings})


def test_it_runs_in_another_process_with_its_settings(written: str, episode: Make) -> None:
    scored = run(
        pool(f"{written}:by_word", settings={"bonus": 0.5}), lambda rewards: rewards.score([episode("a"), episode("b")])
    )
    first, second = (episode.reward for episode in scored)
    assert first == second and first % 1 == 0.5 and first != os.getpid() + 0.5


@pytest.mark.long
def test_async_batch_and_whole_rewards_pass_the_border(written: str, episode: Make) -> None:
    played = [episode("a"), episode("b", replies=["c"])]
    assert [episode.reward for episode in run(pool(f"{written}:later"), lambda rewards: rewards.score(played))] == [
        2.0,
        2.0,
    ]
    together = run(pool(f"{written}:lengths"), lambda rewards: rewards.score(played))
    assert [episode.reward for episode in together] == [1.0, 2.0]
    (whole,) = run(pool(f"{written}:by_word"), lambda rewards: rewards.score([episode("whole")]))
    assert (whole.reward, whole.success, whole.metrics["reward/part"]) == (1.0, True, 0.5)
    assert whole.info["reward"] == {"said": "yes"}


@pytest.mark.long
@pytest.mark.parametrize(
    ("word", "words", "survives"),
    [
        ("raise", "LookupError: no such word", True),
        ("nan", "InvalidReward: a reward is a finite number, at most 1e+100, got nan", True),
        ("exit", "SystemExit", True),
        ("eat", "MemoryError", False),
        ("die", "ended with exit code 3", False),
    ],
)
def test_an_error_is_reported_and_the_next_episode_is_scored(
    written: str, episode: Make, word: str, words: str, survives: bool
) -> None:
    first, second, third = run(
        pool(f"{written}:by_word", memory_mb=512),
        lambda rewards: rewards.score([episode("a"), episode(word), episode("b")]),
    )
    assert first.reward is not None and third.reward is not None
    assert (first.reward == third.reward) == survives
    assert second.status is Status.ENV_ERROR and words in second.error
    assert ("Traceback" in second.info.get("traceback", "")) == (word != "die")


def test_what_a_function_prints_and_reads_touches_no_reward(written: str, episode: Make) -> None:
    played = [episode("a"), episode("forge"), episode("b")]
    scored = run(pool(f"{written}:by_word"), lambda rewards: rewards.score(played))
    assert len({episode.reward for episode in scored}) == 1


@pytest.mark.long
def test_a_hang_is_killed_with_all_it_started(written: str, episode: Make) -> None:
    async def talk(rewards: Rewards) -> list[Trajectory]:
        return await rewards.score([episode("hang"), episode("a")])

    hung, next_one = run(pool(f"{written}:by_word", timeout_s=3.0), talk)
    assert hung.status is Status.ENV_ERROR and "no answer within 3 s" in hung.error
    assert next_one.status is Status.COMPLETED
    left = [
        process for process in psutil.process_iter(["cmdline", "ppid"]) if process.info["cmdline"] == ["sleep", "600"]
    ]
    assert not [process for process in left if process.info["ppid"] in (1, os.getpid())]


@pytest.mark.long
def test_a_process_that_hangs_when_its_parent_is_killed_ends_by_itself(written: str) -> None:
    code = f"""
import asyncio
from agentgym.rewards import RewardConfig, open_rewards
from agentgym.trajectory import *
from agentgym.types import Message, Task

def played(word):
    row = Row((TokenSpan((1,), Source.PROMPT), TokenSpan((2,), Source.POLICY, (-1.0,), (0,))))
    turns = (Turn(Message("assistant", word), 0.0),)
    return Trajectory(Task("A-v0", 0), "0", 0, (row,), turns, Status.COMPLETED, StopReason.TERMINATED)

async def main():
    config = RewardConfig(function={f"{written}:by_word"!r}, manner="pool", concurrency=1, timeout_s=1.0)
    async with open_rewards(config) as rewards:
        (scored,) = await rewards.score([played("pid")])
        print(int(scored.reward), flush=True)
        await rewards.score([played("spin")])

asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as parent:
        assert parent.stdout is not None and parent.stderr is not None
        process = psutil.Process(int(parent.stdout.readline()))
        while b"spinning" not in parent.stderr.readline():
            assert parent.poll() is None
        parent.kill()
    _, alive = psutil.wait_procs([process], timeout=60)
    assert not alive


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        ("{}:by_wrd", UnknownName, "did you mean 'by_word'"),
        ("{}.none.py:by_word", UnknownName, "no file"),
        ("{}:REWARDS", UnknownName, "has no reward function 'REWARDS'"),
        ("{}:Reward", ConfigError, "is a function"),
    ],
)
def test_what_does_not_load_is_reported_before_any_episode(
    written: str, name: str, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        run(pool(name.format(written)), lambda rewards: rewards.score([]))


def test_a_broken_file_is_reported_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import no_such_library\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"does not load: ModuleNotFoundError(.|\n)*broken\.py"):
        run(pool(f"{tmp_path / 'broken.py'}:score"), lambda rewards: rewards.score([]))

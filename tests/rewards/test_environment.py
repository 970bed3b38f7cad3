"""A reward that looks into the environment gets it open, wherever the environment's code runs."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from agentgym.chat_templates.families import renderer_for
from agentgym.chat_templates.protocol import Renderer
from agentgym.engines.scripted import ScriptedEngine
from agentgym.errors import ConfigError
from agentgym.rewards import RewardConfig, open_rewards
from agentgym.rollout import RolloutLoop, Sampler, SamplerConfig
from agentgym.trajectory import Status, Trajectory
from agentgym.types import Task

FILE = '''
"""Environments that end at the first reply, and rewards that look into them."""

import asyncio
import threading
import time

from agentgym.envs import TextEnv


class Inline(TextEnv):
    runs_inline = True

    def reset(self, *, seed=None, options=None):
        self.code, self.is_open = 7, True
        return "Say something.", {}

    def step(self, action):
        self.thread = threading.get_ident()
        return "Done.", 0.5, True, False, {}

    def close(self):
        self.is_open = False


class Threaded(Inline):
    runs_inline = False


class Async(Inline):
    runs_inline = False

    async def areset(self, *, seed=None, options=None):
        return Inline.reset(self)

    async def astep(self, action):
        self.loop = asyncio.get_running_loop()
        return Inline.step(self, action)


def code_of(environment, task, *, factor: float = 1.0):
    assert environment.is_open
    return factor * environment.code + task.seed


def same_thread(environment):
    return threading.get_ident() == environment.thread


async def same_loop(environment):
    await asyncio.sleep(0)
    return asyncio.get_running_loop() is environment.loop


def broken(environment, trajectory):
    raise ValueError(f"the code is {environment.code}")


def hangs(environment):
    time.sleep(3)


def of_others(environment):
    return None


def together(trajectories, tasks):
    return [1.0] * len(tasks)
'''


@pytest.fixture(scope="module")
def renderer(tokenizer_folder: Any) -> Renderer:
    return renderer_for(tokenizer_folder)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "vaults.py").write_text(FILE)
    return tmp_path / "vaults.py"


def play(renderer: Renderer, env: str, function: Any, *, num_processes: int = 0, **settings: Any) -> Trajectory:
    engine = ScriptedEngine(lambda *_: (65, *renderer.stop_ids[:1]), context_window=1 << 16)
    config = RewardConfig(function=None if callable(function) else function, **settings)

    async def main() -> Trajectory:
        async with open_rewards(config, function if callable(function) else None) as rewards:
            limits = SamplerConfig(env_processes=num_processes, max_failure_rate=1.0)
            sampler = Sampler(rewards.loop(RolloutLoop(engine, renderer)), config=limits)
            try:
                (group,) = await sampler.sample([Task(env, seed=3)], group_size=1)
            finally:
                sampler.close()
            return group.trajectories[0]

    return asyncio.run(main())


@pytest.mark.parametrize(("kind", "num_processes"), [("Inline", 0), ("Threaded", 0), ("Async", 0), ("Threaded", 1)])
def test_its_state_is_read_before_it_is_closed(kind: str, num_processes: int, renderer: Renderer, file: Path) -> None:
    settings = {"settings": {"factor": 2.0}, "num_processes": num_processes}
    scored = play(renderer, f"{file}:{kind}", f"{file}:code_of", **settings)
    assert (scored.error, scored.reward) == (None, 2.0 * 7 + 3)
    assert scored.info["environment_reward"] == 0.5


@pytest.mark.parametrize(("kind", "function"), [("Threaded", "same_thread"), ("Async", "same_loop")])
def test_it_runs_where_the_environment_runs(kind: str, function: str, renderer: Renderer, file: Path) -> None:
    assert play(renderer, f"{file}:{kind}", f"{file}:{function}").reward == 1.0


@pytest.mark.parametrize("num_processes", [0, 1])
def test_its_error_fails_the_episode_with_its_traceback(num_processes: int, renderer: Renderer, file: Path) -> None:
    scored = play(renderer, f"{file}:Threaded", f"{file}:broken", num_processes=num_processes)
    assert scored.status is Status.ENV_ERROR
    assert scored.error == "the reward failed: ValueError: the code is 7"
    assert 'raise ValueError(f"the code' in str(scored.info["traceback"])


@pytest.mark.parametrize("num_processes", [0, 1])
def test_its_none_does_not_apply_beside_others_and_fails_the_episode_alone(
    num_processes: int, renderer: Renderer, file: Path
) -> None:
    names = (f"{file}:code_of", f"{file}:of_others")
    beside = play(renderer, f"{file}:Threaded", names, num_processes=num_processes)
    assert (beside.error, beside.reward, beside.metrics["reward/code_of"]) == (None, 10.0, 10.0)
    alone = play(renderer, f"{file}:Threaded", names[1], num_processes=num_processes)
    assert "a reward is a number, got NoneType None" in str(alone.error)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["Inline", "Threaded"])
def test_a_hang_fails_the_episode(kind: str, renderer: Renderer, file: Path) -> None:
    started = time.monotonic()
    scored = play(renderer, f"{file}:{kind}", f"{file}:hangs", timeout_s=0.3)
    assert "it gave no reward within 0.3 s (reward.timeout_s)" in str(scored.error)
    assert time.monotonic() - started < 10


def test_an_object_of_this_process_is_refused_where_the_environment_is_in_another(
    renderer: Renderer, file: Path
) -> None:
    with pytest.raises(ConfigError, match=r"env_processes .* give the function by name, 'path/to/file\.py:name'"):
        play(renderer, f"{file}:Threaded", lambda environment: 1.0, num_processes=1)


def test_it_is_refused_where_episodes_are_played_on_other_machines(renderer: Renderer, file: Path) -> None:
    loop = RolloutLoop(ScriptedEngine(lambda *_: (65,)), renderer)
    loop.has_environment = False

    async def main() -> None:
        async with open_rewards(RewardConfig(function=f"{file}:code_of")) as rewards:
            with pytest.raises(ConfigError, match="which is on another machine"):
                rewards.loop(loop)

    asyncio.run(main())


def test_without_an_open_environment_such_a_reward_is_refused(file: Path) -> None:
    async def refusal(config: RewardConfig, *played: Trajectory) -> str:
        with pytest.raises(ConfigError) as refused:
            async with open_rewards(config) as rewards:
                await rewards.score(played)
        return str(refused.value)

    name = f"{file}:code_of"
    assert "no process of a pool has" in asyncio.run(refusal(RewardConfig(function=name, manner="pool")))
    both = RewardConfig(function=(name, f"{file}:together"))
    assert "is closed when" in asyncio.run(refusal(both))


def test_recorded_episodes_have_no_environment(file: Path, episode: Any) -> None:
    async def main() -> None:
        async with open_rewards(RewardConfig(function=f"{file}:code_of")) as rewards:
            await rewards.score([episode("a")])

    with pytest.raises(ConfigError, match="recorded episodes have none any more"):
        asyncio.run(main())

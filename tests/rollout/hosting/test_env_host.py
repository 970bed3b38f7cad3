"""Environments of every make are played: foreign, wrapped, slow to build, bound to an event loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import gymnasium
import pytest

from agentgym.chat_templates.protocol import Renderer
from agentgym.engines.scripted import ScriptedEngine
from agentgym.envs.base.spaces import Text
from agentgym.envs.base.text_env import Info, StepResult, TextEnv
from agentgym.rollout import Episode, Limits, RolloutLoop, Sampler, SamplerConfig
from agentgym.rollout.hosting.env_host import Env, make_task_env
from agentgym.trajectory import Status, StopReason, Trajectory
from agentgym.types import Task

Raw = Callable[[str], list[int]]


def play(renderer: Renderer, raw: Raw, make: Callable[[], Env], limits: Limits | None = None) -> Trajectory:
    """One episode through a sampler, in which every reply is `hi`."""
    reply = raw("hi<|im_end|>")
    loop = RolloutLoop(ScriptedEngine(lambda *_: reply), renderer, limits)
    sampler = Sampler(loop, lambda task: make(), SamplerConfig(max_failure_rate=1.0))
    (trajectory,) = asyncio.run(sampler.run([Episode(Task("Mine-v0", 5))]))
    sampler.close()
    return trajectory


class Foreign(gymnasium.Env[str, str]):
    """A text environment that knows nothing of TextEnv."""

    observation_space = Text()
    action_space = Text()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.count = 0
        return "start", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.count += 1
        return f"heard {action}", 1.0, self.count == 2, False, {"metrics": {"success": True}}


def test_an_environment_without_our_base_class_is_played(renderer: Renderer, raw: Raw) -> None:
    trajectory = play(renderer, raw, Foreign)
    assert (trajectory.status, trajectory.reward, trajectory.success) == (Status.COMPLETED, 2.0, True)
    assert trajectory.turns[-1].observation == "heard hi"


GARBAGE = [
    "two",
    None,
    ("", 1.0, True, False),
    ("", "high", False, False, {}),
    (b"", 1.0, False, False, {}),
    ("", 1.0, False, False, None),
]


@pytest.mark.parametrize("garbage", GARBAGE)
def test_what_is_no_step_result_is_named(renderer: Renderer, raw: Raw, garbage: object) -> None:
    class Garbled(Foreign):
        def step(self, action: str) -> Any:
            return garbage

    trajectory = play(renderer, raw, Garbled)
    assert trajectory.status is Status.ENV_ERROR
    assert any(word in str(trajectory.error) for word in ("step() returns", "finite number", "is a str", "is a dict"))


class Endless(TextEnv):
    """Never ends."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, Info]:
        return "go", {}

    def step(self, action: str) -> StepResult:
        return "on", 0.0, False, False, {}


def test_a_gymnasium_wrapper_is_honoured(renderer: Renderer, raw: Raw) -> None:
    trajectory = play(renderer, raw, lambda: gymnasium.wrappers.TimeLimit(Endless(), 3))
    assert (trajectory.stop_reason, len(trajectory.turns)) == (StopReason.ENV_TRUNCATED, 3)


def test_a_model_is_shown_the_observation_of_a_wrapper(renderer: Renderer, raw: Raw) -> None:
    def make() -> Env:
        return gymnasium.wrappers.TimeLimit(gymnasium.wrappers.TransformObservation(Endless(), str.upper, None), 3)

    trajectory = play(renderer, raw, make)
    assert [turn.observation for turn in trajectory.turns] == ["ON", "ON", "ON"]
    prompts = renderer.decode(trajectory.rows[0].ids.tolist())
    assert "GO" in prompts and prompts.count("ON") == 2 and "on" not in prompts


def test_a_constructor_that_hangs_or_fails_is_a_status(renderer: Renderer, raw: Raw) -> None:
    gate = threading.Event()

    def hang() -> Env:
        gate.wait(20)
        return Endless()

    def fail() -> Env:
        raise OSError("no such world")

    trajectory = play(renderer, raw, hang, Limits(env_step_s=0.1))
    gate.set()
    assert trajectory.status is Status.TIMEOUT
    assert play(renderer, raw, fail).error == "OSError: no such world"


class Bound(TextEnv):
    """Needs the same event loop from its reset to its close."""

    loops: list[asyncio.AbstractEventLoop]

    async def areset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, Info]:
        self.loops = [asyncio.get_running_loop()]
        return "go", {}

    async def astep(self, action: str) -> StepResult:
        self.loops.append(asyncio.get_running_loop())
        return "on", 0.0, self.turns == 2, False, {}

    async def aclose(self) -> None:
        self.loops.append(asyncio.get_running_loop())
        await super().aclose()


def test_an_async_environment_stays_on_one_loop(renderer: Renderer, raw: Raw) -> None:
    envs = [Bound()]
    assert play(renderer, raw, lambda: envs[0]).status is Status.COMPLETED
    assert len(envs[0].loops) == 4
    assert len(set(envs[0].loops)) == 1


def test_a_queue_behind_a_busy_thread_is_no_time_out(renderer: Renderer, raw: Raw) -> None:
    class Slow(Endless):
        def step(self, action: str) -> StepResult:
            time.sleep(0.1)
            return "", 1.0, True, False, {}

    reply = raw("hi<|im_end|>")
    loop = RolloutLoop(ScriptedEngine(lambda *_: reply), renderer, Limits(env_step_s=0.25))
    sampler = Sampler(loop, lambda task: Slow(), SamplerConfig(env_threads=1))
    (group,) = asyncio.run(sampler.sample([Task("Slow-v0", 0)], 6))
    sampler.close()
    assert {trajectory.status for trajectory in group.trajectories} == {Status.COMPLETED}


def test_the_default_environments_are_those_of_the_task() -> None:
    env = make_task_env(Task("TextGame-v0", 0, kwargs={"level": 1}))
    assert env.reset(seed=0)[0]
    env.close()

"""Whatever of an environment meets a service that is down, its episode has no reward."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import gymnasium
import pytest
from gymnasium.spaces import Discrete

from agentgym.chat_templates.protocol import Renderer
from agentgym.engines.openai.endpoint import EndpointFailure
from agentgym.engines.scripted import ScriptedEngine
from agentgym.envs import TextEnv, ToolEnv, make_env
from agentgym.rollout import RolloutLoop, Sampler, SamplerConfig
from agentgym.tools import tool
from agentgym.trajectory import Status, Trajectory
from agentgym.types import Task


class Shop(ToolEnv):
    """A shop whose parts fail by name."""

    broken = ""
    max_turns = 3

    def start(self, options: dict[str, Any]) -> str:
        self.use("start")
        return "A shop."

    def use(self, part: str) -> None:
        if self.broken == part:
            raise ConnectionError("the shop is down")

    def on_message(self, text: str) -> str:
        self.use("on_message")
        return "Yes?"

    @tool
    def buy(self) -> str:
        """Buys, on the environment's thread."""
        self.use("buy")
        return "bought"

    @tool
    async def ask(self) -> str:
        """Asks."""
        self.use("ask")
        return "asked"


class Simulated(Shop):
    """Its user is a model behind an endpoint."""

    @tool
    def buy(self) -> str:
        """Tells the user."""
        raise EndpointFailure("the endpoint is down")


class Foreign(gymnasium.Env[int, int]):
    """An environment of Gymnasium that asks a server."""

    observation_space = Discrete(2)
    action_space = Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        super().reset(seed=seed)
        return 0, {}

    def step(self, action: int) -> Any:
        raise ConnectionError("the shop is down")


def played(renderer: Renderer, raw: Callable[[str], list[int]], make: Callable[[], TextEnv], reply: str) -> Trajectory:
    async def play() -> Trajectory:
        engine = ScriptedEngine(lambda session, prompt_ids, sampling: raw(reply))
        sampler = Sampler(RolloutLoop(engine, renderer), lambda task: make(), SamplerConfig(max_failure_rate=1.0))
        try:
            (group,) = await sampler.sample([Task("Shop-v0", 3)], 1)
        finally:
            sampler.close()
            await engine.close()
        return group.trajectories[0]

    return asyncio.run(play())


def call(name: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {{}}}}\n</tool_call><|im_end|>'


@pytest.mark.parametrize("part", ["start", "on_message", "buy", "ask"])
def test_each_part_of_an_environment_whose_service_is_down_leaves_no_reward(
    renderer: Renderer, raw: Callable[[str], list[int]], part: str
) -> None:
    def make() -> Shop:
        shop = Shop()
        shop.broken = part
        return shop

    reply = "Hello.<|im_end|>" if part in ("start", "on_message") else call(part)
    trajectory = played(renderer, raw, make, reply)
    assert (trajectory.status, trajectory.reward) == (Status.ENV_ERROR, None)
    assert "the shop is down" in str(trajectory.error)
    assert trajectory.info.get("fault_tool") == (part if part in ("buy", "ask") else None)
    trace = str(trajectory.info["traceback"])
    assert trace.startswith("Traceback") and trace.endswith("ConnectionError: the shop is down")
    assert "agentgym/tools/calling/runner.py" not in trace


def test_a_user_simulator_whose_endpoint_is_down_leaves_no_reward(
    renderer: Renderer, raw: Callable[[str], list[int]]
) -> None:
    trajectory = played(renderer, raw, Simulated, call("buy"))
    assert (trajectory.status, trajectory.reward) == (Status.ENV_ERROR, None)
    assert "tool 'buy' raised EndpointFailure" in str(trajectory.error)


@pytest.mark.parametrize("reply", ["1<|im_end|>", call("act").replace("{}", '{"action": "1"}')])
def test_a_gymnasium_environment_whose_service_is_down_leaves_no_reward(
    renderer: Renderer, raw: Callable[[str], list[int]], reply: str
) -> None:
    if "Foreign-v0" not in gymnasium.registry:
        gymnasium.register(id="Foreign-v0", entry_point=Foreign)
    trajectory = played(renderer, raw, lambda: make_env("text/Foreign-v0"), reply)
    assert (trajectory.status, trajectory.reward) == (Status.ENV_ERROR, None)
    assert "the shop is down" in str(trajectory.error)

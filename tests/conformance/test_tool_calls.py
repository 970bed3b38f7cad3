"""Cases 2, 9 and 10: bad calls beside good ones, calls of different latency, tools that hang."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest

from agentgym.envs import Action, ToolEnv
from agentgym.tools import tool
from agentgym.types import AnyCall, MalformedCall, Message, ToolCall


class Office(ToolEnv):
    """Tools of every kind."""

    def start(self, options: dict[str, Any]) -> str:
        self.log: list[str] = []
        self.gate = threading.Event()
        return "Go."

    def release(self) -> None:
        self.gate.set()

    @tool
    def quick(self) -> str:
        """Answers at once."""
        self.log.append("quick")
        return "quick"

    @tool
    async def slow(self, seconds: float) -> str:
        """Answers later."""
        await asyncio.sleep(seconds)
        self.log.append("slow")
        return f"slept {seconds}"

    @tool(timeout_s=60)
    async def after(self, other: str) -> str:
        """Answers after another call."""
        while other not in self.log:
            self.gate.set()
            await asyncio.sleep(0.001)
        self.log.append(f"after {other}")
        return self.log[-1]

    @tool(timeout_s=60)
    def block(self) -> str:
        """Blocks its thread until a call that is made later runs too."""
        self.gate.wait()
        self.log.append("block")
        return "blocked"

    @tool(timeout_s=0.1)
    def hang(self) -> str:
        """Never answers."""
        self.gate.wait()
        return "late"

    @tool(timeout_s=0.1)
    async def hang_async(self) -> str:
        """Never answers."""
        await asyncio.Event().wait()
        return "late"


def play(*calls: AnyCall) -> tuple[Office, tuple[Any, ...]]:
    async def main() -> tuple[Office, tuple[Any, ...]]:
        env = Office()
        await env.areset(seed=0)
        result = await env.astep(Action.from_message(Message("assistant", "", tool_calls=calls)))
        await env.aclose()
        return env, result

    return asyncio.run(main())


def test_case_2_an_error_for_each_bad_call_while_the_good_one_runs() -> None:
    calls = (
        MalformedCall("a", '{"name": "quick"', "not JSON"),
        ToolCall("b", "quick", {}),
        ToolCall("c", "quik", {}),
        ToolCall("d", "slow", {"seconds": "1"}),
    )
    env, (_, _, terminated, truncated, info) = play(*calls)
    assert env.log == ["quick"]
    assert [result.error for result in info["tool_results"]] == ["malformed", None, "unknown_tool", "invalid_arguments"]
    assert [message.tool_call_id for message in info["messages"]] == ["a", "b", "c", "d"]
    assert (terminated, truncated) == (False, False)


def test_case_9_calls_of_different_latency_all_run_and_are_answered_in_call_order() -> None:
    calls = (
        ToolCall("a", "after", {"other": "after block"}),
        ToolCall("b", "block", {}),
        ToolCall("c", "quick", {}),
        ToolCall("d", "after", {"other": "block"}),
    )
    env, (observation, *_, info) = play(*calls)  # one after the other, the first would wait forever
    assert [result.call_id for result in info["tool_results"]] == ["a", "b", "c", "d"]
    assert observation == "after after block\nblocked\nquick\nafter block"
    assert [entry for entry in env.log if entry != "quick"] == ["block", "after block", "after after block"]
    assert env.log.count("quick") == 1 and env.log.index("block") < env.log.index("quick")


@pytest.mark.parametrize("name", ["hang", "hang_async"])
def test_case_10_a_hanging_tool_is_answered_and_leaves_nothing_running(name: str) -> None:
    before = threading.active_count()
    env, (*_, info) = play(ToolCall("a", name, {}), ToolCall("b", "quick", {}))
    assert [result.error for result in info["tool_results"]] == ["timeout", None]
    assert "0.1 s" in info["tool_results"][0].content
    assert env.log == ["quick"]
    deadline = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= before


def test_case_10_every_tool_has_a_time_limit_by_default() -> None:
    env = Office()
    assert all(entry.timeout_s is not None for entry in env.tools.values())

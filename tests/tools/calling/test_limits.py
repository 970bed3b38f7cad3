"""What a tool is held to: calls at once, calls in a second, and answers that need no second call."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from virtual_time import run_in_virtual_time

from agentgym.envs import ToolEnv
from agentgym.errors import ConfigError
from agentgym.registry import Registry
from agentgym.tools import Tool, ToolRunner, register_tool, tool
from agentgym.tools.calling.answers import KeptAnswers
from agentgym.types import ToolCall, ToolResult


def calls(name: str, *arguments: dict[str, Any]) -> list[ToolCall]:
    return [ToolCall(f"c{number}", name, values) for number, values in enumerate(arguments)]


async def answered(runner: ToolRunner, calls: list[ToolCall]) -> list[str]:
    return [result.content for result in await runner.run(calls)]


# ---- calls in a second


def test_calls_begin_evenly_apart_over_all_episodes() -> None:
    begun: list[float] = []

    @tool(rate_limit_per_s=4)
    async def ask() -> str:
        """Asks a service."""
        begun.append(asyncio.get_running_loop().time())
        return "x"

    async def play() -> None:
        episodes = [ToolRunner([ask]) for _ in range(3)]
        await asyncio.gather(*(answered(runner, calls("ask", {}, {})) for runner in episodes))
        await asyncio.sleep(10)
        await answered(episodes[0], calls("ask", {}))

    run_in_virtual_time(play())
    assert begun == [0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 11.25]


def test_a_plain_function_that_runs_inline_is_held_too() -> None:
    begun: list[float] = []

    @tool(rate_limit_per_s=0.5, blocking=False)
    def ask() -> str:
        """Asks a service."""
        begun.append(asyncio.get_running_loop().time())
        return "x"

    run_in_virtual_time(answered(ToolRunner([ask], inline=True), calls("ask", {}, {}, {})))
    assert begun == [0.0, 2.0, 4.0]


def test_the_wait_is_no_part_of_the_time_out_and_a_slot_that_is_given_up_is_free() -> None:
    @tool(rate_limit_per_s=0.1, timeout_s=1, max_concurrency=1)
    async def ask() -> str:
        """Asks a service."""
        return "x"

    async def play() -> list[str]:
        runner = ToolRunner([ask])
        first = await answered(runner, calls("ask", {}))
        waiting = asyncio.create_task(answered(runner, calls("ask", {})))
        await asyncio.sleep(1)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        return first + await answered(runner, calls("ask", {}))

    assert run_in_virtual_time(play()) == ["x", "x"]


@pytest.mark.parametrize("rate", [0, -1.0, float("nan"), float("inf")])
def test_a_rate_is_positive(rate: float) -> None:
    with pytest.raises(ConfigError, match="rate_limit_per_s must be above 0"):

        @tool(rate_limit_per_s=rate)
        def ask() -> str:
            """Asks."""
            return ""


# ---- answers that are kept


def square(**settings: Any) -> tuple[list[Any], Tool]:
    """A pure tool, and what it was run with."""
    from agentgym.tools import as_tool

    seen: list[Any] = []

    @tool(pure=True, **settings)
    def squared(number: float) -> str:
        """Squares."""
        seen.append(number)
        if number < 0:
            raise ValueError("not below 0")
        return str(number * number)

    return seen, as_tool(squared)


@pytest.mark.parametrize("settings", [{}, {"blocking": False}])
def test_a_pure_tool_is_run_once_for_equal_arguments(settings: dict[str, Any]) -> None:
    seen, tool = square(**settings)
    first, second = ToolRunner([tool]), ToolRunner([tool])
    assert asyncio.run(answered(first, calls("squared", {"number": 3}))) == ["9"]
    results = asyncio.run(second.run(calls("squared", {"number": 3}, {"number": 4})))
    assert results == (ToolResult("c0", "squared", "9"), ToolResult("c1", "squared", "16"))
    assert seen == [3, 4]
    for runner in (first, second):
        runner.close()


def test_arguments_are_equal_where_their_json_is() -> None:
    seen, tool = square(blocking=False)
    runner = ToolRunner([tool])
    asyncio.run(answered(runner, calls("squared", {"number": 1}, {"number": 1.0}, {"number": 1})))
    assert [repr(value) for value in seen] == ["1", "1.0"]


def test_an_error_is_not_kept_nor_is_what_could_not_be_run() -> None:
    seen, tool = square(blocking=False)
    runner = ToolRunner([tool])
    for _ in range(2):
        results = runner.run_directly(calls("squared", {"number": -1}, {"number": "x"}))
        assert [result.error for result in results] == ["tool_error", "invalid_arguments"]
    assert seen == [-1, -1]


def test_a_cached_answer_is_cut_to_the_limit_of_each_environment() -> None:
    @tool(pure=True, blocking=False)
    def long() -> str:
        """Says much."""
        return "x" * 50

    short, whole = ToolRunner([long], max_result_chars=10), ToolRunner([long])
    assert short.run_directly(calls("long", {}))[0].content == "x" * 10 + "\n[40 more characters were cut]"
    assert whole.run_directly(calls("long", {}))[0].content == "x" * 50


def test_a_method_s_answers_are_kept_over_episodes_and_none_is_given_after_the_end() -> None:
    class Clock(ToolEnv):
        runs_inline = True
        ran = 0

        def start(self, options: dict[str, Any]) -> str:
            return "go"

        @tool(pure=True)
        def double(self, number: int) -> int:
            """Doubles."""
            type(self).ran += 1
            return 2 * number

        @tool
        def stop(self) -> str:
            """Ends."""
            self.end(success=True)
            return "over"

    for _ in range(2):
        env = Clock()
        env.reset(seed=0)
        assert env.step('{"name": "double", "arguments": {"number": 2}}')[0] == "4"
        after = '<tool_call>{"name": "stop"}</tool_call>'
        after += '<tool_call>{"name": "double", "arguments": {"number": 2}}</tool_call>'
        assert env.step(after)[0] == "over\nnot run: the episode is over"
        env.close()
    assert Clock.ran == 1


def test_answers_of_two_objects_registered_methods_are_kept_apart() -> None:
    class Shop:
        def __init__(self, price: int) -> None:
            self._price = price

        def price(self, item: str) -> int:
            return self._price

    schema = {"description": "", "parameters": {"type": "object", "properties": {"item": {"type": "string"}}}}
    names = ("dear", "cheap")
    tools = [
        register_tool({**schema, "name": name}, Shop(price).price, registry=Registry("tool", ""), pure=True)
        for name, price in zip(names, (9, 1), strict=True)
    ]
    calls = [ToolCall(name, name, {"item": "tea"}) for name in (*names, *names)]
    runner = ToolRunner(tools, inline=True)
    assert [result.content for result in runner.run_directly(calls)] == ["9", "1", "9", "1"]


def test_arguments_too_deep_to_be_compared_are_run_each_time() -> None:
    @tool(pure=True, blocking=False)
    def depth(lists: list[Any]) -> str:
        """Measures."""
        return "deep"

    lists: list[Any] = []
    for _ in range(5000):
        lists = [lists]
    assert ToolRunner([depth]).run_directly(calls("depth", {"lists": lists}))[0].content == "deep"


def test_what_is_kept_is_bounded() -> None:
    few = KeptAnswers(max_answers=2)
    for number in (1, 2):
        few.keep({"n": number}, str(number))
    few.get({"n": 1})
    few.keep({"n": 3}, "3")
    assert [few.get({"n": number}) for number in (1, 2, 3)] == ["1", None, "3"]
    small = KeptAnswers(max_chars=100)
    small.keep({}, "x" * 200)
    assert small.get({}) is None
    small.keep({}, "x" * 90)
    small.keep({"n": 1}, "y" * 20)
    assert (small.get({}), small.get({"n": 1})) == (None, "y" * 20)

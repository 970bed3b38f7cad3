"""Every call is answered, in order, whatever the model or a tool does."""

from __future__ import annotations

import asyncio
import errno
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentgym.errors import EnvironmentFault, SandboxError
from agentgym.registry import Registry
from agentgym.tools import ToolRunner, register_tool, run_sync, tool
from agentgym.types import AnyCall, MalformedCall, ToolCall, ToolResult


def answers(runner: ToolRunner, *calls: AnyCall) -> tuple[ToolResult, ...]:
    return asyncio.run(runner.run(calls))


def call(name: str, number: int = 0, **arguments: Any) -> ToolCall:
    return ToolCall(f"call_{number}", name, arguments)


@tool
def echo(text: str) -> str:
    """Says it again."""
    return text


@pytest.mark.parametrize("inline", [True, False])
def test_what_cannot_be_run_is_answered_with_its_kind(inline: bool) -> None:
    runner = ToolRunner([echo], inline=inline)
    results = answers(
        runner,
        MalformedCall("a", "{", "not JSON"),
        ToolCall("b", "ecko", {"text": "x"}),
        ToolCall("c", "echo", {"text": 3}),
        ToolCall("d", "echo", {"text": "x"}),
    )
    assert [result.call_id for result in results] == ["a", "b", "c", "d"]
    assert [result.error for result in results] == ["malformed", "unknown_tool", "invalid_arguments", None]
    assert "did you mean 'echo'" in results[1].content
    assert results[3].content == "x"


def raising(error: BaseException) -> Callable[[], str]:
    def fail() -> str:
        raise error

    return fail


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no")


MISTAKES = [ValueError("bad"), KeyError("k"), ZeroDivisionError(), SyntaxError("no"), RecursionError(), re.error("no")]
DEFECTS = [AttributeError("x"), TypeError("y"), RuntimeError("500"), AssertionError(), StopIteration(), Unprintable()]
OUTSIDE = [ConnectionError("down"), TimeoutError("late"), OSError(errno.ENOSPC, "full"), MemoryError(), SystemExit(1)]


@pytest.mark.parametrize("error", MISTAKES, ids=repr)
@pytest.mark.parametrize("inline", [True, False])
def test_an_error_over_the_input_is_answered(error: BaseException, inline: bool) -> None:
    (result,) = answers(ToolRunner([raising(error)], inline=inline), call("fail"))
    assert result.error == "tool_error"
    assert type(error).__name__ in result.content


@pytest.mark.parametrize("error", [*DEFECTS, *OUTSIDE], ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("inline", [True, False])
def test_what_no_input_explains_is_a_fault_with_its_place(error: BaseException, inline: bool) -> None:
    kind = type(error).__name__
    line = raising.__code__.co_firstlineno + 2
    with pytest.raises(
        EnvironmentFault, match=rf"tool 'fail' raised {kind} \(.*test_runner.py, line {line}\)"
    ) as caught:
        answers(ToolRunner([raising(error)], inline=inline), call("fail"))
    assert caught.value.tool == "fail"
    assert caught.value.__cause__ is error
    lenient = tool(on_error="answer")(raising(error))
    (result,) = answers(ToolRunner([lenient], inline=inline), call("fail"))
    assert result.error == "tool_error"


@pytest.mark.parametrize("error", [ConnectionError("down"), SystemExit(1), asyncio.CancelledError()], ids=repr)
def test_a_fault_of_an_async_tool_is_one_too(error: BaseException) -> None:
    async def fail() -> str:
        raise error

    with pytest.raises(EnvironmentFault, match=f"tool 'fail' raised {type(error).__name__}"):
        answers(ToolRunner([fail]), call("fail"))


def test_an_async_tool_that_raises_over_its_input_is_answered() -> None:
    async def fail() -> str:
        raise ValueError("bad")

    (result,) = answers(ToolRunner([fail]), call("fail"))
    assert result.error == "tool_error"


@pytest.mark.parametrize("inline", [True, False])
def test_a_fault_of_the_environment_is_not_told_to_the_model(inline: bool) -> None:
    with pytest.raises(EnvironmentFault, match="disk") as caught:
        answers(ToolRunner([raising(EnvironmentFault("disk gone"))], inline=inline), call("fail"))
    assert caught.value.tool == "fail"
    with pytest.raises(EnvironmentFault, match=r"SandboxError .*: no container"):
        answers(ToolRunner([raising(SandboxError("no container"))], inline=inline), call("fail"))
    strict = tool(on_error="raise")(raising(ValueError("odd")))
    with pytest.raises(EnvironmentFault, match=r"ValueError .*: odd"):
        answers(ToolRunner([strict], inline=inline), call("fail"))


@pytest.mark.parametrize("setting", [{"on_timeout": "raise"}, {"on_error": "raise"}], ids=str)
def test_a_tool_that_waits_for_a_service_and_hangs_is_a_fault(setting: dict[str, Any]) -> None:
    release = threading.Event()

    @tool(timeout_s=0.02, **setting)
    def ask() -> str:
        """Asks."""
        release.wait()
        return "late"

    @tool(timeout_s=0.02, **setting)
    async def ask_async() -> str:
        """Asks."""
        await asyncio.Event().wait()
        return "late"

    for each in (ask, ask_async):
        with pytest.raises(EnvironmentFault, match=r"gave no answer within 0.02 s \(timeout_s\)") as caught:
            answers(ToolRunner([each]), call(each.__name__))
        assert caught.value.tool == each.__name__
    release.set()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "done"),
        ({"a": [1, "é"]}, '{"a": [1, "é"]}'),
        (3, "3"),
        (True, "true"),
        ({"b", "a"}, '["a", "b"]'),
        (ToolResult("a", "b", "c"), '{"call_id": "a", "name": "b", "content": "c", "error": null}'),
    ],
)
def test_what_a_tool_returns_becomes_text(value: object, text: str) -> None:
    def give() -> object:
        return value

    (result,) = answers(ToolRunner([give], inline=True), call("give"))
    assert (result.content, result.error) == (text, None)


LOOP: list[Any] = []
LOOP.append(LOOP)


@pytest.mark.parametrize("value", [object(), b"bytes", LOOP, {object(): 1}], ids=["object", "bytes", "loop", "key"])
def test_what_has_no_text_is_a_fault_of_the_tool(value: object) -> None:
    def give() -> object:
        return value

    with pytest.raises(EnvironmentFault, match=f"tool 'give' returned a {type(value).__name__}, which is neither text"):
        answers(ToolRunner([give], inline=True), call("give"))


def test_a_flood_is_cut_with_a_note() -> None:
    def flood() -> str:
        return "x" * 1_000_000

    (result,) = answers(ToolRunner([flood], inline=True, max_result_chars=100), call("flood"))
    assert result.content == "x" * 100 + "\n[999900 more characters were cut]"


def test_a_hanging_tool_is_left_behind_and_its_turn_goes_on() -> None:
    release = threading.Event()

    @tool(timeout_s=0.05)
    def hang() -> str:
        """Waits."""
        release.wait()
        return "late"

    runner = ToolRunner([hang, echo])
    results = answers(runner, call("hang", 0), call("echo", 1, text="x"))  # while the first still hangs
    assert [result.error for result in results] == ["timeout", None]
    assert "agentgym-tool-hang" in {thread.name for thread in threading.enumerate()}
    release.set()


def test_an_async_tool_that_ignores_cancellation_is_left_behind() -> None:
    async def main() -> None:
        done = asyncio.Event()

        @tool(timeout_s=0.05)
        async def stubborn() -> str:
            """Does not give up."""
            while not done.is_set():
                try:
                    await done.wait()
                except asyncio.CancelledError:
                    continue
            return "late"

        runner = ToolRunner([stubborn])
        (result,) = await runner.run([call("stubborn")])
        assert result.error == "timeout"
        assert len(asyncio.all_tasks()) == 2, "it still runs, beside this"
        done.set()
        await asyncio.sleep(0.01)

    asyncio.run(main())


def test_an_async_tool_past_its_time_is_cancelled() -> None:
    ended = []

    @tool(timeout_s=0.05)
    async def slow() -> str:
        """Sleeps."""
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(True)
        return ""

    runner = ToolRunner([slow])
    (result,) = answers(runner, call("slow"))
    assert (result.error, ended) == ("timeout", [True])


def test_a_tool_runs_at_most_so_often_at_once() -> None:
    running, most = [0], [0]

    @tool(max_concurrency=2)
    async def work(item: int) -> int:
        """Works."""
        running[0] += 1
        most[0] = max(most[0], running[0])
        await asyncio.sleep(0.01)
        running[0] -= 1
        return item

    async def main() -> list[tuple[ToolResult, ...]]:
        runs = (ToolRunner([work]).run([call("work", n, item=n) for n in range(4)]) for _ in range(3))
        return await asyncio.gather(*runs)

    for results in asyncio.run(main()):
        assert [result.content for result in results] == ["0", "1", "2", "3"]
    assert most[0] == 2


def test_a_cancelled_turn_stops_its_calls() -> None:
    ended = []

    async def slow() -> str:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(True)
        return ""

    async def main() -> None:
        turn = asyncio.ensure_future(ToolRunner([slow]).run([call("slow", 0), call("slow", 1)]))
        await asyncio.sleep(0.02)
        turn.cancel()
        with pytest.raises(asyncio.CancelledError):
            await turn

    asyncio.run(main())
    assert ended == [True, True]


def test_run_sync_works_inside_a_running_loop_and_inside_itself() -> None:
    async def inner() -> int:
        return 1

    async def outer() -> int:
        return run_sync(inner()) + 1

    async def main() -> int:
        return run_sync(outer()) + 1

    assert asyncio.run(main()) == 3


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
CALLS = st.lists(
    st.one_of(
        st.builds(MalformedCall, st.text(max_size=3), st.text(), st.text()),
        st.builds(
            ToolCall,
            st.text(max_size=3),
            st.sampled_from(["echo", "shout", "nothing"]) | st.text(),
            st.dictionaries(st.sampled_from(["text", "times", "x"]), JSON_VALUES),
        ),
    ),
    max_size=6,
)


@tool
def shout(text: str, times: int = 1) -> str:
    """Shouts."""
    return text.upper() * min(times, 10)


@given(CALLS)
def test_every_call_id_is_answered_in_order(calls: list[AnyCall]) -> None:
    results = ToolRunner([echo, shout], inline=True).run_directly(calls)
    assert [result.call_id for result in results] == [each.id for each in calls]
    assert all(isinstance(result.content, str) for result in results)


def test_a_lone_surrogate_never_reaches_the_conversation() -> None:
    def fail(text: str) -> str:
        raise ValueError(text)

    runner = ToolRunner([echo, fail], inline=True)
    for result in runner.run_directly([call("echo", text="a\ud800é"), call("fail", text="a\ud800é")]):
        assert result.content.endswith("a?é")


def test_an_argument_that_only_the_schema_accepts_is_an_error_result() -> None:
    schema = {"name": "shop", "parameters": {"type": "object", "properties": {"item": {"type": "string"}}}}
    shop = register_tool(schema, lambda item: f"one {item}", registry=Registry("tool"))
    for arguments in ({"item": "lamp", "colour": "red"}, {}):
        (result,) = answers(ToolRunner([shop], inline=True), call("shop", **arguments))
        assert result.error == "tool_error"
        assert "TypeError" in result.content

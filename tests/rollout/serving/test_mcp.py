"""The environment's tools over MCP: a call is a step, whose reward goes to the reply that made the call."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from contextlib import AsyncExitStack
from typing import Any

import pytest

from agentgym.envs.base.tool_env import ToolEnv
from agentgym.rollout.limits import Limits
from agentgym.rollout.serving.env_steps import tool_of
from agentgym.tools import tool
from agentgym.trajectory import Status, StopReason

CALL = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'
HTTP = {"Accept": "application/json, text/event-stream"}


class Safe(ToolEnv):
    """A safe that opens at 7."""

    runs_inline = True
    system_prompt = "Open the safe."
    max_turns = 9

    def start(self, options: dict[str, Any]) -> str:
        self.num_dialled = 0
        return "It has a dial."

    @tool
    def look(self) -> str:
        """Looks at the safe."""
        self.reward += 0.125
        return f"dialled {self.num_dialled} times"

    @tool
    def dial(self, digit: int, speed: float = 1.0) -> str:
        """Dials a digit."""
        self.num_dialled += 1
        if digit == 7:
            self.end(success=True, reward=1.0)
        self.reward += digit / 64
        return f"heard {digit}"

    @tool(on_error="raise")
    def kick(self) -> str:
        """Kicks the safe."""
        raise RuntimeError("it broke")


def offered(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


async def rpc(caller: Any, method: str, params: object = None, *, number: object = 1, **headers: str) -> Any:
    body = {"jsonrpc": "2.0", "id": number, "method": method, "params": params or {}}
    async with caller.http.post(f"{caller.root}/mcp", json=body, headers={**HTTP, **headers}) as answer:
        return await answer.json()


async def call(caller: Any, name: str, number: object = 1, *, session: str = "", **arguments: object) -> Any:
    headers = {"Mcp-Session-Id": session} if session else {}
    answer = await rpc(caller, "tools/call", {"name": name, "arguments": arguments}, number=number, **headers)
    return answer["result"]


def rewards(trajectory: Any) -> list[float]:
    return [turn.reward for turn in trajectory.turns]


def clients(stack: AsyncExitStack, url: str, transport: str) -> Any:
    """The official client, entered by the test, over HTTP or over the bridge."""
    from mcp import Client, StdioServerParameters  # here, and not above: collected by every process, and costly
    from mcp.client.stdio import stdio_client

    if transport == "http":
        return Client(url)
    arguments = ["-m", "agentgym", "tools", "mcp", url]
    return Client(stdio_client(StdioServerParameters(command=sys.executable, args=arguments, env=dict(os.environ))))


@pytest.mark.parametrize("transport", ["http", "stdio"])
def test_an_agent_with_the_official_client_alone_has_a_reward(table: Any, transport: str) -> None:
    async def agent(caller: Any) -> None:
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(clients(stack, f"{caller.root}/mcp", transport))
            assert client.server_info.name == "agentgym"
            assert client.instructions == "Open the safe.\n\nIt has a dial."
            await client.session.send_ping()
            tools = {each.name: each for each in (await client.list_tools()).tools}
            assert list(tools) == ["look", "dial", "kick"]
            assert tools["dial"].input_schema["required"] == ["digit"] and tools["look"].description
            wrong = await client.call_tool("dial", {"digit": "seven"})
            assert wrong.is_error and "invalid arguments for dial" in wrong.content[0].text
            looked = await client.call_tool("look", {})
            assert not looked.is_error and looked.content[0].text == "dialled 0 times"
            opened = await client.call_tool("dial", {"digit": 7})
            assert opened.content[0].text == "heard 7"
            late = await client.call_tool("look", {})
            assert late.is_error and "is over (terminated)" in late.content[0].text

    trajectory = table.play(agent, lambda prompt: "never asked", Safe())
    assert trajectory.status is Status.COMPLETED and trajectory.reward == pytest.approx(0.125 + 1 + 7 / 64)
    assert trajectory.rows == () and trajectory.num_trained_tokens == 0 and not trajectory.has_ids
    assert [turn.message.tool_calls[0].name for turn in trajectory.turns] == ["dial", "look", "dial"]
    assert trajectory.turns[1].tool_results[0].content == "dialled 0 times" and trajectory.success


@pytest.mark.parametrize("name", ["dial", "mcp__safe__dial", "safe_dial"])
def test_a_call_rewards_the_reply_that_made_it_under_any_name_and_in_any_branch(table: Any, name: str) -> None:
    digits = {"main": 1, "side": 2, "third": 7}

    def say(prompt: str) -> str:
        word = next(word for word in digits if f"{word} task" in prompt)
        return "fine" if "heard" in prompt else CALL % (name, json.dumps({"digit": digits[word]}))

    async def agent(caller: Any) -> None:
        threads = {word: [user(f"{word} task")] for word in digits}
        asks = [caller.chat(messages, tools=[offered(name)]) for messages in threads.values()]
        for messages, completion in zip(threads.values(), await asyncio.gather(*asks), strict=True):
            messages.append(completion["choices"][0]["message"])
        for word in ("side", "main", "third"):
            result = await call(caller, "dial", word, digit=float(digits[word]))
            sent_call = threads[word][1]["tool_calls"][0]["id"]
            threads[word].append({"role": "tool", "tool_call_id": sent_call, "content": result["content"][0]["text"]})
            if word == "main":
                await caller.chat(threads[word], tools=[offered(name)])

    trajectory = table.play(agent, say, Safe())
    earned = {row.messages[0].content: 0.0 for row in trajectory.rows}
    turns = iter(trajectory.turns)
    for row in trajectory.rows:
        for span in row.spans:
            if span.source == "policy":
                turn = next(turns)
                earned[row.messages[0].content] += turn.reward
                if turn.message.tool_calls:
                    assert turn.tool_results or turn.observation, "the answer is not in the record"
    assert earned == {"main task": 1 / 64, "side task": 2 / 64, "third task": 1 + 7 / 64}
    assert trajectory.status is Status.COMPLETED and len(trajectory.rows) == 3


def test_equal_calls_join_in_order_and_others_reward_the_last_reply(table: Any) -> None:
    twice = "\n".join([CALL % ("look", "{}")] * 2)

    async def agent(caller: Any) -> None:
        await call(caller, "dial", 0, digit=1)  # before any reply
        messages = [user("go")]
        for number in range(2):
            reply = (await caller.chat(messages, tools=[offered("look")]))["choices"][0]["message"]
            messages.append(reply)
            for position, sent_call in enumerate(reply["tool_calls"]):
                result = await call(caller, "look", f"{number}-{position}")
                text = result["content"][0]["text"]
                messages.append({"role": "tool", "tool_call_id": sent_call["id"], "content": text})
        await call(caller, "dial", 9, digit=2)
        status, answer = await caller.send("/step", {})
        assert status == 400 and answer["error"]["code"] == "no_reply", "its calls were run already"
        await caller.finish()

    trajectory = table.play(agent, lambda prompt: twice, Safe())
    assert rewards(trajectory) == [0.25, 0.25 + 3 / 64]
    assert trajectory.status is Status.TRUNCATED and trajectory.stop_reason is StopReason.AGENT


def test_an_agent_may_leave_before_it_ran_all_calls_of_a_reply(table: Any) -> None:
    calls = "\n".join(CALL % ("dial", json.dumps({"digit": digit})) for digit in (1, 2, 3))

    async def agent(caller: Any) -> None:
        await caller.chat([user("go")], tools=[offered("dial")])
        for digit in (3, 1):
            await call(caller, "dial", digit, digit=digit)
        await caller.finish()

    trajectory = table.play(agent, lambda prompt: calls, Safe())
    (turn,) = trajectory.turns
    assert [result.call_id for result in turn.tool_results] == ["call_0", "call_2"] and turn.reward == 4 / 64


def test_a_call_that_is_sent_again_is_one_step_and_calls_run_one_after_the_other(table: Any) -> None:
    class Slow(Safe):
        runs_inline = False
        active = 0

        @tool
        async def look(self) -> str:
            """Looks slowly."""
            Slow.active += 1
            assert Slow.active == 1
            await asyncio.sleep(0.02)
            Slow.active -= 1
            self.reward += 0.125
            return "looked"

    async def agent(caller: Any) -> None:
        async with caller.http.post(
            f"{caller.root}/mcp",
            json={"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": {"protocolVersion": "2025-06-18"}},
        ) as answer:
            session = answer.headers["Mcp-Session-Id"]
            assert (await answer.json())["result"]["protocolVersion"] == "2025-06-18"
        same = [call(caller, "look", 5, session=session) for _ in range(3)]
        await asyncio.gather(*same, *(call(caller, "look", each, session=session) for each in "ab"))
        await caller.finish()

    trajectory = table.play(agent, lambda prompt: "never", Slow())
    assert rewards(trajectory) == [0.125] * 3 and trajectory.status is Status.TRUNCATED


def test_an_environment_that_raises_ends_the_episode_and_the_call_has_an_answer(table: Any) -> None:
    async def agent(caller: Any) -> None:
        await caller.chat([user("go")], tools=[offered("kick")])
        result = await call(caller, "kick")
        assert result["isError"] and "is over (env_error)" in result["content"][0]["text"]
        assert (await call(caller, "look"))["isError"]

    trajectory = table.play(agent, lambda prompt: CALL % ("kick", "{}"), Safe())
    assert trajectory.status is Status.ENV_ERROR and trajectory.reward is None and "it broke" in trajectory.error


def test_an_agent_that_only_calls_tools_ends_at_max_turns(table: Any) -> None:
    async def agent(caller: Any) -> None:
        results = [await call(caller, "look", number) for number in range(4)]
        assert [result["isError"] for result in results] == [False, False, False, True]

    trajectory = table.play(agent, lambda prompt: "never", Safe(), limits=Limits(max_turns=3))
    assert trajectory.stop_reason is StopReason.MAX_TURNS and len(trajectory.turns) == 3


def test_a_call_in_flight_when_the_episode_is_cancelled_has_an_answer(table: Any) -> None:
    class Stuck(Safe):
        runs_inline = False

        @tool
        async def look(self) -> str:
            """Never answers."""
            await asyncio.sleep(60)
            return ""

    async def agent(caller: Any) -> None:
        result = await call(caller, "look")
        assert result["isError"] and "is over (deadline)" in result["content"][0]["text"]

    trajectory = table.play(agent, lambda prompt: "never", Stuck(), limits=Limits(deadline_s=0.3))
    assert trajectory.status is Status.TIMEOUT and trajectory.reward is None


def test_each_bad_message_is_answered_in_json_rpc_and_the_episode_goes_on(
    table: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "agentgym")

    async def send(caller: Any, data: object, method: str = "POST", path: str = "", **headers: str) -> tuple[int, Any]:
        body = data if isinstance(data, bytes) else json.dumps(data).encode()
        headers = {"Content-Type": "application/json", **headers} if method == "POST" else headers
        url = path or f"{caller.root}/mcp"
        async with caller.http.request(method, url, data=body if method == "POST" else None, headers=headers) as answer:
            return answer.status, json.loads(await answer.read() or "null")

    def request(method: object = "ping", **fields: object) -> dict[str, object]:
        return {"jsonrpc": "2.0", "id": 1, "method": method, **fields}

    async def agent(caller: Any) -> None:
        key = {"Authorization": f"Bearer {caller.opening['episode']}"}
        root = caller.url
        for data, status, code in (
            (b"{", 400, -32700),
            (b"7", 400, -32700),
            ({}, 400, -32600),
            ({"jsonrpc": "1.0", "id": 1, "method": "ping"}, 400, -32600),
            (request(7), 200, -32600),
            ({**request(), "id": None}, 400, -32600),
            ({**request(), "id": True}, 400, -32600),
            (request(params=[1]), 200, -32600),
            (request("resources/list"), 200, -32601),
            (request("server/discover"), 200, -32601),
            (request("tools/call", params={"name": "fly"}), 200, -32602),
            (request("tools/call", params={"name": "look", "arguments": []}), 200, -32602),
            (request("tools/call", params={"arguments": {}}), 200, -32602),
        ):
            caplog.clear()
            answer = await send(caller, data)
            assert (answer[0], answer[1]["error"]["code"]) == (status, code), (data, answer)
            assert len(caplog.records) == 1, [record.getMessage() for record in caplog.records]
        assert await send(caller, {"jsonrpc": "2.0", "method": "notifications/cancelled"}) == (202, None)
        assert await send(caller, {"jsonrpc": "2.0", "id": 4, "result": {}}) == (202, None)
        status, batch = await send(caller, [request(), {"jsonrpc": "2.0", "method": "x"}, 3])
        results = [each["result"] if "result" in each else each["error"]["code"] for each in batch]
        assert status == 200 and results == [{}, -32600]
        assert (await send(caller, b"", "GET"))[0] == 405
        assert (await send(caller, request(), path=f"{root}/mcp", **key))[0] == 200
        for status, answer in (
            await send(caller, request(), path=f"{root}/mcp"),
            await send(caller, request(), path=f"{root}/episodes/none/mcp"),
            await send(caller, request(), Origin="http://elsewhere.example"),
            await send(caller, request(), **{"Content-Type": "text/plain"}),
            await send(caller, request(), **{"MCP-Protocol-Version": "1999-01-01"}),
            await send(caller, request(), **{"Mcp-Session-Id": "gone"}),
        ):
            assert status in (400, 401, 403, 404, 415) and answer["error"]["code"] == -32600, (status, answer)
        await caller.finish()

    trajectory = table.play(agent, lambda prompt: "never", Safe())
    assert trajectory.status is Status.UNPLAYED and trajectory.turns == ()


def test_a_session_ends_with_delete_and_the_episode_does_not(table: Any) -> None:
    async def agent(caller: Any) -> None:
        body = {"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": {"protocolVersion": "2099-01-01"}}
        url = f"{caller.root}/mcp"
        sessions = []
        for _ in range(2):
            async with caller.http.post(url, json=body) as answer:
                assert (await answer.json())["result"]["protocolVersion"] == "2025-11-25"
                sessions.append({"Mcp-Session-Id": answer.headers["Mcp-Session-Id"]})
        async with caller.http.delete(url, headers=sessions[0]) as answer:
            assert answer.status == 204
        ping = {"jsonrpc": "2.0", "id": 1, "method": "ping"}
        statuses = []
        for headers in sessions:
            async with caller.http.post(url, json=ping, headers=headers) as answer:
                statuses.append(answer.status)
        assert statuses == [404, 200]
        await call(caller, "dial", digit=7)

    assert table.play(agent, lambda prompt: "never", Safe()).status is Status.COMPLETED


@pytest.mark.parametrize(
    ("name", "tools", "inner"),
    [
        ("look", {"look"}, "look"),
        ("mcp__game__look", {"look", "game__look"}, "game__look"),
        ("game.look", {"look", "go"}, "look"),
        ("overlook", {"look"}, ""),
        ("loo", {"look"}, ""),
    ],
)
def test_a_tool_is_known_under_the_name_of_a_harness(name: str, tools: set[str], inner: str) -> None:
    assert tool_of(name, tools) == inner

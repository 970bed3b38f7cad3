"""What agents send wrongly: each is answered in the dialect's own form and logged once, and the episode goes on."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest

from agentgym.rollout.episode.episode import Episode
from agentgym.rollout.episode.token_loop import RolloutLoop
from agentgym.rollout.limits import Limits
from agentgym.rollout.serving.http_server import EpisodeServer, ServeConfig
from agentgym.rollout.serving.served_loop import ServedLoop
from agentgym.trajectory import Status
from agentgym.types import Task
from tests.rollout.serving.conftest import Count

LIMITS = Limits(context_window=8000, turn_tokens=200)
BIG = 10 << 20


@dataclass(frozen=True)
class Dialect:
    """How a dialect asks, and what its errors look like."""

    path: str
    field: str
    """The field with the conversation."""
    result: dict[str, Any]
    """A result of a call that nobody made."""

    def body(self, messages: list[Any], **fields: Any) -> dict[str, Any]:
        return {self.field: messages, "max_tokens": 50, **fields}

    def message_of(self, answer: Any) -> str:
        """The message of an error, whose form is checked."""
        error = answer["error"]
        if self.path == "/v1/messages":
            assert answer["type"] == "error" and set(error) == {"type", "message"}
        else:
            assert set(error) == {"message", "type", "param", "code"}
        return str(error["message"])


DIALECTS = {
    "chat": Dialect("/v1/chat/completions", "messages", {"role": "tool", "tool_call_id": "call_7", "content": "42"}),
    "responses": Dialect(
        "/v1/responses", "input", {"type": "function_call_output", "call_id": "call_7", "output": "42"}
    ),
    "messages": Dialect(
        "/v1/messages",
        "messages",
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call_7", "content": "42"}]},
    ),
}
Send = Callable[[Any, Dialect], Any]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


async def post(caller: Any, url: str, data: str, **headers: str) -> tuple[int, Any]:
    headers = {"Content-Type": "application/json", **headers}
    async with caller.http.post(url, data=io.BytesIO(data.encode()), headers=headers) as answer:
        return answer.status, await answer.json()


async def send(caller: Any, dialect: Dialect, messages: list[Any], **fields: Any) -> tuple[int, Any]:
    return await post(caller, caller.root + dialect.path, json.dumps(dialect.body(messages, **fields)))


async def ask_without_json(caller: Any, dialect: Dialect) -> tuple[int, Any]:
    return await post(caller, caller.root + dialect.path, "{'messages'")


async def ask_with_unknown_key(caller: Any, dialect: Dialect) -> tuple[int, Any]:
    body = json.dumps(dialect.body([user("hello")]))
    return await post(caller, caller.url + dialect.path, body, Authorization="Bearer nobody")


async def ask_with_a_large_number(caller: Any, dialect: Dialect) -> tuple[int, Any]:
    body = json.dumps(dialect.body([user("hello")], metadata={"n": 7})).replace("7}", "1e999}")
    return await post(caller, caller.root + dialect.path, body)


def tool(dialect: Dialect) -> dict[str, Any]:
    """A tool whose description is longer than any window."""
    inner = {"name": "look", "description": "x" * BIG}
    if dialect.path == "/v1/chat/completions":
        return {"type": "function", "function": inner}
    return {"type": "function", **inner} if dialect.field == "input" else {**inner, "input_schema": {"type": "object"}}


BAD: dict[str, tuple[Send, int, str]] = {  # what is sent, the status, and what the error says
    "no JSON": (ask_without_json, 400, "JSON"),
    "a list": (lambda c, d: post(c, c.root + d.path, "[1, 2]"), 400, "object"),
    "an unknown key": (ask_with_unknown_key, 401, "the API key is that of no episode"),
    "no messages": (lambda c, d: send(c, d, []), 400, "at least one"),
    "no role": (lambda c, d: send(c, d, [{"content": "hello"}]), 400, "[0].role is one of"),
    "a role that is a number": (lambda c, d: send(c, d, [{"role": 7, "content": "hello"}]), 400, "[0].role is one of"),
    "no object": (lambda c, d: send(c, d, ["hello"]), 400, "[0] is an object"),
    "a result for no call": (lambda c, d: send(c, d, [user("hello"), d.result]), 400, "no message before it makes"),
    "an infinite number": (lambda c, d: send(c, d, [user("hello")], metadata={"n": float("inf")}), 400, "not JSON"),
    "a number that is too large": (ask_with_a_large_number, 400, "too large"),
    "an image": (lambda c, d: send(c, d, [{"role": "user", "content": [{"type": "image"}]}]), 400, "'image'"),
    "a message of 10 MB": (lambda c, d: send(c, d, [user("word " * (BIG // 5))]), 400, "at least "),
    "40,000 messages": (lambda c, d: send(c, d, [user("a")] * 40_000), 400, "at least "),
    "tools of 10 MB": (lambda c, d: send(c, d, [user("a")], tools=[tool(d)]), 400, "at least "),
}


@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=DIALECTS)
@pytest.mark.parametrize("kind", BAD)
def test_bad_input_is_answered_in_its_dialect_and_the_episode_goes_on(
    table: Any, dialect: Dialect, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    ask, expected, text = BAD[kind]
    caplog.set_level(logging.INFO, "agentgym.rollout.serving")

    async def agent(caller: Any) -> None:
        for round_number in (1, 2):
            status, answer = await ask(caller, dialect)
            message = dialect.message_of(answer)
            assert (status, text in message) == (expected, True), message
            refusals = [record for record in caplog.records if "refused with" in record.getMessage()]
            assert len(refusals) == round_number
        if text == "at least ":
            is_long = "prompt is too long" in message or answer["error"]["code"] == "context_length_exceeded"
            assert is_long and "8000 tokens" in message
        assert (await send(caller, dialect, [user("hello")]))[0] == 200
        await caller.finish()
        status, answer = await send(caller, dialect, [user("again")])
        assert status == 410 and "is over" in dialect.message_of(answer)

    trajectory = table.play(agent, lambda prompt: "I am done", limits=LIMITS)
    assert trajectory.status is Status.COMPLETED and len(trajectory.turns) == 1


@pytest.mark.parametrize(
    ("path", "body", "text"),
    [
        ("/v1/messages", {"messages": [{"role": "user", "content": []}]}, "at least one block"),
        ("/v1/messages", {"messages": [{"role": "user", "content": None}]}, "at least one block"),
        ("/v1/messages", {"messages": [user("a"), {"role": "assistant", "content": "I"}]}, "no agent starts a reply"),
        ("/v1/messages", {"messages": [user("a")], "tool_choice": {"type": []}}, "tool_choice"),
        ("/v1/responses", {"input": [{"type": "web_search_call", "id": "ws_1"}]}, "no message"),
        ("/v1/responses", {"input": [{"id": "msg_1"}]}, "there is no item 'msg_1'"),
    ],
)
def test_a_request_without_a_message_to_answer_is_refused(
    table: Any, path: str, body: dict[str, Any], text: str
) -> None:
    async def agent(caller: Any) -> None:
        status, answer = await caller.send(path, {"max_tokens": 50, **body})
        assert status == 400 and text in answer["error"]["message"], answer
        await caller.chat([user("hello")])
        await caller.finish()

    assert table.play(agent, lambda prompt: "I am done", limits=LIMITS).status is Status.COMPLETED


def test_a_fault_of_ours_at_a_request_ends_no_episode(
    table: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def agent(caller: Any) -> None:
        await caller.chat([user("hello")])
        with monkeypatch.context() as patch:
            patch.setattr(ServedLoop, "_constraint", lambda *_: {}["missing"])
            for path in ("/v1/chat/completions", "/v1/messages"):
                status, answer = await caller.send(path, {"messages": [user("now")], "max_tokens": 5})
                assert status == 500 and "could not be read" in answer["error"]["message"]
        await caller.finish()

    assert table.play(agent, lambda prompt: "I am done", limits=LIMITS).status is Status.COMPLETED
    assert "KeyError: 'missing'" in caplog.text


@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=DIALECTS)
def test_a_10_mb_result_is_refused_and_a_short_one_continues_the_row(table: Any, dialect: Dialect) -> None:
    async def agent(caller: Any) -> None:
        reply = {"role": "assistant", "content": "I am done"}
        for text, expected in (("", 200), ("word " * (BIG // 5), 400), ("on", 200)):
            messages = [user("hello"), *([reply, user(text)] if text else [])]
            status, answer = await send(caller, dialect, messages)
            assert status == expected and (status == 200 or "at least" in dialect.message_of(answer))
        await caller.finish()

    assert len(table.play(agent, lambda prompt: "I am done", limits=LIMITS).rows) == 1


@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=DIALECTS)
def test_a_client_that_disconnects_at_any_byte_loses_nothing(table: Any, dialect: Dialect) -> None:
    async def agent(caller: Any) -> None:
        url = urlsplit(caller.root + dialect.path)
        body = json.dumps(dialect.body([user("hello")], stream=True)).encode()
        head = f"POST {url.path} HTTP/1.1\r\nHost: {url.netloc}\r\nContent-Type: application/json\r\n"
        raw = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
        for number in range(0, len(raw) + 1, 5):  # of the request
            reader, writer = await asyncio.open_connection(url.hostname, url.port)
            writer.write(raw[:number])
            await writer.drain()
            writer.transport.abort()
        for number in range(1, 2000, 150):  # of the answer
            reader, writer = await asyncio.open_connection(url.hostname, url.port, limit=64)
            writer.write(raw)
            await reader.read(number)
            writer.transport.abort()
        assert (await send(caller, dialect, [user("hello")]))[0] == 200
        await caller.finish()

    trajectory = table.play(agent, lambda prompt: "SEED is done")
    assert trajectory.status is Status.COMPLETED and trajectory.num_trained_tokens


@pytest.mark.long
@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=DIALECTS)
def test_an_episode_may_have_1000_branches(table: Any, dialect: Dialect) -> None:
    async def agent(caller: Any) -> None:
        reply = {"role": "assistant", "content": "I am done"}
        assert (await send(caller, dialect, [user("hello")]))[0] == 200
        for number in range(0, 1000, 20):
            forks = [[user("hello"), reply, user(f"task {number + index}")] for index in range(20)]
            statuses = [status for status, _ in await asyncio.gather(*(send(caller, dialect, fork) for fork in forks))]
            assert statuses == [200] * 20
        await caller.finish()

    trajectory = table.play(agent, lambda prompt: "I am done", limits=Limits(max_turns=2000))
    assert len(trajectory.rows) == 1000 and len(trajectory.turns) == 1001
    assert trajectory.num_trained_tokens == sum(map(len, table.sampled))


@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=DIALECTS)
def test_requests_during_and_after_shutdown_are_answered_in_their_dialect(table: Any, dialect: Dialect) -> None:
    engine = table.engine(lambda prompt: "I am done")

    async def run() -> None:
        loop = ServedLoop(RolloutLoop(engine, table.renderer))
        async with aiohttp.ClientSession() as http:
            async with EpisodeServer(loop, ServeConfig(port=0, quiet_s=0.05)) as server:
                playing = asyncio.ensure_future(loop.run(Count(), Episode(Task("Env-v0", 7))))
                async with http.post(f"{server.url}/episodes", json={}) as answer:
                    url = (await answer.json())["root_url"] + dialect.path
                body = dialect.body([user("hello")])
                await engine.pause()
                asking = asyncio.ensure_future(http.post(url, json=body))
                while not engine.num_requests:
                    await asyncio.sleep(0.001)
                playing.cancel()
                for answer in (await asking, await http.post(url, json=body)):
                    assert answer.status == 410 and "cancelled" in dialect.message_of(await answer.json())
                await engine.resume()
            with pytest.raises(aiohttp.ClientConnectionError):
                await http.post(url, json=body)
        await asyncio.gather(playing, return_exceptions=True)

    asyncio.run(run())

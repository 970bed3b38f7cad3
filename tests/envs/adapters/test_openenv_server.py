"""What the OpenEnv server does when an environment or a client fails it, and when it is to end."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from agentgym.envs import TextEnv, ToolEnv
from agentgym.envs.adapters import openenv_server
from agentgym.envs.adapters.openenv_server import openenv_app, serve_openenv
from agentgym.tools import tool


class Paid(TextEnv):
    """Pays what its constructor is told."""

    def __init__(self, paid: float = 0.0) -> None:
        super().__init__()
        self.paid = paid

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Begins."""
        return "Say something.", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Answers."""
        return "Heard.", self.paid, False, False, {}


class Slow(ToolEnv):
    """Counts how many of its calls run at once."""

    running = most = 0

    def start(self, options: dict[str, Any]) -> str:
        """Begins."""
        return "Wait."

    @tool
    async def wait(self) -> str:
        """Waits."""
        Slow.running += 1
        Slow.most = max(Slow.most, Slow.running)
        await asyncio.sleep(0.1)
        Slow.running -= 1
        return "Waited."


@asynccontextmanager
async def served(make: Callable[[], TextEnv], max_sessions: int = 2) -> AsyncIterator[tuple[str, asyncio.Task[None]]]:
    """The URL at which the environment is served, and what serves it."""
    urls: asyncio.Queue[str] = asyncio.Queue()
    serving = asyncio.create_task(
        serve_openenv(openenv_app("E", make, max_sessions), "127.0.0.1", 0, urls.put_nowait),
    )
    try:
        yield await asyncio.wait_for(urls.get(), 30), serving
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


async def asked(socket: aiohttp.ClientWebSocketResponse, kind: str, **data: object) -> Any:
    await socket.send_json({"type": kind, "data": data})
    return await asyncio.wait_for(socket.receive_json(), 20)


def test_an_environment_that_cannot_be_made_is_reported_and_frees_its_session() -> None:
    attempts: list[TextEnv | None] = []

    def make() -> TextEnv:
        attempts.append(None)
        if 2 <= len(attempts) <= 5:
            raise RuntimeError("no licence")
        return Paid()

    async def run() -> list[Any]:
        answers = []
        async with served(make) as (url, _), aiohttp.ClientSession() as http:
            for _ in range(5):
                async with http.ws_connect(f"{url}/ws") as socket:
                    answers.append((await asked(socket, "reset"))["data"])
        return answers

    *failed, fine = asyncio.run(run())
    assert failed == [{"message": "RuntimeError: no licence", "code": "FACTORY_ERROR"}] * 4
    assert fine["observation"]["text"] == "Say something."


def test_a_reward_that_is_no_number_is_an_error_and_not_sent() -> None:
    async def run() -> Any:
        async with (
            served(lambda: Paid(math.nan)) as (url, _),
            aiohttp.ClientSession() as http,
            http.ws_connect(f"{url}/ws") as socket,
        ):
            await asked(socket, "reset")
            return await asked(socket, "step", message="hm")

    assert asyncio.run(run())["data"]["code"] == "EXECUTION_ERROR"


def test_requests_that_share_an_environment_are_played_one_after_the_other() -> None:
    async def run() -> int:
        async with served(Slow) as (url, _), aiohttp.ClientSession() as http:
            async with http.post(f"{url}/reset", json={}) as answer:
                assert answer.status == 200
            action = {"action": {"tool_calls": [{"name": "wait", "arguments": {}}]}}
            async with http.post(f"{url}/step", json={"action": ["wait"]}) as answer:
                assert answer.status == 422
            answers = await asyncio.gather(*(http.post(f"{url}/step", json=action) for _ in range(4)))
            assert {response.status for response in answers} == {200}
            async with http.get(f"{url}/state") as answer:
                return int((await answer.json())["step_count"])

    assert (asyncio.run(run()), Slow.most) == (4, 1)


def test_a_client_that_leaves_before_its_answer_is_no_failure_of_the_environment(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def run() -> Any:
        Slow.running = 0
        async with served(Slow, max_sessions=1) as (url, _), aiohttp.ClientSession() as http:
            socket = await http.ws_connect(f"{url}/ws")
            await asked(socket, "reset")
            await socket.send_json({"type": "step", "data": {"tool_calls": [{"name": "wait"}]}})
            await asyncio.sleep(0.05)
            assert socket._response.connection is not None and socket._response.connection.transport is not None
            socket._response.connection.transport.abort()
            while True:  # until the place of the one that left is free
                async with http.ws_connect(f"{url}/ws") as second:
                    answer = await asked(second, "reset")
                if answer["type"] == "observation":
                    return answer
                await asyncio.sleep(0.05)

    with caplog.at_level(logging.WARNING):
        assert asyncio.run(asyncio.wait_for(run(), 30))["type"] == "observation"
    assert caplog.records == []


def test_a_session_without_a_message_for_long_ends_and_gives_its_place_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openenv_server, "SESSION_IDLE_S", 0.3)

    async def run() -> str:
        async with served(Paid, max_sessions=1) as (url, _), aiohttp.ClientSession() as http:
            forgotten = await http.ws_connect(f"{url}/ws")
            await asked(forgotten, "reset")
            assert (await asyncio.wait_for(forgotten.receive(), 20)).type is aiohttp.WSMsgType.CLOSE
            async with http.ws_connect(f"{url}/ws") as socket:
                return str((await asked(socket, "reset"))["type"])

    assert asyncio.run(run()) == "observation"


def test_serving_ends_while_sessions_are_open() -> None:
    async def run() -> aiohttp.WSMsgType:
        async with (
            served(Paid) as (url, serving),
            aiohttp.ClientSession() as http,
            http.ws_connect(f"{url}/ws") as socket,
        ):
            await asked(socket, "reset")
            waiting = asyncio.create_task(socket.receive())
            await asyncio.sleep(0.05)
            serving.cancel()
            await asyncio.wait_for(asyncio.gather(serving, return_exceptions=True), 10)
            return (await waiting).type

    assert asyncio.run(run()) is aiohttp.WSMsgType.CLOSE

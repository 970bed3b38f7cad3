"""Environments that are played with the tools of MCP servers, most of them written with the official SDK."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from agentgym.envs import Action, ToolEnv
from agentgym.tools.mcp import McpServer, McpTools
from agentgym.types import Message, ToolCall

SERVERS = Path(__file__).parent / "servers"


class Desk(ToolEnv):
    """An environment with nothing but a server's tools."""

    def start(self, options: dict[str, Any]) -> str:
        return "Call a tool."

    def ask(self, name: str, **arguments: Any) -> tuple[str, str | None]:
        """The answer to one call, and the kind of its error."""
        return self.ask_all((name, arguments))[0]

    def ask_all(self, *calls: tuple[str, dict[str, Any]]) -> list[tuple[str, str | None]]:
        """The answers to the calls of one turn."""
        tool_calls = tuple(ToolCall(f"c{number}", name, arguments) for number, (name, arguments) in enumerate(calls))
        info = self.step(Action.from_message(Message("assistant", "", tool_calls=tool_calls)))[-1]
        return [(result.content, result.error) for result in info["tool_results"]]


@pytest.fixture(scope="session")
def server_of() -> Callable[..., McpServer]:
    """`server_of("counter", stateless=True)` is the server of that file."""

    def make(name: str, **settings: Any) -> McpServer:
        server = McpServer(command=(sys.executable, str(SERVERS / f"{name}.py")), start_timeout_s=120)
        return replace(server, **settings)

    return make


@pytest.fixture
def desk() -> Iterator[Callable[..., Desk]]:
    """`desk(server, **settings)` is an environment in an episode."""
    opened: list[Desk] = []

    def make(server: McpServer | str, **settings: Any) -> Desk:
        env = Desk(tool_sources=[lambda: McpTools(server, **settings)])
        opened.append(env)
        env.reset(seed=0)
        return env

    yield make
    for env in opened:
        env.close()


@pytest.fixture(scope="module")
def long_desk(server_of: Callable[..., McpServer]) -> Iterator[Desk]:
    """An episode with the counter that tests share, where what they do to it does not matter."""
    server = server_of("counter", env={"COLOUR": "red"})
    env = Desk(tool_sources=[lambda: McpTools(server)])
    env.reset(seed=0)
    yield env
    env.close()


@pytest.fixture(scope="session")
def server_processes() -> Callable[[], list[psutil.Process]]:
    """The processes under this one that run a server of these tests, or its guard."""

    def running() -> list[psutil.Process]:
        children = []
        for child in psutil.Process().children(recursive=True):
            try:
                if any("/servers/" in word for word in child.cmdline()):
                    children.append(child)
            except psutil.Error:  # it ended meanwhile
                continue
        return children

    return running

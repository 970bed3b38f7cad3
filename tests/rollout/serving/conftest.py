"""Episodes that a test plays over HTTP, with a policy whose replies the test writes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest

from agentgym.chat_templates.protocol import Renderer
from agentgym.engines.protocol import Sampling
from agentgym.engines.scripted import ScriptedEngine
from agentgym.envs.base.text_env import Info, StepResult, TextEnv
from agentgym.envs.base.tool_env import ToolEnv
from agentgym.evaluation.run_check.verify import verify_run
from agentgym.rollout.episode.episode import Episode
from agentgym.rollout.episode.token_loop import RolloutLoop
from agentgym.rollout.limits import Limits
from agentgym.rollout.record.episodes_file import EpisodeWriter
from agentgym.rollout.serving.http_server import EpisodeServer, ServeConfig
from agentgym.rollout.serving.served_loop import ServedLoop
from agentgym.trajectory import Trajectory
from agentgym.types import Task

END = "<|im_end|>"
Say = Callable[[str], str]


class Count(TextEnv):
    """Rewards each text with 0.5, and ends when it reads `done`."""

    runs_inline = True
    system_prompt = "Count."

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, Info]:
        return f"seed {seed}", {}

    def step(self, action: str) -> StepResult:
        return f"heard {action}", 0.5, "done" in action, False, {}


class Caller:
    """A client that sends what a test writes, and returns status and body."""

    def __init__(self, http: aiohttp.ClientSession, url: str, opening: dict[str, Any]) -> None:
        self.http, self.url, self.opening = http, url, opening

    @property
    def root(self) -> str:
        return str(self.opening["root_url"])

    async def send(self, path: str, body: object, **headers: str) -> tuple[int, Any]:
        async with self.http.post(f"{self.root}{path}", json=body, headers=headers) as answer:
            return answer.status, await answer.json()

    async def post(self, path: str, body: object, **headers: str) -> Any:
        status, answer = await self.send(path, body, **headers)
        assert status == 200, answer
        return answer

    async def chat(self, messages: Sequence[object], **fields: object) -> Any:
        return await self.post("/v1/chat/completions", {"messages": messages, **fields})

    async def cut(self, path: str, body: object, num_bytes: int = 0) -> None:
        """Sends a request and closes the connection after some bytes of the answer."""
        url = urlsplit(f"{self.root}{path}")
        reader, writer = await asyncio.open_connection(url.hostname, url.port, limit=max(num_bytes, 1))
        raw = json.dumps(body).encode()
        head = f"POST {url.path} HTTP/1.1\r\nHost: {url.netloc}\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw)
        await writer.drain()
        await asyncio.sleep(0.05)  # the request arrives
        if num_bytes:
            await reader.read(num_bytes)
            await asyncio.sleep(0.05)  # the rest arrives, and is never read
        writer.transport.abort()
        await asyncio.sleep(0.05)

    async def finish(self) -> Any:
        return await self.post("/finish", {})


class Table:
    """Plays episodes for tests."""

    def __init__(self, renderer: Renderer, raw: Callable[[str], list[int]], folder: Path) -> None:
        self.renderer, self.raw, self.folder = renderer, raw, folder
        self.prompts: list[str] = []
        self.sampled: list[tuple[int, ...]] = []

    def engine(self, say: Say, **settings: Any) -> ScriptedEngine:
        """An engine that answers the text of its prompt with `say`."""

        def reply(session: str, prompt_ids: Sequence[int], sampling: Sampling) -> Sequence[int]:
            self.prompts.append(self.renderer.decode(prompt_ids))
            text = say(self.prompts[-1]).replace("SEED", str(sampling.seed % 1000))
            ids = tuple(self.raw(text + END))
            self.sampled.append(ids[: sampling.max_tokens])
            return ids

        return ScriptedEngine(reply, **settings)

    def play(
        self,
        agent: Callable[[Caller], Awaitable[None]],
        say: Say,
        env: TextEnv | ToolEnv | None = None,
        *,
        limits: Limits | None = None,
        engine: ScriptedEngine | None = None,
        idle_s: float = 20.0,
        **settings: Any,
    ) -> Trajectory:
        """One episode that the agent plays; its record is verified, and holds each sampled id once."""
        self.prompts.clear()
        self.sampled.clear()
        engine = engine or self.engine(say)

        async def run() -> Trajectory:
            loop = ServedLoop(RolloutLoop(engine, self.renderer, limits), idle_s=idle_s, **settings)
            async with EpisodeServer(loop, ServeConfig(port=0, quiet_s=0.0)) as server, aiohttp.ClientSession() as http:
                playing = asyncio.ensure_future(loop.run(env or Count(), Episode(Task("Env-v0", 7))))
                async with http.post(f"{server.url}/episodes", json={}) as answer:
                    opening = await answer.json()
                await agent(Caller(http, server.url, opening))
                return await playing

        trajectory = asyncio.run(run())
        assert not engine.sessions, "a session was not released"
        (self.folder / "episodes.jsonl").unlink(missing_ok=True)
        with EpisodeWriter(self.folder) as writer:
            writer.write([trajectory])
        report = verify_run(self.folder, self.renderer)
        assert report.ok, report.lines()
        spans = [span for row in trajectory.rows for span in row.spans if span.source == "policy"]
        assert sorted(span.ids for span in spans) == sorted(self.sampled), "a sampled id is lost, or recorded twice"
        return trajectory


@pytest.fixture
def table(renderer: Renderer, raw: Callable[[str], list[int]], tmp_path: Path) -> Table:
    return Table(renderer, raw, tmp_path)

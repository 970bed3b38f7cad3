"""CPU milliseconds of the server of episodes for each request of an agent, beside those of an empty handler.

The agent is a process of its own, which asks one request after the other over one connection, and reads the CPU clock
of the server's process before and after each. The conversation goes on for 20 turns an episode, so that a request
continues a branch. Rendering, parsing and the engine, which
replies at once, are measured in runs of their own and subtracted.

    python benchmarks/served_requests.py [--requests 400]
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from aiohttp import web

from agentgym.chat_templates.families import renderer_for
from agentgym.chat_templates.tokenizer import ChatTokenizer
from agentgym.embedded import embedded_folder
from agentgym.engines.scripted import ScriptedEngine
from agentgym.envs.base.text_env import Info, StepResult, TextEnv
from agentgym.rollout.episode.episode import Episode
from agentgym.rollout.episode.token_loop import RolloutLoop
from agentgym.rollout.limits import Limits
from agentgym.rollout.serving.http_server import EpisodeServer, ServeConfig
from agentgym.rollout.serving.served_loop import ServedLoop
from agentgym.types import Task

NUM_TURNS = 20
REPEATS = 3
"""The runs of which the least is taken: what another process holds up is not in all of them."""
SIZES = {"6 KB": (500, 4), "50 KB": (38_000, 12)}
"""The characters of the system prompt and the number of tools, which give requests of about that size."""
TARGETS_MS = {"6 KB": 2.0, "50 KB": 5.0}
PATHS = {"chat": "/v1/chat/completions", "messages": "/v1/messages"}
FORK = multiprocessing.get_context("fork")
REST_S = 0.002
"""The seconds after an answer in which the server completes its work."""


class Open(TextEnv):
    """Opens with a word."""

    runs_inline = True

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, Info]:
        return "Go.", {}

    def step(self, action: str) -> StepResult:
        return "", 1.0, True, False, {}


class Stopwatch:
    """Sums the CPU seconds of calls, without those of reading the clock, which may take 0.1 ms."""

    def __init__(self) -> None:
        started = time.thread_time()
        for _ in range(1000):
            time.thread_time()
        self._clock_s, self.spent_s = (time.thread_time() - started) / 1000, 0.0

    def add(self, started: float) -> None:
        """Adds what has passed since a reading of the clock."""
        self.spent_s += time.thread_time() - started - self._clock_s


class TimedEngine(ScriptedEngine):
    """An engine that measures its replies, of which one is in flight at a time."""

    watch: Stopwatch

    async def generate(self, *args: Any, **keywords: Any) -> Any:
        """Measures a reply."""
        started = time.thread_time()
        try:
            return await super().generate(*args, **keywords)
        finally:
            self.watch.add(started)


class TimedRenderer:
    """A renderer that measures its calls."""

    def __init__(self, renderer: Any, watch: Stopwatch) -> None:
        self._renderer, self._watch = renderer, watch

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._renderer, name)
        return self._with_watch(value) if name in ("render", "rerender", "extend", "parse", "decode") else value

    def _with_watch(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **keywords: Any) -> Any:
            started = time.thread_time()
            try:
                return function(*args, **keywords)
            finally:
                self._watch.add(started)

        return call


def body_of(dialect: str, size: str, messages: list[Any]) -> dict[str, Any]:
    num_characters, num_tools = SIZES[size]
    system = ("You are an agent that works in a repository. " * (1 + num_characters // 45))[:num_characters]
    schema = {"type": "object", "properties": {"path": {"type": "string", "description": "A path. " * 40}}}
    tools = [{"name": f"tool_{number}", "description": "Does it. " * 40} for number in range(num_tools)]
    if dialect == "messages":
        return {
            "system": system,
            "messages": messages,
            "max_tokens": 100,
            "tools": [{**tool, "input_schema": schema} for tool in tools],
        }
    functions = [{"type": "function", "function": {**tool, "parameters": schema}} for tool in tools]
    return {"messages": [{"role": "system", "content": system}, *messages], "tools": functions}


def ask(sender: Connection, port: int, dialect: str, size: str, num_requests: int, is_empty: bool) -> None:
    """Plays the agent; sends the milliseconds of the server's CPU time and the bytes of each request."""
    clock = (~os.getppid() << 3) | 2  # CLOCK_PROCESS_CPUTIME_ID of another process
    connection = http.client.HTTPConnection("127.0.0.1", port)

    def post(path: str, body: object) -> Any:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        return json.loads(connection.getresponse().read() or "null")

    costs: list[tuple[float, int]] = []
    for _ in range(0, num_requests, NUM_TURNS):
        root = "" if is_empty else f"/episodes/{post('/episodes', {})['episode']}"
        messages: list[Any] = []
        for turn in range(NUM_TURNS):
            messages.append({"role": "user", "content": f"Result {turn}: {'ok ' * 30}"})
            body = body_of(dialect, size, messages)
            time.sleep(REST_S)
            started = time.clock_gettime(clock)
            answer = post(root + PATHS[dialect], body)
            time.sleep(REST_S)
            costs.append((1e3 * (time.clock_gettime(clock) - started), len(json.dumps(body))))
            content = (
                answer["content"][0]["text"] if dialect == "messages" else answer["choices"][0]["message"]["content"]
            )
            messages.append({"role": "assistant", "content": content})
        if not is_empty:
            post(f"{root}/finish", {})
    sender.send(costs)


async def costs_of(port: int, dialect: str, size: str, num_requests: int, *, is_empty: bool) -> tuple[float, int]:
    """The medians of the server's CPU milliseconds and of the bytes of a request."""
    receiver, sender = FORK.Pipe(duplex=False)
    agent = FORK.Process(target=ask, args=(sender, port, dialect, size, num_requests, is_empty))
    agent.start()
    sender.close()
    costs = await asyncio.to_thread(receiver.recv)
    agent.join()
    return statistics.median(cost for cost, _ in costs), int(statistics.median(length for _, length in costs))


async def empty_handler(dialect: str, size: str, num_requests: int) -> float:
    choice = {"message": {"role": "assistant", "content": "ok"}}
    answer = {"choices": [choice], "content": [{"type": "text", "text": "ok"}]}

    async def handle(request: web.Request) -> web.Response:
        await request.read()
        return web.json_response(answer)

    app = web.Application(client_max_size=1 << 26)
    app.router.add_post(PATHS[dialect], handle)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    cost, _ = await costs_of(port, dialect, size, num_requests, is_empty=True)
    await runner.cleanup()
    return cost


async def serve_agent(dialect: str, size: str, num_requests: int, watch: Stopwatch | None = None) -> tuple[float, int]:
    """The medians of the CPU milliseconds and bytes of a request; a stopwatch measures rendering and the engine."""
    tokenizer = ChatTokenizer.load(embedded_folder())
    renderer = renderer_for(tokenizer)
    ids = [*tokenizer.encode("I look at the file, and go on with the next one."), renderer.stop_ids[0]]
    engine = (ScriptedEngine if watch is None else TimedEngine)(
        lambda session, prompt, sampling: ids, context_window=1 << 18
    )
    if watch is not None:
        engine.watch, renderer = watch, TimedRenderer(renderer, watch)  # type: ignore[attr-defined,assignment]
    loop = ServedLoop(RolloutLoop(engine, renderer, Limits(max_turns=100, turn_tokens=200)))
    num_episodes = -(-num_requests // NUM_TURNS)
    async with EpisodeServer(loop, ServeConfig(port=0, quiet_s=0.0)) as server:
        episodes = [Episode(Task("Open-v0", number), member=number) for number in range(num_episodes)]
        playing = asyncio.gather(*(loop.run(Open(), episode) for episode in episodes))
        port = int(server.url.rpartition(":")[2])
        cost, length = await costs_of(port, dialect, size, num_requests, is_empty=False)
        await playing
    return cost, length


def rendering_of(dialect: str, size: str, num_requests: int) -> float:
    """The mean CPU milliseconds of rendering, parsing and the engine for a request."""
    watch = Stopwatch()
    asyncio.run(serve_agent(dialect, size, num_requests, watch))
    return 1e3 * watch.spent_s / num_requests


def main() -> int:
    """Prints the table; returns 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=400)
    options = parser.parse_args()
    print(f"{'dialect':<10}{'bytes':>8}{'empty ms':>10}{'ours ms':>10}{'rendered ms':>13}{'beyond':>8}{'at most':>9}")
    missed = False
    for size, target in TARGETS_MS.items():
        for dialect in PATHS:
            empty = min(asyncio.run(empty_handler(dialect, size, options.requests)) for _ in range(REPEATS))
            ours, length = min(asyncio.run(serve_agent(dialect, size, options.requests)) for _ in range(REPEATS))
            rendering = min(rendering_of(dialect, size, options.requests) for _ in range(REPEATS))
            beyond = ours - rendering - empty
            missed = missed or beyond > target
            print(f"{dialect:<10}{length:>8,}{empty:>10.2f}{ours:>10.2f}{rendering:>13.2f}{beyond:>8.2f}{target:>9.1f}")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())

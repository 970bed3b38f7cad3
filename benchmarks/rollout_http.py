"""CPU milliseconds per turn of the rollout over HTTP, against an SGLang server that replies at once.

The server is `agentgym fake-server` in a process of its own, so that only the client's CPU time is counted. Beside
ours, in the same run and for the same turns: the loop alone (an engine in this process), aiohttp alone (the same
requests, sent and read by a bare session), and the official OpenAI client (chat completions of the same
conversation). Then the lag of the event loop at 4,096 concurrent episodes. With --soak it plays so many episodes
instead, 256 at once, each environment on a thread, and prints what is left behind: exit code 1 where anything grows.

    python benchmarks/rollout_http.py [--soak 10000] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from openai import AsyncOpenAI

from agentgym.chat_templates.families import renderer_for
from agentgym.chat_templates.protocol import Renderer
from agentgym.embedded import embedded_folder
from agentgym.engines.protocol import Engine
from agentgym.engines.scripted import ScriptedEngine
from agentgym.engines.servers.server_config import ServerConfig
from agentgym.engines.sglang.engine import open_sglang
from agentgym.envs.base.action import Action
from agentgym.envs.base.tool_env import ToolEnv
from agentgym.rollout.episode.replies import reply_ids
from agentgym.rollout.episode.token_loop import RolloutLoop
from agentgym.rollout.limits import Limits
from agentgym.rollout.sampling.sampler import Sampler, SamplerConfig
from agentgym.tools.calling.definition import tool
from agentgym.trajectory import Status
from agentgym.types import Message, Task, ToolCall

NUM_TURNS = 8
TURN_TOKENS = 32
REPEATS = 3
CONCURRENT, CROWD, SOAK = 1024, 4096, 256
SOAK_ROUNDS = 10
MAX_GROWTH_MB = 16
"""The memory that a soak may add after its first round: allocators keep some of what was freed."""
TARGET_MS, TARGET_LAG_MS = 0.5, 50.0
TICK_S = 0.01
CALL = ToolCall("call_0", "look", {"direction": "north"})
TEXT = '<tool_call>\n{"name": "look", "arguments": {"direction": "north"}}\n</tool_call>'


class Walk(ToolEnv):
    """Walks for `NUM_TURNS` turns; one short tool, computed at once."""

    runs_inline = True
    system_prompt = "You walk through rooms."

    def start(self, options: dict[str, object]) -> str:
        """The first room."""
        self.count = 0
        self.house = int(self.np_random.integers(1 << 31))
        return "You stand in a hall. There are doors to the north and to the east."

    def task_identity(self) -> int:
        """The house: all of them look alike."""
        return self.house

    @tool
    def look(self, direction: str) -> str:
        """Looks in a direction."""
        self.count += 1
        if self.count == NUM_TURNS:
            self.end(success=True, reward=1.0)
        return f"To the {direction} there is a room with a lamp, a table and a closed door."


class ThreadedWalk(Walk):
    """The same on a thread, as the environments of users are played."""

    runs_inline = False


@contextmanager
def fake_server(*options: str) -> Iterator[str]:
    """Yields the URL of a server that makes the same call again and again."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "script.jsonl"
        script.write_text(json.dumps(TEXT) + "\n", encoding="utf-8")
        words = [sys.executable, "-m", "agentgym", "fake-server", "--port", "0", "--reply", str(script), *options]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            yield next(word for word in process.stdout.readline().split() if word.startswith("http"))
        finally:
            process.terminate()
            process.communicate()


@asynccontextmanager
async def sglang_engine(url: str) -> AsyncIterator[Engine]:
    """Yields our engine on the server."""
    engine = await open_sglang(ServerConfig(urls=(url,)), embedded_folder())
    try:
        yield engine
    finally:
        await engine.close()


async def play(
    engine: Engine, renderer: Renderer, num_episodes: int, concurrency: int, env: type[Walk] = Walk
) -> float:
    """Returns the CPU seconds of episodes, all of which must end well."""
    loop = RolloutLoop(engine, renderer, Limits(max_turns=NUM_TURNS + 1, turn_tokens=TURN_TOKENS))
    sampler = Sampler(loop, lambda task: env(), SamplerConfig(concurrency=concurrency))
    started = time.process_time()
    groups = await sampler.sample([Task("Walk-v0", seed) for seed in range(num_episodes)], 1)
    used_s = time.process_time() - started
    sampler.close()
    for group in groups:
        for trajectory in group.trajectories:
            assert trajectory.status is Status.COMPLETED, f"an episode ended as {trajectory.status}: {trajectory.error}"
            assert len(trajectory.turns) == NUM_TURNS
    return used_s


def prompts(renderer: Renderer) -> list[tuple[list[int], list[dict[str, Any]]]]:
    """Returns the prompt of each turn: its ids, and its messages for chat completions."""
    env = Walk()
    _, info = env.reset(seed=0)
    messages = [Message("system", env.system_prompt), *info["messages"]]
    chat = [{"role": message.role, "content": message.content} for message in messages]
    ids, reply, pairs = renderer.render(messages, env.tool_specs), reply_ids(renderer, MESSAGE), []
    function = {"name": CALL.name, "arguments": json.dumps(CALL.arguments)}
    for turn in range(NUM_TURNS):
        pairs.append((list(ids), list(chat)))
        _, _, _, _, info = env.step(Action.from_message(renderer.parse(reply)))
        ids += [*reply, *renderer.extend([*ids, *reply], info["messages"])]
        call = {"id": f"c{turn}", "type": "function", "function": function}
        chat.append({"role": "assistant", "content": None, "tool_calls": [call]})
        chat += [
            {"role": "tool", "content": message.content, "tool_call_id": f"c{turn}"} for message in info["messages"]
        ]
    env.close()
    return pairs


MESSAGE = Message("assistant", "", tool_calls=(CALL,))


async def bare_aiohttp(url: str, bodies: list[dict[str, object]], concurrency: int) -> float:
    """Returns CPU seconds of the same requests, encoded, sent, read and decoded by aiohttp and json alone."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def episode() -> None:
            for body in bodies:
                async with session.post(f"{url}/generate", json=body) as response:
                    json.loads(await response.read())

        return await together(episode, concurrency)


async def openai_client(url: str, chats: list[list[dict[str, Any]]], concurrency: int) -> float:
    """Returns CPU seconds of the same conversations by the official client."""
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=600.0) as client:
        tools: Any = [spec.to_openai() for spec in Walk().tool_specs]

        async def episode() -> None:
            for messages in chats:
                chat: Any = messages
                await client.chat.completions.create(model="m", messages=chat, tools=tools, max_tokens=TURN_TOKENS)

        return await together(episode, concurrency)


async def together(episode: Callable[[], Awaitable[None]], concurrency: int) -> float:
    """Returns CPU seconds of `concurrency` episodes at once."""
    started = time.process_time()
    await asyncio.gather(*(episode() for _ in range(concurrency)))
    return time.process_time() - started


async def cpu_table(url: str, renderer: Renderer) -> dict[str, float]:
    """Returns CPU milliseconds per turn at 1,024 concurrent episodes; the least of three times each, interleaved."""
    pairs = prompts(renderer)
    stops = list(renderer.stop_ids)
    params = {"max_new_tokens": TURN_TOKENS, "temperature": 1.0, "stop_token_ids": stops}
    bodies: list[dict[str, object]] = [
        {"input_ids": ids, "sampling_params": params, "return_logprob": True} for ids, _ in pairs
    ]
    reply = reply_ids(renderer, MESSAGE)
    costs: dict[str, list[float]] = {"ours": [], "loop alone": [], "aiohttp alone": []}
    async with sglang_engine(url) as engine:
        await play(engine, renderer, 64, 64)
        for _ in range(REPEATS):
            costs["ours"].append(await play(engine, renderer, CONCURRENT, CONCURRENT))
            scripted = ScriptedEngine(lambda *_: reply)
            costs["loop alone"].append(await play(scripted, renderer, CONCURRENT, CONCURRENT))
            costs["aiohttp alone"].append(await bare_aiohttp(url, bodies, CONCURRENT))
    turns = CONCURRENT * NUM_TURNS
    table = {name: 1000 * min(times) / turns for name, times in costs.items()}
    used_s = await openai_client(url, [chat for _, chat in pairs[:2]], CONCURRENT)
    table["openai client"] = 1000 * used_s / (CONCURRENT * 2)
    return table


async def lag_ms(url: str, renderer: Renderer) -> dict[str, float]:
    """Returns milliseconds by which the event loop is late while 4,096 episodes play: 50th and 99th percentile.

    It is sampled every 10 ms of the clock: a stall of 1 s counts as a hundred late samples, not as one. `cpu_` is the
    CPU time that this process used of it: if that is much less, others had the processor. `share` is its part of a
    core.
    """
    lags: list[float] = []
    used: list[float] = []

    async def watch() -> None:
        due, cpu = time.perf_counter() + TICK_S, time.process_time()
        while True:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            now, cpu_now = time.perf_counter(), time.process_time()
            while due <= now:
                lags.append(now - due)
                used.append(min(now - due, cpu_now - cpu))
                due += TICK_S
            cpu = cpu_now

    async with sglang_engine(url) as engine:
        watcher = asyncio.create_task(watch())
        started = time.perf_counter()
        cpu_s = await play(engine, renderer, CROWD, CROWD)
        share = cpu_s / (time.perf_counter() - started)
        watcher.cancel()
    lags.sort()
    used.sort()
    half, high = len(lags) // 2, int(0.99 * len(lags))
    lags_by_name = {"p50": lags[half], "p99": lags[high], "max": lags[-1], "cpu_p50": used[half], "cpu_p99": used[high]}
    return {name: 1000 * value for name, value in lags_by_name.items()} | {"share": share}


def footprint() -> dict[str, int]:
    """Counts this process's open files, sockets, threads, children, tasks, temporary files, and MB of memory."""
    gc.collect()
    process = psutil.Process()
    return {
        "files": process.num_fds(),
        "ports": len(process.net_connections()),
        "threads": process.num_threads(),
        "children": len(process.children(recursive=True)),
        "tasks": len(asyncio.all_tasks()),
        "temporary": len(os.listdir(tempfile.gettempdir())),
        "rss_mb": process.memory_info().rss // 1_000_000,
    }


async def soak(url: str, renderer: Renderer, num_episodes: int) -> dict[str, dict[str, int]]:
    """Returns footprints: after a first engine was used and closed, after each round of another, and after its end.

    An episode that fails ends the run.
    """
    async with sglang_engine(url) as engine:
        await play(engine, renderer, SOAK, SOAK, ThreadedWalk)
    await asyncio.sleep(0.5)
    footprints = {"before": footprint()}
    async with sglang_engine(url) as engine:
        for number in range(1, SOAK_ROUNDS + 1):
            await play(engine, renderer, num_episodes // SOAK_ROUNDS, SOAK, ThreadedWalk)
            footprints[f"{number * (num_episodes // SOAK_ROUNDS):,} episodes"] = footprint()
    await asyncio.sleep(0.5)
    return footprints | {"engine closed": footprint()}


def leftovers(footprints: dict[str, dict[str, int]]) -> list[str]:
    """Returns what the end of a soak holds more of than its beginning, and of memory than its first round."""
    before, first, *_, last, closed = footprints.values()
    names = [name for name in before if name != "rss_mb" and closed[name] > before[name]]
    return names + (["rss_mb"] if last["rss_mb"] > first["rss_mb"] + MAX_GROWTH_MB else [])


def print_soak(footprints: dict[str, dict[str, int]]) -> None:
    """Prints a line for each footprint."""
    print(f"{'':<16}" + "".join(f"{name:>11}" for name in footprints["before"]))
    for when, parts in footprints.items():
        print(f"{when:<16}" + "".join(f"{value:>11,}" for value in parts.values()))
    print(f"left over: {', '.join(leftovers(footprints)) or 'nothing'}")


def main() -> int:
    """Prints the tables, and with --json one JSON object as the last line; returns 1 if a soak leaves something."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--soak", type=int, default=0, help="play so many episodes, and count what is left")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    arguments = parser.parse_args()
    renderer = renderer_for(embedded_folder())
    if arguments.soak:
        with fake_server() as url, tempfile.TemporaryDirectory() as folder:
            tempfile.tempdir = folder  # temporary files are made here, and counted
            footprints = asyncio.run(soak(url, renderer, arguments.soak))
        print_soak(footprints)
        if arguments.json:
            print(json.dumps({"soak": footprints, "left_over": leftovers(footprints)}))
        return 1 if leftovers(footprints) else 0
    lengths = [len(ids) for ids, _ in prompts(renderer)]
    result: dict[str, object] = {}
    with fake_server() as url:
        table = asyncio.run(cpu_table(url, renderer))
        result["ms_per_turn"] = table
        print(f"{CONCURRENT:,} concurrent episodes of {NUM_TURNS} turns, prompts of {lengths[0]} to {lengths[-1]} ids")
        print(f"{'':<16}{'CPU ms/turn':>12}{'ours is':>9}")
        for name, cost in table.items():
            print(f"{name:<16}{cost:>12.3f}{table['ours'] / cost:>9.2f}")
        print(f"target {TARGET_MS} ms")
    with fake_server("--latency-median-s", "3", "--latency-sigma", "0.5") as url:
        lag = result["lag_ms"] = asyncio.run(lag_ms(url, renderer))
        print(f"\nevent-loop lag at {CROWD:,} episodes, replies after 3 s (sigma 0.5), {lag['share']:.0%} of a core:")
        print(f"p50 {lag['p50']:.1f} ms, p99 {lag['p99']:.1f} ms, max {lag['max']:.1f} ms", end="")
        print(f"; of it CPU p50 {lag['cpu_p50']:.1f}, p99 {lag['cpu_p99']:.1f}; target p99 {TARGET_LAG_MS:g} ms")
    if arguments.json:
        print(json.dumps(result))
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())

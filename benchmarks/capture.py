"""What is trained of an agent's conversations: ours beside what verifiers and OpenEnv capture of the same requests.

Five shapes of conversation are played over HTTP by a policy whose replies are given. The peers get each request in the
tokens that a chat server would render for it, and each reply as it was sampled: `capture_peers.py`, run by interpreters
that have them. A sampled id is `trained` once where it should be; `twice` and `lost` count ids, and `unseen` those that
are trained of a reply which the agent never got.

    python benchmarks/capture.py [--verifiers VENV/bin/python] [--openenv VENV/bin/python]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from agentgym.chat_templates.families import renderer_for
from agentgym.chat_templates.tokenizer import ChatTokenizer
from agentgym.embedded import embedded_folder
from agentgym.engines.protocol import Sampling
from agentgym.engines.scripted import ScriptedEngine
from agentgym.envs.base.text_env import Info, StepResult, TextEnv
from agentgym.openai_wire import message_from_openai
from agentgym.rollout.episode.episode import Episode
from agentgym.rollout.episode.token_loop import RolloutLoop
from agentgym.rollout.serving.http_server import EpisodeServer, ServeConfig
from agentgym.rollout.serving.served_loop import ServedLoop
from agentgym.types import Task

PEERS = Path(__file__).with_name("capture_peers.py")
COLUMNS = ("sampled", "rows", "tokens", "once", "twice", "lost", "unseen")
Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class Call:
    """A request of an agent and its reply."""

    messages: Messages
    reply: dict[str, Any]
    prompt_ids: list[int]
    sampled_ids: list[int]
    is_seen: bool


class Open(TextEnv):
    """Opens with a word."""

    runs_inline = True
    system_prompt = "Work."

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, Info]:
        return "Go.", {}

    def step(self, action: str) -> StepResult:
        return "", 1.0, True, False, {}


class Agent:
    """Sends the requests of a shape, and notes them with what was sampled for each."""

    def __init__(self, http: aiohttp.ClientSession, url: str, opening: Messages, sampled: list[list[int]]) -> None:
        self.http, self.url, self.opening, self.sampled = http, url, opening, sampled
        self.renderer = renderer_for(embedded_folder())
        self.calls: list[Call] = []

    async def ask(self, messages: Messages) -> dict[str, Any]:
        """Returns the message of a reply."""
        async with self.http.post(self.url, json={"messages": messages}) as answer:
            reply: dict[str, Any] = (await answer.json())["choices"][0]["message"]
        self._note(messages, reply, is_seen=True)
        return reply

    async def ask_in_vain(self, messages: Messages) -> None:
        """Sends a request, and closes the connection before the reply has arrived."""
        url, body = urlsplit(self.url), json.dumps({"messages": messages}).encode()
        _, writer = await asyncio.open_connection(url.hostname, url.port)
        head = f"POST {url.path} HTTP/1.1\r\nHost: {url.netloc}\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        await writer.drain()
        await asyncio.sleep(0.2)
        writer.transport.abort()
        await asyncio.sleep(0.2)
        text = self.renderer.decode(self.sampled[-1][:-1])
        self._note(messages, {"role": "assistant", "content": text}, is_seen=False)

    def _note(self, messages: Messages, reply: dict[str, Any], *, is_seen: bool) -> None:
        prompt_ids = list(self.renderer.render([message_from_openai(message) for message in messages], []))
        reply = {key: value for key, value in reply.items() if value is not None}
        self.calls.append(Call(list(messages), reply, prompt_ids, self.sampled[-1], is_seen))


def user(number: int) -> dict[str, Any]:
    return {"role": "user", "content": f"Message {number}."}


async def linear(agent: Agent) -> None:
    messages = [*agent.opening]
    for number in range(2):
        messages += [await agent.ask(messages), user(number)]


async def side_request(agent: Agent) -> None:
    first = [*agent.opening, await agent.ask(agent.opening)]
    await agent.ask([*first, user(1)])
    await agent.ask([*first, user(2)])


async def retry(agent: Agent) -> None:
    messages = [*agent.opening, await agent.ask(agent.opening), user(1)]
    await agent.ask_in_vain(messages)
    messages += [await agent.ask(messages), user(2)]
    await agent.ask(messages)


async def dropped_thinking(agent: Agent) -> None:
    messages = [*agent.opening]
    for number in range(3):
        reply = await agent.ask(messages)
        messages += [{"role": "assistant", "content": reply["content"]}, user(number)]


async def forks(agent: Agent) -> None:
    messages = [*agent.opening]
    for number in range(3):
        messages += [await agent.ask(messages), user(number)]
    await agent.ask(messages)
    for number in (8, 9):
        await agent.ask([*messages[:-1], user(number)])


SHAPES: dict[str, Callable[[Agent], Awaitable[None]]] = {
    "linear": linear,
    "a side request from the middle": side_request,
    "an unmarked retry": retry,
    "dropped thinking": dropped_thinking,
    "two forks from the third turn": forks,
}


async def play(name: str) -> tuple[list[Call], list[list[tuple[list[int], list[bool]]]]]:
    """Plays a shape; returns its calls, and the rows as runs of ids, each with whether they are trained."""
    renderer, tokenizer = renderer_for(embedded_folder()), ChatTokenizer.load(embedded_folder()).backend
    sampled: list[list[int]] = []

    def reply(session: str, prompt_ids: Sequence[int], sampling: Sampling) -> Sequence[int]:
        thought = "<think>\nHm.\n</think>\n\n" if name == "dropped thinking" else ""
        sampled.append([*tokenizer.encode(f"{thought}Reply {len(sampled)}.<|im_end|>", add_special_tokens=False).ids])
        return sampled[-1]

    loop = ServedLoop(RolloutLoop(ScriptedEngine(reply), renderer))
    async with EpisodeServer(loop, ServeConfig(port=0, quiet_s=0.0)) as server, aiohttp.ClientSession() as http:
        playing = asyncio.ensure_future(loop.run(Open(), Episode(Task("Open-v0", 7))))
        async with http.post(f"{server.url}/episodes", json={}) as answer:
            opening = await answer.json()
        agent = Agent(http, f"{opening['root_url']}/v1/chat/completions", opening["messages"], sampled)
        await SHAPES[name](agent)
        async with http.post(f"{opening['root_url']}/finish", json={}):
            trajectory = await playing
    rows = [
        [(list(span.ids), [span.source == "policy" and not span.excluded] * len(span.ids)) for span in row.spans]
        for row in trajectory.rows
    ]
    return agent.calls, rows


def count(calls: Sequence[Call], rows: Sequence[tuple[Sequence[int], Sequence[bool]]]) -> dict[str, int]:
    """Counts the ids of rows; a reply is found in them by its ids, which no other reply has."""
    trained: Counter[int] = Counter()
    for ids, mask in rows:
        learned = [token if is_trained else None for token, is_trained in zip(ids, mask, strict=True)]
        for number, call in enumerate(calls):
            size = len(call.sampled_ids)
            trained[number] += sum(learned[n : n + size] == call.sampled_ids for n in range(len(learned) - size + 1))
    sizes = [len(call.sampled_ids) for call in calls]
    seen = [number for number, call in enumerate(calls) if call.is_seen]
    return {
        "sampled": sum(sizes),
        "rows": len(rows),
        "tokens": sum(len(ids) for ids, _ in rows),
        "once": sum(sizes[number] for number in seen if trained[number] == 1),
        "twice": sum(sizes[number] for number in seen if trained[number] > 1),
        "lost": sum(sizes[number] for number in seen if not trained[number]),
        "unseen": sum(sizes[n] for n, call in enumerate(calls) if not call.is_seen and trained[n]),
    }


def rows_of_peer(python: str, name: str, calls: Sequence[Call]) -> dict[str, list[tuple[list[int], list[bool]]]]:
    """Returns the rows of a peer, as its capture gives them and as its trainer takes them."""
    text = json.dumps([asdict(call) for call in calls])
    done = subprocess.run([python, str(PEERS), name], input=text, stdout=subprocess.PIPE, text=True, check=True)
    rows: dict[str, list[tuple[list[int], list[bool]]]] = json.loads(done.stdout.splitlines()[-1])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for peer in ("verifiers", "openenv"):
        parser.add_argument(f"--{peer}", metavar="PYTHON", help=f"an interpreter that has {peer}")
    options = parser.parse_args()
    print(f"{'shape':<32}{'capture':<31}" + "".join(f"{column:>8}" for column in COLUMNS))
    for name in SHAPES:
        calls, parts = asyncio.run(play(name))
        flat = [([n for ids, _ in row for n in ids], [bit for _, bits in row for bit in bits]) for row in parts]
        tables = {"agentgym": flat}
        for peer in ("verifiers", "openenv"):
            if python := getattr(options, peer):
                rows_by_place = rows_of_peer(python, peer, calls)
                tables |= {f"{peer}, {place}": rows for place, rows in rows_by_place.items()}
        for title, rows in tables.items():
            counts = count(calls, rows)
            print(f"{name:<32}{title:<31}" + "".join(f"{counts[column]:>8}" for column in COLUMNS), flush=True)


if __name__ == "__main__":
    main()

"""A third kind of server, defined and registered here as a user would do it, plays an episode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from aiohttp import web

import agentgym
from agentgym.chat_templates.tokenizer import ChatTokenizer
from agentgym.engines import SERVERS, Sampling, ServerConfig, ServerKind
from agentgym.engines.protocol import Completion, WeightSync
from agentgym.engines.servers.http import HttpClient
from agentgym.engines.servers.replicated import ReplicatedEngine
from agentgym.errors import UnknownName
from agentgym.trainers.config import TrainConfig


@dataclass(frozen=True)
class EchoReplica:
    runner: web.AppRunner
    client: HttpClient
    name: str = "the echo server"
    dtype: str = "float32"

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, *, rid: str, version: int) -> Completion:
        ids = await self.client.post("/sample", {"stop_ids": list(sampling.stop_ids)})
        return Completion(tuple(ids), (-0.5,) * len(ids), (version,) * len(ids), "stop")

    async def update_weights(self, weights: object, version: int) -> WeightSync:
        return WeightSync(version=version)

    async def is_alive(self) -> bool:
        return True

    async def command(self, rid: str | None = None) -> None: ...

    abort = pause = resume = flush = command

    async def close(self) -> None:
        await self.client.close()
        await self.runner.cleanup()


async def open_echo(config: ServerConfig, folder: Path, *, version: int = 0, learner: str = "cpu") -> ReplicatedEngine:
    tokenizer = ChatTokenizer.load(folder)

    async def sample(request: web.Request) -> web.Response:
        return web.json_response([*tokenizer.encode_plain("echo"), (await request.json())["stop_ids"][0]])

    app = web.Application()
    app.router.add_post("/sample", sample)
    await (runner := web.AppRunner(app)).setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    replica = EchoReplica(runner, HttpClient("http://{}:{}".format(*runner.addresses[0])))
    limits = {"vocab_size": tokenizer.vocab_size, "context_window": 2048, "version": version}
    return ReplicatedEngine([replica], config.serving, **limits)


def test_a_kind_of_ones_own_is_an_engine_once_it_is_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnknownName, match=r"unknown engine 'echo'\. Known: local, sglang, vllm"):
        agentgym.create_engine(kind="echo")
    monkeypatch.setattr(SERVERS, "_entries", dict(SERVERS))  # the table is as before after the test
    SERVERS.add("echo", ServerKind(open=open_echo))
    with agentgym.create_engine(kind="echo") as engine:
        played = agentgym.run_episode("GuessNumber-v0", engine, seed=5)
    assert {turn.message.content for turn in played.turns} == {"echo"} and played.status.trainable
    config = TrainConfig(env="GuessNumber-v0", engine="echo", server=ServerConfig(urls=("http://a:1",)))
    assert config.on_servers and config.evaluates_while_learning

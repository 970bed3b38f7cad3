"""An engine actor whose server dies: whoever asks it hears that nobody answered, until the server is back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")

from agentgym.chat_templates import renderer_for
from agentgym.embedded import embedded_folder
from agentgym.engines.protocol import Sampling
from agentgym.engines.servers.http import HttpUnreachable
from agentgym.engines.servers.server_config import ServerConfig
from agentgym.errors import EngineError
from agentgym.model.model_folder import load_decoder, published_views
from agentgym.rollout import SamplingConfig
from agentgym.testing.fake_server.server import FakeSglang
from agentgym.testing.fixtures import fake_sglang
from agentgym.trainers.cluster import engine_actor
from agentgym.trainers.cluster.actors import Actor
from agentgym.trainers.cluster.board import Board, Posted
from agentgym.trainers.cluster.engine_actor import EngineActor
from agentgym.trainers.cluster.inner_engine import Part, open_inner
from agentgym.trainers.cluster.weight_store import store_weights
from agentgym.trainers.config import TrainConfig
from agentgym.types import Message

__all__ = ["fake_sglang"]
PROMPT = tuple(range(5, 45))
LIMIT_S = 60.0


class Local:
    """A board in this process, asked as one in an actor is."""

    def __init__(self) -> None:
        self.board = Board()

    async def call(self, method: Callable[..., Any], *arguments: Any) -> Any:
        return await method(self.board, *arguments)

    def tell(self, method: Callable[..., object], *arguments: Any) -> None:
        """Warnings of an actor, which nobody reads here."""


async def until_ready(actor: EngineActor) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not await actor.is_ready():
            await asyncio.sleep(0.05)


def part_on(server: FakeSglang, run: TrainConfig, logs: Path) -> Part:
    """What an actor is told whose server runs already."""
    config = replace(run, engine="sglang", server=ServerConfig(urls=(server.url,)))
    return Part(config=config, number=0, folder=str(embedded_folder()), logs=str(logs), version=0)


def test_requests_wait_for_a_lost_server_and_get_the_newest_weights(
    fake_sglang: Callable[..., FakeSglang],
    small_run: TrainConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    own_warnings: None,
    parcels_here: None,
) -> None:
    monkeypatch.setattr(engine_actor, "was_restarted", lambda: False)  # Ray says so inside of its actors alone
    server = fake_sglang()
    part = part_on(server, small_run, tmp_path)
    posted = Posted(1, store_weights(published_views(load_decoder(embedded_folder()))))
    board, sampling = Local(), Sampling(max_tokens=4)

    async def run() -> None:
        actor = EngineActor("engine 0", part, cast(Actor[Board], board))
        assert (await actor.identity()).vocab_size == 1984
        await board.board.post(posted)
        await actor.update(posted)
        await asyncio.to_thread(server.kill)
        orders = {
            "generate": lambda: actor.generate(PROMPT, sampling, "a"),
            "pause": actor.pause,
            "resume": actor.resume,
            "flush": actor.flush,
            "update": lambda: actor.update(posted),
        }
        for _ in range(2):  # then it is asked whether it is ready, and tries to begin anew
            for order in orders.values():
                with pytest.raises(HttpUnreachable, match="engine 0 has lost its server"):
                    await order()
            assert not await actor.is_ready()
        fake_sglang(port=int(server.url.rpartition(":")[2]))
        await until_ready(actor)
        assert (await actor.generate(PROMPT, sampling, "a")).policy_versions == (1,) * 4
        assert actor._inner is not None
        await actor._inner.engine.close()  # an actor ends with its process

    asyncio.run(run())


def test_a_restarted_actor_without_its_server_is_unreachable_and_a_new_one_fails(
    fake_sglang: Callable[..., FakeSglang],
    small_run: TrainConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    own_warnings: None,
) -> None:
    server = fake_sglang()
    part = part_on(server, small_run, tmp_path)
    server.kill()

    async def identity(*, was_restarted: bool) -> None:
        monkeypatch.setattr(engine_actor, "was_restarted", lambda: was_restarted)
        await EngineActor("engine 0", part, cast(Actor[Board], Local())).identity()

    with pytest.raises(HttpUnreachable, match="engine 0 has lost its server"):
        asyncio.run(identity(was_restarted=True))
    with pytest.raises(EngineError) as refused:
        asyncio.run(identity(was_restarted=False))
    assert "has lost its server" not in str(refused.value)


def test_an_engine_in_an_actor_ends_a_reply_at_a_stop_string_with_its_own_tokenizer(
    small_run: TrainConfig, tmp_path: Path
) -> None:
    renderer = renderer_for(embedded_folder())
    sampling = SamplingConfig(temperature=0.0, stop=("call",)).for_reply(40, seed=0, renderer=renderer)

    async def play() -> tuple[str, str]:
        folder = str(embedded_folder())
        inner = await open_inner(Part(config=small_run, number=0, folder=folder, logs=str(tmp_path), version=0))
        prompt = renderer.render([Message("user", "Hello")])
        plain_sampling = replace(sampling, decode=None)
        whole = await inner.generate(prompt, replace(plain_sampling, stop=()), "a")
        ended = await inner.generate(prompt, plain_sampling, "b")
        await inner.engine.close()
        return renderer.decode(whole.ids), renderer.decode(ended.ids)

    whole, ended = asyncio.run(play())
    assert whole.startswith(ended) and "call" in ended and len(ended) < len(whole)

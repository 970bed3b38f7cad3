"""A fake SGLang server: the native contract of SGLang 0.5.23 with scripted replies, timing and faults, without a GPU.

`with FakeSglang(FakeConfig(reply=script)) as server:` serves in this process; `agentgym fake-server` in its own.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from agentgym.engines.scripted import LogNormalDelay, Reply
from agentgym.errors import AgentGymError, ConfigError, EngineError
from agentgym.http_guard import HttpGuard, choose_token
from agentgym.settings.functions import check_at_least
from agentgym.testing.fake_server.chat import FakeChat
from agentgym.testing.fake_server.control import FakeControl
from agentgym.testing.fake_server.faults import Faults
from agentgym.testing.fake_server.generate import (
    Dropped,
    FakeStats,
    Generator,
    HttpError,
    Killed,
    read_generate_request,
)
from agentgym.testing.fake_server.http import Endpoint, FakeHost, HttpAnswer, HttpCall, HttpStream
from agentgym.testing.fake_server.model import FakeModel
from agentgym.testing.fake_server.sampler import FakeSampler
from agentgym.testing.fake_server.script import random_reply
from agentgym.testing.fake_server.weights import FakeWeights
from agentgym.tools.calling.background_loop import BackgroundLoop
from agentgym.types import JSON

__all__ = ["FakeConfig", "FakeServer", "FakeSglang", "FakeStats"]

_log = logging.getLogger(__name__)
PATIENCE_S = 30.0


@dataclass(frozen=True, kw_only=True)
class FakeConfig:
    """The model, replies and timing of a fake server."""

    model: Path | str | None = None
    """The model folder that it pretends to serve (vocabulary, window, tokenizer, checksums); None: the embedded one."""
    reply: Reply | None = None
    """`(session, prompt_ids, sampling) -> reply`; None gives random ids. A session is the part of a request id before
    the last `#`. A reply without an end token gets one."""
    latency_median_s: float = 0.0
    """The seconds before the first id of a reply, drawn log-normally."""
    latency_sigma: float = 1.0
    """The spread of the latency's logarithm; 1 makes one reply in a hundred ten times as slow as the median."""
    token_s: float = 0.0
    """The seconds per id."""
    seed: int = 0
    """The seed of random replies and latencies."""
    faults: Faults = dataclasses.field(default_factory=Faults)
    host: str = "127.0.0.1"
    port: int = 0
    """The port; 0 is any free one."""
    token: str | None = None
    """The API key that a client sends; None requires nothing on loopback, and a random token elsewhere."""
    allowed_hosts: tuple[str, ...] = ()
    """The names in the Host header that are served, besides IP addresses and this machine's own name."""

    def __post_init__(self) -> None:
        check_at_least(0, self, "latency_median_s", "latency_sigma", "token_s")
        if not 0 <= self.port < 65536:
            raise ConfigError(f"a port is in [0, 65535], got {self.port}")


class FakeServer:
    """The endpoints of a fake server, on the running event loop. `on_death` is called when the server is killed."""

    def __init__(self, config: FakeConfig, on_death: Callable[[], None] | None = None) -> None:
        self.model = FakeModel(config.model)
        self.sampler = FakeSampler()
        self.weights = FakeWeights(self.model.folder, tied=self.model.tied)
        delay = LogNormalDelay(config.latency_median_s, config.latency_sigma, config.seed)
        self.generator = Generator(
            self.model,
            self.sampler,
            config.reply or random_reply(self.model, config.seed),
            delay_s=delay,
            token_s=config.token_s,
            faults=config.faults,
        )
        self.control = FakeControl(self.model, self.sampler, self.weights)
        self._chat = FakeChat(self.model, self.generator)
        self._on_death = on_death
        own: dict[str, Endpoint] = {
            "/generate": self._generate,
            "/v1/chat/completions": self._chat.complete,
            "/fake/stats": self._stats,
            "/fake/faults": self._faults,
            "/fake/kill": self._kill,
        }
        endpoints = {path: self._answer_errors(endpoint) for path, endpoint in (self.control.endpoints | own).items()}
        self.guard = HttpGuard(
            config.host, token=config.token or choose_token(config.host), allowed_hosts=config.allowed_hosts
        )
        self.host = FakeHost(endpoints, config.host, config.port, guard=self.guard)

    def stats(self) -> FakeStats:
        """Returns the counts so far."""
        seen = self.generator.stats
        return dataclasses.replace(
            seen,
            in_flight=self.sampler.num_in_flight,
            sessions=dict(seen.sessions),
            faults=dict(seen.faults),
            faulted=tuple(self.generator.faulted),
            version=self.sampler.version,
            updates=self.control.num_updates,
            tensors=self.weights.num_tensors,
            payload_digests=tuple(self.weights.digests),
            adapters=tuple(self.weights.adapters),
            released=tuple(sorted(self.control.released)),
        )

    def _answer_errors(self, endpoint: Endpoint) -> Endpoint:
        """Returns the endpoint with its exceptions turned into answers."""

        async def answer(call: HttpCall) -> HttpAnswer | HttpStream:
            try:
                return await endpoint(call)
            except HttpError as error:
                self.generator.stats.refused += error.status == 400
                return HttpAnswer(error.body, error.status, error.headers)
            except Dropped as error:
                return HttpAnswer(error.answer, dropped=True)
            except Killed as error:
                await self.die(str(error))
                return HttpAnswer(None, 500)
            except asyncio.CancelledError:
                self.generator.stats.left += 1
                raise

        return answer

    async def die(self, reason: str) -> None:
        """Ends like a killed process: no connection is answered any more."""
        _log.warning("the fake server dies: %s", reason)
        await self.host.kill()
        if self._on_death is not None:
            self._on_death()

    async def _generate(self, call: HttpCall) -> HttpAnswer | HttpStream:
        request = read_generate_request(call.body, self.model)
        adapter = call.body.get("lora_path")
        if adapter is not None and adapter not in self.weights.adapters:
            raise HttpError.bad(f"The following requested LoRA adapters are not loaded: {{{adapter!r}}}")
        run = await self.generator.start(request)
        if call.body.get("stream"):
            return HttpStream(self._events(self.generator.pieces(run)))
        return HttpAnswer(await self.generator.whole(run))

    async def _events(self, pieces: AsyncIterator[Mapping[str, Any]]) -> AsyncIterator[str | None]:
        try:
            async for piece in pieces:
                yield json.dumps(piece, separators=(",", ":"))
        except Dropped:
            yield None
        except Killed as error:
            await self.die(str(error))
            yield None
        else:
            yield "[DONE]"

    async def _stats(self, _: HttpCall) -> HttpAnswer:
        return HttpAnswer(dataclasses.asdict(self.stats()))

    async def _faults(self, call: HttpCall) -> HttpAnswer:
        if call.body:
            try:
                self.generator.faults = Faults.from_json(call.body)
            except AgentGymError as error:
                raise HttpError.bad(str(error)) from error
        body: dict[str, JSON] = self.generator.faults.to_json()
        return HttpAnswer(body)

    async def _kill(self, _: HttpCall) -> HttpAnswer:
        raise Killed("/fake/kill was called")


class FakeSglang:
    """A fake server on a thread of this process, with an event loop of its own."""

    def __init__(self, config: FakeConfig | None = None) -> None:
        self.config = config or FakeConfig()
        self.url = ""
        """The URL at which it listens, once started."""
        self._background = BackgroundLoop("fake-sglang")
        self._server: FakeServer | None = None
        self._closed = False

    def start(self) -> Self:
        """Begins to serve; raises ConfigError if the port is taken."""
        self._closed = False
        try:
            self.url = self._run(self._begin())
        except BaseException:
            self.close()
            raise
        return self

    @property
    def stats(self) -> FakeStats:
        """The counts so far."""
        server = self._running()

        async def read() -> FakeStats:
            return server.stats()

        stats: FakeStats = self._run(read())
        return stats

    def set_faults(self, faults: Faults) -> None:
        """Sets the faults from the next request on; a schedule counts from there."""
        server = self._running()

        async def put() -> None:
            server.generator.faults = faults

        self._run(put())

    def kill(self) -> None:
        """Closes every connection at once and listens no more, as after kill -9. `stats` can still be read."""
        self._run(self._running().host.kill())

    def close(self) -> None:
        """Ends the server and its thread; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        if self._server is not None:
            self._run(self._server.host.close())
        self._background.close(PATIENCE_S)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    async def _begin(self) -> str:
        self._server = FakeServer(self.config)
        return await self._server.host.start()

    def _running(self) -> FakeServer:
        if self._server is None or self._closed:
            raise EngineError("the fake server is not running: use it in a `with` block, or call start()")
        return self._server

    def _run(self, work: Awaitable[Any]) -> Any:
        async def run() -> Any:
            return await work

        return self._background.submit(run()).result(PATIENCE_S)

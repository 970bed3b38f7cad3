"""The HTTP server for served episodes: the dialects of agents, and the few calls that play an environment."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from urllib.parse import urlsplit

from aiohttp import web

from agentgym.errors import ConfigError
from agentgym.http_guard import (
    HttpGuard,
    RequestRejected,
    format_url,
    is_loopback,
    listen,
    parse_json_object,
    request_key,
)
from agentgym.openai_wire import WireError, message_to_openai
from agentgym.rollout.serving.agent_session import (
    AgentExchange,
    AgentSession,
    EpisodeEnded,
    FinishRequest,
    Opening,
    Replies,
    StepAnswer,
    StepRequest,
)
from agentgym.rollout.serving.branch_label import agent_name, client_name, header_label
from agentgym.rollout.serving.mcp_endpoint import MCP_PATH, answer_mcp, mcp_refusal
from agentgym.rollout.serving.served_loop import ServedLoop
from agentgym.rollout.serving.wires.chat import ChatWire, read_message, wire_messages
from agentgym.rollout.serving.wires.messages import CountTokensWire, MessagesWire
from agentgym.rollout.serving.wires.responses import ResponsesWire
from agentgym.rollout.serving.wires.wire import CONTEXT_EXCEEDED, AgentRequest, AgentWire, Refusal, RequestRefused
from agentgym.settings.config_class import config_class
from agentgym.settings.functions import check_above_zero, check_at_least
from agentgym.trajectory import StopReason
from agentgym.types import JSON

__all__ = ["EpisodeServer", "ServeConfig"]

logger = logging.getLogger(__name__)

WIRES: tuple[AgentWire, ...] = (ChatWire(), ResponsesWire(), CountTokensWire(), MessagesWire())
MODEL = "policy"
"""The name under which the served model is listed; an agent may ask for any name."""
MAX_BODY = 64 << 20
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@config_class
class ServeConfig:
    """The address and the limits of the server for episodes."""

    host: str = "127.0.0.1"
    """The address to listen on."""
    port: int = 8000
    """The port; 0 takes a free one."""
    token: str | None = None
    """The API key that an agent has to send; None demands nothing. An address that is not loopback demands a token."""
    allowed_hosts: tuple[str, ...] = ()
    """Names in the Host header that are accepted in addition to this machine's own."""
    public_url: str = ""
    """The address at which agents reach the server, if they do not connect to it directly (a proxy, a forwarded
    port)."""
    idle_s: float = 120.0
    """Seconds without a request after which an agent is gone; its episode ends with the status `timeout`."""
    claim_s: float = 20.0
    """Seconds that a claim waits for an episode before the agent has to ask again."""
    quiet_s: float = 1.0
    """After the run the server stays until it got no request for this many seconds, and at most ten times as long, so
    that agents learn that the run is over."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"a port is a number from 0 to 65535, got {self.port}")
        check_above_zero(self, "idle_s", "claim_s")
        check_at_least(0, self, "quiet_s")
        if self.token is None and not is_loopback(self.host):
            raise ConfigError(f"a server at {self.host} is reached from other machines: give it a token")


class EpisodeServer:
    """Serves the episodes of a ServedLoop, from `async with` to its end; errors have the form of the dialect.

    | Call | Answer |
    |---|---|
    | `POST /episodes` | the next episode; 204: none yet, ask again; 410: the run is over |
    | `POST /episodes/ID/v1/chat/completions`, `/v1/responses`, `/v1/messages` | the policy's reply, recorded |
    | `POST /episodes/ID/v1/messages/count_tokens` | the number of tokens of a prompt |
    | `POST /v1/...` | the same; the episode's id is the API key (`Bearer`, `x-api-key`), or the header `X-Episode` |
    | `POST /episodes/ID/step` | the environment's answer to the last reply |
    | `POST /episodes/ID/mcp`, `POST /mcp` | an answer of the environment's MCP server: a call of a tool is a step |
    | `POST /episodes/ID/finish` | the environment's verdict: the agent has ended |
    | `GET /v1/models`, `/v1/models/NAME`, `GET /health` | the model; how many episodes wait and are played |
    """

    def __init__(self, loop: ServedLoop, config: ServeConfig | None = None) -> None:
        self.loop = loop
        self.config = config or ServeConfig()
        self.url = ""
        """The URL `http://host:port`, once the server listens."""
        self._guard = HttpGuard(
            self.config.host,
            token=self.config.token,
            allowed_hosts=(*self.config.allowed_hosts, urlsplit(self.config.public_url).hostname or ""),
            accepts_key=lambda key: loop.session(key) is not None,
        )
        middlewares = [self._answer_errors, self._guard.middleware(_raise_rejection)]
        app = web.Application(client_max_size=MAX_BODY, middlewares=middlewares)
        app.router.add_post("/episodes", self._claim)
        app.router.add_post("/episodes/{episode}/step", self._step)
        app.router.add_post("/episodes/{episode}/finish", self._finish)
        for prefix in ("", "/episodes/{episode}"):
            for wire in WIRES:
                app.router.add_post(prefix + wire.path, partial(self._complete, wire))
            app.router.add_route("*", f"{prefix}{MCP_PATH}", self._mcp)
            app.router.add_get(f"{prefix}/v1/models", self._models)
            app.router.add_get(f"{prefix}/v1/models/{{model:.+}}", self._model)
        app.router.add_get("/health", self._health)
        # A claim whose agent has gone must not take an episode: its handler is cancelled.
        self._runner = self._guard.runner(app)
        self._last_request = 0.0
        self._exchanges: dict[object, AgentExchange] = {}
        """The exchange whose answer was sent last on each connection, until its next request."""

    async def __aenter__(self) -> EpisodeServer:
        await self._runner.setup()
        self._watch_connections()
        self.url = await listen(self._runner, self._guard, self.config.host, self.config.port)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.loop.end()
        quiet_s, latest = self.config.quiet_s, time.monotonic() + 10 * self.config.quiet_s
        try:
            while self._last_request and time.monotonic() < min(self._last_request + quiet_s, latest):
                await asyncio.sleep(0.05)
        finally:
            await self._runner.cleanup()

    def _watch_connections(self) -> None:
        """Marks an answer as lost whose connection the client resets: it has not read all of it."""
        server = self._runner.server
        assert server is not None
        on_lost = server.connection_lost

        def connection_lost(handler: web.RequestHandler, error: BaseException | None = None) -> None:
            exchange = self._exchanges.pop(handler, None)
            if exchange is not None and error is not None:
                exchange.is_lost = True
            on_lost(handler, error)

        server.connection_lost = connection_lost  # type: ignore[method-assign,assignment]  # no hook

    @web.middleware
    async def _answer_errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        self._last_request = time.monotonic()
        self._exchanges.pop(request.protocol, None)
        try:
            return await handler(request)
        except RequestRejected as error:
            return _refuse(request, Refusal(error.status, str(error), error.code))
        except WireError as error:
            return _refuse(request, Refusal(400, str(error), "invalid_value", error.param))
        except RequestRefused as error:
            return _refuse(request, Refusal(400, str(error), error.code, error.param))
        except EpisodeEnded as error:
            if error.code == StopReason.CONTEXT:
                return _refuse(request, Refusal(400, str(error), CONTEXT_EXCEEDED, "messages"))
            return _refuse(request, Refusal(410, str(error), error.code))
        except web.HTTPException as error:
            return _refuse(request, Refusal(error.status, f"{request.method} {request.path}: {error.reason}"))
        finally:
            self._last_request = time.monotonic()

    async def _claim(self, request: web.Request) -> web.StreamResponse:
        if self.config.token is not None and self.loop.session(request_key(request)) is not None:
            raise RequestRejected(
                401, "invalid_api_key", "an episode's key claims no other one: send the server's token"
            )
        opening = await self.loop.claim(self.config.claim_s)
        if opening is None:
            return web.Response(status=204)
        return web.json_response(_opening(opening, self._public_url(request)))

    def _public_url(self, request: web.Request) -> str:
        """Returns the URL for an agent: the configured one, else the address that it connected to (not its header)."""
        transport = request.transport
        address = transport.get_extra_info("sockname") if transport is not None else None
        return self.config.public_url.rstrip("/") or (format_url(*address[:2]) if address else self.url)

    async def _complete(self, wire: AgentWire, request: web.Request) -> web.StreamResponse:
        session = self._session(request)
        body = parse_json_object(await request.read())
        # Each message and tool has a token at least, and a million of them take long to read.
        self.loop.check_room(
            max((len(value) for value in body.values() if isinstance(value, list)), default=0), "at least "
        )
        try:
            agent_request = wire.read(body, session.stored)
        except (WireError, RequestRefused):
            if session.is_over:  # it may name a response that was stored while the episode was played
                raise session.end from None
            raise
        if not agent_request.messages:
            raise RequestRefused("the request has no message that can be read", "no_messages", "messages")
        if agent_request.messages[-1].role == "assistant" and not wire.takes_prefill:
            text = "the last message is the assistant's: no agent starts a reply"
            raise RequestRefused(text, "no_prefill", "messages")
        agent_request = replace(
            agent_request,
            label=header_label(request.headers, agent_request),
            client=client_name(request.headers, wire.path),
            agent=agent_name(request.headers),
        )
        exchange = session.ask(agent_request, is_retry=request.headers.get("x-stainless-retry-count", "0") != "0")
        answer = await exchange.answer()
        assert isinstance(answer, Replies)
        try:
            response = await _send(wire, request, agent_request, answer, session)
        except BaseException:  # the agent has closed its connection, or this task is cancelled because it has
            exchange.is_lost = True
            raise
        self._exchanges[request.protocol] = exchange
        return response

    async def _step(self, request: web.Request) -> web.StreamResponse:
        session = self._session(request)
        body = parse_json_object(await request.read())
        message = body.get("message")
        step_request = StepRequest(None if message is None else read_message(message))
        return web.json_response(_answer(await session.step(step_request)))

    async def _finish(self, request: web.Request) -> web.StreamResponse:
        return web.json_response(_answer(await self._session(request).step(FinishRequest())))

    async def _mcp(self, request: web.Request) -> web.StreamResponse:
        return await answer_mcp(self._session(request), request)

    async def _models(self, request: web.Request) -> web.StreamResponse:
        model = self._model_card(MODEL)
        ends = {"first_id": MODEL, "last_id": MODEL, "has_more": False}
        return web.json_response({"object": "list", "data": [model], **ends})

    async def _model(self, request: web.Request) -> web.StreamResponse:
        return web.json_response(self._model_card(request.match_info["model"]))

    def _model_card(self, name: str) -> dict[str, JSON]:
        """Returns a model in the forms of OpenAI and Anthropic."""
        own: dict[str, JSON] = {"id": name, "object": "model", "created": 0, "owned_by": "agentgym"}
        dated: dict[str, JSON] = {"type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}
        return {**own, **dated, "max_model_len": self.loop.window}

    async def _health(self, request: web.Request) -> web.StreamResponse:
        loop = self.loop
        counts = {"waiting": loop.num_waiting, "playing": loop.num_playing, "over": loop.is_over}
        return web.json_response({"status": "ok", **counts})

    def _session(self, request: web.Request) -> AgentSession:
        """Returns the episode of a request: by its path, the header `X-Episode`, or the API key."""
        name = request.match_info.get("episode") or request.headers.get("X-Episode")
        session = self.loop.session(name or request_key(request))
        if session is None:
            how = "claim one with POST /episodes, and name it in the path, as the API key or in the header X-Episode"
            if name:
                raise RequestRejected(404, "not_found", f"there is no episode {name!r:.80}; {how}")
            if self.config.token is not None:  # the key is the server's own, or the guard had refused it
                raise RequestRejected(404, "not_found", f"the request names no episode; {how}")
            raise RequestRejected(401, "invalid_api_key", f"the API key is that of no episode; {how}")
        return session


def _raise_rejection(refusal: RequestRejected) -> web.StreamResponse:
    """Raises the guard's refusal, which is answered in the dialect of the request's path."""
    raise refusal


def _refuse(request: web.Request, refusal: Refusal) -> web.Response:
    """Returns an error in the dialect of the request's path, and logs it."""
    logger.info("%s %s: refused with %d: %s", request.method, request.path, refusal.status, refusal.message)
    if request.path.endswith(MCP_PATH):
        return web.json_response(mcp_refusal(refusal), status=refusal.status)
    wire = next((wire for wire in WIRES if wire.path in request.path), WIRES[0])
    return web.json_response(wire.error(refusal), status=refusal.status)


async def _send(
    wire: AgentWire, request: web.Request, agent_request: AgentRequest, answer: Replies, session: AgentSession
) -> web.StreamResponse:
    """Sends the replies to the last byte, whole or as a stream; raises if the agent has closed its connection."""
    if not agent_request.stream:
        body = wire.answer(agent_request, answer.replies, session.stored)
        whole = web.json_response(body, dumps=partial(json.dumps, default=dict))
        await whole.prepare(request)
        await whole.write_eof()
        return whole
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    for name, event in wire.events(agent_request, answer.replies, session.stored):
        head = f"event: {name}\n" if name else ""
        await response.write(f"{head}data: {json.dumps(event, default=dict)}\n\n".encode())
    if isinstance(wire, ChatWire):
        await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


def _opening(opening: Opening, url: str) -> dict[str, JSON]:
    return {
        "episode": opening.episode,
        "base_url": f"{url}/episodes/{opening.episode}/v1",
        "root_url": f"{url}/episodes/{opening.episode}",
        "messages": [message_to_openai(message) for message in opening.messages],
        "tools": [tool.to_openai() for tool in opening.tools],
    }


def _answer(answer: StepAnswer) -> dict[str, JSON]:
    history = answer.history
    instead = {} if history is None else {"history": [message_to_openai(message) for message in history]}
    return {
        **instead,
        "messages": wire_messages(answer.messages, answer.turn),
        "reward": answer.reward,
        "terminated": answer.terminated,
        "truncated": answer.truncated,
    }

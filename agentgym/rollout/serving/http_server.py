"""The HTTP server for served episodes: OpenAI's chat completions, and the few calls that play an environment."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

from aiohttp import web

from agentgym.errors import AgentGymError, ConfigError
from agentgym.http_guard import HttpGuard, RequestRejected, format_url, is_loopback, listen, parse_json_object
from agentgym.openai_wire import WireError, message_to_openai
from agentgym.rollout.serving.agent_session import (
    AgentSession,
    EpisodeEnded,
    Opening,
    RequestRefused,
    SessionBusy,
    StepAnswer,
    StepRequest,
)
from agentgym.rollout.serving.chat_completion import (
    ChatCompletion,
    ChatRequest,
    chunks_to_openai,
    read_chat_request,
    read_message,
    reply_to_openai,
    wire_answer,
)
from agentgym.rollout.serving.served_loop import CONTEXT_EXCEEDED, ServedLoop
from agentgym.settings import check_above_zero, check_at_least
from agentgym.settings.config_class import config_class
from agentgym.trajectory import StopReason
from agentgym.types import JSON

__all__ = ["EpisodeServer", "ServeConfig"]

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
    """Serves the episodes of a ServedLoop, from `async with` to its end; errors have OpenAI's form.

    | Call | Answer |
    |---|---|
    | `POST /episodes` | the next episode; 204: none yet, ask again; 410: the run is over |
    | `POST /episodes/ID/v1/chat/completions` | the policy's reply, recorded |
    | `POST /v1/chat/completions` | the same; the episode's id is the API key, or the header `X-Episode` |
    | `POST /episodes/ID/step` | the environment's answer to the last reply |
    | `GET /v1/models`, `GET /health` | the model's name; how many episodes wait and are played |
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
        middlewares = [self._answer_errors, self._guard.middleware(_rejection_response)]
        app = web.Application(client_max_size=MAX_BODY, middlewares=middlewares)
        app.router.add_post("/episodes", self._claim)
        app.router.add_post("/episodes/{episode}/step", self._step)
        for prefix in ("", "/episodes/{episode}"):
            app.router.add_post(f"{prefix}/v1/chat/completions", self._chat)
            app.router.add_get(f"{prefix}/v1/models", self._models)
        app.router.add_get("/health", self._health)
        # A claim whose agent has gone must not take an episode: its handler is cancelled.
        self._runner = self._guard.runner(app)
        self._last_request = 0.0

    async def __aenter__(self) -> EpisodeServer:
        await self._runner.setup()
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

    @web.middleware
    async def _answer_errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        self._last_request = time.monotonic()
        try:
            return await handler(request)
        except (WireError, RequestRefused) as error:
            return _error(400, error, getattr(error, "code", None), getattr(error, "param", None))
        except SessionBusy as error:
            return _error(409, error, "episode_busy")
        except EpisodeEnded as error:
            if error.code == StopReason.CONTEXT:
                return _error(400, error, CONTEXT_EXCEEDED, "messages")
            return _error(410, error, error.code)
        except web.HTTPException as error:
            return _error(error.status, f"{request.method} {request.path}: {error.reason}")
        finally:
            self._last_request = time.monotonic()

    async def _claim(self, request: web.Request) -> web.StreamResponse:
        opening = await self.loop.claim(self.config.claim_s)
        if opening is None:
            return web.Response(status=204)
        return web.json_response(_opening(opening, self._public_url(request)))

    def _public_url(self, request: web.Request) -> str:
        """Returns the URL for an agent: the configured one, else the address that it connected to (not its header)."""
        transport = request.transport
        address = transport.get_extra_info("sockname") if transport is not None else None
        return self.config.public_url.rstrip("/") or (format_url(*address[:2]) if address else self.url)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        session = self._session(request)
        chat_request = read_chat_request(parse_json_object(await request.read()))
        reply = await session.chat(chat_request)
        if chat_request.stream:
            return await _stream(request, chat_request, reply)
        return web.json_response(reply_to_openai(reply, MODEL))

    async def _step(self, request: web.Request) -> web.StreamResponse:
        session = self._session(request)
        body = parse_json_object(await request.read())
        message = body.get("message")
        step_request = StepRequest(None if message is None else read_message(message))
        return web.json_response(_answer(await session.step(step_request)))

    async def _models(self, request: web.Request) -> web.StreamResponse:
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "agentgym"}
        return web.json_response({"object": "list", "data": [model]})

    async def _health(self, request: web.Request) -> web.StreamResponse:
        loop = self.loop
        counts = {"waiting": loop.num_waiting, "playing": loop.num_playing, "over": loop.is_over}
        return web.json_response({"status": "ok", **counts})

    def _session(self, request: web.Request) -> AgentSession:
        """Returns the episode of a request: by its path, the header `X-Episode`, or the API key."""
        key = request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        name = request.match_info.get("episode") or request.headers.get("X-Episode") or key
        session = self.loop.session(name)
        if session is None:
            how = "claim one with POST /episodes, and name it in the path, as the API key or in the header X-Episode"
            raise web.HTTPNotFound(reason=f"there is no episode {name!r:.80}; {how}")
        return session


def _rejection_response(refusal: RequestRejected) -> web.Response:
    return _error(refusal.status, refusal, refusal.code)


async def _stream(request: web.Request, chat_request: ChatRequest, reply: ChatCompletion) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    for chunk in chunks_to_openai(reply, MODEL, include_usage=chat_request.include_usage):
        await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


def _opening(opening: Opening, url: str) -> dict[str, JSON]:
    return {
        "episode": opening.episode,
        "base_url": f"{url}/episodes/{opening.episode}/v1",
        "messages": [message_to_openai(message) for message in opening.messages],
        "tools": [tool.to_openai() for tool in opening.tools],
    }


def _answer(answer: StepAnswer) -> dict[str, JSON]:
    history = answer.history
    instead = {} if history is None else {"history": [message_to_openai(message) for message in history]}
    return {
        **instead,
        "messages": wire_answer(answer.messages, answer.turn),
        "reward": answer.reward,
        "terminated": answer.terminated,
        "truncated": answer.truncated,
    }


def _error(status: int, error: AgentGymError | str, code: str | None = None, param: str | None = None) -> web.Response:
    kind = "invalid_request_error" if status < 500 else "server_error"
    body = {"error": {"message": str(error), "type": kind, "param": param, "code": code}}
    return web.json_response(body, status=status)

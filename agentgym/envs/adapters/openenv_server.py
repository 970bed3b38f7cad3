"""Serves environments over OpenEnv's protocol: a WebSocket is a session with an environment of its own."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from aiohttp import WSCloseCode, WSMsgType, web

from agentgym.call_json import as_call
from agentgym.envs.base.action import Action
from agentgym.envs.base.text_env import Info, TextEnv
from agentgym.errors import AgentGymError
from agentgym.http_guard import HttpGuard, RequestRejected, listen, parse_json_object
from agentgym.types import JSON, Message, ToolCall, ToolResult

__all__ = ["Session", "describe_served", "openenv_app", "serve_openenv"]

logger = logging.getLogger(__name__)

GUARD = web.AppKey("guard", HttpGuard)
MAX_MESSAGE = 16 << 20
SHUTDOWN_S = 5.0
"""The seconds that calls of environments have to end after serving has ended."""
SESSION_IDLE_S = 3600.0
"""The seconds without a message after which a session ends, so that clients that forget theirs do not take all."""
METADATA: dict[str, JSON] = {"type": "object", "additionalProperties": True, "default": {}}
CALL: dict[str, JSON] = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "arguments": {"type": "object", "default": {}}},
    "required": ["name"],
}
ACTION: dict[str, JSON] = {
    "title": "Reply",
    "description": "A reply of the agent: text, calls of tools, or both. Text alone is read as what a person typed, "
    "which may be a command; with metadata.reply true it is a model's, which calls tools by calls alone.",
    "type": "object",
    "properties": {
        "message": {"type": "string", "default": ""},
        "tool_calls": {"type": "array", "items": CALL, "default": []},
        "metadata": METADATA,
    },
}
OBSERVATION: dict[str, JSON] = {
    "title": "Observation",
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "done": {"type": "boolean", "default": False},
        "reward": {"type": ["number", "null"], "default": None},
        "metadata": METADATA,
    },
}
STATE: dict[str, JSON] = {
    "title": "State",
    "type": "object",
    "properties": {"episode_id": {"type": ["string", "null"]}, "step_count": {"type": "integer", "minimum": 0}},
}


class OpenEnvProtocolError(AgentGymError, ValueError):
    """Raised for a message that the protocol does not allow; `code` is OpenEnv's name for the error."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code

    def __reduce__(self) -> tuple[object, ...]:
        return (OpenEnvProtocolError, (self.code, str(self)))


class Session:
    """One environment and its episode, driven by messages of OpenEnv."""

    def __init__(self, env: TextEnv) -> None:
        self._env = env
        self._episode_id: str | None = None
        self._one_at_a_time = asyncio.Lock()

    async def answer(self, kind: str, data: object) -> dict[str, Any]:
        """The message that answers one of type `reset`, `step` or `state`."""
        if not isinstance(data, Mapping):
            raise OpenEnvProtocolError("VALIDATION_ERROR", f"data is an object, got {type(data).__name__}")
        if kind in ("reset", "step"):
            async with self._one_at_a_time:
                return {"type": "observation", "data": await (self.reset if kind == "reset" else self.step)(data)}
        if kind == "state":
            return {"type": "state", "data": self.state()}
        raise OpenEnvProtocolError("UNKNOWN_TYPE", f"a message is of type reset, step, state or close, got {kind!r}")

    async def reset(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """Begins an episode."""
        seed, episode_id = data.get("seed"), data.get("episode_id")
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or seed < 0):
            raise OpenEnvProtocolError("VALIDATION_ERROR", f"a seed is a whole number from 0 on, got {seed!r}")
        options = {name: value for name, value in data.items() if name not in ("seed", "episode_id")}
        text, info = await self._env.areset(seed=seed, options=options or None)
        self._episode_id = None if episode_id is None else str(episode_id)
        return _format_observation(text, info, reward=None, done=False)

    async def step(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """Plays a reply."""
        text, reward, terminated, truncated, info = await self._env.astep(_action(data))
        return _format_observation(text, info, reward=reward, done=terminated or truncated, truncated=truncated)

    def state(self) -> dict[str, Any]:
        """The id of the episode, and its number of steps."""
        return {"episode_id": self._episode_id, "step_count": self._env.turns}

    async def close(self) -> None:
        """Closes the environment."""
        await self._env.aclose()


class _Doors:
    """The handlers of the paths: a session for every WebSocket, and one for all requests that know no sessions."""

    def __init__(self, make: Callable[[], TextEnv], max_sessions: int) -> None:
        self._make = make
        self._max_sessions = max_sessions
        self._sockets: set[web.WebSocketResponse] = set()
        self._session: Session | None = None

    async def socket(self, request: web.Request) -> web.WebSocketResponse:
        """A session, until its client leaves."""
        answers = web.WebSocketResponse(max_msg_size=MAX_MESSAGE, receive_timeout=SESSION_IDLE_S)
        await answers.prepare(request)
        if len(self._sockets) >= self._max_sessions:
            await answers.send_json(_error("CAPACITY_REACHED", f"{self._max_sessions} sessions are open"))
            await answers.close()
            return answers
        self._sockets.add(answers)
        try:
            await _converse(self._make, answers)
        finally:
            self._sockets.discard(answers)
        return answers

    async def leave(self, _: web.Application) -> None:
        """Closes the session of every client."""
        leaving = [socket.close(code=WSCloseCode.GOING_AWAY) for socket in self._sockets]
        await asyncio.gather(*leaving, return_exceptions=True)

    async def answer_post(self, request: web.Request) -> web.Response:
        """Runs a reset or a step of the environment that all clients share."""
        kind = request.path.strip("/")
        data = parse_json_object(await request.read())
        content = data.get("action", {}) if kind == "step" else data
        try:
            return web.json_response((await self._of_all().answer(kind, content))["data"], dumps=_dumps)
        except OpenEnvProtocolError as refusal:
            return web.json_response({"detail": str(refusal)}, status=422)
        except Exception as error:  # noqa: BLE001  # the boundary: an environment is user code
            return web.json_response({"detail": _fault(error)}, status=500)

    async def state(self, _: web.Request) -> web.Response:
        """The state of the environment that all clients share."""
        return web.json_response(self._of_all().state())

    async def close(self, _: web.Application) -> None:
        """Closes the environment that all clients share."""
        if self._session is not None:
            await self._session.close()

    def _of_all(self) -> Session:
        if self._session is None:
            self._session = Session(self._make())
        return self._session


def openenv_app(
    name: str, make: Callable[[], TextEnv], max_sessions: int = 64, *, guard: HttpGuard | None = None
) -> web.Application:
    """A web application with `/ws`, `/health`, `/schema` and `/metadata`; each WebSocket gets what `make` makes.

    The guard decides which requests and WebSockets it takes; without one, it takes those with this machine's names.
    Over `/reset`, `/step` and `/state`, which know no sessions, all clients share one environment.
    """
    guard = guard or HttpGuard("")
    app = web.Application(client_max_size=MAX_MESSAGE, middlewares=[guard.middleware(_reject_request)])
    app[GUARD] = guard
    doors = _Doors(make, max_sessions)
    app.on_shutdown.append(doors.leave)
    app.on_cleanup.append(doors.close)
    app.add_routes(
        [
            web.get("/ws", doors.socket),
            web.post("/reset", doors.answer_post),
            web.post("/step", doors.answer_post),
            web.get("/state", doors.state),
            web.get("/health", _always({"status": "healthy"})),
            web.get("/schema", _always({"action": ACTION, "observation": OBSERVATION, "state": STATE})),
            web.get("/metadata", _always(describe_served(name, make))),
        ]
    )
    return app


async def serve_openenv(app: web.Application, host: str, port: int, ready: Callable[[str], None]) -> None:
    """Serves until it is cancelled; `ready` gets the URL. A port of 0 takes a free one."""
    guard = app.get(GUARD) or HttpGuard(host)
    runner = guard.runner(app, handler_cancellation=False, shutdown_timeout=SHUTDOWN_S)
    await runner.setup()
    try:
        ready(await listen(runner, guard, host, port))
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()


def _reject_request(refusal: RequestRejected) -> web.Response:
    return web.json_response({"detail": str(refusal)}, status=refusal.status)


async def _converse(make: Callable[[], TextEnv], answers: web.WebSocketResponse) -> None:
    """Answers messages, in a session of the client's own, until it closes."""
    try:
        session = Session(make())
    except Exception as error:  # noqa: BLE001  # the boundary: an environment is user code
        await _send(answers, _failure_message("FACTORY_ERROR", error))
        return
    try:
        with contextlib.suppress(TimeoutError):
            async for message in answers:
                if message.type is WSMsgType.TEXT:
                    answer = await _answer_text(session, message.data)
                    if answer is None or not await _send(answers, answer):
                        return
    finally:
        await session.close()


async def _answer_text(session: Session, text: str) -> str | None:
    """The answer to a message; None if the client closes."""
    try:
        message = parse_json_object(text.encode())
        if message.get("type") == "close":
            return None
        return _dumps(await session.answer(str(message.get("type")), message.get("data") or {}))
    except RequestRejected as refusal:
        return _dumps(_error("INVALID_JSON", str(refusal)))
    except OpenEnvProtocolError as refusal:
        return _dumps(_error(refusal.code, str(refusal)))
    except Exception as error:  # noqa: BLE001  # the boundary: an environment is user code
        return _failure_message("EXECUTION_ERROR", error)


async def _send(answers: web.WebSocketResponse, text: str) -> bool:
    """Sends an answer; returns False if the client has left."""
    try:
        await answers.send_str(text)
    except ConnectionError:
        return False
    return True


def _action(data: Mapping[str, Any]) -> Action:
    text, calls = data.get("message", ""), data.get("tool_calls") or []
    if not isinstance(text, str) or not isinstance(calls, list):
        raise OpenEnvProtocolError("VALIDATION_ERROR", "an action has a text `message`, a list `tool_calls`, or both")
    tool_calls = []
    for number, call in enumerate(calls):
        try:
            tool_calls.append(ToolCall(f"call_{number}", *as_call(call)))
        except ValueError as error:
            raise OpenEnvProtocolError("VALIDATION_ERROR", f"{error}; got {call!r:.200}") from None
    metadata = data.get("metadata")
    is_reply = bool(tool_calls) or (isinstance(metadata, Mapping) and metadata.get("reply") is True)
    return Action.from_message(Message("assistant", text, tool_calls=tuple(tool_calls))) if is_reply else Action(text)


def _format_observation(
    text: str, info: Info, *, reward: float | None, done: bool, truncated: bool = False
) -> dict[str, Any]:
    results = [result for result in info.get("tool_results", ()) if isinstance(result, ToolResult)]
    metadata: dict[str, Any] = {**info.get("metrics", {}), "truncated": truncated}
    if results:
        metadata["tool_results"] = [
            {"name": result.name, "content": result.content, "error": result.error} for result in results
        ]
    return {"observation": {"text": text, "metadata": metadata}, "reward": reward, "done": done}


def describe_served(name: str, make: Callable[[], TextEnv]) -> dict[str, JSON]:
    """The content of `/metadata`: OpenEnv's fields, and in addition the system prompt and the tools."""
    env = make()
    env.reset(seed=0)
    task = env.card.task if env.card is not None else type(env.unwrapped).__name__
    tools: list[JSON] = [
        {"name": spec.name, "description": spec.description, "parameters": dict(spec.parameters)}
        for spec in env.tool_specs
    ]
    about: dict[str, JSON] = {"name": name, "description": task, "system_prompt": env.system_prompt, "tools": tools}
    env.close()
    return about


def _always(content: Mapping[str, JSON]) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def answer(_: web.Request) -> web.Response:
        return web.json_response(content)

    return answer


_dumps = functools.partial(json.dumps, allow_nan=False)
"""Writes JSON; raises ValueError for NaN or infinity (a reward of NaN), which is the environment's fault."""


def _failure_message(code: str, error: Exception) -> str:
    """The message for a client whose environment raised."""
    return _dumps(_error(code, _fault(error)))


def _fault(error: Exception) -> str:
    """The text of an environment's error for the client; logs its traceback."""
    logger.warning("the environment raised in a session", exc_info=error)
    return f"{type(error).__name__}: {error}"


def _error(code: str, message: str) -> dict[str, Any]:
    return {"type": "error", "data": {"message": message, "code": code}}

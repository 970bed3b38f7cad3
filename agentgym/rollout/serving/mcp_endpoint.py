"""The tools of a served environment over MCP: JSON-RPC over streamable HTTP, answered without a stream."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections.abc import Mapping
from typing import Any

from aiohttp import web

from agentgym import __version__
from agentgym.http_guard import RequestRejected, parse_json_object
from agentgym.rollout.serving.agent_session import AgentSession, EpisodeEnded, Opening, ToolRequest
from agentgym.rollout.serving.wires.wire import Refusal
from agentgym.types import JSON

__all__ = ["MCP_PATH", "PROTOCOL_VERSIONS", "answer_mcp", "mcp_refusal"]

logger = logging.getLogger(__name__)

MCP_PATH = "/mcp"
PROTOCOL_VERSIONS = ("2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05")
"""The versions of the protocol that are spoken, the newest first: those that begin with `initialize`."""
PARSE_ERROR, INVALID_REQUEST, METHOD_NOT_FOUND, INVALID_PARAMS = -32700, -32600, -32601, -32602
"""The codes of JSON-RPC."""
Reply = dict[str, JSON]


class _Refused(Exception):
    """A request that JSON-RPC answers with an error."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


async def answer_mcp(session: AgentSession, request: web.Request) -> web.StreamResponse:
    """Answers a request to an episode's MCP endpoint; raises RequestRejected for one that is no message.

    A GET is refused, as the protocol allows: the server has nothing to say by itself. DELETE ends an MCP session, and
    not the episode.
    """
    number = request.headers.get("Mcp-Session-Id", "")
    if number and number not in session.mcp_sessions:
        raise RequestRejected(404, "not_found", f"there is no MCP session {number!r:.80}: send `initialize` again")
    if request.method == "DELETE":
        session.mcp_sessions.discard(number)
        return web.Response(status=204)
    if request.method != "POST":
        error = _error(INVALID_REQUEST, f"{request.method} is not answered: requests come by POST")
        return web.json_response(error, status=405, headers={"Allow": "POST, DELETE"})
    version = request.headers.get("MCP-Protocol-Version", PROTOCOL_VERSIONS[0])
    raw = (await request.read()).strip()
    is_batch = raw.startswith(b"[")  # as clients of 2025-03-26 may send
    body = parse_json_object(b'{"batch": %s}' % raw if is_batch else raw)
    messages = body["batch"] if is_batch else [body]
    is_start = any(isinstance(message, dict) and message.get("method") == "initialize" for message in messages)
    if version not in PROTOCOL_VERSIONS and not is_start:
        spoken = ", ".join(PROTOCOL_VERSIONS)
        raise RequestRejected(400, "invalid_request", f"the MCP version {version!r:.40} is not spoken, but {spoken}")
    headers = {}
    if is_start:
        number = headers["Mcp-Session-Id"] = secrets.token_urlsafe(16)
        session.mcp_sessions.add(number)
    replies = await asyncio.gather(*(_answer(session, number, message) for message in messages))
    answers = [reply for reply in replies if reply is not None]
    if not answers:
        return web.Response(status=202)
    is_refused = not is_batch and "id" in answers[0] and answers[0]["id"] is None
    return web.json_response(answers if is_batch else answers[0], headers=headers, status=400 if is_refused else 200)


def mcp_refusal(refusal: Refusal) -> Reply:
    """Returns the body of a refusal in JSON-RPC's form."""
    return _error(PARSE_ERROR if refusal.code == "invalid_json" else INVALID_REQUEST, refusal.message)


def _error(code: int, message: str, number: JSON = None) -> Reply:
    return {"jsonrpc": "2.0", "id": number, "error": {"code": code, "message": message}}


async def _answer(session: AgentSession, mcp_session: str, message: object) -> Reply | None:
    """Returns the answer to a message, None if it wants none."""
    number: JSON = None
    try:
        if not isinstance(message, dict) or message.get("jsonrpc") != "2.0":
            raise _Refused(INVALID_REQUEST, 'a message is an object with "jsonrpc": "2.0"')
        if "method" not in message and ("result" in message or "error" in message):
            return None  # it answers a request, and we make none
        method, params = message.get("method"), message.get("params") or {}
        if "id" in message and (isinstance(message["id"], bool) or not isinstance(message["id"], str | int)):
            raise _Refused(INVALID_REQUEST, "the id of a request is a text or a whole number")
        number = message.get("id")
        if not isinstance(method, str) or not isinstance(params, dict):
            raise _Refused(INVALID_REQUEST, "a request has a `method`, a text, and `params`, an object")
        if "id" not in message:
            return None  # a notification
        key = f"mcp/{mcp_session}/{json.dumps(number)}" if mcp_session else ""
        return {"jsonrpc": "2.0", "id": number, "result": await _result(session, method, params, key)}
    except _Refused as refusal:
        logger.info("episode %s, MCP: refused with %d: %s", session.name, refusal.code, refusal)
        return _error(refusal.code, str(refusal), number)


async def _result(session: AgentSession, method: str, params: Mapping[str, Any], key: str) -> Reply:
    """Returns the result of a request; raises _Refused."""
    if method == "ping":
        return {}
    if method == "tools/call":
        return await _call(session, params, key)
    if method not in ("initialize", "tools/list"):
        methods = "initialize, ping, tools/list, tools/call"
        raise _Refused(METHOD_NOT_FOUND, f"there is no method {method!r:.80} here: {methods}")
    try:
        opening = await session.opening()
    except EpisodeEnded as error:
        raise _Refused(INVALID_REQUEST, str(error)) from None
    return _greeting(opening, params) if method == "initialize" else {"tools": _listing(opening)}


def _greeting(opening: Opening, params: Mapping[str, Any]) -> Reply:
    """Returns the answer to `initialize`, whose instructions are the episode's first messages."""
    version = params.get("protocolVersion")
    return {
        "protocolVersion": version if version in PROTOCOL_VERSIONS else PROTOCOL_VERSIONS[0],
        "capabilities": {"tools": {"listChanged": False}},
        "serverInfo": {"name": "agentgym", "version": __version__},
        "instructions": "\n\n".join(message.content for message in opening.messages),
    }


def _listing(opening: Opening) -> list[JSON]:
    return [
        {"name": tool.name, "description": tool.description, "inputSchema": tool.parameters} for tool in opening.tools
    ]


async def _call(session: AgentSession, params: Mapping[str, Any], key: str) -> Reply:
    """Steps the environment; arguments that do not fit are answered by it, as those of a model's call are."""
    name, arguments = params.get("name"), params.get("arguments")
    arguments = {} if arguments is None else arguments
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise _Refused(INVALID_PARAMS, "`tools/call` has a `name`, a text, and `arguments`, an object")
    try:
        names = [tool.name for tool in (await session.opening()).tools]
        if name not in names:
            raise _Refused(INVALID_PARAMS, f"unknown tool {name!r:.80}: the tools are {', '.join(names) or 'none'}")
        answer = await session.call_tool(ToolRequest(name, arguments, key))
    except EpisodeEnded as error:
        logger.info("episode %s, MCP: the call of %s is not run: %s", session.name, name, error)
        return {"content": [{"type": "text", "text": f"not run: {error}"}], "isError": True}
    return {"content": [{"type": "text", "text": answer.text}], "isError": answer.is_error}

"""Anthropic's Messages."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from agentgym.openai_wire import WireError, tool_from_openai
from agentgym.rollout.serving.wires.fields import read_list, read_max_tokens, read_stops, read_text
from agentgym.rollout.serving.wires.response_store import ResponseStore
from agentgym.rollout.serving.wires.wire import (
    CONTEXT_EXCEEDED,
    AgentReply,
    AgentRequest,
    AgentWire,
    Event,
    FieldNotes,
    Refusal,
    SentCall,
    ToolNames,
    ToolSet,
    Transcript,
    UnsupportedValue,
    cached_tools,
    named_turn,
)
from agentgym.types import JSON, Message, Role, ToolCall, ToolSpec

__all__ = ["CountTokensWire", "MessagesWire"]

FIELDS = frozenset("model messages system tools tool_choice max_tokens stream stop_sequences output_config".split())
IDLE = frozenset("metadata cache_control service_tier betas context_management container diagnostics".split())
DECIDED = frozenset("temperature top_p top_k thinking".split())
ROLES: Mapping[str, Role] = {"user": "user", "system": "system", "assistant": "assistant"}
CHOICES = {"auto": "auto", "none": "none", "any": "required"}
ERRORS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large"}
BILLING = re.compile(r"^x-anthropic-billing-header:[^\n]*\n?", re.MULTILINE)
"""A line that Claude Code writes before its system message, with a checksum that changes with each request."""
UNREADABLE = "__unparsedToolInput"
"""The name under which Claude Code keeps the input of a call that is no JSON."""


class MessagesWire(AgentWire):
    """`/v1/messages`."""

    path = "/v1/messages"
    takes_prefill = False

    def read(self, body: Mapping[str, Any], stored: ResponseStore) -> AgentRequest:
        """Returns the request of a body; see `AgentWire.read`."""
        fields = {name: value for name, value in body.items() if value is not None}
        if not isinstance(fields.get("messages"), list) or not fields["messages"]:
            raise WireError("messages is a list of at least one message", "messages")
        tools, names, left_out = _tools(fields.get("tools"))
        transcript = Transcript()
        if system := BILLING.sub("", read_text(fields.get("system"), "system")):
            transcript.add(Message("system", system), "system")
        for index, message in enumerate(fields["messages"]):
            _read_message(transcript, message, f"messages[{index}]")
        config = fields.get("output_config", {})
        schema = _schema(config.get("format") if isinstance(config, Mapping) else None)
        hosted = ("mcp_servers",) if fields.pop("mcp_servers", None) else ()
        decided = DECIDED & fields.keys() | (
            {"effort"} if isinstance(config, Mapping) and "effort" in config else set()
        )
        return AgentRequest(
            **transcript.fields(),
            tools=tools,
            max_tokens=read_max_tokens(fields, "max_tokens"),
            stop=read_stops(fields.get("stop_sequences", []), "stop_sequences"),
            tool_choice=_choice(fields.get("tool_choice"), names),
            schema=schema,
            constraint="output_config.format" if schema is not None else "tool_choice",
            stream=bool(fields.get("stream")),
            names=names,
            notes=FieldNotes(
                tuple(sorted(decided)), tuple(sorted(fields.keys() - FIELDS - IDLE - DECIDED)), (*left_out, *hosted)
            ),
            options={"model": fields.get("model")},
        )

    def answer(self, request: AgentRequest, replies: Sequence[AgentReply], stored: ResponseStore) -> Mapping[str, JSON]:
        """Returns the message of the reply."""
        (reply,) = replies
        return {**_head(request, reply), "content": [*_blocks(reply)], **_end(reply), "usage": _usage(reply)}

    def events(self, request: AgentRequest, replies: Sequence[AgentReply], stored: ResponseStore) -> Iterator[Event]:
        """Yields the events of a message: each block starts, grows and stops."""
        (reply,) = replies
        start: dict[str, JSON] = {"content": [], "stop_reason": None, "stop_sequence": None}
        head = {**_head(request, reply), **start, "usage": {**_usage(reply), "output_tokens": 0}}
        inputs = {call.id: _streamed_input(call, request) for call in reply.calls}
        events: list[Event] = [("message_start", {"message": head})]
        for index, block in enumerate(_blocks(reply)):
            empty, deltas = _parts(block, inputs)
            events.append(("content_block_start", {"index": index, "content_block": empty}))
            events += [("content_block_delta", {"index": index, "delta": delta}) for delta in deltas]
            events.append(("content_block_stop", {"index": index}))
        events += [("message_delta", {"delta": _end(reply), "usage": _usage(reply)}), ("message_stop", {})]
        for name, event in events:
            yield name, {"type": name, **event}

    def error(self, refusal: Refusal) -> Mapping[str, JSON]:
        """Returns Anthropic's error, which has no field for a code."""
        kind = ERRORS.get(refusal.status, "api_error" if refusal.status >= 500 else "invalid_request_error")
        message = refusal.message
        if refusal.code == CONTEXT_EXCEEDED:
            message = f"prompt is too long: {message}"  # what Claude Code looks for before it compacts
        elif refusal.param and refusal.param not in message:
            message = f"{refusal.param}: {message}"
        return {"type": "error", "error": {"type": kind, "message": message}, "request_id": None}


class CountTokensWire(MessagesWire):
    """`/v1/messages/count_tokens`."""

    path = "/v1/messages/count_tokens"
    takes_prefill = True

    def read(self, body: Mapping[str, Any], stored: ResponseStore) -> AgentRequest:
        """Returns the request, which only asks for the number of its tokens."""
        return replace(super().read(body, stored), counts_only=True, stream=False)

    def answer(self, request: AgentRequest, replies: Sequence[AgentReply], stored: ResponseStore) -> Mapping[str, JSON]:
        """Returns the number of tokens of the prompt."""
        return {"input_tokens": replies[0].prompt_tokens}


def _read_message(transcript: Transcript, value: object, where: str) -> None:
    """Adds a message: the results of a user message are messages of their own, in their order with its texts."""
    if not isinstance(value, Mapping):
        raise WireError(f"{where} is an object with a role and a content, got {type(value).__name__}", where)
    role = value.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise WireError(f"{where}.role is one of {', '.join(ROLES)}, got {role!r:.60}", f"{where}.role")
    content = value.get("content")
    if isinstance(content, str) or role == "system":
        transcript.add(Message(ROLES[role], read_text(content, f"{where}.content")), where)
        return
    blocks = [
        (block, f"{where}.content[{index}]") for index, block in enumerate(read_list(content, f"{where}.content"))
    ]
    for block, place in blocks:
        if not isinstance(block, Mapping):
            raise WireError(f"{place} is an object, got {type(block).__name__}", place)
    if role == "assistant":
        _read_reply(transcript, blocks, where)
        return
    texts: list[object] = []
    for block, place in blocks:
        if block.get("type") != "tool_result":
            texts.append(block)
            continue
        _add_texts(transcript, texts, where)
        texts = []
        content = read_text(block.get("content"), f"{place}.content")
        transcript.add(Message("tool", content, tool_call_id=str(block.get("tool_use_id"))), place)
    _add_texts(transcript, texts, where)
    if not blocks:
        raise WireError(f"{where}.content has at least one block", f"{where}.content")


def _add_texts(transcript: Transcript, blocks: Sequence[object], where: str) -> None:
    if blocks:
        transcript.add(Message("user", read_text([*blocks], f"{where}.content")), where)


def _read_reply(transcript: Transcript, blocks: Sequence[tuple[Any, str]], where: str) -> None:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    turn = ""
    for block, place in blocks:
        kind = block.get("type")
        if kind in ("thinking", "redacted_thinking"):
            turn = named_turn(block.get("signature", block.get("data"))) or turn
            thoughts.append(str(block.get("thinking") or ""))
        elif kind == "tool_use":
            call_input, name = block.get("input"), block.get("name")
            if not isinstance(block.get("id"), str) or not isinstance(name, str):
                raise WireError(f"{place} is a tool_use with an id and a name", place)
            calls.append(ToolCall(block["id"], name, call_input if isinstance(call_input, Mapping) else {}))
        else:
            texts.append(read_text([block], place))
    reasoning = "\n".join(filter(None, thoughts)) or None
    transcript.add(Message("assistant", "\n".join(texts), reasoning, tuple(calls)), where, turn)


@cached_tools
def _tools(value: object) -> ToolSet:
    """Returns the tools that an agent describes; those that Anthropic defines are left out. Raises WireError."""
    names = ToolNames()
    tools: list[ToolSpec] = []
    left_out: list[str] = []
    for index, tool in enumerate(read_list(value, "tools")):
        kind = tool.get("type") if isinstance(tool, Mapping) else None
        if kind not in (None, "custom"):
            left_out.append(f"the tool {kind}")
            continue
        spec = tool_from_openai(tool, f"tools[{index}]")
        tools.append(replace(spec, name=names.add(spec.name)))
    return tuple(tools), names, tuple(left_out)


def _choice(value: object, names: ToolNames) -> str:
    kind = value.get("type") if isinstance(value, Mapping) else None
    if value is None or (isinstance(kind, str) and kind in CHOICES):
        return CHOICES.get(str(kind), "auto")
    if isinstance(value, Mapping) and kind == "tool" and value.get("name") in names.kinds:
        return f"={value['name']}"
    raise UnsupportedValue("tool_choice", value, [{"type": each} for each in CHOICES])


def _schema(value: object) -> Mapping[str, JSON] | None:
    if value is None:
        return None
    schema = value.get("schema") if isinstance(value, Mapping) and value.get("type") == "json_schema" else None
    if not isinstance(schema, Mapping):
        raise UnsupportedValue("output_config.format", value, reason="Only a json_schema with a schema is supported.")
    return schema


def _head(request: AgentRequest, reply: AgentReply) -> dict[str, JSON]:
    model = request.options.get("model")
    name = model if isinstance(model, str) else "policy"
    return {"id": f"msg_{reply.id}", "type": "message", "role": "assistant", "model": name}


def _blocks(reply: AgentReply) -> Iterator[dict[str, JSON]]:
    """Yields the blocks of a reply's content."""
    message = reply.message
    if message.reasoning:
        yield {"type": "thinking", "thinking": message.reasoning, "signature": reply.name}
    if message.content or not (message.tool_calls or message.reasoning):
        yield {"type": "text", "text": message.content}
    for call in reply.calls:
        yield {"type": "tool_use", "id": call.id, "name": call.name, "input": _input(call)}


def _input(call: SentCall) -> Mapping[str, JSON]:
    return {UNREADABLE: {"raw": call.arguments}} if call.value is None else call.value


def _streamed_input(call: SentCall, request: AgentRequest) -> str:
    """Returns a call's input as JSON text; of one that cannot be read, Claude Code wraps the text itself.

    Anthropic's own client raises on a text that is no JSON, and completes one that is cut.
    """
    if call.value is None and "claude-cli/" not in request.client:
        return json.dumps(_input(call), ensure_ascii=False)
    return call.arguments


def _parts(block: Mapping[str, Any], inputs: Mapping[str, str]) -> tuple[Mapping[str, JSON], list[Mapping[str, JSON]]]:
    """Returns a block before it has grown, and the deltas by which it grows."""
    if block["type"] == "thinking":
        thought = {"type": "thinking_delta", "thinking": block["thinking"]}
        return {**block, "thinking": "", "signature": ""}, [
            thought,
            {"type": "signature_delta", "signature": block["signature"]},
        ]
    if block["type"] == "text":
        return {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}]
    return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": inputs[block["id"]]}]


def _end(reply: AgentReply) -> dict[str, JSON]:
    """Returns the reason for which a message ended."""
    if reply.finish_reason == "length":
        reason = "max_tokens"
    elif reply.message.tool_calls:
        reason = "tool_use"
    else:
        reason = "stop_sequence" if reply.stop else "end_turn"
    return {"stop_reason": reason, "stop_sequence": reply.stop or None}


def _usage(reply: AgentReply) -> dict[str, JSON]:
    cached: dict[str, JSON] = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    return {"input_tokens": reply.prompt_tokens, **cached, "output_tokens": reply.completion_tokens}

"""OpenAI's Responses."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agentgym.call_json import read_arguments
from agentgym.openai_wire import WireError
from agentgym.rollout.serving.wires.chat import read_choice, read_tools
from agentgym.rollout.serving.wires.custom_tools import custom_input
from agentgym.rollout.serving.wires.fields import read_list, read_max_tokens, read_text
from agentgym.rollout.serving.wires.openai_errors import openai_error
from agentgym.rollout.serving.wires.response_store import ResponseStore
from agentgym.rollout.serving.wires.wire import (
    AgentReply,
    AgentRequest,
    AgentWire,
    Event,
    FieldNotes,
    Refusal,
    RequestRefused,
    SentCall,
    ToolNames,
    Transcript,
    UnsupportedValue,
    named_turn,
    split_call_id,
)
from agentgym.types import JSON, AnyCall, MalformedCall, Message, Role, ToolCall

__all__ = ["ResponsesWire"]

FIELDS = frozenset(
    "model input instructions tools tool_choice max_output_tokens stream previous_response_id store include text "
    "top_logprobs stream_options".split()
)
IDLE = frozenset(
    "metadata prompt_cache_key prompt_cache_retention client_metadata service_tier user safety_identifier truncation "
    "max_tool_calls context_management".split()
)
DECIDED = frozenset("temperature top_p reasoning parallel_tool_calls".split())
NEUTRAL: Mapping[str, tuple[object, ...]] = {"background": (False,), "top_logprobs": (0,)}
UNSUPPORTED = ("conversation", "prompt")
LOGPROBS = "message.output_text.logprobs"
ROLES: Mapping[str, Role] = {"system": "system", "developer": "system", "user": "user"}
CALLS = ("function_call", "custom_tool_call")
RESULTS = ("function_call_output", "custom_tool_call_output")


class ResponsesWire(AgentWire):
    """`/v1/responses`; a response is stored for the life of the episode, unless the request says `store: false`."""

    path = "/v1/responses"

    def read(self, body: Mapping[str, Any], stored: ResponseStore) -> AgentRequest:
        """Returns the request of a body, after the items of its `previous_response_id`; see `AgentWire.read`."""
        fields = {name: value for name, value in body.items() if value is not None}
        for name in fields.keys() & {*NEUTRAL, *UNSUPPORTED}:
            if fields[name] not in NEUTRAL.get(name, ()):
                raise UnsupportedValue(name, fields[name], NEUTRAL.get(name, ()))
        new = fields.get("input", [])
        new = [{"role": "user", "content": new}] if isinstance(new, str) else read_list(new, "input")
        items = (*_before(fields.get("previous_response_id"), stored), *new)
        if not items:
            raise WireError("input is a text or a list of at least one item", "input")
        tools, names, left_out = read_tools(fields.get("tools"))
        reader = _ItemReader(names, stored)
        if fields.get("instructions"):
            text = read_text(fields["instructions"], "instructions")
            reader.transcript.add(Message("system", text), "instructions")
        for index, item in enumerate(items):
            reader.read(item, f"input[{index}]")
        reader.close()
        schema, include = _schema(fields.get("text")), read_list(fields.get("include"), "include")
        return AgentRequest(
            **reader.transcript.fields(),
            tools=tools,
            max_tokens=read_max_tokens(fields, "max_output_tokens"),
            tool_choice=read_choice(fields.get("tool_choice", "auto"), names),
            schema=schema,
            constraint="text.format" if schema is not None else "tool_choice",
            logprobs=LOGPROBS in include,
            stream=bool(fields.get("stream")),
            names=names,
            notes=FieldNotes(
                tuple(sorted(DECIDED & fields.keys())),
                tuple(sorted(fields.keys() - FIELDS - IDLE - DECIDED - NEUTRAL.keys() - set(UNSUPPORTED))),
                (*left_out, *reader.left_out),
            ),
            options={"body": fields, "items": items},
        )

    def answer(self, request: AgentRequest, replies: Sequence[AgentReply], stored: ResponseStore) -> Mapping[str, JSON]:
        """Returns the response, and stores its items."""
        (reply,) = replies
        output = _items(reply, request)
        response_id = f"resp_{reply.id}"
        if request.options["body"].get("store") is not False:
            stored.add(response_id, (*request.options["items"], *output))
        return {**_response(reply, request, response_id), "output": output}

    def events(self, request: AgentRequest, replies: Sequence[AgentReply], stored: ResponseStore) -> Iterator[Event]:
        """Yields the events of a response: each item is added, grows and is done."""
        response = self.answer(request, replies, stored)
        started = {**response, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
        for number, (name, event) in enumerate(_stream(response, started)):
            yield name, {"type": name, "sequence_number": number, **event}

    def error(self, refusal: Refusal) -> Mapping[str, JSON]:
        """Returns OpenAI's error, whose field is `input` where that of chat completions is `messages`."""
        param = refusal.param
        return openai_error(
            Refusal(refusal.status, refusal.message, refusal.code, "input" if param == "messages" else param)
        )


class _ItemReader:
    """Joins the items of each reply, its reasoning, text and calls, into a message."""

    def __init__(self, names: ToolNames, stored: ResponseStore) -> None:
        self.transcript = Transcript()
        self.left_out: list[str] = []
        self._names, self._stored = names, stored
        self._texts: list[str] = []
        self._reasonings: list[str] = []
        self._calls: list[AnyCall] = []
        self._turn = ""
        self._where = ""

    def read(self, item: object, where: str) -> None:
        """Adds an item; raises WireError."""
        if not isinstance(item, Mapping):
            raise WireError(f"{where} is an object, got {type(item).__name__}", where)
        role = item.get("role")
        kind = item.get("type") or ("message" if "role" in item or "content" in item else "item_reference")
        if kind == "item_reference":
            self.read(self._find_item(item.get("id"), where), where)
        elif kind == "message" and role == "assistant":
            if self._calls:  # the text of a reply comes before its calls
                self.close()
            self._join(where, _item_turn(item))
            self._texts.append(read_text(item.get("content"), f"{where}.content", ""))
        elif kind == "reasoning":
            self._join(where, named_turn(item.get("encrypted_content")) or _item_turn(item))
            parts = item.get("summary") or item.get("content")
            self._reasonings.append(read_text(parts, where))
        elif kind in CALLS or _is_of_agent(item, "_call"):
            self._join(where, split_call_id(str(item.get("call_id")))[0])
            self._calls.append(self._call(item, where))
        elif kind in RESULTS or _is_of_agent(item, "_output"):
            self.close()
            output = item.get("output")
            text = read_text(output, f"{where}.output") if output is not None else json.dumps(item.get("tools"))
            self.transcript.add(Message("tool", text, tool_call_id=str(item.get("call_id"))), where)
        elif kind == "agent_message":  # what another agent of Codex's says
            self.close()
            parts = [part for part in read_list(item.get("content"), where) if "text" in part]
            self.transcript.add(Message("user", read_text(parts, where)), where)
        elif kind == "message":
            self.close()
            if not isinstance(role, str) or role not in ROLES:
                raise WireError(
                    f"{where}.role is one of assistant, {', '.join(ROLES)}, got {role!r:.60}", f"{where}.role"
                )
            self.transcript.add(Message(ROLES[role], read_text(item.get("content"), f"{where}.content")), where)
        else:  # what a hosted tool has done
            self.left_out.append(f"the item {kind}")

    def close(self) -> None:
        """Ends the reply that is being joined, if there is one."""
        if self._where:
            reasoning = "\n".join(filter(None, self._reasonings)) or None
            message = Message("assistant", "\n".join(self._texts), reasoning, tuple(self._calls))
            where, turn = self._where, self._turn
            self._texts, self._reasonings, self._calls, self._where, self._turn = [], [], [], "", ""
            self.transcript.add(message, where, turn)

    def _join(self, where: str, turn: str) -> None:
        """Begins a reply, or goes on with it: an item that names a turn is of no other one, named or not."""
        if self._where and turn and turn != self._turn:
            self.close()
        self._where, self._turn = self._where or where, self._turn or turn

    def _call(self, item: Mapping[str, Any], where: str) -> AnyCall:
        call_id, name = item.get("call_id"), item.get("name") or str(item.get("type")).removesuffix("_call")
        name = None if item.get("type") in CALLS and "name" not in item else name
        if not isinstance(call_id, str) or not isinstance(name, str):
            raise WireError(f"{where} is a call with a call_id and a name", where)
        name = self._names.policy_name(name, str(item.get("namespace") or ""))
        if item["type"] == "custom_tool_call":
            return ToolCall(call_id, name, {"input": str(item.get("input") or "")})
        try:
            return ToolCall(call_id, name, dict(read_arguments(item.get("arguments", item.get("action")))))
        except ValueError as error:
            raw = json.dumps({"name": name, "arguments": item.get("arguments")}, ensure_ascii=False)
            return MalformedCall(call_id, raw, str(error))

    def _find_item(self, item_id: object, where: str) -> object:
        item = self._stored.item(item_id)
        if item is not None:
            return item
        raise WireError(f"{where}: there is no item {item_id!r:.80} among the stored ones", where)


def _before(response_id: object, stored: ResponseStore) -> tuple[Any, ...]:
    """Returns the items of a stored response; raises RequestRefused."""
    if response_id is None:
        return ()
    items = stored.items(response_id) if isinstance(response_id, str) else None
    if items is None:
        text = f"Previous response with id {response_id!r:.80} not found."
        raise RequestRefused(text, "previous_response_not_found", "previous_response_id")
    return items


def _is_of_agent(item: Mapping[str, Any], end: str) -> bool:
    """Returns whether an item is of a tool of the provider's that the agent itself runs (`local_shell_call`)."""
    return str(item.get("type")).endswith(end) and isinstance(item.get("call_id"), str)


def _item_turn(item: Mapping[str, Any]) -> str:
    """Returns the turn that the id of an item names, as in `msg_turn3`; empty if it is not ours."""
    return named_turn(str(item.get("id") or "").partition("_")[2])


def _schema(text: object) -> Mapping[str, JSON] | None:
    """Returns the JSON Schema of `text.format`; None if any text will do."""
    form = text.get("format") if isinstance(text, Mapping) else None
    kind = form.get("type") if isinstance(form, Mapping) else None
    if form is None or kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    if kind != "json_schema" or not isinstance(form, Mapping) or not isinstance(form.get("schema"), Mapping):
        raise UnsupportedValue("text.format", form, ({"type": "text"},))
    schema: Mapping[str, JSON] = form["schema"]
    return schema


def _items(reply: AgentReply, request: AgentRequest) -> list[dict[str, JSON]]:
    """Returns the output items of a reply."""
    items: list[dict[str, JSON]] = []
    message, status = reply.message, "incomplete" if reply.finish_reason == "length" else "completed"
    if message.reasoning:
        summary = [{"type": "summary_text", "text": message.reasoning}]
        items.append(
            {"type": "reasoning", "id": f"rs_{reply.name}", "summary": summary, "encrypted_content": reply.name}
        )
    if message.content or not message.tool_calls:
        logprobs: list[JSON] = [
            {"token": text, "logprob": logprob, "bytes": [*text.encode(errors="replace")], "top_logprobs": []}
            for text, logprob in reply.logprobs
        ]
        part: dict[str, JSON] = {
            "type": "output_text",
            "text": message.content,
            "annotations": [],
            "logprobs": logprobs,
        }
        fields: dict[str, JSON] = {"role": "assistant", "status": status, "content": [part]}
        items.append({"type": "message", "id": f"msg_{reply.name}", **fields})
    return [*items, *(_call_item(call, status, request.names) for call in reply.calls)]


def _call_item(call: SentCall, status: str, names: ToolNames) -> dict[str, JSON]:
    kind, namespace, name = names.on_wire(call.name)
    head: dict[str, JSON] = {"call_id": call.id, "name": name, "status": status}
    if namespace:
        head["namespace"] = namespace
    if kind == "custom":
        return {"type": "custom_tool_call", "id": f"ctc_{call.id}", **head, "input": custom_input(call)}
    return {"type": "function_call", "id": f"fc_{call.id}", **head, "arguments": call.arguments}


def _response(reply: AgentReply, request: AgentRequest, response_id: str) -> dict[str, JSON]:
    """Returns a response without its output."""
    body = request.options["body"]
    is_cut = reply.finish_reason == "length"
    echoed = {name: body.get(name) for name in ("instructions", "max_output_tokens", "previous_response_id")}
    total = reply.prompt_tokens + reply.completion_tokens
    return {
        "id": response_id,
        "object": "response",
        "created_at": reply.created,
        "status": "incomplete" if is_cut else "completed",
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "model": body.get("model") if isinstance(body.get("model"), str) else "policy",
        **echoed,
        "metadata": body.get("metadata") or {},
        "parallel_tool_calls": True,
        "store": body.get("store") is not False,
        "temperature": None,
        "text": body.get("text") or {"format": {"type": "text"}},
        "tool_choice": body.get("tool_choice", "auto"),
        "tools": body.get("tools") or [],
        "top_p": None,
        "truncation": "disabled",
        "usage": {
            "input_tokens": reply.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": reply.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": total,
        },
    }


def _stream(response: Mapping[str, Any], started: Mapping[str, JSON]) -> Iterator[Event]:
    yield "response.created", {"response": started}
    yield "response.in_progress", {"response": started}
    for index, item in enumerate(response["output"]):
        yield "response.output_item.added", {"output_index": index, "item": _empty(item)}
        for name, event in _growth(item):
            yield name, {"item_id": item["id"], "output_index": index, **event}
        yield "response.output_item.done", {"output_index": index, "item": item}
    yield f"response.{response['status']}", {"response": response}


def _empty(item: Mapping[str, Any]) -> Mapping[str, JSON]:
    """Returns an item before it has grown."""
    bare = {"content": [], "summary": [], "arguments": "", "input": ""}
    status = {"status": "in_progress"} if "status" in item else {}
    return {**item, **{name: value for name, value in bare.items() if name in item}, **status}


def _growth(item: Mapping[str, Any]) -> Iterator[Event]:
    """Yields the events in which an item grows."""
    if item["type"] == "reasoning":
        (part,) = item["summary"]
        at, name = {"summary_index": 0}, "response.reasoning_summary"
        yield f"{name}_part.added", {**at, "part": {**part, "text": ""}}
        yield f"{name}_text.delta", {**at, "delta": part["text"]}
        yield f"{name}_text.done", {**at, "text": part["text"]}
        yield f"{name}_part.done", {**at, "part": part}
    elif item["type"] == "message":
        (part,) = item["content"]
        place = {"content_index": 0}
        yield "response.content_part.added", {**place, "part": {**part, "text": "", "logprobs": []}}
        yield "response.output_text.delta", {**place, "delta": part["text"], "logprobs": part["logprobs"]}
        yield "response.output_text.done", {**place, "text": part["text"], "logprobs": part["logprobs"]}
        yield "response.content_part.done", {**place, "part": part}
    elif item["type"] == "custom_tool_call":
        yield "response.custom_tool_call_input.delta", {"delta": item["input"]}
        yield "response.custom_tool_call_input.done", {"input": item["input"]}
    else:
        yield "response.function_call_arguments.delta", {"delta": item["arguments"]}
        done = {"arguments": item["arguments"], "name": item["name"]}
        yield "response.function_call_arguments.done", done

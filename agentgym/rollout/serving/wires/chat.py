"""OpenAI's chat completions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from agentgym.openai_wire import WireError, message_from_openai, message_to_openai, tool_from_openai
from agentgym.rollout.serving.wires.custom_tools import custom_input, custom_tool
from agentgym.rollout.serving.wires.fields import read_list, read_max_tokens, read_stops
from agentgym.rollout.serving.wires.openai_errors import openai_error
from agentgym.rollout.serving.wires.response_store import ResponseStore
from agentgym.rollout.serving.wires.wire import (
    MAX_SAMPLES,
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
    split_call_id,
    turn_name,
)
from agentgym.types import JSON, Message, ToolSpec

__all__ = ["ChatWire", "read_message", "wire_messages"]

FIELDS = frozenset(
    "messages tools model max_tokens max_completion_tokens stop stream stream_options n logprobs top_logprobs "
    "tool_choice response_format".split()
)
IDLE = frozenset("user metadata store service_tier safety_identifier prompt_cache_key prompt_cache_retention".split())
"""The settings that do not affect the reply."""
DECIDED = frozenset(
    "temperature top_p top_k min_p seed presence_penalty frequency_penalty reasoning_effort parallel_tool_calls".split()
)
"""The settings of the distribution, which the run decides."""
NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "top_logprobs": (0,),
    "functions": ([],),
    "function_call": ("auto", "none"),
    "modalities": (["text"],),
    "logit_bias": ({},),
}
"""The settings that are accepted with values that ask for nothing special. Any other unknown setting is ignored."""


class ChatWire(AgentWire):
    """`/v1/chat/completions`."""

    path = "/v1/chat/completions"

    def read(self, body: Mapping[str, Any], stored: ResponseStore) -> AgentRequest:
        """Returns the request of a body; see `AgentWire.read`."""
        fields = {name: value for name, value in body.items() if value is not None}
        for name, value in fields.items():
            if name in NEUTRAL and value not in NEUTRAL[name]:
                raise UnsupportedValue(name, value, NEUTRAL[name])
        if not isinstance(fields.get("messages"), list) or not fields["messages"]:
            raise WireError("messages is a list of at least one message", "messages")
        tools, names, left_out = read_tools(fields.get("tools"))
        transcript = Transcript()
        for index, value in enumerate(fields["messages"]):
            transcript.add(message_from_openai(_plain_calls(value), f"messages[{index}]"), f"messages[{index}]")
        schema, choice = _schema(fields.get("response_format")), read_choice(fields.get("tool_choice", "auto"), names)
        stream_options = fields.get("stream_options", {})
        include_usage = isinstance(stream_options, Mapping) and bool(stream_options.get("include_usage"))
        return AgentRequest(
            **transcript.fields(),
            tools=tools,
            max_tokens=read_max_tokens(fields, "max_completion_tokens", "max_tokens"),
            stop=read_stops(fields.get("stop", []), "stop"),
            tool_choice=choice,
            schema=schema,
            constraint="response_format" if schema is not None else "tool_choice",
            num_samples=_num_samples(fields.get("n", 1)),
            logprobs=bool(fields.get("logprobs")),
            stream=bool(fields.get("stream")),
            names=names,
            notes=FieldNotes(
                tuple(sorted(DECIDED & fields.keys())),
                tuple(sorted(fields.keys() - FIELDS - IDLE - DECIDED - NEUTRAL.keys())),
                left_out,
            ),
            options={"model": fields.get("model"), "include_usage": include_usage},
        )

    def answer(self, request: AgentRequest, replies: Sequence[AgentReply], stored: ResponseStore) -> Mapping[str, JSON]:
        """Returns the body of the answer; one choice per reply."""
        choices: list[JSON] = [
            {
                "index": index,
                "message": _message(reply, request.names),
                "logprobs": _logprobs(reply) if request.logprobs else None,
                "finish_reason": _finish_reason(reply),
            }
            for index, reply in enumerate(replies)
        ]
        return {**_head(request, replies[0], "chat.completion"), "choices": choices, "usage": _usage(replies)}

    def events(self, request: AgentRequest, replies: Sequence[AgentReply], stored: ResponseStore) -> Iterator[Event]:
        """Yields chunks: role, reasoning, content, each call in two parts, the reason; usage last if it is wanted."""
        head = _head(request, replies[0], "chat.completion.chunk")
        for index, reply in enumerate(replies):
            for delta in _deltas(reply, request.names):
                yield "", {**head, "choices": [{"index": index, "delta": delta, "finish_reason": None}]}
            last: dict[str, JSON] = {"index": index, "delta": {}, "finish_reason": _finish_reason(reply)}
            yield "", {**head, "choices": [{**last, "logprobs": _logprobs(reply)} if request.logprobs else last]}
        if request.options["include_usage"]:
            yield "", {**head, "choices": [], "usage": _usage(replies)}

    def error(self, refusal: Refusal) -> Mapping[str, JSON]:
        """Returns OpenAI's error."""
        return openai_error(refusal)


def read_message(value: object, where: str = "message") -> Message:
    """Returns a message that an agent sent, its calls under the episode's own ids; raises WireError."""
    message = message_from_openai(_plain_calls(value), where)
    if message.tool_call_id is not None:
        return replace(message, tool_call_id=split_call_id(message.tool_call_id)[1])
    calls = tuple(replace(call, id=split_call_id(call.id)[1]) for call in message.tool_calls)
    return replace(message, tool_calls=calls) if calls else message


def wire_messages(messages: Sequence[Message], turn: int) -> list[dict[str, JSON]]:
    """Returns the messages that answer a turn's reply, for an agent."""
    name = turn_name(turn)
    return [
        message_to_openai(
            message if message.tool_call_id is None else replace(message, tool_call_id=f"{name}_{message.tool_call_id}")
        )
        for message in messages
    ]


@cached_tools
def read_tools(value: object) -> ToolSet:
    """Returns the tools of a request; raises WireError."""
    names = ToolNames()
    tools: list[ToolSpec] = []
    left_out: list[str] = []
    for index, tool in enumerate(read_list(value, "tools")):
        where, kind = f"tools[{index}]", tool.get("type") if isinstance(tool, Mapping) else None
        if kind == "custom":
            tools.append(custom_tool(tool.get("custom", tool), where, names))
        elif kind == "namespace":
            namespace = str(tool.get("name"))
            for number, inner in enumerate(read_list(tool.get("tools"), f"{where}.tools")):
                place = f"{where}.tools[{number}]"
                if isinstance(inner, Mapping) and inner.get("type") == "custom":
                    tools.append(custom_tool(inner, place, names, namespace))
                    continue
                spec = _function(inner, place)
                tools.append(replace(spec, name=names.add(spec.name, namespace)))
        elif kind in (None, "function"):
            spec = _function(tool, where)
            tools.append(replace(spec, name=names.add(spec.name)))
        else:
            left_out.append(f"the tool {kind}")
    return tuple(tools), names, tuple(left_out)


def read_choice(value: object, names: ToolNames) -> str:
    """Returns `AgentRequest.tool_choice`; raises UnsupportedValue."""
    if isinstance(value, str) and value in ("auto", "none", "required"):
        return value
    if isinstance(value, Mapping) and value.get("type") in ("function", "custom"):
        inner = value.get(str(value["type"]), value)
        name = names.policy_name(str(inner.get("name")), str(value.get("namespace") or ""))
        if name in names.kinds:
            return f"={name}"
    raise UnsupportedValue("tool_choice", value, ("auto", "none", "required"))


def _function(tool: object, where: str) -> ToolSpec:
    """Returns the tool of chat completions, or of Responses, whose fields lie one level higher."""
    if isinstance(tool, Mapping) and "function" not in tool and isinstance(tool.get("name"), str):
        tool = {"type": "function", "function": tool}
    return tool_from_openai(tool, where)


def _plain_calls(message: object) -> object:
    """Returns a message whose calls of custom tools are calls of functions with the one argument `input`."""
    calls = message.get("tool_calls") if isinstance(message, Mapping) else None
    if not isinstance(message, Mapping) or not isinstance(calls, list):
        return message
    plain = [
        {"id": call.get("id"), "type": "function", "function": _as_function(call["custom"])}
        if isinstance(call, Mapping) and isinstance(call.get("custom"), Mapping)
        else call
        for call in calls
    ]
    return {**message, "tool_calls": plain}


def _as_function(call: Mapping[str, Any]) -> dict[str, JSON]:
    return {"name": call.get("name"), "arguments": {"input": call.get("input")}}


def _schema(value: object) -> Mapping[str, JSON] | None:
    """Returns the JSON Schema of `response_format`; None if any text will do."""
    kind = value.get("type") if isinstance(value, Mapping) else None
    if value is None or kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    wrapper = value.get("json_schema") if isinstance(value, Mapping) else None
    if kind != "json_schema" or not isinstance(wrapper, Mapping) or not isinstance(wrapper.get("schema"), Mapping):
        raise UnsupportedValue("response_format", value, ({"type": "text"},))
    schema: Mapping[str, JSON] = wrapper["schema"]
    return schema


def _num_samples(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_SAMPLES:
        raise WireError(f"n is a whole number from 1 to {MAX_SAMPLES}, got {value!r:.60}", "n")
    return value


def _message(reply: AgentReply, names: ToolNames) -> dict[str, JSON]:
    message = message_to_openai(replace(reply.message, tool_calls=()))
    if reply.message.tool_calls:
        calls: list[JSON] = [_call(call, names) for call in reply.calls]
        message |= {"content": reply.message.content or None, "tool_calls": calls}
    return message


def _call(call: SentCall, names: ToolNames) -> dict[str, JSON]:
    kind, _, name = names.on_wire(call.name)
    if kind == "custom":
        return {"id": call.id, "type": "custom", "custom": {"name": name, "input": custom_input(call)}}
    return {"id": call.id, "type": "function", "function": {"name": name, "arguments": call.arguments}}


def _deltas(reply: AgentReply, names: ToolNames) -> Iterator[dict[str, JSON]]:
    message: dict[str, Any] = _message(reply, names)
    yield {"role": "assistant", "content": ""}
    for name in ("reasoning_content", "content"):
        if message.get(name):
            yield {name: message[name]}
    for index, call in enumerate(message.get("tool_calls", ())):
        kind, text = call["type"], "input" if call["type"] == "custom" else "arguments"
        yield {"tool_calls": [{"index": index, **call, kind: {**call[kind], text: ""}}]}
        yield {"tool_calls": [{"index": index, kind: {text: call[kind][text]}}]}


def _finish_reason(reply: AgentReply) -> str:
    return "tool_calls" if reply.message.tool_calls and reply.finish_reason == "stop" else reply.finish_reason


def _logprobs(reply: AgentReply) -> JSON:
    return {
        "content": [
            {"token": text, "logprob": logprob, "bytes": [*text.encode(errors="replace")], "top_logprobs": []}
            for text, logprob in reply.logprobs
        ]
    }


def _usage(replies: Sequence[AgentReply]) -> dict[str, JSON]:
    prompt, completion = replies[0].prompt_tokens, sum(reply.completion_tokens for reply in replies)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _head(request: AgentRequest, reply: AgentReply, kind: str) -> dict[str, JSON]:
    model = request.options.get("model")
    name = model if isinstance(model, str) else "policy"
    return {"id": f"chatcmpl-{reply.id}", "object": kind, "created": reply.created, "model": name}

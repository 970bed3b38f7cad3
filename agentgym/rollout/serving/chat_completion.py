"""OpenAI's chat completions on the server's side: parses requests and formats replies."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b
from typing import Any

from agentgym.engines.protocol import FinishReason
from agentgym.openai_wire import WireError, message_from_openai, message_to_openai, tool_from_openai
from agentgym.types import JSON, Message, ToolCall, ToolSpec

__all__ = [
    "ChatCompletion",
    "ChatRequest",
    "UnsupportedValue",
    "chunks_to_openai",
    "read_chat_request",
    "read_message",
    "reply_to_openai",
    "wire_answer",
]

REQUEST_FIELDS = frozenset("messages tools model max_tokens max_completion_tokens stop stream stream_options".split())
IDLE = frozenset("user metadata store service_tier safety_identifier prompt_cache_key prompt_cache_retention".split())
"""The settings that do not affect the reply."""
DECIDED = frozenset(
    "temperature top_p top_k min_p seed presence_penalty frequency_penalty reasoning_effort parallel_tool_calls".split()
)
"""The settings of the distribution, which the run decides: otherwise the record could not be trained on."""
NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "n": (1,),
    "tool_choice": ("auto", "none"),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "functions": ([],),
    "function_call": ("auto", "none"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "logit_bias": ({},),
}
"""The settings that are accepted with values that ask for nothing special. Any other unknown setting is ignored."""
TURN = re.compile(r"\Aturn\d+_(?=.)", re.DOTALL)


class UnsupportedValue(WireError):
    """A known field with a value that is not supported, in OpenAI's words."""

    code = "unsupported_value"

    def __init__(self, param: str, value: object) -> None:
        value_text = json.dumps(value, default=str)
        supported = " or ".join(json.dumps(neutral) for neutral in NEUTRAL[param])
        message = (
            f"Unsupported value: '{param}' does not support {value_text:.60} with this model. "
            f"Only {supported} is supported."
        )
        super().__init__(message, param)
        self.value = value

    def __reduce__(self) -> tuple[object, ...]:
        return (UnsupportedValue, (self.param, self.value))


@dataclass(frozen=True)
class ChatRequest:
    """A request of an agent: for a reply to `messages`, with `tools` available."""

    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()
    max_tokens: int | None = None
    """The agent's own limit of the reply, in addition to the run's."""
    stream: bool = False
    include_usage: bool = False
    calls_tools: bool = True
    """True if a reply may call tools; with `tool_choice="none"`, calls are shown as text."""
    decided: tuple[str, ...] = ()
    """The settings that were sent and that the run decides."""
    ignored: tuple[str, ...] = ()
    """The fields that were sent and that are unknown."""
    stop: tuple[str, ...] = ()
    """The agent's own stop strings, besides the run's; a reply is shown to the agent without the one that ended it."""

    @cached_property
    def key(self) -> str:
        """The key of the request, equal for equal requests however they are sent: a retry has its original's key."""
        messages = [message_to_openai(message) for message in self.messages]
        tools = [tool.to_openai() for tool in self.tools]
        limits = [self.max_tokens, self.calls_tools, self.stop]
        text = json.dumps([messages, tools, *limits], sort_keys=True, default=dict)
        return blake2b(text.encode(errors="surrogatepass"), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class ChatCompletion:
    """A reply that was sampled and recorded; sent again, it is the same to the byte."""

    id: str
    turn: int
    message: Message
    finish_reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    created: int
    """The Unix time in seconds."""

    @property
    def wire_message(self) -> dict[str, JSON]:
        """Returns the message for the agent.

        A chat format numbers the calls of each reply from 0; on the wire their ids are unique in the conversation:
        `turn3_call_0`.
        """
        return wire_answer([self.message], self.turn)[0]

    @property
    def wire_finish_reason(self) -> str:
        """The finish reason: `tool_calls`, `stop` or `length`."""
        return "tool_calls" if self.message.tool_calls and self.finish_reason == "stop" else self.finish_reason

    @property
    def usage(self) -> dict[str, JSON]:
        """Returns the numbers of tokens of the prompt and of the reply."""
        total = self.prompt_tokens + self.completion_tokens
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": total,
        }


def read_chat_request(body: object) -> ChatRequest:
    """Returns the request in the body of a chat completion; raises WireError, naming an unsupported field."""
    if not isinstance(body, Mapping):
        raise WireError("the body of a chat completion is a JSON object")
    fields = {name: value for name, value in body.items() if value is not None}
    for name, value in fields.items():
        if name in NEUTRAL and value not in NEUTRAL[name]:
            raise UnsupportedValue(name, value)
    messages, tools = fields.get("messages"), fields.get("tools", [])
    if not isinstance(messages, list) or not messages:
        raise WireError("messages is a list of at least one message", "messages")
    if not isinstance(tools, list):
        raise WireError("tools is a list", "tools")
    options = fields.get("stream_options", {})
    return ChatRequest(
        _with_tool_names([read_message(message, f"messages[{index}]") for index, message in enumerate(messages)]),
        tuple(tool_from_openai(tool, f"tools[{index}]") for index, tool in enumerate(tools)),
        _max_tokens(fields),
        bool(fields.get("stream")),
        bool(options.get("include_usage")) if isinstance(options, Mapping) else False,
        fields.get("tool_choice") != "none",
        tuple(sorted(DECIDED & fields.keys())),
        tuple(sorted(fields.keys() - REQUEST_FIELDS - IDLE - DECIDED - NEUTRAL.keys())),
        _stop_strings(fields.get("stop", [])),
    )


def read_message(value: object, where: str = "message") -> Message:
    """Returns a message that an agent sent, its calls under the episode's own ids; raises WireError."""
    return _rename_calls(message_from_openai(value, where), lambda name: TURN.sub("", name, count=1))


def wire_answer(messages: Sequence[Message], turn: int) -> list[dict[str, JSON]]:
    """Returns a reply, or the messages that answer it, for the agent; `turn` counts the replies before it."""
    return [message_to_openai(_rename_calls(message, lambda name: f"turn{turn}_{name}")) for message in messages]


def reply_to_openai(reply: ChatCompletion, model: str) -> dict[str, JSON]:
    """Returns the reply as the answer to a request without streaming."""
    choice: dict[str, JSON] = {
        "index": 0,
        "message": reply.wire_message,
        "logprobs": None,
        "finish_reason": reply.wire_finish_reason,
    }
    return {**_head(reply, model, "chat.completion"), "choices": [choice], "usage": reply.usage}


def chunks_to_openai(reply: ChatCompletion, model: str, *, include_usage: bool) -> Iterator[dict[str, JSON]]:
    """Yields the reply as the chunks of a stream: role, reasoning, content, each call in two parts, the reason."""
    head = _head(reply, model, "chat.completion.chunk")
    message: dict[str, Any] = reply.wire_message
    deltas: list[dict[str, JSON]] = [{"role": "assistant", "content": ""}]
    deltas += [{name: message[name]} for name in ("reasoning_content", "content") if message.get(name)]
    for index, call in enumerate(message.get("tool_calls", ())):
        function = call["function"]
        start: dict[str, JSON] = {"index": index, **call, "function": {"name": function["name"], "arguments": ""}}
        rest: dict[str, JSON] = {"index": index, "function": {"arguments": function["arguments"]}}
        deltas += [{"tool_calls": [start]}, {"tool_calls": [rest]}]
    for delta in deltas:
        yield {**head, "choices": [_choice(delta)]}
    yield {**head, "choices": [_choice({}, reply.wire_finish_reason)]}
    if include_usage:
        yield {**head, "choices": [], "usage": reply.usage}


def _head(reply: ChatCompletion, model: str, kind: str) -> dict[str, JSON]:
    return {"id": reply.id, "object": kind, "created": reply.created, "model": model}


def _choice(delta: Mapping[str, JSON], finish_reason: str | None = None) -> dict[str, JSON]:
    return {"index": 0, "delta": delta, "finish_reason": finish_reason}


def _stop_strings(stop: object) -> tuple[str, ...]:
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or not all(isinstance(text, str) and text for text in stops):
        raise WireError(f"stop is a text or a list of texts, none of them empty, got {stop!r:.60}", "stop")
    return tuple(stops)


def _max_tokens(fields: Mapping[str, object]) -> int | None:
    name = "max_completion_tokens" if "max_completion_tokens" in fields else "max_tokens"
    value = fields.get(name)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise WireError(f"{name} is a whole number of at least 1, got {value!r:.60}", name)
    return value


def _with_tool_names(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Returns the messages, each result with the name of its call's tool: the wire has only the call's id."""
    whole: list[Message] = []
    names: dict[str, str] = {}
    for message in messages:
        if message.role == "assistant":
            names = {call.id: call.name for call in message.tool_calls if isinstance(call, ToolCall)}
        is_nameless = message.role == "tool" and message.name is None
        whole.append(replace(message, name=names.get(message.tool_call_id or "")) if is_nameless else message)
    return tuple(whole)


def _rename_calls(message: Message, rename: Callable[[str], str]) -> Message:
    """Returns the message with other ids of its calls, or of the call that it answers."""
    if message.tool_call_id is not None:
        return replace(message, tool_call_id=rename(message.tool_call_id))
    calls = tuple(replace(call, id=rename(call.id)) for call in message.tool_calls)
    return replace(message, tool_calls=calls) if calls else message

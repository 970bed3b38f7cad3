"""What all dialects share: the request of an agent, the reply to it, the names of its tools, and their errors."""

from __future__ import annotations

import json
import marshal
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import blake2b
from typing import Any, TypeAlias

from agentgym.engines.protocol import FinishReason
from agentgym.errors import AgentGymError
from agentgym.openai_wire import MALFORMED, WireError, message_to_openai
from agentgym.rollout.serving.wires.response_store import ResponseStore
from agentgym.types import JSON, AnyCall, MalformedCall, Message, ToolCall, ToolSpec

__all__ = [
    "CONTEXT_EXCEEDED",
    "AgentReply",
    "AgentRequest",
    "AgentWire",
    "Event",
    "FieldNotes",
    "Refusal",
    "RequestRefused",
    "SentCall",
    "ToolNames",
    "ToolSet",
    "Transcript",
    "UnreadableCall",
    "UnsupportedValue",
    "cached_tools",
    "json_digest",
    "named_turn",
    "split_call_id",
    "tools_digest",
    "turn_name",
]

CONTEXT_EXCEEDED = "context_length_exceeded"
"""OpenAI's code for messages that leave no room for a reply."""
MAX_SAMPLES = 64
"""The most replies of one request (`n`)."""
TURN_NAME = re.compile(r"\A(turn\d+)\Z")
CALL_ID = re.compile(r"\A(turn\d+)_(.+)\Z", re.DOTALL)
Event: TypeAlias = tuple[str, Mapping[str, JSON]]
"""The name of an event of a stream, empty for one without a name, and its data."""


ToolSet: TypeAlias = "tuple[tuple[ToolSpec, ...], ToolNames, tuple[str, ...]]"
"""The tools that an agent runs, their names, and the types of those that only a provider's servers can run."""
ReadTools: TypeAlias = Callable[[object], ToolSet]
MAX_TOOL_SETS = 256
"""The most tool sets that are cached."""
MAX_TOOL_BYTES = 1 << 20
"""The most bytes of a tool set beside which others are cached."""


class RequestRefused(AgentGymError, ValueError):
    """A request that cannot be played; the episode continues as if it had not been made."""

    def __init__(self, message: str, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (str(self), self.code, self.param))


class UnsupportedValue(RequestRefused):
    """A known field with a value that is not supported, in OpenAI's words."""

    def __init__(self, param: str, value: object, supported: Sequence[object] = (), reason: str = "") -> None:
        only = f"Only {' or '.join(json.dumps(each) for each in supported)} is supported." if supported else reason
        text = f"Unsupported value: '{param}' does not support {json.dumps(value, default=str):.60} with this model."
        super().__init__(f"{text} {only}".strip(), "unsupported_value", param)
        self._arguments = (param, value, supported, reason)

    def __reduce__(self) -> tuple[object, ...]:
        return (UnsupportedValue, self._arguments)


@dataclass(frozen=True, slots=True)
class Refusal:
    """The answer to a request that is not served, before a dialect words it; `status` is the HTTP status."""

    status: int
    message: str
    code: str | None = None
    param: str | None = None


@dataclass(frozen=True, slots=True)
class UnreadableCall(MalformedCall):
    """A call of an offered tool whose arguments cannot be read: it is sent as a call with the raw arguments."""

    name: str = ""
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class SentCall:
    """A call as it is sent: its id names the turn, and `arguments` is JSON text, or what was sampled in its place."""

    id: str
    name: str
    arguments: str
    value: Mapping[str, JSON] | None
    """The arguments; None if they cannot be read."""

    @classmethod
    def of(cls, call: AnyCall, turn: int) -> SentCall:
        """Returns the call of a turn's reply, under an id that is unique in the episode."""
        call_id = f"{turn_name(turn)}_{call.id}"
        if isinstance(call, ToolCall):
            return cls(call_id, call.name, json.dumps(call.arguments, ensure_ascii=False, default=dict), call.arguments)
        if isinstance(call, UnreadableCall):
            return cls(call_id, call.name, call.arguments, None)
        value: dict[str, JSON] = {
            "raw": call.raw,
            "error": call.error,
            **({"truncated": True} if call.truncated else {}),
        }
        return cls(call_id, MALFORMED, json.dumps(value, ensure_ascii=False), value)


@dataclass(frozen=True, slots=True)
class ToolNames:
    """The names of an agent's tools on the wire, by the names that the policy sees.

    A namespace and a name are joined: `mcp__game` and `look` give `mcp__game__look`.
    """

    kinds: dict[str, str] = field(default_factory=dict)
    """`function` or `custom`, by the policy's name."""
    wire_names: dict[str, tuple[str, str]] = field(default_factory=dict)
    """The namespace, empty for most, and the name on the wire, by the policy's name."""
    digest: str = ""
    """The digest of the tools, if it is known."""

    def add(self, name: str, namespace: str = "", kind: str = "function") -> str:
        """Returns the policy's name of a tool, which no other tool has."""
        joined = self.policy_name(name, namespace)
        while self.wire_names.get(joined, (namespace, name)) != (namespace, name):
            joined += "_"
        self.kinds[joined], self.wire_names[joined] = kind, (namespace, name)
        return joined

    def policy_name(self, name: str, namespace: str = "") -> str:
        """Returns the policy's name of a tool that is called."""
        offered = (tool for tool, parts in self.wire_names.items() if namespace and parts == (namespace, name))
        return next(offered, f"{namespace}__{name}" if namespace else name)

    def on_wire(self, name: str) -> tuple[str, str, str]:
        """Returns the kind, the namespace and the name on the wire of a tool by its policy's name."""
        return (self.kinds.get(name, "function"), *self.wire_names.get(name, ("", name)))


@dataclass(frozen=True, slots=True)
class FieldNotes:
    """The fields of a request that have no effect, each to be reported once."""

    decided: tuple[str, ...] = ()
    """The settings of the distribution, which the run decides: otherwise the record could not be trained on."""
    ignored: tuple[str, ...] = ()
    """The fields that are unknown."""
    left_out: tuple[str, ...] = ()
    """The tools and items that only the provider's own servers can run."""


@dataclass(frozen=True)
class AgentRequest:
    """A request of an agent: for replies to `messages`, with `tools` available."""

    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()
    turns: tuple[str, ...] = ()
    """The turn that each message is the reply of, as its call ids or its sealed reasoning name it; empty if none."""
    max_tokens: int | None = None
    """The agent's own limit of the reply, in addition to the run's."""
    stop: tuple[str, ...] = ()
    """The agent's own stop strings, besides the run's; a reply is shown to the agent without the one that ended it."""
    tool_choice: str = "auto"
    """`auto`, `none` (calls are shown as text), `required`, or the name of the tool that must be called after `=`."""
    schema: Mapping[str, JSON] | None = None
    """The JSON Schema of the reply's text."""
    constraint: str = ""
    """The field that constrains the reply, as the dialect calls it."""
    num_samples: int = 1
    logprobs: bool = False
    stream: bool = False
    counts_only: bool = False
    """True if only the number of the prompt's tokens is wanted."""
    names: ToolNames = field(default_factory=ToolNames)
    notes: FieldNotes = field(default_factory=FieldNotes)
    label: str = ""
    """The kind of the branch, where the agent's headers give it."""
    client: str = ""
    """The dialect, and the program that sent the request."""
    agent: str = ""
    """The conversation that the request belongs to, where the agent's headers name it."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """What the dialect itself needs for its answer."""

    @cached_property
    def key(self) -> str:
        """The key of the request, equal for equal requests however they are sent: a retry has its original's key."""
        messages = [message_to_openai(message) for message in self.messages]
        settings = [self.settings_key, self.num_samples, self.counts_only, self.agent]
        return json_digest([messages, self.turns, self.tools_key, *settings])

    @property
    def tools_key(self) -> str:
        """The digest of the tools, in whatever order."""
        return self.names.digest or tools_digest(self.tools)

    @cached_property
    def settings_key(self) -> str:
        """The key of what the agent decides about the reply itself; empty if that is nothing."""
        settings = [self.max_tokens, self.stop, self.tool_choice, self.schema]
        return "" if settings == [None, (), "auto", None] else json_digest(settings)


@dataclass(frozen=True, slots=True)
class AgentReply:
    """A reply that was sampled and recorded; sent again, it is the same to the byte."""

    id: str
    turn: int
    message: Message
    finish_reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    created: int
    """The Unix time in seconds."""
    stop: str = ""
    """The agent's own stop string that ended the reply."""
    logprobs: tuple[tuple[str, float], ...] = ()
    """The text and the logprob of each sampled id, if the agent asked for them."""

    @property
    def calls(self) -> list[SentCall]:
        """The calls as they are sent."""
        return [SentCall.of(call, self.turn) for call in self.message.tool_calls]

    @property
    def name(self) -> str:
        """The turn's name, by which a message that comes back is known to be this reply."""
        return turn_name(self.turn)


class Transcript:
    """Collects the messages of a request, each with the turn that it names; checks that results answer a call."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.turns: list[str] = []
        self._calls: dict[str, str] = {}
        """The names of the tools by the ids of their calls on the wire."""

    def add(self, message: Message, where: str, turn: str = "") -> None:
        """Adds a message with the ids of the wire; raises WireError for the result of a call that nobody made."""
        if message.role == "tool":
            call_id = message.tool_call_id or ""
            if call_id not in self._calls:
                text = f"{where} is the result of the call {call_id!r:.80}, and no message before it makes that call"
                raise WireError(text, where)
            own = split_call_id(call_id)[1]
            message = replace(message, tool_call_id=own, name=message.name or self._calls[call_id] or None)
        calls: list[AnyCall] = []
        for call in message.tool_calls:
            self._calls[call.id] = call.name if isinstance(call, ToolCall) else ""
            turn_of_call, own = split_call_id(call.id)
            turn = turn or turn_of_call
            calls.append(replace(call, id=own))
        self.messages.append(replace(message, tool_calls=tuple(calls)) if calls else message)
        self.turns.append(turn)

    def fields(self) -> dict[str, Any]:
        """Returns the fields of an AgentRequest."""
        return {"messages": tuple(self.messages), "turns": tuple(self.turns)}


class AgentWire(ABC):
    """A dialect of HTTP in which agents ask for replies."""

    path: str
    """The path below the base URL, with `/v1`."""
    takes_prefill: bool = True
    """False if a last message of the assistant's is the start of the reply, which no agent can give."""

    @abstractmethod
    def read(self, body: Mapping[str, Any], stored: ResponseStore) -> AgentRequest:
        """Returns the request of a body; raises WireError or RequestRefused, which name the field."""

    @abstractmethod
    def answer(self, request: AgentRequest, replies: Sequence[AgentReply], stored: ResponseStore) -> Mapping[str, JSON]:
        """Returns the body of the answer without streaming."""

    @abstractmethod
    def events(self, request: AgentRequest, replies: Sequence[AgentReply], stored: ResponseStore) -> Iterator[Event]:
        """Yields the answer as the events of a stream."""

    @abstractmethod
    def error(self, refusal: Refusal) -> Mapping[str, JSON]:
        """Returns the body of an error."""


def turn_name(turn: int) -> str:
    """Returns the name of a turn on the wire."""
    return f"turn{turn}"


def split_call_id(call_id: str) -> tuple[str, str]:
    """Returns the turn that a call's id on the wire names, empty if none, and the id in the episode.

    >>> split_call_id("turn3_call_0"), split_call_id("call_0")
    (('turn3', 'call_0'), ('', 'call_0'))
    """
    match = CALL_ID.match(call_id)
    return (match[1], match[2]) if match else ("", call_id)


def named_turn(seal: object) -> str:
    """Returns the turn that sealed reasoning (`encrypted_content`, `signature`) names; empty if it is not ours."""
    return seal if isinstance(seal, str) and TURN_NAME.match(seal) else ""


def cached_tools(reader: ReadTools) -> ReadTools:
    """Returns a reader of tools that reads equal ones once: an agent sends them with each request."""
    cache: dict[bytes, ToolSet] = {}

    def read_cached(value: Any) -> ToolSet:
        key = marshal.dumps(value, 2)
        if key not in cache:
            tools, names, left_out = reader(value)
            if len(cache) >= MAX_TOOL_SETS or len(key) > MAX_TOOL_BYTES:
                cache.clear()
            cache[key] = tools, replace(names, digest=tools_digest(tools)), left_out
        return cache[key]

    return read_cached


def tools_digest(tools: Sequence[ToolSpec]) -> str:
    """Returns a digest of tools, in whatever order."""
    return json_digest(sorted([tool.name, json_digest([tool.description, tool.parameters])] for tool in tools))


def json_digest(value: object) -> str:
    """Returns a digest of a JSON value."""
    text = json.dumps(value, sort_keys=True, default=dict)
    return blake2b(text.encode(errors="surrogatepass"), digest_size=16).hexdigest()

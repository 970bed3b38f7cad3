"""Conversations to learn from: files with OpenAI's `messages`, and their conversion to rows of a chat format.

A file's row has `messages` and, if its replies call tools, `tools`; each may also be JSON text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from agentgym.chat_templates.renderers.template_renderer import TemplateRenderer
from agentgym.chat_templates.renderers.written_reply import encode_written_reply
from agentgym.errors import NOT_JSON, ConfigError, RenderError, nearest
from agentgym.openai_wire import WireError, message_from_openai, tool_from_openai
from agentgym.trainers.lessons.demonstrations import Demonstration
from agentgym.types import MalformedCall, Message, ToolCall, ToolSpec

__all__ = ["Conversation", "conversation_of", "conversation_rows"]

MESSAGES, TOOLS = "messages", "tools"


@dataclass(frozen=True)
class Conversation:
    """Messages with at least one reply, and the tools that the model saw: `Conversation((question, answer))`."""

    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()


def conversation_of(row: Mapping[str, object]) -> Conversation:
    """Returns the conversation of a file's row.

    Arguments of calls are an object or its JSON text. A result without `tool_call_id` answers the next open call, and a
    call without an id gets one. Raises ConfigError, naming the message, for a conversation that cannot be learned.
    """
    if MESSAGES not in row:
        near = nearest(MESSAGES, row) or "."
        raise ConfigError(f"there is no column {MESSAGES!r}{near} It has {', '.join(row) or 'none'}")
    raw = _list(row[MESSAGES], MESSAGES)
    try:
        tools = tuple(
            tool_from_openai(tool, f"{TOOLS}[{n}]") for n, tool in enumerate(_list(row.get(TOOLS) or [], TOOLS))
        )
        messages = tuple(
            message_from_openai(message, f"{MESSAGES}[{n}]") for n, message in enumerate(_with_call_ids(raw))
        )
    except WireError as error:
        raise ConfigError(str(error)) from error
    _check(messages, raw)
    return Conversation(_with_tool_names(messages), tools)


def conversation_rows(renderer: TemplateRenderer, conversation: Conversation, *, first: int = 0) -> list[Demonstration]:
    """Returns the conversation as rows in which every reply is learned once, after the prompt of a rollout.

    Replies before the message `first` are shown and not learned.

    As with `history="rerender"`: a row continues while the template renders the earlier replies unchanged. Otherwise
    (old reasoning is dropped) a new row begins. Raises RenderError if the template cannot render a message, or renders
    a reply so that it is parsed as another one.
    """
    messages, tools = conversation.messages, conversation.tools
    rows: list[_Row] = []
    behind = 0
    for place, reply in enumerate(messages):
        if reply.role != "assistant" or place < first:
            continue
        try:
            prompt = renderer.rerender(messages[:place], tools)
            new = _extend_row(renderer, rows[-1].ids, prompt, messages[behind:place]) if rows else None
            reply_ids = encode_written_reply(renderer, messages[:place], reply, tools)
        except RenderError as error:
            raise RenderError(f"{MESSAGES}[{place}]: {error}") from error
        if new is None:
            rows.append(_Row([], []))
        rows[-1].add(prompt if new is None else new, learned=False)
        rows[-1].add(reply_ids, learned=True)
        behind = place + 1
    return [Demonstration(tuple(row.ids), tuple(row.mask)) for row in rows]


@dataclass(frozen=True)
class _Row:
    ids: list[int]
    mask: list[bool]

    def add(self, ids: Sequence[int], *, learned: bool) -> None:
        self.ids.extend(ids)
        self.mask.extend([learned] * len(ids))


def _extend_row(
    renderer: TemplateRenderer, ids: Sequence[int], prompt: Sequence[int], new: Sequence[Message]
) -> list[int] | None:
    """Returns the ids that extend a row to the text of `prompt`, or None if no ids do."""
    try:
        appended = renderer.extend(ids, new)
    except RenderError:  # the template rewrites what came before
        return None
    return appended if renderer.decode([*ids, *appended]) == renderer.decode(prompt) else None


def _list(value: object, where: str) -> Sequence[object]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except NOT_JSON as error:
            raise ConfigError(
                f"{where} is a list, or the JSON text of one, got text that is not JSON: {error}"
            ) from error
    if not isinstance(value, list | tuple):
        raise ConfigError(f"{where} is a list, got {type(value).__name__} {repr(value)[:60]}")
    return value


def _with_call_ids(raw: Sequence[object]) -> Iterator[object]:
    """Yields the messages with an id for every call, and every result with the id of the call that it answers.

    An id has nine letters and digits, as some templates require.
    """
    waiting: list[str] = []
    num_calls = 0
    for message in raw:
        if not isinstance(message, Mapping):
            yield message
            continue
        calls = message.get("tool_calls")
        if isinstance(calls, list | tuple) and all(isinstance(call, Mapping) for call in calls) and calls:
            numbers = range(num_calls, num_calls := num_calls + len(calls))
            calls = [
                {**call, "id": call.get("id") or f"call{number:05d}"}
                for number, call in zip(numbers, calls, strict=True)
            ]
            waiting = [str(call["id"]) for call in calls]
            yield {**message, "tool_calls": calls}
        elif message.get("role") == "tool":
            call_id = message.get("tool_call_id") or (waiting[0] if waiting else None)
            waiting = [waiting_id for waiting_id in waiting if waiting_id != call_id]
            yield {**message, "tool_call_id": call_id}
        else:
            yield message


def _check(messages: Sequence[Message], raw: Sequence[object]) -> None:
    """Raises ConfigError for a conversation without replies, or with a reply that must not be learned."""
    if not any(message.role == "assistant" for message in messages):
        raise ConfigError(f"{MESSAGES} holds no reply: at least one message of the role assistant is learned")
    for place, (message, row_message) in enumerate(zip(messages, raw, strict=True)):
        if message.role != "assistant":
            continue
        where = f"{MESSAGES}[{place}]"
        if not place:
            raise ConfigError(f"{where} is a reply to nothing: a message of another role comes before it")
        if not (message.content.strip() or message.tool_calls):
            raise ConfigError(f"{where} is an empty reply, with neither content nor calls")
        if isinstance(row_message, Mapping) and row_message.get("weight") == 0:
            raise ConfigError(f"{where} has the weight 0: every reply is learned, and none can be left out")
        for number, call in enumerate(message.tool_calls):
            if isinstance(call, MalformedCall):
                raise ConfigError(f"{where}.tool_calls[{number}]: {call.error}")


def _with_tool_names(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Returns the messages with the tool's name added to each result, since some templates write it.

    A result answers the latest call of its id: some servers count the ids of each reply from 0.
    """
    messages_out: list[Message] = []
    names: dict[str, list[str]] = {}
    for message in messages:
        names |= {call.id: [] for call in message.tool_calls}
        for call in message.tool_calls:
            names[call.id] += [call.name] if isinstance(call, ToolCall) else []
        if message.role == "tool":
            waiting = names.get(message.tool_call_id or "", [])
            name = waiting.pop(0) if len(waiting) > 1 else next(iter(waiting), None)
            message = Message("tool", message.content, tool_call_id=message.tool_call_id, name=name)
        messages_out.append(message)
    return tuple(messages_out)

"""The conversation as an outside agent sees it: calls that it cannot run are text."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import replace

from agentgym.types import AnyCall, Message, ToolCall

__all__ = ["hide_stop", "visible_messages"]


def visible_messages(messages: Sequence[Message], tools: Collection[str]) -> list[Message]:
    """Returns the messages for an agent that has the tools of these names.

    A call that cannot be parsed, or that names another tool, becomes a part of the reply's text, as it was sampled; its
    answer becomes a user message after the results of the reply's other calls. An agent's framework can then neither
    fail at a tool that it does not have nor miss a result.
    """
    visible: list[Message] = []
    hidden: set[str] = set()
    answers: list[Message] = []
    for message in messages:
        if message.role == "tool" and message.tool_call_id in hidden:
            answers.append(Message("user", message.content))
            continue
        if message.role != "tool":
            visible += answers
            answers = []
        if message.role == "assistant":
            calls = tuple(call for call in message.tool_calls if _is_runnable(call, tools))
            lost = [call for call in message.tool_calls if not _is_runnable(call, tools)]
            hidden = {call.id for call in lost}
            text = "\n".join(part for part in (message.content, *map(_text, lost)) if part)
            message = replace(message, content=text, tool_calls=calls) if lost else message
        visible.append(message)
    return visible + answers


def hide_stop(reply: Message, stop: str, stop_strings: Collection[str]) -> Message:
    """Returns a reply for an agent, without the stop string that ended its text if the agent asked for that one."""
    return replace(reply, content=reply.content.removesuffix(stop)) if stop in stop_strings else reply


def _is_runnable(call: AnyCall, tools: Collection[str]) -> bool:
    return isinstance(call, ToolCall) and call.name in tools


def _text(call: AnyCall) -> str:
    if isinstance(call, ToolCall):
        return json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False, default=dict)
    return call.raw

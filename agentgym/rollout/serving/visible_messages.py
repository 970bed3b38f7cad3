"""The conversation as an outside agent sees it: calls that it cannot run are text."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from agentgym.rollout.serving.wires.wire import UnreadableCall
from agentgym.types import AnyCall, MalformedCall, Message, ToolCall

__all__ = ["AgentView", "hide_stop", "visible_messages"]

BEFORE_ARGUMENTS = re.compile(r"\b(?:arguments|parameters?|args|input|inputs|params|kwargs)\b|\(")
NAME = re.compile(r'"name"\s*:\s*"([^"]*)"')
WORD = re.compile(r"[\w.\-]+")
CLOSING_MARKS = re.compile(r"(?:\s*<[/|][^<>]*>)+\s*\Z")


@dataclass(frozen=True, slots=True)
class AgentView:
    """What an agent is shown of the calls in a reply: `AgentView(frozenset({"look", "go"}))`."""

    tools: Collection[str]
    """The names of the tools that it has."""
    unknown_as_calls: bool = False
    """True for an agent that answers a call of a tool that it does not have, and goes on."""

    def of(self, call: AnyCall) -> AnyCall | None:
        """Returns the call for the agent, or None if it is shown as text."""
        if isinstance(call, MalformedCall):
            return _unreadable_call(call, self.tools)
        return call if call.name in self.tools or (self.unknown_as_calls and self.tools) else None


def visible_messages(messages: Sequence[Message], view: AgentView) -> list[Message]:
    """Returns the messages for an agent.

    A call of an offered tool whose arguments cannot be read stays a call: agents answer it with an error. Any other
    call that cannot be run becomes a part of the reply's text, as it was sampled; its answer becomes a user message
    after the results of the reply's other calls. An agent's framework can then neither fail at a tool that it does not
    have nor miss a result.
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
            views = [view.of(call) for call in message.tool_calls]
            lost = [call for call, view in zip(message.tool_calls, views, strict=True) if view is None]
            hidden = {call.id for call in lost}
            text = "\n".join(part for part in (message.content, *map(_text, lost)) if part)
            calls = tuple(view for view in views if view is not None)
            message = replace(message, content=text, tool_calls=calls) if calls != message.tool_calls else message
        visible.append(message)
    return visible + answers


def hide_stop(reply: Message, stop: str, stop_strings: Collection[str]) -> Message:
    """Returns a reply for an agent, without the stop string that ended its text if the agent asked for that one."""
    return replace(reply, content=reply.content.removesuffix(stop)) if stop in stop_strings else reply


def _unreadable_call(call: MalformedCall, tools: Collection[str]) -> UnreadableCall | None:
    """Returns the call of an offered tool that the text was meant as; None if it names none.

    The name is the first offered one before the arguments, in whatever form the family writes a call.
    """
    cut = BEFORE_ARGUMENTS.search(call.raw)
    head = call.raw[: cut.start()] if cut else call.raw
    match = next((word for word in WORD.finditer(head) if word[0] in tools), None) or NAME.search(call.raw)
    name = match[match.lastindex or 0] if match else ""
    if match is None or name not in tools:
        return None
    rest = CLOSING_MARKS.sub("", call.raw[match.end() :])
    start = rest.find("{")
    arguments = rest[start:] if start >= 0 else rest
    if not arguments.strip():  # clients read an empty text as a call without arguments, and run it
        arguments = call.raw
    return UnreadableCall(call.id, call.raw, call.error, call.truncated, name, arguments)


def _text(call: AnyCall) -> str:
    if isinstance(call, ToolCall):
        return json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False, default=dict)
    return call.raw

"""`Action`: the argument of an environment's `step`, a text with the tool calls that were read from it."""

from __future__ import annotations

import json

from agentgym.types import AnyCall, MalformedCall, Message

__all__ = ["Action"]

_encode = json.JSONEncoder(ensure_ascii=False).encode


class Action(str):
    """A reply as text, with its parsed calls; a plain `str` for code that does not know about calls.

    `message` is the whole parsed reply when a model gave it; None means that a person (or a test) typed the text,
    so an environment may read commands from it.

    >>> Action("hello").tool_calls
    ()
    """

    __slots__ = ("message", "tool_calls")

    tool_calls: tuple[AnyCall, ...]
    message: Message | None

    def __new__(cls, text: str, tool_calls: tuple[AnyCall, ...] = (), message: Message | None = None) -> Action:
        action = super().__new__(cls, text)
        action.tool_calls = tuple(tool_calls)
        action.message = message
        return action

    @classmethod
    def from_message(cls, message: Message) -> Action:
        """The action of a parsed assistant message; its text spells the calls out, so the text alone replays it."""
        if not message.tool_calls:
            return cls(message.content, (), message)
        parts = [message.content] if message.content else []
        parts += [f"<tool_call>\n{_format_call(call)}\n</tool_call>" for call in message.tool_calls]
        return cls("\n".join(parts), message.tool_calls, message)

    def __reduce__(self) -> tuple[object, ...]:
        return (Action, (str(self), self.tool_calls, self.message))

    def __str__(self) -> str:
        return str.__str__(self)


def _format_call(call: AnyCall) -> str:
    if isinstance(call, MalformedCall):
        return call.raw
    return _encode({"name": call.name, "arguments": dict(call.arguments)})

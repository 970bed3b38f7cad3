"""Replies that come back as several messages: some agents send the text and each call of a reply apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from agentgym.types import Message

__all__ = ["join_replies"]


def join_replies(
    messages: Sequence[Message], turns: Sequence[str], text_of: Callable[[str], str]
) -> tuple[tuple[Message, ...], tuple[str, ...]]:
    """Returns the messages with one for each reply, its calls' results after it, and the turn that each names.

    Pieces of a reply name the same turn, with nothing but results between them, or are beside one that does and have
    its text; `text_of` gives the text of a turn's reply.
    """
    joined: list[Message] = []
    names: list[str] = []
    first: int | None = None
    """The place of the reply that only results have followed so far."""
    for message, turn in zip(messages, turns, strict=True):
        if message.role == "assistant":
            if first is not None and (
                (turn != "" and turn == names[first])
                or (first == len(joined) - 1 and _is_text_of(joined[first], names[first], message, turn, text_of))
            ):
                joined[first], names[first] = _merge(joined[first], message), names[first] or turn
                continue
            first = len(joined)
        elif message.role != "tool":
            first = None
        joined.append(message)
        names.append(turn)
    return tuple(joined), tuple(names)


def _is_text_of(before: Message, name: str, after: Message, turn: str, text_of: Callable[[str], str]) -> bool:
    """Returns whether one of two messages names a turn, and the other is nothing but text of its reply."""
    if bool(name) == bool(turn):
        return False
    plain = after if name else before
    text = plain.content.strip()
    return bool(text) and not plain.tool_calls and text in text_of(name or turn)


def _merge(before: Message, after: Message) -> Message:
    texts = dict.fromkeys(filter(None, (before.content, after.content)))
    ids = {call.id for call in before.tool_calls}
    calls = (*before.tool_calls, *(call for call in after.tool_calls if call.id not in ids))
    reasoning = before.reasoning or after.reasoning
    return replace(before, content="\n".join(texts), reasoning=reasoning, tool_calls=calls)

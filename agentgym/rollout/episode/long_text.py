"""Renders and parses long texts in a thread, so that the event loop goes on with the other episodes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sized
from typing import ParamSpec, TypeVar

from agentgym.chat_templates.tokenizer import LONG_TEXT
from agentgym.types import MalformedCall, Message

__all__ = ["run_if_short", "text_size"]

TOOL_SIZE = 400
"""The characters that a tool's schema has, more or less."""
P = ParamSpec("P")
T = TypeVar("T")


def text_size(messages: Iterable[Message], tools: Sized = ()) -> int:
    """Returns about how many characters a conversation has."""
    size = TOOL_SIZE * len(tools)
    for message in messages:
        size += len(message.content) + len(message.reasoning or "")
        for call in message.tool_calls:
            texts = [call.raw] if isinstance(call, MalformedCall) else map(str, call.arguments.values())
            size += sum(map(len, texts))
    return size


async def run_if_short(size: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Returns the result of `work`: at once for up to `LONG_TEXT` characters or ids, else called in a thread."""
    if size <= LONG_TEXT:
        return work(*args, **kwargs)
    return await asyncio.to_thread(work, *args, **kwargs)

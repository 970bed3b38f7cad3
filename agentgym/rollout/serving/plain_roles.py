"""Messages in an order of roles that every chat template takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from agentgym.types import Message

__all__ = ["plain_roles"]


def plain_roles(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Returns the messages with one system message, the first; later ones, and users in a row, are one user's.

    >>> [message.content for message in plain_roles([Message("user", "Hi."), Message("system", "Be brief.")])]
    ['Hi.\\n\\nBe brief.']
    """
    plain: list[Message] = []
    for message in messages:
        is_late = message.role == "system" and any(before.role != "system" for before in plain)
        message = replace(message, role="user") if is_late else message
        if plain and message.role in ("system", "user") and plain[-1].role == message.role:
            plain[-1] = replace(message, content=f"{plain[-1].content}\n\n{message.content}")
        else:
            plain.append(message)
    return tuple(plain)

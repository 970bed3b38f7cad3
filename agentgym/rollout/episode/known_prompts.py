"""The ids of first prompts that were rendered last: the members of a group begin with the same one."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from operator import is_

from agentgym.types import Message, ToolSpec

__all__ = ["KnownPrompts"]

MOST = 16


class KnownPrompts:
    """Finds a prompt that was rendered lately, from equal messages and the very same tools.

    Messages with calls are not kept: arguments that are equal in Python, 1 and True, are written differently.
    """

    def __init__(self) -> None:
        self._prompts: deque[tuple[list[Message], tuple[ToolSpec, ...], list[int]]] = deque(maxlen=MOST)

    def find(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int] | None:
        """Returns the prompt's ids, or None if it is not known."""
        start = list(messages)
        for before, menu, ids in self._prompts:
            if len(menu) == len(tools) and all(map(is_, menu, tools)) and before == start:
                return list(ids)
        return None

    def keep(self, messages: Sequence[Message], tools: Sequence[ToolSpec], ids: Sequence[int]) -> None:
        """Keeps a prompt, and forgets the oldest."""
        if not any(message.tool_calls for message in messages):
            self._prompts.appendleft((list(messages), tuple(tools), list(ids)))

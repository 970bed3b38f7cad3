"""Reads from a prompt's end if it has opened the reasoning of the reply that is sampled on it."""

from __future__ import annotations

from collections.abc import Sequence

from agentgym.chat_templates.marks import Marks
from agentgym.chat_templates.tokenizer import ChatTokenizer

__all__ = ["REACH", "PromptEnd", "opens_reasoning"]

MAX_KNOWN = 1024
"""The ends of prompts that are remembered."""
REACH = 48
"""The number of ids read at a prompt's end: more than any template puts before a reply."""


class PromptEnd:
    """Reads the ends of one model's prompts.

    Templates that open reasoning need not do so everywhere: DeepSeek R1 does after a question and not after results,
    and `/no_think` in a message closes it at once.
    """

    def __init__(self, tokenizer: ChatTokenizer, marks: Marks, thinking: tuple[str, str]) -> None:
        self._tokenizer = tokenizer
        self._thinking = thinking
        self._cache: dict[tuple[int, ...], bool] = {}
        own = "".join(thinking)
        self._frames = frozenset(index for text, index in marks.ids.items() if text not in own)

    def opens(self, prompt: Sequence[int]) -> bool | None:
        """Returns True if the text after the last mark that frames messages leaves reasoning open.

        It is None if no such mark is near the end, as in a template that frames by plain text.
        """
        tail = list(prompt[-REACH:])
        for end in range(len(tail), 0, -1):
            if tail[end - 1] in self._frames:
                return self._opens_after(tuple(tail[end:]))
        return None

    def _opens_after(self, ids: tuple[int, ...]) -> bool:
        """Returns True if the text of these ids leaves reasoning open."""
        opened = self._cache.get(ids)
        if opened is None:
            if len(self._cache) >= MAX_KNOWN:
                self._cache.clear()
            opened = self._cache[ids] = opens_reasoning(self._tokenizer.decode(ids), self._thinking)
        return opened


def opens_reasoning(text: str, thinking: tuple[str, str]) -> bool:
    """Returns True if a text leaves reasoning open: `opens_reasoning("<think>", ("<think>", "</think>"))`."""
    think, end_think = thinking
    return bool(think) and text.rfind(think) > text.rfind(end_think)

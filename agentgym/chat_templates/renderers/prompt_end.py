"""How a prompt ends: whether it has opened the reasoning of the reply that is sampled on it."""

from __future__ import annotations

from collections.abc import Sequence

from agentgym.chat_templates.marks import Marks
from agentgym.chat_templates.tokenizer import ChatTokenizer

__all__ = ["PromptEnd", "opens_reasoning"]

REACH = 48
"""Ids of a prompt's end that are looked at: more than any template puts before a reply."""


class PromptEnd:
    """Reads the ends of one model's prompts. Templates that open reasoning need not do so everywhere: DeepSeek R1 does
    behind a question and not behind results, and `/no_think` in a message closes it at once."""

    def __init__(self, tokenizer: ChatTokenizer, marks: Marks, thinking: tuple[str, str]) -> None:
        self._tokenizer = tokenizer
        self._thinking = thinking
        own = "".join(thinking)
        self._frames = frozenset(index for text, index in marks.ids.items() if text not in own)

    def opens(self, prompt: Sequence[int]) -> bool | None:
        """Whether what stands behind the last mark that frames messages leaves reasoning open; None where no such mark
        is near the end, as in a template that frames by plain text."""
        tail = list(prompt[-REACH:])
        for place in range(len(tail), 0, -1):
            if tail[place - 1] in self._frames:
                return opens_reasoning(self._tokenizer.decode(tail[place:]), self._thinking)
        return None


def opens_reasoning(text: str, thinking: tuple[str, str]) -> bool:
    """Whether a text opens reasoning and does not close it: `opens_reasoning("<think>", ("<think>", "</think>"))`."""
    think, end_think = thinking
    return bool(think) and text.rfind(think) > text.rfind(end_think)

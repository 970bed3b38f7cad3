"""Builds a reply from what a format reads, by the rules that all formats share."""

from __future__ import annotations

from collections.abc import Mapping

from agentgym.types import JSON, AnyCall, MalformedCall, Message, ToolCall

__all__ = ["ReplyBuilder", "reply_problem"]


class ReplyBuilder:
    """Collects a reply's parts in their order; `message` is the whole.

    Without calls the content is the text as it is; with calls it is the stripped texts around them, one per line. Calls
    are numbered `call_0`, `call_1` unless the model gives each an id of its own.
    """

    def __init__(self) -> None:
        self.reasonings: list[str] = []
        self.calls: list[AnyCall] = []
        self._ids: set[str] = set()
        self._next = 0
        """The least number that may be free as an id."""
        self._texts: list[list[str]] = [[]]
        """The content before, between and after the calls, each in parts."""

    def text(self, text: str) -> None:
        """Adds content."""
        if text:
            self._texts[-1].append(text)

    def paragraph(self, text: str) -> None:
        """Adds content that is a message of its own: it begins a line."""
        self.text(f"\n{text}" if text and self._texts[-1] else text)

    def reason(self, text: str) -> None:
        """Adds reasoning; line breaks around it belong to the format."""
        self.reasonings.append(text.strip("\n"))

    def call(self, name: str, arguments: Mapping[str, JSON], call_id: str | None = None) -> None:
        """Adds a call that could be read; `call_id` is the model's own id for it."""
        self._add(ToolCall(self._id(call_id), name, arguments))

    def add_malformed(self, raw: str, error: str, *, truncated: bool = False) -> None:
        """Adds a text that was meant as a call and cannot be read; `truncated` is true if the reply ended in it."""
        self._add(MalformedCall(self._id(None), raw, error, truncated))

    def forget(self) -> None:
        """Drops content and calls: what was read turned out to be reasoning."""
        self.calls.clear()
        self._ids.clear()
        self._next = 0
        self._texts = [[]]

    def drop_text(self) -> None:
        """Drops the content alone."""
        self._texts = [[] for _ in self._texts]

    def message(self) -> Message:
        """Returns the reply."""
        reasoning = "\n".join(filter(None, self.reasonings)) or None
        return Message("assistant", self._content(), reasoning, tuple(self.calls))

    def _id(self, own: str | None) -> str:
        """Returns an id that no other call of the reply has: the model's own, else a number."""
        if not own or own in self._ids:
            self._next = max(self._next, len(self.calls))
            while f"call_{self._next}" in self._ids:
                self._next += 1
            own = f"call_{self._next}"
        self._ids.add(own)
        return own

    def _add(self, call: AnyCall) -> None:
        self.calls.append(call)
        self._texts.append([])

    def _content(self) -> str:
        if not any(self._texts):
            return ""
        first, *later = ["".join(parts) for parts in self._texts]
        first = first.lstrip("\n") if self.reasonings else first
        if not self.calls:
            return first
        texts = [first.rstrip(), *(text.strip() for text in later)]
        return "\n".join(filter(None, texts))


def reply_problem(message: Message, end_thinking: str = "</think>") -> str | None:
    """Returns a sentence to the model about a reply without content and calls, or None if the reply has either."""
    if message.content.strip() or message.tool_calls:
        return None
    if message.reasoning:
        close = f"Close it with {end_thinking}, then answer" if end_thinking else "Answer"
        return f"Your reply held only reasoning. {close} or call a tool."
    return "Your reply was empty. Answer or call a tool."

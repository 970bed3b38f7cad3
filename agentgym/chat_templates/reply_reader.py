"""Parses sampled ids into a message by a family's format: an id is a mark, and text that only spells one is text."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from agentgym.chat_templates.formats.protocol import ReplyContext, ReplyFormat
from agentgym.chat_templates.jinja_template import clean_json
from agentgym.chat_templates.marks import pick_guard
from agentgym.chat_templates.tokenizer import ChatTokenizer
from agentgym.types import AnyCall, MalformedCall, Message, ToolCall

__all__ = ["ReplyReader"]

Clean = Callable[[str], str]


class ReplyReader:
    """Reads the replies of one model.

    A mark of the format that the tokenizer has as one id is that id alone. Where ordinary ids spell it, a guard
    character inside the spelling hides it from the format, and is removed from what the format read. A mark that the
    tokenizer lacks (`<think>` for Qwen2.5) is recognized by its spelling.
    """

    def __init__(self, tokenizer: ChatTokenizer, reply_format: ReplyFormat, stop_ids: Collection[int]) -> None:
        self.format = reply_format
        self._tokenizer = tokenizer
        self._stop_ids = frozenset(stop_ids)
        added = tokenizer.backend.get_added_tokens_decoder()
        marks = frozenset(reply_format.marks)
        self._mark_texts = {index: token.content for index, token in added.items() if token.content in marks}
        texts = sorted(self._mark_texts.values(), key=len, reverse=True)
        self._special_ids = self._stop_ids.union(self._mark_texts)
        self._mark_pattern = re.compile("|".join(map(re.escape, texts)) or r"(?!)")

    def parse(self, ids: Sequence[int], context: ReplyContext, stop: str = "") -> Message:
        """Returns the reply as a message, up to its first stop id; raises nothing, whatever the ids.

        The text that the last id has after `stop`, a stop string, is left out.
        """
        parts = self._parts(ids)
        if stop and parts and not parts[-1][1]:
            text = self.decode(ids)
            surplus = len(text.partition(stop)[2])
            parts[-1] = (parts[-1][0][: len(parts[-1][0]) - surplus], False)
        spelled = [text for text, is_mark in parts if not is_mark and self._mark_pattern.search(text)]
        if not spelled:
            return self.format.read("".join([text for text, _ in parts]), context)
        guard = pick_guard([text for text, _ in parts])
        hidden = [text if is_mark else self._hide(text, guard) for text, is_mark in parts]
        return _clean_message(self.format.read("".join(hidden), context), lambda text: text.replace(guard, ""))

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the ids' text, special tokens included; ids out of range give none."""
        return self._tokenizer.decode(ids)

    def _parts(self, ids: Sequence[int]) -> list[tuple[str, bool]]:
        """Returns pairs of a text and whether it is a mark; a stop id that closes calls is a mark, and the last one."""
        parts: list[tuple[str, bool]] = []
        start = 0
        for at in [at for at, index in enumerate(ids) if index in self._special_ids]:
            mark, stops = self._mark_texts.get(ids[at]), ids[at] in self._stop_ids
            parts += [(self.decode(ids[start:at]), False)] if at > start else []
            if mark is not None and not (stops and mark in self.format.ends):
                parts.append((mark, True))
            if stops:
                return parts
            start = at + 1
        return parts + ([(self.decode(ids[start:]), False)] if start < len(ids) else [])

    def _hide(self, text: str, guard: str) -> str:
        return self._mark_pattern.sub(lambda match: match[0][0] + guard + match[0][1:], text)


def _clean_message(message: Message, clean: Clean) -> Message:
    reasoning = None if message.reasoning is None else clean(message.reasoning)
    calls = tuple(_clean_call(call, clean) for call in message.tool_calls)
    return Message("assistant", clean(message.content), reasoning, calls)


def _clean_call(call: AnyCall, clean: Clean) -> AnyCall:
    if isinstance(call, MalformedCall):
        return replace(call, raw=clean(call.raw), error=clean(call.error))
    arguments = {clean(name): clean_json(value, clean) for name, value in call.arguments.items()}
    return ToolCall(clean(call.id), clean(call.name), arguments)

"""The format that reads the replies of one model family, and the context that it needs besides the text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from agentgym.chat_templates.formats.grammar import CallGrammar
from agentgym.types import JSON, Message, ToolCall, ToolSpec

__all__ = ["ReadReply", "ReplyContext", "ReplyFormat", "argument_strings"]


@dataclass(frozen=True, slots=True)
class ReplyContext:
    """The conditions under which a reply was sampled: `ReplyContext(tools=(go,), in_reasoning=True)`."""

    tools: Sequence[ToolSpec] = ()
    """The tools that the model was shown: a format whose arguments have no types reads them by their schemas."""
    in_reasoning: bool = False
    """True if the generation prompt already opened the reasoning."""


ReadReply = Callable[[str, ReplyContext], Message]
"""Reads a reply's text; raises nothing, whatever the text, and takes time linear in it."""


@dataclass(frozen=True, slots=True)
class ReplyFormat:
    """The form in which a model family writes replies: reasoning, content and calls."""

    name: str
    models: str
    """The models that use the format, for people: `Qwen2.5, Qwen3, Hermes 2 and 3`."""
    read: ReadReply
    marks: tuple[str, ...]
    """Texts that structure a reply.

    If the tokenizer has one as a single id, that id alone is the mark: the reader gets text that only spells it in
    another spelling, and never takes it for structure."""
    thinking: tuple[str, str] = ("<think>", "</think>")
    """The texts that open and close reasoning; two empty texts for a format without any."""
    ends: tuple[str, ...] = ()
    """Texts that end a reply, such as `<|im_end|>`."""
    aliases: tuple[str, ...] = ()
    """Other names of the format."""
    grammar: CallGrammar | None = None
    """The grammar of the calls for an engine that constrains what it samples; None if the calls have no grammar."""

    def parse(self, text: str, tools: Sequence[ToolSpec] = (), *, in_reasoning: bool = False) -> Message:
        """Reads a reply's text up to the first of `ends` that is not inside the arguments of a call.

        Arguments may spell an end, as `{"html": "<s>old</s>"}` does for a model whose replies end with `</s>`.
        """
        context = ReplyContext(tools, in_reasoning)
        end = re.compile("|".join(map(re.escape, self.ends)) or r"(?!)")
        stops = [match.start() for match in end.finditer(text)]
        for num_inside, stop in ((len(stops), len(text)), (len(stops) - 1, stops[-1] if stops else 0)):
            message = self.read(text[:stop], context)
            if num_inside == sum(len(end.findall(string)) for string in argument_strings(message)):
                return message
        return self.read(text[: stops[0]], context)


def argument_strings(message: Message) -> Iterator[str]:
    """Yields every string, keys included, of the arguments of the calls that could be read."""
    values: list[JSON] = [call.arguments for call in message.tool_calls if isinstance(call, ToolCall)]
    while values:
        value = values.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, Mapping):
            values += [*value.keys(), *value.values()]
        elif isinstance(value, Sequence):
            values += value

"""Calls as Gemma 4 and FunctionGemma write them: a name, and arguments in a notation of their own.

Gemma 4: `<|tool_call>call:go{direction:<|"|>north<|"|>,steps:2}<tool_call|>`. FunctionGemma has `<start_function_call>`
and `<end_function_call>` around calls, and `<escape>` around strings, or around all values.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from agentgym.chat_templates.formats.gemma_value import GemmaValueReader
from agentgym.chat_templates.formats.protocol import ReadReply, ReplyContext, ReplyFormat
from agentgym.chat_templates.formats.quoted_values import without_quotes
from agentgym.chat_templates.formats.schema_types import tool_named
from agentgym.chat_templates.formats.tagged import FoundCall, Tags, read_tagged
from agentgym.types import Message

__all__ = ["FUNCTION_GEMMA", "GEMMA4"]

HEAD = re.compile(r"\s*+(?:(?:call)?+:)?+([^{}]*+)")


def _reader(tags: Tags, quote: str) -> ReadReply:
    """Returns a reader of replies whose strings are between two of `quote`."""
    how_to_write = f"Write {tags.opening}call:tool{{name:{quote}text{quote},number:1}}{tags.closing}"

    def read_body(body: str, context: ReplyContext) -> Sequence[FoundCall]:
        name = "" if (head := HEAD.match(body)) is None else head[1].strip()
        if head is None or not name or quote in name:
            raise ValueError(f"a call begins with call: and the tool's name, got {body[:40]!r}. {how_to_write}")
        values = GemmaValueReader(body, quote, head.end())
        try:
            arguments = values.object() if head.end() < len(body) else {}
            values.end()
        except ValueError as error:
            raise ValueError(f"{error}. {how_to_write}") from None
        return [FoundCall(name, without_quotes(arguments, tool_named(name, context.tools)))]

    def read(text: str, context: ReplyContext) -> Message:
        return read_tagged(text, context, tags, read_body)

    return read


GEMMA4_TAGS = Tags(
    "<|tool_call>",
    "<tool_call|>",
    thinking=("<|channel>thought", "<channel|>"),
    # A second end of reasoning has no meaning.
    silent=("<channel|>",),
    must_close=True,
)
FUNCTION_GEMMA_TAGS = Tags("<start_function_call>", "<end_function_call>", must_close=True)

GEMMA4 = ReplyFormat(
    "gemma4",
    "Gemma 4",
    _reader(GEMMA4_TAGS, '<|"|>'),
    ("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>'),
    ("<|channel>thought\n", "<channel|>"),
    ends=("<turn|>", "<|tool_response>"),
)
FUNCTION_GEMMA = ReplyFormat(
    "function_gemma",
    "FunctionGemma",
    _reader(FUNCTION_GEMMA_TAGS, "<escape>"),
    ("<start_function_call>", "<end_function_call>", "<escape>"),
    ("", ""),
    ends=("<end_of_turn>", "<start_function_response>"),
)

"""Mistral's templates, v3 to v13: tools before the last question, call ids of nine characters."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import replace

from agentgym.chat_templates.renderers.template_renderer import TemplateRenderer
from agentgym.types import Message, ToolCall

__all__ = ["MistralRenderer"]

_ID = re.compile(r"[A-Za-z0-9]{9}")


class MistralRenderer(TemplateRenderer):
    """A `TemplateRenderer` for templates that move `[AVAILABLE_TOOLS]` to the last user message.

    With v3 they move the system prompt as well (`message == user_messages[-1]`,
    `loop.last and system_message is defined`).

    A row keeps both where the first prompt showed them, and what is appended is framed as in a conversation without
    them: appending cannot reproduce a template that moves earlier text. The template refuses call ids that are not nine
    letters and digits; another id becomes the first nine hexadecimal digits of its SHA-256, for the call and for its
    result alike.
    """

    keeps_what_was_shown = True

    def prepare(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Returns the messages with call ids that the template takes."""
        return [_with_fitting_ids(message) for message in messages]


def _with_fitting_ids(message: Message) -> Message:
    if message.tool_call_id is not None:
        return replace(message, tool_call_id=_fitting_id(message.tool_call_id))
    if not message.tool_calls:
        return message
    calls = [
        replace(call, id=_fitting_id(call.id)) if isinstance(call, ToolCall) else call for call in message.tool_calls
    ]
    return replace(message, tool_calls=tuple(calls))


def _fitting_id(call_id: str) -> str:
    return call_id if _ID.fullmatch(call_id) else hashlib.sha256(call_id.encode("utf-8", "replace")).hexdigest()[:9]

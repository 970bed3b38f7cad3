"""Command R7B's template, which numbers the calls of a whole conversation and frames replies in marks of their own."""

from __future__ import annotations

import re
from collections.abc import Sequence

from agentgym.chat_templates.renderers.template_probe import USER
from agentgym.chat_templates.renderers.template_renderer import TemplateRenderer
from agentgym.errors import RenderError
from agentgym.types import Message, ToolSpec

__all__ = ["CommandRenderer"]

_NUMBER = re.compile(r'^        "tool_call_id": "\d*",$', re.MULTILINE)
_UNNUMBERED = re.compile(r"call_\d+")


class CommandRenderer(TemplateRenderer):
    """`TemplateRenderer` for a template whose generation prompt closes the thinking which its history leaves out
    (`not enable_thinking`), and whose results bear the number of their call in the conversation
    (`tool_call_id_to_int`).

    A row keeps the prompt as it was shown. A result bears the number that the model gave its call; one whose call has
    none (it could not be read) bears an empty one, which is what the template writes for a call that it does not find.
    """

    keeps_what_was_shown = True

    def after_reply(
        self,
        new_messages: Sequence[Message],
        history: Sequence[Message] = (USER,),
        tools: Sequence[ToolSpec] | None = None,
        guard: str = "",
    ) -> str:
        """What the template puts after a reply, the results' numbers being those of the calls."""
        text = super().after_reply(new_messages, history, tools, guard)
        numbers = iter([_number(message.tool_call_id or "") for message in new_messages if message.role == "tool"])
        return _NUMBER.sub(lambda match: f'        "tool_call_id": "{next(numbers)}",', text)

    def _closing(self, ids: Sequence[int]) -> str:
        """The end of what a cut reply was in: its response, its calls or its thinking."""
        for index in reversed(ids):
            mark = self.marks.texts.get(index, "")
            if mark.startswith("<|START_") and mark != "<|START_OF_TURN_TOKEN|>":
                return mark.replace("START", "END")
            if mark:
                break
        return ""


def _number(call_id: str) -> str:
    if call_id.isdecimal():
        return str(int(call_id))
    if call_id and not _UNNUMBERED.fullmatch(call_id):
        raise RenderError(
            f"a result of the call {call_id!r} cannot be appended: the chat template numbers the calls of the whole"
            " conversation (`tool_call_id_to_int`), and that id is no number"
        )
    return ""

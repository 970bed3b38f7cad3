"""Command R7B's template, which numbers the calls of a whole conversation and frames replies in special marks."""

from __future__ import annotations

import re
from collections.abc import Sequence

from agentgym.chat_templates.renderers.template_probe import USER
from agentgym.chat_templates.renderers.template_renderer import TemplateRenderer
from agentgym.errors import RenderError
from agentgym.types import Message, ToolSpec

__all__ = ["CommandRenderer"]

_NUMBER = re.compile(r'^        "tool_call_id": "\d*",$', re.MULTILINE)
_CALL_ID = re.compile(r"call_\d+")


class CommandRenderer(TemplateRenderer):
    """A `TemplateRenderer` for a template that numbers calls over the conversation (`tool_call_id_to_int`).

    Its results have the number of their call. Its generation prompt closes the thinking that its history leaves out
    (`not enable_thinking`).

    A row keeps the prompt as it was shown. A result has the number that the model gave its call. If the call has none
    (it could not be read), the number is empty, as the template writes it for a call that it does not find.
    """

    keeps_what_was_shown = True

    def after_reply(
        self,
        new_messages: Sequence[Message],
        history: Sequence[Message] = (USER,),
        tools: Sequence[ToolSpec] | None = None,
        guard: str = "",
    ) -> str:
        """Returns what the template puts after a reply, the results' numbers being those of the calls."""
        text = super().after_reply(new_messages, history, tools, guard)
        numbers = iter([_number(message.tool_call_id or "") for message in new_messages if message.role == "tool"])
        return _NUMBER.sub(lambda match: f'        "tool_call_id": "{next(numbers)}",', text)

    def _closing(self, ids: Sequence[int]) -> str:
        """Returns the end mark of the part in which a reply was cut: its response, its calls or its thinking."""
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
    if call_id and not _CALL_ID.fullmatch(call_id):
        raise RenderError(
            f"a result of the call {call_id!r} cannot be appended: the chat template numbers the calls of the whole"
            " conversation (`tool_call_id_to_int`), and that id is not a number"
        )
    return ""

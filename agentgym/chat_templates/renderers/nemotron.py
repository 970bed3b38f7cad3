"""Nemotron Nano v2's template, in which a message may switch thinking on or off for the rest of the conversation."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from agentgym.chat_templates.renderers.template_probe import USER
from agentgym.chat_templates.renderers.template_renderer import TemplateRenderer
from agentgym.types import Message

__all__ = ["NemotronRenderer"]

_EMPTY_REASONING = "<think></think>"
"""The end of the generation prompt if thinking is switched off."""
_NO_THINK = (Message("system", "/no_think"), USER)
"""A conversation with thinking switched off."""


class NemotronRenderer(TemplateRenderer):
    """A `TemplateRenderer` for a template whose generation prompt depends on the last `/think` or `/no_think`.

    Either may be in a system or user message; the template remembers the last one as `ns.enable_thinking`. `extend`
    reads it from the generation prompt of the previous reply, so it needs no messages of the history.
    """

    def extend(self, ids: Sequence[int], new_messages: Sequence[Message]) -> list[int]:
        """Returns the ids to append to `ids`; see `TemplateRenderer.extend`."""
        return self._new_ids(ids, new_messages, _NO_THINK if self._is_switched_off(ids) else (USER,))

    def _is_switched_off(self, ids: Sequence[int]) -> bool:
        """Returns True if the last generation prompt in `ids` closed the reasoning at once.

        Goes back from the end to the mark that opens the last message, so the time does not grow with the history.
        """
        switch_ids = self._switched_off_ids
        for start in range(len(ids) - 1, -1, -1):
            if ids[start] == switch_ids[0]:
                return list(ids[start : start + len(switch_ids)]) == switch_ids
        return False

    @functools.cached_property
    def _switched_off_ids(self) -> list[int]:
        """The generation prompt that closes the reasoning at once, from the mark that opens its message."""
        prompt = self.text(_NO_THINK, self.probe_tools)
        opening = max(prompt.rfind(mark) for mark in self.marks.ids if mark in prompt and mark not in _EMPTY_REASONING)
        return self.marks.encode(prompt[opening:])

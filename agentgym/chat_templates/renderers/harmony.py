"""Harmony, the format of gpt-oss: channels, one call per reply, and end marks that depend on what they end."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from agentgym.chat_templates.renderers.template_probe import PROBE, USER
from agentgym.chat_templates.renderers.template_renderer import TemplateRenderer
from agentgym.types import Message, ToolCall, ToolSpec

__all__ = ["HarmonyRenderer"]

_END = "<|end|>"
_CALL, _RETURN = "<|call|>", "<|return|>"


class HarmonyRenderer(TemplateRenderer):
    """A `TemplateRenderer` for Harmony.

    A reply begins after `<|start|>assistant` and ends with `<|return|>` or `<|call|>`; `<|end|>` ends only one of its
    messages, though the template puts it where a past answer ended.

    A row keeps the `<|return|>` that was sampled and the analysis that the template drops from past answers. The
    template takes one call per reply and names every result after it; `extend` names each result by its own tool, and
    one whose call could not be read `functions.unknown`. A reply that was cut within a message gets the template's end.
    """

    unnamed = "unknown"

    def dummies(self, new_messages: Sequence[Message]) -> Iterator[Message]:
        """Yields a reply with one call of the first result's tool, then one with text."""
        first = next((message for message in new_messages if message.role == "tool"), None)
        if first is not None:
            call = ToolCall(first.tool_call_id or "000000000", first.name or self.unnamed, {"where": PROBE})
            yield Message("assistant", "", tool_calls=(call,))
        yield Message("assistant", PROBE)

    def after_reply(
        self,
        new_messages: Sequence[Message],
        history: Sequence[Message] = (USER,),
        tools: Sequence[ToolSpec] | None = None,
        guard: str = "",
    ) -> str:
        """Returns what the template puts after a reply, each run of results after a call of their tool."""
        runs = [
            list(run) for _, run in itertools.groupby(new_messages, key=lambda message: (message.role, message.name))
        ]
        texts = [super(HarmonyRenderer, self).after_reply(run, history, tools, guard) for run in runs or [[]]]
        prompt = "<|start|>assistant"
        first, *later = [text.removesuffix(prompt) for text in texts]
        return "".join([first, *(text[text.index(">") + 1 :] for text in later), prompt])

    def _measure_call_end(self) -> str:
        return _CALL

    def _find_stops(self) -> tuple[int, ...]:
        """Returns Harmony's two stop ids, even if a folder without generation_config.json names only one of them."""
        own = [self.tokenizer.backend.token_to_id(text) for text in (_RETURN, _CALL)]
        within = (self.tokenizer.backend.token_to_id(_END), None)
        return tuple(dict.fromkeys(index for index in (*own, *super()._find_stops()) if index not in within))

    def _ids_to_append(self, ids: Sequence[int], appended: list[int]) -> list[int]:
        """Returns what to append to `ids`; they need no end if they end with any of Harmony's ends."""
        ends = (*self._stop_ids, self.tokenizer.backend.token_to_id(_END))
        return appended[1:] if ids and ids[-1] in ends else appended

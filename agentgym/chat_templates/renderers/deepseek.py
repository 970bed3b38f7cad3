"""DeepSeek's templates, which frame results by what came before: the first of a conversation, the last of a reply."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from agentgym.chat_templates.renderers.template_probe import dummy_replies
from agentgym.chat_templates.renderers.template_renderer import TemplateRenderer
from agentgym.types import Message

__all__ = ["DeepSeekRenderer", "DeepSeekV32Renderer"]


class DeepSeekRenderer(TemplateRenderer):
    """A `TemplateRenderer` for templates whose `ns.is_output_first` is never reset.

    Only the first results of a whole conversation get `<｜tool▁outputs▁begin｜>`, though all get
    `<｜tool▁outputs▁end｜>`.

    `extend` frames the results of every reply like those of the first, begin and end. The dummy reply has text besides
    its calls, because the template follows one without text with an empty message of the assistant.
    """

    keeps_what_was_shown = True

    def dummies(self, new_messages: Sequence[Message]) -> Iterator[Message]:
        """Yields replies for `new_messages` to follow, those with text first."""
        replies = list(dummy_replies(new_messages))
        yield from sorted(replies, key=lambda reply: not reply.content)


class DeepSeekV32Renderer(TemplateRenderer):
    """A `TemplateRenderer` for a template that closes `<function_results>` only after as many results as calls.

    It also prompts for a reply only if as many results follow as the reply has calls (`call_order == tool_call_count`).

    `extend` closes after the last result it is given: every call is answered before the model goes on, and one that
    could not be read, which the template does not count, is answered as well.
    """

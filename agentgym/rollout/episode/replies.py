"""The ids of a reply that comes from a script, an oracle or a demonstration instead of an engine."""

from __future__ import annotations

from agentgym.chat_templates.protocol import Renderer
from agentgym.errors import RenderError
from agentgym.types import Message

__all__ = ["reply_ids"]

_QUESTION = Message("user", "?")


def reply_ids(renderer: Renderer, message: Message) -> tuple[int, ...]:
    """Returns the ids that a model would have to sample for the assistant `message`, the end token included.

    Raises RenderError if the chat format gives an assistant message no such ids of its own.
    """
    prompt = renderer.render([_QUESTION])
    whole = renderer.render([_QUESTION, message])
    if whole[: len(prompt)] != prompt:
        raise RenderError("the chat template does not put a reply right after its generation prompt")
    for index in range(len(prompt), len(whole)):
        if whole[index] in renderer.stop_ids:
            return tuple(whole[len(prompt) : index + 1])
    raise RenderError("the chat template puts no stop id after a reply")

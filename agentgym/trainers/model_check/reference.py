"""transformers' own reading of a tokenizer and its chat template, to compare ours with."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import transformers

from agentgym.chat_templates.jinja_template import message_dict, tool_dict
from agentgym.chat_templates.tokenizer import ChatTokenizer
from agentgym.errors import RenderError
from agentgym.types import Message, ToolSpec

__all__ = ["TransformersReference"]


class TransformersReference:
    """Renders with `apply_chat_template` of a transformers tokenizer."""

    def __init__(self, tokenizer: transformers.PreTrainedTokenizerBase, template: str | None = None) -> None:
        self._tokenizer = tokenizer
        self._template = template

    @staticmethod
    def load(folder: Path, template: str | None = None) -> TransformersReference:
        """Loads the folder's tokenizer with transformers; raises what that raises."""
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a folder is complete: nothing is fetched from elsewhere
        transformers.logging.set_verbosity_error()
        return TransformersReference(transformers.AutoTokenizer.from_pretrained(folder), template)

    @staticmethod
    def of(tokenizer: ChatTokenizer) -> TransformersReference:
        """Returns the same vocabulary and template, run by transformers."""
        theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend, **tokenizer.special_tokens)
        if tokenizer.tool_template:
            theirs.chat_template = {"default": tokenizer.template, "tool_use": tokenizer.tool_template}
        else:
            theirs.chat_template = tokenizer.template
        return TransformersReference(theirs)

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> list[int]:
        """Returns the ids of the conversation with its generation prompt.

        Raises RenderError if the template refuses it both with the arguments of calls as they are and as JSON text.
        """
        try:
            return self._render(messages, tools, text_arguments=False)
        except RenderError:
            if not any(message.tool_calls for message in messages):
                raise
        return self._render(messages, tools, text_arguments=True)

    def _render(self, messages: Sequence[Message], tools: Sequence[ToolSpec], *, text_arguments: bool) -> list[int]:
        try:
            ids = self._tokenizer.apply_chat_template(
                [message_dict(message, str, text_arguments=text_arguments) for message in messages],
                tools=[tool_dict(tool, str) for tool in tools] or None,
                chat_template=self._template,
                add_generation_prompt=True,
                tokenize=True,
                return_dict=False,
            )
        except Exception as error:  # the boundary: a template may raise anything
            raise RenderError(str(error)) from error
        return list(ids)

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text; raises RenderError if transformers cannot encode it."""
        try:
            return list(self._tokenizer.encode(text, add_special_tokens=False))
        except Exception as error:  # the boundary: a tokenizer that was loaded wrongly may raise anything
            raise RenderError(f"transformers cannot encode it: {type(error).__name__}: {error}") from error

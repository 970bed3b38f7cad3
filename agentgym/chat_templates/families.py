"""Which renderer a model gets: recognized by its chat template, or asked for by name."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from agentgym.chat_templates.chatml import ChatMLRenderer
from agentgym.chat_templates.template_renderer import TemplateRenderer
from agentgym.chat_templates.tokenizer import ChatTokenizer, HoldsTokenizer
from agentgym.errors import RenderError
from agentgym.registry import Registry
from agentgym.types import JSON

__all__ = ["FAMILIES", "renderer_for"]

_log = logging.getLogger(__name__)


class RendererFactory(Protocol):
    """Makes a renderer of one family."""

    def __call__(self, tokenizer: ChatTokenizer, *, variables: Mapping[str, JSON] | None = None) -> TemplateRenderer:
        """A renderer, or RenderError when the tokenizer's template is not of the family."""


FAMILIES: Registry[RendererFactory] = Registry("chat family")
"""`chatml`: Hermes, Qwen2.5, Qwen3 and the embedded model. `template`: any other model, by its own Jinja template."""
FAMILIES.add("chatml", ChatMLRenderer)
FAMILIES.add("template", TemplateRenderer)


def renderer_for(
    model: str | Path | ChatTokenizer | HoldsTokenizer,
    family: str | None = None,
    *,
    variables: Mapping[str, JSON] | None = None,
) -> TemplateRenderer:
    """The renderer of a model folder or tokenizer.

    `family` is a name of `FAMILIES`; without one a ChatML template gets `chatml` and every other one `template`.
    `variables` go to the template (`{"enable_thinking": False}` for Qwen3). Raises RunFolderError for a missing
    folder or tokenizer, RenderError for a template that is missing or cannot be continued exactly.
    """
    if isinstance(model, str | Path):
        tokenizer = ChatTokenizer.load(model)
    else:
        tokenizer = model if isinstance(model, ChatTokenizer) else ChatTokenizer.of(model)
    if family is not None:
        return FAMILIES[family](tokenizer, variables=variables)
    if "<|im_start|>" in tokenizer.template:
        try:
            return ChatMLRenderer(tokenizer, variables=variables)
        except RenderError as error:
            _log.warning("the chat template of %r is driven by Jinja at every turn: %s", tokenizer.name, error)
    return TemplateRenderer(tokenizer, variables=variables)

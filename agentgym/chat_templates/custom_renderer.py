"""A renderer of the user's own, named `path/to/file.py:name`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

from agentgym.chat_templates.protocol import Renderer
from agentgym.chat_templates.tokenizer import ChatTokenizer
from agentgym.errors import ConfigError
from agentgym.loading import Wanted, load_named
from agentgym.settings.functions import Contract, convert_function_errors
from agentgym.types import JSON

__all__ = ["make_custom_renderer"]

CUSTOM_RENDERER = Wanted(
    noun="renderer",
    example="function",
    hint="It takes (tokenizer) and returns an agentgym.chat_templates.Renderer.",
    new="`agentgym new renderer NAME` writes one to start from",
)
CONTRACT = Contract("renderer", ("tokenizer",))


def make_custom_renderer(code_path: str, tokenizer: ChatTokenizer, variables: Mapping[str, JSON]) -> Renderer:
    """Returns the renderer that a user's function or class makes of a tokenizer.

    A keyword `variables` gets those of the template, with the run's date. Raises ConfigError for an object that is no
    such function, and for a result without the methods of `Renderer`.
    """
    make = load_named(code_path, CUSTOM_RENDERER)
    if not callable(make):
        raise ConfigError(f"{code_path!r} is not a function that makes a renderer. {CUSTOM_RENDERER.hint}")
    CONTRACT.check(code_path, make)
    keywords = {"variables": variables} if "variables" in inspect.signature(make).parameters else {}
    with convert_function_errors(code_path, make):
        renderer: object = make(tokenizer, **keywords)
    if not isinstance(renderer, Renderer):
        names = [name for name in vars(Renderer) if not name.startswith("_")]
        lacking = ", ".join(name for name in names if not hasattr(renderer, name))
        raise ConfigError(f"{code_path!r} returns a {type(renderer).__name__}, no renderer: it lacks {lacking}")
    return renderer

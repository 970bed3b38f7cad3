"""Episodes in which the engine constrains calls to their tools' JSON Schemas."""

from __future__ import annotations

from typing import Any

from agentgym.chat_templates.protocol import GrammarRenderer, Renderer
from agentgym.engines.protocol import Engine
from agentgym.errors import ConfigError, RenderError
from agentgym.rollout.episode.token_loop import RolloutLoop
from agentgym.types import ToolSpec

__all__ = ["ConstrainedLoop"]


class ConstrainedLoop(RolloutLoop):
    """A `RolloutLoop` on an engine that takes grammars (SGLang, vLLM), for evaluation and for data.

    Text is free. A call, once begun, is one of the tools' with arguments that its schema allows, unless the reply's
    limit cuts it (a string without an `enum` or `maxLength` may run on, even over a closing tag). Replies are recorded
    with the logprobs of the masked distribution that they were drawn from, which are not the model's own: they are in
    no loss (`TokenSpan.excluded`). Raises ConfigError for an engine that takes no grammar, and for a model family
    without a grammar for its calls. The other settings are those of `RolloutLoop`.
    """

    def __init__(self, engine: Engine, renderer: Renderer, *settings: Any, **more: Any) -> None:
        super().__init__(engine, renderer, *settings, **more)
        if not getattr(engine, "takes_grammar", False):
            raise ConfigError(f"{type(engine).__name__} takes no grammar: constrained replies need SGLang or vLLM")
        if not isinstance(renderer, GrammarRenderer):
            raise ConfigError(f"{type(renderer).__name__} has no call_grammar, which constrained replies need")
        try:
            renderer.call_grammar(())
        except RenderError as error:
            raise ConfigError(str(error)) from error
        self._call_grammar = renderer.call_grammar

    def _grammar(self, tools: tuple[ToolSpec, ...]) -> str:
        return self._call_grammar(tools) if tools else ""

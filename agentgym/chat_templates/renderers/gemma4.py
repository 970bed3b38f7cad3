"""Gemma 4's template, which names results by their tool and puts a reply's text after the results of its calls."""

from __future__ import annotations

from agentgym.chat_templates.renderers.template_renderer import TemplateRenderer

__all__ = ["Gemma4Renderer"]


class Gemma4Renderer(TemplateRenderer):
    """A `TemplateRenderer` for a template that renders a reply's text after the results of its calls (`ns_tool_scan`).

    The template renders results with the reply whose calls they answer. A row keeps the text where it was sampled,
    before the calls; after the results the model goes on in the same turn, as it does after a reply without text.
    A reply with calls ends with `<|tool_response>`, which begins the first result. A result whose call could not be
    read gets the name that the template has for it, `unknown`.
    """

    unnamed = "unknown"

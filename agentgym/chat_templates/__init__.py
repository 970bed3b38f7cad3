"""Chat formats: messages to token ids, token ids to messages, exactly."""

if __name__ != "agentgym.chat_templates":
    raise ImportError(f"{__name__!r} is a door for readers of the repository; import agentgym.chat_templates instead")

from agentgym.chat_templates.families import FAMILIES, open_renderer, renderer_for
from agentgym.chat_templates.formats.reply import reply_problem
from agentgym.chat_templates.protocol import Renderer
from agentgym.chat_templates.renderers.chatml import ChatMLRenderer
from agentgym.chat_templates.renderers.template_renderer import TemplateRenderer
from agentgym.chat_templates.tokenizer import ChatTokenizer

__all__ = [
    "FAMILIES",
    "ChatMLRenderer",
    "ChatTokenizer",
    "Renderer",
    "TemplateRenderer",
    "open_renderer",
    "renderer_for",
    "reply_problem",
]

"""Chat templates by name, for base models: the marks of a family, around messages and tools as Qwen writes them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from os.path import expanduser
from pathlib import Path

from tokenizers import Tokenizer

from agentgym.errors import ConfigError, nearest

__all__ = ["NAMED_TEMPLATES", "NamedTemplate", "fitting_templates", "lacking_marks", "read_template"]

BODY = Path(__file__).with_name("named.jinja")
"""The template of all of them, which reads the fields of a `NamedTemplate` as variables."""
TAGS = ("<tool_call>", "</tool_call>")


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedTemplate:
    """The marks that a family writes around the parts of a conversation."""

    opening: str
    """The text before the role of a message."""
    after_role: str = "\n"
    closing: str
    """The text after a message, with the mark that ends a reply."""
    roles: Mapping[str, str]
    """The family's word for a role, where it is another one."""
    begins: bool = False
    """True if the conversation begins with the tokenizer's first token."""
    has_system: bool = True
    """True if a system prompt is a message; else the first question begins with it."""
    thinks: bool = False
    """True if the variable `enable_thinking` turns reasoning off."""
    call_opening: str = "<tool_call>\n"
    call_closing: str = "\n</tool_call>"
    arguments: str = "arguments"
    """The key of a call's arguments."""
    result_opening: str = "<tool_response>\n"
    """The text before a result; where it is empty, each result is a message."""
    result_closing: str = "\n</tool_response>"
    marks: tuple[str, ...] = field(default=())
    """Texts that are one token each of a tokenizer that the template fits."""

    def source(self) -> str:
        """Returns the Jinja source."""
        values = {name: json.dumps(value) for name, value in asdict(self).items() if name != "marks"}
        settings = "".join(f"{{%- set {name} = {value} -%}}\n" for name, value in values.items())
        return settings + BODY.read_text(encoding="utf-8")


CHATML = ("<|im_start|>", "<|im_end|>")
NAMED_TEMPLATES: Mapping[str, NamedTemplate] = {
    "qwen3": NamedTemplate(
        opening="<|im_start|>",
        closing="<|im_end|>\n",
        roles={"tool": "user"},
        thinks=True,
        marks=(*CHATML, *TAGS, "<think>", "</think>"),
    ),
    "chatml": NamedTemplate(opening="<|im_start|>", closing="<|im_end|>\n", roles={"tool": "user"}, marks=CHATML),
    "llama3": NamedTemplate(
        opening="<|start_header_id|>",
        after_role="<|end_header_id|>\n\n",
        closing="<|eot_id|>",
        roles={"tool": "ipython"},
        begins=True,
        call_opening="",
        call_closing="",
        arguments="parameters",
        result_opening="",
        result_closing="",
        marks=("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    ),
    "gemma3": NamedTemplate(
        opening="<start_of_turn>",
        closing="<end_of_turn>\n",
        roles={"system": "user", "assistant": "model", "tool": "user"},
        begins=True,
        has_system=False,
        call_opening="",
        call_closing="",
        marks=("<start_of_turn>", "<end_of_turn>"),
    ),
    "granite4": NamedTemplate(
        opening="<|start_of_role|>",
        after_role="<|end_of_role|>",
        closing="<|end_of_text|>\n",
        roles={"tool": "user"},
        marks=("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>"),
    ),
}
"""The templates by name; the more marks one has, the further ahead it is."""


def read_template(template: str) -> str:
    """Returns the source of a template by its name, or of a file; raises ConfigError for one that cannot be read."""
    if template in NAMED_TEMPLATES:
        return NAMED_TEMPLATES[template].source()
    try:
        return Path(expanduser(template)).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        names = nearest(template, NAMED_TEMPLATES) or f"; those by name are {', '.join(NAMED_TEMPLATES)}"
        raise ConfigError(f"the chat template {template!r} cannot be read: {error}{names}") from error


def lacking_marks(template: str, tokenizer: Tokenizer) -> list[str]:
    """Returns the marks of a template by its name that are not a single token of a tokenizer; none for a file."""
    added = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    form = NAMED_TEMPLATES.get(template)
    return [mark for mark in form.marks if mark not in added] if form else []


def fitting_templates(tokenizer: Tokenizer) -> list[str]:
    """Returns the names of the templates whose marks a tokenizer has, the one with the most marks first."""
    return [name for name in NAMED_TEMPLATES if not lacking_marks(name, tokenizer)]

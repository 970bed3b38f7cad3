"""A format's grammar says what the family's template writes, and what the format reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from family_matrix import stand_in

from agentgym.chat_templates import renderer_for
from agentgym.chat_templates.formats.grammar import NAME
from agentgym.chat_templates.formats.registry import FORMATS
from agentgym.embedded import embedded_folder
from agentgym.errors import RenderError
from agentgym.types import Message, ToolCall, ToolSpec

TEMPLATES = Path(__file__).resolve().parents[4] / "shared" / "data" / "chat_templates"
GO = ToolSpec(
    "go",
    "Walk.",
    {"type": "object", "properties": {"direction": {"type": "string"}}, "required": ["direction"]},
)
CALL = ToolCall("call00001", "go", {"direction": "north"})
CONSTRAINED = sorted({entry.name for entry in FORMATS.values() if entry.grammar is not None})
WRITTEN = {
    "json_schema": '{"direction": "north"}',
    "qwen_xml_parameter": "<parameter=direction>\nnorth\n</parameter>",
}
WRITERS = {
    "deepseek_v3": "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B",
    "deepseek_v31": "deepseek-ai-DeepSeek-V3.1",
    "granite4": "ibm-granite-granite-4.0",
    "hermes": "Qwen-Qwen3-0.6B",
    "llama3_json": "meta-llama-Llama-3.1-8B-Instruct",
    "qwen3_coder": "Qwen3-Coder",
}
"""The template of a format, where there is one to compare with."""


def written(name: str) -> str:
    """A call as the grammar has it."""
    grammar = FORMATS[name].grammar
    assert grammar is not None
    return grammar.begin.replace(NAME, "go") + WRITTEN[grammar.arguments] + grammar.end


@pytest.mark.parametrize("name", CONSTRAINED)
def test_what_the_grammar_allows_is_read_as_the_call(name: str) -> None:
    message = FORMATS[name].parse(written(name), [GO])
    assert [(call.name, call.arguments) for call in message.tool_calls if isinstance(call, ToolCall)] == [
        ("go", {"direction": "north"})
    ]
    assert message.content == ""


@pytest.mark.parametrize("name", CONSTRAINED)
def test_the_tag_names_every_tool_with_its_schema_behind_the_trigger(name: str) -> None:
    grammar = FORMATS[name].grammar
    assert grammar is not None
    tag = json.loads(grammar.structural_tag([GO, ToolSpec("wait", "Wait.", {"type": "object"})]))
    assert tag["format"]["triggers"] == [grammar.trigger]
    begins = [entry["begin"] for entry in tag["format"]["tags"]]
    assert all(begin.startswith(grammar.trigger) for begin in begins)
    assert ["go" in begins[0], "wait" in begins[1]] == [True, True]
    assert [entry["content"]["json_schema"] for entry in tag["format"]["tags"]] == [GO.parameters, {"type": "object"}]


@pytest.mark.skipif(not TEMPLATES.is_dir(), reason="the shared test data is not beside this checkout")
@pytest.mark.parametrize("name", sorted(WRITERS))
def test_the_grammar_is_what_the_template_writes(name: str) -> None:
    renderer = renderer_for(stand_in((TEMPLATES / f"{WRITERS[name]}.jinja").read_text(encoding="utf-8"), WRITERS[name]))
    messages = [Message("user", "Go."), Message("assistant", "", None, (CALL,))]
    messages.append(Message("tool", "ok", tool_call_id=CALL.id, name="go"))
    assert renderer.reply_format.name == name
    assert written(name) in renderer.decode(renderer.render(messages, [GO]))


def test_a_family_without_a_grammar_refuses_by_name() -> None:
    renderer = renderer_for(embedded_folder(), family="kimi_k2")
    with pytest.raises(RenderError, match="kimi_k2 says no grammar"):
        renderer.call_grammar([GO])

"""Tools made with `@tool` and `register_tool`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentgym.errors import ConfigError, ToolSchemaError, UnknownName
from agentgym.registry import Registry
from agentgym.tools import Tool, ToolRunner, as_tool, register_tool, tool
from agentgym.types import ToolCall

BARE: dict[str, Any] = {
    "name": "search",
    "description": "Searches.",
    "parameters": {"type": "object", "properties": {"q": {"type": "string", "x-extra": [1]}}, "required": ["q"]},
}


def find(q: str) -> str:
    return f"found {q}"


@pytest.mark.parametrize("form", ["bare", "openai", "mcp", "anthropic", "file"])
def test_register_tool_keeps_the_schema_as_given(form: str, tmp_path: Path) -> None:
    mcp = {"name": "search", "description": "Searches.", "inputSchema": BARE["parameters"]}
    path = tmp_path / "search.json"
    path.write_text(json.dumps(BARE), encoding="utf-8")
    anthropic = {"name": "search", "description": "Searches.", "parameters": None, "input_schema": BARE["parameters"]}
    openai = {"type": "function", "function": BARE}
    schema: Any = {"bare": BARE, "openai": openai, "mcp": mcp, "anthropic": anthropic, "file": path}[form]
    registry = Registry[Tool]("tool")
    new_tool = register_tool(schema, find, registry=registry, timeout_s=2)
    assert new_tool.spec.parameters == BARE["parameters"]
    assert (new_tool.spec.description, new_tool.timeout_s, registry["search"]) == ("Searches.", 2, new_tool)
    (result,) = ToolRunner([new_tool], inline=True).run_directly([ToolCall("a", "search", {"q": "it"})])
    assert result.content == "found it"


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({}, '"name"'),
        ({"name": "a b"}, "tool name"),
        ({"name": "a", "parameters": {"type": "string"}}, "tool 'a': .*'object'"),
        ({"name": "a", "parameters": []}, "JSON Schema object"),
        ("/nowhere/tool.json", "cannot read"),
    ],
)
def test_a_bad_schema_is_refused_with_what_is_wanted(schema: Any, words: str) -> None:
    with pytest.raises(ToolSchemaError, match=words):
        register_tool(schema, find, registry=Registry[Tool]("tool"))


def test_a_file_that_is_not_json_is_named(tmp_path: Path) -> None:
    path = tmp_path / "tool.json"
    path.write_text("{", encoding="utf-8")
    with pytest.raises(ToolSchemaError, match=r"tool\.json.*not JSON"):
        register_tool(str(path), find, registry=Registry[Tool]("tool"))


def test_a_marked_function_stays_a_function() -> None:
    @tool(name="plus", description="Adds up.", timeout_s=1)
    def add(a: int, b: int = 1) -> int:
        return a + b

    assert add(2) == 3
    add_tool = as_tool(add)
    assert (add_tool.spec.name, add_tool.spec.description, add_tool.timeout_s) == ("plus", "Adds up.", 1)


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match="timeout_s"):
        tool(timeout_s=0)(find)
    with pytest.raises(ConfigError, match="max_concurrency"):
        tool(max_concurrency=0)(find)
    with pytest.raises(ConfigError, match="two tools are called 'find'"):
        ToolRunner([find, find])
    with pytest.raises(ToolSchemaError, match="not a tool"):
        as_tool(3)  # type: ignore[arg-type]


def test_an_unknown_registered_tool_is_a_taught_error() -> None:
    registry = Registry[Tool]("tool", "`agentgym tools list` shows all.")
    register_tool(BARE, find, registry=registry)
    with pytest.raises(UnknownName, match="did you mean 'search'"):
        registry["serch"]

"""Tools as servers list them: names that models do not take, schemas of other drafts, and tools that are wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from agentgym.errors import ConfigError, EnvironmentFault, ToolSchemaError
from agentgym.tools.mcp import McpServer

ServerOf = Callable[..., McpServer]
Desk = Callable[..., Any]
TEXT = {"type": "object", "properties": {"x": {"type": "string"}}}
DRAFT_07 = "http://json-schema.org/draft-07/schema#"
LONG = "very_long_part_" * 8
GOOD = {
    "add": TEXT,
    "docs/read": TEXT,
    "docs.read": TEXT,
    "1password": TEXT,
    "Create Share": TEXT,
    LONG + "1": TEXT,
    LONG + "2": TEXT,
    "no_type": {"properties": {"x": {"type": "string"}}},
    "empty": {},
    "draft_04": {"type": "object", "properties": {"x": {"minimum": 0, "exclusiveMinimum": True}}},
    "draft_07": {"$schema": DRAFT_07, "type": "object", "properties": {"x": {"items": [{"type": "string"}]}}},
    "pattern": {"type": "object", "properties": {"x": {"type": "string", "pattern": r"^(?<year>\d+)-\p{L}+$"}}},
}
BAD: dict[str, Any] = {
    "type": {"type": "object", "properties": {"x": {"type": "int"}}},
    "text": {"type": "string"},
    "required": {"type": "object", "required": None},
    "properties": {"type": "object", "properties": {"required": ["x"]}},
    "reference": {"type": "object", "properties": {"x": {"$ref": "https://example.com/s.json"}}},
    "null": None,
    "number": 3,
}


def tool(name: Any, schema: Any, **parts: Any) -> dict[str, Any]:
    return {"name": name, "inputSchema": schema, **parts}


@pytest.fixture
def listed(server_of: ServerOf) -> Callable[..., McpServer]:
    """`listed(page, ...)` is a server with these pages of tools."""

    def make(*pages: list[Any]) -> McpServer:
        server = server_of("listed")
        return server_of("listed", command=(*server.command, json.dumps(pages)))

    return make


def test_a_bad_tool_is_left_out_by_name_and_the_others_stay(
    desk: Desk, listed: Callable[..., McpServer], caplog: pytest.LogCaptureFixture
) -> None:
    bad = [*(tool(name, schema) for name, schema in BAD.items()), {"name": "nothing"}, tool(None, TEXT), "no object"]
    odd = [
        tool("odd", TEXT, annotations=3, icons="none", outputSchema={"type": "string"}, description=None, title=[]),
        tool("add", TEXT),
    ]
    server = listed(bad, [tool(name, schema) for name, schema in GOOD.items()], odd)
    for _ in range(2):
        env = desk(server)
        assert len(env.tools) == len(GOOD) + 1
    warnings = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
    assert len(warnings) == 1
    assert f"{len(bad) + 1} of {len(bad) + len(GOOD) + 2} tools cannot be offered and are left out" in warnings[0]
    assert "tool 'add': the first of 2 is offered; tool 'type': not a JSON Schema" in warnings[0]


def test_a_name_is_mapped_and_the_server_s_own_goes_out(desk: Desk, listed: Callable[..., McpServer]) -> None:
    env = desk(listed([tool(name, schema) for name, schema in GOOD.items()]), prefix="p_")
    names = list(env.tools)
    assert names[0] == "p_add" and names[1] == "p_docs_read" and names[3:5] == ["p_1password", "p_Create_Share"]
    assert names[2].startswith("p_docs_read_") and len(names[5]) == len(names[6]) == 64
    for mapped_name, own in zip(names, GOOD, strict=True):
        arguments = {} if own in ("draft_07", "draft_04", "pattern") else {"x": "a"}
        assert env.ask(mapped_name, **arguments) == (json.dumps([own, arguments]), None)


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [("draft_04", 1, 0), ("draft_07", ["a"], [1]), ("pattern", "2024-é", "2024-1")],
)
def test_arguments_are_checked_by_the_schema_s_own_draft(
    desk: Desk, listed: Callable[..., McpServer], name: str, good: Any, bad: Any
) -> None:
    env = desk(listed([tool(name, GOOD[name])]))
    assert env.ask(name, x=good) == (json.dumps([name, {"x": good}]), None)
    assert env.ask(name, x=bad)[1] == "invalid_arguments"


def test_tools_are_selected_by_the_server_s_name_or_the_mapped_one(
    desk: Desk, listed: Callable[..., McpServer], caplog: pytest.LogCaptureFixture
) -> None:
    server = listed([tool("docs/read", TEXT), tool("1password", TEXT), tool("type", BAD["type"])])
    assert list(desk(server, names=["docs/read", "_1password"]).tools) == ["docs_read", "_1password"]
    assert not [record for record in caplog.records if "left out" in record.getMessage()]
    with pytest.raises(ToolSchemaError, match=r"the MCP server .*: tool 'type': not a JSON Schema"):
        desk(server, names=["type"])
    with pytest.raises(ConfigError, match="has no tool 'docs_reed': did you mean 'docs_read'"):
        desk(server, names=["docs_reed"])


def test_a_server_of_bad_tools_alone_is_refused(desk: Desk, listed: Callable[..., McpServer]) -> None:
    with pytest.raises(ToolSchemaError, match="has no tool that can be offered: tool 'text': a tool's parameters"):
        desk(listed([tool("text", BAD["text"])]))


@pytest.mark.parametrize(
    "raw",
    [
        '{"content": [{"type": "text", "text": "\\\\ud800"}]}'.replace("\\\\", "\\"),
        '{"content": [], "structuredContent": {"a": %s}}' % ("[" * 5000 + "]" * 5000),
        "nonsense",
    ],
    ids=["lone surrogate", "deep", "no JSON"],
)
def test_an_unreadable_result_is_a_described_error(desk: Desk, listed: Callable[..., McpServer], raw: str) -> None:
    env = desk(replace(listed([tool("add", {})]), call_timeout_s=1))
    text, error = env.ask("add", raw=raw)
    assert error == "timeout" and "gave no answer within 1 s; the server sent a message that cannot be read: " in text
    assert "JSON" in text and len(text) < 400
    assert env.ask("add", x=1) == ('["add", {"x": 1}]', None)


@pytest.mark.long
def test_an_unreadable_list_of_tools_is_a_described_error(desk: Desk, listed: Callable[..., McpServer]) -> None:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(300):
        schema = {"type": "array", "items": schema}
    with pytest.raises(EnvironmentFault, match=r"listed no tools within 5 s.*a message that cannot be read: .*JSON"):
        desk(replace(listed([tool("deep", schema)]), start_timeout_s=5))

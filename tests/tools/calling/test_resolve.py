"""A tool is found by its name or its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentgym.errors import ToolSchemaError, UnknownName
from agentgym.tools import resolve_tool
from agentgym.tools.calling.resolve import find_tool

TOOLS = '''
from agentgym.envs import TextEnv
from agentgym.tools import tool

@tool
def add(a: int, b: int) -> int:
    """Adds."""
    return a + b

def plain(a: int) -> int:
    """Gives it back."""
    return a

class Place(TextEnv):
    def reset(self, *, seed=None, options=None): return "", {}
    def step(self, action): return "", 0.0, True, False, {}

LIMIT = 3
'''


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "own_tools.py"
    path.write_text(TOOLS)
    return path


def test_a_tool_is_found_in_a_file_marked_or_plain(file: Path) -> None:
    assert resolve_tool(f"{file}:add").spec.parameters["required"] == ["a", "b"]
    assert resolve_tool(f"{file}:plain").name == "plain"


def test_what_is_no_tool_is_told(file: Path) -> None:
    with pytest.raises(UnknownName, match=r"has no tool 'ad': did you mean 'add'\? `agentgym new tool NAME`"):
        resolve_tool(f"{file}:ad")
    with pytest.raises(ToolSchemaError, match="3 is not a tool"):
        resolve_tool(f"{file}:LIMIT")
    with pytest.raises(UnknownName, match="unknown tool 'add'"):
        resolve_tool("add")


def test_a_name_may_be_a_tool_or_something_else(file: Path) -> None:
    tool = find_tool(f"{file}:add")
    assert tool is not None and tool.name == "add"
    for reference in (f"{file}:Place", f"{file}:plain", f"{file}:nothing", "TextGame-v0", "nowhere.py:add"):
        assert find_tool(reference) is None

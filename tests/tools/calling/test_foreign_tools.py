"""Names that tools of servers and documents get."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentgym.errors import ConfigError, ToolSchemaError
from agentgym.tools import Tool, as_tool
from agentgym.tools.calling.definition import NAME
from agentgym.tools.calling.foreign_tools import fit_names, make_tools


def test_a_name_keeps_what_models_take_and_a_digest_tells_names_apart() -> None:
    long = "part_" * 25
    names = ["add", "docs/read", "docs.read", "docs_read", "1password", "Create Share", long + "1", long + "2"]
    fitted = fit_names(names)
    assert fitted[0] == "add" and fitted[3:6] == ["docs_read", "_1password", "Create_Share"]
    assert fitted[1].startswith("docs_read_") and fitted[2].startswith("docs_read_")
    assert len(fitted[6]) == len(fitted[7]) == 64 and fitted[6][:56] == fitted[7][:56] == f"{long[:55]}_"
    assert len(set(fitted)) == len(names)


@given(st.lists(st.text(st.sampled_from("aB1_./é ") | st.characters(), min_size=1, max_size=80), unique=True))
def test_every_name_gets_one_of_its_own_that_is_allowed(names: list[str]) -> None:
    fitted = fit_names(names)
    assert len(set(fitted)) == len(names)
    assert all(NAME.match(name) and name.isascii() for name in fitted)


def add(a: int) -> int:
    """Adds one."""
    return a + 1


def refuse(text: str) -> Tool:
    raise ToolSchemaError(text)


BAD = {str(number): partial(refuse, f"the box: no {number}") for number in range(4)}


def test_tools_that_cannot_be_made_are_counted_in_one_line_once(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        assert make_tools("the box", {"add": partial(as_tool, add), **BAD}, None, {}, ["a second tool"])
        assert make_tools("the box", {"add": partial(as_tool, add), **BAD}, ["plus"], {"plus": "add"}) == [as_tool(add)]
    line = "5 of 6 tools cannot be offered and are left out: a second tool; tool '0': no 0; tool '1': no 1; and 2 more"
    assert [record.getMessage() for record in caplog.records] == [f"the box: {line}"]


def test_a_selected_tool_that_cannot_be_made_or_is_not_there_is_refused() -> None:
    with pytest.raises(ToolSchemaError, match="the box: tool '2': no 2"):
        make_tools("the box", BAD, ["2"], {})
    with pytest.raises(ToolSchemaError, match="the box has no tool that can be offered: tool '0': no 0"):
        make_tools("the box", BAD, None, {})
    with pytest.raises(ConfigError, match="the box has no tool '7'; it has 0, 1, 2, 3"):
        make_tools("the box", BAD, ["7"], {})

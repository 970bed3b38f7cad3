"""What a model gets from `search` and `fetch`, in an environment and from the command line."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentgym.cli.main import main
from agentgym.envs import ToolEnv
from agentgym.errors import ConfigError
from agentgym.tools.search import Document, SearchIndex, SearchTools, save_index
from agentgym.tools.search.tools import pages_of

OTTER = Document("wiki/otter", "Otter", "The otter eats fish. It lives in rivers.")
LONG = Document("https://example.org/long", "Long", "".join(f"Line {number} of the text.\n" for number in range(100)))


class Library(ToolEnv):
    runs_inline = True
    max_turns = 9

    def start(self, options: dict[str, Any]) -> str:
        return "Read."


def test_a_model_finds_and_reads_pages_and_no_network_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "socket", None)
    env = Library(tools=SearchTools(SearchIndex.build([OTTER, LONG]), page_chars=1000).tools)
    env.reset(seed=0)
    assert [spec.name for spec in env.tool_specs] == ["search", "fetch"]
    assert env.step("search what eats fish")[0] == "1. Otter\n   wiki/otter\n   The otter eats fish."
    assert env.step("search quantum")[0] == "No document has a word of that query."
    assert env.step("fetch wiki/otter")[0] == f"Otter\n{OTTER.text}"
    first = env.step("fetch https://example.org/long")[0]
    assert first.startswith("Long\nLine 0 of") and first.endswith("\n[page 1 of 3]")
    assert env.step("fetch http://example.org/long/ 3")[0].endswith("Line 99 of the text.\n\n[page 3 of 3]")
    observation, *_, info = env.step("fetch url=https://example.org/long page=4")
    assert "has 3 pages, from 1; there is no page 4" in observation
    observation, *_, info = env.step("fetch wiki/oter")
    assert "no page 'wiki/oter' is recorded: did you mean 'wiki/otter'?" in observation
    assert info["tool_results"][0].error == "tool_error" and info["metrics"]["failed_calls"] == 2
    env.close()


@given(st.text("ab \n", max_size=80), st.integers(1, 20))
def test_pages_are_the_text(text: str, page_chars: int) -> None:
    pages = pages_of(text, page_chars)
    assert "".join(pages) == text
    assert all(0 < len(page) <= page_chars for page in pages) or pages == [""]


def test_settings_without_sense_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least 1, got 0 and 4000"):
        SearchTools(SearchIndex.build([OTTER]), num_results=0)


def test_the_command_builds_searches_and_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "pages").mkdir()
    (tmp_path / "pages" / "otter.md").write_text("# Otter\nIt eats fish.", encoding="utf-8")
    index = str(tmp_path / "pages.index")
    assert main(["corpus", "index", str(tmp_path / "pages"), "-o", index, "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["num_documents"] == 1
    assert main(["corpus", "search", index, "eats", "fish", "--json"]) == 0
    hits = json.loads(capsys.readouterr().out.splitlines()[-1])["hits"]
    assert [(hit["url"], hit["snippet"]) for hit in hits] == [("otter.md", "It eats fish.")]
    assert main(["corpus", "fetch", index, "otter.md"]) == 0
    assert capsys.readouterr().out == "Otter\n# Otter\nIt eats fish.\n"
    assert main(["corpus", "fetch", index, "stone.md"]) == 1
    assert "no page 'stone.md' is recorded" in capsys.readouterr().err


def test_a_torn_index_is_named_by_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "pages.index"
    save_index(SearchIndex.build([OTTER]), path)
    path.write_bytes(path.read_bytes()[:-5])
    assert main(["corpus", "search", str(path), "fish"]) == 2
    assert f"the index '{path}' is torn: it has" in capsys.readouterr().err

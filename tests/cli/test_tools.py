"""`agentgym tools parse` reads replies line by line, and `tools families` says in which formats."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentgym.chat_templates.formats.registry import FORMATS

Command = Callable[..., Any]
GO: dict[str, Any] = {"name": "go", "parameters": {"type": "object", "properties": {"to": {"type": "string"}}}}
CALL = '<tool_call>\n{"name": "go", "arguments": {"to": "Zürich", "via": [1, null]}}\n</tool_call>'
REPLIES = Path(__file__).resolve().parents[3] / "shared" / "data" / "toolcalls_bfcl"


def lines(*rows: object) -> str:
    return "".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows)


def parsed(out: str) -> list[Any]:
    return [json.loads(line) for line in out.splitlines()]


def test_each_line_holds_the_parts_of_a_reply(agentgym: Command) -> None:
    reply = f"<think>\nWhere?\n</think>\nI go.\n{CALL}\n<tool_call>\nnot JSON\n</tool_call>"
    tools = [{"type": "function", "function": GO}]
    done = agentgym("tools", "parse", "--family", "hermes", typed=lines({"text": reply, "tools": tools}, {"text": ""}))
    assert done.code == 0, done.err
    whole, empty = parsed(done.out)
    assert list(whole) == ["content", "reasoning", "tool_calls", "malformed"]
    assert (whole["content"], whole["reasoning"]) == ("I go.", "Where?")
    assert whole["tool_calls"] == [{"name": "go", "arguments": {"to": "Zürich", "via": [1, None]}}]
    (bad,) = whole["malformed"]
    assert bad["raw"] == "<tool_call>\nnot JSON\n</tool_call>" and "invalid JSON" in bad["error"]
    assert bad["truncated"] is False
    assert empty == {"content": "", "reasoning": None, "tool_calls": [], "malformed": []}


def test_a_cut_call_is_truncated(agentgym: Command) -> None:
    done = agentgym("tools", "parse", "--family", "hermes", typed=lines({"text": CALL[:40]}))
    (row,) = parsed(done.out)
    assert (row["tool_calls"], row["malformed"][0]["truncated"]) == ([], True)


@pytest.mark.parametrize(
    "tools", [None, [], [GO], [{"function": GO}], [{"name": "go"}], [{"name": "go", "parameters": None}]]
)
def test_tools_are_openai_s_or_bare_functions_or_none(agentgym: Command, tools: object) -> None:
    done = agentgym("tools", "parse", "--family", "qwen3", typed=lines({"text": CALL, "tools": tools}))
    assert done.code == 0, done.err
    assert parsed(done.out)[0]["tool_calls"][0]["name"] == "go"


def test_reasoning_that_the_prompt_opened_is_reasoning(agentgym: Command) -> None:
    row = {"text": "I have not fin", "in_reasoning": True}
    done = agentgym("tools", "parse", "--family", "hermes", typed=lines(row))
    assert (parsed(done.out)[0]["content"], parsed(done.out)[0]["reasoning"]) == ("", "I have not fin")


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ("{\n", "Expecting property name"),
        ("[]\n", "it is not a JSON object"),
        ("[" * 100_000 + "\n", "recursion"),
        ({"txt": "x"}, '"text" is missing'),
        ({"text": None}, '"text" is not a string'),
        ({"text": "x", "tools": {}}, '"tools" is not a list'),
        ({"text": "x", "tools": [GO, {"type": "function"}]}, "tools[1] is"),
        ({"text": "x", "tools": [{"name": "go", "parameters": []}, 3]}, "tools[1] is"),
        ({"text": "x", "tools": [{"name": "go", "parameters": "{}"}]}, "tools[0].function.parameters is a JSON Schema"),
        ({"text": "x", "in_reasoning": 1}, '"in_reasoning" is neither'),
    ],
)
def test_a_line_that_is_no_row_is_named_and_what_came_before_is_written(
    agentgym: Command, bad: object, reason: str
) -> None:
    typed = lines({"text": "One."}, "\n", {"text": "Two."}, bad, {"text": "Three."})
    done = agentgym("tools", "parse", "--family", "hermes", typed=typed)
    assert done.code == 2
    assert [row["content"] for row in parsed(done.out)] == ["One.", "Two."]
    assert done.err.startswith("error: line 4 of standard input cannot be read: ") and reason in done.err
    assert '{"text": "...", "tools": [...]}' in done.err


def test_an_unknown_family_is_answered_with_the_nearest(agentgym: Command) -> None:
    done = agentgym("tools", "parse", "--family", "hremes")
    assert done.code == 2
    assert "did you mean 'hermes'?" in done.err and "agentgym tools families" in done.err


def test_a_family_has_to_be_named(agentgym: Command) -> None:
    done = agentgym("tools", "parse")
    assert done.code == 2 and "missing --family" in done.err


def test_each_reply_is_answered_before_the_next_one_comes() -> None:
    command = [sys.executable, "-m", "agentgym", "tools", "parse", "--family", "hermes"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        for text in ("One.", "Zwölf \u2028 lines", "\ud800"):
            process.stdin.write(json.dumps({"text": text}).encode() + b"\n")
            process.stdin.flush()
            assert json.loads(process.stdout.readline())["content"] == text
        process.stdin.close()
        assert process.wait(60) == 0


def test_bytes_that_are_no_utf_8_are_a_named_line() -> None:
    command = [sys.executable, "-m", "agentgym", "tools", "parse", "--family", "hermes"]
    content = '{"text": "é"}\n'.encode() + b'{"text": "\xff"}\n'
    done = subprocess.run(command, input=content, capture_output=True, timeout=60, env={"LC_ALL": "C"})
    assert done.returncode == 2 and b"line 2 of standard input" in done.stderr
    assert json.loads(done.stdout)["content"] == "é"


def test_parsing_loads_neither_torch_nor_transformers() -> None:
    code = (
        'import io, sys; sys.stdin = io.StringIO(\'{"text": "x"}\'); from agentgym.cli.main import main;'
        "main(['tools', 'parse', '--family', 'hermes']); main(['tools', 'families']);"
        "print([name for name in ('torch', 'transformers', 'gymnasium', 'aiohttp') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]"


def test_families_names_every_format_once(agentgym: Command) -> None:
    done = agentgym("tools", "families", "--json")
    assert done.code == 0, done.err
    families = done.json["families"]
    names = [name for family in families for name in (family["name"], *family["aliases"])]
    assert sorted(names) == sorted(FORMATS)
    assert all(family["name"] in done.out and family["models"] for family in families)
    (hermes,) = [family for family in families if family["name"] == "hermes"]
    assert hermes["recognized"] is True and "Qwen3" in hermes["models"]


@pytest.mark.skipif(not REPLIES.is_dir(), reason=f"the shared test data {REPLIES} is not beside this checkout")
def test_rows_of_the_shared_corpora_go_through_as_they_are(agentgym: Command) -> None:
    text = (REPLIES / "qwen3.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text.splitlines()]
    done = agentgym("tools", "parse", "--family", "qwen3", typed=text)
    assert [row["tool_calls"] for row in parsed(done.out)] == [row["expected"] for row in rows]
    assert [row["malformed"] for row in parsed(done.out)] == [[]] * len(rows)


def test_a_tool_of_a_file_is_listed_and_called(agentgym: Command, tmp_path: Path) -> None:
    text = (
        "from agentgym.tools import tool\n@tool\ndef times(word: str, number: int = 2) -> str:\n    'Repeats a word.'\n"
        "    return ' '.join([word] * number)\n"
    )
    (tmp_path / "own.py").write_text(text, encoding="utf-8")
    (listed,) = agentgym("tools", "list", "own.py:times", "--json").json["tools"]
    assert listed["function"]["name"] == "times" and listed["function"]["parameters"]["required"] == ["word"]
    called = agentgym("tools", "call", "own.py:times", "word=5 or so", "number=3", "--json")
    assert called.code == 0 and called.json == {"tool": "times", "content": "5 or so 5 or so 5 or so", "error": None}
    assert agentgym("tools", "call", "own.py:times", '{"word": "a", "number": 1}').out == "a\n"
    wrong = agentgym("tools", "call", "own.py:times", "number=3")
    assert wrong.code == 1 and "missing argument 'word'" in wrong.err


@pytest.mark.long
def test_an_mcp_server_s_tools_are_listed_and_called(agentgym: Command) -> None:
    server = f"{sys.executable} {Path(__file__).parents[1] / 'tools' / 'mcp' / 'servers' / 'careless.py'}"
    listed = agentgym("tools", "list", "--mcp", server, "--json")
    assert [tool["function"]["name"] for tool in listed.json["tools"]] == ["flood", "pid", "crash", "add", "daemon"]
    called = agentgym("tools", "call", "--mcp", server, "flood", "mib=0", "--json")
    assert (called.code, called.json) == (0, {"tool": "flood", "content": "done", "error": None})
    crashed = agentgym("tools", "call", "--mcp", server, "crash")
    assert crashed.code != 0 and "ended with exit code 3" in crashed.err and "Traceback" not in crashed.err
    wrong = agentgym("tools", "call", "--mcp", server, "flod")
    assert wrong.code == 2 and "has no tool 'flod': did you mean 'flood'?" in wrong.err
    both = agentgym("tools", "list", "TextGame-v0", "--mcp", server)
    assert both.code == 2 and "the tools of one thing are listed" in both.err

"""Rows from files and runs: what is left out is said, broken files are named, and nothing at all is refused."""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from agentgym.chat_templates.families import renderer_for
from agentgym.chat_templates.renderers.template_renderer import TemplateRenderer
from agentgym.errors import ConfigError
from agentgym.openai_wire import REASONING
from agentgym.trainers.lessons.conversations import conversation_of
from agentgym.trainers.lessons.demonstrations import Demonstration
from agentgym.trainers.lessons.lesson import passes
from agentgym.trainers.lessons.sft_rows import ConversationSource, SftRows, rows_of_file

GO = {"type": "function", "function": {"name": "go", "description": "Walks.", "parameters": {"type": "object"}}}
CALL = {"id": "call00000", "type": "function", "function": {"name": "go", "arguments": '{"direction": "north"}'}}
TALK = {"messages": [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Ho."}]}
PLAY = {
    "messages": [
        {"role": "user", "content": "Begin."},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "A wall.", "tool_call_id": "call00000"},
        {"role": "assistant", "content": "Blocked."},
    ],
    "tools": [GO],
}


@pytest.fixture(scope="module")
def renderer(tokenizer_folder: Path) -> TemplateRenderer:
    return renderer_for(tokenizer_folder)


def lines(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def of(renderer: TemplateRenderer, *paths: Path, window: int = 2048, skip: bool = False) -> SftRows:
    return SftRows.of_conversations(
        ConversationSource(paths=tuple(map(str, paths)), skip_malformed=skip), renderer, window
    )


def learned(renderer: TemplateRenderer, row: Demonstration) -> str:
    return renderer.decode([token for token, trained in zip(row.ids, row.mask, strict=True) if trained])


def test_jsonl_json_and_parquet_give_the_same_rows(renderer: TemplateRenderer, tmp_path: Path) -> None:
    as_lines = of(renderer, lines(tmp_path / "a.jsonl", TALK, PLAY)).rows
    (tmp_path / "a.json").write_text(json.dumps([TALK, PLAY]), encoding="utf-8")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{**TALK, "tools": None}, PLAY]), tmp_path / "a.parquet")
    assert len(as_lines) == 2
    assert of(renderer, tmp_path / "a.json").rows == of(renderer, tmp_path / "a.parquet").rows == as_lines
    assert of(renderer, tmp_path / "a.jsonl", tmp_path / "a.json").rows == as_lines * 2


def test_objects_of_parquet_lose_the_keys_that_other_rows_brought(renderer: TemplateRenderer, tmp_path: Path) -> None:
    def calling(**arguments: str) -> dict[str, object]:
        call = {"type": "function", "function": {"name": "go", "arguments": arguments}}
        return {"messages": [TALK["messages"][0], {"role": "assistant", "content": "", "tool_calls": [call]}]}

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([calling(a="x"), calling(b="y")]), tmp_path / "a.parquet")
    first = of(renderer, tmp_path / "a.parquet").rows[0]
    assert '{"a": "x"}' in renderer.decode(first.ids)


def test_nulls_of_json_are_learned_in_calls_and_shown_in_schemas(renderer: TemplateRenderer, tmp_path: Path) -> None:
    limit = {"type": "integer", "default": None, "enum": [1, None], "items": None}
    parameters = {"type": "object", "properties": {"query": {"type": "string"}, "limit": limit, "page": None}}
    function = {"name": "find", "description": None, "parameters": parameters}
    call = {"id": None, "type": "function", "function": {"name": "find", "arguments": {"query": "tea", "limit": None}}}
    reply = {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": None}
    messages = [{**TALK["messages"][0], "name": None}, reply]
    path = lines(tmp_path / "a.jsonl", {"messages": messages, "tools": [{"type": "function", "function": function}]})
    ((_, first_row),) = rows_of_file(str(path), "conversation")
    (tool,) = conversation_of(first_row).tools
    properties = {"query": {"type": "string"}, "limit": {"type": "integer", "default": None, "enum": [1, None]}}
    assert tool.parameters == {"type": "object", "properties": properties}
    assert '{"query": "tea", "limit": null}' in learned(renderer, of(renderer, path).rows[0])


@pytest.mark.parametrize(
    "field",
    [
        *({name: "R"} for name in REASONING),
        {"reasoning_content": "", "reasoning": "R", "thinking": None},
        {"reasoning_details": [{"type": "reasoning.text", "text": "R", "signature": None}]},
        {"thinking_blocks": [{"type": "thinking", "thinking": "R"}]},
        {"content": [{"type": "thinking", "thinking": "R"}, {"type": "text", "text": "Ho."}]},
    ],
    ids=json.dumps,
)
def test_reasoning_is_learned_under_any_usual_name(
    field: dict[str, object], renderer: TemplateRenderer, tmp_path: Path
) -> None:
    path = lines(tmp_path / "a.jsonl", {"messages": [TALK["messages"][0], {**TALK["messages"][1], **field}]})
    assert learned(renderer, of(renderer, path).rows[0]) == "<think>\nR\n</think>\n\nHo.<|im_end|>"


def test_reasoning_is_learned_where_the_names_of_other_rows_are_null_beside_it(
    renderer: TemplateRenderer, tmp_path: Path
) -> None:
    rows = [{"messages": [TALK["messages"][0], {**TALK["messages"][1], name: name}]} for name in REASONING]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    replies = [learned(renderer, row) for row in of(renderer, tmp_path / "a.parquet").rows]
    assert replies == [f"<think>\n{name}\n</think>\n\nHo.<|im_end|>" for name in REASONING]


def test_reasoning_that_cannot_be_read_is_refused_and_not_learned_as_empty(
    renderer: TemplateRenderer, tmp_path: Path
) -> None:
    reply = {**TALK["messages"][1], "reasoning_details": [{"type": "reasoning.encrypted", "data": "gAAAA"}]}
    path = lines(tmp_path / "a.jsonl", TALK, {"messages": [TALK["messages"][0], reply]})
    with pytest.raises(ConfigError, match=r"line 2: messages\[1\]\.reasoning_details holds no text"):
        of(renderer, path)
    assert len(of(renderer, path, skip=True).rows) == 1


def test_what_is_left_out_is_said_with_its_reason(renderer: TemplateRenderer, tmp_path: Path) -> None:
    silent = {"messages": [TALK["messages"][0], {"role": "assistant", "content": ""}]}
    long = {"messages": [{"role": "user", "content": "x" * 300}, TALK["messages"][1]]}
    row_set = of(renderer, lines(tmp_path / "a.jsonl", TALK, silent, long), window=200, skip=True)
    assert len(row_set.rows) == 1
    malformed, too_long = row_set.report
    assert malformed.startswith("2 of 3 conversations are learned; left out: 1 malformed, the first: ")
    assert "a.jsonl, line 2: messages[1] is an empty reply" in malformed
    assert too_long.startswith("1 of 2 rows are learned; left out: 1 longer than the context window of 200")


def test_a_malformed_row_stops_with_its_number(renderer: TemplateRenderer, tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", TALK, {"messages": [{"role": "user", "content": "Hi."}]})
    with pytest.raises(ConfigError, match=r"a\.jsonl, line 2: messages holds no reply.*--skip-malformed"):
        of(renderer, path)


def test_nothing_to_learn_is_refused(renderer: TemplateRenderer, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing is left to learn: 1 of 1 conversations are learned; 0 of 1 rows"):
        of(renderer, lines(tmp_path / "a.jsonl", TALK), window=4)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", "", "is empty"),
        ("a.jsonl", '{"messages": [\n', "line 1 is not JSON"),
        ("a.jsonl", "3\n", "line 1 is a JSON object with columns, got int 3"),
        ("a.json", "[1", "is not JSON"),
        ("a.txt", "x", "is not a file of a known kind"),
        ("a.parquet", "x", "a.parquet"),
    ],
)
def test_broken_files_are_named(name: str, text: str, message: str, renderer: TemplateRenderer, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        of(renderer, tmp_path / name, skip=True)
    with pytest.raises(ConfigError, match="no file"):
        of(renderer, tmp_path / f"absent-{name}")


def test_a_pass_shows_every_row_once_in_an_order_of_its_own() -> None:
    rows = [Demonstration((1, number), (False, True)) for number in range(20)]
    passed_rows = list(islice(passes(rows, seed=3), 60))
    orders = [tuple(row.ids[1] for row in passed_rows[start : start + 20]) for start in (0, 20, 40)]
    assert all(Counter(order) == Counter(range(20)) for order in orders)
    assert len(set(orders)) == 3
    assert list(islice(passes(rows, seed=3), 60)) == passed_rows != list(islice(passes(rows, seed=4), 60))

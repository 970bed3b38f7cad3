"""Calls of the Hermes and Qwen families in the shared corpora are read as their references read them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from agentgym.chat_templates import ChatTokenizer, TemplateRenderer, renderer_for
from agentgym.types import MalformedCall, Message, ToolCall

DISPUTED = {"hermes-0024"}
"""A good call beside a broken one: references drop one or both; ours keeps both, the broken one marked."""


@pytest.fixture(scope="session", params=["qwen2_5", "qwen3"])
def qwen(request: pytest.FixtureRequest, real_folders: Mapping[str, Path]) -> TemplateRenderer:
    return renderer_for(ChatTokenizer.load(real_folders[request.param]))


def load(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def parse(renderer: TemplateRenderer, text: str) -> Message:
    return renderer.parse(renderer.tokenizer.backend.encode(text, add_special_tokens=False).ids)


def calls(message: Message) -> list[dict[str, Any]]:
    return [{"name": c.name, "arguments": c.arguments} for c in message.tool_calls if isinstance(c, ToolCall)]


@pytest.mark.long
@pytest.mark.parametrize("family", ["hermes", "hermes_qwen25", "qwen3"])
def test_every_bfcl_call_is_read_exactly(family: str, shared: Path, qwen: TemplateRenderer) -> None:
    rows = load(shared / "toolcalls_bfcl" / f"{family}.jsonl")
    assert len(rows) == 75
    for row in rows:
        for text in (row["text"], row["raw_text"]):
            message = parse(qwen, text)
            assert (calls(message), message.content) == (row["expected"], row["content"]), row["id"]
            assert len(message.tool_calls) == len(row["expected"])


@pytest.mark.parametrize("family", ["hermes", "qwq"])
def test_every_graded_row_of_the_peers_is_read_as_they_do(family: str, shared: Path, qwen: TemplateRenderer) -> None:
    for row in load(shared / "toolcalls" / f"{family}.jsonl"):
        message = parse(qwen, row["text"])
        if row["grade"] in ("partial", "disputed"):
            assert len(calls(message)) == len(row["expected"]), row["id"]
            assert all(
                want["name"] in (None, got["name"]) for want, got in zip(row["expected"], calls(message), strict=True)
            )
            continue
        assert calls(message) == row["expected"], row["id"]
        if row["category"] == "marker_no_call":
            assert isinstance(message.tool_calls[0], MalformedCall)
        elif row.get("reasoning"):
            assert (message.reasoning, message.content) == (row["reasoning"].strip("\n"), row["content"])
        elif "<think>" not in row["text"]:
            assert message.content == row["content"]


def test_a_broken_call_beside_a_good_one_is_kept(shared: Path, qwen: TemplateRenderer) -> None:
    rows = [row for row in load(shared / "toolcalls" / "hermes.jsonl") if row["id"] in DISPUTED]
    assert len(rows) == 1
    good, bad = parse(qwen, rows[0]["text"]).tool_calls
    assert isinstance(good, ToolCall)
    assert isinstance(bad, MalformedCall)


def test_a_streamed_reply_is_read_as_the_whole(shared: Path, qwen: TemplateRenderer) -> None:
    rows = load(shared / "toolcalls_stream" / "hermes.jsonl")
    assert rows
    for row in rows:
        assert calls(parse(qwen, "".join(row["deltas"]))) == [
            {"name": call["name"], "arguments": call["arguments"]} for call in row["expected"]
        ], row["id"]


def test_a_bfcl_call_cut_anywhere_is_the_whole_call_or_malformed(shared: Path, qwen: TemplateRenderer) -> None:
    for row in load(shared / "toolcalls_bfcl" / "hermes.jsonl")[:20]:
        text = row["text"]
        for end in range(0, len(text), 7):
            first_calls = calls(parse(qwen, text[:end]))
            assert first_calls == row["expected"][: len(first_calls)], (row["id"], end)

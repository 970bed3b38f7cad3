"""The answer of an endpoint, whole and in pieces."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from agentgym.engines.openai.reply import ChatCompletionReader
from agentgym.openai_wire import REASONING
from agentgym.types import Message


def whole(message: Mapping[str, Any]) -> Message:
    reader = ChatCompletionReader()
    reader.take({"choices": [{"message": {"role": "assistant", **message}, "finish_reason": "stop"}]})
    return reader.finish().message


def streamed(deltas: Sequence[Mapping[str, Any]]) -> Message:
    reader = ChatCompletionReader()
    for delta in deltas:
        reader.take({"choices": [{"delta": delta, "finish_reason": None}]})
    reader.take({"choices": [{"delta": {}, "finish_reason": "stop"}]})
    return reader.finish().message


@pytest.mark.parametrize("name", REASONING)
@pytest.mark.parametrize("as_parts", [False, True])
def test_reasoning_of_an_endpoint_is_read_under_any_usual_name(name: str, as_parts: bool) -> None:
    def piece(text: str) -> dict[str, Any]:
        return {name: [{"type": "reasoning.text", "text": text, "index": 0}] if as_parts else text}

    expected = Message("assistant", "Hi.", "I think.")
    assert whole({**dict.fromkeys(REASONING), **piece("I think."), "content": "Hi."}) == expected
    others = [{**dict.fromkeys(REASONING, ""), **piece(text)} for text in ("I ", "think", ".")]
    assert streamed([*others, {"content": "Hi.", name: None}]) == expected


def test_reasoning_under_two_names_is_read_once() -> None:
    pieces = [{"reasoning": text, "reasoning_details": [{"text": text}]} for text in ("I ", "think.")]
    last = {"reasoning_details": [{"type": "reasoning.encrypted", "data": "x"}]}
    assert streamed([*pieces, {"content": "Hi."}, last]) == Message("assistant", "Hi.", "I think.")


def test_reasoning_in_parts_of_the_content_is_no_text_of_the_reply() -> None:
    thoughts = [{"content": [{"type": "thinking", "thinking": [{"type": "text", "text": text}]}]} for text in "RS"]
    assert streamed([*thoughts, {"content": "A"}]) == Message("assistant", "A", "RS")
    content = [{"type": "reasoning", "text": "R"}, {"type": "text", "text": "A"}]
    assert whole({"content": content}) == Message("assistant", "A", "R")


@pytest.mark.parametrize(
    "field",
    [
        {"reasoning_details": [{"type": "reasoning.encrypted", "data": "x"}]},
        {"thinking_blocks": [{"type": "redacted_thinking", "data": "x"}]},
    ],
    ids=json.dumps,
)
def test_reasoning_that_an_endpoint_keeps_to_itself_fails_no_reply(field: dict[str, Any]) -> None:
    assert whole({"content": "Hi.", **field}) == streamed([field, {"content": "Hi."}]) == Message("assistant", "Hi.")


def test_of_two_reasonings_the_longest_is_read() -> None:
    message = {"reasoning_content": "In short.", "reasoning_details": [{"text": "At length, in full."}], "content": "A"}
    assert whole(message) == Message("assistant", "A", "At length, in full.")

"""A scripted message becomes the ids that a model would have to sample."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentgym.chat_templates.protocol import Renderer
from agentgym.rollout import reply_ids
from agentgym.types import Message, ToolCall

directions = st.sampled_from(["north", "it's", 'a "b"', "日本", "<|im_end|>"])


@given(directions, st.integers())
def test_a_call_parses_back_to_itself(renderer: Renderer, direction: str, count: int) -> None:
    call = ToolCall("call_0", "go", {"direction": direction, "count": count})
    ids = reply_ids(renderer, Message("assistant", "", tool_calls=(call,)))
    assert ids[-1] in renderer.stop_ids
    assert renderer.parse(ids).tool_calls == (call,)


@pytest.mark.parametrize("text", ["hello", "", "two\nlines"])
def test_a_text_parses_back_to_itself(renderer: Renderer, text: str) -> None:
    assert renderer.parse(reply_ids(renderer, Message("assistant", text))).content == text

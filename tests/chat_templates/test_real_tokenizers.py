"""Against transformers, with the real tokenizers and templates of the shared test data (skipped without it)."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from agentgym.chat_templates import ChatMLRenderer, ChatTokenizer, TemplateRenderer, renderer_for
from agentgym.chat_templates.jinja_template import message_dict, tool_dict
from agentgym.testing.contracts.renderer import check_renderer
from agentgym.types import Message, ToolCall, ToolSpec

QWEN = (pytest.param("qwen2_5", marks=pytest.mark.slow), "qwen3")
GO = ToolSpec("go", "Walks a <b>way</b>.", {"type": "object", "properties": {"direction": {"type": "string"}}})
USER = Message("user", "Begin.")
NORTH = ToolCall("call_0", "go", {"direction": "é <n> 'north'"})
TALK = [Message("system", "You play."), USER, Message("assistant", "Hi.", "Hm."), Message("user", "Go on.")]
PLAY = [USER, Message("assistant", "", "North?", (NORTH,)), Message("tool", "A wall.", tool_call_id="call_0")]
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40).filter(lambda text: "<" not in text)
"""Ordinary ones: none spells a mark."""
T = TypeVar("T")


class Loaded(dict[str, T]):
    """What a function gives for a name, when it is first asked for: each of these tokenizers takes a second."""

    def __init__(self, load: Callable[[str], T]) -> None:
        self._load = load

    def __missing__(self, name: str) -> T:
        self[name] = self._load(name)
        return self[name]


@pytest.fixture(scope="session")
def theirs(real_folders: Mapping[str, Path]) -> dict[str, PreTrainedTokenizerFast]:
    os.environ["HF_HUB_OFFLINE"] = "1"
    return Loaded(lambda name: AutoTokenizer.from_pretrained(real_folders[name]))


@pytest.fixture(scope="session")
def ours(real_folders: Mapping[str, Path]) -> dict[str, TemplateRenderer]:
    return Loaded(lambda name: renderer_for(real_folders[name]))


def their_ids(
    tokenizer: PreTrainedTokenizerFast, messages: list[Message], tools: list[ToolSpec], **variables: bool
) -> list[int]:
    dicts = [message_dict(message, str) for message in messages]
    tool_dicts = [tool_dict(tool, str) for tool in tools] or None
    options = {"add_generation_prompt": True, "tokenize": True, "return_dict": False}
    ids: list[int] = tokenizer.apply_chat_template(dicts, tools=tool_dicts, **options, **variables)
    return ids


@pytest.mark.long
@pytest.mark.parametrize("name", QWEN)
@pytest.mark.parametrize("tools", [[], [GO]])
@pytest.mark.parametrize("messages", [TALK, PLAY, [*PLAY, USER], TALK[:2]])
def test_qwen_renders_as_transformers_does(
    name: str,
    tools: list[ToolSpec],
    messages: list[Message],
    ours: dict[str, TemplateRenderer],
    theirs: dict[str, PreTrainedTokenizerFast],
) -> None:
    assert isinstance(ours[name], ChatMLRenderer)
    assert ours[name].render(messages, tools) == their_ids(theirs[name], messages, tools)


@pytest.mark.long
@pytest.mark.parametrize("thinking", [True, False])
def test_qwen3_renders_both_ways_of_thinking(
    thinking: bool, real_folders: Mapping[str, Path], theirs: dict[str, PreTrainedTokenizerFast]
) -> None:
    renderer = renderer_for(real_folders["qwen3"], variables={"enable_thinking": thinking})
    assert renderer.render(TALK) == their_ids(theirs["qwen3"], TALK, [], enable_thinking=thinking)
    closes = renderer.decode(renderer.extend((), [USER])).endswith("<think>\n\n</think>\n\n")
    assert closes is not thinking


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gptoss", "mistral_nemo"])
def test_other_families_render_as_transformers_does(
    name: str, ours: dict[str, TemplateRenderer], theirs: dict[str, PreTrainedTokenizerFast]
) -> None:
    messages = [replace(message, reasoning=None) for message in TALK[1:]]
    if name == "mistral_nemo" and theirs[name].chat_template is None:
        pytest.fail("the shared Mistral tokenizer lost its chat template")
    assert ours[name].render(messages) == their_ids(theirs[name], messages, [])
    assert ours[name].render([USER]) == their_ids(theirs[name], [USER], [])


@pytest.mark.parametrize("name", QWEN)
@settings(suppress_health_check=[HealthCheck.too_slow], max_examples=60)
@given(contents=st.lists(texts, min_size=1, max_size=4))
def test_any_ordinary_text_renders_as_transformers_does(
    name: str, ours: dict[str, TemplateRenderer], theirs: dict[str, PreTrainedTokenizerFast], contents: list[str]
) -> None:
    messages = [USER, *(Message("user", content) for content in contents)]
    assert ours[name].render(messages) == their_ids(theirs[name], messages, [])


@pytest.mark.parametrize("name", QWEN)
def test_every_promise_holds_for_qwen(name: str, ours: dict[str, TemplateRenderer]) -> None:
    assert [check for check in check_renderer(ours[name]) if not check.ok] == []


@given(st.lists(st.sampled_from(["<|im_end|>", "<|im_start|>", "<tool_call>", "</tool_response>", "a", "\n", "<"])))
def test_no_text_becomes_a_mark_for_qwen3(ours: dict[str, TemplateRenderer], parts: list[str]) -> None:
    renderer, text = ours["qwen3"], "".join(parts)
    ids = renderer.extend((), [Message("tool", text, tool_call_id="call_0")])
    marks = [index for index in ids if index >= 151643]
    assert [renderer.decode([index]) for index in marks] == [
        *("<|im_end|>", "<|im_start|>", "<tool_response>", "</tool_response>", "<|im_end|>", "<|im_start|>")
    ]
    assert text in renderer.decode(ids)


def test_sampled_ids_that_encode_differently_are_kept(ours: dict[str, TemplateRenderer]) -> None:
    renderer = ours["qwen3"]
    sampled = [49122, 385, 1879]
    assert renderer.decode(sampled) == "hello world"
    assert renderer.tokenizer.backend.encode("hello world").ids == [14990, 1879]
    prompt = renderer.render([USER])
    after = renderer.extend([*prompt, *sampled, renderer.stop_ids[0]], [USER])
    whole = renderer.render([USER, Message("assistant", "hello world"), USER])
    assert whole[-len(after) :] == after
    assert renderer.parse([*sampled, renderer.stop_ids[0]]) == Message("assistant", "hello world")


def test_ids_that_spell_the_end_of_a_call_are_not_its_mark(ours: dict[str, TemplateRenderer]) -> None:
    renderer = ours["qwen3"]
    spelled = [522, 14172, 13429, 29]
    assert renderer.decode(spelled) == "</tool_call>"
    assert renderer.parse(spelled) == Message("assistant", "</tool_call>")


def test_the_stop_token_is_the_reply_s_and_the_newline_is_the_template_s(ours: dict[str, TemplateRenderer]) -> None:
    renderer = ours["qwen3"]
    appended = renderer.extend([9707, renderer.stop_ids[0]], [USER])
    assert renderer.decode(appended).startswith("\n<|im_start|>user\n")
    assert renderer.extend([9707], [USER]) == [renderer.stop_ids[0], *appended]


def test_old_reasoning_that_the_template_drops_stays_as_sampled(ours: dict[str, TemplateRenderer]) -> None:
    renderer = ours["qwen3"]
    prompt = renderer.render([USER])
    sampled = renderer.tokenizer.backend.encode("<think>\nHm.\n</think>\n\nHi.<|im_end|>").ids
    row = [*prompt, *sampled, *renderer.extend([*prompt, *sampled], [USER])]
    assert "<think>\nHm." in renderer.decode(row)
    rerendered = renderer.rerender([USER, renderer.parse(sampled), USER])
    assert "<think>" not in renderer.decode(rerendered)


@pytest.mark.slow
def test_our_loading_of_a_folder_gives_the_ids_of_transformers(
    real_folders: Mapping[str, Path], theirs: dict[str, PreTrainedTokenizerFast]
) -> None:
    sample = "Zwölf Boxkämpfer: 12345 日本語 🙂\n\n  def f(x):\treturn x  <b>"
    for name, folder in real_folders.items():
        ours = ChatTokenizer.load(folder).backend
        assert ours.encode(sample, add_special_tokens=False).ids == theirs[name].encode(
            sample, add_special_tokens=False
        )
        assert ours.get_vocab() == theirs[name].get_vocab()

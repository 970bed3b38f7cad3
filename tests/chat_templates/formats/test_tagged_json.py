"""What each family that writes JSON between tags, or behind a mark, has of its own."""

from __future__ import annotations

import pytest

from agentgym.chat_templates.formats.registry import FORMATS
from agentgym.types import MalformedCall, Message, ToolCall

GO = '{"name": "go", "arguments": {}}'


def malformed(family: str, text: str) -> MalformedCall:
    (call,) = FORMATS[family].parse(text).tool_calls
    assert isinstance(call, MalformedCall)
    return call


def test_aliases_are_the_same_format() -> None:
    for name, alias in [
        ("command_r7b", "cohere2moe"),
        ("apertus", "apertus_8b_instruct"),
        ("mistral", "mistral_v11"),
        ("mistral", "mistral_v13"),
        ("hermes", "qwen3"),
    ]:
        assert FORMATS[name] is FORMATS[alias]


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("ernie45", "<think>\nHm.\n</think>\n\n<response>\nHi.\n</response>"),
        ("hunyuan_a13_b", "<think>\nHm.\n</think>\n<answer>\nHi.\n</answer>"),
        ("command_r7b", "<|START_THINKING|>Hm.<|END_THINKING|><|START_RESPONSE|>Hi.<|END_RESPONSE|>"),
        ("cohere2moe", "Hm.<|END_THINKING|><|START_TEXT|>Hi.<|END_TEXT|>"),
        ("apriel_1_6_15b_thinker_fixed", "Hm.\n[BEGIN FINAL RESPONSE]\nHi.\n[END FINAL RESPONSE]"),
        ("apertus", "<|inner_prefix|>Hm.<|inner_suffix|>Hi.<|assistant_end|>"),
        ("longcat_flash", "<longcat_think>Hm.</longcat_think>Hi.</longcat_s>"),
    ],
)
def test_the_frames_of_an_answer_are_no_content(family: str, text: str) -> None:
    message = FORMATS[family].parse(text)
    assert (message.reasoning, message.content.strip(), message.tool_calls) == ("Hm.", "Hi.", ())


def test_cohere_numbers_its_calls() -> None:
    call = '{"tool_call_id": "3", "tool_name": "go", "parameters": {}}'
    message = FORMATS["command_r7b"].parse(f"<|START_ACTION|>[{call}]<|END_ACTION|>")
    assert message.tool_calls == (ToolCall("3", "go", {}),)


def test_a_call_of_apertus_has_the_tools_name_as_its_only_key() -> None:
    assert "one key" in malformed("apertus", '<|tools_prefix|>[{"go": {}, "say": {}}]<|tools_suffix|>').error
    assert "one key" in malformed("apertus", '<|tools_prefix|>["go"]<|tools_suffix|>').error
    usual = '<|tools_prefix|>[{"name": "go", "arguments": {}}]<|tools_suffix|>'
    assert "got the keys name, arguments" in malformed("apertus", usual).error
    for none in ("null", '""', "{}"):
        message = FORMATS["apertus"].parse(f'<|tools_prefix|>[{{"go": {none}}}]<|tools_suffix|>')
        assert message.tool_calls == (ToolCall("call_0", "go", {}),)


def test_an_action_of_internlm_addresses_the_plugins() -> None:
    assert "<|plugin|>" in malformed("internlm2", f"<|action_start|>{GO}<|action_end|>").error
    assert "<|plugin|>" in malformed("internlm2", "<|action_start|><|interpreter|>print(1)<|action_end|>").error


def test_the_older_mark_of_granite_is_read_as_well() -> None:
    for mark in ("<|tool_call|>", "<tool_call>"):
        message = FORMATS["granite"].parse(f"I go. {mark} [{GO}]\nThen I look.")
        assert message == Message("assistant", "I go.\nThen I look.", tool_calls=(ToolCall("call_0", "go", {}),))


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("granite", f"<|tool_call|> {GO}"),
        ("granite_20b_fc", f"<function_call> [{GO}]"),
        ("granite_20b_fc", '<function_call> {"name": 123}'),
        ("giga_chat3", f"<|function_call|>[{GO}]"),
    ],
)
def test_a_call_in_another_shape_than_the_familys_is_malformed(family: str, text: str) -> None:
    call = malformed(family, text)
    assert (call.raw, call.truncated) == (text, False)
    assert "Write " in call.error


@pytest.mark.parametrize("family", ["granite", "granite_20b_fc", "hermes", "phi4_mini", "mistral", "apertus"])
def test_a_list_or_object_without_the_familys_mark_is_content(family: str) -> None:
    for text in (GO, f"[{GO}]"):
        assert FORMATS[family].parse(text) == Message("assistant", text)


def test_both_marks_of_phi_4_mini_are_read_and_its_word_alone_is_none() -> None:
    for text in (f"functools[{GO}]", f"<|tool_call|>{GO}<|/tool_call|>", f"<|tool_call|>[{GO}]<|/tool_call|>"):
        message = FORMATS["phi4_mini"].parse(f"import functools: {text}")
        assert message == Message("assistant", "import functools:", tool_calls=(ToolCall("call_0", "go", {}),))
    for text in ("functools[] it is", f"functools {GO}"):
        assert FORMATS["phi4_mini"].parse(text) == Message("assistant", text)


def test_a_call_of_gigachat_stands_behind_its_mark_or_in_a_message_of_its_own() -> None:
    for opening in ("<|function_call|>", "<|message_sep|>\n\nfunction call<|role_sep|>\n"):
        message = FORMATS["giga_chat3"].parse(f"I go.{opening}{GO}<|message_sep|>\n\n")
        assert message == Message("assistant", "I go.", tool_calls=(ToolCall("call_0", "go", {}),))


def test_minimax_m1_s_calls_are_objects_one_behind_the_other() -> None:
    text = '<tool_calls>\n{"name": "go", "arguments": {"to": "</tool_calls>"}}\n</tool_calls>'
    expected = (ToolCall("call_0", "go", {"to": "</tool_calls>"}),)
    assert FORMATS["minimax_m1"].parse(text).tool_calls == expected
    calls = FORMATS["minimax_m1"].parse(f"Hm.\n<tool_calls>\n{GO}\n{GO}\n</tool_calls><end_of_sentence>").tool_calls
    assert calls == (ToolCall("call_0", "go", {}), ToolCall("call_1", "go", {}))
    first, rest = FORMATS["minimax_m1"].parse(f'<tool_calls>\n{GO}\n{{"name": 1}}\n{GO}\n</tool_calls>').tool_calls
    assert first == ToolCall("call_0", "go", {})
    assert isinstance(rest, MalformedCall)
    assert "non-empty string" in rest.error
    assert isinstance(FORMATS["minimax_m1"].parse("<tool_calls>\ngo\n</tool_calls>").tool_calls[0], MalformedCall)

"""Families that write calls as JSON: what each of them writes is read back, and nothing else is ever a call."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentgym.call_json import ARGUMENT_KEYS
from agentgym.chat_templates.formats.registry import FORMATS
from agentgym.types import JSON, MalformedCall, Message, ToolCall, ToolSpec

Call = tuple[str, dict[str, Any]]
Write = Callable[[Sequence[Call]], str]


def dumps(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def objects(calls: Sequence[Call], name: str = "name", arguments: str = "arguments") -> list[dict[str, Any]]:
    return [{name: tool, arguments: values} for tool, values in calls]


def each(opening: str, closing: str = "", arguments: str = "arguments") -> Write:
    """Every call in tags of its own."""
    return lambda calls: "\n".join(opening + dumps(call) + closing for call in objects(calls, arguments=arguments))


def listed(opening: str, closing: str = "") -> Write:
    """One list of all calls."""
    return lambda calls: opening + json.dumps(objects(calls), indent=2, ensure_ascii=False) + closing


WRITTEN: dict[str, Write] = {
    "hermes": each("<tool_call>\n", "\n</tool_call>"),
    "granite4": each("<tool_call>\n", "\n</tool_call>"),
    "ernie45": each("<tool_call>\n", "\n</tool_call>"),
    "reka_edge": each("<tool_call>\n", "</tool_call>"),
    "longcat_flash": each("<longcat_tool_call>", "</longcat_tool_call>"),
    "internlm2": each("<|action_start|><|plugin|>\n", "<|action_end|>", "parameters"),
    "hunyuan_a13_b": listed("<tool_calls>", "</tool_calls>"),
    "apriel_1_6_15b_thinker_fixed": listed("<tool_calls>", "</tool_calls>"),
    "apertus": lambda calls: f"<|tools_prefix|>{dumps([{name: args} for name, args in calls])}<|tools_suffix|>",
    "command_r7b": lambda calls: f"<|START_ACTION|>{dumps(objects(calls, 'tool_name', 'parameters'))}<|END_ACTION|>",
    "granite": listed("<|tool_call|> "),
    "granite_20b_fc": each("<function_call> "),
    "giga_chat3": each("<|message_sep|>\n\nfunction call<|role_sep|>\n"),
    "phi4_mini": listed("functools"),
    "mistral": lambda calls: "".join(f"[TOOL_CALLS]{name}[ARGS]{dumps(args)}" for name, args in calls),
    "llama3_json": lambda calls: "<|python_tag|>" + "; ".join(map(dumps, objects(calls, arguments="parameters"))),
    "plain_json": listed(""),
    "xlam": listed("```json\n", "\n```"),
    "gemma2_generic": lambda calls: dumps({"tool_calls": objects(calls)}),
    "functionary": lambda calls: "".join(f"<function={name}>{dumps(args)}</function>" for name, args in calls),
}
families = pytest.mark.parametrize("family", WRITTEN)

TEXTS: dict[str, str] = {
    "mistral": "[TOOL_CALLS]go[ARGS]{}",
    "functionary": "<function=go>{}</function>",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>go\n```json\n{}\n```"
    "<｜tool▁call▁end｜>",
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>go<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.go:0<|tool_call_argument_begin|>{}"
    "<|tool_call_end|>",
    "kimi_k3": '<|open|>tools<|sep|><|open|>call tool="go" index="1"<|sep|><|open|>json<|sep|>{}<|close|>json<|sep|>'
    "<|close|>call<|sep|>",
    "gpt_oss": "<|channel|>commentary to=functions.go <|constrain|>json<|message|>{}<|call|>",
}
"""A call of families that write a name and the JSON of its arguments, which is in place of the braces."""
OBJECTS: dict[str, str] = {
    **dict.fromkeys(("hermes", "granite4", "ernie45", "reka_edge"), '<tool_call>\n{"name": "go"FIELDS}\n</tool_call>'),
    "longcat_flash": '<longcat_tool_call>{"name": "go"FIELDS}</longcat_tool_call>',
    "hunyuan_a13_b": '<tool_calls>[{"name": "go"FIELDS}]</tool_calls>',
    "apriel_1_6_15b_thinker_fixed": '<tool_calls>[{"name": "go"FIELDS}]</tool_calls>',
    "minimax_m1": '<tool_calls>\n{"name": "go"FIELDS}\n</tool_calls>',
    "nemotron": '<TOOLCALL>[{"name": "go"FIELDS}]</TOOLCALL>',
    "internlm2": '<|action_start|><|plugin|>{"name": "go"FIELDS}<|action_end|>',
    "command_r7b": '<|START_ACTION|>[{"tool_name": "go"FIELDS}]<|END_ACTION|>',
    "granite": '<|tool_call|>[{"name": "go"FIELDS}]',
    "granite_20b_fc": '<function_call> {"name": "go"FIELDS}',
    "giga_chat3": '<|function_call|>{"name": "go"FIELDS}',
    "phi4_mini": 'functools[{"name": "go"FIELDS}]',
    "mistral": '[TOOL_CALLS][{"name": "go"FIELDS}]',
    "dots": '<dots_function_call>{"name": "go"FIELDS}</dots_function_call>',
    "k2_horizon": '<ifm|tool_calls><ifm|tool_call>{"name": "go"FIELDS}</ifm|tool_call></ifm|tool_calls>',
    "lfm2": '<|tool_call_start|>[{"name": "go"FIELDS}]<|tool_call_end|>',
    **dict.fromkeys(("llama3_json", "plain_json", "xlam", "gemma2_generic"), '{"name": "go"FIELDS}'),
}
"""A call of every family that writes an object with a key for the arguments."""
READ_BOTH = ("internlm2", "command_r7b", "phi4_mini", "dots", "llama3_json", "plain_json", "xlam", "gemma2_generic")
"""Those whose models write `arguments` as well as `parameters`."""
GO = ToolSpec("go", "", {"type": "object", "properties": {"direction": {"type": "string"}}})

NORTH: Call = ("go", {"direction": "north"})
ODD: Call = (
    "world.say_it",
    {"text": 'Ünïcödé 🎉 "quoted" \\ {"name": "no", "arguments": {}} ]}>\n', "deep": {"a": [1, [2.5, None, {}], True]}},
)

names = st.from_regex(r"[a-zA-Z_][a-zA-Z0-9_.\-]{0,12}", fullmatch=True)
leaves = st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats(allow_nan=False, allow_infinity=False)
texts = st.text(st.characters(codec="utf-8"), max_size=12)
values = st.recursive(
    leaves | texts, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3), max_leaves=8
)
several_calls = st.lists(st.tuples(names, st.dictionaries(texts, values, max_size=3)), min_size=1, max_size=4)


def calls(message: Message) -> list[Call]:
    return [(call.name, dict(call.arguments)) for call in message.tool_calls if isinstance(call, ToolCall)]


@families
def test_a_call_is_read(family: str) -> None:
    message = FORMATS[family].parse(WRITTEN[family]([NORTH]))
    assert message == Message("assistant", "", tool_calls=(ToolCall("call_0", *NORTH),))


@families
def test_several_calls_are_read_in_order_with_nested_and_unicode_arguments(family: str) -> None:
    message = FORMATS[family].parse(WRITTEN[family]([ODD, NORTH, ("rest", {})]))
    assert calls(message) == [ODD, NORTH, ("rest", {})]
    assert [call.id for call in message.tool_calls] == ["call_0", "call_1", "call_2"]
    assert message.content == ""


@pytest.mark.long
@families
@settings(max_examples=20)
@given(several=several_calls)
def test_written_arguments_are_read_back(family: str, several: list[Call]) -> None:
    message = FORMATS[family].parse(WRITTEN[family](several))
    assert calls(message) == several
    assert len(message.tool_calls) == len(several)


@families
def test_an_end_that_arguments_spell_is_text_and_the_next_one_ends_the_reply(family: str) -> None:
    ends = FORMATS[family].ends
    spelled: list[Call] = [("say", {end: ["</think>", f"{end}\n{end}"], "html": "<s>old</s>"}) for end in ends] or [ODD]
    for end in (*ends, ""):
        message = FORMATS[family].parse(WRITTEN[family](spelled) + end)
        assert (calls(message), message.content) == (spelled, "")
    for end in ends:
        message = FORMATS[family].parse(WRITTEN[family]([NORTH]) + end + WRITTEN[family](spelled) + end)
        assert (calls(message), message.content) == ([NORTH], "")
    assert FORMATS[family].parse("".join(f"A {end} B" for end in ends) or "A ").content.strip() == "A"


def test_a_closing_tag_in_arguments_is_text_where_a_mark_precedes_the_json() -> None:
    odd: Call = ("say", {"text": "<|action_end|>"})
    assert calls(FORMATS["internlm2"].parse(WRITTEN["internlm2"]([odd, NORTH]))) == [odd, NORTH]


def read_fields(family: str, fields: dict[str, JSON]) -> ToolCall | MalformedCall:
    """Returns what the family reads where its call has these keys besides its name."""
    inside = "".join(f", {dumps(key)}: {dumps(value)}" for key, value in fields.items())
    (call,) = FORMATS[family].parse(OBJECTS[family].replace("FIELDS", inside), [GO]).tool_calls
    assert isinstance(call, ToolCall | MalformedCall)
    return call


every_object = pytest.mark.parametrize("family", OBJECTS)


@every_object
def test_a_call_with_an_unknown_key_is_malformed_and_the_error_names_the_key(family: str) -> None:
    own = ("arguments", "parameters") if family in READ_BOTH else ("arguments",)
    for key in (*ARGUMENT_KEYS, "direction", "function"):
        alone = read_fields(family, {key: NORTH[1]})
        beside = read_fields(family, {"id": "call_0", "arguments": {}, key: NORTH[1]})
        if key in own:
            assert alone == ToolCall("call_0", "go", NORTH[1])
        else:
            assert isinstance(alone, MalformedCall) and f'no "{key}"' in alone.error
        if key != "arguments":
            assert isinstance(beside, MalformedCall) and f'"{key}"' in beside.error


@every_object
def test_missing_null_and_empty_arguments_are_none_but_other_types_are_errors(family: str) -> None:
    assert read_fields(family, {}) == ToolCall("call_0", "go", {})
    empty: list[JSON] = [None, "", {}]
    for none in empty:
        assert read_fields(family, {"arguments": none}) == ToolCall("call_0", "go", {})
    for value in ([], 0, False, "north", [NORTH[1]]):
        assert isinstance(read_fields(family, {"arguments": value}), MalformedCall)


@every_object
def test_a_label_that_a_model_gives_its_call_is_no_argument(family: str) -> None:
    call = read_fields(family, {"id": "call_0", "type": "function", "index": 0, "arguments": NORTH[1]})
    assert call == ToolCall("call_0", "go", NORTH[1])


@pytest.mark.parametrize("family", ["llama3_json", "plain_json", "xlam", "gemma2_generic"])
def test_an_object_that_names_no_tool_and_has_no_arguments_is_content(family: str) -> None:
    for text in ('{"name": "Ann"}', '{"name": "Ann", "input": "north"}', '{"name": "Ann", "age": 7}'):
        assert FORMATS[family].parse(text, [GO]) == Message("assistant", text)
    (call,) = FORMATS[family].parse('{"function": {"name": "look"}, "arguments": {"a": 1}}').tool_calls
    assert isinstance(call, MalformedCall) and 'no "arguments" outside' in call.error


@pytest.mark.parametrize("family", TEXTS)
@pytest.mark.parametrize("text", ["null", '""', "{}", ""])
def test_empty_arguments_after_a_name_are_none(family: str, text: str) -> None:
    if text or family != "mistral":  # whose calls have no closing mark: nothing may be a call that was cut
        assert calls(FORMATS[family].parse(TEXTS[family].replace("{}", text))) == [("go", {})]


@pytest.mark.parametrize("family", TEXTS)
@pytest.mark.parametrize("text", ["[]", "7", "true", '"north"', "north"])
def test_what_is_no_object_after_a_name_is_malformed(family: str, text: str) -> None:
    (call,) = FORMATS[family].parse(TEXTS[family].replace("{}", text)).tool_calls
    assert isinstance(call, MalformedCall)


@families
def test_text_before_a_call_is_content(family: str) -> None:
    message = FORMATS[family].parse("I go [north] {now}.\n" + WRITTEN[family]([NORTH]))
    assert (calls(message), message.content) == ([NORTH], "I go [north] {now}.")


@families
def test_text_alone_is_content_as_it_is(family: str) -> None:
    for text in ("  Hello.\n", 'A list: [1, 2], an object: {"a": {"b": 1}}.', "import functools >>> x\n", ""):
        assert FORMATS[family].parse(text) == Message("assistant", text)


@families
def test_a_call_after_reasoning_is_read_and_one_inside_is_none(family: str) -> None:
    think, end_think = FORMATS[family].thinking
    call = WRITTEN[family]([NORTH])
    message = FORMATS[family].parse(f"{think}\nMaybe {call}\n{end_think}\n\n{call}")
    assert (calls(message), message.content, message.reasoning) == ([NORTH], "", f"Maybe {call}")
    opened = FORMATS[family].parse(f"Maybe {call}\n{end_think}\n\n{call}", in_reasoning=True)
    assert opened == message


@families
def test_a_call_inside_unclosed_reasoning_is_answered_and_never_run(family: str) -> None:
    think, end_think = FORMATS[family].thinking
    call = WRITTEN[family]([NORTH])
    message = FORMATS[family].parse(f"{think}Maybe {call}")
    assert (calls(message), message.content, message.reasoning) == ([], "", f"Maybe {call}")
    if family != "gemma2_generic":  # its call is told by the whole object only
        (unread,) = message.tool_calls
        assert isinstance(unread, MalformedCall)
        assert end_think in unread.error
        assert unread.raw in call


@families
def test_a_reply_cut_anywhere_holds_the_first_calls_or_a_truncated_one(family: str) -> None:
    meant = [ODD, NORTH]
    text = "On we go.\n" + WRITTEN[family](meant)
    for end in range(len(text)):
        message = FORMATS[family].parse(text[:end])
        first_calls = calls(message)
        assert first_calls == meant[: len(first_calls)], text[:end]
        unread = message.tool_calls[len(first_calls) :]
        assert all(isinstance(call, MalformedCall) and call.truncated for call in unread), text[:end]
        assert len(unread) <= 1


@families
def test_broken_json_is_malformed_and_the_error_explains_how_to_write_it(family: str) -> None:
    text = WRITTEN[family]([("go", {"direction": "NORTH"})]).replace('"NORTH"', "'north'")
    message = FORMATS[family].parse(text)
    (call,) = message.tool_calls
    assert isinstance(call, MalformedCall)
    assert "invalid JSON" in call.error
    assert "Write " in call.error
    assert not call.truncated
    assert "'north'" in call.raw


@families
@pytest.mark.parametrize("value", ["NaN", "-Infinity", "1e999", '"\\ud800"', "[" * 100_000 + "]" * 100_000])
def test_what_json_does_not_have_is_malformed(family: str, value: str) -> None:
    message = FORMATS[family].parse(WRITTEN[family]([("go", {"a": "VALUE"})]).replace('"VALUE"', value))
    (call,) = message.tool_calls
    assert isinstance(call, MalformedCall)


@families
@settings(max_examples=20)
@given(data=st.data())
def test_any_text_gives_a_message_whose_calls_it_spells(family: str, data: st.DataObject) -> None:
    whole = WRITTEN[family]([NORTH, ODD])
    marks = [*FORMATS[family].marks, *FORMATS[family].thinking, whole, whole[: len(whole) // 3], whole[-9:]]
    pieces = st.sampled_from([*marks, *'{}[]":,\\>', '{"name":', '"arguments": {}', "go", "\n", " ", "```"]) | texts
    text = "".join(data.draw(st.lists(pieces, max_size=25)))
    for in_reasoning in (False, True):
        message = FORMATS[family].parse(text, in_reasoning=in_reasoning)
        assert all(name in text for name, _ in calls(message) if "\\" not in text)
        assert len({call.id for call in message.tool_calls}) == len(message.tool_calls)


@pytest.mark.long(cases=6)
@families
def test_hostile_repetition_gives_a_message(family: str) -> None:
    half = WRITTEN[family]([NORTH])[:-25]
    for unit in (*FORMATS[family].marks, half, "{", "[", '"', "\\", '{"', '[{"', '{"name":', '{"a":', "```", ">>>a\n{"):
        message = FORMATS[family].parse(unit * (100_000 // len(unit)))
        assert not calls(message)

"""DeepSeek's calls up to V3.1, Kimi K2's, and K2 Horizon's are read in their sections."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentgym.chat_templates.formats.deepseek import DEEPSEEK_V3, DEEPSEEK_V31
from agentgym.chat_templates.formats.k2_horizon import K2_HORIZON
from agentgym.chat_templates.formats.kimi_k2 import KIMI_K2
from agentgym.chat_templates.formats.protocol import ReplyFormat
from agentgym.types import MalformedCall, Message, ToolCall, ToolSpec

FAMILIES = (DEEPSEEK_V3, DEEPSEEK_V31, KIMI_K2, K2_HORIZON)
SECTIONS = {
    "deepseek_v3": ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    "deepseek_v31": ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    "kimi_k2": ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    "k2_horizon": ("<ifm|tool_calls>", "</ifm|tool_calls>"),
}
CALLS = {
    "deepseek_v3": '<｜tool▁call▁begin｜>function<｜tool▁sep｜>go\n```json\n{"to": %s}\n```<｜tool▁call▁end｜>',
    "deepseek_v31": '<｜tool▁call▁begin｜>go<｜tool▁sep｜>{"to": %s}<｜tool▁call▁end｜>',
    "kimi_k2": '<|tool_call_begin|>functions.go:0<|tool_call_argument_begin|>{"to": %s}<|tool_call_end|>',
    "k2_horizon": "<ifm|tool_call>go<ifm|arg_key>to</ifm|arg_key><ifm|arg_value>%s</ifm|arg_value></ifm|tool_call>",
}
VALUE = '{"a": ["日本", {"b": null}], "c": 1.5}'
ARGUMENTS = {"to": {"a": ["日本", {"b": None}], "c": 1.5}}
each_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)


def section(family: ReplyFormat, inside: str) -> str:
    begin, end = SECTIONS[family.name]
    return begin + inside + end


def good(family: ReplyFormat) -> str:
    return CALLS[family.name] % VALUE


def read_calls(message: Message) -> list[tuple[str, object]]:
    return [(call.name, call.arguments) for call in message.tool_calls if isinstance(call, ToolCall)]


@each_family
def test_several_calls_are_read_with_the_text_around_them(family: ReplyFormat) -> None:
    calls = section(family, f"{good(family)}\n{good(family)}\n")
    message = family.parse(f"First.{calls}\nThen.{family.ends[0]}\n")
    assert read_calls(message) == [("go", ARGUMENTS)] * 2
    assert (message.content, message.reasoning) == ("First.\nThen.", None)


@each_family
def test_calls_after_reasoning_are_calls_and_those_inside_are_not(family: ReplyFormat) -> None:
    opening, closing = family.thinking
    calls = section(family, good(family))
    for text, in_reasoning in (
        (f"{opening}Or {calls}{closing}{calls}", False),
        (f"Or {calls}{closing}{calls}", False),
        (f"Or {calls}{closing}{calls}", True),
    ):
        message = family.parse(text, in_reasoning=in_reasoning)
        assert read_calls(message) == [("go", ARGUMENTS)]
        assert (message.content, message.reasoning) == ("", f"Or {calls}")


@each_family
def test_a_call_without_its_section_is_a_call(family: ReplyFormat) -> None:
    assert read_calls(family.parse(good(family))) == [("go", ARGUMENTS)]


@each_family
def test_what_is_no_call_in_a_section_is_no_content_beside_calls_and_malformed_alone(family: ReplyFormat) -> None:
    message = family.parse(f"Text.{section(family, f' noise {good(family)} noise ')}")
    assert (message.content, read_calls(message)) == ("Text.", [("go", ARGUMENTS)])
    assert family.parse(f"Text.{section(family, '')}") == Message("assistant", "Text.")
    (call,) = family.parse(section(family, "noise")).tool_calls
    assert call == MalformedCall("call_0", section(family, "noise"), call.error, truncated=False)  # type: ignore[union-attr]
    (cut,) = family.parse(f"{SECTIONS[family.name][0]}noise").tool_calls
    assert isinstance(cut, MalformedCall)
    assert cut.truncated


@pytest.mark.parametrize(
    ("family", "body", "reason"),
    [
        (DEEPSEEK_V3, "go<｜tool▁sep｜>{}", "function<｜tool▁sep｜>"),
        (DEEPSEEK_V3, "function<｜tool▁sep｜>go\n{}", "```json"),
        (DEEPSEEK_V3, "function<｜tool▁sep｜>go\n```json\n{}\n", "```json"),
        (DEEPSEEK_V3, "function<｜tool▁sep｜>go\n```json\n{x}\n```", "invalid JSON"),
        (DEEPSEEK_V3, "function<｜tool▁sep｜>\n```json\n{}\n```", "name"),
        (DEEPSEEK_V31, "go{}", "<｜tool▁sep｜>"),
        (DEEPSEEK_V31, "go<｜tool▁sep｜>[1]", "got a list"),
        (DEEPSEEK_V31, "<｜tool▁sep｜>{}", "name"),
        (KIMI_K2, "functions.go<|tool_call_argument_begin|>{}", "functions.tool:0"),
        (KIMI_K2, "0<|tool_call_argument_begin|>{}", "functions.tool:0"),
        (KIMI_K2, "functions.go:0", "functions.tool:0"),
        (KIMI_K2, "functions.go:0<|tool_call_argument_begin|>{'a': 1}", "invalid JSON"),
        (K2_HORIZON, "", "name of a tool"),
        (K2_HORIZON, "go<ifm|arg_key>to</ifm|arg_key>", "expected an argument"),
        (K2_HORIZON, "go to", "expected an argument"),
        (K2_HORIZON, '{"name": 1}', "name"),
    ],
)
def test_a_call_that_cannot_be_read_is_kept_with_its_reason_among_the_good_ones(
    family: ReplyFormat, body: str, reason: str
) -> None:
    opening, closing = good(family)[: good(family).index(">") + 1], good(family)[good(family).rindex("<") :]
    message = family.parse(section(family, f"{good(family)}{opening}{body}{closing}{good(family)}"))
    first, bad, last = message.tool_calls
    assert isinstance(first, ToolCall)
    assert isinstance(last, ToolCall)
    assert isinstance(bad, MalformedCall)
    assert (bad.raw, bad.truncated) == (f"{opening}{body}{closing}", False)
    assert reason in bad.error
    assert "Write " in bad.error


@each_family
def test_a_reply_cut_anywhere_holds_only_calls_that_it_wrote_in_full(family: ReplyFormat) -> None:
    text = f"Text.{section(family, good(family) + good(family))}"
    for end in range(len(text)):
        message = family.parse(text[:end])
        assert read_calls(message) == [("go", ARGUMENTS)] * len(read_calls(message))
        assert all(call.truncated for call in message.tool_calls if isinstance(call, MalformedCall))
        assert len(read_calls(message)) <= text[:end].count("go")


def test_kimis_own_ids_are_kept_and_the_name_is_told_from_them() -> None:
    begin, end = "<|tool_call_begin|>", "<|tool_call_argument_begin|> {} <|tool_call_end|>"
    message = KIMI_K2.parse(f"{begin} functions.a.b-c:0 {end}{begin}go:12{end}{begin}api.x:3{end}")
    assert message.tool_calls == (
        ToolCall("functions.a.b-c:0", "a.b-c", {}),
        ToolCall("go:12", "go", {}),
        ToolCall("api.x:3", "api.x", {}),
    )


def test_an_id_that_kimi_gives_twice_counts_once() -> None:
    message = KIMI_K2.parse(good(KIMI_K2) * 2)
    assert [call.id for call in message.tool_calls] == ["functions.go:0", "call_1"]


def test_k2_horizon_reads_arguments_by_the_tools_schema_or_their_own_type() -> None:
    tool = ToolSpec("go", "", {"type": "object", "properties": {"n": {"type": "integer"}, "s": {"type": "string"}}})
    values = (("n", "", "3"), ("s", "", "3"), ("x", "", "3"), ("y", "string", "3"), ("z", "array", "[3]"))
    arguments = "".join(
        f"<ifm|arg_key>{key}</ifm|arg_key>"
        + (f"<ifm|arg_type>{kind}</ifm|arg_type>" if kind else "")
        + f"<ifm|arg_value>{value}</ifm|arg_value>"
        for key, kind, value in values
    )
    (call,) = K2_HORIZON.parse(f"<ifm|tool_call>go{arguments}</ifm|tool_call>", [tool]).tool_calls
    assert call == ToolCall("call_0", "go", {"n": 3, "s": "3", "x": 3, "y": "3", "z": [3]})


def test_k2_horizon_writes_calls_as_json_too_and_reasons_by_three_marks() -> None:
    call = '<ifm|tool_call>{"name": "go", "arguments": {"to": 1}}</ifm|tool_call>'
    for mark in ("think", "think_fast", "think_faster"):
        message = K2_HORIZON.parse(f"<ifm|{mark}>Hm.</ifm|{mark}>{call}")
        assert message == Message("assistant", "", "Hm.", (ToolCall("call_0", "go", {"to": 1}),))


@each_family
@given(data=st.data())
def test_any_text_gives_an_assistant_message(family: ReplyFormat, data: st.DataObject) -> None:
    parts = st.sampled_from([*family.marks, good(family), "function", "go", ":0", "{", '"', "```json\n", "\n", "é"])
    text = "".join(data.draw(st.lists(parts, max_size=20)))
    assert family.parse(text).role == "assistant"


@pytest.mark.long
@each_family
@pytest.mark.parametrize("tail", ["", '{"', "functions.go:0"])
def test_a_hostile_repetition_is_parsed_in_linear_time(family: ReplyFormat, tail: str) -> None:
    # A quadratic parser takes hours for these; a linear one seconds.
    for mark in family.marks:
        assert family.parse(f"{mark}{tail}" * 10_000).role == "assistant"

"""The parser of gpt-oss's replies (Harmony): its messages become reasoning, content and calls."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentgym.chat_templates.formats.gpt_oss import GPT_OSS
from agentgym.types import MalformedCall, Message, ToolCall

ANALYSIS = "<|channel|>analysis<|message|>Hm.<|end|>"
START = "<|start|>assistant"
GO = '<|channel|>commentary to=functions.go <|constrain|>json<|message|>{"direction": "north"}<|call|>'
NORTH = {"direction": "north"}


@pytest.mark.parametrize(
    "text",
    [
        GO,
        GO.removesuffix("<|call|>"),
        GO.replace(" <|constrain|>json", ""),
        GO.replace("<|constrain|>", ""),
        ' to=functions.go<|channel|>commentary json<|message|>{"direction": "north"}<|call|>',
        '<|start|>assistant to=functions.go<|channel|>commentary<|message|>\n{"direction": "north"}\n',
        '<|channel|>analysis to=functions.go<|message|>{"direction": "north"}',
        ' to=functions.go<|message|>{"direction": "north"}<|call|>',
    ],
)
def test_a_message_to_a_function_is_a_call_wherever_its_recipient_is(text: str) -> None:
    assert GPT_OSS.parse(text) == Message("assistant", "", tool_calls=(ToolCall("call_0", "go", NORTH),))


def test_channels_are_reasoning_preamble_calls_and_the_final_answer() -> None:
    preamble = f"{START}<|channel|>commentary<|message|>I go.<|end|>"
    final = f"{START}<|channel|>final <|constrain|>json<|message|>[1]<|return|>"
    look = f"{START} to=look<|channel|>commentary<|message|><|call|>"
    message = GPT_OSS.parse(f"{ANALYSIS}{START}{ANALYSIS}{preamble}{START}{GO}{look}{final}")
    calls = (ToolCall("call_0", "go", NORTH), ToolCall("call_1", "look", {}))
    assert message == Message("assistant", "I go.\n[1]", "Hm.\nHm.", calls)


def test_preamble_and_answer_are_two_lines_of_content() -> None:
    message = GPT_OSS.parse(f"<|channel|>commentary<|message|>First.<|end|>{START}<|channel|>final<|message|>Then.")
    assert message == Message("assistant", "First.\nThen.")


def test_a_call_spelled_in_reasoning_is_not_a_call() -> None:
    text = '<|channel|>analysis<|message|>Or to=functions.go {"direction": "north"}?<|end|>'
    assert GPT_OSS.parse(text) == Message("assistant", "", 'Or to=functions.go {"direction": "north"}?')


@pytest.mark.parametrize("text", ["Hello.", "", "Send it to=me now", "<|end|>", " to go"])
def test_text_without_a_header_is_content(text: str) -> None:
    assert GPT_OSS.parse(text).content == text.replace("<|end|>", "")
    assert not GPT_OSS.parse(text).tool_calls


@pytest.mark.parametrize(
    "text",
    [
        f'{ANALYSIS}<|start|>functions.go to=assistant<|channel|>commentary<|message|>"Done."<|end|>',
        f'{ANALYSIS}<|start|>user to=functions.go<|message|>"Done."<|end|>',
    ],
)
def test_a_message_of_another_role_is_never_a_call(text: str) -> None:
    assert GPT_OSS.parse(text) == Message("assistant", '"Done."', "Hm.")


def test_a_repeated_end_mark_is_ignored() -> None:
    assert GPT_OSS.parse(f"<|end|>{ANALYSIS}<|end|>{START}{GO}<|call|>") == GPT_OSS.parse(f"{ANALYSIS}{START}{GO}")


def test_a_message_whose_end_is_missing_ends_where_the_next_one_starts() -> None:
    message = GPT_OSS.parse(f"<|channel|>analysis<|message|>Hm.{GO}")
    assert message == Message("assistant", "", "Hm.", (ToolCall("call_0", "go", NORTH),))


@pytest.mark.parametrize(
    ("body", "reason"),
    [("north", "invalid JSON"), ("[1]", "got a list"), ('{"a": 1', "invalid JSON"), ("7", "got the value 7")],
)
def test_a_malformed_call_has_its_error_and_its_place_among_the_valid_ones(body: str, reason: str) -> None:
    bad = f"{START}<|channel|>commentary to=functions.go<|message|>{body}<|call|>"
    first, malformed, last = GPT_OSS.parse(f"{GO}{bad}{START}{GO}").tool_calls
    assert (first, last) == (ToolCall("call_0", "go", NORTH), ToolCall("call_2", "go", NORTH))
    assert isinstance(malformed, MalformedCall)
    assert (malformed.raw, malformed.truncated) == (bad, False)
    assert reason in malformed.error


def test_a_truncated_reply_has_the_call_only_if_its_arguments_are_complete() -> None:
    for text in (
        f"{ANALYSIS}{START}{GO}",
        ' to=functions.go<|channel|>commentary json<|message|>{"direction": "north"}',
    ):
        for end in range(len(text)):
            message = GPT_OSS.parse(text[:end])
            if text[:end].endswith('"}'):  # only the mark that ends the call is missing
                assert message.tool_calls == (ToolCall("call_0", "go", NORTH),)
            else:
                assert all(isinstance(call, MalformedCall) and call.truncated for call in message.tool_calls)
                assert bool(message.tool_calls) is (" to=f" in text[:end])


@given(st.lists(st.sampled_from([*GPT_OSS.marks, GO, "analysis", "to=functions.go", " ", "{}", "é"]), max_size=20))
def test_any_text_gives_an_assistant_message_with_ids_in_order(parts: list[str]) -> None:
    message = GPT_OSS.parse("".join(parts))
    assert [call.id for call in message.tool_calls] == [f"call_{n}" for n in range(len(message.tool_calls))]


@pytest.mark.long
@pytest.mark.parametrize("unit", [*GPT_OSS.marks, GO, "<|message|><|start|>", " to=f", "<|channel|>a<|message|>{"])
def test_a_hostile_repetition_is_parsed_in_linear_time(unit: str) -> None:
    # A quadratic parser takes hours for this; a linear one seconds.
    assert GPT_OSS.parse(unit * 10_000).role == "assistant"
    assert GPT_OSS.parse(f"<|channel|>commentary to=functions.go<|message|>{unit * 10_000}").role == "assistant"

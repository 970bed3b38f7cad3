"""Every finish reason that a provider is known to send is a reply, a cut, a filter or a failure."""

from __future__ import annotations

import re

import pytest

from agentgym.engines.openai.finish_reasons import SPELLINGS, Finish, classify_finish
from agentgym.engines.openai.reply import ChatCompletionReader
from agentgym.engines.servers.http import HttpRefusal

REASONS = [(word, kind) for kind, words in SPELLINGS.items() for word in words.split()]


def read(finish: str | None) -> ChatCompletionReader:
    reader = ChatCompletionReader()
    reader.take({"choices": [{"message": {"role": "assistant", "content": "Hi."}, "finish_reason": finish}]})
    return reader


@pytest.mark.parametrize(("reason", "kind"), REASONS)
def test_a_finish_reason_has_one_kind_in_every_spelling(reason: str, kind: Finish) -> None:
    camel = re.sub(r"_(\w)", lambda match: match[1].upper(), reason.lower())
    for spelling in (reason, reason.lower(), reason.upper(), reason.replace("_", "-"), camel, f"{reason}: more"):
        assert classify_finish(spelling) == (kind, True)
    assert classify_finish(f"FinishReason.{reason}") == classify_finish(f"FINISH_REASON_{reason}") == (kind, True)
    reader = read(reason)
    if kind in ("failed", "filtered"):
        words = "withheld" if kind == "filtered" else "gave the reply up"
        with pytest.raises(HttpRefusal, match=rf"{words} \(finish reason {reason}\)"):
            reader.finish()
    else:
        assert reader.finish().finish_reason == ("length" if kind == "cut" else "stop")
    assert reader.remark == ""


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ("SAFETY", "filtered"),
        ("RECITATION", "filtered"),
        ("content_filter: PROHIBITED_CONTENT", "filtered"),
        ("sensitive", "filtered"),
        ("guardrail_intervened", "filtered"),
        ("refusal", "filtered"),
        ("MAX_TOKENS", "cut"),
        ("model_context_window_exceeded", "cut"),
        ("model_length", "cut"),
        ("network_error", "failed"),
        ("insufficient_system_resource", "failed"),
        ("abort", "failed"),
        ("tool_use", "reply"),
        ("eos", "reply"),
        ("function_call_filter: MALFORMED_FUNCTION_CALL", "reply"),
    ],
)
def test_the_reasons_of_hosted_models_are_what_they_mean(reason: str, kind: Finish) -> None:
    assert classify_finish(reason) == (kind, True)


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ("server_overloaded", "failed"),
        ("input_tokens_exceeded", "cut"),
        ("safety_block", "filtered"),
        ("deadline_exceeded", "failed"),
        ("rate_limit", "failed"),
        ("queue_full", "failed"),
        ("oom", "failed"),
        ("incomplete", "cut"),
        ("eot", "reply"),
        ("完了", "reply"),
    ],
)
def test_an_unknown_reason_is_read_by_its_words_and_reported_by_name(reason: str, kind: Finish) -> None:
    assert classify_finish(reason) == (kind, False)
    reader = read(reason)
    try:
        reader.finish()
    except HttpRefusal:
        assert kind in ("failed", "filtered")
    assert reader.remark == f"ended a reply with the unknown finish reason {reason!r}: taken as {kind}"


def test_null_in_any_spelling_is_no_finish_reason_and_takes_none_away() -> None:
    for reason in (None, "", "null", "None", "NOT_FINISHED"):
        assert classify_finish(reason)[0] is None
        reader = read("length")
        reader.take({"choices": [{"delta": {}, "finish_reason": reason}]})
        assert reader.finish().finish_reason == "length"

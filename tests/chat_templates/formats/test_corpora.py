"""Replies of the shared corpora are read as their references read them, whole, cut and corrupted."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from agentgym.chat_templates.formats.registry import FORMATS
from agentgym.types import MalformedCall, Message, ToolCall, ToolSpec

SHARED = Path(__file__).resolve().parents[4] / "shared" / "data"
BFCL, GRADED, STREAMED = "toolcalls_bfcl", "toolcalls", "toolcalls_stream"
Row = dict[str, Any]

MISSES: dict[str, str] = {
    "deepseek_v41-0001": "a call as V4 writes it, by a template of V4; the marks of V4.1 have a space",
    "gemma4-0007": "a string that the reply's end cuts may be any part of the one that was meant",
    "dots-0002": "a call of an unknown tool is kept as a call, which the environment answers",
    "mini_c_p_m5_x_m_l-0017": "a call whose arguments do not fit the schema is kept as a call; validation answers it",
    "glm47-0023": "without a schema True and None are texts: only JSON's own spelling is another value",
    "qwen3_coder-0010": "the tool's name does not end; the reference takes the next line into the name",
    "qwen3_coder-0040": "without a schema a value is text, as another reference of the family reads it",
    "qwen3_coder-0054": "spaces that the model wrote as a value are kept",
    "step3-0009": "without a schema a value is text, as another reference of the family reads it",
    "mistral-0018": "the call has no name; a call without one is malformed",
    "mistral-s0004": "the call has no name; a call without one is malformed",
}
"""Rows of `toolcalls` and `toolcalls_stream` whose calls are knowingly read otherwise, and why; grades count them."""

DISPUTED: dict[str, str] = {
    "glm47-0005": "a line break behind the name is the template's own way of writing",
    "hermes-0024": "the good call is read, the broken one beside it is malformed; references drop one or both",
    "mistral_v11-0001": "this is how the template of v11 writes a call; the references know only older ones",
    "qwen3_coder-0018": "the function's own tags say all; models leave out the tags around them",
    "qwen3_coder-0019": "the function's own tags say all; models leave out the tags around them",
    "seed_oss-0005": "a line break at the end of a value is a part of it: the template sets none there",
}
"""Rows of `toolcalls` about which references differ; each is read as its row expects, for this reason."""

TEXT_MISSES: dict[str, str] = {
    "apriel_1_6_15b_thinker_fixed-0000": "the heading of the reasoning stands in the prompt, not in the reply",
    "apriel_1_6_15b_thinker_fixed-0001": "the heading of the reasoning stands in the prompt, not in the reply",
    "qwen3_5-0014": "an opening of reasoning at its beginning says nothing; the reference takes it for reasoning",
}
"""Rows of `toolcalls` whose reasoning or content is knowingly read otherwise, and why."""


def rows(folder: str, family: str) -> list[Row]:
    file = SHARED / folder / f"{family}.jsonl"
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []


def families(*folders: str) -> list[Any]:
    stems = sorted({file.stem for folder in folders for file in (SHARED / folder).glob("*.jsonl")})
    absent = pytest.mark.skip(reason=f"the shared test data {SHARED} is not beside this checkout")
    return stems or [pytest.param("absent", marks=absent)]


def read(family: str, row: Row, text: str) -> Message:
    functions = [tool["function"] for tool in row["tools"] or ()]
    tools = [ToolSpec(tool["name"], tool.get("description", ""), tool["parameters"]) for tool in functions]
    return FORMATS[family].parse(text, tools)


def calls(message: Message) -> list[Row]:
    read_calls = [call for call in message.tool_calls if isinstance(call, ToolCall)]
    return [{"name": call.name, "arguments": call.arguments} for call in read_calls]


def wanted(row: Row) -> list[Row]:
    return [{"name": call["name"], "arguments": call["arguments"]} for call in row["expected"]]


def exactly(value: object, expected: object) -> bool:
    """Equality that tells 1 from 1.0 and from True."""
    if isinstance(value, Mapping) and isinstance(expected, Mapping):
        return value.keys() == expected.keys() and all(exactly(value[key], expected[key]) for key in value)
    if isinstance(value, list) and isinstance(expected, list):
        return len(value) == len(expected) and all(map(exactly, value, expected))
    return type(value) is type(expected) and value == expected


def as_graded(row: Row, message: Message) -> bool:
    """Whether the calls are those that the row's grade vouches for."""
    got = calls(message)
    if row["category"] == "partial":  # its reference reads what a stream has so far: here that is a truncated call
        (call,) = message.tool_calls
        return isinstance(call, MalformedCall) and call.truncated and row["expected"][0]["name"] in call.raw
    if not row.get("partial_expectation"):
        return exactly(got, wanted(row))
    names = [call["name"] for call in row["expected"]]
    if len(names) != len(got) or any(want not in (None, call["name"]) for want, call in zip(names, got, strict=True)):
        return False
    subset = row["args_subset_of_first"]
    return not subset or all(got[0]["arguments"].get(key) == value for key, value in subset.items())


def vouched_texts(row: Row) -> tuple[str, str] | None:
    """Reasoning and content, where the row's source asserts both; None where a setting of its own shapes them."""
    options = row.get("parser_opts")
    if options is None or options["reasoning_format"] == 0 or options["json_schema"] or options["continue_final"]:
        return None
    return row["reasoning"].strip(), row["content"].strip()


@pytest.mark.parametrize("family", families(BFCL))
def test_every_rendered_call_is_read_exactly(family: str) -> None:
    for row in rows(BFCL, family):
        for text in (row["text"], row["raw_text"]):
            message = read(family, row, text)
            assert exactly(calls(message), wanted(row)), row["id"]
            assert len(message.tool_calls) == len(row["expected"]), row["id"]
            assert message.content.strip() == row["content"].strip(), row["id"]


@pytest.mark.parametrize("family", families(GRADED))
def test_graded_rows_are_read_as_their_reference_does_but_for_the_listed_misses(family: str) -> None:
    for row in rows(GRADED, family):
        message = read(family, row, row["text"])
        assert as_graded(row, message) is (row["id"] not in MISSES), (row["id"], row["text"], message)


@pytest.mark.parametrize("family", families(GRADED))
def test_reasoning_and_content_are_those_of_the_peers_that_assert_them(family: str) -> None:
    for row in rows(GRADED, family):
        texts = vouched_texts(row)
        if texts is not None:
            message = read(family, row, row["text"])
            got = ((message.reasoning or "").strip(), message.content.strip())
            assert (got == texts) is (row["id"] not in TEXT_MISSES), (row["id"], got, texts)


@pytest.mark.parametrize("family", families(STREAMED))
def test_a_streamed_reply_is_read_as_its_reference_does(family: str) -> None:
    for row in rows(STREAMED, family):
        text = "".join(row["deltas"])
        assert text == row["text"]
        message = read(family, row, text)
        assert exactly(calls(message), wanted(row)) is (row["id"] not in MISSES), (row["id"], text, message)


def test_every_disputed_row_is_decided(shared: Path) -> None:
    graded = [row for family in families(GRADED) for row in rows(GRADED, family)]
    disputed = {row["id"] for row in graded if row["grade"] == "disputed"}
    assert set(DISPUTED) == disputed - set(MISSES)


@pytest.mark.parametrize(("grade", "least"), [("A", 0.97), ("B", 0.9)])
def test_the_misses_leave_each_grade_above_its_bound(grade: str, least: float, shared: Path) -> None:
    graded = [row for family in families(GRADED) for row in rows(GRADED, family) if row["grade"] == grade]
    missed = [row for row in graded if row["id"] in MISSES]
    assert len(graded) > 90
    assert 1 - len(missed) / len(graded) >= least


def all_texts(family: str) -> Iterator[tuple[Row, str]]:
    for folder in (BFCL, GRADED, STREAMED):
        for row in rows(folder, family):
            yield row, row["text"]


@pytest.mark.long
@pytest.mark.parametrize("family", families(BFCL, GRADED, STREAMED))
def test_a_reply_cut_anywhere_holds_no_call_that_the_whole_does_not(family: str) -> None:
    for row, text in all_texts(family):
        whole = read(family, row, text)
        for end in range(0, len(text), 10):
            cut = calls(read(family, row, text[:end]))
            assert all(call["name"] in text[:end] for call in cut), (row["id"], end)
            if not any(isinstance(call, MalformedCall) for call in whole.tool_calls):
                assert begins(cut, calls(whole)), (row["id"], end, cut)


def begins(cut: list[Row], whole: list[Row]) -> bool:
    """Whether the calls of a cut reply are the first ones of the whole, the last perhaps with fewer arguments."""
    if not cut or len(cut) > len(whole):
        return not cut
    last, meant = cut[-1], whole[len(cut) - 1]
    fewer = last["name"] == meant["name"] and last["arguments"].items() <= meant["arguments"].items()
    return cut[:-1] == whole[: len(cut) - 1] and fewer


@pytest.mark.long
@pytest.mark.parametrize("family", families(BFCL, GRADED, STREAMED))
def test_a_corrupted_reply_raises_nothing_and_holds_no_name_that_it_does_not_spell(family: str) -> None:
    for row, text in all_texts(family):
        chance = random.Random(f"{row['id']} of {family}")
        for _ in range(8):
            broken = corrupted(text, FORMATS[family].marks, chance)
            for call in calls(read(family, row, broken)):
                assert call["name"] in broken, (row["id"], broken, call)


def corrupted(text: str, marks: tuple[str, ...], chance: random.Random) -> str:
    """The text with up to three stretches dropped, doubled, replaced, or a mark set between."""
    for _ in range(chance.randint(1, 3)):
        start = chance.randrange(len(text) + 1)
        end = min(len(text), start + chance.choice((0, 1, 1, 2, 5, 40)))
        noise = ["", text[start:end] * 2, chance.choice("{}[]()\"'<>|:,=/ \n\x00é🎉"), chance.choice([*marks, "x"])]
        text = text[:start] + chance.choice(noise) + text[end:]
    return text

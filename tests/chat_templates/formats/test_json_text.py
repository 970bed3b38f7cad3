"""JSON in a model's text is found in time linear in the text."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentgym.call_json import read_json
from agentgym.chat_templates.formats.json_text import json_end, json_span, list_items

leaves = st.none() | st.booleans() | st.integers() | st.text(st.characters(codec="utf-8"))
values = st.recursive(
    leaves, lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner)
)


@settings(max_examples=40)
@given(value=values, indent=st.sampled_from([None, 2]), after=st.sampled_from(["", "}", ']"', " and so on", "\n{}"]))
def test_the_span_of_an_object_is_that_object(value: object, indent: int | None, after: str) -> None:
    text = json.dumps({"a": value}, indent=indent, ensure_ascii=False)
    assert read_json(text) == {"a": value}
    assert json_span("x " + text + after, 1) == (2 + len(text), True)
    assert json_end(text + after, 0) == len(text)


@settings(max_examples=40)
@given(value=values, data=st.data())
def test_a_cut_object_goes_on_to_the_texts_end(value: object, data: st.DataObject) -> None:
    text = json.dumps({"a": value}, ensure_ascii=False)
    cut = text[: data.draw(st.integers(0, len(text) - 1))]
    assert json_span(cut, 0) == (len(cut), False)
    assert json_end(cut, 0) is None


@pytest.mark.parametrize(
    ("text", "end"), [("{'a': 1}", 1), ('{"a": <b>}', 6), ("go {}", 0), ('"a"', 0), ('[{"a": (1)}]', 7)]
)
def test_what_json_cannot_have_ends_the_span(text: str, end: int) -> None:
    assert json_span(text, 0) == (end, False)


@settings(max_examples=40)
@given(items=st.lists(values, max_size=5), indent=st.sampled_from([None, 1]))
def test_the_items_of_a_list_are_its_parts(items: list[object], indent: int | None) -> None:
    text = " \n" + json.dumps(items, indent=indent, ensure_ascii=False) + "\n"
    assert [json.loads(text[start:end]) for start, end in list_items(text)] == items

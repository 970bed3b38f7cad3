"""Python's literals are read without evaluating anything."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentgym.chat_templates.formats.python_literal import LiteralReader
from agentgym.types import JSON

LITERALS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)


def value(text: str) -> JSON:
    reader = LiteralReader(text)
    literal = reader.value()
    assert reader.position == len(text)
    return literal


@given(LITERALS)
def test_what_python_writes_is_read_back(literal: JSON) -> None:
    assert value(repr(literal)) == literal


@given(LITERALS)
def test_what_json_writes_is_read_back(literal: JSON) -> None:
    assert value(json.dumps(literal)) == literal


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("07", "07"),
        ("-00501", "-00501"),
        ("0", 0),
        ("00.5", 0.5),
        ("0x1F", 31),
        ("-0b11", -3),
        ("1_000", 1000),
        ("+5", 5),
        ("1e3", 1000.0),
        (".5", 0.5),
        ("5.", 5.0),
        ("-0", 0),
        ("true", True),
        ("None", None),
        ("(1, 2)", [1, 2]),
        ("(1)", 1),
        ("()", []),
        ("[1, ]", [1]),
        ("{'b', 'a'}", ["b", "a"]),
        ("{}", {}),
        ("{1: 'a', None: 'b', True: 'c', 1.5: 'd'}", {"1": "a", "null": "b", "true": "c", "1.5": "d"}),
        ("'it''s'", "its"),
        ("'a'\n  \"b\"", "ab"),
        (r"r'\d'", r"\d"),
        (r"'\d\,'", r"\d\,"),
        (r"'\x41\101\u00e9\U0001F389\N{BULLET}'", "AAé🎉•"),
        (r"'\ud83c\udf89'", "🎉"),
        ("'one\ntwo\\\nthree'", "one\ntwothree"),
        ("'''it's \"so\"'''", 'it\'s "so"'),
        ("'\x00'", "\x00"),
    ],
)
def test_a_literal_is_read_as_python_means_it(text: str, expected: JSON) -> None:
    literal = value(text)
    assert literal == expected
    assert type(literal) is type(expected)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "the text ends"),
        ("name", "expected a literal"),
        ("f(1)", "expected a literal"),
        ("__import__('os')", "expected a literal"),
        ("1j", "expected a literal"),
        ("5abc", "expected a literal"),
        ("1e999", "too large"),
        ("9" * 301, "digits"),
        ("0x" + "f" * 10_000, "digits"),
        ("b'z'", "bytes"),
        ("f'{x}'", "f-strings"),
        ("'open", "has no end"),
        ("'''open'", "has no end"),
        (r"'\ud800'", "surrogate"),
        (r"'\N{NO SUCH NAME}'", "no character is named"),
        ("[1 2]", "expected ]"),
        ("{'a': 1, 'b'}", "expected :"),
        ("{[1]: 2}", "a key is a string"),
        ("[" * 1_000_000, "nested too deeply"),
        ("{'a':" * 1_000_000, "nested too deeply"),
    ],
)
def test_what_is_no_literal_is_refused_with_its_reason(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=re.escape(reason)):
        LiteralReader(text).value()


def test_a_literal_ends_before_what_does_not_belong_to_it() -> None:
    reader = LiteralReader("1 + 2")
    assert (reader.value(), reader.position) == (1, 1)


@given(LITERALS)
def test_a_text_that_stops_too_early_is_refused(literal: JSON) -> None:
    text = repr([literal, "end"])
    for end in range(len(text)):
        with pytest.raises(ValueError, match=r"expected|no end"):
            LiteralReader(text[:end]).value()


@given(st.text(alphabet="'\"\\nxuN{}[]():,0123456789eE.+-_ \nrbfTrueNone", max_size=30))
def test_any_text_is_read_or_refused(text: str) -> None:
    reader = LiteralReader(text)
    try:
        literal = reader.value()
    except ValueError:
        assert 0 <= reader.position <= len(text)
        return
    assert value(text[: reader.position]) == literal
    assert json.loads(json.dumps(literal, ensure_ascii=False, allow_nan=False).encode()) == literal

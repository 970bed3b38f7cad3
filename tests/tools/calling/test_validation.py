"""What a model is told about wrong arguments, and that the fast check agrees with the full one."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentgym.errors import ToolSchemaError
from agentgym.tools.calling.fast_check import KEYWORDS, fast_check, is_common_schema
from agentgym.tools.calling.validation import ArgumentCheck

SCHEMA = {
    "type": "object",
    "properties": {
        "direction": {"type": "string", "enum": ["north", "south"]},
        "count": {"type": "integer", "minimum": 1},
        "path": {"type": "array", "items": {"type": "object", "properties": {"x": {"type": "number"}}}},
        "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    },
    "required": ["direction"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"direction": "up"}, "argument 'direction': 'up' is not one of ['north', 'south']"),
        ({}, "missing argument 'direction'"),
        ({"direction": "north", "cuont": 1}, "unknown argument 'cuont': did you mean 'count'?"),
        ({"direction": "north", "count": "7"}, "'7' is not of type 'integer' (write it without quotes)"),
        ({"direction": "north", "count": True}, "argument 'count': True is not of type 'integer'"),
        ({"direction": "north", "count": 0}, "argument 'count': 0 is less than the minimum of 1"),
        ({"direction": "north", "path": [{"x": 1}, {"x": "a"}]}, "argument 'path[1].x': 'a' is not of type 'number'"),
        ({"direction": "north", "maybe": "a"}, "argument 'maybe': 'a' is not integer or null"),
    ],
)
def test_a_message_names_the_argument_and_what_is_wanted(arguments: dict[str, Any], message: str) -> None:
    assert message in str(ArgumentCheck(SCHEMA)(arguments))


def test_valid_arguments_pass() -> None:
    assert ArgumentCheck(SCHEMA)({"direction": "north", "count": 2, "path": [{"x": 1.5}], "maybe": None}) is None


def test_messages_stay_short_whatever_is_sent() -> None:
    check = ArgumentCheck(SCHEMA)
    assert len(str(check({"direction": "x" * 100_000}))) < 1000
    assert len(str(check({str(number): 1 for number in range(1000)}))) < 2000


def test_arguments_nested_beyond_reason_are_refused_not_raised() -> None:
    check = ArgumentCheck(
        {"type": "object", "$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}}}}
        | {"properties": {"a": {"$ref": "#/$defs/n"}}}
    )
    value: list[Any] = []
    for _ in range(50_000):
        value = [value]
    assert check({"a": value}) == "the arguments are nested too deeply"
    while value:  # taken apart here: the interpreter would recurse
        value = value[0]


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "array"}, "type 'object'"),
        ({"type": "object", "properties": {"a": {"type": "strin"}}}, "properties.a"),
        ({"type": "object", "properties": {"a": {"$ref": "#/$defs/none"}}}, "does not lead"),
        ({"type": "object", "properties": {"a": {"$ref": "https://example.org/a"}}}, "does not lead"),
        ({"type": "object", "properties": {"a": {"type": "string", "pattern": "("}}}, "regex"),
    ],
)
def test_a_bad_schema_is_refused_when_the_tool_is_made(schema: dict[str, Any], words: str) -> None:
    with pytest.raises(ToolSchemaError, match=words):
        ArgumentCheck(schema)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats() | st.sampled_from(["", "a", "b", "north"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=6,
)
SCHEMAS = st.recursive(
    st.sampled_from(
        [
            True,
            {},
            {"type": "string"},
            {"type": "integer"},
            {"type": "number"},
            {"type": "boolean"},
            {"type": "null"},
            {"type": "integer", "minimum": 0, "maximum": 2},
            {"type": "number", "minimum": -1},
            {"type": "string", "maxLength": 1},
            {"enum": ["a", "b"]},
            {"type": "integer", "enum": [1, 2]},
            {"enum": [1, "a", None]},
            {"enum": [True, 0]},
            {"const": 1},
            {"type": ["integer", "null"]},
        ]
    ),
    lambda inner: st.one_of(
        st.builds(lambda item: {"type": "array", "items": item, "maxItems": 2}, inner),
        st.builds(lambda a, b: {"anyOf": [a, b]}, inner, inner),
        st.builds(
            lambda a, b, extra, required: {
                "type": "object",
                "properties": {"a": a, "b": b},
                "required": required,
                "additionalProperties": extra,
            },
            inner,
            inner,
            st.booleans() | inner,
            st.lists(st.sampled_from("ab"), unique=True),
        ),
    ),
    max_leaves=5,
)


@given(SCHEMAS, VALUES)
def test_the_fast_check_never_accepts_what_the_full_one_refuses(schema: Any, value: Any) -> None:
    check = fast_check(schema)
    if check is not None and check(value):
        assert jsonschema.Draft202012Validator(schema).is_valid(value)


NAMES = sorted({*set().union(*KEYWORDS.values()), "title", "description", "default", "anyOf", "pattern", "$ref"})
PARTS = st.one_of(
    SCHEMAS,
    VALUES,
    st.sampled_from([*KEYWORDS, "strng", -1, 1.5, True, [], {}]),
    st.lists(st.sampled_from(["a", "b", 1])),
    st.lists(SCHEMAS),
    st.dictionaries(st.sampled_from("ab"), SCHEMAS | VALUES),
)


@given(SCHEMAS | st.dictionaries(st.sampled_from(NAMES), PARTS, max_size=3))
def test_a_schema_of_common_keywords_is_well_formed(schema: Any) -> None:
    if is_common_schema(schema):
        jsonschema.Draft202012Validator.check_schema(schema)


@given(st.dictionaries(st.sampled_from(["direction", "count", "path", "maybe", "x"]), VALUES))
def test_an_argument_check_agrees_with_jsonschema_and_never_raises(arguments: dict[str, Any]) -> None:
    problem = ArgumentCheck(SCHEMA)(arguments)
    assert (problem is None) == jsonschema.Draft202012Validator(SCHEMA).is_valid(arguments)

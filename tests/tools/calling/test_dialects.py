"""Schemas of older drafts, and patterns as JavaScript writes them."""

from __future__ import annotations

from typing import Any

import pytest

from agentgym.errors import ToolSchemaError
from agentgym.tools.calling.validation import ArgumentCheck

SCHEMAS = "http://json-schema.org/draft-{}/schema#"
TUPLE = {"type": "array", "items": [{"type": "string"}, {"type": "integer"}], "additionalItems": False}
ABOVE = {"type": "number", "minimum": 0, "exclusiveMinimum": True}


def faults(part: dict[str, Any], *values: Any, dialect: str | None = None) -> list[bool]:
    """Returns for each value whether a property with the schema `part` refuses it."""
    schema = {"type": "object", "properties": {"x": part}, **({"$schema": dialect} if dialect else {})}
    check = ArgumentCheck(schema)
    return [check({"x": value}) is not None for value in values]


@pytest.mark.parametrize(
    ("dialect", "part", "good", "bad"),
    [
        (SCHEMAS.format("04"), ABOVE, 0.5, 0),
        (SCHEMAS.format("06"), {"exclusiveMinimum": 0}, 0.5, 0),
        (SCHEMAS.format("07"), TUPLE, ["a", 1], ["a", 1, 2]),
        (SCHEMAS.format("07").replace("http:", "https:").rstrip("#"), TUPLE, ["a", 1], [1, "a"]),
        ("https://json-schema.org/draft/2019-09/schema", TUPLE, ["a", 1], ["a", 1, 2]),
        ("https://json-schema.org/draft/2020-12/schema", {"prefixItems": [{"type": "string"}]}, ["a"], [1]),
        (None, ABOVE, 0.5, 0),
        (None, TUPLE, ["a", 1], [1, "a"]),
        ("https://example.com/own", TUPLE, ["a", 1], [1, "a"]),
    ],
)
def test_a_schema_has_its_own_dialect(dialect: str | None, part: dict[str, Any], good: object, bad: object) -> None:
    assert faults(part, good, bad, dialect=dialect) == [False, True]


def test_a_keyword_that_the_named_dialect_lacks_is_refused() -> None:
    with pytest.raises(ToolSchemaError, match=r"of the dialect 2020-12 at .*exclusiveMinimum: True"):
        faults(ABOVE, dialect="https://json-schema.org/draft/2020-12/schema")
    with pytest.raises(ToolSchemaError, match=r"of the dialect draft-07 at .*exclusiveMinimum: True"):
        faults(ABOVE, dialect=SCHEMAS.format("07"))


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        (r"^(?<year>\d{4})-\p{L}+$", "2024-é", "2024-1"),
        (r"^(?<sign>['\"]).*\k<sign>$", "'a'", "'a\""),
        (r"^[^]{2}$", "\n\n", "\n"),
        ("^\\u{1F600}\\u0041$", "😀A", "😀a"),
        (r"^\P{Lu}+$", "abc", "aBc"),
        (r"(?<=a+)b", "aab", "b"),
        (r"^[\w-.]+\/\\k<$", r"a-b./\k<", "a"),
    ],
)
def test_a_pattern_of_javascript_is_matched(pattern: str, good: str, bad: str) -> None:
    assert faults({"type": "string", "pattern": pattern}, good, bad, 3) == [False, True, True]
    closed = {"type": "object", "patternProperties": {pattern: {"type": "integer"}}, "additionalProperties": False}
    assert faults(closed, {good: 1}, {good: "1"}, {bad: 1}) == [False, True, True]


@pytest.mark.parametrize(
    "part", [{"type": "string", "pattern": "^(a|aa)+$"}, {"type": "object", "patternProperties": {"^(a|aa)+$": {}}}]
)
def test_a_pattern_that_takes_too_long_refuses_the_argument_by_the_pattern_s_name(part: dict[str, Any]) -> None:
    text = "a" * 60 + "!"
    problem = ArgumentCheck({"type": "object", "properties": {"x": part}})(
        {"x": text if part["type"] == "string" else {text: 1}}
    )
    assert problem == f"'{text}' cannot be compared with '^(a|aa)+$' in 0.2 s"


def test_a_reference_to_the_root_keeps_its_dialect_and_patterns() -> None:
    names = {"type": "string", "pattern": r"^\p{L}$"}
    schema = {"$schema": SCHEMAS.format("07"), "type": "object", "properties": {"x": {"$ref": "#"}, "name": names}}
    assert ArgumentCheck(schema)({"x": {"x": {"name": "é"}}}) is None
    assert "argument 'x.x.name': '1' does not match" in str(ArgumentCheck(schema)({"x": {"x": {"name": "1"}}}))


def test_a_reference_leads_through_lists_and_encoded_names() -> None:
    schema = {
        "type": "object",
        "properties": {"x": {"$ref": "#/properties/y%20z/anyOf/1"}, "y z": {"anyOf": [{}, {"type": "string"}]}},
    }
    assert ArgumentCheck(schema)({"x": "a"}) is None and "'string'" in str(ArgumentCheck(schema)({"x": 1}))
    with pytest.raises(ToolSchemaError, match="does not lead"):
        ArgumentCheck({**schema, "properties": {"x": {"$ref": "#/properties/y/anyOf/2"}, "y": {"anyOf": [{}, {}]}}})


def test_a_schema_that_is_nested_beyond_reason_is_refused() -> None:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(2000):
        schema = {"type": "array", "items": schema}
    with pytest.raises(ToolSchemaError, match="nested too deeply"):
        faults(schema)


@pytest.mark.parametrize(
    "pattern", ["(?:(?:a{1000}){1000}){1000}", "a{1000000}", "(b|a{9}){99999999}", "([{]{99}x){9999}"]
)
def test_a_pattern_that_would_fill_the_memory_when_it_is_read_is_refused(pattern: str) -> None:
    with pytest.raises(ToolSchemaError, match=r"is not a 'regex' .*repeats more than 100,000 parts"):
        faults({"type": "string", "pattern": pattern})
    assert faults({"type": "string", "pattern": r"^([0-9a-f]{1,4}:){7}[0-9a-f{99999}]\{9999999}$"}, "a") == [True]


def test_unevaluated_properties_with_patterns_are_refused_as_unbounded() -> None:
    with pytest.raises(ToolSchemaError, match="unevaluatedProperties beside patternProperties"):
        faults({"type": "object", "patternProperties": {"(a+)+$": {}}, "unevaluatedProperties": False})

"""Bare argument texts are read by the tool's schema; what does not fit stays the text that the model wrote."""

from __future__ import annotations

import json

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentgym.chat_templates.formats.schema_types import KINDS, read_bare, tool_named, typed_value
from agentgym.types import JSON, ToolSpec

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def tool(schema: JSON, **root: JSON) -> ToolSpec:
    return ToolSpec("go", "", {"type": "object", "properties": {"x": schema}, **root})


def read(text: str, schema: JSON, **root: JSON) -> JSON:
    return typed_value(text, "x", tool(schema, **root))


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("5", "string", "5"),
        (" padded ", "string", " padded "),
        ("null", "string", "null"),
        ("42", "integer", 42),
        (" -7\n", "integer", -7),
        ("+3", "integer", 3),
        ("3.0", "integer", 3),
        ("3.14", "number", 3.14),
        ("1e3", "number", 1000.0),
        ("5", "number", 5),
        ("true", "boolean", True),
        ("False", "boolean", False),
        ("null", "null", None),
        ("None", "null", None),
        ('["a", 1]', "array", ["a", 1]),
        ("['it\\'s', \"b\", True, None]", "array", ["it's", "b", True, None]),
        ('{"a": {"b": [1]}}', "object", {"a": {"b": [1]}}),
        ("{'say': '\"hi\"'}", "object", {"say": '"hi"'}),
    ],
)
def test_a_text_is_read_as_its_type(text: str, kind: str, value: JSON) -> None:
    got = read(text, {"type": kind})
    assert got == value
    assert type(got) is type(value)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("five", "integer"),
        ("3.5", "integer"),
        ("9" * 5000, "integer"),
        ("nan", "number"),
        ("Infinity", "number"),
        ("1e999", "number"),
        ("yes", "boolean"),
        ("1", "boolean"),
        ("nothing", "null"),
        ("[1, 2", "array"),
        ('{"a": 1}', "array"),
        ("[1]", "object"),
        ("{open: 1}", "object"),
        ("{'a': '\\x41'}", "object"),
        ("[" * 100_000 + "]" * 100_000, "array"),
    ],
)
def test_a_text_that_does_not_fit_stays_as_it_is(text: str, kind: str) -> None:
    assert read(text, {"type": kind}) == text


def exactly(value: JSON, expected: JSON) -> bool:
    return type(value) is type(expected) and value == expected


OPEN: JSON = {}
IDENTIFIERS = ["00501", "+4930123", "1.", ".5", "1_000", "0x1F", "TRUE", "True", "None", "NULL", "nan", "1e999", "٣"]


@pytest.mark.parametrize("text", [*IDENTIFIERS, "{'a': True}", "[01]", '"quoted"'])
@pytest.mark.parametrize(
    "schema",
    [
        OPEN,
        {"description": "free form"},
        {"type": ["integer", "string"]},
        {"anyOf": [{"type": "number"}, {"type": "string"}]},
        {"oneOf": [{"type": "boolean"}, {"$ref": "#/$defs/Text"}]},
        {"anyOf": [{"type": "integer"}, {}]},
        {"type": ["object", "array", "boolean", "string"]},
        {"enum": [501, "a"]},
    ],
    ids=str,
)
def test_a_text_that_is_no_value_in_json_stays_a_text_where_a_text_is_allowed(text: str, schema: JSON) -> None:
    assert exactly(read(text, schema, **{"$defs": {"Text": {"type": "string"}}}), text)


@pytest.mark.parametrize("text", IDENTIFIERS)
def test_a_text_without_a_schema_is_read_likewise(text: str) -> None:
    assert exactly(read_bare(text), text)
    assert exactly(typed_value(text, "undeclared", tool(OPEN), bare_json=True), text)


@pytest.mark.parametrize(
    ("text", "value"),
    [("12", 12), ("-7", -7), ("1.5", 1.5), ("1.0", 1.0), ("true", True), ("null", None), ('{"a": [1]}', {"a": [1]})],
)
def test_a_value_in_jsons_own_spelling_is_that_value_where_any_is_allowed(text: str, value: JSON) -> None:
    for schema in (OPEN, {"type": [*KINDS]}, {"anyOf": [{"type": kind} for kind in KINDS]}):
        assert exactly(read(text, schema), value)


@pytest.mark.parametrize(("text", "value"), [("007", 7), ("+49", 49), ("3.0", 3), ("1e3", 1000), ("1.5e1", 15)])
def test_an_integer_may_be_spelled_otherwise_where_no_text_is_allowed(text: str, value: JSON) -> None:
    for schema in ({"type": "integer"}, {"type": ["integer", "null"]}, {"enum": [value, None]}):
        assert exactly(read(text, schema), value)


@pytest.mark.parametrize("schema", [{"type": "integer"}, {"type": "number"}, {"type": ["integer", "null"]}, OPEN])
def test_an_integer_is_read_by_its_digits_and_never_through_a_float(schema: JSON) -> None:
    for digits in ("9007199254740993", "-9007199254740993", "12345678901234567890123"):
        assert exactly(read(digits, schema), int(digits))
        assert exactly(read(f"{digits}.0", schema), int(digits))


def test_a_boolean_is_none_of_the_numbers_that_a_schema_lists() -> None:
    for text in ("true", "True", "false"):
        assert read(text, {"enum": [0, 1]}) == text
        assert read(text, {"const": 1}) == text
    assert exactly(read("true", {"enum": [1, True]}), True)
    assert exactly(read("1.0", {"enum": [1, 2]}), 1)


def test_keywords_of_one_schema_hold_together() -> None:
    optional = {"anyOf": [{"type": "string"}, {"type": "null"}]}
    assert read("null", {"type": "string", **optional}) == "null"
    assert read("null", optional) is None and read("None", optional) is None
    assert read("5", {"allOf": [{"type": ["integer", "string"]}, {"type": "string"}]}) == "5"
    assert exactly(read("5", {"type": "number", "anyOf": [{"type": "integer"}, {"type": "null"}]}), 5)
    assert read("5", {"type": "string", "allOf": [{"type": "integer"}]}) == "5"
    assert exactly(read("2", {"anyOf": [{"enum": [1, 2]}, {"type": "string"}]}), 2)
    assert read("3", {"anyOf": [{"enum": [1, 2]}, {"type": "string"}]}) == "3"
    assert exactly(read("3", {"anyOf": [{"enum": [1, 2]}, {"type": "integer"}]}), 3)


def test_of_several_types_the_most_particular_one_counts() -> None:
    nullable_text = {"anyOf": [{"type": "string"}, {"type": "null"}]}
    assert read("null", nullable_text) is None
    assert read("hello", nullable_text) == "hello"
    assert read("5", nullable_text) == "5"
    assert read("42", {"type": ["string", "integer"]}) == 42
    assert read("1abc", {"type": ["string", "integer"]}) == "1abc"
    assert read('{"a": 1}', {"oneOf": [{"type": "string"}, {"type": "object"}]}) == {"a": 1}
    assert read("plain", {"type": ["string", "object"]}) == "plain"
    assert read("null", {"type": "integer", "nullable": True}) is None


def test_enumerated_values_are_read_as_they_are_listed() -> None:
    assert read("celsius", {"enum": ["celsius", "kelvin"]}) == "celsius"
    assert read("2", {"enum": [1, 2]}) == 2
    assert read("2", {"enum": ["1", "2"]}) == "2"
    assert read("2", {"enum": [2, "2"]}) == "2"
    assert read("null", {"enum": ["a", None]}) is None
    assert read("3", {"const": 3}) == 3
    assert read("4", {"const": 3}) == "4"
    assert read("rankine", {"enum": ["celsius", "kelvin"]}) == "rankine"


def test_references_are_followed_and_circles_end() -> None:
    definitions: JSON = {
        "Count": {"type": "integer"},
        "Alias": {"$ref": "#/$defs/Count"},
        "a/b": {"type": "boolean"},
        "Circle": {"$ref": "#/$defs/Circle"},
        "Tree": {"anyOf": [{"$ref": "#/$defs/Tree"}, {"$ref": "#/$defs/Count"}]},
    }
    assert read("7", {"$ref": "#/$defs/Alias"}, **{"$defs": definitions}) == 7
    assert read("7", {"allOf": [{"$ref": "#/$defs/Count"}], "description": "how many"}, **{"$defs": definitions}) == 7
    assert read("true", {"$ref": "#/$defs/a~1b"}, **{"$defs": definitions}) is True
    for lost in ("Circle", "Tree", "Missing"):
        assert read("x", {"$ref": f"#/$defs/{lost}"}, **{"$defs": definitions}) == "x"
    assert read("x", {"$ref": "https://example.org/schema"}) == "x"


def test_a_type_may_follow_from_the_keywords_and_have_pythons_name() -> None:
    assert read('{"a": 1}', {"properties": {"a": {}}}) == {"a": 1}
    assert read("[1]", {"items": {"type": "integer"}}) == [1]
    assert read("[1]", {"type": "list"}) == [1]
    assert read("2.5", {"type": "float"}) == 2.5


def test_an_argument_is_found_in_composed_objects() -> None:
    whole = ToolSpec("go", "", {"oneOf": [{"properties": {"x": {"type": "integer"}}}, {"additionalProperties": False}]})
    assert typed_value("1", "x", whole) == 1
    rest = ToolSpec("go", "", {"type": "object", "additionalProperties": {"type": "integer"}})
    assert typed_value("1", "anything", rest) == 1


def test_without_a_schema_a_text_is_text_or_bare_json() -> None:
    assert typed_value("1", "x", None) == "1"
    assert typed_value("1", "y", tool({"type": "integer"})) == "1"
    assert typed_value("1", "x", None, bare_json=True) == 1
    assert typed_value("1", "x", tool({})) == 1
    assert read_bare("true") is True
    assert read_bare('"quoted"') == '"quoted"'
    assert read_bare(" plain ") == " plain "


def test_a_tool_is_found_by_its_name() -> None:
    tools = [ToolSpec("a", "", {}), ToolSpec("b", "", {})]
    assert tool_named("b", tools) is tools[1]
    assert tool_named("c", tools) is None


@given(value=JSON_VALUES)
def test_what_json_writes_is_read_back_by_the_type_of_the_value(value: JSON) -> None:
    kind = {type(None): "null", bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
    name = kind.get(type(value), "object")
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    assert read(text, {"type": name}) == value
    assert read(text, {"anyOf": [{"type": name}, {"type": "null"}]}) == (None if text in ("null", "None") else value)


@given(text=st.text() | st.from_regex(r"[\[\]{}'\"\\,:0-9a-z]{0,20}"), schema=JSON_VALUES, root=JSON_VALUES)
def test_a_text_is_read_under_any_schema(text: str, schema: JSON, root: JSON) -> None:
    for value in (read(text, schema), read(text, schema, **{"$defs": root})):
        assert json.loads(json.dumps(value, allow_nan=False)) == value


@given(
    text=st.text() | JSON_VALUES.map(json.dumps),
    kinds=st.lists(st.sampled_from(["null", "boolean", "integer", "number", "object", "array"]), min_size=1),
)
def test_a_value_is_valid_or_the_text_itself(text: str, kinds: list[str]) -> None:
    value = read(text, {"type": kinds})
    assert value == text or jsonschema.Draft202012Validator({"type": kinds}).is_valid(value)

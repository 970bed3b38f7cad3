"""Schemas that follow from Python types, and values converted back to them."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NotRequired, TypedDict

import jsonschema
import pytest

from agentgym.errors import ToolSchemaError
from agentgym.tools import ToolRunner, as_tool, tool
from agentgym.tools.calling.schema import type_schema
from agentgym.types import ToolCall


class Way(enum.Enum):
    NORTH = "north"
    SOUTH = "south"


@dataclasses.dataclass
class Point:
    """A place on the map.

    Attributes:
        x: steps to the east
    """

    x: int
    y: int = 0


@dataclasses.dataclass
class Tree:
    value: int
    children: list[Tree] = dataclasses.field(default_factory=list)


class Options(TypedDict):
    fast: bool
    note: NotRequired[str]


@pytest.mark.parametrize(
    ("hint", "schema"),
    [
        (str, {"type": "string"}),
        (int, {"type": "integer"}),
        (float, {"type": "number"}),
        (bool, {"type": "boolean"}),
        (None, {"type": "null"}),
        (Any, {}),
        (list[int], {"type": "array", "items": {"type": "integer"}}),
        (Sequence[str], {"type": "array", "items": {"type": "string"}}),
        (set[str], {"type": "array", "items": {"type": "string"}, "uniqueItems": True}),
        (tuple[int, ...], {"type": "array", "items": {"type": "integer"}}),
        (dict[str, float], {"type": "object", "additionalProperties": {"type": "number"}}),
        (Literal["a", "b"], {"type": "string", "enum": ["a", "b"]}),
        (Literal[1, "b"], {"enum": [1, "b"]}),
        (Way, {"type": "string", "enum": ["north", "south"]}),
        (int | None, {"anyOf": [{"type": "integer"}, {"type": "null"}]}),
        (list[Way | None], {"type": "array", "items": {"anyOf": [type_schema(Way), {"type": "null"}]}}),
        (Annotated[int, "how many", {"minimum": 1}], {"type": "integer", "description": "how many", "minimum": 1}),
    ],
)
def test_a_type_gives_its_schema(hint: object, schema: dict[str, object]) -> None:
    assert type_schema(hint) == schema


def test_a_fixed_tuple_keeps_every_place() -> None:
    schema = type_schema(tuple[int, str])
    assert jsonschema.Draft202012Validator(schema).is_valid([1, "a"])
    assert not jsonschema.Draft202012Validator(schema).is_valid([1])
    assert not jsonschema.Draft202012Validator(schema).is_valid(["a", 1])


def test_nested_classes_keep_their_fields_defaults_and_descriptions() -> None:
    assert type_schema(Point) == {
        "type": "object",
        "properties": {
            "x": {"type": "integer", "description": "steps to the east"},
            "y": {"type": "integer", "default": 0},
        },
        "required": ["x"],
        "additionalProperties": False,
    }
    assert type_schema(Options)["required"] == ["fast"]
    assert type_schema(list[Options])["items"]["properties"]["note"] == {"type": "string"}


def test_a_class_that_contains_itself_is_a_definition() -> None:
    schema = type_schema(Tree)
    check = jsonschema.Draft202012Validator(schema)
    assert check.is_valid({"value": 1, "children": [{"value": 2, "children": []}]})
    assert not check.is_valid({"value": 1, "children": [{"value": "2"}]})


@tool
def plan(
    way: Way,
    place: Point | None = None,
    tags: set[str] | None = None,
    mode: Literal["walk", "run"] = "walk",
    steps: int = 1,
    tree: Tree | None = None,
) -> str:
    """Plans a walk
    over two lines.

    Args:
        way: where to go,
            also far
        place (Point): the start
        mode: how

    Returns:
        the plan
    """
    return f"{way!r} {place!r} {sorted(tags or [])} {mode} {steps!r} {tree!r}"


def test_a_function_keeps_everything() -> None:
    spec = as_tool(plan).spec
    properties: Any = spec.parameters["properties"]
    assert spec.name == "plan"
    assert spec.description == "Plans a walk over two lines."
    assert spec.parameters["required"] == ["way"]
    assert properties["way"] == {"type": "string", "enum": ["north", "south"], "description": "where to go, also far"}
    assert properties["place"]["default"] is None
    assert properties["place"]["description"] == "the start"
    assert properties["place"]["anyOf"][0] == type_schema(Point)
    assert properties["mode"] == {"type": "string", "enum": ["walk", "run"], "default": "walk", "description": "how"}


def test_arguments_reach_the_function_as_its_types() -> None:
    call = {
        "way": "south",
        "place": {"x": 1.0},
        "tags": ["b", "a"],
        "steps": 2.0,
        "tree": {"value": 1, "children": [{"value": 2}]},
    }
    (result,) = ToolRunner([plan], inline=True).run_directly([ToolCall("a", "plan", call)])
    wanted = f"{Way.SOUTH!r} {Point(1)!r} ['a', 'b'] walk 2 {Tree(1, [Tree(2)])!r}"
    assert (result.content, result.error) == (wanted, None)


def test_numpy_and_sphinx_docstrings_describe_arguments_too() -> None:
    @tool
    def first(a: int, b: int) -> int:
        """Adds.

        Parameters
        ----------
        a : int
            the one
        b : int
            the other
        """
        return a + b

    @tool
    def second(a: int) -> int:
        """Doubles.

        :param int a: the one
        """
        return 2 * a

    properties: Any = as_tool(first).spec.parameters["properties"]
    assert (properties["a"]["description"], properties["b"]["description"]) == ("the one", "the other")
    assert as_tool(second).spec.description == "Doubles."
    properties = as_tool(second).spec.parameters["properties"]
    assert properties["a"]["description"] == "the one"


def test_a_google_docstring_is_read_whatever_its_types_and_its_other_entries() -> None:
    @tool
    def third(a: int, b: int, c: int) -> int:
        """Adds three.

        Args:
            a (`int`, *optional*, defaults to `int()`): the one,
                or none
            b (:class:`int`): the other
            an entry without a colon
            c: the third

        Returns:
            c: no argument
        """
        return a + b + c

    properties: Any = as_tool(third).spec.parameters["properties"]
    described = [properties[name]["description"] for name in "abc"]
    assert described == ["the one, or none", "the other an entry without a colon", "the third"]


def test_a_class_known_only_where_the_tool_is_written_is_found() -> None:
    @dataclasses.dataclass
    class Local:
        size: int

    @tool
    def measure(thing: Local) -> int:
        """Measures."""
        return thing.size

    (result,) = ToolRunner([measure], inline=True).run_directly([ToolCall("a", "measure", {"thing": {"size": 3}})])
    assert result.content == "3"


def test_functions_without_a_schema_are_refused_with_the_parameter_named() -> None:
    def untyped(a) -> str:  # type: ignore[no-untyped-def]
        return str(a)

    def many(*values: int) -> str:
        return str(values)

    def odd(a: complex) -> str:
        return str(a)

    def keys(a: dict[int, str]) -> str:
        return str(a)

    for function, words in ((untyped, "'a' has no type"), (many, "by name"), (odd, "complex"), (keys, "str keys")):
        with pytest.raises(ToolSchemaError, match=words):
            tool(function)


def test_an_untyped_parameter_is_named_with_its_class_file_and_line() -> None:
    with pytest.raises(ToolSchemaError) as caught:

        class Lock:
            @tool
            def go(self, direction):  # type: ignore[no-untyped-def]
                """Goes."""

    line = test_an_untyped_parameter_is_named_with_its_class_file_and_line.__code__.co_firstlineno + 4
    name = "test_an_untyped_parameter_is_named_with_its_class_file_and_line.<locals>.Lock.go"
    told = f"tool 'go' ({name} in {__file__}, line {line}): parameter 'direction' has no type annotation"
    assert str(caught.value).startswith(told)


def test_a_method_whose_object_is_not_named_self_is_refused_with_that_name() -> None:
    with pytest.raises(ToolSchemaError, match=r"parameter 'lock' has no type.*the parameter `self`, by this name"):

        class Lock:
            @tool
            def go(lock, direction: str) -> None:
                """Goes."""

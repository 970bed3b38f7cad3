"""Schemas that follow from Python types, and values converted back to them."""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import functools
from collections.abc import Callable, MutableMapping, Sequence
from typing import Annotated, Any, Literal, NotRequired, TypedDict, TypeVar

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
    expected = f"{Way.SOUTH!r} {Point(1)!r} ['a', 'b'] walk 2 {Tree(1, [Tree(2)])!r}"
    assert (result.content, result.error) == (expected, None)


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


FORMS = {
    "keyword": """Finds.

    Args:
        query: what to find
    Keyword Args:
        limit: how many,
            at most
    """,
    "keyword arguments": """Finds.

    Arguments:
        query: what to find

    Keyword Arguments:
        limit (int): how many, at most
    """,
    "dashes": """Finds.

    Args:
        - query: what to find
        - limit (int, optional): how many,
          at most
    """,
    "stars": """Finds.

    Args:
        * `query` (str): what to find
        * **limit**: how many, at most

    Returns:
        query: no argument
    """,
    "bullets that are not indented": """Finds.

    Args:
    - query: what to find
    Keyword Args:
    - limit: how many, at most
    Returns:
    - query: no argument
    """,
    "other parameters": """Finds.

    Parameters
    ----------
    query : str
        what to find

    Other Parameters
    ----------------
    limit : int
        how many, at most
    """,
    "sphinx": """Finds.

    :arg query: what to find
    :type query: str
    :keyword limit: how many, at most
    """,
}


@pytest.mark.parametrize("form", FORMS)
def test_every_usual_form_describes_the_arguments(form: str) -> None:
    def find(query: str, limit: int = 3) -> str:
        return query * limit

    find.__doc__ = FORMS[form]
    spec = as_tool(find).spec
    properties: Any = spec.parameters["properties"]
    descriptions = {name: part["description"] for name, part in properties.items()}
    assert descriptions == {"query": "what to find", "limit": "how many, at most"}
    assert spec.description == "Finds."


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
    message = f"tool 'go' ({name} in {__file__}, line {line}): parameter 'direction' has no type annotation"
    assert str(caught.value).startswith(message)


def test_a_method_whose_object_is_not_named_self_is_refused_with_that_name() -> None:
    with pytest.raises(ToolSchemaError, match=r"parameter 'lock' has no type.*the parameter `self`, by this name"):

        class Lock:
            @tool
            def go(lock, direction: str) -> None:
                """Goes."""


def node_class(value: type) -> type:
    @dataclasses.dataclass
    class Node:
        value: Any
        kids: list[Node] = dataclasses.field(default_factory=list)

    Node.__annotations__ = {"value": value, "kids": list[Node]}
    return Node


def test_two_classes_of_one_name_have_two_schemas() -> None:
    first, second = node_class(int), node_class(str)
    schema = type_schema(tuple[first, second, first])  # type: ignore[valid-type]
    check = jsonschema.Draft202012Validator(schema)
    numbers, texts = {"value": 1, "kids": [{"value": 2}]}, {"value": "a", "kids": [{"value": "b"}]}
    assert check.is_valid([numbers, texts, numbers])
    assert not check.is_valid([texts, texts, numbers]) and not check.is_valid([numbers, numbers, numbers])
    assert list(schema["$defs"]) == ["Node", "Node_2"]


class Named(TypedDict):
    name: str


class Placed(TypedDict):
    point: Point
    ways: NotRequired[list[Way]]


T = TypeVar("T", bound=Point)


@pytest.mark.parametrize(
    ("hint", "value", "converted"),
    [
        (Annotated[Point, "where"] | None, None, None),
        (Annotated[Point, "where"] | None, {"x": 1}, Point(1)),
        (Annotated[Way, "where"] | None, None, None),
        (Annotated[Way, "where"] | None, "south", Way.SOUTH),
        (Annotated[list[Point], "where"] | None, None, None),
        (Annotated[list[Point], "where"] | None, [{"x": 1}], [Point(1)]),
        (Annotated[set[str], "which"] | None, None, None),
        (Annotated[Way | Point, "one"] | None, "north", Way.NORTH),
        (Literal["all"] | Point, {"x": 1}, Point(1)),
        (Literal["all"] | Point, "all", "all"),
        (Literal["none"] | Way, "north", Way.NORTH),
        (Literal[Way.SOUTH] | int, "south", Way.SOUTH),
        (Named | Point, {"x": 1}, Point(1)),
        (Named | Point, {"name": "a"}, {"name": "a"}),
        (Any | Point, {"x": 1}, Point(1)),
        (Annotated[Any, "all"] | Point, {"x": "no number"}, {"x": "no number"}),
        (list[str] | list[Point], [{"x": 1}], [Point(1)]),
        (list[str] | list[Point], ["a"], ["a"]),
        (list[Way] | tuple[int, Point], [1, {"x": 1}], (1, Point(1))),
        (dict[str, int] | dict[str, Point], {"a": {"x": 1}}, {"a": Point(1)}),
        (list[Literal["all"] | Point | None], ["all", {"x": 1}, None], ["all", Point(1), None]),
        (Tree | Point, {"value": 1, "children": [{"value": 2.0}]}, Tree(1, [Tree(2)])),
        (Placed | None, {"point": {"x": 1}, "ways": ["north"]}, {"point": Point(1), "ways": [Way.NORTH]}),
        (int | float, 7.5, 7.5),
        (bool | int, True, True),
        (T, {"x": 1}, Point(1)),
        (MutableMapping[str, Point], {"a": {"x": 1}}, {"a": Point(1)}),
    ],
)
def test_a_value_becomes_the_member_of_a_union_that_it_fits(hint: object, value: object, converted: object) -> None:
    seen: list[object] = []

    def take(p: Any) -> None:
        seen.append(p)

    take.__annotations__["p"] = hint
    (result,) = ToolRunner([take], inline=True).run_directly([ToolCall("a", "take", {"p": value})])  # type: ignore[dict-item]
    assert (result.error, result.content) == (None, "done")
    assert seen == [converted] and type(seen[0]) is type(converted)


class Search:
    """Finds texts."""

    def __call__(self, query: str, limit: int = 1) -> str:
        return query * limit

    def by_word(self, query: str, limit: int = 1) -> str:
        """Finds words."""
        return query * limit

    @staticmethod
    def by_key(query: str, limit: int = 1) -> str:
        """Finds keys."""
        return query * limit

    @classmethod
    def by_class(cls, query: str, limit: int = 1) -> str:
        """Finds classes."""
        return query * limit


class AsyncSearch:
    async def __call__(self, query: str, limit: int = 1) -> str:
        """Finds later."""
        return query * limit


@functools.cache
def kept(query: str, limit: int = 1) -> str:
    """Finds once."""
    return query * limit


@pytest.mark.parametrize(
    ("function", "name", "description"),
    [
        (Search(), "Search", "Finds texts."),
        (AsyncSearch(), "AsyncSearch", "Finds later."),
        (Search().by_word, "by_word", "Finds words."),
        (Search.by_key, "by_key", "Finds keys."),
        (Search().by_key, "by_key", "Finds keys."),
        (Search.by_class, "by_class", "Finds classes."),
        (kept, "kept", "Finds once."),
    ],
)
@pytest.mark.parametrize("bound", ["nothing", "keyword", "twice", "dressed"])
def test_a_callable_is_a_tool_with_its_name(
    function: Callable[..., object], name: str, description: str, bound: str
) -> None:
    if bound != "nothing":
        function = functools.partial(function, limit=2)
    if bound == "twice":
        function = functools.partial(function, limit=3)
    if bound == "dressed" and hasattr(inner := getattr(function, "func", None), "__name__"):
        function = functools.update_wrapper(function, inner)  # type: ignore[arg-type]
    tool = as_tool(function)
    parameters = ["query", "limit"] if bound == "nothing" else ["query"]
    assert (tool.name, tool.spec.description, list(tool.spec.parameters["properties"])) == (
        name,
        description,
        parameters,
    )
    (result,) = asyncio.run(ToolRunner([tool]).run([ToolCall("a", name, {"query": "ab"})]))
    assert result.content == "ab" * {"nothing": 1, "twice": 3}.get(bound, 2)


def test_a_wrapper_around_a_tool_is_called_as_the_tool() -> None:
    @tool(timeout_s=5)
    def shout(text: str) -> str:
        """Shouts."""
        return text.upper()

    @functools.wraps(shout)
    def twice(*args: Any, **keywords: Any) -> str:
        return 2 * shout(*args, **keywords)

    twice_tool = as_tool(twice)
    assert (twice_tool.name, twice_tool.timeout_s) == ("shout", 5)
    (result,) = ToolRunner([twice_tool], inline=True).run_directly([ToolCall("a", "shout", {"text": "ab"})])
    assert result.content == "ABAB"


def test_a_mark_may_be_on_either_side_of_a_staticmethod_or_classmethod() -> None:
    class Kit:
        @tool
        @staticmethod
        def first(a: int) -> str:
            """Firsts."""
            return f"first {a}"

        @classmethod
        @tool
        def second(cls, a: int) -> str:
            """Seconds."""
            return f"{cls.__name__} {a}"

        @tool
        @classmethod
        def third(cls, a: int) -> str:
            """Thirds."""
            return f"{cls.__name__} {a}"

    runner = ToolRunner([Kit.first, Kit.second, Kit().third], inline=True)
    calls = [ToolCall(name, name, {"a": 1}) for name in ("first", "second", "third")]
    assert [result.content for result in runner.run_directly(calls)] == ["first 1", "Kit 1", "Kit 1"]


@pytest.mark.parametrize("function", [max, print, functools.partial(max), str.upper, str.__len__, dict.get])
def test_a_callable_without_named_parameters_is_refused_with_its_name(function: Callable[..., object]) -> None:
    name = getattr(function, "__name__", "max")
    with pytest.raises(ToolSchemaError, match=f"tool '{name}': "):
        as_tool(function)

"""What pydantic's Field, annotated_types and msgspec-like objects say about a parameter."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Annotated, Any

import annotated_types
import pytest
from pydantic import AfterValidator, Field, PositiveInt, StringConstraints

from agentgym.errors import ToolSchemaError
from agentgym.tools import ToolRunner, as_tool, tool
from agentgym.types import ToolCall, ToolResult


@dataclasses.dataclass
class Area:
    width: int = Field(default=3, ge=1)
    names: list[str] = Field(default_factory=list, max_length=1)  # noqa: RUF009  # as pydantic's users write it


def town(name: str = Field(default="Berlin", description="where", examples=["Oslo"], title="Town")) -> str:
    return name


def numbers(
    share: float = Field(gt=0, lt=1, multiple_of=0.25),
    count: Annotated[int | None, Field(ge=2, le=4, default=None)] = Field(description="how many"),
    whole: PositiveInt = 1,
) -> str:
    return f"{share} {count} {whole}"


def texts(
    code: Annotated[str, StringConstraints(min_length=2, pattern=re.compile("^a"))] = "ab",
    parts: list[Annotated[str, annotated_types.Len(1, 2)]] = Field(default_factory=list, max_length=2),  # noqa: B008
    extra: dict[str, int] = Field(default={}, min_length=0, json_schema_extra={"x-order": 1}),  # noqa: B008
) -> str:
    parts.append("end")
    extra["calls"] = extra.get("calls", 0) + 1
    return f"{code} {parts} {extra}"


def area(place: Area, margin: Annotated[int, Field(default=7)], gap: Annotated[int, Field(default=7)] = 8) -> str:
    return f"{place} {margin} {gap}"


def ask(function: Callable[..., object], arguments: dict[str, Any]) -> ToolResult:
    call = ToolCall("c", function.__name__, arguments)
    (result,) = ToolRunner([function], inline=True).run_directly([call])
    return result


@pytest.mark.parametrize(
    ("function", "properties", "required"),
    [
        (
            town,
            {
                "name": {
                    "type": "string",
                    "title": "Town",
                    "description": "where",
                    "examples": ["Oslo"],
                    "default": "Berlin",
                }
            },
            [],
        ),
        (
            numbers,
            {
                "share": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1, "multipleOf": 0.25},
                "count": {
                    "anyOf": [{"type": "integer"}, {"type": "null"}],
                    "minimum": 2,
                    "maximum": 4,
                    "description": "how many",
                    "default": None,
                },
                "whole": {"type": "integer", "exclusiveMinimum": 0, "default": 1},
            },
            ["share"],
        ),
        (
            texts,
            {
                "code": {"type": "string", "minLength": 2, "pattern": "^a", "default": "ab"},
                "parts": {
                    "type": "array",
                    "items": {"type": "string", "minLength": 1, "maxLength": 2},
                    "maxItems": 2,
                },
                "extra": {
                    "type": "object",
                    "additionalProperties": {"type": "integer"},
                    "minProperties": 0,
                    "x-order": 1,
                    "default": {},
                },
            },
            [],
        ),
    ],
)
def test_a_field_is_in_the_schema(
    function: Callable[..., object], properties: dict[str, Any], required: list[str]
) -> None:
    parameters = as_tool(function).spec.parameters
    assert (parameters["properties"], parameters["required"]) == (properties, required)


@pytest.mark.parametrize(
    ("function", "arguments", "content"),
    [
        (town, {}, "Berlin"),
        (town, {"name": "Oslo"}, "Oslo"),
        (numbers, {"share": 0.5}, "0.5 None 1"),
        (texts, {}, "ab ['end'] {'calls': 1}"),
        (texts, {}, "ab ['end'] {'calls': 1}"),  # a default is not shared by calls
        (area, {"place": {}}, "Area(width=3, names=[]) 7 8"),
        (area, {"place": {"width": 2, "names": ["a"]}, "margin": 1}, "Area(width=2, names=['a']) 1 8"),
    ],
)
def test_a_function_gets_the_default_of_a_field(
    function: Callable[..., object], arguments: dict[str, Any], content: str
) -> None:
    result = ask(function, arguments)
    assert (result.content, result.error) == (content, None)


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (numbers, {}),
        (numbers, {"share": 1}),
        (numbers, {"share": 0.3}),
        (numbers, {"share": 0.5, "count": 5}),
        (numbers, {"share": 0.5, "whole": 0}),
        (texts, {"code": "a"}),
        (texts, {"code": "ba"}),
        (texts, {"parts": ["abc"]}),
        (texts, {"parts": ["a", "b", "c"]}),
        (area, {"place": {"width": 0}}),
        (area, {"place": {"names": ["a", "b"]}}),
    ],
)
def test_arguments_are_held_to_a_field(function: Callable[..., object], arguments: dict[str, Any]) -> None:
    assert ask(function, arguments).error == "invalid_arguments"


def test_objects_with_the_same_attributes_are_read_and_methods_are_not() -> None:
    meta = SimpleNamespace(ge=1, description="msgspec's form", title=str.title, metadata=3)

    @tool
    def own(count: Annotated[int, meta], text: Annotated[str, SimpleNamespace(documentation="PEP 727")]) -> None:
        """Counts."""

    assert as_tool(own).spec.parameters["properties"] == {
        "count": {"type": "integer", "minimum": 1, "description": "msgspec's form"},
        "text": {"type": "string", "description": "PEP 727"},
    }


@dataclasses.dataclass
class Renamed:
    size: int = Field(alias="s")


OPTION = SimpleNamespace(default=1, default_factory=None)


@pytest.mark.parametrize(
    ("hint", "default", "words"),
    [
        (int, Field(alias="n"), "'x': alias and validation_alias of "),
        (int, Field(validation_alias="n"), "'x': validation_alias of "),
        (Renamed, None, "'x': 'size': alias and validation_alias of "),
        (list[Annotated[int, AfterValidator(abs)]], None, "'x': func of "),
        (Annotated[str, StringConstraints(to_lower=True)], None, "'x': to_lower of "),
        (Annotated[str, Field(pattern=re.compile("a", re.IGNORECASE))], None, "'x': flags of the pattern"),
        (int, Field(default_factory=lambda data: 1), "'x': default_factory_takes_validated_data of "),
        (int, Field(json_schema_extra=lambda schema: None), "'x': json_schema_extra of "),
        (int, OPTION, "'x': the default .* of types is not read; use pydantic's Field"),
    ],
)
def test_what_no_schema_can_hold_is_refused_with_its_place(hint: object, default: object, words: str) -> None:
    def shift(x: int) -> None:
        """Shifts."""

    shift.__annotations__["x"] = hint
    shift.__defaults__ = (default,) if default is not None else None
    with pytest.raises(ToolSchemaError, match=rf"tool 'shift' \(.*, line \d+\): parameter {words}"):
        as_tool(shift)


def test_no_tool_imports_pydantic() -> None:
    code = """
import sys
from agentgym.tools import tool
@tool
def add(a: int, b: int | None = None) -> int:
    "Adds."
    return a
print({"pydantic", "jsonschema", "regex"} & set(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "set()"

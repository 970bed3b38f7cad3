"""JSON Schema from Python types: nested dataclasses, TypedDicts, containers, enums, unions, defaults, descriptions."""

from __future__ import annotations

import collections.abc
import dataclasses
import enum
import inspect
import json
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal

from agentgym.errors import ToolSchemaError
from agentgym.tools.calling.docstring import argument_descriptions

__all__ = ["function_hints", "function_schema", "type_schema"]

SCALARS: dict[object, str] = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}
ARRAYS = (list, set, frozenset, collections.abc.Sequence, collections.abc.Iterable, collections.abc.Collection)
OBJECTS = (dict, collections.abc.Mapping, collections.abc.MutableMapping)
Schema = dict[str, Any]


def function_schema(fn: Callable[..., object], hints: Mapping[str, object]) -> Schema:
    """Builds the JSON Schema of `fn`'s parameters (without `self`), an object; raises ToolSchemaError with the name."""
    builder = _Builder()
    described = argument_descriptions(inspect.getdoc(fn) or "")
    properties: Schema = {}
    required: list[str] = []
    for parameter in function_parameters(fn):
        if parameter.name not in hints:
            raise ToolSchemaError(
                f"{_place(fn)}: parameter {parameter.name!r} has no type annotation; write e.g. "
                f"`{parameter.name}: str`, or give the schema yourself with register_tool. "
                "The object of a method is the parameter `self`, by this name"
            )
        try:
            schema = builder.build(hints[parameter.name])
        except ToolSchemaError as error:
            raise ToolSchemaError(f"{_place(fn)}: parameter {parameter.name!r}: {error}") from None
        properties[parameter.name] = _with_default(_add_description(schema, described.get(parameter.name)), parameter)
        if parameter.default is inspect.Parameter.empty:
            required.append(parameter.name)
    schema = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    if builder.definitions:
        schema["$defs"] = builder.definitions
    return schema


def function_parameters(fn: Callable[..., object]) -> list[inspect.Parameter]:
    """Returns the parameters filled by name; raises ToolSchemaError for `*args`, `**kwargs` and positional-only."""
    parameters = list(inspect.signature(fn).parameters.values())
    if parameters and parameters[0].name == "self":
        parameters = parameters[1:]
    for parameter in parameters:
        if parameter.kind not in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY):
            raise ToolSchemaError(
                f"{_place(fn)}: parameter {str(parameter)!r} cannot be passed by name; "
                "a tool takes named parameters only"
            )
    return parameters


def _place(fn: Callable[..., object]) -> str:
    """Returns the tool's name and the location of its definition: "tool 'go' (Lock.go in lock.py, line 12)"."""
    code = getattr(fn, "__code__", None)
    where = f" ({fn.__qualname__} in {code.co_filename}, line {code.co_firstlineno})" if code is not None else ""
    return f"tool {fn.__name__!r}{where}"


def function_hints(fn: Callable[..., object], local_names: Mapping[str, object]) -> dict[str, object]:
    """Resolves `fn`'s parameter types; `local_names` are those visible where it was defined."""
    annotations = {name: hint for name, hint in getattr(fn, "__annotations__", {}).items() if name != "return"}
    holder = types.SimpleNamespace(__annotations__=annotations)
    try:
        return typing.get_type_hints(holder, getattr(fn, "__globals__", {}), dict(local_names), include_extras=True)
    except (NameError, TypeError) as error:
        raise ToolSchemaError(f"{_place(fn)}: a type annotation cannot be resolved ({error})") from error


def type_schema(hint: object) -> Schema:
    """The JSON Schema of one type; `type_schema(list[int])` is `{"type": "array", "items": {"type": "integer"}}`."""
    builder = _Builder()
    schema = builder.build(hint)
    return {**schema, "$defs": builder.definitions} if builder.definitions else schema


class _Builder:
    """Builds schemas; classes that contain themselves go to `definitions` and are referred to."""

    def __init__(self) -> None:
        self.definitions: Schema = {}
        self._open: list[type] = []
        self._recursive: set[type] = set()

    def build(self, hint: Any) -> Schema:
        origin, arguments = typing.get_origin(hint), typing.get_args(hint)
        if origin is typing.Annotated:
            return _add_annotations(self.build(arguments[0]), hint.__metadata__)
        if origin in (typing.Required, typing.NotRequired):
            return self.build(arguments[0])
        if hint is None:
            return {"type": "null"}
        if hint in (Any, object):
            return {}
        if isinstance(hint, typing.NewType):
            return self.build(hint.__supertype__)
        if isinstance(hint, typing.TypeVar):
            return self.build(hint.__bound__) if hint.__bound__ else {}
        if origin is Literal:
            return _enumeration(arguments)
        if origin in (typing.Union, types.UnionType):
            return self._union(arguments)
        container = origin or hint
        if container is tuple:
            return self._tuple(arguments)
        if container in ARRAYS:
            return self._array(container, arguments)
        if container in OBJECTS:
            return self._mapping(arguments)
        return self._class_schema(hint)

    def _class_schema(self, hint: Any) -> Schema:
        if hint in SCALARS:
            return {"type": SCALARS[hint]}
        if isinstance(hint, type) and issubclass(hint, enum.Enum):
            return _enumeration(tuple(member.value for member in hint))
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            return self._object(hint, self._dataclass_fields)
        if typing.is_typeddict(hint):
            return self._object(hint, self._typed_dict_fields)
        raise ToolSchemaError(
            f"no JSON Schema follows from {hint!r}; use str, int, float, bool, list, dict, Literal, Enum, a dataclass "
            "or a TypedDict, or give the schema yourself with register_tool"
        )

    def _union(self, arguments: tuple[object, ...]) -> Schema:
        return {"anyOf": [self.build(argument) for argument in arguments]}

    def _array(self, container: object, arguments: tuple[object, ...]) -> Schema:
        schema: Schema = {"type": "array"}
        if arguments:
            schema["items"] = self.build(arguments[0])
        if container in (set, frozenset):
            schema["uniqueItems"] = True
        return schema

    def _tuple(self, arguments: tuple[object, ...]) -> Schema:
        if not arguments:
            return {"type": "array"}
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            return {"type": "array", "items": self.build(arguments[0])}
        items = [self.build(argument) for argument in arguments]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items), "maxItems": len(items)}

    def _mapping(self, arguments: tuple[object, ...]) -> Schema:
        if not arguments:
            return {"type": "object"}
        if arguments[0] is not str:
            raise ToolSchemaError(f"JSON object keys are strings, so a dict has str keys, not {arguments[0]!r}")
        return {"type": "object", "additionalProperties": self.build(arguments[1])}

    def _object(self, cls: type, fields: Callable[[type], tuple[Schema, list[str]]]) -> Schema:
        reference = {"$ref": f"#/$defs/{cls.__name__}"}
        if cls in self._open:
            self._recursive.add(cls)
            return reference
        self._open.append(cls)
        properties, required = fields(cls)
        self._open.pop()
        schema = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
        if cls not in self._recursive:
            return schema
        self.definitions[cls.__name__] = schema
        return reference

    def _dataclass_fields(self, cls: type) -> tuple[Schema, list[str]]:
        hints = typing.get_type_hints(cls, include_extras=True)
        described = argument_descriptions(inspect.getdoc(cls) or "")
        properties: Schema = {}
        required = []
        for field in dataclasses.fields(cls):
            if not field.init:
                continue
            text = field.metadata.get("description") or described.get(field.name)
            schema = _add_description(self.build(hints[field.name]), text)
            if field.default is not dataclasses.MISSING and _is_json(field.default):
                schema = {**schema, "default": field.default}
            if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
                required.append(field.name)
            properties[field.name] = schema
        return properties, required

    def _typed_dict_fields(self, cls: type) -> tuple[Schema, list[str]]:
        hints = typing.get_type_hints(cls, include_extras=True)
        described = argument_descriptions(inspect.getdoc(cls) or "")
        properties = {name: _add_description(self.build(hint), described.get(name)) for name, hint in hints.items()}
        required = [name for name, hint in hints.items() if _is_required(cls, name, hint)]
        return properties, required


def _is_required(cls: Any, name: str, hint: object) -> bool:
    """Postponed annotations hide Required and NotRequired from `__required_keys__`; the resolved hints have them."""
    origin = typing.get_origin(hint)
    return origin is typing.Required or (origin is not typing.NotRequired and name in cls.__required_keys__)


def _enumeration(values: tuple[Any, ...]) -> Schema:
    values = tuple(value.value if isinstance(value, enum.Enum) else value for value in values)
    if not all(_is_json(value) for value in values):
        raise ToolSchemaError(f"the choices {values!r} are not all JSON values")
    kinds = {SCALARS.get(type(value)) for value in values}
    schema: Schema = {"enum": list(values)}
    kind = kinds.pop() if len(kinds) == 1 else None
    return {"type": kind, **schema} if kind else schema


def _add_annotations(schema: Schema, metadata: tuple[object, ...]) -> Schema:
    for extra in metadata:
        if isinstance(extra, str):
            schema = {**schema, "description": extra}
        elif isinstance(extra, Mapping):
            schema = {**schema, **extra}
    return schema


def _add_description(schema: Schema, description: str | None) -> Schema:
    return {**schema, "description": description} if description and "description" not in schema else schema


def _with_default(schema: Schema, parameter: inspect.Parameter) -> Schema:
    default = parameter.default
    if isinstance(default, enum.Enum):
        default = default.value
    if default is inspect.Parameter.empty or not _is_json(default):
        return schema
    return {**schema, "default": default}


def _is_json(value: object) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return False
    return True

"""JSON Schema from Python types: nested dataclasses, TypedDicts, containers, enums, unions, defaults, descriptions."""

from __future__ import annotations

import collections.abc
import dataclasses
import enum
import functools
import inspect
import json
import types
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from agentgym.errors import ToolSchemaError
from agentgym.tools.calling.docstring import argument_descriptions
from agentgym.tools.calling.field_metadata import Fields, add_metadata

__all__ = ["class_fields", "function_doc", "function_fields", "function_name", "function_schema", "type_schema"]

SCALARS: dict[object, str] = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}
ARRAYS = (list, set, frozenset, collections.abc.Sequence, collections.abc.Iterable, collections.abc.Collection)
OF_CLASSES = (types.MethodDescriptorType, types.WrapperDescriptorType)
"""The methods of built-in classes that lack their object, such as `str.upper`."""
OBJECTS = (dict, collections.abc.Mapping, collections.abc.MutableMapping)
Schema = dict[str, Any]


def function_schema(fn: Callable[..., object], fields: Fields) -> Schema:
    """Builds the JSON Schema of `fn`'s parameters, an object; raises ToolSchemaError with the name."""
    builder = _Builder()
    try:
        schema = builder.object_schema(fields, function_doc(fn))
    except ToolSchemaError as error:
        raise ToolSchemaError(f"{_location_of(fn)}: parameter {error}") from None
    return {**schema, "$defs": builder.definitions} if builder.definitions else schema


def function_parameters(fn: Callable[..., object]) -> list[inspect.Parameter]:
    """Returns the parameters filled by name; raises ToolSchemaError for `*args`, `**kwargs` and positional-only.

    Those that a `functools.partial` binds are not among them.
    """
    bound: Mapping[str, object] = {}
    if isinstance(fn, functools.partial):
        bound = fn.keywords
        fn = functools.partial(fn.func, *fn.args, **bound)  # `signature` looks past a partial that is dressed as `func`
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError) as error:
        raise ToolSchemaError(f"{_location_of(fn)}: {error}; write a function that calls it") from None
    if parameters and parameters[0].name in ("self", "cls") and not isinstance(fn, OF_CLASSES):
        parameters = parameters[1:]
    parameters = [parameter for parameter in parameters if parameter.name not in bound]
    for parameter in parameters:
        if parameter.kind not in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY):
            raise ToolSchemaError(
                f"{_location_of(fn)}: parameter {str(parameter)!r} cannot be passed by name; "
                "a tool takes named parameters only"
            )
    return parameters


def function_name(fn: Callable[..., object]) -> str:
    """Returns the name of a function, of the one in a `functools.partial`, or of a callable object's class."""
    while isinstance(fn, functools.partial) and not hasattr(fn, "__name__"):
        fn = fn.func
    return str(getattr(fn, "__name__", type(fn).__name__))


def function_doc(fn: Callable[..., object]) -> str:
    """Returns the docstring of a function, of the one in a `functools.partial`, or of a callable object; "" if none."""
    if isinstance(fn, functools.partial):
        return vars(fn).get("__doc__") or function_doc(fn.func)
    if hasattr(fn, "__name__"):
        return inspect.getdoc(fn) or ""
    return inspect.cleandoc(type(fn).__call__.__doc__ or type(fn).__doc__ or "")


def _innermost(fn: Any) -> Any:
    """Returns the function that has the code and annotations of a partial, a wrapper or a callable object."""
    while True:
        if isinstance(fn, functools.partial):
            fn = fn.func
        elif hasattr(fn, "__wrapped__"):
            fn = fn.__wrapped__
        elif inspect.isroutine(fn) or isinstance(fn, type):
            return fn
        else:
            fn = type(fn).__call__


def _location_of(fn: Callable[..., object]) -> str:
    """Returns the tool's name and the location of its definition: "tool 'go' (Lock.go in lock.py, line 12)"."""
    own = _innermost(fn)
    code = getattr(own, "__code__", None)
    where = f" ({own.__qualname__} in {code.co_filename}, line {code.co_firstlineno})" if code is not None else ""
    return f"tool {function_name(fn)!r}{where}"


def function_fields(fn: Callable[..., object], local_names: Mapping[str, object]) -> Fields:
    """Returns the parameters of `fn` without `self`; `local_names` are those visible where it was defined."""
    own = _innermost(fn)
    annotations = {name: hint for name, hint in getattr(own, "__annotations__", {}).items() if name != "return"}
    holder = types.SimpleNamespace(__annotations__=annotations)
    try:
        hints = typing.get_type_hints(holder, getattr(own, "__globals__", {}), dict(local_names), include_extras=True)
    except (NameError, TypeError) as error:
        raise ToolSchemaError(f"{_location_of(fn)}: a type annotation cannot be resolved ({error})") from error
    parameters = function_parameters(fn)
    for name in (parameter.name for parameter in parameters if parameter.name not in hints):
        raise ToolSchemaError(
            f"{_location_of(fn)}: parameter {name!r} has no type annotation; write e.g. "
            f"`{name}: str`, or give the schema yourself with register_tool. "
            "The object of a method is the parameter `self`, by this name"
        )
    defaults = {part.name: part.default for part in parameters if part.default is not inspect.Parameter.empty}
    try:
        return Fields.of({parameter.name: hints[parameter.name] for parameter in parameters}, defaults)
    except ToolSchemaError as error:
        raise ToolSchemaError(f"{_location_of(fn)}: parameter {error}") from None


def is_class_with_fields(hint: object) -> bool:
    """Returns whether `hint` is a dataclass or a TypedDict."""
    return isinstance(hint, type) and (dataclasses.is_dataclass(hint) or typing.is_typeddict(hint))


def class_fields(cls: Any) -> Fields:
    """Returns the fields of a TypedDict, or those that a dataclass's constructor takes."""
    try:
        hints: dict[str, Any] = typing.get_type_hints(cls, include_extras=True)
    except NameError as error:
        raise ToolSchemaError(f"a type annotation of {cls.__name__} cannot be resolved ({error})") from error
    if typing.is_typeddict(cls):
        optional = [name for name in hints if not _is_required(cls, name, hints[name])]
        return Fields(hints, dict.fromkeys(optional, dataclasses.MISSING))
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
    for name, field in fields.items():
        if text := field.metadata.get("description"):
            hints[name] = Annotated[hints[name], text]
    required = (dataclasses.MISSING, dataclasses.MISSING)
    defaults = {f.name: f.default for f in fields.values() if (f.default, f.default_factory) != required}
    return Fields.of({name: hints[name] for name in fields}, defaults)


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
        self._names: dict[type, str] = {}

    def build(self, hint: Any) -> Schema:
        origin, arguments = typing.get_origin(hint), typing.get_args(hint)
        if origin is typing.Annotated:
            return functools.reduce(add_metadata, hint.__metadata__, self.build(arguments[0]))
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
        if is_class_with_fields(hint):
            return self._class_object(hint)
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

    def _class_object(self, cls: type) -> Schema:
        if cls in self._open:
            return {"$ref": f"#/$defs/{self._definition_name(cls)}"}
        self._open.append(cls)
        schema = self.object_schema(class_fields(cls), inspect.getdoc(cls) or "")
        self._open.pop()
        if cls not in self._names:
            return schema
        self.definitions[self._names[cls]] = schema
        return {"$ref": f"#/$defs/{self._names[cls]}"}

    def _definition_name(self, cls: type) -> str:
        """Returns the name of a class in `$defs`; the second class of a name has another one."""
        if cls not in self._names:
            number = sum(other.__name__ == cls.__name__ for other in self._names)
            self._names[cls] = f"{cls.__name__}_{number + 1}" if number else cls.__name__
        return self._names[cls]

    def object_schema(self, fields: Fields, doc: str) -> Schema:
        """Builds the schema of an object with these fields."""
        described = argument_descriptions(doc)
        properties: Schema = {}
        for name, hint in fields.hints.items():
            try:
                schema = _add_description(self.build(hint), described.get(name))
            except ToolSchemaError as error:
                raise ToolSchemaError(f"{name!r}: {error}") from None
            properties[name] = _with_default(schema, fields.shown_default(name))
        required = [name for name in properties if name not in fields.defaults and name not in fields.given]
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


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


def _add_description(schema: Schema, description: str | None) -> Schema:
    return {**schema, "description": description} if description and "description" not in schema else schema


def _with_default(schema: Schema, default: object) -> Schema:
    default = default.value if isinstance(default, enum.Enum) else default
    return {**schema, "default": default} if _is_json(default) else schema


def _is_json(value: object) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return False
    return True

"""A tool: its specification for the model, its function, and how it is run. `@tool` and `register_tool` make them."""

from __future__ import annotations

import functools
import inspect
import json
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypedDict, TypeVar, Unpack, get_args, overload

from agentgym.errors import NOT_JSON, ConfigError, ToolSchemaError
from agentgym.openai_wire import tool_schema
from agentgym.registry import Registry
from agentgym.settings.functions import check_above_zero, check_at_least
from agentgym.tools.calling.conversion import argument_converter
from agentgym.tools.calling.docstring import summary
from agentgym.tools.calling.schema import function_doc, function_fields, function_name, function_schema
from agentgym.tools.calling.validation import ArgumentCheck
from agentgym.types import JSON, ToolSpec

__all__ = ["TOOLS", "Tool", "ToolFunction", "ToolSettings", "as_tool", "register_tool", "tool"]

ToolFunction: TypeAlias = Callable[..., object]
F = TypeVar("F", bound=ToolFunction)
OnError: TypeAlias = Literal["auto", "answer", "raise"]
OnTimeout: TypeAlias = Literal["answer", "raise"]
DEFAULT_TIMEOUT_S = 30.0
NAME = re.compile(r"^[A-Za-z_][A-Za-z0-9_.-]{0,63}$")
MARK = "__agentgym_tool__"


@dataclass(frozen=True, kw_only=True)
class Tool:
    """A function that a model may call. Make one with `@tool` or `register_tool`."""

    spec: ToolSpec
    fn: ToolFunction
    timeout_s: float | None = DEFAULT_TIMEOUT_S
    """Seconds after which a call is answered with a time-out; None is no limit."""
    max_concurrency: int | None = None
    """The number of calls that may run at once, over all episodes of the process; None is no limit."""
    rate_limit_per_s: float | None = None
    """The number of calls that may begin per second, over all episodes of the process; None is no limit.

    Calls are evenly spaced. The wait does not count toward `timeout_s`.
    """
    pure: bool = False
    """True promises that the answer follows from the arguments alone, and not from the object of an `@tool` method.

    Answers are kept for the process: a call with arguments of the same JSON is answered without running it, in any
    episode.
    """
    blocking: bool = True
    """True: a plain function runs on a thread; False: it is short and pure, and runs where it is called."""
    on_error: OnError = "auto"
    """The meaning of an exception of `fn`: "answer", "raise" or "auto".

    "answer" is something that the model reads. "raise" is a fault of the environment (no reward, its traceback
    logged). "auto" decides by the exception's kind: `agentgym.tools.calling.error_attribution`.
    """
    on_timeout: OnTimeout = "answer"
    """The meaning of a call beyond `timeout_s`: "answer" or "raise".

    "answer" is for a request of the model that takes too long, "raise" for a tool that waits for a service. A tool
    with `on_error="raise"` has "raise".
    """
    owner: object = None
    """The environment whose method this is; the plain methods of one owner run one after the other on one thread."""
    check: ArgumentCheck = field(init=False, repr=False, compare=False)
    convert: Callable[[Mapping[str, JSON]], dict[str, Any]] = field(default=dict, repr=False, compare=False)
    """Converts validated JSON arguments to the keyword arguments of `fn`."""

    def __post_init__(self) -> None:
        if not NAME.match(self.spec.name):
            raise ToolSchemaError(f"tool name {self.spec.name!r} is not a letter followed by letters, digits, _ . or -")
        if self.on_error == "raise":
            object.__setattr__(self, "on_timeout", "raise")
        for setting, kind in (("on_error", OnError), ("on_timeout", OnTimeout)):
            if getattr(self, setting) not in get_args(kind):
                choices = ", ".join(get_args(kind))
                raise ConfigError(f"tool {self.name!r}: {setting} is one of {choices}; got {getattr(self, setting)!r}")
        where = f"tool {self.name!r}: "
        check_above_zero(self, "timeout_s", "rate_limit_per_s", where=where)
        check_at_least(1, self, "max_concurrency", where=where)
        if self.rate_limit_per_s == float("inf"):
            raise ConfigError(f"{where}rate_limit_per_s must be above 0 and finite, or None for no limit")
        object.__setattr__(self, "check", _compiled_check(_SchemaKey(self.spec)))

    @property
    def name(self) -> str:
        """The name the model calls."""
        return self.spec.name

    @functools.cached_property
    def is_async(self) -> bool:
        """True if `fn` is a coroutine function."""
        fn = _without_partial(self.fn)
        call = getattr(fn, "__call__", None)  # noqa: B004  # an object with `async def __call__`
        return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(call)

    def bound_to(self, owner: object, fn: ToolFunction) -> Tool:
        """Returns this tool with the bound method `fn` of `owner`."""
        return replace(self, fn=fn, owner=owner)


class ToolSettings(TypedDict, total=False):
    """The fields of `Tool` that define how its function is run."""

    timeout_s: float | None
    max_concurrency: int | None
    rate_limit_per_s: float | None
    pure: bool
    blocking: bool
    on_error: OnError
    on_timeout: OnTimeout


@overload
def tool(fn: F) -> F: ...
@overload
def tool(
    *, name: str | None = None, description: str | None = None, **settings: Unpack[ToolSettings]
) -> Callable[[F], F]: ...
def tool(
    fn: F | None = None, *, name: str | None = None, description: str | None = None, **settings: Unpack[ToolSettings]
) -> F | Callable[[F], F]:
    """Marks a typed function or method as a tool; it stays an ordinary function.

    Its schema comes from the annotations, its description and those of its arguments from the docstring. A
    `functools.partial` has the name of its function and shows no argument that it binds; a callable object has the name
    of its class.
    Settings are the fields of `Tool`. Raises ToolSchemaError if no schema can be derived.

    >>> @tool
    ... def add(a: int, b: int = 1) -> int:
    ...     \"\"\"Adds two numbers.\"\"\"
    ...     return a + b
    >>> as_tool(add).spec.parameters["required"]
    ['a']
    """
    local_names = sys._getframe(1).f_locals

    def mark(function: F) -> F:
        own = function.__func__ if isinstance(function, staticmethod | classmethod) else function
        setattr(own, MARK, _derive(own, local_names, name, description, **settings))
        return function

    return mark(fn) if fn is not None else mark


def as_tool(entry: Tool | ToolFunction) -> Tool:
    """Returns `entry` as a Tool: itself, the one that `@tool` made, or one derived now from a plain typed function."""
    if isinstance(entry, Tool):
        return entry
    marked = getattr(entry, MARK, None)
    if isinstance(marked, Tool) and marked.fn is entry:
        return marked
    if isinstance(marked, Tool) and not isinstance(entry, functools.partial):  # a method, or a wrapper around the tool
        return marked.bound_to(getattr(entry, "__self__", None), entry)
    if not callable(entry):
        raise ToolSchemaError(f"{entry!r} is not a tool; give a function, a Tool, or use register_tool(schema, fn)")
    if isinstance(entry, type) and hasattr(entry, "tool_specs"):
        raise ConfigError(f"{entry.__name__} is an environment, and no tool: `agentgym play` calls its tools")
    if inspect.isfunction(entry):
        return as_tool(tool(entry))
    bound = _without_partial(entry)
    return replace(_derive(entry, {}), owner=bound.__self__ if inspect.ismethod(bound) else None)


def _derive(
    fn: ToolFunction,
    local_names: Mapping[str, object],
    name: str | None = None,
    description: str | None = None,
    **settings: Unpack[ToolSettings],
) -> Tool:
    fields = function_fields(fn, local_names)
    text = summary(function_doc(fn)) if description is None else description
    spec = ToolSpec(name or function_name(fn), text, function_schema(fn, fields))
    return Tool(spec=spec, fn=fn, convert=argument_converter(fields), **settings)


def _without_partial(fn: ToolFunction) -> ToolFunction:
    while isinstance(fn, functools.partial):
        fn = fn.func
    return fn


TOOLS: Registry[Tool] = Registry("tool", "`agentgym tools list` shows all.")
"""Tools that were registered by name for the whole process."""


def register_tool(
    schema: Mapping[str, JSON] | str | Path,
    fn: ToolFunction,
    *,
    registry: Registry[Tool] | None = None,
    **settings: Unpack[ToolSettings],
) -> Tool:
    """Makes a Tool with the schema exactly as given, and adds it to `registry` (default `TOOLS`) under its name.

    `schema` is a dict, or the path of a JSON file, in OpenAI's form (`{"type": "function", "function": {...}}`), the
    bare form (`{"name", "description", "parameters"}`) or MCP's (`inputSchema`). `fn` gets the validated arguments by
    name, unconverted. Settings are the fields of `Tool`. Raises ToolSchemaError for an invalid schema.
    """
    new_tool = Tool(spec=_read_spec(schema), fn=fn, **settings)
    return (TOOLS if registry is None else registry).add(new_tool.name, new_tool, replace=True)


def _read_spec(source: Mapping[str, JSON] | str | Path) -> ToolSpec:
    schema: Any = _load(source) if isinstance(source, str | Path) else source
    if isinstance(schema, Mapping) and isinstance(schema.get("function"), Mapping):
        schema = schema["function"]
    if not isinstance(schema, Mapping) or not isinstance(schema.get("name"), str):
        raise ToolSchemaError(
            'a tool schema has a "name", a "description" and "parameters", bare or inside {"type": "function", '
            f'"function": ...}}; got {str(schema)[:200]}'
        )
    parameters = tool_schema(schema)
    if parameters is None:
        parameters = {"type": "object", "properties": {}, "additionalProperties": False}
    if not isinstance(parameters, Mapping):
        raise ToolSchemaError(f"tool {schema['name']!r}: parameters must be a JSON Schema object, got {parameters!r}")
    return ToolSpec(schema["name"], str(schema.get("description") or ""), parameters)


def _load(path: str | Path) -> object:
    try:
        return json.loads(Path(path).read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ToolSchemaError(f"cannot read the tool schema {str(path)!r}: {error.strerror}") from error
    except NOT_JSON as error:
        raise ToolSchemaError(f"{str(path)!r} is not JSON: {error}") from error


class _SchemaKey:
    """A specification as a cache key, equal if the parameters' JSON is equal."""

    def __init__(self, spec: ToolSpec) -> None:
        self.spec = spec
        try:
            self.text = json.dumps(spec.parameters, sort_keys=True)
        except (TypeError, ValueError) as error:
            raise ToolSchemaError(f"tool {spec.name!r}: the schema is not JSON: {error}") from None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _SchemaKey) and other.text == self.text

    def __hash__(self) -> int:
        return hash(self.text)


@functools.lru_cache(maxsize=1024)
def _compiled_check(key: _SchemaKey) -> ArgumentCheck:
    try:
        return ArgumentCheck(key.spec.parameters)
    except ToolSchemaError as error:
        raise ToolSchemaError(f"tool {key.spec.name!r}: {error}") from None

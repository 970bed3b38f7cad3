"""Reads arguments that a format writes as bare text, by the tool's JSON Schema.

A value that does not fit its schema stays the text that the model wrote, so that validation reports it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from agentgym.chat_templates.formats.json_text import read_json
from agentgym.types import JSON, ToolSpec

__all__ = ["ITEM", "kinds_at", "read_bare", "tool_named", "typed_at", "typed_value"]


def typed_value(text: str, name: str, tool: ToolSpec | None, *, bare_json: bool = False) -> JSON:
    """Returns the value that `text` spells for the argument `name` of `tool`; raises nothing.

    Of several types that the schema allows, the most specific one that the text spells counts: null, boolean,
    integer, number, object, array, and a string last. If the schema allows any value, `read_bare` reads the text. An
    argument without a schema (the tool is unknown, or does not declare it) is the text as it is; with `bare_json`
    `read_bare` reads it too.

    >>> tool = ToolSpec("go", "", {"type": "object", "properties": {"steps": {"type": ["integer", "null"]}}})
    >>> typed_value("3", "steps", tool), typed_value("null", "steps", tool), typed_value("a few", "steps", tool)
    (3, None, 'a few')
    >>> typed_value("3", "to", tool)
    '3'
    """
    return typed_at(text, (name,), tool, bare_json=bare_json)


def typed_at(text: str, path: Sequence[str], tool: ToolSpec | None, *, bare_json: bool = False) -> JSON:
    """Returns the `typed_value` within an argument: `("order", "items", "item")`, where `item` is any of a list."""
    schema = None if tool is None else _Schema(tool.parameters).at(path)
    if schema is None:
        return read_bare(text) if bare_json else text
    return read_bare(text) if schema.is_open else schema.read(text)


def kinds_at(path: Sequence[str], tool: ToolSpec | None) -> frozenset[str]:
    """Returns the JSON types that the schema allows at a path of the arguments; empty if it declares none."""
    schema = None if tool is None else _Schema(tool.parameters).at(path)
    return frozenset() if schema is None else frozenset(schema.kinds)


def tool_named(name: str, tools: Iterable[ToolSpec]) -> ToolSpec | None:
    """Returns the tool of that name, or None."""
    return next((tool for tool in tools if tool.name == name), None)


def read_bare(text: str) -> JSON:
    """Returns the value that `text` spells if its type is unknown: a JSON value that is no string, else the text."""
    for kind in ("null", "boolean", "integer", "number", "object", "array"):
        try:
            return _READERS[kind](text.strip())
        except ValueError:
            continue
    return text


class _Schema:
    """The types and values that a tool's schema allows for one argument, or for one value within it."""

    def __init__(self, root: JSON) -> None:
        self.root = root
        self.kinds: set[str] = set()
        self.values: list[JSON] = []
        """The values of `enum` and `const`."""
        self._steps = MAX_STEPS

    @property
    def is_open(self) -> bool:
        """True if it allows any text."""
        return not self.kinds and not self.values

    def at(self, path: Sequence[str]) -> _Schema | None:
        """Returns the schema at that path, or None if none is declared."""
        found: list[JSON] = [self.root]
        for step in path:
            found = [inner for schema in found for inner in self._declared_schemas(schema, step)]
        for schema in found:
            self._allow(schema)
        return self if found else None

    def read(self, text: str) -> JSON:
        """Returns the value that `text` spells."""
        if text in self.values:
            return text
        stripped = text.strip()
        for kind in KINDS:
            if self.kinds and kind not in self.kinds:
                continue
            if kind == "string":
                return text
            try:
                value = _READERS[kind](stripped)
            except ValueError:
                continue
            if self.kinds or value in self.values:
                return value
        return text

    def _declared_schemas(self, schema: JSON, name: str) -> Iterable[JSON]:
        """Yields the schemas of a property or an item, in the outer schema or in one that it is composed of."""
        schema = self._target(schema)
        if not isinstance(schema, Mapping):
            return
        properties = schema.get("properties")
        if isinstance(properties, Mapping) and name in properties:
            yield properties[name]
            return
        if name == ITEM and isinstance(items := schema.get("items"), Mapping):
            yield items
        for part in _parts(schema):
            yield from self._declared_schemas(part, name)
        if isinstance(further := schema.get("additionalProperties"), Mapping):
            yield further

    def _allow(self, schema: JSON) -> None:
        """Adds the types and values that a schema allows."""
        schema = self._target(schema)
        if not isinstance(schema, Mapping):
            return
        kinds = schema.get("type")
        named = [kinds] if isinstance(kinds, str) else kinds if isinstance(kinds, Sequence) else []
        spelled = [SPELLINGS.get(kind, kind) for kind in named if isinstance(kind, str)]
        self.kinds.update(kind for kind in spelled if kind in KINDS)
        if not named:
            self.kinds.update(kind for word, kind in IMPLIED.items() if word in schema)
        values = schema.get("enum")
        if isinstance(values, Sequence) and not isinstance(values, str):
            self.values.extend(values)
        if "const" in schema:
            self.values.append(schema["const"])
        if schema.get("nullable") is True and self.kinds:
            self.kinds.add("null")
        for part in _parts(schema):
            self._allow(part)

    def _target(self, schema: JSON) -> JSON:
        """Returns the schema that a reference leads to in the end; null if it leads nowhere, or too far."""
        while self._steps > 0:
            self._steps -= 1
            reference = schema.get("$ref") if isinstance(schema, Mapping) else None
            if not isinstance(reference, str):
                return schema
            schema = self._resolve_pointer(reference)
        return None

    def _resolve_pointer(self, reference: str) -> JSON:
        place, target = reference.removeprefix("#"), self.root
        for step in place.split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            target = target.get(step) if isinstance(target, Mapping) else None
        return target if reference.startswith("#") else None


def _parts(schema: Mapping[str, JSON]) -> Iterable[JSON]:
    for word in ("anyOf", "oneOf", "allOf"):
        parts = schema.get(word)
        if isinstance(parts, Sequence) and not isinstance(parts, str):
            yield from parts


def _null(text: str) -> JSON:
    if text not in NULLS:
        raise ValueError("not null")
    return None


def _boolean(text: str) -> JSON:
    if (value := BOOLEANS.get(text.lower())) is None:
        raise ValueError("not a boolean")
    return value


def _integer(text: str) -> JSON:
    if INTEGER.fullmatch(text):
        return int(text)
    value = _number(text)
    if not isinstance(value, float) or not value.is_integer():
        raise ValueError("not an integer")
    return int(value)


def _number(text: str) -> JSON:
    if INTEGER.fullmatch(text):
        return int(text)
    if not NUMBER.fullmatch(text) or abs(value := float(text)) == float("inf"):
        raise ValueError("not a number")
    return value


def _object(text: str) -> JSON:
    return _structure(text, "{", "}")


def _array(text: str) -> JSON:
    return _structure(text, "[", "]")


def _structure(text: str, opening: str, closing: str) -> JSON:
    if not text.startswith(opening) or not text.endswith(closing):
        raise ValueError(f"not within {opening}{closing}")
    try:
        return read_json(text)
    except ValueError:
        return read_json(_as_json(text))


def _as_json(text: str) -> str:
    """Returns the JSON of a text that may spell Python's literals: `{'open': True}`."""
    parts: list[str] = []
    position = 0
    for match in _PYTHON.finditer(text):
        if match.start() != position:
            break
        position = match.end()
        parts.append(_CONSTANTS.get(match[0], match[0]) if match["quoted"] is None else _double_quoted(match["quoted"]))
    if position != len(text):
        raise ValueError("neither JSON nor a Python literal")
    return "".join(parts)


def _double_quoted(inside: str) -> str:
    """Returns a single-quoted string's inside as a JSON string; escapes unknown to JSON stay, to be refused."""
    return '"' + _ESCAPE.sub(lambda match: {"\\'": "'", '"': '\\"'}.get(match[0], match[0]), inside) + '"'


ITEM = "item"
"""The step of a path that leads to a value of a list."""
MAX_STEPS = 200
"""The maximum number of schemas read for one argument: references may go in circles."""
KINDS = ("null", "boolean", "integer", "number", "object", "array", "string")
"""JSON Schema's types, the most specific first."""
SPELLINGS = {"str": "string", "int": "integer", "float": "number", "bool": "boolean", "dict": "object", "list": "array"}
"""Python's names for the types, which some tool documentation uses."""
IMPLIED = {"properties": "object", "additionalProperties": "object", "items": "array", "prefixItems": "array"}
"""The type of a schema that names none, by its keywords."""
NULLS = ("null", "None")
"""The spellings of null in templates: JSON's and Python's."""
BOOLEANS = {"true": True, "false": False}
INTEGER = re.compile(r"[+-]?[0-9]++")
NUMBER = re.compile(r"[+-]?(?:[0-9]++\.?+[0-9]*+|\.[0-9]++)(?:[eE][+-]?[0-9]++)?+")
_READERS = {
    "null": _null,
    "boolean": _boolean,
    "integer": _integer,
    "number": _number,
    "object": _object,
    "array": _array,
}
_CONSTANTS = {"True": "true", "False": "false", "None": "null"}
_PYTHON = re.compile(r"""'(?P<quoted>(?:[^'\\]|\\.)*+)'|"(?:[^"\\]|\\.)*+"|\w++|[\s,:\[\]{}+.\-]++""", re.DOTALL)
_ESCAPE = re.compile(r'\\.|"', re.DOTALL)

"""Reads arguments that a format writes as bare text, by the tool's JSON Schema.

A value that does not fit its schema stays the text that the model wrote, so that validation reports it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from agentgym.call_json import read_json
from agentgym.types import JSON, ToolSpec

__all__ = ["ITEM", "kinds_at", "kinds_of", "read_bare", "tool_named", "typed_at", "typed_value"]


def typed_value(text: str, name: str, tool: ToolSpec | None, *, bare_json: bool = False) -> JSON:
    """Returns the value that `text` spells for the argument `name` of `tool`; raises nothing.

    If the schema allows a text among other types, or any value, the text becomes another value only where it is that
    value's own spelling in JSON (`read_bare`): `007` stays a text. `None`, as templates write null, is null where the
    schema declares null. If the schema allows no text, other spellings count too: `007`, `+7` and `7.0` for an integer,
    Python's literals for the others. An argument without a schema (the tool is unknown, or does not declare it) is the
    text as it is; with `bare_json` `read_bare` reads it.

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
    return schema.read(text)


def kinds_at(path: Sequence[str], tool: ToolSpec | None) -> frozenset[str]:
    """Returns the JSON types that the schema allows at a path of the arguments; empty if it declares none."""
    schema = None if tool is None else _Schema(tool.parameters).at(path)
    return frozenset() if schema is None else frozenset(schema.kinds or ())


def tool_named(name: str, tools: Iterable[ToolSpec]) -> ToolSpec | None:
    """Returns the tool of that name, or None."""
    return next((tool for tool in tools if tool.name == name), None)


def read_bare(text: str) -> JSON:
    """Returns the JSON value that `text` spells, if that is no string; else the text."""
    try:
        value = read_json(text)
    except ValueError:
        return text
    if isinstance(value, float):
        return _number(text.strip())
    return text if isinstance(value, str) else value


def kinds_of(value: JSON) -> frozenset[str]:
    """Returns the JSON types of a value: an integer is a number too."""
    if value is None or isinstance(value, bool):
        return frozenset(("null" if value is None else "boolean",))
    if isinstance(value, int | float):
        return NUMBERS if isinstance(value, int) else frozenset(("number",))
    return frozenset(("object" if isinstance(value, Mapping) else "string" if isinstance(value, str) else "array",))


class _Schema:
    """The types and values that a tool's schema allows for one argument, or for one value within it."""

    def __init__(self, root: JSON) -> None:
        self.root = root
        self.kinds: frozenset[str] | None = frozenset()
        """The types that it allows; None for any."""
        self.named: set[str] = set()
        """Those that it names; of the others it allows no more than `values`."""
        self.values: list[JSON] = []
        """The values of `enum` and `const`."""
        self._steps = MAX_STEPS

    def at(self, path: Sequence[str]) -> _Schema | None:
        """Returns the schema at that path, or None if none is declared."""
        schemas: list[JSON] = [self.root]
        for step in path:
            schemas = [inner for schema in schemas for inner in self._declared_schemas(schema, step)]
        self.kinds = _union([self._allowed_kinds(schema) for schema in schemas])
        return self if schemas else None

    def read(self, text: str) -> JSON:
        """Returns the value that `text` spells."""
        if text in self.values:
            return text
        stripped = text.strip()
        if self.kinds is None or "string" in self.kinds:
            is_null = stripped == "None" and self.kinds is not None and "null" in self.kinds
            return self._value_or_text(None if is_null else read_bare(text), text)
        for kind in KINDS:
            if kind not in self.kinds or (kind == "integer" and "number" in self.kinds):
                continue
            try:
                value = _READERS[kind](stripped)
            except ValueError:
                continue
            if (allowed := self._value_or_text(value, text)) is not text:
                return allowed
        return text

    def _value_or_text(self, value: JSON, text: str) -> JSON:
        """Returns the value if it is allowed, the listed one if it is one of those; else the text."""
        if self.kinds is None or kinds_of(value) & self.kinds & self.named:
            return value
        is_bool = isinstance(value, bool)
        return next((v for v in self.values if v == value and isinstance(v, bool) is is_bool), text)

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
        for part in _parts(schema, *COMBINATIONS):
            yield from self._declared_schemas(part, name)
        if isinstance(further := schema.get("additionalProperties"), Mapping):
            yield further

    def _allowed_kinds(self, schema: JSON) -> frozenset[str] | None:
        """Returns the types that a schema allows, those of all its keywords together; None for any."""
        schema = self._target(schema)
        if not isinstance(schema, Mapping):
            return None
        kinds = schema.get("type")
        kind_names = [kinds] if isinstance(kinds, str) else kinds if isinstance(kinds, Sequence) else []
        spelled = [SPELLINGS.get(kind, kind) for kind in kind_names if isinstance(kind, str)]
        types = {kind for kind in spelled if kind in KINDS}
        if not kind_names:
            types.update(kind for word, kind in IMPLIED.items() if word in schema)
        types |= NUMBERS if "number" in types else set()
        null = {"null"} if schema.get("nullable") is True else set()
        self.named |= types | null
        values = schema.get("enum")
        listed = [*values] if isinstance(values, Sequence) and not isinstance(values, str) else []
        listed += [schema["const"]] if "const" in schema else []
        self.values += listed
        allowed = frozenset(types or frozenset().union(*map(kinds_of, listed))) or None
        for word, join in (("anyOf", _union), ("oneOf", _union), ("allOf", _intersection)):
            parts = [self._allowed_kinds(part) for part in _parts(schema, word)]
            allowed = _intersection([allowed, join(parts)]) if parts else allowed
        return allowed and allowed | null

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
        pointer, target = reference.removeprefix("#"), self.root
        for step in pointer.split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            target = target.get(step) if isinstance(target, Mapping) else None
        return target if reference.startswith("#") else None


def _parts(schema: Mapping[str, JSON], *words: str) -> Iterable[JSON]:
    for word in words:
        parts = schema.get(word)
        if isinstance(parts, Sequence) and not isinstance(parts, str):
            yield from parts


def _union(parts: Sequence[frozenset[str] | None]) -> frozenset[str] | None:
    kinds = [part for part in parts if part is not None]
    return frozenset().union(*kinds) if len(kinds) == len(parts) else None


def _intersection(parts: Sequence[frozenset[str] | None]) -> frozenset[str] | None:
    kinds = [part for part in parts if part is not None]
    return kinds[0].intersection(*kinds) if kinds else None


def _null(text: str) -> JSON:
    if text not in NULLS:
        raise ValueError("not null")
    return None


def _boolean(text: str) -> JSON:
    if (value := BOOLEANS.get(text.lower())) is None:
        raise ValueError("not a boolean")
    return value


def _integer(text: str) -> JSON:
    """Reads an integer by its digits: a float holds no more than 15 of them for certain."""
    match = NUMBER.fullmatch(text)
    fraction = "" if match is None else (match["fraction"] or "").rstrip("0")
    num_zeros = -1 if match is None else int(match["exponent"] or 0) - len(fraction)
    if match is None or not 0 <= num_zeros <= MAX_ZEROS:
        raise ValueError("not an integer")
    return int(f"{match['whole']}{fraction}{'0' * num_zeros}")


def _number(text: str) -> JSON:
    if INTEGER.fullmatch(text):
        return int(text)
    match = NUMBER.fullmatch(text)
    if match is None or abs(value := float(text)) == float("inf"):
        raise ValueError("not a number")
    is_whole = match["whole"].strip("+-") and not match["exponent"] and not match["fraction"].strip("0")
    whole = int(match["whole"]) if is_whole else value
    return value if whole == value else whole


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
COMBINATIONS = ("anyOf", "oneOf", "allOf")
KINDS = ("null", "boolean", "integer", "number", "object", "array", "string")
"""JSON Schema's types, the most specific first."""
SPELLINGS = {"str": "string", "int": "integer", "float": "number", "bool": "boolean", "dict": "object", "list": "array"}
"""Python's names for the types, which some tool documentation uses."""
IMPLIED = {
    **dict.fromkeys(("properties", "additionalProperties"), "object"),
    **dict.fromkeys(("items", "prefixItems"), "array"),
    **dict.fromkeys(("pattern", "minLength", "maxLength"), "string"),
}
"""The type of a schema that names none, by its keywords."""
NULLS = ("null", "None")
"""The spellings of null in templates: JSON's and Python's."""
BOOLEANS = {"true": True, "false": False}
NUMBERS = frozenset(("integer", "number"))
INTEGER = re.compile(r"[+-]?[0-9]++")
NUMBER = re.compile(
    r"(?P<whole>[+-]?(?:[0-9]++|(?=\.[0-9])))(?:\.(?P<fraction>[0-9]*+))?+(?:[eE](?P<exponent>[+-]?[0-9]++))?+"
)
MAX_ZEROS = 308
"""The maximum exponent of an integer."""
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

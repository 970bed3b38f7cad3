"""Reads what other libraries write beside a type: pydantic's `Field`, annotated_types, msgspec's `Meta`.

They are recognized by their attributes, so that none of these libraries is imported.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field
from typing import Annotated, Any

from agentgym.errors import ToolSchemaError

__all__ = ["Fields", "add_metadata"]

Schema = dict[str, Any]
BOUNDS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}
NOTES = {"title": "title", "description": "description", "documentation": "description", "examples": "examples"}
KEYWORDS = {**BOUNDS, **NOTES, "multiple_of": "multipleOf", "pattern": "pattern"}
"""The JSON Schema keyword of each attribute."""
SIZES = {"string": "Length", "array": "Items", "object": "Properties"}
UNREAD = tuple(
    "alias validation_alias default_factory_takes_validated_data func tz max_digits decimal_places strip_whitespace "
    "to_upper to_lower ascii_only".split()
)
"""Attributes that change or restrict a value in ways that no JSON Schema holds."""
UNDEFINED = ("PydanticUndefinedType", "_MISSING_TYPE", "ellipsis")
"""The types of defaults that mean that there is none."""


@dataclass(frozen=True)
class Fields:
    """The parameters of a function, or the fields of a class. Make one with `Fields.of`."""

    hints: Mapping[str, Any]
    """Their types."""
    defaults: Mapping[str, object]
    """The plain defaults of those that may be missing; `MISSING` for one that has no value here."""
    given: Mapping[str, Any] = field(default_factory=dict)
    """The Fields that give the other defaults."""

    @classmethod
    def of(cls, hints: Mapping[str, Any], defaults: Mapping[str, object]) -> Fields:
        """Moves each Field among the defaults to its type, and finds those in types; a plain default takes precedence.

        Raises ToolSchemaError for a default of another library, which the function would get as it is.
        """
        moved, plain = dict(hints), dict(defaults)
        for name, default in defaults.items():
            if _is_field(default):
                moved[name] = Annotated[hints[name], plain.pop(name)]
            elif hasattr(default, "default") and hasattr(default, "default_factory"):
                what = f"{default!r:.80} of {type(default).__module__}"
                raise ToolSchemaError(f"{name!r}: the default {what} is not read; use pydantic's Field")
        settings = {
            name: entry
            for name in moved.keys() - plain.keys()
            for entry in getattr(moved[name], "__metadata__", ())
            if _is_field(entry) and _has_default(entry)
        }
        return cls(moved, plain, settings)

    def shown_default(self, name: str) -> object:
        """Returns the default that a schema shows, if it is JSON; `MISSING` if there is none."""
        return self.defaults.get(name, getattr(self.given.get(name), "default", MISSING))

    def add_defaults(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Returns `arguments` with the defaults of Fields for those that are missing."""
        return arguments | {name: _make_default(part) for name, part in self.given.items() if name not in arguments}


def add_metadata(schema: Schema, entry: Any) -> Schema:
    """Returns `schema` with what an entry of `Annotated` adds; raises ToolSchemaError for what no schema can hold."""
    if isinstance(entry, str):
        return {**schema, "description": entry}
    if isinstance(entry, Mapping):
        return {**schema, **entry}
    if entry is None or isinstance(entry, type | re.Pattern):
        return schema
    refused = [name for name in UNREAD if getattr(entry, name, None)]
    extra = getattr(entry, "json_schema_extra", None)
    if refused or callable(extra):
        what = f"{' and '.join(refused) or 'json_schema_extra'} of {entry!r:.80}"
        raise ToolSchemaError(f"{what} cannot be part of a JSON Schema; leave it out, and let the function do it")
    metadata = getattr(entry, "metadata", ())
    for inner in metadata if isinstance(metadata, list | tuple) else ():
        schema = add_metadata(schema, inner)
    values = [(keyword, getattr(entry, name, None)) for name, keyword in KEYWORDS.items()]
    for bound in ("min", "max"):
        values += [(f"{bound}{SIZES[kind]}", getattr(entry, f"{bound}_length", None)) for kind in _kinds(schema)]
    added = {keyword: _plain(value) for keyword, value in values if value is not None and not callable(value)}
    return {**schema, **added, **(extra or {})}


def _plain(value: Any) -> Any:
    if not isinstance(value, re.Pattern):
        return value
    if value.flags & ~re.UNICODE:
        raise ToolSchemaError(f"flags of the pattern {value!r:.80} cannot be part of a JSON Schema")
    return value.pattern


def _is_field(value: object) -> bool:
    names = ("default", "default_factory", "metadata")
    return not isinstance(value, type) and all(hasattr(value, name) for name in names)


def _has_default(entry: Any) -> bool:
    return callable(entry.default_factory) or type(entry.default).__name__ not in UNDEFINED


def _make_default(entry: Any) -> object:
    return entry.default_factory() if callable(entry.default_factory) else copy.deepcopy(entry.default)


def _kinds(schema: Schema) -> list[str]:
    """Returns the types with a size that the values of `schema` may have."""
    options = schema.get("anyOf", [schema])
    kinds = {option.get("type", "object" if "$ref" in option else "any") for option in options}
    return [kind for kind in SIZES if kind in kinds or "any" in kinds]

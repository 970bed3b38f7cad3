"""Reads an OpenAPI 3 document: its references, and its schemas as self-contained JSON Schemas."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import yaml

from agentgym.errors import ToolSchemaError

__all__ = ["OpenApiDocument"]

SCHEMA_MAPPINGS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
ONE = (
    "items",
    "additionalProperties",
    "not",
    "if",
    "then",
    "else",
    "contains",
    "propertyNames",
    "unevaluatedProperties",
)
MANY = ("allOf", "anyOf", "oneOf", "prefixItems")
OF_OTHERS = {"$ref", "allOf", "anyOf", "oneOf"}
"""The keywords by which a schema is made of others, which may refuse null."""
MAX_REFERENCES = 64
"""The most references in a row: a longer chain is circular."""


class OpenApiDocument:
    """An OpenAPI document of version 3.0 or 3.1."""

    def __init__(self, source: Mapping[str, Any] | str | Path) -> None:
        self.name = "the OpenAPI document" if isinstance(source, Mapping) else repr(str(source))
        root = source if isinstance(source, Mapping) else _load(Path(source))
        version = root.get("openapi", root.get("swagger")) if isinstance(root, Mapping) else None
        if not isinstance(root, Mapping) or not str(version).startswith("3."):
            raise ToolSchemaError(f"{self.name} is not of OpenAPI 3: its version is {version!r}")
        self.root = root
        self._is_old = str(version).startswith("3.0")
        self._definitions: dict[str, str] = {}
        self._pending: list[str] = []
        self._around: str | None = None
        self.foreign: set[str] = set()
        """The keywords of other versions that were read as they are meant."""

    def follow_reference(self, node: Any) -> Any:
        """Returns `node`, or the target of its `$ref`."""
        for _ in range(MAX_REFERENCES):
            if not isinstance(node, Mapping) or not isinstance(node.get("$ref"), str):
                return node
            node = self._at(node["$ref"])
        raise ToolSchemaError(f"{self.name}: a $ref leads round in a circle")

    def object_at(self, node: Any, what: str) -> Mapping[str, Any]:
        """Returns `node` or the target of its `$ref`, which is an object; `what` names it in the error."""
        target = self.follow_reference(node)
        if not isinstance(target, Mapping):
            raise ToolSchemaError(f"{self.name}: {what} is not an object, but {str(target)[:80]!r}")
        return target

    def parameters(self, properties: Mapping[str, Any], required: list[str]) -> dict[str, Any]:
        """Returns an object schema of these properties, with their references in `$defs`; recursion is kept."""
        definitions: dict[str, Any] = {}
        self._pending.clear()
        self._around = None
        schema: dict[str, Any] = {
            "type": "object",
            "properties": {name: self._schema(part, definitions) for name, part in properties.items()},
            "required": required,
            "additionalProperties": False,
        }
        for reference in self._pending:  # which grows meanwhile: a long chain of references is no recursion
            target = self._at(reference)
            is_anchor = isinstance(target, Mapping) and target.get("$recursiveAnchor") is True
            self._around = reference if is_anchor else None
            definitions[self._definitions[reference]] = self._schema(target, definitions)
        return {**schema, "$defs": definitions} if definitions else schema

    def _at(self, reference: str) -> Any:
        if not reference.startswith("#/"):
            raise ToolSchemaError(f"{self.name}: $ref {reference!r} leads out of the document: bundle it into one file")
        node: Any = self.root
        for part in unquote(reference[2:]).split("/"):
            part = part.replace("~1", "/").replace("~0", "~")
            within = node if isinstance(node, Mapping) else dict(enumerate(node)) if isinstance(node, list) else {}
            key = int(part) if part.isdecimal() and part not in within else part  # YAML reads a status as a number
            if key not in within:
                raise ToolSchemaError(f"{self.name}: $ref {reference!r} leads nowhere")
            node = within[key]
        return node

    def _schema(self, node: Any, definitions: dict[str, Any]) -> Any:
        """Converts a schema of the document to JSON Schema; the schemas it refers to are put into `definitions`."""
        if not isinstance(node, Mapping):
            return node
        node = self._modern(self._sendable(node))
        schema: dict[str, Any] = {}
        for key, value in node.items():
            if key == "$ref":
                schema[key] = self._move_definition(str(value), definitions)
            elif key in SCHEMA_MAPPINGS and isinstance(value, Mapping):
                schema[key] = {name: self._schema(part, definitions) for name, part in value.items()}
            elif key in MANY and isinstance(value, list):
                schema[key] = [self._schema(part, definitions) for part in value]
            else:
                schema[key] = self._schema(value, definitions) if key in ONE else value
        return schema

    def _sendable(self, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns `schema` without its `readOnly` properties: in OpenAPI only answers have them, even if required."""
        parts, required = schema.get("properties"), schema.get("required")
        if not isinstance(parts, Mapping):
            return schema
        properties = {name: part for name, part in parts.items() if not _is_read_only(self.follow_reference(part))}
        if len(properties) == len(parts):
            return schema
        names = (
            [name for name in required if name in properties or name not in parts] if isinstance(required, list) else []
        )
        return {**schema, "properties": properties, "required": names}

    def _modern(self, node: Mapping[str, Any]) -> dict[str, Any]:
        """Rewrites the forms of OpenAPI 3.0 and of older drafts of JSON Schema as today's."""
        schema, old = dict(node), []
        if isinstance(schema.get("nullable"), bool):
            old.append("nullable")
            if schema.pop("nullable"):
                if isinstance(schema.get("type"), str):
                    schema["type"] = [schema["type"], "null"]
                if isinstance(values := schema.get("enum"), list) and None not in values:
                    schema["enum"] = [*values, None]
                if schema.keys() & OF_OTHERS:
                    schema = {"anyOf": [schema, {"type": "null"}]}
        for bound, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
            if isinstance(schema.get(exclusive), bool):
                old.append(f"{exclusive}: {str(schema[exclusive]).lower()}")
                if schema.pop(exclusive) and bound in schema:
                    schema[exclusive] = schema.pop(bound)
        foreign = [name for name in ("$recursiveAnchor", "$recursiveRef") if schema.pop(name, None) is not None]
        if "$recursiveRef" in foreign and self._around is not None:
            schema["$ref"] = self._around
        if isinstance(schema.get("items"), list):
            foreign.append("items: [...]")
            schema["prefixItems"], schema["items"] = schema["items"], schema.pop("additionalItems", True)
        if isinstance(schema.get("required"), bool):
            foreign.append(f"required: {str(schema.pop('required')).lower()}")
        self.foreign.update(foreign if self._is_old else [*foreign, *old])
        return schema

    def _move_definition(self, reference: str, definitions: dict[str, Any]) -> str:
        if reference not in self._definitions:
            short = reference.removeprefix("#/components/schemas/").removeprefix("#/")
            name = re.sub(r"[^A-Za-z0-9_.-]", "_", short)
            while name in self._definitions.values():
                name += "_"
            self._definitions[reference] = name
        name = self._definitions[reference]
        if name not in definitions:
            definitions[name] = {}
            self._pending.append(reference)
        return f"#/$defs/{name}"


def _is_read_only(schema: Any) -> bool:
    return isinstance(schema, Mapping) and schema.get("readOnly") is True


class _Loader(yaml.SafeLoader):
    """Loads YAML 1.2 as OpenAPI requires it: dates are text, and so are `no` and `on`."""

    yaml_implicit_resolvers = {
        sign: [(tag, pattern) for tag, pattern in ways if not tag.endswith((":timestamp", ":bool"))]
        for sign, ways in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile("(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)


def _load(path: Path) -> Any:
    try:
        text = path.read_text(encoding="utf-8-sig")
        return json.loads(text) if path.suffix == ".json" else yaml.load(text, _Loader)
    except OSError as error:
        raise ToolSchemaError(f"cannot read the OpenAPI document {str(path)!r}: {error.strerror}") from error
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise ToolSchemaError(f"{str(path)!r} is neither JSON nor YAML: {error}") from error

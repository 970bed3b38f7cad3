"""An operation of an OpenAPI document: its arguments, and the place of each in the request."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from agentgym.errors import ToolFailure, ToolSchemaError
from agentgym.tools.openapi.document import OpenApiDocument
from agentgym.types import JSON, ToolSpec

__all__ = ["Operation", "Wire", "names_of", "operations_of"]

METHODS = ("get", "put", "post", "delete", "patch", "head", "options")
PLACES = ("path", "query", "header", "cookie")
FORM = "application/x-www-form-urlencoded"
IGNORED_HEADERS = ("accept", "content-type", "authorization")
"""Names of header parameters that OpenAPI ignores."""


@dataclass(frozen=True, kw_only=True)
class Wire:
    """A request as it is sent."""

    method: str
    path: str
    query: tuple[tuple[str, str], ...]
    headers: Mapping[str, str]
    body: bytes | None = None


@dataclass(frozen=True, kw_only=True)
class _Place:
    """The place of an argument; `where` is path, query, header, cookie or body."""

    where: str
    name: str
    style: str = ""
    explode: bool = False
    media: str = ""


class Operation:
    """One operation. `given` are the headers and query parameters that its author sends; models do not see them."""

    def __init__(self, document: OpenApiDocument, method: str, path: str, given: frozenset[tuple[str, str]]) -> None:
        item = document.object_at(document.root["paths"][path], f"path {path!r}")
        node = item[method]
        self._method, self._path = method.upper(), path
        self.name = _name_of(node, method, path)
        self._places: dict[str, _Place] = {}
        properties: dict[str, Any] = {}
        required: list[str] = []
        for parameter in self._parameters(document, item, node):
            where, name = parameter["in"], parameter["name"]
            if (where, name.lower()) in given or (where == "header" and name.lower() in IGNORED_HEADERS):
                continue
            place, schema = _read_place(parameter)
            self._add(place, schema, parameter.get("description"), properties)
            if parameter.get("required") or where == "path":
                required.append(list(properties)[-1])
        if node.get("requestBody") is not None:
            body = document.object_at(node["requestBody"], f"the body of {self.name!r}")
            media, schema = self._media(body, document)
            self._add(_Place(where="body", name="body", media=media), schema, body.get("description"), properties)
            if body.get("required"):
                required.append(list(properties)[-1])
        description = "\n\n".join(filter(None, (node.get("summary"), node.get("description"))))
        self.spec = ToolSpec(self.name, description, document.parameters(properties, required))

    def _parameters(
        self, document: OpenApiDocument, item: Mapping[str, Any], node: Mapping[str, Any]
    ) -> Iterable[Mapping[str, Any]]:
        """Returns the parameters of the path and the operation's own, which take precedence."""
        merged: dict[tuple[str, str], Mapping[str, Any]] = {}
        for entry in (*(item.get("parameters") or ()), *(node.get("parameters") or ())):
            parameter = document.object_at(entry, f"a parameter of {self.name!r}")
            if parameter.get("in") not in PLACES or not isinstance(parameter.get("name"), str):
                raise ToolSchemaError(
                    f"{document.name}: a parameter of {self.name!r} has a name, and is in {', '.join(PLACES)}; this "
                    f"one is {str(parameter)[:80]}"
                )
            merged[parameter["in"], parameter["name"]] = parameter
        return merged.values()

    def _add(self, place: _Place, schema: Any, description: object, properties: dict[str, Any]) -> None:
        name = place.name if place.name not in properties else f"{place.name}_{place.where}"
        if isinstance(description, str) and isinstance(schema, Mapping) and "description" not in schema:
            schema = {**schema, "description": description}
        self._places[name] = place
        properties[name] = schema

    def _media(self, body: Mapping[str, Any], document: OpenApiDocument) -> tuple[str, Any]:
        content = body.get("content", {})
        for media in content:
            kind = media.partition(";")[0].strip().lower()
            if kind == FORM or kind == "application/json" or kind.endswith("+json"):
                return kind, content[media].get("schema", {})
        raise ToolSchemaError(
            f"{document.name}: the body of {self.name!r} is {', '.join(content) or 'of no type'}; JSON and forms can "
            "be sent. Leave it out: names=[...] are the operations that become tools"
        )

    def wire(self, arguments: Mapping[str, JSON]) -> Wire:
        """Returns the request of a call; raises ToolFailure for an argument that cannot be sent."""
        path, body = self._path, None
        query: list[tuple[str, str]] = []
        headers: dict[str, str] = {}
        cookies: list[str] = []
        for argument, value in arguments.items():
            place = self._places[argument]
            if place.where == "path":
                path = path.replace("{" + place.name + "}", _segment(argument, value, place))
            elif place.where == "query":
                query.extend(_pairs(place, value))
            elif place.where == "header":
                headers[place.name] = _line(argument, _join_value(place, value))
            elif place.where == "cookie":
                cookies.append(f"{place.name}={quote(_join_value(place, value), safe='')}")
            else:
                headers["Content-Type"] = place.media
                body = _body(place, value)
        if cookies:
            headers["Cookie"] = "; ".join(cookies)
        return Wire(method=self._method, path=path, query=tuple(query), headers=headers, body=body)


def operations_of(
    document: OpenApiDocument, given: frozenset[tuple[str, str]], names: frozenset[str] | None
) -> Iterator[Operation]:
    """Yields the operations of these names, or all."""
    for name, method, path in _list_operations(document):
        if names is None or name in names:
            yield Operation(document, method, path, given)


def names_of(document: OpenApiDocument) -> list[str]:
    """Returns the names of all operations, including those that cannot be tools."""
    return [name for name, _, _ in _list_operations(document)]


def _list_operations(document: OpenApiDocument) -> Iterator[tuple[str, str, str]]:
    """Yields the name, method and path of each operation."""
    for path, item in document.object_at(document.root.get("paths") or {}, "the value of paths").items():
        for method, node in document.object_at(item, f"path {path!r}").items():
            if method in METHODS:
                yield _name_of(document.object_at(node, f"{method} of path {path!r}"), method, path), method, path


def _name_of(node: Mapping[str, Any], method: str, path: str) -> str:
    """Returns the operation's id in the characters of a tool's name; without an id, the method and the path."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", str(node.get("operationId") or f"{method}{path}")).strip("_")[:64]


def _read_place(parameter: Mapping[str, Any]) -> tuple[_Place, Any]:
    where, name = parameter["in"], parameter["name"]
    for media, content in parameter.get("content", {}).items():
        return _Place(where=where, name=name, style="json", media=media), content.get("schema", {})
    style = parameter.get("style", "form" if where in ("query", "cookie") else "simple")
    explode = bool(parameter.get("explode", style in ("form", "deepObject")))
    return _Place(where=where, name=name, style=style, explode=explode), parameter.get("schema", {})


def _text(value: JSON) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _join_value(place: _Place, value: JSON) -> str:
    """Returns a value as one text: the items of a list, and the pairs of an object, with commas between."""
    if place.style == "json":
        return _text(value) if not isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    between = {"spaceDelimited": " ", "pipeDelimited": "|"}.get(place.style, ",")
    if isinstance(value, list):
        return between.join(_text(item) for item in value)
    if isinstance(value, Mapping):
        equals = "=" if place.explode else ","
        return ",".join(f"{key}{equals}{_text(item)}" for key, item in value.items())
    return _text(value)


def _pairs(place: _Place, value: JSON) -> Iterator[tuple[str, str]]:
    if place.style == "deepObject" and isinstance(value, Mapping):
        yield from ((f"{place.name}[{key}]", _text(item)) for key, item in value.items())
    elif place.explode and isinstance(value, Mapping):
        yield from ((key, _text(item)) for key, item in value.items())
    elif place.explode and isinstance(value, list):
        yield from ((place.name, _text(item)) for item in value)
    else:
        yield place.name, _join_value(place, value)


def _segment(argument: str, value: JSON, place: _Place) -> str:
    """Returns a value as a segment of the path, which it cannot leave."""
    text = _join_value(place, value)
    if text in ("", ".", ".."):
        raise ToolFailure(f"argument {argument!r} is part of the path of a URL, where {text!r} is not possible")
    return quote(text.encode("utf-8", "replace"), safe="")


def _line(argument: str, text: str) -> str:
    if not text.isprintable() or not text.isascii():
        raise ToolFailure(f"argument {argument!r} is sent in a header, which holds printable ASCII alone")
    return text


def _body(place: _Place, value: JSON) -> bytes:
    if place.media != FORM:
        return json.dumps(value).encode()
    fields = value.items() if isinstance(value, Mapping) else ()
    return "&".join(f"{quote(key, safe='')}={quote(_text(item), safe='')}" for key, item in fields).encode()

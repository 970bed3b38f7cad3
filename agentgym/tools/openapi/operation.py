"""An operation of an OpenAPI document: its arguments, and the place of each in the request."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from agentgym.errors import ToolFailure, ToolSchemaError
from agentgym.tools.calling.foreign_tools import fit_names
from agentgym.tools.openapi.document import OpenApiDocument
from agentgym.types import JSON, ToolSpec

__all__ = ["Operation", "Wire", "list_operations"]

METHODS = ("get", "put", "post", "delete", "patch", "head", "options")
STYLES = {
    "path": ("simple",),
    "query": ("form", "spaceDelimited", "pipeDelimited", "deepObject"),
    "header": ("simple",),
    "cookie": ("form",),
}
"""The styles that can be sent, the default first; those of a form's properties are the query's."""
PLACES = tuple(STYLES)
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
class _Target:
    """The place of an argument; `where` is path, query, header, cookie or body."""

    where: str
    name: str
    style: str = ""
    explode: bool = False
    media: str = ""
    fields: Mapping[str, _Target] = field(default_factory=dict)
    """The properties of a form for which the document defines how they are written."""


class Operation:
    """One operation. `given` are the headers and query parameters that its author sends; models do not see them.

    Raises ToolSchemaError for an operation that cannot be a tool.
    """

    def __init__(
        self, document: OpenApiDocument, name: str, method: str, path: str, preset_names: frozenset[tuple[str, str]]
    ) -> None:
        item = document.object_at(document.root["paths"][path], f"path {path!r}")
        node = item[method]
        self._method, self._path = method.upper(), path
        self.name = name
        self._targets: dict[str, _Target] = {}
        properties: dict[str, Any] = {}
        required: list[str] = []
        for parameter in self._parameters(document, item, node):
            where, lower = parameter["in"], parameter["name"].lower()
            if (where, lower) in preset_names or (where == "header" and lower in IGNORED_HEADERS):
                continue
            target, schema = _read_target(parameter)
            self._add(target, schema, parameter.get("description"), properties)
            if parameter.get("required") or where == "path":
                required.append(list(properties)[-1])
        if node.get("requestBody") is not None:
            body = document.object_at(node["requestBody"], f"the body of {self.name!r}")
            target, schema = self._read_body(body, document)
            self._add(target, schema, body.get("description"), properties)
            if body.get("required"):
                required.append(list(properties)[-1])
        path_alone = path.partition("#")[0]
        filled = {
            target.name
            for target in self._targets.values()
            if target.where == "path" and f"{{{target.name}}}" in path_alone
        }
        if empty := set(re.findall(r"{([^{}]*)}", path)) - filled:
            raise ToolSchemaError(f"{document.name}: no parameter of {self.name!r} fills {{{min(empty)}}} of its path")
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

    def _add(self, target: _Target, schema: Any, description: object, properties: dict[str, Any]) -> None:
        name = target.name if target.name not in properties else f"{target.name}_{target.where}"
        if isinstance(description, str) and isinstance(schema, Mapping) and "description" not in schema:
            schema = {**schema, "description": description}
        self._targets[name] = target
        properties[name] = schema

    def _read_body(self, body: Mapping[str, Any], document: OpenApiDocument) -> tuple[_Target, Any]:
        content = body.get("content", {})
        for media in content:
            kind = media.partition(";")[0].strip().lower()
            if kind == FORM or kind == "application/json" or kind.endswith("+json"):
                encoding = content[media].get("encoding") or {} if kind == FORM else {}
                fields = {name: target for name, part in encoding.items() if (target := _read_encoding(name, part))}
                target = _Target(where="body", name="body", media=kind, fields=fields)
                return target, content[media].get("schema", {})
        raise ToolSchemaError(
            f"{document.name}: the body of {self.name!r} is {', '.join(content) or 'of no type'}; JSON and forms can "
            "be sent"
        )

    def wire(self, arguments: Mapping[str, JSON]) -> Wire:
        """Returns the request of a call; raises ToolFailure for an argument that cannot be sent."""
        path, body = self._path, None
        query: list[tuple[str, str]] = []
        headers: dict[str, str] = {}
        cookies: list[str] = []
        for argument, value in arguments.items():
            target = self._targets[argument]
            if target.where == "path":
                path = path.replace("{" + target.name + "}", _segment(argument, value, target))
            elif target.where == "query":
                query.extend(_pairs(target, value))
            elif target.where == "header":
                headers[target.name] = _line(argument, _join_value(target, value))
            elif target.where == "cookie":
                cookies.append(f"{target.name}={quote(_join_value(target, value), safe='')}")
            else:
                headers["Content-Type"] = target.media
                body = _body(target, value)
        if cookies:
            headers["Cookie"] = "; ".join(cookies)
        return Wire(method=self._method, path=path, query=tuple(query), headers=headers, body=body)


def list_operations(document: OpenApiDocument) -> dict[str, tuple[str, str, str]]:
    """Returns the id, method and path of each operation by the tool's name; an id that is used twice gets its path.

    Raises ToolSchemaError for a path that does not begin with `/`: another host would get the secrets.
    """
    listed: dict[str, tuple[str, str, str]] = {}
    for path, item in document.object_at(document.root.get("paths") or {}, "the value of paths").items():
        path = str(path)
        if path.startswith("x-"):
            continue
        if not path.startswith("/"):
            raise ToolSchemaError(
                f"{document.name}: path {path!r} does not begin with /, so its requests could go to another host: "
                "correct it, or take it out"
            )
        for method, node in document.object_at(item, f"path {path!r}").items():
            if method in METHODS:
                operation_id = document.object_at(node, f"{method} of path {path!r}").get("operationId")
                own = re.sub(r"[^A-Za-z0-9_.-]+", "_", str(operation_id or f"{method}{path}")).strip("_")
                own = f"{own} {method}{path}" if own in listed else own
                listed[own] = str(operation_id or own), method, path
    return dict(zip(fit_names(listed, others="_.-"), listed.values(), strict=True))


def _read_target(parameter: Mapping[str, Any]) -> tuple[_Target, Any]:
    where, name = parameter["in"], parameter["name"]
    for media, content in parameter.get("content", {}).items():
        return _Target(where=where, name=name, style="json", media=media), content.get("schema", {})
    return _style_target(where, name, parameter), parameter.get("schema", {})


def _read_encoding(name: str, encoding: Mapping[str, Any]) -> _Target | None:
    if "style" in encoding or "explode" in encoding:
        return _style_target("body", name, encoding)
    return _Target(where="body", name=name, style="json") if "json" in encoding.get("contentType", "") else None


def _style_target(where: str, name: str, node: Mapping[str, Any]) -> _Target:
    styles = STYLES.get(where, STYLES["query"])
    style = node.get("style") or styles[0]
    if style not in styles:
        raise ToolSchemaError(f"{name!r} in {where} has the style {style!r}; {' and '.join(styles)} can be sent")
    explode = bool(node.get("explode", style in ("form", "deepObject")))
    return _Target(where=where, name=name, style=style, explode=explode)


def _text(value: JSON) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _join_value(target: _Target, value: JSON) -> str:
    """Returns a value as one text: the items of a list, and the pairs of an object, with commas between."""
    if target.style == "json":
        return _text(value) if not isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    between = {"spaceDelimited": " ", "pipeDelimited": "|"}.get(target.style, ",")
    if isinstance(value, list):
        return between.join(_text(item) for item in value)
    if isinstance(value, Mapping):
        equals = "=" if target.explode else between
        return between.join(f"{key}{equals}{_text(item)}" for key, item in value.items())
    return _text(value)


def _pairs(target: _Target, value: JSON) -> Iterator[tuple[str, str]]:
    if target.style == "deepObject":
        yield from _deep_pairs(target.name, value)
    elif target.explode and isinstance(value, Mapping):
        yield from ((key, _text(item)) for key, item in value.items())
    elif target.explode and isinstance(value, list):
        yield from ((target.name, _text(item)) for item in value)
    else:
        yield target.name, _join_value(target, value)


def _deep_pairs(name: str, value: JSON) -> Iterator[tuple[str, str]]:
    """Yields the leaves of a value as `name[key][0]=leaf`, as servers that know this style read them."""
    if not isinstance(value, Mapping | list):
        yield name, _text(value)
        return
    for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
        yield from _deep_pairs(f"{name}[{key}]", item)


def _segment(argument: str, value: JSON, target: _Target) -> str:
    """Returns a value as a segment of the path, which it cannot leave."""
    text = _join_value(target, value)
    if text in ("", ".", ".."):
        raise ToolFailure(f"argument {argument!r} is part of the path of a URL, where {text!r} is not possible")
    return quote(text.encode("utf-8", "replace"), safe="")


def _line(argument: str, text: str) -> str:
    if not text.isprintable() or not text.isascii():
        raise ToolFailure(f"argument {argument!r} is sent in a header, which holds printable ASCII alone")
    return text


def _body(target: _Target, value: JSON) -> bytes:
    if target.media != FORM:
        return json.dumps(value).encode()
    if not isinstance(value, Mapping):
        raise ToolFailure(f"{target.name} is sent as a form, which is an object, not {_text(value)[:80]}")
    pairs: list[tuple[str, str]] = []
    for name, item in value.items():
        # without an encoding the items of a list are fields of one name, and an object is JSON
        style = "json" if isinstance(item, Mapping) else "form"
        default = _Target(where="body", name=name, style=style, explode=style == "form")
        pairs.extend(_pairs(target.fields.get(name, default), item))
    return "&".join(f"{quote(name, safe='')}={quote(text, safe='')}" for name, text in pairs).encode()

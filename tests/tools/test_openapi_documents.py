"""OpenAPI documents as they are: forms, uploads, long names, paths of other hosts, foreign keywords, BOMs."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import pytest

from agentgym.errors import ConfigError, ToolFailure, ToolSchemaError
from agentgym.tools import Tool, register_tool
from agentgym.tools.named_tools import named_tools
from agentgym.tools.openapi import openapi_tools

FORM = "application/x-www-form-urlencoded"
HOST = "http://api.example"


class Recorder(ThreadingHTTPServer):
    """A server that records the path, the key and the fields of each request."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str | None, list[tuple[str, str]]]] = []
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Recorder

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
        self.server.requests.append((self.path, self.headers.get("X-Key"), parse_qsl(body, keep_blank_values=True)))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *parts: Any) -> None:
        pass


@pytest.fixture(scope="module")
def server() -> Iterator[Recorder]:
    recorder = Recorder()
    thread = threading.Thread(target=recorder.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield recorder
    recorder.shutdown()
    thread.join()
    recorder.server_close()


def document(paths: Mapping[str, Any], version: str = "3.0.3", **schemas: Any) -> dict[str, Any]:
    return {"openapi": version, "info": {}, "paths": paths, "components": {"schemas": schemas}}


def posting(name: str, schema: Any, media: str = "application/json", **content: Any) -> dict[str, Any]:
    return {"post": {"operationId": name, "requestBody": {"content": {media: {"schema": schema, **content}}}}}


def send(tool: Tool, **arguments: Any) -> object:
    return asyncio.run(tool.fn(**arguments))  # type: ignore[arg-type]


def names_of(paths: Mapping[str, Any], **settings: Any) -> list[str]:
    return [tool.name for tool in openapi_tools(document(paths), HOST, **settings)]


# ---- forms

NESTED = {"order": 7, "lines": [{"price": "x"}]}


@pytest.mark.parametrize(
    ("encoding", "value", "fields"),
    [
        (None, ["a", "b c"], [("m", "a"), ("m", "b c")]),
        (None, True, [("m", "true")]),
        (None, {"order": 7}, [("m", '{"order":7}')]),
        ({"style": "form"}, {"order": 7}, [("order", "7")]),
        ({"explode": False}, ["a", "b"], [("m", "a,b")]),
        ({"style": "form", "explode": False}, {"order": 7, "b": "c"}, [("m", "order,7,b,c")]),
        ({"style": "deepObject", "explode": True}, {"order": 7}, [("m[order]", "7")]),
        ({"style": "deepObject"}, NESTED, [("m[order]", "7"), ("m[lines][0][price]", "x")]),
        ({"style": "deepObject"}, ["a", "b"], [("m[0]", "a"), ("m[1]", "b")]),
        ({"style": "spaceDelimited"}, ["a", "b"], [("m", "a b")]),
        ({"style": "pipeDelimited"}, ["a", "b"], [("m", "a|b")]),
        ({"style": "pipeDelimited", "explode": True}, ["a", "b"], [("m", "a"), ("m", "b")]),
        ({"contentType": "application/json"}, ["a"], [("m", '["a"]')]),
        ({"contentType": "text/plain"}, ["a", "b"], [("m", "a"), ("m", "b")]),
        ({"contentType": "text/plain"}, {"order": 7}, [("m", '{"order":7}')]),
    ],
)
def test_a_form_follows_the_style_of_its_encoding(
    server: Recorder, encoding: Any, value: object, fields: list[tuple[str, str]]
) -> None:
    parts = {} if encoding is None else {"encoding": {"m": encoding}}
    (tool,) = openapi_tools(document({"/m": posting("send", {"type": "object"}, FORM, **parts)}), server.url)
    send(tool, body={"m": value, "n": 1})
    assert server.requests[-1][2] == [*fields, ("n", "1")]


def test_a_form_that_is_no_object_is_answered() -> None:
    (tool,) = openapi_tools(document({"/m": posting("send", {}, FORM)}), HOST)
    with pytest.raises(ToolFailure, match=r"body is sent as a form, which is an object, not \[1\]"):
        send(tool, body=[1])


# ---- what cannot be offered


def test_an_operation_that_cannot_be_offered_is_left_out_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    label = {"name": "id", "in": "path", "style": "label", "schema": {}}
    paths = {
        "/pet": {"get": {"operationId": "findPet"}},
        "/image": posting("uploadFile", {}, "application/octet-stream"),
        "/type": posting("typed", {"type": "int"}),
        "/gone": posting("gone", {"$ref": "#/components/schemas/Gone"}),
        "/a/{id}": {"get": {"operationId": "unfilled"}},
        "/b/{id}": {"get": {"operationId": "labelled", "parameters": [label]}},
        "x-note": "no path",
    }
    for _ in range(2):
        assert names_of(paths) == ["findPet"]
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "5 of 6 tools cannot be offered and are left out: tool 'uploadFile': the body of" in warning
    for name, words in (
        ("uploadFile", "JSON and forms can be sent"),
        ("typed", "tool 'typed': not a JSON Schema"),
        ("gone", "tool 'gone': .* leads nowhere"),
        ("unfilled", "no parameter of 'unfilled' fills {id} of its path"),
        ("labelled", "tool 'labelled': 'id' in path has the style 'label'; simple can be sent"),
    ):
        with pytest.raises(ToolSchemaError, match=words):
            names_of(paths, names=[name])
    with pytest.raises(ToolSchemaError, match="JSON and forms can be sent"):
        names_of({"/image": paths["/image"]})


# ---- names

LONG = "put_metadata_templates_enterprise_securityClassification-6VMVochwUWo_schema"


def test_a_long_name_ends_in_a_digest_and_can_be_selected() -> None:
    ids = [f"{LONG}1", f"{LONG}2", "2fa", "pets/list", "pets_list", "pets.list"]
    paths = {f"/{number}": {"get": {"operationId": name}} for number, name in enumerate(ids)}
    names = names_of(paths)
    assert names[2:4] == ["_2fa", "pets_list"] and names[4].startswith("pets_list_") and names[5] == "pets.list"
    assert len(set(names)) == len(ids) and {len(name) for name in names[:2]} == {64}
    assert names_of(paths, names=[names[1], ids[0], "2fa"]) == [names[1], names[0], "_2fa"]


def test_two_operations_of_one_id_are_two_tools() -> None:
    paths = {"/a": {"get": {"operationId": "x"}, "put": {"operationId": "x"}}}
    assert names_of(paths) == ["x", "x_put_a"]
    assert names_of(paths, names=["x"]) == ["x"]


# ---- hosts


@pytest.mark.parametrize(
    "path", ["", "steal", "@evil.example/x", ":81/x", ".evil/x", "http://evil.example/x", "{host}/x"]
)
def test_a_path_that_could_name_another_host_is_refused(path: str) -> None:
    paths = {"/pet": {"get": {"operationId": "findPet"}}, path: {"get": {"operationId": "steal"}}}
    for names in (None, ["findPet"]):
        with pytest.raises(ToolSchemaError, match="does not begin with /, so its requests could go to another host"):
            names_of(paths, names=names)


@pytest.mark.parametrize("path", ["//evil.example/x", "/@evil.example/x", "/http://evil.example/x", "/../x", "/:1@x"])
def test_another_path_reaches_the_api_alone(server: Recorder, path: str) -> None:
    (tool,) = openapi_tools(document({path: posting("send", {})}), server.url, headers={"X-Key": "hush"})
    send(tool)
    assert server.requests[-1][:2] == (re.sub("^//", "/", path), "hush")


@pytest.mark.parametrize("value", ["//evil.example", "@evil.example", ":81", "evil.example:81", "\\\\evil", "http://e"])
def test_an_argument_in_the_path_names_no_host(server: Recorder, value: str) -> None:
    item = {"parameters": [{"name": "id", "in": "path", "schema": {"type": "string"}}], **posting("send", {})}
    (tool,) = openapi_tools(document({"/{id}/x": item}), server.url, headers={"X-Key": "hush"})
    send(tool, id=value)
    path, key, _ = server.requests[-1]
    assert key == "hush" and path.count("/") == 2 and path.endswith("/x")


@pytest.mark.parametrize("url", ["http://", "http:///v1", "http://api.example?a=", "http://api.example#a", "ftp://x"])
def test_an_address_without_a_host_or_with_more_than_a_path_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="base_url is where the API is"):
        openapi_tools(document({"/a": posting("a", {})}), url)


# ---- schemas


def test_keywords_of_other_versions_are_read_and_told_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    filters = {
        "$recursiveAnchor": True,
        "type": "object",
        "properties": {
            "above": {"type": "number", "minimum": 0, "exclusiveMinimum": True, "required": True},
            "below": {"type": "number", "maximum": 9, "exclusiveMaximum": False},
            "inner": {"type": "array", "items": {"anyOf": [{"$recursiveRef": "#"}, {"type": "null"}]}},
            "pair": {"type": "array", "items": [{"type": "string"}], "additionalItems": False},
            "note": {"type": "string", "enum": ["a"], "nullable": True},
        },
    }
    paths = {"/a": posting("a", {"$ref": "#/components/schemas/Filter"}), "/b": posting("b", {"required": False})}
    tool, _ = openapi_tools(document(paths, "3.1.0", Filter=filters), HOST)
    assert tool.spec.parameters["$defs"] == {
        "Filter": {
            "type": "object",
            "properties": {
                "above": {"type": "number", "exclusiveMinimum": 0},
                "below": {"type": "number", "maximum": 9},
                "inner": {"type": "array", "items": {"anyOf": [{"$ref": "#/$defs/Filter"}, {"type": "null"}]}},
                "pair": {"type": "array", "prefixItems": [{"type": "string"}], "items": False},
                "note": {"type": ["string", "null"], "enum": ["a", None]},
            },
        }
    }
    assert tool.check({"body": {"above": 1, "inner": [{"above": 2}, None], "note": None}}) is None
    assert "body.inner[0].above" in str(tool.check({"body": {"above": 1, "inner": [{"above": 0}]}}))
    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning.endswith(
        "as far as their meaning is clear: $recursiveAnchor, $recursiveRef, exclusiveMaximum: false, "
        "exclusiveMinimum: true, items: [...], nullable, required: false, required: true"
    )


def test_the_keywords_of_openapi_3_0_are_its_own(caplog: pytest.LogCaptureFixture) -> None:
    schema = {"type": "number", "nullable": True, "minimum": 0, "exclusiveMinimum": True}
    (tool,) = openapi_tools(document({"/a": posting("a", schema)}), HOST)
    body = tool.spec.parameters["properties"]["body"]  # type: ignore[index, call-overload]
    assert body == {"type": ["number", "null"], "exclusiveMinimum": 0} and not caplog.records


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [{"$ref": "#/components/schemas/Pet"}]},
        {"type": "object", "allOf": [{"$ref": "#/components/schemas/Pet"}], "description": "A pet."},
        {"oneOf": [{"$ref": "#/components/schemas/Pet"}, {"type": "string"}]},
        {"anyOf": [{"$ref": "#/components/schemas/Pet"}]},
        {"$ref": "#/components/schemas/Pet"},
    ],
)
def test_a_nullable_schema_made_of_others_takes_null(schema: dict[str, Any]) -> None:
    pet = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    paths = {"/a": posting("a", {"type": "object", "properties": {"pet": {**schema, "nullable": True}}})}
    (tool,) = openapi_tools(document(paths, "3.0.3", Pet=pet), HOST)
    assert tool.check({"body": {"pet": None}}) is None and tool.check({"body": {"pet": {"name": "Rex"}}}) is None
    assert tool.check({"body": {"pet": {}}}) is not None
    paths = {"/a": posting("a", {"type": "object", "properties": {"pet": {**schema, "nullable": False}}})}
    (tool,) = openapi_tools(document(paths, "3.0.3", Pet=pet), HOST)
    assert tool.check({"body": {"pet": None}}) is not None


def test_a_nullable_enum_without_a_type_takes_null(caplog: pytest.LogCaptureFixture) -> None:
    odd = {"/a": posting("a", {"enum": 5, "nullable": True}), "/b": posting("b", {"type": "string"})}
    assert [tool.name for tool in openapi_tools(document(odd), HOST)] == ["b"] and "left out" in caplog.text
    (tool,) = openapi_tools(document({"/a": posting("a", {"enum": ["a", 1], "nullable": True})}), HOST)
    assert tool.check({"body": None}) is None and tool.check({"body": "b"}) is not None


def test_a_fragment_of_a_path_is_not_sent_and_holds_no_argument(caplog: pytest.LogCaptureFixture) -> None:
    paths = {"/#Target=Get": posting("get", {"type": "object"}), "/x#{id}": posting("lost", {"type": "object"})}
    paths["/x#{id}"]["post"]["parameters"] = [{"in": "path", "name": "id", "required": True, "schema": {}}]
    (tool,) = openapi_tools(document(paths), HOST)
    assert tool.name == "get"
    (line,) = [record.getMessage() for record in caplog.records]
    assert "fills {id} of its path" in line


def test_a_long_chain_of_references_is_read() -> None:
    def linked(number: int) -> dict[str, Any]:
        return {"type": "object", "properties": {"next": {"$ref": f"#/components/schemas/S{number % 300}"}}}

    schemas = {f"S{number}": linked(number + 1) for number in range(300)}
    (tool,) = openapi_tools(document({"/a": posting("a", {"$ref": "#/components/schemas/S0"})}, **schemas), HOST)
    assert len(tool.spec.parameters["$defs"]) == 300  # type: ignore[arg-type]
    assert "body.next.next" in str(tool.check({"body": {"next": {"next": 1}}}))


def test_a_schema_nested_beyond_reason_leaves_its_operation_out() -> None:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(3000):
        schema = {"type": "array", "items": schema}
    assert names_of({"/a": posting("deep", schema), "/b": posting("flat", {})}) == ["flat"]


# ---- files


def test_files_of_tools_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    schema = {"name": "shout", "description": "Shouts.", "parameters": {"type": "object", "properties": {}}}
    contents: dict[str, Any] = {
        "api.json": document({"/p": posting("ping", {})}),
        "api.yaml": document({"/p": posting("ping", {})}),
        "tool.json": schema,
        "tools.json": [{"function": schema, "call": "own.py:shout"}],
        "servers.json": {"mcpServers": {"one": {"command": "python3"}}},
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + json.dumps(content).encode())
    (tmp_path / "own.py").write_text("def shout() -> str:\n    return 'A'\n")
    for name in ("api.json", "api.yaml"):
        assert [tool.name for tool in openapi_tools(tmp_path / name, HOST)] == ["ping"]
    assert register_tool(tmp_path / "tool.json", lambda: "A").name == "shout"
    assert [tool.name for tool in named_tools([str(tmp_path / "tools.json")]).tools] == ["shout"]
    assert len(named_tools([str(tmp_path / "servers.json")]).sources) == 1


def test_the_command_line_selects_operations_by_name(tmp_path: Path) -> None:
    path = tmp_path / "api.json"
    path.write_text(json.dumps(document({"/a": posting("a", {}), "/b": posting("b", {}), "/c": posting("c/d", {})})))
    for selected, names in (("", ["a", "b", "c_d"]), ("#b", ["b"]), ("#c/d,a", ["c_d", "a"])):
        assert [tool.name for tool in named_tools([f"openapi:{path}@{HOST}/v1{selected}"]).tools] == names
    with pytest.raises(ConfigError, match="has no tool 'e'"):
        named_tools([f"openapi:{path}@{HOST}#e"])

"""The operations of an OpenAPI document as tools, against a real server on this machine."""

from __future__ import annotations

import asyncio
import html
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web

from agentgym.errors import ConfigError, EnvironmentFault, ToolSchemaError
from agentgym.refusals import Secrets
from agentgym.tools import ToolRunner
from agentgym.tools.openapi import openapi_tools
from agentgym.types import ToolCall, ToolResult

PET = {
    "type": "object",
    "required": ["id", "name"],
    "properties": {
        "name": {"type": "string"},
        "tag": {"type": "string", "nullable": True},
        "weight": {"type": "number", "minimum": 0, "exclusiveMinimum": True},
        "id": {"$ref": "#/components/schemas/Id"},
        "children": {"type": "array", "items": {"$ref": "#/components/schemas/Pet"}},
    },
}
DOCUMENT: dict[str, Any] = {
    "openapi": "3.0.3",
    "info": {"title": "pets", "version": "1"},
    "paths": {
        "/pets": {
            "get": {
                "operationId": "pets/list",
                "summary": "Lists pets.",
                "description": "All of them.",
                "parameters": [
                    {"$ref": "#/components/parameters/Limit"},
                    {"name": "tags", "in": "query", "schema": {"type": "array", "items": {"type": "string"}}},
                    {"name": "ids", "in": "query", "explode": False, "schema": {"type": "array", "items": {}}},
                    {"name": "where", "in": "query", "style": "deepObject", "schema": {"type": "object"}},
                    {"name": "api_key", "in": "query", "required": True, "schema": {"type": "string"}},
                    {"name": "X-Trace", "in": "header", "schema": {"type": "string"}},
                    {"name": "session", "in": "cookie", "schema": {"type": "string"}},
                ],
            },
            "post": {
                "operationId": "createPet",
                "requestBody": {"$ref": "#/components/requestBodies/Pet"},
            },
        },
        "/pets/{id}": {
            "parameters": [{"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}],
            "get": {"operationId": "getPet"},
            "put": {
                "requestBody": {
                    "content": {"application/x-www-form-urlencoded": {"schema": {"type": "object", "properties": {}}}}
                }
            },
        },
    },
    "components": {
        "parameters": {
            "Limit": {
                "name": "limit",
                "in": "query",
                "description": "How many.",
                "schema": {"type": "integer", "maximum": 5},
            }
        },
        "requestBodies": {
            "Pet": {
                "required": True,
                "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Pet"}}},
            }
        },
        "schemas": {"Pet": PET, "Id": {"type": "integer", "readOnly": True}},
    },
}
SECRETS: dict[str, Any] = {"headers": {"Authorization": "Bearer hush-hush"}, "query": {"api_key": "k3y-of-ours"}}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def echo(request: web.Request) -> web.Response:
    """Tells everything of a request, secrets included, as careless servers do."""
    request_facts = {
        "method": request.method,
        "path": request.rel_url.raw_path,
        "query": list(request.query.items()),
        "headers": {name: request.headers.get(name) for name in ("Authorization", "X-Trace", "Cookie")},
        "body": (await request.read()).decode(),
    }
    return web.json_response(request_facts)


def call(name: str, arguments: dict[str, Any], handler: Handler = echo, **settings: Any) -> ToolResult:
    """The answer to a call, from a server where `handler` answers everything."""

    async def play() -> ToolResult:
        server = web.Server(handler)  # type: ignore[arg-type]
        runner = web.ServerRunner(server, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1/"
        try:
            tools = ToolRunner(openapi_tools(DOCUMENT, url, **{**SECRETS, **settings}))
            (result,) = await tools.run([ToolCall("c", name, arguments)])
            return result
        finally:
            await runner.cleanup()

    return asyncio.run(play())


def told(name: str, arguments: dict[str, Any]) -> Any:
    result = call(name, arguments)
    assert result.error is None, result.content
    return json.loads(result.content)


# ---- schemas


def tools_of(document: Any = DOCUMENT, **settings: Any) -> dict[str, Any]:
    return {tool.name: tool.spec for tool in openapi_tools(document, "http://127.0.0.1:1", **{**SECRETS, **settings})}


def test_an_operation_is_a_tool_by_its_id() -> None:
    specs = tools_of()
    assert list(specs) == ["pets_list", "createPet", "getPet", "put_pets_id"]
    assert specs["pets_list"].description == "Lists pets.\n\nAll of them."


def test_what_the_author_sends_is_shown_to_nobody() -> None:
    assert list(tools_of()["pets_list"].parameters["properties"]) == [
        "limit",
        "tags",
        "ids",
        "where",
        "X-Trace",
        "session",
    ]
    schemas = json.dumps([spec.parameters for spec in tools_of().values()])
    assert "api_key" not in schemas and "hush" not in schemas
    assert tools_of(query={})["pets_list"].parameters["required"] == ["api_key"]


def test_references_are_taken_along_and_recursion_stays() -> None:
    parameters = tools_of()["createPet"].parameters
    assert parameters["properties"] == {"body": {"$ref": "#/$defs/Pet"}} and parameters["required"] == ["body"]
    pet = parameters["$defs"]["Pet"]
    assert "id" not in pet["properties"] and pet["required"] == ["name"]  # only answers have it
    assert pet["properties"]["children"] == {"type": "array", "items": {"$ref": "#/$defs/Pet"}}
    assert pet["properties"]["tag"] == {"type": ["string", "null"]}
    assert pet["properties"]["weight"] == {"type": "number", "exclusiveMinimum": 0}
    limit = tools_of()["pets_list"].parameters["properties"]["limit"]
    assert limit == {"type": "integer", "maximum": 5, "description": "How many."}


def test_a_reference_leads_through_lists_and_encoded_names() -> None:
    """As bundlers write them."""
    limit = {"name": "limit", "in": "query", "schema": {"type": "integer"}}
    again = {"$ref": "#/paths/~1pets~1%7Bid%7D/get/parameters/0"}
    last = {"name": "last", "in": "query", "schema": {"$ref": "#/paths/~1pets~1%7Bid%7D/get/responses/200/schema"}}
    get = {"operationId": "a", "parameters": [limit], "responses": {200: {"schema": {"type": "string"}}}}
    paths = {"/pets/{id}": {"get": get}, "/b": {"get": {"operationId": "b", "parameters": [again, last]}}}
    parameters = tools_of({**DOCUMENT, "paths": paths})["b"].parameters
    assert parameters["properties"]["limit"] == {"type": "integer"}
    assert list(parameters["$defs"].values()) == [{"type": "string"}]


def test_schemas_whose_names_are_written_alike_stay_apart() -> None:
    schemas = {"用户": {"type": "string"}, "订单": {"type": "integer"}}
    query_parameters = [{"name": n, "in": "query", "schema": {"$ref": f"#/components/schemas/{n}"}} for n in schemas]
    document = {**DOCUMENT, "paths": {"/a": {"get": {"operationId": "a", "parameters": query_parameters}}}}
    parameters = tools_of({**document, "components": {"schemas": schemas}})["a"].parameters
    meant = [
        parameters["$defs"][schema["$ref"].removeprefix("#/$defs/")] for schema in parameters["properties"].values()
    ]
    assert meant == list(schemas.values())


def test_arguments_are_held_to_the_schema() -> None:
    result = call("createPet", {"body": {"name": "Rex", "children": [{"name": 3}]}})
    assert result.error == "invalid_arguments" and "body.children[0].name" in result.content
    assert call("createPet", {"body": {"name": "Rex", "weight": 0}}).error == "invalid_arguments"
    assert call("createPet", {"body": {"name": "Rex", "tag": None}}).error is None


@pytest.mark.parametrize("suffix", [".json", ".yaml"])
def test_a_document_is_a_file_too(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"pets{suffix}"
    path.write_text(json.dumps(DOCUMENT) if suffix == ".json" else yaml.safe_dump(DOCUMENT))
    assert tools_of(path) == tools_of() == tools_of(str(path))


def test_yaml_is_read_as_json_would_be(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    schema = "{enum: [NO, 2020-01-01, true, False, ~, 7, trueish], example: 2020-01-01T10:00:00Z}"
    operation = f"{{get: {{operationId: a, parameters: [{{name: on, in: query, schema: {schema}}}]}}}}"
    path.write_text(f"openapi: 3.1.0\npaths: {{/a: {operation}}}")
    on_schema = tools_of(path)["a"].parameters["properties"]["on"]
    assert on_schema["enum"] == ["NO", "2020-01-01", True, False, None, 7, "trueish"]
    assert on_schema["example"] == "2020-01-01T10:00:00Z"


def test_some_operations_are_taken() -> None:
    assert list(tools_of(names=["getPet"])) == ["getPet"]
    with pytest.raises(ConfigError, match="has no tool 'getPets': did you mean 'getPet'"):
        tools_of(names=["getPets"])
    upload = {"post": {"operationId": "upload", "requestBody": {"content": {"multipart/form-data": {}}}}}
    document = {**DOCUMENT, "paths": {**DOCUMENT["paths"], "/upload": upload}}
    with pytest.raises(ConfigError, match="has no tool 'getPets': did you mean 'getPet'"):
        tools_of(document, names=["getPets"])


# ---- requests


def test_arguments_are_sent_at_the_documents_location() -> None:
    arguments = {
        "limit": 2,
        "tags": ["a b", "c&d"],
        "ids": [1, 2],
        "where": {"age": 3},
        "X-Trace": "t1",
        "session": "s=1",
    }
    seen = told("pets_list", arguments)
    assert (seen["method"], seen["path"]) == ("GET", "/v1/pets")
    assert seen["query"] == [
        ["limit", "2"],
        ["tags", "a b"],
        ["tags", "c&d"],
        ["ids", "1,2"],
        ["where[age]", "3"],
        ["api_key", "***"],
    ]
    assert seen["headers"] == {"Authorization": "***", "X-Trace": "t1", "Cookie": "session=s%3D1"}


def test_a_body_is_json_or_a_form() -> None:
    assert json.loads(told("createPet", {"body": {"name": "Rex"}})["body"]) == {"name": "Rex"}
    assert told("put_pets_id", {"id": "7", "body": {"a b": "c&d", "n": 1}})["body"] == "a%20b=c%26d&n=1"


@pytest.mark.parametrize("value", ["../admin", "a/b", "..%2fadmin", "x?y=1", "x#y", "Zürich", "%2e%2e"])
def test_an_argument_cannot_lead_out_of_its_place_in_the_path(value: str) -> None:
    path = told("getPet", {"id": value})["path"]
    assert path.startswith("/v1/pets/") and path.count("/") == 3


@pytest.mark.parametrize("value", ["", ".", ".."])
def test_a_part_of_the_path_that_means_another_path_is_refused(value: str) -> None:
    result = call("getPet", {"id": value})
    assert result.error == "tool_error" and "is part of the path" in result.content


def test_a_header_is_one_line() -> None:
    result = call("pets_list", {"X-Trace": "a\r\nAuthorization: other"})
    assert result.error == "tool_error" and "printable ASCII" in result.content


# ---- answers


def answering(status: int, text: str = "", kind: str = "text/plain", **headers: str) -> Handler:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(status=status, body=text.encode(), content_type=kind, headers=headers)

    return answer


@pytest.mark.parametrize(
    ("handler", "content", "error"),
    [
        (answering(200, "hello"), "hello", None),
        (answering(204), "done", None),
        (answering(200, "x", "image/png"), "[image/png was left out: only text is shown]", None),
        (answering(404, "no such pet"), "getPet failed: 404 Not Found: no such pet", "tool_error"),
        (
            answering(422, '{"bad": "k3y-of-ours"}'),
            'getPet failed: 422 Unprocessable Entity: {"bad": "***"}',
            "tool_error",
        ),
    ],
)
def test_an_answer_and_a_refusal_reach_the_model(handler: Handler, content: str, error: str | None) -> None:
    result = call("getPet", {"id": "1"}, handler)
    assert (result.content, result.error) == (content, error)


@pytest.mark.parametrize(
    ("handler", "match"),
    [
        (answering(500, "oops hush-hush"), r"answered 500 Internal Server Error: oops \*\*\*"),
        (answering(401), r"answered 401 Unauthorized \(the secrets are refused\)"),
        (answering(429), r"answered 429 Too Many Requests \(too many calls\)"),
        (answering(302, Location="http://elsewhere/"), "leads to http://elsewhere/; redirects are not followed"),
    ],
)
def test_what_is_not_the_model_s_fault_is_an_infrastructure_failure(handler: Handler, match: str) -> None:
    with pytest.raises(EnvironmentFault, match=match) as caught:
        call("getPet", {"id": "1"}, handler)
    assert "hush" not in str(caught.value)


def test_a_server_that_is_gone_or_breaks_off_is_an_infrastructure_failure() -> None:
    async def breaks(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.close()
        return web.Response()

    with pytest.raises(EnvironmentFault, match="gave no answer"):
        call("getPet", {"id": "1"}, breaks)
    tools = ToolRunner(openapi_tools(DOCUMENT, "http://127.0.0.1:9", **SECRETS))
    with pytest.raises(EnvironmentFault, match="gave no answer"):
        asyncio.run(tools.run([ToolCall("c", "getPet", {"id": "1"})]))


def test_a_slow_server_is_a_time_out_and_a_long_answer_is_cut() -> None:
    async def slow(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(3600)
        return web.Response()

    with pytest.raises(EnvironmentFault, match=r"getPet gave no answer within 0\.3 s"):
        call("getPet", {"id": "1"}, slow, timeout_s=0.3)
    assert call("getPet", {"id": "1"}, slow, timeout_s=0.3, on_timeout="answer").error == "timeout"
    assert "more characters were cut" in call("getPet", {"id": "1"}, answering(200, "x" * 2_000_000)).content


def test_a_secret_is_hidden_however_it_is_spelt_and_nothing_else_is() -> None:
    key = 'k3y+of/"ours"=é &'

    async def tells(request: web.Request) -> web.Response:
        facts = {"url": request.raw_path, "key": request.query["api_key"], "seen": "The Bearer of Linux"}
        facts["html"] = html.escape(key)
        return web.json_response(facts)

    headers = {"Authorization": "Bearer hush-hush", "User-Agent": "me (Linux)", "Cookie": "a=cr1sp; b=s0ft"}
    seen = json.loads(call("getPet", {"id": "1"}, tells, query={"api_key": key}, headers=headers).content)
    url = "/v1/pets/1?api_key=***"
    assert seen == {"url": url, "key": "***", "seen": "The Bearer of Linux", "html": "***"}
    hidden = Secrets(headers, {}).mask_secrets("cr1sp s0ft hush-hush")
    assert hidden == "*** *** ***"


@pytest.mark.parametrize("charset", ["klingon", "hex"])
def test_a_charset_that_there_is_not_is_read_as_utf_8(charset: str) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(body="Zürich".encode(), headers={"Content-Type": f"text/plain; charset={charset}"})

    assert call("getPet", {"id": "1"}, answer) == ToolResult("c", "getPet", "Zürich")


# ---- documents that cannot be used


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"openapi": None, "swagger": "2.0"}, "is not of OpenAPI 3"),
        ({"paths": {"/a": {"get": {"parameters": [{"$ref": "other.yaml#/x"}]}}}}, "leads out of the document"),
        ({"paths": {"/a": {"get": {"parameters": [{"$ref": "#/components/none"}]}}}}, "leads nowhere"),
        ({"paths": {}}, "has no operations under `paths`"),
        ({"paths": []}, "has no operations under `paths`"),
        ({"paths": ["/a"]}, "the value of paths is not an object"),
        ({"paths": {"/a": None}}, "path '/a' is not an object, but 'None'"),
        ({"paths": {"/a": {"get": "x"}}}, "get of path '/a' is not an object"),
        ({"paths": {"/a": {"get": {"parameters": ["x"]}}}}, "a parameter of 'get_a' is not an object, but 'x'"),
        (
            {"paths": {"/a": {"get": {"parameters": [{"name": "x"}]}}}},
            "has a name, and is in path, query, header, cookie",
        ),
        ({"paths": {"/a": {"put": {"requestBody": "x"}}}}, "the body of 'put_a' is not an object"),
        ({"paths": {"/a": {"$ref": "#/paths/~1a"}}}, "leads round in a circle"),
        (
            {"paths": {"/a": {"post": {"requestBody": {"content": {"multipart/form-data": {}}}}}}},
            "JSON and forms can be sent",
        ),
    ],
)
def test_what_cannot_be_read_is_refused(change: dict[str, Any], message: str) -> None:
    document = {key: value for key, value in {**DOCUMENT, **change}.items() if value is not None}
    with pytest.raises(ToolSchemaError, match=message):
        tools_of(document)


def test_an_invalid_file_or_url_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ToolSchemaError, match="cannot read the OpenAPI document"):
        tools_of(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(ToolSchemaError, match="neither JSON nor YAML"):
        tools_of(tmp_path / "bad.json")
    with pytest.raises(ConfigError, match="base_url is where the API is"):
        openapi_tools(DOCUMENT, "pets.example")

"""`openapi_tools`: the operations of an API as tools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack
from urllib.parse import urlsplit

from agentgym.errors import ConfigError, ToolSchemaError, nearest
from agentgym.tools.calling.definition import Tool, ToolSettings
from agentgym.tools.openapi.document import OpenApiDocument
from agentgym.tools.openapi.operation import Operation, names_of, operations_of
from agentgym.tools.openapi.service import Service
from agentgym.types import JSON

__all__ = ["openapi_tools"]


def openapi_tools(
    document: Mapping[str, Any] | str | Path,
    base_url: str,
    *,
    names: Sequence[str] | None = None,
    headers: Mapping[str, str] | None = None,
    query: Mapping[str, str] | None = None,
    **settings: Unpack[ToolSettings],
) -> list[Tool]:
    """Makes a tool for each operation of an OpenAPI 3 document (a dict, or a JSON or YAML file) at `base_url`.

    A tool's name is the operation's id; `names` selects operations, None for all. `headers` and `query` are sent with
    every request: keys and other secrets, which models do not see, neither as arguments nor in answers. Settings are
    the fields of `Tool`. Raises ToolSchemaError for an operation that cannot be a tool.

    The model reads the answer (2xx) and what the server refuses (4xx). A server that redirects (3xx), fails (5xx),
    cannot be reached, gives no answer in `timeout_s`, or refuses the secrets (401, 407) or more calls (408, 429) is an
    EnvironmentFault.
    """
    if urlsplit(base_url).scheme not in ("http", "https"):
        raise ConfigError(f"base_url is where the API is, http:// or https://, got {base_url!r}")
    read = OpenApiDocument(document)
    given = {("header", name.lower()) for name in headers or ()} | {("query", name.lower()) for name in query or ()}
    wanted = None if names is None else frozenset(names)
    found: dict[str, Operation] = {}
    for operation in operations_of(read, frozenset(given), wanted):
        if operation.name in found:
            raise ToolSchemaError(f"{read.name} has two operations that would be the tool {operation.name!r}")
        found[operation.name] = operation
    for name in names or ():
        if name not in found:
            known = names_of(read)
            raise ConfigError(f"{read.name} has no operation {name!r}{nearest(name, known) or f'; it has {known}'}")
    if names is None and not found:
        raise ToolSchemaError(f"{read.name} has no operations under `paths`")
    service = Service(base_url, headers or {}, query or {})
    return [_tool(operation, service, settings) for operation in found.values()]


def _tool(operation: Operation, service: Service, settings: ToolSettings) -> Tool:
    async def call(**arguments: JSON) -> str:
        return await service.answer(operation.name, operation.wire(arguments))

    own: ToolSettings = {"on_timeout": "raise", **settings}
    return Tool(spec=operation.spec, fn=call, **own)

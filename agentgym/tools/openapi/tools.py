"""`openapi_tools`: the operations of an API as tools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Unpack
from urllib.parse import urlsplit

from agentgym.errors import ConfigError, ToolSchemaError
from agentgym.tools.calling.definition import Tool, ToolSettings
from agentgym.tools.calling.foreign_tools import make_tools, warn_once
from agentgym.tools.openapi.document import OpenApiDocument
from agentgym.tools.openapi.operation import Operation, list_operations
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

    A tool's name is the operation's id, of at most 64 characters: the end of a longer one is a digest. `names` selects
    operations by either; None takes all that can be tools, and one warning counts the others. `headers` and `query` are
    sent with every request: keys and other secrets, which models do not see, neither as arguments nor in answers.
    Settings are the fields of `Tool`. Raises ToolSchemaError for a selected operation that cannot be a tool, and for a
    path that does not begin with `/`.

    The model reads the answer (2xx) and what the server refuses (4xx). A server that redirects (3xx), fails (5xx),
    cannot be reached, gives no answer in `timeout_s`, or refuses the secrets (401, 407) or more calls (408, 429) is an
    EnvironmentFault.
    """
    address = urlsplit(base_url)
    if address.scheme not in ("http", "https") or not address.hostname or address.query or address.fragment:
        raise ConfigError(f"base_url is where the API is, http://HOST or https://HOST, got {base_url!r}")
    source = OpenApiDocument(document)
    fixed = {("header", name.lower()) for name in headers or ()} | {("query", name.lower()) for name in query or ()}
    service = Service(base_url, headers or {}, query or {})
    listed = list_operations(source)
    if names is None and not listed:
        raise ToolSchemaError(f"{source.name} has no operations under `paths`")

    def make(name: str, method: str, path: str) -> Tool:
        return _tool(Operation(source, name, method, path, frozenset(fixed)), service, settings)

    makers = {name: partial(make, name, method, path) for name, (_, method, path) in listed.items()}
    tools = make_tools(source.name, makers, names, {own: name for name, (own, _, _) in reversed(listed.items())})
    if source.foreign:
        keywords = ", ".join(sorted(source.foreign))
        warn_once(f"{source.name}: keywords of other versions were read as far as their meaning is clear: {keywords}")
    return tools


def _tool(operation: Operation, service: Service, settings: ToolSettings) -> Tool:
    async def call(**arguments: JSON) -> str:
        return await service.answer(operation.name, operation.wire(arguments))

    own: ToolSettings = {"on_timeout": "raise", **settings}
    return Tool(spec=operation.spec, fn=call, **own)

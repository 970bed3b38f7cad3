"""`tools.jsonl`: each tool set that a run's models were shown, once, by the digest that rows name it with."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

from agentgym.errors import RunFolderError
from agentgym.types import JSON, ToolSpec

__all__ = ["FILE_NAME", "Menus", "menu_digest", "menu_lines", "read_menus"]

FILE_NAME = "tools.jsonl"
Menus = Mapping[str, tuple[ToolSpec, ...]]
"""The tool sets by digest."""


def menu_digest(tools: Sequence[ToolSpec]) -> str:
    """Returns a 16-byte BLAKE2b digest, in hex, of the tools in their order; their schemas' keys count in any order.

    >>> menu_digest(())
    '7ebb3c7c2a87b1a2f8a7ed729ecb040d'
    """
    text = json.dumps(_to_json(tools), sort_keys=True, separators=(",", ":"), default=dict)
    return blake2b(text.encode("ascii"), digest_size=16).hexdigest()


def menu_lines(menus: Menus) -> bytes:
    """Returns the lines of the file for these tool sets, each as the model was shown it."""
    lines = [json.dumps({"digest": digest, "tools": _to_json(tools)}, default=dict) for digest, tools in menus.items()]
    return "".join(f"{line}\n" for line in lines).encode("ascii")


def read_menus(folder: Path) -> dict[str, tuple[ToolSpec, ...]]:
    """Returns the tool sets of a run folder by digest, empty if it has no such file.

    An incomplete last line is left out. Raises RunFolderError for any other line that is not a tool set.
    """
    path = folder / FILE_NAME
    if not path.is_file():
        return {}
    with open(path, "rb") as file:
        return dict(_read_line(path, number, line) for number, line in enumerate(file, 1) if line.endswith(b"\n"))


def _read_line(path: Path, number: int, line: bytes) -> tuple[str, tuple[ToolSpec, ...]]:
    try:
        value: Mapping[str, Any] = json.loads(line)
        tools = tuple(ToolSpec(tool["name"], tool["description"], tool["parameters"]) for tool in value["tools"])
        return str(value["digest"]), tools
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise RunFolderError(f"{str(path)!r}, line {number} is not a set of tools: {error!r}") from error


def _to_json(tools: Iterable[ToolSpec]) -> list[JSON]:
    return [{"name": tool.name, "description": tool.description, "parameters": tool.parameters} for tool in tools]

"""`tools.jsonl`: each set of tools that a run's models were shown, once, by the digest that rows name it with."""

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
"""Digest to tools."""


def menu_digest(tools: Sequence[ToolSpec]) -> str:
    """A 16-byte BLAKE2b digest, in hex, of the tools in their order; their schemas' keys count in any order.

    >>> menu_digest(())
    '7ebb3c7c2a87b1a2f8a7ed729ecb040d'
    """
    text = json.dumps(_to_json(tools), sort_keys=True, separators=(",", ":"), default=dict)
    return blake2b(text.encode("ascii"), digest_size=16).hexdigest()


def menu_lines(menus: Menus) -> bytes:
    """The lines of the file for these sets, each as the model was shown it."""
    lines = [json.dumps({"digest": digest, "tools": _to_json(tools)}, default=dict) for digest, tools in menus.items()]
    return "".join(f"{line}\n" for line in lines).encode("ascii")


def read_menus(folder: Path) -> dict[str, tuple[ToolSpec, ...]]:
    """The sets of a run folder by digest; none where it has no such file. A torn last line is left out.

    Raises RunFolderError for any other line that is no set of tools.
    """
    path = folder / FILE_NAME
    if not path.is_file():
        return {}
    with open(path, "rb") as file:
        return dict(_read_line(path, number, line) for number, line in enumerate(file, 1) if line.endswith(b"\n"))


def _read_line(path: Path, number: int, line: bytes) -> tuple[str, tuple[ToolSpec, ...]]:
    try:
        value: Mapping[str, Any] = json.loads(line)
        tools = tuple(ToolSpec(one["name"], one["description"], one["parameters"]) for one in value["tools"])
        return str(value["digest"]), tools
    except (ValueError, KeyError, TypeError) as error:
        raise RunFolderError(f"{str(path)!r}, line {number} is no set of tools: {error!r}") from error


def _to_json(tools: Iterable[ToolSpec]) -> list[JSON]:
    return [{"name": one.name, "description": one.description, "parameters": one.parameters} for one in tools]

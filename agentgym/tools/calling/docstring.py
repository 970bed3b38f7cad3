"""Reads a tool's description and its arguments' descriptions from a docstring (Google, NumPy or Sphinx style)."""

from __future__ import annotations

import re
from collections.abc import Iterator

__all__ = ["argument_descriptions", "summary"]

ARGUMENT_SECTIONS = ("args", "arguments", "parameters", "params", "attributes", "fields")
SECTIONS = (*ARGUMENT_SECTIONS, "returns", "return", "raises", "yields", "example", "examples", "note")
GOOGLE_ENTRY = re.compile(r"^(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)$")
NUMPY_ENTRY = re.compile(r"^(\w+)\s*(?::.*)?$")
SPHINX_ENTRY = re.compile(r"^:param\s+(?:[^:]*\s)?(\w+):\s*(.*)$")


def summary(doc: str) -> str:
    """Returns the text before the first section, one line per paragraph: it describes the tool."""
    lines = []
    for line in doc.splitlines():
        stripped = line.strip()
        if _section(stripped) or stripped.startswith((":param", ":return", ":raises")):
            break
        lines.append(stripped)
    paragraphs = "\n".join(lines).strip().split("\n\n")
    return "\n".join(" ".join(paragraph.split()) for paragraph in paragraphs if paragraph.strip())


def argument_descriptions(doc: str) -> dict[str, str]:
    """Returns name to description, for every argument that the docstring describes."""
    found: dict[str, list[str]] = {}
    name = ""
    for style, indent, text in _entries(doc):
        match = {"google": GOOGLE_ENTRY, "numpy": NUMPY_ENTRY, "sphinx": SPHINX_ENTRY}.get(style)
        entry = match.match(text) if match else None
        if entry and (indent == 0 or style == "sphinx"):
            name = entry.group(1)
            found[name] = [entry.group(2)] if style != "numpy" else []
        elif name:
            found[name].append(text)
    return {key: " ".join(" ".join(parts).split()) for key, parts in found.items() if any(parts)}


def _section(line: str) -> str:
    word = line.rstrip(":").lower()
    return word if word in SECTIONS and (line.endswith(":") or line == line.capitalize()) else ""


def _entries(doc: str) -> Iterator[tuple[str, int, str]]:
    """Yields the lines of argument sections as (style, indentation beyond the first entry's, text)."""
    lines = doc.splitlines()
    style, base = "", -1
    for position, line in enumerate(lines):
        stripped = line.strip()
        if stripped.startswith(":param"):
            style, base = "sphinx", -1
            yield "sphinx", 0, stripped
            continue
        section = _section(stripped)
        if section:
            underlined = position + 1 < len(lines) and set(lines[position + 1].strip()) == {"-"}
            style = ("numpy" if underlined else "google") if section in ARGUMENT_SECTIONS else ""
            base = -1
            continue
        if not style or not stripped or set(stripped) == {"-"}:
            continue
        if style == "sphinx" and stripped.startswith(":"):
            style = ""
            continue
        indent = len(line) - len(line.lstrip())
        base = indent if base < 0 else base
        if style == "google" and indent < base:
            style = ""
            continue
        yield style, max(0, indent - base), stripped

"""Reads a tool's description and its arguments' descriptions from a docstring (Google, NumPy or Sphinx style)."""

from __future__ import annotations

import re
import textwrap
from contextlib import suppress

from docstring_parser import DocstringStyle, ParseError, parse

__all__ = ["argument_descriptions", "summary"]

ARGUMENT_SECTIONS = (
    *"args arguments parameters params attributes fields".split(),
    "keyword args",
    "keyword arguments",
    "other parameters",
)
SECTIONS = (*ARGUMENT_SECTIONS, "returns", "return", "raises", "yields", "example", "examples", "note")
SPHINX = (":param", ":arg", ":key", ":kwarg", ":attribute", ":type", ":return", ":rtype", ":raise", ":yield")
GOOGLE_SECTION = re.compile(
    rf"^([ \t]*)(?i:{'|'.join(ARGUMENT_SECTIONS)}):?[ \t]*\n(?:[ \t]*\n)*"
    rf"(([ \t]*)(?:[^\s-]|-[ \t]).*\n?(?:(?!\1(?i:{'|'.join(SECTIONS)}):[ \t]*$)\3.+\n?|[ \t]*\n)*)",
    re.MULTILINE,
)
"""A heading, and the lines below that are indented as the first of them; a heading that is indented alike ends them."""
GOOGLE_ENTRY = re.compile(
    r"^(?:[-*+•][ \t]+)?[`*]{0,2}(\w+)[`*]{0,2}[ \t]*(?:\((?:[^()]|\([^()]*\))*\))?[ \t]*:[`*]{0,2}", re.MULTILINE
)


def summary(doc: str) -> str:
    """Returns the text before the first section, one line per paragraph: it describes the tool."""
    lines = []
    for line in doc.splitlines():
        stripped = line.strip()
        if _is_section(stripped) or stripped.startswith(SPHINX):
            break
        lines.append(stripped)
    paragraphs = "\n".join(lines).strip().split("\n\n")
    return "\n".join(" ".join(paragraph.split()) for paragraph in paragraphs if paragraph.strip())


def argument_descriptions(doc: str) -> dict[str, str]:
    """Returns name to description, for every argument that the docstring describes.

    Google style is read here: docstring_parser drops all arguments where one lacks a colon, or has one in its type.
    """
    descriptions: dict[str, str] = {}
    for _, section, _ in GOOGLE_SECTION.findall(doc):
        _, *parts = GOOGLE_ENTRY.split(textwrap.dedent(section))
        descriptions |= zip(parts[::2], parts[1::2], strict=True)
    for style in (DocstringStyle.NUMPYDOC, DocstringStyle.REST):
        with suppress(ParseError):
            descriptions |= {param.arg_name: param.description or "" for param in parse(doc, style).params}
    return {name: " ".join(text.split()) for name, text in descriptions.items() if text.strip()}


def _is_section(line: str) -> bool:
    return line.rstrip(":").lower() in SECTIONS and (line.endswith(":") or line in (line.capitalize(), line.title()))

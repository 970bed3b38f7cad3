"""Finds JSON in texts: where an object or a list ends, and the items of a list."""

from __future__ import annotations

import json
import re

__all__ = ["json_end", "json_span", "list_items"]


def json_end(text: str, start: int) -> int | None:
    """Returns the end of the JSON object or list that begins at `start` (after white space or not), or None."""
    end, is_whole = json_span(text, start)
    return end if is_whole else None


def json_span(text: str, start: int) -> tuple[int, bool]:
    """Returns where the JSON object or list that begins at `start` ends, or stops being one, and whether it is whole.

    Only brackets and strings are checked. It stops at the first character that JSON cannot have there, so that asking
    at each of many offsets costs no more than the text is long; at the text's end if the text could go on.
    """
    depth, position = 0, start
    while (match := _TOKEN.match(text, position)) is not None:
        if match.lastgroup == "open":
            depth += 1
        elif match.lastgroup == "close":
            depth -= 1
            if depth <= 0:
                return match.end(), depth == 0
        elif depth == 0 and match[0].strip():
            return position, False
        position = match.end()
    return len(text) if text.startswith('"', position) else position, False


def list_items(text: str) -> list[tuple[int, int]]:
    """Returns the start and end of each item of a JSON list that `read_json` accepts."""
    items = []
    position = _GAP.match(text, text.index("[") + 1).end()  # type: ignore[union-attr]  # it matches nothing as well
    while not text.startswith("]", position):
        end = _DECODER.raw_decode(text, position)[1]
        items.append((position, end))
        position = _GAP.match(text, end).end()  # type: ignore[union-attr]
    return items


_TOKEN = re.compile(
    r"""(?P<string>"(?:[^"\\]++|\\.)*+")|(?P<open>[{\[])|(?P<close>[}\]])|(?P<other>[\s,:\w+.\-]++)""", re.DOTALL
)
_GAP = re.compile(r"[\s,]*+")
_DECODER = json.JSONDecoder()

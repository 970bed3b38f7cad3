"""JSON text in pieces: one call of the encoder for an episode of many tokens would keep all other threads waiting."""

from __future__ import annotations

import json
from collections.abc import Iterator

from agentgym.types import JSON

__all__ = ["PIECE", "encode_json", "json_pieces"]

PIECE = 2048
"""The numbers that one piece has at most; they take about a millisecond."""

encode_json = json.JSONEncoder(allow_nan=False, separators=(",", ":"), default=dict).encode
"""Returns the JSON text of a value, without spaces; raises ValueError for a number that is not finite."""


def json_pieces(value: JSON, depth: int) -> Iterator[str]:
    """Yields the text of `encode_json` in pieces: one for each value within `depth` levels of objects and lists.

    Lists of numbers are divided at any depth.

    >>> "".join(json_pieces({"ids": [1, 2], "source": "env"}, 1))
    '{"ids":[1,2],"source":"env"}'
    """
    if isinstance(value, dict) and depth:
        yield "{"
        for index, (name, item) in enumerate(value.items()):
            yield f"{',' if index else ''}{encode_json(name)}:"
            yield from json_pieces(item, depth - 1)
        yield "}"
    elif isinstance(value, list | tuple) and value and isinstance(value[0], dict | list | tuple) and depth:
        for index, item in enumerate(value):
            yield "," if index else "["
            yield from json_pieces(item, depth - 1)
        yield "]"
    elif isinstance(value, list | tuple) and len(value) > PIECE:
        for start in range(0, len(value), PIECE):
            yield "," if start else "["
            yield encode_json(value[start : start + PIECE])[1:-1]
        yield "]"
    else:
        yield encode_json(value)

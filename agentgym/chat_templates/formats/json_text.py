"""Reads JSON as models write it: strictly, whole or from an offset in a text on."""

from __future__ import annotations

import json
import json.scanner
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

from agentgym.types import JSON

__all__ = ["as_call", "json_end", "json_kind", "json_span", "list_items", "read_json"]


def read_json(text: str) -> JSON:
    """Returns the value that `text` spells; raises ValueError with the reason.

    Values that JSON does not have (NaN, infinities, lone surrogates) are refused.
    """
    try:
        value: JSON = _decode_json(text)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise ValueError(f"invalid JSON ({error.msg} at character {error.pos})") from None
    except UnicodeEncodeError:
        raise ValueError("invalid JSON (a lone surrogate)") from None
    except RecursionError:
        raise ValueError("invalid JSON (nested too deeply)") from None
    return value


def _decode_json(text: str) -> JSON:
    """Decodes a text without the decoder's two regular expressions for white space."""
    bare = text.strip(_BLANKS)
    try:
        value, end = _SCAN(bare, 0)
    except (StopIteration, json.JSONDecodeError):
        end = -1
    if end != len(bare):
        value = _DECODER.decode(text)  # raises, and counts characters from the text's beginning
    return value


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


def as_call(
    value: JSON, name_keys: Sequence[str] = ("name",), argument_keys: Sequence[str] = ("arguments",)
) -> tuple[str, Mapping[str, JSON]]:
    """Returns the name and arguments of a call that is a JSON object; raises ValueError that names what it lacks.

    The first key that is present counts. Arguments may be an object, a string that holds one, or absent (none).
    """
    if not isinstance(value, dict | Mapping):  # a dict is recognized at once
        raise ValueError(f"a call is a JSON object, got {json_kind(value)}")
    name_key, key = _first_key(value, name_keys), _first_key(value, argument_keys)
    name = None if name_key is None else value[name_key]
    if not isinstance(name, str) or not name:
        raise ValueError(f'a call needs a "{name_keys[0]}" that is a non-empty string')
    arguments = {} if key is None else value[key]
    if isinstance(arguments, str):
        arguments = read_json(arguments)
    if not isinstance(arguments, dict | Mapping):
        raise ValueError(f'"{key}" is a JSON object, got {json_kind(arguments)}')
    return name, arguments


def _first_key(value: Mapping[str, JSON], keys: Sequence[str]) -> str | None:
    for key in keys:
        if key in value:
            return key
    return None


def json_kind(value: JSON) -> str:
    """Returns the kind of a value, for a message: `a list`."""
    if isinstance(value, str):
        return "a string"
    if isinstance(value, Mapping):
        return "an object"
    return "null" if value is None else "a list" if isinstance(value, Sequence) else f"the value {value!r}"[:40]


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"invalid JSON ({name} is not JSON)")


def _read_finite(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"invalid JSON (the number {text[:20]} is too large)")
    return value


_TOKEN = re.compile(
    r"""(?P<string>"(?:[^"\\]++|\\.)*+")|(?P<open>[{\[])|(?P<close>[}\]])|(?P<other>[\s,:\w+.\-]++)""", re.DOTALL
)
_GAP = re.compile(r"[\s,]*+")
_DECODER = json.JSONDecoder(parse_constant=_no_constant, parse_float=_read_finite)
_SCAN: Callable[[str, int], tuple[JSON, int]] = json.scanner.make_scanner(_DECODER)  # type: ignore[arg-type]  # any decoder
_BLANKS = " \t\n\r"

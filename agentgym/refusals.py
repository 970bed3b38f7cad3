"""The refusals of servers: without the secrets that we send with every request, and whether they are rate limits."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator, Mapping

__all__ = ["Secrets", "refusal_status"]

SHORTEST = 4
PUBLIC_HEADERS = ("accept", "accept-encoding", "accept-language", "content-type", "user-agent")


class Secrets:
    """The values of headers and query parameters; of `Bearer KEY` also the key alone, and of a cookie its values.

    >>> Secrets({"Authorization": "Bearer a+b/c="}, {}).mask_secrets("The Bearer of a%2Bb%2Fc%3d was refused")
    'The Bearer of *** was refused'
    """

    def __init__(self, headers: Mapping[str, str], query: Mapping[str, str]) -> None:
        values = {*_of_headers(headers), *query.values()}
        longest_first = sorted((value for value in values if len(value) >= SHORTEST), key=len, reverse=True)
        patterns = ["".join(map(_spelling_pattern, value)) for value in longest_first]
        self._pattern = re.compile("|".join(patterns)) if patterns else None

    def mask_secrets(self, text: str) -> str:
        """Returns `text` with `***` for each secret: as it is, or as encoded in a URL, JSON or HTML."""
        return self._pattern.sub("***", text) if self._pattern else text


def refusal_status(status: int, headers: Mapping[str, str]) -> int:
    """Returns the status of a refusal: 429 for a 403 that is a rate limit, as GitHub's API answers.

    >>> refusal_status(403, {"x-ratelimit-remaining": "0"}), refusal_status(403, {})
    (429, 403)
    """
    is_limit = headers.get("x-ratelimit-remaining") == "0" or "Retry-After" in headers
    return 429 if status == 403 and is_limit else status


def _of_headers(headers: Mapping[str, str]) -> Iterator[str]:
    for name, value in headers.items():
        if name.lower() in PUBLIC_HEADERS:
            continue
        yield value
        if name.lower() == "cookie":
            yield from (pair.partition("=")[2].strip() for pair in value.split(";"))
        else:
            yield from value.split()[1:]


def _spelling_pattern(char: str) -> str:
    """Returns a pattern of all ways to write a character, longest first."""
    if char.isascii() and char.isalnum():
        return char
    code = "".join(f"%{byte:02x}" for byte in char.encode("utf-8", "surrogatepass"))
    ways = {char, json.dumps(char)[1:-1], html.escape(char), {" ": "+", "/": r"\/"}.get(char, char)}
    return f"(?:{'|'.join(map(re.escape, sorted(ways, key=len, reverse=True)))}|(?i:{code}))"

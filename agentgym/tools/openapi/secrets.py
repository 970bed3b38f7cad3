"""Takes what an author sends with every request out of what a model reads, however a server spells it."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator, Mapping

__all__ = ["Secrets"]

SHORTEST = 4
PUBLIC_HEADERS = ("accept", "accept-encoding", "accept-language", "content-type", "user-agent")


class Secrets:
    """The values of headers and query parameters; of `Bearer KEY` also the key alone, and of a cookie its values.

    >>> Secrets({"Authorization": "Bearer a+b/c="}, {}).hidden("The Bearer of a%2Bb%2Fc%3d was refused")
    'The Bearer of *** was refused'
    """

    def __init__(self, headers: Mapping[str, str], query: Mapping[str, str]) -> None:
        values = {*_of_headers(headers), *query.values()}
        longest_first = sorted((one for one in values if len(one) >= SHORTEST), key=len, reverse=True)
        patterns = ["".join(map(_spelt, one)) for one in longest_first]
        self._pattern = re.compile("|".join(patterns)) if patterns else None

    def hidden(self, text: str) -> str:
        """`text` with `***` where a secret stands: as it is, or as a URL, JSON or HTML spells it."""
        return self._pattern.sub("***", text) if self._pattern else text


def _of_headers(headers: Mapping[str, str]) -> Iterator[str]:
    for name, value in headers.items():
        if name.lower() in PUBLIC_HEADERS:
            continue
        yield value
        if name.lower() == "cookie":
            yield from (pair.partition("=")[2].strip() for pair in value.split(";"))
        else:
            yield from value.split()[1:]


def _spelt(sign: str) -> str:
    """A pattern of all ways in which a sign is written, longest first."""
    if sign.isascii() and sign.isalnum():
        return sign
    code = "".join(f"%{byte:02x}" for byte in sign.encode("utf-8", "surrogatepass"))
    ways = {sign, json.dumps(sign)[1:-1], html.escape(sign), {" ": "+", "/": r"\/"}.get(sign, sign)}
    return f"(?:{'|'.join(map(re.escape, sorted(ways, key=len, reverse=True)))}|(?i:{code}))"

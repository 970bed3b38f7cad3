"""The wait that a server asks for when it refuses a request."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from contextlib import suppress
from email.utils import mktime_tz, parsedate_tz

__all__ = ["retry_after_s"]

SECONDS: Mapping[str, float] = {"ms": 1e-3, "millis": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
PART = r"(\d+(?:\.\d+)?)\s*(ms|millis|s|m|h)(?:econds?|ecs?|inutes?|ins?|ours?|rs?)?(?![a-z])\s*"
WORDS = re.compile(rf"(?:retry|try again|please wait)\D{{0,24}}?((?:{PART})+)", re.IGNORECASE)
"""Such as "Please retry in 38.2s", "try again in 6m0s", or the `"retryDelay": "38s"` of Google's APIs."""


def retry_after_s(headers: Mapping[str, str], body: str = "") -> float | None:
    """Returns the seconds that a refusal asks to wait; None if it does not.

    `Retry-After` is a number of seconds or an HTTP date, which is compared with the server's own `Date`;
    `retry-after-ms`, of OpenAI and Azure, is more exact. Without them, the words or the fields of the body count.
    """
    for name, unit_s in (("retry-after-ms", 1e-3), ("Retry-After", 1.0)):
        with suppress(ValueError):
            return max(0.0, *(unit_s * float(part) for part in headers.get(name, "").split(",")))  # a proxy adds one
    text = headers.get("Retry-After", "")
    date, now = parsedate_tz(text), parsedate_tz(headers.get("Date", ""))
    with suppress(ValueError, OverflowError):
        if date:
            return max(0.0, mktime_tz(date) - (mktime_tz(now) if now else time.time()))
    match = WORDS.search(f"retry after {text}") or WORDS.search(body)
    parts = re.findall(PART, match[1], re.IGNORECASE) if match else []
    return sum(float(number) * SECONDS[unit.lower()] for number, unit in parts) if parts else None

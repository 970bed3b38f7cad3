"""How long to wait before a request is sent again."""

from __future__ import annotations

import random

__all__ = ["MAX_RETRY_AFTER_S", "back_off_s"]

BACK_OFF_S, MAX_BACK_OFF_S = 0.5, 30.0
MAX_RETRY_AFTER_S = 600.0
"""A server that asks for a longer wait has failed."""


def back_off_s(place: str, num_retries: int, retry_after_s: float | None = None) -> float:
    """Seconds to wait after `num_retries` retries: twice as long each time, half of it random by `place` (a name of the
    request and its attempt), and as long as the server's `Retry-After` says at least."""
    wait_s = min(MAX_BACK_OFF_S, BACK_OFF_S * 2.0**num_retries)
    wait_s *= 0.5 + 0.5 * random.Random(place).random()
    return max(wait_s, retry_after_s or 0.0)

"""The wait before a request is sent again."""

from __future__ import annotations

import random

__all__ = ["MAX_RETRY_AFTER_S", "back_off_s"]

BACK_OFF_S, MAX_BACK_OFF_S = 0.5, 30.0
MAX_RETRY_AFTER_S = 600.0
"""The longest wait that a server may ask for; with a longer one it counts as failed."""


def back_off_s(seed: str, num_retries: int, retry_after_s: float | None = None) -> float:
    """Returns the seconds to wait after `num_retries` retries: twice as long each time, half of it random.

    The random part depends on `seed` (a name of the request and its attempt). The wait is at least the server's
    `Retry-After`.
    """
    wait_s = min(MAX_BACK_OFF_S, BACK_OFF_S * 2.0**num_retries)
    wait_s *= 0.5 + 0.5 * random.Random(seed).random()
    return max(wait_s, retry_after_s or 0.0)

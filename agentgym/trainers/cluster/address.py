"""The address of a running cluster: whether anything answers there, and what it may ask for."""

from __future__ import annotations

import os
import re
import socket

from agentgym.errors import EngineError

__all__ = ["check_answers", "token_hint"]

ANSWER_S = 20.0
"""The seconds that a cluster may take to accept a connection."""


def check_answers(address: str) -> None:
    """Raises EngineError if no process listens at `HOST:PORT`: Ray would try for many minutes."""
    match = re.fullmatch(r"([^:/]+):(\d+)", address)
    if match is None:  # `auto`, or a form that Ray knows
        return
    try:
        socket.create_connection((match[1], int(match[2])), timeout=ANSWER_S).close()
    except (OSError, OverflowError) as error:
        raise EngineError(f"cannot join the Ray cluster at {address!r}: nothing answers there ({error})") from error


def token_hint(address: str | None) -> str:
    """Returns a hint on clusters that ask for a token: Ray sends its token to no cluster that is named by address."""
    if address in (None, "auto") or os.environ.get("RAY_AUTH_MODE", "").lower() == "token":
        return ""
    return "where it asks for a token (`ray start` does once there is a ~/.ray/auth_token), set RAY_AUTH_MODE=token; "

"""The errors of OpenAI's dialects."""

from __future__ import annotations

from collections.abc import Mapping

from agentgym.rollout.serving.wires.wire import Refusal
from agentgym.types import JSON

__all__ = ["openai_error"]


def openai_error(refusal: Refusal) -> Mapping[str, JSON]:
    """Returns the body of an error."""
    kind = "invalid_request_error" if refusal.status < 500 else "server_error"
    return {"error": {"message": refusal.message, "type": kind, "param": refusal.param, "code": refusal.code}}

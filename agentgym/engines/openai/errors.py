"""The meaning of an endpoint's refusals: retry, ask for less, or correct the settings."""

from __future__ import annotations

import re
from collections.abc import Sequence

from agentgym.engines.servers.http import HttpRefusal
from agentgym.errors import AgentGymError, ConfigError, EngineError, UnknownName, nearest

__all__ = ["ContextExceeded", "EndpointFailure", "is_about_context", "is_transient", "mistake", "unknown_model"]

TRANSIENT = frozenset({408, 409, 425, 429, 529})
CONTEXT = re.compile(
    r"context.?(length|window|size)|max_model_len|(prompt|input) is too long|too many tokens|input token count"
    r"|input length .* exceeds|at most \d+ completion tokens",
    re.IGNORECASE,
)
QUOTA = re.compile(r"insufficient_quota|exceeded your current quota|billing", re.IGNORECASE)


class EndpointFailure(EngineError):
    """An endpoint that gave no reply after all retries; `attempts` requests were sent."""

    def __init__(self, message: str, attempts: int = 1) -> None:
        super().__init__(message)
        self.attempts = attempts

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (str(self), self.attempts))


class ContextExceeded(EndpointFailure):
    """The messages alone fill the model's context window."""


def is_about_context(refusal: HttpRefusal) -> bool:
    """Returns whether the refusal is about prompt and reply being longer than the context window."""
    return refusal.status in (400, 413, 422) and CONTEXT.search(str(refusal)) is not None


def is_transient(refusal: HttpRefusal) -> bool:
    """Returns whether the same request may be answered later."""
    if refusal.status == 429 and QUOTA.search(str(refusal)):
        return False
    return refusal.status in TRANSIENT or (500 <= refusal.status < 600 and refusal.status != 501)


def mistake(refusal: HttpRefusal, words: str, api_key_env: str, attempts: int = 1) -> AgentGymError:
    """Returns the error for a refusal that no retry can fix; `words` is the endpoint's message."""
    if refusal.status == 401:
        return ConfigError(f"the endpoint refuses the key of the environment variable {api_key_env}: {words}")
    if refusal.status == 402 or QUOTA.search(words):
        return ConfigError(f"the endpoint's credit is used up: {words}")
    if refusal.status == 403:
        return ConfigError(f"the key of {api_key_env} may not do this: {words}")
    if refusal.status in (404, 405, 501):
        return ConfigError(f"there are no chat completions at this address: {words}")
    return EndpointFailure(words, attempts)


def unknown_model(url: str, model: str, names: Sequence[str]) -> UnknownName:
    """Returns the error for a model that the endpoint does not have."""
    have = nearest(model, names) or (f": it has {', '.join(names[:5])}" if names else "")
    return UnknownName(f"{url} has no model {model!r}{have}; name one with --endpoint.model")

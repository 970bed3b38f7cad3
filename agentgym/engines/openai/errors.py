"""The meaning of an endpoint's refusals: retry, ask for less, or correct the settings."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from agentgym.engines.servers.http import HttpRefusal, HttpUnreachable
from agentgym.errors import AgentGymError, ConfigError, EngineError, UnknownName, nearest

__all__ = ["WITHHELD", "ContextExceeded", "EndpointFailure", "cause_of", "is_transient", "mistake", "unknown_model"]

TRANSIENT = frozenset({408, 409, 425, 429, 529})
CONTEXT = re.compile(
    r"context.?(length|window|size)|max_model_len|(prompt|input) is too long|too many tokens|input token count"
    r"|input length .* exceeds|at most \d+ completion tokens",
    re.IGNORECASE,
)
QUOTA = re.compile(r"exceeded your current quota|billing", re.IGNORECASE)
WAITS = re.compile(r"RESOURCE_EXHAUSTED|RetryInfo|per.?(minute|second)|rate.?limit", re.IGNORECASE)
"""The words of a limit that passes, although its message names the plan and billing, as Google's do."""
FILTER = re.compile(
    r"content[ _]?(filter|management|moderation|policy)|data_?inspection_?failed|responsible_?ai|flagged|"
    r"(usage|safety) (guideline|polic)|safety_check|inappropriate content|content exists risk",
    re.IGNORECASE,
)
WITHHELD = 451
"""The status of the refusal that stands for a reply which a content filter withheld."""


class EndpointFailure(EngineError):
    """An endpoint that gave no reply after all retries; `failures` counts the requests that were sent, by cause.

    The causes are `too_many_tokens` (for the context window), `unsupported_feature`, `rate_limit`, `server_error`,
    `connection` (lost or too slow), `content_filter` and `refused`.
    """

    def __init__(self, message: str, failures: Mapping[str, int] | None = None) -> None:
        super().__init__(message)
        self.failures = dict(failures or {"refused": 1})

    @property
    def attempts(self) -> int:
        """The number of requests that were sent."""
        return sum(self.failures.values())

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (str(self), self.failures))


class ContextExceeded(EndpointFailure):
    """The messages alone fill the model's context window."""


def cause_of(failure: HttpRefusal | HttpUnreachable) -> str:
    """Returns the cause of a failure, which is not known to be about a feature."""
    if isinstance(failure, HttpUnreachable):
        return "connection"
    if failure.status in (400, 413, 422) and CONTEXT.search(str(failure)):
        return "too_many_tokens"
    if failure.status == WITHHELD or (failure.status in (400, 403, 422, 500) and FILTER.search(failure.body)):
        return "content_filter"
    if not is_transient(failure):
        return "refused"
    return "rate_limit" if failure.status == 429 else "server_error"


def is_transient(refusal: HttpRefusal) -> bool:
    """Returns whether the same request may be answered later."""
    if _is_quota_used(refusal):
        return False
    return refusal.status in TRANSIENT or (500 <= refusal.status < 600 and refusal.status != 501)


def _is_quota_used(refusal: HttpRefusal) -> bool:
    """Returns whether the credit is used up, for which no wait helps."""
    if "insufficient_quota" in refusal.body:
        return True
    waits = refusal.retry_after_s is not None or WAITS.search(refusal.body)
    return refusal.status < 500 and not waits and QUOTA.search(refusal.body) is not None


def mistake(refusal: HttpRefusal, words: str, key_env: str, failures: Mapping[str, int] | None = None) -> AgentGymError:
    """Returns the error for a refusal that no retry can fix; `words` is the endpoint's message."""
    if refusal.status == 401:
        return ConfigError(f"the endpoint refuses the key of the environment variable {key_env}: {words}")
    if refusal.status == 402 or _is_quota_used(refusal):
        return ConfigError(f"the endpoint's credit is used up: {words}")
    if refusal.status == 403:
        return ConfigError(f"the key of {key_env} may not do this: {words}")
    if refusal.status in (404, 405, 501):
        return ConfigError(f"there are no chat completions at this address: {words}")
    return EndpointFailure(words, failures)


def unknown_model(url: str, model: str, names: Sequence[str]) -> UnknownName:
    """Returns the error for a model that the endpoint does not have."""
    have = nearest(model, names) or (f": it has {', '.join(names[:5])}" if names else "")
    return UnknownName(f"{url} has no model {model!r}{have}; name one with --endpoint.model")

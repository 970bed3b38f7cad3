"""The settings of requests to a server, and those of a chat endpoint: its address, key, limits and prices."""

from __future__ import annotations

from urllib.parse import urlsplit

from agentgym.errors import ConfigError
from agentgym.settings.config_class import config_class
from agentgym.settings.functions import check_above_zero, check_at_least
from agentgym.url_credentials import check_variable, read_key, refuse_credentials

__all__ = ["ChatEndpointConfig", "ModelRequestConfig", "RequestConfig", "endpoint_url", "is_url"]


@config_class
class RequestConfig:
    """The key and the limits of requests to a server that others use too."""

    api_key_env: str = ""
    """The environment variable that holds a bearer token; empty sends none. The token is written nowhere."""
    timeout_s: float = 60.0
    """Seconds that one request may take, from its sending to its last byte."""
    max_retries: int = 6
    """Requests that may follow a failed one: after 429, 5xx, a dropped connection or a time-out, with back-off."""
    requests_per_minute: float | None = None
    """The most requests sent in a minute; None sets no limit."""
    tokens_per_minute: float | None = None
    """The most tokens in a minute, those of replies included, estimated before a request; None sets no limit."""

    def __post_init__(self) -> None:
        check_variable(self.api_key_env)
        check_above_zero(self, "timeout_s", "requests_per_minute", "tokens_per_minute")
        check_at_least(0, self, "max_retries")


@config_class
class ModelRequestConfig(RequestConfig):
    """The model of requests to a chat endpoint, their key and limits; none of them holds the key."""

    model: str | None = None
    """The model's name; None takes the only one that the endpoint lists."""
    api_key_env: str = "OPENAI_API_KEY"
    """The environment variable that holds the key; without one, no key is sent. The key is written nowhere."""
    timeout_s: float = 300.0
    """Seconds that one request may take, from its sending to its last token."""


@config_class
class ChatEndpointConfig(ModelRequestConfig):
    """The settings of a `ChatEndpoint`, with those for a model under test."""

    price_prompt: float | None = None
    """Price of a million prompt tokens; with a price, the cost is counted."""
    price_cached: float | None = None
    """Price of a million prompt tokens that the endpoint had cached; None takes `price_prompt`."""
    price_completion: float | None = None
    """Price of a million sampled tokens."""
    stream: bool = True
    """Ask for the reply token by token, which gives the time to the first one."""
    token_ids: bool = True
    """Ask for token ids and logprobs; without streaming if a server (SGLang) cannot give both. An endpoint that gives
    none is asked once."""
    text_marks: bool = True
    """Read `<tool_call>` and `<think>` marks that a server without a parser for them leaves in the text."""
    strict_tools: bool = False
    """Send `strict: true` with each tool: a server that can (OpenAI, SGLang; vLLM with some of its parsers) samples no
    call that its JSON Schema forbids. Such replies are recorded in no loss: their logprobs are not the model's own."""

    def __post_init__(self) -> None:
        RequestConfig.__post_init__(self)
        check_at_least(0, self, "price_prompt", "price_cached", "price_completion")

    def api_key(self) -> str | None:
        """Returns the key from the environment; raises ConfigError for a key that no header can carry."""
        return read_key(self.api_key_env, default="OPENAI_API_KEY") or None

    def cost(self, prompt_tokens: int, cached_tokens: int, completion_tokens: int) -> float | None:
        """Returns the price of a reply, in the currency of the prices; None if no price is set."""
        prices = (self.price_prompt, self.price_cached, self.price_completion)
        if all(price is None for price in prices):
            return None
        cached = self.price_prompt if self.price_cached is None else self.price_cached
        fresh_tokens = prompt_tokens - cached_tokens
        parts = ((fresh_tokens, self.price_prompt), (cached_tokens, cached), (completion_tokens, self.price_completion))
        return sum(tokens * (price or 0.0) for tokens, price in parts) / 1e6


def is_url(text: str) -> bool:
    """Returns whether `text` is the address of an endpoint."""
    return text.startswith(("http://", "https://"))


def endpoint_url(text: str) -> str:
    """Returns the address before `/chat/completions`: `http://host:8000` is `http://host:8000/v1`, another path stays.

    Raises ConfigError if it is not the address of a server, or holds a secret.
    """
    refuse_credentials(text, "the endpoint")
    try:
        parts = urlsplit(text.strip())
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigError(f"{text!r} is no address of an endpoint ({error}): http://HOST:PORT/v1 was wanted") from None
    if parts.scheme not in ("http", "https") or not host:
        raise ConfigError(f"{text!r} is not an address of an endpoint: http://HOST:PORT/v1 was wanted")
    if parts.username is not None or parts.query or parts.fragment:
        raise ConfigError(
            f"the address of {host} holds more than a host and a path; a key belongs into the environment, "
            "where OPENAI_API_KEY (or --endpoint.api-key-env) names it"
        )
    path = parts.path.rstrip("/").removesuffix("/chat/completions")
    return f"{parts.scheme}://{parts.netloc}{path or '/v1'}"

"""Calls to the operations of an API: a request over HTTP, and the meaning of its answer."""

from __future__ import annotations

from collections.abc import Mapping

import aiohttp
from yarl import URL

from agentgym.errors import EnvironmentFault, ToolFailure
from agentgym.proxies import proxy_options
from agentgym.refusals import Secrets, refusal_status
from agentgym.tools.openapi.operation import Wire

__all__ = ["Service"]

MAX_ANSWER_BYTES = 1 << 20
NOT_THE_MODEL_S = {
    401: "the secrets are refused",
    407: "a proxy refuses",
    408: "it waited too long",
    429: "too many calls",
}


class Service:
    """An API at a URL, with the headers and query of every request; each request has its own connection."""

    def __init__(self, base_url: str, headers: Mapping[str, str], query: Mapping[str, str]) -> None:
        self._base_url = base_url.rstrip("/")
        self._proxy = proxy_options(base_url)
        self._headers, self._query = dict(headers), tuple(query.items())
        self._secrets = Secrets(headers, query)

    async def answer(self, name: str, wire: Wire) -> str:
        """Returns text for the model. Raises ToolFailure for a refusal, EnvironmentFault if that is not the model's."""
        url = URL(f"{self._base_url}{wire.path}", encoded=True).extend_query([*wire.query, *self._query])
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session,
                session.request(
                    wire.method,
                    url,
                    data=wire.body,
                    headers={"Accept": "application/json, text/*;q=0.9, */*;q=0.1", **wire.headers, **self._headers},
                    allow_redirects=False,
                    **self._proxy,
                ) as response,
            ):
                content = await _read(response)
        except (aiohttp.ClientError, OSError) as error:
            raise EnvironmentFault(
                f"{name}: {self._base_url} gave no answer: {self._secrets.mask_secrets(str(error))}"
            ) from None
        text = self._secrets.mask_secrets(_answer_text(response, content))
        answer = f"{response.status} {response.reason}"
        if response.status < 300:
            return text or "done"
        status = refusal_status(response.status, response.headers)
        if status >= 500 or status < 400 or status in NOT_THE_MODEL_S:
            why = NOT_THE_MODEL_S.get(status, "")
            if response.status < 400:
                to = self._secrets.mask_secrets(response.headers.get("Location", "nowhere"))
                why = f"it leads to {to}; redirects are not followed"
            reason = f" ({why})" if why else ""
            raise EnvironmentFault(f"{name}: {self._base_url} answered {answer}{reason}: {text[:500]}")
        raise ToolFailure(f"{name} failed: {answer}" + (f": {text}" if text else ""))


async def _read(response: aiohttp.ClientResponse) -> bytes:
    chunks = bytearray()
    async for chunk in response.content.iter_chunked(1 << 16):
        chunks += chunk
        if len(chunks) > MAX_ANSWER_BYTES:
            break
    return bytes(chunks)


def _answer_text(response: aiohttp.ClientResponse, content: bytes) -> str:
    kind = response.content_type
    if not (kind.startswith("text/") or "json" in kind or "xml" in kind or kind == "application/octet-stream"):
        return f"[{kind} was left out: only text is shown]" if content else ""
    text = _decode_text(content[:MAX_ANSWER_BYTES], response.charset or "utf-8")
    if kind == "application/octet-stream" and not text.isprintable() and "\ufffd" in text:
        return f"[{kind} was left out: only text is shown]"
    return f"{text}\n[more was cut]" if len(content) > MAX_ANSWER_BYTES else text


def _decode_text(content: bytes, charset: str) -> str:
    try:
        return content.decode(charset, "replace")
    except (LookupError, UnicodeError):  # an unknown charset, or one that is not for text
        return content.decode("utf-8", "replace")

"""Refusals of servers: without our secrets, and a rate limit whatever its status."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import quote

import pytest

from agentgym.engines.openai.errors import cause_of
from agentgym.engines.servers.http import HttpClient, HttpRefusal
from agentgym.errors import EnvironmentFault, SandboxError, ToolFailure
from agentgym.tools.openapi.operation import Wire
from agentgym.tools.openapi.service import Service
from agentgym.tools.sandbox.protocol import SandboxLimits
from agentgym.tools.sandbox.service import ServiceSandbox
from agentgym.tools.sandbox.service_settings import KEY

KEY_VALUE = "sk/s3cret+of=mine"


class Echo(BaseHTTPRequestHandler):
    """Refuses with 403 and the request's key, spelled in several ways, the last at the end of what is shown."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        key = self.headers["Authorization"].removeprefix("Bearer ")
        body = f"{key} {json.dumps(key)} {quote(key, safe='')} " + "x" * 380 + key * 3
        self.send_response(403)
        for name, value in json.loads(self.headers.get("X-Answer", "{}")).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body.encode())

    do_GET = do_POST

    def log_message(self, *_: object) -> None:
        """Logs nothing."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Echo)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def refusal(url: str, answer: dict[str, str], *, stream: bool = False) -> HttpRefusal:
    async def run() -> None:
        client = HttpClient(url, headers={"Authorization": f"Bearer {KEY_VALUE}", "X-Answer": json.dumps(answer)})
        try:
            if stream:
                async for _ in client.stream("/", {}):
                    pass
            else:
                await client.post("/", {})
        finally:
            await client.close()

    with pytest.raises(HttpRefusal) as caught:
        asyncio.run(run())
    return caught.value


def test_a_key_that_a_server_repeats_is_in_no_error(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    errors = [refusal(url, {}), refusal(url, {}, stream=True)]
    texts = [text for error in errors for text in (str(error), error.body)]
    monkeypatch.setenv(KEY, "OWN_KEY")
    monkeypatch.setenv("OWN_KEY", KEY_VALUE)
    with pytest.raises(SandboxError) as caught:
        ServiceSandbox(url, SandboxLimits()).run("1")
    for text in [*texts, str(caught.value)]:
        assert text.count("***") > 2
        assert "s3c" not in text and "sk" not in text


@pytest.mark.parametrize(
    "answer", [{"x-ratelimit-remaining": "0"}, {"X-RateLimit-Remaining": "0"}, {"retry-after": "7"}]
)
def test_a_403_that_is_a_rate_limit_is_asked_again_and_is_not_the_models(url: str, answer: dict[str, str]) -> None:
    error = refusal(url, answer)
    assert (error.status, cause_of(error)) == (429, "rate_limit") and "answered 403" in str(error)
    plain = refusal(url, {"x-ratelimit-remaining": "12"})
    assert (plain.status, cause_of(plain)) == (403, "refused")
    headers = {"Authorization": KEY_VALUE, "X-Answer": json.dumps(answer)}
    wire = Wire(method="GET", path="/", query=(), headers={})
    with pytest.raises(EnvironmentFault, match="too many calls"):
        asyncio.run(Service(url, headers, {}).answer("look", wire))
    with pytest.raises(ToolFailure):
        asyncio.run(Service(url, {"Authorization": KEY_VALUE}, {}).answer("look", wire))

"""Servers that we launch answer nobody but us, and weights on their way to them are data, not programs."""

from __future__ import annotations

import asyncio
import base64
import pickle
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
import safetensors.torch
import torch

from agentgym.engines.servers.http import SERVER_SECRET, HttpClient, HttpRefusal, secret_headers
from agentgym.engines.servers.server_process import ServerCommand, ServerProcess, free_port
from agentgym.engines.vllm.auth import RequireSecret
from agentgym.engines.vllm.worker_extension import WeightWorker
from agentgym.engines.weights.buckets import safetensors_bytes

SERVER = """
import os, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        known = self.headers.get("Authorization") == "Bearer " + os.environ["AGENTGYM_SERVER_SECRET"]
        self.send_response(200 if known else 401)
        self.end_headers()

HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


class Program:
    """A pickle that creates a file when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


def test_the_vllm_worker_does_not_run_what_it_is_sent(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    payload = base64.b64encode(pickle.dumps(Program(mark))).decode()
    with pytest.raises(safetensors.SafetensorError):
        WeightWorker().agentgym_load(payload)
    assert not mark.exists()
    pickle.loads(base64.b64decode(payload))
    assert mark.exists()


def test_tensors_travel_as_safetensors_bit_for_bit() -> None:
    whole = torch.randn(4, 6)
    tensors = {"a": whole[:, ::2], "b": whole.to(torch.bfloat16), "c": whole}
    tensors_read = safetensors.torch.load(safetensors_bytes(tensors))
    assert all(
        tensors_read[name].equal(tensor) and tensors_read[name].dtype == tensor.dtype
        for name, tensor in tensors.items()
    )


def answer(headers: list[tuple[bytes, bytes]], kind: str = "http") -> list[Mapping[str, Any]]:
    """What a server behind the middleware sends."""
    messages: list[Mapping[str, Any]] = []

    async def app(scope: Mapping[str, Any], receive: object, send: Callable[..., Any]) -> None:
        await send({"type": "passed on"})

    async def send(message: Mapping[str, Any]) -> None:
        messages.append(message)

    asyncio.run(RequireSecret(app)({"type": kind, "headers": headers}, None, send))
    return messages


@pytest.mark.parametrize("values", [[], [b"Bearer x"], [b"Bearer "], [b"Bearer s3cret", b"Bearer s3cret"], [b"s3cret"]])
def test_a_request_without_the_secret_is_not_passed_on(values: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SERVER_SECRET, "s3cret")
    headers = [(b"authorization", value) for value in values]
    assert answer(headers)[0]["status"] == 401
    assert answer(headers, "websocket")[0]["type"] == "websocket.close"


def test_a_request_with_the_secret_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SERVER_SECRET, "s3cret")
    assert answer([(b"authorization", b"Bearer s3cret")]) == [{"type": "passed on"}]
    assert answer([], "lifespan") == [{"type": "passed on"}]


def test_without_a_secret_the_server_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SERVER_SECRET, raising=False)
    with pytest.raises(RuntimeError, match=SERVER_SECRET):
        answer([])


def test_a_launched_server_gets_its_secret_where_other_users_do_not_see_it(tmp_path: Path) -> None:
    port, log = free_port(), tmp_path / "log"
    words = [sys.executable, "-c", SERVER, str(port)]
    command = ServerCommand(name="small", words=words, port=port, log=log, secret="s3cret", ready_s=60)
    server = ServerProcess(command)

    async def run() -> None:
        await server.start()
        try:
            assert "s3cret" not in command_lines(server)
            assert log.stat().st_mode & 0o077 == 0
            client = HttpClient(server.url)
            with pytest.raises(HttpRefusal, match="401"):
                await client.get("/health")
            await client.close()
        finally:
            await server.close()

    asyncio.run(run())
    assert "s3cret" not in repr(command)


def command_lines(process: ServerProcess) -> str:
    """What other users see of the server's processes."""
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    return " ".join(word for member in family for word in member.cmdline())


async def refusals(process: ServerProcess, paths: list[str]) -> list[int]:
    """The status that each path answers without the secret, after the server was seen to answer with it."""
    ours = HttpClient(process.url, headers=secret_headers(process.command.secret))
    theirs, statuses = HttpClient(process.url, headers=secret_headers("guess")), []
    await ours.get("/v1/models")
    for path in paths:
        try:
            await theirs.post(path, {})
            statuses.append(200)
        except HttpRefusal as refusal:
            statuses.append(refusal.status)
    await ours.close()
    await theirs.close()
    return statuses


@pytest.mark.engine
def test_a_launched_vllm_obeys_nobody_else(vllm_server: ServerProcess) -> None:
    paths = ["/collective_rpc", "/inference/v1/generate", "/v1/completions", "/pause", "/update_weight_version"]
    assert asyncio.run(refusals(vllm_server, paths)) == [401] * len(paths)
    assert vllm_server.command.secret not in command_lines(vllm_server) + vllm_server.command.log.read_text()


@pytest.mark.engine
def test_a_launched_sglang_obeys_nobody_else(sglang_server: ServerProcess) -> None:
    paths = ["/generate", "/update_weights_from_tensor", "/update_weights_from_disk", "/v1/completions", "/flush_cache"]
    assert asyncio.run(refusals(sglang_server, paths)) == [401] * len(paths)
    assert sglang_server.command.secret not in command_lines(sglang_server) + sglang_server.command.log.read_text()

"""The real servers that the other tests use: there, with the embedded model, and ready when they say so."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentgym.embedded import embedded_folder
from agentgym.engines.servers.http import HttpClient, secret_headers
from agentgym.engines.servers.server_process import ServerProcess
from agentgym.errors import EngineError
from agentgym.types import JSON

pytestmark = pytest.mark.engine
ENVIRONMENTS = Path(__file__).parent / "environments"
StartServer = Callable[..., ServerProcess]
PROMPT = [1, 2, 3, 4, 5, 6, 7]


def post(server: ServerProcess, path: str, body: dict[str, JSON]) -> Any:
    """The answer of a server."""

    async def ask() -> Any:
        client = HttpClient(server.url, headers=secret_headers(server.command.secret), timeout_s=120.0)
        try:
            return await client.post(path, body)
        finally:
            await client.close()

    return asyncio.run(ask())


@pytest.mark.parametrize("name", ["sglang", "vllm"])
def test_two_builds_of_one_environment_are_one(name: str, request: pytest.FixtureRequest) -> None:
    python = request.getfixturevalue(f"{name}_python")
    again = subprocess.run([ENVIRONMENTS / "build.sh", name, name], capture_output=True, text=True, check=True)
    folder = str(Path(python).parent.parent)
    assert again.stdout.splitlines() == [f"{name}: {folder}"] * 2


def test_sglang_answers_with_the_ids_that_it_sampled(sglang_server: ServerProcess) -> None:
    sampling = {"max_new_tokens": 5, "temperature": 1.0, "ignore_eos": True}
    answer = post(sglang_server, "/generate", {"input_ids": PROMPT, "sampling_params": sampling})
    assert len(answer["output_ids"]) == 5
    assert answer["meta_info"]["prompt_tokens"] == len(PROMPT)


def test_vllm_answers_with_the_ids_that_it_sampled(vllm_server: ServerProcess) -> None:
    request = {"prompt": PROMPT, "max_tokens": 5, "temperature": 1.0, "ignore_eos": True, "return_token_ids": True}
    answer = post(vllm_server, "/v1/completions", {"model": str(embedded_folder()), **request})
    assert len(answer["choices"][0]["token_ids"]) == 5
    assert answer["usage"]["prompt_tokens"] == len(PROMPT)


def test_the_kernels_stand_in_can_be_imported_and_not_called(sglang_python: str) -> None:
    code = "from sgl_kernel import copy_all_layer_kv_cache_cpu as copy\ncopy()"
    done = subprocess.run([sglang_python, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert "NotImplementedError: sgl_kernel.copy_all_layer_kv_cache_cpu was called: this is a stand-in" in done.stderr


def test_a_server_that_ends_while_it_starts_is_reported_with_its_last_lines(start_sglang: StartServer) -> None:
    with pytest.raises(EngineError, match=r"sglang server ended while starting(?s:.*)--no-such-flag"):
        start_sglang("--no-such-flag")

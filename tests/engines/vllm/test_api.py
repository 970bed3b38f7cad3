"""What is sent to vLLM and what its answers mean; answers that cannot be trusted are refused by name."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web
from aiohttp.test_utils import TestServer

from agentgym.engines.protocol import Completion, Sampling
from agentgym.engines.servers.http import HttpRefusal, HttpUnreachable
from agentgym.engines.servers.server_config import ServerConfig, ServerLaunch
from agentgym.engines.servers.serving_settings import EngineServing, ServingSettings
from agentgym.engines.sglang.engine import sglang_command
from agentgym.engines.vllm.api import VllmReply, join_pieces, read_reply, read_vllm_completion, sampling_params
from agentgym.engines.vllm.engine import open_vllm, vllm_command
from agentgym.engines.vllm.server import VllmServer
from agentgym.errors import ConfigError, EngineError, RunFolderError

SPANS = [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 2}]
LAYOUT = {"vocab_size": 50, "ranks": 1, "seeds": True, "device": "cpu", "logprobs": "processed_logprobs"}
LAYOUT |= {"weights": [["w.weight", [2], "float32"]]}


def answer(**changes: Any) -> dict[str, Any]:
    """What vLLM 0.32 answers to a request whose reply is (9, 2)."""
    content = [{"token_id": 9, "logprob": -0.25, "rank": 1}, {"token_id": 2, "logprob": -0.5, "rank": 1}]
    choice = {"index": 0, "finish_reason": "stop", "token_ids": [9, 2], "logprobs": {"content": content}}
    choice |= {"weight_versions": SPANS, **changes}
    return {"request_id": "generate-tokens-a", "usage": {"prompt_tokens": 3}, "choices": [choice]}


def completion(**changes: Any) -> Completion:
    return read_vllm_completion(read_reply(answer(**changes), name="it"), name="it", num_prompt_ids=3, version=7)


def test_a_request_holds_the_whole_distribution_and_only_its_stop_ids_end_it() -> None:
    cut = {"temperature": 0.6, "top_p": 0.9, "top_k": 4, "presence_penalty": 0.5, "repetition_penalty": 1.1}
    params = sampling_params(Sampling(max_tokens=5, stop_ids=(2, 7), seed=1 << 63, **cut))  # type: ignore[arg-type]
    assert params == {
        "max_tokens": 5,
        "temperature": 0.6,
        "top_p": 0.9,
        "top_k": 4,
        "min_p": 0.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.5,
        "repetition_penalty": 1.1,
        "seed": 0,
        "stop_token_ids": [2, 7],
        "ignore_eos": True,
        "logprobs": 0,
        "detokenize": False,
    }


def test_stop_strings_need_the_text_marks_included() -> None:
    params = sampling_params(Sampling(max_tokens=5, stop=("</answer>",)))
    assert (params["stop"], params["detokenize"], params["skip_special_tokens"]) == (["</answer>"], True, False)


def test_each_id_has_the_version_that_the_server_reports_for_it() -> None:
    assert completion() == Completion((9, 2), (-0.25, -0.5), (3, 4), "stop")
    assert completion(weight_versions=None).policy_versions == (7, 7)
    assert completion(finish_reason="abort").finish_reason == "abort"
    nothing = completion(token_ids=[], logprobs={"content": []}, weight_versions=[], finish_reason="abort")
    assert nothing == Completion((), (), (), "abort")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"token_ids": [9]}, "1 ids and 2 logprobs"),
        ({"token_ids": [9, 3]}, "other ids"),
        ({"weight_versions": SPANS[:1]}, "weights of 1 ids in a reply of 2"),
        ({"weight_versions": SPANS[1:]}, "id 1 was sampled with weights '4'"),
        ({"weight_versions": [{"version": "default", "start": 0, "end": 2}]}, "another client"),
        ({"finish_reason": "error"}, "ended a reply with 'error'"),
        ({"logprobs": {"content": [{"token_id": 9, "logprob": -9999.0}, {"token_id": 2, "logprob": 0.0}]}}, "diverged"),
        ({"logprobs": {"content": [{"token_id": 9}]}}, "without 'logprob'"),
        ({"token_ids": [9, 2.5]}, "gave an answer without"),
        ({"token_ids": ["9", "2"]}, "gave an answer without"),
        ({"weight_versions": "34"}, "gave an answer without"),
        ({"weight_versions": [{"version": "3", "start": 0}]}, "without 'end'"),
        ({"weight_versions": [{"version": "3", "start": 0, "end": 10**15}]}, "weights of 3 ids in a reply of 2"),
        ({"weight_versions": [{"version": "9" * 5000, "start": 0, "end": 2}]}, "another client"),
    ],
)
def test_an_answer_that_cannot_be_trusted_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(EngineError, match=words):
        completion(**changes)


def test_another_number_of_prompt_ids_than_was_sent_is_refused() -> None:
    with pytest.raises(EngineError, match="read 3 prompt ids where 4 were sent"):
        read_vllm_completion(read_reply(answer(), name="it"), name="it", num_prompt_ids=4, version=7)


def test_a_reply_in_pieces_is_the_reply() -> None:
    pieces = [
        VllmReply((9,), (9,), (-0.25,), None),
        VllmReply((2,), (2,), (-0.5,), "stop", [("3", 0, 1), ("4", 1, 2)], 3),
    ]
    assert join_pieces(pieces) == read_reply(answer(), name="it")


# ---- a server in this process, as small as can be

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def served(play: Callable[[str], Awaitable[None]], **handlers: Handler) -> None:
    """Plays against a server whose paths are the handlers' names, with / for __."""

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"max_model_len": 40}]})

    app = web.Application()
    app.router.add_get("/v1/models", models)
    for name, handler in handlers.items():
        app.router.add_route("*", "/" + name.replace("__", "/"), handler)
    server = TestServer(app)
    await server.start_server()
    try:
        await play(str(server.make_url("")))
    finally:
        await server.close()


def fixed(body: Any, status: int = 200) -> Handler:
    async def handler(request: web.Request) -> web.Response:
        return web.json_response(body, status=status)

    return handler


def test_a_server_that_is_no_vllm_or_lacks_the_extension_is_refused_with_what_to_do() -> None:
    async def play(url: str) -> None:
        with pytest.raises(EngineError, match="--worker-extension-cls"):
            await open_vllm(ServerConfig(urls=(url,)), None)

    asyncio.run(served(play))
    asyncio.run(served(play, collective_rpc=fixed({"error": "no such method"}, 500)))
    asyncio.run(served(play, collective_rpc=fixed({"results": [None]})))


def test_a_server_whose_logprobs_are_of_another_distribution_is_refused() -> None:
    async def play(url: str) -> None:
        with pytest.raises(EngineError, match="--logprobs-mode processed_logprobs"):
            await open_vllm(ServerConfig(urls=(url,)), None)

    asyncio.run(served(play, collective_rpc=fixed({"results": [{**LAYOUT, "logprobs": "raw_logprobs"}]})))


def test_what_the_engine_cannot_take_never_reaches_the_server() -> None:
    async def play(url: str) -> None:
        engine = await open_vllm(ServerConfig(urls=(url,)), None, version=4)
        assert (engine.vocab_size, engine.context_window, engine.version) == (50, 40, 4)
        for prompt, words in (([50], "outside of the vocabulary"), ([-1], "outside"), ([1] * 36, "context window")):
            with pytest.raises(EngineError, match=words):
                await engine.generate(prompt, Sampling(max_tokens=5), session="a")
        reply = await engine.generate([1, 2, 3], Sampling(max_tokens=5), session="a")
        assert reply.policy_versions == (3, 4)
        assert engine.num_requests == 1
        await engine.close()

    handlers = {"collective_rpc": fixed({"results": [LAYOUT]}), "update_weight_version": fixed({"success": True})}
    asyncio.run(served(play, inference__v1__generate=fixed(answer()), **handlers))


def test_a_request_salts_its_cache_by_version_and_omits_unsupported_seeds(
    caplog: pytest.LogCaptureFixture,
) -> None:
    seen: list[dict[str, Any]] = []

    async def generate(request: web.Request) -> web.Response:
        seen.append(await request.json())
        return web.json_response(answer())

    async def play(url: str) -> None:
        engine = await open_vllm(ServerConfig(urls=(url,)), None, version=4)
        await engine.generate([1, 2, 3], Sampling(max_tokens=5, seed=8), session="a")
        await engine.close()

    for seeds in (True, False):
        layout = fixed({"results": [{**LAYOUT, "seeds": seeds}]})
        version = fixed({"success": True})
        asyncio.run(
            served(play, inference__v1__generate=generate, collective_rpc=layout, update_weight_version=version)
        )
    assert [request["sampling_params"].get("seed") for request in seen] == [8, None]
    assert seen[0]["token_ids"] == [1, 2, 3]
    assert seen[0]["cache_salt"].startswith("v4")
    assert "--no-enable-chunked-prefill" in caplog.text


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_gpu_server_sleeps_while_paused_and_wakes_its_weights_first(device: str) -> None:
    paths: list[str] = []

    def note(body: Any) -> Handler:
        async def handler(request: web.Request) -> web.Response:
            paths.append(str(request.rel_url))
            return web.json_response(body)

        return handler

    async def play(url: str) -> None:
        engine = await open_vllm(ServerConfig(urls=(url,), serving=EngineServing(sleep=True, verify_sync=False)), None)
        await engine.pause()
        with suppress(EngineError):  # this server takes no weights; they would come now
            await engine.update_weights({"w.weight": torch.zeros(2)}, 1)
        await engine.resume()
        await engine.close()

    orders = {name: note({}) for name in ("pause", "resume", "sleep", "wake_up")}
    layout = {"collective_rpc": fixed({"results": [{**LAYOUT, "device": device}]})}
    asyncio.run(served(play, update_weight_version=fixed({"success": True}), **orders, **layout))
    sleep_paths = [path for path in paths if path.startswith(("/sleep", "/wake"))]
    assert sleep_paths == (
        ["/sleep?level=1", "/wake_up?tags=weights", "/wake_up?tags=kv_cache"] if device == "cuda" else []
    )
    assert paths.index("/resume") > max((paths.index(path) for path in sleep_paths), default=0)


def test_a_server_that_was_started_without_sleep_is_named() -> None:
    async def play(url: str) -> None:
        engine = await open_vllm(ServerConfig(urls=(url,), serving=ServingSettings(sleep=True)), None)
        with pytest.raises(EngineError, match=r"cannot sleep .* start it with --enable-sleep-mode"):
            await engine.pause()
        await engine.close()

    layout = fixed({"results": [{**LAYOUT, "device": "cuda"}]})
    orders = {"pause": fixed({}), "resume": fixed({}), "sleep": fixed({"error": "no sleep mode"}, 500)}
    asyncio.run(served(play, collective_rpc=layout, update_weight_version=fixed({"success": True}), **orders))


def test_a_broken_stream_returns_what_arrived_and_fails_if_nothing_did() -> None:
    async def halfway(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        whole = answer(finish_reason=None, weight_versions=None)
        await response.write(f"data: {json.dumps(whole)}\n\n".encode())
        assert request.transport is not None
        request.transport.abort()
        return response

    async def never(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    async def failed(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b'data: {"error": {"message": "engine died"}}\n\n')
        return response

    async def ask(url: str) -> VllmReply:
        server = VllmServer(url, stream=True)
        try:
            return await server.generate([1, 2, 3], {}, rid="a", cache_salt="v0")
        finally:
            await server.close()

    async def cut(url: str) -> None:
        reply = await ask(url)
        assert (reply.ids, reply.finish_reason) == ((9, 2), None)

    async def unreachable(url: str) -> None:
        with pytest.raises(HttpUnreachable):
            await ask(url)

    async def refused(url: str) -> None:
        with pytest.raises(HttpRefusal, match="engine died"):
            await ask(url)

    asyncio.run(served(cut, inference__v1__generate=halfway))
    asyncio.run(served(unreachable, inference__v1__generate=never))
    asyncio.run(served(refused, inference__v1__generate=failed))


def test_settings_that_cannot_work_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="replicas"):
        ServerConfig(replicas=0)
    with pytest.raises(ConfigError, match="http://"):
        ServerConfig(urls=("localhost:8000",))
    with pytest.raises(RunFolderError, match=r"config\.json"):
        asyncio.run(open_vllm(ServerConfig(), tmp_path))


def test_an_interpreter_without_vllm_is_named_as_the_cause(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    config = ServerLaunch(python=sys.executable, device="cpu", log_folder=str(tmp_path / "logs"))
    with pytest.raises(EngineError, match=r"--server\.python"):
        asyncio.run(open_vllm(config, tmp_path))


def test_a_cpu_server_is_started_without_what_breaks_it(tmp_path: Path) -> None:
    words = vllm_command(ServerConfig(device="cpu", python="p", server_args=("--seed", "3")), tmp_path, 1234)
    assert {"--no-enable-chunked-prefill", "--enforce-eager", "processed_logprobs"} <= set(words)
    assert words[-2:] == ["--seed", "3"]
    assert "--no-enable-chunked-prefill" not in vllm_command(ServerConfig(device="cuda"), tmp_path, 1234)


@pytest.mark.parametrize(("device", "sleep"), [("cuda", True), ("cuda", False), ("cpu", True)])
def test_a_gpu_server_that_is_to_sleep_is_started_for_it(device: Any, sleep: bool, tmp_path: Path) -> None:
    serving = ServingSettings(sleep=sleep)
    vllm = vllm_command(ServerConfig(device=device, serving=serving), tmp_path, 1234)
    sglang = sglang_command(ServerConfig(device=device, serving=serving), tmp_path, 1234)
    starts = device == "cuda" and sleep
    assert ("--enable-sleep-mode" in vllm) is ("--enable-memory-saver" in sglang) is starts
    assert ("--enable-weights-cpu-backup" in sglang) is starts

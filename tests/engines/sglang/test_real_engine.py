"""The SGLang engine on the shipped fake server: what is sent, what is believed, and what is survived."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from aiohttp import web
from aiohttp.test_utils import TestServer

from agentgym.chat_templates.tokenizer import ChatTokenizer
from agentgym.embedded import embedded_folder
from agentgym.engines.protocol import Completion, Sampling
from agentgym.engines.scripted import ScriptedReply
from agentgym.engines.servers.http import SERVER_SECRET, HttpClient, HttpUnreachable
from agentgym.engines.servers.replicated import ReplicatedEngine
from agentgym.engines.servers.server_config import ServerConfig
from agentgym.engines.servers.serving_settings import EngineServing, PauseMode
from agentgym.engines.sglang.api import read_sglang_completion, read_spans
from agentgym.engines.sglang.engine import open_sglang
from agentgym.engines.sglang.replica import SglangReplica
from agentgym.engines.sglang.weight_sync import SglangSync
from agentgym.engines.vllm.engine import open_vllm
from agentgym.errors import EngineError
from agentgym.model.model_folder import load_decoder, published_views
from agentgym.testing.fake_server.control import FakeControl
from agentgym.testing.fake_server.faults import Faults
from agentgym.testing.fake_server.http import HttpAnswer, HttpCall
from agentgym.testing.fake_server.server import FakeSglang
from agentgym.testing.fixtures import fake_sglang
from agentgym.trainers.learner.learner import Learner
from agentgym.trainers.loop.open_parts import LocalWeights
from agentgym.trainers.settings.learner import LearnerConfig
from agentgym.trainers.settings.optimizer import OptimizerConfig

__all__ = ["fake_sglang"]
Fake = Callable[..., FakeSglang]
Play = Callable[[ReplicatedEngine], Awaitable[Any]]
PROMPT = tuple(range(5, 45))
PAUSES: tuple[PauseMode, ...] = ("abort", "in_place", "retract")


def using(play: Play, *servers: FakeSglang, **serving: Any) -> Any:
    """What `play` returns, given an engine on the servers."""

    async def run() -> Any:
        config = ServerConfig(urls=tuple(server.url for server in servers), serving=EngineServing(**serving))
        engine = await open_sglang(config, embedded_folder())
        try:
            return await play(engine)
        finally:
            await engine.close()

    return asyncio.run(run())


def weights() -> dict[str, object]:
    return dict(published_views(load_decoder(embedded_folder())))


async def ask(engine: ReplicatedEngine, session: str = "a", **sampling: Any) -> Completion:
    return await engine.generate(PROMPT, Sampling(**{"max_tokens": 8, **sampling}), session=session)


async def update(engine: ReplicatedEngine, version: int) -> None:
    await engine.pause()
    await engine.update_weights(weights(), version)
    await engine.resume()


def replica(engine: ReplicatedEngine, index: int = 0) -> SglangReplica:
    return cast(SglangReplica, engine.replicas[index])


# ---- replies


@pytest.mark.parametrize("stream", [False, True])
def test_a_reply_holds_the_sampled_ids_with_logprobs_and_versions(fake_sglang: Fake, stream: bool) -> None:
    server = fake_sglang(reply=lambda *_: ScriptedReply((7, 8, 9), logprobs=(-0.5, -0.25, -1.0)))

    async def play(engine: ReplicatedEngine) -> Completion:
        return await ask(engine, stop_ids=(9,))

    assert using(play, server, stream=stream) == Completion((7, 8, 9), (-0.5, -0.25, -1.0), (0, 0, 0), "stop")


@pytest.mark.parametrize("stream", [False, True])
def test_a_server_ends_a_reply_at_a_stop_string(fake_sglang: Fake, stream: bool) -> None:
    tokenizer = ChatTokenizer.load(embedded_folder())
    ids = tokenizer.encode("It is </answer> or not")
    server = fake_sglang(reply=lambda *_: ids)

    async def play(engine: ReplicatedEngine) -> Completion:
        return await ask(engine, max_tokens=99, stop=("</answer>",))

    reply = using(play, server, stream=stream)
    assert tokenizer.decode(reply.ids).startswith("It is </answer>") and len(reply.ids) < len(ids)
    assert reply.ids == tuple(ids[: len(reply.ids)]) and reply.finish_reason == "stop"


def test_an_id_outside_of_the_vocabulary_never_reaches_the_server(fake_sglang: Fake) -> None:
    server = fake_sglang()

    async def play(engine: ReplicatedEngine) -> None:
        for prompt in ([1, -1], [engine.vocab_size], []):
            with pytest.raises(EngineError):
                await engine.generate(prompt, Sampling(max_tokens=4), session="a")
        with pytest.raises(EngineError, match="context window"):
            await ask(engine, max_tokens=engine.context_window)

    using(play, server)
    assert server.stats.requests == 0


def test_a_reply_with_a_logprob_too_few_is_refused_not_recorded(fake_sglang: Fake) -> None:
    server = fake_sglang(faults=Faults(schedule={0: "lengths"}))

    async def play(engine: ReplicatedEngine) -> None:
        with pytest.raises(EngineError, match="8 ids and 7 logprobs"):
            await ask(engine)

    using(play, server)


@pytest.mark.parametrize("fault", ["error", "drop"])
def test_a_request_that_failed_is_sent_anew_under_another_id(fake_sglang: Fake, fault: Any) -> None:
    server = fake_sglang(faults=Faults(schedule={0: fault}))

    async def play(engine: ReplicatedEngine) -> Completion:
        return await ask(engine)

    assert len(using(play, server).ids) == 8
    assert server.stats.requests == 2
    assert server.stats.duplicates == 0


def test_a_server_that_always_fails_is_an_engine_error(fake_sglang: Fake) -> None:
    server = fake_sglang(faults=Faults(rates={"error": 1.0}))

    async def play(engine: ReplicatedEngine) -> None:
        with pytest.raises(EngineError, match="500"):
            await ask(engine)

    using(play, server, max_retries=2)
    assert server.stats.requests == 3


# ---- abort and pause


def test_an_abort_brings_back_what_was_sampled(fake_sglang: Fake) -> None:
    server = fake_sglang(token_s=0.01)

    async def play(engine: ReplicatedEngine) -> Completion:
        request = asyncio.create_task(ask(engine, max_tokens=500))
        await asyncio.sleep(0.2)
        await engine.abort("a")
        return await request

    completion = using(play, server)
    assert completion.finish_reason == "abort"
    assert 0 < len(completion.ids) < 500


@pytest.mark.long
@pytest.mark.parametrize("pause", PAUSES)
def test_an_abort_during_a_pause_ends_the_request(fake_sglang: Fake, pause: PauseMode) -> None:
    server = fake_sglang(token_s=0.01)

    async def play(engine: ReplicatedEngine) -> Completion:
        request = asyncio.create_task(ask(engine, max_tokens=500))
        await asyncio.sleep(0.2)
        await engine.pause()
        await engine.abort("a")
        completion = await asyncio.wait_for(request, 10)
        await engine.resume()
        return completion

    assert using(play, server, pause=pause).finish_reason == "abort"


def test_an_abort_ends_a_request_that_the_server_never_answers(fake_sglang: Fake) -> None:
    server = fake_sglang(faults=Faults(rates={"hang": 1.0}))

    async def play(engine: ReplicatedEngine) -> Completion:
        request = asyncio.create_task(ask(engine))
        await asyncio.sleep(0.1)
        await engine.abort("a")
        return await asyncio.wait_for(request, 10)

    assert using(play, server).finish_reason == "abort"


def test_a_caller_that_is_cancelled_leaves_nothing_in_flight(fake_sglang: Fake) -> None:
    server = fake_sglang(token_s=0.01)

    async def play(engine: ReplicatedEngine) -> None:
        request = asyncio.create_task(ask(engine, max_tokens=500))
        await asyncio.sleep(0.1)
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        async with asyncio.timeout(10):
            while server.stats.in_flight:
                await asyncio.sleep(0.02)

    using(play, server)


@pytest.mark.long
@pytest.mark.parametrize("pause", PAUSES)
def test_an_update_in_mid_reply_shows_in_the_versions_of_its_tokens(fake_sglang: Fake, pause: PauseMode) -> None:
    server = fake_sglang(token_s=0.01)

    async def play(engine: ReplicatedEngine) -> tuple[Completion, Completion]:
        request = asyncio.create_task(ask(engine, max_tokens=60))
        await asyncio.sleep(0.2)
        await update(engine, 1)
        return await request, await ask(engine, "b")

    first, later = using(play, server, pause=pause)
    assert set(later.policy_versions) == {1}
    if pause == "abort":
        assert first.finish_reason == "abort"
        assert set(first.policy_versions) == {0}
    else:
        assert len(first.ids) == 60
        assert set(first.policy_versions) == {0, 1}


def test_what_a_trainer_that_died_left_paused_goes_on(fake_sglang: Fake) -> None:
    server = fake_sglang()

    async def leave(engine: ReplicatedEngine) -> None:
        await engine.pause()
        await replica(engine).sync.order("/begin_weight_update", {})

    async def play(engine: ReplicatedEngine) -> Completion:
        await update(engine, 1)
        return await asyncio.wait_for(ask(engine), 10)

    using(leave, server)
    assert len(using(play, server).ids) == 8


def test_an_engine_that_is_closed_while_paused_leaves_the_server_to_others(fake_sglang: Fake) -> None:
    server = fake_sglang()

    async def leave(engine: ReplicatedEngine) -> None:
        await engine.pause()

    async def look() -> Any:
        client = HttpClient(server.url)
        payload = {"input_ids": [5], "sampling_params": {"max_new_tokens": 2}}
        try:
            return await client.post("/generate", payload, timeout_s=10.0)
        finally:
            await client.close()

    using(leave, server)
    assert asyncio.run(look())["output_ids"]


def test_engines_on_one_server_never_use_each_others_request_ids(fake_sglang: Fake) -> None:
    server = fake_sglang()

    async def play(engine: ReplicatedEngine) -> None:
        for _ in range(3):
            await ask(engine)

    using(play, server)
    using(play, server, stream=True)
    assert server.stats.answered == 6
    assert server.stats.duplicates == 0


# ---- weights


def test_an_update_reports_its_size_checksum_and_time(fake_sglang: Fake) -> None:
    server = fake_sglang()

    async def play(engine: ReplicatedEngine) -> None:
        for version in (1, 2):
            report = await engine.update_weights(weights(), version)
            assert (report.version, report.num_tensors) == (version, len(weights()))
            assert report.num_bytes == sum(tensor.nbytes for tensor in cast("dict[str, Any]", weights()).values())
            assert len(report.checksum) == 16
            assert report.transfer_s > 0

    using(play, server, bucket_mb=1)
    assert server.stats.version == "2"
    assert server.stats.updates == 10


def test_a_version_that_falls_and_weights_that_are_none_are_refused(fake_sglang: Fake) -> None:
    async def play(engine: ReplicatedEngine) -> None:
        await engine.update_weights(weights(), 3)
        with pytest.raises(EngineError, match="never fall"):
            await engine.update_weights(weights(), 2)
        with pytest.raises(EngineError, match="got none"):
            await engine.update_weights({}, 4)
        with pytest.raises(EngineError, match="is a str"):
            await engine.update_weights({"model.norm.weight": "x"}, 4)

    using(play, fake_sglang())


def changed(name: str) -> dict[str, object]:
    """All weights, that one changed."""
    tensors = cast("dict[str, Any]", weights())
    return {**tensors, name: tensors[name].detach() + 1}


@pytest.mark.parametrize("name", ["model.layers.2.self_attn.k_proj.weight", "model.norm.weight"])
def test_a_tensor_that_is_left_out_of_an_update_is_named(
    fake_sglang: Fake, leave_out: Callable[[str], None], name: str
) -> None:
    leave_out(name)

    async def play(engine: ReplicatedEngine) -> None:
        fused = name.replace("k_proj", "qkv_proj")
        with pytest.raises(EngineError, match=rf"stale weights: 1 of 34 tensors .* the first is '{fused}'"):
            await engine.update_weights(changed(name), 1)

    using(play, fake_sglang())


def test_an_update_that_is_skipped_is_named(fake_sglang: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    async def skipped(self: SglangSync, tensors: Any, version: int, **options: Any) -> Any:
        return None

    monkeypatch.setattr(SglangSync, "load", skipped)

    async def play(engine: ReplicatedEngine) -> None:
        with pytest.raises(EngineError, match="says it samples from version '0' after the update to 1"):
            await engine.update_weights(weights(), 1)

    using(play, fake_sglang())


def test_what_is_no_sglang_server_is_refused_and_nothing_stays_open(fake_sglang: Fake) -> None:
    server = fake_sglang()

    async def play() -> None:
        config = ServerConfig(urls=(f"{server.url}/elsewhere",))
        with pytest.raises(EngineError, match=r"is not an SGLang server: .* answered 404"):
            await open_sglang(config, embedded_folder())
        with pytest.raises(EngineError, match="no server answers at http"):
            await open_sglang(ServerConfig(urls=("http://127.0.0.1:9",)), embedded_folder())

    asyncio.run(play())


def test_a_running_servers_token_is_read_from_a_variable_that_the_refusal_names(
    fake_sglang: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = fake_sglang(token="a-token-of-the-server")
    monkeypatch.delenv(SERVER_SECRET, raising=False)
    with pytest.raises(EngineError, match=f"wants a token .* in the variable {SERVER_SECRET}: .* answered 401"):
        using(ask, server)
    with pytest.raises(EngineError, match=f"wants a token .* in the variable {SERVER_SECRET}: .* answered 401"):
        asyncio.run(open_vllm(ServerConfig(urls=(server.url,)), None))
    monkeypatch.setenv(SERVER_SECRET, "a-token-of-the-server")
    assert len(using(ask, server).ids) == 8


def test_a_server_of_a_model_of_another_shape_is_refused_before_weights_are_sent(
    fake_sglang: Fake, tmp_path: Path
) -> None:
    server = fake_sglang()
    folder = shutil.copytree(embedded_folder(), tmp_path / "other")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 2048}))
    with pytest.raises(EngineError, match=r"serves .* with vocab_size 1984, and .*other' has 2048"):
        asyncio.run(open_sglang(ServerConfig(urls=(server.url,)), folder))


def test_weights_that_somebody_else_updates_are_noticed() -> None:
    spans = [{"version": "3", "start": 0, "end": 2}, {"version": "1", "start": 2, "end": 4}]
    with pytest.raises(EngineError, match="another client updates them"):
        read_spans(spans, 4, name="s", version=3)
    with pytest.raises(EngineError, match="'default', which is none of ours"):
        read_spans([{"version": "default", "start": 0, "end": 4}], 4, name="s", version=3)
    with pytest.raises(EngineError, match="of 2 ids of a reply of 4"):
        read_spans(spans[:1], 4, name="s", version=3)


def test_weights_newer_than_the_newest_of_ours_are_somebody_elses(fake_sglang: Fake) -> None:
    server = fake_sglang()

    async def play(engine: ReplicatedEngine) -> Completion:
        await replica(engine).transport.post(
            "/update_weight_version", {"new_version": "99", "abort_all_requests": False}
        )
        return await ask(engine)

    with pytest.raises(EngineError, match="version 99, and the newest of ours is 0"):
        using(play, server)


GOOD = {"output_ids": [7, 8], "meta_info": {"finish_reason": {"type": "stop"}, "prompt_tokens": 3}}
GOOD["meta_info"] |= {"output_token_logprobs": [[-0.5, 7, None], [-0.25, 8, None]]}  # type: ignore[operator]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("weight_versions", [{"version": "0", "start": 0}]),
        ("weight_versions", ["0"]),
        ("weight_versions", "0"),
        ("weight_versions", 3),
        ("weight_versions", [{"version": "-4", "start": 0, "end": 2}]),
        ("weight_versions", [{"version": None, "start": 0, "end": 2}]),
        ("weight_versions", [{"version": "9" * 5000, "start": 0, "end": 2}]),
        ("weight_versions", [{"version": "0", "start": 0, "end": 1e300}]),
        ("output_ids", [7, 8.7]),
        ("output_ids", ["7", "8"]),
        ("output_ids", None),
        ("output_token_logprobs", [[-0.5, 7, None], [-0.25, "8", None]]),
        ("output_token_logprobs", [[-0.5, 7, None], None]),
        ("output_token_logprobs", 5),
        ("finish_reason", "stop"),
        ("finish_reason", ["stop"]),
        ("prompt_tokens", "3"),
        ("meta_info", []),
        ("meta_info", "meta"),
    ],
)
def test_an_answer_of_another_form_is_the_servers_fault_by_name(path: str, value: Any) -> None:
    assert read_sglang_completion(GOOD, name="s", num_prompt_ids=3, version=0).ids == (7, 8)
    answer: dict[str, Any] = json.loads(json.dumps(GOOD))
    (answer if path in answer else answer["meta_info"])[path] = value
    with pytest.raises(EngineError, match=r"^s "):
        read_sglang_completion(answer, name="s", num_prompt_ids=3, version=0)


@pytest.mark.parametrize("answer", [None, [], "text", 5, {}])
def test_an_answer_that_is_no_object_is_the_servers_fault(answer: object) -> None:
    with pytest.raises(EngineError, match=r"^s "):
        read_sglang_completion(answer, name="s", num_prompt_ids=3, version=0)


class BrokenStream:
    """A transport whose stream breaks off after one piece."""

    name, gpus = "s", None

    def __init__(self, piece: object) -> None:
        self.piece = piece

    async def stream(self, *_: object, **__: object) -> AsyncIterator[object]:
        yield self.piece
        raise HttpUnreachable("gone")


@pytest.mark.parametrize("piece", [None, [], "text", 5, {}, {"meta_info": 5}, {"meta_info": [], "output_ids": [7]}])
def test_a_stream_that_breaks_off_after_a_piece_of_another_form_is_the_servers_fault(piece: object) -> None:
    settings = EngineServing(stream=True)
    transport = cast(Any, BrokenStream(piece))
    sync = cast(Any, SimpleNamespace(adapter=None))
    replica = SglangReplica(transport, sync, settings)
    with pytest.raises(EngineError):
        asyncio.run(replica.generate([1, 2, 3], Sampling(max_tokens=4), rid="a", version=0))


@pytest.mark.parametrize("body", [b"[" * 200_000, b'{"a":' * 50_000 + b"1" + b"}" * 50_000, b"\xff", b'{"a":'])
def test_an_answer_that_is_no_json_is_read_as_text(body: bytes) -> None:
    async def run() -> object:
        async def answer(_: web.Request) -> web.Response:
            return web.Response(body=body)

        app = web.Application()
        app.router.add_get("/", answer)
        async with TestServer(app) as server:
            client = HttpClient(str(server.make_url("")))
            try:
                return await client.get("/")
            finally:
                await client.close()

    assert asyncio.run(run()) == body.decode(errors="replace")


@pytest.mark.parametrize(("num_bytes", "is_read"), [(3 << 20, True), (33 << 20, False)])
def test_a_line_of_a_stream_that_is_too_long_is_a_lost_answer(num_bytes: int, is_read: bool) -> None:
    events: list[object] = []

    async def run() -> None:
        async def answer(request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse()
            await response.prepare(request)
            await response.write(b'data: {"a": 1}\n\ndata: "' + b"x" * num_bytes + b'"\n\ndata: [DONE]\n\n')
            return response

        app = web.Application()
        app.router.add_post("/", answer)
        async with TestServer(app) as server:
            client = HttpClient(str(server.make_url("")))
            try:
                async for event in client.stream("/", {}):
                    events.append(event)
            finally:
                await client.close()

    if is_read:
        asyncio.run(run())
        assert events == [{"a": 1}, "x" * num_bytes]
        return
    with pytest.raises(HttpUnreachable) as caught:
        asyncio.run(run())
    assert events == [{"a": 1}] and len(str(caught.value)) < 500


# ---- several servers


@pytest.mark.long
def test_a_session_stays_on_its_server_and_servers_share_the_sessions(fake_sglang: Fake) -> None:
    # of a latency beside which it is little by how much a busy machine delays an answer
    servers = [fake_sglang(latency_median_s=0.1), fake_sglang(latency_median_s=0.1)]

    async def episode(engine: ReplicatedEngine, number: int) -> None:
        for _ in range(10):
            await ask(engine, f"s{number}")
        await engine.abort(f"s{number}")

    async def play(engine: ReplicatedEngine) -> int:
        await asyncio.gather(*(episode(engine, number) for number in range(32)))
        return engine.router.num_moved

    assert using(play, *servers) <= 0.05 * 32 * 9
    assert min(server.stats.requests for server in servers) > 80


@pytest.mark.long
def test_a_server_that_is_five_times_slower_loses_its_sessions(fake_sglang: Fake) -> None:
    slow = fake_sglang(latency_median_s=0.01, faults=Faults(slow_factor=5.0))
    fast = fake_sglang(latency_median_s=0.01)

    async def episode(engine: ReplicatedEngine, number: int) -> None:
        for _ in range(40):
            await ask(engine, f"s{number}")

    async def play(engine: ReplicatedEngine) -> int:
        await asyncio.gather(*(episode(engine, number) for number in range(16)))
        return engine.router.num_moved

    assert using(play, slow, fast) > 0
    assert fast.stats.requests > 3 * slow.stats.requests


@pytest.mark.long
@pytest.mark.parametrize("stream", [False, True])
def test_requests_of_a_server_that_dies_are_answered_by_another_one(fake_sglang: Fake, stream: bool) -> None:
    first, second = fake_sglang(token_s=0.01), fake_sglang(token_s=0.01)

    async def whole(engine: ReplicatedEngine, session: str) -> list[int]:
        ids: list[int] = []
        while len(ids) < 50:
            sampling = Sampling(max_tokens=50 - len(ids))
            completion = await engine.generate([*PROMPT, *ids], sampling, session=session)
            ids += completion.ids
        return ids

    async def play(engine: ReplicatedEngine) -> tuple[list[list[int]], int]:
        requests = [asyncio.create_task(whole(engine, f"s{number}")) for number in range(16)]
        await asyncio.sleep(0.2)
        await asyncio.to_thread(first.kill)
        replies = await asyncio.gather(*requests)
        assert engine.router.alive == [1]
        await update(engine, 1)
        return replies, engine.num_lost

    replies, num_lost = using(play, first, second, stream=stream)
    assert [len(ids) for ids in replies] == [50] * 16
    assert num_lost > 0
    assert second.stats.duplicates == 0
    was_streamed = second.stats.prompts > 1
    assert was_streamed is stream, "what was streamed is the beginning of the next prompt"


def test_a_server_whose_front_outlives_its_model_is_left(fake_sglang: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request is an error there, and so is its health: they are no retries."""
    front, sound = fake_sglang(faults=Faults(rates={"error": 1.0})), fake_sglang()

    async def unhealthy() -> bool:
        return False

    async def play(engine: ReplicatedEngine) -> None:
        monkeypatch.setattr(engine.replicas[0], "is_alive", unhealthy)
        replies = await asyncio.gather(*(ask(engine, f"s{number}") for number in range(8)))
        assert [len(reply.ids) for reply in replies] == [8] * 8
        assert engine.router.alive == [1]

    using(play, front, sound, max_retries=0)
    assert front.stats.requests == 4
    assert sound.stats.answered == 8


def test_all_servers_dead_is_an_engine_error(fake_sglang: Fake) -> None:
    server = fake_sglang()

    async def play(engine: ReplicatedEngine) -> None:
        await asyncio.to_thread(server.kill)
        with pytest.raises(EngineError, match="no server is left that answers"):
            await ask(engine)
        with pytest.raises(EngineError, match="no server is left that answers"):
            await engine.pause()

    using(play, server)


# ---- sleeping


def test_a_server_sleeps_while_paused_with_nothing_in_flight(fake_sglang: Fake) -> None:
    server = fake_sglang()
    seen: list[tuple[str, ...]] = []

    async def play(engine: ReplicatedEngine) -> Completion:
        await ask(engine)
        await engine.pause()
        seen.append(server.stats.released)
        await engine.update_weights(weights(), 1)
        seen.append(server.stats.released)
        await engine.resume()
        seen.append(server.stats.released)
        return await ask(engine)

    reply = using(play, server, sleep=True)
    assert seen == [("cuda_graph", "kv_cache", "weights"), ("cuda_graph", "kv_cache"), ()]
    assert reply.policy_versions == (1,) * 8


@pytest.mark.parametrize("sleep", [True, False])
def test_a_learner_gives_back_what_it_has_cached_of_a_gpu_before_a_server_wakes(
    sleep: bool, fake_sglang: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, model = fake_sglang(), load_decoder(embedded_folder())
    asleep: list[bool] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: asleep.append("weights" in server.stats.released))
    learner = Learner(model, LearnerConfig(threads=1), OptimizerConfig(), total_steps=1)

    async def play(engine: ReplicatedEngine) -> None:
        await engine.pause()
        await LocalWeights(engine, model, learner).send(1)
        await engine.resume()

    using(play, server, sleep=sleep)
    learner.close()
    assert asleep == ([True] if sleep else [])


def test_a_server_that_slept_goes_on_without_new_weights(fake_sglang: Fake) -> None:
    server = fake_sglang()

    async def play(engine: ReplicatedEngine) -> Completion:
        await engine.pause()
        await engine.pause()
        await engine.resume()
        return await ask(engine)

    assert using(play, server, sleep=True).policy_versions == (0,) * 8
    assert not server.stats.released


def test_a_server_with_requests_in_flight_keeps_its_memory(fake_sglang: Fake) -> None:
    server = fake_sglang(token_s=0.05)

    async def play(engine: ReplicatedEngine) -> Completion:
        reply = asyncio.ensure_future(ask(engine))
        await asyncio.sleep(0.1)
        await engine.pause()
        assert not server.stats.released
        await engine.resume()
        return await reply

    assert len(using(play, server, sleep=True).ids) == 8


def test_a_gpu_server_without_a_memory_saver_is_refused(fake_sglang: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    server_info = FakeControl._server_info

    async def on_gpu(control: FakeControl, call: HttpCall) -> HttpAnswer:
        answer = await server_info(control, call)
        return HttpAnswer({**answer.content, "device": "cuda"})

    monkeypatch.setattr(FakeControl, "_server_info", on_gpu)
    server = fake_sglang()

    async def play(engine: ReplicatedEngine) -> None:
        raise AssertionError("it is refused")

    with pytest.raises(EngineError, match="--enable-memory-saver --enable-weights-cpu-backup"):
        using(play, server, sleep=True)

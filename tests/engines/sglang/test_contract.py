"""What our client relies on in SGLang's native interface: the fake server and a real one pass the same tests.

`pytest -m engine tests/engines/sglang/test_contract.py` runs them on a real server.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import pickle
from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
import torch

from agentgym.embedded import embedded_folder
from agentgym.engines.servers.http import SERVER_SECRET, secret_headers
from agentgym.testing.fake_server.server import FakeConfig, FakeSglang
from agentgym.testing.fake_server.tensors import read_safetensors

if TYPE_CHECKING:
    import openai

PROMPT = [1, 2, 3, 4]
LONG = 1000
"""Tokens of a reply that lasts long enough to be disturbed."""
Post = Callable[..., Awaitable[tuple[int, Any]]]


@pytest.fixture(scope="module", params=["fake", pytest.param("real", marks=pytest.mark.engine)])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "fake":
        with FakeSglang(FakeConfig(token_s=0.0015)) as server:
            yield server.url
    elif running := os.environ.get("SGLANG_CONTRACT_URL"):  # one that may be paused and updated
        yield running
    else:
        with request.getfixturevalue("lend_sglang")() as server:
            yield server.url


def connect() -> aiohttp.ClientSession:
    """A connection with the secret of our environment, if there is one."""
    return aiohttp.ClientSession(headers=secret_headers(os.environ.get(SERVER_SECRET, "")))


def openai_client(url: str) -> openai.OpenAI:
    """Such a connection of the library."""
    import openai  # here, and not above: collected by every process, and costly

    return openai.OpenAI(base_url=f"{url}/v1", api_key=os.environ.get(SERVER_SECRET, "none"))


def talk(url: str, conversation: Callable[[Post], Awaitable[None]]) -> None:
    """Runs `conversation(post)`, where `post(path, body)` gives status and answer; lets a paused server go on."""

    async def run() -> None:
        async with connect() as session:

            async def post(path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
                async with session.post(url + path, json=body or {}) as response:
                    text = await response.text()
                    try:
                        return response.status, json.loads(text)
                    except ValueError:
                        return response.status, text

            try:
                async with asyncio.timeout(180.0):
                    await conversation(post)
            finally:
                await post("/continue_generation")
                await post("/abort_request", {"abort_all": True})

    asyncio.run(run())


def generation(rid: str, num_new: int = 4, **params: Any) -> dict[str, Any]:
    sampling = {"max_new_tokens": num_new, "temperature": 1.0, "ignore_eos": True, **params}
    return {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True, "rid": rid}


async def begun(post: Post, *rids: str) -> list[asyncio.Task[tuple[int, Any]]]:
    """Long replies under way."""
    tasks = [asyncio.create_task(post("/generate", generation(rid, LONG))) for rid in rids]
    await asyncio.sleep(0.5)  # until they are being sampled
    assert not any(task.done() for task in tasks)
    return tasks


def check_lengths(answer: dict[str, Any]) -> int:
    """The number of ids of an answer whose parts agree."""
    ids, meta = answer["output_ids"], answer["meta_info"]
    assert [pair[1] for pair in meta["output_token_logprobs"]] == ids
    assert meta["completion_tokens"] == meta["output_token_logprobs_length"] == len(ids)
    assert meta["weight_versions"][-1]["end"] == len(ids)
    return len(ids)


def test_an_answer_has_ids_logprobs_and_versions(url: str) -> None:
    async def conversation(post: Post) -> None:
        status, answer = await post("/generate", generation("r"))
        meta = answer["meta_info"]
        assert status == 200
        assert check_lengths(answer) == 4
        assert meta["id"] == "r"
        assert meta["finish_reason"] == {"type": "length", "length": 4}
        assert (meta["prompt_tokens"], meta["reasoning_tokens"]) == (4, 0)
        assert all(logprob <= 0.0 and text is None for logprob, _, text in meta["output_token_logprobs"])
        version = meta["weight_version"]
        assert meta["weight_versions"] == [{"version": version, "start": 0, "end": 4}]
        assert {type(meta[name]) for name in ("cached_tokens", "num_retractions")} == {int}
        assert isinstance(meta["e2e_latency"], float)
        assert isinstance(answer["text"], str)

    talk(url, conversation)


def test_a_stop_id_is_the_last_id_and_not_in_the_text(url: str) -> None:
    async def conversation(post: Post) -> None:
        everything = list(range(1984))
        _, answer = await post("/generate", generation("r", 5, stop_token_ids=everything, ignore_eos=False))
        assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": answer["output_ids"][0]}
        assert (check_lengths(answer), answer["text"]) == (1, "")

    talk(url, conversation)


def test_stop_ids_do_not_count_where_the_end_is_ignored(url: str) -> None:
    async def conversation(post: Post) -> None:
        _, answer = await post("/generate", generation("r", 5, stop_token_ids=list(range(1984)), ignore_eos=True))
        assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 5}

    talk(url, conversation)


REFUSED = [
    ({"input_ids": []}, "input_ids cannot be empty."),
    ({"input_ids": None}, "Either text, input_ids or input_embeds should be provided."),
    ({"sampling_params": {"max_new_tokens": -3}}, "max_new_tokens must be at least 0, got -3."),
    (
        {"sampling_params": {"max_new_tokens": 3000}},
        "Requested token count exceeds the model's maximum context length of 1024 tokens. You requested a total of 3004"
        " tokens: 4 tokens from the input messages and 3000 tokens for the completion. Please reduce the number of"
        " tokens in the input messages or the completion to fit within the limit.",
    ),
    (
        {"input_ids": [5] * 1018},
        "Input length (1018 tokens) exceeds the maximum allowed length (1018 tokens). Use a shorter input or enable"
        " --allow-auto-truncate.",
    ),
    (
        {"input_ids": [5] * 1030},
        "The input (1030 tokens) is longer than the model's context length (1024 tokens).",
    ),
]


@pytest.mark.parametrize(("changed", "message"), REFUSED)
def test_a_wrong_request_is_refused_in_these_words(url: str, changed: dict[str, Any], message: str) -> None:
    async def conversation(post: Post) -> None:
        assert await post("/generate", generation("r") | changed) == (400, {"error": {"message": message}})

    talk(url, conversation)


def test_an_unknown_sampling_parameter_is_refused(url: str) -> None:
    async def conversation(post: Post) -> None:
        status, answer = await post("/generate", generation("r", temprature=1.0))
        assert status == 400
        assert answer["error"].startswith("unknown field `temprature`, expected one of `max_new_tokens`")

    talk(url, conversation)


def test_a_request_id_in_flight_is_refused_again(url: str) -> None:
    async def conversation(post: Post) -> None:
        await begun(post, "twice")
        assert await post("/generate", generation("twice")) == (
            400,
            {"error": {"message": "Duplicate request ID detected: twice"}},
        )

    talk(url, conversation)


def test_a_stream_repeats_all_ids_so_far(url: str) -> None:
    async def run() -> None:
        async with connect() as session:
            body = generation("s", 3) | {"stream": True}
            async with session.post(url + "/generate", json=body) as response:
                assert response.content_type == "text/event-stream"
                events = [part.removeprefix("data: ") for part in (await response.text()).split("\n\n") if part]
        assert events.pop() == "[DONE]"
        pieces = [json.loads(event) for event in events]
        last = pieces[-1]
        assert check_lengths(last) == 3
        assert last["meta_info"]["finish_reason"] == {"type": "length", "length": 3}
        for piece in pieces[:-1]:
            count = len(piece["output_ids"])
            assert piece["output_ids"] == last["output_ids"][:count]
            assert piece["meta_info"]["finish_reason"] is None
            assert len(piece["meta_info"]["output_token_logprobs"]) == count

    asyncio.run(run())


@pytest.mark.long
def test_whatever_bears_the_id_of_a_stream_two_seconds_after_it_is_aborted(url: str) -> None:
    async def conversation(post: Post) -> None:
        await post("/generate", generation("again", 2) | {"stream": True})
        await asyncio.sleep(1.2)
        (task,) = await begun(post, "again")
        _, answer = await task
        assert answer["meta_info"]["finish_reason"]["type"] == "abort"
        assert check_lengths(answer) < LONG

    talk(url, conversation)


def test_an_abort_ends_a_reply_with_the_ids_so_far(url: str) -> None:
    async def conversation(post: Post) -> None:
        (task,) = await begun(post, "a")
        assert await post("/abort_request", {"rid": "a"}) == (200, "")
        status, answer = await task
        assert status == 200
        assert 0 < check_lengths(answer) < LONG
        finish = answer["meta_info"]["finish_reason"]
        assert finish == {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}

    talk(url, conversation)


@pytest.mark.long
def test_an_abort_also_ends_ids_that_begin_alike_and_no_others(url: str) -> None:
    async def conversation(post: Post) -> None:
        tasks = await begun(post, "a1", "a12", "b")
        await post("/abort_request", {"rid": "a"})  # nobody's id
        await post("/abort_request", {"rid": ""})
        await asyncio.sleep(0.1)
        assert not any(task.done() for task in tasks)
        await post("/abort_request", {"rid": "a1"})
        reasons = [(await task)[1]["meta_info"]["finish_reason"]["type"] for task in tasks]
        assert reasons == ["abort", "abort", "length"]

    talk(url, conversation)


def test_the_cache_is_not_flushed_under_a_running_request(url: str) -> None:
    async def conversation(post: Post) -> None:
        (task,) = await begun(post, "f")
        assert await post("/flush_cache") == (400, "Flush cache failed.\n")
        await post("/abort_request", {"rid": "f"})
        await task
        status, answer = await post("/flush_cache?timeout=5")
        assert status == 200
        assert answer.startswith("Cache flushed.")

    talk(url, conversation)


@pytest.mark.long
def test_an_in_place_pause_holds_ids_flushes_and_aborts(url: str) -> None:
    async def conversation(post: Post) -> None:
        going_on, ended = await begun(post, "kept", "ended")
        assert (await post("/pause_generation", {"mode": "in_place"}))[0] == 200
        await post("/abort_request", {"rid": "ended"})
        await asyncio.sleep(0.2)
        assert not going_on.done()
        assert not ended.done()
        assert (await post("/flush_cache"))[0] == 400
        assert (await post("/continue_generation"))[0] == 200
        assert (await ended)[1]["meta_info"]["finish_reason"]["type"] == "abort"
        assert check_lengths((await going_on)[1]) == LONG

    talk(url, conversation)


@pytest.mark.long
def test_a_retracting_pause_allows_a_flush_and_gives_aborted_ids_at_once(url: str) -> None:
    async def conversation(post: Post) -> None:
        going_on, ended = await begun(post, "kept", "ended")
        assert (await post("/pause_generation", {"mode": "retract"}))[0] == 200
        await post("/abort_request", {"rid": "ended"})
        answer = (await ended)[1]
        assert answer["meta_info"]["finish_reason"] == {"type": "abort", "message": "Abort in waiting queue"}
        assert "prompt_tokens" not in answer["meta_info"]
        assert 0 <= check_lengths(answer) < LONG
        assert (await post("/flush_cache"))[0] == 200
        assert not going_on.done()
        await post("/continue_generation")
        assert check_lengths((await going_on)[1]) == LONG

    talk(url, conversation)


def test_an_aborting_pause_ends_all_and_holds_what_comes(url: str) -> None:
    async def conversation(post: Post) -> None:
        (ended,) = await begun(post, "ended")
        await post("/pause_generation", {"mode": "abort"})
        assert (await ended)[1]["meta_info"]["finish_reason"]["type"] == "abort"
        waiting = asyncio.create_task(post("/generate", generation("held")))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        await post("/continue_generation")
        assert check_lengths((await waiting)[1]) == 4

    talk(url, conversation)


def test_an_abort_of_a_request_that_came_in_a_pause_is_lost(url: str) -> None:
    async def conversation(post: Post) -> None:
        await post("/pause_generation", {"mode": "in_place"})
        waiting = asyncio.create_task(post("/generate", generation("held")))
        await asyncio.sleep(0.2)
        await post("/abort_request", {"rid": "held"})
        await post("/continue_generation")
        assert (await waiting)[1]["meta_info"]["finish_reason"]["type"] == "length"

    talk(url, conversation)


@pytest.mark.long
def test_a_new_version_in_mid_reply_shows_in_the_spans(url: str) -> None:
    async def conversation(post: Post) -> None:
        before = (await post("/generate", generation("r")))[1]["meta_info"]["weight_version"]
        (task,) = await begun(post, "r")
        await post("/pause_generation", {"mode": "in_place"})
        body = {"new_version": "new", "abort_all_requests": False}
        message = "Weight version updated to new"
        expected = {"success": True, "message": message, "new_version": "new"}
        assert await post("/update_weight_version", body) == (200, expected)
        await post("/continue_generation")
        answer = (await task)[1]
        old, new = answer["meta_info"]["weight_versions"]
        assert (old["version"], new["version"]) == (before, "new")
        assert 0 == old["start"] < old["end"] == new["start"] < new["end"] == LONG
        assert answer["meta_info"]["weight_version"] == "new"
        await post("/update_weight_version", {"new_version": before})

    talk(url, conversation)


def test_a_new_version_aborts_by_default(url: str) -> None:
    async def conversation(post: Post) -> None:
        (task,) = await begun(post, "r")
        await post("/update_weight_version", {"new_version": "default"})
        assert (await task)[1]["meta_info"]["finish_reason"]["type"] == "abort"

    talk(url, conversation)


def payload(*names: str, change: float = 0.0, **more: Any) -> dict[str, Any]:
    """Embedded tensors for `/update_weights_from_tensor`, each plus `change`."""
    tensors = dict(read_safetensors(embedded_folder() / "model.safetensors"))
    pairs = [
        (
            name,
            torch.frombuffer(bytearray(tensors[name].data), dtype=torch.float32).reshape(tensors[name].shape) + change,
        )
        for name in names
    ]
    return {"serialized_named_tensors": [base64.b64encode(pickle.dumps(pairs)).decode()], **more}


Q, NORM = "model.layers.0.self_attn.q_proj.weight", "model.norm.weight"


async def checksums(post: Post) -> dict[str, str]:
    answer = (await post("/weights_checker", {"action": "checksum"}))[1]
    assert answer["success"] is True
    sums: dict[str, str] = answer["ranks"][0]["checksums"]
    return sums


def test_an_update_shows_in_the_checksums_of_its_tensors_alone(url: str) -> None:
    async def conversation(post: Post) -> None:
        before = await checksums(post)
        assert (await post("/begin_weight_update"))[0] == 200
        status, answer = await post("/update_weights_from_tensor", payload(Q, NORM, change=0.25, weight_version="9"))
        assert (status, answer) == (200, {"success": True, "message": "Success Weight version updated to 9."})
        assert await post("/end_weight_update") == (200, {"success": True, "message": "Success"})
        after = await checksums(post)
        changed = {name for name in before if before[name] != after[name]}
        assert changed == {NORM, "model.layers.0.self_attn.qkv_proj.weight"}
        await post("/begin_weight_update")
        await post("/update_weights_from_tensor", payload(Q, NORM, weight_version="default"))
        await post("/end_weight_update")
        assert await checksums(post) == before

    talk(url, conversation)


def test_the_shipped_weights_have_these_checksums(url: str) -> None:
    async def conversation(post: Post) -> None:
        sums = await checksums(post)
        assert len(sums) == 34
        assert sums["model.embed_tokens.weight"] == "041a64f920c7e45f"
        assert sums["model.layers.3.mlp.gate_up_proj.weight"] == "a258db6801ccd899"
        answer = (await post("/weights_checker", {"action": "checksum", "skip_tensor_list": ["layers"]}))[1]
        assert set(answer["ranks"][0]["checksums"]) == {"model.embed_tokens.weight", NORM}

    talk(url, conversation)


def test_weights_are_taken_only_within_an_update(url: str) -> None:
    async def conversation(post: Post) -> None:
        outside = "update_weights_from_tensor must run between begin_weight_update() and end_weight_update()"
        assert await post("/update_weights_from_tensor", payload(NORM)) == (400, {"success": False, "message": outside})
        closed = "no weight-update session is open; call begin_weight_update() first"
        assert await post("/end_weight_update") == (400, {"success": False, "message": closed})
        await post("/begin_weight_update")
        open_already = "a weight-update session is already open; call end_weight_update() first"
        assert await post("/begin_weight_update") == (400, {"success": False, "message": open_already})
        assert (await post("/end_weight_update"))[0] == 200

    talk(url, conversation)


def test_an_update_without_a_pause_waits_for_what_is_in_flight(url: str) -> None:
    async def conversation(post: Post) -> None:
        (task,) = await begun(post, "r")
        begin = asyncio.create_task(post("/begin_weight_update"))
        await asyncio.sleep(0.2)
        assert not begin.done()
        await post("/abort_request", {"rid": "r"})
        assert (await begin)[0] == 200
        assert task.done()
        await post("/end_weight_update")

    talk(url, conversation)


@pytest.mark.long
def test_an_update_that_cannot_flush_fails_and_keeps_the_old_version(url: str) -> None:
    async def conversation(post: Post) -> None:
        before = await checksums(post)
        (task,) = await begun(post, "r")
        await post("/pause_generation", {"mode": "in_place"})
        await post("/begin_weight_update")
        status, answer = await post("/update_weights_from_tensor", payload(NORM, change=0.25, weight_version="7"))
        assert (status, answer["success"]) == (400, False)
        assert answer["message"].startswith("Weights were updated, but the cache was not flushed")
        assert (await checksums(post))[NORM] != before[NORM]
        body = payload(NORM, flush_cache=False, weight_version="default")
        assert (await post("/update_weights_from_tensor", body))[0] == 200
        await post("/end_weight_update")
        await post("/continue_generation")
        assert check_lengths((await task)[1]) == LONG

    talk(url, conversation)


def test_an_adapter_that_is_not_loaded_cannot_be_unloaded(url: str) -> None:
    async def conversation(post: Post) -> None:
        status, answer = await post("/unload_lora_adapter", {"lora_name": "nobody"})
        assert (status, answer["success"]) == (400, False)
        assert isinstance(answer["error_message"], str)

    talk(url, conversation)


def test_the_server_information_is_read(url: str) -> None:
    async def run() -> None:
        async with connect() as session:

            async def get(path: str) -> Any:
                async with session.get(url + path) as response:
                    response.raise_for_status()
                    return await response.json()

            info = await get("/model_info")
            server = await get("/server_info")
            models = await get("/v1/models")
            async with session.get(url + "/health") as response:
                assert (response.status, await response.text()) == (200, "")
        assert info["is_generation"] is True
        assert info["model_type"] == "qwen3"
        assert info["weight_version"] == "default"
        assert (server["version"], server["dtype"], server["device"]) == ("0.5.23", "float32", "cpu")
        assert (server["tp_size"], server["dp_size"], server["context_length"]) == (1, 1, None)
        assert server["max_req_input_len"] == 1018
        assert server["model_path"] == info["model_path"] == models["data"][0]["id"]
        assert models["data"][0]["max_model_len"] == 1024

    asyncio.run(run())


def test_the_openai_client_reads_chat_completions_and_their_exact_ids(url: str) -> None:
    extra = {"return_token_ids": True, "return_prompt_token_ids": True, "return_meta_info": True}
    with openai_client(url) as client:
        answer = client.chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": "hi"}],
            max_tokens=6,
            logprobs=True,
            extra_body=extra,
        )
    (choice,) = answer.choices
    choice_json = choice.model_dump()
    ids = choice_json["response_token_ids"]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(choice_json["prompt_token_ids"]) == 7
    assert answer.usage.completion_tokens == len(ids)
    assert [pair[1] for pair in choice_json["meta_info"]["output_token_logprobs"]] == ids
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert [token.logprob for token in choice.logprobs.content] == [
        pair[0] for pair in choice_json["meta_info"]["output_token_logprobs"]
    ]
    assert answer.metadata is not None
    assert answer.metadata["weight_version"] == "default"


def test_the_openai_client_reads_a_stream(url: str) -> None:
    with openai_client(url) as client:
        chunks = list(
            client.chat.completions.create(
                model="m",
                messages=[{"role": "user", "content": "hi"}],
                max_tokens=6,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason in ("length", "stop")
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.prompt_tokens == 7


def test_exact_ids_are_not_streamed_in_chat(url: str) -> None:
    async def conversation(post: Post) -> None:
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True, "return_token_ids": True}
        status, answer = await post("/v1/chat/completions", body)
        assert status == 400
        assert answer["message"].startswith("return_token_ids is not supported with streaming")

    talk(url, conversation)


def test_a_chat_that_is_wrong_is_refused(url: str) -> None:
    async def conversation(post: Post) -> None:
        empty = {"object": "error", "message": "Messages cannot be empty.", "type": "BadRequestError", "param": None}
        assert await post("/v1/chat/completions", {"model": "m", "messages": []}) == (400, empty | {"code": 400})
        long = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5000}
        status, answer = await post("/v1/chat/completions", long)
        assert (status, answer["type"]) == (400, "BadRequestError")
        assert "maximum context length of 1024 tokens" in answer["message"]

    talk(url, conversation)

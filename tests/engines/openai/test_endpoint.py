"""A chat endpoint is asked over real HTTP: replies whole and streamed, calls, failures, limits, ids."""

from __future__ import annotations

import asyncio
import json
import logging
import pickle
import threading
from collections.abc import Callable, Coroutine
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from agentgym.engines.openai.config import endpoint_url
from agentgym.engines.openai.endpoint import (
    ChatEndpoint,
    ChatEndpointConfig,
    ChatReply,
    ContextExceeded,
    EndpointFailure,
)
from agentgym.engines.protocol import Sampling
from agentgym.engines.servers.http import HttpClient
from agentgym.errors import ConfigError, UnknownName
from agentgym.testing.fake_server.server import FakeConfig, FakeSglang
from agentgym.types import MalformedCall, Message, ToolCall, ToolSpec

Start = Callable[..., Any]
QUESTION = [Message("user", "Hello?")]
GO = ToolSpec("go", "Goes.", {"type": "object", "properties": {"direction": {"type": "string"}}})
PLAIN = ChatEndpointConfig(token_ids=False)
REFUSED = {"error": {"message": "This model's maximum context length is 10 tokens.", "code": "context_length_exceeded"}}


class Asker:
    """Asks an endpoint without waiting: the waits it would have made are in `slept`."""

    def __init__(self, url: str, config: ChatEndpointConfig = PLAIN) -> None:
        self.url, self.config = url, config
        self.slept: list[float] = []
        self.now = 0.0

    async def _sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds

    def run(self, talk: Callable[[ChatEndpoint], Coroutine[Any, Any, Any]]) -> Any:
        async def main() -> Any:
            async with ChatEndpoint(self.url, self.config, sleep=self._sleep, clock=lambda: self.now) as endpoint:
                return await talk(endpoint)

        return asyncio.run(main())

    def ask(self, *messages: Message | ChatReply, sampling: Sampling | None = None, tools: Any = ()) -> ChatReply:
        reply = self.run(lambda endpoint: endpoint.complete(messages or QUESTION, tools, sampling, session="s"))
        assert isinstance(reply, ChatReply)
        return reply


@pytest.mark.parametrize("stream", [True, False])
def test_a_reply_is_read_whole_and_streamed(stream: bool, chat_endpoint: Start) -> None:
    calls = [("call_a", "go", '{"direction": "north"}'), ("call_b", "go", '{"direction": '), ("call_c", "look", "")]
    completion = chat_endpoint.make_reply(content="Hi.", reasoning="Think.", calls=calls, usage=(100, 60, 7))
    endpoint = chat_endpoint(lambda body, number: completion)
    config = ChatEndpointConfig(
        stream=stream, token_ids=False, price_prompt=2.0, price_cached=1.0, price_completion=8.0
    )
    reply = Asker(endpoint.url, config).ask(tools=[GO])
    message = reply.message
    assert (message.content, message.reasoning) == ("Hi.", "Think.")
    assert message.tool_calls[0] == ToolCall("call_a", "go", {"direction": "north"})
    bad = message.tool_calls[1]
    assert isinstance(bad, MalformedCall) and bad.id == "call_b" and '{"direction": ' in bad.raw.replace("\\", "")
    assert message.tool_calls[2] == ToolCall("call_c", "look", {})
    assert reply.finish_reason == "stop" and reply.attempts == 1
    assert (reply.usage.prompt_tokens, reply.usage.cached_tokens, reply.usage.completion_tokens) == (100, 60, 7)
    assert reply.cost == pytest.approx((40 * 2 + 60 * 1 + 7 * 8) / 1e6)
    assert reply.latency_s > 0 and (reply.first_token_s is not None) is stream
    assert reply.ids is None and reply.prompt_ids is None and reply.logprobs is None


@pytest.mark.parametrize(
    "odd",
    [
        {"usage": {"completion_tokens": float("inf")}},
        {"usage": {"prompt_tokens_details": {"cached_tokens": float("inf")}}},
        {"usage": [1]},
        {"choices": [None]},
        {"choices": {"0": {}}},
        {"prompt_token_ids": [1], "choices": [{"token_ids": [1], "logprobs": {"content": [{"logprob": -(10**400)}]}}]},
    ],
)
def test_an_answer_of_another_form_fails_its_own_question_alone(
    odd: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    good = {"choices": [{"message": {"content": "x"}, "finish_reason": "stop"}]}
    if isinstance(odd.get("choices"), list) and odd["choices"][0]:
        odd = {**odd, "choices": [{**good["choices"][0], **odd["choices"][0]}]}

    async def post(*_: object, **__: object) -> object:
        return {**good, **odd}

    monkeypatch.setattr(HttpClient, "post", post)
    config = ChatEndpointConfig(model="m", stream=False, token_ids=False, max_retries=0)
    with pytest.raises(EndpointFailure, match="not a chat completion"):
        Asker("http://127.0.0.1:9/v1", config).ask()


def test_a_key_in_a_finish_reason_is_not_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret-123")

    async def post(*_: object, **__: object) -> object:
        return {"choices": [{"message": {"content": "x"}, "finish_reason": "odd sk-secret-123"}]}

    monkeypatch.setattr(HttpClient, "post", post)
    config = ChatEndpointConfig(model="m", stream=False, token_ids=False)
    assert Asker("http://127.0.0.1:9/v1", config).ask().message.content == "x"
    assert "odd ***" in caplog.text and "secret" not in caplog.text


def test_history_goes_back_word_for_word_and_bad_arguments_as_good_json(chat_endpoint: Start) -> None:
    completion = chat_endpoint.make_reply(
        reasoning="Hm.", calls=[("call_7", "go", '{"direction":"north"}'), ("call_8", "go", "{")]
    )
    endpoint = chat_endpoint(lambda body, number: completion)
    asker = Asker(endpoint.url)
    reply = asker.ask(tools=[GO])
    asker.ask(*QUESTION, reply, Message("tool", "A hall.", tool_call_id="call_7"), tools=[GO])
    messages = endpoint.bodies[-1]["messages"]
    assert messages[1]["tool_calls"][0]["function"] == {"name": "go", "arguments": '{"direction":"north"}'}
    assert "reasoning_content" not in messages[1]
    assert isinstance(json.loads(messages[1]["tool_calls"][1]["function"]["arguments"]), dict)
    assert messages[2] == {"role": "tool", "content": "A hall.", "tool_call_id": "call_7"}
    assert endpoint.bodies[-1]["tools"] == [GO.to_openai()]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    "failure", [{"status": 500}, {"status": 503}, {"status": 429}, {"breaks": True, "content": "x"}]
)
def test_a_failure_that_passes_is_met_by_another_request(
    failure: dict[str, Any], stream: bool, chat_endpoint: Start
) -> None:
    make_reply = chat_endpoint.make_reply
    endpoint = chat_endpoint(
        lambda body, number: make_reply(**failure) if number < 3 else make_reply(content="At last.")
    )
    asker = Asker(endpoint.url, ChatEndpointConfig(stream=stream, token_ids=False))
    reply = asker.ask()
    assert reply.message.content == "At last." and reply.attempts == 4 == len(endpoint.bodies)
    assert reply.usage.completion_tokens == 3  # those of the one answer
    assert len(asker.slept) == 3
    for number, waited in enumerate(asker.slept):
        assert 0.25 * 2**number <= waited <= 0.5 * 2**number
    again = Asker(endpoint.url, asker.config)
    endpoint.bodies.clear()
    again.ask()
    assert again.slept == asker.slept  # the same session waits the same


def test_a_request_that_takes_too_long_is_sent_again(chat_endpoint: Start) -> None:
    make_reply = chat_endpoint.make_reply
    endpoint = chat_endpoint(lambda body, number: make_reply(hangs=number == 0, content="Now."))
    reply = Asker(endpoint.url, ChatEndpointConfig(timeout_s=0.2, token_ids=False)).ask()
    assert reply.message.content == "Now." and reply.attempts == 2


def test_the_wait_before_a_retry_is_the_one_the_endpoint_names(chat_endpoint: Start) -> None:
    make_reply = chat_endpoint.make_reply
    busy = make_reply(status=429, headers={"Retry-After": "17"})
    endpoint = chat_endpoint(lambda body, number: busy if number == 0 else make_reply(content="Yes."))
    asker = Asker(endpoint.url)
    assert asker.ask().message.content == "Yes." and asker.slept == [17.0]
    endpoint.script = lambda body, number: make_reply(status=429, headers={"Retry-After": "86400"})
    with pytest.raises(EndpointFailure, match="asks to wait for 86400 s"):
        asker.ask()


def test_retries_end_and_the_failure_counts_them(chat_endpoint: Start) -> None:
    endpoint = chat_endpoint(lambda body, number: chat_endpoint.make_reply(status=500, body={"error": "worker died"}))
    asker = Asker(endpoint.url, ChatEndpointConfig(max_retries=2, token_ids=False))
    with pytest.raises(EndpointFailure, match=r"answered 500.*worker died") as caught:
        asker.ask()
    assert caught.value.attempts == 3 == len(endpoint.bodies) and len(asker.slept) == 2
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (type(copy), copy.attempts) == (EndpointFailure, 3)


def test_a_wrong_key_fails_at_once_and_is_never_shown(chat_endpoint: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret-123")
    endpoint = chat_endpoint(lambda body, number: chat_endpoint.make_reply())
    endpoint.key = "another"
    asker = Asker(endpoint.url, ChatEndpointConfig(model="test-model", token_ids=False))
    for talk in (lambda client: client.open(), lambda client: client.complete(QUESTION)):
        with pytest.raises(ConfigError, match="OPENAI_API_KEY") as caught:
            asker.run(talk)
        text = f"{caught.value!r} {caught.value.__cause__!r} {asker.config!r}"
        assert "sk-secret" not in text and "***" in text
    assert len(endpoint.bodies) == 1 and asker.slept == []
    endpoint.key = "sk-secret-123"
    assert asker.ask().attempts == 1


def test_a_model_that_is_not_there_is_answered_with_the_nearest(chat_endpoint: Start) -> None:
    def script(body: dict[str, Any], number: int) -> Any:
        return chat_endpoint.make_reply(
            status=404, body={"error": {"message": f"The model {body['model']} does not exist"}}
        )

    endpoint = chat_endpoint(script, models=("qwen3-8b", "llama-70b"))
    asker = Asker(endpoint.url, ChatEndpointConfig(model="qwen-8b"))
    for talk in (lambda client: client.open(), lambda client: client.complete(QUESTION)):
        with pytest.raises(UnknownName, match="did you mean 'qwen3-8b'"):
            asker.run(talk)
    with pytest.raises(ConfigError, match="lists 2: qwen3-8b, llama-70b; name a model"):
        Asker(endpoint.url).ask()
    unlisted = chat_endpoint(lambda body, number: chat_endpoint.make_reply(content="Hi."), models=None)
    with pytest.raises(ConfigError, match="lists no models; name a model with --endpoint"):
        Asker(unlisted.url).ask()
    assert Asker(unlisted.url, ChatEndpointConfig(model="any", token_ids=False)).ask().message.content == "Hi."


def test_a_reply_that_the_endpoint_gives_up_is_asked_for_again(chat_endpoint: Start) -> None:
    make_reply = chat_endpoint.make_reply
    for finish in ("abort", "error"):
        endpoint = chat_endpoint(
            lambda *arguments, f=finish: make_reply(content="A", finish="stop" if arguments[1] else f)
        )
        assert Asker(endpoint.url).ask().attempts == 2


def test_a_busy_endpoint_is_asked_again_which_models_it_has(chat_endpoint: Start) -> None:
    endpoint = chat_endpoint(lambda body, number: chat_endpoint.make_reply(content="Hi."))
    endpoint.busy = 2
    asker = Asker(endpoint.url)
    assert asker.ask().message.content == "Hi." and len(asker.slept) == 2
    endpoint.busy = 20
    with pytest.raises(EndpointFailure, match="answered 429"):
        asker.ask()


def test_an_address_where_nobody_answers_is_named() -> None:
    with pytest.raises(EndpointFailure, match="no endpoint answers at http://127"):
        Asker("http://127.0.0.1:9").run(lambda client: client.open())


@pytest.mark.parametrize(
    ("status", "message"), [(403, "may not do this"), (405, "no chat completions"), (402, "credit")]
)
def test_what_no_retry_mends_is_the_users_to_mend(status: int, message: str, chat_endpoint: Start) -> None:
    endpoint = chat_endpoint(lambda body, number: chat_endpoint.make_reply(status=status, body={}))
    with pytest.raises(ConfigError, match=message):
        Asker(endpoint.url).ask()
    assert len(endpoint.bodies) == 1


def test_a_quota_that_is_used_up_is_not_asked_again(chat_endpoint: Start) -> None:
    body = {"error": {"code": "insufficient_quota", "message": "You exceeded your current quota"}}
    endpoint = chat_endpoint(lambda *_: chat_endpoint.make_reply(status=429, body=body))
    with pytest.raises(ConfigError, match="credit is used up"):
        Asker(endpoint.url).ask()
    assert len(endpoint.bodies) == 1


@pytest.mark.parametrize(
    "words",
    [
        "Requested token count exceeds the model's maximum context length of 1024 tokens.",
        "The input (8006 tokens) is longer than the model's context length (1024 tokens).",
        "Input length (1023 tokens) exceeds the maximum allowed length (1018 tokens).",
        "max_tokens=2000 cannot be greater than max_model_len=1024.",
        "the request exceeds the available context size, try increasing it",
        "prompt is too long: 210000 tokens > 200000 maximum",
        "The input token count (1200000) exceeds the maximum number of tokens allowed (1048576).",
        "max_tokens is too large: 5000. This model supports at most 4096 completion tokens.",
    ],
)
def test_a_full_window_is_recognized_in_the_wording_of_many_servers(words: str, chat_endpoint: Start) -> None:
    body = {"error": {"message": words}}
    endpoint = chat_endpoint(lambda *_: chat_endpoint.make_reply(status=400, body=body))
    with pytest.raises(ContextExceeded):
        Asker(endpoint.url).ask()


def test_a_reply_for_which_the_window_is_too_small_gets_what_is_left(chat_endpoint: Start) -> None:
    make_reply = chat_endpoint.make_reply
    refusal, cut = make_reply(status=400, body=REFUSED), make_reply(content="a", finish="length")
    endpoint = chat_endpoint(lambda body, number: refusal if "max_tokens" in body else cut)
    reply = Asker(endpoint.url).ask(sampling=Sampling(max_tokens=100))
    assert reply.finish_reason == "length" and reply.cut_by_window and reply.attempts == 2
    endpoint.script = lambda body, number: refusal
    with pytest.raises(ContextExceeded, match="maximum context length"):
        Asker(endpoint.url).ask()


def test_a_reply_that_cannot_fit_any_more_is_asked_for_without_a_limit(chat_endpoint: Start) -> None:
    endpoint = chat_endpoint(lambda *_: chat_endpoint.make_reply(content="a", usage=(60, 0, 5)))
    endpoint.models = ({"id": "small", "max_model_len": 100},)

    async def talk(client: ChatEndpoint) -> list[ChatReply]:
        await client.open()
        first = await client.complete(QUESTION, (), Sampling(max_tokens=41))
        return [first, await client.complete([*QUESTION, first, *QUESTION], (), Sampling(max_tokens=41))]

    replies = Asker(endpoint.url).run(talk)
    assert [reply.cut_by_window for reply in replies] == [False, True]
    assert ["max_tokens" in body for body in endpoint.bodies] == [True, False]


def test_an_address_that_is_no_endpoint_is_said_so_in_one_line() -> None:
    class Quiet(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            """Says nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Quiet) as files:
        threading.Thread(target=files.serve_forever).start()
        asker = Asker(f"http://127.0.0.1:{files.server_port}", ChatEndpointConfig(model="any"))
        try:
            with pytest.raises(
                ConfigError, match=r"no chat completions at this address: .* answered 501: a page of HTML$"
            ):
                asker.ask()
        finally:
            files.shutdown()


def test_what_an_endpoint_refuses_is_asked_once_a_client(chat_endpoint: Start) -> None:
    endpoint = chat_endpoint(lambda body, number: chat_endpoint.make_reply(content="Hi."))
    endpoint.refused = ("return_token_ids", "top_k", "seed", "stream_options")
    asker = Asker(endpoint.url, ChatEndpointConfig())

    async def talk(client: ChatEndpoint) -> list[ChatReply]:
        return await asyncio.gather(*(client.complete(QUESTION) for _ in range(8)))

    replies = asker.run(talk)
    assert [reply.attempts for reply in replies] == [5, *[1] * 7]
    assert len(endpoint.bodies) == 12
    assert endpoint.bodies[-1].keys() == {"model", "messages", "temperature", "top_p", "max_tokens", "stream"}


def test_an_endpoint_that_never_streams_is_asked_for_whole_answers_from_then_on(chat_endpoint: Start) -> None:
    endpoint = chat_endpoint(lambda body, number: chat_endpoint.make_reply(content="Hi."))
    endpoint.streams = False

    async def talk(client: ChatEndpoint) -> list[str]:
        return [(await client.complete(QUESTION)).message.content for _ in range(3)]

    assert Asker(endpoint.url, ChatEndpointConfig()).run(talk) == ["Hi."] * 3
    assert ["stream" in body for body in endpoint.bodies][-2:] == [False, False]


def test_an_endpoint_that_refuses_without_naming_gets_the_plain_form(chat_endpoint: Start) -> None:
    make_reply = chat_endpoint.make_reply
    strange = make_reply(status=422, body={"detail": "extra fields not permitted"})
    endpoint = chat_endpoint(lambda body, number: strange if "min_p" in body else make_reply(content="Hi."))
    assert Asker(endpoint.url, ChatEndpointConfig()).ask().message.content == "Hi."
    endpoint.script = lambda body, number: make_reply(status=400, body={"error": "content policy"})
    with pytest.raises(EndpointFailure, match="content policy"):
        Asker(endpoint.url, ChatEndpointConfig()).ask()


def test_penalties_are_sent_where_they_are_set(chat_endpoint: Start) -> None:
    endpoint = chat_endpoint(lambda body, number: chat_endpoint.make_reply(content="Hi."))
    sampling = Sampling(max_tokens=9, presence_penalty=1.5, repetition_penalty=1.1)
    Asker(endpoint.url).ask(sampling=sampling)
    request_body = endpoint.bodies[-1]
    assert (request_body["presence_penalty"], request_body["repetition_penalty"]) == (
        1.5,
        1.1,
    ) and "frequency_penalty" not in request_body
    Asker(endpoint.url).ask()
    assert "presence_penalty" not in endpoint.bodies[-1] and endpoint.bodies[-1]["repetition_penalty"] == 1.0


def test_models_that_want_another_name_for_the_limit_get_it(chat_endpoint: Start) -> None:
    make_reply = chat_endpoint.make_reply
    words = "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead."
    refusal = make_reply(status=400, body={"error": {"message": words}})
    endpoint = chat_endpoint(lambda body, number: refusal if "max_tokens" in body else make_reply(content="Hi."))
    assert Asker(endpoint.url).ask(sampling=Sampling(max_tokens=9)).attempts == 2
    assert endpoint.bodies[-1]["max_completion_tokens"] == 9


def test_a_server_without_a_parser_of_calls_is_told_to_leave_them_in_the_text(chat_endpoint: Start) -> None:
    make_reply = chat_endpoint.make_reply
    words = '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'
    refusal = make_reply(status=400, body={"error": {"message": words}})
    endpoint = chat_endpoint(
        lambda body, number: make_reply(content="x") if body.get("tool_choice") == "none" else refusal
    )
    assert Asker(endpoint.url).ask(tools=[GO]).attempts == 2


def test_an_endpoint_without_token_counts_is_warned_about_once(
    chat_endpoint: Start, caplog: pytest.LogCaptureFixture
) -> None:
    endpoint = chat_endpoint(lambda body, number: chat_endpoint.make_reply(content="Hi.", usage=None))

    async def talk(client: ChatEndpoint) -> None:
        for _ in range(2):
            await client.complete(QUESTION)

    with caplog.at_level(logging.WARNING):
        Asker(endpoint.url).run(talk)
    assert [record.getMessage().partition(" does ")[2] for record in caplog.records] == [
        "not say how many tokens it used: tokens and cost are not counted"
    ]


def test_requests_keep_within_the_rate_limit(chat_endpoint: Start) -> None:
    endpoint = chat_endpoint(lambda body, number: chat_endpoint.make_reply(content="Hi.", usage=(900, 0, 100)))

    async def talk(client: ChatEndpoint) -> None:
        for _ in range(4):
            await client.complete(QUESTION)

    asker = Asker(endpoint.url, ChatEndpointConfig(requests_per_minute=30, token_ids=False))
    asker.run(talk)
    assert asker.now == pytest.approx(3 * 2.0)
    asker = Asker(endpoint.url, ChatEndpointConfig(tokens_per_minute=6000, token_ids=False))
    asker.run(talk)
    assert asker.now == pytest.approx(3 * 10.0)  # a thousand tokens each, a hundred in a second


def test_ids_and_logprobs_are_kept_where_the_server_returns_them() -> None:
    with FakeSglang(FakeConfig()) as server:
        asker = Asker(server.url, ChatEndpointConfig())

        async def talk(client: ChatEndpoint) -> tuple[ChatReply, ChatReply]:
            first = await client.complete(QUESTION, sampling=Sampling(max_tokens=8))
            return first, await client.complete(QUESTION, sampling=Sampling(max_tokens=8))

        first, second = asker.run(talk)
    assert first.attempts == 2 and second.attempts == 1  # it streams no ids, so that it is asked without streaming
    for reply in (first, second):
        assert reply.prompt_ids and reply.ids and reply.logprobs
        assert len(reply.ids) == len(reply.logprobs) == reply.usage.completion_tokens
        assert len(reply.prompt_ids) == reply.usage.prompt_tokens


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("http://localhost:8000", "http://localhost:8000/v1"),
        ("http://localhost:8000/", "http://localhost:8000/v1"),
        ("https://api.example.com/v1/chat/completions", "https://api.example.com/v1"),
        ("https://api.example.com/api/paas/v4/", "https://api.example.com/api/paas/v4"),
    ],
)
def test_an_address_is_read_as_people_write_it(address: str, expected: str) -> None:
    assert endpoint_url(address) == expected


@pytest.mark.parametrize(
    "address", ["http://", "ftp://host", "http://host:port", "http://k:secret@host", "http://h/?key=s"]
)
def test_what_is_no_address_or_holds_a_key_is_refused_and_not_repeated(address: str) -> None:
    with pytest.raises(ConfigError) as caught:
        endpoint_url(address)
    assert "secret" not in str(caught.value)


def test_settings_out_of_range_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for settings in ({"timeout_s": 0}, {"requests_per_minute": -1}, {"price_prompt": -0.1}, {"max_retries": -1}):
        with pytest.raises(ConfigError, match=next(iter(settings))):
            ChatEndpointConfig(**settings)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="MY_KEY is not set"):
        ChatEndpoint("http://localhost:1", ChatEndpointConfig(api_key_env="MY_KEY"))
    monkeypatch.setenv("MY_KEY", "a\nb")
    with pytest.raises(ConfigError, match="character that no key has"):
        ChatEndpoint("http://localhost:1", ChatEndpointConfig(api_key_env="MY_KEY"))

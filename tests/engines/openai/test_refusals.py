"""What an endpoint refuses is waited for, given up, counted by its cause, or final."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
from collections.abc import Callable
from email.utils import formatdate
from typing import Any

import pytest

from agentgym.engines.openai import ChatEndpoint, ChatEndpointConfig
from agentgym.engines.openai.endpoint import ChatReply, ContextExceeded, EndpointFailure
from agentgym.engines.protocol import Sampling
from agentgym.engines.servers.http import connection_slots
from agentgym.errors import ConfigError
from agentgym.types import Message

Start = Callable[..., Any]
QUESTION = [Message("user", "Hello?")]
PLAIN = ChatEndpointConfig(token_ids=False)
GOOGLE = "You exceeded your current quota, please check your plan and billing details."
LONG = f"{GOOGLE} For more information, head to the documentation of limits. {'* Quota exceeded for a metric. ' * 30}"
RETRY_INFO = {"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": "38s"}


def ask(
    url: str, *samplings: Sampling, config: ChatEndpointConfig = PLAIN, slept: list[float] | None = None
) -> list[ChatReply]:
    """Asks once for each sampling, without waiting; the waits are in `slept`."""
    now, waits = 0.0, [] if slept is None else slept

    async def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        waits.append(seconds)

    async def main() -> list[ChatReply]:
        async with ChatEndpoint(url, config, sleep=sleep, clock=lambda: now) as endpoint:
            return [
                await endpoint.complete(QUESTION, (), sampling) for sampling in samplings or [Sampling(max_tokens=9)]
            ]

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("body", "wait_s"),
    [
        ([{"error": {"code": 429, "message": LONG, "status": "RESOURCE_EXHAUSTED", "details": [RETRY_INFO]}}], 38.0),
        ({"error": {"code": 429, "message": f"{LONG}\nPlease retry in 38.5s.", "status": "RESOURCE_EXHAUSTED"}}, 38.5),
        ({"error": {"code": 429, "message": LONG, "status": "RESOURCE_EXHAUSTED"}}, None),
        ({"error": {"message": "Rate limit reached for requests per minute. Please try again in 6m0s."}}, 360.0),
        ({"error": {"message": "You have exceeded 60 requests per minute. See your billing plan."}}, None),
    ],
)
def test_a_rate_limit_waits_as_long_as_its_header_asks(body: Any, wait_s: float | None, chat_endpoint: Start) -> None:
    make_reply = chat_endpoint.make_reply
    for headers in ({}, {"Retry-After": "2"}):
        slept: list[float] = []
        busy = make_reply(status=429, body=body, headers=headers)
        endpoint = chat_endpoint(lambda body, number, busy=busy: make_reply(content="Yes.") if number else busy)
        (reply,) = ask(endpoint.url, slept=slept)
        assert reply.failures == {"rate_limit": 1}
        if headers or wait_s is not None:
            assert slept == [2.0 if headers else wait_s]
        else:
            assert len(slept) == 1 and 0.25 <= slept[0] <= 0.5


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (429, {"error": {"code": "insufficient_quota", "message": f"{GOOGLE} Please retry in 5s."}}),
        (429, {"error": {"type": "insufficient_quota", "message": "x"}}),
        (429, {"error": {"message": GOOGLE}}),
        (400, {"error": {"message": "Your credit balance is too low. Please go to Plans & Billing."}}),
        (402, {"error": {"message": "Insufficient Balance"}}),
    ],
)
def test_credit_that_is_used_up_is_final(status: int, body: Any, chat_endpoint: Start) -> None:
    endpoint = chat_endpoint(lambda *_: chat_endpoint.make_reply(status=status, body=body))
    with pytest.raises(ConfigError, match="credit is used up"):
        ask(endpoint.url)
    assert len(endpoint.bodies) <= 2  # 400 may be about the form


def test_a_date_is_waited_for_and_one_beyond_the_limit_is_a_failure(chat_endpoint: Start) -> None:
    slept: list[float] = []
    dates = {"Retry-After": formatdate(1_000_038, usegmt=True), "Date": formatdate(1_000_000, usegmt=True)}
    busy = chat_endpoint.make_reply(status=503, headers=dates)
    endpoint = chat_endpoint(lambda body, number: chat_endpoint.make_reply(content="Yes.") if number else busy)
    (reply,) = ask(endpoint.url, slept=slept)
    assert slept == [38.0] and reply.failures == {"server_error": 1}
    dates["Retry-After"] = formatdate(1_090_000, usegmt=True)
    endpoint.script = lambda body, number: busy
    with pytest.raises(EndpointFailure, match="asks to wait for 90000 s"):
        ask(endpoint.url)


def refusing(*rules: tuple[Callable[[dict[str, Any]], bool], str]) -> Any:
    """Returns what a model says to a request that breaks one of the rules, or None."""
    return lambda body: next((words for breaks, words in rules if breaks(body)), None)


BOTH = "`temperature` and `top_p` cannot both be specified for this model. Please use only one."
MODELS: dict[str, Any] = {
    "takes its default alone": refusing(
        (
            lambda body: body.get("temperature", 1) != 1,
            "Unsupported value: 'temperature' does not support 0.7 with this model. Only the default (1) is supported.",
        ),
        (lambda body: "top_p" in body, "Unsupported parameter: 'top_p' is not supported with this model."),
    ),
    "takes one of them": refusing((lambda body: {"temperature", "top_p"} <= body.keys(), BOTH)),
    "takes temperature 1": refusing(
        (lambda body: body.get("temperature", 1) != 1, "invalid temperature: only 1 is allowed for this model")
    ),
    "takes none": refusing(
        (lambda body: "temperature" in body, "`temperature` is deprecated for this model."),
        (lambda body: "top_p" in body, "Top-P is deprecated for this model."),
    ),
    "takes none, in one message": refusing(
        (
            lambda body: bool({"temperature", "top_p"} & body.keys()),
            "UnsupportedParamsError: model=o1 does not support parameters: ['temperature', 'top_p']",
        )
    ),
}


@pytest.mark.parametrize(
    ("model", "sampling", "expected"),
    [
        ("takes its default alone", {}, {"temperature": 1.0}),
        ("takes its default alone", {"temperature": 0.7}, {}),
        ("takes one of them", {"temperature": 0.7}, {"temperature": 0.7}),
        ("takes one of them", {"top_p": 0.9}, {"top_p": 0.9}),
        ("takes temperature 1", {"temperature": 0.0}, {"top_p": 1.0}),
        ("takes none", {"temperature": 0.7, "top_p": 0.9}, {}),
        ("takes none, in one message", {"temperature": 0.7}, {}),
    ],
)
@pytest.mark.parametrize("status", [400, 422])
def test_sampling_settings_that_a_model_refuses_are_left_out_with_one_warning(
    status: int,
    model: str,
    sampling: dict[str, float],
    expected: dict[str, float],
    chat_endpoint: Start,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def script(body: dict[str, Any], number: int) -> Any:
        words = MODELS[model](body)
        error = {"error": {"message": words, "code": "unsupported_value"}}
        return (
            chat_endpoint.make_reply(status=status, body=error) if words else chat_endpoint.make_reply(content="Yes.")
        )

    endpoint = chat_endpoint(script)
    settings = Sampling(max_tokens=9, **sampling)
    with caplog.at_level(logging.WARNING):
        replies = ask(endpoint.url, settings, settings)
    names = {"temperature", "top_p"}
    assert {name: value for name, value in endpoint.bodies[-1].items() if name in names} == expected
    left_out = sorted(names - expected.keys())
    assert [reply.failures for reply in replies] == [{"unsupported_feature": len(left_out)}, {}]
    warnings = sorted(record.getMessage() for record in caplog.records)
    assert len(warnings) == len(left_out)
    for name, warning in zip(left_out, warnings, strict=True):
        assert f"refuses {name}={getattr(settings, name):g}: it is asked without, which changes the results" in warning


@pytest.mark.parametrize("words", ["temperature must be between 0 and 1", "top_p: Input should be greater than 0"])
def test_a_value_out_of_range_is_the_users_to_change(words: str, chat_endpoint: Start) -> None:
    endpoint = chat_endpoint(lambda *_: chat_endpoint.make_reply(status=400, body={"error": {"message": words}}))
    with pytest.raises(EndpointFailure, match=words):
        ask(endpoint.url, Sampling(max_tokens=9, temperature=1.5))


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (400, {"error": {"code": "content_filter", "message": "The prompt triggered the content management policy"}}),
        (400, {"error": {"code": "1301", "message": "unsafe"}, "contentFilter": [{"role": "user", "level": 1}]}),
        (400, {"error": {"code": "data_inspection_failed", "message": "Input data may contain inappropriate content"}}),
        (400, {"error": {"message": "Content Exists Risk"}}),
        (400, {"error": {"message": "Output blocked by content filtering policy"}}),
        (400, {"error": {"code": "invalid_prompt", "message": "flagged as potentially violating our usage policy"}}),
        (403, {"error": "Content violates usage guidelines. Failed check: SAFETY_CHECK_TYPE_BIO"}),
        (403, {"error": {"message": "Your input was flagged", "metadata": {"reasons": ["violence"]}}}),
    ],
)
def test_a_prompt_that_a_filter_refuses_is_counted_as_that_and_not_asked_again(
    status: int, body: Any, chat_endpoint: Start
) -> None:
    endpoint = chat_endpoint(lambda *_: chat_endpoint.make_reply(status=status, body=body))
    with pytest.raises(EndpointFailure, match=f"content filter: .* answered {status}") as caught:
        ask(endpoint.url, config=ChatEndpointConfig())
    assert caught.value.failures == {"content_filter": 1} and len(endpoint.bodies) == 1


@pytest.mark.parametrize("stream", [True, False])
def test_a_whole_reply_without_a_finish_reason_is_taken_with_one_warning(
    stream: bool, chat_endpoint: Start, caplog: pytest.LogCaptureFixture
) -> None:
    replies = [
        chat_endpoint.make_reply(content="four", finish=None),
        chat_endpoint.make_reply(content="f", finish=None),
    ]
    endpoint = chat_endpoint(lambda body, number: replies[number % 2])
    config = ChatEndpointConfig(token_ids=False, stream=stream)
    cut = Sampling(max_tokens=3)  # as many as the endpoint counts
    with caplog.at_level(logging.WARNING):
        first, second, third = ask(endpoint.url, Sampling(max_tokens=9), Sampling(max_tokens=9), cut, config=config)
    assert (first.message.content, first.finish_reason, first.attempts) == ("four", "stop", 1)
    assert (second.finish_reason, third.finish_reason) == ("stop", "length")
    assert [record.getMessage().partition(" gives ")[2] for record in caplog.records] == [
        "no finish reason: a reply is taken if the answer is whole and not empty"
    ]


@pytest.mark.parametrize("stream", [True, False])
def test_an_empty_answer_without_a_finish_reason_and_a_torn_one_are_asked_for_again(
    stream: bool, chat_endpoint: Start
) -> None:
    make_reply = chat_endpoint.make_reply
    answers = [make_reply(finish=None), make_reply(content="fo", breaks=True), make_reply(content="four")]
    endpoint = chat_endpoint(lambda body, number: answers[number])
    (reply,) = ask(endpoint.url, config=ChatEndpointConfig(token_ids=False, stream=stream))
    assert reply.message.content == "four" and reply.failures == {"connection": 2}


def test_an_unknown_finish_reason_is_reported_once_by_name(
    chat_endpoint: Start, caplog: pytest.LogCaptureFixture
) -> None:
    endpoint = chat_endpoint(
        lambda body, number: chat_endpoint.make_reply(content="Hi.", finish=f"eot_{'xxy'[number]}")
    )
    with caplog.at_level(logging.WARNING):
        ask(endpoint.url, *[Sampling(max_tokens=9)] * 3)
    words = [record.getMessage().partition(" ended a reply with the unknown finish ")[2] for record in caplog.records]
    assert words == ["reason 'eot_x': taken as reply", "reason 'eot_y': taken as reply"]


def test_requests_without_a_reply_are_counted_by_cause(chat_endpoint: Start) -> None:
    make_reply = chat_endpoint.make_reply
    window = make_reply(status=400, body={"error": {"message": "max_tokens is above the context window of 10 tokens"}})
    answers = [
        make_reply(status=400, body={"error": {"message": "Unrecognized argument: seed"}}),
        make_reply(status=429),
        make_reply(status=503),
        make_reply(content="x", breaks=True),
        make_reply(content="x", finish="network_error"),
        window,
        make_reply(status=500),
        make_reply(content="Hi."),
    ]
    endpoint = chat_endpoint(lambda body, number: answers[number])
    (reply,) = ask(endpoint.url)
    counts = {"unsupported_feature": 1, "rate_limit": 1, "server_error": 3, "connection": 1, "too_many_tokens": 1}
    assert reply.failures == counts and reply.attempts == 8 == len(endpoint.bodies) and reply.cut_by_window
    endpoint.script = lambda body, number: window
    with pytest.raises(ContextExceeded) as caught:
        ask(endpoint.url)
    assert caught.value.failures == {"too_many_tokens": 2} and caught.value.attempts == 2


def test_connections_stay_below_the_limit_of_open_files(chat_endpoint: Start) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    running = most = 0
    endpoint = chat_endpoint(lambda body, number: chat_endpoint.make_reply(content="Hi."))
    answer = endpoint._stream

    async def counted(*request: Any) -> Any:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.05)  # long enough that a slow client has sent all it may
        running -= 1
        return await answer(*request)

    endpoint._stream = counted

    async def main() -> list[ChatReply]:
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/dev/fd")) + 60, hard))
        try:
            connection_slots()
        finally:  # the endpoint of this test is in the same process
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        async with ChatEndpoint(endpoint.url, PLAIN) as player, ChatEndpoint(endpoint.url, PLAIN) as judge:
            return await asyncio.gather(*(each.complete(QUESTION) for _ in range(60) for each in (player, judge)))

    replies = asyncio.run(main())
    assert [reply.attempts for reply in replies] == [1] * 120
    assert 10 < most <= 20

"""`agentgym generate --policy http://...`: the endpoints that `eval` takes reply to the prompts of files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentgym.testing.fake_server.server import FakeConfig, FakeSglang

Command = Callable[..., Any]
Start = Any
"""The fixture `chat_endpoint`."""
GENERATE = ("generate", "--input", "prompts.jsonl", "--output", "replies.jsonl", "--endpoint.max-retries", 0)


def read() -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path("replies.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def echo(agentgym: Command, chat_endpoint: Start) -> Any:
    """An endpoint that repeats the prompt; `prompts.jsonl` has four."""
    lines = [{"prompt": f"Say {number}.", "answer": str(number), "id": number} for number in range(4)]
    Path("prompts.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))

    def repeat(body: dict[str, Any], number: int) -> Any:
        return chat_endpoint.make_reply(body["messages"][-1]["content"], usage=(10, 0, 5))

    return chat_endpoint(repeat)


def test_an_endpoint_replies_in_the_order_of_the_prompts_with_tokens_and_cost(agentgym: Command, echo: Any) -> None:
    options = ("--num-replies", 2, "--temperature", 0.5, "--stop", "###", "--max-tokens", 9, "--keep", "id")
    prices = ("--endpoint.price-prompt", 1, "--endpoint.price-completion", 2)
    done = agentgym(*GENERATE, "--policy", echo.url, *options, *prices, "--json")
    assert done.code == 0, done.err
    assert done.json == {
        "replies": 8,
        "kept": 0,
        "failed": 0,
        "cost": pytest.approx(8 * (10 + 2 * 5) / 1e6),
        "output": "replies.jsonl",
    }
    replies = read()
    assert [line["messages"][-1]["content"] for line in replies] == [f"Say {n}." for n in range(4) for _ in range(2)]
    assert {(line["prompt_tokens"], line["tokens"], line["finish_reason"]) for line in replies} == {(10, 5, "stop")}
    assert [line["extra_info"]["id"] for line in replies[::2]] == [0, 1, 2, 3]
    bodies = [body for body in echo.bodies if body["temperature"] == 0.5]
    assert {tuple(body["stop"]) for body in bodies} == {("###",)} and len({body["seed"] for body in bodies}) == 8
    again = agentgym(*GENERATE, "--model", echo.url, *options, "--resume", "--json")
    assert again.json["kept"] == again.json["replies"] == 8 and read() == replies


def test_a_prompt_without_reply_has_an_error_and_a_dead_endpoint_ends_all(
    agentgym: Command, echo: Any, chat_endpoint: Start
) -> None:
    repeat, make_reply = echo.script, chat_endpoint.make_reply
    refusals = {
        "Say 1.": make_reply(status=400, body={"error": {"message": "maximum context length is 10 tokens"}}),
        "Say 2.": make_reply(status=400, body={"error": {"message": "the content management policy"}}),
    }
    echo.script = lambda body, number: refusals.get(body["messages"][-1]["content"]) or repeat(body, number)
    done = agentgym(*GENERATE, "--policy", echo.url, "--concurrency", 1, "--json")
    assert done.code == 1 and done.json["failed"] == 2 and done.json["error"].startswith("2 of them have an `error`")
    assert ["error" in line for line in read()] == [False, True, True, False]
    Path("replies.jsonl").unlink()
    echo.script = lambda body, number: make_reply(status=502) if "3" in str(body["messages"]) else repeat(body, number)
    dead = agentgym(*GENERATE, "--policy", echo.url, "--concurrency", 1, "--json")
    assert dead.code == 1 and "answered 502" in dead.json["error"] and len(read()) == 3
    echo.script = repeat
    assert agentgym(*GENERATE, "--policy", echo.url, "--resume", "--json").json["kept"] == 3


def test_marks_in_the_text_and_ids_are_read(agentgym: Command, echo: Any, chat_endpoint: Start) -> None:
    echo.script = lambda body, number: chat_endpoint.make_reply("<think>One.</think>Two.")
    assert agentgym(*GENERATE, "--policy", echo.url).code == 0
    assert {line["messages"][-1]["content"].strip() for line in read()} == {"Two."}
    Path("replies.jsonl").unlink()
    refusal = agentgym(*GENERATE, "--policy", echo.url, "--ids")
    assert refusal.code == 2 and "gives no token ids" in refusal.err and not Path("replies.jsonl").exists()
    with FakeSglang(FakeConfig()) as server:
        assert agentgym(*GENERATE, "--policy", server.url, "--ids", "--max-tokens", 8).code == 0
    for line in read():
        assert 0 < len(line["ids"]) == len(line["logprobs"]) == line["tokens"] <= 8
        assert len(line["prompt_ids"]) == line["prompt_tokens"] > 0


@pytest.mark.parametrize(
    ("line", "code", "message"),
    [
        ("--policy http://127.0.0.1:9", 1, "no endpoint answers at http://127.0.0.1:9/v1"),
        ("--policy http://", 2, "http://HOST:PORT/v1 was wanted"),
        ("--policy URL?api_key=sk-secret-123", 2, "a key belongs into an environment variable"),
        ("--policy URL --endpoint.model tst-model", 2, "has no model 'tst-model': did you mean 'test-model'?"),
        ("--policy URL --endpoint.modle x", 2, "did you mean '--endpoint.model'?"),
        ("--policy URL --engine vllm", 2, "leave engine, family, chat_template"),
        ("--policy URL --family qwen3", 2, "leave engine, family, chat_template"),
        ("--polcy URL", 2, "did you mean '--policy'?"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_no_file(
    line: str, code: int, message: str, agentgym: Command, echo: Any
) -> None:
    done = agentgym(*GENERATE, *line.replace("URL", echo.url).split())
    assert done.code == code and message in done.err and done.err.count("\n") == 1, done.err
    assert "sk-secret" not in done.err and not Path("replies.jsonl").exists() and echo.bodies == []

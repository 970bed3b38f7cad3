"""`agentgym eval --policy http://...`: the report, the mistakes, and a server that dies on the way."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentgym.testing.fake_server.server import FakeConfig, FakeSglang

REGEX = '''
import re

from agentgym.envs import ToolEnv
from agentgym.tools import tool


class Search(ToolEnv):
    """Looks for a pattern, over which one task of ten never ends."""

    own_split = True
    max_turns = 2

    def start(self, options):
        return f"Task {self.np_random_seed}."

    @tool
    def look(self, pattern: str) -> str:
        """Looks for a pattern.

        Args:
            pattern: the pattern
        """
        text = "a" * 40 + "b" if self.np_random_seed % 10 == 3 else "a"
        return str(bool(re.match(pattern, text)))
'''
Command = Callable[..., Any]
Start = Callable[..., Any]
EVAL = ("eval", "--env", "GuessNumber-v0", "--endpoint.max-retries", 0, "--turn-tokens", 32)


@pytest.fixture
def guesser(chat_endpoint: Start) -> Any:
    """An endpoint that guesses 50, with a call."""
    call = ("call_1", "guess", '{"value": 50}')
    return chat_endpoint(lambda body, number: chat_endpoint.make_reply(calls=[call], usage=(100, 40, 8)))


def test_an_endpoint_is_evaluated_with_its_cost_and_latency_in_the_report(
    agentgym: Command, guesser: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    prices = ("--endpoint.price-prompt", 3, "--endpoint.price-cached", 0.3, "--endpoint.price-completion", 15)
    done = agentgym(*EVAL, "--policy", guesser.url, "-n", 3, *prices, "--output", "run", "--json")
    assert done.code == 0, done.err
    use = done.json["use"]
    num = len(guesser.bodies)
    assert (
        use["requests"] == num
        and use["retries"] == 0
        and use["retries_by_cause"] == {}
        and use["episodes_without_ids"] == 3
    )
    assert (use["prompt_tokens"], use["completion_tokens"]) == (100 * num, 8 * num)
    assert use["cost"] == pytest.approx(num * (60 * 3 + 40 * 0.3 + 8 * 15) / 1e6)
    assert use["latency_s"]["p95"] >= use["latency_s"]["p50"] >= use["first_token_s"]["p50"] > 0
    for row in ("requests", "prompt tokens", "reply tokens", "cost", "latency", "first token"):
        assert f"\n{row} " in done.text
    assert "3 episodes hold no token ids: they cannot be trained on" in done.text
    assert json.loads(Path("run/result.json").read_text()) == done.json
    verified = agentgym("verify", "run")
    assert verified.code == 0 and "3 of 3 episodes hold no token ids" in verified.out
    viewed = agentgym("view", "run", "--share", "run.html")
    assert viewed.code == 0 and "--tokenizer FOLDER" in viewed.out


def test_the_report_counts_failed_requests_by_cause_and_filtered_replies(
    agentgym: Command, chat_endpoint: Start
) -> None:
    make_reply = chat_endpoint.make_reply
    window = make_reply(status=400, body={"error": {"message": "total of 90 tokens exceeds the context length of 80"}})

    def script(body: dict[str, Any], number: int) -> Any:
        if number in (0, 3):
            return window
        return make_reply(content="Hm.", finish="content_filter" if number == 1 else "stop")

    endpoint = chat_endpoint(script)
    done = agentgym(*EVAL, "--policy", endpoint.url, "-n", 3, "--concurrency", 1, "--output", "run", "--json")
    assert done.code == 0, done.err
    assert done.json["use"]["retries"] == 3 and done.json["num_failed"] == 1
    assert done.json["use"]["retries_by_cause"] == {"too_many_tokens": 2, "content_filter": 1}
    words = " ".join(done.text.split())
    assert "3 of them without a reply: too many tokens 2, content filter 1" in words and "engine_error 1" in words
    assert "count in no mean; the first: the endpoint's content filter: the reply was withheld" in words


def test_a_server_that_returns_ids_gives_an_exact_record(agentgym: Command) -> None:
    with FakeSglang(FakeConfig()) as server:
        done = agentgym(*EVAL, "--policy", server.url, "-n", 2, "--output", "run", "--json")
    assert done.code == 0, done.err
    assert done.json["use"]["episodes_without_ids"] == 0 and done.json["mean_tokens"] > 0
    verified = agentgym("verify", "run", "--json")
    assert verified.code == 0 and verified.json["num_tokens"] > 0 and verified.json["num_without_ids"] == 0


def test_a_server_that_dies_leaves_a_folder_that_resumes(agentgym: Command, chat_endpoint: Start) -> None:
    make_reply = chat_endpoint.make_reply
    good = make_reply(calls=[("call_1", "guess", '{"value": 50}')])
    endpoint = chat_endpoint(lambda body, number: good if number < 9 else make_reply(status=502, body="bad gateway"))
    command = (*EVAL, "--policy", endpoint.url, "-n", 6, "--concurrency", 1, "--output", "run")
    done = agentgym(*command)
    assert done.code == 1
    assert "answered 502: " in done.err and "finished episodes are in run" in done.text
    num_kept = sum(
        json.loads(line)["reward"] is not None for line in Path("run/episodes.jsonl").read_text().splitlines()
    )
    assert 0 < num_kept < 6
    endpoint.script = lambda body, number: good
    again = agentgym(*command, "--resume", "--json")
    assert again.code == 0 and f"{num_kept} of 6 episodes are there already" in again.text
    assert again.json["num_episodes"] == 6 and again.json["num_failed"] == 0
    episodes = [json.loads(line) for line in Path("run/episodes.jsonl").read_text().splitlines()]
    assert again.json["use"]["requests"] == sum(len(episode["turns"]) for episode in episodes)


MISTAKES = {
    "--policy http://127.0.0.1:9": (1, "no endpoint answers at http://127.0.0.1:9/v1"),
    "--policy http://": (2, "http://HOST:PORT/v1 was wanted"),
    "--policy http://host:port": (2, "http://HOST:PORT/v1 was wanted"),
    "--policy URL?api_key=sk-secret-123": (2, "a key belongs into an environment variable"),
    "--policy URL --endpoint.model tst-model": (2, "has no model 'tst-model': did you mean 'test-model'?"),
    "--policy URL --endpoint.modle x": (2, "did you mean '--endpoint.model'?"),
    "--policy URL --endpoint.timeout-s 0": (2, "timeout_s must be above 0, got 0"),
    "--policy URL --endpoint.api-key-env NO_SUCH_KEY": (2, "export NO_SUCH_KEY=KEY"),
    "--policy LOCKED": (2, "the endpoint refuses the key of the environment variable OPENAI_API_KEY"),
}


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_is_one_line_before_anything_is_written(
    line: str, agentgym: Command, guesser: Any, chat_endpoint: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret-123")
    locked = chat_endpoint(lambda body, number: chat_endpoint.make_reply())
    locked.key = "another"
    code, message = MISTAKES[line]
    done = agentgym(
        "eval", "--env", "GuessNumber-v0", *line.replace("URL", guesser.url).replace("LOCKED", locked.url).split()
    )
    assert done.code == code and message in done.err, done.err
    assert done.err.startswith("error: ") and done.err.count("\n") == 1
    assert "sk-secret" not in done.err and not (tmp_path / "runs").exists()
    assert guesser.bodies == locked.bodies == []


def test_the_key_goes_to_the_endpoint_and_into_no_file(
    agentgym: Command, guesser: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", "sk-secret-123")
    guesser.key = "sk-secret-123"
    done = agentgym(*EVAL, "--policy", guesser.url, "-n", 2, "--endpoint.api-key-env", "MY_KEY", "--output", "run")
    assert done.code == 0, done.err
    assert "sk-secret" not in done.text + done.err
    assert all("sk-secret" not in path.read_text() for path in Path("run").iterdir())
    assert "test-model" in Path("run/config.yaml").read_text()


@pytest.mark.slow
def test_a_tool_that_holds_the_interpreter_ends_its_own_episode_alone(agentgym: Command, chat_endpoint: Start) -> None:
    Path("regex.py").write_text(REGEX)
    endpoint = chat_endpoint(
        lambda body, number: chat_endpoint.make_reply(calls=[("call_1", "look", '{"pattern": "(a+)+$"}')])
    )
    played_by = ("--policy", endpoint.url, "--endpoint.max-retries", 0, "--turn-tokens", 32)
    done = agentgym(
        *("eval", "--env", "regex.py:Search", *played_by, "-n", 10, "--output", "run"),
        *("--env-processes", 2, "--stall-s", 2),
    )
    assert done.code == 0, done.err
    assert "1 episodes failed" in done.text
    episodes = [json.loads(line) for line in Path("run/episodes.jsonl").read_text().splitlines()]
    (failed,) = [episode for episode in episodes if episode["status"] != "truncated"]
    assert len(episodes) == 10 and failed["status"] == "timeout" and failed["reward"] is None
    assert failed["error"].startswith("the environment held Python's interpreter for ")
    assert "its process was ended: regex.py:Search (seed 1000000003), tool look, step(" in failed["error"]
    assert 'regex.py", line ' in failed["info"]["traceback"] and "in look" in failed["info"]["traceback"]
    assert done.err.count("a process with ") == 1  # whose fault it was is known at once

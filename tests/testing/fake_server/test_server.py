"""What a fake server does beyond the contract: scripts, timing, faults, counters, and an end as by kill -9.

That it answers as a real server does is tests/engines/sglang/test_contract.py.
"""

from __future__ import annotations

import asyncio
import json
import pickle
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from agentgym.cli.main import main
from agentgym.engines.protocol import Sampling
from agentgym.engines.scripted import ScriptedReply
from agentgym.engines.servers.http import HttpClient, HttpRefusal, HttpUnreachable
from agentgym.errors import ConfigError, UnknownName
from agentgym.testing.fake_server.faults import FaultKind, Faults
from agentgym.testing.fake_server.model import FakeModel
from agentgym.testing.fake_server.script import FileScript, echo_reply
from agentgym.testing.fake_server.server import FakeSglang
from agentgym.testing.fake_server.tensors import RawTensor, read_pickled
from agentgym.testing.fixtures import fake_sglang

__all__ = ["fake_sglang"]

Start = Callable[..., FakeSglang]
CALL = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'


def json_request(url: str, data: bytes) -> urllib.request.Request:
    return urllib.request.Request(url, data, {"Content-Type": "application/json"})


def post(server: FakeSglang, path: str, body: dict[str, Any]) -> Any:
    """The JSON of an answer, or the status of a refusal."""
    data = json.dumps(body).encode()
    request = urllib.request.Request(server.url + path, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=20) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def generate(
    server: FakeSglang, *, rid: str = "a#0", num_new: int = 8, ids: Sequence[int] = (5, 6), **body: Any
) -> Any:
    params = {"max_new_tokens": num_new, **body.pop("params", {})}
    request = {"input_ids": list(ids), "sampling_params": params, "return_logprob": True, "rid": rid}
    return post(server, "/generate", request | body)


def in_thread(act: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(act())
        except (OSError, HTTPException) as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, results


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


# ---- what it says


def test_random_replies_depend_on_seed_and_prompt_alone(fake_sglang: Start) -> None:
    first, second, reseeded = fake_sglang(seed=1), fake_sglang(seed=1), fake_sglang(seed=2)
    answers = [generate(server, num_new=40)["output_ids"] for server in (first, second, reseeded)]
    assert answers[0] == answers[1] != answers[2]
    assert generate(first, ids=(5, 7), num_new=40)["output_ids"] != answers[0]
    assert generate(first, params={"sampling_seed": 3}, num_new=40)["output_ids"] != answers[0]
    assert answers[0][-1] == 2
    assert 2 not in answers[0][:-1]


def test_a_reply_function_gives_ids_and_logprobs_per_session(fake_sglang: Start) -> None:
    requests = []

    def reply(session: str, prompt_ids: Sequence[int], sampling: Sampling) -> ScriptedReply:
        requests.append((session, list(prompt_ids), sampling.max_tokens, sampling.stop_ids, sampling.seed))
        return ScriptedReply((7, 9, 11, 9), logprobs=(-0.5, -0.125, -1.0, -2.0))

    server = fake_sglang(reply=reply)
    answer = generate(server, rid="task#3/1#12", params={"stop_token_ids": [11], "sampling_seed": 4})
    assert requests == [("task#3/1", [5, 6], 8, (11,), 4)]
    assert answer["output_ids"] == [7, 9, 11]
    assert answer["meta_info"]["output_token_logprobs"] == [[-0.5, 7, None], [-0.125, 9, None], [-1.0, 11, None]]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": 11}


def test_a_script_that_ends_is_given_an_end_token_or_repeated(fake_sglang: Start) -> None:
    server = fake_sglang(reply=lambda *_: (7, 8))
    assert generate(server)["output_ids"] == [7, 8, 2]
    assert generate(server, num_new=1)["meta_info"]["finish_reason"] == {"type": "length", "length": 1}
    assert generate(server, num_new=5, params={"ignore_eos": True})["output_ids"] == [7, 8, 7, 8, 7]


def test_echo_replies_with_the_end_of_the_prompt(fake_sglang: Start) -> None:
    server = fake_sglang(reply=echo_reply)
    assert generate(server, ids=(9, 8, 7), num_new=2)["output_ids"] == [8, 7]


def test_a_script_file_is_said_line_by_line_in_each_session(fake_sglang: Start, tmp_path: Path) -> None:
    script = tmp_path / "script.jsonl"
    script.write_text(f'[7, 8]\n\n{json.dumps(CALL)}\n{{"ids": [9], "logprobs": [-0.75]}}\n', encoding="utf-8")
    model = FakeModel()
    server = fake_sglang(reply=FileScript(script, model))
    answers = [generate(server, rid=f"a#{turn}", num_new=40) for turn in range(4)]
    assert [answer["output_ids"] for answer in answers] == [[7, 8, 2], [*model.encode(CALL), 2], [9, 2], [7, 8, 2]]
    assert answers[2]["meta_info"]["output_token_logprobs"][0][0] == -0.75
    assert generate(server, rid="b#9")["output_ids"] == [7, 8, 2]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[1, ", "a list of ids"),
        ('{"ids": [1], "logprobs": []}', "0 logprobs for 1 ids"),
        ('{"fault": "x"}', "fault is"),
    ],
)
def test_a_script_line_that_cannot_be_read_is_named(tmp_path: Path, line: str, message: str) -> None:
    script = tmp_path / "script.jsonl"
    script.write_text(f"[1]\n{line}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=rf"script\.jsonl:2: .*{message}"):
        FileScript(script, FakeModel())


def test_chat_calls_come_parsed_where_tools_are_given(fake_sglang: Start) -> None:
    model = FakeModel()
    server = fake_sglang(reply=lambda *_: model.encode(CALL))
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    import openai  # here, and not above: collected by every process, and costly

    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        ask = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
        (choice,) = client.chat.completions.create(**ask, tools=[tool]).choices  # type: ignore[call-overload]
        (plain,) = client.chat.completions.create(**ask).choices  # type: ignore[call-overload]
        chunks = list(client.chat.completions.create(**ask, tools=[tool], stream=True))  # type: ignore[call-overload]
    assert choice.finish_reason == "tool_calls"
    assert [(call.function.name, call.function.arguments) for call in choice.message.tool_calls] == [("look", "{}")]
    assert (plain.finish_reason, plain.message.content, plain.message.tool_calls) == ("stop", CALL, None)
    streamed = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    assert [call.function.name for call in streamed] == ["look"]


@pytest.mark.parametrize("arguments", ["[" * 5000, "{" * 5000, '{"a":' * 200 + "1" + "}" * 200, "9" * 5000, "no JSON"])
def test_arguments_that_are_no_json_are_a_malformed_call(fake_sglang: Start, arguments: str) -> None:
    server = fake_sglang(reply=lambda *_: FakeModel().encode("Yes."))
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": arguments}}
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    messages.append({"role": "tool", "content": "No.", "tool_call_id": "1"})
    answer = post(server, "/v1/chat/completions", {"model": "m", "messages": messages})
    is_long = len(arguments) == 5000  # longer than the window of the model
    assert answer == 400 if is_long else answer["choices"][0]["message"]["content"] == "Yes."


# ---- time and faults


def test_latency_and_token_times_are_multiplied_by_the_slow_factor(fake_sglang: Start) -> None:
    server = fake_sglang(reply=lambda *_: (7,) * 20, token_s=0.002, faults=Faults(slow_factor=5.0))
    assert generate(server, num_new=20)["meta_info"]["e2e_latency"] >= 0.2


def played(server: FakeSglang, kind: FaultKind) -> Any:
    server.set_faults(Faults(schedule={0: kind}))
    return generate(server, num_new=4, params={"ignore_eos": True}, rid=f"{kind}#0")


def test_faults_are_played_once_and_counted(fake_sglang: Start) -> None:
    server = fake_sglang()
    assert played(server, "error") == 500
    assert played(server, "busy") == 429
    with pytest.raises(HTTPException):
        played(server, "drop")
    lengths = played(server, "lengths")
    assert (len(lengths["output_ids"]), len(lengths["meta_info"]["output_token_logprobs"])) == (4, 3)
    assert played(server, "vocabulary")["output_ids"][-1] == 1984
    aborted = played(server, "abort")
    assert (len(aborted["output_ids"]), aborted["meta_info"]["finish_reason"]["type"]) == (2, "abort")
    assert len(generate(server)["output_ids"]) > 0
    kinds = ("error", "busy", "drop", "lengths", "vocabulary", "abort")
    stats = server.stats
    assert stats.faults == dict.fromkeys(kinds, 1)
    assert stats.faulted == tuple((f"{kind}#0", kind) for kind in kinds)
    assert (stats.requests, stats.answered, stats.in_flight) == (7, 4, 0)


def test_a_busy_server_sends_a_retry_after_header(fake_sglang: Start) -> None:
    server = fake_sglang(faults=Faults(schedule={0: "busy"}, retry_after_s=0.25))

    async def ask() -> float | None:
        client = HttpClient(server.url)
        try:
            with pytest.raises(HttpRefusal) as refusal:
                await client.post("/generate", {"input_ids": [5]})
            return refusal.value.retry_after_s
        finally:
            await client.close()

    assert asyncio.run(ask()) == 0.25


def test_a_dropped_stream_has_given_half(fake_sglang: Start) -> None:
    server = fake_sglang(token_s=0.001, faults=Faults(schedule={0: "drop"}))
    seen: list[bytes] = []

    async def read() -> None:
        async with aiohttp.ClientSession() as session:
            params = {"max_new_tokens": 10, "ignore_eos": True}
            body = {"input_ids": [5], "sampling_params": params, "stream": True}
            async with session.post(server.url + "/generate", json=body) as response:
                with pytest.raises(aiohttp.ClientPayloadError):
                    async for line in response.content:
                        seen.append(line)

    asyncio.run(read())
    pieces = [json.loads(line.removeprefix(b"data: ")) for line in seen if line.strip()]
    assert [len(piece["output_ids"]) for piece in pieces] == [1, 2, 3, 4]


def test_a_hanging_request_ends_when_it_is_aborted_or_left(fake_sglang: Start) -> None:
    server = fake_sglang(faults=Faults(rates={"hang": 1.0}))
    thread, results = in_thread(lambda: generate(server, rid="h#0"))
    wait_for(lambda: server.stats.in_flight == 1)
    assert post(server, "/fake/stats", {})["in_flight"] == 1
    urllib.request.urlopen(json_request(server.url + "/abort_request", b'{"rid": "h#0"}')).close()
    thread.join()
    assert results[0]["meta_info"]["finish_reason"]["type"] == "abort"

    async def leave() -> None:
        client = HttpClient(server.url)
        try:
            with pytest.raises(HttpUnreachable, match=r"within 0\.1 s"):
                await client.post("/generate", {"input_ids": [5], "rid": "left#0"}, timeout_s=0.1)
        finally:
            await client.close()

    asyncio.run(leave())
    wait_for(lambda: server.stats.in_flight == 0)
    assert server.stats.left == 1


def test_rates_are_drawn_by_seed(fake_sglang: Start) -> None:
    faults = Faults(rates={"error": 0.3, "busy": 0.2}, seed=5)
    series = []
    for _ in range(2):
        server = fake_sglang(faults=faults)
        series.append([generate(server, num_new=1) for _ in range(40)])
    kinds = [[answer if isinstance(answer, int) else 200 for answer in answers] for answers in series]
    assert kinds[0] == kinds[1]
    assert 6 <= kinds[0].count(500) <= 18
    assert 2 <= kinds[0].count(429) <= 14


def test_faults_can_be_set_over_http_and_wrong_ones_are_refused(fake_sglang: Start) -> None:
    server = fake_sglang()
    faults = post(server, "/fake/faults", {"rates": {"error": 1.0}, "slow_factor": 2.0})
    assert faults == Faults(rates={"error": 1.0}, slow_factor=2.0).to_json()
    assert generate(server) == 500
    for wrong in ({"rates": {"eror": 1.0}}, {"rate": {}}, {"rates": {"error": 2.0}}, {"rates": 3}, {"slow_factor": 0}):
        assert post(server, "/fake/faults", wrong) == 400
    assert post(server, "/fake/faults", {}) == faults


def test_unknown_faults_and_impossible_rates_are_named() -> None:
    with pytest.raises(UnknownName, match="did you mean 'error'"):
        Faults(rates={"eror": 0.1})  # type: ignore[dict-item]
    with pytest.raises(ConfigError, match="at most 1 together"):
        Faults(rates={"error": 0.7, "busy": 0.7})


@pytest.mark.parametrize("how", ["kill", "fault", "bad id"])
def test_a_killed_server_drops_what_it_carries_and_answers_no_more(fake_sglang: Start, how: str) -> None:
    server = fake_sglang(token_s=0.01)
    thread, results = in_thread(lambda: generate(server, rid="a#0", num_new=900, params={"ignore_eos": True}))
    wait_for(lambda: server.stats.in_flight == 1)
    if how == "kill":
        server.kill()
    else:
        server.set_faults(Faults(schedule={0: "die"} if how == "fault" else {}))
        with pytest.raises((OSError, HTTPException)):
            generate(server, ids=(5,) if how == "fault" else (5, 1984), num_new=1, rid="b#0")
    thread.join()
    assert isinstance(results[0], OSError | HTTPException)
    with pytest.raises(OSError, match="refused"):
        generate(server)
    assert server.stats.answered == 0


# ---- counters, weights


def test_counters_tell_sessions_prompts_and_repeated_requests_apart(fake_sglang: Start) -> None:
    server = fake_sglang(reply=lambda *_: (7, 8))
    for rid, ids in (("a#0", (5,)), ("a#1", (5, 6)), ("b#2", (5,)), ("b#2", (5,))):
        generate(server, rid=rid, ids=ids)
    generate(server, rid="b#3", ids=())
    stats = server.stats
    assert (stats.requests, stats.answered, stats.refused) == (4, 4, 1)
    assert stats.sessions == {"a": 2, "b": 2}
    assert (stats.duplicates, stats.prompts) == (1, 2)
    assert (stats.tokens, stats.prompt_tokens) == (12, 5)
    counters = post(server, "/fake/stats", {})
    assert (counters["tokens"], counters["sessions"]) == (12, {"a": 2, "b": 2})


@pytest.mark.long
def test_a_thousand_requests_are_in_flight_at_once(fake_sglang: Start) -> None:
    server = fake_sglang()

    async def ask() -> None:
        client = HttpClient(server.url)
        try:
            await client.post("/pause_generation", {"mode": "in_place"})
            bodies = [{"input_ids": [5, index], "sampling_params": {"max_new_tokens": 2}} for index in range(1000)]
            tasks = [asyncio.create_task(client.post("/generate", body)) for body in bodies]
            while (await client.get("/fake/stats"))["in_flight"] < 1000:
                await asyncio.sleep(0.01)
            await client.post("/continue_generation", {})
            answers = await asyncio.gather(*tasks)
        finally:
            await client.close()
        assert all(len(answer["output_ids"]) == 2 for answer in answers)

    asyncio.run(ask())
    assert (server.stats.answered, server.stats.in_flight) == (1000, 0)


def test_nothing_but_tensors_is_unpickled() -> None:
    with pytest.raises(ConfigError, match=r"os\.getcwd is not read here|posix\.getcwd is not read here"):
        read_pickled(pickle.dumps(__import__("os").getcwd))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_pickled(b"no pickle")


def test_half_precision_is_rounded_to_nearest() -> None:
    torch = pytest.importorskip("torch", reason="the reference for rounding is torch")
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    raw = RawTensor("F32", (1000,), values.numpy().tobytes())
    assert raw.to("BF16").data == values.bfloat16().view(torch.int16).numpy().tobytes()
    assert raw.to("F16").data == values.half().numpy().tobytes()
    assert raw.to("BF16").to("F32").data == values.bfloat16().float().numpy().tobytes()


# ---- the command


@pytest.fixture
def command() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    running: list[subprocess.Popen[str]] = []

    def start(*args: str) -> subprocess.Popen[str]:
        words = [sys.executable, "-m", "agentgym", "fake-server", *args]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        running.append(process)
        return process

    yield start
    for process in running:
        process.kill()
        process.communicate()


@pytest.mark.long
def test_the_command_serves_until_it_is_ended(command: Callable[..., subprocess.Popen[str]]) -> None:
    process = command("--port", "0", "--faults", "error=1.0")
    assert process.stdout is not None
    url = next(word for word in process.stdout.readline().split() if word.startswith("http://"))
    with pytest.raises(urllib.error.HTTPError, match="500") as refusal:
        urllib.request.urlopen(json_request(url + "/generate", b'{"input_ids": [5]}'), timeout=20)
    refusal.value.close()
    second = command("--port", url.rpartition(":")[2])
    assert "give another --port" in second.communicate(timeout=60)[1]
    assert second.returncode == 2
    process.terminate()
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "ended after 1 requests" in output
    assert errors == ""


def test_the_command_dies_like_a_killed_process_on_demand(command: Callable[..., subprocess.Popen[str]]) -> None:
    process = command("--port", "0")
    assert process.stdout is not None
    url = next(word for word in process.stdout.readline().split() if word.startswith("http://"))
    with pytest.raises((OSError, HTTPException)):
        urllib.request.urlopen(json_request(url + "/fake/kill", b"{}"), timeout=20)
    assert process.wait(timeout=60) == -9


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--faults", "eror=0.1"], "did you mean 'error'"),
        (["--faults", "error=often"], "error=0.01"),
        (["--reply", "no/such/file"], "cannot be read"),
        (["--token-s", "-1"], "token_s must be at least 0"),
        (["--port", "99999"], "a port is in"),
    ],
)
def test_the_command_reports_wrong_arguments(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fake-server", *args]) == 2
    assert message in capsys.readouterr().err

"""Programs run by a code execution service: as in a box of this machine, and a service that fails is never a zero."""

from __future__ import annotations

import asyncio
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from agentgym.envs import make_env
from agentgym.errors import ConfigError, SandboxError, TrainingHalted
from agentgym.evaluation import EvalConfig, evaluate
from agentgym.rewards.scorers.code_tests import code
from agentgym.rollout import read_episodes
from agentgym.tools.code import CodeTools
from agentgym.tools.sandbox import Ended, Sandbox, SandboxLimits, open_sandbox, service
from agentgym.tools.sandbox.service_server import SandboxServer
from agentgym.tools.sandbox.service_settings import SandboxConfig, used_by_run
from agentgym.trajectory import Row, Source, Status, StopReason, TokenSpan, Trajectory, Turn
from agentgym.types import Message, Task

LIMITS = SandboxLimits(time_limit_s=10.0, memory_mb=256)


@contextmanager
def serving(box: Sandbox) -> Iterator[str]:
    """The URL of a service of that box."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    server = SandboxServer(box, LIMITS, concurrency=4)
    try:
        asyncio.run_coroutine_threadsafe(server.__aenter__(), loop).result(30)
        yield server.url
    finally:
        asyncio.run_coroutine_threadsafe(server.__aexit__(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)
        loop.close()


@pytest.fixture(scope="module")
def box() -> Iterator[Sandbox]:
    with open_sandbox(limits=LIMITS) as open_box:
        yield open_box


@pytest.fixture(scope="module")
def url(box: Sandbox) -> Iterator[str]:
    with serving(box) as at:
        yield at


@contextmanager
def answering(answer: Callable[[dict[str, Any], dict[str, str]], tuple[int, bytes]]) -> Iterator[str]:
    """The URL of a server with these answers to a request and its headers."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, content = answer(body, dict(self.headers))
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join(30)
        server.server_close()


def finished(**fields: object) -> bytes:
    """The answer of a service whose program has finished."""
    result = {"status": "Finished", "execution_time": 0.1, "return_code": 0, "stdout": "42\n", "stderr": ""}
    return json.dumps({"status": "Success", "message": "", "run_result": {**result, **fields}, "files": {}}).encode()


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pauses between the tries of a request."""
    monkeypatch.setattr(service, "PAUSES_S", (0.0, 0.0, 0.0))


def post(url: str, **body: object) -> tuple[int, dict[str, Any]]:
    request = urllib.request.Request(f"{url}/run_code", json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


@pytest.mark.parametrize(
    "call",
    [
        {"code": "print(6 * 7)"},
        {"code": "import sys; print('x', file=sys.stderr); sys.exit(3)"},
        {"code": "1 / 0"},
        {"code": "echo é; exit 4", "language": "shell"},
        {"code": "open('out/b', 'wb').write(open('out/a', 'rb').read() * 2)", "files": {"out/a": b"\0\xff"}},
        {"code": "while True: pass", "time_limit_s": 0.3},
    ],
    ids=["output", "exit code", "traceback", "shell", "files", "time limit"],
)
def test_a_program_ends_as_in_a_box_of_this_machine(call: dict[str, Any], box: Sandbox, url: str) -> None:
    with open_sandbox(url, limits=LIMITS) as elsewhere:
        here, there = (place.run(collect=["out/b", "missing"], **call) for place in (box, elsewhere))
    assert (there.stdout, there.stderr, there.exit_code) == (here.stdout, here.stderr, here.exit_code)
    assert (there.ended, there.files, there.ok) == (here.ended, here.files, here.ok)
    assert there.backend == "service" and there.seconds > 0


@pytest.mark.parametrize(
    ("language", "program"), [("python", "import sys\nprint(input() + sys.stdin.read(), end='')"), ("bash", "cat; ls")]
)
def test_a_program_reads_the_standard_input_of_its_request(language: str, program: str, url: str) -> None:
    unlimited = {"run_timeout": None, "memory_limit_MB": None}
    status, answer = post(url, code=program, language=language, stdin="one\ntwo\n", **unlimited)
    assert (status, answer["status"], answer["run_result"]["return_code"]) == (200, "Success", 0)
    assert answer["run_result"]["stdout"] == ("onetwo\n" if language == "python" else "one\ntwo\n")


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ({"code": "1", "language": "cpp"}, "python or bash, got 'cpp'"),
        ({"code": 1, "language": "python"}, "code is a text"),
        ({"language": "python"}, "code is a text"),
        ({"code": "1", "language": "python", "files": {"a": "no base64"}}, "is not base64"),
        ({"code": "1", "language": "python", "files": {"../a": ""}}, "relative to the working folder"),
        ({"code": "1", "language": "python", "fetch_files": "a"}, "fetch_files is a list"),
        ({"code": "1", "language": "python", "run_timeout": 60}, "at most 10"),
        ({"code": "1", "language": "python", "run_timeout": "5"}, "at most 10"),
        ({"code": "1", "language": "python", "run_timeout": -1}, "positive number"),
        ({"code": "1", "language": "python", "memory_limit_MB": 4096}, "at most 256"),
        ({"code": "1", "language": "python", "stdin": "a", "files": {".main.py": ""}}, "cannot be given beside stdin"),
        ({"code": "cat", "language": "bash", "stdin": "a", "files": {"./.stdin": ""}}, "cannot be given beside stdin"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_with_the_reason(
    body: dict[str, object], why: str, url: str
) -> None:
    status, answer = post(url, **body)
    assert status == 422 and why in answer["error"]["message"]


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize(
    "content",
    [
        b"<html>busy</html>",
        b"[]",
        b"{}",
        json.dumps({"status": "SandboxError", "message": "no box"}).encode(),
        json.dumps({"status": "Failed", "compile_result": None, "run_result": None}).encode(),
        finished(return_code=None),
        finished(status="Error"),
        finished(stdout=5),
        finished(return_code=0.5),
        finished(return_code=float("inf")),
        finished(return_code=True),
        finished(execution_time=float("nan")),
        b"[" * 100_000,
    ],
)
def test_what_is_no_outcome_is_the_services_fault(content: bytes) -> None:
    with answering(lambda *_: (200, content)) as at, open_sandbox(at) as sandbox, pytest.raises(SandboxError):
        sandbox.run("print(42)")


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize(("status", "tries"), [(503, 4), (429, 4), (500, 4), (404, 1), (401, 1), (422, 1)])
def test_a_refusal_is_the_services_fault_and_a_busy_service_is_asked_again(status: int, tries: int) -> None:
    requests: list[int] = []

    def refuse(*_: object) -> tuple[int, bytes]:
        requests.append(1)
        return status, b"not now"

    why = pytest.raises(SandboxError, match=f"status {status}: not now")
    with answering(refuse) as at, open_sandbox(at) as sandbox, why:
        sandbox.run("print(42)")
    assert len(requests) == tries


@pytest.mark.usefixtures("at_once")
def test_a_service_that_recovers_gives_the_outcome() -> None:
    answers = [(503, b""), (200, json.dumps({"status": "SandboxError"}).encode()), (200, finished())]
    with answering(lambda *_: answers.pop(0)) as at, open_sandbox(at) as sandbox:
        assert sandbox.run("print(42)").stdout == "42\n"


@pytest.mark.usefixtures("at_once")
def test_a_service_that_is_not_there_or_does_not_answer_is_at_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_sandbox("http://127.0.0.1:1") as sandbox, pytest.raises(SandboxError, match="refused"):
        sandbox.run("1")
    monkeypatch.setattr(service, "ANSWER_S", 0.1)

    def sleep(*_: object) -> tuple[int, bytes]:
        time.sleep(0.5)
        return 200, finished()

    with answering(sleep) as at, open_sandbox(at) as sandbox, pytest.raises(SandboxError, match="no answer within"):
        sandbox.run("1", time_limit_s=0.1)


def test_output_beyond_the_limit_is_cut_and_named() -> None:
    limits = SandboxLimits(output_kb=1)
    with answering(lambda *_: (200, finished(stdout="x" * 3000))) as at, open_sandbox(at, limits=limits) as sandbox:
        outcome = sandbox.run("1")
    assert (outcome.ended, outcome.stdout) == (Ended.OUTPUT_LIMIT, "x" * 1024)


def test_a_run_sends_its_key_and_no_more_requests_at_once_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVICE_KEY", "a-key-of-some-length")
    running, most, keys, lock = 0, 0, set(), threading.Lock()

    def count(_: object, headers: dict[str, str]) -> tuple[int, bytes]:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
            keys.add(headers.get("Authorization"))
        time.sleep(0.05)
        with lock:
            running -= 1
        return 200, finished()

    with answering(count) as at:
        config = SandboxConfig(url=at, concurrency=2, api_key_env="SERVICE_KEY")
        with used_by_run(config), open_sandbox() as sandbox, ThreadPoolExecutor(6) as threads:
            assert all(threads.map(lambda _: sandbox.run("1").ok, range(6)))
    assert (most, keys) == (2, {"Bearer a-key-of-some-length"})


def test_after_the_run_a_sandbox_is_a_box_of_this_machine_again(url: str) -> None:
    with used_by_run(SandboxConfig(url=url)), open_sandbox(limits=LIMITS) as sandbox:
        assert sandbox.run("print(1)").backend == "service"
    with used_by_run(SandboxConfig()), open_sandbox() as sandbox:
        assert sandbox.backend != "service"


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"url": "host:8080"}, "http:// address"),
        ({"url": "http://me:secret@host"}, "sandbox.url"),
        ({"url": "http://host", "concurrency": 0}, "at least 1"),
        ({"url": "http://host", "api_key_env": "NOT_SET_ANYWHERE"}, "not set"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        SandboxConfig(**settings)


def test_a_service_has_no_sessions_patterns_packages_or_images(url: str) -> None:
    with open_sandbox(url) as sandbox, pytest.raises(ConfigError, match="keeps nothing"):
        sandbox.session()
    with open_sandbox(url) as sandbox, pytest.raises(ConfigError, match="not by patterns"):
        sandbox.run("1", collect=["*.csv"])
    with pytest.raises(ConfigError, match="packages"):
        open_sandbox(url, image="python:3.12")


def test_tools_describe_each_call_as_a_new_program_that_keeps_nothing(url: str) -> None:
    tools = CodeTools(limits=LIMITS, backend=url)
    assert all("Nothing is kept" in entry.spec.description for entry in tools.open())
    assert tools.python("kept = 1\nprint(kept)") == "1"
    assert "NameError" in tools.python("print(kept)")
    assert tools.shell("echo one; exit 2") == "one\n[exit code 2]"
    here = CodeTools(limits=LIMITS)
    assert all("kept for the next call" in entry.spec.description for entry in here.open())


def test_a_terminal_needs_a_box_of_this_machine(url: str) -> None:
    with used_by_run(SandboxConfig(url=url)):
        with pytest.raises(ConfigError, match="backend=namespaces"):
            make_env("Terminal-v0")
        make_env("Terminal-v0", {"backend": "namespaces"}).close()


def replied(program: str, truth: Any) -> Trajectory:
    row = Row((TokenSpan((1,), Source.PROMPT), TokenSpan((2,), Source.POLICY, (-0.5,), (0,))), (Message("user", "?"),))
    turns = (Turn(Message("assistant", f"```python\n{program}\n```"), 0.0),)
    task = Task("Data-v0", 1, options={"ground_truth": truth})
    return Trajectory(task, "0", 0, (row,), turns, Status.COMPLETED, StopReason.TERMINATED)


@pytest.mark.parametrize(
    ("program", "truth", "value"),
    [
        ("def add(a, b): return a + b", "assert add(1, 2) == 3", 1.0),
        ("def add(a, b): return a - b", "assert add(1, 2) == 3", 0.0),
        ("raise SystemExit", "assert True", 0.0),
        ("while True: pass", "assert True", 0.0),
        ("print(int(input()) + 1)", {"inputs": ["1\n", "5\n"], "outputs": ["2\n", "6\n"]}, 1.0),
        ("print(2)", {"inputs": ["1\n", "5\n"], "outputs": ["2\n", "6\n"]}, 0.5),
    ],
)
def test_the_code_reward_is_that_of_this_machine(program: str, truth: Any, value: float, url: str) -> None:
    played = replied(program, truth)
    settings = {"seconds": 1.0, "memory_mb": 128, "partial": True}
    with used_by_run(SandboxConfig(url=url)):
        there = code(played, played.task, **settings)
    here = code(played, played.task, **settings)
    assert there == here and there.value == value


@pytest.mark.usefixtures("at_once")
def test_a_service_that_runs_no_program_gives_no_reward() -> None:
    played = replied("x = 1", "assert x == 1")
    with used_by_run(SandboxConfig(url="http://127.0.0.1:1")), pytest.raises(SandboxError, match="ran no program"):
        code(played, played.task)


@pytest.mark.usefixtures("at_once")
def test_an_evaluation_plays_by_its_service_and_a_service_that_is_gone_is_no_zero(tmp_path: Path, url: str) -> None:
    played = {"env": "CodeTasks-v0", "policy": "oracle", "num_tasks": 3}
    won = evaluate(EvalConfig(**played, sandbox=SandboxConfig(url=url)), output=tmp_path / "won")
    assert (won.summary.success, won.summary.num_failed) == (1.0, 0)
    assert won.config.to_json()["sandbox"] == {"url": url, "concurrency": 32, "api_key_env": ""}
    with pytest.raises(TrainingHalted, match="ran no program"):
        evaluate(EvalConfig(**played, sandbox=SandboxConfig(url="http://127.0.0.1:1")), output=tmp_path / "lost")
    lost = [record.trajectory for record in read_episodes(tmp_path / "lost")]
    assert {episode.status for episode in lost} == {Status.ENV_ERROR}

"""Environments behind OpenEnv's protocol: ours played by its client, its own played here, ours by ours."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gymnasium
import pytest
from aiohttp import web

from agentgym.cli.main import main
from agentgym.engines.servers.server_process import free_port
from agentgym.envs import Action, TextEnv, make_env, resolve_env
from agentgym.envs.adapters.openenv_server import openenv_app, serve_openenv
from agentgym.envs.base.policies import RandomPolicy
from agentgym.errors import ConfigError, EnvironmentFault
from agentgym.evaluation.play.evaluate import evaluate
from agentgym.http_guard import HttpGuard
from agentgym.testing import check_env
from agentgym.trajectory import Status
from agentgym.types import JSON, Message, ToolCall
from tests.envs.adapters.conftest import running

GUESS = Path(__file__).parent / "openenv_guess.py"
ECHO = Path(__file__).parent / "openenv_echo.py"
CLIENT = """
import asyncio, json, sys
from openenv.core.generic_client import GenericEnvClient

async def main():
    async with GenericEnvClient(base_url=sys.argv[1]) as env:
        told = [await env.reset(seed=3)]
        told.append(await env.step({"tool_calls": [{"name": "look", "arguments": {}}]}))
        told.append(await env.step({"message": "go south"}))
        print(json.dumps([[one.observation["text"], one.reward, one.done] for one in told]))
        print((await env.state())["step_count"])

asyncio.run(main())
"""


JSON_TYPE = {"Content-Type": "application/json"}


@contextmanager
def _serving(app: web.Application) -> Iterator[str]:
    """The URL of an application on a loop and a thread of its own."""
    urls: list[str] = []
    loop = asyncio.new_event_loop()
    is_ready = threading.Event()

    def ready(at: str) -> None:
        urls.append(at)
        is_ready.set()

    serving = loop.create_task(serve_openenv(app, "127.0.0.1", 0, ready))

    def serve() -> None:
        with pytest.raises(asyncio.CancelledError):
            loop.run_until_complete(serving)
        loop.close()

    thread = threading.Thread(target=serve)
    thread.start()
    assert is_ready.wait(30)
    yield urls[0]
    loop.call_soon_threadsafe(serving.cancel)
    thread.join(30)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """TextGame-v0, served on this machine."""
    with _serving(openenv_app("TextGame-v0", resolve_env("TextGame-v0"), max_sessions=40)) as at:
        yield at


def episode(env: TextEnv, seed: int, turns: int = 12) -> list[tuple[str, float, bool, bool, Any]]:
    """What a random player is told and paid, the player's calls one in each reply."""
    observation, _ = env.reset(seed=seed)
    steps: list[tuple[str, float, bool, bool, Any]] = [(observation, 0.0, False, False, None)]
    player = RandomPolicy()
    player.reset(env, observation, seed)
    while len(steps) <= turns and not (steps[-1][2] or steps[-1][3]):
        observation, reward, terminated, truncated, info = env.step(Action.from_message(player.act(observation)))
        steps.append((observation, reward, terminated, truncated, info["metrics"].get("success")))
    return steps


def test_a_served_environment_is_the_environment(url: str) -> None:
    here, there = make_env("TextGame-v0"), make_env(f"openenv/{url}")
    assert there.system_prompt == here.system_prompt
    assert there.tool_specs == here.tool_specs
    for seed in range(5):
        assert episode(there, seed) == episode(here, seed)
    there.close()


def test_what_a_model_writes_without_a_call_is_no_command_there_either(url: str) -> None:
    here, there = make_env("TextGame-v0"), make_env(f"openenv/{url}")
    for env in (here, there):
        env.reset(seed=3)
    written, typed = Action.from_message(Message("assistant", "look")), "look"
    answers = [[env.step(action)[0] for action in (written, typed)] for env in (here, there)]
    assert answers[0] == answers[1]
    assert answers[0][0].startswith("That is not a command")
    there.close()


def test_sessions_side_by_side_are_each_their_own(url: str) -> None:
    def played(seed: int) -> list[tuple[str, float, bool, bool, Any]]:
        env = make_env(url)
        try:
            return episode(env, seed)
        finally:
            env.close()

    with ThreadPoolExecutor(16) as threads:
        assert list(threads.map(played, range(32))) == [episode(make_env("TextGame-v0"), seed) for seed in range(32)]


@pytest.mark.slow
def test_gymnasium_makes_it_and_env_check_finds_nothing(url: str) -> None:
    env = gymnasium.make(f"openenv/{url}")
    assert env.reset(seed=3)[0] == make_env("TextGame-v0").reset(seed=3)[0]
    env.close()
    assert check_env(f"openenv/{url}") == []


def test_a_server_that_is_not_there_is_a_taught_error() -> None:
    with pytest.raises(ConfigError, match=r"no OpenEnv server answers at http://127\.0\.0\.1:1/schema"):
        make_env("openenv/http://127.0.0.1:1")
    with pytest.raises(ConfigError, match="is named by its URL"):
        make_env("openenv/localhost")
    assert main(["env", "serve", "TextGam-v0"]) == 2
    assert main(["env", "serve", "TextGame-v0", "--port", "70000"]) == 2


def test_a_servers_token_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("OPENENV_API_KEY", raising=False)
    guard = HttpGuard("127.0.0.1", token="a-token-of-the-server")
    with _serving(openenv_app("TextGame-v0", resolve_env("TextGame-v0"), max_sessions=4, guard=guard)) as url:
        with pytest.raises(ConfigError, match=r"401.*Its token belongs into the variable OPENENV_API_KEY"):
            make_env(f"openenv/{url}")
        monkeypatch.setenv("OPENENV_API_KEY", "a-token-of-the-server")
        there = make_env(f"openenv/{url}")
        assert episode(there, 3) == episode(make_env("TextGame-v0"), 3)
        there.close()
        monkeypatch.setenv("OPENENV_API_KEY", "another token")
        monkeypatch.setenv("SPACE_TOKEN", "a-token-of-the-server")
        result = evaluate(
            f"openenv/{url}", "random", num_tasks=1, env_kwargs={"api_key_env": "SPACE_TOKEN"}, output=tmp_path / "run"
        )
    assert result.summary.num_failed == 0
    recorded = b"".join(path.read_bytes() for path in result.output.iterdir() if path.is_file())
    assert b"SPACE_TOKEN" in recorded and b"a-token-of-the-server" not in recorded
    with pytest.raises(ConfigError, match="NO_SUCH_TOKEN is not set"):
        make_env(f"openenv/{url}", {"api_key_env": "NO_SUCH_TOKEN"})


def test_a_step_outside_an_episode_is_an_error_of_the_protocol(url: str) -> None:
    env: Any = make_env(url)
    env.reset(seed=0)
    with pytest.raises(EnvironmentFault, match="VALIDATION_ERROR"):
        env._send_action({"tool_calls": 5})
    with pytest.raises(EnvironmentFault, match=r"EXECUTION_ERROR.*EpisodeOver"):
        fresh: Any = make_env(url)
        fresh.start({})
        for _ in range(100):
            fresh._send_action({"message": "look"})
    fresh.release()
    env.close()


def test_requests_without_a_session_share_one_environment(url: str) -> None:
    def post(path: str, content: object) -> Any:
        request = urllib.request.Request(f"{url}/{path}", json.dumps(content).encode(), JSON_TYPE)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)

    opening = post("reset", {"seed": 3, "episode_id": "one"})
    assert opening["observation"]["text"] == make_env("TextGame-v0").reset(seed=3)[0]
    assert post("step", {"action": {"message": "look"}})["reward"] == 0.0
    with urllib.request.urlopen(f"{url}/state", timeout=30) as answer:
        assert json.load(answer) == {"episode_id": "one", "step_count": 1}


async def _impatient(request: web.Request) -> web.WebSocketResponse:
    """A session that ends where the client does not answer a ping; its second step has no answer."""
    answers = web.WebSocketResponse(heartbeat=2.5)
    await answers.prepare(request)
    num_steps = 0
    async for message in answers:
        num_steps += json.loads(message.data)["type"] == "step"
        if num_steps != 2:
            await answers.send_json({"type": "observation", "data": {"observation": {"text": f"{num_steps}"}}})
    return answers


@pytest.fixture
def impatient_url() -> Iterator[str]:
    """Where such sessions are."""

    async def schema(_: web.Request) -> web.Response:
        return web.json_response({"action": {"properties": {"message": {"type": "string"}}}})

    app = web.Application()
    app.add_routes([web.get("/ws", _impatient), web.get("/schema", schema)])
    with _serving(app) as at:
        yield at


@pytest.mark.long
def test_a_server_that_pings_is_answered_while_the_model_thinks(impatient_url: str) -> None:
    env = make_env(impatient_url)
    assert env.reset(seed=0)[0] == "0"
    time.sleep(5.0)  # a ping and the time for its answer
    assert env.step("hm")[0] == "1"
    env.close()


@pytest.mark.long
def test_an_answer_that_comes_too_late_is_not_taken_for_that_of_the_next_step(impatient_url: str) -> None:
    env = make_env(impatient_url, {"reply_timeout_s": 2.0})
    env.reset(seed=0)
    env.step("hm")
    with pytest.raises(EnvironmentFault, match="did not answer 'step': TimeoutError"):
        env.step("hm")
    with pytest.raises(EnvironmentFault, match="left a message of this session without an answer"):
        env.step("hm")
    assert env.reset(seed=0)[0] == "0"
    env.close()


@pytest.mark.long
def test_a_slow_server_fails_the_episode_without_a_tool_error(url: str, impatient_url: str) -> None:
    for at in (url, impatient_url):
        assert {tool.timeout_s for tool in vars(make_env(at))["_runner"].tools.values()} == {None}
    env = make_env(impatient_url, {"reply_timeout_s": 2.0})
    env.reset(seed=0)
    env.step("hm")
    with pytest.raises(EnvironmentFault, match="did not answer 'step': TimeoutError"):
        env.step(Action.from_message(Message("assistant", "", tool_calls=(ToolCall("c", "act", {"message": "hm"}),))))
    env.close()


CALLS = {"type": {"const": "call_tool"}, "tool_name": {"type": "string"}, "arguments": {"type": "object"}}
ADD: dict[str, Any] = {
    "name": "add",
    "description": "Adds two numbers.",
    "input_schema": {"properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]},
}


def _result(action: dict[str, Any]) -> dict[str, Any]:
    """The observation of a call of `add`: its sum, or the error that the sum stands for."""
    total = sum(action["arguments"].values())
    errors = {-1: "invalid_args", -2: "transport_error", -3: "timeout"}
    error = {"error_type": errors[total], "message": f"no {total}"} if total in errors else None
    content = [{"type": "text", "text": str(total)}]
    result = None if error else {"content": content, "structured_content": {"result": total}, "is_error": total > 99}
    return {"tool_name": "add", "result": result, "error": error, "metadata": {}}


@pytest.fixture
def mcp_server() -> Iterator[Callable[..., str]]:
    """`mcp_server(tools)` is the URL of a server whose actions are calls of these tools, with one session at a time."""

    def app(tools: list[dict[str, Any]]) -> web.Application:
        live: list[object] = []

        async def session(request: web.Request) -> web.WebSocketResponse:
            socket = web.WebSocketResponse()
            await socket.prepare(request)
            if live:
                await socket.send_json({"type": "error", "data": {"code": "CAPACITY_REACHED", "message": "1 of 1"}})
                await socket.close()
                return socket
            live.append(socket)
            async for message in socket:
                message_json = json.loads(message.data)
                if message_json["type"] == "close":
                    break
                lists = message_json["data"].get("type") == "list_tools"
                seen = (
                    {"tools": tools}
                    if lists
                    else _result(message_json["data"])
                    if message_json["type"] == "step"
                    else {}
                )
                await socket.send_json({"type": "observation", "data": {"observation": seen, "reward": None}})
            await asyncio.sleep(0.3)  # the next session comes while this one is being closed
            live.remove(socket)
            return socket

        async def schema(_: web.Request) -> web.Response:
            return web.json_response({"action": {"properties": CALLS, "required": ["tool_name"]}})

        application = web.Application()
        application.add_routes([web.get("/ws", session), web.get("/schema", schema)])
        return application

    with contextlib.ExitStack() as stack:
        yield lambda tools: stack.enter_context(_serving(app(tools)))


def test_a_server_of_tool_calls_gives_its_own_tools(mcp_server: Callable[..., str]) -> None:
    env = make_env(mcp_server([ADD]))
    assert [spec.name for spec in env.tool_specs] == ["add"]
    env.reset(seed=0)
    assert _called(env, "add", a=3, b=4) == "7"
    assert _called(env, "add", a=99, b=1) == "100"  # the tool says that this is an error: the model reads it
    assert _called(env, "add", a=-1, b=0) == "no -1"  # and so it does where its arguments were wrong
    assert _called(env, "act", a=-1, b=0).startswith("unknown tool 'act'")
    env.close()


@pytest.mark.parametrize("total", [-2, -3])
def test_a_failure_of_the_server_behind_a_tool_is_a_fault(mcp_server: Callable[..., str], total: int) -> None:
    env = make_env(mcp_server([ADD]))
    env.reset(seed=0)
    with pytest.raises(EnvironmentFault, match=f"tool 'add' of the OpenEnv server failed: no {total}"):
        _called(env, "add", a=total, b=0)
    env.close()


def test_a_server_of_tool_calls_without_tools_is_refused(mcp_server: Callable[..., str]) -> None:
    with pytest.raises(ConfigError, match="takes tool calls and lists no tools"):
        make_env(mcp_server([]))


@pytest.mark.long
def test_an_episode_waits_for_a_session_that_is_taken(mcp_server: Callable[..., str]) -> None:
    url = mcp_server([ADD])
    first, second = make_env(url), make_env(url, {"reply_timeout_s": 0.5})
    first.reset(seed=0)
    with pytest.raises(EnvironmentFault, match=r"has no free session: 1 of 1\. Lower --concurrency"):
        second.reset(seed=0)
    first.close()
    patient = make_env(url)
    patient.reset(seed=0)
    assert _called(patient, "add", a=1, b=1) == "2"
    patient.close()


def test_a_server_that_gives_no_reward_is_warned_about(
    mcp_server: Callable[..., str], caplog: pytest.LogCaptureFixture
) -> None:
    env = make_env(mcp_server([ADD]))
    for seed in range(2):
        env.reset(seed=seed)
        _called(env, "add", a=1, b=1)
    env.close()
    assert [record.message.partition(" at ")[0] for record in caplog.records] == ["the OpenEnv server"]
    assert "gave no reward in an episode" in caplog.text


@pytest.mark.adapter
def test_the_client_of_openenv_plays_what_is_served(url: str, openenv_python: Path) -> None:
    done = subprocess.run([openenv_python, "-c", CLIENT, url], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    answers, steps = done.stdout.splitlines()
    env = make_env("TextGame-v0")
    expected = [[env.reset(seed=3)[0], None, False]]
    expected += [[*env.step(reply)[:2], False] for reply in ("look", "go south")]
    assert (json.loads(answers), steps) == (expected, "2")


@pytest.mark.adapter
def test_a_server_of_openenv_is_played_by_calls_and_by_words(openenv_python: Path) -> None:
    port = free_port()
    with running(openenv_python, GUESS, str(port)):
        env = _soon(f"openenv/http://127.0.0.1:{port}")
        assert [spec.name for spec in env.tool_specs] == ["act"]
        assert env.tool_specs[0].parameters["required"] == ["message"]
        rewards = set()
        for seed in range(12):
            assert env.reset(seed=seed)[0] == "Guess a number from 1 to 3."
            first = env.step("1")
            again = '{"name": "act", "arguments": {"message": "2"}}'
            observation, reward, terminated, *_ = first if first[2] else env.step(again)
            assert (observation, terminated) == ("Yes." if reward else "No.", True)
            rewards.add(reward)
        assert rewards == {0.0, 1.0}
        env.close()
        findings = check_env(f"openenv/http://127.0.0.1:{port}")
        assert {finding.check for finding in findings} <= {"canaries"}  # one word in three is right


@pytest.mark.adapter
def test_an_mcp_environment_of_openenv_is_played_with_its_own_tools(openenv_python: Path, tmp_path: Path) -> None:
    port = free_port()
    with running(openenv_python, ECHO, str(port)):
        env = _soon(f"openenv/http://127.0.0.1:{port}")
        assert [spec.name for spec in env.tool_specs] == ["echo", "measure"]
        assert env.tool_specs[0].parameters["required"] == ["message"]
        assert env.reset(seed=0)[0] == "Echo is ready."
        assert [_called(env, "echo", message="hi"), _called(env, "measure", message="hi")] == ["hi", '{"length":2}']
        assert "there is no message" in _called(env, "measure", message="")
        env.close()
        # The server holds one session: episodes side by side wait for it, and none fails.
        name, folder = f"openenv/http://127.0.0.1:{port}", tmp_path / "eval"
        played = evaluate(name, "random", num_tasks=3, concurrency=3, max_turns=5, output=folder).trajectories
        assert [trajectory.status for trajectory in played] == [Status.TRUNCATED] * 3
        results = [result for trajectory in played for turn in trajectory.turns for result in turn.tool_results]
        assert len(results) == 15 and {result.error for result in results} <= {None, "tool_error"}


def _called(env: TextEnv, name: str, **arguments: JSON) -> str:
    """The observation after a call."""
    call = ToolCall("c", name, arguments)
    return env.step(Action.from_message(Message("assistant", "", tool_calls=(call,))))[0]


def _soon(name: str) -> TextEnv:
    """The environment of a server that is about to listen."""
    until = time.monotonic() + 90
    while True:
        try:
            return make_env(name)
        except ConfigError:
            if time.monotonic() > until:
                raise
            time.sleep(0.5)

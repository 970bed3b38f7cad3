"""An MCP server's tools in an episode: what the model reads, what is isolated, and that nothing is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from agentgym.errors import ConfigError, EnvironmentFault
from agentgym.tools.mcp import McpServer, McpTools
from agentgym.tools.mcp.content import as_text

ServerOf = Callable[..., McpServer]
Desk = Callable[..., Any]
Processes = Callable[[], list[psutil.Process]]
Ended = Callable[[psutil.Process], bool]


def wait_until(done: Callable[[], bool], limit_s: float = 30.0) -> None:
    ends = time.monotonic() + limit_s
    while not done():
        assert time.monotonic() < ends
        time.sleep(0.02)


# ---- what the model is shown, and reads


@pytest.mark.long
def test_descriptions_and_schemas_are_the_server_s(long_desk: Any) -> None:
    spec = {spec.name: spec for spec in long_desk.tool_specs}["add"]
    assert spec.description == "Adds to the counter."
    assert spec.parameters["properties"] == {"amount": {"default": 1, "title": "Amount", "type": "integer"}}


def test_a_call_is_answered_with_its_text(long_desk: Any) -> None:
    assert long_desk.ask("sums", numbers=[1, 2]) == ('{\n  "total": 3\n}', None)


def test_arguments_are_checked_before_they_are_sent(long_desk: Any) -> None:
    text, error = long_desk.ask("sums", numbers="1")
    assert error == "invalid_arguments" and "'numbers'" in text


def test_an_image_is_left_out_in_words(long_desk: Any) -> None:
    assert long_desk.ask("picture") == ("[an image (image/png) was left out: only text is shown]", None)


def test_structured_content_is_shown_where_no_text_is() -> None:
    image = {"type": "image", "mimeType": "image/png", "data": ""}
    left_out = "[an image (image/png) was left out: only text is shown]"
    assert as_text({"content": [image], "structuredContent": {"a": "é"}}) == f'{left_out}\n{{"a": "é"}}'
    assert as_text({"content": [], "structuredContent": {}}) == "{}"
    assert as_text({"content": [image, {"type": "text", "text": "x"}], "structuredContent": {}}) == f"{left_out}\nx"


def test_a_tool_s_error_is_answered(long_desk: Any) -> None:
    text, error = long_desk.ask("refuse", reason="not today")
    assert error == "tool_error" and "refuse" in text


def test_an_answer_is_cut_as_every_tool_s(long_desk: Any) -> None:
    text, error = long_desk.ask("long", chars=50_000)
    assert error is None and text.endswith("[30000 more characters were cut]")


def test_the_calls_of_a_turn_run_at_once(long_desk: Any) -> None:
    assert long_desk.ask_all(*[("meet", {"num_calls": 4})] * 4) == [("met", None)] * 4


def test_a_server_gets_the_variables_it_was_given_and_no_other(long_desk: Any) -> None:
    assert long_desk.ask("secret", variable="COLOUR")[0] == "red"
    assert long_desk.ask("secret", variable="PYTEST_CURRENT_TEST")[0] == "unset"


def test_chosen_tools_have_a_prefix(desk: Desk, server_of: ServerOf) -> None:
    env = desk(server_of("careless"), names=["flood"], prefix="pipe_")
    assert list(env.tools) == ["pipe_flood"]
    assert env.ask("pipe_flood") == ("done", None)


def test_a_tool_that_is_not_there_is_refused_with_the_nearest(desk: Desk, server_of: ServerOf) -> None:
    with pytest.raises(ConfigError, match="has no tool 'flod': did you mean 'flood'"):
        desk(server_of("careless"), names=["flod"])


# ---- one server for an episode


def test_episodes_side_by_side_have_a_server_each(server_of: ServerOf, desk: Desk, server_processes: Processes) -> None:
    before = len(server_processes())
    envs = [desk(server_of("careless")) for _ in range(2)]
    counts = [[env.ask("add", amount=amount)[0] for _ in range(3)] for amount, env in enumerate(envs, start=1)]
    assert counts == [["1", "2", "3"], ["2", "4", "6"]]
    assert len({env.ask("pid") for env in envs}) == 2
    envs[0].reset(seed=0)
    assert envs[0].ask("add") == ("1", None)
    for env in envs:
        env.close()
    wait_until(lambda: len(server_processes()) == before)


def test_what_a_server_leaves_behind_ends_with_it(desk: Desk, server_of: ServerOf, has_ended: Ended) -> None:
    env = desk(server_of("careless"))
    left = psutil.Process(int(env.ask("daemon")[0]))
    assert not has_ended(left)
    env.close()
    assert has_ended(left)


@pytest.mark.long
@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGTERM])
def test_a_server_ends_with_a_program_that_is_killed(signal_number: int, server_of: ServerOf, has_ended: Ended) -> None:
    program = f"""
import time
from agentgym.tools.mcp import McpServer, McpTools
from agentgym.tools.mcp.connection import CLOSE_S, PING_S
from agentgym.tools.mcp.content import as_text
source = McpTools(McpServer(command={server_of("careless").command!r}))
source.open()
print("open", flush=True)
time.sleep(3600)
"""
    done = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, cwd=Path.cwd())
    assert done.stdout is not None and done.stdout.readline() == b"open\n"
    children = psutil.Process(done.pid).children(recursive=True)
    assert len(children) == 2  # the guard and the server
    os.kill(done.pid, signal_number)
    done.wait()
    done.stdout.close()
    wait_until(lambda: all(has_ended(child) for child in children))


# ---- servers that fail


def test_a_server_that_crashes_is_an_infrastructure_failure(
    desk: Desk, server_of: ServerOf, server_processes: Processes
) -> None:
    env = desk(server_of("careless"))
    with pytest.raises(EnvironmentFault, match="ended during a call of 'crash'") as caught:
        env.ask("crash")
    assert "out of cheese" in str(caught.value) and "ended with exit code 3" in str(caught.value)
    with pytest.raises(EnvironmentFault, match="is gone: 'add' cannot be called"):
        env.ask("add")
    env.reset(seed=0)
    assert env.ask("add") == ("1", None)


@pytest.mark.long
def test_a_call_that_takes_too_long_is_answered_and_a_server_that_hangs_is_ended(
    desk: Desk, server_of: ServerOf, has_ended: Ended
) -> None:
    env = desk(server_of("counter", call_timeout_s=1))
    server = psutil.Process(int(env.ask("pid")[0]))
    assert env.ask("nap", seconds=30) == ("nap gave no answer within 1 s", "timeout")
    assert env.ask("add") == ("1", None)
    with pytest.raises(EnvironmentFault, match="hangs, and was ended: hang gave no answer within 1 s"):
        env.ask("hang")
    wait_until(lambda: has_ended(server))


def test_what_is_no_message_is_passed_over_and_told_where_the_server_fails(desk: Desk, server_of: ServerOf) -> None:
    env = desk(server_of("careless"))
    assert env.ask("flood", mib=1)[0].startswith("xxx")
    with pytest.raises(EnvironmentFault, match="wrote a line of more than 4 MiB, and was ended"):
        env.ask("flood", mib=5)


@pytest.mark.long
@pytest.mark.parametrize(
    ("command", "message"),
    [
        (("-c", "print('Hello')"), r"ended before it listed its tools.*\nHello\n\[agentgym: the server ended with"),
        (("-c", "import sys; sys.exit('no such model')"), r"ended before it listed its tools.*\nno such model"),
        (("-c", "import time; time.sleep(60)"), "listed no tools within 0.5 s, and was ended"),
    ],
)
def test_a_server_that_does_not_start_is_reported_with_its_standard_error(
    command: tuple[str, ...], message: str, desk: Desk, server_processes: Processes
) -> None:
    with pytest.raises(EnvironmentFault, match=message):
        desk(McpServer(command=(sys.executable, *command), start_timeout_s=0.5 if "sleep" in command[1] else 60))
    wait_until(lambda: not server_processes() or all("-c" not in process.cmdline() for process in server_processes()))


# ---- one server for all episodes


def test_episodes_share_a_server_without_state(desk: Desk, server_of: ServerOf) -> None:
    server = server_of("careless", stateless=True)
    first, second = desk(server), desk(server)
    (pid,) = {env.ask("pid")[0] for env in (first, second)}
    first.close()
    assert second.ask("pid")[0] == pid
    os.kill(int(pid), signal.SIGKILL)
    again = second.ask("pid")[0]  # sent once more, to a fresh one
    assert again != pid
    with pytest.raises(EnvironmentFault, match="ended during a call of 'crash'"):
        second.ask("crash")
    assert second.ask("pid")[0] not in (pid, again)


@pytest.mark.parametrize(
    "argument", ["\ud800", {"\ud800": 1}, json.loads("[" * 251 + "]" * 251), json.loads("[" * 900 + "]" * 900)]
)
def test_arguments_that_no_message_can_hold_are_refused_and_the_server_goes_on(
    argument: Any, desk: Desk, server_of: ServerOf
) -> None:
    env = desk(server_of("careless", stateless=True))
    pid = env.ask("pid")
    text, error = env.ask("pid", more=argument)
    assert error == "tool_error" and text.startswith("pid was not called, for its arguments cannot be sent")
    assert env.ask("pid", more=json.loads("[" * 200 + "]" * 200)) == env.ask("pid", more="é \0") == pid


def test_a_call_is_given_up_only_when_its_server_has_been(desk: Desk, server_of: ServerOf) -> None:
    from agentgym.tools.mcp.connection import (  # here, and not above: collected by every process, and costly
        CLOSE_S,
        PING_S,
    )

    one_call_s = 40 + PING_S + 2 * CLOSE_S
    for stateless, needed_s in ((True, 2 * one_call_s + 50), (False, one_call_s)):
        server = server_of("careless", stateless=stateless, call_timeout_s=40, start_timeout_s=50)
        (tool,) = desk(server, names=["flood"]).tools.values()
        assert tool.timeout_s > needed_s
        assert tool.on_error == "raise"  # what the model is to read is a ToolFailure


# ---- mistakes


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "a command line such as 'python server.py', or a URL; got nothing"),
        ("python 'server.py", "cannot be read: No closing quotation"),
        ("ftp://here/mcp", "begins with http:// or https://, got 'ftp://here/mcp'"),
    ],
)
def test_what_names_no_server_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        McpServer.of(text)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "give one of `command` and `url`"),
        ({"command": ("a",), "url": "http://b"}, "give one of `command` and `url`"),
        ({"url": "http://b", "env": {"A": "b"}}, "env and cwd are for a server that is started"),
        ({"command": ("a",), "headers": {"A": "b"}}, "headers are for a server at a URL"),
        ({"command": ("a",), "call_timeout_s": 0}, "call_timeout_s is a number of seconds above 0"),
        ({"command": ("a",), "start_timeout_s": float("nan")}, "start_timeout_s is a number of seconds above 0"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        McpServer(**settings)


def test_a_missing_program_is_reported_at_once() -> None:
    with pytest.raises(ConfigError, match="there is no program 'pythn'"):
        McpTools("pythn server.py").open()
    with pytest.raises(ConfigError, match="is not a folder: '/nowhere'"):
        McpTools(McpServer(command=("python3",), cwd="/nowhere")).open()


def test_a_program_is_found_from_the_server_s_working_directory(
    tmp_path: Path, desk: Desk, server_of: ServerOf
) -> None:
    python, careless = server_of("careless").command
    program = tmp_path / "run"
    program.write_text(f"#!/bin/sh\nexec {python} {careless}\n")
    program.chmod(0o700)
    assert desk(McpServer(command=("./run",), cwd=tmp_path)).ask("flood") == ("done", None)
    with pytest.raises(ConfigError, match=r"there is no program './run'"):
        McpTools(McpServer(command=("./run",), cwd=tmp_path.parent)).open()


def test_a_missing_package_is_reported_with_its_install_command() -> None:
    code = """
import sys, agentgym.tools.mcp as mcp
sys.modules["mcp"] = None
try:
    mcp.McpTools("cat").open()
except ValueError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "pip install " in done.stdout and "[mcp]'" in done.stdout


def test_secrets_are_in_no_repr() -> None:
    assert "hush" not in repr(McpServer(url="http://x/mcp", headers={"Authorization": "hush"}))
    assert "hush" not in repr(McpServer(command=("x",), env={"KEY": "hush"}))


def test_nothing_is_started_before_an_episode(server_processes: Processes) -> None:
    threads = threading.active_count()
    McpTools("python server.py")
    assert threading.active_count() == threads and not [
        process for process in server_processes() if "server.py" in str(process)
    ]

"""Agents are started for episodes, and how they end is the episode's status."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from agentgym.envs.base.text_env import Info, StepResult, TextEnv
from agentgym.errors import ConfigError, UnknownName
from agentgym.rollout.agents.agents import check_agent
from agentgym.rollout.agents.config import AgentConfig
from agentgym.trajectory import Status, StopReason

ASK = """
import json, os, urllib.error, urllib.request

def ask(text, url, key):
    body = json.dumps({"messages": [{"role": "user", "content": text}]}).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    request = urllib.request.Request(f"{url}/chat/completions", body, headers)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]
"""
PROGRAM = f"""{ASK}
import signal, subprocess, sys, time
text = ask(sys.argv[1], os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"])
"""
PYTHON = sys.executable


class Long(TextEnv):
    """Opens with a text."""

    runs_inline = True

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, Info]:
        return self.text, {}

    def step(self, action: str) -> StepResult:
        return "", 0.0, True, False, {}


@pytest.fixture
def command(tmp_path: Path) -> Callable[[str], str]:
    """`command(code)` is an agent that asks for a reply, `text`, and then runs the code."""

    def write(code: str) -> str:
        path = tmp_path / "agent.py"
        path.write_text(f"{PROGRAM}\n{code}\n", encoding="utf-8")
        return f"{PYTHON} {path} {{prompt}}"

    return write


@pytest.fixture
def function(tmp_path: Path) -> Callable[[str], str]:
    """`function(code)` is the location of a function `play(episode)` with this body."""

    def write(code: str, head: str = "def play(episode):") -> str:
        path = tmp_path / "agent_function.py"
        path.write_text(f"{ASK}\nimport asyncio, time\n\n{head}\n    {code}\n", encoding="utf-8")
        return f"{path}:play"

    return write


def test_a_command_has_nothing_of_our_environment_and_its_last_reply_is_judged(
    stage: Any, command: Callable[[str], str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SECRET_KEY", "hidden")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    code = "print(text, *sorted(os.environ), os.listdir(), os.listdir(os.environ['HOME']), sys.stdin.read())"
    (trajectory,) = stage.play(command(code))
    assert (trajectory.status, trajectory.reward) == (Status.COMPLETED, 1.0)
    assert "You add numbers.\n\nWhat is 2 + 3?" in stage.prompts[0]
    assert stage.log().startswith("It is 5. ") and "OPENAI_API_KEY" in stage.log() and "[] []" in stage.log()
    assert "SECRET" not in stage.log() and "hidden" not in stage.log()
    assert [*temporary.iterdir()] == []


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("sys.exit('no way')", "exit code 1: no way"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "exit code 137"),
        ("os.kill(os.getppid(), signal.SIGKILL); time.sleep(60)", "exit code 137"),
    ],
)
def test_a_crash_is_an_agent_error_without_a_reward(
    code: str, error: str, stage: Any, command: Callable[[str], str]
) -> None:
    (trajectory,) = stage.play(command(code))
    assert (trajectory.status, trajectory.reward) == (Status.AGENT_ERROR, None)
    assert error in str(trajectory.error) and "train-0-0-0-0.log" in str(trajectory.error)


def test_an_agent_that_asks_for_nothing_leaves_an_unplayed_episode(stage: Any) -> None:
    (trajectory,) = stage.play("true {prompt}")
    assert (trajectory.status, trajectory.stop_reason) == (Status.UNPLAYED, StopReason.AGENT)


def test_a_hang_is_a_timeout_and_all_that_the_agent_started_is_ended(
    stage: Any, command: Callable[[str], str], has_ended: Callable[[psutil.Process], bool]
) -> None:
    child = "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)"
    code = f"child = {child}; print(os.getpid(), child.pid, flush=True); signal.pause()"
    (trajectory,) = stage.play(command(code), timeout_s=1.5)
    assert (trajectory.status, trajectory.reward) == (Status.TIMEOUT, None)
    assert "1.5 s (agent.timeout_s)" in str(trajectory.error)
    for pid in map(int, stage.log().split()):
        assert not psutil.pid_exists(pid) or has_ended(psutil.Process(pid))


def test_a_process_that_an_agent_leaves_is_ended_with_it(stage: Any, command: Callable[[str], str]) -> None:
    code = "print(subprocess.Popen(['sleep', '600'], start_new_session=True).pid)"
    started = time.monotonic()
    (trajectory,) = stage.play(command(code))
    assert trajectory.status is Status.COMPLETED and time.monotonic() - started < 30
    assert not psutil.pid_exists(int(stage.log()))


def test_an_agent_that_prints_without_end_leaves_a_bounded_log(stage: Any, command: Callable[[str], str]) -> None:
    (trajectory,) = stage.play(command("print('first'); print('x' * (8 << 20)); print('last')"))
    log = stage.log()
    assert trajectory.status is Status.COMPLETED and len(log) < 70_000
    assert log.startswith("first\n") and log.endswith("x\nlast\n") and "bytes ...]" in log


def test_many_episodes_have_an_agent_each(stage: Any, function: Callable[[str], str]) -> None:
    agent = function("assert ask('?', episode.base_url, episode.api_key) == 'It is 5.'")
    played = stage.play(agent, num_episodes=30, parallel=4)
    assert [trajectory.reward for trajectory in played] == [1.0] * 30


@pytest.mark.parametrize("head", ["def play(episode):", "async def play(episode):"])
def test_the_error_of_a_function_is_an_agent_error(head: str, stage: Any, function: Callable[..., str]) -> None:
    (trajectory,) = stage.play(function("raise ValueError('no digit')", head))
    assert trajectory.status is Status.AGENT_ERROR and "ValueError: no digit" in str(trajectory.error)
    assert "Traceback" in stage.log()


@pytest.mark.parametrize(
    ("head", "code"),
    [("def play(episode):", "time.sleep(600)"), ("async def play(episode):", "await asyncio.sleep(600)")],
)
def test_a_function_that_hangs_is_a_timeout(head: str, code: str, stage: Any, function: Callable[..., str]) -> None:
    (trajectory,) = stage.play(function(code, head), timeout_s=0.3)
    assert trajectory.status is Status.TIMEOUT


def test_an_agent_opens_its_own_episode_and_claims_none(stage: Any, function: Callable[[str], str]) -> None:
    code = """server = episode.root_url.partition("/episodes/")[0]
    request = urllib.request.Request(f"{server}/episodes", b"{}", {"Content-Type": "application/json"})
    request.add_header("Authorization", f"Bearer {episode.api_key}")
    try:
        urllib.request.urlopen(request, timeout=5)
    except urllib.error.HTTPError as error:
        error.close()
        raise ValueError(error.code) from None"""
    (trajectory, _) = stage.play(function(code), num_episodes=2, parallel=1)
    assert trajectory.status is Status.AGENT_ERROR and "ValueError: 401" in str(trajectory.error)


def test_an_agent_without_a_folder_is_an_agent_error(stage: Any, function: Callable[[str], str]) -> None:
    code = "import shutil; shutil.rmtree(episode.folder.parent)"
    (_, trajectory) = stage.play(function(code), num_episodes=2, parallel=1)
    assert trajectory.status is Status.AGENT_ERROR and "no folder for an agent" in str(trajectory.error)


@pytest.mark.parametrize("text", ["x" * 140_000, "nul \0"], ids=["long", "nul"])
def test_a_prompt_that_no_command_can_have_is_an_agent_error(text: str, stage: Any) -> None:
    (trajectory,) = stage.play("true {prompt}", env=lambda: Long(text))
    assert trajectory.status is Status.AGENT_ERROR, trajectory


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "codx"}, "no agent 'codx': did you mean 'codex'?"),
        ({"name": "my-agent run"}, "write {prompt} where it goes"),
        ({"name": "no-such-program {prompt}", "unsafe": True}, "there is no program 'no-such-program'"),
        ({"name": "true {prompt}"}, "--agent.unsafe"),
        ({"name": "'true {prompt}", "unsafe": True}, "cannot be read"),
        ({"name": "nowhere.py:play"}, "no file 'nowhere.py'"),
        ({"name": "agentgym.rollout.agents.config:PROMPT"}, "is no function"),
        ({"name": "mini-swe-agent"}, "has no tool but a shell"),
        ({"name": "codex", "program": "/nowhere/codex"}, "codex is not installed: npm install -g @openai/codex@"),
        ({"name": "codex", "program": "python3"}, "take it untested with --agent.version 3."),
        ({"name": "codex", "program": "true"}, "prints no version"),
        ({"name": "true {prompt}", "version": "1.2.3"}, "are those of a harness"),
        ({"name": "codex", "timeout_s": 0}, "agent.timeout_s must be above 0"),
    ],
)
def test_a_mistake_is_one_line(settings: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, UnknownName)) as caught:
        check_agent(AgentConfig(**settings))
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_another_version_is_taken_where_it_is_named() -> None:
    version = ".".join(map(str, sys.version_info[:3]))
    check_agent(AgentConfig(name="codex", program=PYTHON, version=version))

"""The tools `python` and `shell` as an environment has them: state per episode, budgets, and what the model reads."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from agentgym.envs import Action, ToolEnv
from agentgym.errors import ConfigError
from agentgym.tools.code import CodeTools, shared_sandbox
from agentgym.tools.sandbox import SandboxLimits
from agentgym.types import Message, ToolCall

LIMITS = SandboxLimits(time_limit_s=2.0, memory_mb=256)


class Desk(ToolEnv):
    """A place to compute."""

    max_turns = 50

    def start(self, options: dict[str, Any]) -> str:
        return "Compute."


def ask(env: Desk, *calls: tuple[str, str]) -> list[str]:
    """The answers to calls of one turn."""
    tool_calls = tuple(
        ToolCall(f"c{n}", name, {"code" if name == "python" else "command": text})
        for n, (name, text) in enumerate(calls)
    )
    _, _, _, _, info = env.step(Action.from_message(Message("assistant", "", tool_calls=tool_calls)))
    return [message.content for message in info["messages"]]


@pytest.fixture
def desk() -> Any:
    opened: list[Desk] = []

    def open_desk(**settings: Any) -> Desk:
        env = Desk(tool_sources=[partial(CodeTools, **{"limits": LIMITS, **settings})])
        opened.append(env)
        env.reset(seed=0)
        return env

    yield open_desk
    for env in opened:
        env.close()


def test_variables_and_files_live_for_an_episode(desk: Callable[..., Desk]) -> None:
    env = desk()
    assert ask(env, ("python", "x = 41; open('f', 'w').write('kept')"))[0] == "4"
    assert ask(env, ("shell", "cat f"), ("python", "x + 1"), ("python", "y = 0")) == ["kept", "42", "(no output)"]
    env.reset(seed=0)
    assert "NameError" in ask(env, ("python", "x"))[0]
    assert "exit code 1" in ask(env, ("shell", "cat f"))[0]


@pytest.mark.long
def test_the_model_reads_how_a_program_ended(desk: Callable[..., Desk]) -> None:
    env = desk()
    ask(env, ("python", "x = 1"))
    stopped = ask(env, ("python", "x = 2\nprint('on')\nwhile True: pass"))[0]
    assert stopped == "on\n[it was stopped after 2 s; variables are as they were before this call]"
    assert ask(env, ("python", "x"))[0] == "1"
    assert ask(env, ("python", "1 / 0"))[0].endswith("ZeroDivisionError: division by zero\n[exit code 1]")
    lost = ask(env, ("python", "import os\nfor pid in (os.getppid(), os.getpid()): os.kill(pid, 9)"))[0]
    assert lost.endswith("variables and files are lost]")
    assert ask(env, ("python", "6 * 7"))[0] == "42"


def test_budgets_of_an_episode_are_kept_and_told(desk: Callable[..., Desk]) -> None:
    env = desk(max_calls=2)
    answers = [ask(env, ("python", "1"))[0] for _ in range(3)]
    assert answers == ["1", "1", "not run: this episode's 2 calls are used up"]
    env.reset(seed=0)
    assert ask(env, ("python", "1"))[0] == "1"
    env = desk(max_seconds=0.5)
    assert "it was stopped after 0.5 s" in ask(env, ("python", "while True: pass"))[0]
    assert ask(env, ("python", "1"))[0] == "not run: this episode's 0.5 seconds are used up"


def test_tools_are_chosen_by_name(desk: Callable[..., Desk]) -> None:
    assert "unknown tool 'shell'" in ask(desk(names=["python"]), ("shell", "ls"))[0]
    for wrong in ({"names": ["perl"]}, {"names": []}, {"max_calls": 0}, {"max_seconds": -1.0}):
        with pytest.raises(ConfigError):
            CodeTools(**wrong)


def test_a_fork_has_a_sandbox_of_its_own() -> None:
    ours = shared_sandbox("auto", LIMITS)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            own = shared_sandbox("auto", LIMITS)
            code = int(own is ours or own.run("print(6 * 7)").stdout != "42\n")
            own.close()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert ours is shared_sandbox("auto", LIMITS) and ours.run("print(1)").ok

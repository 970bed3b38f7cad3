"""Real harnesses, unchanged, play an environment with a scripted model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentgym.rollout.agents.agents import check_agent
from agentgym.rollout.agents.config import AgentConfig
from agentgym.rollout.agents.harnesses import HARNESSES
from agentgym.trajectory import Status

pytestmark = [pytest.mark.harness, pytest.mark.usefixtures("installed")]
CALL = '<tool_call>\n{"name": "NAME", "arguments": {"command": "COMMAND", "cmd": "COMMAND"}}\n</tool_call>'
SUBMIT = CALL.replace("NAME", "bash").replace("COMMAND", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")
UNREADABLE = '<tool_call>\n{"name": "NAME", "arguments": {"command": "ls\n</tool_call>'
SHELLS = ("bash", "shell", "exec_command", "Bash", "Read", "Write", "read", "write", "edit", "apply_patch")


def answer(name: str) -> str:
    """The last reply of a harness that knows the sum; mini-swe-agent ends with a call."""
    return f"It is 5.\n{SUBMIT}" if name == "mini-swe-agent" else "It is 5."


@pytest.mark.parametrize("name", HARNESSES)
def test_the_tested_version_is_installed(name: str) -> None:
    check_agent(AgentConfig(name=name, unsafe=bool(HARNESSES[name].needs_unsafe)))


@pytest.mark.parametrize("name", HARNESSES)
def test_a_harness_answers_and_its_answer_is_judged(name: str, stage: Any) -> None:
    (trajectory,) = stage.play(name, lambda prompt: answer(name))
    assert (trajectory.status, trajectory.reward) == (Status.COMPLETED, 1.0), (trajectory, stage.log())
    assert "What is 2 + 3?" in stage.prompts[0]


@pytest.mark.parametrize("name", HARNESSES)
def test_an_unreadable_call_is_answered_and_the_harness_goes_on(name: str, stage: Any) -> None:
    tool = {"codex": "request_user_input", "claude-code": "Agent", "opencode": "task"}.get(name, "bash")

    def say(prompt: str) -> str:
        return answer(name) if len(stage.prompts) > 1 else UNREADABLE.replace("NAME", tool)

    (trajectory,) = stage.play(name, say)
    if name == "pi":  # it has no tool here, so that the call is text, and its answer
        assert (trajectory.status, trajectory.reward) == (Status.COMPLETED, 0.0)
        return
    assert (trajectory.status, trajectory.reward) == (Status.COMPLETED, 1.0), (trajectory, stage.log())
    assert len(trajectory.turns) == 2


@pytest.mark.parametrize("name", HARNESSES)
def test_a_reply_that_was_cut_is_not_sampled_anew(name: str, stage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from agentgym.rollout.serving import http_server

    send, cuts = http_server._send, []

    async def cut_once(wire: Any, request: Any, *args: Any) -> Any:
        if not cuts:
            cuts.append(request.path)
            request.transport.abort()
            raise ConnectionResetError
        return await send(wire, request, *args)

    monkeypatch.setattr(http_server, "_send", cut_once)
    (trajectory,) = stage.play(name, lambda prompt: answer(name), timeout_s=120.0)
    assert (trajectory.status, trajectory.reward) == (Status.COMPLETED, 1.0), (trajectory, stage.log())
    assert cuts and len(stage.prompts) == 1


@pytest.mark.parametrize("name", [name for name, harness in HARNESSES.items() if not harness.needs_unsafe])
def test_the_shell_of_a_harness_is_off(name: str, stage: Any, tmp_path: Path) -> None:
    secret = tmp_path / "written"
    calls = "".join(CALL.replace("NAME", tool).replace("COMMAND", f"touch {secret}") for tool in SHELLS)

    def say(prompt: str) -> str:
        return answer(name) if len(stage.prompts) > 1 else calls

    stage.play(name, say, unsafe=False)
    assert not secret.exists()
    assert not any(f'"name": "{tool}"' in stage.prompts[0] for tool in SHELLS)


def test_a_full_window_that_ends_codex_is_no_failure_of_it(stage: Any) -> None:
    def say(prompt: str) -> str:
        return '<tool_call>\n{"name": "list_mcp_resources", "arguments": {}}\n</tool_call>' + "x" * 3000

    (trajectory,) = stage.play("codex", say, window=24_000)
    assert trajectory.status in (Status.UNPLAYED, Status.TRUNCATED), (trajectory, stage.log())


def test_pi_asks_for_no_summary_of_what_fits_a_small_window(stage: Any) -> None:
    (trajectory,) = stage.play("pi", lambda prompt: answer("pi"), window=12_000)
    assert (trajectory.status, trajectory.reward) == (Status.COMPLETED, 1.0), (trajectory, stage.log())
    assert len(stage.prompts) == 1

"""Environments of verifiers 0.4, played in a process of the interpreter that has it."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from agentgym.cli.main import main
from agentgym.envs import TextEnv, make_env
from agentgym.envs.adapters.verifiers_bridge import PROGRAM, bridge_to
from agentgym.envs.base.action import Action
from agentgym.errors import ConfigError, EnvironmentFault
from agentgym.types import MalformedCall, Message, ToolCall
from tests.envs.adapters.verifiers_kinds import KINDS

EXAMPLES = Path(__file__).parent / "examples" / "verifiers"
GLOSSARY, ECHO = EXAMPLES / "glossary", EXAMPLES / "echo_user_sim_v1.py"
FAULTS = Path(__file__).with_name("verifiers_faults.py")


def make(path: Path, python: Path, **settings: Any) -> TextEnv:
    return make_env(f"verifiers/{path}", {"python": str(python), **settings})


def processes() -> list[str]:
    """The commands of the processes that play environments."""
    commands = []
    for folder in Path("/proc").iterdir():
        try:
            commands.append((folder / "cmdline").read_bytes().decode().replace("\0", " "))
        except (OSError, UnicodeDecodeError):
            continue
    return [command for command in commands if str(PROGRAM) in command]


@pytest.mark.adapter
def test_tools_are_those_of_the_task_and_the_reward_is_its_own(verifiers_0_4_python: Path) -> None:
    env = make(GLOSSARY, verifiers_0_4_python)
    observation, _ = env.reset(seed=6)  # row 1 of 5
    assert observation.startswith('Use the `facts_lookup` tool to look up "Grace Hopper"')
    assert [spec.name for spec in env.tool_specs] == ["facts_lookup"]
    calls = (
        ToolCall("c1", "facts_lookup", {"name": "Grace Hopper"}),
        ToolCall("c2", "nope", {}),
        ToolCall("c3", "facts_lookup", {"nme": 1}),
        MalformedCall("c4", "{oops", "no JSON"),
    )
    _, reward, terminated, _, info = env.step(Action.from_message(Message("assistant", "", tool_calls=calls)))
    assert (reward, terminated) == (0.0, False)
    results = info["tool_results"]
    assert [result.error for result in results] == [None, "unknown_tool", "tool_error", "malformed"]
    assert [message.tool_call_id for message in info["messages"]] == ["c1", "c2", "c3", "c4"]
    _, reward, terminated, truncated, info = env.step(f"<answer>{results[0].content}</answer>")
    assert (reward, terminated, truncated) == (1.0, True, False)
    assert info["metrics"] == {"looked_up": 1.0, "success": 1.0}
    env.close()


@pytest.mark.adapter
def test_a_user_of_the_environment_answers_in_several_turns(verifiers_0_4_python: Path) -> None:
    env = make(ECHO, verifiers_0_4_python, phrases=["one", "two", "three"])
    _, info = env.reset(seed=0)
    assert [message.role for message in info["messages"]] == ["system", "user"]
    assert env.step("one")[:4] == ("two", 0.0, False, False)
    assert env.step("2")[0] == "three"
    assert env.step("three")[1:3] == (pytest.approx(2 / 3), True)
    env.close()


@pytest.mark.adapter
@pytest.mark.parametrize(("example", "sizes"), [(GLOSSARY, ("1", "2")), (ECHO, ("2", "4"))])
def test_examples_are_evaluated_and_trained_on(
    verifiers_0_4_python: Path, tmp_path: Path, example: Path, sizes: tuple[str, str]
) -> None:
    env = ["--env", f"verifiers/{example}", "--env-kwargs", f"python={verifiers_0_4_python}"]
    run = str(tmp_path / "run")
    assert main(["eval", *env, "--policy", "embedded", "-n", "1", "--output", str(tmp_path / "eval")]) == 0
    more = ["--tasks", sizes[0], "--group-size", sizes[1], "--eval.episodes", "0", "--limits.turn-tokens", "32"]
    assert main(["train", *env, "--steps", "2", *more, "--output", run]) == 0
    steps = [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]
    assert [step["failed"] for step in steps] == [0, 0]
    assert main(["verify", run]) == 0


@pytest.mark.adapter
def test_a_failure_is_a_fault_of_its_episode_and_nothing_is_left(verifiers_0_4_python: Path) -> None:
    env = make(FAULTS, verifiers_0_4_python, reply_timeout_s=15.0)
    reasons = {
        "raises": "the rollout failed: TaskError: task FaultyTask scoring: OSError: the scorer is broken",
        "pays no number": "the rollout failed: ValueError: Out of range float values",
        "sleeps": "the environment did nothing for 15 s",
        "dies": r"the rollout failed: its process ended: .*no more memory",
        "hangs": "the environment did nothing for 15 s",
    }
    for kind, reason in reasons.items():
        env.reset(options={"row": KINDS.index(kind)})  # after one that died, in another process
        with pytest.raises(EnvironmentFault, match=reason):
            env.step("x")
        env.reset(options={"row": KINDS.index("pays")})
        assert env.step("x")[1:3] == (1.0, True)
    env.reset(options={"row": KINDS.index("prints")})
    assert env.step("x")[1:3] == (1.0, True)
    env.reset(seed=0)
    env.close()
    bridge_to(str(verifiers_0_4_python), str(FAULTS), {}).process.close()
    until = time.monotonic() + 20
    while any("verifiers_faults" in command for command in processes()) and time.monotonic() < until:
        time.sleep(0.1)
    assert not [command for command in processes() if "verifiers_faults" in command]


@pytest.mark.adapter
@pytest.mark.parametrize(
    ("names", "reason"),
    [
        ("FaultyTaskset TwoEnv", r"has 2 agents \(first, second\); one is played"),
        ("FaultyTaskset ShellHarness", "brings the program 'verifiers_faults', which runs commands"),
        ("BoxTaskset", "need a container"),
        ("KINDS", "exports no Taskset subclass"),
    ],
)
def test_what_cannot_be_played_is_refused_by_name(
    verifiers_0_4_python: Path, monkeypatch: pytest.MonkeyPatch, names: str, reason: str
) -> None:
    monkeypatch.setenv("FAULTS", names)
    with pytest.raises(ConfigError, match=rf"verifiers cannot play .*{reason}"):
        make(FAULTS, verifiers_0_4_python)


@pytest.mark.adapter
def test_an_agent_that_runs_twice_is_a_fault(verifiers_0_4_python: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAULTS", "FaultyTaskset TwiceEnv")
    env = make(FAULTS, verifiers_0_4_python, kinds=["pays"])
    env.reset(seed=0)
    with pytest.raises(EnvironmentFault, match="runs its agent more than once in an episode"):
        env.step("x")
    env.close()


@pytest.mark.adapter
def test_an_interpreter_with_another_version_is_named_with_both(verifiers_python: Path) -> None:
    with pytest.raises(ConfigError, match=rf"{verifiers_python} has verifiers 0\.3\.1; 0\.4\.x is read"):
        make(ECHO, verifiers_python)


def test_an_interpreter_without_the_library_or_none_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"has verifiers \(none\); 0\.4\.x is read: python -m venv FOLDER"):
        make(ECHO, Path(sys.executable))
    with pytest.raises(ConfigError, match="python='nowhere/python' is no interpreter that runs"):
        make(ECHO, Path("nowhere/python"))
    with pytest.raises(ConfigError, match=r"Verifiers 0\.4 may be in an environment of its own"):
        make_env(f"verifiers/{ECHO}")

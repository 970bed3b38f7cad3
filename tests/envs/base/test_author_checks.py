"""Slips in an author's environment: each is met where it is made, with its line and what to write."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import agentgym
from agentgym.envs import Script, ScriptedPolicy, ToolEnv
from agentgym.errors import AgentGymError, ConfigError, EnvironmentFault
from agentgym.tools import tool


class Door(ToolEnv):
    """Opens at the first call."""

    max_turns = 3

    def start(self, options: dict[str, Any]) -> Any:
        return "A door."

    @tool
    def open(self, turns: int = 1) -> str:
        """Opens the door."""
        self.end(success=True, reward=1.0)
        return "open"


class WithoutSuper(Door):
    def __init__(self, **keywords: Any) -> None:
        self.level = 1


class HalfSuper(Door):
    def __init__(self) -> None:
        super(ToolEnv, self).__init__()


class HidesStep(Door):
    def __init__(self) -> None:
        super().__init__()
        self.step = 0  # type: ignore[assignment,method-assign]


class HidesClose(Door):
    def start(self, options: dict[str, Any]) -> str:
        self.close = "soon"  # type: ignore[assignment,method-assign]
        return "A door."


class OwnReset(Door):
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        return "A door.", {}


class StartsWithInfo(Door):
    def start(self, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        return "A door.", {}


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        (WithoutSuper, r"WithoutSuper\.__init__ must call super\(\)\.__init__"),
        (HalfSuper, r"HalfSuper\.__init__ must call super\(\)\.__init__"),
        (HidesStep, r"HidesStep: self\.step = 0 hides the method of this name"),
        (HidesClose, r"HidesClose: self\.close = 'soon' hides the method"),
        (OwnReset, r"OwnReset\.reset is not that of ToolEnv: write start\(self, options\)"),
        (StartsWithInfo, r"StartsWithInfo\.start returned a tuple: it returns the observation alone"),
    ],
)
def test_a_slip_is_met_before_the_first_turn(kind: Callable[[], ToolEnv], what: str) -> None:
    with pytest.raises(AgentGymError, match=what):
        kind().reset(seed=0)


def test_a_script_is_the_function_and_not_what_it_returns() -> None:
    with pytest.raises(ConfigError, match=r"got a generator: write ScriptedPolicy\(self\.solve\)"):
        ScriptedPolicy(open_once("A door."))  # type: ignore[arg-type]


def open_once(observation: str) -> Script:
    yield "open", {}


class EndsTwice(Door):
    @tool
    def open(self, turns: int = 1) -> str:
        """Opens the door."""
        self.end(success=True, reward=1.0)
        self.end(success=False)
        return "open"


class EndsInParallel(Door):
    @tool
    async def open(self, turns: int = 1) -> str:
        """Opens the door."""
        await asyncio.sleep(0.01 * turns)
        self.end(success=turns == 1, reward=float(turns))
        return "open"


@pytest.mark.parametrize("inline", [True, False])
def test_a_call_that_ends_an_episode_twice_is_a_fault_with_its_line(inline: bool) -> None:
    env = type("EndsTwice", (EndsTwice,), {"runs_inline": inline})()
    env.reset(seed=0)
    file = Path(__file__).name
    with pytest.raises(EnvironmentFault, match=rf"the first call said success=True: return after it \(.*{file}, line"):
        env.step("open")
    env.close()


def test_calls_that_end_an_episode_at_once_leave_the_verdict_of_the_first() -> None:
    env = EndsInParallel()
    env.reset(seed=0)
    calls = "".join(
        f"<tool_call>{json.dumps({'name': 'open', 'arguments': {'turns': turns}})}</tool_call>" for turns in (3, 1, 2)
    )
    _, reward, terminated, _, info = env.step(calls)
    assert (reward, terminated, info["metrics"]["success"]) == (1.0, True, 1.0)
    env.close()


class OwnStep(Door):
    """Plays turns without the tools, with a verdict or without."""

    verdict: bool = False

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "done", 1.0, True, False, {"metrics": {"success": 1.0}} if self.verdict else {}


def test_a_step_of_ones_own_gives_a_verdict_or_leaves_it_to_the_base() -> None:
    env = OwnStep()
    env.reset(seed=0)
    with pytest.raises(EnvironmentFault, match=r"OwnStep\.step ended an episode without a verdict: let super\("):
        env.step("open")
    env.verdict = True
    env.reset(seed=0)
    assert env.step("open")[4]["metrics"] == {"success": 1.0}
    env.close()


class OpensEarly(Door):
    def __init__(self, **keywords: Any) -> None:
        super().__init__(**keywords)
        self.store = sqlite3.connect(":memory:")

    def start(self, options: dict[str, Any]) -> str:
        self.store.execute("create table doors (n)")
        return "A door."


class OpensEarlyForTools(OpensEarly):
    def start(self, options: dict[str, Any]) -> str:
        return "A door."

    @tool
    def open(self, turns: int = 1) -> str:
        """Opens the door."""
        return str(self.store.execute("select 1").fetchall())

    def make_oracle(self) -> ScriptedPolicy:
        return ScriptedPolicy(open_once)


@pytest.mark.parametrize("kind", [OpensEarly, OpensEarlyForTools])
def test_a_connection_of_the_wrong_thread_says_where_to_open_it(kind: type[ToolEnv], tmp_path: Path) -> None:
    settings = {"num_tasks": 1, "progress": False, "output": tmp_path / "run"}
    policy = "oracle" if kind is OpensEarlyForTools else "random"
    with pytest.raises(AgentGymError, match=r"ProgrammingError.*Open it in start"):
        agentgym.evaluate(kind, policy, **settings)  # type: ignore[arg-type]


def test_a_setting_that_takes_a_class_refuses_an_object_of_it() -> None:
    with pytest.raises(ConfigError, match=r"setting 'env' is a text, got .*: give the class Door itself"):
        agentgym.TrainConfig(env=Door())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"setting 'model' is a text, got Linear\(.*\)$"):
        agentgym.TrainConfig(env=Door, model=torch.nn.Linear(1, 1))  # type: ignore[arg-type]


def test_typed_words_beyond_the_arguments_of_a_tool_are_named() -> None:
    env = Door()
    env.reset(seed=0)
    assert env.step("open 1 2")[0].startswith("invalid arguments for open: argument 'turns': '1 2' is not of type")
    assert "close takes no arguments, and more words" in Closed().reset_and_step("close it")


class Closed(Door):
    @tool(name="close")
    def shut(self) -> str:
        """Closes the door."""
        return "closed"

    def reset_and_step(self, action: str) -> str:
        self.reset(seed=0)
        return self.step(action)[0]

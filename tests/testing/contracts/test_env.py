"""`check_env` finds each kind of fault, and nothing in a sound environment."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest

from agentgym.envs import EnvCard, TextEnv, ToolEnv
from agentgym.envs.base.tool_env import HOOKS
from agentgym.testing import check_env, examine_env
from agentgym.testing.contracts.env import CHECKS, RELEASE
from agentgym.tools import tool
from agentgym.types import Message

EXAMPLE = Path(__file__).parents[3] / "examples" / "number_lock.py"
PAGE = Path(__file__).parents[3] / "docs" / "write_your_own.md"


class Sound(ToolEnv):
    """A sound environment."""

    system_prompt = "Guess."
    runs_inline = True
    max_turns = 4

    def start(self, options: dict[str, Any]) -> str:
        self.number = int(self.np_random.integers(10**6))
        return f"Room {self.number}."

    @tool
    def guess(self, value: int) -> str:
        """Guesses."""
        return f"You said {value}."


@pytest.mark.long
def test_a_sound_environment_has_no_findings() -> None:
    assert check_env(Sound) == []
    assert check_env(Sound()) == []
    assert check_env(f"{EXAMPLE}:NumberLock") == []


def test_the_example_fits_in_forty_lines() -> None:
    text = EXAMPLE.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 40


class IgnoresSeed(Sound):
    def start(self, options: dict[str, Any]) -> str:
        return "Always this."


NUMBERS = itertools.count()


class OtherEachTime(Sound):
    def start(self, options: dict[str, Any]) -> str:
        return f"Room {next(NUMBERS)} {self.np_random.integers(100)}."


class DropsObservation(Sound):
    def _opening_result(self, observation: str) -> tuple[str, dict[str, Any]]:
        return observation, {"messages": (Message("user", "something else"),)}


class Undescribed(Sound):
    @tool
    def guess(self, value: int) -> str:
        return f"You said {value}."


class LeavesFoldersOpen(Sound):
    def start(self, options: dict[str, Any]) -> str:
        warnings.warn("Implicitly cleaning up a folder", ResourceWarning, stacklevel=1)  # as a TemporaryDirectory does
        return super().start(options)


class LeaksMethods(Sound):
    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__(render_mode, tools=[self.surrender])

    def surrender(self) -> str:
        """Gives up."""
        return "You gave up."


class Unserialisable(Sound):
    def _opening_result(self, observation: str) -> tuple[str, dict[str, Any]]:
        return observation, {"state": {1, 2}}


class NoLimit(Sound):
    max_turns = None


class Pictures(Sound):
    @tool
    def guess(self, value: int) -> str:
        """Guesses."""
        return "data:image/png;base64,iVBORw0KGgo="


class Raises(Sound):
    def on_message(self, text: str) -> str:
        raise ValueError("no words")


class FailsSecondClose(Sound):
    closed = False

    def close(self) -> None:
        super().close()
        if self.closed:
            raise OSError("closed already")
        self.closed = True


class Plain(TextEnv):
    """Answers only some of what it is told."""

    max_turns = 3
    system_prompt = "Talk."

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        return f"Say {self.np_random.integers(1000)}.", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "Yes?", 0.0, False, False, {}


class PlainWithTools(Plain):
    @property
    def tool_specs(self) -> Any:
        return Sound().tool_specs


@pytest.mark.parametrize(
    ("env", "check"),
    [
        (IgnoresSeed, "ignored seed"),
        (OtherEachTime, "reproducible"),
        (DropsObservation, "dropped observation"),
        (LeaksMethods, "leaked methods"),
        (Undescribed, "tool schemas"),
        (Unserialisable, "unserialisable info"),
        (NoLimit, "no turn limit"),
        (Pictures, "images"),
        (Raises, "unanswered calls"),
        (PlainWithTools, "unanswered calls"),
        (FailsSecondClose, "close twice"),
    ],
)
def test_each_fault_is_found(env: type[TextEnv], check: str) -> None:
    if env is Raises:
        assert {finding.check for finding in check_env(env) if "ValueError: no words" in finding.message}
    else:
        (verdict,) = examine_env(env, only=[check])
        assert {finding.check for finding in verdict.findings} == {check}


def test_an_environment_without_tools_may_be_sound() -> None:
    assert check_env(Plain) == []


def test_folders_that_a_start_left_open_are_one_finding_with_advice() -> None:
    (verdict,) = examine_env(LeavesFoldersOpen, only=["Gymnasium"])
    (finding,) = verdict.findings
    assert "Implicitly cleaning up" in finding.message and RELEASE in finding.message


def test_the_page_has_each_check_and_each_field_and_its_example_is_sound(tmp_path: Path) -> None:
    page = PAGE.read_text(encoding="utf-8")
    names = [*CHECKS, *HOOKS, *(field.name for field in dataclasses.fields(EnvCard))]
    assert [name for name in names if f"`{name}`" not in page and f"`{name}(" not in page] == []
    example = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)[0]
    (tmp_path / "orders.py").write_text(example, encoding="utf-8")
    verdicts = examine_env(f"{tmp_path / 'orders.py'}:Orders", only=["card", "oracle", "canaries", "raising tools"])
    assert [(verdict.check, verdict.findings) for verdict in verdicts if verdict.findings] == []
    assert {verdict.check for verdict in verdicts if verdict.verdict == "passed"} >= {"oracle", "canaries"}


@pytest.mark.long
def test_findings_explain_what_to_do() -> None:
    (finding,) = check_env(NoLimit)
    assert finding.severity == "error"
    assert "set max_turns" in finding.message


def test_what_cannot_be_made_is_one_finding() -> None:
    def fail() -> TextEnv:
        raise OSError("no disk")

    (finding,) = check_env(fail)
    assert (finding.check, "OSError: no disk" in finding.message) == ("makes", True)
    (finding,) = check_env(lambda: 3)  # type: ignore[arg-type,return-value]
    assert "derive it from agentgym.envs.TextEnv" in finding.message


@pytest.mark.parametrize("check", [name for name in CHECKS if name != "makes"])
def test_every_environment_that_a_check_plays_is_closed(check: str) -> None:
    left: dict[int, Held] = {}

    class Held(Sound):
        def start(self, options: dict[str, Any]) -> str:
            left[id(self)] = self
            return super().start(options)

        def close(self) -> None:
            left.pop(id(self), None)
            super().close()

    examine_env(Held, only=[check])
    assert not left


class RaisesInStart(Sound):
    def start(self, options: dict[str, Any]) -> str:
        return f"Room {json.dumps(self.np_random.integers(5))}."


class ToolBehindWorker(Sound):
    @tool
    def guess(self, value: int) -> str:
        """Guesses."""
        return self.missing  # type: ignore[attr-defined,no-any-return]


@pytest.mark.parametrize("env", [RaisesInStart, ToolBehindWorker])
def test_a_fault_is_shown_with_the_line_of_the_environment(env: type[TextEnv]) -> None:
    messages = [finding.message for verdict in examine_env(env) for finding in verdict.findings]
    assert messages and all(__file__ in message for message in messages), messages


def test_a_name_of_a_tool_may_be_that_of_another_method() -> None:
    class Shop(Sound):
        @tool(name="close")
        def close_shop(self) -> str:
            """Closes the shop."""
            return "Closed."

    assert examine_env(Shop, only=["leaked methods"])[0].verdict == "passed"

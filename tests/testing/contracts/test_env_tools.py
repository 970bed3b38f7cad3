"""`env check` calls each tool, and shows what an environment prints only where a check failed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from agentgym.cli.main import main
from agentgym.envs import TextEnv, ToolEnv
from agentgym.errors import ToolFailure
from agentgym.testing import examine_env
from agentgym.testing.contracts.env import Verdict
from agentgym.tools import tool

SOURCE = '''
import sys

from agentgym.envs import ToolEnv
from agentgym.tools import tool


class R(ToolEnv):
    """Its only tool raises in every call."""

    system_prompt = "Go."
    max_turns = 3

    def start(self, options):
        print("starting", file=sys.stderr)
        return f"Start {self.np_random.integers(1000)}."

    @tool
    def go(self) -> str:
        """Goes."""
        for number in range(100):
            print("step", number)
        return {}["nope"]
'''


class Shop(ToolEnv):
    """A shop with one lamp."""

    system_prompt = "Buy."
    runs_inline = True
    max_turns = 4

    def start(self, options: dict[str, Any]) -> str:
        self.stock = {"lamp": 3}
        return f"Shop {self.np_random.integers(10**6)}."


class RefusesUnknown(Shop):
    @tool
    def price(self, item: str) -> int:
        """Shows a price."""
        if item not in self.stock:
            raise ToolFailure(f"there is no {item!r}")
        return self.stock[item]


class RaisesUnknown(Shop):
    @tool
    def price(self, item: str) -> int:
        """Shows a price."""
        if item not in self.stock:
            raise ValueError(f"there is no {item!r}")
        return self.stock[item]


class LooksUp(Shop):
    @tool
    def price(self, item: str) -> int:
        """Shows a price."""
        return self.stock[item]


class LooksUpAnotherKey(Shop):
    @tool
    def price(self, item: str) -> int:
        """Shows a price."""
        return self.stock["prices"]


class IsDown(Shop):
    @tool
    async def price(self, item: str) -> int:
        """Shows a price."""
        raise ConnectionError("the price server is down")


class IsUndefined(Shop):
    @tool
    def price(self, item: str) -> int:
        """Shows a price."""
        return self.prices[item]  # type: ignore[attr-defined,no-any-return]


def verdict(env: type[TextEnv]) -> Verdict:
    (report,) = examine_env(env, only=["raising tools"])
    return report


@pytest.mark.parametrize("env", [RefusesUnknown, RaisesUnknown])
def test_a_tool_that_refuses_its_arguments_passes(env: type[TextEnv]) -> None:
    assert verdict(env).verdict == "passed"


def test_a_tool_that_fails_over_every_argument_is_a_warning() -> None:
    report = verdict(LooksUp)
    assert report.verdict == "warned"
    assert "price raised in each of 4 calls that fit its schema: KeyError" in report.findings[0].message


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (LooksUpAnotherKey, "KeyError"),
        (IsDown, "ConnectionError"),
        (IsUndefined, "AttributeError"),
    ],
)
def test_a_tool_that_raises_for_no_argument_fails_with_its_place(env: type[TextEnv], message: str) -> None:
    report = verdict(env)
    assert report.verdict == "failed"
    line = env.price.__code__.co_firstlineno + 3  # type: ignore[attr-defined]
    assert f"{message} ({__file__}, line {line})" in report.findings[0].message


@pytest.mark.long
def test_env_check_fails_if_the_only_tool_raises_and_shortens_its_output(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "raise2.py"
    file.write_text(SOURCE, encoding="utf-8")
    assert main(["env", "check", f"{file}:R", "--json"]) == 1
    out, err = capfd.readouterr()
    report_json = json.loads(out.splitlines()[-1])
    (finding,) = report_json["findings"]
    assert finding["check"] == "raising tools"
    assert f"go({{}}) raised KeyError ({file}, line 23): 'nope'" in finding["message"]
    lines_shown = [line for line in f"{out}{err}".splitlines() if re.match(r"step \d|starting|\(the last", line)]
    assert re.fullmatch(r"\(the last of \d{3,} lines\)", lines_shown[0])  # how many depends on the other checks
    assert lines_shown[1:] == [f"step {number}" for number in range(95, 100)]


def test_what_a_sound_environment_prints_is_not_shown(capfd: pytest.CaptureFixture[str]) -> None:
    class Talks(RefusesUnknown):
        def start(self, options: dict[str, Any]) -> str:
            print("starting")
            return super().start(options)

    assert all(verdict.printed == "" for verdict in examine_env(Talks, only=["makes", "reproducible", "raising tools"]))
    assert capfd.readouterr() == ("", "")

"""Every environment under examples/ passes the checks that its author would run."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path

import pytest

from agentgym.cli.main import main
from agentgym.envs import TextEnv

AGENTS = {"black_box_agent"}
"""Examples that play environments; the tests of `agentgym serve` run them."""
FILES = (Path(__file__).parents[2] / "examples").glob("*.py")
REWARDS = {"custom_reward"}
"""Examples that score episodes; tests/rewards/test_example.py runs them."""
EXAMPLES = sorted(path.stem for path in FILES if path.stem[0] != "_" and path.stem not in AGENTS | REWARDS)


def environments(module: str) -> list[str]:
    classes = inspect.getmembers(importlib.import_module(f"examples.{module}"), inspect.isclass)
    own = [name for name, one in classes if issubclass(one, TextEnv) and one.__module__ == f"examples.{module}"]
    return [f"examples.{module}:{name}" for name in own]


@pytest.mark.parametrize("module", EXAMPLES)
def test_an_example_is_sound(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert environments(module)
    for name in environments(module):
        assert main(["env", "check", name]) == 0, capsys.readouterr().out

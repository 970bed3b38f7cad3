"""The package has exactly the size that `.ci/size.toml` gives: it grows only in a commit that raises a number there."""

from __future__ import annotations

import ast
import tomllib
from collections import Counter
from pathlib import Path

import pytest
import yaml

from agentgym.cli.main import COMMANDS, main

ROOT = Path(__file__).parent.parent
SIZES = tomllib.loads((ROOT / ".ci" / "size.toml").read_text(encoding="utf-8"))
ADVICE = """.ci/size.toml holds other numbers: write these there. A commit that raises a number gives the reason in its
message; before that, look for what can go."""


def count_code_lines(source: str) -> int:
    """Number of lines of a module that are not blank, a comment alone, or part of a docstring."""
    text = {
        number
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for number in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    lines = enumerate(source.splitlines(), start=1)
    return sum(number not in text and line.strip() != "" and line.strip()[0] != "#" for number, line in lines)


def count_leaves(settings: object) -> int:
    """Number of values in nested settings; a block without any counts as one."""
    return sum(map(count_leaves, settings.values())) if isinstance(settings, dict) and settings else 1


def test_only_code_is_counted() -> None:
    source = '''"""A module
of two lines."""

# why
x = 1  # one


def f() -> int:
    """One."""
    return x
'''
    assert count_code_lines(source) == 3


def test_each_room_has_the_lines_of_the_table() -> None:
    lines: Counter[str] = Counter()
    for path in (ROOT / "agentgym").rglob("*.py"):
        room = path.relative_to(ROOT / "agentgym").parts[:-1]
        lines[room[0] if room else "floor 0"] += count_code_lines(path.read_text(encoding="utf-8"))
    assert dict(lines) == SIZES["code_lines"], ADVICE


def test_train_has_the_settings_and_the_command_line_the_commands_of_the_table(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["train", "--env", "TextGame-v0", "--print-config"]) == 0
    settings = yaml.safe_load(capsys.readouterr().out)
    assert {"settings_of_train": count_leaves(settings), "commands": len(COMMANDS)} == SIZES["command_line"], ADVICE

"""The house style that no linter checks: small files, small functions, names that say what is inside, and a package of
exactly the size that `.ci/size.toml` gives, which grows only in a commit that raises a number there."""

from __future__ import annotations

import ast
import functools
import tomllib
from collections import Counter
from pathlib import Path

import pytest
import yaml

from agentgym.cli.main import COMMANDS, main
from tests.syntax_trees import parse_file, walk_statements

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "agentgym").rglob("*.py"))
ATTICS = {"utils", "util", "helpers", "common", "misc", "manager", "managers"}
SIZES = tomllib.loads((ROOT / ".ci" / "size.toml").read_text(encoding="utf-8"))
ADVICE = """.ci/size.toml holds other numbers: write these there. A commit that raises a number gives the reason in its
message; before that, look for what can go."""


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@functools.cache
def measure_file(path: Path) -> tuple[int, dict[str, int]]:
    """Returns the number of lines that are not blank, a comment alone or part of a docstring, and the length of each
    function; of those with one name, of the longest."""
    text, functions = set(), {}
    for node in walk_statements(parse_file(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            functions[node.name] = max(length, functions.get(node.name, 0))
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            text.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
    code = sum(number not in text and line.strip() != "" and line.strip()[0] != "#" for number, line in lines)
    return code, functions


def count_leaves(settings: object) -> int:
    """Number of values in nested settings; a block without any counts as one."""
    return sum(map(count_leaves, settings.values())) if isinstance(settings, dict) and settings else 1


def test_every_file_is_under_400_lines() -> None:
    lengths = {relative(path): len(path.read_text(encoding="utf-8").splitlines()) for path in SOURCES}
    assert not {path: length for path, length in lengths.items() if length >= 400}


def test_every_function_is_under_50_lines() -> None:
    lengths = {f"{relative(path)}:{name}": length for path in SOURCES for name, length in measure_file(path)[1].items()}
    assert len(lengths) > len(SOURCES)
    assert not {function: length for function, length in lengths.items() if length >= 50}


def test_no_file_is_an_attic() -> None:
    attics = [relative(path) for path in SOURCES if ATTICS & {path.stem, path.parent.name}]
    assert not attics


def test_only_code_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(
        '"""A module\nof two lines."""\n\n# why\nx = 1  # one\n\n\ndef f() -> int:\n    """One."""\n    return x\n',
        encoding="utf-8",
    )
    assert measure_file(path) == (3, {"f": 3})


def test_each_room_has_the_lines_of_the_table() -> None:
    lines: Counter[str] = Counter()
    for path in SOURCES:
        folders = path.relative_to(ROOT / "agentgym").parts[:-1]
        lines[folders[0] if folders else "floor 0"] += measure_file(path)[0]
    assert dict(lines) == SIZES["code_lines"], ADVICE


def test_train_has_the_settings_and_the_command_line_the_commands_of_the_table(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["train", "--env", "TextGame-v0", "--print-config"]) == 0
    settings = yaml.safe_load(capsys.readouterr().out)
    assert {"settings_of_train": count_leaves(settings), "commands": len(COMMANDS)} == SIZES["command_line"], ADVICE

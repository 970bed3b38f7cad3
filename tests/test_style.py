"""The house style that no linter checks: small files, small functions, names that say what is inside."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.syntax_trees import parse_file, walk_statements

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "agentgym").rglob("*.py"))
ATTICS = {"utils", "util", "helpers", "common", "misc", "manager", "managers"}


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_every_file_is_under_400_lines() -> None:
    lengths = {relative(path): len(path.read_text(encoding="utf-8").splitlines()) for path in SOURCES}
    assert not {path: length for path, length in lengths.items() if length >= 400}


def test_every_function_is_under_50_lines() -> None:
    lengths = {
        f"{relative(path)}:{node.name}": node.end_lineno - node.lineno + 1
        for path in SOURCES
        for node in walk_statements(parse_file(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno
    }
    assert len(lengths) > len(SOURCES)
    assert not {function: length for function, length in lengths.items() if length >= 50}


def test_no_file_is_an_attic() -> None:
    attics = [relative(path) for path in SOURCES if ATTICS & {path.stem, path.parent.name}]
    assert not attics

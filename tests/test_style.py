"""The house style that no linter checks: small files, small functions, names that say what is inside."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "agentgym").rglob("*.py"))
ATTICS = {"utils", "util", "helpers", "common", "misc", "manager", "managers"}


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_a_file_is_under_400_lines(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) < 400


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_a_function_is_under_50_lines(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    long = {f.name: f.end_lineno - f.lineno + 1 for f in functions if f.end_lineno and f.end_lineno - f.lineno >= 49}
    assert not long


def test_no_file_is_an_attic() -> None:
    attics = [relative(path) for path in SOURCES if ATTICS & {path.stem, path.parent.name}]
    assert not attics

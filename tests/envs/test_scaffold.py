"""The environment that a user starts from."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from agentgym.envs.scaffold import new_env
from agentgym.errors import ConfigError
from agentgym.testing import check_env

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["number_lock", "number-lock", "NumberLock"])
def test_a_new_environment_is_short_and_passes_its_check(name: str, tmp_path: Path) -> None:
    path, test = new_env(name, tmp_path / "new")
    assert (path.name, test.name) == ("number_lock.py", "test_number_lock.py")
    lines = path.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 100
    assert check_env(f"{path}:NumberLock") == []


def test_its_test_passes(tmp_path: Path) -> None:
    _, test = new_env("Lock", tmp_path)
    code = f"import runpy; tests = runpy.run_path({str(test)!r}); [f() for n, f in tests.items() if n[:5] == 'test_']"
    subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=ROOT, check=True)


def test_names_and_files_in_the_way_are_refused(tmp_path: Path) -> None:
    for name in ("", "9lives", "a b", "class", "../x"):
        with pytest.raises(ConfigError, match="cannot name"):
            new_env(name, tmp_path)
    new_env("lock", tmp_path)
    with pytest.raises(ConfigError, match="exists already"):
        new_env("lock", tmp_path)

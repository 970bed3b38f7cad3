"""`agentgym new`: what is written works as it is, and so does every command that is shown for it."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentgym.cli.scaffold import KINDS, write_scaffold
from agentgym.errors import ConfigError
from agentgym.testing import check_env

Command = Callable[..., Any]
ROOT = Path(__file__).parents[2]
NEW = {
    "env": ("new", "env", "number-lock"),
    "tool": ("new", "tool", "count_words"),
    "reward": ("new", "reward", "SolvedFast"),
    "reward_math": ("new", "reward", "right_number", "--task", "math"),
    "reward_code": ("new", "reward", "right_program", "--task", "code"),
    "reward_qa": ("new", "reward", "right_answer", "--task", "qa"),
    "advantage": ("new", "algorithm", "my_credit"),
    "sampler": ("new", "sampler", "rising-levels"),
    "optimizer": ("new", "optimizer", "my_descent"),
    "engine": ("new", "engine", "counting-engine"),
    "renderer": ("new", "renderer", "plain-json"),
    "loss": ("new", "algorithm", "my_loss", "--kind", "loss"),
}


def python(*args: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, *map(str, args)]
    return subprocess.run(words, cwd=cwd, capture_output=True, text=True, timeout=280, check=False)


def test_every_kind_is_tried_here() -> None:
    assert set(NEW) == set(KINDS)


@pytest.mark.slow
def test_the_written_tests_pass_with_plain_pytest(agentgym: Command, tmp_path: Path) -> None:
    tests = []
    for kind, words in NEW.items():
        result = agentgym(*words, "--output", "mine", "--json")
        assert result.code == 0, result.err
        path, test = result.json["files"]
        assert Path(test).name == f"test_{Path(path).name}", kind
        assert result.json["commands"][-1] == f"pytest {test}" and f"wrote {path} and {test}" in result.text
        tests.append(test)
    done = python("-m", "pytest", "-v", "-p", "no:cacheprovider", *tests, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(done.stdout.count(f"{Path(test).name}::") >= 2 for test in tests), done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("kind", NEW)
def test_the_shown_commands_work_unmodified(kind: str, agentgym: Command) -> None:
    result = agentgym(*NEW[kind], "--json")
    commands = [line.removeprefix("next:").strip() for line in result.err.splitlines()[1:]]
    assert commands == result.json["commands"] and len(commands) >= 2
    for command in commands[:-1]:
        done = agentgym(*shlex.split(command)[1:], typed="help\nquit\n")
        assert done.code == 0, f"{command}: {done.err}"


@pytest.mark.parametrize("kind", NEW)
def test_the_files_are_short_and_as_ruff_writes_them(kind: str, agentgym: Command, tmp_path: Path) -> None:
    path, test = (Path(name) for name in agentgym(*NEW[kind], "--output", "mine", "--json").json["files"])
    assert len(path.read_text().splitlines()) <= 50 and len(test.read_text().splitlines()) <= 40
    rules = ("check", "--isolated", "--no-cache", "--select", "E,F,I,UP,B,SIM,RUF", "mine")
    for words in (rules, ("format", "--isolated", "--no-cache", "--diff", "mine")):
        done = python("-m", "ruff", *words, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_the_files_are_typed(agentgym: Command, tmp_path: Path) -> None:
    for words in NEW.values():
        agentgym(*words, "--output", "mine")
    files = sorted(str(path) for path in (tmp_path / "mine").glob("*.py"))
    assert len(files) == 2 * len(NEW)
    options = ("--config-file", ROOT / "pyproject.toml", "--strict", "--cache-dir", ROOT / ".mypy_cache")
    done = python("-m", "mypy", *options, *files, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_place_with_a_space_is_quoted_in_the_shown_commands(agentgym: Command) -> None:
    result = agentgym("new", "tool", "count", "--output", "my tools", "--json")
    assert result.json["tool"] == "my tools/count.py:count"
    assert agentgym(*shlex.split(result.json["commands"][0])[1:]).code == 0


def test_env_new_is_new_env(agentgym: Command) -> None:
    first = agentgym("new", "env", "lock", "--output", "a", "--json")
    second = agentgym("env", "new", "lock", "--output", "b", "--json")
    assert Path("a/lock.py").read_text() == Path("b/lock.py").read_text()
    assert second.json["commands"] == [command.replace("a/", "b/") for command in first.json["commands"]]


@pytest.mark.long
@pytest.mark.parametrize("name", ["number_lock", "number-lock", "NumberLock"])
def test_a_new_environment_keeps_its_contract_however_its_name_is_spelled(name: str, tmp_path: Path) -> None:
    scaffold = write_scaffold("env", name, tmp_path / "new")
    assert [path.name for path in scaffold.files] == ["number_lock.py", "test_number_lock.py"]
    assert scaffold.code_path == f"{scaffold.files[0]}:NumberLock"
    assert check_env(scaffold.code_path) == []


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "cannot name a tool; use letters, digits and _, such as 'my_tool'"),
        ("9lives", "such as 'lives'"),
        ("a b", "such as 'a_b'"),
        ("../x", "such as 'x'"),
        ("!json!", "such as 'my_json'"),
        ("class", "it is a word of Python's; take another, such as 'my_class'"),
        ("match", "it is a word of Python's; take another, such as 'my_match'"),
        ("json", r"json\.py would hide the module 'json'"),
        ("Torch", r"torch\.py would hide the module 'torch'; take another, such as 'my_torch'"),
        ("agentgym", "would hide the module 'agentgym'"),
        ("tool", "a name that the file itself needs; take another, such as 'my_tool'"),
    ],
)
def test_a_name_that_cannot_be_is_refused_with_one_that_can(name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        write_scaffold("tool", name, tmp_path)
    assert list(tmp_path.iterdir()) == []
    suggested = re.findall(r"such as '(\w+)'", str(caught.value)) or ["my_agentgym"]
    assert write_scaffold("tool", suggested[0], tmp_path).files[0].exists()


@pytest.mark.parametrize("name", ["lock.py", "test_lock.py"])
def test_nothing_is_overwritten(name: str, agentgym: Command) -> None:
    Path(name).write_text("mine")
    done = agentgym("new", "env", "lock")
    assert done.code == 2 and f"'{name}' exists already" in done.err
    assert Path(name).read_text() == "mine"
    assert sorted(path.name for path in Path().glob("*lock.py")) == [name]


def test_a_folder_that_cannot_be_written_is_told(agentgym: Command) -> None:
    done = agentgym("new", "env", "lock", "--output", "/proc/mine")
    assert done.code == 2 and "cannot write into '/proc/mine'" in done.err


def test_a_package_is_a_folder_as_ruff_writes_it_and_its_commands_name_it(agentgym: Command, tmp_path: Path) -> None:
    result = agentgym("new", "env", "NumberLock", "--package", "--output", "my envs", "--json")
    folder = tmp_path / "my envs" / "number-lock"
    written = sorted(path.relative_to(tmp_path) for path in folder.rglob("*") if path.is_file())
    assert sorted(map(Path, result.json["files"])) == written and len(written) == 6
    assert result.json["env"] == "NumberLock-v0"
    assert result.json["commands"][0] == "pip install -e './my envs/number-lock[test]'"
    for words in (("check", "--select", "E,F,I,UP,B,SIM,RUF"), ("format", "--diff")):
        done = python("-m", "ruff", words[0], "--isolated", "--no-cache", *words[1:], folder, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
    again = agentgym("env", "new", "number-lock", "--package", "--output", "my envs")
    assert again.code == 2 and again.text == (
        "error: 'my envs/number-lock' exists already; choose another name, or another folder by --output\n"
    )

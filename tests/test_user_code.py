"""What a user names by place is found, and what is not there or raises is told as theirs."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentgym.errors import ConfigError, UnknownName, UserCodeFault
from agentgym.user_code import blamed, load_object


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with two functions and an import, where commands are run."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "own_parts.py"
    path.write_text("from math import sqrt\ndef double(x): return 2 * x\ndef triple(x): return 3 * x\n")
    return path


def test_a_part_is_found_by_file_and_by_module_and_loaded_once(parts: Path) -> None:
    by_file = load_object(f"{parts}:double", "part")
    assert callable(by_file) and by_file(4) == 8
    assert load_object("own_parts.py:double", "part") is by_file
    by_module = load_object("own_parts:triple", "part")
    assert callable(by_module) and by_module(4) == 12
    assert load_object("own_parts:triple", "part") is by_module


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("own_parts.py:duble", "'own_parts.py' has no part 'duble': did you mean 'double'? `make` makes one."),
        ("own_parts.py:zzzz", "'own_parts.py' has no part 'zzzz'; it has double, triple. `make` makes one."),
        ("nowhere.py:double", "no file 'nowhere.py'. `make` makes one."),
        ("no_such_parts:double", "no module 'no_such_parts' for the part 'no_such_parts:double'; give "),
    ],
)
def test_what_is_not_there_is_told_with_the_nearest_and_what_to_do(parts: Path, name: str, told: str) -> None:
    with pytest.raises(UnknownName) as caught:
        load_object(name, "part", "`make` makes one.")
    assert str(caught.value).startswith(told)


def test_a_long_list_of_names_is_cut(parts: Path) -> None:
    parts.write_text("".join(f"def part_{number}(): ...\n" for number in range(20)))
    with pytest.raises(UnknownName, match=r"it has part_0, .*part_7, and more\."):
        load_object("own_parts.py:zzzz", "part")


@pytest.mark.parametrize("name", ["own_parts.py", "own_parts.py:", ":double"])
def test_a_place_without_a_name_is_refused(parts: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"write 'path/to/file\.py:name'"):
        load_object(name, "part")


@pytest.mark.parametrize("text", ["import no_such_library", "def broken(:", "1 / 0"])
def test_a_module_that_raises_is_the_users_fault_whenever_it_is_loaded(parts: Path, text: str) -> None:
    parts.write_text(text)
    for _ in range(2):
        with pytest.raises(UserCodeFault, match=r"own_parts\.py:double cannot be loaded: \w+Error: "):
            load_object("own_parts.py:double", "part")


def test_our_own_errors_and_an_interrupt_are_blamed_on_nobody() -> None:
    for error in (ConfigError("a setting"), KeyboardInterrupt()):
        with pytest.raises(type(error)) as caught, blamed("the part"):
            raise error
        assert caught.value is error
    with pytest.raises(UserCodeFault, match="the part: KeyError: 'x'") as blame, blamed("the part"):
        {}["x"]
    assert isinstance(blame.value.__cause__, KeyError)

"""What a user names in code of their own is found, in a module or a file; what is not there or raises is theirs."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from agentgym.errors import ConfigError, UnknownName, UserCodeFault
from agentgym.loading import Wanted, convert_user_errors, is_code_path, load_module, load_named

SCORE = Wanted(noun="scorer", example="function", hint="See `scorers`.", new="write one")


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_scores.py").write_text("from json import dumps\nbest = 3\ndef exact(): return 1\n")


def test_a_function_is_found_by_file_and_module() -> None:
    for place in ("own_scores.py", "./own_scores.py", "own_scores"):
        assert load_named(f"{place}:exact", SCORE)() == 1  # type: ignore[operator]
        assert load_named(f"{place}:best", SCORE) == 3
    assert load_named("own_scores.py:exact", SCORE) is load_named("./own_scores.py:exact", SCORE)


def test_threads_that_load_a_file_at_once_have_the_whole_of_it(tmp_path: Path) -> None:
    (tmp_path / "slow_scores.py").write_text("import time\ntime.sleep(0.2)\ndef exact(): return 1\n")
    with ThreadPoolExecutor(4) as threads:
        functions = list(threads.map(lambda _: load_named("slow_scores.py:exact", SCORE), range(4)))
    assert len(set(map(id, functions))) == 1


def test_a_file_is_the_same_module_in_every_process() -> None:
    program = (
        "from agentgym.loading import *; print(load_module('own_scores.py', '', Wanted(noun='', hint='')).__name__)"
    )
    names = {
        subprocess.check_output([sys.executable, "-c", program], env={**os.environ, "PYTHONHASHSEED": seed})
        for seed in "12"
    }
    assert len(names) == 1 and next(iter(names)).startswith(b"agentgym_user_own_scores_")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("own_scores.py:exat", "'own_scores.py' has no scorer 'exat': did you mean 'exact'? See `scorers`."),
        ("own_scores:f1", "'own_scores' has no scorer 'f1'; it has exact. See `scorers`."),
        ("none.py:exact", "no file 'none.py'; write one"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(name: str, message: str) -> None:
    with pytest.raises(UnknownName) as caught:
        load_named(name, SCORE)
    assert str(caught.value) == message


def test_a_long_list_of_names_is_cut() -> None:
    Path("many_scores.py").write_text("".join(f"def score_{number}(): ...\n" for number in range(20)))
    with pytest.raises(UnknownName, match=r"it has score_0, .*score_7, and more\. See"):
        load_named("many_scores.py:zzzz", SCORE)


@pytest.mark.parametrize("name", ["own_scores.py", "own_scores.py:", ":exact"])
def test_a_place_without_a_name_is_refused(name: str) -> None:
    assert is_code_path(name) and not is_code_path("exact")
    with pytest.raises(ConfigError, match=r"names no scorer: write 'path/to/file\.py:function'"):
        load_named(name, SCORE)


def test_a_module_that_is_not_there_is_told() -> None:
    with pytest.raises(UnknownName, match="no module 'no_scores' for the scorer 'no_scores:exact'; give 'path/to/file"):
        load_named("no_scores:exact", SCORE)


@pytest.mark.parametrize("text", ["import no_such_library", "def broken(:", "1 / 0"])
@pytest.mark.parametrize("place", ["torn_scores.py", "torn_scores"])
def test_a_module_that_raises_is_the_users_fault_whenever_it_is_loaded(place: str, text: str) -> None:
    Path("torn_scores.py").write_text(text)
    for _ in range(2):
        with pytest.raises(UserCodeFault, match=rf"{place}:exact cannot be loaded: \w+Error: ") as caught:
            load_named(f"{place}:exact", SCORE)
        with pytest.raises(UserCodeFault):
            load_module(place, f"{place}:exact", SCORE)
        assert isinstance(caught.value.__cause__, (ModuleNotFoundError, SyntaxError, ZeroDivisionError))


def test_our_own_errors_and_an_interrupt_are_blamed_on_nobody() -> None:
    for error in (ConfigError("a setting"), KeyboardInterrupt()):
        with pytest.raises(type(error)) as caught, convert_user_errors("the part"):
            raise error
        assert caught.value is error
    with pytest.raises(UserCodeFault, match="the part: KeyError: 'x'") as blame, convert_user_errors("the part"):
        {}["x"]
    assert isinstance(blame.value.__cause__, KeyError)

"""What a user names in code of their own is found, in a module or a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentgym.errors import UnknownName
from agentgym.loading import Wanted, load_named

SCORE = Wanted(noun="scorer", example="function", hint="See `scorers`", new="write one")


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


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("own_scores.py:exat", "'own_scores.py' has no 'exat': did you mean 'exact'?. See `scorers`"),
        ("own_scores:f1", "'own_scores' has no 'f1'; it has exact. See `scorers`"),
        ("none.py:exact", "no file 'none.py'; write one"),
    ],
)
def test_a_name_that_leads_nowhere_is_told_with_the_nearest(name: str, message: str) -> None:
    with pytest.raises(UnknownName) as caught:
        load_named(name, SCORE)
    assert str(caught.value) == message


def test_a_module_that_is_not_there_is_told_and_one_that_lacks_a_library_says_so() -> None:
    with pytest.raises(UnknownName, match="no module 'no_scores' for the scorer 'no_scores:exact'; give 'path/to/file"):
        load_named("no_scores:exact", SCORE)
    Path("torn_scores.py").write_text("import no_such_library\n")
    with pytest.raises(ModuleNotFoundError, match="no_such_library"):
        load_named("torn_scores:exact", SCORE)

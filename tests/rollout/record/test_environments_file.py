"""`environments.json` names what a run was played on, and a change shows when it goes on or is compared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentgym.cli.main import main
from agentgym.envs.catalog.identity import digest_of_files
from agentgym.errors import RunFolderError
from agentgym.rollout.record.environments_file import read_environments, record_environments

LOCK = Path(__file__).parents[3] / "examples" / "number_lock.py"
SMALL = "--steps 1 --tasks 2 --group-size 2 --eval.episodes 0 --output run".split()


def test_a_change_of_an_environment_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lock = tmp_path / "lock.py"
    lock.write_text("x = 1\n")
    names = [f"{lock}:Lock", "TextGame-v0", f"{lock}:Lock"]
    record_environments(tmp_path, names)
    first = read_environments(tmp_path)
    assert sorted(first) == sorted(set(names)) and first["TextGame-v0"]["package"] == "agentgym-llm"
    record_environments(tmp_path, names)
    assert caplog.records == []
    lock.write_text("x = 2\n")
    digest_of_files.cache_clear()
    record_environments(tmp_path, names)
    assert [f"{lock}:Lock has changed since the run" in record.getMessage() for record in caplog.records] == [True]
    assert read_environments(tmp_path) == first  # what it began with


def test_a_malformed_file_is_an_error_and_a_missing_one_is_not(tmp_path: Path) -> None:
    assert read_environments(tmp_path) == {}
    (tmp_path / "environments.json").write_text("{")
    with pytest.raises(RunFolderError, match=r"environments\.json' cannot be read"):
        read_environments(tmp_path)


def test_compare_names_an_environment_that_changed_in_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("lock.py").write_text(LOCK.read_text())
    words = "eval --env lock.py:NumberLock --policy random -n 2 --output".split()
    assert main([*words, "a"]) == main([*words, "b"]) == 0
    assert main(["compare", "a", "b"]) == 0 and "not the same" not in capsys.readouterr().out
    with open("lock.py", "a") as file:
        file.write("# changed\n")
    digest_of_files.cache_clear()
    assert main([*words, "c"]) == main(["compare", "a", "b", "c"]) == 0
    assert "lock.py:NumberLock is not the same in a and c: its code or its data" in capsys.readouterr().out


@pytest.mark.long
def test_a_training_run_has_the_file_and_its_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--mix", "TextGame-v0=1", "GuessNumber-v0=1", *SMALL]) == 0
    assert sorted(read_environments(Path("run"))) == ["GuessNumber-v0", "TextGame-v0"]
    assert main(["verify", "run"]) == 0
    cards = json.loads(Path("run/environments.json").read_text())
    cards["TextGame-v0"]["package_version"] = "9"
    Path("run/environments.json").write_text(json.dumps(cards))
    capsys.readouterr()
    assert main(["verify", "run"]) == 1 and "environments.json is not as it was written" in capsys.readouterr().out

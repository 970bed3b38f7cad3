"""A user id without a name and without a home folder gets what libraries ask for."""

from __future__ import annotations

import getpass
import os
import pwd
import tempfile
from pathlib import Path
from typing import NoReturn

import pytest

from agentgym import child_guard
from agentgym.cli.installation import engine_home, server_libraries
from agentgym.cli.main import main
from agentgym.errors import RunFolderError
from agentgym.home_folder import ensure_home
from agentgym.remote import keep_folder

NAMES = ("HOME", "XDG_CACHE_HOME", "LOGNAME", "USER", "LNAME", "USERNAME", "AGENTGYM_ENGINES")
NAMES += ("TORCHINDUCTOR_CACHE_DIR",)


@pytest.fixture
def bare_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Makes this process's user id one that the system does not know; returns the folder for temporary files."""

    def unknown(uid: int) -> NoReturn:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in NAMES:
        monkeypatch.setenv(name, "")  # so that what is set in the test is undone
        monkeypatch.delenv(name)
    return tmp_path


def test_a_bare_user_id_has_a_home_of_its_own_and_a_name(bare_user: Path) -> None:
    ensure_home()
    assert Path.home().parent == bare_user and Path.home().stat().st_mode & 0o777 == 0o700
    assert getpass.getuser() == f"uid{os.getuid()}"
    ensure_home()
    assert [path.name for path in bare_user.iterdir()] == [Path.home().name]


def test_what_needs_a_home_or_a_name_works_without(bare_user: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert child_guard._environment("x")["TORCHINDUCTOR_CACHE_DIR"] == str(bare_user / f"torchinductor_{os.getuid()}")
    assert keep_folder("data", ["state"], lambda part: None).is_relative_to(bare_user)
    assert main(["env", "list", "--json"]) == 0
    assert engine_home().is_relative_to(bare_user) and isinstance(server_libraries(), list)


def test_a_cache_that_cannot_be_written_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(RunFolderError, match=r"cannot write into .*agentgym/data.*XDG_CACHE_HOME"):
        keep_folder("data", ["state"], lambda part: None)


def test_a_user_with_a_home_keeps_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "missing"))
    monkeypatch.setenv("LOGNAME", "anna")
    ensure_home()
    assert (Path.home(), getpass.getuser()) == (tmp_path / "missing", "anna") and not any(tmp_path.iterdir())

"""A run removes the folders of agents that killed runs have left, and no other."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from agentgym.errors import ConfigError
from agentgym.rollout.agents.agents_folder import LOCK_NAME, PREFIX, agents_folder

OWNER = """
import sys, tempfile
from agentgym.rollout.agents.agents_folder import agents_folder

tempfile.tempdir = sys.argv[1]
with agents_folder() as folder:
    (folder / "work").mkdir()
    print(folder, flush=True)
    sys.stdin.read()
"""


def test_folders_of_killed_runs_are_removed_and_those_of_others_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    command = [sys.executable, "-c", OWNER, str(tmp_path)]
    with subprocess.Popen(command, **streams) as alive, subprocess.Popen(command, **streams) as killed:  # type: ignore[call-overload]
        live, left = (Path(owner.stdout.readline().strip()) for owner in (alive, killed))
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        foreign, link = tmp_path / f"{PREFIX}foreign", tmp_path / f"{PREFIX}link"
        foreign.mkdir()
        link.mkdir()
        (link / LOCK_NAME).symlink_to(tmp_path / "elsewhere")
        (tmp_path / "elsewhere").write_text("")
        assert left.is_dir()
        with agents_folder() as own:
            assert not left.exists()
            assert all(folder.is_dir() for folder in (own, live, live / "work", foreign, link))
        assert not own.exists()
        alive.stdin.close()
    assert not live.exists() and foreign.is_dir()


def test_no_room_for_a_folder_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(ConfigError, match="there is no folder for agents"), agents_folder():
        pass

"""The guard of a server: what the server leaves in its temporary folder goes with it, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import psutil
import pytest

SERVER = """
import os, pathlib, sys, tempfile, time
folder = pathlib.Path(tempfile.gettempdir())
assert os.environ["VLLM_RPC_BASE_PATH"] == str(folder)
(folder / "socket").touch()
pathlib.Path(sys.argv[1]).write_text(f"{os.getpid()} {folder}")
time.sleep(float(sys.argv[2]))
"""
LIMIT_S = 60.0


def begun(told: Path, lasts_s: float) -> tuple[subprocess.Popen[bytes], int, Path]:
    """The guard, the server's process id and the folder, when the server has left something there."""
    words = [sys.executable, "-m", "agentgym.engines.servers.server_guard", sys.executable, "-c", SERVER]
    guard = subprocess.Popen([*words, str(told), str(lasts_s)], stdin=subprocess.PIPE)
    deadline = time.monotonic() + LIMIT_S
    while not (told.exists() and told.read_text()):
        assert time.monotonic() < deadline and guard.poll() is None
        time.sleep(0.05)
    pid, _, folder = told.read_text().partition(" ")
    return guard, int(pid), Path(folder)


@pytest.mark.parametrize("end", ["by itself", "killed", "its parent is gone", "its parent and the guard are killed"])
def test_a_server_has_a_temporary_folder_that_ends_with_it(end: str, tmp_path: Path) -> None:
    guard, pid, folder = begun(tmp_path / "told", 0.5 if end == "by itself" else LIMIT_S)
    assert len(str(folder / "01234567-89ab-cdef-0123-456789abcdef")) < 107, "no socket has a longer path"
    if end == "killed":
        os.kill(pid, signal.SIGKILL)
    elif end == "its parent is gone":
        assert (folder / "socket").exists()
        assert guard.stdin is not None
        guard.stdin.close()
    elif end == "its parent and the guard are killed":
        guard.kill()  # as Ray kills the children of an actor
    guard.wait(LIMIT_S)
    assert guard.stdin is not None
    guard.stdin.close()
    deadline = time.monotonic() + LIMIT_S
    while folder.exists() or psutil.pid_exists(pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)


SHARED = """
import os, pathlib, signal, sys
from multiprocessing.shared_memory import SharedMemory
memory = SharedMemory(create=True, size=4096)
pathlib.Path(sys.argv[1]).write_text(memory.name)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_server_that_is_killed_leaves_no_shared_memory(tmp_path: Path) -> None:
    """Python's resource tracker, a child of the server, is left to free it."""
    told = tmp_path / "told"
    words = [sys.executable, "-m", "agentgym.engines.servers.server_guard", sys.executable, "-c", SHARED, str(told)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL) as guard:
        assert guard.wait(LIMIT_S) == 128 + signal.SIGKILL
    with pytest.raises(FileNotFoundError):
        SharedMemory(told.read_text())

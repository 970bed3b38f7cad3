"""The guard of a child: what a server leaves goes with it, however it ends; the end of a stdio program is reported."""

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

from agentgym.child_guard import Kind, guard_command

SERVER = """
import os, pathlib, sys, tempfile, time
folder = pathlib.Path(tempfile.gettempdir())
assert os.environ["VLLM_RPC_BASE_PATH"] == str(folder)
(folder / "socket").touch()
pathlib.Path(sys.argv[1]).write_text(f"{os.getpid()} {folder}")
time.sleep(float(sys.argv[2]))
"""
LIMIT_S = 60.0


def begun(report: Path, lasts_s: float) -> tuple[subprocess.Popen[bytes], int, Path]:
    """The guard, the server's process id and the folder, when the server has left something there."""
    words = guard_command("server", [sys.executable, "-c", SERVER, str(report), str(lasts_s)])
    guard = subprocess.Popen(words, stdin=subprocess.PIPE)
    deadline = time.monotonic() + LIMIT_S
    while not (report.exists() and report.read_text()):
        assert time.monotonic() < deadline and guard.poll() is None
        time.sleep(0.05)
    pid, _, folder = report.read_text().partition(" ")
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
    report = tmp_path / "told"
    words = guard_command("server", [sys.executable, "-c", SHARED, str(report)])
    with subprocess.Popen(words, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL) as guard:
        assert guard.wait(LIMIT_S) == 128 + signal.SIGKILL
    with pytest.raises(FileNotFoundError):
        SharedMemory(report.read_text())


DAEMON = """
import pathlib, subprocess, sys, time
daemon = subprocess.Popen(["sleep", "600"], start_new_session=True)
pathlib.Path(sys.argv[1]).write_text(str(daemon.pid))
sys.stdin.read()
time.sleep(float(sys.argv[2]))
"""


@pytest.mark.parametrize("kind", ["server", "stdio"])
@pytest.mark.parametrize("lasts_s", [0, 600])
def test_a_process_in_a_session_of_its_own_ends_with_the_program(kind: Kind, lasts_s: int, tmp_path: Path) -> None:
    report = tmp_path / "told"
    words = guard_command(kind, [sys.executable, "-c", DAEMON, str(report), str(lasts_s)])
    with subprocess.Popen(words, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL) as guard:
        deadline = time.monotonic() + LIMIT_S
        while not (report.exists() and report.read_text()):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert guard.stdin is not None
        guard.stdin.close()
        guard.wait(LIMIT_S)
        assert not psutil.pid_exists(int(report.read_text()))


def test_a_program_that_is_not_there_is_named_and_leaves_no_folder(tmp_path: Path) -> None:
    for kind, message in (("server", "cannot run"), ("stdio", "[agentgym: cannot run")):
        words = guard_command(kind, [str(tmp_path / "absent")])  # type: ignore[arg-type]
        done = subprocess.run(
            words, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={"TMPDIR": str(tmp_path)}
        )
        assert (done.returncode, done.stderr.startswith(message), list(tmp_path.iterdir())) == (127, True, [])


def test_how_a_server_ended_is_told_where_it_was_written_to_meanwhile() -> None:
    command = ["sh", "-c", "exec <&-; echo deaf >&2; sleep 0.3; exit 3"]
    words = guard_command("stdio", command)
    guard = subprocess.Popen(words, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with guard:
        assert guard.stdin is not None and guard.stderr is not None
        assert guard.stderr.readline() == "deaf\n"
        guard.stdin.write("{}\n")
        guard.stdin.flush()
        assert guard.stderr.readline() == "[agentgym: the server ended with exit code 3]\n"

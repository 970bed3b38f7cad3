"""Runs a server as a child and ends it, with all of its own children, when its parent is gone.

`python -m agentgym.engines.servers.server_guard COMMAND...`: the parent holds the other end of standard input. When
that end closes, because the parent closed it, crashed or was killed, the server's whole process group is ended. The
server has a temporary folder of its own, which is removed with what it leaves there (SGLang and vLLM: sockets). What it
leaves in shared memory is removed too.
"""

from __future__ import annotations

import getpass
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

GRACE_S = 5.0
"""Seconds between asking the server to end and killing it."""
POLL_S = 0.05
TRACKER = b"multiprocessing.resource_tracker"
LONGEST = 60
"""The number of characters of a folder in which the path of a socket (107 at most) may end in a UUID."""


def main(command: Sequence[str]) -> int:
    """Runs `command` until it ends or standard input does; returns its exit code.

    A second process does the work and outlives this one: a parent that is an actor of Ray kills its children by a
    signal that leaves them no time to end theirs.
    """
    second = os.fork()
    if not second:
        os._exit(guard(command))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: os.kill(second, number))
    code = os.waitstatus_to_exitcode(os.waitpid(second, 0)[1])
    return code if code >= 0 else 128 - code


def guard(command: Sequence[str]) -> int:
    """Runs the command, and ends it when standard input ends."""
    folder = _private_folder()
    try:
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, env=_environment(folder))
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        print(f"cannot run {command[0]!r}: {error.strerror}", file=sys.stderr)
        return 127
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: _end(server))
    threading.Thread(target=_watch, args=(server,), daemon=True).start()
    code = server.wait()
    _kill(server)  # whatever it started and left
    shutil.rmtree(folder, ignore_errors=True)
    return code if code >= 0 else 128 - code


def _private_folder() -> str:
    parent = tempfile.gettempdir()
    return tempfile.mkdtemp(
        prefix="agentgym-", dir=parent if len(parent) < LONGEST - len("/agentgym-12345678") else "/tmp"
    )


def _environment(folder: str) -> dict[str, str]:
    """Returns our environment with the folder for temporary files; caches of compiled code stay where they were."""
    compiled = os.path.join(tempfile.gettempdir(), f"torchinductor_{getpass.getuser()}")
    given = {"TORCHINDUCTOR_CACHE_DIR": compiled, **os.environ}
    return {**given, "TMPDIR": folder, "VLLM_RPC_BASE_PATH": folder}


def _watch(server: subprocess.Popen[bytes]) -> None:
    while os.read(0, 4096):
        pass
    _end(server)


def _end(server: subprocess.Popen[bytes]) -> None:
    _signal(server, signal.SIGTERM)
    timer = threading.Timer(GRACE_S, _kill, (server,))
    timer.daemon = True
    timer.start()


def _kill(server: subprocess.Popen[bytes]) -> None:
    """Kills what is left of the group.

    Python's resource tracker is left to end last and by itself: when the others are gone, it frees the shared memory
    that they left (vLLM: hundreds of megabytes), which nothing else ever does.
    """
    ends = time.monotonic() + GRACE_S
    while (rest := _rest(server.pid)) and time.monotonic() < ends:
        for process, command in rest:
            if command and TRACKER not in command:  # one without a command is becoming something: perhaps the tracker
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
        time.sleep(POLL_S)
    _signal(server, signal.SIGKILL)


def _rest(group: int) -> list[tuple[int, bytes]]:
    """Returns the processes of a group that have not ended, and their commands; empty if there is no /proc."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it ended meanwhile
            state, _, own_group = (process / "stat").read_text(errors="replace").rpartition(")")[2].split()[:3]
            if state not in ("Z", "X") and int(own_group) == group:
                found.append((int(process.name), (process / "cmdline").read_bytes()))
    return found


def _signal(server: subprocess.Popen[bytes], number: signal.Signals) -> None:
    try:
        os.killpg(server.pid, number)
    except ProcessLookupError:
        return


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

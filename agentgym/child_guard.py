"""Runs a program as a child, and ends it with everything it started when standard input ends.

It is run as `python child_guard.py KIND COMMAND...`, without its package. The process that started this one holds the
other end of standard input. When that closes, because its holder closed it, crashed or was killed, the program has some
seconds to end by itself, and is then killed. There are two kinds of programs:

- A `server` is asked to end by SIGTERM. It has a temporary folder of its own, which is removed with what it leaves
  there (SGLang and vLLM: sockets). What it leaves in shared memory is removed too.
- A `stdio` program is asked to end by the end of its input. Our input goes to it, the messages that it writes go out,
  and other output goes to standard error; a line too long for a message ends it.
"""

from __future__ import annotations

import ctypes
import getpass
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Literal

__all__ = ["Kind", "guard_command"]

Kind = Literal["server", "stdio"]
SERVER_GRACE_S = 5.0
"""The seconds that a server has to end by itself."""
STDIO_GRACE_S = 1.0
"""The seconds that a program has to end by itself when its input has ended."""
TRACKER_GRACE_S = 5.0
POLL_S = 0.01
TRACKER = b"multiprocessing.resource_tracker"
LONGEST = 60
"""The number of characters of a folder in which the path of a socket (107 at most) may end in a UUID."""
MAX_MESSAGE_BYTES = 4 << 20
SET_PARENT_DEATH_SIGNAL = 1
SET_CHILD_SUBREAPER = 36


def guard_command(kind: Kind, command: Sequence[str]) -> list[str]:
    """Returns the command that runs `command` under a guard, by a bare interpreter."""
    return [sys.executable, "-I", "-S", __file__, kind, *command]


# ---- servers


def guard_server(command: Sequence[str]) -> int:
    """Runs a server until it ends or standard input does; returns its exit code.

    A second process does the work and outlives this one: a parent that is an actor of Ray kills its children by a
    signal that leaves them no time to end theirs.
    """
    second = os.fork()
    if not second:
        os._exit(_run_server(command))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: os.kill(second, number))
    return _exit_code(os.waitstatus_to_exitcode(os.waitpid(second, 0)[1]))


def _run_server(command: Sequence[str]) -> int:
    parent = tempfile.gettempdir()
    is_short = len(parent) < LONGEST - len("/agentgym-12345678")
    folder = tempfile.mkdtemp(prefix="agentgym-", dir=parent if is_short else "/tmp")
    try:
        return _run_in(_environment(folder), command)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run_in(environment: Mapping[str, str], command: Sequence[str]) -> int:
    try:
        server = Child(command, stdin=subprocess.DEVNULL, env=environment)
    except OSError as error:
        print(f"cannot run {command[0]!r}: {error.strerror}", file=sys.stderr, flush=True)
        return 127
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: server.ask_to_end())
    threading.Thread(target=_watch, args=(server,), daemon=True).start()
    return _exit_code(server.wait())


def _environment(folder: str) -> dict[str, str]:
    """Returns our environment with the folder for temporary files; caches of compiled code stay where they were."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user id that the system has no name for
        user = str(os.getuid())
    compiled = os.path.join(tempfile.gettempdir(), f"torchinductor_{user}")
    variables = {"TORCHINDUCTOR_CACHE_DIR": compiled, **os.environ}
    return {**variables, "TMPDIR": folder, "VLLM_RPC_BASE_PATH": folder}


def _watch(server: Child) -> None:
    while os.read(0, 4096):
        pass
    server.ask_to_end()


# ---- programs that exchange messages over their pipes


def guard_stdio(command: Sequence[str]) -> int:
    """Runs a program that speaks over its pipes until it ends, or is ended; returns its exit code."""
    _control_process(SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)
    try:
        child = Child(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    except OSError as error:
        _note(f"cannot run {command[0]!r}: {error.strerror}")
        return 127
    signal.signal(signal.SIGTERM, lambda *_: child.end())
    threading.Thread(target=_bring_in, args=(child,), daemon=True).start()
    out = threading.Thread(target=_bring_out, args=(child,), daemon=True)
    out.start()
    code = child.wait()
    out.join(STDIO_GRACE_S)
    if not child.is_asked:
        _note(f"the server was ended by signal {-code}" if code < 0 else f"the server ended with exit code {code}")
    return _exit_code(code)


def _bring_in(child: Child) -> None:
    to = child.process.stdin
    assert to is not None
    with suppress(OSError):
        while chunk := os.read(0, 1 << 16):
            to.write(chunk)
            to.flush()
        child.is_asked = True  # not if the server is ending and reads no more
    with suppress(OSError):
        to.close()
    child.end_after(STDIO_GRACE_S)


def _bring_out(child: Child) -> None:
    """Passes messages on, line by line; other output goes to standard error."""
    source = child.process.stdout
    assert source is not None
    with suppress(OSError):  # the output is no longer read
        while line := source.readline(MAX_MESSAGE_BYTES + 1):
            if len(line) > MAX_MESSAGE_BYTES:
                _note(f"the server wrote a line of more than {MAX_MESSAGE_BYTES >> 20} MiB, and was ended")
                break
            _write_all(1 if line.lstrip()[:1] in (b"{", b"[") else 2, line)
        else:
            return
    child.end()


def _write_all(to: int, chunk: bytes) -> None:
    while chunk:
        chunk = chunk[os.write(to, chunk) :]


def _note(text: str) -> None:
    with suppress(OSError):
        os.write(2, f"[agentgym: {text}]\n".encode())


# ---- both


class Child:
    """The program in a session of its own; the processes that its children leave become ours to end."""

    def __init__(
        self, command: Sequence[str], *, stdin: int, stdout: int | None = None, env: Mapping[str, str] | None = None
    ) -> None:
        _control_process(SET_CHILD_SUBREAPER, 1)
        self.is_asked = False
        """True if its end is wanted."""
        self.process = subprocess.Popen(
            command, stdin=stdin, stdout=stdout, env=env, start_new_session=True, preexec_fn=_end_with_guard
        )

    def ask_to_end(self) -> None:
        """Asks the processes of its group to end, and kills it if it does not."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGTERM)
        self.end_after(SERVER_GRACE_S)

    def end_after(self, seconds: float) -> None:
        """Kills it in so many seconds, unless it has ended by then."""
        timer = threading.Timer(seconds, self.end)
        timer.daemon = True
        timer.start()

    def end(self) -> None:
        """Kills it."""
        self.is_asked = True
        self.process.kill()

    def wait(self) -> int:
        """Returns its exit code when it has ended, with the processes that it left; a signal is a negative number.

        Python's resource tracker is left to end last and by itself: when the others are gone, it frees the shared
        memory that they left (vLLM: hundreds of megabytes), which nothing else ever does.
        """
        code = self.process.wait()
        if sys.platform != "linux":
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        start, passed_s = time.monotonic(), 0.0
        while passed_s < 2 * TRACKER_GRACE_S and (children := _children()):
            for child, command in children:
                is_tracker = not command or TRACKER in command  # one without a command may be becoming the tracker
                if not is_tracker or passed_s > TRACKER_GRACE_S:
                    with suppress(ProcessLookupError):
                        os.kill(child, signal.SIGKILL)
            time.sleep(POLL_S)
            passed_s = time.monotonic() - start
        return code


def _children() -> list[tuple[int, bytes]]:
    """Returns our children that have not ended, and their commands; empty if there is no /proc."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    children, own = [], str(os.getpid())
    for name in filter(str.isdigit, os.listdir("/proc") if sys.platform == "linux" else ()):
        with (
            suppress(OSError),  # it ended meanwhile
            open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as stat,
            open(f"/proc/{name}/cmdline", "rb") as command,
        ):
            if stat.read().rpartition(")")[2].split()[1] == own:
                children.append((int(name), command.read()))
    return children


def _control_process(option: int, value: int) -> None:
    """Calls `prctl`, if there is one."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _end_with_guard() -> None:
    _control_process(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)


def _exit_code(code: int) -> int:
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    kind, *command = sys.argv[1:]
    code = guard_server(command) if kind == "server" else guard_stdio(command)
    os._exit(code)  # a thread may still wait for input

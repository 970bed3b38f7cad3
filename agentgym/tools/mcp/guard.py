"""Runs an MCP server as a child, and ends it with everything it started when standard input ends.

It is run as `python guard.py COMMAND...`, without its package. Input goes to the server, the messages that it writes go
out, and other output goes to standard error; a line too long for a message ends the server. The process that started
this one holds the other end of standard input. When that closes, because its holder closed it, crashed or was killed,
so does the server's input; the server then has `GRACE_S` to end by itself.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from typing import IO

GRACE_S = 1.0
"""The seconds that a server has to end by itself when its input has ended."""
MAX_MESSAGE_BYTES = 4 << 20
SET_PARENT_DEATH_SIGNAL = 1
SET_CHILD_SUBREAPER = 36


def main(command: list[str]) -> int:
    """Runs the command until it ends, or is ended; returns its exit code."""
    _control_process(SET_CHILD_SUBREAPER, 1)  # processes that the server's children leave become ours to end
    _control_process(SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)
    try:
        server = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, preexec_fn=_end_with_guard
        )
    except OSError as error:
        _note(f"cannot run {command[0]!r}: {error.strerror}")
        return 127
    assert server.stdin is not None and server.stdout is not None
    asked = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: _end(server, asked))
    threading.Thread(target=_bring_in, args=(server, server.stdin, asked), daemon=True).start()
    out = threading.Thread(target=_bring_out, args=(server, server.stdout, asked), daemon=True)
    out.start()
    code = server.wait()
    _end_the_rest()
    out.join(GRACE_S)
    if not asked.is_set():
        _note(f"the server was ended by signal {-code}" if code < 0 else f"the server ended with exit code {code}")
    return code if code >= 0 else 128 - code


def _control_process(option: int, value: int) -> None:
    """Calls `prctl`, if there is one."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _end_with_guard() -> None:
    _control_process(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)


def _bring_in(server: subprocess.Popen[bytes], to: IO[bytes], asked: threading.Event) -> None:
    with suppress(OSError):
        while chunk := os.read(0, 1 << 16):
            to.write(chunk)
            to.flush()
        asked.set()  # not if the server is ending and reads no more
    with suppress(OSError):
        to.close()
    timer = threading.Timer(GRACE_S, _end, (server, asked))
    timer.daemon = True
    timer.start()


def _bring_out(server: subprocess.Popen[bytes], source: IO[bytes], asked: threading.Event) -> None:
    """Passes messages on, line by line; other output goes to standard error."""
    with suppress(OSError):  # the output is no longer read
        while line := source.readline(MAX_MESSAGE_BYTES + 1):
            if len(line) > MAX_MESSAGE_BYTES:
                _note(f"the server wrote a line of more than {MAX_MESSAGE_BYTES >> 20} MiB, and was ended")
                break
            _write_all(1 if line.lstrip()[:1] in (b"{", b"[") else 2, line)
        else:
            return
    _end(server, asked)


def _write_all(to: int, chunk: bytes) -> None:
    while chunk:
        chunk = chunk[os.write(to, chunk) :]


def _end(server: subprocess.Popen[bytes], asked: threading.Event) -> None:
    asked.set()
    with suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)


def _end_the_rest() -> None:
    """Ends the processes that the server left: they become ours as their parents end, until there is none."""
    while children := _children():
        for child in children:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(child, 0)


def _children() -> list[int]:
    found = []
    own = str(os.getpid())
    for name in filter(str.isdigit, os.listdir("/proc") if sys.platform == "linux" else ()):
        with (
            suppress(OSError),
            open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file,
        ):
            if file.read().rpartition(")")[2].split()[1] == own:
                found.append(int(name))
    return found


def _note(text: str) -> None:
    with suppress(OSError):
        os.write(2, f"[agentgym: {text}]\n".encode())


if __name__ == "__main__":
    code = main(sys.argv[1:])
    os._exit(code)  # a thread may still wait for input

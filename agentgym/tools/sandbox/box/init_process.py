"""The first process of a box: it starts the program, reaps children, ends leftover processes, and collects files.

In a PID namespace it is PID 1, so nothing in the box outlives it.
"""

import fnmatch
import itertools
import os
import select
import signal
import socket
import stat
from collections.abc import Callable
from dataclasses import dataclass

from agentgym.tools.sandbox.box import frames
from agentgym.tools.sandbox.box.processes import lower_priority, reap_children, resume
from agentgym.tools.sandbox.box.runner import Box

__all__ = ["Job", "run_init"]

MAX_FILES_OUT = 256
MAX_DEPTH = 128
"""The deepest nesting of folders: one descriptor is kept open for each."""
MAX_FOLDERS = 16384
"""The most folders that are searched: a thread of a session may keep adding folders meanwhile."""


@dataclass(frozen=True)
class Job:
    """The work of a box: its program, and the files to collect."""

    start: Callable[[], None]
    """Becomes the program, and does not return."""
    is_session: bool
    collect: list[str]
    """The patterns of the files that are collected at the end."""
    max_bytes: int
    """The most bytes of all collected files together."""


def run_init(box: Box, orders: socket.socket, job: Job) -> None:
    """Runs a box to its end. Does not return.

    Its supervisor receives `{"ready": program}`, then `{"ended": exit code}` with the files as blobs. In a session it
    orders `{"settle": process}`: all but that process end. With `{"nice": value, "holder": process}`, the processes
    that compute get that priority, except for the program or the cell itself. SIGUSR1 pauses all others, and
    `{"resume": processes}` resumes these, or all for an empty list.
    """
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGTERM, lambda *_: _end(box))
    signal.signal(signal.SIGUSR1, lambda *_: box.signal_others(signal.SIGSTOP))
    box.begin()
    program = os.fork()
    if program == 0:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, signal.SIG_DFL)
        job.start()
    box.set_program(program)
    frames.send(orders, {"ready": program})
    while True:
        waited: list[int | socket.socket] = [orders, woken]
        ready, _, _ = select.select(waited, [], [])
        if woken in ready:
            os.read(woken, 4096)
        ended = dict(reap_children())
        if _is_over(box, program, ended, is_session=job.is_session):
            box.kill_all()
            names, contents = _collect_files(job.collect, job.max_bytes)
            frames.send(orders, {"ended": ended.get(program, -signal.SIGKILL), "files": names}, contents)
            os._exit(0)
        if orders in ready:
            _obey(box, orders, program, job.max_bytes)


def _is_over(box: Box, program: int, ended: dict[int, int], is_session: bool) -> bool:
    """Returns whether the program has ended; a session hands its state from process to process until none is left."""
    return bool(ended) and not box.pids(os.getpid()) if is_session else program in ended


def _obey(box: Box, orders: socket.socket, program: int, max_bytes: int) -> None:
    order = frames.receive(orders)
    if order is None:
        _end(box)
    assert order is not None
    if "nice" in order[0]:
        nice, holder = order[0]["nice"], order[0]["holder"]
        assert isinstance(nice, int) and isinstance(holder, int)
        lower_priority([pid for pid in box.pids(os.getpid()) if pid != program], nice, holder)
        return
    if "resume" in order[0]:
        pids = order[0]["resume"]
        assert isinstance(pids, list)
        resume(pids) if pids else box.signal_others(signal.SIGCONT)
        return
    process, patterns = order[0]["settle"], order[0]["collect"]
    assert isinstance(process, int) and isinstance(patterns, list)
    settled = box.kill_others(process)
    names, contents = _collect_files(patterns, max_bytes)
    frames.send(orders, {"settled": settled, "files": names}, contents)


def _end(box: Box) -> None:
    box.kill_all()
    os._exit(0)


def _collect_files(patterns: list[str], max_bytes: int) -> tuple[list[str], list[bytes]]:
    """Returns the regular files of the working folder whose paths match; no link is followed."""
    names: list[str] = []
    contents: list[bytes] = []
    if not patterns:
        return names, contents
    walk = itertools.islice(os.fwalk(".", follow_symlinks=False), MAX_FOLDERS)
    for folder, folders, file_names, handle in walk:
        if folder.count("/") >= MAX_DEPTH:
            folders.clear()
        for name in sorted(file_names):
            path = os.path.normpath(os.path.join(folder, name))
            if len(names) < MAX_FILES_OUT and any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns):
                content = _content(name, handle, max_bytes - sum(map(len, contents)))
                if content is not None:
                    names.append(path)
                    contents.append(content)
    return names, contents


def _content(name: str, folder: int, max_bytes: int) -> bytes | None:
    try:
        handle = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except OSError:
        return None
    with open(handle, "rb") as file:
        about = os.fstat(handle)
        if not stat.S_ISREG(about.st_mode) or about.st_size > max_bytes:
            return None
        return file.read(max_bytes)

"""The confined process of a box: it runs one program, or the cells of a session with a checkpoint before each.

A session is a chain of forks. The process that holds the state waits while a copy of it runs a cell: a copy that
finishes holds the state from then on, and one that does not leaves the state as it was.
"""

import errno
import itertools
import os
import select
import socket
import struct
import sys
from pathlib import PurePosixPath

from agentgym.tools.sandbox.box import frames
from agentgym.tools.sandbox.box.container_box import ContainerBox
from agentgym.tools.sandbox.box.landlock_box import LandlockBox
from agentgym.tools.sandbox.box.namespaces import NamespaceBox
from agentgym.tools.sandbox.box.plan import Plan
from agentgym.tools.sandbox.box.program import adopt, new_main, run_python, run_to_the_end

__all__ = ["REPORT", "Box", "Output", "run_once", "run_session"]

Box = NamespaceBox | LandlockBox | ContainerBox
Output = tuple[int, int]
"""The pipes that standard output and standard error go to."""
NOT_RUN = 126
"""A shell's exit code for a command that it cannot run."""
REPORT = struct.Struct("!iii")
"""The process that holds the state, the exit code, and whether the state was rolled back."""


def run_once(box: Box, plan: Plan, output: Output, cell: frames.Frame) -> None:
    """Becomes the program; does not return."""
    _enter(box, plan, output, descriptors=())
    header, blobs = cell
    _put_files(header, blobs)
    if header["language"] == "shell":
        _become_shell(blobs[0])
    os._exit(run_to_the_end(("main.py", blobs[0].decode("utf-8", "surrogatepass"))))


def run_session(box: Box, plan: Plan, output: Output, cells: socket.socket, reports: socket.socket) -> None:
    """Runs cells until there are no more; does not return."""
    _enter(box, plan, output, descriptors=(cells.fileno(), reports.fileno()))
    names = new_main()
    reports.send(REPORT.pack(os.getpid(), 0, 0))
    while (cell := frames.receive(cells)) is not None:
        commit_reader, committed = os.pipe()
        child = os.fork()
        if child:
            os.close(committed)
            code = _wait(child, commit_reader)
            os.close(commit_reader)
            reports.send(REPORT.pack(os.getpid(), code, 1))
            continue
        os.close(commit_reader)
        code = _run_cell(cell, names)
        os.write(committed, b"x")
        os.close(committed)
        reports.send(REPORT.pack(os.getpid(), code, 0))
    os._exit(0)


def _enter(box: Box, plan: Plan, output: Output, descriptors: tuple[int, ...]) -> None:
    """Confines this process, with nothing open but its streams and the descriptors in `descriptors`."""
    nothing = os.open("/dev/null", os.O_RDONLY)
    for target, source in enumerate((nothing, *output)):
        os.dup2(source, target)
    borders = [2, *sorted(descriptors), 1 << 16]
    for low, high in itertools.pairwise(borders):
        os.closerange(low + 1, high)
    box.confine()
    adopt(box.home, plan.environment(box.home), plan.packages)


def _wait(child: int, commit_reader: int) -> int:
    """Returns the exit code of a copy that died; ends this process if the copy finished its cell."""
    ended = os.pidfd_open(child)
    ready, _, _ = select.select([commit_reader, ended], [], [])
    if commit_reader in ready and os.read(commit_reader, 1):
        os._exit(0)
    os.close(ended)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _run_cell(cell: frames.Frame, names: dict[str, object]) -> int:
    header, blobs = cell
    _put_files(header, blobs)
    if header["language"] == "shell":
        return _run_shell(blobs[0])
    code = blobs[0].decode("utf-8", "surrogatepass")
    return run_python((f"<cell {header['number']}>", code), names, shows_last=True)


def _run_shell(code: bytes) -> int:
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        _become_shell(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _become_shell(code: bytes) -> None:
    """Becomes the shell; does not return."""
    try:
        os.execv("/bin/sh", [b"sh", b"-c", code])
    except OSError as error:
        hint = "; write what is longer to a file in parts" if error.errno == errno.E2BIG else ""
        os.write(2, f"sh: {error.strerror}: {len(code)} bytes of code{hint}\n".encode())
        os._exit(NOT_RUN)


def _put_files(header: dict[str, object], blobs: list[bytes]) -> None:
    """Writes files from inside the box, where a link that a program left cannot lead outside."""
    paths = header["files"]
    assert isinstance(paths, list)
    for path, content in zip(paths, blobs[1:], strict=True):
        os.makedirs(PurePosixPath(path).parent, exist_ok=True)
        with open(path, "wb") as file:
            file.write(content)

"""Runs an agent's program: with nothing of the user's environment, its output kept, and all that it started ended."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO

from agentgym.child_guard import guard_command
from agentgym.rollout.agents.own_thread import start_thread

__all__ = ["OutputLog", "ProgramEnd", "clean_variables", "run_program"]

HALF_LOG = 32 << 10
"""The bytes of the beginning and of the end of an output that are kept."""
LINE_CHARS = 300


@dataclass(frozen=True, slots=True)
class ProgramEnd:
    """The end of a program: its exit code, 128 + N for the signal N, and the last line that it printed."""

    code: int
    last_line: str


class OutputLog:
    """The output of a program in a file: its beginning, and its end if it is long."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: BinaryIO = path.open("wb", buffering=0)
        self._left = HALF_LOG
        self._tail = bytearray()
        self._num_dropped = 0
        self._last = bytearray()

    def write(self, output: bytes) -> None:
        """Adds what the program printed."""
        self._last = (self._last + output)[-4 * LINE_CHARS :]
        head = output[: self._left]
        self._file.write(head)
        self._left -= len(head)
        self._tail += output[len(head) :]
        surplus = max(0, len(self._tail) - HALF_LOG)
        self._num_dropped += surplus
        del self._tail[:surplus]

    def close(self) -> None:
        """Completes the file."""
        with self._file:
            if self._num_dropped:
                self._file.write(f"\n[... {self._num_dropped} bytes ...]\n".encode())
            self._file.write(self._tail)

    @property
    def last_line(self) -> str:
        """The last line that is not empty, or an empty one."""
        lines = [line.strip() for line in self._last.decode(errors="replace").splitlines()]
        return next((line[:LINE_CHARS] for line in reversed(lines) if line), "")


def clean_variables(home: Path) -> dict[str, str]:
    """Returns the variables of a program: its home folder, where programs are, and nothing else of ours."""
    return {"PATH": os.environ.get("PATH", os.defpath), "HOME": str(home), "LANG": "C.UTF-8"}


async def run_program(command: Sequence[str], variables: Mapping[str, str], folder: Path, log_path: Path) -> ProgramEnd:
    """Runs a program to its end; a cancellation ends it, and so does the end of this process.

    What it started and left is ended too, before this returns. Raises OSError if there is no process to be had.
    """
    process = subprocess.Popen(
        guard_command("server", command),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=folder,
        env=variables,
    )
    assert process.stdin is not None
    ending = start_thread(partial(_read_to_end, process, log_path), f"output of {command[0]}")
    try:
        return await asyncio.shield(ending)
    finally:
        process.stdin.close()  # the guard ends the program, unless it has ended
        await asyncio.wait({ending})


def _read_to_end(process: subprocess.Popen[bytes], log_path: Path) -> ProgramEnd:
    assert process.stdin is not None and process.stdout is not None
    try:
        with process.stdout, closing(OutputLog(log_path)) as log:
            while output := os.read(process.stdout.fileno(), 1 << 16):
                log.write(output)
    except OSError:  # no room for the log
        process.stdin.close()
        raise
    finally:
        code = process.wait()
    return ProgramEnd(code, log.last_line)

"""The end of a server's standard error, read as it comes and shown if the server fails."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

__all__ = ["StderrTail"]

MAX_BYTES = 4096
MAX_CHARS = 1500


class StderrTail:
    """Reads a pipe on the running loop, so that a server that writes much is not blocked, and keeps its end."""

    def __init__(self) -> None:
        self._tail = b""
        self._reading: int | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @contextmanager
    def writing(self) -> Iterator[TextIO]:
        """Opens the pipe's other end for the server; the caller closes it once the server has started."""
        self._reading, writing = os.pipe()
        os.set_blocking(self._reading, False)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._reading, self._read)
        with os.fdopen(writing, "w") as file:
            yield file

    def _read(self) -> None:
        """Reads available output; at the end of the pipe, stops listening."""
        while self._reading is not None:
            try:
                chunk = os.read(self._reading, 1 << 16)
            except BlockingIOError:
                return
            if not chunk:
                self._stop()
            self._tail = (self._tail + chunk)[-MAX_BYTES:]

    def format_tail(self) -> str:
        """Returns the last lines, for the end of a sentence; "." if there are none."""
        self._read()
        text = self._tail.decode("utf-8", "replace").strip()
        if not text:
            return "."
        return f". Its standard error ends with:\n{text[-MAX_CHARS:]}"

    def close(self) -> None:
        """Reads what is left, and closes the pipe."""
        self._read()
        self._stop()

    def _stop(self) -> None:
        if self._reading is not None and self._loop is not None:
            self._loop.remove_reader(self._reading)
            os.close(self._reading)
            self._reading = None

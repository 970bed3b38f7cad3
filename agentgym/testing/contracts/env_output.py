"""Captures what an environment prints while it is checked."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator

__all__ = ["Printed", "captured_output"]

MAX_LINES = 5
MAX_CHARS = 200


class Printed(io.TextIOBase):
    """A text stream that holds the last lines that were written to it."""

    def __init__(self) -> None:
        self._text = ""
        self.num_lines = 0

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.num_lines += text.count("\n")
        self._text = (self._text + text)[-MAX_LINES * MAX_CHARS :]
        return len(text)

    def __str__(self) -> str:
        """Returns the last lines, and the number of all."""
        lines = [line[:MAX_CHARS] for line in self._text.splitlines() if line.strip()][-MAX_LINES:]
        if not lines:
            return ""
        more = f"(the last of {self.num_lines} lines)\n" if self.num_lines > len(lines) else ""
        return more + "\n".join(lines)


@contextlib.contextmanager
def captured_output() -> Iterator[Printed]:
    """Captures what this process prints, on standard output and error, while the context lasts."""
    printed = Printed()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        yield printed

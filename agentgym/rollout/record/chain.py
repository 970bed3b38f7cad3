"""Files of JSON lines that grow by whole lines.

In a chained file each line has a digest over itself and the line before, so that a line that was edited, moved or
removed is detected.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path

from agentgym.errors import RunFolderError

__all__ = ["CHAIN", "GENESIS", "ChainedFile", "LineFile", "chained_lines", "folder_errors", "line_digest", "split_line"]

CHAIN = "chain"
"""The key of the digest, the last key of a line."""
GENESIS = "0" * 32
"""The digest before the first line."""
HELD_BYTES = 1 << 24
"""The bytes of lines that are encoded before the first is written; the lines of most steps have fewer."""
_BEFORE, _AFTER = b',"chain":"', b'"}'
_TAIL = len(_BEFORE) + len(GENESIS) + len(_AFTER)


def line_digest(before: str, body: bytes) -> str:
    """Returns a 16-byte BLAKE2b digest, in hex, of the digest before and the bytes of a line up to its own digest.

    >>> line_digest(GENESIS, b'{"step":1')
    'c3252d40722face9b918b831141b11a4'
    """
    return blake2b(before.encode("ascii") + body, digest_size=16).hexdigest()


def split_line(line: bytes) -> tuple[bytes, str | None]:
    """Returns the bytes of a line up to its digest, and the digest; None if the line has none.

    >>> split_line(b'{"step":1}')
    (b'{"step":1}', None)
    """
    line = line.removesuffix(b"\n")
    tail = line[-_TAIL:]
    if not (tail.startswith(_BEFORE) and tail.endswith(_AFTER)):
        return line, None
    return line[:-_TAIL], tail[len(_BEFORE) : -len(_AFTER)].decode("ascii", "replace")


def chained_lines(texts: Sequence[str], before: str = GENESIS) -> tuple[bytes, str]:
    """Returns the lines of JSON objects that follow a line with the digest `before`, and the digest of the last one."""
    lines = []
    for text in texts:
        line, before = _chained_line(text, before)
        lines.append(line)
    return b"".join(lines), before


def _chained_line(text: str, before: str) -> tuple[bytes, str]:
    """Returns the line of one JSON object, and its digest."""
    body = text[:-1].encode("ascii")
    digest = line_digest(before, body)
    return b"".join((body, _BEFORE, digest.encode("ascii"), _AFTER, b"\n")), digest


class LineFile:
    """A file that grows by whole lines or not at all; a line that a kill left incomplete is removed on opening."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with folder_errors(path):
            self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - closed by close()
            self.cut(_last_line(path, os.path.getsize(path))[1])

    def cut(self, size: int) -> None:
        """Removes what is after the first `size` bytes, which end with a line."""
        with folder_errors(self.path):
            self._file.truncate(size)
        self._size = size

    def write(self, data: bytes) -> None:
        """Appends whole lines; if the disk does not take them, raises RunFolderError and appends nothing."""
        with folder_errors(self.path):
            view = memoryview(data)
            try:
                while view:
                    view = view[self._file.write(view) :]
            except OSError:
                self._file.truncate(self._size)
                raise
        self._size += len(data)

    def close(self) -> None:
        """Closes the file; a second call does nothing."""
        self._file.close()

    def __enter__(self) -> LineFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ChainedFile(LineFile):
    """A file of JSON objects, each with a digest over itself and the line before, under the key `chain`.

    `head` is the digest of the last line. It is read from the file, so a file that was cut back or that a kill left is
    continued from its contents.
    """

    head: str = GENESIS

    def cut(self, size: int) -> None:
        """Removes what is after the first `size` bytes, which end with a line."""
        super().cut(size)
        start, end = _last_line(self.path, size)
        with folder_errors(self.path), open(self.path, "rb") as file:
            file.seek(start)
            self.head = split_line(file.read(end - start))[1] or GENESIS

    def append(self, texts: Iterable[str]) -> None:
        """Appends JSON objects as lines, all or none; raises RunFolderError if the disk does not take them.

        At most `HELD_BYTES` and a line are held at once. After any error the file is as it was before.
        """
        size, head = self._size, self.head
        lines: list[bytes] = []
        num_bytes = 0
        try:
            for text in texts:
                line, head = _chained_line(text, head)
                lines.append(line)
                num_bytes += len(line)
                if num_bytes >= HELD_BYTES:
                    self._write_each(lines)
                    num_bytes = 0
            self._write_each(lines)
        except BaseException:
            with folder_errors(self.path):
                self._file.truncate(size)
            self._size = size
            raise
        self.head = head

    def _write_each(self, lines: list[bytes]) -> None:
        """Writes lines that are complete, and removes them from the list."""
        for line in lines:
            self.write(line)
        lines.clear()

    def __enter__(self) -> ChainedFile:
        return self


def _last_line(path: Path, size: int) -> tuple[int, int]:
    """Returns the begin and end of the last whole line in the first `size` bytes; reads only the end of the file."""
    with open(path, "rb") as file:
        end = _after_newline(file.fileno(), size)
        return (_after_newline(file.fileno(), end - 1) if end else 0), end


def _after_newline(handle: int, size: int) -> int:
    """Returns the size up to and including the last newline in the first `size` bytes; 0 if there is none."""
    position = size
    while position > 0:
        start = max(0, position - 65536)
        newline = os.pread(handle, position - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        position = start
    return 0


@contextmanager
def folder_errors(path: Path) -> Iterator[None]:
    """Adds the folder's name to errors of the file system."""
    try:
        yield
    except RunFolderError:
        raise
    except OSError as error:
        raise RunFolderError(f"cannot write {path.name} in the run folder {str(path.parent)!r}: {error}") from error

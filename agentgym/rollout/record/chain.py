"""Files of JSON lines that grow by whole lines.

In a chained file each line has a digest over itself and the line before, so that a line that was edited, moved or
removed is detected.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Self

from agentgym.errors import RunFolderError
from agentgym.rollout.record.frames import pack_lines, read_frames, unpack_frame
from agentgym.rollout.record.manifest import replacing

__all__ = [
    "CHAIN",
    "GENESIS",
    "ChainedFile",
    "LineFile",
    "PackedFile",
    "chained_lines",
    "folder_errors",
    "line_digest",
    "split_line",
]

logger = logging.getLogger(__name__)

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
            if path.is_file() and not path.is_symlink() and path.stat().st_nlink > 1:  # a copy keeps its own
                with replacing(path) as part:
                    shutil.copyfile(path, part)
            # Not through a link, which may lead to any file of the user.
            handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
            self._file = open(handle, "ab", buffering=0)  # noqa: SIM115 - closed by close()
            try:
                self.cut(self._whole_size(os.path.getsize(path)))
            except BaseException:
                self._file.close()
                raise

    def cut(self, size: int) -> None:
        """Removes what is after the first `size` bytes, which end with a line."""
        with folder_errors(self.path):
            self._file.truncate(size)
        self._size = size

    def _whole_size(self, size: int) -> int:
        """Returns the size of the whole lines in the first `size` bytes."""
        return _last_line(self.path, size)[1]

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

    def __enter__(self) -> Self:
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
        self.head = split_line(self._read_last(size))[1] or GENESIS

    def cut_from(self, is_dropped: Callable[[bytes], bool]) -> None:
        """Removes the first line that is to be dropped, and all after it."""
        size = 0
        with folder_errors(self.path), open(self.path, "rb") as file:
            for line in file:
                if is_dropped(line):
                    break
                size += len(line)
        self.cut(size)

    def _read_last(self, size: int) -> bytes:
        """Returns the last whole line in the first `size` bytes."""
        with folder_errors(self.path), open(self.path, "rb") as file:
            start, end = _last_line(self.path, size)
            file.seek(start)
            return file.read(end - start)

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


class PackedFile(ChainedFile):
    """A chained file of compressed lines: each append makes frames of its own, and a cut is made between appends."""

    def cut_from(self, is_dropped: Callable[[bytes], bool]) -> None:
        """Removes the first append with a line to be dropped, and all after it; one is dropped or kept as a whole."""
        size = self._size
        with folder_errors(self.path), open(self.path, "rb") as file:
            for frame in reversed([*read_frames(file, self._size)]):
                if not is_dropped(unpack_frame(file, frame).partition(b"\n")[0]):
                    break
                size = frame.offset
        self.cut(size)

    def _whole_size(self, size: int) -> int:
        """Returns the size of the whole frames; a last one without its contents, after a power cut, is none."""
        with open(self.path, "rb") as file:
            last = deque(read_frames(file, size), 1)
            if not last:
                return 0
            try:
                unpack_frame(file, last[0])
            except RunFolderError as error:
                logger.warning("%s; this last frame is dropped", error)
                return last[0].offset
            return last[0].end

    def _read_last(self, size: int) -> bytes:
        with folder_errors(self.path), open(self.path, "rb") as file:
            last = deque(read_frames(file, size), 1)
            return unpack_frame(file, last[0]).splitlines(keepends=True)[-1] if last else b""

    def _write_each(self, lines: list[bytes]) -> None:
        for frame in pack_lines(lines):
            self.write(frame)
        lines.clear()


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

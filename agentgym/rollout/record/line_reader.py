"""Reads the lines of a file of JSON lines, plain or compressed."""

from __future__ import annotations

import io
import os
from bisect import bisect_right
from collections.abc import Iterator
from functools import cached_property, lru_cache
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from agentgym.errors import RunFolderError
from agentgym.rollout.record.frames import FRAME_BYTES, MAX_BYTES, SUFFIX, Frame, read_frames, unpack_frame

__all__ = ["FILE_NAME", "PACKED_NAME", "LineBlock", "LineReader", "find_episodes"]

FILE_NAME = "episodes.jsonl"
PACKED_NAME = FILE_NAME + SUFFIX
TORN = b"(torn)"
"""The line that is read where a kill left an incomplete frame."""
DAMAGED = b"(damaged)\n"
"""The line that is read for each one of a damaged frame."""


def find_episodes(folder: Path) -> Path | None:
    """Returns the file of a run's episodes, plain or compressed; None if there is none. Raises if there are both."""
    paths = [path for name in (FILE_NAME, PACKED_NAME) if (path := folder / name).is_file()]
    if len(paths) > 1:
        raise RunFolderError(f"{str(folder)!r} holds {FILE_NAME} and {PACKED_NAME}: remove the one that is a copy")
    return paths[0] if paths else None


class LineBlock(NamedTuple):
    """Whole lines that follow each other: where their text begins, and where file and text go on after them."""

    lines: list[bytes]
    offset: int
    """The offset of the first line in the plain text."""
    end: int
    """The position in the file after the block."""
    end_offset: int
    """The offset in the plain text after the block."""


class LineReader:
    """The lines of a file that may grow meanwhile; of a compressed one, a frame is held at a time.

    Offsets count the bytes of the plain text. An incomplete last line is read without its newline.
    """

    def __init__(self, path: Path) -> None:
        self._file = open(path, "rb")  # noqa: SIM115 - closed by close()
        self._is_packed = path.suffix == SUFFIX
        self._unpack = lru_cache(maxsize=1)(self._unpack_frame)

    def __iter__(self) -> Iterator[bytes]:
        if not self._is_packed:
            self._file.seek(0)
            yield from iter(self._read_line, b"")
            return
        end, size = 0, os.fstat(self._file.fileno()).st_size
        try:
            for frame in read_frames(self._file, size):
                yield from self._lines_of(frame)
                end = frame.end
        except RunFolderError:
            yield DAMAGED
            return
        if end < size:
            yield TORN

    def _read_line(self) -> bytes:
        """Returns the next line of a plain file; one that no episode has is damaged, and is not held."""
        line = self._file.readline(MAX_BYTES)
        if len(line) < MAX_BYTES:
            return line
        while not line.endswith(b"\n") and (line := self._file.readline(FRAME_BYTES)):
            pass
        return DAMAGED

    def blocks_after(self, position: int, offset: int) -> Iterator[LineBlock]:
        """Yields the whole lines from a position of the file on, which has the `offset` in the plain text.

        A line that is still being written is left out. Raises RunFolderError where an index entry is damaged.
        """
        if self._is_packed:
            for frame in read_frames(self._file, os.fstat(self._file.fileno()).st_size, position):
                yield LineBlock([*self._lines_of(frame)], offset, frame.end, offset := offset + frame.num_bytes)
            return
        self._file.seek(position)
        while lines := [*self._lines_of_block()]:
            begin, position = position, self._file.tell()
            yield LineBlock(lines, begin, position, position)

    def _lines_of_block(self) -> Iterator[bytes]:
        """Yields the next whole lines of a plain file, of a frame's size; a damaged one is the last."""
        num_bytes = 0
        while num_bytes < FRAME_BYTES and (line := self._read_line()).endswith(b"\n"):
            yield line
            num_bytes = FRAME_BYTES if line == DAMAGED else num_bytes + len(line)
        if num_bytes < FRAME_BYTES:
            self._file.seek(-len(line), os.SEEK_CUR)  # it is read again once it is whole

    def line_at(self, offset: int) -> bytes:
        """Returns the line that begins at an offset."""
        if not self._is_packed:
            self._file.seek(offset)
            return self._read_line()
        frames, starts = self._index
        index = bisect_right(starts, offset) - 1
        text = self._unpack(frames[index])
        begin = offset - starts[index]
        return text[begin : text.index(b"\n", begin) + 1]

    @cached_property
    def _index(self) -> tuple[list[Frame], list[int]]:
        """The frames, and the offset at which each begins in the plain text."""
        frames = list(read_frames(self._file, os.fstat(self._file.fileno()).st_size))
        return frames, list(accumulate((frame.num_bytes for frame in frames), initial=0))[:-1]

    def _lines_of(self, frame: Frame) -> Iterator[bytes]:
        try:
            text = self._unpack(frame)
        except RunFolderError:
            yield from [DAMAGED] * frame.num_lines
            return
        yield from io.BytesIO(text)

    def _unpack_frame(self, frame: Frame) -> bytes:
        return unpack_frame(self._file, frame)

    def close(self) -> None:
        """Closes the file; a second call does nothing."""
        self._file.close()

    def __enter__(self) -> LineReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

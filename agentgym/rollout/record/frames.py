"""Lines compressed in zstd frames, so that a file can be appended to, cut back and read in the middle.

An index entry precedes each frame: its sizes, its number of lines, and a checksum of these. It is a skippable frame of
the format, which `zstd -d` passes over. The only file that imports zstandard.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple
from zlib import crc32

import zstandard

from agentgym.errors import RunFolderError

__all__ = ["FRAME_BYTES", "MAX_BYTES", "SUFFIX", "Frame", "pack_lines", "read_frames", "unpack_frame"]

SUFFIX = ".zst"
FRAME_BYTES = 1 << 20
"""The bytes of lines after which a frame ends."""
MAX_BYTES = 1 << 28
"""The most bytes that are read of one line, and so of one frame: an episode has a hundredth of them at most."""
LEVEL = 3  # the default of zstd
_ENTRY = struct.Struct("<IIQQII")
_MAGIC = 0x184D2A5A  # of a skippable frame: the format has sixteen such numbers
_HEAD = (_MAGIC, _ENTRY.size - 8)


class Frame(NamedTuple):
    """A frame of a file: where its index entry begins, its compressed bytes, its bytes and its lines.

    Example: Frame(offset=0, packed_bytes=65410, num_bytes=1048990, num_lines=90)
    """

    offset: int
    packed_bytes: int
    num_bytes: int
    num_lines: int

    @property
    def end(self) -> int:
        """The offset after the frame."""
        return self.offset + _ENTRY.size + self.packed_bytes


def pack_lines(lines: list[bytes]) -> Iterator[bytes]:
    """Yields the frames of whole lines, each with its index entry; which lines share a frame depends on them alone."""
    compressor = zstandard.ZstdCompressor(level=LEVEL, write_checksum=True)
    frame_lines: list[bytes] = []
    num_bytes = 0
    for line in lines:
        frame_lines.append(line)
        num_bytes += len(line)
        if num_bytes >= FRAME_BYTES:
            yield _pack(compressor, frame_lines)
            frame_lines, num_bytes = [], 0
    if frame_lines:
        yield _pack(compressor, frame_lines)


def _pack(compressor: zstandard.ZstdCompressor, lines: list[bytes]) -> bytes:
    text = b"".join(lines)
    packed: bytes = compressor.compress(text)
    sizes = len(packed), len(text), len(lines)
    return _ENTRY.pack(*_HEAD, *sizes, _checksum(*sizes)) + packed


def _checksum(*sizes: int) -> int:
    return crc32(repr(sizes).encode())


def read_frames(file: BinaryIO, size: int, offset: int = 0) -> Iterator[Frame]:
    """Yields the whole frames from `offset` on in the first `size` bytes of an open file, by their index entries.

    A last frame that a kill left incomplete is left out. Raises RunFolderError where an index entry is damaged.
    """
    while offset < size:
        entry = os.pread(file.fileno(), _ENTRY.size, offset)
        if len(entry) < _ENTRY.size or not any(entry):
            return
        *head, packed_bytes, num_bytes, num_lines, checksum = _ENTRY.unpack(entry)
        is_whole = tuple(head) == _HEAD and checksum == _checksum(packed_bytes, num_bytes, num_lines)
        if not is_whole or num_bytes > MAX_BYTES or num_lines > min(num_bytes, FRAME_BYTES):
            raise RunFolderError(f"{file.name!r} is damaged at byte {offset}")
        frame = Frame(offset, packed_bytes, num_bytes, num_lines)
        if frame.end > size:
            return
        yield frame
        offset = frame.end


def unpack_frame(file: BinaryIO, frame: Frame) -> bytes:
    """Returns the lines of a frame; raises RunFolderError if they are not those that were written."""
    packed = os.pread(file.fileno(), frame.packed_bytes, frame.offset + _ENTRY.size)
    try:
        if zstandard.frame_content_size(packed) != frame.num_bytes:  # which it would be given memory for
            raise RunFolderError(f"{file.name!r} is damaged at byte {frame.offset}: another frame was indexed")
        text: bytes = zstandard.ZstdDecompressor().decompress(packed, max_output_size=frame.num_bytes)
    except (zstandard.ZstdError, MemoryError) as error:
        raise RunFolderError(f"{file.name!r} is damaged at byte {frame.offset}: {error}") from error
    if (len(text), text.count(b"\n")) != (frame.num_bytes, frame.num_lines):
        raise RunFolderError(f"{file.name!r} is damaged at byte {frame.offset}: another frame was indexed")
    return text

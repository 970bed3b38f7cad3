"""A file in GGUF: where it is, its digest, and its header, read without the tensors and compared with its length."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from hashlib import file_digest
from math import prod
from pathlib import Path

from agentgym.errors import RunFolderError

__all__ = ["GgufHeader", "file_sha256", "find_gguf", "is_gguf", "read_header"]

MAGIC = b"GGUF"
VERSIONS = (2, 3)
"""The versions of the format; a file in the other byte order has neither."""
NUMBERS = {**dict(enumerate("BbHhIif?")), 10: "Q", 11: "q", 12: "d"}
"""The codes of `struct` for the types of a setting that are numbers."""
TEXT, ARRAY = 8, 9
ALIGNMENT = 32
"""The number of bytes at whose multiples tensors begin, unless the setting `general.alignment` has another."""
MAX_DIMENSIONS = 4


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """The header of a file: its settings by their names, with the length of an array in its place."""

    settings: Mapping[str, int | float | str]
    types: Mapping[str, int]
    """The number of the type that a tensor is stored in, by the tensor's name."""
    num_weights: int
    """The numbers in all tensors together."""


def is_gguf(name: str) -> bool:
    """Returns True for the name of a file in GGUF.

    >>> is_gguf("models/gemma.gguf"), is_gguf("models/gemma")
    (True, False)
    """
    return name.lower().endswith(".gguf")


def find_gguf(path: Path) -> Path | None:
    """Returns the GGUF file that a path is, or that a folder without safetensors contains; None if there is none.

    Raises RunFolderError for a folder with several, and for a file that does not exist.
    """
    if is_gguf(path.name) and not path.is_dir():
        if path.is_file():
            return path
        fetch = "hf download OWNER/NAME FILE --local-dir FOLDER"
        raise RunFolderError(f"there is no file {str(path)!r}; `{fetch}` fetches one of the Hugging Face hub")
    files = [] if next(path.glob("*.safetensors"), None) else sorted(path.glob("*.gguf"))
    if len(files) > 1:
        names = ", ".join(file.name for file in files[:4])
        raise RunFolderError(f"{str(path)!r} has {len(files)} models in GGUF ({names}): name one of the files")
    return files[0] if files else None


def file_sha256(file: Path) -> str:
    """Returns the SHA-256 of a file's content, in hexadecimal digits."""
    state = file.stat()
    return _sha256(file, state.st_mtime_ns, state.st_size)


@lru_cache(maxsize=64)
def _sha256(file: Path, _modified_ns: int, _size: int) -> str:
    with file.open("rb") as opened:
        return file_digest(opened, "sha256").hexdigest()


def read_header(file: Path, block_sizes: Mapping[int, tuple[int, int]]) -> GgufHeader:
    """Returns the header of a file; raises RunFolderError for one that is damaged, or of another format.

    `block_sizes` are the numbers of a block and its bytes, by the type; tensors of other types are not measured.
    """
    try:
        with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return _Reader(content).header(block_sizes)
    except OSError as error:
        raise RunFolderError(f"{str(file)!r} cannot be read: {error.strerror}") from error
    except (ValueError, struct.error) as error:  # ValueError for an empty file too
        reason = "it ends within its header" if isinstance(error, struct.error) else error
        raise RunFolderError(f"{str(file)!r} is not a whole model in GGUF: {reason}") from error


class _Reader:
    """Reads a file from its beginning; raises ValueError or struct.error for what no file in GGUF contains."""

    def __init__(self, content: mmap.mmap) -> None:
        self._content = content
        self._offset = 0

    def header(self, block_sizes: Mapping[int, tuple[int, int]]) -> GgufHeader:
        magic = self._bytes(len(MAGIC))
        if magic != MAGIC:
            raise ValueError(f"it begins with {magic!r}")
        version = self._number("I")
        if version not in VERSIONS:
            raise ValueError(f"the version of its format is {version}, not one of {VERSIONS}")
        num_tensors, num_settings = self._number("Q"), self._number("Q")
        settings = {self._text(): self._setting(self._number("I")) for _ in range(num_settings)}
        types, num_weights, end = dict[str, int](), 0, 0
        for _ in range(num_tensors):
            name, num_dimensions = self._text(), self._number("I")
            if num_dimensions > MAX_DIMENSIONS:
                raise ValueError(f"the tensor {name[:40]!r} has {num_dimensions} dimensions")
            count = prod(self._number("Q") for _ in range(num_dimensions))
            types[name], offset = self._number("I"), self._number("Q")
            num_weights += count
            per_block, block_bytes = block_sizes.get(types[name], (1, 0))
            end = max(end, offset + count // per_block * block_bytes)
        alignment = settings.get("general.alignment", ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"its alignment is {alignment!r}")
        missing = -(-self._offset // alignment) * alignment + end - len(self._content)
        if missing > 0:
            raise ValueError(f"it lacks {missing:,} bytes of its tensors, so it was not copied whole")
        return GgufHeader(settings, types, num_weights)

    def _setting(self, kind: int) -> int | float | str:
        if kind == TEXT:
            return self._text()
        if kind != ARRAY:
            return self._number(self._code(kind))
        kind, count = self._number("I"), self._number("Q")
        if kind == TEXT:
            for _ in range(count):
                self._skip(self._number("Q"))
        else:
            self._skip(count * struct.calcsize(f"<{self._code(kind)}"))
        return count

    def _code(self, kind: int) -> str:
        if kind not in NUMBERS:
            raise ValueError(f"a setting has the type {kind}")
        return NUMBERS[kind]

    def _text(self) -> str:
        return self._bytes(self._number("Q")).decode()

    def _bytes(self, size: int) -> bytes:
        start = self._offset
        self._skip(size)
        return self._content[start : start + size]

    def _skip(self, size: int) -> None:
        self._offset += size
        if self._offset > len(self._content):
            raise struct.error

    def _number(self, code: str) -> int:
        number: int = struct.unpack_from(f"<{code}", self._content, self._offset)[0]
        self._offset += struct.calcsize(f"<{code}")
        return number

"""An index as a file: the same documents give the same bytes, and a torn file is detected.

Version 1: a line `agentgym search index 1`; a line of JSON with the sizes of the sections in bytes, and the SHA-256 of
these sizes and all sections; then the sections: documents (JSON lines), words (a line each), begins (int64), postings,
counts and lengths (int32), little-endian.
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentgym.errors import NOT_JSON, ConfigError
from agentgym.tools.search.document import Document
from agentgym.tools.search.index import Postings, SearchIndex

__all__ = ["load_index", "save_index"]

MAGIC = b"agentgym search index "
VERSION = 1
ARRAYS = {"begins": "<i8", "postings": "<i4", "counts": "<i4", "lengths": "<i4"}


def save_index(index: SearchIndex, path: Path) -> None:
    """Writes the index atomically. An existing index is replaced; any other file raises ConfigError."""
    rows = [
        json.dumps([document.url, document.title, document.text], ensure_ascii=False) for document in index.documents
    ]
    postings = index.postings
    arrays: tuple[NDArray[Any], ...] = (postings.begins, postings.documents, postings.counts, postings.lengths)
    sections = {
        "documents": "\n".join(rows).encode("utf-8", "surrogatepass"),
        "words": "\n".join(postings.words).encode("utf-8", "surrogatepass"),
        **{name: values.astype(kind).tobytes() for (name, kind), values in zip(ARRAYS.items(), arrays, strict=True)},
    }
    body = b"".join(sections.values())
    sizes = {name: len(section) for name, section in sections.items()}
    header = json.dumps({"sections": sizes, "sha256": _digest(sizes, body)})
    beside = path.parent / f".{path.name}.{uuid.uuid4().hex}"
    try:
        _check_replaceable(path)
        beside.write_bytes(b"%s%d\n%s\n%s" % (MAGIC, VERSION, header.encode(), body))
        os.replace(beside, path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise ConfigError(f"cannot write the index {str(path)!r}: {error.strerror}") from error


def _check_replaceable(path: Path) -> None:
    if path.is_file():
        with path.open("rb") as there:
            if not MAGIC.startswith(there.read(len(MAGIC))):
                raise ConfigError(f"{str(path)!r} is there and is not a search index: give another name, or remove it")


def load_index(path: Path) -> SearchIndex:
    """Loads an index; raises ConfigError for a file that is torn, changed, of another version or no index."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read the index {str(path)!r}: {error.strerror}") from error
    first, _, rest = content.partition(b"\n")
    if not first.startswith(MAGIC):
        raise ConfigError(f"{str(path)!r} is not a search index; `agentgym corpus index DIR -o INDEX` writes one")
    if first != b"%s%d" % (MAGIC, VERSION):
        version = first.removeprefix(MAGIC).decode("ascii", "replace")[:20]
        raise ConfigError(f"the index {str(path)!r} is of version {version}, this reads {VERSION}: rebuild it")
    header, _, body = rest.partition(b"\n")
    sizes = _sections(header, body, path)
    parts: dict[str, bytes] = {}
    begin = 0
    for name, size in sizes.items():
        parts[name] = body[begin : begin + size]
        begin += size
    rows = [json.loads(row) for row in parts["documents"].decode("utf-8", "surrogatepass").split("\n")]
    words = tuple(parts["words"].decode("utf-8", "surrogatepass").split("\n")) if parts["words"] else ()
    arrays: list[Any] = [np.frombuffer(parts[name], kind) for name, kind in ARRAYS.items()]
    return SearchIndex([Document(*row) for row in rows], Postings(words, *arrays))


def _sections(header: bytes, body: bytes, path: Path) -> dict[str, int]:
    """Returns the sizes of the sections; content that is as it was written is trusted from here on."""
    try:
        fields = json.loads(header)
        sizes, digest = dict(fields["sections"]), str(fields["sha256"])
        total = sum(sizes.values())
    except (*NOT_JSON, KeyError, TypeError):
        raise ConfigError(f"the index {str(path)!r} is torn: its header cannot be read; rebuild it") from None
    if total != len(body):
        raise ConfigError(f"the index {str(path)!r} is torn: it has {len(body)} bytes of {total}; rebuild it")
    if _digest(sizes, body) != digest:
        raise ConfigError(f"the index {str(path)!r} was changed: its SHA-256 is not as written; rebuild it")
    return sizes


def _digest(sizes: dict[str, int], body: bytes) -> str:
    return hashlib.sha256(json.dumps(sizes).encode() + body).hexdigest()

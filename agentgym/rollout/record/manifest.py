"""The manifest of a complete folder of files: it names each with its size and digest, and is written last."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from agentgym.types import JSON

__all__ = ["MANIFEST", "replace_file", "replacing", "sync", "what_is_torn", "write_manifest"]

MANIFEST = "manifest.json"


def write_manifest(folder: Path, about: Mapping[str, JSON]) -> None:
    """Writes `manifest.json` over everything in the folder, when all of it is on the disk; it includes `about`.

    Example: {"step": 20, "files": {"config.json": {"bytes": 812, "sha256": "9f86d0..."}, ...}}
    """
    files: dict[str, JSON] = {}
    for path in _files(folder):
        sync(path)
        files[path.relative_to(folder).as_posix()] = {"bytes": path.stat().st_size, "sha256": _digest(path)}
    for inner in [path for path in folder.rglob("*") if path.is_dir()]:
        sync(inner)
    (folder / MANIFEST).write_text(json.dumps({**about, "files": files}, indent=1, default=dict) + "\n")
    sync(folder / MANIFEST)
    sync(folder)


def what_is_torn(folder: Path) -> str | None:
    """Returns how the folder differs from its manifest, by the name of the file; None if it is complete."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        entries = {str(name): (int(entry["bytes"]), str(entry["sha256"])) for name, entry in manifest["files"].items()}
    except FileNotFoundError:
        return f"it has no {MANIFEST}, which is written last"
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        return f"{MANIFEST} is torn ({type(error).__name__}: {error})"
    for name, (size, digest) in entries.items():
        try:
            size_now = (folder / name).stat().st_size
            if size_now != size:
                return f"{name} has {size_now:,} bytes, and {MANIFEST} says {size:,}"
            if _digest(folder / name) != digest:
                return f"{name} holds other bytes than {MANIFEST} says: it is damaged, or of another checkpoint"
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            return f"{name} cannot be read ({error.strerror or error})"
    return None


def replace_file(path: Path, text: str) -> None:
    """Writes a small file to the disk atomically, as `replacing` does."""
    with replacing(path) as part:
        part.write_text(text, encoding="utf-8")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a new file beside `path` to write, which takes its place at the end; after an error it is removed.

    A link at `path` is replaced: what it leads to, which may be any file of the user, stays as it is.
    """
    part = path.with_name(f".{secrets.token_hex(4)}.{path.name}")
    os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    try:
        yield part
        sync(part)
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def sync(path: Path) -> None:
    """Writes a file, or the names in a folder, to the disk; does nothing if it does not exist."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

"""Folders and files at an address of fsspec: `s3://bucket/run`, `gs://bucket/train.parquet`, `file:///mnt/runs/run`."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from agentgym.errors import AgentGymError, ConfigError, RunFolderError
from agentgym.home_folder import ensure_home

__all__ = ["RemoteFolder", "cached_files", "cached_folder", "is_remote", "keep_folder"]

ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://.+")
PIECE_BYTES = 8 * 2**20


def is_remote(name: str) -> bool:
    """Returns True for an address with a scheme.

    >>> is_remote("s3://bucket/model"), is_remote("runs/model"), is_remote("Qwen/Qwen3-0.6B")
    (True, False, False)
    """
    return ADDRESS.fullmatch(name) is not None


class RemoteFolder:
    """A folder in a file system of fsspec, whose own errors become RunFolderError with the address."""

    def __init__(self, address: str) -> None:
        """Raises ConfigError if the scheme is unknown, or the library of its file system is not installed."""
        try:
            from fsspec.core import url_to_fs  # here, because few folders are remote

            self._files, self._root = url_to_fs(address)
        except (ImportError, ValueError) as error:
            raise ConfigError(f"{address!r} cannot be opened: {error}") from error
        self.address = address
        self._folders: set[str] = set()

    def listing(self) -> dict[str, str]:
        """Returns a digest of what is known of each file in it, by its path; nothing if there is none."""
        with self._naming_errors("read"):
            self._files.invalidate_cache()
            top, files = self._root, self._files
            entries: dict[str, dict[str, Any]] = files.find(top, detail=True) if files.exists(top) else {}
        start = len(self._root.rstrip("/")) + 1
        return {path[start:]: _digest(str(sorted(info.items()))) for path, info in entries.items()}

    def matching(self, pattern: str) -> dict[str, str]:
        """Returns the same of the folder's own files with names like the pattern."""
        with self._naming_errors("read"):
            self._files.invalidate_cache()
            entries: dict[str, dict[str, Any]] = self._files.glob(self._path(pattern), detail=True)
        files = {path: info for path, info in entries.items() if info.get("type") == "file"}
        return {path.rpartition("/")[2]: _digest(str(sorted(info.items()))) for path, info in sorted(files.items())}

    def read(self, path: str) -> bytes | None:
        """Returns the content of a small file, or None if it does not exist."""
        with self._naming_errors("read"):
            try:
                return bytes(self._files.cat_file(self._path(path)))
            except FileNotFoundError:
                return None

    def write(self, path: str, content: bytes) -> None:
        """Writes a small file."""
        with self._naming_errors("write"):
            self._make_parent(path)
            self._files.pipe_file(self._path(path), content)

    def download(self, path: str, into: Path, *, append: bool = False) -> None:
        """Copies a file to this machine, after what `into` holds already if `append`."""
        into.parent.mkdir(parents=True, exist_ok=True)
        mode = "ab" if append else "wb"
        with self._naming_errors("read"), self._files.open(self._path(path), "rb") as source, into.open(mode) as target:
            shutil.copyfileobj(source, target, PIECE_BYTES)

    def upload(self, file: Path, path: str, start: int = 0, end: int | None = None) -> None:
        """Copies the bytes from `start` up to `end` of a file of this machine."""
        left = (file.stat().st_size if end is None else end) - start
        with self._naming_errors("write"):
            self._make_parent(path)
            with file.open("rb") as source, self._files.open(self._path(path), "wb") as target:
                source.seek(start)
                while left > 0 and (piece := source.read(min(left, PIECE_BYTES))):
                    target.write(piece)
                    left -= len(piece)

    def delete(self, path: str) -> None:
        """Deletes a file."""
        with self._naming_errors("delete"):
            self._files.rm_file(self._path(path))

    def _path(self, path: str) -> str:
        return f"{self._root.rstrip('/')}/{path}"

    def _make_parent(self, path: str) -> None:
        """Makes the file's folder; a bucket, which is the top of the path, is never made."""
        folder = self._path(path).rpartition("/")[0]
        if folder in self._folders:
            return
        top = "/" * folder.startswith("/") + folder.strip("/").partition("/")[0]
        if not self._files.exists(top):
            raise FileNotFoundError(f"there is no {top!r}")
        if folder.strip("/") != top.strip("/"):
            self._files.makedirs(folder, exist_ok=True)
        self._folders.add(folder)

    @contextmanager
    def _naming_errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except AgentGymError:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
            raise RunFolderError(f"cannot {what} {self.address!r}: {reason}") from error


def cached_folder(address: str, patterns: tuple[str, ...]) -> Path:
    """Returns a copy of the folder's own files with names like the patterns, fetched if they changed since.

    Copies are in `agentgym/models` of the user's cache (XDG_CACHE_HOME, or ~/.cache). Raises RunFolderError if there is
    no such file.
    """
    remote = RemoteFolder(address)
    listed = remote.listing()
    names = sorted(path for path in listed if any(fnmatch(path, pattern) for pattern in patterns) and "/" not in path)
    if not names:
        raise RunFolderError(f"there is no model in {address!r}: it has no file like {', '.join(patterns)}")
    return _copy_once(remote, {path: listed[path] for path in names}, "models")


def cached_files(address: str) -> list[Path]:
    """Returns copies of the files at an address, whose last part may be a pattern; fetched if they changed since.

    Copies are in `agentgym/data` of the user's cache. Raises RunFolderError if there is no such file.
    """
    folder, _, pattern = address.rpartition("/")
    remote = RemoteFolder(folder)
    digests = remote.matching(pattern)
    if not digests:
        raise RunFolderError(f"no file {address!r}")
    return [_copy_once(remote, {name: digest}, "data") / name for name, digest in digests.items()]


def _copy_once(remote: RemoteFolder, files: Mapping[str, str], kind: str) -> Path:
    """Returns a folder of the user's cache with these files of a remote folder, each given with its digest."""

    def fill(part: Path) -> None:
        for path in files:
            remote.download(path, part / path)

    return keep_folder(kind, [remote.address, *(f"{path} {digest}" for path, digest in files.items())], fill)


def keep_folder(kind: str, state: Sequence[str], fill: Callable[[Path], None]) -> Path:
    """Returns the folder of the user's cache for a state, such as the digests of files; `fill` writes a new one."""
    ensure_home()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "agentgym" / kind
    folder = cache / _digest("\n".join(state))[:24]
    if not folder.is_dir():
        part = cache / f".{folder.name}.{secrets.token_hex(4)}"
        try:
            part.mkdir(parents=True)
            fill(part)
            part.rename(folder)
        except RunFolderError:
            raise
        except OSError as error:
            if not folder.is_dir():  # no other process was faster
                other = "the variable XDG_CACHE_HOME names another folder for caches"
                raise RunFolderError(f"cannot write into {str(cache)!r}: {error}; {other}") from error
        finally:
            shutil.rmtree(part, ignore_errors=True)
    return folder


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()

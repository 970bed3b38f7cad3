"""The folders of a run on nodes that do not share the file system of the node on which it was started."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from agentgym.errors import EngineError
from agentgym.trainers.cluster.actors import Actor, call_all

__all__ = ["ONE_NODE", "FileServer", "NodeFiles"]

PIECE_BYTES = 64 * 2**20
PREFIX = "agentgym-files-"
WEIGHTS = (".safetensors", ".bin", ".pt")
P = ParamSpec("P")
T = TypeVar("T")


class FileServer:
    """An actor on the node of the command, which reads and writes files below some folders for other nodes."""

    def __init__(self, roots: Sequence[str]) -> None:
        self._roots = [os.path.abspath(root) for root in roots]

    def listing(self, folder: str) -> list[tuple[str, int, int]]:
        """Returns name, size and time (ns) of each file in a folder, without those of its subfolders.

        The time tells an older checkpoint of the same sizes, at the same path of another node, from this one.
        """
        return _listing(self._path(folder))

    def read(self, path: str, start: int) -> bytes:
        """Returns a piece of a file from a position on, at most `PIECE_BYTES`; nothing at its end."""
        with self._path(path).open("rb") as file:
            file.seek(start)
            return file.read(PIECE_BYTES)

    def write(self, path: str, start: int, content: bytes) -> None:
        """Writes a piece of a file at a position, and makes its folder."""
        file = self._path(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("r+b" if start else "wb") as opened:
            opened.seek(start)
            opened.write(content)

    def _path(self, name: str) -> Path:
        path = os.path.abspath(name)
        if not any(os.path.commonpath([root, path]) == root for root in self._roots):
            raise EngineError(f"{path!r} is in none of the run's folders")
        return Path(path)


@dataclass(frozen=True)
class NodeFiles:
    """The run's folders as a process on some node reads and writes them; `server` is None if no other node has any.

    Copies are in the node's folder for temporary files, until a later run on it finds them unused.
    """

    run: str
    """The name of the run in the cluster."""
    server: Actor[FileServer] | None = None

    def folder(self, path: str, *, has_weights: bool = True) -> Path:
        """Returns the folder itself if it is there with the same files, otherwise a copy; blocks meanwhile.

        Without `has_weights` the files of weights are left out.
        """
        if self.server is None:
            return Path(path)
        files = self._ask(FileServer.listing, path)
        if _listing(Path(path)) == files:
            return Path(path)
        names = [name for name, _, _ in files if has_weights or not name.endswith(WEIGHTS)]
        home = self._home()
        copy = home / hashlib.sha256(f"{path} {has_weights}".encode()).hexdigest()[:16]
        with _exclusive_lock(copy.with_suffix(".lock")):
            if not copy.exists():
                part = copy.with_suffix(".part")
                shutil.rmtree(part, ignore_errors=True)
                part.mkdir()
                for name in names:
                    self._download(os.path.join(path, name), part / name)
                os.replace(part, copy)
        return copy

    def write(self, folder: str, marker: str, work: Callable[[Path], T]) -> T:
        """Calls `work` with a folder, whose files are in `folder` afterwards.

        It is `folder` itself where a file with the name `marker` is in it, as on the node of the command.
        """
        if self.server is None or Path(folder, marker).exists():
            return work(Path(folder))
        with tempfile.TemporaryDirectory(dir=self._home()) as local:
            done = work(Path(local))
            for file in Path(local).rglob("*"):
                if file.is_file():
                    self._upload(file, os.path.join(folder, file.relative_to(local)))
        return done

    def _download(self, path: str, into: Path) -> None:
        with into.open("wb") as file:
            while piece := self._ask(FileServer.read, path, file.tell()):
                file.write(piece)

    def _upload(self, file: Path, path: str) -> None:
        with file.open("rb") as opened:
            start, piece = 0, opened.read(PIECE_BYTES)
            while piece or not start:
                self._ask(FileServer.write, path, start, piece)
                start += max(1, len(piece))
                piece = opened.read(PIECE_BYTES)

    def _ask(self, method: Callable[Concatenate[FileServer, P], T], *arguments: P.args, **kwargs: P.kwargs) -> T:
        assert self.server is not None
        return call_all([self.server], method, *arguments, **kwargs)[0]

    def _home(self) -> Path:
        """Returns the folder of this run's copies on this node, and removes those of runs that have ended."""
        place = Path(tempfile.gettempdir())
        home = place / f"{PREFIX}{self.run}"
        home.mkdir(mode=0o700, exist_ok=True)
        if home not in _locks:
            _locks[home] = _lock(home / ".in-use", fcntl.LOCK_SH)
        for other in place.glob(f"{PREFIX}*"):
            if other != home and other.is_dir() and (other / ".in-use").exists():
                with suppress(OSError):
                    os.close(_lock(other / ".in-use", fcntl.LOCK_EX | fcntl.LOCK_NB))
                    shutil.rmtree(other, ignore_errors=True)
        return home


ONE_NODE = NodeFiles("")
"""The folders where all processes see the same ones."""
_locks: dict[Path, int] = {}
"""The locks that this process has on folders of copies, until it ends."""


def _listing(folder: Path) -> list[tuple[str, int, int]]:
    if not folder.is_dir():
        return []
    files = ((file.name, file.stat()) for file in folder.iterdir() if file.is_file())
    return sorted((name, stat.st_size, stat.st_mtime_ns) for name, stat in files)


@contextmanager
def _exclusive_lock(path: Path) -> Iterator[None]:
    file = _lock(path, fcntl.LOCK_EX)
    try:
        yield
    finally:
        os.close(file)


def _lock(path: Path, kind: int) -> int:
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, kind)
    except OSError:
        os.close(file)
        raise
    return file

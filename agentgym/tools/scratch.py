"""A folder for an episode's files that no path can leave."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator

from agentgym.errors import EnvironmentFault, ToolFailure

__all__ = ["Scratch"]

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
MAX_DEPTH = 16
MAX_NAME_BYTES = 255  # the limit of Linux file systems
OF_THE_PATH = frozenset(
    {errno.EACCES, errno.EEXIST, errno.EILSEQ, errno.EINVAL, errno.EISDIR, errno.ELOOP, errno.ENXIO, errno.EPERM}
)
"""The system errors that the model's request can cause."""


class Scratch:
    """Reads, writes and lists files in its own temporary folder.

    A path is opened name by name, each in the folder before it, and links are not followed. So it stays inside,
    whatever it contains and whatever is changed meanwhile. An impossible request is a ToolFailure; a failure of the
    machine is an EnvironmentFault.
    """

    def __init__(self, max_file_bytes: int, max_total_bytes: int, max_files: int) -> None:
        self._max_file, self._max_total, self._max_files = max_file_bytes, max_total_bytes, max_files
        self.folder = tempfile.mkdtemp(prefix="agentgym-files-")
        try:
            self._root = os.open(self.folder, FOLDER)
        except OSError:
            os.rmdir(self.folder)
            raise

    def close(self) -> None:
        """Removes the folder with its content; a second call does nothing."""
        if self._root >= 0:
            os.close(self._root)
            self._root = -1
            shutil.rmtree(self.folder, ignore_errors=True)

    def read(self, path: str) -> bytes:
        """Returns a file's content."""
        with self._parent_of(path) as (folder, name), _translate_errors(path):
            file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
            try:
                self._check_regular(path, os.fstat(file))
                with open(file, "rb", closefd=False) as opened:
                    return opened.read(self._max_file)
            finally:
                os.close(file)

    def write(self, path: str, content: bytes, *, new: bool) -> None:
        """Writes a file atomically; `new` refuses an existing one. Missing folders are created."""
        if len(content) > self._max_file:
            raise ToolFailure(f"{path!r} would have {len(content)} bytes; a file may have {self._max_file}")
        with self._parent_of(path, make=True) as (folder, name), _translate_errors(path):
            before = self._size_of(path, folder, name)
            if before is not None and new:
                raise ToolFailure(
                    f"{path!r} exists already: change it with str_replace or insert, or choose another name"
                )
            num_bytes, count = self._usage()
            if num_bytes - (before or 0) + len(content) > self._max_total:
                raise ToolFailure(f"no room: all files together may have {self._max_total} bytes, and have {num_bytes}")
            if before is None and count >= self._max_files:
                raise ToolFailure(f"no room: there are {count} files and folders, and there may be {self._max_files}")
            beside = f".{os.urandom(8).hex()}"
            file = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=folder)
            try:
                with open(file, "wb") as opened:
                    opened.write(content)
                os.replace(beside, name, src_dir_fd=folder, dst_dir_fd=folder)
            except OSError:
                os.unlink(beside, dir_fd=folder)
                raise

    def names(self, path: str) -> list[str]:
        """Lists a folder recursively: folders end with a slash, files with their size."""
        names = self._split(path, may_be_root=True)
        with contextlib.ExitStack() as stack, _translate_errors(path):
            folder = self._walk(stack, names)
            return sorted(self._tree(folder, ""))

    @contextlib.contextmanager
    def _parent_of(self, path: str, *, make: bool = False) -> Iterator[tuple[int, str]]:
        *folders, name = self._split(path)
        with contextlib.ExitStack() as stack:
            with _translate_errors(path):
                folder = self._walk(stack, folders, make=make)
            yield folder, name

    def _split(self, path: str, *, may_be_root: bool = False) -> list[str]:
        if path.startswith("/"):
            raise ToolFailure(f"{path!r} is absolute; paths begin in the scratch folder, such as 'notes/plan.txt'")
        names = [name for name in path.split("/") if name not in ("", ".")]
        if ".." in names or "\0" in path:
            raise ToolFailure(f"{path!r} leads outside; '..' and NUL characters are not allowed")
        if not names and not may_be_root:
            raise ToolFailure(f"{path!r} names no file")
        if len(names) > MAX_DEPTH:
            raise ToolFailure(f"a path has at most {MAX_DEPTH} parts, this one {len(names)}")
        if any(len(name.encode("utf-8", "surrogatepass")) > MAX_NAME_BYTES for name in names):
            raise ToolFailure(f"a name has at most {MAX_NAME_BYTES} bytes")
        return names

    def _walk(self, stack: contextlib.ExitStack, names: list[str], *, make: bool = False) -> int:
        folder = self._root
        for name in names:
            if make:
                with contextlib.suppress(FileExistsError):
                    self._make(name, folder)
            folder = os.open(name, FOLDER, dir_fd=folder)
            stack.callback(os.close, folder)
        return folder

    def _make(self, name: str, folder: int) -> None:
        try:
            os.stat(name, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            if self._usage()[1] >= self._max_files:
                raise ToolFailure(f"no room: there may be {self._max_files} files and folders") from None
            os.mkdir(name, 0o700, dir_fd=folder)

    def _size_of(self, path: str, folder: int, name: str) -> int | None:
        try:
            stat_result = os.stat(name, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            return None
        self._check_regular(path, stat_result)
        return stat_result.st_size

    def _check_regular(self, path: str, stat_result: os.stat_result) -> None:
        if stat.S_ISDIR(stat_result.st_mode):
            raise ToolFailure(f"{path!r} is a folder")
        if not stat.S_ISREG(stat_result.st_mode):
            raise ToolFailure(f"{path!r} is no plain file")
        if stat_result.st_size > self._max_file:
            raise ToolFailure(f"{path!r} has {stat_result.st_size} bytes; a file may have {self._max_file}")

    def _usage(self) -> tuple[int, int]:
        """Returns the bytes of all files, and the number of files and folders."""
        size = count = 0
        for _, folders, files, folder in os.fwalk(".", dir_fd=self._root):
            count += len(folders) + len(files)
            for name in files:
                with contextlib.suppress(FileNotFoundError):
                    size += os.stat(name, dir_fd=folder, follow_symlinks=False).st_size
        return size, count

    def _tree(self, top: int, prefix: str) -> Iterator[str]:
        with os.scandir(top) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    yield f"{prefix}{entry.name}/"
                    folder = os.open(entry.name, FOLDER, dir_fd=top)
                    try:
                        yield from self._tree(folder, f"{prefix}{entry.name}/")
                    finally:
                        os.close(folder)
                elif entry.is_file(follow_symlinks=False):
                    yield f"{prefix}{entry.name} ({entry.stat(follow_symlinks=False).st_size} bytes)"
                else:
                    yield f"{prefix}{entry.name} (no plain file)"


@contextlib.contextmanager
def _translate_errors(path: str) -> Iterator[None]:
    """Turns system errors into messages for the model, without the folder's real path.

    A machine without disk space, memory or open files is not the model's mistake: that is an EnvironmentFault.
    """
    try:
        yield
    except FileNotFoundError:
        raise ToolFailure(f"there is no {path!r}; `list` shows what is there") from None
    except NotADirectoryError:
        raise ToolFailure(f"{path!r} leads through what is no folder") from None
    except UnicodeEncodeError:
        raise ToolFailure("a path holds characters that no file name can have") from None
    except OSError as error:
        if error.errno not in OF_THE_PATH:
            raise EnvironmentFault(f"the files of the episode cannot be used: {error.strerror}") from error
        raise ToolFailure(f"{path!r} cannot be used: {error.strerror}") from None

"""Packs the files of a box, and unpacks them in another one. A program: it is run inside of boxes, with Python alone.

Modes and times are kept. Landlock lets no mode be changed, so files are created with theirs.
"""

import io
import os
import shutil
import stat
import sys
import tarfile
from typing import IO

OPEN_MODES = {tarfile.REGTYPE: 0o400, tarfile.DIRTYPE: 0o700}
"""The rights that packing a file or a folder takes."""


def pack(archive: str, own: set[str], left_out: set[str]) -> None:
    """Packs the working folder. The folders `own` are those of every box; of `left_out` nothing is packed."""
    with tarfile.open(archive, "w", format=tarfile.PAX_FORMAT) as tar:
        for folder, folders, files in os.walk("."):
            for name in [*folders, *files]:
                path = os.path.normpath(os.path.join(folder, name))
                if path in left_out and name in folders:
                    folders.remove(name)
                if path not in own and path != archive:
                    _add(tar, path)


def _add(tar: tarfile.TarFile, path: str) -> None:
    if stat.S_ISSOCK(os.lstat(path).st_mode):  # no archive can hold it, and no process is left to answer
        return
    entry = tar.gettarinfo(path)
    needed = OPEN_MODES.get(entry.type, 0)
    if entry.mode & needed != needed:
        os.chmod(path, entry.mode | needed)
    content: IO[bytes] = io.BytesIO()
    if entry.isreg():
        try:
            content = open(path, "rb")  # noqa: SIM115  # closed below
        except PermissionError:  # its mode could not be changed: no program of the next box can read it either
            entry.size = 0
    with content:
        tar.addfile(entry, content)


def unpack(archive: str) -> None:
    """Unpacks an archive into the working folder, in place of what is there, and removes it."""
    os.umask(0)
    with tarfile.open(archive) as tar:
        entries = tar.getmembers()
        for entry in entries:
            if not entry.isdir():
                os.makedirs(os.path.dirname(entry.name) or ".", 0o755, exist_ok=True)
                if os.path.lexists(entry.name):
                    os.unlink(entry.name)
            if entry.isdir():
                os.makedirs(entry.name, entry.mode | 0o700, exist_ok=True)
            elif entry.issym():
                os.symlink(entry.linkname, entry.name)
            elif entry.islnk():
                os.link(entry.linkname, entry.name)
            elif entry.isfifo():
                os.mkfifo(entry.name, entry.mode)
            elif (content := tar.extractfile(entry)) is not None:
                handle = os.open(entry.name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, entry.mode)
                with open(handle, "wb") as file:
                    shutil.copyfileobj(content, file)
    os.unlink(archive)
    for entry in reversed(entries):  # the content of a folder before the folder
        if not entry.issym():
            os.chmod(entry.name, entry.mode)
        os.utime(entry.name, (entry.mtime, entry.mtime), follow_symlinks=False)


if __name__ == "__main__":
    archive, *lists = sys.argv[1:]
    if lists:
        own, left_out = (set(names.split("\n")) for names in lists)
        pack(archive, own, left_out)
    else:
        unpack(archive)

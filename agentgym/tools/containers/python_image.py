"""An image of this machine's own Python and shell, for daemons that have none and reach no registry."""

from __future__ import annotations

import functools
import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import BinaryIO

from agentgym.errors import SandboxError
from agentgym.tools.containers.daemon import Daemon

__all__ = ["IMAGE", "IMAGE_LABEL", "host_image", "host_image_name"]

IMAGE = "agentgym-python"
IMAGE_LABEL = "agentgym.image"
"""The label on our images: they are made again when they are needed."""
COMMANDS = """
awk base64 basename bash cat chmod chown cmp comm cp cut date dd df diff dirname du echo egrep env expand expr false
fgrep find fold grep gunzip gzip head id install join ln ls md5sum mkdir mktemp mv nl od paste patch printf pwd readlink
realpath rm rmdir sed seq sh sha1sum sha256sum shuf sleep sort split stat sum tac tail tar tee test timeout touch tr
true truncate uname uniq wc which whoami xargs yes zcat
"""
"""The programs that are included, if this machine has them."""
LEFT_OUT = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idlelib",
    "ensurepip",
    "turtledemo",
    "tkinter",
    "lib2to3",
}
LOADER = re.compile(rb"(/[\w./-]*/ld-[\w.-]+)\0")
"""The loader, as an ELF program names it among its first bytes."""
FOLDERS = ("/dev", "/etc", "/proc", "/sys", "/tmp")
ACCOUNTS = {
    "/etc/passwd": b"root:x:0:0::/root:/bin/sh\nnobody:x:65534:65534::/tmp:/bin/sh\n",
    "/etc/group": b"root:x:0:\nnogroup:x:65534:\n",
}


def host_image(daemon: Daemon) -> str:
    """Returns the name of the image, which is made if the daemon has none with exactly this content."""
    name = host_image_name()
    if not daemon.has_image(name):
        with tempfile.TemporaryFile() as file:
            _write_tar(file)
            file.seek(0)
            path = f"{os.path.dirname(os.path.realpath(sys.executable))}:/usr/local/bin:/usr/bin:/bin"
            daemon.import_image(file, name, [f'LABEL {IMAGE_LABEL}="python"', f"ENV PATH={path}"])
    return name


@functools.cache
def host_image_name() -> str:
    """Returns the image's name, which has a digest of its whole content."""
    digest = hashlib.sha256(repr(sorted(ACCOUNTS.items())).encode())
    for path in _entries():
        about = os.lstat(path)
        digest.update(f"\n{path}\0{about.st_mode}\0{int(about.st_mtime)}\0".encode())
        if os.path.islink(path):
            digest.update(os.readlink(path).encode())
        elif os.path.isfile(path):
            with open(path, "rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return f"{IMAGE}:{digest.hexdigest()[:16]}"


@functools.cache
def _entries() -> tuple[str, ...]:
    """Returns folders, links and files, each once: the daemon refuses an archive that names one twice."""
    entries: dict[str, None] = {}
    python = os.path.realpath(sys.executable)
    programs = [
        python,
        f"{os.path.dirname(python)}/python3",
        *filter(None, (shutil.which(name, path="/bin:/usr/bin") for name in COMMANDS.split())),
    ]
    library = [path for root in _library_roots() for path in _files_below(root)]
    dynamic = [os.path.realpath(path) for path in (*programs, *(path for path in library if path.endswith(".so")))]
    for path in (*programs, *library, *_libraries_of(sorted(set(dynamic))), "/etc/ld.so.cache"):
        if os.path.lexists(path):
            _add(path, entries)
    return tuple(sorted(entries))


def _library_roots() -> list[str]:
    names = ("stdlib", "platstdlib")
    values = {"base": sys.base_prefix, "platbase": sys.base_exec_prefix}
    return sorted({sysconfig.get_path(name, vars=values) for name in names})


def _files_below(root: str) -> Iterator[str]:
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in LEFT_OUT and not name.startswith("config-")]
        yield from (os.path.join(folder, name) for name in names if ".opt-" not in name and not name.endswith(".a"))


def _libraries_of(programs: list[str]) -> set[str]:
    """Returns the shared libraries that programs load, and the loader itself, which lists them."""
    with open(os.path.realpath(sys.executable), "rb") as file:
        match = LOADER.search(file.read(4096))
    if match is None:
        raise SandboxError("this machine's Python has no loader that lists its libraries: name an image with Python")
    loader = match[1].decode()
    with ThreadPoolExecutor() as threads:
        lists = threads.map(lambda program: _list_libraries(loader, program), programs)
        return set().union(*lists, {loader})


def _list_libraries(loader: str, program: str) -> set[str]:
    """Returns the files that the loader would map for a program, which is not run; none for scripts and static ones."""
    listing = subprocess.run([loader, "--list", program], capture_output=True, text=True, check=False, env={})
    return set(re.findall(r"(?:=> |^\s+)(/\S+) \(0x", listing.stdout, re.MULTILINE))


def _add(path: str, entries: dict[str, None]) -> None:
    """Adds a path, with the folders and links that lead to it."""
    here, parts = "/", os.path.normpath(path).strip("/").split("/")
    for index, part in enumerate(parts):
        here = os.path.join(here, part)
        if os.path.islink(here):
            entries[here] = None
            target = os.path.join(os.path.dirname(here), os.readlink(here), *parts[index + 1 :])
            return _add(target, entries)
        entries[here] = None
    return None


def _write_tar(file: BinaryIO) -> None:
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
        entries = set(_entries())
        for path in FOLDERS:
            if path not in entries:
                tar.addfile(_folder(path))
        for path, content in ACCOUNTS.items():
            about = tarfile.TarInfo(path.strip("/"))
            about.size = len(content)
            tar.addfile(about, io.BytesIO(content))
        for path in _entries():
            _write_entry(tar, path)


def _folder(path: str) -> tarfile.TarInfo:
    about = tarfile.TarInfo(path.strip("/"))
    about.type, about.mode = tarfile.DIRTYPE, 0o1777 if path == "/tmp" else 0o755
    return about


def _write_entry(tar: tarfile.TarFile, path: str) -> None:
    """Writes a path so that every user may read it, without a set-user-id bit."""
    about = tar.gettarinfo(path, arcname=path.strip("/"))
    about.uid = about.gid = 0
    about.uname = about.gname = ""
    if about.isdir():
        tar.addfile(_folder(path))
    elif about.issym():
        tar.addfile(about)
    else:
        about.type, about.linkname = tarfile.REGTYPE, ""  # files with two names are two files
        about.size = os.path.getsize(path)
        about.mode = 0o555 if about.mode & 0o111 else 0o444
        with open(path, "rb") as file:
            tar.addfile(about, file)

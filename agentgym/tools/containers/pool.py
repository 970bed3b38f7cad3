"""Containers of one kind, started before they are needed, and snapshots of prepared ones."""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import uuid
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from agentgym.errors import ConfigError, SandboxError
from agentgym.tools.containers.daemon import Daemon
from agentgym.tools.containers.owner import labels
from agentgym.tools.containers.python_image import host_image
from agentgym.tools.containers.workspace import FOLDER, ContainerLimits, Workspace

__all__ = ["ContainerPool", "Kind", "shared_pool"]

NOBODY = "65534:65534"


@dataclass(frozen=True, kw_only=True)
class Kind:
    """The source of a pool's containers, and their limits."""

    image: str = ""
    """An image in the daemon; by default one of this machine's own Python and shell."""
    dockerfile: str = ""
    """A folder with a Dockerfile, in place of an image."""
    dockerfile_text: str = ""
    """The text to build from, in place of the folder's file `Dockerfile`."""
    folder: str = FOLDER
    """The folder where commands are run and files are named from; `/` is the image's own one, and the root."""
    limits: ContainerLimits = field(default_factory=ContainerLimits)
    user: str = NOBODY
    """The `user:group`, as numbers, that runs commands; not root, who could end the first process."""
    num_warm: int = 1
    """The number of containers that wait, started."""

    def __post_init__(self) -> None:
        owner, _, group = self.user.partition(":")
        if not owner.isdecimal() or not (group or owner).isdecimal() or int(owner) == 0:
            raise ConfigError(f"user is 'user:group' in numbers, and not root, got {self.user!r}")
        if self.image and self.dockerfile:
            raise ConfigError("a container has an image or a Dockerfile, and both were given")
        if self.dockerfile and not self.dockerfile_text and not (Path(self.dockerfile) / "Dockerfile").is_file():
            raise ConfigError(f"dockerfile is a folder that holds a Dockerfile; {self.dockerfile!r} holds none")


class ContainerPool:
    """Hands out containers. May be used from many threads."""

    def __init__(self, kind: Kind) -> None:
        self._kind = kind
        self._id = uuid.uuid4().hex[:12]
        """The ID in its images' names: another pool, or a process with the same PID elsewhere, removes only its own."""
        self._daemon = Daemon()
        self._lock = threading.Lock()
        self._snapshot_locks: dict[str, threading.Lock] = {}
        self._warm: list[Workspace] = []
        self._snapshots: set[str] = set()
        self._starting: set[threading.Thread] = set()
        self._closed = False
        resources = (self._starting, self._warm, self._snapshots, self._daemon)
        self._finish = weakref.finalize(self, _finish, *resources, os.getpid())
        self._image = self._found_image()

    def take(self) -> Workspace:
        """Returns a fresh container; it belongs to the caller, who closes it."""
        with self._lock:
            self._check_open()
            ready = self._warm.pop() if self._warm else None
            if len(self._starting) + len(self._warm) < self._kind.num_warm:
                thread = threading.Thread(target=self._start_one, name="agentgym-containers", daemon=True)
                self._starting.add(thread)
                thread.start()
        return ready or self._start_container(self._image)

    def take_prepared(self, key: str, prepare: Callable[[Workspace], None]) -> Workspace:
        """Returns a container as `prepare` leaves it. That runs once for a key; all others start from a snapshot."""
        digest = hashlib.sha256(repr((self._image, key)).encode()).hexdigest()[:16]
        name = f"agentgym-snapshot:{digest}-{self._id}"
        with self._lock:
            lock = self._snapshot_locks.setdefault(name, threading.Lock())
        with lock:
            if name not in self._snapshots:
                with contextlib.closing(self.take()) as workspace:
                    prepare(workspace)
                    workspace.snapshot(name)
                self._keep_snapshot(name)
        return self._start_container(name)

    def close(self) -> None:
        """Ends containers that wait or are starting, and removes the snapshots."""
        with self._lock:
            self._closed = True
        self._finish()

    def _check_open(self) -> None:
        if self._closed:
            raise SandboxError("this pool of containers was closed")

    def _keep_snapshot(self, name: str) -> None:
        """Registers a new snapshot for `close`; removes it if that was called meanwhile."""
        with self._lock:
            if not self._closed:
                self._snapshots.add(name)
                return
        self._daemon.remove_image(name)
        self._check_open()

    def _found_image(self) -> str:
        kind = self._kind
        if kind.dockerfile:
            folder = Path(kind.dockerfile).resolve()
            name = f"agentgym-built:{_digest(folder, kind.dockerfile_text)}-{self._id}"
            self._daemon.build_image(folder, name, labels(), kind.dockerfile_text)
            self._snapshots.add(name)
            return name
        if kind.image and not self._daemon.has_image(kind.image):
            raise ConfigError(f"the Docker daemon has no image {kind.image!r}: `docker pull {kind.image}`")
        return kind.image or host_image(self._daemon)

    def _start_container(self, image: str) -> Workspace:
        return Workspace(self._daemon, image, self._kind.limits, self._kind.user, self._kind.folder)

    def _start_one(self) -> None:
        workspaces: list[Workspace] = []
        try:
            workspaces.append(self._start_container(self._image))
        except SandboxError:  # the next caller of `take` starts it, and gets the error
            pass
        finally:
            with self._lock:
                self._starting.discard(threading.current_thread())
                self._warm += workspaces


def _digest(folder: Path, text: str) -> str:
    digest = hashlib.sha256(text.encode())
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        digest.update(f"{path.relative_to(folder)}\0{path.stat().st_size}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _finish(
    starting: set[threading.Thread], warm: list[Workspace], images: set[str], daemon: Daemon, owner: int
) -> None:
    if os.getpid() != owner:  # a forked child of the owner is ending; it does not own the containers
        return
    for thread in [*starting]:
        thread.join()
    with contextlib.suppress(SandboxError):  # the daemon is gone, and its containers with it
        while warm:
            warm.pop().close()
        for name in images:
            daemon.remove_image(name)
    images.clear()
    daemon.close()


_lock = threading.Lock()
_pools: dict[tuple[int, Kind], ContainerPool] = {}


def shared_pool(kind: Kind) -> ContainerPool:
    """Returns the process's pool of a kind; it ends with the process."""
    with _lock:
        key = (os.getpid(), kind)
        if key not in _pools:
            _pools[key] = ContainerPool(kind)
        return _pools[key]

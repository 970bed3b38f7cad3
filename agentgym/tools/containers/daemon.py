"""The Docker daemon, by the `docker` SDK: images, containers, and streams into them. No other file imports the SDK."""

from __future__ import annotations

import contextlib
import functools
import os
import select
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from io import BufferedReader, BytesIO
from pathlib import Path
from typing import Any, BinaryIO, ParamSpec, TypeVar, cast
from urllib.parse import urlsplit

from agentgym.errors import SandboxError
from agentgym.extras import install_extra
from agentgym.tools.containers.owner import OWNER, labels

__all__ = ["Container", "ContainerPlan", "ContainerStream", "Daemon", "Found"]

CALL_S, END_S = 120.0, 10.0
HEAD, STDERR = struct.Struct("!BxxxI"), 2
MAX_KEPT = 256
"""The most unused connections that are kept; there are as many as requests were made at once."""
STREAMS = ("/attach", "/start")
"""Ends of URL paths whose connection becomes a stream, and leaves its pool permanently."""
DEFAULT_HOST = "unix:///var/run/docker.sock"

P = ParamSpec("P")
R = TypeVar("R")


def _translate_errors(call: Callable[P, R]) -> Callable[P, R]:
    """Turns the SDK's errors into SandboxError."""

    @functools.wraps(call)
    def call_docker(*args: P.args, **kwargs: P.kwargs) -> R:
        import docker.errors
        import requests

        try:
            return call(*args, **kwargs)
        except (docker.errors.DockerException, requests.exceptions.RequestException) as error:
            raise SandboxError(f"Docker: {error}") from error

    return call_docker


@dataclass(frozen=True, kw_only=True)
class ContainerPlan:
    """Everything that a container is started with. Anything that is not listed is denied."""

    image: str
    command: Sequence[str]
    memory_bytes: int
    """The memory of all its processes and its in-memory files together; there is no swap beyond it."""
    num_processes: int
    """The number of processes and threads together."""
    num_cores: float = 1.0
    user: str = ""
    """The user's name or number; by default the image's."""
    capabilities: Sequence[str] = ()
    network: str = "none"
    is_read_only: bool = True
    ipc: str = "none"
    tmpfs: Mapping[str, str] = field(default_factory=dict)
    """The in-memory folders: path to mount options."""
    folders: Sequence[Path] = ()
    """The folders of this machine that can be read at the same path."""
    seccomp: str = ""
    """The profile as JSON; by default Docker's own."""
    has_stdin: bool = False
    """True if it ends when the stream that was attached to it does, however that ended."""
    working_folder: str = ""


@dataclass(frozen=True)
class Found:
    """A container, image or network with a label of ours."""

    id: str
    name: str
    labels: Mapping[str, str]


class Daemon:
    """A connection to the daemon at DOCKER_HOST or at the default socket. May be used from many threads."""

    def __init__(self) -> None:
        try:
            import docker
        except ImportError as error:
            raise SandboxError(f"the docker package is not installed: {install_extra('docker')}") from error
        where = os.environ.get("DOCKER_HOST") or DEFAULT_HOST
        advice = f"no Docker daemon answers at {where}: start one, or name it by DOCKER_HOST"
        if fault := _fault_of(where):
            raise SandboxError(f"{advice} ({fault})")
        try:
            self._client = docker.DockerClient.from_env(timeout=CALL_S)
            _share_pool(self._client.api)
            self._client.ping()
        except docker.errors.DockerException as error:
            raise SandboxError(f"{advice} ({error})") from error

    def close(self) -> None:
        """Closes the connections; containers keep running."""
        self._client.close()

    @_translate_errors
    def has_image(self, name: str) -> bool:
        """Returns whether the daemon has an image."""
        import docker.errors

        try:
            self._client.api.inspect_image(name)
        except docker.errors.ImageNotFound:
            return False
        return True

    @_translate_errors
    def volumes_of(self, image: str) -> list[str]:
        """Returns the folders that each container of the image gets a volume for."""
        return sorted(self._client.api.inspect_image(image)["Config"].get("Volumes") or {})

    @_translate_errors
    def import_image(self, tar: BinaryIO, name: str, changes: Sequence[str]) -> None:
        """Makes an image of the files in a tar archive; `changes` are lines of a Dockerfile."""
        repository, _, tag = name.partition(":")
        self._client.api.import_image_from_data(tar, repository=repository, tag=tag, changes=list(changes))
        if not self.has_image(name):
            raise SandboxError(f"the Docker daemon did not take the image {name}")

    @_translate_errors
    def build_image(self, folder: Path, name: str, labels: Mapping[str, str], text: str = "") -> None:
        """Builds an image from the Dockerfile in a folder, or from `text` in place of that file."""
        import docker.errors

        # In memory: for a folder the SDK makes a temporary file, which stays if this process is killed meanwhile.
        lines = file.read_text().splitlines() if (file := folder / ".dockerignore").is_file() else []
        tar = docker.utils.tar(str(folder), exclude=lines, dockerfile=("Dockerfile", text or None), fileobj=BytesIO())
        try:
            self._client.images.build(
                fileobj=tar, custom_context=True, tag=name, labels={**labels}, rm=True, forcerm=True
            )
        except docker.errors.BuildError as error:
            log = "".join(str(line.get("stream", line.get("error", ""))) for line in error.build_log)
            raise SandboxError(f"the Dockerfile in {folder} does not build:\n{log[-2000:]}") from error

    @_translate_errors
    def remove_image(self, name: str) -> bool:
        """Removes an image; False if containers still use it."""
        import docker.errors

        try:
            self._client.api.remove_image(name)
        except docker.errors.ImageNotFound:
            return True
        except docker.errors.APIError as error:
            if error.status_code == 409:
                return False
            raise
        return True

    @_translate_errors
    def create(self, plan: ContainerPlan) -> Container:
        """Creates a container, labelled as this process's, without starting it."""
        api = self._client.api
        options = ["no-new-privileges", *([f"seccomp={plan.seccomp}"] if plan.seccomp else [])]
        host = api.create_host_config(
            auto_remove=True,
            binds={str(path): {"bind": str(path), "mode": "ro"} for path in plan.folders},
            cap_add=list(plan.capabilities),
            cap_drop=["ALL"],
            ipc_mode=plan.ipc,
            log_config={"Type": "none"},
            mem_limit=plan.memory_bytes,
            memswap_limit=plan.memory_bytes,
            nano_cpus=int(plan.num_cores * 1e9),
            network_mode=plan.network,
            pids_limit=plan.num_processes,
            read_only=plan.is_read_only,
            security_opt=options,
            tmpfs=dict(plan.tmpfs),
        )
        response = api.create_container(
            plan.image,
            list(plan.command),
            entrypoint=[],
            host_config=host,
            labels=labels(),
            stdin_open=plan.has_stdin,
            user=plan.user or None,
            working_dir=plan.working_folder or None,
        )
        return Container(self._client, response["Id"])

    @_translate_errors
    def find_labelled(self, kind: str, label: str = OWNER) -> list[Found]:
        """Returns all `containers`, `images` or `networks` with a label."""
        api = self._client.api
        filters = {"label": label}
        if kind == "containers":
            rows = api.containers(all=True, filters=filters)
        else:
            rows = api.images(filters=filters) if kind == "images" else api.networks(filters=filters)
        return [Found(row["Id"], _name(row), row["Labels"] or {}) for row in rows]

    @_translate_errors
    def remove_network(self, identity: str) -> None:
        """Removes a network that no container is in."""
        self._client.api.remove_network(identity)

    @_translate_errors
    def remove_container(self, identity: str) -> None:
        """Ends a container and removes it; does nothing if it is already gone."""
        _remove(self._client.api, identity)


class Container:
    """One container."""

    def __init__(self, client: object, identity: str) -> None:
        self._api = client.api  # type: ignore[attr-defined]
        self.id = identity

    @_translate_errors
    def attach(self) -> ContainerStream:
        """Attaches to its standard streams; to be called before `start`."""
        params = {"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1}
        return ContainerStream(self._api.attach_socket(self.id, params=params))

    @_translate_errors
    def start(self) -> None:
        """Starts its first process."""
        self._api.start(self.id)

    @_translate_errors
    def begin(self, command: Sequence[str], user: str, folder: str | None) -> tuple[str, ContainerStream]:
        """Starts another process, without input, in a folder or the image's own; returns its ID, and its output."""
        response = self._api.exec_create(self.id, list(command), user=user, workdir=folder)
        return str(response["Id"]), ContainerStream(self._api.exec_start(response["Id"], socket=True))

    @_translate_errors
    def exit_code(self, execution: str) -> int:
        """Returns the exit code of a process of `begin` whose output has ended: it ends itself a moment later."""
        deadline = time.monotonic() + END_S
        while (code := self._api.exec_inspect(execution)["ExitCode"]) is None and time.monotonic() < deadline:
            time.sleep(0.005)
        if code is None:
            raise SandboxError(
                f"Docker: a process in a container has closed its output, and not ended within {END_S:g} s"
            )
        return int(code)

    @_translate_errors
    def extract(self, folder: str, archive: bytes) -> None:
        """Unpacks a tar archive in a folder of it."""
        self._api.put_archive(self.id, folder, archive)

    @_translate_errors
    def archive(self, path: str, max_bytes: int) -> bytes | None:
        """Returns a path of it as a tar archive, cut off after `max_bytes`; None if nothing is there."""
        import docker.errors

        try:
            parts, _ = self._api.get_archive(self.id, path)
        except docker.errors.NotFound:
            return None
        content = bytearray()
        with contextlib.closing(parts):
            for part in parts:
                content += part
                if len(content) >= max_bytes:
                    break
        return bytes(content)

    @_translate_errors
    def commit(self, name: str) -> None:
        """Saves its files as an image with its labels."""
        repository, _, tag = name.partition(":")
        self._api.commit(self.id, repository=repository, tag=tag)

    @_translate_errors
    def remove(self) -> None:
        """Ends and removes it, with its own volumes."""
        _remove(self._api, self.id)


class ContainerStream:
    """A container's streams as a channel of frames: standard output is read, standard error is kept separately."""

    def __init__(self, handle: object) -> None:
        self._handle = handle
        """The SDK's response, which owns the socket and is kept alive here."""
        self._socket = cast(socket.socket, getattr(handle, "_sock", handle))
        self._early = _read_ahead(handle, self._socket)
        self._pending = b""
        self.stderr = b""

    def settimeout(self, seconds: float) -> None:
        """Sets the seconds that the next read or write may wait."""
        self._socket.settimeout(seconds)

    def sendall(self, data: bytes) -> None:
        """Writes to its standard input."""
        self._socket.sendall(data)

    def recv(self, size: int) -> bytes:
        """Reads from its standard output; empty at the end."""
        while not self._pending:
            head = self._exactly(HEAD.size)
            if len(head) < HEAD.size:
                return b""
            kind, length = HEAD.unpack(head)
            content = self._exactly(length)
            if kind == STDERR:
                self.stderr = (self.stderr + content)[-4096:]
            else:
                self._pending = content
        part, self._pending = self._pending[:size], self._pending[size:]
        return part

    def _exactly(self, size: int) -> bytes:
        parts, missing = [], size
        while missing:
            part, self._early = self._early[:missing], self._early[missing:]
            part = part or self._socket.recv(min(missing, 1 << 20))
            if not part:
                break
            parts.append(part)
            missing -= len(part)
        return b"".join(parts)

    def is_quiet(self) -> bool:
        """Returns whether nothing unrequested has come, not even the end."""
        return not (self._pending or self._early) and not select.select([self._socket], [], [], 0)[0]

    def close(self) -> None:
        """Closes the streams, and so ends a container that waits for its standard input."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._handle.close()  # type: ignore[attr-defined]
        self._socket.close()


def _share_pool(api: Any) -> None:
    """Makes requests to a Unix socket share one pool of connections."""
    # The SDK has a pool for each URL, and closes the least recently used one even while a thread waits for its answer.
    adapter, any_url = api.get_adapter(api.base_url), api.base_url
    if hasattr(adapter, "socket_path"):  # other adapters have a pool for each host
        pool_for, adapter.max_pool_size = adapter.get_connection, MAX_KEPT
        adapter.get_connection = lambda url, _=None: pool_for(url if urlsplit(url).path.endswith(STREAMS) else any_url)


def _read_ahead(handle: object, connection: socket.socket) -> bytes:
    """Returns the bytes that came with the answer's head: they are in the SDK's buffer, no longer in the socket."""
    reader: BufferedReader = handle._response.raw._fp.fp  # type: ignore[attr-defined]
    seconds = connection.gettimeout()
    connection.setblocking(False)
    try:
        return reader.peek()
    except OSError:  # nothing has come over TLS
        return b""
    finally:
        connection.settimeout(seconds)


def _remove(api: object, identity: str) -> None:
    import docker.errors

    try:
        api.remove_container(identity, force=True, v=True)  # type: ignore[attr-defined]
    except docker.errors.NotFound:
        return
    except docker.errors.APIError as error:
        if error.status_code != 409:  # it is being removed
            raise


def _name(row: Mapping[str, object]) -> str:
    names = row.get("RepoTags") or row.get("Names") or row.get("Name") or row["Id"]
    name = str(names[0] if isinstance(names, list) else names).removeprefix("/")
    return str(row["Id"]) if "<none>" in name else name  # an image whose name went to another


def _fault_of(address: str) -> str:
    """Returns why no connection to a Unix socket can be made, or ""; the SDK would leave the socket open."""
    if not address.startswith("unix://"):
        return ""
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(address.removeprefix("unix://"))
        except OSError as error:
            return error.strerror or str(error)
    return ""

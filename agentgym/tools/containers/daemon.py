"""The Docker daemon, by the `docker` SDK: images, containers, and streams into them. Nothing else imports it."""

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
from agentgym.tools.containers.owner import OWNER, labels

__all__ = ["Container", "ContainerPlan", "Daemon", "Found", "Stream"]

CALL_S, END_S = 120.0, 10.0
HEAD, STDERR = struct.Struct("!BxxxI"), 2
MOST_KEPT = 256
"""Connections that are kept unused; there are as many as requests were made at once."""
STREAMS = ("/attach", "/start")
"""Ends of paths whose connection becomes a stream, and is taken from its pool for good."""
DEFAULT_HOST = "unix:///var/run/docker.sock"
MISSING = "the docker package is not installed: pip install 'agentgym-llm[docker]'"

P = ParamSpec("P")
R = TypeVar("R")


def _told(call: Callable[P, R]) -> Callable[P, R]:
    """Turns the SDK's errors into SandboxError."""

    @functools.wraps(call)
    def told(*args: P.args, **kwargs: P.kwargs) -> R:
        import docker.errors
        import requests

        try:
            return call(*args, **kwargs)
        except (docker.errors.DockerException, requests.exceptions.RequestException) as error:
            raise SandboxError(f"Docker: {error}") from error

    return told


@dataclass(frozen=True, kw_only=True)
class ContainerPlan:
    """Everything that a container is started with. What is not said is refused to it."""

    image: str
    command: Sequence[str]
    memory_bytes: int
    """Of all its processes and its files in memory together; there is no swap beyond it."""
    num_processes: int
    """Processes and threads together."""
    num_cores: float = 1.0
    user: str = ""
    """Name or number; by default the image's."""
    capabilities: Sequence[str] = ()
    network: str = "none"
    is_read_only: bool = True
    ipc: str = "none"
    tmpfs: Mapping[str, str] = field(default_factory=dict)
    """Folder to mount options."""
    folders: Sequence[Path] = ()
    """Folders of this machine that can be read at the same path."""
    seccomp: str = ""
    """Profile as JSON; by default Docker's own."""
    has_stdin: bool = False
    """Whether it ends when the stream that was attached to it does, however that ended."""
    working_folder: str = ""


@dataclass(frozen=True)
class Found:
    """A container, image or network with a label of ours."""

    id: str
    name: str
    labels: Mapping[str, str]


class Daemon:
    """A connection to the daemon that DOCKER_HOST, or the default socket, names. May be used from many threads."""

    def __init__(self) -> None:
        try:
            import docker
        except ImportError as error:
            raise SandboxError(MISSING) from error
        where = os.environ.get("DOCKER_HOST") or DEFAULT_HOST
        wanted = f"no Docker daemon answers at {where}: start one, or name it by DOCKER_HOST"
        if fault := _fault_of(where):
            raise SandboxError(f"{wanted} ({fault})")
        try:
            self._client = docker.DockerClient.from_env(timeout=CALL_S)
            _share_pool(self._client.api)
            self._client.ping()
        except docker.errors.DockerException as error:
            raise SandboxError(f"{wanted} ({error})") from error

    def close(self) -> None:
        """Closes the connections; containers go on."""
        self._client.close()

    @_told
    def has_image(self, name: str) -> bool:
        """Whether the daemon holds an image."""
        import docker.errors

        try:
            self._client.api.inspect_image(name)
        except docker.errors.ImageNotFound:
            return False
        return True

    @_told
    def volumes_of(self, image: str) -> list[str]:
        """Folders that each container of the image gets a volume for."""
        return sorted(self._client.api.inspect_image(image)["Config"].get("Volumes") or {})

    @_told
    def import_image(self, tar: BinaryIO, name: str, changes: Sequence[str]) -> None:
        """An image whose files are a tar archive's; `changes` are lines of a Dockerfile."""
        repository, _, tag = name.partition(":")
        self._client.api.import_image_from_data(tar, repository=repository, tag=tag, changes=list(changes))
        if not self.has_image(name):
            raise SandboxError(f"the Docker daemon did not take the image {name}")

    @_told
    def build_image(self, folder: Path, name: str, given: Mapping[str, str]) -> None:
        """An image from the Dockerfile in a folder."""
        import docker.errors

        # In memory: of a folder the SDK makes a temporary file, which stays where this process is killed meanwhile.
        lines = file.read_text().splitlines() if (file := folder / ".dockerignore").is_file() else []
        tar = docker.utils.tar(str(folder), exclude=lines, dockerfile=("Dockerfile", None), fileobj=BytesIO())
        try:
            self._client.images.build(
                fileobj=tar, custom_context=True, tag=name, labels={**given}, rm=True, forcerm=True
            )
        except docker.errors.BuildError as error:
            log = "".join(str(line.get("stream", line.get("error", ""))) for line in error.build_log)
            raise SandboxError(f"the Dockerfile in {folder} does not build:\n{log[-2000:]}") from error

    @_told
    def remove_image(self, name: str) -> bool:
        """Removes an image; False where containers still use it."""
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

    @_told
    def create(self, plan: ContainerPlan) -> Container:
        """A container that has not started yet; it is labelled as this process's."""
        api = self._client.api
        options = ["no-new-privileges", *([f"seccomp={plan.seccomp}"] if plan.seccomp else [])]
        host = api.create_host_config(
            auto_remove=True,
            binds={str(one): {"bind": str(one), "mode": "ro"} for one in plan.folders},
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
        made = api.create_container(
            plan.image,
            list(plan.command),
            entrypoint=[],
            host_config=host,
            labels=labels(),
            stdin_open=plan.has_stdin,
            user=plan.user or None,
            working_dir=plan.working_folder or None,
        )
        return Container(self._client, made["Id"])

    @_told
    def found(self, kind: str, label: str = OWNER) -> list[Found]:
        """All `containers`, `images` or `networks` with a label."""
        api = self._client.api
        wanted = {"label": label}
        if kind == "containers":
            rows = api.containers(all=True, filters=wanted)
        else:
            rows = api.images(filters=wanted) if kind == "images" else api.networks(filters=wanted)
        return [Found(one["Id"], _name(one), one["Labels"] or {}) for one in rows]

    @_told
    def remove_network(self, identity: str) -> None:
        """Removes a network that no container is in."""
        self._client.api.remove_network(identity)

    @_told
    def remove_container(self, identity: str) -> None:
        """Ends a container and removes it; one that is gone already is no mistake."""
        _remove(self._client.api, identity)


class Container:
    """One container."""

    def __init__(self, client: object, identity: str) -> None:
        self._api = client.api  # type: ignore[attr-defined]
        self.id = identity

    @_told
    def attach(self) -> Stream:
        """Its standard streams; to be called before `start`."""
        asked = {"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1}
        return Stream(self._api.attach_socket(self.id, params=asked))

    @_told
    def start(self) -> None:
        """Starts its first process."""
        self._api.start(self.id)

    @_told
    def begin(self, command: Sequence[str], user: str, folder: str) -> tuple[str, Stream]:
        """Another process in it, which has no input: its name, and the stream of its output."""
        made = self._api.exec_create(self.id, list(command), user=user, workdir=folder)
        return str(made["Id"]), Stream(self._api.exec_start(made["Id"], socket=True))

    @_told
    def exit_code(self, execution: str) -> int:
        """Of a process that `begin` named, and whose output has ended: it does so itself a moment later."""
        deadline = time.monotonic() + END_S
        while (code := self._api.exec_inspect(execution)["ExitCode"]) is None and time.monotonic() < deadline:
            time.sleep(0.005)
        if code is None:
            raise SandboxError(
                f"Docker: a process in a container has closed its output, and not ended within {END_S:g} s"
            )
        return int(code)

    @_told
    def extract(self, folder: str, archive: bytes) -> None:
        """Unpacks a tar archive in a folder of it."""
        self._api.put_archive(self.id, folder, archive)

    @_told
    def archive(self, path: str, most_bytes: int) -> bytes | None:
        """A path of it as a tar archive, cut off behind so many bytes; None where nothing is there."""
        import docker.errors

        try:
            parts, _ = self._api.get_archive(self.id, path)
        except docker.errors.NotFound:
            return None
        content = bytearray()
        with contextlib.closing(parts):
            for part in parts:
                content += part
                if len(content) >= most_bytes:
                    break
        return bytes(content)

    @_told
    def commit(self, name: str) -> None:
        """Keeps its files as an image with its labels."""
        repository, _, tag = name.partition(":")
        self._api.commit(self.id, repository=repository, tag=tag)

    @_told
    def remove(self) -> None:
        """Ends it and removes it, with the volumes that are its own."""
        _remove(self._api, self.id)


class Stream:
    """A container's streams as a channel of frames: its standard output is read, standard error kept aside."""

    def __init__(self, handle: object) -> None:
        self._handle = handle
        """Keeps the SDK's response alive, whose socket this is."""
        self._socket = cast(socket.socket, getattr(handle, "_sock", handle))
        self._early = _read_ahead(handle, self._socket)
        self._pending = b""
        self.stderr = b""

    def settimeout(self, seconds: float) -> None:
        """Longest that the next read or write may wait."""
        self._socket.settimeout(seconds)

    def sendall(self, data: bytes) -> None:
        """To its standard input."""
        self._socket.sendall(data)

    def recv(self, size: int) -> bytes:
        """From its standard output; empty at the end."""
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
        """Whether nothing has come that was not asked for, not even the end."""
        return not (self._pending or self._early) and not select.select([self._socket], [], [], 0)[0]

    def close(self) -> None:
        """Ends standard input too, and so the container, if it waits for it."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._handle.close()  # type: ignore[attr-defined]
        self._socket.close()


def _share_pool(api: Any) -> None:
    """Has requests to a socket of files share one pool of connections. The SDK has a pool for each URL, and closes the
    one used longest ago, under a thread that is using it, too: its answer is lost then."""
    adapter, any_url = api.get_adapter(api.base_url), api.base_url
    if hasattr(adapter, "socket_path"):  # others have a pool for each host
        pool_for, adapter.max_pool_size = adapter.get_connection, MOST_KEPT
        adapter.get_connection = lambda url, _=None: pool_for(url if urlsplit(url).path.endswith(STREAMS) else any_url)


def _read_ahead(handle: object, connection: socket.socket) -> bytes:
    """What came together with the answer's head: the SDK's buffer has it, and the socket no more."""
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
    """Why no connection to a socket of files can be made, if so; the SDK would leave it open."""
    if not address.startswith("unix://"):
        return ""
    with socket.socket(socket.AF_UNIX) as one:
        try:
            one.connect(address.removeprefix("unix://"))
        except OSError as error:
            return error.strerror or str(error)
    return ""

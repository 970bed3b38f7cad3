"""A container to work in: commands run in it one after the other, files go in and out, and its state can be kept."""

from __future__ import annotations

import contextlib
import io
import tarfile
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Protocol

from agentgym.errors import ConfigError, SandboxError
from agentgym.settings.config_class import config_class
from agentgym.tools.containers.daemon import Container, ContainerPlan, ContainerStream, Daemon

__all__ = ["FOLDER", "MAX_COMMAND_BYTES", "ContainerLimits", "Ran", "ShellMachine", "Workspace"]

FOLDER = "/work"
"""The folder where commands are run; files are named relative to it."""
UNTIL_STDIN_ENDS = ("sh", "-c", "cat >/dev/null; exit 0")
"""The first process: the container ends with the process that holds its input, however that one ends."""
COMMAND = ("sh", "-c", 'exec 2>&1; exec timeout -s KILL "$1" sh -c "$2"', "sh")
KILL_SCRIPT = """
kill -9 -1
others() { for one in /proc/[0-9]*; do [ "$one" = "/proc/$$" ] || [ ! -O "$one" ] || return 0; done; return 1; }
while others; do :; done
"""
KILL_ALL = ("sh", "-c", KILL_SCRIPT)
"""Run by the commands' user: ends all of that user's processes at once, but not the first one, which is root's."""
MAX_COMMAND_BYTES = (1 << 17) - 1
"""The most bytes that Linux takes as one argument of a program."""
GRACE_S = 10.0
KILL_CODE = 137  # 128 + SIGKILL, as a shell reports it
MIB = 1 << 20


@config_class
class ContainerLimits:
    """The limits of a container, and of each command in it."""

    memory_mb: int = 1024
    """The MiB of all its processes together."""
    num_processes: int = 256
    """The number of processes and threads together."""
    num_cores: float = 1.0
    """The processor time, in cores."""
    time_limit_s: float = 60.0
    """The seconds of one command."""
    output_kb: int = 64
    """The KiB of one command's output; a command that writes more is ended."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0 < value < float("inf"):
                raise ConfigError(f"a container's {name} must be a positive number, got {value!r}")


@dataclass(frozen=True, kw_only=True)
class Ran:
    """The result of a command, e.g. `Ran(output="4\\n", exit_code=0)`."""

    output: str
    """Standard output and standard error, as they came."""
    exit_code: int
    """The exit code; 137 if a limit ended it."""
    seconds: float = 0.0
    """The wall-clock seconds that it took."""
    timed_out: bool = False
    is_cut: bool = False
    """True if it was ended because it wrote too much; `output` is the beginning."""
    is_lost: bool = False
    """True if the container is gone, because processes that the command started could not be ended."""


class ShellMachine(Protocol):
    """A machine to work in, whatever isolates it: a container (`Workspace`) or a box (`BoxWorkspace`)."""

    @property
    def is_open(self) -> bool:
        """False once it is closed or lost."""

    def run(self, command: str, *, time_limit_s: float | None = None) -> Ran:
        """Runs a shell command."""

    def write(
        self, files: Mapping[str, bytes], *, is_protected: bool = False, executables: Collection[str] = ()
    ) -> None:
        """Writes files, by paths relative to the machine's folder; protected ones are root's, where it has a root.

        The files `executables` can be run as programs.
        """

    def read(self, path: str, max_bytes: int = 1 << 20) -> bytes | None:
        """Returns a regular file's content; None if there is none at the path, or a larger one."""

    def end_processes(self) -> None:
        """Ends every process that commands have left; raises SandboxError if it cannot."""

    def renew(self, without: Sequence[str] = ()) -> None:
        """Ends every process, and keeps the files, those in the folders `without` excepted that commands could write.

        Raises SandboxError if it cannot.
        """

    def close(self) -> None:
        """Ends the machine and everything in it; it may be called twice."""


class Workspace:
    """A running container of this process. Commands are run by an ordinary user in `/work`, which that user owns.

    With `folder="/"` they are run in the image's own working folder, and files are named relative to the root.
    """

    def __init__(self, daemon: Daemon, image: str, limits: ContainerLimits, user: str, folder: str = FOLDER) -> None:
        self._daemon, self._limits, self._user, self._folder = daemon, limits, user, folder
        self.is_open = True
        plan = ContainerPlan(
            image=image,
            command=UNTIL_STDIN_ENDS,
            memory_bytes=limits.memory_mb * MIB,
            num_processes=limits.num_processes,
            num_cores=limits.num_cores,
            user="0:0",
            is_read_only=False,
            ipc="private",
            has_stdin=True,
        )
        self._container: Container = daemon.create(plan)
        self._stream: ContainerStream | None = None
        try:
            self._stream = self._container.attach()
            self._container.start()
            if folder != "/":
                self._put([_entry(folder.strip("/"), self._user, None)])
        except BaseException:
            self.close()
            raise

    def run(self, command: str, *, time_limit_s: float | None = None) -> Ran:
        """Runs a shell command. Processes that it leaves go on, unless a limit ended it: then everything ends."""
        if not self.is_open:
            raise SandboxError("this container was discarded: begin another one")
        seconds = self._limits.time_limit_s if time_limit_s is None else time_limit_s
        if not 0 < seconds < float("inf"):  # 0 means no limit to timeout
            raise ConfigError(f"time_limit_s must be a positive number of seconds, got {seconds!r}")
        if len(command.encode("utf-8", "replace")) > MAX_COMMAND_BYTES:
            raise ConfigError(f"a command has at most {MAX_COMMAND_BYTES} bytes: write what is longer to a file")
        execution, stream = self._container.begin(
            [*COMMAND, f"{seconds:g}", command], self._user, self._folder if self._folder != "/" else None
        )
        with contextlib.closing(stream):
            started = time.monotonic()
            output, is_cut, is_late = _read(stream, started + seconds + GRACE_S, self._limits.output_kb * 1024)
        code = KILL_CODE if is_cut or is_late else self._container.exit_code(execution)
        timed_out = is_late or (code == KILL_CODE and time.monotonic() - started >= seconds)
        is_lost = (timed_out or is_cut) and not self._kill_all()
        if is_lost:
            self.close()
        text, took_s = output.decode("utf-8", "replace"), time.monotonic() - started
        return Ran(output=text, exit_code=code, seconds=took_s, timed_out=timed_out, is_cut=is_cut, is_lost=is_lost)

    def write(
        self, files: Mapping[str, bytes], *, is_protected: bool = False, executables: Collection[str] = ()
    ) -> None:
        """Writes files below the folder, as the user's own or as root's; missing folders are created."""
        top, owner = self._folder.strip("/"), "0:0" if is_protected else self._user
        entries: dict[str, tuple[tarfile.TarInfo, bytes]] = {}
        for path, content in files.items():
            pure = PurePosixPath(path)
            if pure.is_absolute() or ".." in pure.parts or not pure.parts or "\0" in path:
                raise ConfigError(f"a file goes to a path relative to {self._folder}, without '..', got {path!r}")
            for parent in reversed(pure.parents[:-1]):
                entries.setdefault(str(parent), _entry(f"{top}/{parent}".strip("/"), owner, None))
            entries[str(pure)] = _entry(f"{top}/{pure}".strip("/"), owner, content)
            if path in executables:
                entries[str(pure)][0].mode = 0o755
        self._put(list(entries.values()))

    def read(self, path: str, max_bytes: int = 1 << 20) -> bytes | None:
        """Returns a regular file's content; None if there is none at the path, or a larger one."""
        archive = self._container.archive(str(PurePosixPath(self._folder) / path), 2 * max_bytes + 10240)
        if archive is None:
            return None
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            first = tar.next()
            if first is None or not first.isreg() or first.size > max_bytes:
                return None
            file = tar.extractfile(first)
            return None if file is None else file.read()

    def snapshot(self, name: str) -> None:
        """Saves the container's files as an image, which is this process's; running processes are not saved."""
        self._container.commit(name)

    def renew(self, without: Sequence[str] = ()) -> None:
        """Ends every process, and keeps the files; folders that the image keeps for root need not be emptied."""
        self.end_processes()

    def end_processes(self) -> None:
        """Ends every process but the first one, which is root's."""
        if not self._kill_all():
            raise SandboxError("the processes in a container could not be ended")

    def close(self) -> None:
        """Ends the container and everything in it; it may be called twice."""
        self.is_open = False
        stream, self._stream = self._stream, None
        try:
            self._container.remove()
        finally:  # closing the stream alone ends it if the daemon does not answer
            if stream is not None:
                stream.close()

    def _kill_all(self) -> bool:
        try:
            execution, stream = self._container.begin(KILL_ALL, self._user, "/")
            with contextlib.closing(stream):
                is_late = _read(stream, time.monotonic() + GRACE_S, 4096)[2]
            return not is_late and self._container.exit_code(execution) == 0
        except SandboxError:  # no process could be started in it any more
            return False

    def _put(self, entries: list[tuple[tarfile.TarInfo, bytes]]) -> None:
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
            for about, content in entries:
                tar.addfile(about, io.BytesIO(content))
        self._container.extract("/", buffer.getvalue())


def _entry(path: str, user: str, content: bytes | None) -> tuple[tarfile.TarInfo, bytes]:
    """Returns an archive's entry for a file of the user, or for a folder if there is no content."""
    about = tarfile.TarInfo(path)
    owner, _, group = user.partition(":")
    about.uid, about.gid = int(owner), int(group or owner)
    about.type = tarfile.REGTYPE if content is not None else tarfile.DIRTYPE
    about.mode, about.size = 0o644 if content is not None else 0o755, len(content or b"")
    return about, content or b""


def _read(stream: ContainerStream, deadline: float, max_bytes: int) -> tuple[bytes, bool, bool]:
    """Returns the output until its end, whether it was too long, and whether it took too long."""
    output = bytearray()
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            return bytes(output), False, True
        stream.settimeout(left)
        try:
            part = stream.recv(1 << 16)
        except TimeoutError:
            return bytes(output), False, True
        if not part:
            return bytes(output), False, False
        output += part
        if len(output) > max_bytes:
            return bytes(output[:max_bytes]), True, False

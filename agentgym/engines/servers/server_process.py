"""A server that we started: waited for until it is ready, watched, and ended with all of its children."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import shutil
import socket
import subprocess
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from agentgym.child_guard import guard_command
from agentgym.engines.servers.http import SERVER_SECRET, HttpClient, HttpRefusal, HttpUnreachable, secret_headers
from agentgym.errors import ConfigError, EngineError

__all__ = ["ServerCommand", "ServerProcess", "free_port", "start_together"]

_log = logging.getLogger(__name__)
END_S = 12.0
NUM_PORTS = 12_000
"""The range from which `free_port` draws; two launches at the same moment draw the same port once in this many."""
TAIL_LINES = 25


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerCommand:
    """The command of a server: `ServerCommand(name="sglang", words=("python", "-m", ...), port=30000, log=path)`."""

    name: str
    words: Sequence[str]
    port: int
    log: Path
    """The file for the server's output."""
    keeps_log: bool = True
    """False deletes the log, and its folder with the last one, when a server that started well is closed."""
    env: Mapping[str, str] | None = None
    """Variables in addition to our own environment."""
    secret: str = field(default="", repr=False)
    """The secret that the server requires with each request; it reads it from AGENTGYM_SERVER_SECRET."""
    gpus: Sequence[str] = ()
    """The GPUs that the server sees; empty if it sees what this process does."""
    ready_path: str = "/health"
    ready_s: float = 600.0
    """Seconds that it may take to load the model and answer `ready_path`."""

    @property
    def url(self) -> str:
        """The address on which it listens: this machine only."""
        return f"http://127.0.0.1:{self.port}"


class ServerProcess:
    """A running server; `close` ends it. It ends by itself when this process does, however that happens."""

    def __init__(self, command: ServerCommand) -> None:
        self.command = command
        self.url = command.url
        self._process: subprocess.Popen[bytes] | None = None
        self._has_answered = False

    async def start(self) -> None:
        """Starts it and waits until it answers; raises EngineError with the end of its log if it does not."""
        command = self.command
        command.log.parent.mkdir(parents=True, exist_ok=True)
        guard = guard_command("server", command.words)
        more = {SERVER_SECRET: command.secret} if command.secret else {}
        more |= {"CUDA_VISIBLE_DEVICES": ",".join(command.gpus)} if command.gpus else {}
        with open(command.log, "ab", opener=_open_private) as log:
            try:
                self._process = subprocess.Popen(
                    guard,
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **(command.env or {}), **more},
                    start_new_session=True,  # Ctrl-C is for us: the episodes in flight still need the server
                )
            except OSError as error:
                raise ConfigError(f"the {command.name} server cannot be started: {error}") from error
        try:
            await self._until_ready()
        except BaseException:
            await self.close()
            raise

    @property
    def pid(self) -> int:
        """The id of the process that guards the server."""
        assert self._process is not None
        return self._process.pid

    @property
    def alive(self) -> bool:
        """True while the server's process runs."""
        return self._process is not None and self._process.poll() is None

    def log_tail(self) -> str:
        """Returns the last lines of its output."""
        try:
            return "\n".join(self.command.log.read_text(errors="replace").splitlines()[-TAIL_LINES:])
        except OSError:
            return "(no log)"

    async def close(self) -> None:
        """Ends the server and whatever it started; a second call does nothing."""
        process = self._process
        if process is None:
            return
        self._process = None
        was_well = self._has_answered and process.poll() is None
        assert process.stdin is not None
        process.stdin.close()
        if await _wait_for_exit(process, END_S):
            if was_well and not self.command.keeps_log:
                self._delete_log()
            return
        _log.warning("the %s server (process %d) does not end; it is killed", self.command.name, process.pid)
        process.kill()
        await _wait_for_exit(process, END_S)

    async def _until_ready(self) -> None:
        command, deadline = self.command, time.monotonic() + self.command.ready_s
        client = HttpClient(self.url, headers=secret_headers(command.secret), timeout_s=10.0)
        try:
            while time.monotonic() < deadline:
                if not self.alive:
                    raise EngineError(f"the {command.name} server ended while starting: {self._last_words()}")
                try:
                    await client.get(command.ready_path)
                    self._has_answered = True
                    return
                except (HttpRefusal, HttpUnreachable):
                    await asyncio.sleep(0.25)
        finally:
            await client.close()
        raise EngineError(
            f"the {command.name} server was not ready within {command.ready_s:g} s (its log: {command.log}): "
            f"{self._last_words()}"
        )

    def _delete_log(self) -> None:
        log = self.command.log
        log.unlink(missing_ok=True)
        if not any(log.parent.glob("*.log")):
            shutil.rmtree(log.parent, ignore_errors=True)

    def _last_words(self) -> str:
        return f"its log {command_log(self.command)} ends with\n{textwrap.indent(self.log_tail(), '  ')}"


def _open_private(path: str, flags: int) -> int:
    """Opens a file that no other user can read: servers log their settings."""
    return os.open(path, flags, 0o600)


async def start_together(processes: Sequence[ServerProcess]) -> None:
    """Starts servers in parallel; if one does not start, ends all of them and raises its error."""
    try:
        outcomes = await asyncio.gather(*(process.start() for process in processes), return_exceptions=True)
    except BaseException:
        for process in processes:
            await process.close()
        raise
    failure = next((outcome for outcome in outcomes if isinstance(outcome, BaseException)), None)
    if failure is None:
        return
    for process in processes:
        await process.close()
    if "No module named" in str(failure):
        raise EngineError(f"{failure}\nname the interpreter that has it with --server.python") from failure
    raise failure


def command_log(command: ServerCommand) -> str:
    """Returns the path of a server's log, quoted."""
    return repr(str(command.log))


async def _wait_for_exit(process: subprocess.Popen[bytes], within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while process.poll() is None and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    return process.poll() is not None


def free_port(host: str = "127.0.0.1") -> int:
    """Returns a port of this machine that is unused now, and that no connection is given later.

    A server may take a minute before it binds its port. So the port is below those that the system gives to connections
    and to programs that ask for any port. Raises EngineError if none of a hundred tries is free.
    """
    above = _first_ephemeral_port()
    draw = random.SystemRandom()  # no seed of the caller's: two processes with one seed would draw the same ports
    for _ in range(100):
        port = draw.randrange(above - NUM_PORTS, above)
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return port
    raise EngineError(f"no port between {above - NUM_PORTS} and {above} is free on this machine")


def _first_ephemeral_port() -> int:
    """Returns the first port that Linux gives to connections; its default, 32768, if that cannot be read or used."""
    try:
        first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 32768
    return first if first - NUM_PORTS > 1024 else 32768

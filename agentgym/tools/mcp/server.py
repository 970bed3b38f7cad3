"""The settings of an MCP server: how it is started or reached, and how long it may take."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from agentgym.errors import ConfigError

__all__ = ["McpServer"]


@dataclass(frozen=True, kw_only=True)
class McpServer:
    """An MCP server: a command that communicates over standard input and output, or a URL (streamable HTTP).

    >>> McpServer.of("python server.py --quiet").command
    ('python', 'server.py', '--quiet')
    >>> McpServer.of("http://127.0.0.1:8000/mcp").url
    'http://127.0.0.1:8000/mcp'
    """

    command: tuple[str, ...] = ()
    """The program and its arguments; it is found as a shell finds it."""
    url: str = ""
    """The URL where the server listens, in place of a command."""
    stateless: bool = False
    """True promises that no call changes the answer to another: all episodes of the process share one server.

    A call that ended it is sent once more to a fresh one. With False, every episode has its own server (over HTTP: its
    own session).
    """
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Environment variables besides HOME, LOGNAME, PATH, SHELL, TERM and USER; it inherits no other of ours."""
    cwd: str | Path | None = None
    """The command's working directory; None is ours."""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """HTTP headers of every request to a URL, such as `Authorization`."""
    call_timeout_s: float = 30.0
    """The seconds after which a call is cancelled; a server that answers no ping after that is ended."""
    start_timeout_s: float = 60.0
    """The seconds that a server may take to start or connect and to list its tools."""

    def __post_init__(self) -> None:
        if bool(self.command) == bool(self.url):
            raise ConfigError("an MCP server is a command or a URL: give one of `command` and `url`")
        if self.url and urlsplit(self.url).scheme not in ("http", "https"):
            raise ConfigError(f"the URL of an MCP server begins with http:// or https://, got {self.url!r}")
        if self.url and (self.env or self.cwd is not None):
            raise ConfigError("env and cwd are for a server that is started by a command, not for a URL")
        if self.command and self.headers:
            raise ConfigError("headers are for a server at a URL, not for one that is started by a command")
        for name in ("call_timeout_s", "start_timeout_s"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(f"{name} is a number of seconds above 0, got {getattr(self, name)!r}")

    @classmethod
    def of(cls, text: str) -> McpServer:
        """Reads a server that a user writes as one text: a URL, or a command line."""
        if "://" in text.split(" ")[0]:
            return cls(url=text)
        try:
            words = tuple(shlex.split(text))
        except ValueError as error:
            raise ConfigError(f"the command of an MCP server cannot be read: {error}: {text!r}") from None
        if not words:
            raise ConfigError("an MCP server is a command line such as 'python server.py', or a URL; got nothing")
        return cls(command=words)

    def __str__(self) -> str:
        return self.url or shlex.join(self.command)

    @property
    def identity(self) -> tuple[object, ...]:
        """A key that is equal for servers that are interchangeable."""
        return (
            self.command,
            self.url,
            tuple(sorted(self.env.items())),
            str(self.cwd),
            tuple(sorted(self.headers.items())),
            self.call_timeout_s,
        )

    def check_program(self) -> None:
        """Raises ConfigError if the command names no program."""
        if self.cwd is not None and not Path(self.cwd).is_dir():
            raise ConfigError(f"the working directory of the MCP server `{self}` is not a folder: {str(self.cwd)!r}")
        if not self.command:
            return
        program = self.command[0]
        if os.sep in program:  # then it is relative to the server's working directory, and not on PATH
            program = os.path.join(self.cwd or "", program)
        if shutil.which(program, path=self.env.get("PATH")) is None:
            raise ConfigError(f"there is no program {self.command[0]!r}, which was to start the MCP server `{self}`")

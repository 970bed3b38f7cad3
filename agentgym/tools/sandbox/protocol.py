"""The interface of a sandbox: programs in, outcomes out, and sessions whose variables persist."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, Protocol, Self

from agentgym.errors import ConfigError
from agentgym.settings.config_class import config_class

__all__ = ["Ended", "Language", "Outcome", "Sandbox", "SandboxLimits", "SandboxSession"]

Language = Literal["python", "shell"]


class Ended(StrEnum):
    """The reason that an execution ended."""

    EXITED = "exited"
    """The program ended by itself, with any exit code."""
    TIME_LIMIT = "time_limit"
    MEMORY = "memory"
    """All its processes together used too much. One that asks for too much at once gets a MemoryError instead."""
    PROCESS_LIMIT = "process_limit"
    DISK_LIMIT = "disk_limit"
    OUTPUT_LIMIT = "output_limit"
    """Standard output and error were too long; the outcome has their beginning."""
    KILLED = "killed"
    """Something else ended it."""


@config_class
class SandboxLimits:
    """The limits of one execution; a session's limits apply to each of its cells."""

    time_limit_s: float = 10.0
    """The wall-clock seconds; a call may ask for fewer."""
    memory_mb: int = 512
    """The MiB of each process's address space, and of the memory that all processes use together."""
    num_processes: int = 32
    """The number of processes and threads together."""
    scratch_mb: int = 64
    """The MiB of files in the working folder."""
    output_kb: int = 256
    """The KiB of standard output and standard error together."""
    num_open_files: int = 128
    """The number of open files of each process."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0 < value < float("inf"):
                raise ConfigError(f"the sandbox's {name} must be a positive number, got {value!r}")
        if self.memory_mb < 64:
            raise ConfigError(f"memory_mb={self.memory_mb} is too little for Python to start: give at least 64")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of an execution, e.g. `Outcome(stdout="4\\n", stderr="", exit_code=0, ended=Ended.EXITED, ...)`."""

    stdout: str
    stderr: str
    exit_code: int
    """The exit code, as of a subprocess: negative for the signal that ended it; -9 if a limit did."""
    ended: Ended
    backend: str
    """`namespaces`, `landlock`, `docker`, or `none (unsafe)`: the kind of box that it ran in."""
    seconds: float
    files: Mapping[str, bytes] = field(default_factory=dict)
    """The requested files that exist: path to content."""
    rolled_back: bool = False
    """True if a session's variables are again as they were before this cell."""
    is_lost: bool = False
    """True if a session's state is gone, so that it takes no more cells."""

    @property
    def ok(self) -> bool:
        """True if the program ended by itself with exit code 0."""
        return self.ended is Ended.EXITED and self.exit_code == 0


class SandboxSession(Protocol):
    """A sequence of cells that share their state: variables in Python, files in both languages.

    A cell that is stopped, or whose process dies, leaves the variables as they were before it. Files are not rolled
    back. Processes that a cell started end with it. Only threads continue, and they do not see the next cell.
    """

    def run(
        self,
        code: str,
        *,
        language: Language = "python",
        files: Mapping[str, bytes] | None = None,
        collect: Sequence[str] = (),
        time_limit_s: float | None = None,
    ) -> Outcome:
        """Runs one cell; a last line that is an expression shows its value."""

    def close(self) -> None:
        """Ends the session and all its processes."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


class Sandbox(Protocol):
    """Runs untrusted code. May be used from many threads at once."""

    backend: str

    def run(
        self,
        code: str,
        *,
        language: Language = "python",
        files: Mapping[str, bytes] | None = None,
        collect: Sequence[str] = (),
        time_limit_s: float | None = None,
    ) -> Outcome:
        """Runs a whole program in its own box.

        `files` (relative path to content) are put into its working folder; `collect` names the files to return, by path
        or pattern (`*.csv`). Failures of the program are in the Outcome; SandboxError is the sandbox's own failure.
        """

    def session(self) -> SandboxSession:
        """Opens a box whose state persists from call to call."""

    def close(self) -> None:
        """Ends all programs that still run."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

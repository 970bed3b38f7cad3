"""What a sandbox is to those who use it: programs in, outcomes out, and sessions whose variables live on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, Protocol, Self

from agentgym.errors import ConfigError

__all__ = ["Ended", "Language", "Outcome", "Sandbox", "SandboxLimits", "SandboxSession"]

Language = Literal["python", "shell"]


class Ended(StrEnum):
    """Why an execution ended."""

    EXITED = "exited"
    """The program came to its end, with whatever exit code."""
    TIME_LIMIT = "time_limit"
    MEMORY = "memory"
    """All its processes together held too much. One that asks for too much at once gets a MemoryError instead."""
    PROCESS_LIMIT = "process_limit"
    DISK_LIMIT = "disk_limit"
    OUTPUT_LIMIT = "output_limit"
    """Standard output and error were too long; what is there is their beginning."""
    KILLED = "killed"
    """Something else ended it."""


@dataclass(frozen=True, kw_only=True)
class SandboxLimits:
    """What one execution may take; a session's limits hold for each of its cells."""

    time_limit_s: float = 10.0
    """Seconds by the clock on the wall; a call may ask for fewer."""
    memory_mb: int = 512
    """MiB of each process's address space, and of the memory that all processes hold together."""
    num_processes: int = 32
    """Processes and threads together."""
    scratch_mb: int = 64
    """MiB of files in the working folder."""
    output_kb: int = 256
    """KiB of standard output and standard error together."""
    num_open_files: int = 128
    """Open files of each process."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0 < value < float("inf"):
                raise ConfigError(f"the sandbox's {name} must be a positive number, got {value!r}")
        if self.memory_mb < 64:
            raise ConfigError(f"memory_mb={self.memory_mb} is too little for Python to start: give at least 64")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How an execution went, e.g. `Outcome(stdout="4\\n", stderr="", exit_code=0, ended=Ended.EXITED, ...)`."""

    stdout: str
    stderr: str
    exit_code: int
    """As of a subprocess: negative for the signal that ended it; -9 where a limit did."""
    ended: Ended
    backend: str
    """`namespaces`, `landlock`, `docker`, or `none (unsafe)`: the box that it ran in."""
    seconds: float
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Path to content of the files that were asked for and are there."""
    rolled_back: bool = False
    """Whether a session's variables are again as they were before this cell."""
    is_lost: bool = False
    """Whether a session's state is gone, so that it takes no more cells."""

    @property
    def ok(self) -> bool:
        """Whether the program came to its end with exit code 0."""
        return self.ended is Ended.EXITED and self.exit_code == 0


class SandboxSession(Protocol):
    """Cells that see what cells before them left: variables in Python, files in both languages.

    A cell that is stopped, or whose process dies, leaves the variables as they were before it. Files are not rolled
    back. What a cell started ends with it: nothing goes on between cells but threads, which do not see the next one.
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
        """Ends the session, and every process of it."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


class Sandbox(Protocol):
    """Runs code that nobody trusts. May be used from many threads at once."""

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
        """Runs a whole program in a box of its own.

        `files` (relative path to content) are put into its working folder; `collect` names the files to bring out, by
        path or pattern (`*.csv`). What the program does is in the Outcome; SandboxError is the sandbox's own failure.
        """

    def session(self) -> SandboxSession:
        """A box whose state lives from call to call."""

    def close(self) -> None:
        """Ends everything that still runs."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

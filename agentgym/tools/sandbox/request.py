"""The checked request of a call to a sandbox: code, language, files in and out, seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Self, get_args

from agentgym.errors import ConfigError
from agentgym.tools.sandbox.protocol import Language, Outcome, SandboxLimits

__all__ = ["ExecutionRequest", "Runner"]

PAGE = 4096


@dataclass(frozen=True, kw_only=True)
class ExecutionRequest:
    """One execution."""

    code: bytes
    language: Language
    files: Mapping[str, bytes]
    collect: Sequence[str]
    time_limit_s: float


class Runner:
    """The base of sandboxes and sessions, which checks their calls and runs the requests."""

    def __init__(self, limits: SandboxLimits) -> None:
        self.limits = limits

    def run(
        self,
        code: str,
        *,
        language: Language = "python",
        files: Mapping[str, bytes] | None = None,
        collect: Sequence[str] = (),
        time_limit_s: float | None = None,
    ) -> Outcome:
        """Runs code, as `Sandbox.run` and `SandboxSession.run` say. Raises ConfigError for what cannot be run."""
        if language not in get_args(Language):
            raise ConfigError(f"language must be one of {', '.join(get_args(Language))}, got {language!r}")
        if "\0" in code and language == "shell":
            raise ConfigError("shell code cannot hold a NUL character")
        self._check_files(files or {})
        if isinstance(collect, str):
            raise ConfigError(f"collect is a list of paths or patterns, got the string {collect!r}")
        request = ExecutionRequest(
            code=code.encode("utf-8", "surrogatepass"),
            language=language,
            files=dict(files or {}),
            collect=tuple(collect),
            time_limit_s=self._seconds(time_limit_s),
        )
        return self._execute(request)

    def close(self) -> None:
        """Ends all programs that still run."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _execute(self, request: ExecutionRequest) -> Outcome:
        raise NotImplementedError

    def _check_files(self, files: Mapping[str, bytes]) -> None:
        for path in files:
            pure = PurePosixPath(path)
            if pure.is_absolute() or ".." in pure.parts or not pure.parts or "\0" in path:
                raise ConfigError(f"a file goes to a path relative to the working folder, without '..', got {path!r}")
        folders = {parent for path in files for parent in PurePosixPath(path).parents}
        if twice := [path for path in files if PurePosixPath(path) in folders]:
            raise ConfigError(f"{twice[0]!r} is given as a file, and as a folder of another file")
        num_pages = sum(-(-len(content) // PAGE) for content in files.values())
        if num_pages * PAGE > self.limits.scratch_mb << 20:
            raise ConfigError(
                f"the files take {num_pages * PAGE} bytes, and the sandbox holds {self.limits.scratch_mb} MiB: open it "
                "with a larger SandboxLimits(scratch_mb=...)"
            )

    def _seconds(self, limit_s: float | None) -> float:
        """Returns the seconds of a call: the requested ones, within the limits."""
        if limit_s is None:
            return self.limits.time_limit_s
        if not 0 < limit_s < float("inf"):
            raise ConfigError(f"time_limit_s must be a positive number of seconds, got {limit_s!r}")
        if limit_s > self.limits.time_limit_s:
            raise ConfigError(
                f"time_limit_s={limit_s:g} of a call is over the sandbox's {self.limits.time_limit_s:g}: open it with "
                f"SandboxLimits(time_limit_s={limit_s:g})"
            )
        return limit_s

"""What a call to a sandbox asks for, checked: code, language, files in and out, seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import get_args

from agentgym.errors import ConfigError
from agentgym.tools.sandbox.protocol import Language, SandboxLimits

__all__ = ["Request"]


@dataclass(frozen=True, kw_only=True)
class Request:
    """One execution."""

    code: bytes
    language: Language
    files: Mapping[str, bytes]
    collect: Sequence[str]
    time_limit_s: float

    @classmethod
    def checked(
        cls,
        code: str,
        language: Language,
        files: Mapping[str, bytes] | None,
        collect: Sequence[str],
        time_limit_s: float,
    ) -> Request:
        """The request, or ConfigError for what cannot be run."""
        if language not in get_args(Language):
            raise ConfigError(f"language must be one of {', '.join(get_args(Language))}, got {language!r}")
        if "\0" in code and language == "shell":
            raise ConfigError("shell code cannot hold a NUL character")
        for path in files or {}:
            pure = PurePosixPath(path)
            if pure.is_absolute() or ".." in pure.parts or not pure.parts or "\0" in path:
                raise ConfigError(f"a file goes to a path relative to the working folder, without '..', got {path!r}")
        if isinstance(collect, str):
            raise ConfigError(f"collect is a list of paths or patterns, got the string {collect!r}")
        if not 0 < time_limit_s < float("inf"):
            raise ConfigError(f"time_limit_s must be a positive number of seconds, got {time_limit_s!r}")
        return cls(
            code=code.encode("utf-8", "surrogatepass"),
            language=language,
            files=dict(files or {}),
            collect=tuple(collect),
            time_limit_s=time_limit_s,
        )

    @classmethod
    def seconds(cls, asked: float | None, limits: SandboxLimits) -> float:
        """The seconds that a call has: what it asks for, within the limits."""
        if asked is not None and asked > limits.time_limit_s:
            raise ConfigError(
                f"time_limit_s={asked:g} of a call is over the sandbox's {limits.time_limit_s:g}: open it with "
                f"SandboxLimits(time_limit_s={asked:g})"
            )
        return limits.time_limit_s if asked is None else asked

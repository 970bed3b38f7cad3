"""Every error that agentgym raises on purpose: one root, a fitting builtin as second base, and all of them pickle."""

from __future__ import annotations

import difflib
import re
import threading
from collections.abc import Iterable
from typing import Literal

__all__ = [
    "CODE_ERRORS",
    "NOT_JSON",
    "AgentGymError",
    "ConfigError",
    "EngineError",
    "EnvironmentFault",
    "InvalidTrajectory",
    "MissingSetting",
    "RenderError",
    "RunFolderError",
    "SandboxError",
    "ToolFailure",
    "ToolSchemaError",
    "TrainingHalted",
    "UnknownName",
    "UserCodeFault",
    "describe_error",
    "is_interrupt",
    "nearest",
    "thread_hint",
]


class AgentGymError(Exception):
    """Root of every error that agentgym raises on purpose."""


class ConfigError(AgentGymError, ValueError):
    """A setting, or a combination of settings, that cannot be run."""


class MissingSetting(ConfigError):
    """A setting that has no default and is not given: `missing NAME` begins the message."""


class UnknownName(AgentGymError, KeyError):
    """A name that no registry, option or environment has."""

    def __str__(self) -> str:  # KeyError quotes its argument, which garbles a sentence
        return str(self.args[0]) if self.args else ""


class InvalidTrajectory(AgentGymError, ValueError):
    """Spans, logprobs, versions or turns that do not line up."""


class ToolSchemaError(AgentGymError, ValueError):
    """A tool definition from which no valid JSON Schema follows."""


class RenderError(AgentGymError, ValueError):
    """A conversation that the chat template cannot render exactly."""


class EnvironmentFault(AgentGymError, RuntimeError):
    """An environment raised; has the id and seed that replay it, and the name of the tool if one raised."""

    def __init__(self, message: str, *, env_id: str = "", seed: int | None = None, tool: str = "") -> None:
        super().__init__(message)
        self.env_id = env_id
        self.seed = seed
        self.tool = tool

    def __reduce__(self) -> tuple[object, ...]:
        return (_environment_fault, (str(self), self.env_id, self.seed, self.tool))


def _environment_fault(message: str, env_id: str, seed: int | None, tool: str) -> EnvironmentFault:
    return EnvironmentFault(message, env_id=env_id, seed=seed, tool=tool)


class UserCodeFault(AgentGymError, RuntimeError):
    """A function or a module of the user raised; the cause is its exception."""


class EngineError(AgentGymError, RuntimeError):
    """An inference engine that failed, or was asked for what it cannot do."""


class SandboxError(AgentGymError, RuntimeError):
    """A sandbox that cannot run here, or that itself failed; the end of a program in a sandbox is an Outcome."""


class ToolFailure(AgentGymError, RuntimeError):
    """Raised by a tool to have its call answered with an error in exactly these words, which the model reads."""

    def __init__(self, message: str, *, kind: Literal["tool_error", "timeout"] = "tool_error") -> None:
        super().__init__(message)
        self.kind = kind

    def __reduce__(self) -> tuple[object, ...]:
        return (_tool_failure, (str(self), self.kind))


def _tool_failure(message: str, kind: Literal["tool_error", "timeout"]) -> ToolFailure:
    return ToolFailure(message, kind=kind)


class TrainingHalted(AgentGymError, RuntimeError):
    """Training stopped itself because going on would train on something wrong."""


class RunFolderError(AgentGymError, OSError):
    """A run folder, checkpoint or model folder that is missing, torn or cannot be written."""


NOT_JSON = (ValueError, RecursionError)
"""The errors of reading a text that is not JSON: one is nested too deeply."""
CODE_ERRORS = (Exception, SystemExit, GeneratorExit, KeyboardInterrupt)
"""The exceptions that user code may raise; `is_interrupt` finds the one that is not its fault."""


def is_interrupt(error: BaseException) -> bool:
    """True for Ctrl-C: Python raises KeyboardInterrupt on the main thread alone, so on others the code raised it."""
    return isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread()


def describe_error(error: BaseException) -> str:
    """Returns one line, never an empty one: the first line of an error's message, after its type if it is not ours.

    >>> describe_error(TimeoutError()), describe_error(ValueError("no digit")), describe_error(ConfigError("no name"))
    ('TimeoutError', 'ValueError: no digit', 'no name')
    """
    line, kind = str(error).strip().partition("\n")[0], type(error).__name__
    if not line:
        return kind
    return line if isinstance(error, AgentGymError) else f"{kind}: {line}{thread_hint(error)}"


def thread_hint(error: BaseException) -> str:
    """Returns what to do about a connection that SQLite refuses because another thread has opened it, else ""."""
    if type(error).__module__ != "sqlite3" or "created in a thread" not in str(error):
        return ""
    return " Open it in start, which runs on the thread of the tools, as __init__ does not"


def nearest(name: str, names: Iterable[str]) -> str:
    """Returns `": did you mean 'x'?"` for the nearest known name, or an empty string when none is near.

    Names are compared without a version: `NoSuch-v0` is not near `SearchQA-v0`.
    """
    folded = {_without_version(candidate): candidate for candidate in names}
    plain_name = _without_version(name)
    matches = difflib.get_close_matches(plain_name, folded)
    matches.sort(
        key=lambda match: sorted(match) != sorted(plain_name)
    )  # letters in another order are the likeliest slip
    return f": did you mean {folded[matches[0]]!r}?" if matches else ""


def _without_version(name: str) -> str:
    return re.sub(r"-v\d+$", "", name.casefold())

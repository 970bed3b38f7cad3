"""The tools `python` and `shell`: code that a model writes, run in a sandbox, with state for an episode."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from agentgym.errors import ConfigError, EnvironmentFault, SandboxError
from agentgym.tools.calling.definition import Tool, as_tool, tool
from agentgym.tools.sandbox import Ended, Language, Outcome, Sandbox, SandboxLimits, SandboxSession, open_sandbox
from agentgym.tools.sandbox.service_settings import backend_of_run, is_service

__all__ = ["CodeTools", "shared_sandbox"]

ANSWER_S = 60.0
"""The seconds after the program's own limit when a call is given up: the sandbox itself has then failed."""
STOP_TEXTS = {
    Ended.TIME_LIMIT: "it was stopped after {limits.time_limit_s:g} s",
    Ended.MEMORY: "it was stopped: its processes held more than {limits.memory_mb} MiB",
    Ended.PROCESS_LIMIT: "it was stopped: more than {limits.num_processes} processes",
    Ended.DISK_LIMIT: "it was stopped: more than {limits.scratch_mb} MiB of files",
    Ended.OUTPUT_LIMIT: "it was stopped: more than {limits.output_kb} KiB of output, of which this is the beginning",
    Ended.KILLED: "it was killed",
}


STATELESS = {
    "python": "Runs a Python program and returns what it prints. Nothing is kept for the next call.",
    "shell": "Runs shell commands (sh). Nothing is kept for the next call.",
}
"""The descriptions of the tools where a code execution service runs them."""


class CodeTools:
    """Gives an environment the tools `python` and `shell`: `tool_sources=[CodeTools]`.

    Each episode has its own session: Python variables and files persist from call to call. All episodes of a process
    that ask for the same limits share the sandbox's server. The model reads the outcome of its program. A failure of
    the sandbox itself is an EnvironmentFault, so that the episode does not count as a zero. With a code execution
    service, every call is a program of its own, as the tools' descriptions then say.
    """

    def __init__(
        self,
        *,
        names: Sequence[Literal["python", "shell"]] = ("python", "shell"),
        limits: SandboxLimits | None = None,
        backend: str = "auto",
        max_calls: int | None = None,
        max_seconds: float | None = None,
    ) -> None:
        """`max_calls` and `max_seconds` are an episode's budgets: its calls, and the total seconds of its programs."""
        unknown = sorted(set(names) - {"python", "shell"})
        if unknown or not names:
            raise ConfigError(f"names must be of python and shell, got {list(names)}")
        for name, budget in (("max_calls", max_calls), ("max_seconds", max_seconds)):
            if budget is not None and not budget > 0:
                raise ConfigError(f"{name} must be positive, or None for no limit, got {budget!r}")
        self._names, self._limits, self._backend = tuple(names), limits or SandboxLimits(), backend
        self._max_calls, self._max_seconds = max_calls, max_seconds
        self._session: SandboxSession | None = None
        self._calls, self._seconds = 0, 0.0
        self._keeps_state = True

    def open(self) -> Sequence[Tool]:
        """Begins an episode's session."""
        self._calls, self._seconds = 0, 0.0
        timeout_s = self._limits.time_limit_s + ANSWER_S
        own = [as_tool(fn).bound_to(self, fn) for fn in (self.python, self.shell)]
        tools = [replace(entry, timeout_s=timeout_s, on_error="raise") for entry in own if entry.name in self._names]
        self._keeps_state = not is_service(backend_of_run(self._backend))
        if self._keeps_state:
            return tools
        return [replace(entry, spec=replace(entry.spec, description=STATELESS[entry.name])) for entry in tools]

    def close(self) -> None:
        """Ends the session and everything it started."""
        if self._session is not None:
            self._session.close()
            self._session = None

    @tool
    def python(self, code: str) -> str:
        """Runs Python code. Variables and files are kept for the next call; the value of a last expression is shown.

        Args:
            code: The code. It has the standard library, and no network.
        """
        return self._run(code, "python")

    @tool
    def shell(self, command: str) -> str:
        """Runs shell commands (sh). Files are kept for the next call, variables are not.

        Args:
            command: One or more commands.
        """
        return self._run(command, "shell")

    def _run(self, code: str, language: Language) -> str:
        if self._max_calls is not None and self._calls >= self._max_calls:
            return f"not run: this episode's {self._max_calls} calls are used up"
        left = self._limits.time_limit_s
        if self._max_seconds is not None:
            left = min(left, self._max_seconds - self._seconds)
        if left <= 0:
            return f"not run: this episode's {self._max_seconds:g} seconds are used up"
        if language == "shell" and "\0" in code:
            return "not run: a command cannot hold a NUL character"
        try:
            sandbox = shared_sandbox(self._backend, self._limits)
            if self._session is None and self._keeps_state:
                self._session = sandbox.session()
            outcome = (self._session or sandbox).run(code, language=language, time_limit_s=left)
        except SandboxError as error:
            raise EnvironmentFault(f"the sandbox failed: {error}") from error
        self._calls += 1
        self._seconds += outcome.seconds
        if outcome.is_lost:
            self.close()
        return format_outcome(outcome, replace(self._limits, time_limit_s=left), language)


def format_outcome(outcome: Outcome, limits: SandboxLimits, language: Language) -> str:
    """Returns the text for the model: standard output, standard error and, unless all went well, how it ended."""
    parts = [text.removesuffix("\n") for text in (outcome.stdout, outcome.stderr) if text]
    notes = []
    if outcome.ended is not Ended.EXITED:
        notes.append(STOP_TEXTS[outcome.ended].format(limits=limits))
    elif outcome.exit_code:
        notes.append(f"exit code {outcome.exit_code}")
    if outcome.is_lost:
        notes.append("variables and files are lost")
    elif outcome.rolled_back and language == "python":
        notes.append("variables are as they were before this call")
    if notes:
        parts.append(f"[{'; '.join(notes)}]")
    return "\n".join(parts) or "(no output)"


_lock = threading.Lock()
_sandboxes: dict[tuple[object, ...], Sandbox] = {}


def shared_sandbox(
    backend: str, limits: SandboxLimits, *, packages: Sequence[Path] = (), folders: Sequence[str] = ()
) -> Sandbox:
    """Returns the process's sandbox with these limits and folders; it ends with the process."""
    with _lock:
        # A forked child must not use the streams of its parent's containers.
        key = (backend_of_run(backend), limits, tuple(packages), tuple(folders), os.getpid())
        if key not in _sandboxes:
            _sandboxes[key] = open_sandbox(backend, limits=limits, packages=packages, folders=folders)
        return _sandboxes[key]

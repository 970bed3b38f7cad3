"""The messages on the channel to a box's supervisor: a request, and its outcome."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast

from agentgym.tools.sandbox.box import frames
from agentgym.tools.sandbox.box.plan import Plan
from agentgym.tools.sandbox.protocol import Ended, Outcome, SandboxLimits
from agentgym.tools.sandbox.request import ExecutionRequest

__all__ = ["lost_outcome", "outcome_of", "plan_of", "send_request"]

MIB = 1 << 20

TASK_DATA = Path(__file__).resolve().parents[2] / "envs" / "data"
"""The answers and tests of tasks: if agentgym is installed in Python's own folder, programs could read them."""


def plan_of(
    backend: str, limits: SandboxLimits, packages: Sequence[str], scratch: str = "", folders: Sequence[str] = ()
) -> Plan:
    """Returns the plan of a box with these limits."""
    return Plan(
        backend=backend,
        packages=tuple(packages),
        hidden=str(TASK_DATA),
        scratch=scratch,
        memory_bytes=limits.memory_mb * MIB,
        scratch_bytes=limits.scratch_mb * MIB,
        output_bytes=limits.output_kb * 1024,
        time_limit_s=limits.time_limit_s,
        num_processes=limits.num_processes,
        num_open_files=limits.num_open_files,
        folders=tuple(folders),
    )


def send_request(channel: frames.Channel, request: ExecutionRequest, *, is_session: bool) -> None:
    """Sends a request."""
    header: dict[str, object] = {
        "session": is_session,
        "language": request.language,
        "files": list(request.files),
        "collect": list(request.collect),
        "time_limit_s": request.time_limit_s,
    }
    frames.send(channel, header, [request.code, *request.files.values()])


def outcome_of(answer: frames.Frame, backend: str, *, is_session: bool) -> Outcome:
    """Returns the outcome in a supervisor's answer."""
    facts, (out, err, *contents) = answer
    return Outcome(
        stdout=out.decode("utf-8", "replace"),
        stderr=err.decode("utf-8", "replace"),
        exit_code=cast(int, facts["code"]) if facts["why"] == "exited" else -9,
        ended=Ended(cast(str, facts["why"])),
        backend=backend,
        seconds=cast(float, facts["seconds"]),
        files=dict(zip(cast(list[str], facts["files"]), contents, strict=True)),
        rolled_back=bool(facts["rolled_back"]),
        is_lost=is_session and bool(facts["is_over"]),
    )


def lost_outcome(ended: Ended, backend: str, seconds: float, *, is_session: bool) -> Outcome:
    """Returns the outcome of an execution whose supervisor gave no answer."""
    return Outcome(
        stdout="", stderr="", exit_code=-9, ended=ended, backend=backend, seconds=seconds, is_lost=is_session
    )

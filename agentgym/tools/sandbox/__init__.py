"""Sandboxes: programs that nobody trusts, run in a box. `open_sandbox` opens the best that the machine can hold."""

from agentgym.tools.sandbox.opening import BACKENDS, open_sandbox, sandbox_faults
from agentgym.tools.sandbox.protocol import Ended, Language, Outcome, Sandbox, SandboxLimits, SandboxSession

__all__ = [
    "BACKENDS",
    "Ended",
    "Language",
    "Outcome",
    "Sandbox",
    "SandboxLimits",
    "SandboxSession",
    "open_sandbox",
    "sandbox_faults",
]

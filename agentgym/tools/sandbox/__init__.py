"""Sandboxes for untrusted programs. `open_sandbox` opens the best one that this machine supports."""

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

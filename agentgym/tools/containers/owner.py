"""Labels that say which process a container or image belongs to, and whether that process has ended."""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Mapping

import psutil

__all__ = ["MACHINE", "OWNER", "RUN", "has_ended", "is_of_this_machine", "labels"]

OWNER = "agentgym.owner"
"""`pid:start`, the start in seconds since 1970: numbers of processes are given again, with other starts."""
MACHINE = "agentgym.machine"
"""Host and PID namespace: another one's processes cannot be looked for here."""
RUN = "agentgym.run"
SLACK_S = 2.0
"""A start is computed from the time of the machine's own start, which its clock's corrections move."""

_run_id = uuid.uuid4().hex[:12]


def labels() -> dict[str, str]:
    """What everything that this process makes is labelled with."""
    return {OWNER: _owner(), MACHINE: _machine(), RUN: f"{_run_id}-{os.getpid()}"}


def is_of_this_machine(given: Mapping[str, str]) -> bool:
    """Whether the owner could be seen from here."""
    return given.get(MACHINE) == _machine()


def has_ended(given: Mapping[str, str]) -> bool:
    """Whether the owner, a process of this machine, is no more."""
    pid, _, start = given[OWNER].partition(":")
    try:
        process = psutil.Process(int(pid))
        if process.status() == psutil.STATUS_ZOMBIE:
            return True
        return abs(process.create_time() - float(start)) > SLACK_S
    except psutil.NoSuchProcess:
        return True


def _owner() -> str:
    return f"{os.getpid()}:{psutil.Process().create_time():.2f}"


def _machine() -> str:
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:  # no Linux
        namespace = ""
    return f"{socket.gethostname()}/{namespace}"

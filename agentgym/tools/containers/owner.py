"""Labels that name the process that a container or image belongs to, and whether that process has ended."""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Mapping

import psutil

__all__ = ["MACHINE", "OWNER", "RUN", "has_ended", "is_of_this_machine", "labels"]

OWNER = "agentgym.owner"
"""`pid:start`, the start in seconds since 1970: PIDs are used again, with other starts."""
MACHINE = "agentgym.machine"
"""The host and PID namespace: the processes of another one cannot be looked up here."""
RUN = "agentgym.run"
SLACK_S = 2.0
"""The tolerance in seconds: a start is computed from the machine's boot time, which clock corrections move."""

_run_id = uuid.uuid4().hex[:12]


def labels() -> dict[str, str]:
    """Returns the labels of everything that this process makes."""
    return {OWNER: _owner(), MACHINE: _machine(), RUN: f"{_run_id}-{os.getpid()}"}


def is_of_this_machine(labels: Mapping[str, str]) -> bool:
    """Returns whether the owner would be visible from here."""
    return labels.get(MACHINE) == _machine()


def has_ended(labels: Mapping[str, str]) -> bool:
    """Returns whether the owner, a process of this machine, has ended."""
    pid, _, start = labels[OWNER].partition(":")
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
    except OSError:  # not Linux
        namespace = ""
    return f"{socket.gethostname()}/{namespace}"

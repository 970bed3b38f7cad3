"""The system-call filter of a whole container, in Docker's format: calls that the box allows, and that set it up."""

from __future__ import annotations

import errno
import json

from agentgym.tools.sandbox.box.seccomp import NEW_NAMESPACES
from agentgym.tools.sandbox.box.syscalls import EXAMINED, GROUPS, MODES, ORDINARY, OWNERS, REFUSED, SIGNALS

__all__ = ["docker_profile"]

SETTING_UP = ("capset", "seccomp", "sched_setattr", "setpriority")
"""Calls by which the box's own processes drop their rights, and get priority over a program's."""
LATE = ("clone", "clone3")
"""Calls whose arguments decide, or that libraries must see as missing."""


def docker_profile() -> str:
    """Returns JSON for `--security-opt seccomp=`. Programs also have their own filter, which examines arguments too."""
    allowed = {*_names(ORDINARY + MODES + OWNERS + GROUPS + SIGNALS + EXAMINED), *SETTING_UP} - {*LATE}
    refused = {*_names(REFUSED)} - allowed - {"socket"}
    no_namespace = {"index": 0, "value": NEW_NAMESPACES, "valueTwo": 0, "op": "SCMP_CMP_MASKED_EQ"}
    rules: list[dict[str, object]] = [
        {"names": sorted(allowed), "action": "SCMP_ACT_ALLOW"},
        {"names": ["clone"], "action": "SCMP_ACT_ALLOW", "args": [no_namespace]},
        {"names": sorted(refused), "action": "SCMP_ACT_ERRNO", "errnoRet": errno.EPERM},
        {"names": ["socket"], "action": "SCMP_ACT_ERRNO", "errnoRet": errno.EACCES},
    ]
    return json.dumps({"defaultAction": "SCMP_ACT_ERRNO", "defaultErrnoRet": errno.ENOSYS, "syscalls": rules})


def _names(table: str) -> list[str]:
    return [entry.partition(":")[0] for entry in table.split()]

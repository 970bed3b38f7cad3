"""The filter of system calls for a whole container, in Docker's form: what the box allows, and what sets a box up."""

from __future__ import annotations

import errno
import json

from agentgym.tools.sandbox.box.seccomp import NEW_NAMESPACES
from agentgym.tools.sandbox.box.syscalls import EXAMINED, GROUPS, MODES, ORDINARY, OWNERS, REFUSED, SIGNALS

__all__ = ["docker_profile"]

SETTING_UP = ("capset", "seccomp", "sched_setattr", "setpriority")
"""Calls by which the box's own processes give their rights up, and run before a program's."""
LATE = ("clone", "clone3")
"""Their arguments decide, or libraries must see that they are not there."""


def docker_profile() -> str:
    """JSON for `--security-opt seccomp=`. Programs have a filter of their own in it, which also examines arguments."""
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

"""Landlock: a process gives up access, for itself and its children, to every file that it does not name."""

import ctypes
import os
from collections.abc import Sequence

from agentgym.tools.sandbox.box.kernel import syscall

__all__ = ["landlock_version", "restrict_files"]

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
VERSION_FLAG = 1
PATH_BENEATH = 1
O_PATH_CLOEXEC = os.O_PATH | os.O_CLOEXEC

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR, IOCTL_DEV = 1, 2, 4, 8, 1 << 15
RIGHTS_BY_VERSION = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
"""Each version's rights over files: 2 adds linking elsewhere, 3 truncating, 5 ioctl on devices."""
FILE_RIGHTS = EXECUTE | WRITE_FILE | READ_FILE | (1 << 14) | IOCTL_DEV
NETWORK_RIGHTS = 3
"""The rights to bind and connect TCP (from version 4)."""
SCOPES = 3
"""The flags that keep abstract sockets and signals inside (from version 6)."""


def landlock_version() -> int:
    """Returns the kernel's version of Landlock, or 0 if there is none or it is switched off."""
    try:
        return syscall(CREATE_RULESET, None, ctypes.c_size_t(0), VERSION_FLAG, what="landlock_create_ruleset")
    except OSError:
        return 0


def restrict_files(
    version: int, *, listed: Sequence[str], readable: Sequence[str], devices: Sequence[str], write: Sequence[str]
) -> None:
    """Leaves this process only names to list, files to read and run, device files, and folders to write.

    It needs no_new_privs.
    """
    newest = max(number for number in RIGHTS_BY_VERSION if number <= version)
    rights = RIGHTS_BY_VERSION[newest]
    attributes = (ctypes.c_uint64 * 3)(rights, NETWORK_RIGHTS if version >= 4 else 0, SCOPES if version >= 6 else 0)
    size = ctypes.c_size_t(24 if version >= 6 else 16 if version >= 4 else 8)
    ruleset = syscall(CREATE_RULESET, attributes, size, 0, what="landlock_create_ruleset")
    for path in listed:
        _allow(ruleset, path, rights & READ_DIR)
    for path in readable:
        _allow(ruleset, path, rights & (EXECUTE | READ_FILE | READ_DIR))
    for path in devices:
        _allow(ruleset, path, rights & (READ_FILE | WRITE_FILE))
    for path in write:
        _allow(ruleset, path, rights & ~IOCTL_DEV)
    syscall(RESTRICT_SELF, ruleset, 0, what="landlock_restrict_self")
    os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    if not os.path.exists(path):
        return
    if not os.path.isdir(path):
        rights &= FILE_RIGHTS
    handle = os.open(path, O_PATH_CLOEXEC)
    packed = ctypes.create_string_buffer(rights.to_bytes(8, "little") + handle.to_bytes(4, "little"), 12)
    syscall(ADD_RULE, ruleset, PATH_BENEATH, packed, 0, what=f"landlock_add_rule({path})")
    os.close(handle)

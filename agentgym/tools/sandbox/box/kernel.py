"""System calls that Python has no function for, through ctypes; a failure is an OSError that names the call."""

import contextlib
import ctypes
import os
import resource
import struct

__all__ = [
    "CLONE_NEWCGROUP",
    "CLONE_NEWIPC",
    "CLONE_NEWNET",
    "CLONE_NEWNS",
    "CLONE_NEWPID",
    "CLONE_NEWUSER",
    "CLONE_NEWUTS",
    "become_subreaper",
    "die_with_parent",
    "drop_capabilities",
    "forbid_new_privileges",
    "limit",
    "mount",
    "pivot_root",
    "prctl",
    "protect_mounts",
    "run_soon",
    "set_dumpable",
    "syscall",
    "unmount",
    "unshare",
]

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_SECUREBITS = 1, 4, 24, 28
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = 36, 38, 47
SECUREBITS_LOCKED = 0b11101111  # no root, no fixup of capabilities, no ambient ones, each of them for good
CAPABILITY_VERSION_3 = 0x20080522
MOUNT_SETATTR = 442
SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
SCHED_ATTR = struct.Struct("=IIQiIQQQ")
RESET_ON_FORK = 1
SHORT_SLICE_NS, HIGH_PRIORITY = 100_000, -10
AT_FDCWD, AT_RECURSIVE = -100, 0x8000
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV = 1, 2, 4

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def syscall(number: int, *arguments: object, what: str) -> int:
    """Makes a system call by its number; `what` is its name in errors."""
    _libc.syscall.restype = ctypes.c_long
    return _check(_libc.syscall(ctypes.c_long(number), *arguments), what)


def prctl(option: int, *arguments: int) -> int:
    """`prctl(2)`."""
    values = [ctypes.c_ulong(value) for value in (*arguments, 0, 0, 0, 0)[:4]]
    return _check(_libc.prctl(option, *values), f"prctl({option})")


def unshare(flags: int) -> None:
    """Moves this process into new namespaces."""
    _check(_libc.unshare(flags), f"unshare({flags:#x})")


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    """`mount(2)`."""
    texts = [text.encode() for text in (source, target, kind)]
    _check(_libc.mount(*texts, ctypes.c_ulong(flags), options.encode() or None), f"mount({source} on {target})")


def unmount(target: str, flags: int) -> None:
    """`umount2(2)`."""
    _check(_libc.umount2(target.encode(), flags), f"umount({target})")


def protect_mounts(target: str, *, nodev: bool = True) -> None:
    """Makes the mount at `target`, and those below it, read-only and without set-user-id programs."""
    set_bits = MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | (MOUNT_ATTR_NODEV if nodev else 0)
    attributes = (ctypes.c_uint64 * 4)(set_bits, 0, 0, 0)
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    path = target.encode()
    syscall(MOUNT_SETATTR, AT_FDCWD, path, AT_RECURSIVE, attributes, size, what=f"mount_setattr({target})")


def pivot_root(new: str, old: str) -> None:
    """`pivot_root(2)`."""
    number = {"x86_64": 155, "aarch64": 41}[os.uname().machine]
    syscall(number, new.encode(), old.encode(), what="pivot_root")


def die_with_parent(signal_number: int) -> None:
    """Makes this process get the signal when the thread that started it ends."""
    prctl(PR_SET_PDEATHSIG, signal_number)


def become_subreaper() -> None:
    """Makes orphans among this process's descendants its children."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)


def set_dumpable(dumpable: bool) -> None:
    """Sets whether processes with the same user may inspect this one."""
    prctl(PR_SET_DUMPABLE, int(dumpable))


def run_soon() -> None:
    """Makes this process run soon after it wakes, however many others want to; its children do not inherit this.

    Every user may ask for a short time slice, which kernels before 6.12 ignore. Root gets a priority as well.
    """
    number = SCHED_SETATTR[os.uname().machine]
    for priority in (HIGH_PRIORITY, 0):
        attributes = SCHED_ATTR.pack(SCHED_ATTR.size, 0, RESET_ON_FORK, priority, 0, SHORT_SLICE_NS, 0, 0)
        with contextlib.suppress(OSError):  # not root, or forbidden by the machine: it stays as it is
            syscall(number, 0, ctypes.create_string_buffer(attributes, len(attributes)), 0, what="sched_setattr")
            return


def drop_capabilities() -> None:
    """Drops all capabilities; running a program cannot gain any."""
    for capability in range(64):
        try:
            prctl(PR_CAPBSET_DROP, capability)
        except OSError:  # EINVAL after the last one; EPERM if there never were any
            break
    with contextlib.suppress(OSError):  # only a process with capabilities can, or needs to
        prctl(PR_SET_SECUREBITS, SECUREBITS_LOCKED)
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
    _check(_libc.capset(header, (ctypes.c_uint32 * 6)()), "capset")


def forbid_new_privileges() -> None:
    """Keeps programs that are run from now on from having more rights than this process."""
    prctl(PR_SET_NO_NEW_PRIVS, 1)


def limit(kind: int, value: int) -> None:
    """Sets a resource limit permanently, to `value` or to the present limit if that is lower."""
    _, hard = resource.getrlimit(kind)
    bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (bound, bound))

"""The system-call filter (seccomp-bpf), assembled here: the calls that programs need are allowed, the rest refused.

Calls that ask for more than a box has get EPERM; unknown ones get ENOSYS, for which libraries have fallbacks. A program
for another machine type (32 bits, x32) is killed at its first call.
"""

import ctypes
import errno
import os
import struct

from agentgym.tools.sandbox.box.kernel import prctl
from agentgym.tools.sandbox.box.syscalls import (
    EXAMINED,
    GROUPS,
    MODES,
    ORDINARY,
    OWNERS,
    REFUSED,
    SIGNALS,
    syscall_numbers,
)

__all__ = ["assemble", "install_filter"]

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
X32_BIT = 0x40000000  # set in calls of the x32 ABI, which have numbers of their own
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN, AND = 0x20, 0x15, 0x35, 0x45, 0x06, 0x54
ALLOW, KILL, ERROR = 0x7FFF0000, 0x80000000, 0x00050000
NUMBER, ARCHITECTURE, ARGUMENTS = 0, 4, 16
PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2

NEW_NAMESPACES = 0x7E020080  # all flags CLONE_NEW* of clone(2)
AF_UNIX, SOCK_STREAM, SOCK_SEQPACKET, SOCK_TYPE = 1, 1, 5, 0xF
TERMINAL_INPUT = (0x5412, 0x541C)
"""TIOCSTI and TIOCLINUX, which type into the terminal."""
SIGNAL_OWNERS = (8, 10, 15)
"""F_SETOWN, F_SETSIG, F_SETOWN_EX: the kernel sends the signal, to any process of the same user."""

Instruction = tuple[int, int, int, int]


class _Program:
    """The instructions, in groups that each answer one call: a jump leads past the group of a call."""

    def __init__(self) -> None:
        self.code: list[Instruction] = []

    def add(self, operation: int, value: int, if_true: int = 0, if_false: int = 0) -> None:
        self.code.append((operation, if_true, if_false, value))

    def answer(self, number: int, verdict: int) -> None:
        """Adds `verdict` for one call; the accumulator holds its number before and after."""
        self.add(EQUAL, number, 0, 1)
        self.add(RETURN, verdict)

    def examine(self, number: int, body: list[Instruction]) -> None:
        """Adds `body`, which decides about one call, and returns for any arguments."""
        self.add(EQUAL, number, 0, len(body))
        self.code += body


def _load(index: int) -> Instruction:
    return (LOAD, 0, 0, ARGUMENTS + 8 * index)


def _refuse(number: int) -> Instruction:
    return (RETURN, 0, 0, ERROR | number)


def _allow() -> Instruction:
    return (RETURN, 0, 0, ALLOW)


def _one_of(index: int, values: tuple[int, ...], *, allowed: bool, mask: int = 0xFFFFFFFF) -> list[Instruction]:
    """Allows a call whose argument is one of `values`, or (if not `allowed`) all others."""
    tests = [(EQUAL, len(values) - index, 0, value) for index, value in enumerate(values)]
    ends = [_refuse(errno.EPERM), _allow()] if allowed else [_allow(), _refuse(errno.EPERM)]
    return [_load(index), (AND, 0, 0, mask), *tests, *ends]


def _bodies(own_signals: bool) -> dict[str, list[Instruction]]:
    """Returns the instructions that decide about each call, by its name."""
    no_namespace = [_load(0), (ANY_BIT, 0, 1, NEW_NAMESPACES), _refuse(errno.EPERM), _allow()]
    connected = _one_of(1, (SOCK_STREAM, SOCK_SEQPACKET), allowed=True, mask=SOCK_TYPE)
    bodies = {
        "clone": no_namespace,
        "clone3": [_refuse(errno.ENOSYS)],  # its flags are reached by a pointer: libraries fall back to clone
        "socketpair": [_load(0), (EQUAL, 1, 0, AF_UNIX), _refuse(errno.EACCES), *connected],
        "prlimit64": _one_of(0, (0,), allowed=True),
        "ioctl": _one_of(1, TERMINAL_INPUT, allowed=False),
        "fcntl": _one_of(1, SIGNAL_OWNERS, allowed=False),
        "socket": [_refuse(errno.EACCES)],
    }
    if own_signals:
        bodies |= {name: _one_of(0, (os.getpid(),), allowed=True) for name in ("kill", "tgkill")}
    return bodies


def assemble(machine: str, *, owns_files: bool, leaves_group: bool, signals: bool) -> bytes:
    """Assembles the filter's program.

    `owns_files` allows changes of modes and owners; otherwise modes and times stay as they are, without an error,
    because copying and unpacking set them. `leaves_group` allows processes to start sessions, and `signals` allows them
    to signal others.
    """
    program = _Program()
    program.add(LOAD, ARCHITECTURE)
    program.add(EQUAL, ARCHITECTURES[machine], 1, 0)
    program.add(RETURN, KILL)
    program.add(LOAD, NUMBER)
    if machine == "x86_64":
        program.add(AT_LEAST, X32_BIT, 0, 1)
        program.add(RETURN, KILL)
    examined = _bodies(own_signals=not signals)
    calls = syscall_numbers(REFUSED + EXAMINED + SIGNALS, machine)
    for name, body in examined.items():
        program.examine(calls[name], body)
    allowed, refused = syscall_numbers(ORDINARY, machine), syscall_numbers(REFUSED, machine)
    for table, free in ((OWNERS, owns_files), (GROUPS, leaves_group), (SIGNALS, signals)):
        (allowed if free else refused).update(syscall_numbers(table, machine))
    for number in syscall_numbers(MODES, machine).values():
        program.answer(number, ALLOW if owns_files else ERROR)  # error 0: the call seems to have worked
    for name, number in allowed.items():
        if name not in examined:
            program.answer(number, ALLOW)
    for name, number in refused.items():
        if name not in examined:
            program.answer(number, ERROR | errno.EPERM)
    program.add(RETURN, ERROR | errno.ENOSYS)
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program.code)


def install_filter(program: bytes) -> None:
    """Applies `program` permanently to this process and its future children; needs no_new_privs."""
    code = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("=H6xQ", len(program) // 8, ctypes.addressof(code))
    buffer = ctypes.create_string_buffer(header, len(header))
    prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.addressof(buffer))

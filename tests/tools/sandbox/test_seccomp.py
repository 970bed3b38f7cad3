"""The filter's program, run here by a machine of its own: so both processors' filters are held to what they say."""

from __future__ import annotations

import errno
import struct

import pytest

from agentgym.tools.sandbox.box.seccomp import assemble

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
NAMES = """
read openat execve socket socketpair clone clone3 ptrace io_uring_setup setsid kill prlimit64 fchmodat fchownat unknown
""".split()
X86_64 = (0, 257, 59, 41, 53, 56, 435, 101, 425, 112, 62, 302, 268, 260, 2000)
AARCH64 = (63, 56, 221, 198, 199, 220, 435, 117, 425, 157, 129, 261, 53, 54, 2000)
NUMBERS = {"x86_64": dict(zip(NAMES, X86_64, strict=True)), "aarch64": dict(zip(NAMES, AARCH64, strict=True))}
"""From the kernel's tables, by hand."""
LOOSE = {"owns_files": True, "leaves_group": True, "signals": True}
STRICT = {"owns_files": False, "leaves_group": False, "signals": False}


def verdict(program: bytes, number: int, architecture: int, *arguments: int) -> str:
    """What a classic BPF machine answers to a call: `allow`, `kill`, or an error's name."""
    data = struct.pack("<IIQ6Q", number, architecture, 0, *(*arguments, 0, 0, 0, 0, 0, 0)[:6])
    at = accumulator = 0
    while True:
        operation, if_true, if_false, value = struct.unpack_from("=HBBI", program, 8 * at)
        at += 1
        if operation == 0x20:
            (accumulator,) = struct.unpack_from("<I", data, value)
        elif operation == 0x54:
            accumulator &= value
        elif operation == 0x06:
            if value >> 16 == 5:
                return errno.errorcode.get(value & 0xFFFF, "nothing happens")
            return {0x7FFF0000: "allow", 0x80000000: "kill"}[value]
        else:
            holds = {0x15: accumulator == value, 0x35: accumulator >= value, 0x45: bool(accumulator & value)}[operation]
            at += if_true if holds else if_false


@pytest.mark.parametrize("machine", ARCHITECTURES)
@pytest.mark.parametrize(
    ("call", "arguments", "loose", "strict"),
    [
        ("read", (), "allow", "allow"),
        ("openat", (), "allow", "allow"),
        ("execve", (), "allow", "allow"),
        ("socket", (1, 1), "EACCES", "EACCES"),
        ("socketpair", (1, 1), "allow", "allow"),
        ("socketpair", (1, 5 | 0o2000000), "allow", "allow"),
        ("socketpair", (1, 2), "EPERM", "EPERM"),
        ("socketpair", (2, 1), "EACCES", "EACCES"),
        ("clone", (17,), "allow", "allow"),
        ("clone", (0x3D0F00,), "allow", "allow"),
        ("clone", (0x10000000 | 17,), "EPERM", "EPERM"),
        ("clone", (0x80 | 17,), "EPERM", "EPERM"),
        ("clone3", (), "ENOSYS", "ENOSYS"),
        ("ptrace", (), "EPERM", "EPERM"),
        ("io_uring_setup", (), "EPERM", "EPERM"),
        ("setsid", (), "allow", "EPERM"),
        ("kill", (1, 9), "allow", "EPERM"),
        ("prlimit64", (0, 7), "allow", "allow"),
        ("prlimit64", (1, 7), "EPERM", "EPERM"),
        ("fchmodat", (), "allow", "nothing happens"),
        ("fchownat", (), "allow", "EPERM"),
        ("unknown", (), "ENOSYS", "ENOSYS"),
    ],
)
def test_a_call_is_answered_by_what_it_asks_for(
    machine: str, call: str, arguments: tuple[int, ...], loose: str, strict: str
) -> None:
    number, architecture = NUMBERS[machine][call], ARCHITECTURES[machine]
    assert verdict(assemble(machine, **LOOSE), number, architecture, *arguments) == loose
    assert verdict(assemble(machine, **STRICT), number, architecture, *arguments) == strict


def test_a_program_for_another_machine_is_killed_at_its_first_call() -> None:
    for machine, architecture in ARCHITECTURES.items():
        for foreign in {0x40000003, *ARCHITECTURES.values()} - {architecture}:  # 32 bits among them
            assert verdict(assemble(machine, **LOOSE), 0, foreign) == "kill"
    assert verdict(assemble("x86_64", **LOOSE), 0x40000000, ARCHITECTURES["x86_64"]) == "kill"

"""The containment battery: programs that take all they can get, in a cgroup, with an honest program beside them.

No limit is passed by more than a second or half of it, and each attack is the program's outcome: never SandboxError.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from agentgym.tools.sandbox import Outcome, SandboxLimits
from tests.tools.sandbox.cgroup import Cgroup
from tests.tools.sandbox.conftest import KINDS, backend_and_user, by_driver

pytestmark = pytest.mark.slow
LIMITS = SandboxLimits(time_limit_s=6.0, memory_mb=256, num_processes=32, scratch_mb=32, output_kb=64)
AROUND_MB = 64
"""What the processes around two boxes hold, with an honest program."""
HONEST = {"code": "print(sum(n * n for n in range(100_000)))"}


@dataclass(frozen=True)
class Attack:
    """A program without bounds of its own."""

    name: str
    code: str
    ended: set[str]
    language: str = "python"
    time_limit_s: float = 2.0


FORKS = "import os, time\ndef fork():\n  try: return os.fork()\n  except OSError: return -1\n"
COUNTED = {"process_limit", "time_limit", "exited"}
"""Where the kernel counts, a fork fails, and the program goes on; elsewhere it is ended."""
LIMIT_ENDS = {"memory", "time_limit"}
ATTACKS = [
    # silent, as each fork that fails is a line on standard error: its output is not what this attack is about
    Attack("a shell's fork bomb", "f() { f | f & }; f 2>/dev/null; sleep 9", COUNTED, "shell"),
    Attack("forks for ever", FORKS + "while True: fork()", COUNTED),
    Attack("forks and leaves", FORKS + "while True:\n  if fork() > 0: os._exit(0)", COUNTED),
    Attack("starts and ends processes", FORKS + "while True:\n  if not fork(): os._exit(0)", COUNTED),
    Attack(
        "starts threads for ever",
        "import threading, time\nthreading.stack_size(32768)\nwhile True:\n"
        "  try: threading.Thread(target=time.sleep, args=(9,), daemon=True).start()\n  except RuntimeError: pass",
        COUNTED,
    ),
    Attack(
        "computes in 25 processes", FORKS + "for _ in range(25):\n  if not fork(): break\nwhile True: pass", LIMIT_ENDS
    ),
    Attack(
        "holds memory in 30 children",
        FORKS + "for _ in range(30):\n  if not fork():\n    kept = bytearray(b'x') * (200 << 20); time.sleep(9)\n"
        "time.sleep(9)",
        LIMIT_ENDS,
        time_limit_s=5.0,
    ),
    Attack(
        "writes what its children share",
        FORKS + "kept = bytearray(b'x') * (150 << 20)\nfor _ in range(28):\n  if not fork():\n"
        "    for n in range(0, len(kept), 4096): kept[n] = 1\n    time.sleep(9)\ntime.sleep(9)",
        LIMIT_ENDS,
        time_limit_s=5.0,
    ),
    Attack(
        "shares memory with 20 children",
        FORKS + "import mmap\nfor _ in range(20):\n  if not fork():\n    kept = mmap.mmap(-1, 150 << 20)\n"
        "    for n in range(0, len(kept), 4096): kept[n] = 1\n    time.sleep(9)\ntime.sleep(9)",
        LIMIT_ENDS,
        time_limit_s=5.0,
    ),
    Attack(
        "holds memory in processes whose first thread has ended",
        FORKS + "import ctypes, threading\ndef hold():\n  kept = bytearray(b'x') * (80 << 20); time.sleep(9)\n"
        "for _ in range(8):\n  if not fork():\n    threading.Thread(target=hold).start()\n"
        "    ctypes.CDLL(None).syscall(ctypes.c_long({'x86_64': 60, 'aarch64': 93}[os.uname().machine]), 0)\n"
        "time.sleep(9)",
        LIMIT_ENDS,
        time_limit_s=5.0,
    ),
    Attack("nests folders for ever", "import os\nwhile True: os.mkdir('d'); os.chdir('d')", {"disk_limit", "exited"}),
    Attack(
        "makes 10,000 files",
        "import os\nfor n in range(100):\n  os.mkdir(str(n))\n"
        "  for m in range(100): open(f'{n}/{m}', 'w').close()\nwhile True: pass",
        {"time_limit"},
    ),
    Attack(
        "fills the disk for ever",
        "import os\nwhile True:\n  try: open(os.urandom(4).hex(), 'wb').write(bytes(1 << 20))\n  except OSError: pass",
        {"disk_limit", "time_limit"},
    ),
    Attack(
        "stops whatever it can",
        "import os, signal, time\ntry: os.kill(-1, signal.SIGSTOP)\nexcept OSError: pass\ntime.sleep(9)",
        {"time_limit"},
        time_limit_s=1.0,
    ),
    Attack(
        "kills whatever it can",
        "import os, signal, time\ntry: os.kill(-1, signal.SIGKILL)\nexcept OSError: pass\ntime.sleep(9)",
        {"time_limit", "killed"},
        time_limit_s=1.0,
    ),
]


@dataclass
class Contained:
    """A sandbox whose processes are in a cgroup, or a container."""

    opened: Any
    cgroup: Cgroup | None

    def run(self, attack: Attack) -> tuple[Outcome, Outcome, float]:
        """Runs an attack and an honest program; returns their outcomes, and the MiB that were held at most."""
        most = 0
        is_over = threading.Event()

        def sample() -> None:
            nonlocal most
            while not is_over.wait(0.005):
                most = max(most, self.cgroup.held_bytes() if self.cgroup else 0)

        if not self.cgroup:
            self.opened.run_all([HONEST, HONEST])  # a container's start is no part of an execution
        sampler = threading.Thread(target=sample)
        before = self.cgroup.held_bytes() if self.cgroup else 0
        sampler.start()
        try:
            call = {"code": attack.code, "language": attack.language, "time_limit_s": attack.time_limit_s}
            outcome, honest = self.opened.run_all([call, HONEST])
        finally:
            is_over.set()
            sampler.join()
        return outcome, honest, (most - before) / (1 << 20)


@contextmanager
def _contained(backend: str, user: str) -> Iterator[Contained]:
    if backend == "docker":  # a container has a cgroup of its own
        with by_driver(backend, LIMITS, is_ordinary=False) as opened:
            yield Contained(opened, None)
        return
    cgroup = Cgroup(num_tasks=600, memory_mb=4096)
    try:
        with by_driver(backend, LIMITS, is_ordinary=user == "ordinary", cgroup=cgroup) as opened:
            yield Contained(opened, cgroup)
    finally:
        cgroup.remove()


@pytest.fixture(scope="module", params=KINDS)
def contained(request: pytest.FixtureRequest) -> Iterator[Contained]:
    """Each kind of sandbox, as root and as an ordinary user."""
    if os.geteuid() != 0 or not os.access(Cgroup.ROOT, os.W_OK):
        reason = "fork bombs run only in a cgroup, and only root can make one here"
        pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)
    with _contained(*backend_and_user(request)) as box:
        yield box


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_a_limit_is_passed_by_a_second_or_half_of_it_at_most(attack: Attack, contained: Contained) -> None:
    outcome, honest, held_mb = contained.run(attack)
    print(f"{attack.name}: {outcome.ended}, {outcome.seconds:.2f} s, {held_mb:.0f} MiB; beside: {honest.seconds:.2f} s")
    assert outcome.ended.value in attack.ended, outcome
    assert outcome.seconds <= attack.time_limit_s + max(1.0, attack.time_limit_s / 2), outcome
    assert held_mb <= 1.5 * LIMITS.memory_mb + AROUND_MB
    assert honest.ok and honest.seconds <= LIMITS.time_limit_s, honest
    contained.opened.assert_at_rest()

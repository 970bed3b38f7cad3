"""The process of one test of a program: it limits itself, runs the program, and then its test.

It is run as a file, isolated from installed packages, and imports only the standard library. In a box of a code
execution service, which has limits of its own, its job is in a file.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import tempfile
from collections.abc import Mapping
from types import ModuleType
from typing import Any

MAX_FILE_BYTES = 1 << 24
JOB_FILE = "job.json"


def main() -> None:
    """Runs the job from its file or standard input; writes the proof to standard output if the test passed."""
    job: Mapping[str, Any]
    if os.path.exists(JOB_FILE):
        with open(JOB_FILE, "rb") as file:
            job = json.loads(file.read())
        os.unlink(JOB_FILE)
    else:
        with os.fdopen(0, "rb", closefd=False) as pipe:
            job = json.loads(pipe.read())
        _limit(job)
    _give_input(job["input"])
    program = ModuleType("__main__" if job["test"] is None else "solution")
    sys.modules[program.__name__] = program
    sys.argv = ["solution.py"]
    if job["test"] is None:
        exec(compile(job["program"], "solution.py", "exec"), program.__dict__)
        return
    answer = os.dup(1)
    with open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), 1)
    exec(compile(job["program"], "solution.py", "exec"), program.__dict__)
    exec(compile(job["test"], "test.py", "exec"), program.__dict__)
    os.write(answer, job["proof"].encode())


def _limit(job: Mapping[str, Any]) -> None:
    signal.setitimer(signal.ITIMER_REAL, job["wall_s"] + 1)  # SIGALRM ends the process if its parent is gone
    bounds = {
        resource.RLIMIT_CPU: job["cpu_s"],
        resource.RLIMIT_AS: _memory_in_use() + job["memory_mb"] * (1 << 20),
        resource.RLIMIT_FSIZE: MAX_FILE_BYTES,
        resource.RLIMIT_CORE: 0,
    }
    for name, bound in bounds.items():
        hard = resource.getrlimit(name)[1]
        bound = bound if hard == resource.RLIM_INFINITY else min(bound, hard)
        resource.setrlimit(name, (bound, bound))


def _memory_in_use() -> int:
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except FileNotFoundError:
        return 0  # not Linux


def _give_input(text: str) -> None:
    with tempfile.TemporaryFile() as file:
        file.write(text.encode())
        file.seek(0)
        os.dup2(file.fileno(), 0)
    sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)


if __name__ == "__main__":
    main()

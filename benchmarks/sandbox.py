"""The cost of a sandboxed execution: `python benchmarks/sandbox.py`.

Whole programs and cells of a session in each kind of box, against a plain subprocess that contains nothing.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from agentgym.tools.sandbox import BACKENDS, open_sandbox, sandbox_faults

CODE = "print(sum(range(1000)))"
Run = Callable[[], str]


def plain() -> str:
    """Runs the code as frameworks without a sandbox do."""
    return subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True).stdout


def measure_ms(run: Run, number: int) -> tuple[float, float]:
    """Returns median and 95th percentile in milliseconds, of runs one after the other."""
    seconds = []
    for _ in range(number):
        started = time.perf_counter()
        assert run() == "499500\n"
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds) * 1e3, statistics.quantiles(seconds, n=20)[-1] * 1e3


def rate(run: Run, number: int, cores: int) -> float:
    """Returns executions a second, two at once for each core."""
    with ThreadPoolExecutor(2 * cores) as threads:
        started = time.perf_counter()
        list(threads.map(lambda _: run(), range(number)))
        return number / (time.perf_counter() - started)


def main() -> None:
    """Prints the table."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--number", type=int, default=300, help="executions of each kind")
    number = options.parse_args().number
    cores = len(os.sched_getaffinity(0))
    faults = sandbox_faults()
    base = measure_ms(plain, number // 3)
    rows = [("plain subprocess, no isolation", *base, rate(plain, number // 3, cores))]
    for name in BACKENDS:
        if faults[name] is not None:
            print(f"{name}: {faults[name]}")
            continue
        with open_sandbox(name) as sandbox:

            def program(run: Callable[[str], object] = sandbox.run) -> str:
                return run(CODE).stdout  # type: ignore[attr-defined, no-any-return]

            rows.append((f"{name}: program", *measure_ms(program, number), rate(program, number, cores)))
            with sandbox.session() as session:
                rows.append((f"{name}: cell", *measure_ms(lambda: session.run(CODE).stdout, number), 0.0))
    print(f"{'':32}{'median ms':>12}{'p95 ms':>10}{f'a second, {cores} cores':>22}{'ratio':>8}")
    for name, median, late, per_second in rows:
        rate_text = f"{per_second:.0f}" if per_second else ""
        print(f"{name:32}{median:12.2f}{late:10.2f}{rate_text:>22}{median / base[0]:8.2f}")


if __name__ == "__main__":
    main()

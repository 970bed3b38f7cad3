"""The time of our imports against that of the bare libraries they need: `python benchmarks/import_time.py`.

Each line is the least of several fresh interpreters, less an empty one; milliseconds of CPU time.
"""

from __future__ import annotations

import subprocess
import sys

RUNS = 7
STATEMENTS = ("import numpy", "import gymnasium", "import agentgym", "import agentgym.envs", "import agentgym.rollout")


def cpu_ms(statement: str) -> float:
    """Returns the least CPU time, in milliseconds, of a fresh interpreter that runs `statement`."""
    code = f"{statement}\nimport time\nprint(time.process_time())"
    runs = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True) for _ in range(RUNS)
    ]
    return 1000 * min(float(run.stdout) for run in runs)


def main() -> None:
    """Prints the table."""
    empty = cpu_ms("pass")
    times_ms = {statement: cpu_ms(statement) - empty for statement in STATEMENTS}
    print(f"{'statement':<26}{'ms':>8}{'ratio to gymnasium':>22}")
    for statement, time_ms in times_ms.items():
        print(f"{statement:<26}{time_ms:>8.0f}{time_ms / times_ms['import gymnasium']:>22.2f}")


if __name__ == "__main__":
    main()

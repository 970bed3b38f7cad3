"""The memory of a benchmark's process, as Linux counts it."""

from __future__ import annotations

from pathlib import Path

__all__ = ["Memory"]


class Memory:
    """The growth of this process at its largest, from now on."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
        self._before_kb = self._peak_kb()

    @property
    def grown_mb(self) -> float:
        """The growth in megabytes."""
        return (self._peak_kb() - self._before_kb) / 1024

    def _peak_kb(self) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

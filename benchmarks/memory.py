"""The memory of a benchmark's process, as Linux counts it."""

from __future__ import annotations

import threading
from pathlib import Path

__all__ = ["Memory", "OwnMemory"]

POLL_S = 0.02


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
        return _status_kb("VmHWM")


class OwnMemory:
    """The memory of this process at its largest since the last question, without files that are mapped into it."""

    def __init__(self) -> None:
        self._largest_kb = 0
        threading.Thread(target=self._watch, daemon=True).start()

    def largest_mb(self) -> float:
        """Returns the largest size in megabytes, and forgets it."""
        largest, self._largest_kb = max(self._largest_kb, _status_kb("RssAnon")), 0
        return largest / 1024

    def _watch(self) -> None:
        pause = threading.Event()
        while not pause.wait(POLL_S):
            self._largest_kb = max(self._largest_kb, _status_kb("RssAnon"))


def _status_kb(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))

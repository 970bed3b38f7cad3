"""The process that watches a run: `python -I -S watchdog_process.py PID BOARD STACKS LIMIT_S SIGNAL [REPORT]`.

It needs only the standard library. BOARD and STACKS are open files: the board of `watchdog.py`, and the file to which
the run's process writes the stacks of its threads when it gets SIGNAL. REPORT is the file for a report of a process of
environments, which the run reads; without it the report is printed for a person. It ends with its standard input. It is
begun with SIGINT and SIGTERM blocked, of which it would die before it handles them.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import select
import signal
import struct
import sys
import time
from collections.abc import Mapping, Sequence

SLOT = struct.Struct("<QQ240s")
"""A call in progress: the system's and Python's number of its thread (0 for a free slot), and its label."""
COUNT = struct.Struct("<Q")
INTERRUPT_S = 5.0
"""Seconds after which Ctrl-C or SIGTERM ends a run that is blocked."""
ENDING = (signal.SIGINT, signal.SIGTERM)
"""The signals that end a run, which are often sent to all of its processes."""
MAX_LINES = 16

EnvCall = tuple[int, int, str]
"""The system's and Python's number of a thread, and the label of its call."""


class ProcessWatchdog:
    """The state of the run's process as the watchdog knows it."""

    def __init__(
        self, pid: int, board: int, stacks: int, limit_s: float, number: int, report: int | None = None
    ) -> None:
        self.pid, self.stacks, self.limit_s, self.number, self.report = pid, stacks, limit_s, number, report
        self.parent = self._field(1)
        self.board = mmap.mmap(board, 0, prot=mmap.PROT_READ)
        self.interrupted = False  # stays true: a run that got the signal is about to end
        for each in ENDING:
            signal.signal(each, self._interrupt)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)

    def run(self) -> None:
        """Watches until standard input ends, or an environment has held the interpreter for too long."""
        tick_s = min(1.0, self.limit_s / 10)
        last, stalled_s, looked = -1, 0.0, time.monotonic()
        before: Mapping[int, int] = {}
        while not select.select([0], [], [], tick_s)[0]:
            if os.getppid() != self.pid:  # it is gone, and a fork of it holds standard input open
                return
            passed_s, looked = time.monotonic() - looked, time.monotonic()
            (count,) = COUNT.unpack_from(self.board, 0)
            if count != last or passed_s > 10 * tick_s or self._field(0) in ("T", "t"):
                last, stalled_s, before = count, 0.0, self._cpu()
                continue
            stalled_s += passed_s
            if self.report is not None and self._field(1) != self.parent:  # the run is gone
                self.interrupted = True
            is_due = stalled_s >= self.limit_s or (self.interrupted and stalled_s >= INTERRUPT_S)
            if is_due and (culprits := self._culprits(before)):
                self._end(culprits, stalled_s)
                return

    def _interrupt(self, *_: object) -> None:
        self.interrupted = True

    def _culprits(self, before: Mapping[int, int]) -> list[EnvCall]:
        """Returns the calls of the thread that computed most since then, or all calls if that thread has none.

        An environment may have started such a thread. The main thread without a call belongs to no environment: then
        none.
        """
        calls = self._calls()
        used = {thread: ticks - before.get(thread, 0) for thread, ticks in self._cpu().items()}
        busiest = max(used, key=lambda thread: used[thread], default=0)
        of_busiest = [call for call in calls if call[0] == busiest]
        if of_busiest:
            return of_busiest
        if busiest == self.pid and used[busiest] >= 10:
            return []
        return [(tid, 0, label) for tid, _, label in calls]  # the stack cannot be attributed to a call

    def _calls(self) -> list[EnvCall]:
        slots = [SLOT.unpack_from(self.board, offset) for offset in range(SLOT.size, len(self.board), SLOT.size)]
        return [(tid, ident, text.rstrip(b"\0").decode(errors="replace")) for tid, ident, text in slots if tid]

    def _cpu(self) -> dict[int, int]:
        """Returns the clock ticks that each thread has computed."""
        used = {}
        try:
            for thread in os.listdir(f"/proc/{self.pid}/task"):
                with open(f"/proc/{self.pid}/task/{thread}/stat") as file:
                    fields = file.read().rpartition(")")[2].split()
                used[int(thread)] = int(fields[11]) + int(fields[12])
        except (OSError, ValueError, IndexError):
            pass  # a thread has ended, or there is no /proc
        return used

    def _field(self, index: int) -> str:
        """Returns a field of the process' state: 0 is T or t if it is stopped (Ctrl-Z, a debugger), 1 is its parent."""
        try:
            with open(f"/proc/{self.pid}/stat") as file:
                return file.read().rpartition(")")[2].split()[index]
        except OSError:
            return ""

    def _end(self, culprits: Sequence[EnvCall], stalled_s: float) -> None:
        os.kill(self.pid, self.number)
        time.sleep(1.0)
        stack = stack_of(os.pread(self.stacks, 1 << 20, 0).decode(errors="replace"), culprits[0][1])
        if self.report is not None:
            labels = {label for _, ident, label in culprits if ident}
            certain = labels.pop() if len(labels) == 1 else ""  # coroutines share a thread
            report = {"stalled_s": stalled_s, "call": certain, "stack": stack}
            os.write(self.report, json.dumps(report).encode())
            os.kill(self.pid, signal.SIGKILL)
            return
        who = "; or ".join(label for _, _, label in culprits[:3])
        sys.stderr.write(
            f"\nerror: an environment has held Python's interpreter for {stalled_s:.0f} s, so that no other episode and"
            f" no Ctrl-C got its turn: {who}\n{stack}\nThe run is ended by SIGKILL (exit code 137); what it recorded is"
            " whole. Change that code so that it ends, or releases the interpreter; stall_s is the time that it has.\n"
        )
        sys.stderr.flush()
        os.kill(self.pid, signal.SIGKILL)


def stack_of(dump: str, ident: int) -> str:
    """Returns the stack of a thread from what `faulthandler` wrote, or of all threads if it is not among them."""
    for part in re.split(r"\n\n(?=Thread|Current thread)", dump.strip()):
        if re.match(rf"(Current thread|Thread) 0x0*{ident:x} ", part):
            return "\n".join(part.splitlines()[1:MAX_LINES])
    return "\n".join(dump.splitlines()[: 4 * MAX_LINES])


if __name__ == "__main__":
    pid, board, stacks = map(int, sys.argv[1:4])
    ProcessWatchdog(pid, board, stacks, float(sys.argv[4]), *map(int, sys.argv[5:])).run()

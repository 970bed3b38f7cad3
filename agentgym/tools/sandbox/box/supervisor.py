"""The process outside each box: it keeps the time, reads the output up to its limit, watches limits, and answers.

It never waits for a program: anything that is late ends the box's first process, and all others with it. It answers
before it removes what the program left.
"""

import contextlib
import os
import select
import signal
import socket
import sys
import time
from dataclasses import dataclass, field

from agentgym.tools.sandbox.box import frames
from agentgym.tools.sandbox.box.init_process import Job, run_init
from agentgym.tools.sandbox.box.plan import Plan
from agentgym.tools.sandbox.box.runner import REPORT, Box, run_once, run_session
from agentgym.tools.sandbox.box.watch import WATCH_S, BoxWatch

__all__ = ["grace_s", "supervise"]

CHANNEL_S = 20.0
"""The seconds that a box may take to start or to read a cell."""
STOP_S = 0.3
"""The longest wait in seconds for the end of a box's processes before the answer is sent."""
NICE_S = 0.1
"""The shortest time in seconds between two orders to lower a box's priority."""
END_S = 2.0
"""The seconds that a box's first process may take to end the others before it is killed."""
CHUNK, MAX_CHUNKS = 1 << 16, 32


@dataclass
class _Running:
    """One execution: what it wrote so far, and why it ended."""

    deadline: float
    settled_by: float
    """The time by which the box must be at rest, however it ended."""
    max_output: int
    num_ended_before: int
    """The number of processes that had been killed for memory when it began."""
    output: dict[int, bytearray] = field(default_factory=dict)
    """The output of each pipe so far."""
    why: str = ""
    code: int = 0
    holder: int = 0
    """The process that holds the state of a session."""
    rolled_back: bool = False
    is_over: bool = False
    """True if the box has ended."""
    files: tuple[list[str], list[bytes]] = field(default_factory=lambda: ([], []))

    def take(self, pipe: int) -> bool:
        """Reads available output; False at its end. Output over the limit is cut off, and ends the execution."""
        try:
            part = os.read(pipe, CHUNK)
        except BlockingIOError:
            return True
        room = self.max_output - sum(map(len, self.output.values()))
        self.output[pipe] += part[:room]
        if len(part) > room:
            self.why = "output_limit" if self.why in ("", "exited") else self.why
        return bool(part)

    def drain(self) -> None:
        """Reads what ended processes have left in the pipes: no more of each than fits into it."""
        for pipe in self.output:
            for _ in range(MAX_CHUNKS):
                if not select.select([pipe], [], [], 0)[0] or not self.take(pipe):
                    break


class _Supervisor:
    """A box and the processes in it, seen from outside."""

    def __init__(self, box: Box, plan: Plan, is_session: bool) -> None:
        self._box, self._plan, self._is_session = box, plan, is_session
        self._holder = 0
        self._first = 0
        self._is_up = False
        self._watch = BoxWatch(box, plan, self._resume)
        self._next_nice = 0.0

    def start(self, cell: frames.Frame, client: socket.socket) -> None:
        """Starts the box; its program is `cell`, or waits for cells."""
        self._pipes = [os.pipe(), os.pipe()]
        for reading, _ in self._pipes:
            os.set_blocking(reading, False)
        self._orders, inner = socket.socketpair()
        self._cells, inner_cells = socket.socketpair()
        self._reports, inner_reports = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        output = (self._pipes[0][1], self._pipes[1][1])

        def become() -> None:
            if self._is_session:
                run_session(self._box, self._plan, output, inner_cells, inner_reports)
            run_once(self._box, self._plan, output, cell)

        self._box.open()
        self._first = os.fork()
        if self._first == 0:
            _forget_signals()
            for ours in (self._orders, self._cells, self._reports, client):  # that the box sees our end
                ours.close()
            collect = [] if self._is_session else cell[0]["collect"]
            assert isinstance(collect, list)
            _run_guarded(
                lambda: run_init(self._box, inner, Job(become, self._is_session, collect, self._plan.scratch_bytes))
            )
        for channel in (inner, inner_cells, inner_reports):
            channel.close()
        for _, writing in self._pipes:
            os.close(writing)
        self._cells.settimeout(CHANNEL_S)
        self._reports.setblocking(False)

    def run(self, cell: frames.Frame, client: socket.socket) -> _Running:
        """Runs one execution to its end, whatever it does."""
        seconds = cell[0]["time_limit_s"]
        assert isinstance(seconds, int | float)
        deadline = time.monotonic() + seconds
        num_before = self._box.num_ended_for_memory()
        running = _Running(deadline, deadline + grace_s(seconds), self._plan.output_bytes, num_before)
        running.output = {reading: bytearray() for reading, _ in self._pipes}
        self._watch.begin()
        if self._is_session:
            if not self._holder:
                self._await_state(running)
            with contextlib.suppress(OSError):
                frames.send(self._cells, *cell)
        open_pipes = [reading for reading, _ in self._pipes]
        while not running.why:
            self._wait(running, open_pipes, client)
        if running.why == "exited" and self._ran_out_of_memory(running):
            running.why = "memory"
        if self._is_session and not running.is_over:
            self._settle(running, cell)
        if not self._is_session or running.is_over:
            self._box.end(self._first)
            self._has_ended(STOP_S)
            running.is_over = True
        running.drain()
        return running

    def _await_state(self, running: _Running) -> None:
        while not running.holder and not running.why:
            ready, _, _ = select.select([self._reports, self._orders], [], [], CHANNEL_S)
            if not ready:
                running.why, running.is_over = "killed", True
            if self._orders in ready:
                self._hear_keeper(running)
            if self._reports in ready:
                self._hear_report(running)
        running.why, self._holder = running.why if not running.holder else "", running.holder

    def _wait(self, running: _Running, open_pipes: list[int], client: socket.socket) -> None:
        """Waits a moment for the next events, and handles them."""
        waited: list[int | socket.socket] = [*open_pipes, self._orders, client]
        if self._is_session:
            waited.append(self._reports)
        until_look = self._watch.wait_s() if self._is_up else WATCH_S
        seconds = max(0.0, min(running.deadline - time.monotonic(), until_look))
        ready, _, _ = select.select(waited, [], [], seconds)
        for pipe in [reader for reader in open_pipes if reader in ready]:
            if not running.take(pipe):
                open_pipes.remove(pipe)
        if client in ready:  # the client is gone, and does not need the rest
            running.why, running.is_over = "killed", True
        if self._orders in ready:
            self._hear_keeper(running)
        if self._is_session and self._reports in ready and not running.why:
            self._hear_report(running)
        if not running.why:
            running.why = self._overrun(running)

    def _hear_keeper(self, running: _Running) -> None:
        message = frames.receive(self._orders)
        if message is None:
            running.why, running.is_over, running.code = running.why or "killed", True, -signal.SIGKILL
        elif "ended" in message[0]:
            code, names = message[0]["ended"], message[0]["files"]
            assert isinstance(code, int) and isinstance(names, list)
            running.why, running.is_over, running.code = running.why or "exited", True, code
            running.files = (names, message[1])
        else:
            program = message[0]["ready"]
            assert isinstance(program, int)
            self._box.set_program(program)
            self._is_up = True

    def _hear_report(self, running: _Running) -> None:
        """Reads the report of the program's process. It may lie: then its own state is lost."""
        try:
            report = self._reports.recv(64)
        except OSError:
            report = b""
        if len(report) != REPORT.size:
            running.why, running.is_over, running.code = "killed", True, -signal.SIGKILL
            return
        holder, running.code, rolled_back = REPORT.unpack(report)
        running.holder, running.rolled_back, running.why = holder, bool(rolled_back), "exited"

    def _overrun(self, running: _Running) -> str:
        """Returns the limit that is passed, or ""."""
        if time.monotonic() >= running.deadline:
            return "time_limit"
        if not self._is_up or self._watch.wait_s():
            return ""
        reason = self._watch.look(self._first) or ("memory" if self._ran_out_of_memory(running) else "")
        if not reason:
            self._make_way()
        return reason

    def _make_way(self) -> None:
        """Lowers the priority of a box in which many processes compute: many machines share cores by process."""
        nice, now = self._watch.nice(), time.monotonic()
        if nice > 0 and now >= self._next_nice:
            self._next_nice = now + NICE_S
            with contextlib.suppress(OSError):  # the box is about to end
                frames.send(self._orders, {"nice": nice, "holder": self._holder})

    def _resume(self, pids: list[int]) -> None:
        with contextlib.suppress(OSError):  # the box is about to end
            frames.send(self._orders, {"resume": pids})

    def _ran_out_of_memory(self, running: _Running) -> bool:
        """Returns whether the kernel killed a process for memory since the execution began."""
        return self._box.num_ended_for_memory() > running.num_ended_before

    def _settle(self, running: _Running, cell: frames.Frame) -> None:
        """Ends what a cell left running; if the cell was stopped, the process with the state before it reports."""
        was_stopped = running.why != "exited"
        holder = self._holder if was_stopped else running.holder
        answer = None
        with contextlib.suppress(OSError):  # it was too late
            frames.send(self._orders, {"settle": holder, "collect": cell[0]["collect"]})
            answer = self._hear_in_time(running)
            while answer is not None and "settled" not in answer[0] and "ended" not in answer[0]:
                answer = self._hear_in_time(running)
        if answer is None or not answer[0].get("settled"):
            running.is_over = True
            return
        names = answer[0]["files"]
        assert isinstance(names, list)
        running.files = (names, answer[1])
        if was_stopped:
            why, code = running.why, -signal.SIGKILL
            ready, _, _ = select.select([self._reports], [], [], max(0.0, running.settled_by - time.monotonic()))
            if ready:
                self._hear_report(running)
            running.is_over = running.is_over or running.holder != self._holder
            running.why, running.code, running.rolled_back = why, code, not running.is_over
        self._holder = running.holder

    def _hear_in_time(self, running: _Running) -> frames.Frame | None:
        self._orders.settimeout(max(0.001, running.settled_by - time.monotonic()))
        try:
            return frames.receive(self._orders)
        finally:
            self._orders.settimeout(None)

    def _has_ended(self, seconds: float) -> bool:
        """Waits up to `seconds` for the end of the box's first process."""
        ended = os.pidfd_open(self._first)
        try:
            return bool(select.select([ended], [], [], seconds)[0])
        finally:
            os.close(ended)

    def end(self) -> None:
        """Ends the box, if it has not ended, and removes what is left of it."""
        if self._first:
            self._box.end(self._first)
            if not self._has_ended(END_S):
                os.kill(self._first, signal.SIGKILL)
            os.waitpid(self._first, 0)
            self._first = 0
            self._box.close()


def grace_s(time_limit_s: float) -> float:
    """Returns the seconds beyond its time limit that an execution may take until its answer is sent."""
    return max(0.7, 0.4 * time_limit_s)


def supervise(box: Box, plan: Plan, client: socket.socket) -> None:
    """Serves one connection: one program, or a session's cells until the client is gone. Does not return."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    supervisor: _Supervisor | None = None

    def stop(*_: object) -> None:
        if supervisor is not None:
            supervisor.end()
        os._exit(0)

    signal.signal(signal.SIGTERM, stop)
    try:
        number = 0
        while (cell := _next_cell(client)) is not None:
            started = time.monotonic()
            number += 1
            cell[0]["number"] = number
            if supervisor is None:
                supervisor = _Supervisor(box, plan, is_session=bool(cell[0]["session"]))
                supervisor.start(cell, client)
            running = supervisor.run(cell, client)
            _answer(client, running, time.monotonic() - started)
            if running.is_over:
                break
    finally:
        if supervisor is not None:
            supervisor.end()
    os._exit(0)


def _next_cell(client: socket.socket) -> frames.Frame | None:
    """Returns the client's next cell, or None if it is gone."""
    try:
        return frames.receive(client)
    except OSError:  # it left without reading an answer
        return None


def _answer(client: socket.socket, running: _Running, seconds: float) -> None:
    header: dict[str, object] = {
        "why": running.why,
        "code": running.code,
        "rolled_back": running.rolled_back,
        "is_over": running.is_over,
        "files": running.files[0],
        "seconds": seconds,
    }
    texts = [bytes(content) for content in running.output.values()]
    with contextlib.suppress(OSError):
        frames.send(client, header, [*texts, *running.files[1]])


def _forget_signals() -> None:
    """Resets the signals of a supervisor in the process that it starts, until that sets its own."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _run_guarded(body: object) -> None:
    """Runs a body that does not return; an error of ours is printed to the server's standard error."""
    try:
        assert callable(body)
        body()
    except BaseException as error:  # noqa: BLE001  # the process ends here either way
        print(f"the sandbox's own process failed: {error!r}", file=sys.stderr, flush=True)
    os._exit(70)

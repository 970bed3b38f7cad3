"""The first process of a container: it forks a supervisor for each execution or session, and relays its messages.

The other side is the process that attached the container's streams. When those end, this one ends, and the container
with it. A program may stop or kill every process of the container but this one, so this one has its own clock.
"""

import contextlib
import gc
import os
import select
import signal
import socket
import sys
import time
import traceback

from agentgym.tools.sandbox.box import frames
from agentgym.tools.sandbox.box.container_box import ContainerBox
from agentgym.tools.sandbox.box.plan import Plan
from agentgym.tools.sandbox.box.supervisor import grace_s, supervise

__all__ = ["main"]

ANSWER_S = 20.0
"""The seconds that a supervisor's answer may take once it has started."""
LATE_S = 0.1
"""The seconds by which this process gives up an execution later than its supervisor."""
END_S = 0.5
"""The seconds that a supervisor may take to end after its last answer."""


def main(plan_text: str) -> None:
    """Serves the container's standard streams until they end.

    The supervisor answers each frame. `{"over": is clean}` follows when the box has ended: after a program, a lost
    session, or `{"leave": true}`. `{"late": true}` replaces an answer that does not come in time.
    """
    plan = Plan.from_json(plan_text)
    box = ContainerBox(plan)
    box.enclose_server()
    gc.freeze()  # a collection in a fork would copy every page
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # supervisors and orphans are not waited for
    client = frames.Pipes(0, 1)
    frames.send(client, {"ready": True})
    while (cell := frames.receive(client)) is not None:
        if "leave" in cell[0]:  # the session that it meant to leave is over already
            continue
        near, far = socket.socketpair()
        if os.fork() == 0:
            near.close()
            _supervise(box, plan, far)
        far.close()
        near.settimeout(ANSWER_S)
        with contextlib.suppress(OSError):  # the program has ended its supervisor
            _relay(client, near, cell)
        near.close()
        frames.send(client, {"over": box.is_as_new()})
    os._exit(0)


def _relay(client: frames.Pipes, near: socket.socket, cell: frames.Frame) -> None:
    """Passes cells in and answers out until either side ends."""
    frames.send(near, *cell)
    due: float | None = _due(cell)
    is_over = False
    while True:
        waited: list[int | socket.socket] = [near, client.reading]
        ready, _, _ = select.select(waited, [], [], None if due is None else max(0.0, due - time.monotonic()))
        if not ready:
            if not is_over:
                frames.send(client, {"late": True})
            return
        if near in ready:
            answer = frames.receive(near)
            if answer is None:
                return
            frames.send(client, *answer)
            is_over = bool(answer[0]["is_over"])
            due = time.monotonic() + END_S if is_over else None
        if client.reading in ready:
            order = frames.receive(client)
            if order is None:
                os._exit(0)
            if "leave" in order[0]:
                return
            frames.send(near, *order)
            due = _due(order)


def _due(cell: frames.Frame) -> float:
    """Returns the time by which a cell must be answered."""
    seconds = cell[0]["time_limit_s"]
    assert isinstance(seconds, int | float)
    return time.monotonic() + seconds + grace_s(seconds) + LATE_S


def _supervise(box: ContainerBox, plan: Plan, channel: socket.socket) -> None:
    try:
        nothing = os.open("/dev/null", os.O_RDWR)
        os.dup2(nothing, 0)
        os.dup2(nothing, 1)
        supervise(box, plan, channel)
    except BaseException:  # noqa: BLE001  # the client sees the box end; the cause is printed here
        traceback.print_exc(file=sys.stderr)
    os._exit(1)

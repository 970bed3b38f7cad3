"""The server of a sandbox: waits for connections, and forks a supervisor for each.

There are two processes: the first one watches its parent; its child is the server, which is PID 1 of its namespaces if
there are any. When the parent is gone, or closes its end of the control socket, both end, and every box with them.
"""

import contextlib
import gc
import os
import select
import signal
import socket
import sys
import traceback

from agentgym.tools.sandbox.box import frames, kernel
from agentgym.tools.sandbox.box.folders import empty_folder
from agentgym.tools.sandbox.box.landlock_box import LandlockBox
from agentgym.tools.sandbox.box.namespaces import NamespaceBox, enter_namespaces
from agentgym.tools.sandbox.box.plan import Plan
from agentgym.tools.sandbox.box.processes import descendants, kill_until_gone
from agentgym.tools.sandbox.box.runner import Box
from agentgym.tools.sandbox.box.supervisor import supervise
from agentgym.tools.sandbox.box.task_count import remove_task_counts

__all__ = ["main"]


def main(control_handle: int, parent: int, plan_text: str) -> None:
    """Runs until the parent is gone."""
    control = socket.socket(fileno=control_handle)
    watched = os.pidfd_open(parent)
    plan = Plan.from_json(plan_text)
    try:
        box: Box = NamespaceBox(plan) if plan.backend == "namespaces" else LandlockBox(plan)
        if plan.backend == "namespaces":
            enter_namespaces()
        else:
            kernel.become_subreaper()
        server = os.fork()
        if server == 0:
            _serve(box, plan, control)
    except BrokenPipeError:  # the parent is gone before it was answered
        os._exit(1)
    except OSError as error:
        frames.send(control, {"error": str(error)})
        os._exit(1)
    control.close()
    ended = os.pidfd_open(server)
    select.select([watched, ended], [], [])
    _end(server, plan)


def _end(server: int, plan: Plan) -> None:
    """Ends everything that was started, and removes the plan's scratch folder."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(server, signal.SIGKILL)
    kill_until_gone(lambda: descendants(os.getpid()))
    remove_task_counts(server)
    if plan.scratch:
        with contextlib.suppress(OSError):
            empty_folder(plan.scratch)
            os.rmdir(plan.scratch)
    os._exit(0)


def _serve(box: Box, plan: Plan, control: socket.socket) -> None:
    try:
        kernel.die_with_parent(signal.SIGKILL)
        box.enclose_server()
        os.closerange(control.fileno() + 1, 1 << 16)
    except BaseException as error:  # noqa: BLE001  # reported to the client
        frames.send(control, {"error": str(error) or repr(error)})
        os._exit(1)
    gc.freeze()  # a collection in a fork would copy every page
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # supervisors are not waited for
    frames.send(control, {"ready": True})
    while True:
        _, handles, _, _ = socket.recv_fds(control, 1, 1)
        if not handles:
            os._exit(0)
        with contextlib.suppress(OSError):  # no process can be started now: the client sees its connection end
            if os.fork() == 0:
                _supervise(box, plan, control, handles[0])
        os.close(handles[0])


def _supervise(box: Box, plan: Plan, control: socket.socket, handle: int) -> None:
    try:
        if plan.backend != "namespaces":  # in namespaces, the end of the server ends all
            kernel.die_with_parent(signal.SIGTERM)
            kernel.become_subreaper()
        control.close()
        supervise(box, plan, socket.socket(fileno=handle))
    except BaseException:  # noqa: BLE001  # the client sees the connection end; the cause is printed here
        traceback.print_exc(file=sys.stderr)
    os._exit(1)

"""A sandbox whose boxes are forked by a server process: the client's side of `box/`."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path

from agentgym.errors import SandboxError
from agentgym.tools.sandbox.box import frames
from agentgym.tools.sandbox.box.folders import empty_folder
from agentgym.tools.sandbox.box.plan import Plan
from agentgym.tools.sandbox.exchange import lost_outcome, outcome_of, plan_of, send_request
from agentgym.tools.sandbox.protocol import Ended, Outcome, SandboxLimits
from agentgym.tools.sandbox.request import ExecutionRequest, Runner

__all__ = ["ServedSandbox"]

ANSWER_S = 30.0
"""The seconds after an execution's limit that its answer may take on a busy machine."""
PROBE_S = 10.0
"""The seconds that an empty program may take when a server is tested."""
END_S = 10.0
BOX = Path(__file__).parent / "box"
BOOT = """
import sys, types
name, box = "", sys.argv[1]
for part in "agentgym tools sandbox".split():
    name = f"{name}.{part}".lstrip(".")
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = []
sys.modules[name].__path__ = [box]
from agentgym.tools.sandbox.box.main import main
main(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
"""
"""Loads `box/` under its own name, without its parent packages: a program's process has no other code of ours."""


class ServedSandbox(Runner):
    """A sandbox of namespaces, or of Landlock. Its server is started at once, and restarted if it was killed."""

    def __init__(
        self, backend: str, limits: SandboxLimits, packages: Sequence[Path] = (), folders: Sequence[str] = ()
    ) -> None:
        super().__init__(limits)
        self.backend = backend
        self._packages = tuple(str(folder.resolve()) for folder in packages)
        self._folders = tuple(folders)
        self._lock = threading.Lock()
        self._closed = False
        self._server = _Server(self._plan())

    def _plan(self) -> Plan:
        scratch = tempfile.mkdtemp(prefix="agentgym-sandbox-") if self.backend == "landlock" else ""
        return plan_of(self.backend, self.limits, self._packages, scratch, self._folders)

    def _execute(self, request: ExecutionRequest) -> Outcome:
        with contextlib.closing(self._connect()) as channel:
            return _run_request(channel, request, self, is_session=False)

    def session(self) -> ServedSession:
        return ServedSession(self._connect(), self)

    def works(self) -> bool:
        """Returns whether an empty program gets an answer."""
        probe = ExecutionRequest(code=b"", language="python", files={}, collect=(), time_limit_s=PROBE_S)
        try:
            with contextlib.closing(self._connect()) as channel:
                channel.settimeout(PROBE_S)
                send_request(channel, probe, is_session=False)
                return frames.receive(channel) is not None
        except (OSError, SandboxError):
            return False

    def _connect(self) -> socket.socket:
        with self._lock:
            if self._closed:
                raise SandboxError("this sandbox was closed: open another one with open_sandbox()")
            try:
                return self._server.connect()
            except OSError:  # it was killed
                self._server.close()
                self._server = _Server(self._plan())
                return self._server.connect()

    def close(self) -> None:
        """Ends the server, and with it every execution that still runs."""
        with self._lock:
            self._closed = True
            self._server.close()


class ServedSession(Runner):
    """A box whose program waits for cells."""

    def __init__(self, channel: socket.socket, sandbox: ServedSandbox) -> None:
        self._channel: socket.socket | None = channel
        super().__init__(sandbox.limits)
        self._sandbox = sandbox

    def _execute(self, request: ExecutionRequest) -> Outcome:
        if self._channel is None:
            raise SandboxError("this session is over: begin another one with session()")
        outcome = _run_request(self._channel, request, self._sandbox, is_session=True)
        if outcome.is_lost:
            self.close()
        return outcome

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None


def _run_request(
    channel: socket.socket, request: ExecutionRequest, sandbox: ServedSandbox, *, is_session: bool
) -> Outcome:
    """Runs a request and returns its outcome.

    If a box gives no answer while others of its server do, its program has exhausted its time: a program cannot turn
    its own failure into one of the sandbox.
    """
    seconds = request.time_limit_s + ANSWER_S
    channel.settimeout(seconds)
    backend = sandbox.backend
    try:
        send_request(channel, request, is_session=is_session)
        answer = frames.receive(channel)
    except TimeoutError as error:
        if not sandbox.works():
            raise SandboxError(f"the sandbox's server does not answer: {error}") from error
        return lost_outcome(Ended.TIME_LIMIT, backend, seconds, is_session=is_session)
    except OSError as error:
        raise SandboxError(f"the sandbox's server does not answer: {error}") from error
    if answer is None:
        raise SandboxError("the sandbox's server ended during an execution; what it said is on standard error")
    return outcome_of(answer, backend, is_session=is_session)


class _Server:
    """The server process, and the socket over which it gets connections."""

    def __init__(self, plan: Plan) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        handle = theirs.fileno()
        python = [os.path.realpath(sys.executable), "-I", "-S", "-X", "utf8", "-c", BOOT]
        try:
            self._process = subprocess.Popen(
                [*python, str(BOX.parent), str(handle), str(os.getpid()), plan.to_json()],
                env={},
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(handle,),
                start_new_session=True,
            )
        except OSError as error:
            ours.close()
            _remove_scratch(plan.scratch)
            raise SandboxError(f"its server cannot be started: {error}") from error
        finally:
            theirs.close()
        self._control = ours
        self._finish = weakref.finalize(self, _finish, ours, self._process, plan.scratch, os.getpid())
        ours.settimeout(ANSWER_S)
        try:
            message = frames.receive(ours)
        except OSError as error:
            message = ({"error": f"its server did not start within {ANSWER_S:g} s: {error}"}, [])
        if message is None or "error" in message[0]:
            self.close()
            raise SandboxError(str(message[0]["error"]) if message else "its server ended before it began")

    def connect(self) -> socket.socket:
        """Opens a connection with its own supervisor. Raises OSError if the server has ended."""
        if self._process.poll() is not None:  # its processes may hold the socket's other end a moment longer
            raise ConnectionResetError("its server has ended")
        near, far = socket.socketpair()
        try:
            socket.send_fds(self._control, [b"x"], [far.fileno()])
        except OSError:
            near.close()
            raise
        finally:
            far.close()
        return near

    def close(self) -> None:
        """Ends the server; a second call does nothing."""
        self._finish()


def _finish(control: socket.socket, process: subprocess.Popen[bytes], scratch: str, owner: int) -> None:
    control.close()
    if os.getpid() != owner:  # a forked child of the owner is ending; it does not own the server
        return
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    _remove_scratch(scratch)


def _remove_scratch(scratch: str) -> None:
    if scratch:
        with contextlib.suppress(OSError):  # the server removed it first
            empty_folder(scratch)
            os.rmdir(scratch)

"""A sandbox of Docker containers: each runs one execution or session at a time, and is kept warm for the next."""

from __future__ import annotations

import contextlib
import json
import os
import struct
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path

from agentgym.errors import ConfigError, SandboxError
from agentgym.tools.containers.daemon import Container, ContainerPlan, ContainerStream, Daemon
from agentgym.tools.containers.python_image import host_image
from agentgym.tools.sandbox.box import frames
from agentgym.tools.sandbox.box.container_box import HOME
from agentgym.tools.sandbox.docker_profile import docker_profile
from agentgym.tools.sandbox.exchange import MIB, TASK_DATA, lost_outcome, outcome_of, plan_of, send_request
from agentgym.tools.sandbox.protocol import Ended, Outcome, SandboxLimits
from agentgym.tools.sandbox.request import ExecutionRequest, Runner

__all__ = ["DockerSandbox"]

ANSWER_S = 10.0
"""The seconds after an execution's limit when its container is discarded: a program may stop its supervisor."""
START_S = 60.0
CLEAN_S = 0.5
"""The seconds that emptying a container may take; one that takes longer is discarded."""
MAX_IDLE = 16
AROUND = 3
"""The number of our processes around a program: PID 1, its supervisor and the box's first."""
AROUND_MB = 64
"""The MiB for these processes, on top of what programs and their files may use."""
NOBODY = "65534:65534"
BOX = Path(__file__).parent / "box"
BOOT = """
import json, os, sys, types
from importlib.machinery import ModuleSpec
def exactly(size):
    parts = b""
    while len(parts) < size:
        part = os.read(0, size - len(parts)) or os._exit(0)
        parts += part
    return parts
given = json.loads(exactly(int.from_bytes(exactly(4), "big")))
class Given:
    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self) if name in given["modules"] else None
    def create_module(self, spec):
        return None
    def exec_module(self, module):
        source = given["modules"][module.__name__]
        exec(compile(source, module.__name__, "exec"), module.__dict__)
name = ""
for part in "agentgym tools sandbox box".split():
    name = f"{name}.{part}".lstrip(".")
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = []
sys.meta_path.append(Given())
from agentgym.tools.sandbox.box.relay import main
sys.meta_path.pop()
main(given["plan"])
"""
"""Loads `box/` from the container's standard input, so that any image with Python works."""


class DockerSandbox(Runner):
    """A sandbox of containers. The first one is started at once, others when several executions run concurrently."""

    backend = "docker"

    def __init__(self, limits: SandboxLimits, packages: Sequence[Path] = (), image: str | None = None) -> None:
        super().__init__(limits)
        self._daemon = Daemon()
        self._plan = plan_of("docker", limits, [str(folder.resolve()) for folder in packages]).to_json()
        self._container_plan = self._make_plan(image)
        self._lock = threading.Lock()
        self._idle: list[_Box] = []
        self._boxes: set[_Box] = set()
        self._closed = False
        self._removals: list[threading.Thread] = []
        self._finish = weakref.finalize(self, _finish, self._boxes, self._daemon, os.getpid())
        self._give_back(self._take())

    def _make_plan(self, image: str | None) -> ContainerPlan:
        limits = self.limits
        if image is not None and not self._daemon.has_image(image):
            raise ConfigError(f"the Docker daemon has no image {image!r}: `docker pull {image}`, or leave it out")
        name = image or host_image(self._daemon)
        if volumes := self._daemon.volumes_of(name):
            raise ConfigError(
                f"the image {name!r} has volumes ({', '.join(volumes)}), where programs could leave files"
            )
        python = os.path.realpath(sys.executable) if image is None else "python3"
        folders = [Path(name) for name in json.loads(self._plan)["packages"]]
        is_below = any(folder in TASK_DATA.parents for folder in folders)
        hidden = {str(TASK_DATA): "ro,nosuid,nodev,noexec,size=4k,mode=0555"} if is_below else {}
        options = f"rw,exec,nosuid,nodev,size={limits.scratch_mb * MIB},nr_inodes=16384,mode=1777"
        return ContainerPlan(
            image=name,
            command=[python, "-I", "-S", "-X", "utf8", "-c", BOOT],
            memory_bytes=(limits.memory_mb + limits.scratch_mb + AROUND_MB) * MIB,
            num_processes=limits.num_processes + AROUND,
            user=NOBODY,
            tmpfs={HOME: options, **hidden},
            folders=folders,
            seccomp=docker_profile(),
            has_stdin=True,
        )

    def _execute(self, request: ExecutionRequest) -> Outcome:
        box = self._take()
        outcome = box.run(request, is_session=False)
        self._give_back(box)
        return outcome

    def session(self) -> DockerSession:
        return DockerSession(self, self._take())

    def _take(self) -> _Box:
        """Returns a container that is not in use."""
        with self._lock:
            if self._closed:
                raise SandboxError("this sandbox was closed: open another one with open_sandbox()")
            while self._idle:
                box = self._idle.pop()
                if box.is_up():
                    return box
                self._boxes.discard(box)
                box.remove()
        box = _Box(self._daemon.create(self._container_plan), self._plan)
        self._boxes.add(box)
        try:
            box.start()
        except BaseException:
            self._boxes.discard(box)
            box.remove()
            raise
        return box

    def _give_back(self, box: _Box) -> None:
        """Keeps a container for the next execution if nothing of the last is left in it.

        Otherwise it is removed in the background, because that may take the daemon a second.
        """
        if box.is_clean():
            with self._lock:
                if not self._closed and len(self._idle) < MAX_IDLE:
                    self._idle.append(box)
                    return
        removal = threading.Thread(target=self._remove, args=(box,), name="agentgym-sandbox-removal")
        with self._lock:
            self._removals = [thread for thread in self._removals if thread.is_alive()] + [removal]
            removal.start()

    def _remove(self, box: _Box) -> None:
        with contextlib.suppress(SandboxError):  # the daemon is gone, or `agentgym sandbox reap` will find it
            box.remove()
        self._boxes.discard(box)

    def close(self) -> None:
        """Removes every container."""
        with self._lock:
            self._closed = True
            self._idle.clear()
            removals = self._removals
        for removal in removals:
            removal.join()
        self._finish()


class DockerSession(Runner):
    """A container whose program waits for cells."""

    def __init__(self, sandbox: DockerSandbox, box: _Box) -> None:
        super().__init__(sandbox.limits)
        self._sandbox = sandbox
        self._box: _Box | None = box

    def _execute(self, request: ExecutionRequest) -> Outcome:
        if self._box is None:
            raise SandboxError("this session is over: begin another one with session()")
        outcome = self._box.run(request, is_session=True)
        if outcome.is_lost:
            self.close()
        return outcome

    def close(self) -> None:
        box, self._box = self._box, None
        if box is not None:
            self._sandbox._give_back(box)


class _Box:
    """A container with the box's server in it, and the stream to it."""

    def __init__(self, container: Container, plan: str) -> None:
        self._container, self._plan = container, plan
        self._stream: ContainerStream | None = None
        self._is_over = True
        """True if nothing runs in it."""
        self._is_spoilt = False
        """True if it is to be discarded."""

    def start(self) -> None:
        self._stream = self._container.attach()
        self._container.start()
        self._stream.settimeout(START_S)
        names = [path.stem for path in BOX.glob("*.py") if path.stem != "__init__"]
        modules = {f"agentgym.tools.sandbox.box.{name}": (BOX / f"{name}.py").read_text("utf-8") for name in names}
        payload = json.dumps({"modules": modules, "plan": self._plan}).encode()
        message = None
        with contextlib.suppress(OSError):
            self._stream.sendall(struct.pack("!I", len(payload)) + payload)
            message = frames.receive(self._stream)
        if message is None:
            words = self._stream.stderr.decode("utf-8", "replace").strip()[-500:]
            raise SandboxError(f"the container's Python (3.11 or newer is needed) did not start: {words or 'no word'}")

    def run(self, request: ExecutionRequest, *, is_session: bool) -> Outcome:
        """Runs one execution, whatever it does to the processes around it."""
        assert self._stream is not None
        self._is_over = False
        self._stream.settimeout(request.time_limit_s + ANSWER_S)
        started = time.monotonic()
        try:
            send_request(self._stream, request, is_session=is_session)
            answer = frames.receive(self._stream)
        except TimeoutError:
            return self._lost_box_outcome(Ended.TIME_LIMIT, time.monotonic() - started)
        except OSError as error:
            self._is_spoilt = True
            raise SandboxError(f"the sandbox's container does not answer: {error}") from error
        if answer is None:
            self._is_spoilt = True
            raise SandboxError("the sandbox's container ended during an execution")
        if "late" in answer[0]:  # the program stopped its supervisor
            return self._lost_box_outcome(Ended.TIME_LIMIT, time.monotonic() - started)
        if "over" in answer[0]:  # the program ended its supervisor
            return self._lost_box_outcome(Ended.KILLED, time.monotonic() - started)
        outcome = outcome_of(answer, DockerSandbox.backend, is_session=is_session)
        self._is_spoilt = self._is_spoilt or outcome.ended is not Ended.EXITED
        if bool(answer[0]["is_over"]):
            self._hear_end()
        return outcome

    def _lost_box_outcome(self, ended: Ended, seconds: float) -> Outcome:
        self._is_spoilt = True
        return lost_outcome(ended, DockerSandbox.backend, seconds, is_session=True)

    def _hear_end(self) -> None:
        assert self._stream is not None
        message = None
        self._stream.settimeout(CLEAN_S)
        with contextlib.suppress(OSError):
            message = frames.receive(self._stream)
        self._is_over = True
        self._is_spoilt = self._is_spoilt or message is None or not message[0].get("over")

    def is_up(self) -> bool:
        """Returns whether the container is still running after it was idle."""
        assert self._stream is not None
        return self._stream.is_quiet()

    def is_clean(self) -> bool:
        """Ends a session, if there is one; returns whether the next execution may use the container."""
        assert self._stream is not None
        if not self._is_spoilt and not self._is_over:
            try:
                frames.send(self._stream, {"leave": True})
            except OSError:
                return False
            self._hear_end()
        return not self._is_spoilt

    def remove(self) -> None:
        """Ends the container and everything in it."""
        try:
            self._container.remove()
        finally:  # closing the stream alone ends it if the daemon does not answer
            if self._stream is not None:
                self._stream.close()


def _finish(boxes: set[_Box], daemon: Daemon, owner: int) -> None:
    if os.getpid() != owner:  # a forked child of the owner is ending; it does not own the containers
        return
    for box in list(boxes):
        with contextlib.suppress(SandboxError):  # the daemon is gone, and its containers with it
            box.remove()
    boxes.clear()
    daemon.close()

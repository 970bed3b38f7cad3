"""Environments in other processes: one that holds the interpreter, crashes or is killed ends only its own process."""

from __future__ import annotations

import asyncio
import json
import logging
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import TypeVar, cast

from agentgym.errors import AgentGymError, ConfigError, EnvironmentFault
from agentgym.rollout.hosting.answer import EnvStep
from agentgym.rollout.hosting.env_code import EnvCallTimeout
from agentgym.rollout.hosting.env_link import EnvLink, Failure
from agentgym.rollout.hosting.hosted_env import DistantTraceback, Env, EnvFacts, HostedEnv, called_tools, label_of
from agentgym.rollout.limits import Limits
from agentgym.types import Task

__all__ = ["EnvProcessLost", "EnvProcesses"]

T = TypeVar("T")
logger = logging.getLogger(__name__)

PROGRAM = """
import json, signal, sys
for number in (signal.SIGINT, signal.SIGTERM):  # they are for the run, which ends its processes in order
    signal.signal(number, lambda *_: None)
sys.path[:] = json.loads(sys.argv[3])
from agentgym.rollout.hosting.env_worker import main
main(int(sys.argv[1]), int(sys.argv[2]))
"""
LABEL_BYTES = 240
"""The number of bytes of a label that the watchdog keeps."""
MAX_STACK = 4000
"""The number of characters of a crashed process's last output that an episode keeps."""
GRACE_S = 2.0
"""Seconds for a process's answer on its way, and for its end once it has nothing more to do."""


class EnvProcessLost(AgentGymError):
    """An episode's process ended without evidence that the episode was the reason: it can be played again."""

    def __init__(self, *, was_in_call: bool) -> None:
        super().__init__("the process of the environment ended")
        self.was_in_call = was_in_call
        """True if the episode may have been the reason."""


@dataclass(frozen=True, slots=True)
class _End:
    """The end of a process."""

    reason: str
    """The reason: `ended with exit code 3`."""
    culprit: str = ""
    """The label of the call that was the reason, if it is known."""
    held_s: float = 0.0
    """Seconds for which the interpreter was held, if that is the reason."""
    stack: str = ""

    def error(self, label: str | None, action: str, *, is_alone: bool) -> Exception:
        """Returns the error of an episode in that process, which was in the call `label`, or in none."""
        if label is not None and label.encode()[:LABEL_BYTES].decode(errors="replace") == self.culprit:
            is_alone = True
        if not is_alone:
            return EnvProcessLost(was_in_call=label is not None)
        where = f": {label}" if label else ", between two calls"
        error: Exception
        if self.held_s:
            error = EnvCallTimeout(
                f"the environment held Python's interpreter for {self.held_s:.0f} s, so its process was ended{where}"
            )
        else:
            tools = called_tools(action)
            error = EnvironmentFault(
                f"the environment's process {self.reason}{where}", tool=tools[0] if len(tools) == 1 else ""
            )
        error.__cause__ = DistantTraceback(self.stack) if self.stack else None
        return error


class EnvProcess:
    """One process, and its calls without an answer yet. It belongs to the running event loop."""

    def __init__(self, limits: Limits, *, is_alone: bool) -> None:
        self.is_alone = is_alone
        self.num_environments = 0
        self.num_leaked = 0
        """The number of calls that hang in the process."""
        self.end: _End | None = None
        self._limits = limits
        self._calls: dict[int, asyncio.Future[bytes | None]] = {}
        self._numbers = count()
        self._report = tempfile.TemporaryFile()  # noqa: SIM115 - closed when the process has ended
        self._socket, theirs = socket.socketpair()
        files = (theirs.fileno(), self._report.fileno())
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, *map(str, files), json.dumps([*map(str, sys.path)])],
                stdin=subprocess.DEVNULL,
                pass_fds=files,
            )
        self._link: EnvLink | None = None
        self._ready = asyncio.Event()
        self._is_finished = False
        self._listening = asyncio.ensure_future(self._listen())

    async def call(self, env: int, method: str, *args: object) -> object:
        """Returns the value of an environment's method there; raises its error, or ProcessEnded."""
        payload = pickle.dumps(args)
        await self._ready.wait()
        if self._link is None:
            raise ConfigError(
                f"a process of environments (env_processes) did not start: it {self.end and self.end.reason}"
            )
        if self.end is not None:
            raise ProcessEnded
        number = next(self._numbers)
        answer = self._calls[number] = asyncio.get_running_loop().create_future()
        self._link.send(number, env, method, payload)
        try:
            async with asyncio.timeout(self._limits.deadline_s):
                content = await answer
        except TimeoutError:
            raise EnvCallTimeout(
                f"the environment's process gave no answer for {self._limits.deadline_s:g} s (limits.deadline_s)"
            ) from None
        finally:
            del self._calls[number]
        if content is None:
            raise ProcessEnded
        try:
            value: object = pickle.loads(content)
        except Exception as error:  # of a class that exists only in that process
            raise EnvironmentFault(f"what {method}() gave cannot be read in the run's process: {error}") from error
        if isinstance(value, Failure):
            raise value.error()
        return value

    def give_up(self, env: int) -> None:
        """Has an environment closed as soon as possible, without waiting for it."""
        if self._link is not None and self.end is None:
            self._link.send(next(self._numbers), env, "close", pickle.dumps(()))

    def finish(self) -> None:
        """Lets the process close its environments and end."""
        self._is_finished = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def join(self, until: float) -> None:
        """Waits for the end of a finished process; kills it at `until` (of `time.monotonic`)."""
        try:
            self._process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    async def _listen(self) -> None:
        """Reads the answers until the process ends."""
        end = _End("was ended with the run")
        link = await EnvLink.open(self._socket)
        try:
            if await link.receive() is not None:
                link.send(self._limits)
                self._link = link
                self._ready.set()
            while (message := await link.receive()) is not None:
                number, self.num_leaked, answer = message
                waiting = self._calls.get(number)
                if waiting is not None and not waiting.done():
                    waiting.set_result(answer)
            end = await asyncio.to_thread(self._find_end)
        finally:
            self._settle(end)
            link.close()

    def _settle(self, end: _End) -> None:
        """Notes the end, and passes it on to the callers that wait for an answer."""
        if self._link is not None and not self._is_finished and self._process.returncode is not None:
            logger.warning(
                "a process with %d environments %s%s; episodes that were not the reason are played again",
                self.num_environments,
                end.reason,
                f": {end.culprit}" if end.culprit else "",
            )
        self.end = end
        self.num_leaked = 0
        self._ready.set()
        self.finish()
        self._report.close()
        for waiting in self._calls.values():
            if not waiting.done():
                waiting.set_result(None)

    def _find_end(self) -> _End:
        """Waits for the process, which has left, and reads the reason."""
        self.join(time.monotonic() + 2 * self._limits.close_s + GRACE_S)
        code = self._process.returncode
        reason = f"ended with exit code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"
        if code == -signal.SIGKILL:
            reason += " (the system does that when memory is short)"
        self._report.seek(0)
        text = self._report.read().decode(errors="replace").strip()
        if not text.startswith("{"):
            return _End(reason, stack=text[:MAX_STACK])
        report = json.loads(text)
        held_s = float(report["stalled_s"])
        reason = f"was ended, because an environment held Python's interpreter for {held_s:.0f} s"
        return _End(reason, report["call"], held_s, report["stack"])


class ProcessEnded(AgentGymError):
    """A call's process ended before it answered."""


class _ProcessEnv(HostedEnv):
    """An environment in another process."""

    __slots__ = ("_close_s", "_leave", "_number", "_process", "_task")

    def __init__(self, process: EnvProcess, number: int, task: Task, close_s: float, leave: Callable[[], None]) -> None:
        super().__init__()
        self._process = process
        self._number = number
        self._task = task
        self._close_s = close_s
        self._leave = leave

    async def open(self) -> None:
        """Makes the environment."""
        await self._call("its constructor", "open", self._task)

    async def reset(self, seed: int, options: dict[str, object] | None) -> EnvStep:
        """Calls the environment's `reset`."""
        answer, self.facts = cast("tuple[EnvStep, EnvFacts]", await self._call("reset", "reset", seed, options))
        return answer

    async def step(self, action: str) -> EnvStep:
        """Calls the environment's `step`."""
        return cast(EnvStep, await self._call("step", "step", action, action=action))

    async def apply(self, function: Callable[[Env], Coroutine[object, object, T]]) -> T:
        """Runs a function there that looks into the environment."""
        return cast(T, await self._call("reward", "apply", function))

    async def close(self) -> str | None:
        """Closes the environment there, as far as something is left of it."""
        try:
            async with asyncio.timeout(self._close_s + GRACE_S):
                problem = await self._process.call(self._number, "close")
        except ProcessEnded:
            return None
        except TimeoutError:
            return f"its process gave no answer for {self._close_s + GRACE_S:g} s"
        finally:
            self._leave()
        return None if problem is None else str(problem)

    def give_up(self) -> None:
        """Has the environment closed without waiting for it."""
        self._process.give_up(self._number)
        self._leave()

    async def _call(self, call: str, method: str, *args: object, action: str | None = None) -> object:
        process, was_ended = self._process, self._process.end is not None
        try:
            return await process.call(self._number, method, *args)
        except ProcessEnded:
            assert process.end is not None
            label = None if was_ended else label_of(self._task.env_id, self._task.seed, call, action)
            raise process.end.error(label, action or "", is_alone=process.is_alone)  # noqa: B904 - it has its cause


class EnvProcesses:
    """Up to `num` processes that environments share, and as many that hold only one each.

    They are started when needed; an ended process is replaced by another one. They end with the run, however that ends.
    """

    def __init__(self, num: int, limits: Limits) -> None:
        self.num = num
        self._limits = limits
        self._processes: list[EnvProcess] = []
        self._slots = asyncio.Semaphore(num)
        """Limits the processes with one environment."""
        self._numbers = count()
        weakref.finalize(self, _end_all, self._processes, 0.0)

    @property
    def num_leaked(self) -> int:
        """The number of calls of environments that hang in the processes."""
        return sum(process.num_leaked for process in self._processes)

    async def open(self, task: Task, *, alone: bool = False) -> HostedEnv:
        """Makes the task's environment in the process with the fewest environments.

        Raises as `EnvHost.open` does, and EnvProcessLost if that process ended over another environment.
        """
        _check_task(task)
        if alone:
            await self._slots.acquire()
        process = self._choose(alone)
        process.num_environments += 1
        env = _ProcessEnv(process, next(self._numbers), task, self._limits.close_s, lambda: self._leave(process))
        try:
            await env.open()
        except BaseException:
            env.give_up()
            raise
        return env

    def close(self) -> None:
        """Ends the processes; what still runs there is killed after `close_s`."""
        _end_all(self._processes, self._limits.close_s + GRACE_S)

    def _choose(self, alone: bool) -> EnvProcess:
        for process in [process for process in self._processes if process.end is not None]:
            self._processes.remove(process)
            process.join(time.monotonic() + GRACE_S)
        shared = [process for process in self._processes if not process.is_alone]
        emptiest = min(shared, key=lambda process: process.num_environments, default=None)
        if alone or emptiest is None or (emptiest.num_environments and len(shared) < self.num):
            emptiest = EnvProcess(self._limits, is_alone=alone)
            self._processes.append(emptiest)
        return emptiest

    def _leave(self, process: EnvProcess) -> None:
        process.num_environments -= 1
        if process.is_alone:
            self._slots.release()
            process.finish()


def _end_all(processes: list[EnvProcess], wait_s: float) -> None:
    for process in processes:
        process.finish()
    until = time.monotonic() + wait_s
    for process in processes:
        process.join(until)
    processes.clear()


def _check_task(task: Task) -> None:
    """Raises ConfigError for a task that another process cannot play."""
    if task.env_id.startswith("__main__:"):
        raise ConfigError(
            f"{task.env_id} is of the program that runs, which a process of environments (env_processes) does not have:"
            f" name its file, 'path/to/file.py:{task.env_id[9:]}'"
        )
    try:
        pickle.dumps(task)
    except Exception as error:  # an object's own methods may raise anything
        raise ConfigError(
            f"the keywords or options of {task.env_id} hold what a process of environments (env_processes) cannot be"
            f" sent: {error}"
        ) from error

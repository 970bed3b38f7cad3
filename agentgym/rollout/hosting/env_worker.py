"""A process of environments (`env_processes`): plays the calls that the run's process sends, until that is gone."""

from __future__ import annotations

import asyncio
import faulthandler
import os
import pickle
import socket
import threading

from agentgym.errors import ConfigError, EnvironmentFault, UnknownName
from agentgym.rollout.hosting.answer import EnvStep
from agentgym.rollout.hosting.env_code import EnvCallTimeout
from agentgym.rollout.hosting.env_host import EnvHost, make_task_env
from agentgym.rollout.hosting.env_link import EnvLink, Failure
from agentgym.rollout.hosting.hosted_env import HostedEnv
from agentgym.rollout.hosting.tracebacks import fault_traceback, user_traceback
from agentgym.rollout.hosting.watchdog import watch_calls
from agentgym.rollout.limits import Limits
from agentgym.types import Task

__all__ = ["main"]


def main(connection: int, report: int) -> None:
    """Serves the calls that arrive at the socket `connection`; the file `report` is for what ends this process."""
    for number in (connection, report):  # processes that environments start have neither
        os.set_inheritable(number, False)
    os.register_at_fork(after_in_child=lambda: os.close(connection))  # or the run would not see that this process ended
    faulthandler.enable(report)
    asyncio.run(_serve(socket.socket(fileno=connection), report))


async def _serve(connection: socket.socket, report: int) -> None:
    link = await EnvLink.open(connection)
    link.send("ready")
    begun = await link.receive()
    if begun is None:
        return
    limits: Limits = begun[0]
    worker = EnvWorker(link, limits)
    with watch_calls(min(limits.env_step_s, limits.stall_s or limits.env_step_s), report):
        while (message := await link.receive()) is not None:
            worker.begin(*message)
        last = threading.Timer(2 * limits.close_s, os._exit, [1])  # an environment may have threads that never end
        last.daemon = True
        last.start()
        await worker.close()


class EnvWorker:
    """The environments of this process, by the numbers that the run has given them."""

    def __init__(self, link: EnvLink, limits: Limits) -> None:
        self._link = link
        self._limits = limits
        self._host = EnvHost(limits, runs_inline=False)
        self._envs: dict[int, HostedEnv] = {}
        self._running: dict[int, asyncio.Task[None]] = {}

    def begin(self, number: int, env: int, method: str, payload: bytes) -> None:
        """Begins call `number`, of an environment's `open`, `reset`, `step`, `apply` or `close`; its answer is sent."""
        before = self._running.get(env)
        if method == "close" and before is not None:
            before.cancel()  # the run has given that call up
        task = self._running[env] = asyncio.ensure_future(self._answer(number, env, method, payload, before))
        if method == "close":
            task.add_done_callback(lambda _: self._running.pop(env, None))

    async def close(self) -> None:
        """Closes the environments that are left, within `close_s`."""
        closing = [asyncio.ensure_future(env.close()) for env in self._envs.values()]
        if closing:
            await asyncio.wait(closing, timeout=self._limits.close_s)

    async def _answer(
        self, number: int, env: int, method: str, payload: bytes, before: asyncio.Task[None] | None
    ) -> None:
        if before is not None:
            await asyncio.wait({before})
        try:
            answer = pickle.dumps(await self._call(env, method, pickle.loads(payload)))
        except Exception as error:  # noqa: BLE001 - the boundary around environments: the run reads what it was
            answer = pickle.dumps(_failure_of(error))
        self._link.send(number, self._host.num_leaked, answer)

    async def _call(self, env: int, method: str, args: tuple[object, ...]) -> object:
        match method, args:
            case "open", (Task() as task,):
                self._envs[env] = await self._host.open(make_task_env, task)
                return None
            case "reset", (int() as seed, options):
                answer = await self._envs[env].reset(seed, options)  # type: ignore[arg-type]
                return _sendable("reset", answer), self._envs[env].facts
            case "step", (str() as action,):
                return _sendable("step", await self._envs[env].step(action))
            case "apply", (function,):
                return await self._envs[env].apply(function)  # type: ignore[arg-type]
            case _:
                hosted = self._envs.pop(env, None)
                return None if hosted is None else await hosted.close()


def _sendable(method: str, answer: EnvStep) -> EnvStep:
    """Returns the answer for the run; raises EnvironmentFault if it cannot be sent."""
    try:
        plain = answer.plain()
        pickle.dumps(plain)
    except Exception as error:  # an object's own methods may raise anything
        raise EnvironmentFault(f"what {method}() gave cannot be sent to the run's process: {error}") from error
    return plain


def _failure_of(error: Exception) -> Failure:
    if isinstance(error, EnvCallTimeout):
        return Failure("timeout", str(error))
    if isinstance(error, EnvironmentFault):
        return Failure("fault", str(error), error.tool, fault_traceback(error))
    if isinstance(error, (ConfigError, UnknownName)):
        return Failure("config" if isinstance(error, ConfigError) else "name", str(error))
    return Failure("fault", f"{type(error).__name__}: {error}", "", user_traceback(error))

"""The place where an environment's code runs: the event loop, a thread, the environments' loop, or another process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Literal, TypeAlias, TypeVar, cast

from agentgym.envs.base.text_env import TextEnv
from agentgym.envs.base.wrapped_env import as_text_env
from agentgym.envs.catalog.resolve import make_env
from agentgym.errors import ConfigError, EnvironmentFault, UnknownName
from agentgym.rollout.hosting.answer import EnvStep, read_reset, read_step
from agentgym.rollout.hosting.env_code import ENV_CODE, CallOutcome, EnvCallTimeout, unwrap_outcome
from agentgym.rollout.hosting.env_process import EnvProcesses
from agentgym.rollout.hosting.env_threads import EnvThread, EnvThreads, Mailbox
from agentgym.rollout.hosting.hosted_env import Env, EnvFacts, HostedEnv, facts_of, label_of
from agentgym.rollout.hosting.watchdog import named_call, watch_call
from agentgym.rollout.limits import Limits
from agentgym.tools.calling.background_loop import BackgroundLoop
from agentgym.types import Task

__all__ = ["EnvHost", "LocalEnv", "make_task_env"]

T = TypeVar("T")
Kind: TypeAlias = Literal["inline", "thread", "async"]
_async_envs = BackgroundLoop("agentgym-async-envs")
"""The loop of every async environment of the process, not the rollout's own: a coroutine that ignores its cancellation
would keep that one from ending."""


def make_task_env(task: Task) -> Env:
    """Returns a new environment for a task; raises UnknownName or ConfigError if there is no such environment."""
    return make_env(task.env_id, task.kwargs)


def hosting_kind(env: Env) -> Kind:
    """Returns the place for an environment's code.

    An async environment in a wrapper is driven through its sync `step`, on a thread.
    """
    inner = env.unwrapped
    if not isinstance(inner, TextEnv):
        return "thread"
    if env.get_wrapper_attr("runs_inline"):
        return "inline"
    is_async = inner is env and not getattr(type(inner).astep, "from_sync", False)
    return "async" if is_async else "thread"


class LocalEnv(HostedEnv):
    """An environment of this process."""

    __slots__ = ("_host", "_name", "_seed", "_thread", "env", "kind")

    def __init__(self, env: Env, kind: Kind, host: EnvHost, thread: EnvThread | None = None, name: str = "") -> None:
        super().__init__()
        self.env = env
        self.kind = kind
        self._name = name or _name_of(env)
        self._seed = 0
        self._host = host
        self._thread = thread

    async def reset(self, seed: int, options: dict[str, object] | None) -> EnvStep:
        """Calls the environment's `reset`."""
        env, self._seed = self.env, seed
        label = partial(label_of, self._name, seed, "reset")
        if self.kind == "async":

            async def reset() -> tuple[object, EnvFacts]:
                return await cast(TextEnv, env).areset(seed=seed, options=options), facts_of(env)

            values, self.facts = await self._host.run_async(reset, label)
        else:
            values, self.facts = await self._run(lambda: (env.reset(seed=seed, options=options), facts_of(env)), label)
        return read_reset(values)

    async def step(self, action: str) -> EnvStep:
        """Calls the environment's `step`; an inline one directly, so that few frames lead to the author's code."""
        env, label = self.env, partial(label_of, self._name, self._seed, "step", action)
        values: object
        if self.kind == "inline":
            with ENV_CODE, watch_call(label):
                values = env.step(action)
        elif self.kind == "async":
            values = await self._host.run_async(lambda: cast(TextEnv, env).astep(action), label)
        else:
            values = await self._run(lambda: env.step(action), label)
        return read_step(values)

    async def apply(self, function: Callable[[Env], Coroutine[object, object, T]]) -> T:
        """Runs a function that looks into the environment where its own code runs, an inline one on a thread."""
        env, host, label = self.env, self._host, partial(label_of, self._name, self._seed, "reward")
        if self.kind == "async":
            return await host.run_async(lambda: function(env), label)
        call = named_call(label, lambda: asyncio.run(function(env)))
        if self._thread is not None:
            return await host.run_on(self._thread, call)
        thread = host.threads.acquire()
        try:
            result = await host.run_on(thread, call)
        except (EnvCallTimeout, asyncio.CancelledError):
            host.threads.abandon(thread)
            raise
        except BaseException:
            host.threads.release(thread)
            raise
        host.threads.release(thread)
        return result

    async def close(self) -> str | None:
        """Closes the environment; one that is still in a call keeps its thread, which closes it after that call."""
        try:
            return await self._close()
        except (EnvironmentFault, EnvCallTimeout) as error:
            return str(error)

    async def _close(self) -> str | None:
        env, thread, limit_s = self.env, self._thread, self._host.limits.close_s
        label = partial(label_of, self._name, self._seed, "close")
        if self.kind == "async":
            await self._host.run_async(cast(TextEnv, env).aclose, label, limit_s)
        elif thread is None:
            await self._run(env.close, label)
        else:
            self._thread = None
            call = thread.submit(named_call(label, env.close), self._host.mailbox())
            try:
                await asyncio.wait({call.future}, timeout=limit_s)
            except asyncio.CancelledError:
                self._host.threads.abandon(thread)
                raise
            if not call.future.done():
                self._host.threads.abandon(thread)
                return f"the environment was still busy {limit_s:g} s after it was asked to close"
            self._host.threads.release(thread)
            unwrap_outcome(call.future.result())
        return None

    def release(self) -> None:
        """Returns the thread to the pool and leaves the environment open, for the caller who made it."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._host.threads.release(thread)

    async def _run(self, function: Callable[[], T], label: Callable[[], str]) -> T:
        """Runs sync code of the environment, on its thread if it has one."""
        if self._thread is not None:
            return await self._host.run_on(self._thread, named_call(label, function))
        with ENV_CODE, watch_call(label):
            return function()


class EnvHost:
    """Places environments, and bounds the threads that hung environments keep.

    With `num_processes`, they run in that many processes. Without `runs_inline`, each has a thread, whatever its class
    promises.
    """

    def __init__(
        self,
        limits: Limits,
        threads: EnvThreads | None = None,
        num_processes: int = 0,
        *,
        runs_inline: bool = True,
    ) -> None:
        self.limits = limits
        self.threads = threads or EnvThreads()
        self.processes = EnvProcesses(num_processes, limits) if num_processes else None
        self._runs_inline = runs_inline
        self._mailbox: Mailbox | None = None
        self._kinds: dict[str, Kind] = {}
        self._first: dict[str, asyncio.Event] = {}
        self._running: set[object] = set()
        self._given_up: set[object] = set()

    @property
    def num_leaked(self) -> int:
        """The number of abandoned calls of environments that still run."""
        self._given_up &= self._running
        return self.threads.num_leaked + len(self._given_up) + (self.processes.num_leaked if self.processes else 0)

    async def open(self, make: Callable[[Task], Env], task: Task, *, alone: bool = False) -> HostedEnv:
        """Makes the task's environment in its place, so that even its constructor blocks nothing.

        `alone` asks for a process of its own. The first environment of an id is made on a thread, and others wait for
        it: then its kind is known. A name or keywords that no environment has raise UnknownName or ConfigError: they
        are the caller's mistake.
        """
        if self.processes is not None:
            return await self.processes.open(task, alone=alone)
        first = self._first.get(task.env_id)
        if first is not None:
            await first.wait()
        else:
            first = self._first[task.env_id] = asyncio.Event()
        try:
            return await self._open(make, task)
        except EnvironmentFault as fault:
            if isinstance(fault.__cause__, (UnknownName, ConfigError)):
                raise fault.__cause__ from None
            raise
        finally:
            first.set()

    async def _open(self, make: Callable[[Task], Env], task: Task) -> LocalEnv:
        name, label = task.env_id, partial(label_of, task.env_id, task.seed, "its constructor")
        if self._kinds.get(name) == "inline":
            with ENV_CODE, watch_call(label):
                env = as_text_env(make(task))
            return LocalEnv(env, "inline", self, name=name)
        thread = self.threads.acquire()
        envs: list[Env] = []
        try:
            await self.run_on(thread, named_call(label, lambda: envs.append(as_text_env(make(task)))))
        except EnvCallTimeout:
            self.threads.abandon(thread)
            raise
        except BaseException:  # cancelled while it was made: it closes as soon as it is ready
            thread.submit(lambda: _close_all(envs), self.mailbox())
            self.threads.release(thread)
            raise
        env = envs[0]
        kind = hosting_kind(env)
        kind = self._kinds[name] = "thread" if kind == "inline" and not self._runs_inline else kind
        if kind == "thread":
            return LocalEnv(env, kind, self, thread, name)
        self.threads.release(thread)
        return LocalEnv(env, kind, self, name=name)

    def adopt(self, env: Env) -> LocalEnv:
        """Places an existing environment."""
        env = as_text_env(env)
        kind = hosting_kind(env)
        return LocalEnv(env, kind, self, self.threads.acquire() if kind == "thread" else None)

    def close(self) -> None:
        """Ends the threads and the processes; threads in a call end after it."""
        self.threads.close()
        if self.processes is not None:
            self.processes.close()

    def mailbox(self) -> Mailbox:
        """Returns the mailbox of the running event loop."""
        loop = asyncio.get_running_loop()
        if self._mailbox is None or self._mailbox.loop is not loop:
            self._mailbox = Mailbox(loop)
        return self._mailbox

    async def run_on(self, thread: EnvThread, function: Callable[[], T]) -> T:
        """Runs user code on its thread, for at most `env_step_s` from when it begins."""
        mailbox, limit_s = self.mailbox(), min(self.limits.env_step_s, self.limits.deadline_s)
        call = thread.submit(function, mailbox)

        timer = mailbox.loop.call_later(limit_s, lambda: check())

        def check() -> None:
            nonlocal timer
            left_s = limit_s if call.started_at is None else call.started_at + limit_s - time.monotonic()
            if left_s > 0:  # it waits for another environment of its thread, or began later than it was queued
                timer = mailbox.loop.call_later(left_s, check)
            elif not call.future.done():
                call.future.set_result((_too_long(limit_s), None))

        try:
            return unwrap_outcome(await call.future)
        finally:
            timer.cancel()

    async def run_async(
        self,
        function: Callable[[], Coroutine[object, object, T]],
        label: Callable[[], str],
        limit_s: float | None = None,
    ) -> T:
        """Runs a coroutine of the user on the environments' loop, for at most `limit_s` (`env_step_s`).

        One that ignores its cancellation is left running there and is not waited for.
        """
        limit_s = limit_s or self.limits.env_step_s
        call = object()
        running = _async_envs.submit(self._attempt_async(function, call, label))
        try:
            async with asyncio.timeout(limit_s):
                outcome = await asyncio.wrap_future(running)
        except TimeoutError:
            self._given_up.add(call)
            raise _too_long(limit_s) from None
        except asyncio.CancelledError:
            self._given_up.add(call)
            raise
        return unwrap_outcome(outcome)

    async def _attempt_async(
        self, function: Callable[[], Coroutine[object, object, T]], call: object, label: Callable[[], str]
    ) -> CallOutcome[T]:
        """Runs `attempt` for a coroutine; `call` counts as running until it ends."""
        self._running.add(call)
        try:
            with watch_call(label):
                return None, await function()
        except (Exception, SystemExit, KeyboardInterrupt) as error:  # noqa: BLE001 - the boundary around user code
            return error, None
        finally:
            self._running.discard(call)


def _name_of(env: Env) -> str:
    spec = env.unwrapped.spec
    return spec.id if spec is not None else type(env.unwrapped).__name__


def _close_all(envs: list[Env]) -> None:
    for env in envs:
        env.close()


def _too_long(limit_s: float) -> EnvCallTimeout:
    return EnvCallTimeout(f"a call of the environment took over {limit_s:g} s (limits.env_step_s)")

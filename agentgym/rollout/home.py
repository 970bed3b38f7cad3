"""Where the code of an environment runs: on the event loop, on a thread of its own, or on the environments' loop."""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Literal, TypeAlias, TypeVar, cast

import gymnasium

from agentgym.envs.resolve import make_env
from agentgym.envs.text_env import TextEnv
from agentgym.errors import AgentGymError, ConfigError, EnvironmentFault, UnknownName
from agentgym.rollout.limits import Limits
from agentgym.rollout.threads import EnvThread, EnvThreads, Mailbox, Outcome, attempt
from agentgym.rollout.watchdog import calling, named_call
from agentgym.types import JSON, Task, ToolSpec

__all__ = ["EnvCallTimeout", "Home", "HostedEnv", "make_task_env"]

T = TypeVar("T")
Env: TypeAlias = "gymnasium.Env[str, str]"
Kind: TypeAlias = Literal["inline", "thread", "async"]


class EnvCallTimeout(AgentGymError, TimeoutError):
    """A call of an environment that ran longer than `env_step_s`."""


def make_task_env(task: Task) -> Env:
    """A new environment for a task; raises UnknownName or ConfigError when there is no such environment."""
    return make_env(task.env_id, task.kwargs)


def kind_of(env: Env) -> Kind:
    """Where an environment's code belongs. An async one in a wrapper is driven through its sync `step`, on a thread."""
    inner = env.unwrapped
    if not isinstance(inner, TextEnv):
        return "thread"
    if inner.runs_inline:
        return "inline"
    is_async = inner is env and not getattr(type(inner).astep, "from_sync", False)
    return "async" if is_async else "thread"


class HostedEnv:
    """An environment at its place; its calls await instead of blocking.

    `reset` and `step` raise EnvironmentFault (its cause is what the environment raised) or EnvCallTimeout.
    """

    __slots__ = ("_home", "_seed", "_thread", "env", "kind", "system_prompt")

    def __init__(self, env: Env, kind: Kind, home: Home, thread: EnvThread | None = None) -> None:
        self.env = env
        self.kind = kind
        self._seed = 0
        self._home = home
        self._thread = thread
        inner = env.unwrapped
        self.system_prompt: str = inner.system_prompt if isinstance(inner, TextEnv) else ""

    @property
    def tool_specs(self) -> tuple[ToolSpec, ...]:
        """The tools of the episode at hand; ask after `reset`."""
        inner = self.env.unwrapped
        return inner.tool_specs if isinstance(inner, TextEnv) else ()

    @property
    def task_info(self) -> dict[str, JSON]:
        """What the record keeps of the task at hand: its digest, and whether no task on the side of its seed was found;
        ask after `reset`."""
        inner = self.env.unwrapped
        if not isinstance(inner, TextEnv) or not inner.task_digest:
            return {}
        return {"task_digest": inner.task_digest, **({"split_failed": True} if inner.split_failed else {})}

    @property
    def wants_tools(self) -> bool:
        """Whether the episode at hand has tools and cannot be won without."""
        return bool(self.tool_specs) and not getattr(self.env.unwrapped, "tools_optional", False)

    async def reset(self, seed: int, options: dict[str, object] | None) -> tuple[object, ...]:
        """The environment's `reset`."""
        env, self._seed = self.env, seed
        if self.kind == "async":
            reset = cast(TextEnv, env).areset
            return await self._home.run_async(lambda: reset(seed=seed, options=options), self._label("reset"))
        return await self._run(named_call(lambda: self._label("reset"), lambda: env.reset(seed=seed, options=options)))

    async def step(self, action: str) -> tuple[object, ...]:
        """The environment's `step`."""
        env = self.env
        if self.kind == "async":
            label = self._label(f"step({action!r:.120})")
            return await self._home.run_async(lambda: cast(TextEnv, env).astep(action), label)
        return await self._run(named_call(lambda: self._label(f"step({action!r:.120})"), lambda: env.step(action)))

    def _label(self, call: str) -> str:
        """Returns the name of a call for the watchdog."""
        spec = self.env.unwrapped.spec
        name = spec.id if spec is not None else type(self.env.unwrapped).__name__
        return f"{name} (seed {self._seed}), {call}"

    async def close(self) -> str | None:
        """Closes the environment where it lives, within `close_s`; returns what went wrong, if anything.

        An environment that is still in a call then keeps its thread, which closes it after that call.
        """
        try:
            return await self._close()
        except (EnvironmentFault, EnvCallTimeout) as error:
            return str(error)

    async def _close(self) -> str | None:
        env, thread, limit_s = self.env, self._thread, self._home.limits.close_s
        if self.kind == "async":
            await self._home.run_async(cast(TextEnv, env).aclose, self._label("close"), limit_s)
        elif thread is None:
            opened(attempt(env.close))
        else:
            self._thread = None
            call = thread.submit(env.close, self._home.mailbox())
            try:
                await asyncio.wait({call.future}, timeout=limit_s)
            except asyncio.CancelledError:
                self._home.threads.abandon(thread)
                raise
            if not call.future.done():
                self._home.threads.abandon(thread)
                return f"the environment was still busy {limit_s:g} s after it was told to close"
            self._home.threads.release(thread)
            opened(call.future.result())
        return None

    def release(self) -> None:
        """Gives the thread back and leaves the environment open, for the one who made it."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._home.threads.release(thread)

    async def _run(self, function: Callable[[], T]) -> T:
        if self._thread is None:
            return opened(attempt(function))
        return await self._home.run_on(self._thread, function)


class Home:
    """Places environments, and bounds what the hung ones among them leave behind."""

    def __init__(self, limits: Limits, threads: EnvThreads | None = None) -> None:
        self.limits = limits
        self.threads = threads or EnvThreads()
        self._mailbox: Mailbox | None = None
        self._kinds: dict[str, Kind] = {}
        self._first: dict[str, asyncio.Event] = {}
        self._running: set[object] = set()
        self._given_up: set[object] = set()

    @property
    def num_leaked(self) -> int:
        """Calls of environments that nobody waits for any more and that still run."""
        self._given_up &= self._running
        return self.threads.num_leaked + len(self._given_up)

    async def open(self, make: Callable[[Task], Env], task: Task) -> HostedEnv:
        """Makes the task's environment where it will live, so that even its constructor blocks nobody.

        The first environment of an id is made on a thread, and others wait for it: then its kind is known. A name or
        keywords that no environment has raise UnknownName or ConfigError: they are the caller's mistake.
        """
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

    async def _open(self, make: Callable[[Task], Env], task: Task) -> HostedEnv:
        def label() -> str:
            return f"{task.env_id} (seed {task.seed}), its constructor"

        if self._kinds.get(task.env_id) == "inline":
            return HostedEnv(opened(attempt(named_call(label, lambda: make(task)))), "inline", self)
        thread = self.threads.acquire()
        made: list[Env] = []
        try:
            await self.run_on(thread, named_call(label, lambda: made.append(make(task))))
        except EnvCallTimeout:
            self.threads.abandon(thread)
            raise
        except BaseException:  # cancelled while it was made: it closes as soon as it is
            thread.submit(lambda: _close_all(made), self.mailbox())
            self.threads.release(thread)
            raise
        env = made[0]
        kind = self._kinds[task.env_id] = kind_of(env)
        if kind == "thread":
            return HostedEnv(env, kind, self, thread)
        self.threads.release(thread)
        return HostedEnv(env, kind, self)

    def adopt(self, env: Env) -> HostedEnv:
        """Places an environment that exists already."""
        kind = kind_of(env)
        return HostedEnv(env, kind, self, self.threads.acquire() if kind == "thread" else None)

    def mailbox(self) -> Mailbox:
        """The mailbox of the running event loop."""
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
            if left_s > 0:  # it waits behind another environment of its thread, or began later than it was queued
                timer = mailbox.loop.call_later(left_s, check)
            elif not call.future.done():
                call.future.set_result((_too_long(limit_s), None))

        try:
            return opened(await call.future)
        finally:
            timer.cancel()

    async def run_async(
        self, function: Callable[[], Coroutine[object, object, T]], label: str, limit_s: float | None = None
    ) -> T:
        """Runs a coroutine of the user on the environments' loop, for at most `limit_s` (`env_step_s`).

        One that ignores its cancellation is left running there, and nobody waits for it.
        """
        limit_s = limit_s or self.limits.env_step_s
        call = object()
        running = asyncio.run_coroutine_threadsafe(self._guarded(function, call, label), _environment_loop())
        try:
            async with asyncio.timeout(limit_s):
                outcome = await asyncio.wrap_future(running)
        except TimeoutError:
            self._given_up.add(call)
            raise _too_long(limit_s) from None
        except asyncio.CancelledError:
            self._given_up.add(call)
            raise
        return opened(outcome)

    async def _guarded(
        self, function: Callable[[], Coroutine[object, object, T]], call: object, label: str
    ) -> Outcome[T]:
        """`attempt` for a coroutine; `call` counts as running until it ends."""
        self._running.add(call)
        try:
            with calling(label):
                return None, await function()
        except (Exception, SystemExit, KeyboardInterrupt) as error:  # noqa: BLE001 - the boundary around user code
            return error, None
        finally:
            self._running.discard(call)


def _close_all(envs: list[Env]) -> None:
    for env in envs:
        env.close()


def opened(outcome: Outcome[T]) -> T:
    """The value of an outcome; raises EnvironmentFault from the user's error (EnvCallTimeout as it is)."""
    error, value = outcome
    if isinstance(error, EnvCallTimeout):
        raise error
    if error is not None:
        raise EnvironmentFault(_described(error), tool=getattr(error, "tool", "")) from error
    return cast(T, value)


def _too_long(limit_s: float) -> EnvCallTimeout:
    return EnvCallTimeout(f"a call of the environment took over {limit_s:g} s (limits.env_step_s)")


def _described(error: BaseException) -> str:
    """One line: the error's type and the first line of its message."""
    if isinstance(error, SystemExit):
        return f"the environment called sys.exit({error.code!r})"
    message = str(error).strip().split("\n")[0]
    if isinstance(error, EnvironmentFault):
        return message
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


@functools.cache
def _environment_loop() -> asyncio.AbstractEventLoop:
    """The event loop, on a daemon thread, where every async environment of the process runs.

    Not the rollout's own loop: a coroutine that ignores its cancellation would keep that one from ending.
    """
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="agentgym-async-envs", daemon=True).start()
    return loop

"""An agent that is a function of the user's."""

from __future__ import annotations

import asyncio
import inspect
import traceback
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import cast

from agentgym.errors import ConfigError, describe_error
from agentgym.loading import Wanted, load_named
from agentgym.rollout.agents.agent_episode import AgentEpisode
from agentgym.rollout.agents.own_thread import start_thread

__all__ = ["FunctionAgent"]

FUNCTION = Wanted(noun="agent", example="play", hint="It takes an AgentEpisode (`agentgym docs agents`).")


class FunctionAgent:
    """A function of the user's, which plays each episode on a thread of its own.

    A coroutine function is cancelled when its time is over. An ordinary function cannot be ended from outside: it goes
    on until a request of it is answered with an error.
    """

    def __init__(self, name: str) -> None:
        function = load_named(name, FUNCTION)
        if not callable(function):
            raise ConfigError(f"the agent {name!r} is no function. {FUNCTION.hint}")
        self.name = name
        self._function = cast("Callable[[AgentEpisode], Awaitable[object] | object]", function)

    async def play(self, episode: AgentEpisode, log_path: Path) -> str:
        """Calls the function, and waits for its end; see `Agent.play`."""
        call = _Call(self._function, episode)
        try:
            await start_thread(call.run, f"agent {episode.name}")
        except Exception as error:  # noqa: BLE001 - the boundary around the user's function
            log_path.parent.mkdir(parents=True, exist_ok=True)
            log_path.write_text("".join(traceback.format_exception(error)), encoding="utf-8")
            return f"{self.name} failed: {describe_error(error)} ({log_path.name})"
        finally:
            call.cancel()
        return ""


class _Call:
    """A call of a function on another thread."""

    def __init__(self, function: Callable[[AgentEpisode], Awaitable[object] | object], episode: AgentEpisode) -> None:
        self._function, self._episode = function, episode
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[object] | None = None

    def run(self) -> None:
        """Calls the function, to its end."""
        outcome = self._function(self._episode)
        if inspect.isawaitable(outcome):
            with suppress(asyncio.CancelledError):
                asyncio.run(self._await(outcome))

    def cancel(self) -> None:
        """Ends a coroutine function that still runs; an ordinary function goes on."""
        if self._loop is not None and self._task is not None:
            with suppress(RuntimeError):  # it has ended, and its loop is closed
                self._loop.call_soon_threadsafe(self._task.cancel)

    async def _await(self, outcome: Awaitable[object]) -> None:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        await outcome

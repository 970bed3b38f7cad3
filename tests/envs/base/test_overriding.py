"""A subclass may override any method of a tool environment and call its base, whoever calls it and from where."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import gymnasium
import pytest

from agentgym.envs import Action, ToolEnv
from agentgym.envs.base.text_env import Info, StepResult
from agentgym.tools import tool
from agentgym.types import ToolCall

WAIT_S = 20.0
Opening = tuple[str, Info]


class Bell(ToolEnv):
    """Rings: the tool tells on which thread it runs, the first observation a number drawn from the seed."""

    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__(render_mode)
        self.closed = 0
        self.threads: set[str] = set()

    def start(self, options: dict[str, Any]) -> str:
        self.threads.add(threading.current_thread().name)
        return str(self.np_random.integers(10**6))

    @tool
    def ring(self) -> str:
        """Rings."""
        self.threads.add(threading.current_thread().name)
        return "rung"

    @tool
    async def chime(self) -> str:
        """Rings softly."""
        await asyncio.sleep(0)
        return "chimed"


class Sync(Bell):
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Opening:
        self.threads.add(threading.current_thread().name)
        observation, info = super().reset(seed=seed, options=options)
        return f"{observation}!", info

    def step(self, action: str) -> StepResult:
        self.threads.add(threading.current_thread().name)
        observation, reward, *rest = super().step(action)
        return (f"{observation}!", reward + 1.0, *rest)  # type: ignore[return-value]

    def close(self) -> None:
        self.closed += 1
        super().close()


class Async(Bell):
    async def areset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Opening:
        observation, info = await super().areset(seed=seed, options=options)
        return f"{observation}!", info

    async def astep(self, action: str) -> StepResult:
        observation, reward, *rest = await super().astep(action)
        return (f"{observation}!", reward + 1.0, *rest)  # type: ignore[return-value]

    def close(self) -> None:
        self.closed += 1
        super().close()


class SyncOfAsync(Async):
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Opening:
        return super().reset(seed=seed, options=options)

    def step(self, action: str) -> StepResult:
        return super().step(action)


class AsyncOfSync(Sync):
    async def areset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Opening:
        return await super().areset(seed=seed, options=options)

    async def astep(self, action: str) -> StepResult:
        return await super().astep(action)


class SyncInline(Sync):
    runs_inline = True


class AsyncInline(Async):
    runs_inline = True


KINDS = [Sync, Async, SyncOfAsync, AsyncOfSync, SyncInline, AsyncInline]


def calls(*names: str) -> Action:
    return Action("", tool_calls=tuple(ToolCall(str(number), name, {}) for number, name in enumerate(names)))


def within(work: Callable[[], Any]) -> Any:
    """The result of `work`; one that waits for itself fails the test instead of hanging it."""
    box: list[Any] = []
    thread = threading.Thread(target=lambda: box.append(work()), daemon=True)
    thread.start()
    thread.join(WAIT_S)
    assert box, "it still waits" if thread.is_alive() else "it failed"
    return box[0]


def play_sync(kind: type[Bell]) -> tuple[str, list[tuple[str, float]], Bell]:
    env = kind()
    opening = env.reset(seed=3)[0]
    steps = [env.step(calls("ring", "chime"))[:2], env.step("hello")[:2]]
    env.close()
    return opening, steps, env


async def play_async(kind: type[Bell]) -> tuple[str, list[tuple[str, float]], Bell]:
    env = kind()
    opening = (await env.areset(seed=3))[0]
    steps = [(await env.astep(calls("ring", "chime")))[:2], (await env.astep("hello"))[:2]]
    await env.aclose()
    return opening, steps, env


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_subclass_overrides_is_called_once_in_both_interfaces(kind: type[Bell]) -> None:
    plain = Bell()
    expected = plain.reset(seed=3)[0] + "!"
    plain.close()
    for opening, steps, env in (
        within(lambda: play_sync(kind)),
        within(lambda: asyncio.run(play_async(kind))),
    ):
        assert opening == expected
        assert steps[0] == ("rung\nchimed!", 1.0)
        assert steps[1][0].startswith("Nothing was done") and steps[1][0].endswith("!") and steps[1][1] == 1.0
        assert env.closed == 1


def test_sync_code_of_the_async_interface_stays_on_one_thread() -> None:
    _, _, env = within(lambda: asyncio.run(play_async(Sync)))
    assert env.threads == {"agentgym-Sync"}


@pytest.mark.parametrize("kind", [Sync, Async, SyncInline, AsyncInline])
def test_a_seed_given_to_the_base_counts(kind: type[Bell]) -> None:
    if issubclass(kind, Async):

        class Fixed(kind):  # type: ignore[valid-type,misc]
            async def areset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Opening:
                return await super().areset(seed=7, options=options)

    else:

        class Fixed(kind):  # type: ignore[valid-type,misc,no-redef]
            def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Opening:
                return super().reset(seed=7, options=options)

    def openings(of: type[Bell]) -> list[str]:
        env = of()
        return [env.reset(seed=seed)[0] for seed in (1, 2, 7)]

    fixed, free = within(lambda: openings(Fixed)), within(lambda: openings(kind))
    assert len(set(free)) == 3
    assert fixed == [free[2]] * 3


def test_a_wrapped_environment_with_overridden_methods_plays() -> None:
    def play() -> tuple[str, float]:
        env = gymnasium.wrappers.TimeLimit(Sync(), max_episode_steps=3)
        env.reset(seed=3)
        observation, reward, *_ = env.step(calls("ring"))
        env.close()
        return observation, float(reward)

    assert within(play) == ("rung!", 1.0)

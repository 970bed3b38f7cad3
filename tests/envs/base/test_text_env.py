"""TextEnv: one of each pair is written, the other follows; turns, limits and threads are the base's."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env as gymnasium_check_env
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, RecordEpisodeStatistics, TimeLimit

from agentgym.envs import EpisodeOver, TextEnv
from agentgym.errors import ConfigError, EnvironmentFault
from agentgym.types import Message


class Echo(TextEnv):
    max_turns = 3

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        return f"start {self.np_random.integers(1000)}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return action, 0.5, action == "stop", False, {}


class AsyncEcho(TextEnv):
    max_turns = 3

    async def areset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        await asyncio.sleep(0)
        return f"start {self.np_random.integers(1000)}", {}

    async def astep(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        await asyncio.sleep(0)
        return action, 0.5, action == "stop", False, {}


@pytest.mark.parametrize("kind", [Echo, AsyncEcho])
def test_the_sync_interface_plays(kind: type[TextEnv]) -> None:
    env = kind()
    observation, info = env.reset(seed=3)
    assert env.reset(seed=3)[0] == observation
    assert info["messages"] == (Message("user", observation),)
    assert env.step("a")[:4] == ("a", 0.5, False, False)
    assert env.turns == 1
    env.close()
    env.close()


@pytest.mark.parametrize("kind", [Echo, AsyncEcho])
def test_the_async_interface_plays_the_same_episode(kind: type[TextEnv]) -> None:
    async def play() -> list[Any]:
        env = kind()
        first = await env.areset(seed=3)
        steps = [await env.astep("a"), await env.astep("b")]
        await env.aclose()
        return [first, *steps]

    env = kind()
    assert asyncio.run(play()) == [env.reset(seed=3), env.step("a"), env.step("b")]
    env.close()


def test_sync_calls_work_while_a_loop_runs() -> None:
    async def main() -> str:
        env = AsyncEcho()
        env.reset(seed=0)
        return env.step("inside")[0]

    assert asyncio.run(main()) == "inside"


@pytest.mark.parametrize("kind", [Echo, AsyncEcho])
def test_the_turn_limit_truncates_with_a_message(kind: type[TextEnv]) -> None:
    env = kind()
    env.reset(seed=0)
    results = [env.step("a") for _ in range(3)]
    assert [result[3] for result in results] == [False, False, True]
    assert results[2][2] is False
    assert results[2][4]["truncated_by"] == "env turn limit"
    with pytest.raises(EpisodeOver, match="after the episode ended"):
        env.step("a")
    env.reset(seed=0)
    assert env.step("stop")[2:4] == (True, False)


def test_a_step_before_reset_or_of_no_text_is_refused() -> None:
    env = Echo()
    with pytest.raises(EpisodeOver, match="before reset"):
        env.step("a")
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step("a")
    env.reset(seed=0)
    with pytest.raises(ConfigError, match="got int"):
        env.step(3)  # type: ignore[arg-type]


def test_a_class_overrides_exactly_one_of_each_pair() -> None:
    with pytest.raises(ConfigError, match="overrides both step and astep"):
        type("Both", (Echo,), {"step": Echo.step, "astep": AsyncEcho.astep})
    with pytest.raises(ConfigError, match="overrides neither step nor astep"):
        type("None_", (TextEnv,), {})
    with pytest.raises(ConfigError, match="must be `async def`"):
        type("Wrong", (TextEnv,), {"astep": lambda self, action: None})
    with pytest.raises(ConfigError, match="must be a plain `def`"):
        type("Wrong", (TextEnv,), {"step": AsyncEcho.astep})


def test_a_subclass_may_call_super_and_may_change_the_kind() -> None:
    class Louder(Echo):
        def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
            observation, *rest = super().step(action)
            return (observation.upper(), *rest)  # type: ignore[return-value]

    class Later(Echo):
        async def astep(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
            return "later", 0.0, False, False, {}

    env: TextEnv = Louder()
    env.reset(seed=0)
    assert (env.step("a")[0], env.turns) == ("A", 1)
    env = Later()
    env.reset(seed=0)
    assert env.step("a")[0] == "later"


def test_an_observation_that_is_no_text_is_the_environments_fault() -> None:
    class Image(Echo):
        def step(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            return b"png", 0.0, False, False, {}

    env = Image()
    env.reset(seed=0)
    with pytest.raises(EnvironmentFault, match="type bytes"):
        env.step("a")


@pytest.mark.parametrize("kind", [Echo, AsyncEcho])
def test_gymnasiums_own_check_is_silent(kind: type[TextEnv]) -> None:
    gymnasium_check_env(kind(), skip_render_check=True)


def test_standard_wrappers_work() -> None:
    bare = Echo(render_mode="ansi")
    env = RecordEpisodeStatistics(TimeLimit(OrderEnforcing(PassiveEnvChecker(bare)), max_episode_steps=2))
    env.reset(seed=0)
    env.step("a")
    assert env.render() == "a"
    *_, truncated, info = env.step("b")
    assert truncated
    assert info["episode"]["r"] == 1.0
    env.close()
    with pytest.raises(ConfigError, match="human"):
        Echo(render_mode="human")


class Blocking(TextEnv):
    """Blocks until its `gate` opens, and remembers the threads that it was called on."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.entered = threading.Event()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        self.threads = {threading.get_ident()}
        return "", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.threads.add(threading.get_ident())
        self.entered.set()
        return "blocked", float(self.gate.wait(float(action))), False, False, {}

    def close(self) -> None:
        self.threads.add(threading.get_ident())
        super().close()


def test_blocking_environments_do_not_wait_for_each_other_and_stay_on_one_thread() -> None:
    async def main() -> list[Blocking]:
        envs = [Blocking() for _ in range(64)]
        await asyncio.gather(*(env.areset(seed=0) for env in envs))
        steps = asyncio.gather(*(env.astep("60") for env in envs))
        while not all(env.entered.is_set() for env in envs) and not steps.done():
            await asyncio.sleep(0.001)  # the event loop goes on while all of them block
        for env in envs:
            env.gate.set()
        assert [reward for _, reward, *_ in await steps] == [1.0] * 64, "one waited for another, or for the loop"
        await asyncio.gather(*(env.aclose() for env in envs))
        return envs

    assert all(len(env.threads) == 1 for env in asyncio.run(main()))


def test_a_cancelled_step_leaves_nothing_running_once_it_returns() -> None:
    before = threading.active_count()

    async def main() -> None:
        envs = [Blocking() for _ in range(10)]
        for env in envs:
            await env.areset(seed=0)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(env.astep("0.1"), 0.01)
            await env.aclose()

    asyncio.run(main())
    deadline = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= before

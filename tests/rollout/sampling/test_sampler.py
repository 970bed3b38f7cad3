"""Many episodes at once: order, failures that touch nobody else, and nothing left behind."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import pytest

from agentgym.chat_templates.protocol import Renderer
from agentgym.engines.protocol import Sampling
from agentgym.engines.scripted import LogNormalDelay, ScriptedEngine, ScriptedReply
from agentgym.envs.base.text_env import Info, StepResult, TextEnv
from agentgym.envs.base.tool_env import ToolEnv
from agentgym.errors import ConfigError, TrainingHalted, UnknownName
from agentgym.rollout.episode.episode import Episode
from agentgym.rollout.episode.token_loop import RolloutLoop
from agentgym.rollout.limits import Limits
from agentgym.rollout.record.episodes_file import trajectory_to_json
from agentgym.rollout.sampling import sampler as sampler_module
from agentgym.rollout.sampling.sampler import Sampler, SamplerConfig
from agentgym.tools import tool
from agentgym.trajectory import Group, Status, Trajectory
from agentgym.types import Task

Raw = Callable[[str], list[int]]
END = "<|im_end|>"


def tasks_of(count: int) -> list[Task]:
    return [Task("Guess-v0", seed) for seed in range(count)]


class Guess(TextEnv):
    """Rewards a reply that holds the seed's digit; three turns. Records which threads its code ran on."""

    closed = 0

    def __init__(self) -> None:
        super().__init__()
        self.threads = {threading.get_ident()}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, Info]:
        self.threads.add(threading.get_ident())
        self.digit = str(self.np_random.integers(10))
        return "guess", {}

    def step(self, action: str) -> StepResult:
        self.threads.add(threading.get_ident())
        return "again", float(self.digit in action), self.turns == 3, False, {}

    def close(self) -> None:
        self.threads.add(threading.get_ident())
        type(self).closed += 1
        super().close()


def digits(raw: Raw, **settings: Any) -> ScriptedEngine:
    """An engine that says the digits of its request's seed, so that equal seeds give equal replies."""

    def reply(session: str, prompt_ids: Sequence[int], sampling: Sampling) -> Sequence[int]:
        return raw(f"{sampling.seed % 1000}{END}")

    return ScriptedEngine(reply, **settings)


def sampler_of(
    renderer: Renderer,
    engine: ScriptedEngine,
    make: Callable[[Task], TextEnv],
    limits: Limits | None = None,
    **config: Any,
) -> Sampler:
    return Sampler(RolloutLoop(engine, renderer, limits), make, SamplerConfig(**config))


def lines(groups: Sequence[Group]) -> str:
    return json.dumps([trajectory_to_json(trajectory) for group in groups for trajectory in group.trajectories])


def by_status(groups: Sequence[Group], status: Status) -> list[Trajectory]:
    return [trajectory for group in groups for trajectory in group.trajectories if trajectory.status is status]


def test_groups_and_members_come_in_order_whatever_finishes_first(renderer: Renderer, raw: Raw) -> None:
    engine = digits(raw, delay_s=LogNormalDelay(0.002, 1.0))
    sampler = sampler_of(renderer, engine, lambda task: Guess(), concurrency=7)
    groups = asyncio.run(sampler.sample(tasks_of(5), 4, step=3))
    assert [group.id for group in groups] == [f"3/{index}" for index in range(5)]
    assert [[trajectory.member for trajectory in group.trajectories] for group in groups] == [[0, 1, 2, 3]] * 5
    assert [group.task.seed for group in groups] == list(range(5))
    assert len({lines([group]) for group in groups}) == 5
    assert not engine.sessions


def test_the_same_seed_gives_the_same_bytes_with_any_number_of_workers(renderer: Renderer, raw: Raw) -> None:
    def run(run_seed: int = 0, **config: Any) -> str:
        engine = digits(raw, delay_s=LogNormalDelay(0.0005, 1.0, seed=len(config)))
        sampler = sampler_of(renderer, engine, lambda task: Guess(), **config)
        return lines(asyncio.run(sampler.sample(tasks_of(4), 4, run_seed=run_seed)))

    first = run()
    assert run() == first
    assert run(env_threads=1) == run(env_threads=8) == run(concurrency=1) == first
    assert run(run_seed=1) != first


def test_members_of_a_group_differ(renderer: Renderer, raw: Raw) -> None:
    (group,) = asyncio.run(sampler_of(renderer, digits(raw), lambda task: Guess()).sample(tasks_of(1), 8))
    assert len({tuple(trajectory.rows[0].ids.tolist()) for trajectory in group.trajectories}) == 8


@pytest.mark.parametrize("env_threads", [None, 3])
def test_an_environment_lives_on_one_thread_from_its_making_to_its_closing(
    renderer: Renderer, raw: Raw, env_threads: int | None
) -> None:
    envs: list[Guess] = []

    def make(task: Task) -> Guess:
        envs.append(Guess())
        return envs[-1]

    before = Guess.closed
    sampler = sampler_of(renderer, digits(raw), make, env_threads=env_threads)
    asyncio.run(sampler.sample(tasks_of(4), 4))
    assert [len(env.threads) for env in envs] == [1] * 16
    assert threading.get_ident() not in set.union(*(env.threads for env in envs))
    assert Guess.closed - before == 16


class Async(Guess):
    """Waits without blocking, until 32 of its kind have begun."""

    begun = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, Info]:
        type(self).begun += 1
        return super().reset(seed=seed)

    async def astep(self, action: str) -> StepResult:
        while self.begun < 32:
            await asyncio.sleep(0.001)
        return "again", 0.0, self.turns == 2, False, {}


class Inline(Guess):
    """Is called on the event loop."""

    runs_inline = True


@pytest.mark.parametrize("kind", [Guess, Inline, Async])
def test_sync_inline_and_async_environments_are_played_alike(renderer: Renderer, raw: Raw, kind: type[Guess]) -> None:
    before = kind.closed
    sampler = sampler_of(renderer, digits(raw), lambda task: kind(), Limits(env_step_s=30.0), max_failure_rate=1.0)
    groups = asyncio.run(sampler.sample(tasks_of(4), 8))
    assert len(by_status(groups, Status.COMPLETED)) == 32
    assert kind.closed - before == 32


class Blocker(Guess):
    """Blocks its thread until 64 of its kind do."""

    barrier = threading.Barrier(64, timeout=30)

    def step(self, action: str) -> StepResult:
        self.barrier.wait()
        return "", 1.0, True, False, {}


def test_64_environments_block_at_once(renderer: Renderer, raw: Raw) -> None:
    sampler = sampler_of(renderer, digits(raw), lambda task: Blocker(), max_failure_rate=1.0)
    groups = asyncio.run(sampler.sample(tasks_of(8), 8))
    assert len(by_status(groups, Status.COMPLETED)) == 64


class Faulty(Guess):
    """Fails in its second step, in the way its seed says."""

    gate = threading.Event()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, Info]:
        self.how = {1: "raise", 2: "hang"}.get(seed or 0, "")
        return super().reset(seed=seed)

    def step(self, action: str) -> StepResult:
        if self.turns == 2 and self.how == "raise":
            raise RuntimeError("the door is stuck")
        if self.turns == 2 and self.how == "hang":
            self.gate.wait()
        return super().step(action)


class Unlucky(Guess):
    """Fails with another number each time."""

    numbers = count()

    def step(self, action: str) -> StepResult:
        raise RuntimeError(f"lost {next(self.numbers)} of 400 bytes")


def faulty(renderer: Renderer, raw: Raw, count: int, **config: Any) -> tuple[list[Group], Sampler]:
    limits = Limits(env_step_s=0.3, close_s=0.2)
    sampler = sampler_of(renderer, digits(raw), lambda task: Faulty(), limits, **config)
    return asyncio.run(sampler.sample(tasks_of(count), 4)), sampler


def test_failing_and_hanging_environments_get_a_status_and_no_reward(renderer: Renderer, raw: Raw) -> None:
    groups, sampler = faulty(renderer, raw, 8)  # while the calls of four hang until the gate opens, below
    assert [trajectory.reward for trajectory in groups[1].trajectories] == [None] * 4
    assert {trajectory.status for trajectory in groups[1].trajectories} == {Status.ENV_ERROR}
    assert {trajectory.status for trajectory in groups[2].trajectories} == {Status.TIMEOUT}
    assert sampler.env_host.num_leaked == 4
    clean = asyncio.run(sampler_of(renderer, digits(raw), lambda task: Guess()).sample(tasks_of(8), 4))
    assert lines([groups[0], *groups[3:]]) == lines([clean[0], *clean[3:]])
    Faulty.gate.set()
    deadline = time.monotonic() + 30
    while sampler.env_host.num_leaked and time.monotonic() < deadline:
        time.sleep(0.001)
    assert sampler.env_host.num_leaked == 0
    Faulty.gate.clear()


def test_a_failure_is_shown_once_with_its_traceback_and_replay(
    renderer: Renderer, raw: Raw, warnings_of: Callable[[], list[str]]
) -> None:
    _, sampler = faulty(renderer, raw, 2)
    (warning,) = [text for text in warnings_of() if "the door is stuck" in text]
    assert "Guess-v0 with seed 1 ended as env_error" in warning
    assert "agentgym play Guess-v0 --seed 1" in warning
    assert warning.endswith("RuntimeError: the door is stuck")
    asyncio.run(sampler.sample(tasks_of(2), 4))
    assert len([text for text in warnings_of() if "the door is stuck" in text]) == 1


def test_failures_that_differ_by_a_number_are_shown_once(
    renderer: Renderer, raw: Raw, warnings_of: Callable[[], list[str]]
) -> None:
    sampler = sampler_of(renderer, digits(raw), lambda task: Unlucky(), max_failure_rate=1.0)
    asyncio.run(sampler.sample(tasks_of(2), 4))
    assert len([text for text in warnings_of() if "of 400 bytes" in text]) == 1


def test_too_many_failures_stop_the_run_and_show_the_first(renderer: Renderer, raw: Raw) -> None:
    with pytest.raises(TrainingHalted, match="4 of 12 episodes failed") as halted:
        faulty(renderer, raw, 3, max_failure_rate=0.3)
    assert str(halted.value).endswith("RuntimeError: the door is stuck\nreplay: agentgym play Guess-v0 --seed 1")


def test_the_share_that_may_fail_is_of_the_episodes_played_earlier_too(renderer: Renderer, raw: Raw) -> None:
    sampler = sampler_of(renderer, digits(raw), lambda task: Unlucky() if task.seed == 2 else Guess())
    good, bad = ([Episode(task, str(task.seed), member) for member in (0, 1)] for task in tasks_of(3)[1:])

    async def play(*, together: bool) -> list[Trajectory]:
        earlier = await sampler.run(good)
        return await sampler.run(bad, earlier=earlier if together else ())

    assert [trajectory.status for trajectory in asyncio.run(play(together=True))] == [Status.ENV_ERROR] * 2
    with pytest.raises(TrainingHalted, match="2 of 2 episodes failed"):
        asyncio.run(play(together=False))
    sampler.close()


def test_too_many_leaked_threads_stop_the_run(renderer: Renderer, raw: Raw, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler_module, "MAX_LEAKED_THREADS", 2)
    with pytest.raises(TrainingHalted, match="calls hang in Guess-v0"):
        faulty(renderer, raw, 3, max_failure_rate=1.0)
    Faulty.gate.set()
    Faulty.gate.clear()


class Stubborn(Guess):
    """An async environment that ignores its cancellation until its test is over."""

    over = threading.Event()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, Info]:
        return super().reset(seed=seed)

    async def astep(self, action: str) -> StepResult:
        while not self.over.is_set():
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                continue
        return "", 0.0, True, False, {}


def test_an_environment_that_ignores_cancellation_delays_nobody(renderer: Renderer, raw: Raw) -> None:
    limits = Limits(deadline_s=0.3, close_s=0.2)
    sampler = sampler_of(renderer, digits(raw), lambda task: Stubborn(), limits, max_failure_rate=1.0)
    groups = asyncio.run(sampler.sample(tasks_of(2), 4))  # while all are still in their step
    assert len(by_status(groups, Status.TIMEOUT)) == 8
    assert sampler.env_host.num_leaked == 8
    Stubborn.over.set()


def test_an_environment_that_does_not_close_is_named_and_delays_nobody(
    renderer: Renderer, raw: Raw, warnings_of: Callable[[], list[str]]
) -> None:
    over, closed = threading.Event(), threading.Semaphore(0)

    class Clinging(Guess):
        def close(self) -> None:
            over.wait(30)
            closed.release()

    sampler = sampler_of(renderer, digits(raw), lambda task: Clinging(), Limits(close_s=0.05))
    groups = asyncio.run(sampler.sample(tasks_of(1), 4))
    assert not closed.acquire(blocking=False)
    over.set()
    assert len(by_status(groups, Status.COMPLETED)) == 4
    assert any("still busy 0.05 s after it was asked to close" in text for text in warnings_of())


@pytest.mark.long
def test_cancelling_in_the_middle_closes_everything(renderer: Renderer, raw: Raw) -> None:
    async def main(engine: ScriptedEngine) -> None:
        sampler = sampler_of(renderer, engine, lambda task: Guess(), concurrency=50)
        for _ in range(5):
            running = asyncio.ensure_future(sampler.sample(tasks_of(25), 4))
            await asyncio.sleep(0.05)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            assert not engine.sessions
        assert len(asyncio.all_tasks()) == 1
        sampler.close()

    def leftovers() -> tuple[int, int]:
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    asyncio.run(main(digits(raw, delay_s=0.02)))
    gc.collect()  # the pools of other tests end with them
    time.sleep(0.2)
    first = leftovers()
    asyncio.run(main(digits(raw, delay_s=0.02)))
    time.sleep(0.2)
    assert leftovers() <= first


INTERRUPTED = """
import asyncio, os, signal, threading, time
from agentgym.engines.scripted import ScriptedEngine
from agentgym.envs.base.text_env import TextEnv
from agentgym.rollout import RolloutLoop, Sampler
from agentgym.types import Message, Task

class Words:
    stop_ids, vocab_size, thinking = (2,), 9, ("", "")
    render = lambda self, messages, tools=(): [1]
    extend = lambda self, ids, new_messages: [1]
    parse = lambda self, ids, tools=(), prompt=(): Message("assistant", "hi")
    decode = lambda self, ids: "hi"

class Slow(TextEnv):
    def reset(self, *, seed=None, options=None):
        return "", {}
    def step(self, action):
        if self.turns == 5 and once.acquire(blocking=False):
            os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.05)
        return "", 0.0, False, False, {}
    def close(self):
        closed.append(self)

closed, engine, once = [], ScriptedEngine(lambda *_: (2,)), threading.Lock()
try:
    asyncio.run(Sampler(RolloutLoop(engine, Words()), lambda task: Slow()).sample([Task("Slow-v0", 0)], 8))
except KeyboardInterrupt:
    time.sleep(0.1)
    print("interrupted", len(closed), len(engine.sessions))
"""


def test_an_interrupt_in_the_middle_closes_every_environment_and_session() -> None:
    run = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=60, check=False)
    assert run.stdout == "interrupted 8 0\n", run.stderr


def test_over_dispatch_gives_the_first_complete_groups_and_cancels_the_rest(renderer: Renderer, raw: Raw) -> None:
    def reply(session: str, prompt_ids: Sequence[int], sampling: Sampling) -> ScriptedReply:
        return ScriptedReply(raw("7" + END), delay_s=3600.0 if "/1-" in session or "/4-" in session else 0.0)

    seen: list[Trajectory] = []
    engine = ScriptedEngine(reply)
    sampler = sampler_of(renderer, engine, lambda task: Guess())
    groups = asyncio.run(asyncio.wait_for(sampler.sample(tasks_of(5), 2, num_groups=3), 60))
    assert [group.id for group in groups] == ["0/0", "0/2", "0/3"]
    assert not engine.sessions
    asyncio.run(
        sampler.run([Episode(Task("Guess-v0", 1), str(n), run_seed=n) for n in range(3)], on_episode=seen.append)
    )
    assert len(seen) == 3


@pytest.mark.parametrize("optional", [False, True])
def test_a_model_that_never_calls_a_tool_is_noticed_unless_it_need_not(
    renderer: Renderer, raw: Raw, warnings_of: Callable[[], list[str]], optional: bool
) -> None:
    class Lamp(ToolEnv):
        runs_inline = True
        tools_optional = optional

        def start(self, options: dict[str, Any]) -> str:
            return "dark"

        @tool
        def light(self) -> str:
            """Lights it."""
            return "bright"

    sampler = sampler_of(renderer, digits(raw), lambda task: Lamp(), Limits(max_turns=2))
    asyncio.run(sampler.sample([Task("Lamp-v0", 1)], 2))
    asyncio.run(sampler.sample([Task("Lamp-v0", 1)], 2))
    warnings = [text for text in warnings_of() if "tool calls of the first 2 episodes of Lamp-v0" in text]
    assert len(warnings) == (0 if optional else 1)


def test_an_environment_that_does_not_exist_is_the_callers_mistake(renderer: Renderer, raw: Raw) -> None:
    sampler = Sampler(RolloutLoop(digits(raw), renderer))
    with pytest.raises(UnknownName, match="did you mean 'TextGame-v0'"):
        asyncio.run(sampler.sample([Task("TextGme-v0", 1)], 2))


def test_an_error_of_our_own_is_not_swallowed(renderer: Renderer) -> None:
    def reply(session: str, prompt_ids: Sequence[int], sampling: Sampling) -> Sequence[int]:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        asyncio.run(sampler_of(renderer, ScriptedEngine(reply), lambda task: Guess()).sample(tasks_of(2), 2))


@pytest.mark.parametrize("config", [{"concurrency": 0}, {"env_threads": 0}, {"max_failure_rate": 1.5}])
def test_settings_that_cannot_work_are_refused(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        SamplerConfig(**config)


def test_nothing_to_sample_gives_nothing(renderer: Renderer, raw: Raw) -> None:
    assert asyncio.run(sampler_of(renderer, digits(raw), lambda task: Guess()).sample([], 4)) == []
    with pytest.raises(ConfigError, match="group_size"):
        asyncio.run(sampler_of(renderer, digits(raw), lambda task: Guess()).sample(tasks_of(1), 0))


def test_the_log_of_a_clean_run_is_empty(renderer: Renderer, raw: Raw, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        asyncio.run(sampler_of(renderer, digits(raw), lambda task: Guess()).sample(tasks_of(3), 3))
    assert not caplog.records


def test_a_tool_that_always_fails_is_reported_to_the_user_once(
    renderer: Renderer, raw: Raw, warnings_of: Callable[[], list[str]]
) -> None:
    class Broken(ToolEnv):
        runs_inline = True

        def start(self, options: dict[str, Any]) -> str:
            return "search"

        @tool
        def search(self) -> str:
            """Searches."""
            return str({}["index"])

        @tool
        def look(self) -> str:
            """Looks."""
            return "a room"

    def reply(session: str, prompt_ids: Sequence[int], sampling: Sampling) -> Sequence[int]:
        return raw(f'<tool_call>\n{{"name": "search", "arguments": {{}}}}\n</tool_call>{END}')

    engine = ScriptedEngine(reply, vocab_size=renderer.vocab_size)
    sampler = sampler_of(renderer, engine, lambda task: Broken(), Limits(max_turns=2))
    for _ in range(2):
        asyncio.run(sampler.sample([Task("Broken-v0", 1)], 2))
    warnings = [text for text in warnings_of() if "failed in all" in text]
    first = "search failed: KeyError: 'index'"
    assert warnings == [
        f"tool 'search' failed in all of its 4 calls, and only the model saw the errors. The first: {first}"
    ]


def test_thousands_of_episodes_begin_without_holding_up_the_event_loop(renderer: Renderer, raw: Raw) -> None:
    begun: dict[str, int] = {}
    looks = 0

    def reply(session: str, _prompt: Sequence[int], _sampling: Sampling) -> list[int]:
        begun.setdefault(session, looks)
        return raw(f"1{END}")

    async def run() -> None:
        nonlocal looks
        playing = asyncio.ensure_future(sampler.sample(tasks_of(64), 1))
        while not playing.done():
            await asyncio.sleep(0)
            looks += 1

    sampler = Sampler(RolloutLoop(ScriptedEngine(reply), renderer), lambda task: Inline(), SamplerConfig())
    asyncio.run(run())
    sampler.close()
    assert len(begun) == 64
    assert max(Counter(begun.values()).values()) <= 32


def test_a_model_whose_replies_are_cut_is_not_told_to_look_at_its_format(
    renderer: Renderer, raw: Raw, warnings_of: Callable[[], list[str]]
) -> None:
    class Lamp(ToolEnv):
        runs_inline = True

        def start(self, options: dict[str, Any]) -> str:
            return "dark"

        @tool
        def light(self) -> str:
            """Lights it."""
            return "bright"

    sampler = sampler_of(
        renderer, ScriptedEngine(lambda *_: raw("hmmmmmm")), lambda task: Lamp(), Limits(turn_tokens=5)
    )
    (group,) = asyncio.run(sampler.sample([Task("Lamp-v0", 1)], 2))
    assert [trajectory.num_cut_replies for trajectory in group.trajectories] == [1, 1]
    (warning,) = [text for text in warnings_of() if "tool calls of the first" in text]
    assert "in 2 of them a limit of tokens cut the reply" in warning and "the longest has 5 tokens" in warning
    assert "--limits.turn-tokens" in warning and "format" not in warning

"""Groups that go on over updates: none is lost, each is whole, and the first complete ones come first."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest

from agentgym.chat_templates.protocol import Renderer
from agentgym.engines.scripted import ScriptedEngine, ScriptedReply
from agentgym.envs.text_env import TextEnv
from agentgym.errors import ConfigError, TrainingHalted
from agentgym.rollout.limits import Limits
from agentgym.rollout.loop import RolloutLoop
from agentgym.rollout.sampler import Sampler, SamplerConfig
from agentgym.rollout.stream import GroupStream, Order
from agentgym.trajectory import Group, Status
from agentgym.types import Task


class Turns(TextEnv):
    """Ends after two turns; with seed 13 it raises."""

    runs_inline = True

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.seed, self.count = seed, 0
        return "begin", {}

    def step(self, action: str) -> Any:
        if self.seed == 13:
            raise RuntimeError("unlucky")
        self.count += 1
        return "go on", float(self.count), self.count == 2, False, {}


def orders() -> Iterator[Order]:
    for number in count():
        yield Order(Task("Turns-v0", number), f"{number}", number)


def sampler_of(renderer: Renderer, delays: dict[str, float], concurrency: int = 64) -> Sampler:
    """Replies of groups named in `delays` take so many seconds."""
    end = renderer.stop_ids[0]

    def reply(session: str, *_: Any) -> ScriptedReply:
        group = session.split("-")[-2]
        return ScriptedReply((70, end), delay_s=delays.get(group, 0.0))

    engine = ScriptedEngine(reply, vocab_size=renderer.vocab_size)
    loop = RolloutLoop(engine, renderer, Limits(max_turns=4))
    return Sampler(loop, lambda task: Turns(), SamplerConfig(concurrency=concurrency))


def run(
    renderer: Renderer,
    delays: dict[str, float],
    takes: list[int],
    *,
    num_open: int,
    wait_s: float = 0.0,
    **options: Any,
) -> Any:
    async def play() -> tuple[list[list[Group]], int, Sampler]:
        sampler = sampler_of(renderer, delays, **options)
        stream = GroupStream(sampler, orders(), group_size=3, num_open=num_open)
        try:
            taken = []
            for version, number in enumerate(takes, start=1):
                taken.append(await stream.take(number))
                await sampler.loop.engine.update_weights({}, version)  # type: ignore[attr-defined]
                await asyncio.sleep(wait_s)
            return taken, stream.num_unfinished, sampler
        finally:
            await stream.close()
            assert not sampler.loop.engine.sessions  # type: ignore[attr-defined]
            sampler.close()

    return asyncio.run(play())


def test_complete_groups_come_first_and_slow_ones_later(renderer: Renderer) -> None:
    taken, _, _ = run(renderer, {"0": 0.2}, [2, 2, 1], num_open=3)
    first, second = ({group.id for group in groups} for groups in taken[:2])
    assert first == {"1", "2"}
    assert "0" not in second or second == {"0", "3"}
    everything = [group.id for groups in taken for group in groups]
    assert len(set(everything)) == 5
    assert all(len(group.trajectories) == 3 for groups in taken for group in groups)


def test_an_episode_that_goes_on_over_an_update_bears_both_versions(renderer: Renderer) -> None:
    taken, _, _ = run(renderer, {"0": 0.2}, [1, 1, 2], num_open=2, wait_s=0.25)
    slow = next(group for groups in taken for group in groups if group.id == "0")
    versions = [set(row.policy_versions[row.mask].tolist()) for one in slow.trajectories for row in one.rows]
    assert any(len(found) > 1 for found in versions)


def test_no_more_is_in_flight_than_is_asked_for(renderer: Renderer) -> None:
    taken, unfinished, sampler = run(renderer, {}, [2], num_open=4, concurrency=2)
    assert len(taken[0]) == 2
    assert unfinished <= 4 * 3
    assert sampler.config.concurrency == 2


def test_too_many_failures_stop_the_run(renderer: Renderer) -> None:
    with pytest.raises(TrainingHalted, match="3 of 3 episodes failed"):
        run(renderer, {}, [1] * 14, num_open=1)


def test_a_failed_episode_is_part_of_its_group(renderer: Renderer) -> None:
    taken, _, _ = run(renderer, {}, [14], num_open=14)
    failed = [one.status for group in taken[0] for one in group.trajectories if group.id == "13"]
    assert failed == [Status.ENV_ERROR] * 3


def test_sizes_below_one_are_refused(renderer: Renderer) -> None:
    sampler = sampler_of(renderer, {})
    for sizes in ({"group_size": 0, "num_open": 1}, {"group_size": 1, "num_open": 0}):
        with pytest.raises(ConfigError, match="at least 1"):
            GroupStream(sampler, orders(), **sizes)
    with pytest.raises(ConfigError, match="3 groups at once, and only 2 are open"):
        asyncio.run(GroupStream(sampler, orders(), group_size=1, num_open=2).take(3))
    sampler.close()


def test_the_share_that_may_fail_is_of_all_groups_that_a_step_takes(renderer: Renderer) -> None:
    async def play(*, together: bool) -> list[Group]:
        sampler = sampler_of(renderer, {})
        stream = GroupStream(sampler, orders(), group_size=3, num_open=13)
        try:
            first = await stream.take(13)
            return [*first, *await stream.take(1, first if together else ())]
        finally:
            await stream.close()
            sampler.close()

    with pytest.raises(TrainingHalted, match="3 of 3 episodes failed"):
        asyncio.run(play(together=False))
    assert asyncio.run(play(together=True))[-1].task.seed == 13

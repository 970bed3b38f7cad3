"""Groups that are played ahead: none is lost, each is whole, none is too old, and no wait is for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count, islice
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from simulated import ENV_ID, LogNormalSeconds, SimulatedEnv, simulated_sampler
from virtual_time import run_in_virtual_time

from agentgym.chat_templates.protocol import Renderer
from agentgym.engines.scripted import ScriptedEngine, ScriptedReply
from agentgym.envs.base.text_env import TextEnv
from agentgym.errors import ConfigError, TrainingHalted
from agentgym.rollout.episode.episode import Episode
from agentgym.rollout.episode.token_loop import RolloutLoop
from agentgym.rollout.limits import Limits
from agentgym.rollout.sampling.group_stream import GroupRequest, GroupStream, StreamEnded, StreamReport
from agentgym.rollout.sampling.sampler import Sampler, SamplerConfig
from agentgym.rollout.sampling.staleness import ages
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


def requests() -> Iterator[GroupRequest]:
    for number in count():
        yield GroupRequest(Task("Turns-v0", number), f"{number}", number)


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
    bound: int = 1,
    wait_s: float = 0.0,
    **options: Any,
) -> Any:
    """Steps that take so many groups each, with an update and a wait after each; steps are planned by the first."""

    async def play() -> tuple[list[list[Group]], int, Sampler]:
        sampler = sampler_of(renderer, delays, **options)
        stream = GroupStream(sampler, requests(), group_size=3, groups_per_step=takes[0], max_staleness=bound)
        try:
            steps = []
            for version, number in enumerate(takes, start=1):
                steps.append(await stream.take(number))
                await sampler.loop.engine.update_weights({}, version)  # type: ignore[attr-defined]
                stream.advance(version)
                await asyncio.sleep(wait_s)
            return steps, stream.num_unfinished, sampler
        finally:
            await stream.close()
            assert not sampler.loop.engine.sessions  # type: ignore[attr-defined]
            sampler.close()

    return asyncio.run(play())


def test_complete_groups_come_first_and_slow_ones_later(renderer: Renderer) -> None:
    steps, _, _ = run(renderer, {"0": 0.2}, [2, 2, 2])
    first = {group.id for group in steps[0]}
    assert "0" not in first and len(first) == 2
    assert "0" in {group.id for group in steps[1]}, "it began at version 0, and is waited for at version 1"
    everything = [group.id for groups in steps for group in groups]
    assert len(set(everything)) == 6
    assert all(len(group.trajectories) == 3 for groups in steps for group in groups)


def test_an_episode_that_goes_on_over_an_update_bears_both_versions(renderer: Renderer) -> None:
    steps, _, _ = run(renderer, {"0": 0.2}, [1, 1, 1, 1], bound=3, wait_s=0.25)
    slow = next(group for groups in steps for group in groups if group.id == "0")
    versions = [
        set(row.policy_versions[row.mask].tolist()) for trajectory in slow.trajectories for row in trajectory.rows
    ]
    assert any(len(versions_of_episode) > 1 for versions_of_episode in versions)


def test_no_more_is_in_flight_than_is_asked_for(renderer: Renderer) -> None:
    steps, unfinished, sampler = run(renderer, {}, [2], concurrency=2)
    assert len(steps[0]) == 2
    assert unfinished <= 3, "a group begins when its first episode can"
    assert sampler.config.concurrency == 2


def test_too_many_failures_stop_the_run(renderer: Renderer) -> None:
    with pytest.raises(TrainingHalted, match="3 of 3 episodes failed"):
        run(renderer, {}, [1] * 14, bound=0)


def test_failed_episodes_are_part_of_their_group_and_starve_nobody(renderer: Renderer) -> None:
    steps, _, _ = run(renderer, {}, [14], bound=0)
    failed = [trajectory.status for group in steps[0] for trajectory in group.trajectories if group.id == "13"]
    assert failed == [Status.ENV_ERROR] * 3


def test_sizes_that_make_no_sense_are_refused(renderer: Renderer) -> None:
    sampler = sampler_of(renderer, {})
    for sizes in ({"group_size": 0, "groups_per_step": 1}, {"group_size": 1, "groups_per_step": 0}):
        with pytest.raises(ConfigError, match="at least 1"):
            GroupStream(sampler, requests(), max_staleness=0, **sizes)
    with pytest.raises(ConfigError, match="3 groups at once, and only 2 can be ahead"):
        asyncio.run(GroupStream(sampler, requests(), group_size=1, groups_per_step=1, max_staleness=1).take(3))
    sampler.close()


def test_the_share_that_may_fail_is_of_all_groups_that_a_step_takes(renderer: Renderer) -> None:
    async def play(*, together: bool) -> list[Group]:
        sampler = sampler_of(renderer, {}, concurrency=3)
        stream = GroupStream(sampler, requests(), group_size=3, groups_per_step=13, max_staleness=1)
        try:
            first = await stream.take(13)
            return [*first, *await stream.take(1, first if together else ())]
        finally:
            await stream.close()
            sampler.close()

    with pytest.raises(TrainingHalted, match="3 of 3 episodes failed"):
        asyncio.run(play(together=False))
    assert asyncio.run(play(together=True))[-1].task.seed == 13


# ---- simulated time


def simulated_requests() -> Iterator[GroupRequest]:
    for number in count():
        yield GroupRequest(Task(ENV_ID, number), f"{number}", number)


@dataclass
class Scene:
    """What becomes of steps of so many groups of two episodes of two replies."""

    seconds: Callable[[int], float]
    per_step: int = 3
    bound: int = 2
    num_steps: int = 10
    learn_s: float = 1.0
    concurrency: int = 64
    taken: list[list[Group]] = field(default_factory=list)
    oldest: list[int] = field(default_factory=list)
    seconds_in_all: float = 0.0

    async def play(self) -> list[StreamReport]:
        sampler, engine = await simulated_sampler(
            self.seconds, make=lambda task: SimulatedEnv(2), concurrency=self.concurrency, deadline_s=500.0
        )
        stream = GroupStream(
            sampler, simulated_requests(), group_size=2, groups_per_step=self.per_step, max_staleness=self.bound
        )
        reports, clock = [], asyncio.get_running_loop().time
        started = clock()
        for version in range(self.num_steps):
            groups = await stream.take(self.per_step)
            self.taken.append(groups)
            self.oldest.append(int(ages(groups, version).max(initial=0)))
            await asyncio.sleep(self.learn_s)
            await engine.update_weights({}, version + 1)
            stream.advance(version + 1)
            reports.append(stream.report())
        self.seconds_in_all = clock() - started
        await stream.close()
        sampler.close()
        return reports


@settings(deadline=None, max_examples=30)
@given(
    seed=st.integers(0, 1000),
    sigma=st.floats(0, 4),
    per_step=st.integers(1, 5),
    bound=st.integers(0, 4),
    learn_s=st.floats(0, 20),
    concurrency=st.integers(1, 40),
)
@example(seed=470, sigma=3.0, per_step=1, bound=0, learn_s=0.0, concurrency=1)
def test_no_token_is_older_than_the_bound_however_long_replies_take(
    seed: int, sigma: float, per_step: int, bound: int, learn_s: float, concurrency: int
) -> None:
    log_normal = LogNormalSeconds(1.0, sigma)

    def seconds(reply: int) -> float:
        return min(log_normal(reply ^ seed), 200.0)  # two replies are within the deadline of an episode

    scene = Scene(seconds, per_step, bound, learn_s=learn_s, concurrency=concurrency)
    reports = run_in_virtual_time(scene.play())
    assert max(scene.oldest) <= bound
    names = [group.id for groups in scene.taken for group in groups]
    assert len(set(names)) == len(names) == 10 * per_step
    assert all(report.groups_ahead <= (bound + 1) * per_step for report in reports)


@pytest.mark.slow
def test_ten_thousand_episodes_of_log_normal_length_never_exceed_a_bound_of_4() -> None:
    scene = Scene(LogNormalSeconds(1.0, 1.5), per_step=100, bound=4, num_steps=50, concurrency=400)
    run_in_virtual_time(scene.play())
    assert sum(len(group.trajectories) for groups in scene.taken for group in groups) == 10_000
    assert max(scene.oldest) == 4


def test_with_a_bound_of_0_every_token_is_of_the_newest_weights() -> None:
    scene = Scene(LogNormalSeconds(1.0, 1.0), bound=0)
    reports = run_in_virtual_time(scene.play())
    assert set(scene.oldest) == {0}
    assert all(report.groups_ahead <= 3 for report in reports)


def test_sampling_ahead_of_the_learner_is_nearly_twice_as_fast_at_least() -> None:
    """The times of both are those of the virtual clock: what is compared is the order of things alone."""

    async def seconds_of(bound: int) -> float:
        scene = Scene(LogNormalSeconds(1.0, 1.0), per_step=8, bound=bound, num_steps=40, learn_s=2.0, concurrency=16)
        await scene.play()
        return scene.seconds_in_all

    in_turn, ahead = (run_in_virtual_time(seconds_of(bound)) for bound in (0, 4))
    assert in_turn / ahead >= 1.8


def test_waits_are_told_apart() -> None:
    slow_learner = run_in_virtual_time(Scene(lambda seed: 1.0, learn_s=100.0).play())
    assert sum(report.sampling_wait_s for report in slow_learner) > 500
    assert sum(report.learner_wait_s for report in slow_learner) < 10
    slow_replies = run_in_virtual_time(Scene(lambda seed: 100.0, learn_s=1.0, concurrency=2).play())
    assert sum(report.learner_wait_s for report in slow_replies) > 500
    assert sum(report.sampling_wait_s for report in slow_replies) < 10


def test_an_episode_that_takes_longer_than_the_bound_is_waited_for_and_counted() -> None:
    first = Episode(Task(ENV_ID, 0), "0", 0).seed(0)
    scene = Scene(lambda seed: 400.0 if seed == first else 1.0, bound=2, learn_s=10.0)
    reports = run_in_virtual_time(scene.play())
    assert [group.id for group in scene.taken[2]].count("0") == 1, "it was due at version 2"
    assert max(scene.oldest) <= 2
    assert sum(report.held_groups for report in reports) == 1


def test_an_episode_that_never_ends_holds_a_step_up_to_its_deadline_and_no_longer() -> None:
    first = Episode(Task(ENV_ID, 0), "0", 0).seed(0)
    scene = Scene(lambda seed: 1e12 if seed == first else 1.0, bound=2)
    run_in_virtual_time(scene.play())
    (late,) = [
        trajectory for groups in scene.taken for group in groups if group.id == "0" for trajectory in group.trajectories
    ][:1]
    assert late.status is Status.TIMEOUT


async def stream_of(source: Iterator[GroupRequest]) -> GroupStream:
    """Steps of three groups of two episodes, all of 10 s and eight at once."""
    sampler, _ = await simulated_sampler(lambda seed: 10.0, make=lambda task: SimulatedEnv(), concurrency=8)
    return GroupStream(sampler, source, group_size=2, groups_per_step=3, max_staleness=1)


async def take_from(
    source: Iterator[GroupRequest], number: int, *, after_5_s: Callable[[], None] = lambda: None
) -> None:
    """Takes groups; a TimeoutError after a virtual day."""
    stream = await stream_of(source)
    async with asyncio.timeout(86_400):
        asyncio.get_running_loop().call_later(5.0, after_5_s)
        await stream.take(number)


def test_a_wait_for_tasks_that_there_are_not_ends() -> None:
    with pytest.raises(StreamEnded, match="1 of 3 groups are missing, and no episode is being played: there are no"):
        run_in_virtual_time(take_from(islice(simulated_requests(), 2), 3))


def test_a_wait_ends_when_whoever_names_the_tasks_fails() -> None:
    def broken() -> Iterator[GroupRequest]:
        yield from islice(simulated_requests(), 4)  # all that begin at once
        raise RuntimeError("the disk is gone")

    with pytest.raises(RuntimeError, match="the disk is gone"):
        run_in_virtual_time(take_from(broken(), 6))


def test_a_wait_ends_when_an_episode_is_cancelled_from_outside() -> None:
    def cancel_one() -> None:
        mine = asyncio.current_task()
        next(task for task in asyncio.all_tasks() if task is not mine and "_work" in repr(task)).cancel()

    with pytest.raises(StreamEnded, match="cancelled from outside"):
        run_in_virtual_time(take_from(simulated_requests(), 6, after_5_s=cancel_one))


def test_a_stream_that_is_closed_before_it_begins_may_still_be_used() -> None:
    async def play() -> int:
        stream = await stream_of(simulated_requests())
        await stream.close()
        groups = await stream.take(3)
        await stream.close()
        return len(groups)

    assert run_in_virtual_time(play()) == 3


def test_a_wait_ends_when_the_stream_is_closed() -> None:
    async def play() -> None:
        stream = await stream_of(simulated_requests())
        waiting = asyncio.ensure_future(stream.take(3))
        await asyncio.sleep(1.0)
        await stream.close()
        with pytest.raises(StreamEnded, match=r"3 of 3 groups are missing, and no episode .*: the stream was closed"):
            await waiting

    run_in_virtual_time(play())

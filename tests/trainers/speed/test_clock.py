"""The clock of a step: every second is of one stage, and idle where nobody works."""

from __future__ import annotations

import asyncio

import pytest

from agentgym.engines.protocol import Completion, Sampling
from agentgym.engines.scripted import ScriptedEngine
from agentgym.trainers.speed.clock import StepClock
from agentgym.trainers.speed.metered import MeteredEngine


class Time:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_stages_add_up_to_the_step_and_what_learning_hides_is_learning() -> None:
    time = Time()
    clock = StepClock(time)
    time.now += 1  # the rest, and idle
    with clock.doing("generate"):
        time.now += 2  # all episodes wait for their environments: idle
        with clock.doing("engine"), clock.doing("engine"):
            time.now += 4
            with clock.doing("learn"):
                time.now += 8
                with clock.doing("sync"):
                    time.now += 16
                time.now += 32
    with clock.doing("engine"):
        time.now += 64  # a probe: of the rest, and yet somebody works
    lap = clock.lap()
    assert (lap.generate_s, lap.learn_s, lap.sync_s, lap.rest_s) == (6, 40, 16, 65)
    assert lap.step_s == 127
    assert lap.idle_s == 3


def test_a_lap_begins_where_the_last_one_ended_also_within_a_stage() -> None:
    time = Time()
    clock = StepClock(time)
    with clock.doing("generate"):
        time.now += 5
        assert clock.lap().generate_s == 5
        time.now += 7
    time.now += 1
    second = clock.lap()
    assert (second.step_s, second.generate_s, second.rest_s) == (8, 7, 1)


def test_an_activity_that_raises_has_ended() -> None:
    time = Time()
    clock = StepClock(time)
    with pytest.raises(ValueError, match="broken"), clock.doing("learn"):
        time.now += 1
        raise ValueError("broken")
    time.now += 2
    lap = clock.lap()
    assert (lap.learn_s, lap.rest_s) == (1, 2)


def test_a_metered_engine_replies_as_the_engine_and_is_busy_meanwhile() -> None:
    time = Time()

    class Slow(ScriptedEngine):
        async def generate(self, prompt_ids: object, sampling: Sampling, *, session: str) -> Completion:
            time.now += 3
            return Completion((5,), (-0.5,), (0,), "stop")

    clock = StepClock(time)
    engine = MeteredEngine(Slow.__new__(Slow), clock)
    reply = asyncio.run(engine.generate((1, 2), Sampling(max_tokens=4), session="s"))
    assert reply == Completion((5,), (-0.5,), (0,), "stop")
    time.now += 2
    lap = clock.lap()
    assert (lap.rest_s, lap.idle_s) == (5, 2)


def test_where_playing_goes_on_beside_learning_the_whole_step_is_sampling() -> None:
    time = Time()
    clock = StepClock(time)
    for beside, sampling_s in ((False, 2), (True, 7)):
        clock.plays_beside = beside
        with clock.doing("generate"):
            time.now += 2
        with clock.doing("learn"):
            time.now += 5
        assert clock.lap().sampling_s == sampling_s

"""The watch names a symptom once, over interruptions too, and says what ends a run."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest

from agentgym.engines.protocol import WeightSync
from agentgym.trainers.monitoring.collapse import Symptom
from agentgym.trainers.monitoring.metrics import RolloutSummary, StepMetrics
from agentgym.trainers.monitoring.watch import CollapseWatch
from agentgym.trainers.settings.collapse import CollapseConfig

HEALTHY = RolloutSummary.of([], [])


def step(number: int, **changes: Any) -> StepMetrics:
    rollout = replace(HEALTHY, **{"groups": 4, "success": 0.5, **changes})
    times = {"generate_s": 1.0, "update_s": 1.0, "elapsed_s": 2.0 * number}
    return StepMetrics(step=number, rollout=rollout, update=None, sync=WeightSync(version=number), **times)


def dead(number: int, success: float = 0.0) -> StepMetrics:
    return step(number, dead_groups=4, success=success)


def test_a_sign_is_logged_once_and_stands_as_long_as_it_is_shown(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    watch = CollapseWatch(CollapseConfig())
    seen = [watch.see(step_metrics) for step_metrics in (step(1), dead(2), dead(3), dead(4), step(5), dead(6), dead(7))]
    assert [[symptom.name for symptom in metrics.symptoms] for metrics in seen] == [
        [], [], ["dead_groups"], ["dead_groups"], [], [], ["dead_groups"],
    ]  # fmt: skip
    assert {symptom.step for metrics in seen for symptom in metrics.symptoms} == {3}
    (record,) = caplog.records
    assert record.getMessage().startswith("step 3: dead_groups: no episode succeeds")
    assert [len(metrics.to_json()["warnings"]) for metrics in seen] == [0, 0, 1, 0, 0, 0, 0]  # type: ignore[arg-type]


def test_a_watch_that_begins_with_recorded_lines_goes_on_as_if_it_had_seen_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    steps = [step(1), dead(2), dead(3), dead(4), dead(5)]
    whole = CollapseWatch(CollapseConfig())
    seen = [whole.see(step_metrics) for step_metrics in steps]
    for cut in range(len(steps)):
        resumed = CollapseWatch(CollapseConfig(), [metrics.to_json() for metrics in seen[:cut]])
        caplog.clear()
        assert [resumed.see(step_metrics) for step_metrics in steps[cut:]] == seen[cut:]
        assert len(caplog.records) == (cut < 3)


def test_what_a_step_found_itself_stands_at_that_step_alone() -> None:
    watch = CollapseWatch(CollapseConfig(stop_on=()))
    watch.add_symptom("nan", "the loss is not finite")
    first, second = watch.see(step(1)), watch.see(step(2))
    assert first.symptoms == (Symptom("nan", 1, "the loss is not finite"),)
    assert second.symptoms == () and second.to_json()["signs"] == []


def test_a_sign_ends_the_run_only_where_it_is_among_those_that_stop() -> None:
    for stop_on, halts in (((), False), (("dead_groups",), True), (("solved",), False)):
        watch = CollapseWatch(CollapseConfig(stop_on=stop_on))
        for step_metrics in (dead(1), dead(2)):
            watch.see(step_metrics)
        assert (watch.halt is not None) is halts and not watch.is_finished
    assert "first seen at step 2" in str(halted()) and "collapse.stop_on" in str(halted())


def halted() -> object:
    watch = CollapseWatch(CollapseConfig(stop_on=("dead_groups",)))
    for step_metrics in (dead(1), dead(2)):
        watch.see(step_metrics)
    return watch.halt


def test_a_solved_run_is_finished_and_not_halted() -> None:
    watch = CollapseWatch(CollapseConfig(stop_on=("solved",)))
    watch.see(dead(1, success=1.0))
    assert not watch.is_finished
    watch.see(dead(2, success=1.0))
    assert watch.is_finished and watch.halt is None

"""Signs of collapse are named for what they are."""

from __future__ import annotations

from agentgym.engines.protocol import WeightSync
from agentgym.trainers.collapse import signs_of_collapse
from agentgym.trainers.metrics import RolloutSummary, StepMetrics


def step(number: int, *, malformed: int) -> StepMetrics:
    rollout = RolloutSummary(
        episodes=8,
        failed=0,
        truncated=0,
        success=0.5,
        reward_mean=0.5,
        turns_mean=2.0,
        tokens=100,
        trained_tokens=50,
        tool_calls=16,
        malformed_calls=malformed,
        truncated_calls=0,
        unknown_tools=0,
        invalid_arguments=0,
        tool_errors=0,
        groups=2,
        dead_groups=0,
    )
    sync, times = WeightSync(version=number), {"generate_s": 1.0, "update_s": 1.0, "elapsed_s": 2.0 * number}
    return StepMetrics(step=number, rollout=rollout, update=None, sync=sync, **times)


def test_a_format_that_never_was_is_not_called_lost() -> None:
    (never,) = signs_of_collapse([step(1, malformed=15), step(2, malformed=15)])
    assert never.startswith("no format") and "agentgym sft" in never
    (lost,) = signs_of_collapse([step(1, malformed=0), step(2, malformed=15), step(3, malformed=15)])
    assert lost.startswith("lost format") and "learning rate" in lost
    assert not signs_of_collapse([step(1, malformed=0), step(2, malformed=1)])

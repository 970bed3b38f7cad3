"""The numbers of a step are over the episodes that have a reward, and `verify` holds them to that."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentgym.evaluation.run_check.step_checks import StepChecks
from agentgym.rollout.record.episodes_file import EpisodeWriter
from agentgym.rollout.record.ledger import Ledger
from agentgym.trainers.batch.credits import credit_groups
from agentgym.trainers.monitoring.metrics import RolloutSummary
from agentgym.trajectory import Group, Row, Source, Status, StopReason, TokenSpan, Trajectory, Turn
from agentgym.types import Message, Task

TASK = Task("Some-v0", 1)


def episode(member: int, reward: float | None, num_turns: int, *, cut: bool, calls: int) -> Trajectory:
    reply = TokenSpan((7, 2), Source.POLICY, (-0.5, -0.5), (0, 0))
    spans = [span for _ in range(num_turns) for span in (reply, TokenSpan((3,), Source.ENV))][:-1]
    turns = [Turn(Message("assistant", "x"), 0.0, "on")] * (num_turns - 1)
    turns.append(Turn(Message("assistant", "x"), reward, finish_reason="length" if cut else "stop"))
    failed = reward is None
    return Trajectory(
        task=TASK,
        group="g",
        member=member,
        rows=(Row((TokenSpan((1,), Source.PROMPT), *spans)),),
        turns=tuple(turns),
        status=Status.ENV_ERROR if failed else Status.COMPLETED,
        stop_reason=StopReason.ENV_ERROR if failed else StopReason.TERMINATED,
        metrics={"num_tool_calls": calls},
        error="boom" if failed else None,
    )


PLAYED = (
    episode(0, 1.0, 2, cut=False, calls=2),
    episode(1, 0.0, 1, cut=True, calls=1),
    episode(2, None, 4, cut=True, calls=9),
)


def test_cut_replies_and_calls_a_turn_are_those_of_episodes_with_a_reward() -> None:
    group = Group("g", TASK, PLAYED)
    (credit,) = credit_groups([group], "grpo")
    summary = RolloutSummary.of([group], [credit])
    assert (summary.replies_cut, summary.replies_cut_by_window, summary.tool_calls_per_turn) == (1, 0, 1.0)
    assert (summary.failed, summary.tool_calls, summary.longest_reply) == (1, 12, 2)


@pytest.mark.parametrize(
    ("numbers", "is_sound"),
    [
        ({"replies_cut": 1, "replies_cut_by_window": 0, "tool_calls_per_turn": 1.0, "tool_calls": 12}, True),
        ({"replies_cut": 2, "replies_cut_by_window": 0, "tool_calls_per_turn": 12 / 7, "tool_calls": 12}, True),
        ({"replies_cut": 0}, False),
        ({"tool_calls_per_turn": 9 / 4}, False),
        ({"tool_calls": 3}, False),
    ],
    ids=["as written", "as older versions wrote them", "cut", "per turn", "calls"],
)
def test_the_line_of_a_step_is_held_against_its_episodes(
    numbers: dict[str, float], is_sound: bool, tmp_path: Path
) -> None:
    with EpisodeWriter(tmp_path) as writer:
        writer.write(PLAYED, step=1)
    checks, ledger = StepChecks(), Ledger()
    for line in (tmp_path / "episodes.jsonl").read_text().splitlines():
        checks.add(json.loads(line))
    checks.check(ledger, 1, json.dumps({"step": 1, **numbers}).encode())
    assert (ledger.tally("metrics").num_failed == 0) is is_sound

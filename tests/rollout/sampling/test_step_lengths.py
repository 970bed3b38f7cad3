"""The length of what a step learned from is held against the length of what was ordered for it."""

from __future__ import annotations

from agentgym.rollout.sampling.step_lengths import StepLengths
from agentgym.trajectory import Group, Row, Source, Status, StopReason, TokenSpan, Trajectory, Turn
from agentgym.types import Message, Task

TASK = Task("TextGame-v0", seed=7)


def group(key: str, *lengths: int) -> Group:
    return Group(key, TASK, tuple(episode(key, member, length) for member, length in enumerate(lengths)))


def episode(key: str, member: int, length: int) -> Trajectory:
    sampled = TokenSpan((3,) * length, Source.POLICY, (-0.5,) * length, (0,) * length)
    return Trajectory(
        task=TASK,
        group=key,
        member=member,
        rows=(Row((TokenSpan((1, 2), Source.PROMPT), sampled)),),
        turns=(Turn(Message("assistant", "x"), 0.0),),
        status=Status.COMPLETED,
        stop_reason=StopReason.TERMINATED,
    )


def test_a_step_that_took_short_groups_first_is_said_when_its_last_group_is_learned() -> None:
    lengths = StepLengths(groups_per_step=2, max_staleness=2)
    assert lengths.add(1, [group("1/1", 5, 15), group("2/0", 20, 20)]) == {}
    assert lengths.add(2, [group("1/0", 60, 60), group("2/1", 30, 30)]) == {
        "length_step": 1,
        "length_learned": 15.0,
        "length_ordered": 35.0,
    }
    assert lengths.add(3, [group("3/0", 8, 8), group("3/1", 10, 10)]) == {
        "length_step": 2,
        "length_learned": 45.0,
        "length_ordered": 25.0,
    }
    assert lengths.add(4, [group("4/0", 1, 1), group("4/1", 1, 1)])["length_learned"] == 9.0


def test_steps_that_take_what_was_ordered_for_them_have_equal_lengths() -> None:
    lengths = StepLengths(groups_per_step=1, max_staleness=1)
    for step in range(1, 5):
        metrics = lengths.add(step, [group(f"{step}/0", step, step + 2)])
        assert metrics == {"length_step": step, "length_learned": step + 1, "length_ordered": step + 1}


def test_orders_learned_before_a_resumption_are_waited_for_within_the_bound() -> None:
    lengths = StepLengths(groups_per_step=2, max_staleness=1)
    metrics = [lengths.add(5, [group("4/1", 3, 3), group("5/0", 4, 4)])]  # 5/1 was learned before
    metrics += [lengths.add(step, [group(f"{step}/{n}", step, step) for n in range(2)]) for step in range(6, 10)]
    assert [step_metrics.get("length_step") for step_metrics in metrics] == [None, None, None, 6, 7]

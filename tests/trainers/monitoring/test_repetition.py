"""Repetition is counted as its definition says, whatever the replies are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentgym.trainers.monitoring.repetition import Repetition, repeated_ngrams
from agentgym.trajectory import Group, Row, Source, Status, StopReason, TokenSpan, Trajectory, Turn
from agentgym.types import Message, Task

TASK = Task("TextGame-v0", seed=7)
Replies = tuple[tuple[int, ...], ...]


def group_of(*episodes: Replies, failed: bool = False) -> Group:
    """A group whose members sampled these replies."""
    members = []
    for member, replies in enumerate(episodes):
        spans = [TokenSpan((1, 2), Source.PROMPT)]
        for ids in replies:
            spans += [TokenSpan(ids, Source.POLICY, (-0.1,) * len(ids), (0,) * len(ids)), TokenSpan((3,), Source.ENV)]
        ended: dict[str, Any] = (
            {"status": Status.ENV_ERROR, "stop_reason": StopReason.ENV_ERROR, "error": "broken"}
            if failed
            else {"status": Status.COMPLETED, "stop_reason": StopReason.TERMINATED}
        )
        turns = tuple(Turn(Message("assistant", "x"), 0.0) for _ in replies)
        members.append(Trajectory(TASK, "g", member, (Row(tuple(spans)),), turns, **ended))
    return Group("g", TASK, tuple(members))


@pytest.mark.parametrize(
    ("replies", "share"),
    [
        ([], 0.0),
        ([(1, 2, 3)], 0.0),  # shorter than an n-gram
        ([(1, 2, 3, 4, 5)], 0.0),
        ([(1, 2, 3, 4), (1, 2, 3, 4)], 0.0),  # what another reply says is no repetition within one
        ([(7,) * 8], 4 / 5),  # five n-grams, one distinct
        ([(1, 2, 3, 4, 1, 2, 3, 4)], 1 / 5),
        ([(7,) * 8, (1, 2, 3, 4, 5)], 4 / 7),  # counts are summed before they are divided
    ],
)
def test_repeated_ngrams_by_hand(replies: list[tuple[int, ...]], share: float) -> None:
    assert repeated_ngrams(replies) == pytest.approx(share)


@given(st.lists(st.lists(st.integers(0, 3), max_size=30), max_size=5), st.integers(1, 5))
def test_repeated_ngrams_by_counting_each(replies: list[list[int]], n: int) -> None:
    total = surplus = 0
    for ids in replies:
        counts = Counter(tuple(ids[start : start + n]) for start in range(len(ids) - n + 1))
        total += counts.total()
        surplus += sum(count - 1 for count in counts.values())
    assert repeated_ngrams(replies, n) == pytest.approx(surplus / total if total else 0.0)


def test_replies_of_an_episode_and_episodes_of_a_group_by_hand() -> None:
    a, b, c = (1, 2), (3, 4), (5, 6)
    repetition = Repetition.of([group_of((a, b, a, a), (a, b), (a, b)), group_of((c,))])
    assert repetition.repeated_replies == pytest.approx(
        2 / 5
    )  # of 3 + 1 + 1 replies after a first one, two came before
    assert repetition.identical_episodes == pytest.approx(1 / 2)  # of two further members, one says what another did
    assert Repetition.of([group_of((a,), (a,), (a,))]).identical_episodes == 1.0
    assert Repetition.of([group_of((a,), (b,), (c,))]).identical_episodes == 0.0


def test_replies_that_are_cut_at_another_place_are_other_replies() -> None:
    assert Repetition.of([group_of(((1, 2), (3,)), ((1,), (2, 3)))]).identical_episodes == 0.0


def test_episodes_without_a_reward_are_not_counted() -> None:
    repetition = Repetition.of([group_of(((7,) * 9,), ((7,) * 9,), failed=True)])
    assert repetition == Repetition(repeated_ngrams=0.0, repeated_replies=0.0, identical_episodes=0.0)
    assert repetition == Repetition.of([])


SHARES: list[Callable[[Repetition], float]] = [
    lambda repetition: repetition.repeated_ngrams,
    lambda repetition: repetition.repeated_replies,
    lambda repetition: repetition.identical_episodes,
]


@given(
    st.lists(
        st.lists(
            st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6).map(tuple), min_size=1, max_size=4).map(tuple),
            min_size=1,
            max_size=4,
        ),
        max_size=3,
    )
)
def test_shares_lie_between_none_and_all_and_do_not_depend_on_the_order(groups: list[list[Replies]]) -> None:
    repetition = Repetition.of([group_of(*group) for group in groups])
    turned = Repetition.of([group_of(*reversed(group)) for group in reversed(groups)])
    for share in SHARES:
        assert 0.0 <= share(repetition) <= 1.0
        assert share(repetition) == pytest.approx(share(turned))

"""Rewards of turns reach the tokens that an estimator credits, whatever rows, failures and masks there are."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentgym.errors import ConfigError, InvalidTrajectory, UnknownName
from agentgym.trainers.algorithms.estimators import check_estimator
from agentgym.trainers.batch.credits import GroupCredit, credit_groups, flat_credit
from agentgym.trajectory import Group, Row, Source, Status, StopReason, TokenSpan, Trajectory, Turn
from agentgym.types import Message, Task

TASK = Task("TextGame-v0", seed=7)
PROMPT, ENV = TokenSpan((1,), Source.PROMPT), TokenSpan((3,), Source.ENV)
REWARDS = st.lists(st.one_of(st.none(), st.floats(-10, 10, width=16)), min_size=2, max_size=8)
SIMPLE = ["grpo", "dr_grpo", "rloo", "opo"]


def reply(length: int, *, excluded: str = "") -> TokenSpan:
    return TokenSpan((2,) * length, Source.POLICY, (-0.5,) * length, (0,) * length, excluded=excluded)


def episode(
    member: int, rewards: Sequence[float | None], rows: Sequence[Sequence[TokenSpan]], observations: Sequence[str] = ()
) -> Trajectory:
    failed = None in rewards
    texts = [*observations, *[""] * len(rewards)]
    return Trajectory(
        task=TASK,
        group="g",
        member=member,
        rows=tuple(Row(tuple(row)) for row in rows),
        turns=tuple(
            Turn(Message("assistant", "x"), reward, text) for reward, text in zip(rewards, texts, strict=False)
        ),
        status=Status.ENV_ERROR if failed else Status.COMPLETED,
        stop_reason=StopReason.ENV_ERROR if failed else StopReason.TERMINATED,
        error="sandbox died" if failed else None,
    )


def group_of(*members: Trajectory) -> Group:
    return Group("g", TASK, members)


def of_rewards(rewards: Sequence[float | None]) -> Group:
    return group_of(*(episode(number, [reward], [[PROMPT, reply(2)]]) for number, reward in enumerate(rewards)))


def credit_of(group: Group, name: str, **settings: object) -> GroupCredit:
    (credit,) = credit_groups([group], name, settings)
    return credit


def tokens(credit: GroupCredit, member: int) -> list[list[float]]:
    rows = credit.members[member]
    assert rows is not None
    return [row.tolist() for row in rows]


def test_grpo_is_the_z_score_with_the_sample_deviation() -> None:
    # mean 2, squared distances 4 + 0 + 4 over n - 1 = 2: deviation 2
    assert credit_of(of_rewards([0.0, 2.0, 4.0]), "grpo").means == pytest.approx((-1.0, 0.0, 1.0), abs=1e-5)


def test_each_row_has_a_number_for_every_id_that_was_sampled() -> None:
    """Two rows, a reply that the loss leaves out, and a member of another shape."""
    long = episode(0, [0.0, 0.0, 1.0], [[PROMPT, reply(2), ENV, reply(3, excluded="summary")], [PROMPT, reply(1)]])
    credit = credit_of(group_of(long, episode(1, [0.0], [[PROMPT, reply(4)]])), "dr_grpo")
    assert tokens(credit, 0) == [[0.5, 0.5, 0.0, 0.0, 0.0], [0.5]]
    assert tokens(credit, 1) == [[-0.5] * 4]
    assert not credit.dead


def test_a_turns_reward_reaches_its_own_reply() -> None:
    first = episode(0, [1.0, 0.0], [[PROMPT, reply(2), ENV, reply(1)]])
    second = episode(1, [0.0, 2.0], [[PROMPT, reply(1), ENV, reply(2)]])
    credit = credit_of(group_of(first, second), "turn_returns", gamma=0.5)
    assert tokens(credit, 0) == [[1.0, 1.0, 0.0]]
    assert tokens(credit, 1) == [[1.0, 2.0, 2.0]]
    group_credit = credit_of(group_of(first, second), "turn_group", normalize_by_std=False)
    assert tokens(group_credit, 0) == [[-0.5, -0.5, -1.0]] and tokens(group_credit, 1) == [[0.5, 1.0, 1.0]]


def test_branches_are_credited_in_the_order_of_time() -> None:
    """A side branch was asked between the two replies of the main one, whose last turn has the reward."""
    branches = episode(0, [0.0, 1.0, 0.0], [[PROMPT, reply(1), ENV, reply(2)], [PROMPT, reply(3)]])
    turns = tuple(replace(turn, order=order) for turn, order in zip(branches.turns, (0, 2, 1), strict=True))
    credit = credit_of(
        group_of(replace(branches, turns=turns), episode(1, [0.0], [[PROMPT, reply(1)]])), "turn_returns", gamma=0.5
    )
    assert tokens(credit, 0) == [[0.25, 1.0, 1.0], [0.5, 0.5, 0.5]]


def test_turns_are_compared_where_the_environment_showed_the_same() -> None:
    """Both begin alike; behind their first turn they stand in a hall and in a cellar."""
    rows = [[PROMPT, reply(1), ENV, reply(1)]]
    group = group_of(episode(0, [0.0, 1.0], rows, ["hall"]), episode(1, [0.0, 0.0], rows, ["cellar"]))
    settings = {"gamma": 1.0, "normalize_by_std": False}
    apart = credit_of(group, "gigpo", **settings)
    assert tokens(apart, 0) == [[1.0, 0.5]] and tokens(apart, 1) == [[-1.0, -0.5]]
    same = group_of(episode(0, [0.0, 1.0], rows, ["hall"]), episode(1, [0.0, 0.0], rows, ["hall"]))
    assert tokens(credit_of(same, "gigpo", **settings), 0) == [[1.0, 1.0]]


@pytest.mark.parametrize("name", SIMPLE)
@pytest.mark.parametrize("reward", [0.7, 100.1, -1e9, 0.0])
def test_equal_rewards_give_exactly_zero_and_a_dead_group(name: str, reward: float) -> None:
    credit = credit_of(of_rewards([reward] * 15), name)
    assert credit.means == (0.0,) * 15 and credit.dead


@pytest.mark.parametrize("name", ["grpo", "rloo", "maxrl", "turn_group", "gigpo", "reinforce_plus_plus_baseline"])
def test_a_group_of_one_is_refused_and_is_zero_where_allowed(name: str) -> None:
    with pytest.raises(ConfigError, match="group size to 2 or more"):
        credit_groups([of_rewards([1.0])], name)
    (credit,) = credit_groups([of_rewards([1.0])], name, allow_single=True)
    assert credit.means == (0.0,) and credit.dead


@pytest.mark.parametrize("name", SIMPLE)
def test_a_sole_survivor_has_no_baseline_and_gets_zero(name: str) -> None:
    credit = credit_of(of_rewards([None, 1.0, None]), name)
    assert credit.means == (None, 0.0, None) and credit.dead


def test_a_step_without_survivors_trains_nothing() -> None:
    credit = credit_of(of_rewards([None, None]), "grpo")
    assert credit.members == (None, None) and credit.dead


@pytest.mark.long
@pytest.mark.parametrize("name", SIMPLE)
@given(rewards=REWARDS)
def test_survivors_have_the_advantages_of_a_run_without_the_failures(name: str, rewards: list[float | None]) -> None:
    clean = [reward for reward in rewards if reward is not None]
    credit = credit_of(of_rewards(rewards), name)
    assert [mean is None for mean in credit.means] == [reward is None for reward in rewards]
    if clean:
        (alone,) = credit_groups([of_rewards(clean)], name, allow_single=True)
        assert tuple(mean for mean in credit.means if mean is not None) == alone.means


@given(rewards=REWARDS)
def test_groups_of_one_step_do_not_touch_each_other(rewards: list[float | None]) -> None:
    neighbour = of_rewards([0.0, 1.0, 5.0])
    together = credit_groups([neighbour, of_rewards(rewards)], "grpo")
    assert together[1].means == credit_of(of_rewards(rewards), "grpo").means
    assert together[0].means == credit_of(neighbour, "grpo").means


def test_the_batch_is_whitened_over_all_groups_of_a_step() -> None:
    groups = [of_rewards([0.0, 1.0]), of_rewards([2.0, 3.0])]
    means = [mean or 0.0 for credit in credit_groups(groups, "reinforce_plus_plus") for mean in credit.means]
    values = [0.0, 0.0, 1.0, 1.0, 2.0, 2.0, 3.0, 3.0]
    scale = math.sqrt(statistics.variance(values) + 1e-8)
    assert means == pytest.approx([(value - 1.5) / scale for value in (0.0, 1.0, 2.0, 3.0)], rel=1e-6)


def test_flat_credit_leaves_out_what_the_loss_does() -> None:
    group = group_of(episode(0, [0.0, 1.0], [[PROMPT, reply(2, excluded="summary"), ENV, reply(1)]]))
    (rows,) = flat_credit(group, [0.25]).members
    assert rows is not None and [row.tolist() for row in rows] == [[0.0, 0.0, 0.25]]
    assert flat_credit(group, [None]).members == (None,)
    assert rows[0].dtype == np.float32


def test_an_episode_without_ids_is_refused() -> None:
    bare = episode(0, [1.0], [])
    with pytest.raises(InvalidTrajectory, match="holds no exact ids"):
        credit_groups([group_of(bare, episode(1, [0.0], [[PROMPT, reply(1)]]))], "grpo")


def test_what_an_estimator_needs_and_has_is_told() -> None:
    with pytest.raises(UnknownName, match="did you mean 'grpo'"):
        check_estimator("grop", {})
    with pytest.raises(ConfigError, match="gae takes values_BT, which was not given with the episodes"):
        credit_groups([of_rewards([0.0, 1.0])], "gae")
    with pytest.raises(ConfigError, match="rloo has no setting 'gamma'"):
        check_estimator("rloo", {"gamma": 1.0})
    check_estimator("gigpo", {"gamma": 0.9})

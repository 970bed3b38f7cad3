"""The record keeps provenance: ids, mask, logprobs and versions follow from the spans, and nothing else fits in."""

from __future__ import annotations

import dataclasses
import math
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentgym.errors import InvalidTrajectory
from agentgym.trajectory import Group, Row, Source, Status, StopReason, TokenSpan, Trajectory, Turn, shortest_floats
from agentgym.types import Message, Task

TASK = Task("TextGame-v0", seed=7)
PROMPT = TokenSpan((1, 2, 3), Source.PROMPT)
REPLY = TokenSpan((7, 8), Source.POLICY, logprobs=(-0.5, -0.25), policy_versions=(3, 4))
ANSWER = TokenSpan((9,), Source.ENV)
ROW = Row((PROMPT, REPLY, ANSWER))
REASONS = {
    Status.COMPLETED: {StopReason.TERMINATED},
    Status.TRUNCATED: {
        StopReason.ENV_TRUNCATED,
        StopReason.MAX_TURNS,
        StopReason.TURN_TOKENS,
        StopReason.TRAJECTORY_TOKENS,
        StopReason.CONTEXT,
        StopReason.AGENT,
    },
    Status.ENV_ERROR: {StopReason.ENV_ERROR},
    Status.ENGINE_ERROR: {StopReason.ENGINE_ERROR},
    Status.TIMEOUT: {StopReason.DEADLINE},
    Status.CANCELLED: {StopReason.CANCELLED},
    Status.AGENT_ERROR: {StopReason.AGENT},
    Status.UNPLAYED: {
        StopReason.AGENT,
        StopReason.CONTEXT,
        StopReason.MAX_TURNS,
        StopReason.TRAJECTORY_TOKENS,
    },
}
FAILED = [status for status in Status if not status.trainable]


def turn(reward: float | None = 1.0) -> Turn:
    return Turn(Message("assistant", "go north"), reward)


def trajectory(
    rewards: tuple[float | None, ...] = (1.0,),
    status: Status = Status.COMPLETED,
    reason: StopReason | None = None,
    metrics: dict[str, float] | None = None,
    member: int = 0,
) -> Trajectory:
    return Trajectory(
        task=TASK,
        group="g0",
        member=member,
        rows=(Row((PROMPT, *(REPLY, ANSWER) * len(rewards))),),
        turns=tuple(turn(reward) for reward in rewards),
        status=status,
        stop_reason=reason or min(REASONS[status]),
        metrics=metrics or {},
        error=None if status.trainable else "it failed",
    )


# ---- spans


@pytest.mark.parametrize("source", [Source.PROMPT, Source.ENV])
def test_what_was_not_sampled_bears_no_logprobs_and_no_versions(source: Source) -> None:
    assert TokenSpan((1,), source).logprobs is None
    with pytest.raises(InvalidTrajectory, match="was not sampled"):
        TokenSpan((1,), source, logprobs=(-0.1,))
    with pytest.raises(InvalidTrajectory, match="was not sampled"):
        TokenSpan((1,), source, policy_versions=(0,))


@pytest.mark.parametrize("logprobs", [None, (), (-0.1,), (-0.1, -0.1, -0.1)])
def test_every_sampled_id_has_its_logprob(logprobs: tuple[float, ...] | None) -> None:
    with pytest.raises(InvalidTrajectory, match="2 ids needs as many logprobs"):
        TokenSpan((7, 8), Source.POLICY, logprobs=logprobs, policy_versions=(0, 0))


@pytest.mark.parametrize("versions", [None, (), (0,), (0, 0, 0)])
def test_every_sampled_id_has_its_policy_version(versions: tuple[int, ...] | None) -> None:
    with pytest.raises(InvalidTrajectory, match="2 ids needs as many policy_versions"):
        TokenSpan((7, 8), Source.POLICY, logprobs=(-0.1, -0.1), policy_versions=versions)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.1])
def test_a_logprob_is_finite_and_at_most_zero(value: float) -> None:
    with pytest.raises(InvalidTrajectory, match="finite and at most 0"):
        TokenSpan((7,), Source.POLICY, logprobs=(value,), policy_versions=(0,))


def test_a_certain_token_has_logprob_zero() -> None:
    assert TokenSpan((7,), Source.POLICY, logprobs=(0.0,), policy_versions=(0,)).logprobs == (0.0,)


def test_versions_rise_within_a_span_and_never_fall() -> None:
    assert REPLY.policy_versions == (3, 4)
    with pytest.raises(InvalidTrajectory, match="never fall"):
        TokenSpan((7, 8), Source.POLICY, logprobs=(-0.1, -0.1), policy_versions=(4, 3))


def test_token_ids_are_not_negative_and_a_reply_is_not_empty() -> None:
    with pytest.raises(InvalidTrajectory, match="non-negative integers, got -1"):
        TokenSpan((3, -1), Source.ENV)
    with pytest.raises(InvalidTrajectory, match="at least one sampled id"):
        TokenSpan((), Source.POLICY, logprobs=(), policy_versions=())


# ---- rows


def test_a_row_lays_its_spans_end_to_end() -> None:
    assert ROW.ids.tolist() == [1, 2, 3, 7, 8, 9]
    assert ROW.mask.tolist() == [False, False, False, True, True, False]
    assert ROW.logprobs.tolist() == [0, 0, 0, -0.5, -0.25, 0]
    assert ROW.policy_versions.tolist() == [-1, -1, -1, 3, 4, -1]
    assert (len(ROW), ROW.num_trained_tokens) == (6, 2)


@pytest.mark.parametrize("spans", [(), (TokenSpan((), Source.PROMPT),), (ANSWER, REPLY), (REPLY,)])
def test_a_row_begins_with_a_prompt(spans: tuple[TokenSpan, ...]) -> None:
    with pytest.raises(InvalidTrajectory, match="begins with a non-empty prompt"):
        Row(spans)


def test_a_row_has_one_prompt() -> None:
    with pytest.raises(InvalidTrajectory, match="only the first span"):
        Row((PROMPT, REPLY, PROMPT))


ids = st.lists(st.integers(0, 200_000), max_size=5).map(tuple)


@st.composite
def sampled(draw: st.DrawFn) -> TokenSpan:
    tokens = draw(st.lists(st.integers(0, 200_000), min_size=1, max_size=5))
    floats = st.floats(-50, 0, width=32)
    logprobs = draw(st.lists(floats, min_size=len(tokens), max_size=len(tokens)))
    versions = sorted(draw(st.lists(st.integers(0, 9), min_size=len(tokens), max_size=len(tokens))))
    return TokenSpan(tuple(tokens), Source.POLICY, tuple(logprobs), tuple(versions))


appended = st.builds(TokenSpan, ids, st.just(Source.ENV))
rows = st.builds(
    lambda prompt, rest: Row((TokenSpan((5, *prompt), Source.PROMPT), *rest)), ids, st.lists(sampled() | appended)
)


@given(row=rows)
def test_the_arrays_of_a_row_are_its_spans(row: Row) -> None:
    tokens = [i for span in row.spans for i in span.ids]
    arrays = (row.ids, row.mask, row.logprobs, row.policy_versions)
    assert [a.shape for a in arrays] == [(len(tokens),)] * 4
    assert [a.dtype for a in arrays] == [np.int64, np.bool_, np.float32, np.int64]
    assert row.ids.tolist() == tokens
    replies = [span for span in row.spans if span.source is Source.POLICY]
    assert row.ids[row.mask].tolist() == [i for span in replies for i in span.ids]
    assert row.logprobs[row.mask].tolist() == [v for span in replies for v in span.logprobs or ()]
    assert row.policy_versions[row.mask].tolist() == [v for span in replies for v in span.policy_versions or ()]
    assert not row.logprobs[~row.mask].any()
    assert (row.policy_versions[~row.mask] == -1).all()
    assert row.num_trained_tokens == row.mask.sum()
    assert len(row) == len(tokens)


@given(row=rows)
def test_a_row_pickles_and_equals_its_copy(row: Row) -> None:
    assert row.ids.size == len(row)
    copy = pickle.loads(pickle.dumps(row))
    assert copy == row
    assert (copy.ids == row.ids).all()


# ---- trajectories


@pytest.mark.parametrize("status", Status)
@pytest.mark.parametrize("reason", StopReason)
def test_a_status_stops_only_for_its_own_reasons(status: Status, reason: StopReason) -> None:
    if reason in REASONS[status]:
        assert trajectory(status=status, reason=reason).stop_reason is reason
    else:
        with pytest.raises(InvalidTrajectory, match="does not stop for the reason"):
            trajectory(status=status, reason=reason)


def test_only_an_episode_that_ran_is_trainable() -> None:
    assert {status for status in Status if status.trainable} == {Status.COMPLETED, Status.TRUNCATED}


@pytest.mark.parametrize("status", FAILED)
def test_a_failed_episode_has_no_reward_and_no_success(status: Status) -> None:
    failed = trajectory((1.0, None), status, metrics={"success": 1.0})
    assert failed.reward is None
    assert failed.success is None
    assert failed.num_trained_tokens == 4


@pytest.mark.parametrize("status", FAILED)
def test_a_failed_episode_needs_an_error(status: Status) -> None:
    with pytest.raises(InvalidTrajectory, match="says why in `error`"):
        dataclasses.replace(trajectory((None,), status), error=None)


def test_an_episode_may_fail_before_its_first_row() -> None:
    reason = StopReason.ENV_ERROR
    failed = Trajectory(TASK, "g0", 0, (), (), Status.ENV_ERROR, reason, error="reset raised ValueError")
    assert (failed.reward, failed.num_tokens, failed.num_trained_tokens) == (None, 0, 0)


@pytest.mark.parametrize("reward", [None, math.nan, math.inf])
def test_every_turn_of_a_trainable_episode_has_a_finite_reward(reward: float | None) -> None:
    with pytest.raises(InvalidTrajectory, match="finite reward on every turn"):
        trajectory((1.0, reward))


def test_a_trainable_episode_has_a_turn() -> None:
    with pytest.raises(InvalidTrajectory, match="at least one turn"):
        Trajectory(TASK, "g0", 0, (Row((PROMPT,)),), (), Status.COMPLETED, StopReason.TERMINATED)


def test_every_turn_has_its_policy_span() -> None:
    whole = trajectory((0.0, 1.0))
    with pytest.raises(InvalidTrajectory, match="1 turns need as many policy spans, got 2"):
        dataclasses.replace(whole, turns=whole.turns[:1])
    with pytest.raises(InvalidTrajectory, match="2 turns need as many policy spans, got 1"):
        dataclasses.replace(whole, rows=(ROW,))


def test_has_ids_is_false_only_for_turns_without_rows() -> None:
    with_ids = trajectory((1.0,))
    assert with_ids.has_ids
    text = dataclasses.replace(with_ids, rows=())
    assert not text.has_ids and len(text.turns) == 1
    assert (text.reward, text.num_tokens, text.num_trained_tokens) == (1.0, 0, 0)
    assert dataclasses.replace(trajectory((None,), Status.ENV_ERROR), rows=(), turns=()).has_ids


def test_the_reward_is_the_exact_sum_of_the_turns() -> None:
    assert trajectory((0.1,) * 10).reward == 1.0


def test_success_is_the_environments_word_where_it_gives_one() -> None:
    assert trajectory((1.0,), metrics={"success": 0.0}).success is False
    assert trajectory((0.0,), metrics={"success": 1.0}).success is True


@pytest.mark.parametrize(("reward", "success"), [(0.5, True), (0.0, False), (-1.0, False)])
def test_success_is_a_positive_reward_where_the_environment_is_silent(reward: float, success: bool) -> None:
    assert trajectory((reward,)).success is success


def test_a_rewritten_history_counts_the_ids_of_all_its_rows() -> None:
    two_rows = dataclasses.replace(trajectory((0.0, 1.0)), rows=(ROW, Row((PROMPT, REPLY))))
    assert (two_rows.num_tokens, two_rows.num_trained_tokens) == (11, 4)


def test_wall_clock_is_no_part_of_what_happened() -> None:
    assert dataclasses.replace(turn(), timings={"generate_s": 1.5}) == turn()


def test_a_trajectory_pickles() -> None:
    whole = trajectory((0.0, 1.0), metrics={"success": 1.0})
    assert pickle.loads(pickle.dumps(whole)) == whole


# ---- groups


def test_a_group_holds_the_members_of_one_task() -> None:
    members = (trajectory(member=0), trajectory(member=1))
    assert Group("g0", TASK, members).trajectories == members


def test_a_group_refuses_strangers() -> None:
    with pytest.raises(InvalidTrajectory, match="cannot join group 'g1'"):
        Group("g1", TASK, (trajectory(),))
    with pytest.raises(InvalidTrajectory, match="cannot join group 'g0'"):
        Group("g0", Task("TextGame-v0", seed=8), (trajectory(),))


def test_a_group_refuses_a_member_twice() -> None:
    with pytest.raises(InvalidTrajectory, match="holds a member twice"):
        Group("g0", TASK, (trajectory(), trajectory()))


def test_a_trajectory_is_shown_on_one_line() -> None:
    text = "<Trajectory g0/0 of TextGame-v0 (seed 7): completed, reward 1, 1 turns, 1 rows, 6 tokens, 2 trained>"
    assert repr(trajectory()) == text
    failed = trajectory((), Status.ENV_ERROR)
    assert "env_error, no reward (it failed), 0 turns" in repr(failed)


@given(st.lists(st.floats(-1e4, 0.0, width=32), max_size=9))
def test_the_shortest_floats_are_the_same_fp32_numbers_and_stay_as_they_are(values: list[float]) -> None:
    short = shortest_floats(values)
    assert np.asarray(short, np.float32).tobytes() == np.asarray(values, np.float32).tobytes()
    assert shortest_floats(short) == short and all(len(repr(number)) <= 16 for number in short)

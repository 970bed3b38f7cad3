"""The experts of tokens, as arrays, as parts of a row, and as a run stores them."""

from __future__ import annotations

import json

import numpy as np
import pytest

from agentgym.errors import InvalidTrajectory
from agentgym.rollout.record.episode_digests import row_digest
from agentgym.routed_experts import RoutedExperts
from agentgym.trajectory import Row, Source, TokenSpan

ALL = np.arange(7 * 2 * 3).reshape(7, 2, 3)


def reply(ids: tuple[int, ...], experts: RoutedExperts | None) -> TokenSpan:
    return TokenSpan(ids, Source.POLICY, (-1.0,) * len(ids), (0,) * len(ids), experts)


def test_parts_are_put_together_again() -> None:
    whole = RoutedExperts.of(ALL)
    assert (whole.start, whole.stop, whole.num_routers, whole.num_chosen) == (0, 7, 2, 3)
    first, rest = RoutedExperts.of(ALL[:3]), whole.since(3)
    assert (rest.start, rest.stop) == (3, 7) and np.array_equal(rest.experts_TRK, ALL[3:])
    assert rest.after(first) == whole.after(first) == whole
    second = RoutedExperts.of(ALL + 1)
    assert np.array_equal(second.after(first).experts_TRK, [*ALL[:3], *(ALL[3:] + 1)])
    assert whole.after(None) == whole and rest.after(RoutedExperts.of(ALL[:2])) == rest
    assert whole.since(7).stop == 7 and not len(whole.since(7).experts_TRK)


def test_a_row_has_the_experts_of_its_spans_and_none_for_the_rest() -> None:
    prompt, env = TokenSpan((1, 2, 3), Source.PROMPT), TokenSpan((6,), Source.ENV)
    first, second = RoutedExperts.of(ALL[:4]), RoutedExperts.of(ALL[4:7], 4)
    row = Row((prompt, reply((4, 5), first), env, reply((7, 8), second), TokenSpan((9,), Source.ENV)))
    assert row.experts_TRK is not None and row.experts_TRK.dtype == np.int16
    assert np.array_equal(row.experts_TRK[:7], ALL) and (row.experts_TRK[7:] == -1).all()
    assert Row((prompt, reply((4,), None))).experts_TRK is None


def test_the_stored_form_reads_back_and_damage_is_found() -> None:
    whole = RoutedExperts.of(ALL - 1)
    stored = json.loads(json.dumps(whole.to_json()))
    assert RoutedExperts.from_json(stored) == whole
    for change in (
        {"data": "no base64!"},
        {"data": stored["data"][:-4]},
        {"data": stored["data"][:-8]},
        {"shape": [6, 2, 3]},
        {"shape": [8, 2, 3]},
    ):
        with pytest.raises(InvalidTrajectory, match="stored experts"):
            RoutedExperts.from_json(stored | change)
    span = {"source": "policy", "ids": [1], "logprobs": [-1.0], "policy_versions": [0]}
    digests = {row_digest([span]), row_digest([{**span, "experts": stored}])}
    digests.add(row_digest([{**span, "experts": stored | {"start": 1}}]))
    assert len(digests) == 3


def test_what_is_no_record_of_experts_is_refused() -> None:
    with pytest.raises(InvalidTrajectory, match="are not 2 routers of 3 experts"):
        RoutedExperts(0, 2, 3, b"12345")
    with pytest.raises(InvalidTrajectory, match="it has no experts"):
        TokenSpan((1,), Source.ENV, experts=RoutedExperts.of(ALL))

"""Long JSON is encoded in pieces to the same text."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentgym.rollout.record.json_pieces import PIECE, encode_json, json_pieces
from agentgym.types import JSON

leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(values, st.integers(0, 5))
def test_pieces_join_to_the_text_of_one_call(value: JSON, depth: int) -> None:
    whole = json.dumps(value, allow_nan=False, separators=(",", ":"))
    assert "".join(json_pieces(value, depth)) == encode_json(value) == whole


@pytest.mark.parametrize("length", [0, 1, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE, 3 * PIECE + 1])
def test_a_list_of_numbers_is_divided_at_any_depth(length: int) -> None:
    value = {"ids": tuple(range(length)), "logprobs": [-number / 7 for number in range(length)]}
    for depth in (0, 1):
        pieces = list(json_pieces(value, depth))
        assert "".join(pieces) == encode_json(value)
        if depth:
            assert max(map(len, pieces)) < 25 * PIECE


def test_a_number_that_is_not_finite_is_refused_in_any_piece() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        list(json_pieces([0.0] * 3 * PIECE + [float("nan")], 1))

"""What an engine has is held against what it was sent: exactly where it can be, by what changed elsewhere."""

from __future__ import annotations

import pytest

from agentgym.engines.weights.check import WeightCheck
from agentgym.errors import EngineError

OLD, NEW = {"a": "1", "b": "1", "c": "1"}, {"a": "2", "b": "2", "c": "1"}


@pytest.mark.parametrize("found", [{**NEW, "b": "1"}, {"a": "2", "c": "1"}])
def test_a_parameter_that_differs_or_is_missing_is_named(found: dict[str, str]) -> None:
    check = WeightCheck("the engine", is_exact=True)
    check.compare(OLD, {**OLD, "of its own": "7"}, 1)
    with pytest.raises(
        EngineError,
        match=r"stale weights: 1 of 3 tensors of the engine are .* version 2, the first is 'b': it was left",
    ):
        check.compare(NEW, found, 2)


def test_an_engine_that_hashes_in_its_own_way_must_change_where_what_was_sent_changed() -> None:
    check = WeightCheck("the engine", is_exact=False)
    check.compare(OLD, {"a": "x", "b": "x", "c": "x"}, 1)
    check.compare(NEW, {"a": "y", "b": "y", "c": "x"}, 2)
    with pytest.raises(EngineError, match=r"1 of 3 tensors .* version 3, the first is 'a'"):
        check.compare(OLD, {"a": "y", "b": "x", "c": "x"}, 3)


def test_what_arrives_after_an_update_that_did_not_is_taken() -> None:
    for is_exact in (True, False):
        check = WeightCheck("the engine", is_exact=is_exact)
        check.compare(OLD, OLD, 1)
        with pytest.raises(EngineError, match="2 of 3"):
            check.compare(NEW, OLD, 2)
        check.compare(NEW, NEW, 2)

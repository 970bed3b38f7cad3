"""Slots that begin with equal keys are known, and forgotten as far as one of them is overwritten."""

from __future__ import annotations

import numpy as np
import pytest

from agentgym.engines.local.common_keys import CommonKeys

NUM_SLOTS, WINDOW = 6, 40


def test_what_is_read_in_a_root_is_equal_there_whatever_is_copied_and_overwritten() -> None:
    """Each key is a number that says when it was written; a copy has the number of its source."""
    random = np.random.default_rng(0)
    common = CommonKeys(NUM_SLOTS, WINDOW)
    content_SW = np.arange(NUM_SLOTS * WINDOW).reshape(NUM_SLOTS, WINDOW)
    num_shared = 0
    for moment in range(1, 2_000):
        source, target = random.permutation(NUM_SLOTS)[:2].tolist()
        number = int(random.integers(1, WINDOW))
        if random.random() < 0.7:  # as a request does that gets the slot: load, then copy
            common.keep(target, 0)
            content_SW[target] = moment * 1_000 + np.arange(WINDOW)
            common.note_copy(source, target, number)
            content_SW[target, :number] = content_SW[source, :number]
        else:  # as one does that goes on in its slot
            common.keep(target, number)
            content_SW[target, number:] = moment * 1_000 + np.arange(number, WINDOW)
        slot_N = np.sort(random.permutation(NUM_SLOTS)[:4])
        root_N, num_N = common.of(slot_N, 4)
        for slot, root, num in zip(slot_N, root_N, num_N, strict=True):
            assert (content_SW[slot, :num] == content_SW[root, :num]).all()
            num_shared += bool(num and root != slot)
    assert num_shared > 1_000
    common.forget()
    assert not common.of(slot_N, 4)[1].any()


@pytest.mark.parametrize("num_decode", [2, 3])
def test_a_root_is_read_with_those_that_follow_it_and_a_prompt_in_its_own_slot(num_decode: int) -> None:
    common = CommonKeys(NUM_SLOTS, WINDOW)
    common.note_copy(0, 1, 20)
    common.note_copy(1, 2, 12)  # of the same root
    root_N, num_N = common.of(np.array([0, 1, 2]), num_decode)
    assert root_N.tolist() == [0, 0, 0 if num_decode == 3 else 2]
    assert num_N.tolist() == [20, 20, 12 if num_decode == 3 else WINDOW]

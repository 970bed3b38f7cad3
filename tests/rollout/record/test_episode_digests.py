"""A stored row's seal follows from its spans, and differs when any number of the row does."""

from __future__ import annotations

import math
import struct
from hashlib import blake2b
from typing import Any

import pytest

from agentgym.rollout.record.episode_digests import credit_digest, mask_runs, row_digest

SPANS: list[dict[str, Any]] = [
    {"source": "prompt", "ids": [1, 2]},
    {"source": "policy", "ids": [3, 4, 5], "logprobs": [-0.5, -0.25, 0.0], "policy_versions": [0, 0, 1]},
    {"source": "env", "ids": [6]},
    {"source": "env", "ids": [7]},
    {"source": "policy", "ids": [8], "logprobs": [-1.0], "policy_versions": [1]},
]


def test_the_mask_is_stored_as_runs() -> None:
    assert mask_runs(SPANS) == [[0, 2], [1, 3], [0, 2], [1, 1]]
    assert mask_runs([]) == []


def test_the_digest_hashes_the_published_bytes() -> None:
    sources = bytes([0, 0, 1, 1, 1, 2, 2, 1])
    numbers = struct.pack("<8q", *range(1, 9)) + sources + struct.pack("<4d", -0.5, -0.25, 0.0, -1.0)
    expected = blake2b(numbers + struct.pack("<4q", 0, 0, 1, 1), digest_size=16).hexdigest()
    assert row_digest(SPANS) == expected


@pytest.mark.parametrize("key", ["ids", "logprobs", "policy_versions"])
@pytest.mark.parametrize("index", [0, 1, 2])
def test_the_digest_differs_when_one_number_does(key: str, index: int) -> None:
    changed = [{name: list(v) if isinstance(v, list) else v for name, v in span.items()} for span in SPANS]
    changed[1][key][index] -= 1
    assert row_digest(changed) != row_digest(SPANS)


def test_the_digest_differs_when_a_source_does() -> None:
    assert row_digest([*SPANS[:2], {"source": "prompt", "ids": [6]}, *SPANS[3:]]) != row_digest(SPANS)


def test_the_digest_of_credit_hashes_the_published_bytes() -> None:
    numbers = struct.pack("<q2d", 2, 0.5, math.nan) + struct.pack("<qq2dqd", 2, 2, 0.25, -1.0, 1, 3.0)
    assert credit_digest([0.5, None], [[0.25, -1.0], [3.0]]) == blake2b(numbers, digest_size=16).hexdigest()
    nothing = struct.pack("<qq", 0, -1)
    assert credit_digest([], None) == blake2b(nothing, digest_size=16).hexdigest()


def test_the_digest_of_credit_differs_when_a_number_or_its_place_does() -> None:
    credits: list[tuple[list[float | None], list[list[float]] | None]] = [
        ([0.0, 1.0], [[0.5, 0.25], [0.0]]),
        ([1.0, 0.0], [[0.5, 0.25], [0.0]]),
        ([None, 1.0], [[0.5, 0.25], [0.0]]),
        ([0.0, 1.0], [[0.25, 0.5], [0.0]]),
        ([0.0, 1.0], [[0.5], [0.25, 0.0]]),
        ([0.0, 1.0], [[0.5, 0.25, 0.0]]),
        ([0.0, 1.0], []),
        ([0.0, 1.0], None),
    ]
    assert len({credit_digest(*credit) for credit in credits}) == len(credits)

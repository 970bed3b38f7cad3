"""A learner's pass on a GPU launches and moves no more than it did when it was measured on one."""

from __future__ import annotations

import pytest
from meta import count_step, model_of


@pytest.mark.parametrize(
    ("backend", "launches", "moved", "fastest", "slowest"),
    [("fast", 1_450, 0.27e12, 0.18, 0.24), ("transformers", 4_700, 0.66e12, 0.2, 0.31)],
)
def test_a_step_of_06b_stays_within_its_counts(
    backend: str, launches: int, moved: float, fastest: float, slowest: float
) -> None:
    counts = count_step(model_of("0.6B", backend), [2048] * 8)
    assert sum(part.launches for part in counts.values()) < launches
    assert sum(part.bytes for part in counts.values()) < moved
    predicted_s = sum(part.predicted_s for part in counts.values())
    assert fastest < predicted_s < slowest, "0.24 s were measured of the fast one on an H200, with the optimizer"


@pytest.mark.long
def test_launches_and_bytes_per_token_do_not_grow_up_to_rows_of_32k_tokens() -> None:
    more = {}
    for shape in ("0.6B", "8B"):
        short, long = (count_step(model_of(shape, "fast"), [length]) for length in (16_384, 32_768))
        for name in ("forward", "backward"):
            assert long[name].bytes < 2.0 * short[name].bytes
            more[shape, name] = long[name].launches - short[name].launches
    assert long["backward"].predicted_s < 4.5
    for name in ("forward", "backward"):
        assert more["0.6B", name] == more["8B", name] < 50, "those of the head's chunks: a layer takes no more"

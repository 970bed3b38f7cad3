"""A step of the in-process engine on a GPU launches and moves no more than it did when it was measured on one."""

from __future__ import annotations

import pytest
from meta_steps import MEASURED, count_engine_step, decode, prompt


def test_decoding_by_the_fast_decoder_is_near_what_was_measured() -> None:
    counts = count_engine_step("0.6B", "fast", decode(128, 1024))
    assert counts.launches <= 285, "so many kernels were counted on an H200"
    assert 0.85 < counts.gpu_s / MEASURED["decode 128 at 1024"] < 1.0
    weights, keys = 0.6e9 * 2, 128 * 1025 * 28 * 2 * 8 * 128 * 2
    assert weights + keys < counts.bytes < 1.1 * (weights + keys)
    alone = count_engine_step("0.6B", "fast", decode(1, 1024))
    assert alone.launches == counts.launches and alone.gpu_s < MEASURED["decode 1 at 1024"]


def test_a_prompt_takes_as_many_kernels_and_at_most_what_was_measured() -> None:
    short, long = (count_engine_step("0.6B", "fast", prompt(length)) for length in (1024, 4096))
    assert short.launches == long.launches <= 287
    assert 0.5 < short.gpu_s / MEASURED["prompt of 1024"] < 1.0
    products = 2 * 0.44e9 * 1024 + 4 * 16 * 128 * 28 * 1024 * 1025 / 2
    assert short.flops == pytest.approx(products, rel=0.02)


@pytest.mark.parametrize(("shape", "launches"), [("0.6B", 1_600), ("8B", 2_050), ("qwen3-30b-a3b", 3_600)])
def test_a_step_of_a_model_of_transformers_stays_within_its_counts(shape: str, launches: int) -> None:
    counts = count_engine_step(shape, "transformers", decode(64, 1024))
    assert counts.launches < launches
    assert counts.predicted_s == pytest.approx(max(counts.gpu_s, counts.cpu_s))

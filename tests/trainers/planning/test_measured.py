"""Rates out of measured seconds: made up ones give back what they were made of, real ones explain themselves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from agentgym.errors import ConfigError
from agentgym.trainers.planning.config import GpuSpec, MeasureSpec
from agentgym.trainers.planning.measure import measure
from agentgym.trainers.planning.measured import Measured, Sample, fitted_rates, read_measured, write_measured
from agentgym.trainers.planning.shapes import SHAPES, shape_of

GPU = GpuSpec(name="made up", memory_gib=80, tflops=100, memory_gb_s=1000, link_gb_s=100)


def made_up(*, layer_us: float, bandwidth: float, mfu: float) -> Measured:
    samples = []
    for name in ("Qwen3-0.6B", "Qwen3-4B"):
        shape = SHAPES[name]
        for batch in (1, 16, 256):
            one = Sample(what="decode", model=shape, rows=batch, context=500, seconds=1)
            seconds = shape.num_layers * layer_us * 1e-6 + one.read / (bandwidth * 1e12) + one.flops / (mfu * 100e12)
            samples.append(Sample(what="decode", model=shape, rows=batch, context=500, seconds=seconds))
            read = Sample(what="prefill", model=shape, rows=batch, context=500, seconds=1)
            samples.append(
                Sample(what="prefill", model=shape, rows=batch, context=500, seconds=read.flops / (0.5 * 100e12))
            )
    return Measured(gpu=GPU, samples=tuple(samples))


def test_the_rates_that_made_the_seconds_are_found() -> None:
    found = fitted_rates(made_up(layer_us=30, bandwidth=0.7, mfu=0.3))
    assert found.decode_layer_us == pytest.approx(30)
    assert found.decode_bandwidth == pytest.approx(0.7)
    assert found.decode_mfu == pytest.approx(0.3)
    assert found.prefill_mfu == pytest.approx(0.5)
    assert "train_mfu" in found.assumed
    assert "decode_mfu" not in found.assumed


def test_no_rate_is_negative_where_a_cost_is_not_there() -> None:
    found = fitted_rates(made_up(layer_us=0, bandwidth=0.7, mfu=0.3))
    assert found.decode_layer_us == pytest.approx(0, abs=1e-6)
    assert found.decode_bandwidth == pytest.approx(0.7, rel=1e-3)


def test_figures_are_read_as_they_were_written(tmp_path: Path) -> None:
    measured = made_up(layer_us=1, bandwidth=1, mfu=1)
    write_measured(measured, tmp_path / "figures.json")
    assert read_measured(tmp_path / "figures.json") == measured


@pytest.mark.parametrize("text", ["", "[]", '{"gpu": {}}', '{"gpu": {"speed": 1}, "samples": []}'])
def test_a_file_without_figures_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "figures.json").write_text(text)
    with pytest.raises(ConfigError, match="--measure FILE"):
        read_measured(tmp_path / "figures.json")


@pytest.mark.slow
def test_this_machine_is_measured() -> None:
    shape = replace(shape_of("embedded"), num_layers=1, vocab_size=64)
    found = measure(shape, MeasureSpec(device="cpu", context=8, batches=(1, 2), compile=False))
    assert {one.what for one in found.samples} == {"decode", "prefill", "train"}
    assert {one.model.width for one in found.samples} == {128, 64}
    rates = fitted_rates(found)
    assert rates.train_mfu > 0
    assert not {"train_mfu", "prefill_mfu", "decode_mfu"} & set(rates.assumed)

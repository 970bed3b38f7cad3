"""Figures that were measured on one device: their file, and the rates that fit them best."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Literal

import numpy as np

from agentgym.errors import ConfigError
from agentgym.trainers.planning.config import GpuSpec
from agentgym.trainers.planning.rates import ASSUMED, Rates
from agentgym.trainers.planning.shapes import ModelShape

__all__ = ["Measured", "Sample", "fitted_rates", "read_measured", "write_measured"]

MOST = 100.0
"""The upper bound of a fitted rate, as a share of the published figure; the seconds show no cost beyond it."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """The seconds of one measured operation.

    Example: `Sample(what="decode", model=shape, rows=8, context=512, seconds=0.012)` is a step that samples a token for
    each of 8 requests of 512 tokens.
    """

    what: Literal["decode", "prefill", "train"]
    """A decoding step; reading `rows` prompts of `context` tokens; or a forward and backward pass over as many rows,
    whose tokens are all trained, in `parts` micro-batches."""
    model: ModelShape
    rows: int
    context: int
    seconds: float
    bytes: int = 2
    """The bytes of a weight, and of a number in the KV cache."""
    parts: float = 1.0
    """The number of micro-batches, one after the other."""

    def __post_init__(self) -> None:
        if not (self.rows >= 1 and self.context >= 1 and self.seconds > 0 and self.bytes > 0 and self.parts > 0):
            raise ConfigError(f"a measured sample has positive rows, context, seconds, bytes and parts, got {self}")

    @property
    def flops(self) -> float:
        """The operations, as a plan counts them."""
        shape, tokens = self.model, float(self.rows * self.context)
        if self.what == "decode":
            return self.rows * shape.forward_flops(1, self.context, 1)
        pairs = self.rows * self.context * (self.context + 1) / 2
        if self.what == "prefill":
            return shape.forward_flops(tokens, pairs, 0)
        return 3 * shape.forward_flops(tokens, pairs, 0) + 4 * shape.forward_flops(0, 0, tokens)

    @property
    def read(self) -> float:
        """The bytes that a decoding step reads; 0 for any other sample."""
        if self.what != "decode":
            return 0.0
        cache = self.rows * self.context * self.model.kv_floats
        return float(self.bytes * (self.model.read_weights + cache))


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The measurements of one device."""

    gpu: GpuSpec
    """The device, with its memory and its peaks."""
    samples: tuple[Sample, ...] = field(default_factory=tuple)


def write_measured(measured: Measured, path: Path) -> None:
    """Writes the file that `read_measured` reads."""
    path.write_text(json.dumps(asdict(measured), indent=1) + "\n", encoding="utf-8")


def read_measured(path: Path) -> Measured:
    """Returns the figures of a file; raises ConfigError if it is not a file of measured figures."""
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{str(path)!r} holds no measured figures: {error}; --measure FILE writes them") from error
    try:
        samples = tuple(Sample(**{**sample, "model": ModelShape(**sample["model"])}) for sample in given["samples"])
        return Measured(gpu=GpuSpec(**given["gpu"]), samples=samples)
    except (KeyError, TypeError) as error:
        raise ConfigError(f"{str(path)!r} is not what --measure FILE writes: {error}") from error


def fitted_rates(measured: Measured) -> Rates:
    """Returns the rates with which the plan's formulas fit the samples best; rates without a sample stay assumed."""
    gpu, samples = measured.gpu, measured.samples
    if not gpu.tflops or not gpu.memory_gb_s:
        raise ConfigError("measured figures need the device's tflops and memory_gb_s; --measure FILE writes both")
    peak, bandwidth = gpu.tflops * 1e12, gpu.memory_gb_s * 1e9
    found: dict[str, float] = {}
    if decode := [sample for sample in samples if sample.what == "decode"]:
        features = [(step.model.num_layers * 1e-6, step.read / bandwidth, step.flops / peak) for step in decode]
        layer_us, per_read, per_flop = _fit_coefficients(features, decode)
        found |= {"decode_layer_us": layer_us, "decode_bandwidth": _share(per_read), "decode_mfu": _share(per_flop)}
    if prefill := [sample for sample in samples if sample.what == "prefill"]:
        (per_flop,) = _fit_coefficients([(sample.flops / peak,) for sample in prefill], prefill)
        found["prefill_mfu"] = _share(per_flop)
    if train := [sample for sample in samples if sample.what == "train"]:
        layers = [sample.parts * sample.model.num_layers * 1e-6 for sample in train]
        pairs = [(layer, sample.flops / peak) for layer, sample in zip(layers, train, strict=True)]
        layer_us, per_flop = _fit_coefficients(pairs, train)
        found |= {"train_layer_us": layer_us, "train_mfu": _share(per_flop)}
    return replace(ASSUMED, **found, assumed=tuple(name for name in ASSUMED.assumed if name not in found))


def _share(slowness: float) -> float:
    return min(MOST, 1 / slowness) if slowness > 0 else MOST


def _fit_coefficients(features: Sequence[Sequence[float]], samples: Sequence[Sample]) -> Sequence[float]:
    """Returns the coefficients, none below 0, with the least sum of squared relative errors.

    Solves the least squares of each choice of features and takes the best solution without a negative coefficient.
    """
    seconds = np.array([sample.seconds for sample in samples])
    rows = np.array(features) / seconds[:, None]
    best, least = np.zeros(rows.shape[1]), np.inf
    for chosen in _choices(rows.shape[1]):
        part, *_ = np.linalg.lstsq(rows[:, chosen], np.ones(len(rows)), rcond=None)
        error = float(np.square(rows[:, chosen] @ part - 1).sum())
        if (part >= 0).all() and error < least:
            best, least = np.zeros(rows.shape[1]), error
            best[chosen] = part
    return [float(coefficient) for coefficient in best]


def _choices(number: int) -> Iterator[list[int]]:
    for size in range(1, number + 1):
        yield from (list(choice) for choice in combinations(range(number), size))

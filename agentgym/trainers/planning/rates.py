"""What share of its published speed a device reaches: assumed, measured, or given."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from agentgym.errors import ConfigError
from agentgym.trainers.planning.config import GpuSpec, LearnerSpec
from agentgym.trainers.speed.gpus import GPUS, gpu_named

__all__ = ["ASSUMED", "Device", "Rates", "RatesSpec", "device_of"]

GB = 1e9
MAY_BE_ZERO = ("decode_layer_us", "train_layer_us", "hop_us", "runtime_gib")


@dataclass(frozen=True, kw_only=True)
class RatesSpec:
    """What is given in place of what was measured or is assumed."""

    train_mfu: float | None = None
    """Of the peak operations, what the learner reaches."""
    prefill_mfu: float | None = None
    """Of the peak operations, what an engine reaches that reads prompts."""
    decode_mfu: float | None = None
    """Of the peak operations, what an engine reaches that samples for very many."""
    decode_bandwidth: float | None = None
    """Of the memory's bandwidth, what an engine reaches that samples for few."""
    decode_layer_us: float | None = None
    """Microseconds of a layer in a decoding step, beside both."""
    train_layer_us: float | None = None
    """Microseconds of a layer in the forward and backward pass of a micro-batch, beside its operations."""
    hop_us: float | None = None
    """Microseconds that an exchange between the GPUs of an engine takes beside its bytes; two are in a layer."""
    link: float | None = None
    """Of the links' and the network's bandwidth, what exchanges reach."""
    runtime_gib: float | None = None
    """Memory of a GPU that drivers and libraries take."""

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if value is not None and not value >= 0:
                raise ConfigError(f"rates.{one.name} must be at least 0, got {value}")
            if value == 0 and one.name not in MAY_BE_ZERO:
                raise ConfigError(f"rates.{one.name} must be above 0")


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Every rate, and which of them nobody measured or gave; the fields are those of `RatesSpec`."""

    train_mfu: float = 0.4
    prefill_mfu: float = 0.5
    decode_mfu: float = 0.4
    decode_bandwidth: float = 0.6
    decode_layer_us: float = 20.0
    train_layer_us: float = 0.0
    hop_us: float = 10.0
    link: float = 0.7
    runtime_gib: float = 3.0
    assumed: tuple[str, ...] = ()
    """Names of what is assumed."""

    def given(self, spec: RatesSpec) -> Rates:
        """With what `spec` gives in place."""
        found = {one.name: getattr(spec, one.name) for one in fields(spec) if getattr(spec, one.name) is not None}
        return replace(self, **found, assumed=tuple(name for name in self.assumed if name not in found))


ASSUMED = Rates(assumed=tuple(one.name for one in fields(RatesSpec)))
"""Usual for dense models on data-centre GPUs: published training runs reach 35 to 45% of the peak."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """What a device can do at most, in bytes, operations and seconds."""

    name: str
    memory: float
    flops: float
    bandwidth: float
    link: float
    network: float
    per_node: int

    def exchange(self, gpus: int) -> float:
        """Bytes a second of each GPU in an exchange among so many."""
        return self.link if gpus <= self.per_node else min(self.link, self.network)


def device_of(spec: GpuSpec, learner: LearnerSpec, measured: GpuSpec | None = None) -> Device:
    """The device that is planned with; `measured` is the one behind the measured rates, and is taken where none is
    named. Raises ConfigError for one that is not known and not described either."""
    if spec.name is None and measured is not None:
        own = {one.name: getattr(spec, one.name) for one in fields(spec) if getattr(spec, one.name) is not None}
        spec = replace(measured, **own)
    name = spec.name or "H100"
    known = gpu_named(name)
    peak = (known.tf32 if learner.precision == "float32" else known.half) if known else None
    figures = {
        "memory_gib": spec.memory_gib or (known and known.memory_gib),
        "tflops": spec.tflops or peak,
        "memory_gb_s": spec.memory_gb_s or (known and known.memory_gb_s),
        "link_gb_s": spec.link_gb_s or (known and known.link_gb_s),
    }
    missing = [f"--gpu.{key.replace('_', '-')}" for key, value in figures.items() if not value]
    if missing:
        raise ConfigError(
            f"no figures of a GPU {name!r} are known ({', '.join(GPUS)} are): name one of these, or give"
            f" {' '.join(missing)}"
        )
    found = {key: float(value) for key, value in figures.items() if value}
    return Device(
        name=name,
        memory=found["memory_gib"] * 2**30,
        flops=found["tflops"] * 1e12,
        bandwidth=found["memory_gb_s"] * GB,
        link=found["link_gb_s"] * GB,
        network=spec.network_gb_s * GB,
        per_node=spec.per_node,
    )

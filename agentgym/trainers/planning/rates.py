"""The shares of its published speed that a device reaches: assumed, measured, or given."""

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
    """The rates that are given in place of measured or assumed ones."""

    train_mfu: float | None = None
    """The share of the peak operations that the learner reaches."""
    prefill_mfu: float | None = None
    """The share of the peak operations that an engine reaches in prefill."""
    decode_mfu: float | None = None
    """The share of the peak operations that an engine reaches when it samples for very many requests."""
    decode_bandwidth: float | None = None
    """The share of the memory's bandwidth that an engine reaches when it samples for few requests."""
    decode_layer_us: float | None = None
    """Microseconds of a layer in a decoding step, in addition to both."""
    train_layer_us: float | None = None
    """Microseconds of a layer in a micro-batch's forward and backward pass, in addition to its operations."""
    hop_us: float | None = None
    """Microseconds of an exchange between an engine's GPUs, in addition to its bytes; a layer has two."""
    link: float | None = None
    """The share of the links' and the network's bandwidth that exchanges reach."""
    runtime_gib: float | None = None
    """The memory of a GPU that drivers and libraries take, in GiB."""

    def __post_init__(self) -> None:
        for rate in fields(self):
            value = getattr(self, rate.name)
            if value is not None and not value >= 0:
                raise ConfigError(f"rates.{rate.name} must be at least 0, got {value}")
            if value == 0 and rate.name not in MAY_BE_ZERO:
                raise ConfigError(f"rates.{rate.name} must be above 0")


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Every rate, and the names of the assumed ones; the fields are those of `RatesSpec`."""

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
    """The names of the rates that are neither measured nor given."""

    def with_overrides(self, spec: RatesSpec) -> Rates:
        """Returns the rates with those that `spec` gives in place."""
        found = {rate.name: getattr(spec, rate.name) for rate in fields(spec) if getattr(spec, rate.name) is not None}
        return replace(self, **found, assumed=tuple(name for name in self.assumed if name not in found))


ASSUMED = Rates(assumed=tuple(rate.name for rate in fields(RatesSpec)))
"""The usual rates of dense models on data-centre GPUs: published training runs reach 35 to 45% of the peak."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """The memory and peak speeds of a device, in bytes and operations per second."""

    name: str
    memory: float
    flops: float
    bandwidth: float
    link: float
    network: float
    per_node: int

    def exchange(self, gpus: int) -> float:
        """Returns the bytes per second of each GPU in an exchange among `gpus` GPUs."""
        return self.link if gpus <= self.per_node else min(self.link, self.network)


def device_of(spec: GpuSpec, learner: LearnerSpec, measured: GpuSpec | None = None) -> Device:
    """Returns the device of a plan: the one that `spec` names or describes, else `measured`, else an H100.

    `measured` is the device of the measured rates. Raises ConfigError for a device that is neither known nor described.
    """
    if spec.name is None and measured is not None:
        own = {
            figure.name: getattr(spec, figure.name) for figure in fields(spec) if getattr(spec, figure.name) is not None
        }
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

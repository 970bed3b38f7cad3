"""Computes the seconds of a step: playing, learning, and sending the weights to the engines."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from agentgym.trainers.planning.config import EngineSpec, EpisodeSpec, LearnerSpec, PlanConfig
from agentgym.trainers.planning.memory import rows_together
from agentgym.trainers.planning.rates import Device, Rates
from agentgym.trainers.planning.shapes import ModelShape

__all__ = [
    "GenerationEstimate",
    "LearningEstimate",
    "PlannedMachine",
    "decode_step_s",
    "generation",
    "learning",
    "sync_s",
]


@dataclass(frozen=True, kw_only=True)
class PlannedMachine:
    """A model on devices of one kind, with the rates that they reach."""

    shape: ModelShape
    device: Device
    rates: Rates


@dataclass(frozen=True, kw_only=True)
class GenerationEstimate:
    """The playing of a step's episodes."""

    seconds: float
    """The seconds until the step's episodes are played: all of them, or as many as it takes if others go on."""
    tail_s: float
    """The part of `seconds` that is spent waiting for the longest episodes."""
    episode_s: float
    """The seconds of an average episode."""
    live: float
    """The number of episodes that run at once."""
    batch: float
    """The average number of requests that an engine samples for at once."""
    tokens_per_s: float
    """The tokens that all engines sample per second."""


@dataclass(frozen=True, kw_only=True)
class LearningEstimate:
    """The learning from a step's episodes."""

    seconds: float
    compute_s: float
    exchange_s: float
    """The seconds of exchanging weights and gradients between ranks, which overlaps with computing."""
    optimizer_s: float
    flops: float
    """The operations of all ranks."""
    computed_tokens: float
    """The number of computed tokens; a prompt that rows of a micro-batch share counts once."""
    packed_tokens: float
    """The number of tokens of all rows."""
    micro_batches: int
    """The number of micro-batches of a rank."""


def decode_step_s(machine: PlannedMachine, spec: EngineSpec, gpus: int, batch: float, context: float) -> float:
    """Returns the seconds in which an engine of `gpus` GPUs samples a token for each of `batch` requests.

    Each request has `context` tokens. The weights and all keys and values are read once, the operations of each request
    are added, and each layer has a fixed cost.
    """
    shape, device, rates = machine.shape, machine.device, machine.rates
    flops = batch * shape.forward_flops(1, context, 1) / gpus
    read = (shape.read_weights * spec.weight_bytes + batch * context * shape.kv_floats * spec.cache_bytes) / gpus
    sent = 2 * shape.num_layers * batch * shape.width * 2 if gpus > 1 else 0
    layer_us = rates.decode_layer_us + (2 * rates.hop_us if gpus > 1 else 0)
    return (
        shape.num_layers * layer_us * 1e-6
        + read / (device.bandwidth * rates.decode_bandwidth)
        + flops / (device.flops * rates.decode_mfu)
        + sent / (device.exchange(gpus) * rates.link)
    )


def generation(
    machine: PlannedMachine, config: PlanConfig, *, engines: int, gpus: int, running: int
) -> GenerationEstimate:
    """Estimates playing on `engines` engines of `gpus` GPUs, each of which runs at most `running` requests at once."""
    play = _Play(machine, config, gpus)
    ahead = max(1, config.max_staleness)
    live = min(config.concurrency, ahead * config.episodes)
    batch = play.batch(live / engines, min(running, live / engines))
    rate = engines * play.rate(batch)
    host_s = config.episode.turns * config.episode.host_ms * 1e-3
    rate = min(rate, config.workers / host_s) if host_s else rate
    tail_s = 0.0
    if not config.max_staleness:
        tail_s = (config.episode.spread - 1) * play.latency(max(1.0, batch / 8))
    seconds = config.episodes / rate + tail_s
    return GenerationEstimate(
        seconds=seconds,
        tail_s=tail_s,
        episode_s=live / rate,
        live=live,
        batch=batch,
        tokens_per_s=config.episodes * config.episode.sampled_tokens / seconds,
    )


class _Play:
    """Playing on one engine, as a function of the number of requests that it samples for at once."""

    def __init__(self, machine: PlannedMachine, config: PlanConfig, gpus: int) -> None:
        self._machine, self._spec, self._gpus = machine, config.engine, gpus
        self._episode = config.episode
        read = prefill_flops(machine.shape, config.episode, config.group_size) / gpus
        self._prefill_s = read / (machine.device.flops * machine.rates.prefill_mfu)
        self._away_s = config.episode.turns * (config.episode.tool_s + config.episode.host_ms * 1e-3)

    def rate(self, batch: float) -> float:
        """Returns the episodes per second."""
        return 1 / (self._prefill_s + self._sampling_s(batch) / batch)

    def latency(self, batch: float) -> float:
        """Returns the seconds of an episode, without waiting."""
        return self._prefill_s + self._sampling_s(batch) + self._away_s

    def batch(self, live: float, most: float) -> float:
        """Returns how many of `live` episodes are sampled for, at most `most`; the others run tools or are in prefill.

        Little's law: the sampled episodes, and the rate times the seconds that an episode spends elsewhere, add up to
        `live`.
        """
        low, high = 0.0, most
        for _ in range(60):
            middle = (low + high) / 2
            if middle + self.rate(max(middle, 1e-9)) * (self._away_s + self._prefill_s) < live:
                low = middle
            else:
                high = middle
        return max(high, 1e-9)

    def _sampling_s(self, batch: float) -> float:
        # A decoding step costs the same for a few requests as for one; below 1, some of the time has no steps.
        step_s = decode_step_s(self._machine, self._spec, self._gpus, max(1.0, batch), self._episode.context)
        return self._episode.sampled_tokens * step_s


def prefill_flops(shape: ModelShape, episode: EpisodeSpec, group_size: int) -> float:
    """Returns the prefill operations of an episode: its share of the group's prompt, and the answers to its replies.

    Sampled tokens are in the KV cache already.
    """
    prompt, answers = episode.prompt_tokens, episode.answer_tokens
    own = shape.forward_flops(answers, answers * episode.context, 0)
    return own + shape.forward_flops(prompt, prompt * (prompt + 1) / 2, 0) / group_size


def learning(machine: PlannedMachine, config: PlanConfig, ranks: int) -> LearningEstimate:
    """Estimates learning from a step's episodes on `ranks` GPUs."""
    shape, device, rates, spec = machine.shape, machine.device, machine.rates, config.learner
    computed, flops = _work(shape, config)
    shards = ranks / (spec.sequence_parallel * spec.tensor_parallel)
    uneven = ceil(config.episodes / shards) * shards / config.episodes
    parts = max(1, ceil(uneven * computed / shards / spec.micro_batch_tokens / spec.threads))
    layers_s = parts * shape.num_layers * rates.train_layer_us * 1e-6
    compute_s = spec.epochs * (uneven * flops / (ranks * device.flops * rates.train_mfu) + layers_s)
    exchange_s = (
        spec.epochs
        * _exchanged_bytes(shape, spec, ranks, parts, computed / shards)
        / (device.exchange(ranks) * rates.link)
    )
    trained = shape.adapter_parameters(spec.lora_rank) if spec.lora_rank else shape.num_parameters
    optimizer_s = 7 * trained * spec.weight_bytes / ranks / (device.bandwidth * rates.decode_bandwidth)
    return LearningEstimate(
        seconds=max(compute_s, exchange_s) + optimizer_s,
        compute_s=compute_s,
        exchange_s=exchange_s,
        optimizer_s=optimizer_s,
        flops=spec.epochs * flops,
        computed_tokens=computed,
        packed_tokens=float(config.episodes * config.episode.tokens),
        micro_batches=parts,
    )


def _work(shape: ModelShape, config: PlanConfig) -> tuple[float, float]:
    """Returns the number of computed tokens of a step, and the operations of one pass over them."""
    episode, spec = config.episode, config.learner
    prompts = ceil(config.group_size / rows_together(spec, episode, config.group_size))
    prompt, length = episode.prompt_tokens, episode.tokens
    computed = config.tasks * (prompts * prompt + config.group_size * (length - prompt))
    pairs = config.tasks * (prompts * prompt**2 + config.group_size * (length**2 - prompt**2)) / 2
    passes = training_passes(spec)
    body = passes * shape.forward_flops(computed, pairs, 0)
    head = 4 + spec.extra_forwards  # the backward pass makes the logits once more
    return computed, body + head * shape.forward_flops(0, 0, config.episodes * episode.sampled_tokens)


def training_passes(spec: LearnerSpec) -> int:
    """Returns the cost of learning in forward passes: a backward pass is two, or one if weights are frozen."""
    return (2 if spec.lora_rank else 3) + spec.activation_checkpointing + spec.extra_forwards


def _exchanged_bytes(shape: ModelShape, spec: LearnerSpec, ranks: int, parts: int, tokens: float) -> float:
    """Returns the bytes that a rank receives.

    They are weights for the passes of each micro-batch, gradients once or once per micro-batch, and states if
    GPUs share rows or matrices.
    """
    if ranks == 1:
        return 0.0
    others = (ranks - 1) / ranks
    trained = shape.adapter_parameters(spec.lora_rank) if spec.lora_rank else shape.num_parameters
    weights = parts * (2 + spec.extra_forwards) * shape.num_parameters * spec.compute_bytes * others
    gradients = (parts if spec.gradients == "sharded" else 1) * trained * spec.weight_bytes * others
    states = 0.0
    if spec.tensor_parallel > 1:
        states += 8 * shape.width
    if spec.sequence_parallel > 1:
        states += 4 * (shape.q_width + shape.kv_width) / spec.sequence_parallel
    return weights + gradients + shape.num_layers * tokens * states * spec.compute_bytes


def sync_s(machine: PlannedMachine, config: PlanConfig, *, apart: bool) -> float:
    """Returns the seconds of sending the weights, or the adapters, to engines on the same GPUs or `apart`."""
    shape, device = machine.shape, machine.device
    rank = config.learner.lora_rank
    numbers = shape.adapter_parameters(rank) if rank else shape.num_parameters
    if config.gpus == 1 and not apart:
        return 2 * numbers * config.engine.weight_bytes / (device.bandwidth * machine.rates.decode_bandwidth)
    return numbers * config.engine.weight_bytes / (device.exchange(config.gpus) * machine.rates.link)

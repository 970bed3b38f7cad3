"""The memory of one GPU in bytes: a learner's, and an engine's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

from agentgym.trainers.planning.config import EngineSpec, EpisodeSpec, LearnerSpec
from agentgym.trainers.planning.shapes import ModelShape

__all__ = [
    "EngineMemory",
    "LearnerMemory",
    "activation_bytes",
    "engine_memory",
    "layer_floats",
    "learner_memory",
    "rows_together",
]

LOGITS = 4_000_000
"""The number of logits that are held at once, whatever the vocabulary."""
LOGIT_BYTES = 16
"""The bytes of a logit: itself and what its gradient takes, in float32."""

MASK_BYTES = 4
"""The bytes of a pair of a query and a key in the masks that all layers share."""


@dataclass(frozen=True, kw_only=True)
class LearnerMemory:
    """The peak memory of a learner's GPU, in bytes."""

    weights: float
    """The GPU's share of the weights, in the type that the optimizer updates."""
    gradients: float
    optimizer: float
    gathered: float
    """The whole weights of the layers that are being computed, and of embedding and head."""
    activations: float
    logits: float
    runtime: float

    @property
    def resting(self) -> float:
        """The bytes that stay allocated while nothing is learned."""
        return self.weights + self.optimizer

    @property
    def total(self) -> float:
        """The sum of all parts."""
        return sum(self.parts.values())

    @property
    def parts(self) -> Mapping[str, float]:
        """The bytes of each part, by name."""
        return {
            "weights": self.weights,
            "gradients": self.gradients,
            "optimizer": self.optimizer,
            "gathered layers": self.gathered,
            "activations": self.activations,
            "logits": self.logits,
            "runtime": self.runtime,
        }


@dataclass(frozen=True, kw_only=True)
class EngineMemory:
    """The memory of an engine's GPU, in bytes."""

    weights: float
    runtime: float
    cache: float
    """The bytes left for keys and values; below 0 if the weights do not fit."""
    token: float
    """The bytes of a token's keys and values on one GPU."""

    def sequences(self, tokens: float) -> int:
        """Returns the number of sequences of so many tokens that the cache holds."""
        return max(0, int(self.cache / (self.token * tokens)))


def learner_memory(
    shape: ModelShape, spec: LearnerSpec, episode: EpisodeSpec, *, ranks: int, group_size: int, parts: float = 2
) -> LearnerMemory:
    """Returns the learner's memory on each of `ranks` GPUs, each of which computes `parts` micro-batches per step.

    The runtime's memory is 0.
    """
    trained = shape.adapter_parameters(spec.lora_rank) if spec.lora_rank else shape.num_parameters
    frozen = shape.num_parameters if spec.lora_rank else 0
    held = _gradient_numbers(spec, trained, ranks, parts)
    cut = ranks > 1 or spec.precision == "mixed"
    layers = 2 * shape.layer_parameters / spec.tensor_parallel + shape.head_parameters / spec.tensor_parallel
    return LearnerMemory(
        weights=(trained * spec.weight_bytes + frozen * spec.compute_bytes) / ranks,
        gradients=held * spec.weight_bytes,
        optimizer=_optimizer_numbers(shape, spec, trained) * spec.weight_bytes / ranks,
        gathered=layers * spec.compute_bytes if cut else 0.0,
        activations=spec.threads * activation_bytes(shape, spec, episode, group_size),
        logits=float(spec.threads * LOGITS * LOGIT_BYTES),
        runtime=0.0,
    )


def _gradient_numbers(spec: LearnerSpec, trained: int, ranks: int, parts: float) -> float:
    """Returns how many numbers of gradients a rank holds between the micro-batches of a step.

    A rank holds the whole sum or its share; a single process holds the sum and what each of its threads adds to it.
    """
    if parts <= 1:
        return trained / ranks
    if ranks == 1:
        return float(trained * (1 + spec.threads))
    return float(trained) if spec.gradients == "whole" else trained / ranks


def _optimizer_numbers(shape: ModelShape, spec: LearnerSpec, trained: int) -> int:
    if spec.optimizer == "adamw" or spec.lora_rank:
        return 2 * trained
    matrices = shape.num_layers * sum(inputs * outputs for inputs, outputs in shape.matrices)
    return 2 * trained - matrices


def rows_together(spec: LearnerSpec, episode: EpisodeSpec, group_size: int) -> int:
    """Returns the number of a group's rows that a micro-batch holds; their prompt counts once."""
    return max(1, min(group_size, (spec.micro_batch_tokens - episode.prompt_tokens) // _own_tokens(episode)))


def _own_tokens(episode: EpisodeSpec) -> int:
    """Returns the number of tokens of a row after the prompt that it shares."""
    return episode.tokens - episode.prompt_tokens


def activation_bytes(shape: ModelShape, spec: LearnerSpec, episode: EpisodeSpec, group_size: int) -> float:
    """Returns the bytes that a micro-batch keeps for its backward pass, on one GPU."""
    together = rows_together(spec, episode, group_size)
    one_group = episode.prompt_tokens + together * _own_tokens(episode)
    computed = max(one_group, spec.micro_batch_tokens if together == group_size else 0)
    groups = computed / one_group
    seen = groups * (together * episode.tokens + (episode.prompt_tokens if together > 1 else 0))
    layer = layer_floats(shape, computed, seen) / spec.tensor_parallel
    states = shape.width * computed
    kept = shape.num_layers * states + 2 * layer if spec.activation_checkpointing else (shape.num_layers + 1) * layer
    pairs = groups * (episode.prompt_tokens**2 + together * (episode.tokens**2 - episode.prompt_tokens**2)) / 2
    return (kept * spec.compute_bytes + pairs * MASK_BYTES) / spec.sequence_parallel


def layer_floats(shape: ModelShape, computed: float, seen: float) -> float:
    """Returns the number of values that a layer keeps for its backward pass.

    They are those of each computed token, and keys and values of each token that its rows see (a shared prompt once
    more for each row). A token's are the residual stream before and after attention, and both after their norms;
    queries, keys and values as projected; rotated queries; the output of attention, twice; gate and up, the gate's
    activation, and the product.
    """
    token = 4 * shape.width + 4 * shape.q_width + 2 * shape.kv_width + 4 * shape.ffn_width
    return computed * token + seen * 2 * shape.q_width


def engine_memory(
    shape: ModelShape, spec: EngineSpec, *, gpus: int, memory: float, resting: float, runtime: float
) -> EngineMemory:
    """Returns the memory of an engine on `gpus` GPUs of `memory` bytes each, of which a learner keeps `resting`."""
    weights = shape.num_parameters * spec.weight_bytes / gpus
    heads = ceil(shape.num_kv_heads / gpus)  # more GPUs than heads hold copies
    token = 2.0 * shape.num_layers * heads * shape.head_width * spec.cache_bytes
    return EngineMemory(
        weights=weights, runtime=runtime, cache=memory * spec.memory_fraction - resting - weights - runtime, token=token
    )

"""Bytes of one GPU: of a learner, and of an engine."""

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
"""Logits that are held at once, whatever the vocabulary."""
LOGIT_BYTES = 16
"""Of one of them: itself and what its gradient takes, in float32."""

MASK_BYTES = 4
"""Of a pair of a query and a key in the masks that all layers share."""


@dataclass(frozen=True, kw_only=True)
class LearnerMemory:
    """Bytes of a learner's GPU, at the largest."""

    weights: float
    """Its share, in the type that the optimizer steps on."""
    gradients: float
    optimizer: float
    gathered: float
    """Whole weights of the layers that are computed, and of embedding and head."""
    activations: float
    logits: float
    runtime: float

    @property
    def resting(self) -> float:
        """What stays where nothing is learned."""
        return self.weights + self.optimizer

    @property
    def total(self) -> float:
        """All of it."""
        return sum(self.parts.values())

    @property
    def parts(self) -> Mapping[str, float]:
        """By name."""
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
    """Bytes of an engine's GPU."""

    weights: float
    runtime: float
    cache: float
    """What is left for keys and values; below 0 where the weights do not fit."""
    token: float
    """Keys and values of a token on one GPU."""

    def sequences(self, tokens: float) -> int:
        """Sequences of so many tokens that the cache holds."""
        return max(0, int(self.cache / (self.token * tokens)))


def learner_memory(
    shape: ModelShape, spec: LearnerSpec, episode: EpisodeSpec, *, ranks: int, group_size: int, parts: float = 2
) -> LearnerMemory:
    """The learner's memory on each of `ranks` GPUs, of which each goes over `parts` micro-batches a step; the runtime's
    is 0."""
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
    """Between the micro-batches of a step, a rank holds all of the sum, or its share; one process holds the sum and
    what each of its threads adds to it."""
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
    """Rows of a group that one micro-batch holds; their prompt counts once."""
    return max(1, min(group_size, (spec.micro_batch_tokens - episode.prompt_tokens) // _own_tokens(episode)))


def _own_tokens(episode: EpisodeSpec) -> int:
    """Tokens of a row behind the prompt that it shares."""
    return episode.tokens - episode.prompt_tokens


def activation_bytes(shape: ModelShape, spec: LearnerSpec, episode: EpisodeSpec, group_size: int) -> float:
    """What a micro-batch leaves for its backward pass, on one GPU."""
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
    """Numbers that a layer keeps for its backward pass: of each computed token, and keys and values of each that its
    rows see (a shared prompt once more for each row).

    The residual stream before and behind attention, and both behind their norms; queries, keys and values as projected;
    queries rotated; what attention gave, twice; gate and up, the gate's activation, and the product.
    """
    token = 4 * shape.width + 4 * shape.q_width + 2 * shape.kv_width + 4 * shape.ffn_width
    return computed * token + seen * 2 * shape.q_width


def engine_memory(
    shape: ModelShape, spec: EngineSpec, *, gpus: int, memory: float, resting: float, runtime: float
) -> EngineMemory:
    """An engine of so many GPUs with so much `memory` each, of which `resting` is a learner's."""
    weights = shape.num_parameters * spec.weight_bytes / gpus
    heads = ceil(shape.num_kv_heads / gpus)  # more GPUs than heads hold copies
    token = 2.0 * shape.num_layers * heads * shape.head_width * spec.cache_bytes
    return EngineMemory(
        weights=weights, runtime=runtime, cache=memory * spec.memory_fraction - resting - weights - runtime, token=token
    )

"""The memory of one GPU in bytes: a learner's, and an engine's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

from agentgym.trainers.planning.config import BYTES, PlanConfig
from agentgym.trainers.planning.shapes import ModelShape

__all__ = [
    "EngineMemory",
    "LearnerMemory",
    "activation_bytes",
    "engine_memory",
    "layer_floats",
    "learner_memory",
    "micro_batches",
    "rows_together",
]

WEIGHT_BYTES = 4
"""The bytes of a number that the optimizer steps on, and of each number that it holds for it."""

LOGITS = 4_000_000
"""The number of logits that are held at once, unless those of LOGIT_ROWS rows, or of the model's width, are more."""
LOGIT_ROWS = 512
LOGIT_BYTES = 16
"""The bytes of a logit: itself and what its gradient takes, in float32."""

MASK_BYTES = 4
"""The bytes of a pair of a query and a key in the masks that all layers share."""


@dataclass(frozen=True, kw_only=True)
class LearnerMemory:
    """The peak memory of a learner's GPU, in bytes."""

    weights: float
    """The GPU's share of the weights, with the float32 copies that the optimizer steps on if they are bfloat16."""
    reference: float
    """The GPU's share of the weights that the run began with: under adapters, or for a KL term."""
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
        return self.weights + self.reference + self.optimizer

    @property
    def total(self) -> float:
        """The sum of all parts."""
        return sum(self.parts.values())

    @property
    def parts(self) -> Mapping[str, float]:
        """The bytes of each part, by name."""
        return {
            "weights": self.weights,
            "reference": self.reference,
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
    cache: float
    """The bytes left for keys and values; below 0 if the weights do not fit."""
    token: float
    """The bytes of a token's keys and values on one GPU."""

    def sequences(self, tokens: float) -> int:
        """Returns the number of sequences of so many tokens that the cache holds."""
        return max(0, int(self.cache / (self.token * tokens)))


def learner_memory(shape: ModelShape, config: PlanConfig) -> LearnerMemory:
    """Returns the memory of each of the learner's GPUs."""
    learner, ranks = config.learner, config.ranks
    lora, fsdp = learner.lora, learner.fsdp
    trained = shape.adapter_parameters(lora.rank, lora.target_modules) if lora.rank else shape.num_parameters
    models = 2 if learner.critic.trunk == "own" else 1
    on_gpu = 0.0 if fsdp.cpu_offload and ranks > 1 else models / ranks
    held = BYTES[learner.weights_dtype]
    stepped_on = WEIGHT_BYTES if held == WEIGHT_BYTES else held + WEIGHT_BYTES
    frozen = shape.num_parameters if lora.rank else 0
    refers = learner.needs_first_weights and (ranks == 1 or not lora.rank)
    return LearnerMemory(
        weights=(trained * stepped_on + frozen * held) * on_gpu,
        reference=shape.num_parameters * held * on_gpu / models if refers else 0.0,
        gradients=_gradient_bytes(config, trained, micro_batches(config)) * models,
        optimizer=_optimizer_numbers(shape, config, trained) * WEIGHT_BYTES * on_gpu,
        gathered=_gathered_numbers(shape, config) * config.compute_bytes if ranks > 1 else 0.0,
        activations=config.threads * activation_bytes(shape, config),
        logits=float(config.threads * max(LOGITS, shape.vocab_size * min(LOGIT_ROWS, shape.width)) * LOGIT_BYTES),
        runtime=config.gpu.runtime,
    )


def micro_batches(config: PlanConfig) -> int:
    """Returns the number of micro-batches that a rank computes, one after the other, for an optimizer step."""
    episode, learner, group_size = config.episode, config.learner, config.group_size
    shares = learner.mesh.data(config.ranks)
    prompts = ceil(group_size / rows_together(config))
    computed = config.tasks * (prompts * episode.prompt_tokens + group_size * episode.own_tokens)
    episodes = config.tasks * group_size
    uneven = ceil(episodes / shares) * shares / episodes
    at_once = shares * learner.minibatches * learner.micro_batch_tokens * config.threads
    return max(1, ceil(uneven * computed / at_once))


def _gradient_bytes(config: PlanConfig, trained: int, parts: int) -> float:
    """Returns the gradients that a rank holds between the `parts` micro-batches of a step.

    A rank holds the whole sum or its share; a single process holds the sum and what each of its threads adds to it.
    """
    ranks, fsdp = config.ranks, config.learner.fsdp
    if ranks == 1:
        return float(trained * WEIGHT_BYTES * (1 + config.threads if parts > 1 else 1))
    if fsdp.gradients == "whole" and parts > 1:
        return float(trained * BYTES[fsdp.reduce_dtype])
    return 0.0 if fsdp.cpu_offload else trained * WEIGHT_BYTES / ranks


def _gathered_numbers(shape: ModelShape, config: PlanConfig) -> float:
    """Returns how many whole weights of other ranks a rank holds at most."""
    layers = 2 if config.learner.fsdp.reshard_after_forward else shape.num_layers
    return (layers * shape.layer_parameters + shape.head_parameters) / config.learner.mesh.tensor


def _optimizer_numbers(shape: ModelShape, config: PlanConfig, trained: int) -> int:
    average = trained if config.learner.ema_decay is not None else 0
    if config.optimizer.name == "adamw" or config.learner.lora.rank:
        return 2 * trained + average
    matrices = shape.num_layers * sum(inputs * outputs for inputs, outputs in shape.matrices.values())
    return 2 * trained - matrices + average


def rows_together(config: PlanConfig) -> int:
    """Returns the number of a group's rows that a micro-batch holds; their prompt counts once."""
    episode = config.episode
    room = config.learner.micro_batch_tokens - episode.prompt_tokens
    return max(1, min(config.group_size, room // episode.own_tokens))


def activation_bytes(shape: ModelShape, config: PlanConfig) -> float:
    """Returns the bytes that a micro-batch keeps for its backward pass, on one GPU."""
    learner, episode, together = config.learner, config.episode, rows_together(config)
    one_group = episode.prompt_tokens + together * episode.own_tokens
    further = min(learner.micro_batch_tokens, config.tasks * one_group) if together == config.group_size else 0
    computed = max(one_group, further)
    groups = computed / one_group
    seen = groups * (together * episode.tokens + (episode.prompt_tokens if together > 1 else 0))
    layer = layer_floats(shape, computed, seen) / learner.mesh.tensor
    states = shape.width * computed
    kept = shape.num_layers * states + 2 * layer if learner.activation_checkpointing else (shape.num_layers + 1) * layer
    pairs = groups * (episode.prompt_tokens**2 + together * (episode.tokens**2 - episode.prompt_tokens**2)) / 2
    return (kept * config.compute_bytes + pairs * MASK_BYTES) / learner.mesh.sequence


def layer_floats(shape: ModelShape, computed: float, seen: float) -> float:
    """Returns the number of values that a layer keeps for its backward pass.

    They are those of each computed token, and keys and values of each token that its rows see (a shared prompt once
    more for each row). A token's are the residual stream before and after attention, and both after their norms;
    queries, keys and values as projected; rotated queries; the output of attention, twice; gate and up, the gate's
    activation, and the product.
    """
    token = 4 * shape.width + 4 * shape.q_width + 2 * shape.kv_width + 4 * shape.ffn_width
    return computed * token + seen * 2 * shape.q_width


def engine_memory(shape: ModelShape, config: PlanConfig, *, resting: float = 0.0) -> EngineMemory:
    """Returns the memory of each GPU of an engine, of which a learner keeps `resting` bytes."""
    spec, gpus = config.engine, config.engine.tensor_parallel
    weights = shape.num_parameters * spec.weight_bytes / gpus
    heads = ceil(shape.num_kv_heads / gpus)  # more GPUs than heads hold copies
    token = 2.0 * shape.num_layers * heads * shape.head_width * spec.cache_bytes
    available = config.gpu.memory * spec.memory_fraction - config.gpu.runtime
    return EngineMemory(weights=weights, cache=available - resting - weights, token=token)

"""The memory of one GPU in bytes: a learner's, and an engine's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

from agentgym.trainers.planning.activations import activation_bytes, logit_bytes, rows_together
from agentgym.trainers.planning.config import BYTES, PlanConfig
from agentgym.trainers.planning.shapes import ModelShape

__all__ = ["EngineMemory", "LearnerMemory", "engine_memory", "learner_memory", "micro_batches"]

WEIGHT_BYTES = 4
"""The bytes of a number that the optimizer steps on, and of each number that it holds for it."""


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
    kept: float
    """The bytes that the layers keep for the backward pass."""
    working: float
    """The bytes of the layer whose backward pass is computed, if its inner states are computed again."""
    logits: float
    runtime: float
    sums_gradients: bool
    """True if a step has further micro-batches, which add to the gradients of the first."""

    @property
    def resting(self) -> float:
        """The bytes that stay allocated while nothing is learned."""
        return self.weights + self.reference + self.optimizer

    @property
    def activations(self) -> float:
        """The most that activations take."""
        return self.kept + self.working

    @property
    def total(self) -> float:
        """The most at any moment: activations are there before gradients, which begin as the activations go."""
        before = self.gradients if self.sums_gradients else 0.0
        moments = (
            self.kept + self.logits + before,
            self.kept + self.working + before,
            self.working + self.gradients,
        )
        return self.resting + self.gathered + self.runtime + max(moments)

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
    models = 2 if learner.critic.trunk == "own" and not config.ray.critics else 1
    on_gpu = 0.0 if fsdp.cpu_offload and ranks > 1 else models / ranks
    weight_bytes = BYTES[config.weights_dtype]
    stepped_on = WEIGHT_BYTES if weight_bytes == WEIGHT_BYTES else weight_bytes + WEIGHT_BYTES
    frozen = shape.num_parameters if lora.rank else 0
    refers = learner.needs_first_weights and (ranks == 1 or not lora.rank) and not config.ray.references
    parts = micro_batches(config)
    stored, working = activation_bytes(shape, config)
    return LearnerMemory(
        weights=(trained * stepped_on + frozen * weight_bytes) * on_gpu,
        reference=shape.num_parameters * weight_bytes * on_gpu / models if refers else 0.0,
        gradients=_gradient_bytes(shape, config, trained, parts) * models,
        optimizer=_optimizer_numbers(shape, config, trained) * WEIGHT_BYTES * on_gpu,
        gathered=_gathered_numbers(shape, config) * config.compute_bytes if ranks > 1 else 0.0,
        kept=stored,
        working=working,
        logits=logit_bytes(shape, config),
        runtime=config.gpu.runtime,
        sums_gradients=parts > 1,
    )


def micro_batches(config: PlanConfig) -> int:
    """Returns the number of micro-batches that a rank computes, one after the other, for an optimizer step."""
    episode, learner, group_size = config.episode, config.learner, config.group_size
    shares = learner.mesh.data(config.ranks)
    prompts = ceil(group_size / rows_together(config))
    computed = config.tasks * (prompts * episode.prompt_tokens + group_size * episode.own_tokens)
    episodes = config.tasks * group_size
    uneven = ceil(episodes / shares) * shares / episodes
    at_once = shares * learner.minibatches * learner.pass_tokens
    return max(1, ceil(uneven * computed / at_once))


def _elsewhere(experts: int, config: PlanConfig) -> float:
    """Returns how many of these weights of experts other ranks have, so that this one never gathers them."""
    return experts * (1 - 1 / config.learner.mesh.expert)


def _gradient_bytes(shape: ModelShape, config: PlanConfig, trained: int, parts: int) -> float:
    """Returns the gradients that a rank holds between the `parts` micro-batches of a step: the sum, or its share."""
    ranks, fsdp = config.ranks, config.learner.fsdp
    if ranks == 1:
        return float(trained * WEIGHT_BYTES)
    if fsdp.gradients == "whole" and parts > 1:
        elsewhere = 0.0 if config.learner.lora.rank else _elsewhere(shape.all_experts, config)
        return (trained - elsewhere) * WEIGHT_BYTES
    return 0.0 if fsdp.cpu_offload else trained * WEIGHT_BYTES / ranks


def _gathered_numbers(shape: ModelShape, config: PlanConfig) -> float:
    """Returns how many whole weights of other ranks a rank holds at most."""
    layers = 2 if config.learner.fsdp.reshard_after_forward else shape.num_layers
    layer = shape.layer_parameters - _elsewhere(shape.layer_experts, config)
    return (layers * layer + shape.head_parameters) / config.learner.mesh.tensor


def _optimizer_numbers(shape: ModelShape, config: PlanConfig, trained: int) -> int:
    average = trained if config.learner.ema_decay is not None else 0
    if config.optimizer.name in (None, "adamw") or config.learner.lora.rank:
        return 2 * trained + average
    return 2 * trained - shape.matrix_parameters + average


def engine_memory(shape: ModelShape, config: PlanConfig, *, resting: float = 0.0) -> EngineMemory:
    """Returns the memory of each GPU of an engine, of which a learner keeps `resting` bytes."""
    spec, gpus = config.engine, config.engine.tensor_parallel
    weights = shape.num_parameters * spec.weight_bytes / gpus
    copies = ceil(shape.num_kv_heads / gpus) / shape.num_kv_heads  # more GPUs than heads hold copies
    token = shape.kv_floats * copies * spec.cache_bytes
    available = config.gpu.memory * spec.memory_fraction - config.gpu.runtime
    return EngineMemory(weights=weights, cache=available - resting - weights, token=token)

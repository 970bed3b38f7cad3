"""The bytes that the layers and the head of a model keep for the backward pass, on one GPU."""

from __future__ import annotations

from agentgym.trainers.planning.config import PlanConfig
from agentgym.trainers.planning.shapes import ModelShape

__all__ = ["activation_bytes", "layer_floats", "logit_bytes", "rows_together"]

LOGITS = 256_000_000
"""The number of logits that are held at once on a GPU."""
LOGIT_BYTES = 12
"""The bytes of a logit: itself, its log-softmax and its gradient, in float32."""
MASK_BYTES = 4
"""The bytes of a pair of a query and a key in the masks that all layers share, without a flash kernel."""


def rows_together(config: PlanConfig) -> int:
    """Returns the number of a group's rows that a micro-batch holds; their prompt counts once."""
    episode = config.episode
    room = config.learner.pass_tokens - episode.prompt_tokens
    return max(1, min(config.group_size, room // episode.own_tokens))


def _groups_and_tokens(config: PlanConfig) -> tuple[float, float]:
    """Returns how many groups a micro-batch holds, and its computed tokens; both may be of a part of a group."""
    learner, episode, together = config.learner, config.episode, rows_together(config)
    one_group = episode.prompt_tokens + together * episode.own_tokens
    further = min(learner.pass_tokens, config.tasks * one_group) if together == config.group_size else 0
    computed = max(one_group, further)
    return computed / one_group, float(computed)


def activation_bytes(shape: ModelShape, config: PlanConfig) -> tuple[float, float]:
    """Returns the bytes that the layers keep of a micro-batch, and those that one of them takes in its backward pass.

    A layer whose inner states are kept has them already.
    """
    learner, episode, together = config.learner, config.episode, rows_together(config)
    groups, computed = _groups_and_tokens(config)
    is_flash = config.compute_dtype == "bfloat16"
    layer, pairs = computed * layer_floats(shape, is_flash=is_flash), 0.0
    if not is_flash:
        seen = groups * (together * episode.tokens + (episode.prompt_tokens if together > 1 else 0))
        layer += seen * 2 * shape.q_width
        pairs = groups * (episode.prompt_tokens**2 + together * (episode.tokens**2 - episode.prompt_tokens**2)) / 2
    layer, states = layer / learner.mesh.tensor, shape.width * computed
    stored, working = shape.num_layers * layer, 0.0
    if learner.activation_checkpointing:
        stored, working = shape.num_layers * states, 2 * layer
    parts, size = learner.mesh.sequence, config.compute_bytes
    return (stored * size + pairs * MASK_BYTES) / parts, working * size / parts


def layer_floats(shape: ModelShape, *, is_flash: bool) -> int:
    """Returns the number of values that a layer keeps for the backward pass, for each computed token.

    The fast decoder on a GPU with a flash kernel: the residual stream before attention and before the feed-forward,
    and both after their norms; queries, keys and values as projected, queries and keys rotated, and the output of
    attention, twice; gate and up, and their product. Without the kernel its keys and values are copied for each row
    and head, which `activation_bytes` adds, and the gate's activation is kept.

    Torch's operators in a model of transformers keep more: of a norm three values, and of each expert that computes a
    token its input and output too.
    """
    e, q, kv, f = shape.width, shape.q_width, shape.kv_width, shape.ffn_width
    if not shape.refusal:
        return 4 * e + 4 * q + (3 * kv + 3 * f if is_flash else 2 * kv + 4 * f)
    normed = 3 * q + 3 * kv if shape.qk_norm else 0
    experts = shape.experts
    inner = 4 * f if experts is None else experts.chosen * (4 * experts.width + 2 * e) + 4 * experts.shared_width
    return 8 * e + 3 * q + 2 * kv + normed + inner


def logit_bytes(shape: ModelShape, config: PlanConfig) -> float:
    """Returns the bytes of the logits that are held at once: those of all computed tokens at most."""
    _, computed = _groups_and_tokens(config)
    return min(float(LOGITS), computed / config.learner.mesh.sequence * shape.vocab_size) * LOGIT_BYTES

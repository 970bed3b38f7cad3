"""The work of an update: its tokens, and its operations by the model's shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agentgym.model.decoder import Decoder, DecoderConfig
from agentgym.model.language_model import LanguageModel
from agentgym.model.packed_layout import num_computed
from agentgym.trainers.batch.batch import TrainingBatch
from agentgym.trainers.settings.learner import LearnerConfig

__all__ = ["UpdateWork", "forward_flops", "update_work"]


@dataclass(frozen=True, kw_only=True)
class UpdateWork:
    """The work of one update of the policy, over all of its epochs.

    Example: two rows of 3 and 5 entries with a common prefix of 2 are 10 tokens padded, 8 packed and 6 computed (were
    so short a prefix shared).
    """

    trained_tokens: int
    """The targets that the loss counts."""
    padded_tokens: int
    """The tokens of the same micro-batches with each row padded to their longest."""
    packed_tokens: int
    """The tokens without padding: the entries of the rows."""
    computed_tokens: int
    """The tokens that are computed: prefixes that rows share count once."""
    flops: float | None
    """The operations of the model's forward and backward passes over whole rows, whatever is shared; see
    `forward_flops`. The backward counts twice, or once if adapters are trained, since the weights under them take no
    gradient. Passes of a reference model, a critic or a correction are not counted. None for a
    model that transformers computes, whose operations are not known."""


def update_work(batch: TrainingBatch, learner: LearnerConfig, model: LanguageModel) -> UpdateWork:
    """Computes the work of `Learner.update` on a batch."""
    padded = computed = 0
    for minibatch in batch.minibatches(learner.minibatches):
        rows = minibatch.ids_N.cpu().split(minibatch.seqlens)
        for portion in minibatch.portions(learner.pass_tokens):
            padded += len(portion) * max(minibatch.seqlens[row] for row in portion)
            computed += num_computed([rows[row] for row in portion])
    epochs, num_trained = learner.epochs, batch.num_trained_tokens
    flops = forward_flops(model.config, batch.seqlens, num_trained) if isinstance(model, Decoder) else None
    passes = 2.0 if learner.lora.rank else 3.0
    return UpdateWork(
        trained_tokens=epochs * num_trained,
        padded_tokens=epochs * padded,
        packed_tokens=epochs * batch.num_tokens,
        computed_tokens=epochs * computed,
        flops=None if flops is None else passes * epochs * flops,
    )


def forward_flops(shape: DecoderConfig, seqlens: Sequence[int], num_targets: int) -> float:
    """Returns the operations of one forward pass over rows of `seqlens` tokens, with logits at `num_targets` of them.

    A multiply-add of a matrix product counts as two. Attention is causal: token t of a row attends to t + 1 tokens.
    Other operations (norms, rotations, softmax) are left out, as is usual.
    """
    queries, keys = shape.num_heads * shape.head_width, shape.num_kv_heads * shape.head_width
    projections = shape.width * (2 * queries + 2 * keys + 3 * shape.ffn_width)
    attended = sum(length * (length + 1) // 2 for length in seqlens)
    per_layer = 2.0 * projections * sum(seqlens) + 4.0 * queries * attended
    return shape.num_layers * per_layer + 2.0 * shape.width * shape.vocab_size * num_targets

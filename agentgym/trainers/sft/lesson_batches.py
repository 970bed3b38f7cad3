"""The batches of a step on recorded text: rows to imitate, and pairs of a better and a worse reply."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from agentgym.chat_templates.protocol import Renderer
from agentgym.errors import ConfigError
from agentgym.model.language_model import LanguageModel
from agentgym.trainers.batch.batch import TrainingBatch, batch_of_rows
from agentgym.trainers.batch.trained_row import TrainedRow
from agentgym.trainers.learner.pass_tokens import fitting_tokens
from agentgym.trainers.parallel.sharded_tensor import is_sharded
from agentgym.trainers.sft.demonstrations import Demonstration, Pair

__all__ = ["check_vocabulary", "imitation_batch", "most_tokens", "pair_batch"]

_STATE_BYTES = 16
"""The bytes of a weight's float32 copy, its gradient and AdamW's two means."""


def check_vocabulary(renderer: Renderer, model: LanguageModel) -> None:
    """Raises ConfigError if the tokenizer has ids that the model does not have."""
    if renderer.vocab_size > model.vocab_size:
        raise ConfigError(
            f"the tokenizer has {renderer.vocab_size} ids and the model only {model.vocab_size}: use the"
            " tokenizer that belongs to the model"
        )


def most_tokens(model: LanguageModel, micro_batch_tokens: int | None, *, recomputes: bool) -> int | None:
    """Returns the tokens of a forward pass: those of the settings, or on a GPU what its memory allows."""
    if micro_batch_tokens is not None or model.embed.device.type == "cpu":
        return micro_batch_tokens
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    own = sum((tensor.to_local() if is_sharded(tensor) else tensor).numel() for tensor in trained)
    return fitting_tokens(model, recomputes=recomputes, kept=_STATE_BYTES * own)


def imitation_batch(rows: Sequence[Demonstration]) -> TrainingBatch:
    """Returns the batch of rows, whose loss is the mean over all tokens that are imitated."""
    trained = [_trained_row(row, number, number, 1.0) for number, row in enumerate(rows) if any(row.mask[1:])]
    return batch_of_rows(trained, aggregation="token-mean")


def pair_batch(pairs: Sequence[Pair]) -> TrainingBatch:
    """Returns the batch of pairs, whose loss is the mean over pairs; a pair is a trajectory of two rows."""
    trained = [
        _trained_row(row, 2 * number + place, number, advantage)
        for number, pair in enumerate(pairs)
        for place, (row, advantage) in enumerate(((pair.chosen, 1.0), (pair.rejected, -1.0)))
    ]
    return batch_of_rows(trained, aggregation="seq-mean-token-mean")


def _trained_row(row: Demonstration, row_index: int, trajectory_index: int, advantage: float) -> TrainedRow:
    advantages = np.full(sum(row.mask[1:]), advantage, np.float32)
    nothing = np.zeros_like(advantages)
    return TrainedRow(row.row, row_index, trajectory_index, advantages, nothing, nothing)

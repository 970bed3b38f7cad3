"""The batches of a step on recorded text: rows to imitate, and pairs of a better and a worse reply."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from agentgym.chat_templates.protocol import Renderer
from agentgym.errors import ConfigError
from agentgym.model.language_model import LanguageModel
from agentgym.trainers.batch.batch import TrainingBatch, batch_of_rows
from agentgym.trainers.batch.trained_row import TrainedRow
from agentgym.trainers.lessons.demonstrations import Demonstration, Pair

__all__ = ["check_vocabulary", "imitation_batch", "pair_batch"]


def check_vocabulary(renderer: Renderer, model: LanguageModel) -> None:
    """Raises ConfigError if the tokenizer has ids that the model does not have."""
    if renderer.vocab_size > model.vocab_size:
        raise ConfigError(
            f"the tokenizer has {renderer.vocab_size} ids and the model only {model.vocab_size}: use the"
            " tokenizer that belongs to the model"
        )


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
